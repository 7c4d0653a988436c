/* SPDX-License-Identifier: BSD-3-Clause */
#define _GNU_SOURCE /* secure_getenv() */
#include "ibv.h"
#include "exit_report.h"
#include "fork.h"
#include "ibv_ranges.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>

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
	struct rf_ibv_ranges ranges;	/* what came through ibv_dontfork_range() */
	uint64_t calls, unbalanced;
} state;

/* Static storage: no malloc() at its first use, in whatever thread. */
static __thread int own __attribute__((tls_model("initial-exec")));

RF_API void rf_ranges_own(int yes)
{
	own = yes;
}

/* Nobody has asked for it, so nobody is told of a failure: then nothing is protected. */
static void start(void)
{
	static bool failed;
	struct rf_error error;

	if (rf_likely(rf_mode() != RF_MODE_NONE) || __atomic_load_n(&failed, __ATOMIC_RELAXED))
		return;
	if (rf_fork_init(RF_MODE_AUTO, &error) < 0)
		__atomic_store_n(&failed, true, __ATOMIC_RELAXED);
}

/* Nobody holds the memory, but whoever asks for lazy by name says that somebody does. */
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
	rc = rf_register((const void *)begin, end - begin, flags(), RF_OMIT, &entry->handle,
			 &error);
	if (rf_unlikely(rc >= 0 && error.cause == RF_CAUSE_SHARED_PAGE))
		rf_exit_report_shared_page(begin, end, &error);
	return rc;
}

static int remember(const struct rf_ibv_range *entry)
{
	int rc = rf_enter(0);

	if (rc < 0)
		return rc;
	state.calls++;
	rc = rf_ibv_ranges_reserve(&state.ranges, 1);
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
	rc = register_range(begin, begin + nbytes, &entry);
	if (rc < 0)
		return rc;
	rc = remember(&entry);
	if (rc < 0)
		(void)rf_release(entry.handle, 0);
	return rc;
}

/* What is left of a registration when [@start, @end) of it is released. */
struct rest {
	struct rf_ibv_range parts[2];
	unsigned int count;
};

static void forget_rest(const struct rest *rest)
{
	unsigned int i;

	for (i = 0; i < rest->count; i++)
		(void)rf_release(rest->parts[i].handle, 0);
}

static int register_rest(const struct rf_ibv_range *whole, uintptr_t begin, uintptr_t end,
			 struct rest *rest)
{
	int rc = 0;

	rest->count = 0;
	if (whole->start < begin)
		rc = register_range(whole->start, begin, &rest->parts[rest->count++]);
	if (rc >= 0 && end < whole->end)
		rc = register_range(end, whole->end, &rest->parts[rest->count++]);
	if (rc < 0) {
		rest->count--;
		forget_rest(rest);
	}
	return rc;
}

/* Put @rest in the place of @whole. -ESTALE: another thread has released that. */
static int exchange(struct rf_ibv_range *whole, const struct rest *rest)
{
	struct rf_ibv_ranges *ranges = &state.ranges;
	struct rf_ibv_range *entry;
	unsigned int i;
	int rc = rf_enter(0);

	if (rc < 0)
		return rc;
	rc = rf_ibv_ranges_reserve(ranges, rest->count);
	entry = rf_ibv_ranges_find(ranges, whole->start, whole->end);
	if (rc >= 0 && !entry)
		rc = -ESTALE;
	if (rc >= 0) {
		/* Whichever has these bytes: they are all the same. */
		*whole = *entry;
		rf_ibv_ranges_remove(ranges, entry);
		for (i = 0; i < rest->count; i++)
			rf_ibv_ranges_add(ranges, &rest->parts[i]);
	}
	rf_leave();
	return rc;
}

/* 1; 0: @whole is not there any more. */
static int release_part(struct rf_ibv_range *whole, uintptr_t begin, uintptr_t end)
{
	struct rest rest;
	int rc = register_rest(whole, begin, end, &rest);

	if (rc < 0)
		return rc;
	rc = exchange(whole, &rest);
	if (rc < 0) {
		forget_rest(&rest);
		return rc == -ESTALE ? 0 : rc;
	}
	/* After the rest is counted: no page of that is unmarked in between. */
	rc = rf_release(whole->handle, 0);
	return rc < 0 ? rc : 1;
}

/*
 * Is every page of [@begin, @end) registered? The first that touches one is *@found.
 * If not, this is one release too many: no part of it may release what another registered.
 */
static int find_all(uintptr_t begin, uintptr_t end, size_t page_size, struct rf_ibv_range *found)
{
	const size_t mask = page_size - 1;
	const struct rf_ibv_range *entry;
	uintptr_t at = begin;
	int rc = rf_enter(0);

	if (rc < 0)
		return rc;
	while (at < end) {
		entry = rf_ibv_ranges_first(&state.ranges, at, end, page_size);
		if (!entry || (entry->start & ~mask) > at)
			break;
		if (at == begin)
			*found = *entry;
		at = (entry->end + mask) & ~mask;
	}
	state.unbalanced += at < end;
	rf_leave();
	return at >= end;
}

/*
 * A range that was not registered as such: part of one, or several. libibverbs counts
 * pages, so here too every page is released once.
 */
static int release_pages(uintptr_t begin, uintptr_t end)
{
	const size_t page_size = getauxval(AT_PAGESZ), mask = page_size - 1;
	struct rf_ibv_range whole = { .end = 0 };
	int rc;

	begin &= ~mask;
	end = end > UINTPTR_MAX - mask || end < begin ? UINTPTR_MAX & ~mask : (end + mask) & ~mask;
	while (begin < end) {
		rc = find_all(begin, end, page_size, &whole);
		if (rc <= 0)
			return rc;
		rc = release_part(&whole, begin, end);
		if (rc < 0)
			return rc;
		/* Else another thread was faster: look again. */
		if (rc > 0)
			begin = (whole.end + mask) & ~mask;
	}
	return 0;
}

static int dofork(uintptr_t begin, size_t nbytes)
{
	struct rf_ibv_range *entry;
	struct rf_handle handle;
	int rc = rf_enter(0);

	if (rc < 0)
		return rc;
	state.calls++;
	entry = rf_ibv_ranges_find(&state.ranges, begin, begin + nbytes);
	if (rf_likely(entry)) {
		handle = entry->handle;
		rf_ibv_ranges_remove(&state.ranges, entry);
	}
	rf_leave();
	return rf_likely(entry) ? rf_release(handle, 0) : release_pages(begin, begin + nbytes);
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
	struct rf_error error;
	int rc = rf_fork_init(RF_MODE_AUTO, &error);

	return rc < 0 ? -rc : rf_intercept_forward(&functions);
}

/* UNNEEDED keeps other libraries from what would slow a fork down or make them abort. */
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
	return rf_intercept_all(&functions, error);
}

void rf_ibv_serve_all(void)
{
	rf_intercept_begin(&functions);
}

void rf_ibv_clear(bool torn)
{
	if (torn)
		rf_ibv_ranges_abandon(&state.ranges);
	rf_ibv_ranges_clear(&state.ranges);
	state.calls = 0;
	state.unbalanced = 0;
}

void rf_ibv_add_stats(struct rf_stats *stats)
{
	stats->engine_bytes += state.ranges.entries.mapped;
	stats->ibv_ranges = state.ranges.used;
	stats->ibv_calls = state.calls;
	stats->ibv_unbalanced = state.unbalanced;
}

void rf_ibv_check(void)
{
	rf_ibv_ranges_check(&state.ranges);
}
