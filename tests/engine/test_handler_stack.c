/* SPDX-License-Identifier: BSD-3-Clause */
/* How much stack fork() takes with the engine's handlers: a signal handler may fork on 8 KiB. */
#define _GNU_SOURCE
#include "check.h"
#include "engine.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#define MOST 2048 /* bytes more than a plain fork() */
#define STACK (256u * 1024)
#define PATTERN 0xa5

static char *stack;
static size_t taken_by_child;
static bool plainly;

static size_t taken(void)
{
	size_t at = 0;

	while (at < STACK && (unsigned char)stack[at] == PATTERN)
		at++;
	return STACK - at;
}

/* The child's own handlers run on its copy of the stack. */
static void fork_in_handler(int number)
{
	int ends[2];
	size_t in_child = 0;
	pid_t pid;

	(void)number;
	CHECK(pipe(ends) == 0);
	pid = plainly ? check_clone() : fork();
	CHECK(pid >= 0);
	if (!pid) {
		in_child = taken();
		_exit(write(ends[1], &in_child, sizeof(in_child)) != sizeof(in_child));
	}
	CHECK(check_wait(pid) == 0);
	CHECK(read(ends[0], &in_child, sizeof(in_child)) == sizeof(in_child));
	close(ends[0]);
	close(ends[1]);
	taken_by_child = in_child;
}

/* The most that either process has taken. This is linked -z now, as the library is. */
static size_t stack_of_fork(bool plain)
{
	size_t in_parent;

	plainly = plain;
	memset(stack, PATTERN, STACK);
	CHECK(raise(SIGUSR1) == 0);
	in_parent = taken();
	return in_parent > taken_by_child ? in_parent : taken_by_child;
}

/* As private huge pages would lie: without PROCMAP_QUERY their size is read in smaps. */
static char *map_as_huge_pages_lie(void)
{
	char *memory = check_map(2 * CHECK_HUGE / check_page);
	int fd = memfd_create("aligned", MFD_CLOEXEC);

	memory = (char *)(((uintptr_t)memory + CHECK_HUGE - 1) & ~(uintptr_t)(CHECK_HUGE - 1));
	CHECK(fd >= 0 && ftruncate(fd, CHECK_HUGE) == 0);
	CHECK(mmap(memory, CHECK_HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd, 0) ==
	      memory);
	close(fd);
	return memory;
}

static void forks_fit(enum rf_mode mode, bool query)
{
	struct sigaction action = { .sa_handler = fork_in_handler, .sa_flags = SA_ONSTACK };
	char *memory = check_map(6), *shared = check_map_shared(2);
	char *aligned = map_as_huge_pages_lie();
	size_t plain, with;
	stack_t alternate;
	int device;
	unsigned int round;

#ifndef __OPTIMIZE__
	check_skip("frames are larger where nothing is optimized");
#endif
	if (CHECK_SLOWNESS > 1)
		check_skip("a sanitizer's frames are larger");
	stack = check_map(STACK / check_page);
	alternate = (stack_t){ .ss_sp = stack, .ss_size = STACK };
	CHECK(sigaltstack(&alternate, NULL) == 0);
	CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
	plain = stack_of_fork(true);
	check_start(mode);
	rf_engine.tracker.reader.query &= query;
	check_register(memory + 100, 2 * check_page, RF_HELD);
	check_register(memory + 4 * check_page + 100, 1000, 0);
	check_register(shared, check_page, RF_HELD);
	check_register(aligned + 100, check_page, RF_HELD);
	device = memfd_create("device", MFD_CLOEXEC);
	CHECK(ftruncate(device, (off_t)check_page) == 0);
	CHECK(mmap(NULL, check_page, PROT_READ, MAP_SHARED, device, 0) != MAP_FAILED);
	CHECK(rf_descriptor_omit(device, RF_MAPPED) == 0);
	for (round = 0; round < 3; round++) {
		with = stack_of_fork(false);
		CHECK(with <= plain + MOST, "%zu bytes, %zu without the engine", with, plain);
		/* To be marked by the next one. */
		check_register(memory + 3 * check_page, 100, round & RF_HELD);
		check_register(aligned + (2 * round + 4) * check_page + 8, check_page, RF_HELD);
	}
	printf("%zu bytes, %zu without the engine\n", with, plain);
	fflush(stdout);
}

static void a_handler_s_fork_is_small(void)
{
	forks_fit(check_best_mode(), true);
}

static void a_handler_s_fork_is_small_with_maps_as_text(void)
{
	forks_fit(check_best_mode(), false);
}

static void a_handler_s_fork_is_small_where_copying_is_untrusted(void)
{
	check_distrust_copying();
	forks_fit(check_best_mode(), false);
}

static void a_handler_s_fork_is_small_where_copying_is_refused(void)
{
	const struct sock_filter filters[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 1, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_ioctl, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	const struct sock_fprog program = { COUNT_OF(filters), (struct sock_filter *)filters };
	struct rf_kernel kernel;

	check_distrust_copying();
	/* The kernel is asked before; a sandbox comes later. */
	rf_kernel_info(&kernel);
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
	    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		check_skip("no seccomp filter: %s", strerror(errno));
	forks_fit(check_best_mode(), true);
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(a_handler_s_fork_is_small),
		SCENARIO(a_handler_s_fork_is_small_with_maps_as_text),
		SCENARIO(a_handler_s_fork_is_small_where_copying_is_untrusted),
		SCENARIO(a_handler_s_fork_is_small_where_copying_is_refused),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
