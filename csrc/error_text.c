/* SPDX-License-Identifier: BSD-3-Clause */
/* Without _GNU_SOURCE: strerror_r() is then the one of POSIX with every libc. */
#include "error_text.h"
#include "kernel.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

struct line {
	char *at;
	size_t room;
};

__attribute__((format(printf, 2, 3))) static void put(struct line *line, const char *format, ...)
{
	va_list values;
	size_t wanted;
	int rc;

	va_start(values, format);
	rc = vsnprintf(line->at, line->room, format, values);
	va_end(values);
	wanted = rc < 0 ? 0 : (size_t)rc;
	/* The final 0 stays in the room. */
	if (wanted >= line->room)
		wanted = line->room - 1;
	line->at += wanted;
	line->room -= wanted;
}

static void put_errno(struct line *line, int rc)
{
	char said[128];

	if (strerror_r(-rc, said, sizeof(said)))
		put(line, "error %d", -rc);
	else
		put(line, "%s", said);
}

static void put_registration(struct line *line, const struct rf_error *error)
{
	if (error->nbytes)
		put(line, "cannot register 0x%zx-0x%zx (%zu bytes): ", (size_t)error->address,
		    (size_t)error->address + error->nbytes, error->nbytes);
}

static void put_refused(struct line *line, int rc, const struct rf_error *error)
{
	put(line, "madvise(MADV_DONTFORK) refuses 0x%zx-0x%zx (", (size_t)error->start,
	    (size_t)error->end);
	put_errno(line, rc);
	put(line, "); a sealed or a device's mapping cannot be protected: copy the data to "
		  "ordinary memory, and register that");
}

static void put_no_proc(struct line *line, int rc)
{
	put(line, "its page size is needed and /proc/self/maps cannot be read (");
	put_errno(line, rc);
	put(line, "); mount /proc, or use buffers aligned to huge pages");
}

/* Why the registration of a range failed. */
static void put_range(struct line *line, int rc, const struct rf_error *error)
{
	put_registration(line, error);
	switch (error->cause) {
	case RF_CAUSE_POLICY:
		if (rc == -EINVAL)
			put(line, "on_fork must be one of omit, wipe, keep, not %s", error->text);
		else
			put(line, "on_fork=\"keep\" needs a kernel that loses no pinned pages at "
				  "fork, as Linux 5.19 and later; %s: use \"omit\", or shared "
				  "memory, which children keep everywhere",
			    error->text);
		break;
	case RF_CAUSE_FLAGS:
		put(line, "rf_register() has no flags %s; it takes RF_HELD (0x%x) and "
			  "RF_NOWAIT (0x%x)",
		    error->text, RF_HELD, RF_NOWAIT);
		break;
	case RF_CAUSE_NOT_MAPPED:
		put(line, "nothing is mapped at 0x%zx-0x%zx; register memory before it is freed, "
			  "and only as much as there is",
		    (size_t)error->start,
		    (size_t)error->end);
		break;
	case RF_CAUSE_VMA_LIMIT:
		put(line, "marks would take more than a third of vm.max_map_count (%u), or the "
			  "kernel has no memory for more mappings; raise sysctl vm.max_map_count "
			  "or the control group's memory limit, or register fewer and "
			  "larger buffers",
		    rf_kernel()->max_map_count);
		break;
	case RF_CAUSE_ENGINE_MEMORY:
		put(line, "no memory for rdmafork's own tables; free some, or raise the limit "
			  "(ulimit -v, the control group's)");
		break;
	case RF_CAUSE_REFUSED:
		put_refused(line, rc, error);
		break;
	case RF_CAUSE_NO_PROC:
		put_no_proc(line, rc);
		break;
	default:
		put_errno(line, rc);
	}
}

/* Why rf_fork_init() or rf_intercept() failed. False: for another reason than these. */
static bool put_start(struct line *line, const struct rf_error *error)
{
	switch (error->cause) {
	case RF_CAUSE_UNKNOWN_MODE:
		put(line, "mode must be one of auto, lazy, eager, not %s", error->text);
		return true;
	case RF_CAUSE_LATE:
		put(line, "fork_init() comes too late: memory registered before it is not "
			  "protected; call it before the first registration, or set "
			  "RDMAV_FORK_SAFE=1");
		return true;
	case RF_CAUSE_MODE:
		put(line, "%s already, and a process has one mode; use the same mode everywhere, "
			  "or name none",
		    error->text);
		return true;
	case RF_CAUSE_ENVIRONMENT:
		put(line, "%s in the environment is not valid; RDMAFORK_MODE is auto, lazy or "
			  "eager; RDMAFORK_TRUST_COPYING, RDMAFORK_EXPLAIN_FAULTS and "
			  "RDMAFORK_TRACE_REGISTRATIONS are 0 or 1",
		    error->text);
		return true;
	case RF_CAUSE_UNTRUSTED:
		put(line, "lazy mode needs a kernel that loses no pinned pages at fork, as Linux "
			  "5.19 and later; %s: use eager",
		    error->text);
		return true;
	case RF_CAUSE_OTHER_ENGINE:
		put(line, "another copy of rdmafork runs in this process, %s; two would undo each "
			  "other's marks: load one only",
		    error->text);
		return true;
	case RF_CAUSE_LIBRARY:
		put(line, "the calls of a libibverbs cannot be taken over: %s; run the program "
			  "with rdmafork exec, or intercept (in Python fork_init(intercept=True), "
			  "in C rf_intercept()) before anything calls ibv_fork_init() and without "
			  "RDMAV_FORK_SAFE and IBV_FORK_SAFE, or register the same memory with "
			  "rdmafork too",
		    error->text);
		return true;
	default:
		return false;
	}
}

static void put_text(struct line *line, int rc, const struct rf_error *error)
{
	if (error->cause == RF_CAUSE_SHARED_PAGE)
		put(line, "the %zu bytes registered at 0x%zx share the page 0x%zx with %s, as "
			  "rdmafork.Buffer does",
		    error->nbytes, (size_t)error->address,
		    (size_t)error->start, error->text);
	else if (error->cause == RF_CAUSE_WRAP)
		put(line, "address 0x%zx + %zu bytes is beyond the address space",
		    (size_t)error->address, error->nbytes);
	else if (rc == -EDEADLK)
		put(line, "called by a signal handler that interrupted rdmafork itself; call it "
			  "again when the handler has returned");
	else if (rc == -EINVAL && error->cause == RF_CAUSE_NONE)
		put(line, "unknown flags: rf_release() takes RF_NOWAIT (0x%x) and RF_UNDO (0x%x), "
			  "rf_descriptor_omit() takes RF_MAPPED (0x%x)",
		    RF_NOWAIT, RF_UNDO, RF_MAPPED);
	else if (rc == -ESTALE)
		put(line, "the registration has been released already, or was never made");
	else if (rc == -ECHILD)
		put(line, "the registration belongs to the parent process; register afresh in "
			  "this child");
	else if (!put_start(line, error))
		put_range(line, rc, error);
}

RF_API const char *rf_strerror(int rc, const struct rf_error *error, char *out, size_t size)
{
	static const struct rf_error none = { .cause = RF_CAUSE_NONE };
	struct line line = { out, size };
	int before = errno;

	if (size) {
		*out = '\0';
		put_text(&line, rc, error ? error : &none);
	}
	errno = before;
	return out;
}

void rf_error_untrusted(struct rf_error *error)
{
	struct line line = { error->text, sizeof(error->text) };

	if (rf_kernel_would_trust(false))
		put(&line, "RDMAFORK_TRUST_COPYING=0 is set");
	else
		put(&line, "%s may lose them", rf_kernel()->release);
}
