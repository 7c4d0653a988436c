/* SPDX-License-Identifier: BSD-3-Clause */
#define _GNU_SOURCE /* secure_getenv() */
#include "exit_report.h"
#include "devices.h"
#include "fork.h"
#include "fork_callers.h"
#include "intercept.h"
#include "json.h"
#include "pinned.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STDERR 2
#define WARNINGS 4	/* different ones that are told */
/* Room for strings of which every byte is escaped. Untouched pages cost nothing. */
#define REPORT_BYTES (2 * (RF_LIBRARIES + RF_FORK_CALLERS) * 6 * RF_JSON_STRING)

static struct {
	bool on;
	/* Each taken by one store, then written by the thread that made it. */
	uint32_t warnings;
	struct rf_file error_output;
	char path[4096], rank[64], exec_pid[16], failure[64 + RF_STRERROR_SIZE], inherited[192];
	pid_t pid;
	pid_t ppid;		/* who forked: getppid() is init's once that process has ended */
	pid_t opener;		/* forked with a device open; 0: none, or it was told */
	/* Of this process alone: a child begins anew. */
	struct {
		uint64_t handler_ns, handler_max_ns;
		uint64_t marked_bytes, marked_last_bytes;
		uint64_t elsewhere_bytes; /* pinned, and not registered here: the most at a time */
		uint64_t unread;	/* looks at which /proc could not be read */
		bool device_without_libibverbs;	/* one is open, and no libibverbs was found */
	} process;
	struct warning {
		uint32_t written;
		char text[sizeof(((struct rf_error *)0)->text)];
		char line[64 + RF_STRERROR_SIZE];
	} warning[WARNINGS];
} report;

/* ---- As it begins ---- */

static void copy_variable(char *to, size_t nbytes, const char *name)
{
	const char *value = secure_getenv(name);
	size_t length = value ? strlen(value) : 0;

	if (length < nbytes)
		memcpy(to, value ? value : "", length + 1);
}

void rf_exit_report_begin(bool on)
{
	(void)rf_sys_identify(STDERR, &report.error_output);
	if (!on)
		return;
	report.on = true;
	report.pid = rf_sys_pid();
	report.ppid = rf_sys_ppid();
	copy_variable(report.path, sizeof(report.path), "RDMAFORK_REPORT");
	copy_variable(report.rank, sizeof(report.rank), "RDMAFORK_RANK");
	copy_variable(report.exec_pid, sizeof(report.exec_pid), "RDMAFORK_PID");
}

/* Say it on stderr, and keep it in @line for the report. */
__attribute__((format(printf, 3, 4))) static void tell(char *line, size_t nbytes,
						       const char *format, ...)
{
	va_list values;

	va_start(values, format);
	vsnprintf(line, nbytes, format, values);
	va_end(values);
	nbytes = strlen(line);
	line[nbytes] = '\n';
	if (rf_sys_is_still(STDERR, &report.error_output))
		(void)rf_sys_write(STDERR, line, nbytes + 1);
	line[nbytes] = '\0';
}

/* Nothing is protected by the engine. */
void rf_exit_report_failure(int rc, const struct rf_error *error)
{
	char text[RF_STRERROR_SIZE];

	tell(report.failure, sizeof(report.failure), "rdmafork: not started: %s",
	     rf_strerror(rc, error, text, sizeof(text)));
}

/* ---- As memory is registered ---- */

static void write_warning(struct warning *warning, const struct rf_error *error)
{
	char text[RF_STRERROR_SIZE];

	memcpy(warning->text, error->text, sizeof(warning->text));
	tell(warning->line, sizeof(warning->line), "rdmafork: pid %d: %s", (int)rf_sys_pid(),
	     rf_strerror(1, error, text, sizeof(text)));
	__atomic_store_n(&warning->written, 1, __ATOMIC_RELEASE);
}

void rf_exit_report_shared_page(const struct rf_error *error)
{
	uint32_t i, count = __atomic_load_n(&report.warnings, __ATOMIC_RELAXED);

	/* While one is being written no other is told: it will be registered again. */
	do {
		for (i = 0; i < count; i++)
			if (!__atomic_load_n(&report.warning[i].written, __ATOMIC_ACQUIRE) ||
			    !strcmp(report.warning[i].text, error->text))
				return;
		if (count == WARNINGS)
			return;
	} while (!__atomic_compare_exchange_n(&report.warnings, &count, count + 1, false,
					      __ATOMIC_RELAXED, __ATOMIC_RELAXED));
	write_warning(&report.warning[count], error);
}

void rf_exit_report_device_gone(void)
{
	report.opener = report.ppid;
}

/* A child that only cleans up registers nothing, so it is not told. */
void rf_exit_report_registers(void)
{
	pid_t opener;

	if (rf_likely(!__atomic_load_n(&report.opener, __ATOMIC_RELAXED)))
		return;
	opener = __atomic_exchange_n(&report.opener, 0, __ATOMIC_RELAXED);
	if (opener && !rf_devices_are_open())
		tell(report.inherited, sizeof(report.inherited),
		     "rdmafork: pid %d uses a device opened before fork() in pid %d; "
		     "open it in the child, or use --keep-devices",
		     (int)rf_sys_pid(), (int)opener);
}

static void put_warnings(struct rf_json *json)
{
	uint32_t i;

	for (i = 0; i < WARNINGS; i++)
		if (__atomic_load_n(&report.warning[i].written, __ATOMIC_ACQUIRE))
			rf_json_string(json, NULL, report.warning[i].line);
}

/* ---- At a fork ---- */

/*
 * Bytes that are pinned and not registered here; at least so many, as not all that is
 * registered is pinned. The engine is entered: a caller registers before it pins, and releases
 * after, so no more known memory can be pinned than is registered.
 */
static void look_at_pins(void)
{
	int64_t pinned = rf_pinned_bytes();
	uint64_t registered = rf_engine.registry.page_bytes, elsewhere;

	report.process.unread += pinned < 0;
	elsewhere = pinned > 0 && (uint64_t)pinned > registered ? (uint64_t)pinned - registered
								: 0;
	if (elsewhere > report.process.elsewhere_bytes)
		report.process.elsewhere_bytes = elsewhere;
	/* The descriptors are many, and listed only where something is amiss, or at the end. */
	if (elsewhere && !report.process.device_without_libibverbs && !rf_intercept_any())
		report.process.device_without_libibverbs = rf_devices_are_open();
}

void rf_exit_report_fork(uint64_t began)
{
	uint64_t ns;

	if (rf_likely(!report.on))
		return;
	report.process.marked_last_bytes = rf_engine.tracker.ranges.marked_bytes;
	report.process.marked_bytes += report.process.marked_last_bytes;
	ns = rf_sys_now() - began;
	report.process.handler_ns += ns;
	if (ns > report.process.handler_max_ns)
		report.process.handler_max_ns = ns;
	/* After the clock is read: some 20 us are the report's, and not the engine's. */
	if (*report.path)
		look_at_pins();
	rf_fork_callers_count();
}

void rf_exit_report_child(void)
{
	if (!report.on)
		return;
	report.ppid = report.pid;
	report.pid = rf_sys_pid();
}

void rf_exit_report_clear(void)
{
	/* Unused pages are not written to: each costs a child a page fault. */
	if (!report.on && !report.warnings)
		return;
	memset(&report.process, 0, sizeof(report.process));
	report.warnings = 0;
	*report.inherited = '\0';
	memset(report.warning, 0, sizeof(report.warning));
	rf_fork_callers_clear();
}

/* ---- As it ends ---- */

static void put_process(struct rf_json *json)
{
	struct utsname name;

	rf_sys_uname(&name);
	rf_json_number(json, "rdmafork", RF_ABI);
	rf_json_number(json, "pid", (uint64_t)rf_sys_pid());
	rf_json_number(json, "ppid", (uint64_t)report.ppid);
	rf_json_string(json, "exec_pid", *report.exec_pid ? report.exec_pid : NULL);
	rf_json_number(json, "forked", rf_engine.generation > 1);
	rf_json_string(json, "host", name.nodename);
	rf_json_string(json, "rank", *report.rank ? report.rank : NULL);
	rf_json_string(json, "program", program_invocation_name);
}

static void put_kernel(struct rf_json *json)
{
	struct rf_kernel kernel;

	rf_kernel_info(&kernel);
	rf_json_open(json, "kernel", '{');
	rf_json_string(json, "release", kernel.release);
	rf_json_number(json, "copy_trusted", kernel.copy_trusted);
	rf_json_close(json, '}');
}

/* False in a signal handler that has interrupted the engine, and calls exit(): most are 0. */
static bool put_numbers(struct rf_json *json)
{
	const struct rf_registry *registry = &rf_engine.registry;
	struct rf_stats stats = { 0 };
	bool known = rf_stats(&stats) >= 0;

	rf_json_open(json, "registrations", '{');
	rf_json_number(json, "total", registry->last_serial - registry->inherited);
	rf_json_number(json, "live", stats.registrations);
	rf_json_close(json, '}');
	rf_json_open(json, "ranges", '{');
	rf_json_number(json, "calls", stats.ibv_calls);
	rf_json_number(json, "live", stats.ibv_ranges);
	rf_json_close(json, '}');
	rf_json_number(json, "forks", stats.forks);
	rf_json_open(json, "handler_ns", '{');
	rf_json_number(json, "total", report.process.handler_ns);
	rf_json_number(json, "max", report.process.handler_max_ns);
	rf_json_close(json, '}');
	rf_json_open(json, "marked_bytes", '{');
	rf_json_number(json, "total", report.process.marked_bytes);
	rf_json_number(json, "last", report.process.marked_last_bytes);
	rf_json_close(json, '}');
	rf_json_number(json, "unmarked_bytes", stats.unmarked_bytes);
	rf_json_number(json, "unbalanced", stats.ibv_unbalanced);
	return known;
}

static void put_pins(struct rf_json *json)
{
	if (rf_enter(0) >= 0) {
		look_at_pins();
		rf_leave();
	}
	if (!rf_intercept_any())
		report.process.device_without_libibverbs |= rf_devices_are_open();
	rf_json_open(json, "pinned_elsewhere", '{');
	rf_json_number(json, "max", report.process.elsewhere_bytes);
	rf_json_number(json, "unread", report.process.unread);
	rf_json_close(json, '}');
	rf_json_number(json, "device_without_libibverbs", report.process.device_without_libibverbs);
}

static void put_libraries(struct rf_json *json)
{
	static struct rf_library libraries[RF_LIBRARIES];
	ssize_t i, count = rf_libraries(libraries, RF_LIBRARIES);

	rf_json_open(json, "libraries", '[');
	for (i = 0; i < count; i++) {
		rf_json_open(json, NULL, '{');
		rf_json_string(json, "path", libraries[i].path);
		rf_json_string(json, "how", rf_library_how_name(libraries[i].how));
		rf_json_string(json, "why", libraries[i].why);
		rf_json_number(json, "protects", libraries[i].protects);
		rf_json_close(json, '}');
	}
	rf_json_close(json, ']');
}

static void put_line(struct rf_json *json)
{
	static const char *const modes[] = { NULL, NULL, "lazy", "eager" };
	bool known;

	rf_json_open(json, NULL, '{');
	put_process(json);
	rf_json_string(json, "mode", modes[rf_mode()]);
	put_kernel(json);
	known = put_numbers(json);
	put_libraries(json);
	/* After put_libraries(), which looks for libraries. */
	put_pins(json);
	rf_json_open(json, "errors", '[');
	if (*report.failure)
		rf_json_string(json, NULL, report.failure);
	if (*report.inherited)
		rf_json_string(json, NULL, report.inherited);
	put_warnings(json);
	if (!known)
		rf_json_string(json, NULL,
			       "rdmafork: the process ended during a call of rdmafork, so the "
			       "counts are incomplete");
	rf_json_close(json, ']');
	rf_fork_callers_put(json, "fork_callers");
	rf_json_close(json, '}');
	rf_json_raw(json, "\n");
}

/* A link may be anybody's in a directory that is everybody's; not so /dev/stderr or /dev/fd/7. */
static int open_report(void)
{
	const bool is_stream = !strncmp(report.path, "/dev/std", 8) ||
			       !strncmp(report.path, "/dev/fd/", 8) ||
			       !strncmp(report.path, "/proc/", 6);

	if (!strcmp(report.path, "-"))
		return rf_sys_is_still(STDERR, &report.error_output) ? STDERR : -EBADF;
	return rf_sys_open(report.path, is_stream ? RF_APPEND : RF_CREATE);
}

/* 0, or why it is not there, or not all of it. */
static int append_line(void)
{
	struct rf_json json;
	void *memory;
	int fd, rc = rf_sys_map(REPORT_BYTES, &memory);
	size_t at;

	if (rc < 0)
		return rc;
	rf_json_begin(&json, memory, REPORT_BYTES);
	put_line(&json);
	fd = rc = json.full ? -ENOBUFS : open_report();
	/* Mostly one call: lines of many processes do not mix. */
	for (at = 0; rc >= 0 && at < json.used; at += (size_t)rc)
		rc = (int)rf_sys_write(fd, json.text + at, json.used - at);
	if (fd > STDERR)
		rf_sys_close(fd);
	rf_sys_unmap(memory, REPORT_BYTES);
	return rc < 0 ? rc : 0;
}

/* After chroot() or setuid() the file may be out of reach. */
__attribute__((destructor)) static void write_line(void)
{
	char line[sizeof(report.path) + 128];
	int rc = *report.path ? append_line() : 0;

	if (rc < 0)
		tell(line, sizeof(line), "rdmafork: pid %d: report %s cannot be written: %s",
		     (int)rf_sys_pid(), report.path, strerror(-rc));
}
