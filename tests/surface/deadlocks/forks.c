/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Forks that Python knows nothing of: by C threads without its lock, and by a
 * signal handler that a timer calls wherever the thread is. Each child registers
 * and releases before it goes.
 */
#define _GNU_SOURCE
#include <rdmafork.h>

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#define NBYTES 16384ul

/* The parent's may be absent from a child. */
static char parents[8 * NBYTES] __attribute__((aligned(NBYTES)));
static char own[8 * NBYTES] __attribute__((aligned(NBYTES)));
static volatile sig_atomic_t forked, failed;

/* 0 if the engine works; @interrupted: it may say that it is being used. */
static int use_engine(char *memory, int interrupted)
{
	struct rf_handle handle;
	struct rf_error error;
	int i, rc;

	for (i = 0; i < 3; i++) {
		rc = rf_register(memory + i * NBYTES + 100, 2 * NBYTES, i & RF_HELD, RF_OMIT,
				 &handle, &error);
		if (interrupted && rc == -EDEADLK)
			return 0;
		if (rc != 1)
			return 100 - rc;
		if (rf_handle_state(handle) != 1)
			return 2;
		rc = rf_release(handle, 0);
		if (rc)
			return 200 - rc;
	}
	return 0;
}

static int fork_once(int interrupted)
{
	int status = -1;
	pid_t pid = fork();

	if (!pid)
		_exit(use_engine(own, interrupted));
	if (pid > 0 && waitpid(pid, &status, 0) == pid && !status)
		return 0;
	dprintf(2, "fork: %d, errno %d, status 0x%x\n", pid, errno, status);
	return 1;
}

/* How many of @count forks went wrong. */
int fork_many(int count)
{
	int wrong = 0;

	while (count--)
		wrong += fork_once(0);
	return wrong;
}

static void *fork_thread(void *count)
{
	return (void *)(long)fork_many((int)(long)count);
}

int fork_in_threads(int threads, int count)
{
	pthread_t ids[16];
	void *wrong;
	int i, sum = 0;

	for (i = 0; i < threads; i++)
		pthread_create(&ids[i], NULL, fork_thread, (void *)(long)count);
	for (i = 0; i < threads; i++) {
		pthread_join(ids[i], &wrong);
		sum += (int)(long)wrong;
	}
	return sum;
}

int use_many(int count)
{
	int wrong = 0;

	while (count--)
		wrong += !!use_engine(parents, 0);
	return wrong;
}

/* ---- the storm ------------------------------------------------------------------------ */

static void on_signal(int signal)
{
	int saved = errno;

	(void)signal;
	forked++;
	failed += fork_once(1);
	errno = saved;
}

/* Every @us microseconds of time this process computes. */
void storm_begin(int us)
{
	struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_RESTART };
	struct itimerval timer = { { 0, us }, { 0, us } };

	sigaction(SIGPROF, &action, NULL);
	setitimer(ITIMER_PROF, &timer, NULL);
}

void storm_end(void)
{
	struct itimerval timer = { { 0, 0 }, { 0, 0 } };

	setitimer(ITIMER_PROF, &timer, NULL);
	signal(SIGPROF, SIG_IGN);
}

int storm_forked(void)
{
	return forked;
}

int storm_failed(void)
{
	return failed;
}

static int goal;

/* Signals come while the engine is called, and at no other time. */
static void *storm_thread(void *unused)
{
	sigset_t set;
	int wrong = 0;

	sigemptyset(&set);
	sigaddset(&set, SIGPROF);
	pthread_sigmask(SIG_UNBLOCK, &set, NULL);
	while (forked < goal)
		wrong += !!use_engine(parents, 0);
	pthread_sigmask(SIG_BLOCK, &set, NULL);
	(void)unused;
	return (void *)(long)wrong;
}

/* Forks by signals in several threads at once, until there were @forks. */
int storm_in_threads(int threads, int us, int forks)
{
	pthread_t ids[16];
	sigset_t set, before;
	void *wrong;
	int i, sum = 0;

	goal = forks;
	sigemptyset(&set);
	sigaddset(&set, SIGPROF);
	pthread_sigmask(SIG_BLOCK, &set, &before);
	storm_begin(us);
	for (i = 0; i < threads; i++)
		pthread_create(&ids[i], NULL, storm_thread, NULL);
	for (i = 0; i < threads; i++) {
		pthread_join(ids[i], &wrong);
		sum += (int)(long)wrong;
	}
	storm_end();
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return sum + failed;
}

/* A child that runs no fork handler. */
int raw_clone(void)
{
	return (int)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
}
