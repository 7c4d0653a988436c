/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A program under "rdmafork exec", whose engine starts by the environment and tells at the
 * end what it did: every system call of either fails, with every errno, and the program is
 * none the worse for it. It is protected by the engine or by libibverbs, and its report is
 * a whole line or none.
 */
#define _GNU_SOURCE /* program_invocation_name */
#include "check.h"
#include "fork.h"
#include "preload/exec.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>

#define STANDIN "build/ctest/standin-got.so"
#define DONE 2 /* exit status: fewer calls were made */

static const int errors[] = CHECK_ERRORS;

static char report[] = "/tmp/rdmafork-report-XXXXXX";

/* The system call that fails as the program exits. */
static unsigned long last_nth;
static int last_error;

/* Run by exit() before the report, as the library's destructor is older. */
static void fail_what_follows(void)
{
	inject(last_nth, last_error);
}

static int call(void *handle, const char *name, void *memory, size_t nbytes)
{
	int (*function)(void *, size_t);

	*(void **)&function = dlsym(handle, name);
	CHECK(function, "%s", dlerror());
	return function(memory, nbytes);
}

/* A program's calls of libibverbs. */
static void work(void)
{
	void *handle = dlopen(STANDIN, RTLD_NOW | RTLD_LOCAL);
	char *memory = check_map(4);

	CHECK(handle, "%s", dlerror());
	/* Where the engine runs, a fork has it look; where not, libibverbs is asked to protect. */
	if (rf_mode() == RF_MODE_NONE)
		CHECK(call(handle, "ibv_fork_init", NULL, 0) == 0);
	else
		check_fork();
	CHECK(call(handle, "standin_register", memory + check_page, 2 * check_page) == 0);
	CHECK(check_marked(memory, 4) == 2);
	check_fork();
	CHECK(call(handle, "standin_release", memory + check_page, 2 * check_page) == 0);
	CHECK(check_marked(memory, 4) == 0);
}

__attribute__((noreturn)) static void run_once(unsigned long nth, int error, bool at_the_end)
{
	unsigned long faults = inject_faults();
	int null = open("/dev/null", O_WRONLY);

	/* Where it says that it was not started. */
	CHECK(null >= 0 && dup2(null, STDERR_FILENO) == STDERR_FILENO);
	if (!at_the_end)
		inject(nth, error);
	rf_exec_begin();
	inject(0, 0);
	faults = inject_faults() - faults;
	CHECK(rf_mode() != RF_MODE_NONE || faults);
	work();
	if (at_the_end) {
		last_nth = nth;
		last_error = error;
		CHECK(atexit(fail_what_follows) == 0);
	}
	exit(faults || at_the_end ? 0 : DONE);
}

/* The report so far, which is taken away. */
static size_t take_report(char *text, size_t nbytes)
{
	int fd = open(report, O_RDWR);
	ssize_t length = read(fd, text, nbytes - 1);

	CHECK(length >= 0 && ftruncate(fd, 0) == 0);
	close(fd);
	text[length] = '\0';
	return (size_t)length;
}

static void ask_for_a_report(void)
{
	int fd = mkstemp(report);

	CHECK(fd >= 0);
	close(fd);
	CHECK(setenv("RDMAFORK_EXEC", "1", 1) == 0);
	CHECK(setenv("RDMAFORK_REPORT", report, 1) == 0);
}

static void check_line(const char *text, size_t length)
{
	CHECK(length > 2 && text[0] == '{' && !strcmp(text + length - 2, "}\n"), "%s", text);
	CHECK(strchr(text, '\n') == text + length - 1, "%s", text);
}

static void fail_each(bool at_the_end)
{
	static char text[1 << 16];
	unsigned long nth, faults = 0, none = 0;
	size_t i, length;
	int status;

	ask_for_a_report();
	for (i = 0; i < COUNT_OF(errors); i++) {
		/* As it ends it makes fewer calls than these. */
		for (nth = 1, status = 0; status != DONE && nth < (at_the_end ? 12 : 100); nth++) {
			pid_t pid = fork();

			CHECK(pid >= 0);
			if (!pid)
				run_once(nth, errors[i], at_the_end);
			status = check_wait(pid);
			CHECK(status == 0 || status == DONE, "call %lu with %s: %d", nth,
			      strerror(errors[i]), status);
			length = take_report(text, sizeof(text));
			if (length)
				check_line(text, length);
			else
				none++;
			CHECK(length || at_the_end, "no report");
		}
		faults += nth - 1;
	}
	unlink(report);
	CHECK(status == DONE || at_the_end);
	CHECK(none || !at_the_end, "every report was written");
	printf("        %lu calls failed, %lu without a report\n", faults, none);
	fflush(stdout);
}

static void a_failure_at_the_start_stops_no_program(void)
{
	fail_each(false);
}

static void a_failure_at_the_end_leaves_a_whole_report_or_none(void)
{
	fail_each(true);
}

__attribute__((format(printf, 2, 3))) static void expect(const char *text, const char *format, ...)
{
	char expected[512];
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(expected, sizeof(expected), format, arguments);
	va_end(arguments);
	CHECK(strstr(text, expected), "no %s in %s", expected, text);
}

/* One range stays registered at the last fork; one that was never registered is released. */
static void work_and_leave_a_range(void)
{
	void *handle;
	char *memory;

	rf_exec_begin();
	work();
	handle = dlopen(STANDIN, RTLD_NOW | RTLD_LOCAL);
	memory = check_map(4);
	CHECK(call(handle, "standin_release", memory, check_page) == 0);
	CHECK(call(handle, "standin_register", memory, 3 * check_page) == 0);
	check_fork();
	exit(0);
}

static void a_report_tells_forks_and_registrations(void)
{
	static char text[1 << 16];
	unsigned long total, most;
	const char *handler;
	pid_t pid;

	ask_for_a_report();
	CHECK(setenv("RDMAFORK_RANK", "7", 1) == 0);
	pid = fork();
	CHECK(pid >= 0);
	if (!pid)
		work_and_leave_a_range();
	CHECK(check_wait(pid) == 0);
	check_line(text, take_report(text, sizeof(text)));
	unlink(report);
	expect(text, "{\"rdmafork\": %d, \"pid\": %d, \"ppid\": %d, \"exec_pid\": null, "
		     "\"forked\": 1, \"host\": \"",
	       RF_ABI, (int)pid, (int)getpid());
	expect(text, "\"rank\": \"7\", \"program\": \"%s\", ", program_invocation_name);
	expect(text, "\"registrations\": {\"total\": 2, \"live\": 1}, ");
	expect(text, "\"ranges\": {\"calls\": 4, \"live\": 1}, \"forks\": 3, ");
	expect(text, "\"marked_bytes\": {\"total\": %zu, \"last\": %zu}, ", 5 * check_page,
	       3 * check_page);
	expect(text, "\"unmarked_bytes\": 0, \"unbalanced\": 1, ");
	expect(text,
	       "{\"path\": \"%s\", \"how\": \"rewritten\", \"why\": null, \"protects\": 0}",
	       STANDIN);
	expect(text, "\"device_without_libibverbs\": 0, \"errors\": [], ");
	handler = strstr(text, "\"handler_ns\": ");
	CHECK(handler && sscanf(handler, "\"handler_ns\": {\"total\": %lu, \"max\": %lu}, ", &total,
				&most) == 2,
	      "%s", text);
	CHECK(total > most && 3 * most >= total, "%lu, %lu", total, most);
}

/* exit() in a signal handler that has interrupted the engine. */
static void a_program_that_ends_inside_the_engine_says_so(void)
{
	static char text[1 << 16];
	size_t length;
	pid_t pid;

	ask_for_a_report();
	pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		rf_exec_begin();
		CHECK(rf_enter(0) == 0);
		exit(0);
	}
	CHECK(check_wait(pid) == 0);
	length = take_report(text, sizeof(text));
	unlink(report);
	check_line(text, length);
	CHECK(strstr(text, "\"errors\": [\"") && strstr(text, "during a call of"), "%s", text);
	CHECK(strstr(text, "\"unmarked_bytes\": 0,"), "%s", text);
}

/* The program's own signal, blocked and waiting: the write's may not take it along. */
static void a_failed_write_leaves_a_pending_signal(void)
{
	int ends[2], everybody;
	sigset_t blocked, pending;

	signal(SIGPIPE, SIG_DFL);
	CHECK(pipe(ends) == 0 && close(ends[0]) == 0);
	sigemptyset(&blocked);
	sigaddset(&blocked, SIGPIPE);
	CHECK(rf_sys_write(ends[1], "x", 1) == -EPIPE);
	CHECK(sigprocmask(SIG_BLOCK, &blocked, NULL) == 0);
	CHECK(rf_sys_write(ends[1], "x", 1) == -EPIPE);
	CHECK(sigpending(&pending) == 0 && !sigismember(&pending, SIGPIPE));
	for (everybody = 0; everybody < 2; everybody++) {
		CHECK((everybody ? kill(getpid(), SIGPIPE) : raise(SIGPIPE)) == 0);
		CHECK(rf_sys_write(ends[1], "x", 1) == -EPIPE);
		CHECK(sigpending(&pending) == 0 && sigismember(&pending, SIGPIPE));
		CHECK(sigwaitinfo(&blocked, NULL) == SIGPIPE);
		while (sigpending(&pending) == 0 && sigismember(&pending, SIGPIPE))
			CHECK(sigwaitinfo(&blocked, NULL) == SIGPIPE);
	}
	close(ends[1]);
}

int main(int argc, char **argv)
{
	const struct check_scenario scenarios[] = {
		SCENARIO(a_failure_at_the_start_stops_no_program),
		SCENARIO(a_failure_at_the_end_leaves_a_whole_report_or_none),
		SCENARIO(a_report_tells_forks_and_registrations),
		SCENARIO(a_program_that_ends_inside_the_engine_says_so),
		SCENARIO(a_failed_write_leaves_a_pending_signal),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
