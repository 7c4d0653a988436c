/* SPDX-License-Identifier: BSD-3-Clause */
/* The common cases of counting in one search and one step, all within one leaf. */
#include "ranges_internal.h"

/* Does [@start, @end), whose place is @cursor, touch ranges of another leaf too? */
static inline bool leaves_leaf(const struct rf_ranges *ranges, struct rf_cursor cursor,
			       uintptr_t start, uintptr_t end)
{
	const struct rf_leaf *before;

	if (cursor.entry + 1 < ranges->leaf_count &&
	    directory_of(ranges)[cursor.entry + 1].first <= end)
		return true;
	if (cursor.item || !cursor.entry)
		return false;
	before = leaf_at(ranges, cursor.entry - 1);
	return before->ranges[before->used - 1].end == start;
}

/* Append @range to what will be, joined with what is before it where they are alike. */
static inline void put(struct rf_plan *plan, const struct rf_range *range)
{
	struct rf_range *last = plan->ranges + plan->count - 1;

	if (plan->start < plan->end && plan->end == range->start)
		plan->beside += range->mark;
	if (plan->count && is_same(last, range))
		last->end = range->end;
	else
		plan->ranges[plan->count++] = *range;
}

static inline void put_part(struct rf_plan *plan, const struct rf_range *range, uintptr_t start,
			    uintptr_t end)
{
	struct rf_range part = *range;

	part.start = start;
	part.end = end;
	put(plan, &part);
}

/* The mark of [@start, @end) changes. One call is to do, so false if another part's did. */
static inline bool change_mark(struct rf_plan *plan, uintptr_t start, uintptr_t end)
{
	const struct rf_range *last = plan->ranges + plan->count - 1;

	if (plan->start == plan->end) {
		plan->start = start;
		plan->beside = plan->count && last->end == start && last->mark;
	} else if (plan->end != start) {
		return false;
	}
	plan->end = end;
	return true;
}

/* Is it known what the mark of @range is, and that nothing is to do but to count? */
static inline bool is_steady(const struct rf_range *range, const struct rf_range *fresh)
{
	uint8_t unsteady = RF_RANGE_RETRY;

	if (fresh || range->count > 1)
		unsteady |= RF_RANGE_DOUBT;
	if (range->flags & unsteady || rf_range_is_unwanted(range))
		return false;
	return !fresh || (!(fresh->flags & RF_RANGE_DOUBT) && (range->mark || !fresh->mark));
}

/* Nothing touches [@start, @end), where all is to be @fresh. */
static inline void plan_new(const struct rf_range *fresh, uintptr_t start, uintptr_t end,
			    struct rf_plan *plan)
{
	plan->ranges[0] = *fresh;
	plan->ranges[0].start = start;
	plan->ranges[0].end = end;
	plan->count = 1;
	plan->replaced = 0;
	if (fresh->mark) {
		plan->start = start;
		plan->end = end;
	}
}

/* Is @range, which nothing touches before it, all of [@start, @end) and counted by one? */
static inline bool is_apart(const struct rf_range *range, const struct rf_range *last,
			    uintptr_t start, uintptr_t end)
{
	return range < last && range->start == start && range->end == end && range->count == 1 &&
	       (range + 1 == last || range[1].start > end);
}

static inline void plan_gone(const struct rf_range *range, struct rf_plan *plan)
{
	plan->replaced = 1;
	if (range->mark) {
		plan->start = range->start;
		plan->end = range->end;
	}
}

/* The stretch [@start, @end), which nobody counts yet. */
static inline bool put_fresh(struct rf_plan *plan, const struct rf_range *fresh, uintptr_t start,
			     uintptr_t end)
{
	if (fresh->mark && !change_mark(plan, start, end))
		return false;
	put_part(plan, fresh, start, end);
	return true;
}

/* All of @range, of which [@start, @end) is counted once more with @fresh, else once less. */
static inline bool put_counted(struct rf_plan *plan, const struct rf_range *range,
			       const struct rf_range *fresh, uintptr_t start, uintptr_t end)
{
	struct rf_range piece = *range;

	if (range->start < start)
		put_part(plan, range, range->start, start);
	piece.start = start;
	piece.end = end;
	piece.count += fresh ? 1 : -1;
	if (fresh && !piece.mark)
		piece.flags |= fresh->flags;
	if (piece.count)
		put(plan, &piece);
	else if (piece.mark && !change_mark(plan, start, end))
		return false;
	if (range->end > end)
		put_part(plan, range, end, range->end);
	return true;
}

/* @fresh: what nobody counts yet becomes such. NULL: all is counted once less. */
static inline __attribute__((always_inline)) bool
plan_change(const struct rf_ranges *ranges, struct rf_cursor cursor, uintptr_t start,
	    uintptr_t end, const struct rf_range *fresh, struct rf_plan *plan)
{
	const struct rf_range *range = NULL, *last = NULL;
	uintptr_t at, stop;
	uint32_t used = 0;

	plan->count = 0;
	plan->start = plan->end = 0;
	plan->beside = 0;
	plan->leaf = NULL;
	if (rf_likely(ranges->leaf_count)) {
		if (leaves_leaf(ranges, cursor, start, end))
			return false;
		plan->leaf = leaf_at(ranges, cursor.entry);
		used = plan->leaf->used;
		range = plan->leaf->ranges + cursor.item;
		last = plan->leaf->ranges + used;
	}
	plan->cursor = cursor;
	if (cursor.item && range[-1].end == start) {
		if (rf_range_is_unwanted(range - 1))
			return false;
		put(plan, range - 1);
		plan->cursor.item--;
	} else if (fresh && (range == last || range->start > end)) {
		plan_new(fresh, start, end, plan);
		return used < RF_LEAF_RANGES;
	} else if (!fresh && is_apart(range, last, start, end)) {
		plan_gone(range, plan);
		return is_steady(range, NULL);
	}
	for (at = start; at < end; at = stop) {
		/* One more takes three at most. */
		if (plan->count > RF_PLAN_RANGES - 3)
			return false;
		if (range == last || range->start > at) {
			stop = range < last && range->start < end ? range->start : end;
			if (!fresh || !put_fresh(plan, fresh, at, stop))
				return false;
			continue;
		}
		stop = range->end < end ? range->end : end;
		if (!is_steady(range, fresh) || !put_counted(plan, range, fresh, at, stop))
			return false;
		range++;
	}
	if (range < last && range->start == end) {
		if (rf_range_is_unwanted(range))
			return false;
		put(plan, range++);
	}
	plan->replaced = (uint32_t)(range - plan->leaf->ranges) - plan->cursor.item;
	return used + plan->count - plan->replaced <= RF_LEAF_RANGES;
}

bool rf_ranges_plan_add(const struct rf_ranges *ranges, struct rf_cursor cursor, uintptr_t start,
			uintptr_t end, bool mark, uint8_t flags, struct rf_plan *plan)
{
	const struct rf_range fresh = { .count = 1, .mark = mark, .flags = flags };

	plan->mark = mark;
	return plan_change(ranges, cursor, start, end, &fresh, plan);
}

bool rf_ranges_plan_sub(const struct rf_ranges *ranges, uintptr_t start, uintptr_t end,
			struct rf_plan *plan)
{
	plan->mark = false;
	return plan_change(ranges, rf_ranges_seek(ranges, start), start, end, NULL, plan);
}

void rf_ranges_commit(struct rf_ranges *ranges, const struct rf_plan *plan)
{
	const uint32_t count = plan->count, more = count - plan->replaced;
	struct rf_cursor cursor = plan->cursor;
	struct rf_leaf *leaf = plan->leaf;
	struct rf_range *at;
	uint32_t after, i;

	if (rf_unlikely(!leaf)) {
		rf_leaf_insert(ranges, 0);
		leaf = leaf_at(ranges, 0);
	}
	at = leaf->ranges + cursor.item;
	if (more) {
		after = leaf->used - cursor.item - plan->replaced;
		if (after)
			memmove(at + count, at + plan->replaced, after * sizeof(*at));
		leaf->used += more;
		ranges->count += more;
	}
	for (i = 0; i < count; i++)
		at[i] = plan->ranges[i];
	if (plan->start < plan->end) {
		const uint64_t nbytes = plan->end - plan->start;
		const uint32_t edges = 2 - 2 * (uint32_t)plan->beside;

		ranges->marks++;
		ranges->mark_edges += plan->mark ? edges : -edges;
		ranges->marked_bytes += plan->mark ? nbytes : -nbytes;
	}
	if (!cursor.item)
		directory_of(ranges)[cursor.entry].first = leaf->ranges[0].start;
	if (plan->count < plan->replaced)
		rf_leaf_shrunk(ranges, &cursor);
}
