/* SPDX-License-Identifier: BSD-3-Clause */
/* Advice taken back, as far as the kernel lets it. */
#include "advise_internal.h"

#include <errno.h>
#include <sys/mman.h>

static int call_unmark(struct rf_advisor *advisor, uintptr_t start, uintptr_t end)
{
	return rf_advise_call(advisor, start, end,
			      advisor->policy == RF_OMIT ? MADV_DOFORK : MADV_KEEPONFORK);
}

static bool is_marked(const struct rf_range *range)
{
	return range->mark;
}

/* The kernel has no marks any more in [@start, @end). */
static void forget_marks(struct rf_advisor *advisor, uintptr_t start, uintptr_t end)
{
	struct rf_run run;
	uintptr_t at;

	rf_ranges_cut(&advisor->ranges, start);
	rf_ranges_cut(&advisor->ranges, end);
	for (at = start; rf_advise_next_run(advisor, at, end, is_marked, &run); at = run.end)
		rf_ranges_set_mark(&advisor->ranges, run.start, run.end, false);
}

/* Does anybody want a mark in the huge page [@first, @last) outside [@start, @end)? */
static bool is_wanted_beside(struct rf_advisor *advisor, uintptr_t first, uintptr_t last,
			     uintptr_t start, uintptr_t end)
{
	struct rf_cursor cursor = rf_ranges_seek(&advisor->ranges, first);
	const struct rf_range *range = rf_ranges_at(&advisor->ranges, cursor);

	for (; range && range->start < last; range = rf_ranges_next(&advisor->ranges, &cursor))
		if ((range->start < start || range->end > end) && range->mark &&
		    rf_range_wants_mark(range))
			return true;
	return false;
}

/* Unmark [@start, @end), which lies in @vma and is a range's whole. */
static void unmark_mapping(struct rf_advisor *advisor, const struct rf_vma *vma, uintptr_t start,
			   uintptr_t end)
{
	uintptr_t first, last;
	int rc;

	/* A huge page goes as a whole, unless another registration wants it marked. */
	first = rf_down(start, vma->shift);
	if (!vma->shared && is_wanted_beside(advisor, first, rf_up(start, vma->shift), start, end))
		first = rf_up(start, vma->shift);
	last = rf_up(end, vma->shift);
	if (!vma->shared && is_wanted_beside(advisor, rf_down(end, vma->shift), last, start, end))
		last = rf_down(end, vma->shift);
	/* What stays marked is to be given back to children, and is in no registration's gaps. */
	if (first > start || last < end)
		advisor->edges->leftovers = true;
	if (first >= last)
		return;
	rc = call_unmark(advisor, first, last);
	/* EINVAL now: a device's mapping, which no child ever had or will have. */
	if (rc >= 0 || (rc == -EINVAL && !vma->anonymous)) {
		forget_marks(advisor, first, last);
		/* Beyond what the caller tidies. */
		if (first < start)
			rf_ranges_tidy(&advisor->ranges, first, start);
		if (last > end)
			rf_ranges_tidy(&advisor->ranges, end, last);
		return;
	}
	first = first < start ? start : first;
	last = last > end ? end : last;
	rf_ranges_cut(&advisor->ranges, first);
	rf_ranges_cut(&advisor->ranges, last);
	rf_ranges_set_flags(&advisor->ranges, first, last, RF_RANGE_RETRY, 0);
}

/*
 * Unmark [@start, @end) mapping by mapping, as the kernel refused it as a whole:
 * because of a hole, a huge page only partly released, or the VMA limit.
 */
static void unmark_mappings(struct rf_advisor *advisor, uintptr_t start, uintptr_t end)
{
	struct rf_ranges *ranges = &advisor->ranges;
	int opened = rf_vma_open(&advisor->reader), rc = opened;
	uintptr_t at = start, stop;
	struct rf_vma vma;

	for (; rc >= 0 && at < end; at = stop) {
		rc = rf_ranges_reserve(ranges, ranges->registrations);
		if (rc < 0)
			break;
		rc = rf_vma_find(&advisor->reader, at, &vma);
		if (rc == -ENOENT || (rc >= 0 && vma.start > at)) {
			stop = rc == -ENOENT || vma.start > end ? end : vma.start;
			rc = 0;
			forget_marks(advisor, at, stop);
			continue;
		}
		if (rc < 0)
			break;
		stop = vma.end < end ? vma.end : end;
		rf_ranges_cut(ranges, stop);
		unmark_mapping(advisor, &vma, at, stop);
	}
	if (rc < 0)
		rf_ranges_set_flags(ranges, at, end, RF_RANGE_RETRY, 0);
	if (opened >= 0)
		rf_vma_close(&advisor->reader);
}

void rf_advise_unmark(struct rf_advisor *advisor, uintptr_t start, uintptr_t end)
{
	if (call_unmark(advisor, start, end) >= 0) {
		if (rf_unlikely(advisor->ranges.retries))
			rf_ranges_set_flags(&advisor->ranges, start, end, 0, RF_RANGE_RETRY);
		rf_ranges_set_mark(&advisor->ranges, start, end, false);
		return;
	}
	unmark_mappings(advisor, start, end);
}

void rf_advise_unmark_runs(struct rf_advisor *advisor, uintptr_t start, uintptr_t end,
			   bool (*belongs)(const struct rf_range *))
{
	struct rf_run run;

	for (; start < end && rf_advise_next_run(advisor, start, end, belongs, &run);
	     start = run.end)
		rf_advise_unmark(advisor, run.start, run.end);
}

void rf_advise_widen(const struct rf_advisor *advisor, uintptr_t *start, uintptr_t *end)
{
	const struct rf_range *range, *beside;

	while ((beside = rf_ranges_find(&advisor->ranges, *end)) && rf_range_is_unwanted(beside) &&
	       (range = rf_ranges_find(&advisor->ranges, *end - 1)) && rf_range_is_unwanted(range))
		*end = beside->end;
	while (*start && (beside = rf_ranges_find(&advisor->ranges, *start - 1)) &&
	       rf_range_is_unwanted(beside) && (range = rf_ranges_find(&advisor->ranges, *start)) &&
	       rf_range_is_unwanted(range))
		*start = beside->start;
}

static bool is_to_retry(const struct rf_range *range)
{
	return range->flags & RF_RANGE_RETRY;
}

void rf_advise_retry_all(struct rf_advisor *advisor)
{
	struct rf_run run;
	uintptr_t at;

	for (at = 0; rf_advise_next_run(advisor, at, UINTPTR_MAX, is_to_retry, &run);
	     at = run.end) {
		rf_advise_unmark(advisor, run.start, run.end);
		rf_ranges_tidy(&advisor->ranges, run.start, run.end);
	}
}

void rf_advise_unmark_all(struct rf_advisor *advisor)
{
	struct rf_run run;
	uintptr_t at;

	for (at = 0; rf_advise_next_run(advisor, at, UINTPTR_MAX, is_marked, &run); at = run.end)
		rf_advise_unmark(advisor, run.start, run.end);
}

static bool is_over_budget(const struct rf_advisor *advisor)
{
	return rf_advise_edges(advisor) > advisor->vma_budget;
}

void rf_advise_leave(struct rf_advisor *advisor, const struct rf_run *run)
{
	struct rf_cursor cursor = rf_ranges_seek(&advisor->ranges, run->start);
	struct rf_range *range = rf_ranges_at(&advisor->ranges, cursor);

	for (; range && range->start < run->end; range = rf_ranges_next(&advisor->ranges, &cursor))
		if (!(range->flags & RF_RANGE_DOUBT))
			range->flags |= RF_RANGE_DUE;
	advisor->dirty = true;
	rf_advise_unmark(advisor, run->start, run->end);
	rf_ranges_tidy(&advisor->ranges, run->start, run->end);
}

/* The run of marked ranges that holds @address. */
static bool marked_run(const struct rf_advisor *advisor, uintptr_t address, struct rf_run *run)
{
	const struct rf_range *range;
	uintptr_t start = address + 1;

	while (start && (range = rf_ranges_find(&advisor->ranges, start - 1)) && range->mark)
		start = range->start;
	return start <= address && rf_advise_next_run(advisor, start, UINTPTR_MAX, is_marked, run);
}

/*
 * A release in the middle of a run makes two of it. Where that is one too many,
 * what it has cut off goes to the kernel, or else the shorter of the neighbours.
 */
static void keep_to_budget(struct rf_advisor *advisor, uintptr_t start, uintptr_t end)
{
	struct rf_run run, left, right;
	bool has_left, has_right;
	uintptr_t at;

	for (at = start; is_over_budget(advisor) && at < end &&
			 rf_advise_next_run(advisor, at, end, is_marked, &run);
	     at = run.end)
		rf_advise_leave(advisor, &run);
	if (!is_over_budget(advisor))
		return;
	has_left = start && marked_run(advisor, start - 1, &left);
	has_right = marked_run(advisor, end, &right);
	if (has_left && (!has_right || left.end - left.start < right.end - right.start))
		rf_advise_leave(advisor, &left);
	else if (has_right)
		rf_advise_leave(advisor, &right);
}

/*
 * Who held these pages has let go of them. Where others count that do not hold them,
 * they may be a stranger's by the next fold.
 */
static void forget_due(struct rf_advisor *advisor, uintptr_t start, uintptr_t end)
{
	struct rf_cursor cursor = rf_ranges_seek(&advisor->ranges, start);
	struct rf_range *range = rf_ranges_at(&advisor->ranges, cursor);

	for (; range && range->start < end; range = rf_ranges_next(&advisor->ranges, &cursor))
		if (range->flags & RF_RANGE_DOUBT)
			range->flags &= (uint8_t)~RF_RANGE_DUE;
}

/* The common case. False: nothing has changed. */
static bool release_planned(struct rf_advisor *advisor, const struct rf_slot *slot,
			    uintptr_t start, uintptr_t end)
{
	struct rf_plan plan;

	if (!has_no_gaps(slot, start, end) ||
	    !rf_ranges_plan_sub(&advisor->ranges, start, end, &plan))
		return false;
	if (plan.start < plan.end && call_unmark(advisor, plan.start, plan.end) < 0)
		return false;
	rf_ranges_commit(&advisor->ranges, &plan);
	return true;
}

static void release_by_steps(struct rf_advisor *advisor, const struct rf_slot *slot,
			     uintptr_t start, uintptr_t end)
{
	struct rf_ranges *ranges = &advisor->ranges;

	rf_advise_uncount(advisor, slot, start, end);
	if (slot->flags & RF_SLOT_HELD)
		forget_due(advisor, start, end);
	rf_advise_widen(advisor, &start, &end);
	rf_advise_unmark_runs(advisor, start, end, rf_range_is_unwanted);
	rf_ranges_tidy(ranges, start, end);
}

void rf_advise_release(struct rf_advisor *advisor, struct rf_slot *slot)
{
	struct rf_ranges *ranges = &advisor->ranges;
	uint32_t edges = ranges->mark_edges;
	uintptr_t start, end;

	rf_advise_extent(advisor, slot, &start, &end);
	if (start >= end)
		return;
	if (rf_unlikely(!release_planned(advisor, slot, start, end)))
		release_by_steps(advisor, slot, start, end);
	if (rf_unlikely(is_over_budget(advisor)) && !advisor->required)
		keep_to_budget(advisor, start, end);
	/* VMAs came free, which may be what others wait for. */
	if (ranges->mark_edges < edges)
		rf_advise_retry(advisor);
}
