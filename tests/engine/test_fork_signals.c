/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Signals that arrive while a fork is under way: a handler of the program's finds every page
 * that the child is to have, and afterwards the same signals are blocked as before.
 */
#define _GNU_SOURCE
#include "check.h"
#include "engine.h"

#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>

static char *memory;
static volatile sig_atomic_t handled, seen;

static void on_signal(int signo)
{
	(void)signo;
	seen = memory[10];
	handled++;
}

/* Handlers of a library loaded before the engine: they run inside its window. */
static void (*inside[3])(void);

static void inside_prepare(void)
{
	if (inside[0])
		inside[0]();
}

static void inside_parent(void)
{
	if (inside[1])
		inside[1]();
}

static void inside_child(void)
{
	if (inside[2])
		inside[2]();
}

__attribute__((constructor(101))) static void install_before(void)
{
	pthread_atfork(inside_prepare, inside_parent, inside_child);
}

static bool is_blocked(int signo)
{
	sigset_t now;

	CHECK(pthread_sigmask(SIG_SETMASK, NULL, &now) == 0);
	return sigismember(&now, signo);
}

static const int never[] = { SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGSYS };

/* All signals except the ones that the processor raises, and libc's own. */
static void check_all_blocked(void)
{
	uint64_t now = 0;
	size_t i;
	int signo;

	CHECK(syscall(SYS_rt_sigprocmask, SIG_BLOCK, NULL, &now, sizeof(now)) == 0);
	for (signo = 1; signo <= 64; signo++) {
		bool may = signo != SIGKILL && signo != SIGSTOP &&
			   (signo < 32 || signo >= SIGRTMIN);

		for (i = 0; i < COUNT_OF(never); i++)
			may &= signo != never[i];
		CHECK(!!(now >> (signo - 1) & 1) == may, "signal %d", signo);
	}
}

static void check_none_blocked(void)
{
	uint64_t now = 1;

	CHECK(syscall(SYS_rt_sigprocmask, SIG_BLOCK, NULL, &now, sizeof(now)) == 0);
	CHECK(!now, "0x%lx", (unsigned long)now);
}

/* A page of which some bytes are registered: a child gets its copy. */
static struct rf_handle start_partial(void)
{
	const struct sigaction action = { .sa_handler = on_signal };

	memory = check_map(1);
	memset(memory, 7, check_page);
	check_start_untrusted();
	CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
	return check_register(memory + 100, 64, RF_HELD);
}

static void raise_one(void)
{
	CHECK(kill(getpid(), SIGUSR1) == 0);
}

static void a_handler_in_a_child_finds_partial_pages(void)
{
	struct rf_handle handle = start_partial();
	pid_t pid;

	inside[2] = raise_one;
	pid = fork();
	if (!pid) {
		CHECK(handled == 1 && seen == 7);
		check_none_blocked();
		_exit(0);
	}
	CHECK(check_wait(pid) == 0);
	CHECK(!handled);
	check_none_blocked();
	check_release(handle);
	check_empty();
}

static void a_handler_in_a_child_finds_zeros(void)
{
	char name[] = "/tmp/zeros-XXXXXX";
	int fd = mkstemp(name);
	pid_t pid;

	check_release(start_partial());
	CHECK(fd >= 0 && unlink(name) == 0 && ftruncate(fd, (off_t)check_page) == 0);
	memory = mmap(NULL, check_page, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
	CHECK(memory != MAP_FAILED);
	memory[10] = 7;
	(void)check_register_as(memory, check_page, RF_WIPE);
	inside[2] = raise_one;
	pid = fork();
	if (!pid)
		_exit(handled == 1 && seen == 0 ? 0 : 1);
	CHECK(check_wait(pid) == 0);
}

static void synchronous_signals_stay_deliverable(void)
{
	start_partial();
	inside[0] = inside[1] = inside[2] = check_all_blocked;
	check_fork();
	check_none_blocked();
}

static void nothing_is_blocked_where_nothing_is_mapped(void)
{
	struct rf_handle handle = start_partial();

	check_release(handle);
	handle = check_register(memory, check_page, RF_HELD);
	inside[0] = inside[1] = inside[2] = check_none_blocked;
	check_fork();
	check_fork();
	check_release(handle);
	check_fork();
}

static void a_fork_that_fails_unblocks(void)
{
	start_partial();
	inside[0] = check_all_blocked;
	check_refuse(SYS_clone, EAGAIN);
	CHECK(fork() < 0);
	check_none_blocked();
}

static void signals_that_the_program_blocks_stay_blocked(void)
{
	sigset_t own;
	pid_t pid;

	start_partial();
	sigemptyset(&own);
	sigaddset(&own, SIGUSR1);
	CHECK(pthread_sigmask(SIG_BLOCK, &own, NULL) == 0);
	inside[2] = raise_one;
	pid = fork();
	if (!pid)
		_exit(is_blocked(SIGUSR1) && !is_blocked(SIGUSR2) && !handled ? 0 : 1);
	CHECK(check_wait(pid) == 0);
	CHECK(is_blocked(SIGUSR1) && !is_blocked(SIGUSR2));
}

static sigset_t saved;

static void block_all(void)
{
	sigset_t all;

	sigfillset(&all);
	CHECK(pthread_sigmask(SIG_SETMASK, &all, &saved) == 0);
}

static void unblock_all(void)
{
	CHECK(pthread_sigmask(SIG_SETMASK, &saved, NULL) == 0);
}

static void unblock_one(void)
{
	sigset_t one;

	sigemptyset(&one);
	sigaddset(&one, SIGUSR2);
	CHECK(pthread_sigmask(SIG_UNBLOCK, &one, NULL) == 0);
}

/* In pairs, or for good. */
static void handlers_of_other_libraries_may_set_the_mask(void)
{
	sigset_t one;

	start_partial();
	inside[0] = block_all;
	inside[1] = inside[2] = unblock_all;
	check_fork();
	check_none_blocked();
	pthread_atfork(block_all, unblock_all, unblock_all);
	inside[0] = inside[1] = inside[2] = NULL;
	check_fork();
	check_none_blocked();
	sigemptyset(&one);
	sigaddset(&one, SIGUSR2);
	CHECK(pthread_sigmask(SIG_BLOCK, &one, NULL) == 0);
	inside[1] = unblock_one;
	check_fork();
	/* The library that came later puts back the mask that it has seen. */
	CHECK(is_blocked(SIGUSR2) && !is_blocked(SIGUSR1));
}

static void fork_within(void)
{
	pid_t pid;

	inside[0] = NULL;
	pid = fork();
	/* The outer fork goes on in either. */
	check_all_blocked();
	if (!pid)
		return;
	CHECK(check_wait(pid) == 0);
}

/* In each of the four processes of two forks, one within the other, which all return. */
static void the_outer_of_nested_forks_unblocks(void)
{
	pid_t first = getpid(), pid;

	start_partial();
	inside[0] = fork_within;
	pid = fork();
	check_none_blocked();
	CHECK(memory[10] == 7);
	if (pid)
		CHECK(check_wait(pid) == 0);
	if (getpid() != first)
		_exit(0);
}

static bool over;

/* The thread that forks gets all of them. */
static void *send_signals(void *unused)
{
	sigset_t sent;

	sigemptyset(&sent);
	sigaddset(&sent, SIGUSR1);
	pthread_sigmask(SIG_BLOCK, &sent, NULL);
	while (!__atomic_load_n(&over, __ATOMIC_SEQ_CST))
		kill(0, SIGUSR1);
	return unused;
}

/* To the whole process group, children included. */
static void signals_at_any_moment_kill_no_child(void)
{
	unsigned long round, rounds = check_scale(1000);
	pthread_t thread;
	pid_t pid;
	int status;

	if (CHECK_TSAN)
		check_skip("TSan delays handlers, and calls them where signals are blocked");
	start_partial();
	CHECK(setpgid(0, 0) == 0);
	CHECK(!pthread_create(&thread, NULL, send_signals, NULL));
	for (round = 0; round < rounds; round++) {
		pid = fork();
		if (!pid)
			_exit(0);
		while (waitpid(pid, &status, 0) < 0)
			CHECK(errno == EINTR);
		CHECK(WIFEXITED(status), "round %lu: signal %d", round, WTERMSIG(status));
	}
	__atomic_store_n(&over, true, __ATOMIC_SEQ_CST);
	CHECK(!pthread_join(thread, NULL));
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(a_handler_in_a_child_finds_partial_pages),
		SCENARIO(a_handler_in_a_child_finds_zeros),
		SCENARIO(synchronous_signals_stay_deliverable),
		SCENARIO(nothing_is_blocked_where_nothing_is_mapped),
		SCENARIO(a_fork_that_fails_unblocks),
		SCENARIO(signals_that_the_program_blocks_stay_blocked),
		SCENARIO(handlers_of_other_libraries_may_set_the_mask),
		SCENARIO(the_outer_of_nested_forks_unblocks),
		SCENARIO(signals_at_any_moment_kill_no_child),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
