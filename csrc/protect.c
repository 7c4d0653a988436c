/* SPDX-License-Identifier: BSD-3-Clause */
#include "protect.h"
#include "ask.h"
#include "kernel.h"
#include "marks.h"

#include <errno.h>
#include <sys/mman.h>

static uint8_t doubt_of(const struct rf_slot *slot)
{
	return slot->flags & RF_SLOT_HELD ? 0 : RF_RANGE_DOUBT;
}

/* The range keeps its mark, whatever this call does. */
static bool is_steady(const struct rf_range *range)
{
	return range->mark && rf_range_wants_mark(range) &&
	       !(range->flags & (RF_RANGE_UNSURE | RF_RANGE_RETRY));
}

/* The work on some pages. */
enum shape {
	COVERED,	/* nothing but to count them */
	ONE_RUN,	/* to mark or unmark .run */
	OTHER,		/* more than that */
};

struct look {
	struct rf_cursor cursor;	/* of the first page */
	struct rf_run run;
};

/*
 * Which pages of [@start, @end) are to be marked? Those in the ranges already have to be
 * steadily marked, for it to be one run.
 */
static inline enum shape look(const struct rf_tracker *tracker, uintptr_t start, uintptr_t end,
			      struct look *look)
{
	const struct rf_ranges *ranges = &tracker->ranges;
	struct rf_cursor cursor = rf_ranges_seek(ranges, start);
	const struct rf_range *range = rf_ranges_at(cursor);
	struct rf_run *run = &look->run;
	uintptr_t at, stop;

	look->cursor = cursor;
	run->start = run->end = 0;
	for (at = start; at < end; at = stop) {
		if (range && range->start <= at) {
			stop = rf_ranges_skip_marked(ranges, &cursor, end, 1);
			if (rf_unlikely(stop)) {
				range = rf_ranges_at(cursor);
				continue;
			}
			if (!is_steady(range))
				return OTHER;
			stop = range->end;
			if (stop < end)
				range = rf_ranges_next(ranges, &cursor);
			continue;
		}
		stop = range && range->start < end ? range->start : end;
		if (run->start < run->end)
			return OTHER;
		run->start = at;
		run->end = stop;
	}
	return run->start < run->end ? ONE_RUN : COVERED;
}

static bool to_mark_now(const struct rf_range *range)
{
	return rf_range_wants_mark(range) && (!range->mark || range->flags & RF_RANGE_UNSURE);
}

/*
 * Would a mark on these pages, which bear none, stay for good? Then the caller asks about the
 * mapping first, as shared memory must not get one. MADV_DOFORK changes nothing here, and succeeds
 * on memory that can be unmarked.
 */
static inline bool may_stay_marked(struct rf_tracker *tracker, uintptr_t start, uintptr_t end)
{
	return rf_unlikely(tracker->marks_stay) &&
	       rf_marks_call(tracker, start, end, MADV_DOFORK) < 0;
}

static bool some_may_stay_marked(struct rf_tracker *tracker, uintptr_t start, uintptr_t end)
{
	struct rf_run run = { .end = start };

	while (rf_tracker_next_run(tracker, end, rf_range_is_unmarked, &run))
		if (may_stay_marked(tracker, run.start, run.end))
			return true;
	return false;
}

/*
 * Mark [@start, @end), with @all also the pages that are marked beyond doubt.
 * -errno of the first refusal.
 */
static int mark_runs(struct rf_tracker *tracker, uintptr_t start, uintptr_t end, bool held,
		     bool all)
{
	const struct rf_change due = { .set = RF_RANGE_DUE };
	struct rf_run run = { .end = start };
	int rc;

	while (all ? rf_tracker_next_run(tracker, end, rf_range_wants_mark, &run)
		   : rf_tracker_next_odd(tracker, end, to_mark_now, &run)) {
		if (run.mark == RF_MARK_NONE && !rf_marks_have_room(tracker, run.start, run.end)) {
			if (!rf_tracker_trusts(tracker))
				return -EDQUOT;
			if (held)
				rf_ranges_change(&tracker->ranges, run.start, run.end, &due);
			continue;
		}
		/* Memory that is not held cannot wait for the next fork. */
		rc = rf_marks_set(tracker, &run, RF_MARK_DONTFORK);
		if (rc < 0)
			return rc;
	}
	return 0;
}

/*
 * madvise() refused: learn what is mapped, round to that, and try once more.
 * On failure the caller undoes the counts and marks made so far.
 */
static int ask_and_mark(struct rf_tracker *tracker, struct rf_child_list *list,
			struct rf_slot *slot, bool forking, struct rf_error *error)
{
	const struct rf_extent old = rf_tracker_extent(tracker, slot);
	struct rf_extent extent;
	uintptr_t hole;
	int rc = rf_vma_open(&tracker->reader);

	if (rc < 0) {
		error->cause = RF_CAUSE_NO_PROC;
		return rc;
	}
	rc = rf_ask_ends(tracker, slot);
	rf_tracker_count_again(tracker, slot, &old, 0);
	extent = rf_tracker_extent(tracker, slot);
	if (rc >= 0)
		rc = rf_ask(tracker, extent.start, extent.end, true, &hole);
	rf_vma_close(&tracker->reader);
	if (rc < 0) {
		error->cause = rc == -ENOMEM ? RF_CAUSE_ENGINE_MEMORY : RF_CAUSE_NO_PROC;
		return rc;
	}
	if (hole)
		return -ENOMEM;
	if (forking && rf_child_list_make(list, tracker, extent.start, extent.end) < 0) {
		error->cause = RF_CAUSE_ENGINE_MEMORY;
		return -ENOMEM;
	}
	rf_marks_clear_runs(tracker, extent.start, extent.end, rf_range_is_marked_but_shared);
	/* Marked or not: others may have unmarked a part of a huge page, which goes as a whole. */
	return mark_runs(tracker, extent.start, extent.end, slot->flags & RF_SLOT_HELD, true);
}

/*
 * Why the kernel said @rc to [@start, @end): *@error, unless that names a cause already,
 * and the errno that says it best.
 */
static int explain(struct rf_tracker *tracker, uintptr_t start, uintptr_t end, int rc,
		   struct rf_error *error)
{
	uintptr_t at, stop = end;
	struct rf_vma vma;
	int found = 1;

	error->start = start;
	error->end = end;
	if (error->cause != RF_CAUSE_NONE)
		return rc;
	error->cause = RF_CAUSE_VMA_LIMIT;
	if (rc == -EDQUOT || rc == -EAGAIN)
		return -ENOMEM;
	if (rc != -ENOMEM) {
		error->cause = RF_CAUSE_REFUSED;
		return rc;
	}
	if (rf_vma_open(&tracker->reader) < 0)
		return rc;
	for (at = start; at < end; at = stop) {
		found = rf_vma_part(&tracker->reader, at, end, &vma, &stop);
		if (found <= 0)
			break;
	}
	rf_vma_close(&tracker->reader);
	if (found)
		return rc;
	error->cause = RF_CAUSE_NOT_MAPPED;
	error->start = at;
	error->end = stop;
	return rc;
}

/* The slot is no longer counted: unmark the pages that only it wanted marked. */
static void clean_up(struct rf_tracker *tracker, uintptr_t start, uintptr_t end)
{
	rf_marks_widen(tracker, &start, &end);
	rf_marks_clear_runs(tracker, start, end, rf_range_is_unwanted);
}

static void undo(struct rf_tracker *tracker, struct rf_slot *slot)
{
	const struct rf_change less = { .count = -1, .finds = rf_tracker_finds(slot) };
	struct rf_extent extent = rf_tracker_extent(tracker, slot);

	rf_tracker_count(tracker, extent, &less);
	clean_up(tracker, extent.start, extent.end);
	slot->start_shift = 0;
	slot->end_shift = 0;
}

/*
 * More than one run is to be marked, or the kernel has refused to mark @tried, as @refused
 * says.
 */
static __attribute__((noinline)) int protect_by_steps(struct rf_tracker *tracker,
						      struct rf_child_list *list,
						      struct rf_slot *slot, bool forking,
						      const struct rf_run *tried, int refused,
						      struct rf_error *error)
{
	const struct rf_change more = { .count = 1, .finds = rf_tracker_finds(slot) };
	const struct rf_change maybe = { .remark = true, .mark = RF_MARK_DONTFORK };
	const struct rf_change doubt = { .set = RF_RANGE_DOUBT, .rename = true };
	bool held = slot->flags & RF_SLOT_HELD;
	struct rf_extent extent = rf_tracker_extent(tracker, slot);
	int rc = refused;

	/* On failure too: memory in doubt that was marked again may be shared by now. */
	tracker->dirty = true;
	rf_tracker_count(tracker, extent, &more);
	/* madvise() advises part of a range before it refuses. */
	if (tried)
		rf_ranges_change(&tracker->ranges, tried->start, tried->end, &maybe);
	if (!rc && tracker->marks_stay && some_may_stay_marked(tracker, extent.start, extent.end))
		rc = -EINVAL;
	if (!rc)
		/* Memory that is not held may have been mapped anew since it was marked. */
		rc = mark_runs(tracker, extent.start, extent.end, held, !held);
	if (rc == -EINVAL)
		rc = ask_and_mark(tracker, list, slot, forking, error);
	extent = rf_tracker_extent(tracker, slot);
	if (rc < 0) {
		rc = explain(tracker, extent.start, extent.end, rc, error);
		undo(tracker, slot);
		return rc;
	}
	/* Nothing fails from here on: a failure must leave no doubt about others' memory. */
	if (!held)
		rf_ranges_change(&tracker->ranges, extent.start, extent.end, &doubt);
	return 0;
}

/*
 * Does it begin or end on pages that bear a mark? There madvise() takes any part of a huge
 * page, so its success does not tell base pages.
 */
static bool has_marked_end(const struct rf_tracker *tracker, const struct rf_slot *slot)
{
	const struct rf_range *first = rf_ranges_find(&tracker->ranges, slot->start);
	const struct rf_range *last = rf_ranges_find(&tracker->ranges, slot->end - 1);

	return (first && first->mark) || (last && last->mark);
}

/* Is one of its partial base pages the first or the last of a possible huge page? */
static bool has_end_like_huge_page(const struct rf_tracker *tracker, const struct rf_slot *slot)
{
	const uintptr_t base = tracker->kernel->page_size - 1;
	const unsigned int shift = rf_kernel_huge_shift(tracker->kernel);
	const uintptr_t huge = ((uintptr_t)1 << shift) - 1;

	return shift && ((slot->start & base && !(slot->start & huge & ~base)) ||
			 (slot->end & base && !((slot->end + base) & huge & ~base)));
}

/* Mark the run of @seen, and count all. */
static inline int protect_run(struct rf_tracker *tracker, struct rf_child_list *list,
			      struct rf_slot *slot, struct rf_extent extent,
			      const struct look *seen, struct rf_error *error)
{
	const struct rf_change marked = {
		.count = 1,
		.finds = rf_tracker_finds(slot),
		.set = doubt_of(slot),
		.remark = true,
		.mark = RF_MARK_DONTFORK,
	};
	int rc;

	tracker->dirty = true;
	rf_marks_announce(tracker, seen->run.start, seen->run.end);
	rc = rf_marks_call(tracker, seen->run.start, seen->run.end, MADV_DONTFORK);
	if (rf_unlikely(rc < 0)) {
		const struct rf_run tried = seen->run;

		return protect_by_steps(tracker, list, slot, false, &tried, rc, error);
	}
	rf_tracker_count_at(tracker, seen->cursor, extent, &marked);
	return 0;
}

int rf_protect(struct rf_tracker *tracker, struct rf_child_list *list, struct rf_slot *slot,
	       unsigned int how, struct rf_error *error)
{
	bool partial = (slot->start | slot->end) & (tracker->kernel->page_size - 1);
	bool held = slot->flags & RF_SLOT_HELD, fresh;
	enum shape shape = OTHER;
	struct rf_extent extent;
	struct look seen;
	int rc, ask;

	/*
	 * The ends of memory that is not held cannot wait for the next fork: by then they may
	 * belong to somebody else. Where every page touched is marked, madvise() refuses a part
	 * of a huge page that bears no mark, unless the base pages are all of it: that is soon
	 * enough. Without /proc they are the kernel's to copy.
	 */
	if (!held && !(how & RF_PROTECT_NOWAIT) &&
	    ((partial &&
	      (rf_tracker_trusts(tracker) || has_end_like_huge_page(tracker, slot))) ||
	     has_marked_end(tracker, slot)))
		(void)rf_ask_ends_alone(tracker, slot);
	extent = rf_tracker_extent(tracker, slot);
	if (rf_likely(!(how & RF_PROTECT_FORKING))) {
		if (extent.start < extent.end)
			shape = look(tracker, extent.start, extent.end, &seen);
		if (shape == COVERED && held)
			return RF_PROTECT_COVERED;
	}
	if (how & RF_PROTECT_NOWAIT)
		return -EAGAIN;
	fresh = shape == ONE_RUN && seen.run.start == extent.start && seen.run.end == extent.end;
	ask = held && (partial || (!fresh && has_marked_end(tracker, slot))) ? RF_PROTECT_ASK : 0;
	if (extent.start >= extent.end)
		return ask;
	if (rf_unlikely(how & RF_PROTECT_FORKING))
		rc = protect_by_steps(tracker, list, slot, true, NULL, -EINVAL, error);
	else if (rf_unlikely(shape != ONE_RUN ||
			     !rf_marks_have_room(tracker, seen.run.start, seen.run.end) ||
			     (!held && !fresh)))
		rc = protect_by_steps(tracker, list, slot, false, NULL, 0, error);
	else if (rf_unlikely(may_stay_marked(tracker, seen.run.start, seen.run.end)))
		rc = protect_by_steps(tracker, list, slot, false, NULL, -EINVAL, error);
	else
		rc = protect_run(tracker, list, slot, extent, &seen, error);
	return rc < 0 ? rc : ask;
}

/*
 * Pages that a registration without RF_HELD counts may be marked late only while another
 * one holds them. The released one may have been the last to do so.
 */
static bool is_doubted_and_due(const struct rf_range *range)
{
	return (range->flags & RF_RANGE_DOUBT) && (range->flags & RF_RANGE_DUE);
}

static void forget_due(struct rf_tracker *tracker, uintptr_t start, uintptr_t end)
{
	const struct rf_change forgotten = { .clear = RF_RANGE_DUE };
	struct rf_run run = { .end = start };

	while (rf_tracker_next_odd(tracker, end, is_doubted_and_due, &run))
		rf_ranges_change(&tracker->ranges, run.start, run.end, &forgotten);
}

static bool is_wiped_no_more(const struct rf_range *range)
{
	return range->mark == RF_MARK_WIPEONFORK && rf_range_wants_mark(range) &&
	       rf_range_best_mark(range) != RF_MARK_WIPEONFORK;
}

/*
 * A child is not to find zeros any more. Memory in doubt should be marked now or
 * never, but where the kernel refuses the next fork is to do it: zeros would be lost data.
 */
static void exchange_wiped(struct rf_tracker *tracker, uintptr_t start, uintptr_t end)
{
	const struct rf_change due = { .set = RF_RANGE_DUE };
	struct rf_run run = { .end = start };

	while (rf_tracker_next_odd(tracker, end, is_wiped_no_more, &run))
		if (rf_marks_exchange(tracker, &run) < 0)
			rf_ranges_change(&tracker->ranges, run.start, run.end, &due);
}

/* Marks that wait beside it, as parts of the same huge page, may go with it. */
static bool has_leftover_beside(const struct rf_ranges *ranges, uintptr_t start, uintptr_t end)
{
	const struct rf_range *before = start ? rf_ranges_find(ranges, start - 1) : NULL;
	const struct rf_range *after = rf_ranges_find(ranges, end);

	return (before && rf_range_is_unwanted(before)) || (after && rf_range_is_unwanted(after));
}

/* Which pages of [@start, @end), all of which are counted, does a release unmark? */
static inline enum shape look_back(const struct rf_tracker *tracker, uintptr_t start,
				   uintptr_t end, struct look *look)
{
	const struct rf_ranges *ranges = &tracker->ranges;
	struct rf_cursor cursor = rf_ranges_seek(ranges, start);
	const struct rf_range *range = rf_ranges_at(cursor);
	struct rf_run *run = &look->run;
	uintptr_t at, stop;

	look->cursor = cursor;
	run->start = run->end = 0;
	run->mark = RF_MARK_NONE;
	for (at = start; at < end; at = stop) {
		stop = rf_ranges_skip_marked(ranges, &cursor, end, 2);
		if (rf_unlikely(stop)) {
			range = rf_ranges_at(cursor);
			continue;
		}
		stop = range->end < end ? range->end : end;
		if (range->flags & RF_RANGE_RETRY || rf_range_is_marked_but_shared(range))
			return OTHER;
		if (rf_range_count(range) > 1) {
			/* Those that stay registered may want other bytes for a child. */
			if (range->flags & RF_RANGE_DOUBT || range->mark == RF_MARK_WIPEONFORK)
				return OTHER;
		} else if (range->mark) {
			if (run->start < run->end && (run->end != at || run->mark != range->mark))
				return OTHER;
			run->start = run->start < run->end ? run->start : at;
			run->end = stop;
			run->mark = range->mark;
		}
		if (stop < end)
			range = rf_ranges_next(ranges, &cursor);
	}
	if (rf_unlikely(ranges->leftover) && has_leftover_beside(ranges, start, end))
		return OTHER;
	return run->start < run->end ? ONE_RUN : COVERED;
}

void rf_protect_release(struct rf_tracker *tracker, const struct rf_slot *slot)
{
	const uint32_t edges = tracker->ranges.mark_edges;
	struct rf_extent extent = rf_tracker_extent(tracker, slot);
	struct rf_change less;
	struct look seen;
	enum shape shape;

	if (extent.start >= extent.end)
		return;
	shape = look_back(tracker, extent.start, extent.end, &seen);
	if (rf_likely(shape == ONE_RUN) &&
	    rf_marks_call(tracker, seen.run.start, seen.run.end,
			  rf_marks_undoing(seen.run.mark)) < 0)
		shape = OTHER;
	less = (struct rf_change){
		.count = -1,
		.finds = rf_tracker_finds(slot),
		.remark = shape != OTHER,
	};
	rf_tracker_count_at(tracker, seen.cursor, extent, &less);
	if (rf_unlikely(shape == OTHER)) {
		const uint64_t holes = tracker->hole_bytes;

		tracker->dirty = true;
		if (slot->flags & RF_SLOT_HELD)
			forget_due(tracker, extent.start, extent.end);
		exchange_wiped(tracker, extent.start, extent.end);
		clean_up(tracker, extent.start, extent.end);
		/* Unmapped; or mremap() has moved it, and has taken the mark along. */
		tracker->gone_bytes += tracker->hole_bytes - holes;
	}
	if (rf_unlikely(tracker->ranges.mark_edges > tracker->vma_budget) &&
	    rf_tracker_trusts(tracker))
		rf_marks_keep_to_budget(tracker, extent.start, extent.end);
	/* VMAs came free, which other ranges may wait for. */
	if (tracker->ranges.mark_edges < edges)
		rf_marks_retry_some(tracker);
}
