/* SPDX-License-Identifier: BSD-3-Clause */
/* fork() at any moment: threads that fork side by side, and signals that do. */
#define _GNU_SOURCE
#include "check.h"
#include "fork.h"
#include "window.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/time.h>

static bool stop;

static void fork_and_check(struct rf_handle mine, bool thoroughly)
{
	pid_t child = fork();

	CHECK(child >= 0);
	if (!child) {
		check_alarm(30);
		check_inherited(mine);
		if (thoroughly)
			check_works();
		_exit(0);
	}
	CHECK(check_wait(child) == 0);
}

static void *fork_until_stopped(void *argument)
{
	char *memory = check_map(1);
	struct rf_handle mine = check_register(memory, check_page, RF_HELD);
	unsigned long i, forks = check_scale(400);

	(void)argument;
	for (i = 0; i < forks; i++)
		fork_and_check(mine, i % 4 == 0);
	check_release(mine);
	return NULL;
}

static void threads_fork(enum rf_mode mode)
{
	pthread_t registering[2], forking[2];
	size_t i;

	check_start(mode);
	for (i = 0; i < 2; i++)
		CHECK(!pthread_create(&registering[i], NULL, check_register_until, &stop));
	for (i = 0; i < 2; i++)
		CHECK(!pthread_create(&forking[i], NULL, fork_until_stopped, NULL));
	for (i = 0; i < 2; i++)
		CHECK(!pthread_join(forking[i], NULL));
	__atomic_store_n(&stop, true, __ATOMIC_RELAXED);
	for (i = 0; i < 2; i++)
		CHECK(!pthread_join(registering[i], NULL));
	CHECK(rf_window.forks == 0);
	check_empty();
}

static void threads_fork_and_register_lazily(void)
{
	threads_fork(check_best_mode());
}

static void threads_fork_and_register_eagerly(void)
{
	threads_fork(RF_MODE_EAGER);
}

/* ---- Threads that another waits for ---- */

static bool holding, let_go;

/* In the middle of a call, as far as others can tell. */
static void *hold_the_engine(void *unused)
{
	CHECK(rf_enter(0) == 0);
	check_tell(&holding);
	check_await(&let_go);
	rf_leave();
	return unused;
}

static pid_t (*raw_fork)(void);
static pthread_t interrupted;

/* The child comes back from here, and waits on for a thread that it does not have. */
static void raw_fork_in_handler(int number)
{
	int saved = errno;
	pid_t child = raw_fork();

	(void)number;
	CHECK(child >= 0);
	if (child) {
		CHECK(check_wait(child) == 0);
		check_tell(&let_go);
	} else {
		check_alarm(30);
	}
	errno = saved;
}

/* When the other waits for the lock, and not before. */
static void *interrupt_who_waits(void *unused)
{
	while (!(__atomic_load_n(&rf_engine.lock.word, __ATOMIC_SEQ_CST) & RF_LOCK_WAITERS))
		usleep(1000);
	CHECK(!pthread_kill(interrupted, SIGUSR1));
	return unused;
}

static void a_raw_child_waits_for_no_thread_of_its_parent(void)
{
	struct sigaction action = { .sa_handler = raw_fork_in_handler, .sa_flags = SA_RESTART };
	pthread_t holder, interrupter;
	pid_t self = getpid();
	struct rf_stats stats;

	raw_fork = (pid_t(*)(void))dlsym(RTLD_DEFAULT, "_Fork");
	if (!raw_fork || CHECK_TSAN)
		check_skip("no _Fork() here");
	check_start(check_best_mode());
	check_register(check_map(1), check_page, RF_HELD);
	sigaction(SIGUSR1, &action, NULL);
	interrupted = pthread_self();
	CHECK(!pthread_create(&holder, NULL, hold_the_engine, NULL));
	check_await(&holding);
	CHECK(!pthread_create(&interrupter, NULL, interrupt_who_waits, NULL));
	CHECK(rf_stats(&stats) == 0);
	CHECK(stats.registrations == (getpid() == self));
	if (getpid() != self) {
		check_works();
		_exit(0);
	}
	CHECK(!pthread_join(holder, NULL) && !pthread_join(interrupter, NULL));
}

/*
 * A library that holds its lock from prepare on, as libc itself does before glibc 2.36, and
 * a signal handler that forks inside the engine: each would wait for the other.
 */
static pthread_mutex_t another_lock = PTHREAD_MUTEX_INITIALIZER;
static bool contended, locked;

static void lock_another(void)
{
	if (!contended)
		return;
	pthread_mutex_lock(&another_lock);
	check_tell(&locked);
}

static void unlock_another(void)
{
	if (contended)
		pthread_mutex_unlock(&another_lock);
}

static void *fork_inside_the_engine(void *unused)
{
	CHECK(rf_enter(0) == 0);
	check_tell(&holding);
	check_await(&locked);
	check_fork();
	rf_leave();
	return unused;
}

static void a_fork_waits_for_the_engine_but_not_for_ever(void)
{
	char *memory = check_map(1);
	struct rf_handle mine;
	struct rf_stats stats;
	pthread_t thread;
	pid_t child;
	int status;

	check_start_untrusted();
	rf_window.patience = 1;
	mine = check_register(memory + 100, 100, RF_HELD);
	memory[0] = 1;
	check_fork();
	memory[0] = 2;
	pthread_atfork(lock_another, unlock_another, unlock_another);
	contended = true;
	CHECK(!pthread_create(&thread, NULL, fork_inside_the_engine, NULL));
	check_await(&holding);
	child = fork();
	if (!child) {
		contended = false;
		check_inherited(mine);
		check_works();
		signal(SIGSEGV, SIG_DFL);
		/* Nothing was saved for it: the byte may be gone, but is not an older one. */
		_exit(*(volatile char *)memory == 1);
	}
	status = check_wait(child);
	CHECK(status == 0 || status == -SIGSEGV, "%d", status);
	CHECK(!pthread_join(thread, NULL));
	contended = false;
	CHECK(rf_stats(&stats) == 0 && stats.forks_unmarked == 2 && !rf_window.forks);
	check_release(mine);
	check_works();
}

/* ---- A fork that cannot sleep ---- */

static pthread_t forker;
static bool forked;

static void ignore(int number)
{
	(void)number;
}

/* Before a tenth of a second is over, always. */
static void *signal_the_forker(void *unused)
{
	while (!__atomic_load_n(&forked, __ATOMIC_SEQ_CST)) {
		CHECK(!pthread_kill(forker, SIGUSR1));
		usleep(5000);
	}
	return unused;
}

/* The main thread forks, and has no end of patience if the engine's lock has none. */
static void fork_while_the_engine_is_held(int error)
{
	struct sigaction action = { .sa_handler = ignore, .sa_flags = SA_RESTART };
	pthread_t holder, signaller;
	struct rf_stats stats;
	pid_t child;

	if (CHECK_TSAN)
		check_skip("ThreadSanitizer waits by futex itself");
	check_start(check_best_mode());
	rf_window.patience = 1;
	forker = pthread_self();
	sigaction(SIGUSR1, &action, NULL);
	CHECK(!pthread_create(&holder, NULL, hold_the_engine, NULL));
	check_await(&holding);
	if (!error)
		CHECK(!pthread_create(&signaller, NULL, signal_the_forker, NULL));
	else
		check_refuse(SYS_futex, error);
	check_alarm(20);
	child = fork();
	if (!child)
		_exit(0);
	check_tell(&forked);
	CHECK(check_wait(child) == 0);
	check_tell(&let_go);
	while (rf_stats(&stats) < 0)
		usleep(1000);
	CHECK(stats.forks_unmarked == 1, "%lu", (unsigned long)stats.forks_unmarked);
	_exit(0);
}

/* As a sandbox does that has forgotten it, and one that knows no such call. */
static void a_fork_that_cannot_sleep_still_times_out(void)
{
	fork_while_the_engine_is_held(EPERM);
}

static void a_fork_without_futex_still_times_out(void)
{
	fork_while_the_engine_is_held(ENOSYS);
}

static void an_interrupted_fork_still_times_out(void)
{
	fork_while_the_engine_is_held(0);
}

static void *fork_amid_the_main_thread_s(void *unused)
{
	pid_t child = fork();

	CHECK(child >= 0);
	if (!child) {
		CHECK(rf_window.first == rf_lock_self() && !rf_window.forks);
		CHECK(!rf_window_here()->depth);
		check_works();
		_exit(0);
	}
	CHECK(check_wait(child) == 0);
	CHECK(rf_window.first != rf_lock_self() && !rf_window_here()->depth);
	return unused;
}

/* A thread that such a child starts may get the address of one that was forking in its parent. */
static void a_child_of_another_thread_has_no_forks_of_the_first(void)
{
	pthread_t thread;

	check_start(check_best_mode());
	check_fork();
	CHECK(rf_window.first == rf_lock_self());
	/* As in another library's handler. */
	rf_window_open();
	CHECK(!pthread_create(&thread, NULL, fork_amid_the_main_thread_s, NULL));
	CHECK(!pthread_join(thread, NULL));
	CHECK(rf_window_here()->depth == 1);
	rf_window_shut();
	check_works();
}

static bool came_back;

static void list_some(void)
{
	struct rf_range_info info;

	CHECK(rf_list(&info, 1) >= 0);
}

static void omit_one(void)
{
	CHECK(rf_descriptor_omit(STDERR_FILENO, 0) == 0);
	CHECK(rf_descriptor_release(STDERR_FILENO) == 0);
}

static void register_hole(void)
{
	struct rf_handle handle;
	struct rf_error error;

	CHECK(rf_register((void *)check_page, check_page, 0, RF_OMIT, &handle, &error) == -ENOMEM);
}

static void *cancelled_thread(void *act)
{
	/* At the next cancellation point: none in the engine. */
	pthread_cancel(pthread_self());
	(*(void (**)(void))act)();
	check_tell(&came_back);
	pthread_testcancel();
	return NULL;
}

static void a_cancelled_thread_does_not_take_the_lock_along(void)
{
	void (*acts[])(void) = { list_some, omit_one, register_hole };
	struct rf_stats stats;
	pthread_t thread;
	void *result;
	size_t i;

	check_start(check_best_mode());
	for (i = 0; i < COUNT_OF(acts); i++) {
		came_back = false;
		CHECK(!pthread_create(&thread, NULL, cancelled_thread, &acts[i]));
		CHECK(!pthread_join(thread, &result) && result == PTHREAD_CANCELED);
		CHECK(came_back, "%zu: cancelled inside the engine", i);
		CHECK(rf_stats(&stats) == 0);
	}
	check_works();
}

/* Thread-local data goes when the thread has all but gone. */
static char *leaving_memory;

static void fork_and_register(void *unused)
{
	struct rf_handle mine = check_register(leaving_memory, check_page, RF_HELD);

	(void)unused;
	fork_and_check(mine, true);
	check_release(mine);
	check_tell(&came_back);
}

static void *thread_with_data(void *key)
{
	CHECK(!pthread_setspecific(*(pthread_key_t *)key, leaving_memory));
	return NULL;
}

static void a_thread_forks_as_it_ends(void)
{
	unsigned long i, many = check_scale(50);
	pthread_key_t key;
	pthread_t thread;

	leaving_memory = check_map(1);
	check_start(check_best_mode());
	CHECK(!pthread_key_create(&key, fork_and_register));
	for (i = 0; i < many; i++) {
		came_back = false;
		CHECK(!pthread_create(&thread, NULL, thread_with_data, &key));
		CHECK(!pthread_join(thread, NULL) && came_back);
	}
	check_works();
}

/* ---- A start that a fork does not wait for the end of ---- */

static void *start_until_stopped(void *unused)
{
	struct rf_error error;

	while (!__atomic_load_n(&stop, __ATOMIC_RELAXED))
		CHECK(rf_fork_init(RF_MODE_AUTO, &error) == 0);
	return unused;
}

/* dl_iterate_phdr() holds a lock that libc does not free in a child. */
static void a_child_may_start_whatever_its_parent_was_starting(void)
{
	unsigned long i, many = check_scale(100);
	struct rf_error error;
	pthread_t thread;

	CHECK(!pthread_create(&thread, NULL, start_until_stopped, NULL));
	for (i = 0; i < many; i++) {
		pid_t child = fork();

		CHECK(child >= 0);
		if (!child) {
			check_alarm(30);
			CHECK(rf_fork_init(RF_MODE_AUTO, &error) == 0);
			check_works();
			_exit(0);
		}
		CHECK(check_wait(child) == 0);
	}
	__atomic_store_n(&stop, true, __ATOMIC_RELAXED);
	CHECK(!pthread_join(thread, NULL));
}

/* The environment is read, and the mode not yet stored, as another thread forks. */
static void a_child_reads_the_environment_if_nothing_runs(void)
{
	pid_t child;

	setenv("RDMAV_FORK_SAFE", "1", 1);
	rf_engine.environment_read = true;
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		check_works();
		_exit(0);
	}
	CHECK(check_wait(child) == 0);
}

/* ---- Signals ---- */

static void set_timer(void);

static struct rf_handle in_handler;
static unsigned long storms, from_handler;
static char *handler_memory;
static pid_t original;

static void fork_in_handler(int number)
{
	int saved = errno;
	pid_t child;

	(void)number;
	if (getpid() != original)
		return;
	storms++;
	child = fork();
	if (!child) {
		struct rf_error error;
		int rc;

		check_alarm(30);
		rc = rf_register(handler_memory, check_page, 0, RF_OMIT, &in_handler, &error);
		CHECK(rc == 1 || rc == -EDEADLK, "%d", rc);
		CHECK(rc < 0 || rf_release(in_handler, 0) == 0);
		if (storms % 2)
			_exit(0);
		errno = saved;
		return;
	}
	CHECK(child > 0 && check_wait(child) == 0);
	set_timer();
	errno = saved;
}

static void register_in_handler(int number)
{
	struct rf_error error;
	int saved = errno, rc;

	(void)number;
	storms++;
	rc = rf_register(handler_memory, check_page, storms & 1, RF_OMIT, &in_handler, &error);
	CHECK(rc == 1 || rc == -EDEADLK, "%d", rc);
	CHECK(rc < 0 || rf_release(in_handler, 0) == 0);
	from_handler += rc == 1;
	set_timer();
	errno = saved;
}

/* Once: the handler sets it again as it ends, so that the interrupted gets on. */
static void set_timer(void)
{
	const struct itimerval soon = { { 0, 0 }, { 0, 1 + (suseconds_t)check_below(150) } };

	setitimer(ITIMER_REAL, &soon, NULL);
}

static void storm(void (*handler)(int), unsigned long wanted)
{
	struct sigaction action = { .sa_handler = handler, .sa_flags = SA_RESTART };
	char *memory = check_map(8);
	struct rf_handle handles[3];
	size_t i;

	if (CHECK_TSAN)
		check_skip("ThreadSanitizer delays signals");
	original = getpid();
	handler_memory = check_map(1);
	check_start(check_best_mode());
	sigaction(SIGALRM, &action, NULL);
	set_timer();
	while (storms < wanted && getpid() == original) {
		for (i = 0; i < 3; i++)
			handles[i] = check_register(memory + i * check_page + i, 2 * check_page,
						    i ? RF_HELD : 0);
		for (i = 0; i < 3; i++) {
			int rc = rf_release(handles[i], 0);

			/* In a child that came back from the handler some are the parent's. */
			CHECK(rc == 0 || (rc == -ECHILD && getpid() != original), "%d", rc);
		}
	}
	if (getpid() != original) {
		signal(SIGALRM, SIG_DFL);
		check_works();
		_exit(0);
	}
	/* One may be under way still. */
	signal(SIGALRM, SIG_IGN);
	check_sound();
	check_works();
}

static void a_timer_forks_in_a_storm(void)
{
	/* A child that comes back goes on to register pages that eager mode has taken from it. */
	check_needs_lazy();
	storm(fork_in_handler, check_scale(3000));
}

static void a_timer_registers_in_a_storm(void)
{
	storm(register_in_handler, check_scale(10000));
	CHECK(from_handler);
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(threads_fork_and_register_lazily),
		SCENARIO(threads_fork_and_register_eagerly),
		SCENARIO(a_child_of_another_thread_has_no_forks_of_the_first),
		SCENARIO(a_raw_child_waits_for_no_thread_of_its_parent),
		SCENARIO(a_fork_waits_for_the_engine_but_not_for_ever),
		SCENARIO(a_fork_that_cannot_sleep_still_times_out),
		SCENARIO(a_fork_without_futex_still_times_out),
		SCENARIO(an_interrupted_fork_still_times_out),
		SCENARIO(a_cancelled_thread_does_not_take_the_lock_along),
		SCENARIO(a_thread_forks_as_it_ends),
		SCENARIO(a_child_may_start_whatever_its_parent_was_starting),
		SCENARIO(a_child_reads_the_environment_if_nothing_runs),
		SCENARIO(a_timer_forks_in_a_storm),
		SCENARIO(a_timer_registers_in_a_storm),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
