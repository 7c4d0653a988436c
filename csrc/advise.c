/* SPDX-License-Identifier: BSD-3-Clause */
#include "advise_internal.h"
#include "kernel.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

void rf_advisor_init(struct rf_advisor *advisor, enum rf_policy policy,
		     const struct rf_advisor *beside, struct rf_edges *edges)
{
	memset(advisor, 0, sizeof(*advisor));
	advisor->policy = policy;
	advisor->beside = beside;
	advisor->edges = edges;
	rf_ranges_init(&advisor->ranges);
	rf_ranges_init(&advisor->gaps);
}

void rf_advisor_start(struct rf_advisor *advisor, const struct rf_kernel *kernel, bool contested)
{
	advisor->kernel = kernel;
	advisor->whole = !kernel->copy_trusted;
	advisor->required = advisor->policy == RF_WIPE || !kernel->copy_trusted;
	advisor->contested = contested || !kernel->copy_trusted;
	advisor->vma_budget = kernel->max_map_count / 2;
	rf_memory_free(&advisor->reader.table);
	rf_vma_init(&advisor->reader, kernel->procmap_query, rf_kernel_huge_shift(kernel));
}

void rf_advisor_clear(struct rf_advisor *advisor)
{
	rf_ranges_clear(&advisor->ranges);
	rf_ranges_clear(&advisor->gaps);
	advisor->gap_bytes = 0;
	advisor->dirty = false;
	advisor->madvise_calls = 0;
	advisor->reader.questions = 0;
	/* Another thread may have had a round under way: its descriptor speaks of the parent. */
	advisor->reader.depth = 0;
	advisor->reader.fd = -1;
}

void rf_advisor_abandon(struct rf_advisor *advisor)
{
	rf_ranges_abandon(&advisor->ranges);
	rf_ranges_abandon(&advisor->gaps);
	rf_memory_abandon(&advisor->reader.table);
}

static int call_mark(struct rf_advisor *advisor, uintptr_t start, uintptr_t end)
{
	return rf_advise_call(advisor, start, end,
			      advisor->policy == RF_OMIT ? MADV_DONTFORK : MADV_WIPEONFORK);
}

/* The page size one end is rounded to: 0 for base pages and where nothing is mapped. */
static int ask_end(struct rf_advisor *advisor, uintptr_t address, uint8_t *shift)
{
	struct rf_vma vma;
	int rc = rf_vma_find(&advisor->reader, address, &vma);

	if (rc == -ENOENT)
		return 0;
	if (rc < 0)
		return rc;
	if (vma.start <= address && !vma.shared && 1ull << vma.shift > advisor->kernel->page_size)
		*shift = vma.shift;
	return 0;
}

int rf_advise_ask_ends(struct rf_advisor *advisor, struct rf_slot *slot)
{
	int rc = ask_end(advisor, slot->start, &slot->start_shift);

	return rc < 0 ? rc : ask_end(advisor, slot->end - 1, &slot->end_shift);
}

/* A stretch of mappings that are alike, for which one step in the ranges is enough. */
struct stretch {
	uintptr_t start, end;
	enum rf_nature nature;
};

static int record(struct rf_advisor *advisor, const struct stretch *stretch)
{
	int rc;

	if (stretch->start == stretch->end)
		return 0;
	rc = rf_ranges_reserve(&advisor->ranges, advisor->ranges.registrations);
	if (rc < 0)
		return rc;
	rf_ranges_set_nature(&advisor->ranges, stretch->start, stretch->end, stretch->nature);
	return 0;
}

/*
 * Advice on part of an area that was never touched splits it for good: each part
 * gets an anon_vma of its own at its first fault, and such parts do not merge.
 * One page touched before the first split lets them share one.
 */
static void touch_before_split(struct rf_advisor *advisor, const struct rf_vma *vma,
			       uintptr_t start, uintptr_t end)
{
#ifndef MADV_POPULATE_WRITE /* Linux 5.14 */
#define MADV_POPULATE_WRITE 23
#endif
	if (advisor->touched == vma->start || !vma->anonymous || !vma->writable || vma->shared ||
	    (start == vma->start && end == vma->end) ||
	    1ull << vma->shift > advisor->kernel->page_size)
		return;
	advisor->touched = vma->start;
	rf_advise_call(advisor, start, start + advisor->kernel->page_size, MADV_POPULATE_WRITE);
}

int rf_advise_ask(struct rf_advisor *advisor, uintptr_t start, uintptr_t end, bool will_split,
		  uintptr_t *hole)
{
	struct stretch stretch = { .start = start, .end = start };
	enum rf_nature nature;
	struct rf_vma vma;
	uintptr_t at, stop;
	int rc = 0;

	*hole = 0;
	for (at = start; at < end; at = stop) {
		rc = rf_vma_find(&advisor->reader, at, &vma);
		if (rc < 0 && rc != -ENOENT)
			return rc;
		if (rc == -ENOENT || vma.start > at) {
			*hole = *hole ? *hole : at;
			nature = RF_NATURE_UNASKED;
			stop = rc == -ENOENT || vma.start > end ? end : vma.start;
		} else {
			nature = vma.shared ? RF_NATURE_SHARED : RF_NATURE_PRIVATE;
			stop = vma.end < end ? vma.end : end;
			if (will_split)
				touch_before_split(advisor, &vma, at, stop);
		}
		if (nature != stretch.nature) {
			rc = record(advisor, &stretch);
			if (rc < 0)
				return rc;
			stretch = (struct stretch){ at, at, nature };
		}
		stretch.end = stop;
	}
	return record(advisor, &stretch);
}

void rf_advise_set_fresh(struct rf_advisor *advisor, const struct rf_run *run)
{
	struct rf_cursor cursor = rf_ranges_seek(&advisor->ranges, run->start);
	struct rf_range *range = rf_ranges_at(&advisor->ranges, cursor);

	for (; range && range->start < run->end; range = rf_ranges_next(&advisor->ranges, &cursor))
		if (!range->mark)
			range->flags |= RF_RANGE_FRESH;
}

bool rf_advise_next_run(const struct rf_advisor *advisor, uintptr_t at, uintptr_t end,
			bool (*belongs)(const struct rf_range *), struct rf_run *run)
{
	const struct rf_ranges *ranges = &advisor->ranges;
	struct rf_cursor cursor = rf_ranges_seek(ranges, at);
	const struct rf_range *range = rf_ranges_at(ranges, cursor);

	while (range && range->start < end && !belongs(range))
		range = rf_ranges_next(ranges, &cursor);
	if (!range || range->start >= end)
		return false;
	run->start = range->start;
	run->unmarked = run->marked = false;
	do {
		run->end = range->end;
		run->unmarked |= !range->mark;
		run->marked |= range->mark;
		range = rf_ranges_next(ranges, &cursor);
	} while (range && range->start == run->end && range->start < end && belongs(range));
	return true;
}

static bool to_mark_now(const struct rf_range *range)
{
	return rf_range_wants_mark(range) && (!range->mark || range->flags & RF_RANGE_DOUBT);
}

static bool is_fresh(const struct rf_range *range)
{
	return range->flags & RF_RANGE_FRESH;
}

static bool is_fresh_but_shared(const struct rf_range *range)
{
	return is_fresh(range) && range->nature == RF_NATURE_SHARED;
}

void rf_advise_unmark_fresh(struct rf_advisor *advisor, uintptr_t start, uintptr_t end)
{
	struct rf_run run;

	for (; rf_advise_next_run(advisor, start, end, is_fresh, &run); start = run.end) {
		rf_ranges_set_mark(&advisor->ranges, run.start, run.end, true);
		rf_advise_unmark(advisor, run.start, run.end);
	}
}

/* A run about to be marked may not take the process past its share of VMAs. */
static bool has_room(const struct rf_advisor *advisor)
{
	return rf_advise_edges(advisor) + 2 <= advisor->vma_budget;
}

/* Mark what @belongs() picks in [@start, @end). -errno of the first refusal. */
static int mark_now(struct rf_advisor *advisor, uintptr_t start, uintptr_t end, bool held,
		    bool (*belongs)(const struct rf_range *))
{
	struct rf_run run;
	uintptr_t at;
	int rc;

	for (at = start; at < end && rf_advise_next_run(advisor, at, end, belongs, &run);
	     at = run.end) {
		if (!run.marked && !has_room(advisor)) {
			if (advisor->required)
				return -EDQUOT;
			if (held) {
				rf_ranges_set_flags(&advisor->ranges, run.start, run.end,
						    RF_RANGE_DUE, 0);
				advisor->dirty = true;
			}
			continue;
		}
		if (run.unmarked)
			rf_advise_set_fresh(advisor, &run);
		rc = call_mark(advisor, run.start, run.end);
		if (rc < 0)
			return rc;
		if (run.unmarked)
			rf_ranges_set_mark(&advisor->ranges, run.start, run.end, true);
	}
	return 0;
}

/*
 * madvise() refused: learn what is mapped, round to that, and try once more.
 * On failure what has been counted and marked so far is the caller's to undo.
 */
static int ask_and_mark(struct rf_advisor *advisor, struct rf_slot *slot, bool forking,
			struct rf_error *error)
{
	bool held = slot->flags & RF_SLOT_HELD;
	uintptr_t start, end, hole;
	int rc = rf_vma_open(&advisor->reader);

	if (rc < 0) {
		error->cause = RF_CAUSE_NO_PROC;
		return rc;
	}
	rf_advise_extent(advisor, slot, &start, &end);
	rc = rf_advise_ask_ends(advisor, slot);
	rf_advise_extend(advisor, slot, start, end, 0);
	rf_advise_extent(advisor, slot, &start, &end);
	if (rc >= 0)
		rc = rf_advise_ask(advisor, start, end, true, &hole);
	rf_vma_close(&advisor->reader);
	if (rc < 0) {
		error->cause = rc == -ENOMEM ? RF_CAUSE_ENGINE_MEMORY : RF_CAUSE_NO_PROC;
		return rc;
	}
	if (hole)
		return -ENOMEM;
	if (forking)
		rf_edges_save(advisor->edges);
	rf_advise_unmark_runs(advisor, start, end, is_fresh_but_shared);
	/* Marked or not: others may have unmarked a part of a huge page, which goes as a whole. */
	return mark_now(advisor, start, end, held, rf_range_wants_mark);
}

int rf_advise_is_shared(struct rf_advisor *advisor, uintptr_t start, uintptr_t end)
{
	int rc = rf_vma_open(&advisor->reader);
	struct rf_vma vma;
	bool shared = true;
	uintptr_t at;

	if (rc < 0)
		return rc;
	for (at = start; rc >= 0 && shared && at < end; at = vma.end) {
		rc = rf_vma_find(&advisor->reader, at, &vma);
		shared = rc >= 0 && vma.start <= at && vma.shared;
	}
	rf_vma_close(&advisor->reader);
	return rc < 0 && rc != -ENOENT ? rc : shared;
}

static void undo(struct rf_advisor *advisor, struct rf_slot *slot)
{
	uintptr_t start, end;

	rf_advise_extent(advisor, slot, &start, &end);
	rf_advise_uncount(advisor, slot, start, end);
	rf_advise_unmark_fresh(advisor, start, end);
	/* What waited to be unmarked before waits again, or is gone, all of it. */
	rf_advise_widen(advisor, &start, &end);
	rf_advise_unmark_runs(advisor, start, end, rf_range_is_unwanted);
	rf_ranges_tidy(&advisor->ranges, start, end);
	slot->start_shift = 0;
	slot->end_shift = 0;
}

/*
 * The ends of memory that is not held cannot wait for the fold: by then they may
 * be another's. Where every page touched is marked, madvise() refuses what is
 * part of a huge page, and that is soon enough.
 */
static int ask_unheld_ends(struct rf_advisor *advisor, struct rf_slot *slot)
{
	int rc = rf_vma_open(&advisor->reader);

	if (rc < 0)
		return rc;
	rc = rf_advise_ask_ends(advisor, slot);
	rf_vma_close(&advisor->reader);
	return rc;
}

/* No page of it is marked, so madvise() has not refused it: is it part of a huge page? */
static int refuse_huge_ends(struct rf_advisor *advisor, struct rf_slot *slot,
			    struct rf_error *error)
{
	int rc = rf_vma_open(&advisor->reader);
	bool huge;

	if (rc >= 0) {
		rc = rf_advise_ask_ends(advisor, slot);
		rf_vma_close(&advisor->reader);
	}
	huge = slot->start_shift || slot->end_shift;
	slot->start_shift = 0;
	slot->end_shift = 0;
	if (rc >= 0 && !huge)
		return 0;
	error->cause = huge ? RF_CAUSE_WIPE : RF_CAUSE_NO_PROC;
	error->start = slot->start;
	error->end = slot->end;
	return huge ? -EINVAL : rc;
}

static uint8_t doubt_of(const struct rf_slot *slot)
{
	return slot->flags & RF_SLOT_HELD ? 0 : RF_RANGE_DOUBT;
}

/* Count the pages [@start, @end) of @slot and mark what is not marked. */
static int count_and_mark(struct rf_advisor *advisor, struct rf_slot *slot, uintptr_t start,
			  uintptr_t end, bool forking)
{
	bool held = slot->flags & RF_SLOT_HELD;

	rf_advise_count(advisor, slot, start, end);
	if (forking && advisor->policy == RF_OMIT)
		return -EINVAL;
	if (forking)
		rf_edges_save(advisor->edges);
	/* What is not held is marked even if it was: it may have been mapped anew since. */
	return mark_now(advisor, start, end, held, held ? to_mark_now : rf_range_wants_mark);
}

/* Its mark may be gone, or about to be taken away. */
#define UNSTEADY (RF_RANGE_DOUBT | RF_RANGE_RETRY)

/*
 * Are all pages [@start, @end), whose place is @cursor, marked by others, so that @slot
 * need not be counted as long as they are?
 */
static bool is_covered(const struct rf_advisor *advisor, const struct rf_slot *slot,
		       struct rf_cursor cursor, uintptr_t start, uintptr_t end)
{
	const struct rf_range *range = rf_ranges_at(&advisor->ranges, cursor);

	if (!(slot->flags & RF_SLOT_HELD) || advisor->policy != RF_OMIT)
		return false;
	for (; range && range->start <= start && range->mark && rf_range_wants_mark(range) &&
	       !(range->flags & UNSTEADY);
	     range = rf_ranges_next(&advisor->ranges, &cursor)) {
		start = range->end;
		if (start >= end)
			return true;
	}
	return false;
}

/* The pages of @slot are counted, and marking them has given @rc. */
static int finish(struct rf_advisor *advisor, struct rf_slot *slot, bool forking, int rc,
		  struct rf_error *error)
{
	uintptr_t start, end;

	if (rc == -EINVAL && advisor->policy == RF_OMIT)
		rc = ask_and_mark(advisor, slot, forking, error);
	rf_advise_extent(advisor, slot, &start, &end);
	if (rc < 0) {
		rc = rf_advise_explain(advisor, start, end, rc, error);
		undo(advisor, slot);
		return rc;
	}
	/* Only now: a failure leaves no doubt about what others hold. */
	if (doubt_of(slot)) {
		rf_ranges_set_flags(&advisor->ranges, start, end, RF_RANGE_DOUBT, 0);
		rf_ranges_set_nature(&advisor->ranges, start, end, RF_NATURE_UNASKED);
	}
	rf_ranges_tidy(&advisor->ranges, start, end);
	return 0;
}

/* What no plan could be made for. */
static __attribute__((noinline)) int mark_by_steps(struct rf_advisor *advisor, struct rf_slot *slot,
						   uintptr_t start, uintptr_t end, bool forking,
						   struct rf_error *error)
{
	if (start >= end)
		return advisor->policy == RF_WIPE ? refuse_huge_ends(advisor, slot, error) : 0;
	/* Also if this fails: memory in doubt that was marked anew may be shared by now. */
	advisor->dirty = true;
	return finish(advisor, slot, forking,
		      count_and_mark(advisor, slot, start, end, forking), error);
}

/* The kernel has refused what a plan is for. */
static __attribute__((noinline)) int mark_refused(struct rf_advisor *advisor, struct rf_slot *slot,
						  const struct rf_plan *plan, int rc,
						  struct rf_error *error)
{
	struct rf_run run = { .start = plan->start, .end = plan->end };
	uintptr_t start, end;

	rf_advise_extent(advisor, slot, &start, &end);
	rf_advise_count(advisor, slot, start, end);
	rf_advise_set_fresh(advisor, &run);
	return finish(advisor, slot, false, rc, error);
}

int rf_advise_now(struct rf_advisor *advisor, struct rf_slot *slot, unsigned int how, bool *ask,
		  struct rf_error *error)
{
	bool edges = (slot->start | slot->end) & (advisor->kernel->page_size - 1);
	bool held = slot->flags & RF_SLOT_HELD, simple;
	struct rf_cursor cursor = { 0, 0 };
	struct rf_plan plan;
	uintptr_t start, end;
	int rc;

	error->cause = RF_CAUSE_NONE;
	*ask = held && edges;
	/* Without /proc its edges are the kernel's to copy, huge pages or not. */
	if (!held && edges && !advisor->whole && advisor->policy == RF_OMIT &&
	    !(how & RF_ADVISE_NOWAIT))
		(void)ask_unheld_ends(advisor, slot);
	rf_advise_extent(advisor, slot, &start, &end);
	simple = !(how & RF_ADVISE_FORKING) && start < end && has_no_gaps(slot, start, end);
	if (rf_likely(simple)) {
		cursor = rf_ranges_seek(&advisor->ranges, start);
		if (is_covered(advisor, slot, cursor, start, end))
			return RF_ADVISE_COVERED;
	}
	if (how & RF_ADVISE_NOWAIT)
		return -EAGAIN;
	if (rf_unlikely(!simple || !has_room(advisor) ||
			!rf_ranges_plan_add(&advisor->ranges, cursor, start, end, true,
					    doubt_of(slot), &plan)))
		return mark_by_steps(advisor, slot, start, end, how & RF_ADVISE_FORKING, error);
	if (rf_likely(plan.start < plan.end)) {
		advisor->dirty = true;
		rc = call_mark(advisor, plan.start, plan.end);
		if (rf_unlikely(rc < 0))
			return mark_refused(advisor, slot, &plan, rc, error);
	}
	rf_ranges_commit(&advisor->ranges, &plan);
	return 0;
}
