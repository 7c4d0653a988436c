/* SPDX-License-Identifier: BSD-3-Clause */
#include "marks.h"

#include <errno.h>

/* A release looks at so many ranges in search of some to unmark. */
#define LOOKED_AT 64

/* The share of all mappings that is given back: of 65530 about 1000, for some hundred threads. */
#define SHARE_GIVEN_BACK 64
#define SHORT_PAGES 16

static const struct rf_change unmark = { .remark = true, .clear = RF_RANGE_RETRY };

static bool is_marked(const struct rf_range *range)
{
	return range->mark;
}

static bool is_marked_and_not_stuck(const struct rf_range *range)
{
	return range->mark && !rf_range_is_stuck(range);
}

/* Unmarked parts of @run may bear a mark now: madvise() advises part of a range, then refuses. */
static void clear_partly_set(struct rf_tracker *tracker, const struct rf_run *run, uint8_t mark)
{
	const struct rf_change maybe = { .remark = true, .mark = mark };
	struct rf_run part = { .end = run->start };

	while (rf_tracker_next_run(tracker, run->end, rf_range_is_unmarked, &part)) {
		part.mark = mark;
		rf_ranges_change(&tracker->ranges, part.start, part.end, &maybe);
		rf_marks_clear(tracker, &part);
	}
}

int rf_marks_exchange(struct rf_tracker *tracker, const struct rf_run *run)
{
	const struct rf_change made = rf_marks_made(run->best);
	int rc = rf_marks_call(tracker, run->start, run->end, rf_marks_advice(run->best));

	if (rc >= 0)
		rc = rf_marks_call(tracker, run->start, run->end, rf_marks_undoing(run->mark));
	if (rc < 0)
		(void)rf_marks_call(tracker, run->start, run->end, rf_marks_undoing(run->best));
	else
		rf_ranges_change(&tracker->ranges, run->start, run->end, &made);
	return rc;
}

int rf_marks_set(struct rf_tracker *tracker, const struct rf_run *run, uint8_t mark)
{
	struct rf_change made;
	int rc;

	if (run->mark == RF_MARK_WIPEONFORK && run->best != RF_MARK_WIPEONFORK)
		return rf_marks_exchange(tracker, run);
	mark = run->mark ? run->mark : mark;
	made = rf_marks_made(mark);
	rf_marks_announce(tracker, run->start, run->end);
	rc = rf_marks_call(tracker, run->start, run->end, rf_marks_advice(mark));
	if (rc >= 0)
		rf_ranges_change(&tracker->ranges, run->start, run->end, &made);
	else if (run->unmarked)
		clear_partly_set(tracker, run, mark);
	return rc;
}

/* Is there a mark that is wanted in the huge page [@first, @last) outside [@start, @end)? */
static bool is_wanted_beside(const struct rf_tracker *tracker, uintptr_t first, uintptr_t last,
			     uintptr_t start, uintptr_t end)
{
	struct rf_cursor cursor = rf_ranges_seek(&tracker->ranges, first);
	const struct rf_range *range = rf_ranges_at(cursor);

	for (; range && range->start < last; range = rf_ranges_next(&tracker->ranges, &cursor))
		if ((range->start < start || range->end > end) && range->mark &&
		    rf_range_wants_mark(range))
			return true;
	return false;
}

/* Unmark [@start, @end), which lies in @vma and in a run of that @mark. */
static void clear_mapping(struct rf_tracker *tracker, const struct rf_vma *vma, uintptr_t start,
			  uintptr_t end, uint8_t mark)
{
	struct rf_change refused = { .set = RF_RANGE_RETRY };
	uintptr_t first, last;
	int rc;

	/* A huge page goes as a whole, unless another registration wants it marked. */
	first = rf_down(start, vma->shift);
	if (!vma->shared && is_wanted_beside(tracker, first, rf_up(start, vma->shift), start, end))
		first = rf_up(start, vma->shift);
	last = rf_up(end, vma->shift);
	if (!vma->shared && is_wanted_beside(tracker, rf_down(end, vma->shift), last, start, end))
		last = rf_down(end, vma->shift);
	if (first >= last)
		return;
	rc = rf_marks_call(tracker, first, last, rf_marks_undoing(mark));
	/*
	 * EINVAL now: a huge page, on Linux 7.3; a device's mapping, which no child ever had or
	 * will have; or one that takes no mark either, and so bears none.
	 */
	if (rc >= 0 ||
	    (rc == -EINVAL && vma->shift == tracker->base_shift &&
	     (!vma->anonymous ||
	      rf_marks_call(tracker, first, last, rf_marks_advice(mark)) < 0))) {
		rf_ranges_change(&tracker->ranges, first, last, &unmark);
		return;
	}
	first = first < start ? start : first;
	last = last > end ? end : last;
	refused.tried = rc != -ENOMEM && rc != -EAGAIN;
	rf_ranges_change(&tracker->ranges, first, last, &refused);
}

/*
 * Unmark @run mapping by mapping, as the kernel refused it as a whole: because of a
 * hole, a huge page only partly released, or the VMA limit.
 */
static void clear_mappings(struct rf_tracker *tracker, const struct rf_run *run)
{
	const struct rf_change refused = { .set = RF_RANGE_RETRY };
	struct rf_ranges *ranges = &tracker->ranges;
	int opened = rf_vma_open(&tracker->reader), rc = opened;
	uintptr_t at = run->start, stop;
	struct rf_vma vma;

	for (; rc >= 0 && at < run->end; at = stop) {
		rc = rf_ranges_reserve(ranges, ranges->registrations);
		if (rc >= 0)
			rc = rf_vma_part(&tracker->reader, at, run->end, &vma, &stop);
		if (rc < 0)
			break;
		if (rc) {
			clear_mapping(tracker, &vma, at, stop, run->mark);
			continue;
		}
		tracker->hole_bytes += stop - at;
		rf_ranges_change(ranges, at, stop, &unmark);
	}
	if (rc < 0)
		rf_ranges_change(ranges, at, run->end, &refused);
	if (opened >= 0)
		rf_vma_close(&tracker->reader);
}

void rf_marks_clear(struct rf_tracker *tracker, const struct rf_run *run)
{
	if (rf_marks_call(tracker, run->start, run->end, rf_marks_undoing(run->mark)) >= 0)
		rf_ranges_change(&tracker->ranges, run->start, run->end, &unmark);
	else
		clear_mappings(tracker, run);
}

void rf_marks_clear_runs(struct rf_tracker *tracker, uintptr_t start, uintptr_t end,
			 bool (*belongs)(const struct rf_range *))
{
	struct rf_run run = { .end = start };

	while (rf_tracker_next_odd(tracker, end, belongs, &run))
		rf_marks_clear(tracker, &run);
}

void rf_marks_widen(const struct rf_tracker *tracker, uintptr_t *start, uintptr_t *end)
{
	const struct rf_ranges *ranges = &tracker->ranges;
	const struct rf_range *range, *beside;

	while ((beside = rf_ranges_find(ranges, *end)) && rf_range_is_unwanted(beside) &&
	       (range = rf_ranges_find(ranges, *end - 1)) && rf_range_is_unwanted(range))
		*end = beside->end;
	while (*start && (beside = rf_ranges_find(ranges, *start - 1)) &&
	       rf_range_is_unwanted(beside) && (range = rf_ranges_find(ranges, *start)) &&
	       rf_range_is_unwanted(range))
		*start = beside->start;
}

static bool is_held(const struct rf_range *range)
{
	return !(range->flags & RF_RANGE_DOUBT);
}

void rf_marks_leave(struct rf_tracker *tracker, const struct rf_run *run)
{
	const struct rf_change due = { .set = RF_RANGE_DUE };
	struct rf_run held = { .end = run->start };

	tracker->dirty = true;
	rf_marks_clear(tracker, run);
	while (rf_tracker_next_run(tracker, run->end, is_held, &held))
		rf_ranges_change(&tracker->ranges, held.start, held.end, &due);
}

void rf_marks_clear_all(struct rf_tracker *tracker)
{
	struct rf_run run = { .end = 0 };

	while (rf_tracker_next_run(tracker, UINTPTR_MAX, is_marked, &run))
		rf_marks_clear(tracker, &run);
}

/* Stuck memory too, which may be unmapped by now. */
static bool is_to_unmark(const struct rf_range *range)
{
	return range->flags & RF_RANGE_RETRY;
}

static bool is_to_retry(const struct rf_range *range)
{
	return is_to_unmark(range) && !rf_range_is_stuck(range);
}

void rf_marks_retry_all(struct rf_tracker *tracker)
{
	struct rf_run run = { .end = 0 };

	if (rf_likely(!tracker->ranges.retry))
		return;
	rf_marks_clear_runs(tracker, 0, UINTPTR_MAX, is_to_unmark);
	tracker->ranges.retry = rf_tracker_next_odd(tracker, UINTPTR_MAX, is_to_unmark, &run);
	tracker->retry_at = 0;
}

void rf_marks_retry_next(struct rf_tracker *tracker)
{
	const struct rf_ranges *ranges = &tracker->ranges;
	const uintptr_t start = tracker->retry_at;
	struct rf_cursor cursor = rf_ranges_seek(ranges, start);
	const struct rf_range *range = rf_ranges_at(cursor);
	unsigned int looked_at = 0;

	for (; range && looked_at < LOOKED_AT; range = rf_ranges_next(ranges, &cursor))
		looked_at++;
	tracker->retry_at = range ? range->start : 0;
	rf_marks_clear_runs(tracker, start, range ? range->start : UINTPTR_MAX, is_to_retry);
}

/* Where MADV_DONTFORK begins or ends beside that range, or beside none. */
static int edges_more(const struct rf_range *beside)
{
	if (!beside || !beside->mark)
		return 1;
	return beside->mark == RF_MARK_DONTFORK ? -1 : 0;
}

/* A mark beside a mark of the same kind takes no further VMA. */
bool rf_marks_touch(const struct rf_tracker *tracker, uintptr_t start, uintptr_t end)
{
	const struct rf_ranges *ranges = &tracker->ranges;
	int more;

	more = edges_more(start ? rf_ranges_find(ranges, start - 1) : NULL) +
	       edges_more(rf_ranges_find(ranges, end));
	return more <= 0 || ranges->mark_edges + (uint64_t)more <= tracker->vma_budget;
}

static bool is_over_budget(const struct rf_tracker *tracker)
{
	return tracker->ranges.mark_edges > tracker->vma_budget;
}

/* All that bears one mark around @address, whatever mark would serve it best. */
static bool marked_run(const struct rf_tracker *tracker, uintptr_t address, struct rf_run *run)
{
	const struct rf_ranges *ranges = &tracker->ranges;
	const struct rf_range *range = rf_ranges_find(ranges, address);

	if (!range || !is_marked_and_not_stuck(range))
		return false;
	*run = (struct rf_run){ .start = range->start, .end = range->end, .mark = range->mark };
	while (run->start && (range = rf_ranges_find(ranges, run->start - 1)) &&
	       is_marked_and_not_stuck(range) && range->mark == run->mark)
		run->start = range->start;
	while ((range = rf_ranges_find(ranges, run->end)) && is_marked_and_not_stuck(range) &&
	       range->mark == run->mark)
		run->end = range->end;
	return true;
}

/*
 * A release in the middle of a run makes two runs. If that is one too many, the kernel gets the
 * marked pieces of the released pages, or else the shorter neighbour. If that one touched a run
 * with another mark, which now has an edge of its own, the next neighbour follows.
 */
void rf_marks_keep_to_budget(struct rf_tracker *tracker, uintptr_t start, uintptr_t end)
{
	struct rf_run run = { .end = start }, left, right;
	bool has_left, has_right;
	const struct rf_range *range;

	while (is_over_budget(tracker) &&
	       rf_tracker_next_run(tracker, end, is_marked_and_not_stuck, &run))
		rf_marks_leave(tracker, &run);
	while (is_over_budget(tracker)) {
		has_left = start && marked_run(tracker, start - 1, &left);
		has_right = marked_run(tracker, end, &right);
		if (has_left && (!has_right || left.end - left.start < right.end - right.start)) {
			run = left;
			start = left.start;
		} else if (has_right) {
			run = right;
			end = right.end;
		} else {
			return;
		}
		rf_marks_leave(tracker, &run);
		/* The kernel refused. The next fork unmarks it, which is enough. */
		range = rf_ranges_find(&tracker->ranges, run.start);
		if (range && range->mark)
			return;
	}
}

void rf_marks_give_back(struct rf_tracker *tracker)
{
	const uint32_t share = tracker->kernel->max_map_count / SHARE_GIVEN_BACK;
	const uint32_t most = tracker->ranges.mark_edges - share;
	size_t nbytes = SHORT_PAGES * (size_t)tracker->kernel->page_size;
	struct rf_run run = { .end = 0 };

	/* Where marks are few they are not the reason. */
	if (!rf_tracker_trusts(tracker) || tracker->ranges.mark_edges < 2 * share)
		return;
	/* Runs of up to so many bytes, then longer ones. */
	for (; tracker->ranges.mark_edges > most && nbytes; nbytes *= SHORT_PAGES, run.end = 0)
		while (tracker->ranges.mark_edges > most &&
		       rf_tracker_next_run(tracker, UINTPTR_MAX, rf_range_is_marked_and_held, &run))
			if (run.end - run.start <= nbytes)
				rf_marks_leave(tracker, &run);
}

/* Unmark shared memory in [@start, @end), whose registration may be under way. */
static void drop_shared(struct rf_vma_reader *reader, uintptr_t start, uintptr_t end)
{
	struct rf_vma vma;
	uintptr_t stop;
	int rc;

	for (; start < end; start = stop) {
		rc = rf_vma_part(reader, start, end, &vma, &stop);
		if (rc < 0)
			return;
		if (rc && vma.shared)
			(void)rf_sys_madvise(start, stop - start, MADV_DOFORK);
	}
}

/* The ranges as they lie there: the interrupted call may be in the middle of any change. */
static void drop_shared_ranges(struct rf_vma_reader *reader, const struct rf_ranges *ranges)
{
	const struct rf_range *range, *last;
	const struct rf_leaf *leaf;
	uint32_t entry;

	/* Without memory they are being moved by it. */
	if (!ranges->leaves.capacity || !ranges->directory.capacity)
		return;
	for (entry = 0; entry < ranges->leaf_count; entry++) {
		leaf = rf_ranges_leaf(ranges, entry);
		last = leaf->ranges + leaf->used;
		for (range = leaf->ranges; range < last; range++)
			if (range->mark && range->nature == RF_NATURE_UNASKED)
				drop_shared(reader, range->start, range->end);
	}
}

void rf_marks_drop_shared(const struct rf_tracker *tracker)
{
	struct rf_vma_reader reader;

	rf_vma_init(&reader, tracker->kernel->procmap_query, 0);
	if (rf_vma_open(&reader) < 0)
		return;
	drop_shared(&reader, tracker->announced_start, tracker->announced_end);
	drop_shared_ranges(&reader, &tracker->ranges);
	rf_vma_close(&reader);
	rf_memory_free(&reader.table);
}
