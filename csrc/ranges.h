/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Which pages are registered how often, and whether the kernel has been told so
 * by an advice, the mark. Registrations overlap, and end where no other ends; advice is per page.
 * So: a step function over the address space, as the sorted list of its steps.
 *
 *	registrations    |-------A-------|      |--C--|
 *	                      |----B----|
 *	ranges           | 1  |    2    |1|     |  1  |
 *
 *	directory  [first, leaf] [first, leaf] ...       binary search
 *	                |              |
 *	leaf       [range range ...]  [range ...]        binary search, memmove
 *
 * Two levels suffice: a million ranges are some 16 000 leaves, and a leaf is
 * split or joined once in dozens of changes.
 *
 * Invariants (rf_ranges_check):
 *  - ranges are half open, page aligned, not empty, sorted, disjoint;
 *  - each has a count above zero or a mark;
 *  - touching ranges differ in something (between operations);
 *  - no leaf is empty but an only one; two neighbours hold more than half of a leaf's ranges.
 *
 * No locks: the engine's lock is held. Only rf_ranges_reserve() can fail.
 */
#ifndef RF_RANGES_H
#define RF_RANGES_H

#include "memory.h"
#include "rdmafork.h"

#include <stdbool.h>

/* What is mapped there. */
enum rf_nature {
	RF_NATURE_UNASKED = 0,
	RF_NATURE_PRIVATE = 1,
	RF_NATURE_SHARED = 2,
};

/*
 * The memory may have been unmapped and mapped anew since it was marked, as
 * somebody counts here who does not hold it: every registration marks it again.
 */
#define RF_RANGE_DOUBT	1u
/* Held, and to be marked by the next fold if it wants a mark. */
#define RF_RANGE_DUE	2u
/* Marked by the operation under way, which may still fail. */
#define RF_RANGE_FRESH	4u
/* Released, but the kernel would not unmark it yet. */
#define RF_RANGE_RETRY	8u

struct rf_range {
	uintptr_t start, end;
	uint32_t count;		/* registrations that want it marked */
	bool mark;
	uint8_t nature;
	uint8_t flags;
	uint8_t reserved;
};

#define RF_LEAF_RANGES	63
#define RF_LEAF_JOIN	47

#define RF_RANGES_SPARE	64

struct rf_leaf {
	uint32_t used;
	uint32_t next_free;
	struct rf_range ranges[RF_LEAF_RANGES];
};

struct rf_leaf_entry {
	uintptr_t first;	/* start of the leaf's first range */
	uint32_t leaf;
};

struct rf_ranges {
	struct rf_memory leaves, directory;
	uint32_t leaf_count;	/* entries of the directory */
	uint32_t leaves_touched;
	uint32_t free_leaf;	/* list through next_free, index + 1 */
	uint32_t capacity;	/* ranges there is room for, whatever the order */
	uint32_t count;
	uint32_t registrations;	/* of the last reservation */
	uint32_t mark_edges;	/* addresses where marked meets unmarked */
	uint64_t marked_bytes;
	uint64_t marks;		/* changes with every change of a mark */
	uint32_t retries;	/* ranges with RF_RANGE_RETRY */
};

/* A place in the list. Any change to the list makes it stale. */
struct rf_cursor {
	uint32_t entry, item;
};

void rf_ranges_init(struct rf_ranges *ranges);

/* Forget everything and keep the memory, for a child that inherits it. */
void rf_ranges_clear(struct rf_ranges *ranges);

/* The same where its structures may not fit together: their memory is lost. */
void rf_ranges_abandon(struct rf_ranges *ranges);

/* Make room for @count ranges. -ENOMEM: nothing has changed. */
int rf_ranges_grow(struct rf_ranges *ranges, uint32_t count);

/*
 * Make room for @registrations, those counted already included, so that counting
 * and releasing them in any order finds memory. Every step of the function is
 * one of a visible range, or one of a registration hidden where another begins
 * as this one ends; what a release cannot unmark takes a few more.
 */
static inline int rf_ranges_reserve(struct rf_ranges *ranges, uint32_t registrations)
{
	uint64_t needed = 2 * ((uint64_t)ranges->count + registrations) + RF_RANGES_SPARE;

	ranges->registrations = registrations;
	if (rf_likely(needed <= ranges->capacity))
		return 0;
	return rf_ranges_grow(ranges, needed > UINT32_MAX ? UINT32_MAX : (uint32_t)needed);
}

/* The first range that ends after @address. */
struct rf_cursor rf_ranges_seek(const struct rf_ranges *ranges, uintptr_t address);
/* NULL past the end. */
struct rf_range *rf_ranges_at(const struct rf_ranges *ranges, struct rf_cursor cursor);
struct rf_range *rf_ranges_next(const struct rf_ranges *ranges, struct rf_cursor *cursor);
/* The range that holds @address, or NULL. */
struct rf_range *rf_ranges_find(const struct rf_ranges *ranges, uintptr_t address);

/*
 * Count [@start, @end) once more and set @flags there. This, and
 * what follows, leaves the list for rf_ranges_tidy() to join.
 */
void rf_ranges_add(struct rf_ranges *ranges, uintptr_t start, uintptr_t end, uint8_t flags);

/*
 * Count it once less. What is counted no more and bears a mark stays, for the
 * caller to unmark and tidy.
 */
void rf_ranges_sub(struct rf_ranges *ranges, uintptr_t start, uintptr_t end);

/* Let a range begin at @address, if one holds it. */
void rf_ranges_cut(struct rf_ranges *ranges, uintptr_t address);

/* Record what is mapped in [@start, @end), where ranges may be cut by it. */
void rf_ranges_set_nature(struct rf_ranges *ranges, uintptr_t start, uintptr_t end,
			  enum rf_nature nature);

/*
 * The next two speak of whole ranges: some begins at @start, some ends at @end,
 * and, for marks, there is none but touching ones between.
 */

/* Record whether the kernel has the mark on [@start, @end). */
void rf_ranges_set_mark(struct rf_ranges *ranges, uintptr_t start, uintptr_t end, bool mark);

/* Set, then clear flags of all ranges in [@start, @end). */
void rf_ranges_set_flags(struct rf_ranges *ranges, uintptr_t start, uintptr_t end,
			 uint8_t set, uint8_t clear);

/*
 * The common cases in one search and one step: what [start, end) and what touches it
 * become, while nothing has changed yet. False: it is not so simple, and is done by the
 * functions above. After rf_ranges_commit() there is nothing to tidy.
 */
#define RF_PLAN_RANGES	8

struct rf_plan {
	struct rf_leaf *leaf;
	struct rf_cursor cursor;	/* the first range replaced */
	uint32_t replaced, count;
	struct rf_range ranges[RF_PLAN_RANGES];
	/* What gets its mark, or loses it; empty if nothing does. The caller tells the kernel. */
	uintptr_t start, end;
	bool mark;
	uint8_t beside;			/* of its ends, those that touch marked ranges */
};

/*
 * Count [@start, @end) once more; @cursor is the first range that ends after @start.
 * With @mark all of it is marked then. What bore no mark gets @flags.
 */
bool rf_ranges_plan_add(const struct rf_ranges *ranges, struct rf_cursor cursor, uintptr_t start,
			uintptr_t end, bool mark, uint8_t flags, struct rf_plan *plan);

/* Count it once less. What is counted no more loses its mark and goes. */
bool rf_ranges_plan_sub(const struct rf_ranges *ranges, uintptr_t start, uintptr_t end,
			struct rf_plan *plan);

/* Nothing has changed since @plan was made, and the kernel has done its part. */
void rf_ranges_commit(struct rf_ranges *ranges, const struct rf_plan *plan);

/*
 * The end of an operation on [@start, @end): nothing there is fresh any more, and
 * what has become equal or empty is joined and dropped.
 */
void rf_ranges_tidy(struct rf_ranges *ranges, uintptr_t start, uintptr_t end);

/* fork() does not move shared memory. */
static inline bool rf_range_wants_mark(const struct rf_range *range)
{
	return range->count && range->nature != RF_NATURE_SHARED;
}

/* Nobody counts it, or it is shared: its mark waits to be taken away. */
static inline bool rf_range_is_unwanted(const struct rf_range *range)
{
	return range->mark && !rf_range_wants_mark(range);
}

/* Runs of marked pages: each takes at most two VMAs more. */
static inline uint32_t rf_ranges_runs(const struct rf_ranges *ranges)
{
	return ranges->mark_edges / 2;
}

/* Asserts the invariants (tests). */
void rf_ranges_check(const struct rf_ranges *ranges);

#endif
