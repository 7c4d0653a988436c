/* SPDX-License-Identifier: BSD-3-Clause */
/* A child that touches memory kept from it says why, and then dies as it would have. */
#define _GNU_SOURCE
#include "check.h"

#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#define PAGES 16

static char *memory; /* PAGES, registered but for the first and the last */
static struct rf_handle handle;
static char said[8192];
static int ends[2];

/* The default action: a sanitizer's own would exit. */
static void start(void)
{
	memory = check_map(PAGES);
	signal(SIGSEGV, SIG_DFL);
	setrlimit(RLIMIT_CORE, &(struct rlimit){ 0, 0 });
	check_start(check_best_mode());
	handle = check_register(memory + check_page, (PAGES - 2) * check_page, RF_HELD);
}

/* A child whose stderr is @fd, since before the fork. How it ended, as check_wait() says. */
static int run_with(int fd, void (*run)(void))
{
	int before = dup(2), status;
	pid_t pid;

	CHECK(dup2(fd, 2) == 2);
	pid = fork();
	if (!pid) {
		run();
		_exit(0);
	}
	status = check_wait(pid);
	CHECK(dup2(before, 2) == 2);
	close(before);
	return status;
}

/* The same, with a pipe: its words are in @said. */
static int run_child(void (*run)(void))
{
	ssize_t nbytes;
	int status;

	CHECK(pipe2(ends, O_NONBLOCK) == 0);
	status = run_with(ends[1], run);
	nbytes = read(ends[0], said, sizeof(said) - 1);
	said[nbytes < 0 ? 0 : nbytes] = '\0';
	close(ends[0]);
	close(ends[1]);
	return status;
}

static int count_lines(void)
{
	const char *at = said;
	int lines = 0;

	while ((at = strstr(at, "rdmafork: process "))) {
		lines++;
		at++;
	}
	return lines;
}

static void touch(void)
{
	*(volatile char *)(memory + 3 * check_page + 5) = 1;
}

static void read_it(void)
{
	(void)*(volatile char *)(memory + 3 * check_page + 5);
}

static void check_told(void)
{
	char expected[200];

	snprintf(expected, sizeof(expected),
		 " touched 0x%lx: its parent registered 0x%lx-0x%lx (%zu bytes) with ",
		 (unsigned long)memory + 3 * check_page + 5, (unsigned long)memory + check_page,
		 (unsigned long)memory + (PAGES - 1) * check_page, (PAGES - 2) * check_page);
	CHECK(strstr(said, expected), "%s", said);
	CHECK(count_lines() == 1 && said[strlen(said) - 1] == '\n', "%s", said);
}

static void a_child_that_dies_says_why(void)
{
	start();
	CHECK(run_child(touch) == -SIGSEGV);
	check_told();
	CHECK(strstr(said, "with rf_register(), so this child does not have that memory. "), "%s",
	      said);
	CHECK(run_child(read_it) == -SIGSEGV);
	check_told();
	CHECK(rf_registered_at(handle, "train.py:12") == 0);
	CHECK(run_child(touch) == -SIGSEGV);
	CHECK(strstr(said, "with rf_register() at train.py:12, so"), "%s", said);
	check_release(handle);
	CHECK(rf_registered_at(handle, "train.py:12") == -ESTALE);
	CHECK(run_child(touch) == 0);
	CHECK(!*said, "%s", said);
}

/* A refusal is no sign that the page can be read by now. */
static void a_child_says_why_where_copying_is_refused(void)
{
	start();
	check_refuse(SYS_process_vm_readv, EPERM);
	CHECK(run_child(touch) == -SIGSEGV);
	check_told();
}

__attribute__((no_sanitize("address", "undefined"))) static void touch_null(void)
{
	volatile char *null = NULL;

	__asm__("" : "+r"(null));
	*null = 1;
}

static void the_line_names_the_call_and_a_remedy_for_its_caller(void)
{
	static const char *const words[][2] = {
		{ "rf_register(), so", "memory, register with RF_WIPE or RF_KEEP, or copy it " },
		{ "rdmafork.register(), so", "on_fork=\"wipe\" or \"keep\", or copy it " },
		{ "rdmafork.register_address(), so", "on_fork=\"wipe\" or \"keep\", or copy it " },
		{ "rdmafork.Buffer(), so", "on_fork=\"wipe\" or \"keep\", or copy it " },
		{ "ProtectionDomain.register(), so", "on_fork=\"wipe\" or \"keep\", or copy it " },
		{ "libibverbs, so", "use shared memory, or copy it before fork()." },
		{ "rf_register(), so", "before fork()." },
		{ "rf_register(), so", "before fork()." },
	};
	unsigned int from;

	start();
	check_release(handle);
	for (from = 0; from < COUNT_OF(words); from++) {
		handle = check_register(memory + check_page, (PAGES - 2) * check_page,
					RF_HELD | from * RF_FROM_REGISTER);
		CHECK(run_child(touch) == -SIGSEGV);
		check_told();
		CHECK(strstr(said, words[from][0]) && strstr(said, words[from][1]), "%s", said);
		check_release(handle);
	}
}

static void the_longest_line_is_whole(void)
{
	char where[200];

	start();
	memset(where, 'x', sizeof(where));
	where[sizeof(where) - 1] = '\0';
	check_release(handle);
	handle = check_register(memory + check_page, (PAGES - 2) * check_page,
				RF_HELD | RF_FROM_ADDRESS);
	CHECK(rf_registered_at(handle, where) == 0);
	CHECK(run_child(touch) == -SIGSEGV);
	check_told();
	CHECK(strlen(said) < PIPE_BUF && strstr(said, "xxx, so this child"), "%s", said);
}

static void a_registration_that_omits_is_named_before_one_that_keeps(void)
{
	struct rf_handle kept;
	struct rf_error error;

	start();
	check_release(handle);
	CHECK(rf_register(memory, PAGES * check_page, RF_HELD | RF_FROM_REGISTER, RF_WIPE, &kept,
			  &error) == 1);
	handle = check_register(memory + check_page, (PAGES - 2) * check_page,
				RF_HELD | RF_FROM_LIBIBVERBS);
	CHECK(run_child(touch) == -SIGSEGV);
	check_told();
	CHECK(strstr(said, " with libibverbs, "), "%s", said);
}

static void faults_elsewhere_are_not_explained(void)
{
	start();
	CHECK(run_child(touch_null) == -SIGSEGV);
	CHECK(!*said, "%s", said);
}

static void map_readable(void)
{
	CHECK(mmap(memory + 3 * check_page, check_page, PROT_READ,
		   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED);
	touch();
}

static void a_later_mapping_s_fault_is_not_explained(void)
{
	start();
	CHECK(run_child(map_readable) == -SIGSEGV);
	CHECK(!*said, "%s", said);
}

static void unmap_and_touch(void)
{
	CHECK(munmap(memory + 2 * check_page, 3 * check_page) == 0);
	touch();
}

static void map_write_unmap_and_touch(void)
{
	check_map_over(memory + 3 * check_page, 1, MAP_PRIVATE);
	touch();
	CHECK(munmap(memory + 3 * check_page, check_page) == 0);
	touch();
}

static void memory_that_the_child_unmapped_is_not_explained(void)
{
	start();
	CHECK(run_child(unmap_and_touch) == -SIGSEGV);
	CHECK(!*said, "%s", said);
	CHECK(run_child(map_write_unmap_and_touch) == -SIGSEGV);
	CHECK(!*said, "%s", said);
}

/* The longest 1,024 areas are reserved, and these are as long as each other. */
static void areas_that_are_not_reserved_are_explained(void)
{
	const size_t count = 3000;
	char *many = check_map(2 * count);
	size_t i;

	start();
	for (i = 0; i < count; i++)
		(void)check_register(many + 2 * i * check_page, check_page, RF_HELD);
	for (i = 0; i < count; i += count - 1) {
		memory = many + 2 * i * check_page - 3 * check_page;
		CHECK(run_child(touch) == -SIGSEGV);
		CHECK(count_lines() == 1, "%s", said);
	}
}

static void the_environment_turns_the_handler_off(void)
{
	struct rf_error error;

	setenv("RDMAFORK_EXPLAIN_FAULTS", "no", 1);
	CHECK(rf_fork_init(RF_MODE_AUTO, &error) == -EINVAL);
	CHECK(error.cause == RF_CAUSE_ENVIRONMENT && strstr(error.text, "EXPLAIN_FAULTS=no"));
	setenv("RDMAFORK_EXPLAIN_FAULTS", "0", 1);
	start();
	CHECK(run_child(touch) == -SIGSEGV);
	CHECK(!*said, "%s", said);
}

static struct sigaction action_of_child;

static void look(void)
{
	CHECK(sigaction(SIGSEGV, NULL, &action_of_child) == 0);
	_exit(action_of_child.sa_handler != SIG_DFL);
}

static void a_child_that_lacks_nothing_has_no_action(void)
{
	start();
	CHECK(run_child(look) == 1);
	check_release(handle);
	CHECK(run_child(look) == 0);
	CHECK(rf_explain_faults() == 0);
}

/* ---- The program's own actions ---- */

static void by_info(int signo, siginfo_t *info, void *context)
{
	const bool same = info->si_addr == memory + 3 * check_page + 5 &&
			  (info->si_code == SEGV_MAPERR || info->si_code == SEGV_ACCERR);

	(void)signo, (void)context;
	_exit(same ? 42 : 43);
}

static void by_number(int signo)
{
	_exit(signo == SIGSEGV ? 44 : 45);
}

static void the_program_s_handler_is_called(void)
{
	struct sigaction info = { .sa_sigaction = by_info, .sa_flags = SA_SIGINFO };
	struct sigaction number = { .sa_handler = by_number, .sa_flags = (int)SA_RESETHAND };

	start();
	CHECK(sigaction(SIGSEGV, &info, NULL) == 0);
	CHECK(run_child(touch) == 42);
	check_told();
	CHECK(sigaction(SIGSEGV, &number, NULL) == 0);
	CHECK(run_child(touch) == 44);
	check_told();
}

static unsigned int faults;

static void once(int signo)
{
	(void)signo;
	faults++;
}

static void fault_once(void)
{
	struct sigaction now;

	/* After a return from the program's handler its action is the default's, as it was. */
	touch();
	CHECK(sigaction(SIGSEGV, NULL, &now) == 0);
}

static void a_one_shot_handler_is_called_once(void)
{
	struct sigaction action = { .sa_handler = once, .sa_flags = (int)SA_RESETHAND };

	start();
	CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
	CHECK(run_child(fault_once) == -SIGSEGV);
	check_told();
}

static void is_ignored(void)
{
	struct sigaction now;

	CHECK(sigaction(SIGSEGV, NULL, &now) == 0);
	_exit(now.sa_handler == SIG_IGN ? 46 : 47);
}

static void an_ignored_signal_stays_ignored(void)
{
	start();
	signal(SIGSEGV, SIG_IGN);
	CHECK(run_child(is_ignored) == 46);
	CHECK(run_child(touch) == -SIGSEGV);
	CHECK(!*said, "%s", said);
}

static struct sigaction in_front_of;

static void chain(int signo, siginfo_t *info, void *context)
{
	if (in_front_of.sa_flags & SA_SIGINFO)
		in_front_of.sa_sigaction(signo, info, context);
}

static void chain_and_touch(void)
{
	struct sigaction action = { .sa_sigaction = chain, .sa_flags = SA_SIGINFO };

	CHECK(sigaction(SIGSEGV, &action, &in_front_of) == 0);
	touch();
}

static void explain_chain_and_touch(void)
{
	struct sigaction action = { .sa_sigaction = chain, .sa_flags = SA_SIGINFO };

	CHECK(sigaction(SIGSEGV, &action, &in_front_of) == 0);
	CHECK(rf_explain_faults() == 1);
	CHECK(rf_explain_faults() == 1);
	touch();
}

static void chain_and_raise(void)
{
	struct sigaction action = { .sa_sigaction = chain, .sa_flags = SA_SIGINFO };

	CHECK(sigaction(SIGSEGV, &action, &in_front_of) == 0);
	raise(SIGSEGV);
}

static void a_handler_that_calls_ours_ends(void)
{
	struct sigaction info = { .sa_sigaction = by_info, .sa_flags = SA_SIGINFO };

	start();
	CHECK(run_child(chain_and_touch) == -SIGSEGV);
	CHECK(run_child(chain_and_raise) == -SIGSEGV);
	CHECK(run_child(explain_chain_and_touch) == -SIGSEGV);
	check_told();
	CHECK(sigaction(SIGSEGV, &info, NULL) == 0);
	CHECK(run_child(chain_and_touch) == 42);
	CHECK(run_child(explain_chain_and_touch) == 42);
	check_told();
}

static unsigned int in_front;

/* As Python's faulthandler does. */
static void put_back_and_raise(int signo)
{
	if (!in_front++)
		CHECK(sigaction(SIGSEGV, &in_front_of, NULL) == 0);
	if (in_front > 2)
		_exit(52);
	raise(signo);
}

static void put_back(int signo)
{
	(void)signo;
	if (!in_front++)
		CHECK(sigaction(SIGSEGV, &in_front_of, NULL) == 0);
	if (in_front > 2)
		_exit(53);
}

static void explain_before(void (*handler)(int))
{
	struct sigaction action = { .sa_handler = handler, .sa_flags = SA_NODEFER };

	CHECK(sigaction(SIGSEGV, &action, &in_front_of) == 0);
	CHECK(rf_explain_faults() == 1);
	touch();
}

static void explain_put_back_and_raise(void)
{
	explain_before(put_back_and_raise);
}

static void explain_put_back(void)
{
	explain_before(put_back);
}

static void a_handler_that_puts_ours_back_is_called_once(void)
{
	struct sigaction info = { .sa_sigaction = by_info, .sa_flags = SA_SIGINFO };

	start();
	CHECK(run_child(explain_put_back_and_raise) == -SIGSEGV);
	check_told();
	CHECK(run_child(explain_put_back) == -SIGSEGV);
	check_told();
	CHECK(sigaction(SIGSEGV, &info, NULL) == 0);
	CHECK(run_child(explain_put_back) == 42);
	check_told();
}

static void count_and_chain(int signo, siginfo_t *info, void *context)
{
	in_front++;
	in_front_of.sa_sigaction(signo, info, context);
}

static void chain_and_raise_twice(void)
{
	struct sigaction action = { .sa_sigaction = count_and_chain, .sa_flags = SA_SIGINFO };

	CHECK(sigaction(SIGSEGV, &action, &in_front_of) == 0);
	raise(SIGSEGV);
	raise(SIGSEGV);
	_exit(in_front == 2 && faults == 2 ? 50 : 51);
}

static void a_handler_that_calls_ours_stays_in_front(void)
{
	struct sigaction returns = { .sa_handler = once };

	start();
	CHECK(sigaction(SIGSEGV, &returns, NULL) == 0);
	CHECK(run_child(chain_and_raise_twice) == 50);
}

static void install_and_touch(void)
{
	signal(SIGSEGV, by_number);
	touch();
}

static void install_explain_and_touch(void)
{
	signal(SIGSEGV, by_number);
	CHECK(rf_explain_faults() == 1);
	touch();
}

static void explain_faults_puts_the_handler_in_front_again(void)
{
	start();
	CHECK(run_child(install_and_touch) == 44);
	CHECK(!*said, "%s", said);
	CHECK(run_child(install_explain_and_touch) == 44);
	check_told();
}

/* ---- Signals that are sent ---- */

static void was_sent(int signo, siginfo_t *info, void *context)
{
	const bool same = info->si_code == SI_QUEUE && info->si_pid == getpid() &&
			  info->si_value.sival_int == 99;

	(void)signo, (void)context;
	_exit(same ? 48 : 49);
}

static void send_it(void)
{
	CHECK(sigqueue(getpid(), SIGSEGV, (union sigval){ .sival_int = 99 }) == 0);
}

static void a_signal_that_is_sent_arrives(void)
{
	struct sigaction action = { .sa_sigaction = was_sent, .sa_flags = SA_SIGINFO };

	start();
	CHECK(run_child(send_it) == -SIGSEGV);
	CHECK(!*said, "%s", said);
	CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
	CHECK(run_child(send_it) == 48);
	CHECK(!*said, "%s", said);
}

static void install_explain_and_send(void)
{
	struct sigaction action = { .sa_sigaction = was_sent, .sa_flags = SA_SIGINFO };

	CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
	CHECK(rf_explain_faults() == 1);
	send_it();
}

/* And not to the action that was in force before it. */
static void a_signal_that_is_sent_arrives_at_the_last_handler(void)
{
	start();
	CHECK(run_child(install_explain_and_send) == 48);
	CHECK(!*said, "%s", said);
}

/* ---- Where the line goes ---- */

static void a_full_pipe_on_stderr_does_not_hang_the_child(void)
{
	start();
	CHECK(pipe(ends) == 0);
	CHECK(fcntl(ends[1], F_SETFL, O_NONBLOCK) == 0);
	while (write(ends[1], said, 4096) > 0)
		;
	CHECK(fcntl(ends[1], F_SETFL, 0) == 0);
	CHECK(run_with(ends[1], touch) == -SIGSEGV);
	/* Nor does a write to a pipe without a reader end it by another signal. */
	close(ends[0]);
	CHECK(run_with(ends[1], touch) == -SIGSEGV);
}

static void close_and_touch(void)
{
	close(2);
	touch();
}

static void replace_and_touch(void)
{
	CHECK(dup2(ends[1], 2) == 2);
	touch();
}

static void another_file_at_descriptor_2_is_left_alone(void)
{
	char byte;

	start();
	CHECK(run_child(close_and_touch) == -SIGSEGV);
	CHECK(!*said, "%s", said);
	CHECK(pipe2(ends, O_NONBLOCK) == 0);
	CHECK(run_with(2, replace_and_touch) == -SIGSEGV);
	CHECK(read(ends[0], &byte, 1) == -1 && errno == EAGAIN);
}

/* ---- Processes and threads ---- */

static char *second;

static void fork_and_touch_first(void)
{
	pid_t pid;

	second = check_map(4);
	check_register(second, 4 * check_page, RF_HELD);
	pid = fork();
	if (!pid) {
		touch();
		_exit(0);
	}
	CHECK(check_wait(pid) == -SIGSEGV);
}

static void fork_and_touch_second(void)
{
	pid_t pid;

	second = check_map(4);
	check_register(second, 4 * check_page, RF_HELD);
	pid = fork();
	if (!pid) {
		second[7] = 1;
		_exit(0);
	}
	CHECK(check_wait(pid) == -SIGSEGV);
}

static void grandchildren_lack_the_memory_of_both_parents(void)
{
	start();
	CHECK(run_child(fork_and_touch_first) == 0);
	check_told();
	CHECK(run_child(fork_and_touch_second) == 0);
	CHECK(count_lines() == 1, "%s", said);
}

static void fork_for_ever(void)
{
	pid_t pid;
	int i;

	/* Each the child of the one before, with a registration of its own. */
	for (i = 0; i < 20; i++) {
		second = check_map(2);
		check_register(second, 2 * check_page, RF_HELD);
		pid = fork();
		if (pid)
			_exit(check_wait(pid) == -SIGSEGV ? 0 : 1);
	}
	second[0] = 1;
}

static void long_lines_of_children_keep_little(void)
{
	start();
	(void)run_child(fork_for_ever);
	CHECK(count_lines() == 1, "%s", said);
}

static pthread_barrier_t barrier;

static void *touch_together(void *unused)
{
	(void)unused;
	pthread_barrier_wait(&barrier);
	read_it(); /* threads that write would race */
	return NULL;
}

static void touch_in_threads(void)
{
	pthread_t threads[8];
	size_t i;

	pthread_barrier_init(&barrier, NULL, COUNT_OF(threads));
	for (i = 0; i < COUNT_OF(threads); i++)
		CHECK(pthread_create(&threads[i], NULL, touch_together, NULL) == 0);
	for (i = 0; i < COUNT_OF(threads); i++)
		pthread_join(threads[i], NULL);
}

static void one_thread_reports_the_fault(void)
{
	struct sigaction info = { .sa_sigaction = by_info, .sa_flags = SA_SIGINFO };
	int i;

	start();
	for (i = 0; i < 30; i++) {
		CHECK(run_child(touch_in_threads) == -SIGSEGV);
		check_told();
	}
	CHECK(sigaction(SIGSEGV, &info, NULL) == 0);
	for (i = 0; i < 30; i++) {
		CHECK(run_child(touch_in_threads) == 42);
		check_told();
	}
}

/*
 * A child of vfork() has its parent's memory, and dies for itself: but before 5.16 a core dump
 * kills all who share the memory.
 */
static void touch_in_vfork(void)
{
	int status;
	pid_t pid;

	CHECK(prctl(PR_SET_DUMPABLE, 0) == 0);
	pid = vfork();
	if (!pid) {
		touch();
		_exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid && WTERMSIG(status) == SIGSEGV);
	touch();
}

static void touch_in_clone(void)
{
	pid_t pid = check_clone();

	if (!pid) {
		touch();
		_exit(0);
	}
	CHECK(check_wait(pid) == -SIGSEGV);
	touch();
}

static void vfork_and_clone_children_die_for_themselves(void)
{
	start();
	CHECK(run_child(touch_in_vfork) == -SIGSEGV);
	CHECK(count_lines() == 2, "%s", said);
	CHECK(run_child(touch_in_clone) == -SIGSEGV);
	CHECK(count_lines() == 2, "%s", said);
}

static void explain_after_clone(void)
{
	pid_t pid = check_clone();

	if (!pid) {
		CHECK(rf_explain_faults() == 1);
		touch();
		_exit(0);
	}
	CHECK(check_wait(pid) == -SIGSEGV);
}

static void a_raw_clone_may_call_explain_faults(void)
{
	int before = dup(2);

	start();
	check_fork(); /* the list, and the marks, are made */
	CHECK(pipe2(ends, O_NONBLOCK) == 0);
	CHECK(dup2(ends[1], 2) == 2);
	explain_after_clone();
	CHECK(dup2(before, 2) == 2);
	said[read(ends[0], said, sizeof(said) - 1)] = '\0';
	check_told();
}

static void overflow(unsigned int depth)
{
	volatile char room[4096];

	room[0] = (char)depth;
	if (depth < UINT32_MAX)
		overflow(depth + 1);
	room[1] = room[0];
}

static void overflow_the_stack(void)
{
	overflow(0);
}

static void overflow_with_another(void)
{
	static char room[64 * 1024];
	stack_t stack = { .ss_sp = room, .ss_size = sizeof(room) };

	CHECK(sigaltstack(&stack, NULL) == 0);
	overflow(0);
}

static void touch_on_another(void)
{
	static char room[64 * 1024];
	stack_t stack = { .ss_sp = room, .ss_size = sizeof(room) };

	CHECK(sigaltstack(&stack, NULL) == 0);
	touch();
}

static void a_stack_that_overflows_dies_as_it_would(void)
{
	start();
	CHECK(run_child(overflow_the_stack) == -SIGSEGV);
	CHECK(!*said, "%s", said);
	CHECK(run_child(overflow_with_another) == -SIGSEGV);
	CHECK(!*said, "%s", said);
	CHECK(run_child(touch_on_another) == -SIGSEGV);
	check_told();
}

static sigjmp_buf back;

static void jump(int signo)
{
	(void)signo;
	siglongjmp(back, 1);
}

static void probe(void)
{
	signal(SIGSEGV, jump);
	CHECK(rf_explain_faults() == 1);
	if (!sigsetjmp(back, 1))
		touch();
	/* The program's own is in force now, and may be used as often as it likes. */
	if (!sigsetjmp(back, 1))
		touch();
	_exit(52);
}

static void a_program_that_survives_goes_on(void)
{
	start();
	CHECK(run_child(probe) == 52);
	check_told();
}

static void a_refused_sigaction_does_no_harm(void)
{
	start();
	check_refuse(SYS_rt_sigaction, EPERM);
	CHECK(run_child(touch) == -SIGSEGV);
	check_release(handle);
}

static void the_faulting_area_is_found_among_many(void)
{
	const size_t count = 100000;
	char *many = check_map(count), expected[200];
	size_t i;

	start();
	for (i = 0; i < count; i++)
		(void)check_register(many + i * check_page, check_page, RF_HELD);
	memory = many + (count - 7) * check_page;
	CHECK(run_child(touch) == -SIGSEGV);
	memory += 3 * check_page;
	snprintf(expected, sizeof(expected), " its parent registered 0x%lx-0x%lx (%zu bytes)",
		 (unsigned long)memory, (unsigned long)memory + check_page, check_page);
	CHECK(strstr(said, expected) && count_lines() == 1, "%s", said);
}

static const struct check_scenario scenarios[] = {
	SCENARIO(a_child_that_dies_says_why),
	SCENARIO(a_child_says_why_where_copying_is_refused),
	SCENARIO(the_line_names_the_call_and_a_remedy_for_its_caller),
	SCENARIO(the_longest_line_is_whole),
	SCENARIO(a_registration_that_omits_is_named_before_one_that_keeps),
	SCENARIO(faults_elsewhere_are_not_explained),
	SCENARIO(a_later_mapping_s_fault_is_not_explained),
	SCENARIO(memory_that_the_child_unmapped_is_not_explained),
	SCENARIO(areas_that_are_not_reserved_are_explained),
	SCENARIO(the_environment_turns_the_handler_off),
	SCENARIO(a_child_that_lacks_nothing_has_no_action),
	SCENARIO(the_program_s_handler_is_called),
	SCENARIO(a_one_shot_handler_is_called_once),
	SCENARIO(an_ignored_signal_stays_ignored),
	SCENARIO(a_handler_that_calls_ours_ends),
	SCENARIO(a_handler_that_calls_ours_stays_in_front),
	SCENARIO(a_handler_that_puts_ours_back_is_called_once),
	SCENARIO(explain_faults_puts_the_handler_in_front_again),
	SCENARIO(a_signal_that_is_sent_arrives),
	SCENARIO(a_signal_that_is_sent_arrives_at_the_last_handler),
	SCENARIO(a_full_pipe_on_stderr_does_not_hang_the_child),
	SCENARIO(another_file_at_descriptor_2_is_left_alone),
	SCENARIO(grandchildren_lack_the_memory_of_both_parents),
	SCENARIO(long_lines_of_children_keep_little),
	SCENARIO(one_thread_reports_the_fault),
	SCENARIO(vfork_and_clone_children_die_for_themselves),
	SCENARIO(a_raw_clone_may_call_explain_faults),
	SCENARIO(a_stack_that_overflows_dies_as_it_would),
	SCENARIO(a_program_that_survives_goes_on),
	SCENARIO(a_refused_sigaction_does_no_harm),
	SCENARIO(the_faulting_area_is_found_among_many),
};

int main(int argc, char **argv)
{
	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
