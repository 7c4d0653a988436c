/* SPDX-License-Identifier: BSD-3-Clause */
#define _GNU_SOURCE /* secure_getenv() */
#include "ibv.h"
#include "exit_report.h"
#include "fork.h"
#include "ibv_ranges.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

int ibv_dontfork_range(void *base, size_t size);
int ibv_dofork_range(void *base, size_t size);
int ibv_fork_init(void);
int ibv_is_fork_initialized(void);

/* enum ibv_fork_status */
#define DISABLED 0
#define ENABLED 1
#define UNNEEDED 2

/* Between rf_enter() and rf_leave(). */
static struct {
	struct rf_ibv_ranges ranges;	/* registered by ibv_dontfork_range() */
	uint64_t calls, unbalanced;
} state;

/* Static storage: no malloc() at its first use, in whatever thread. */
static __thread int own __attribute__((tls_model("initial-exec")));

RF_API void rf_ranges_own(int yes)
{
	own = yes;
}

/* The program did not ask for it, so a failure is not told: then nothing is protected. */
static void start(void)
{
	static bool failed;

	if (rf_likely(rf_mode() != RF_MODE_NONE) || __atomic_load_n(&failed, __ATOMIC_RELAXED))
		return;
	if (rf_fork_init(RF_MODE_AUTO, NULL) < 0)
		__atomic_store_n(&failed, true, __ATOMIC_RELAXED);
}

/* The memory is not held, but a user who asks for lazy by name says that it is. */
static unsigned int flags(void)
{
	static int asked; /* 0 not read, 1 yes, -1 no */
	int lazy = __atomic_load_n(&asked, __ATOMIC_RELAXED);
	const char *mode;

	if (!lazy) {
		mode = secure_getenv("RDMAFORK_MODE");
		lazy = mode && !strcmp(mode, "lazy") ? 1 : -1;
		__atomic_store_n(&asked, lazy, __ATOMIC_RELAXED);
	}
	return lazy > 0 && rf_mode() == RF_MODE_LAZY ? RF_HELD : 0;
}

static int register_range(uintptr_t begin, uintptr_t end, struct rf_ibv_range *entry)
{
	struct rf_error error;
	int rc;

	entry->start = begin;
	entry->end = end;
	rc = rf_register((const void *)begin, end - begin, flags() | RF_FROM_LIBIBVERBS, RF_OMIT,
			 &entry->handle, &error);
	if (rf_unlikely(rc >= 0 && error.cause == RF_CAUSE_SHARED_PAGE))
		rf_exit_report_shared_page(&error);
	return rc;
}

static int remember(const struct rf_ibv_range *entry)
{
	int rc = rf_enter(0);

	if (rc < 0)
		return rc;
	state.calls++;
	rc = rf_ibv_ranges_reserve(&state.ranges);
	if (rc >= 0)
		rf_ibv_ranges_add(&state.ranges, entry);
	rf_leave();
	return rc;
}

static int dontfork(uintptr_t begin, size_t nbytes)
{
	struct rf_ibv_range entry;
	int rc;

	start();
	rf_exit_report_registers();
	rc = register_range(begin, begin + nbytes, &entry);
	if (rc < 0)
		return rc;
	rc = remember(&entry);
	if (rc < 0)
		(void)rf_release(entry.handle, 0);
	return rc;
}

/* A range that was not registered as such is one release too many. */
static int dofork(uintptr_t begin, size_t nbytes)
{
	struct rf_handle handle;
	bool found;
	int rc = rf_enter(0);

	if (rc < 0)
		return rc;
	state.calls++;
	found = rf_ibv_ranges_take(&state.ranges, begin, begin + nbytes, &handle);
	state.unbalanced += !found;
	rf_leave();
	return rf_likely(found) ? rf_release(handle, 0) : 0;
}

static int done(int rc)
{
	if (rc >= 0)
		return 0;
	errno = -rc;
	return -1;
}

/* Nothing to do: no bytes, or bytes that count here already. */
static bool is_nothing(const void *base, size_t size)
{
	return rf_intercept_is_trial() || !base || !size || own;
}

RF_API int ibv_dontfork_range(void *base, size_t size)
{
	return is_nothing(base, size) ? 0 : done(dontfork((uintptr_t)base, size));
}

RF_API int ibv_dofork_range(void *base, size_t size)
{
	return is_nothing(base, size) ? 0 : done(dofork((uintptr_t)base, size));
}

static const struct rf_ibv_functions functions = {
	.dofork_range = ibv_dofork_range,
	.dontfork_range = ibv_dontfork_range,
	.fork_init = ibv_fork_init,
	.is_fork_initialized = ibv_is_fork_initialized,
};

RF_API int ibv_fork_init(void)
{
	int rc = rf_fork_init(RF_MODE_AUTO, NULL);

	return rc < 0 ? -rc : rf_intercept_forward(&functions);
}

/* UNNEEDED keeps other libraries from measures that slow a fork down or make them abort. */
RF_API int ibv_is_fork_initialized(void)
{
	struct rf_kernel kernel;

	rf_intercept_look(false);
	rf_kernel_info(&kernel);
	if (kernel.copy_trusted)
		return UNNEEDED;
	return rf_mode() == RF_MODE_NONE ? DISABLED : ENABLED;
}

RF_API int rf_intercept(struct rf_error *error)
{
	struct rf_error unasked;

	return rf_intercept_all(&functions, error ? error : &unasked);
}

void rf_ibv_serve_all(void)
{
	rf_intercept_begin(&functions);
}

void rf_ibv_clear(bool torn)
{
	if (!state.calls)
		return;
	rf_ibv_ranges_clear(&state.ranges, torn);
	state.calls = 0;
	state.unbalanced = 0;
}

void rf_ibv_add_stats(struct rf_stats *stats)
{
	stats->engine_bytes += state.ranges.table.mapped;
	stats->ibv_ranges = state.ranges.used;
	stats->ibv_calls = state.calls;
	stats->ibv_unbalanced = state.unbalanced;
}

void rf_ibv_check(void)
{
	rf_ibv_ranges_check(&state.ranges);
}
