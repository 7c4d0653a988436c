/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * fork() at any moment: other libraries' handlers before and after the engine's,
 * threads that fork side by side, children made without any handler, signals.
 */
#define _GNU_SOURCE
#include "check.h"
#include "engine.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>

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
		rf_sys_fail(2, EINVAL);
}

static enum rf_mode best_mode(void)
{
	struct rf_kernel kernel;

	rf_kernel_info(&kernel);
	return kernel.copy_trusted ? RF_MODE_LAZY : RF_MODE_EAGER;
}

/* A process just made: it starts from nothing and is protected against its own children. */
static void check_works(void)
{
	struct rf_handle held, unheld;
	char *memory = check_map(4);

	/* A fork while rf_leave() unlocked leaves the clearing to whoever enters next. */
	CHECK(rf_handle_state((struct rf_handle){ 0 }) == -ESTALE);
	CHECK(!rf_engine.window && !rf_engine.lock.word && !rf_engine.clear_when_left);
	held = check_register(memory, check_page, RF_HELD);
	unheld = check_register(memory + 2 * check_page, check_page, 0);
	CHECK(!check_child_reads(memory));
	CHECK(check_marked(memory, 4) == 2);
	check_release(held);
	check_release(unheld);
	CHECK(check_marked(memory, 4) == 0);
	check_empty();
	check_unmap(memory, 4);
}

static void check_inherited(struct rf_handle handle)
{
	CHECK(rf_handle_state(handle) == -ECHILD, "%d", rf_handle_state(handle));
	CHECK(rf_release(handle, 0) == -ECHILD);
	CHECK(rf_release(handle, RF_NOWAIT) == -ECHILD);
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

	check_start(best_mode());
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

/* What is registered in the window is protected in the fork under way. */
static void window_register(void)
{
	early = check_register(early_memory, check_page, RF_HELD);
}

static void what_the_window_registers_is_protected(void)
{
	check_start(best_mode());
	early_memory = check_map(4);
	inside[0] = window_register;
	CHECK(!check_child_reads(early_memory));
	inside[0] = NULL;
	check_release(early);
	check_empty();
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

static void raise_in_the_window(void)
{
	raise(SIGUSR1);
}

static void a_fork_within_a_fork_shuts_the_window(void)
{
	pid_t self = getpid(), child;

	check_start(best_mode());
	signal(SIGUSR1, nested_fork);
	inside[0] = raise_in_the_window;
	child = fork();
	CHECK(child >= 0);
	CHECK(rf_engine.window == 0, "%d forks seem to be under way", rf_engine.window);
	if (child)
		CHECK(check_wait(child) == 0);
	check_works();
	CHECK(rf_engine.window == 0);
	if (getpid() != self)
		_exit(0);
}

static void a_fork_that_fails_shuts_the_window(void)
{
	struct rlimit none = { 0, 0 };
	char *memory = check_map(1);
	struct rf_handle handle;
	pid_t child;

	check_start(best_mode());
	if (!getuid() && setresuid(65534, 65534, 65534))
		check_skip("cannot be another user: %s", strerror(errno));
	CHECK(!setrlimit(RLIMIT_NPROC, &none));
	child = fork();
	if (!child)
		_exit(0);
	if (child > 0)
		check_skip("RLIMIT_NPROC does not count here");
	CHECK(errno == EAGAIN && rf_engine.window == 0);
	handle = check_register(memory, check_page, RF_HELD);
	check_release(handle);
	check_empty();
}

static void errno_passes_through_the_handlers(void)
{
	char *memory = check_map(4);
	pid_t child;

	check_start(best_mode());
	check_register(memory + 9, 2 * check_page, RF_HELD);
	errno = 4242;
	child = fork();
	CHECK(errno == 4242, "%d", errno);
	if (!child)
		_exit(0);
	CHECK(check_wait(child) == 0);
}

static void errno_passes_through_everything(void)
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

static pid_t raw_clone(void)
{
	return (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
}

static void children_unseen(pid_t (*make)(void))
{
	unsigned long i, many = check_scale(400);
	struct rf_handle held, unheld;
	char *memory = check_map(4);
	struct rf_stats stats;

	check_start(best_mode());
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
			/* And so on: what it registers is its own child's past. */
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
	children_unseen(raw_clone);
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
	CHECK(rf_sys_faults() == 1);
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

	check_start(best_mode());
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
	CHECK(rf_generation() == generation && rf_engine.window == 0);
	CHECK(rf_handle_state(held) == 1 && rf_handle_state(unheld) == 1);
	check_release(held);
	check_release(unheld);
	check_empty();
}

/* ---- Threads ---- */

static bool stop;

static void *register_until_stopped(void *argument)
{
	char *memory = check_map(8);
	struct rf_handle handles[4];
	size_t i;

	(void)argument;
	while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
		for (i = 0; i < 4; i++)
			handles[i] = check_register(memory + i * check_page + 7 * (i & 1),
						    3 * check_page, i & 2 ? RF_HELD : 0);
		for (i = 0; i < 4; i++)
			check_release(handles[i]);
	}
	check_unmap(memory, 8);
	return NULL;
}

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

static void threads_fork(enum rf_mode mode, bool handlers)
{
	pthread_t registering[2], forking[2];
	size_t i;

	check_start(mode);
	if (handlers)
		install_handlers();
	/* The handlers of two forks at once would overwrite what they note. */
	for (i = 0; i < 2; i++)
		CHECK(!pthread_create(&registering[i], NULL, register_until_stopped, NULL));
	for (i = 0; i < 2; i++)
		CHECK(!pthread_create(&forking[i], NULL, fork_until_stopped, NULL));
	for (i = 0; i < 2; i++)
		CHECK(!pthread_join(forking[i], NULL));
	__atomic_store_n(&stop, true, __ATOMIC_RELAXED);
	for (i = 0; i < 2; i++)
		CHECK(!pthread_join(registering[i], NULL));
	CHECK(rf_engine.window == 0);
	check_empty();
}

static void threads_fork_and_register_lazily(void)
{
	threads_fork(best_mode(), false);
}

static void threads_fork_and_register_eagerly(void)
{
	threads_fork(RF_MODE_EAGER, false);
}

/* ---- Threads that another waits for ---- */

static bool holding, let_go;

static void await(const bool *flag)
{
	while (!__atomic_load_n(flag, __ATOMIC_SEQ_CST))
		usleep(1000);
}

static void set(bool *flag)
{
	__atomic_store_n(flag, true, __ATOMIC_SEQ_CST);
}

/* In the middle of a call, as far as others can tell. */
static void *hold_the_engine(void *unused)
{
	CHECK(rf_enter(0) == 0);
	set(&holding);
	await(&let_go);
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
		set(&let_go);
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
	check_start(best_mode());
	check_register(check_map(1), check_page, RF_HELD);
	sigaction(SIGUSR1, &action, NULL);
	interrupted = pthread_self();
	CHECK(!pthread_create(&holder, NULL, hold_the_engine, NULL));
	await(&holding);
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
static bool locked;

static void lock_another(void)
{
	pthread_mutex_lock(&another_lock);
	set(&locked);
}

static void unlock_another(void)
{
	pthread_mutex_unlock(&another_lock);
}

static void *fork_inside_the_engine(void *unused)
{
	CHECK(rf_enter(0) == 0);
	set(&holding);
	await(&locked);
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

	setenv("RDMAFORK_EDGES", "whole", 1);
	check_start(RF_MODE_EAGER);
	rf_engine.patience = 1;
	mine = check_register(memory + 100, 100, RF_HELD);
	memory[0] = 1;
	check_fork();
	memory[0] = 2;
	pthread_atfork(outside_0, outside_1, outside_2);
	outside[0] = lock_another;
	outside[1] = unlock_another;
	outside[2] = unlock_another;
	CHECK(!pthread_create(&thread, NULL, fork_inside_the_engine, NULL));
	await(&holding);
	child = fork();
	if (!child) {
		outside[0] = outside[1] = outside[2] = NULL;
		check_inherited(mine);
		check_works();
		signal(SIGSEGV, SIG_DFL);
		/* Nothing was saved for it: the byte may be gone, but is not an older one. */
		_exit(*(volatile char *)memory == 1);
	}
	status = check_wait(child);
	CHECK(status == 0 || status == -SIGSEGV, "%d", status);
	CHECK(!pthread_join(thread, NULL));
	outside[0] = outside[1] = outside[2] = NULL;
	CHECK(rf_stats(&stats) == 0 && stats.forks_unprepared == 2 && !rf_engine.window);
	check_release(mine);
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
	set(&came_back);
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

	check_start(best_mode());
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
	set(&came_back);
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
	check_start(best_mode());
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
	pid_t child;

	start_at_once();
	if (!raw_fork)
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

	if (!CHECK_TSAN)
		raw_fork = (pid_t(*)(void))dlsym(RTLD_DEFAULT, "_Fork");
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
			check_alarm(10);
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
	check_start(best_mode());
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
		SCENARIO(handlers_register_and_release),
		SCENARIO(what_the_window_registers_is_protected),
		SCENARIO(shared_memory_in_the_window_eager),
		SCENARIO(shared_memory_in_the_window_lazy),
		SCENARIO(a_fork_within_a_fork_shuts_the_window),
		SCENARIO(a_fork_that_fails_shuts_the_window),
		SCENARIO(errno_passes_through_the_handlers),
		SCENARIO(errno_passes_through_everything),
		SCENARIO(children_of_clone_are_noticed),
		SCENARIO(children_of__Fork_are_noticed),
		SCENARIO(children_of_fork_are_noticed),
		SCENARIO(children_of_fork_are_noticed_without_a_wiped_page),
		SCENARIO(children_of_fork_are_noticed_again),
		SCENARIO(processes_that_share_memory_change_nothing),
		SCENARIO(threads_fork_and_register_lazily),
		SCENARIO(threads_fork_and_register_eagerly),
		SCENARIO(a_raw_child_waits_for_no_thread_of_its_parent),
		SCENARIO(a_fork_waits_for_the_engine_but_not_for_ever),
		SCENARIO(a_cancelled_thread_does_not_take_the_lock_along),
		SCENARIO(a_thread_forks_as_it_ends),
		SCENARIO(handlers_may_start_the_engine),
		SCENARIO(a_child_may_start_whatever_its_parent_was_starting),
		SCENARIO(a_child_reads_the_environment_if_nothing_runs),
		SCENARIO(a_timer_forks_in_a_storm),
		SCENARIO(a_timer_registers_in_a_storm),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
