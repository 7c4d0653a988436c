/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Marks are made, exchanged, and taken back as far as the kernel allows.
 *
 * madvise() is not exact: over marked pages a misaligned call in a huge page
 * succeeds and changes nothing, and a range with a hole is advised around it and
 * then refused. So only success over unmarked pages means anything, and undoing
 * goes mapping by mapping.
 *
 * A mark that cannot be taken back stays in the ranges and is tried again: by releases
 * that free VMAs, a few at a time, and by every fork. Where the number of mappings is not
 * the reason, releases give it up after a few tries.
 */
#ifndef RF_MARKS_H
#define RF_MARKS_H

#include "tracker.h"

#include <sys/mman.h>

static inline int rf_marks_call(struct rf_tracker *tracker, uintptr_t start, uintptr_t end,
				int advice)
{
	tracker->madvise_calls++;
	return rf_sys_madvise(start, end - start, advice);
}

/* Tell rf_marks_drop_shared() where a mark is about to be made. */
static inline void rf_marks_announce(struct rf_tracker *tracker, uintptr_t start, uintptr_t end)
{
	tracker->announced_start = start;
	tracker->announced_end = end;
}

/* The change of ranges whose pages have been marked, as registrations want. */
static inline struct rf_change rf_marks_made(uint8_t mark)
{
	return (struct rf_change){ .remark = true,
				   .mark = mark,
				   .clear = RF_RANGE_DUE | RF_RANGE_LOST | RF_RANGE_RETRY };
}

/* The advice that makes a mark, and the one that takes it back. */
static inline int rf_marks_advice(uint8_t mark)
{
	return mark == RF_MARK_WIPEONFORK ? MADV_WIPEONFORK : MADV_DONTFORK;
}

static inline int rf_marks_undoing(uint8_t mark)
{
	return mark == RF_MARK_WIPEONFORK ? MADV_KEEPONFORK : MADV_DOFORK;
}

/* Give @run its best mark, then take back the one it bears. -errno: nothing has changed. */
int rf_marks_exchange(struct rf_tracker *tracker, const struct rf_run *run);

/*
 * Mark the unmarked parts of @run with @mark. Marked parts are marked again, or exchange their
 * mark if it would wipe pages that are not to be wiped. -errno: nothing has changed, as far as
 * the kernel takes back the advice given so far.
 */
int rf_marks_set(struct rf_tracker *tracker, const struct rf_run *run, uint8_t mark);

/*
 * Unmark @run, as far as the kernel lets it: pages refused for now get
 * RF_RANGE_RETRY, the rest of a huge page keeps its mark.
 */
void rf_marks_clear(struct rf_tracker *tracker, const struct rf_run *run);

/* The same for the ranges that @belongs() picks in [@start, @end): it must pick none that stays. */
void rf_marks_clear_runs(struct rf_tracker *tracker, uintptr_t start, uintptr_t end,
			 bool (*belongs)(const struct rf_range *));

/* Widen [@start, @end) by the ranges that touch it and wait to be unmarked. */
void rf_marks_widen(const struct rf_tracker *tracker, uintptr_t *start, uintptr_t *end);

/* Unmark a run that is wanted: the kernel copies it, until a fork marks it again. */
void rf_marks_leave(struct rf_tracker *tracker, const struct rf_run *run);

/* Unmark whatever is marked, counted or not: the caller is about to forget it. */
void rf_marks_clear_all(struct rf_tracker *tracker);

/* Unmark pages the kernel refused before: all, or as many as a release may spend. */
void rf_marks_retry_all(struct rf_tracker *tracker);
void rf_marks_retry_next(struct rf_tracker *tracker);

static inline void rf_marks_retry_some(struct rf_tracker *tracker)
{
	if (rf_unlikely(tracker->ranges.retry))
		rf_marks_retry_next(tracker);
}

/* The rest of rf_marks_have_room(), where the budget is used up. */
bool rf_marks_touch(const struct rf_tracker *tracker, uintptr_t start, uintptr_t end);

/* Would a mark on [@start, @end), which bears none, stay within the process's share of VMAs? */
static inline bool rf_marks_have_room(const struct rf_tracker *tracker, uintptr_t start,
				      uintptr_t end)
{
	return rf_likely(tracker->ranges.mark_edges + 2ull <= tracker->vma_budget) ||
	       rf_marks_touch(tracker, start, end);
}

/* A release has unmarked [@start, @end): leave runs beyond the budget to the kernel. */
void rf_marks_keep_to_budget(struct rf_tracker *tracker, uintptr_t start, uintptr_t end);

/*
 * The kernel has refused a mark for want of mappings, so it would refuse the program's next
 * thread too. Where copying is trusted, leave the shortest runs to the kernel until the program
 * has some mappings again. The next fork tries to mark them.
 */
void rf_marks_give_back(struct rf_tracker *tracker);

/*
 * For a fork inside the engine, where the tables may be half changed: pages that are
 * marked, not asked about yet and really shared are unmarked. The tables do not learn of it: the
 * next fork unmarks the same again.
 */
void rf_marks_drop_shared(const struct rf_tracker *tracker);

#endif
