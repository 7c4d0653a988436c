/* SPDX-License-Identifier: BSD-3-Clause */
/* A process whose main thread has ended by pthread_exit(): /proc/self has no memory then. */
#define _GNU_SOURCE
#include "check.h"
#include "open_files.h"
#include "vma.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>

#define MARGIN 100 /* bytes between a page's start and the registration on it */

/* Kernels differ in which of the calls they refuse. */
static bool has_main_thread(void)
{
	int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
	char byte;
	ssize_t got;

	if (fd < 0)
		return false;
	got = read(fd, &byte, 1);
	close(fd);
	return got > 0;
}

static void wait_for_main_thread_s_end(void)
{
	unsigned int patience = 10000;

	for (; has_main_thread(); patience--) {
		CHECK(patience);
		usleep(1000);
	}
}

static void *register_and_fork(void *mode)
{
	const unsigned int flags[] = { RF_HELD, 0 };
	char *memory = check_map(3), *shared = check_map_shared(1);
	struct rf_handle handles[2];
	size_t i;

	wait_for_main_thread_s_end();
	check_start(*(enum rf_mode *)mode);
	memset(memory, 'a', 3 * check_page);
	memset(shared, 'b', check_page);
	for (i = 0; i < COUNT_OF(flags); i++) {
		/* From within the first page to within the last one. */
		handles[0] = check_register(memory + MARGIN, 2 * check_page, flags[i]);
		handles[1] = check_register(shared, check_page, flags[i]);
		CHECK(!check_child_reads(memory + check_page));
		CHECK(check_child_finds(memory) == 'a' &&
		      check_child_finds(memory + 3 * check_page - 1) == 'a');
		CHECK(check_child_finds(shared) == 'b');
		check_sound();
		check_release(handles[0]);
		check_release(handles[1]);
		CHECK(check_child_finds(memory + check_page) == 'a');
		CHECK(check_marked(memory, 3) == 0 && check_marked(shared, 1) == 0);
	}
	check_empty();
	_exit(0);
}

static void in_a_thread_that_outlives_main(void *(*act)(void *), void *argument)
{
	pthread_t thread;

	CHECK(!pthread_create(&thread, NULL, act, argument));
	pthread_exit(NULL);
}

static void without_main_thread(enum rf_mode mode)
{
	static enum rf_mode asked;

	asked = mode;
	in_a_thread_that_outlives_main(register_and_fork, &asked);
}

static void a_thread_outlives_main_lazily(void)
{
	check_needs_lazy();
	without_main_thread(RF_MODE_LAZY);
}

static void a_thread_outlives_main_eagerly(void)
{
	without_main_thread(RF_MODE_EAGER);
}

static void a_thread_outlives_main_where_copying_is_untrusted(void)
{
	check_distrust_copying();
	without_main_thread(check_best_mode());
}

/* ---- The engine's questions to the kernel there ---- */

static void *copy_where_one_call_is_refused(void *call)
{
	char from[] = "from", to[sizeof(from)] = "";
	const struct iovec target = { to, sizeof(to) }, source = { from, sizeof(from) };

	wait_for_main_thread_s_end();
	check_refuse(*(unsigned int *)call, EACCES);
	CHECK(rf_sys_copy(&target, &source, 1) == sizeof(to) && !strcmp(to, from));
	_exit(0);
}

static void memory_is_copied_without_a_file(void)
{
	static unsigned int opening = SYS_openat;

	in_a_thread_that_outlives_main(copy_where_one_call_is_refused, &opening);
}

static void memory_is_copied_from_its_file(void)
{
	static unsigned int copying = SYS_process_vm_readv;

	in_a_thread_that_outlives_main(copy_where_one_call_is_refused, &copying);
}

static void note_if_it_is(void *fd, int other, const char *target)
{
	if (*(int *)fd == other && strstr(target, "memfd:"))
		*(int *)fd = -1;
}

static void *look_for_a_file(void *unused)
{
	int fd = memfd_create("file", MFD_CLOEXEC);

	CHECK(fd >= 0);
	wait_for_main_thread_s_end();
	CHECK(rf_open_files_list(note_if_it_is, &fd) && fd == -1);
	(void)unused;
	_exit(0);
}

static void open_files_are_found(void)
{
	in_a_thread_that_outlives_main(look_for_a_file, NULL);
}

/* In smaps, as a kernel before 6.11 does not answer for single addresses. */
static void *ask_for_a_page_size(void *huge)
{
	struct rf_vma_reader reader;
	struct rf_vma vma;

	wait_for_main_thread_s_end();
	rf_vma_init(&reader, false, (unsigned int)__builtin_ctz(CHECK_HUGE));
	CHECK(rf_vma_open(&reader) == 0);
	CHECK(rf_vma_find(&reader, (uintptr_t)huge, &vma) == 0);
	CHECK((size_t)1 << vma.shift == CHECK_HUGE, "%u", vma.shift);
	rf_vma_close(&reader);
	_exit(0);
}

static void page_sizes_are_found(void)
{
	in_a_thread_that_outlives_main(ask_for_a_page_size, check_map_huge_any(1, MAP_PRIVATE));
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(a_thread_outlives_main_lazily),
		SCENARIO(a_thread_outlives_main_eagerly),
		SCENARIO(a_thread_outlives_main_where_copying_is_untrusted),
		SCENARIO(memory_is_copied_without_a_file),
		SCENARIO(memory_is_copied_from_its_file),
		SCENARIO(open_files_are_found),
		SCENARIO_HUGE(page_sizes_are_found),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
