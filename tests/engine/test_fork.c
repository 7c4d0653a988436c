/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * fork() and other libraries' handlers before and after the engine's; children made without
 * any handler. Threads and signals are test_fork_threads.c's.
 */
#define _GNU_SOURCE
#include "check.h"
#include "fork.h"
#include "prefork.h"
#include "window.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>

extern char **environ;

/*
 * Handlers of a library loaded before the engine, which run inside its window,
 * and of one loaded after it.
 */
static void (*inside[3])(void), (*outside[3])(void);

#define HANDLER(where, n)               \
	static void where##_##n(void)   \
	{                               \
		if (where[n])           \
			where[n]();     \
	}

HANDLER(inside, 0)
HANDLER(inside, 1)
HANDLER(inside, 2)
HANDLER(outside, 0)
HANDLER(outside, 1)
HANDLER(outside, 2)

/* $NO_ALIVE: as on a kernel before 4.14, where no page is wiped at fork. */
__attribute__((constructor(101))) static void install_before(void)
{
	pthread_atfork(inside_0, inside_1, inside_2);
	if (getenv("NO_ALIVE"))
		inject(2, EINVAL);
}

/* ---- Other libraries' handlers ---- */

static struct rf_handle early, late, early_child;
static char *early_memory, *late_memory, *shared_memory;
static unsigned long handled;

static void early_prepare(void)
{
	errno = 4711;
	early = check_register(early_memory, check_page, RF_HELD);
	check_release(check_register(early_memory + 2 * check_page, check_page, 0));
	CHECK(errno == 4711);
	handled++;
}

static void early_parent(void)
{
	check_release(early);
}

static void early_in_child(void)
{
	check_inherited(early);
	/* Where it is looked at now it must be the child's: its parent's page has left it. */
	early_child = check_register(early_memory + 3 * check_page * (rf_mode() == RF_MODE_EAGER),
				     check_page, RF_HELD);
	check_release(early_child);
}

static void late_prepare(void)
{
	late = check_register(late_memory, check_page, RF_HELD);
}

static void late_in_child(void)
{
	check_inherited(late);
}

static void late_parent(void)
{
	check_release(late);
}

static void install_handlers(void)
{
	early_memory = check_map(4);
	late_memory = check_map(4);
	inside[0] = early_prepare;
	inside[1] = early_parent;
	inside[2] = early_in_child;
	outside[0] = late_prepare;
	outside[1] = late_parent;
	outside[2] = late_in_child;
	pthread_atfork(outside_0, outside_1, outside_2);
}

static void handlers_register_and_release(void)
{
	unsigned long i, forks = check_scale(2000);
	struct rf_handle mine;
	char *memory = check_map(4);

	check_start(check_best_mode());
	install_handlers();
	mine = check_register(memory, 4 * check_page, RF_HELD);
	for (i = 0; i < forks; i++) {
		pid_t child = fork();

		CHECK(child >= 0);
		if (!child) {
			inside[0] = outside[0] = NULL;
			inside[1] = outside[1] = NULL;
			inside[2] = outside[2] = NULL;
			check_inherited(mine);
			if (i % 50 == 0)
				check_works();
			_exit(0);
		}
		CHECK(check_wait(child) == 0);
	}
	CHECK(handled == forks);
	check_release(mine);
	CHECK(check_marked(early_memory, 4) == 0 && check_marked(late_memory, 4) == 0);
	check_empty();
}

/* A registration in the window is protected in the fork under way, a release is one. */
static struct rf_handle in_window[3], to_release;

static void window_prepare(void)
{
	check_release(to_release);
	in_window[0] = check_register(early_memory, check_page, RF_HELD);
	in_window[1] = check_register(early_memory + 2 * check_page + 8, 56, RF_HELD);
}

/* Our own runs after it. */
static void window_parent(void)
{
	in_window[2] = check_register(early_memory + 6 * check_page, check_page, RF_HELD);
}

static void memory_registered_in_the_window_is_protected(enum rf_mode mode)
{
	pid_t child;
	size_t i;

	check_start(mode);
	early_memory = check_map(8);
	to_release = check_register(early_memory + 4 * check_page, check_page, RF_HELD);
	check_fork();
	inside[0] = window_prepare;
	inside[1] = window_parent;
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		CHECK(!check_is_readable(early_memory));
		CHECK(check_is_readable(early_memory + 2 * check_page));
		CHECK(check_is_readable(early_memory + 4 * check_page));
		_exit(0);
	}
	CHECK(check_wait(child) == 0);
	inside[0] = inside[1] = NULL;
	CHECK(check_marked(early_memory, 1) == 1);
	CHECK(check_marked(early_memory + 4 * check_page, 1) == 0);
	CHECK(check_marked(early_memory + 6 * check_page, 1) == 1);
	for (i = 0; i < COUNT_OF(in_window); i++)
		check_release(in_window[i]);
	CHECK(check_marked(early_memory, 8) == 0);
	check_empty();
}

static void memory_in_the_window_eager(void)
{
	memory_registered_in_the_window_is_protected(RF_MODE_EAGER);
}

static void memory_in_the_window_lazy(void)
{
	check_needs_lazy();
	memory_registered_in_the_window_is_protected(RF_MODE_LAZY);
}

static unsigned int window_flags;

static void window_register_shared(void)
{
	early = check_register(shared_memory, 2 * check_page, window_flags);
}

static void shared_memory_registered_in_the_window_stays(enum rf_mode mode)
{
	shared_memory = check_map_shared(2);
	check_start(mode);
	inside[1] = early_parent;
	for (window_flags = 0; window_flags < 2; window_flags++) {
		inside[0] = window_register_shared;
		CHECK(check_child_reads(shared_memory), "the child has lost shared memory");
	}
	inside[0] = NULL;
	inside[1] = NULL;
	check_empty();
}

static void shared_memory_in_the_window_eager(void)
{
	shared_memory_registered_in_the_window_stays(RF_MODE_EAGER);
}

static void shared_memory_in_the_window_lazy(void)
{
	check_needs_lazy();
	shared_memory_registered_in_the_window_stays(RF_MODE_LAZY);
}

/* ---- The window ---- */

static void nested_fork(int number)
{
	pid_t child;

	(void)number;
	inside[0] = NULL;
	child = fork();
	CHECK(child >= 0);
	/* This child goes on with the outer fork, which its parent began. */
	if (child)
		CHECK(check_wait(child) == 0);
}

/* A signal that is not blocked there. */
static void raise_in_the_window(void)
{
	raise(SIGTRAP);
}

static void a_fork_within_a_fork_shuts_the_window(void)
{
	pid_t self = getpid(), child;

	check_start(check_best_mode());
	signal(SIGTRAP, nested_fork);
	inside[0] = raise_in_the_window;
	child = fork();
	CHECK(child >= 0);
	CHECK(rf_window.forks == 0, "%d forks seem to be under way", rf_window.forks);
	if (child)
		CHECK(check_wait(child) == 0);
	check_works();
	CHECK(rf_window.forks == 0);
	if (getpid() != self)
		_exit(0);
}

/* Partial pages are given back, and only by a child that knows how it was made. */
static void check_gives_back(void)
{
	char *memory = check_map(2);
	struct rf_handle handle;
	pid_t child;

	memory[0] = 7;
	handle = check_register(memory + 100, check_page, RF_HELD);
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		signal(SIGSEGV, SIG_DFL);
		_exit(memory[0]);
	}
	CHECK(check_wait(child) == 7);
	check_release(handle);
	check_empty();
}

static void each_process_of_nested_forks_gives_pages_back(void)
{
	pid_t self = getpid(), child;

	check_start_untrusted();
	signal(SIGTRAP, nested_fork);
	inside[0] = raise_in_the_window;
	child = fork();
	CHECK(child >= 0);
	/* Four processes: the nested fork's child, too, has made one by the outer fork. */
	if (child)
		CHECK(check_wait(child) == 0);
	check_gives_back();
	check_gives_back();
	if (getpid() != self)
		_exit(0);
}

/* A fork of another thread's, as far as its marks: its list is not shown yet. */
static void prepare_anothers_fork(void)
{
	early = check_register(early_memory + CHECK_HUGE + 100, 64, RF_HELD);
	__atomic_add_fetch(&rf_window.forks, 1, __ATOMIC_SEQ_CST);
	CHECK(rf_enter(RF_FORKING) == 0);
	rf_prefork(&rf_engine.tracker, &rf_engine.registry, &rf_engine.list);
	rf_leave();
}

static void a_fork_amid_another_gives_back_the_pages_that_one_marks(void)
{
	pid_t child;

	check_needs_lazy();
	check_start(RF_MODE_LAZY);
	early_memory = check_map_huge_any(2, MAP_PRIVATE);
	memset(early_memory, 7, 2 * CHECK_HUGE);
	inside[0] = prepare_anothers_fork;
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		signal(SIGSEGV, SIG_DFL);
		_exit(early_memory[CHECK_HUGE]);
	}
	__atomic_sub_fetch(&rf_window.forks, 1, __ATOMIC_SEQ_CST);
	CHECK(check_flags(early_memory + CHECK_HUGE) & CHECK_DC);
	CHECK(check_wait(child) == 7);
	check_release(early);
	if (!check_marks_stay())
		check_empty();
}

#define CROWD 64

static void register_without_memory(void)
{
	const struct rlimit none = { 0, RLIM_INFINITY }, any = { RLIM_INFINITY, RLIM_INFINITY };
	struct rf_handle handle;
	struct rf_error error;
	size_t i;
	int rc = 1;

	CHECK(!setrlimit(RLIMIT_AS, &none));
	for (i = 0; rc == 1 && i < CROWD; i++)
		rc = rf_register(early_memory + 2 * i * check_page + 100, check_page, RF_HELD,
				 RF_OMIT, &handle, &error);
	CHECK(!setrlimit(RLIMIT_AS, &any));
	CHECK(rc == -ENOMEM && error.cause == RF_CAUSE_ENGINE_MEMORY, "%zu: %d, cause %d", i, rc,
	      error.cause);
}

/* The fork under way was prepared before it. */
static void a_registration_in_the_window_that_fails_changes_nothing(void)
{
	char *memory = check_map(2);
	struct rf_handle handle;
	pid_t child;

	check_start_untrusted();
	early_memory = check_map(2 * CROWD);
	memory[0] = 7;
	handle = check_register(memory + 100, check_page, RF_HELD);
	inside[0] = register_without_memory;
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		signal(SIGSEGV, SIG_DFL);
		_exit(memory[0]);
	}
	CHECK(check_wait(child) == 7);
	check_release(handle);
}

/* So many mappings, every other one shared, that the list of areas has to grow. */
#define ALTERNATE 4096
#define MARKED (ALTERNATE / 2)

static void map_alternately(void)
{
	size_t i;

	early_memory = check_map(ALTERNATE);
	for (i = 0; i < ALTERNATE; i += 2)
		check_map_over(early_memory + i * check_page, 1, MAP_SHARED);
}

/* Each system call fails from the @nth on. 1 or -ENOMEM; *@calls: how many there were. */
static int register_refused_from(unsigned long nth, unsigned long *calls)
{
	struct rf_handle handle;
	struct rf_error error;
	int rc;

	*calls = inject_calls();
	inject_from(nth, ENOMEM);
	rc = rf_register(early_memory, ALTERNATE * check_page, RF_HELD, RF_OMIT, &handle, &error);
	inject(0, 0);
	*calls = inject_calls() - *calls;
	if (rc == 1) {
		CHECK(error.cause == RF_CAUSE_NONE, "call %lu: cause %d", nth, error.cause);
		check_release(handle);
	} else {
		CHECK(rc == -ENOMEM && error.cause == RF_CAUSE_ENGINE_MEMORY,
		      "call %lu: %d, cause %d", nth, rc, error.cause);
	}
	return rc;
}

/* The same in a process of its own, where nothing has grown yet, and the state as before. */
static int window_refused_from(unsigned long nth, unsigned long *calls)
{
	pid_t pid = fork();
	int rc;

	CHECK(pid >= 0);
	if (!pid) {
		__atomic_add_fetch(&rf_window.forks, 1, __ATOMIC_SEQ_CST);
		rc = register_refused_from(nth, calls);
		__atomic_sub_fetch(&rf_window.forks, 1, __ATOMIC_SEQ_CST);
		/* Memory that the kernel refused to unmark is tried again. */
		check_fork();
		check_empty();
		CHECK(check_marked(early_memory, ALTERNATE) == 0);
		_exit(rc == 1);
	}
	rc = check_wait(pid);
	CHECK(rc == 0 || rc == 1, "call %lu", nth);
	return rc;
}

/*
 * In lazy mode a refused mark is no failure, as the kernel copies. But where the answers to the
 * questions have made the tables grow, the list has to grow too, and that is refused as well.
 */
static void a_registration_in_the_window_refused_twice_changes_nothing(void)
{
	unsigned long *calls = (unsigned long *)check_map_shared(1), nth, marks;

	check_needs_lazy();
	check_start(RF_MODE_LAZY);
	map_alternately();
	CHECK(window_refused_from(0, calls) == 1);
	marks = *calls - MARKED;
	/* Without the first call, for room that every registration takes. */
	for (nth = 2; nth < 5; nth++)
		CHECK(window_refused_from(nth, calls) == 1, "question %lu", nth);
	for (nth = marks - 4; nth < marks + 4; nth++)
		CHECK(window_refused_from(nth, calls) == 0, "call %lu", nth);
}

static void a_fork_that_fails_shuts_the_window(void)
{
	struct rlimit none = { 0, 0 };
	char *memory = check_map(1);
	struct rf_handle handle;
	pid_t child;

	check_start(check_best_mode());
	if (!getuid() && setresuid(65534, 65534, 65534))
		check_skip("cannot be another user: %s", strerror(errno));
	CHECK(!setrlimit(RLIMIT_NPROC, &none));
	child = fork();
	if (!child)
		_exit(0);
	if (child > 0)
		check_skip("RLIMIT_NPROC does not count here");
	CHECK(errno == EAGAIN && rf_window.forks == 0);
	handle = check_register(memory, check_page, RF_HELD);
	check_release(handle);
	check_empty();
}

static void errno_passes_through_the_handlers(void)
{
	char *memory = check_map(4);
	pid_t child;

	check_start(check_best_mode());
	check_register(memory + 9, 2 * check_page, RF_HELD);
	errno = 4242;
	child = fork();
	CHECK(errno == 4242, "%d", errno);
	if (!child)
		_exit(0);
	CHECK(check_wait(child) == 0);
}

static void errno_is_unchanged_by_every_call(void)
{
	struct rf_range_info info;
	struct rf_handle handle;
	struct rf_kernel kernel;
	struct rf_error error;
	struct rf_stats stats;

	errno = 4243;
	rf_kernel_info(&kernel);
	CHECK(errno == 4243, "rf_kernel_info: %s", strerror(errno));
	CHECK(rf_fork_init(RF_MODE_AUTO, &error) == 0);
	CHECK(errno == 4243, "rf_fork_init: %s", strerror(errno));
	CHECK(rf_register((void *)check_page, check_page, 0, RF_OMIT, &handle, &error) == -ENOMEM);
	CHECK(errno == 4243, "rf_register: %s", strerror(errno));
	CHECK(rf_release(handle, 0) == -ESTALE && rf_list(&info, 1) == 0 && rf_stats(&stats) == 0);
	CHECK(errno == 4243, "%s", strerror(errno));
}

/* ---- Children that no handler sees ---- */

static void children_unseen(pid_t (*make)(void))
{
	unsigned long i, many = check_scale(400);
	struct rf_handle held, unheld;
	char *memory = check_map(4);
	struct rf_stats stats;

	check_start(check_best_mode());
	held = check_register(memory, check_page, RF_HELD);
	unheld = check_register(memory + 2 * check_page, check_page, 0);
	for (i = 0; i < many; i++) {
		uint64_t generation = rf_generation();
		pid_t child = make();

		CHECK(child >= 0);
		if (!child) {
			CHECK(rf_generation() != generation);
			check_inherited(held);
			check_inherited(unheld);
			check_works();
			/* And so on: a registration of the child is inherited by its own child. */
			held = check_register(check_map(1), check_page, RF_HELD);
			child = make();
			if (!child) {
				check_inherited(held);
				check_works();
				_exit(0);
			}
			CHECK(check_wait(child) == 0);
			check_release(held);
			_exit(0);
		}
		CHECK(check_wait(child) == 0);
	}
	CHECK(rf_stats(&stats) == 0 && stats.registrations == 2);
	check_release(held);
	check_release(unheld);
	check_empty();
}

static void children_of_clone_are_noticed(void)
{
	if (CHECK_TSAN)
		check_skip("ThreadSanitizer does not bear a raw clone()");
	children_unseen(check_clone);
}

static void children_of__Fork_are_noticed(void)
{
	pid_t (*raw_fork)(void) = (pid_t(*)(void))dlsym(RTLD_DEFAULT, "_Fork");

	if (!raw_fork || CHECK_TSAN)
		check_skip("no _Fork() here");
	children_unseen(raw_fork);
}

static pid_t plain_fork(void)
{
	return fork();
}

static void children_of_fork_are_noticed(void)
{
	children_unseen(plain_fork);
}

/* Where no page can be wiped at fork the handlers must do. */
static void children_of_fork_are_noticed_without_a_wiped_page(void)
{
	setenv("NO_ALIVE", "1", 1);
	execl("/proc/self/exe", "test_fork", "children_of_fork_are_noticed_again", (char *)NULL);
	CHECK(0, "exec: %s", strerror(errno));
}

static void children_of_fork_are_noticed_again(void)
{
	if (!getenv("NO_ALIVE"))
		return;
	CHECK(inject_faults() == 1);
	children_unseen(plain_fork);
}

static void processes_that_share_memory_change_nothing(void)
{
	char *memory = check_map(4), *arguments[] = { (char *)"true", NULL };
	struct rf_handle held = { 0 }, unheld;
	unsigned long i, many = check_scale(100);
	uint64_t generation;
	pid_t child;
	FILE *pipe;

	check_start(check_best_mode());
	generation = rf_generation();
	held = check_register(memory, check_page, RF_HELD);
	unheld = check_register(memory + 2 * check_page, check_page, 0);
	for (i = 0; i < many; i++) {
		CHECK(!posix_spawn(&child, "/bin/true", NULL, NULL, arguments, environ));
		CHECK(check_wait(child) == 0);
		CHECK(system("exit 3") == 3 << 8);
		pipe = popen("exit 4", "r");
		CHECK(pipe && pclose(pipe) == 4 << 8);
		if (!CHECK_TSAN) {
			child = vfork();
			if (!child)
				_exit(5);
			CHECK(check_wait(child) == 5);
		}
	}
	CHECK(rf_generation() == generation && rf_window.forks == 0);
	CHECK(rf_handle_state(held) == 1 && rf_handle_state(unheld) == 1);
	check_release(held);
	check_release(unheld);
	check_empty();
}

/* Without waiting for the fork it is called in, nor, in a child, for one of the parent's. */
static void start_at_once(void)
{
	uint64_t began = rf_sys_now();
	struct rf_error error;

	CHECK(rf_fork_init(RF_MODE_AUTO, &error) == 0);
	CHECK(rf_sys_now() - began < 10000000000u, "it has waited");
}

static void start_in_a_raw_child(void)
{
	pid_t (*raw_fork)(void) = (pid_t(*)(void))dlsym(RTLD_DEFAULT, "_Fork");
	pid_t child;

	start_at_once();
	if (!raw_fork || CHECK_TSAN)
		return;
	child = raw_fork();
	if (!child) {
		start_at_once();
		_exit(0);
	}
	CHECK(check_wait(child) == 0);
}

static void handlers_may_start_the_engine(void)
{
	pid_t child;

	inside[0] = start_in_a_raw_child;
	inside[1] = inside[2] = start_at_once;
	child = fork();
	if (!child) {
		inside[0] = inside[1] = inside[2] = NULL;
		check_works();
		_exit(0);
	}
	CHECK(check_wait(child) == 0);
	inside[0] = inside[1] = inside[2] = NULL;
	check_fork();
	CHECK(rf_forks());
	check_empty();
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(handlers_register_and_release),
		SCENARIO(memory_in_the_window_eager),
		SCENARIO(memory_in_the_window_lazy),
		SCENARIO(shared_memory_in_the_window_eager),
		SCENARIO(shared_memory_in_the_window_lazy),
		SCENARIO(a_fork_within_a_fork_shuts_the_window),
		SCENARIO(each_process_of_nested_forks_gives_pages_back),
		SCENARIO_HUGE(a_fork_amid_another_gives_back_the_pages_that_one_marks),
		SCENARIO(a_registration_in_the_window_that_fails_changes_nothing),
		SCENARIO(a_registration_in_the_window_refused_twice_changes_nothing),
		SCENARIO(a_fork_that_fails_shuts_the_window),
		SCENARIO(errno_passes_through_the_handlers),
		SCENARIO(errno_is_unchanged_by_every_call),
		SCENARIO(children_of_clone_are_noticed),
		SCENARIO(children_of__Fork_are_noticed),
		SCENARIO(children_of_fork_are_noticed),
		SCENARIO(children_of_fork_are_noticed_without_a_wiped_page),
		SCENARIO(children_of_fork_are_noticed_again),
		SCENARIO(processes_that_share_memory_change_nothing),
		SCENARIO(handlers_may_start_the_engine),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
