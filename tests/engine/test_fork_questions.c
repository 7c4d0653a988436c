/* SPDX-License-Identifier: BSD-3-Clause */
/* A thread asks /proc while another forks: the child has nothing of the question. */
#define _GNU_SOURCE
#include "check.h"
#include "fork.h"
#include "open_files.h"
#include "preload/pinned.h"
#include "window.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>

static bool holding;

/* Descriptors of /proc that speak of an engine's memory. */
static size_t open_maps(void)
{
	char link[64], target[64];
	size_t count = 0;
	ssize_t length;
	int fd;

	for (fd = 0; fd < 64; fd++) {
		snprintf(link, sizeof(link), "/proc/thread-self/fd/%d", fd);
		length = readlink(link, target, sizeof(target) - 1);
		if (length < 0)
			continue;
		target[length] = '\0';
		count += !strncmp(target, "/proc/", 6) && strstr(target, "maps");
	}
	return count;
}

static bool asking, asked, answered, moving;

static void *ask_within_a_fork(void *unused)
{
	struct rf_vma_reader *reader = &rf_engine.tracker.reader;
	struct rf_memory table;

	check_await(&asked);
	CHECK(rf_enter(0) == 0);
	CHECK(rf_vma_open(reader) == 0 && open_maps() == 1);
	table = reader->table;
	/* Between mremap() and the storing of where the table is now. */
	if (moving) {
		CHECK(table.items);
		CHECK(rf_sys_remap(table.items, table.mapped, 2 * table.mapped, &table.items) == 0);
		table.mapped *= 2;
		if (table.items == reader->table.items)
			moving = false;
	}
	check_tell(&holding);
	check_await(&answered);
	reader->table.items = table.items;
	reader->table.mapped = table.mapped;
	rf_vma_close(reader);
	rf_leave();
	return unused;
}

static void ask_in_window(void)
{
	if (!asking)
		return;
	asking = false;
	check_tell(&asked);
	check_await(&holding);
}

/* Installed before the engine's own: it prepares after that, without the lock. */
__attribute__((constructor(101))) static void install_before(void)
{
	pthread_atfork(ask_in_window, NULL, NULL);
}

static void a_child_lacks_the_descriptor_of_a_question_under_way(void)
{
	pthread_t thread;
	pid_t child;

	check_start(check_best_mode());
	asking = true;
	CHECK(!pthread_create(&thread, NULL, ask_within_a_fork, NULL));
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		CHECK(open_maps() == 0, "%zu", open_maps());
		check_works();
		_exit(0);
	}
	CHECK(open_maps() == 1);
	check_tell(&answered);
	CHECK(check_wait(child) == 0);
	CHECK(!pthread_join(thread, NULL));
	CHECK(open_maps() == 0);
	check_fork();
}

static int transient;

static void *read_status_within_a_fork(void *unused)
{
	uint64_t before;

	check_await(&asked);
	CHECK(rf_enter(0) == 0);
	before = rf_sys_transients();
	/* One more was opened, and none is open. */
	CHECK(rf_pinned_bytes() >= 0 && rf_sys_transients() - before == (uint64_t)1 << 32);
	transient = rf_transient_open("/proc/thread-self/status");
	CHECK(transient >= 0);
	check_tell(&holding);
	check_await(&answered);
	rf_transient_close(transient);
	rf_leave();
	return unused;
}

/* The exec report reads one. The program's own files of the same name stay. */
static void a_child_lacks_a_file_of_proc_that_is_read_for_a_moment(void)
{
	static const char *const own[] = { "/proc/thread-self/status", "/proc/thread-self/maps" };
	int fds[COUNT_OF(own)];
	pthread_t thread;
	pid_t child;
	size_t i;

	check_start(check_best_mode());
	for (i = 0; i < COUNT_OF(own); i++)
		CHECK((fds[i] = open(own[i], O_RDONLY | O_CLOEXEC)) >= 0);
	asking = true;
	CHECK(!pthread_create(&thread, NULL, read_status_within_a_fork, NULL));
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		CHECK(fcntl(transient, F_GETFD) < 0 && errno == EBADF);
		for (i = 0; i < COUNT_OF(own); i++)
			CHECK(fcntl(fds[i], F_GETFD) >= 0, "%s", own[i]);
		_exit(0);
	}
	CHECK(fcntl(transient, F_GETFD) >= 0);
	check_tell(&answered);
	CHECK(check_wait(child) == 0);
	CHECK(!pthread_join(thread, NULL));
	CHECK(fcntl(transient, F_GETFD) < 0);
}

/* However many others there are. */
static void a_child_looks_for_no_descriptor_of_its_own_fork(void)
{
	char *memory = check_map(2);
	struct rf_handle handle;
	unsigned long before;
	int calls[3], i;
	pid_t child;

	check_start(check_best_mode());
	/* The first fork also makes room for a table, where maps is read as text. */
	for (i = 0; i < 3; i++) {
		while (i == 2 && dup(0) < 64)
			;
		handle = check_register(memory, 2 * check_page, RF_HELD);
		before = inject_calls();
		child = fork();
		CHECK(child >= 0);
		if (!child)
			_exit((int)(inject_calls() - before));
		calls[i] = check_wait(child);
		check_release(handle);
	}
	CHECK(calls[1] == calls[2], "%d, then %d", calls[1], calls[2]);
}

/* The child has nothing of that thread's question, neither its descriptor nor its table. */
static void check_asks_anew(void)
{
	rf_engine.tracker.reader.query = false;
	check_works();
	CHECK(!rf_engine.tracker.reader.depth);
	_exit(0);
}

static void a_child_made_while_a_thread_reads_maps_as_text(pid_t (*make)(void))
{
	pthread_t thread;
	pid_t child;

	check_start(check_best_mode());
	rf_engine.tracker.reader.query = false;
	moving = true;
	/* The wait for its lock ends soon: of fork() the child is an unprepared one. */
	rf_window.patience = 1;
	CHECK(!pthread_create(&thread, NULL, ask_within_a_fork, NULL));
	check_tell(&asked);
	check_await(&holding);
	if (!moving)
		check_skip("a table that grows in its place");
	child = make();
	CHECK(child >= 0);
	if (!child)
		check_asks_anew();
	CHECK(check_wait(child) == 0);
	check_tell(&answered);
	CHECK(!pthread_join(thread, NULL));
	check_works();
}

static void a_child_made_while_a_thread_reads_maps(void)
{
	if (CHECK_TSAN)
		check_skip("ThreadSanitizer waits for the thread");
	a_child_made_while_a_thread_reads_maps_as_text(fork);
}

static void a_raw_child_made_while_a_thread_reads_maps(void)
{
	pid_t (*raw_fork)(void) = (pid_t(*)(void))dlsym(RTLD_DEFAULT, "_Fork");

	if (!raw_fork || CHECK_TSAN)
		check_skip("no _Fork() here");
	a_child_made_while_a_thread_reads_maps_as_text(raw_fork);
}

static bool stop;

static void children_have_no_descriptor_of_proc(bool query)
{
	unsigned long i, forks = check_scale(500);
	pthread_t registering[2];
	pid_t child;
	size_t at;

	check_start(check_best_mode());
	rf_engine.tracker.reader.query &= query;
	for (at = 0; at < 2; at++)
		CHECK(!pthread_create(&registering[at], NULL, check_register_until, &stop));
	for (i = 0; i < forks; i++) {
		child = fork();
		CHECK(child >= 0);
		if (!child) {
			CHECK(open_maps() == 0, "%zu in child %lu", open_maps(), i);
			if (i % 16 == 0)
				check_works();
			_exit(0);
		}
		CHECK(check_wait(child) == 0);
	}
	__atomic_store_n(&stop, true, __ATOMIC_RELAXED);
	for (at = 0; at < 2; at++)
		CHECK(!pthread_join(registering[at], NULL));
	CHECK(open_maps() == 0);
}

static void children_amid_questions_have_no_descriptor_of_proc(void)
{
	children_have_no_descriptor_of_proc(true);
}

static void children_amid_reading_have_no_descriptor_of_proc(void)
{
	children_have_no_descriptor_of_proc(false);
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(a_child_made_while_a_thread_reads_maps),
		SCENARIO(a_raw_child_made_while_a_thread_reads_maps),
		SCENARIO(a_child_lacks_the_descriptor_of_a_question_under_way),
		SCENARIO(a_child_lacks_a_file_of_proc_that_is_read_for_a_moment),
		SCENARIO(a_child_looks_for_no_descriptor_of_its_own_fork),
		SCENARIO(children_amid_questions_have_no_descriptor_of_proc),
		SCENARIO(children_amid_reading_have_no_descriptor_of_proc),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
