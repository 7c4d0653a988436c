/* SPDX-License-Identifier: BSD-3-Clause */
#include "ranges_internal.h"

#include <errno.h>

void rf_ranges_init(struct rf_ranges *ranges)
{
	memset(ranges, 0, sizeof(*ranges));
	ranges->leaves.item_size = sizeof(struct rf_leaf);
	ranges->directory.item_size = sizeof(struct rf_leaf_entry);
}

void rf_ranges_clear(struct rf_ranges *ranges)
{
	struct rf_memory leaves = ranges->leaves, directory = ranges->directory;
	uint32_t capacity = ranges->capacity;

	memset(ranges, 0, sizeof(*ranges));
	ranges->leaves = leaves;
	ranges->directory = directory;
	ranges->capacity = capacity;
}

void rf_ranges_abandon(struct rf_ranges *ranges)
{
	rf_memory_abandon(&ranges->leaves);
	rf_memory_abandon(&ranges->directory);
	ranges->capacity = 0;
}

int rf_ranges_grow(struct rf_ranges *ranges, uint32_t count)
{
	/* Two neighbours hold at least as many as half of one that was split, and one more. */
	uint64_t leaves = 2 * (uint64_t)count / (RF_LEAF_RANGES / 2 + 1) + 3;

	if (count == UINT32_MAX)
		return -ENOMEM;
	if (rf_memory_grow(&ranges->leaves, (uint32_t)leaves) < 0 ||
	    rf_memory_grow(&ranges->directory, (uint32_t)leaves) < 0)
		return -ENOMEM;
	ranges->capacity = count;
	return 0;
}

struct rf_cursor rf_ranges_seek(const struct rf_ranges *ranges, uintptr_t address)
{
	const struct rf_leaf_entry *directory = directory_of(ranges);
	uint32_t low = 0, high = ranges->leaf_count, middle;
	struct rf_cursor cursor = { 0, 0 };
	const struct rf_leaf *leaf;

	if (!high)
		return cursor;
	/* The last leaf that begins at or before the address, or the first. */
	while (high - low > 1) {
		middle = low + (high - low) / 2;
		if (directory[middle].first <= address)
			low = middle;
		else
			high = middle;
	}
	cursor.entry = low;
	leaf = leaf_at(ranges, low);
	low = 0;
	high = leaf->used;
	while (low < high) {
		middle = low + (high - low) / 2;
		if (leaf->ranges[middle].end <= address)
			low = middle + 1;
		else
			high = middle;
	}
	cursor.item = low;
	if (low == leaf->used && cursor.entry + 1 < ranges->leaf_count) {
		cursor.entry++;
		cursor.item = 0;
	}
	return cursor;
}

struct rf_range *rf_ranges_at(const struct rf_ranges *ranges, struct rf_cursor cursor)
{
	struct rf_leaf *leaf;

	if (cursor.entry >= ranges->leaf_count)
		return NULL;
	leaf = leaf_at(ranges, cursor.entry);
	return cursor.item < leaf->used ? &leaf->ranges[cursor.item] : NULL;
}

struct rf_range *rf_ranges_next(const struct rf_ranges *ranges, struct rf_cursor *cursor)
{
	cursor->item++;
	if (cursor->item >= leaf_at(ranges, cursor->entry)->used &&
	    cursor->entry + 1 < ranges->leaf_count) {
		cursor->entry++;
		cursor->item = 0;
	}
	return rf_ranges_at(ranges, *cursor);
}

struct rf_range *rf_ranges_find(const struct rf_ranges *ranges, uintptr_t address)
{
	struct rf_range *range = rf_ranges_at(ranges, rf_ranges_seek(ranges, address));

	return range && range->start <= address ? range : NULL;
}

static uint32_t leaf_take(struct rf_ranges *ranges)
{
	struct rf_leaf *leaves = ranges->leaves.items;
	uint32_t index = ranges->free_leaf;

	if (index) {
		ranges->free_leaf = leaves[--index].next_free;
	} else {
		index = ranges->leaves_touched++;
		RF_ASSERT(index < ranges->leaves.capacity);
	}
	leaves[index].used = 0;
	return index;
}

void rf_leaf_insert(struct rf_ranges *ranges, uint32_t entry)
{
	struct rf_leaf_entry *directory = directory_of(ranges);

	RF_ASSERT(ranges->leaf_count < ranges->directory.capacity);
	memmove(directory + entry + 1, directory + entry,
		(ranges->leaf_count - entry) * sizeof(*directory));
	ranges->leaf_count++;
	directory[entry].leaf = leaf_take(ranges);
}

static void leaf_remove(struct rf_ranges *ranges, uint32_t entry)
{
	struct rf_leaf_entry *directory = directory_of(ranges);

	leaf_at(ranges, entry)->next_free = ranges->free_leaf;
	ranges->free_leaf = directory[entry].leaf + 1;
	ranges->leaf_count--;
	memmove(directory + entry, directory + entry + 1,
		(ranges->leaf_count - entry) * sizeof(*directory));
}

/* Split a full leaf where @cursor wants to insert, and follow with the cursor. */
static void leaf_split(struct rf_ranges *ranges, struct rf_cursor *cursor)
{
	bool appending = cursor->entry + 1 == ranges->leaf_count && cursor->item == RF_LEAF_RANGES;
	uint32_t keep = appending ? RF_LEAF_RANGES : RF_LEAF_RANGES / 2 + 1;
	struct rf_leaf *left, *right;

	rf_leaf_insert(ranges, cursor->entry + 1);
	left = leaf_at(ranges, cursor->entry);
	right = leaf_at(ranges, cursor->entry + 1);
	right->used = left->used - keep;
	memcpy(right->ranges, left->ranges + keep, right->used * sizeof(*right->ranges));
	left->used = keep;
	if (right->used)
		directory_of(ranges)[cursor->entry + 1].first = right->ranges[0].start;
	if (cursor->item > keep || appending) {
		cursor->item -= keep;
		cursor->entry++;
	}
}

/*
 * Room for what goes before a full leaf: behind the leaf before it, or, lest those
 * who register downwards leave every leaf half full, in a leaf of its own.
 */
static void make_room_before(struct rf_ranges *ranges, struct rf_cursor *cursor)
{
	/* A cut has moved its first start, and counts on the insertion to say so. */
	directory_of(ranges)[cursor->entry].first = leaf_at(ranges, cursor->entry)->ranges[0].start;
	if (cursor->entry && leaf_at(ranges, cursor->entry - 1)->used < RF_LEAF_RANGES) {
		cursor->entry--;
		cursor->item = leaf_at(ranges, cursor->entry)->used;
		return;
	}
	rf_leaf_insert(ranges, cursor->entry);
}

/* Insert before @cursor; it then points to the new range. */
static void insert(struct rf_ranges *ranges, struct rf_cursor *cursor, struct rf_range range)
{
	struct rf_leaf *leaf;

	RF_ASSERT(ranges->count < ranges->capacity);
	if (!ranges->leaf_count)
		rf_leaf_insert(ranges, 0);
	leaf = leaf_at(ranges, cursor->entry);
	if (leaf->used == RF_LEAF_RANGES) {
		if (cursor->item)
			leaf_split(ranges, cursor);
		else
			make_room_before(ranges, cursor);
		leaf = leaf_at(ranges, cursor->entry);
	}
	memmove(leaf->ranges + cursor->item + 1, leaf->ranges + cursor->item,
		(leaf->used - cursor->item) * sizeof(range));
	leaf->ranges[cursor->item] = range;
	leaf->used++;
	ranges->count++;
	if (!cursor->item)
		directory_of(ranges)[cursor->entry].first = range.start;
}

/* Append the leaf after @entry to it and drop that one. */
static void leaf_join(struct rf_ranges *ranges, uint32_t entry)
{
	struct rf_leaf *left = leaf_at(ranges, entry), *right = leaf_at(ranges, entry + 1);

	memcpy(left->ranges + left->used, right->ranges, right->used * sizeof(*right->ranges));
	left->used += right->used;
	leaf_remove(ranges, entry + 1);
}

/* An only leaf stays, empty or not: registrations come again. */
void rf_leaf_shrunk(struct rf_ranges *ranges, struct rf_cursor *cursor)
{
	uint32_t entry = cursor->entry, used = leaf_at(ranges, entry)->used;

	if (ranges->leaf_count == 1)
		return;
	if (!used) {
		leaf_remove(ranges, entry);
		return;
	}
	if (entry + 1 < ranges->leaf_count &&
	    used + leaf_at(ranges, entry + 1)->used <= RF_LEAF_JOIN) {
		leaf_join(ranges, entry);
		used = leaf_at(ranges, entry)->used;
	}
	if (entry && used + leaf_at(ranges, entry - 1)->used <= RF_LEAF_JOIN) {
		cursor->entry--;
		cursor->item += leaf_at(ranges, entry - 1)->used;
		leaf_join(ranges, entry - 1);
	}
	if (cursor->item >= leaf_at(ranges, cursor->entry)->used &&
	    cursor->entry + 1 < ranges->leaf_count) {
		cursor->entry++;
		cursor->item = 0;
	}
}

/* Remove the range at @cursor, which then points to the one after it. */
static void erase(struct rf_ranges *ranges, struct rf_cursor *cursor)
{
	struct rf_leaf *leaf = leaf_at(ranges, cursor->entry);

	leaf->used--;
	ranges->count--;
	memmove(leaf->ranges + cursor->item, leaf->ranges + cursor->item + 1,
		(leaf->used - cursor->item) * sizeof(*leaf->ranges));
	if (!cursor->item && leaf->used)
		directory_of(ranges)[cursor->entry].first = leaf->ranges[0].start;
	rf_leaf_shrunk(ranges, cursor);
}

void rf_ranges_cut(struct rf_ranges *ranges, uintptr_t address)
{
	struct rf_cursor cursor = rf_ranges_seek(ranges, address);
	struct rf_range *range = rf_ranges_at(ranges, cursor), left;

	if (!range || range->start >= address)
		return;
	left = *range;
	left.end = address;
	range->start = address;
	/* Its leaf's first start, if it was that, is put back by the insertion. */
	insert(ranges, &cursor, left);
	if (left.flags & RF_RANGE_RETRY)
		ranges->retries++;
}

/* Released, but marked still: its memory may be another's by now. */
static void revive(struct rf_ranges *ranges, struct rf_range *range)
{
	ranges->retries -= !!(range->flags & RF_RANGE_RETRY);
	range->flags = RF_RANGE_DOUBT;
	range->nature = RF_NATURE_UNASKED;
}

void rf_ranges_add(struct rf_ranges *ranges, uintptr_t start, uintptr_t end, uint8_t flags)
{
	struct rf_range fresh = { .count = 1, .flags = flags }, *range;
	struct rf_cursor cursor;
	uintptr_t at = start;

	RF_ASSERT(start < end);
	rf_ranges_cut(ranges, start);
	rf_ranges_cut(ranges, end);
	cursor = rf_ranges_seek(ranges, start);
	while (at < end) {
		range = rf_ranges_at(ranges, cursor);
		if (range && range->start == at) {
			if (!range->count)
				revive(ranges, range);
			range->count++;
			range->flags |= flags;
			if (range->flags & RF_RANGE_DOUBT)
				range->nature = RF_NATURE_UNASKED;
			at = range->end;
		} else {
			fresh.start = at;
			fresh.end = range && range->start < end ? range->start : end;
			at = fresh.end;
			insert(ranges, &cursor, fresh);
		}
		rf_ranges_next(ranges, &cursor);
	}
}

void rf_ranges_sub(struct rf_ranges *ranges, uintptr_t start, uintptr_t end)
{
	struct rf_cursor cursor;
	struct rf_range *range;

	rf_ranges_cut(ranges, start);
	rf_ranges_cut(ranges, end);
	cursor = rf_ranges_seek(ranges, start);
	for (range = rf_ranges_at(ranges, cursor); range && range->start < end;
	     range = rf_ranges_next(ranges, &cursor)) {
		RF_ASSERT(range->count);
		range->count--;
		if (!range->count)
			range->flags &= (uint8_t)~(RF_RANGE_DOUBT | RF_RANGE_DUE);
	}
}

void rf_ranges_set_mark(struct rf_ranges *ranges, uintptr_t start, uintptr_t end, bool mark)
{
	struct rf_cursor cursor = rf_ranges_seek(ranges, start ? start - 1 : 0);
	struct rf_range *range = rf_ranges_at(ranges, cursor);
	bool outside = false, before;

	ranges->marks++;
	if (range && range->start < start) {
		outside = range->mark && range->end == start;
		range = rf_ranges_next(ranges, &cursor);
	}
	before = outside;
	/* Edges as they were go, those as they will be come: at both ends at most. */
	for (; range && range->start < end; range = rf_ranges_next(ranges, &cursor)) {
		RF_ASSERT(range->start >= start && range->end <= end);
		ranges->mark_edges -= before != range->mark;
		before = range->mark;
		if (before && !mark)
			ranges->marked_bytes -= range->end - range->start;
		else if (!before && mark)
			ranges->marked_bytes += range->end - range->start;
		range->mark = mark;
	}
	ranges->mark_edges += outside != mark;
	outside = range && range->mark && range->start == end;
	ranges->mark_edges -= before != outside;
	ranges->mark_edges += mark != outside;
}

void rf_ranges_set_nature(struct rf_ranges *ranges, uintptr_t start, uintptr_t end,
			  enum rf_nature nature)
{
	struct rf_cursor cursor;
	struct rf_range *range;

	rf_ranges_cut(ranges, start);
	rf_ranges_cut(ranges, end);
	cursor = rf_ranges_seek(ranges, start);
	for (range = rf_ranges_at(ranges, cursor); range && range->start < end;
	     range = rf_ranges_next(ranges, &cursor))
		range->nature = (uint8_t)nature;
}

void rf_ranges_set_flags(struct rf_ranges *ranges, uintptr_t start, uintptr_t end, uint8_t set,
			 uint8_t clear)
{
	struct rf_cursor cursor = rf_ranges_seek(ranges, start);
	struct rf_range *range;

	for (range = rf_ranges_at(ranges, cursor); range && range->start < end;
	     range = rf_ranges_next(ranges, &cursor)) {
		RF_ASSERT(range->start >= start && range->end <= end);
		ranges->retries -= !!(range->flags & RF_RANGE_RETRY);
		range->flags = (uint8_t)((range->flags | set) & ~clear);
		ranges->retries += !!(range->flags & RF_RANGE_RETRY);
	}
}

static bool is_empty(const struct rf_range *range)
{
	return !range->count && !range->mark;
}

void rf_ranges_tidy(struct rf_ranges *ranges, uintptr_t start, uintptr_t end)
{
	struct rf_cursor cursor = rf_ranges_seek(ranges, start ? start - 1 : 0), next;
	struct rf_range *range, *after;
	uintptr_t joined;

	while ((range = rf_ranges_at(ranges, cursor)) && range->start <= end) {
		range->flags &= (uint8_t)~RF_RANGE_FRESH;
		if (is_empty(range)) {
			ranges->retries -= !!(range->flags & RF_RANGE_RETRY);
			erase(ranges, &cursor);
			continue;
		}
		next = cursor;
		after = rf_ranges_next(ranges, &next);
		if (after)
			after->flags &= (uint8_t)~RF_RANGE_FRESH;
		if (!after || !is_same(range, after)) {
			cursor = next;
			continue;
		}
		ranges->retries -= !!(range->flags & RF_RANGE_RETRY);
		joined = range->start;
		erase(ranges, &cursor);
		after = rf_ranges_at(ranges, cursor);
		after->start = joined;
		if (!cursor.item)
			directory_of(ranges)[cursor.entry].first = joined;
	}
}

void rf_ranges_check(const struct rf_ranges *ranges)
{
	struct rf_cursor cursor = { 0, 0 };
	uint32_t entry, count = 0, edges = 0, retries = 0;
	uint64_t bytes = 0;
	struct rf_range *range, *before = NULL;

	for (entry = 0; entry < ranges->leaf_count; entry++) {
		RF_ASSERT(leaf_at(ranges, entry)->used || ranges->leaf_count == 1);
		if (leaf_at(ranges, entry)->used)
			RF_ASSERT(directory_of(ranges)[entry].first ==
				  leaf_at(ranges, entry)->ranges[0].start);
		RF_ASSERT(!entry || leaf_at(ranges, entry)->used +
						    leaf_at(ranges, entry - 1)->used >
					    RF_LEAF_RANGES / 2);
	}
	for (range = rf_ranges_at(ranges, cursor); range;
	     before = range, range = rf_ranges_next(ranges, &cursor)) {
		RF_ASSERT(range->start < range->end);
		RF_ASSERT(!before || before->end <= range->start);
		RF_ASSERT(!before || !is_same(before, range));
		RF_ASSERT(!is_empty(range));
		RF_ASSERT(!(range->flags & RF_RANGE_FRESH));
		count++;
		retries += !!(range->flags & RF_RANGE_RETRY);
		if (!range->mark)
			continue;
		bytes += range->end - range->start;
		edges += before && before->mark && before->end == range->start ? 0 : 2;
	}
	RF_ASSERT(count == ranges->count);
	RF_ASSERT(edges == ranges->mark_edges);
	RF_ASSERT(bytes == ranges->marked_bytes);
	RF_ASSERT(retries == ranges->retries);
	(void)count, (void)edges, (void)bytes, (void)retries, (void)before;
}
