/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Children that repair faults themselves, as garbage collectors and user-space pagers do, on
 * several threads at once. The action that is put in front of theirs must let every fault through.
 */
#define _GNU_SOURCE
#include "check.h"

#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>

#define THREADS 6

static char *registered, *protected;
static pthread_barrier_t barrier;

static void start(void)
{
	registered = check_map(4);
	signal(SIGSEGV, SIG_DFL);
	check_start(check_best_mode());
	(void)check_register(registered, 4 * check_page, RF_HELD);
}

static void repair(int signo, siginfo_t *info, void *context)
{
	(void)signo, (void)info, (void)context;
	mprotect(protected, THREADS * check_page, PROT_READ | PROT_WRITE);
}

static void repair_faults(void)
{
	struct sigaction action = { .sa_sigaction = repair, .sa_flags = SA_SIGINFO };

	sigaction(SIGSEGV, &action, NULL);
}

static void *fault(void *page)
{
	pthread_barrier_wait(&barrier);
	*(volatile char *)page = 1;
	return NULL;
}

static void fault_on_all_threads(void)
{
	pthread_t threads[THREADS];
	size_t i;

	protected = mmap(NULL, THREADS * check_page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	pthread_barrier_init(&barrier, NULL, THREADS);
	for (i = 0; i < THREADS; i++)
		pthread_create(&threads[i], NULL, fault, protected + i * check_page);
	for (i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
}

/* Each of many children does @act, and ends well. */
static void check_children(void (*act)(void))
{
	unsigned long i, children = check_scale(500);

	start();
	for (i = 0; i < children; i++) {
		pid_t pid = fork();

		if (!pid) {
			repair_faults();
			act();
			_exit(0);
		}
		CHECK(check_wait(pid) == 0, "child %lu", i);
	}
}

static void ask_for_the_line(void)
{
	if (rf_explain_faults() != 1)
		_exit(2);
	fault_on_all_threads();
}

static void children_that_repair_faults_live(void)
{
	check_children(ask_for_the_line);
}

static void fork_once_more(void)
{
	pid_t pid;

	(void)check_register(check_map(4), 4 * check_page, RF_HELD);
	pid = fork();
	if (pid)
		_exit(check_wait(pid) != 0);
	fault_on_all_threads();
}

/* The action in front of theirs is put there by the fork. */
static void grandchildren_that_inherit_the_handler_live(void)
{
	check_children(fork_once_more);
}

/* A child that may not change its actions any more dies of the fault, and does not spin. */
static void a_child_in_a_sandbox_dies(void)
{
	pid_t pid;

	start();
	pid = fork();
	if (!pid) {
		check_refuse(SYS_rt_sigaction, EPERM);
		check_alarm(10);
		*(volatile char *)registered = 1;
		_exit(0);
	}
	CHECK(check_wait(pid) == -SIGSEGV);
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(children_that_repair_faults_live),
		SCENARIO(grandchildren_that_inherit_the_handler_live),
		SCENARIO(a_child_in_a_sandbox_dies),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
