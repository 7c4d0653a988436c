/* SPDX-License-Identifier: BSD-3-Clause */
#define _GNU_SOURCE /* secure_getenv(), dladdr() */
#include "witness.h"
#include "engine.h"
#include "intercept.h"
#include "json.h"
#include "kernel.h"
#include "object.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#ifdef __GLIBC__
#include <execinfo.h>
#else
/* musl has none: that somebody forked is told there, and not who. */
static int backtrace(void **frames, int size)
{
	(void)frames, (void)size;
	return 0;
}
#endif

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define CALLERS 64
#define FRAMES 16
#define STDERR 2
/* Room for strings of which every byte is escaped. What is not touched costs nothing. */
#define REPORT_BYTES (2 * (RF_LIBRARIES + CALLERS) * 6 * RF_JSON_STRING)

struct caller {
	uintptr_t address;
	uint64_t count;
};

static struct {
	bool on, keeps_devices, traces;
	char path[4096], rank[64], failure[384];
	uint64_t handler_ns, handler_max_ns;
	uint64_t absent_bytes, absent_last_bytes;
	struct caller callers[CALLERS];
	struct {
		uintptr_t start, end;
	} within[2];	/* this library and libc */
	size_t within_count;
} witness;

/* ---- As it begins ---- */

static bool is_set(const char *name)
{
	const char *value = secure_getenv(name);

	return value && *value && strcmp(value, "0") != 0;
}

static void copy_variable(char *to, size_t nbytes, const char *name)
{
	const char *value = secure_getenv(name);
	size_t length = value ? strlen(value) : 0;

	if (length < nbytes)
		memcpy(to, value ? value : "", length + 1);
}

static const char *describe(const struct rf_error *error)
{
	switch (error->cause) {
	case RF_CAUSE_ENVIRONMENT:
		return "a variable means nothing";
	case RF_CAUSE_UNTRUSTED:
		return "lazy mode is not for this kernel, whose copying at fork is not trusted";
	case RF_CAUSE_OTHER_ENGINE:
		return "another copy of rdmafork runs here";
	default:
		return "no memory for its tables";
	}
}

/* Told once, where somebody looks: nothing is protected by the engine. */
static void tell_failure(const struct rf_error *error)
{
	struct rf_json json;

	rf_json_begin(&json, witness.failure, sizeof(witness.failure) - 1);
	rf_json_raw(&json, "rdmafork: not started: ");
	rf_json_raw(&json, describe(error));
	rf_json_raw(&json, *error->text ? ": " : "");
	rf_json_raw(&json, error->text);
	rf_json_raw(&json, "\n");
	(void)rf_sys_write(STDERR, witness.failure, json.used);
	witness.failure[json.used - 1] = '\0';
}

static int note_object(struct dl_phdr_info *info, size_t size, void *unused)
{
	const uintptr_t here = (uintptr_t)note_object, libc = (uintptr_t)secure_getenv;
	struct rf_object object;

	(void)size, (void)unused;
	if (!rf_object_read(&object, info) || witness.within_count == COUNT_OF(witness.within))
		return 0;
	if ((object.start <= here && here < object.end) ||
	    (object.start <= libc && libc < object.end)) {
		witness.within[witness.within_count].start = object.start;
		witness.within[witness.within_count++].end = object.end;
	}
	return 0;
}

/* What takes the loader's locks, or memory, is not left to the fork handler. */
static void prepare_to_trace(void)
{
	void *frame;

	dl_iterate_phdr(note_object, NULL);
	(void)backtrace(&frame, 1);
}

void rf_witness_begin(void)
{
	struct rf_error error = { .cause = RF_CAUSE_NONE };

	if (!is_set("RDMAFORK_EXEC"))
		return;
	witness.on = true;
	witness.keeps_devices = is_set("RDMAFORK_KEEP_DEVICES");
	witness.traces = is_set("RDMAFORK_TRACE_FORKS");
	copy_variable(witness.path, sizeof(witness.path), "RDMAFORK_REPORT");
	copy_variable(witness.rank, sizeof(witness.rank), "RDMAFORK_RANK");
	if (witness.traces)
		prepare_to_trace();
	if (rf_fork_init(RF_MODE_AUTO, &error) < 0)
		tell_failure(&error);
	else
		rf_intercept_begin();
}

bool rf_witness_omits_devices(void)
{
	return witness.on && !witness.keeps_devices && rf_intercept_any();
}

/* ---- At a fork ---- */

static bool is_within(uintptr_t address)
{
	size_t i;

	for (i = 0; i < witness.within_count; i++)
		if (witness.within[i].start <= address && address < witness.within[i].end)
			return true;
	return false;
}

static void count_caller(uintptr_t address)
{
	size_t i;

	for (i = 0; i < CALLERS; i++) {
		struct caller *caller = &witness.callers[i];

		if (caller->address && caller->address != address)
			continue;
		caller->address = address;
		caller->count++;
		return;
	}
}

/* Whoever called into libc, where fork(), or daemon(), calls the handler here. */
static void trace(void)
{
	void *frames[FRAMES];
	int i, count = backtrace(frames, FRAMES);

	for (i = 1; i < count; i++) {
		if (is_within((uintptr_t)frames[i]))
			continue;
		count_caller((uintptr_t)frames[i]);
		return;
	}
}

void rf_witness_fork(uint64_t since)
{
	const struct rf_engine *engine = &rf_engine;
	uint64_t ns;

	if (rf_likely(!witness.on))
		return;
	witness.absent_last_bytes = engine->advisor.ranges.marked_bytes;
	witness.absent_bytes += witness.absent_last_bytes;
	ns = rf_sys_now() - since;
	witness.handler_ns += ns;
	witness.handler_max_ns = ns > witness.handler_max_ns ? ns : witness.handler_max_ns;
	if (witness.traces)
		trace();
}

void rf_witness_clear(void)
{
	witness.handler_ns = 0;
	witness.handler_max_ns = 0;
	witness.absent_bytes = 0;
	witness.absent_last_bytes = 0;
	memset(witness.callers, 0, sizeof(witness.callers));
}

/* ---- As it ends ---- */

static void put_process(struct rf_json *json)
{
	char host[65];

	rf_sys_host(host, sizeof(host));
	rf_json_number(json, "rdmafork", RF_ABI);
	rf_json_number(json, "pid", (uint64_t)rf_sys_pid());
	rf_json_number(json, "ppid", (uint64_t)rf_sys_ppid());
	rf_json_string(json, "host", host);
	rf_json_string(json, "rank", *witness.rank ? witness.rank : NULL);
	rf_json_string(json, "program", program_invocation_name);
}

static void put_kernel(struct rf_json *json)
{
	struct rf_kernel kernel;

	rf_kernel_info(&kernel);
	rf_json_open(json, "kernel", '{');
	rf_json_string(json, "release", kernel.release);
	rf_json_number(json, "copy_on_fork", kernel.copy_on_fork);
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
	rf_json_number(json, "total", witness.handler_ns);
	rf_json_number(json, "max", witness.handler_max_ns);
	rf_json_close(json, '}');
	rf_json_open(json, "absent_bytes", '{');
	rf_json_number(json, "total", witness.absent_bytes);
	rf_json_number(json, "last", witness.absent_last_bytes);
	rf_json_close(json, '}');
	rf_json_number(json, "left_bytes", stats.left_bytes);
	rf_json_number(json, "unbalanced", stats.ibv_unbalanced);
	return known;
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
		rf_json_string(json, "why", rf_library_why_text(libraries[i].why));
		rf_json_close(json, '}');
	}
	rf_json_close(json, ']');
}

static void put_callers(struct rf_json *json)
{
	size_t i;

	rf_json_open(json, "fork_callers", '[');
	for (i = 0; i < CALLERS && witness.callers[i].count; i++) {
		const struct caller *caller = &witness.callers[i];
		Dl_info where = { .dli_fname = NULL };

		(void)dladdr((void *)(caller->address - 1), &where);
		rf_json_open(json, NULL, '{');
		rf_json_string(json, "symbol", where.dli_sname);
		rf_json_string(json, "object", where.dli_fname);
		rf_json_number(json, "count", caller->count);
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
	rf_json_open(json, "errors", '[');
	if (*witness.failure)
		rf_json_string(json, NULL, witness.failure);
	if (!known)
		rf_json_string(json, NULL, "rdmafork: ended inside the engine: not all is counted");
	rf_json_close(json, ']');
	put_callers(json);
	rf_json_close(json, '}');
	rf_json_raw(json, "\n");
}

/* A link may be anybody's in a directory that is everybody's; not so /dev/stderr or /dev/fd/7. */
static int open_report(void)
{
	const bool is_stream = !strncmp(witness.path, "/dev/std", 8) ||
			       !strncmp(witness.path, "/dev/fd/", 8) ||
			       !strncmp(witness.path, "/proc/", 6);

	return rf_sys_open(witness.path, is_stream ? RF_APPEND : RF_CREATE);
}

__attribute__((destructor)) static void report(void)
{
	struct rf_json json;
	void *memory;
	int fd = STDERR;

	if (!*witness.path || rf_sys_map(REPORT_BYTES, &memory) < 0)
		return;
	rf_json_begin(&json, memory, REPORT_BYTES);
	put_line(&json);
	if (strcmp(witness.path, "-") != 0)
		fd = open_report();
	/* One call: lines of many processes do not mix. */
	if (fd >= 0 && !json.full)
		(void)rf_sys_write(fd, memory, json.used);
	if (fd > STDERR)
		rf_sys_close(fd);
	rf_sys_unmap(memory, REPORT_BYTES);
}
