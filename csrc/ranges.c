/* SPDX-License-Identifier: BSD-3-Clause */
#include "ranges.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>

void rf_ranges_init(struct rf_ranges *ranges)
{
	memset(ranges, 0, sizeof(*ranges));
	ranges->leaves.item_size = sizeof(struct rf_leaf);
	ranges->directory.item_size = sizeof(struct rf_leaf_entry);
}

void rf_ranges_clear(struct rf_ranges *ranges, bool torn)
{
	struct rf_memory leaves = ranges->leaves, directory = ranges->directory;
	uint32_t capacity = ranges->capacity;

	if (torn) {
		rf_memory_abandon(&leaves);
		rf_memory_abandon(&directory);
		capacity = 0;
	}
	memset(ranges, 0, sizeof(*ranges));
	ranges->leaves = leaves;
	ranges->directory = directory;
	ranges->capacity = capacity;
}

int rf_ranges_grow(struct rf_ranges *ranges, uint32_t count)
{
	/* Two neighbours hold at least the lesser part of one that was split, and one more. */
	uint64_t leaves = 2 * (uint64_t)count / (RF_LEAF_RANGES / 2) + 3;

	if (count == UINT32_MAX)
		return -ENOMEM;
	if (rf_memory_grow(&ranges->leaves, (uint32_t)leaves) < 0 ||
	    rf_memory_grow(&ranges->directory, (uint32_t)leaves) < 0)
		return -ENOMEM;
	ranges->capacity = count;
	return 0;
}

/* ---- Reading ---- */

static inline struct rf_leaf_entry *directory_of(const struct rf_ranges *ranges)
{
	return ranges->directory.items;
}

static inline void count_sum(struct rf_sum *sum, uint32_t finds, int32_t count)
{
	sum->more[finds] += count;
	sum->least += (uint32_t)count;
	sum->lazy = true;
}

static void settle_group(const struct rf_ranges *ranges, uint32_t entry)
{
	const uint32_t first = entry - entry % RF_GROUP;
	struct rf_sum *group = &rf_ranges_group(ranges, entry)->group;
	uint32_t i, finds;

	for (i = first; i < first + RF_GROUP; i++)
		for (finds = 0; finds < RF_FINDS; finds++)
			count_sum(&rf_ranges_leaf(ranges, i)->sum, finds, group->more[finds]);
	memset(group->more, 0, sizeof(group->more));
	group->lazy = false;
}

static void settle_leaf(struct rf_leaf *leaf)
{
	uint32_t i, finds;

	for (i = 0; i < leaf->used; i++)
		for (finds = 0; finds < RF_FINDS; finds++)
			leaf->ranges[i].counts[finds] += (uint32_t)leaf->sum.more[finds];
	memset(leaf->sum.more, 0, sizeof(leaf->sum.more));
	leaf->sum.lazy = false;
}

void rf_ranges_settle(const struct rf_ranges *ranges, uint32_t entry)
{
	struct rf_leaf *leaf = rf_ranges_leaf(ranges, entry);

	if (rf_ranges_group(ranges, entry)->group.lazy)
		settle_group(ranges, entry);
	if (leaf->sum.lazy)
		settle_leaf(leaf);
}

static __attribute__((noinline)) struct rf_cursor first_of(const struct rf_ranges *ranges,
							   uint32_t entry)
{
	return (struct rf_cursor){ rf_ranges_settled(ranges, entry), entry, 0 };
}

/* Behind the last range of a leaf is the place of the first one of the next leaf. */
static inline struct rf_cursor over_end(const struct rf_ranges *ranges, struct rf_cursor place)
{
	if (place.item == place.leaf->used && place.entry + 1 < ranges->leaf_count)
		return first_of(ranges, place.entry + 1);
	return place;
}

static inline struct rf_cursor next_place(const struct rf_ranges *ranges, struct rf_cursor place)
{
	place.item++;
	return over_end(ranges, place);
}

static __attribute__((noinline)) struct rf_cursor
settle_and_seek(const struct rf_ranges *ranges, uint32_t entry, uintptr_t address)
{
	rf_ranges_settle(ranges, entry);
	return rf_ranges_seek(ranges, address);
}

struct rf_cursor rf_ranges_seek(const struct rf_ranges *ranges, uintptr_t address)
{
	const struct rf_leaf_entry *directory = directory_of(ranges);
	uint32_t low = 0, high = ranges->leaf_count, middle;
	struct rf_cursor cursor = { .leaf = NULL };

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
	if (rf_unlikely(rf_ranges_waits(ranges, low)))
		return settle_and_seek(ranges, low, address);
	cursor.entry = low;
	cursor.leaf = rf_ranges_leaf(ranges, low);
	low = 0;
	high = cursor.leaf->used;
	while (low < high) {
		middle = low + (high - low) / 2;
		if (cursor.leaf->ranges[middle].end <= address)
			low = middle + 1;
		else
			high = middle;
	}
	if (low == cursor.leaf->used && cursor.entry + 1 < ranges->leaf_count)
		return first_of(ranges, cursor.entry + 1);
	cursor.item = low;
	return cursor;
}

const struct rf_range *rf_ranges_next(const struct rf_ranges *ranges, struct rf_cursor *cursor)
{
	*cursor = next_place(ranges, *cursor);
	return rf_ranges_at(*cursor);
}

const struct rf_range *rf_ranges_find(const struct rf_ranges *ranges, uintptr_t address)
{
	const struct rf_range *range = rf_ranges_at(rf_ranges_seek(ranges, address));

	return range && range->start <= address ? range : NULL;
}

/* ---- Leaves ---- */

/*
 * A signal handler that interrupts a change and forks reads the ranges as they lie there
 * (rf_marks_drop_shared()). So each range is always in a leaf, and each leaf in the directory:
 * what moves is copied before its old place is used again, one by one, as memmove() need not.
 */
static inline void in_this_order(void)
{
	__atomic_signal_fence(__ATOMIC_SEQ_CST);
}

static inline bool is_alike(const struct rf_range *left, const struct rf_range *right)
{
	/* All fields but the addresses, in one comparison. */
	const size_t at = offsetof(struct rf_range, counts);

	return left->end == right->start &&
	       !memcmp((const char *)left + at, (const char *)right + at, sizeof(*left) - at);
}

/* @leaf changes, which is at @entry. */
static inline void forget(struct rf_ranges *ranges, struct rf_leaf *leaf, uint32_t entry)
{
	leaf->sum.known = false;
	if (rf_unlikely(ranges->leaf_count >= RF_GROUP))
		rf_ranges_group(ranges, entry)->group.known = false;
}

/* The groups from @entry on are about to consist of other leaves. */
static void forget_groups(struct rf_ranges *ranges, uint32_t entry)
{
	if (ranges->leaf_count < RF_GROUP)
		return;
	for (entry -= entry % RF_GROUP; entry < ranges->leaf_count; entry += RF_GROUP) {
		if (rf_ranges_group(ranges, entry)->group.lazy)
			settle_group(ranges, entry);
		rf_ranges_group(ranges, entry)->group.known = false;
	}
}

/* An empty leaf at @entry of the directory, for ranges from @first on. */
static void leaf_insert(struct rf_ranges *ranges, uint32_t entry, uintptr_t first)
{
	struct rf_leaf_entry *directory = directory_of(ranges), *at, *end;
	struct rf_leaf *leaves = ranges->leaves.items;
	uint32_t index = ranges->free_leaf;

	if (index) {
		ranges->free_leaf = leaves[--index].next_free;
	} else {
		index = ranges->leaves_touched++;
		RF_ASSERT(index < ranges->leaves.capacity);
	}
	memset(&leaves[index], 0, offsetof(struct rf_leaf, ranges));
	forget_groups(ranges, entry);
	RF_ASSERT(ranges->leaf_count < ranges->directory.capacity);
	at = directory + entry;
	end = directory + ranges->leaf_count;
	*end = at < end ? end[-1] : (struct rf_leaf_entry){ .leaf = index };
	in_this_order();
	ranges->leaf_count++;
	for (end--; end > at; end--) {
		in_this_order();
		*end = end[-1];
	}
	in_this_order();
	*at = (struct rf_leaf_entry){ .first = first, .leaf = index };
}

static void leaf_remove(struct rf_ranges *ranges, uint32_t entry)
{
	struct rf_leaf_entry *at = directory_of(ranges) + entry;
	const struct rf_leaf_entry *last = directory_of(ranges) + ranges->leaf_count - 1;

	forget_groups(ranges, entry);
	rf_ranges_settled(ranges, entry)->next_free = ranges->free_leaf;
	ranges->free_leaf = at->leaf + 1;
	for (; at < last; at++) {
		*at = at[1];
		in_this_order();
	}
	ranges->leaf_count--;
}

/* Append the leaf after @entry to it and drop that one, if together they are few. */
static void leaf_join(struct rf_ranges *ranges, uint32_t entry)
{
	struct rf_leaf *left, *right;
	uint32_t skipped;

	if (entry + 1 >= ranges->leaf_count)
		return;
	left = rf_ranges_settled(ranges, entry);
	right = rf_ranges_settled(ranges, entry + 1);
	if (left->used + right->used > RF_LEAF_JOIN)
		return;
	skipped = is_alike(&left->ranges[left->used - 1], &right->ranges[0]);
	if (skipped) {
		left->ranges[left->used - 1].end = right->ranges[0].end;
		ranges->count--;
	}
	memcpy(left->ranges + left->used, right->ranges + skipped,
	       (right->used - skipped) * sizeof(*right->ranges));
	in_this_order();
	left->used += right->used - skipped;
	forget(ranges, left, entry);
	leaf_remove(ranges, entry + 1);
}

/* The leaf at @entry, one of several, has lost a range: it goes if it is empty, or joins others. */
static void leaf_tidy(struct rf_ranges *ranges, uint32_t entry)
{
	if (!rf_ranges_settled(ranges, entry)->used) {
		leaf_remove(ranges, entry);
		if (!entry)
			return;
		entry--;
	}
	leaf_join(ranges, entry);
	if (entry)
		leaf_join(ranges, entry - 1);
}

/*
 * The leaf of @cursor has no room for a range at @address. One that grows at an end
 * keeps all it has, or registrations in order of address would leave every leaf half full.
 */
static void make_room(struct rf_ranges *ranges, struct rf_cursor cursor, uintptr_t address)
{
	struct rf_leaf *left = rf_ranges_settled(ranges, cursor.entry), *right;
	uint32_t keep = left->used / 2 + 1;

	if (left->ranges[0].start > address) {
		leaf_insert(ranges, cursor.entry, address);
		return;
	}
	if (left->ranges[left->used - 1].end <= address) {
		leaf_insert(ranges, cursor.entry + 1, address);
		return;
	}
	leaf_insert(ranges, cursor.entry + 1, left->ranges[keep].start);
	right = rf_ranges_settled(ranges, cursor.entry + 1);
	memcpy(right->ranges, left->ranges + keep, (left->used - keep) * sizeof(*right->ranges));
	in_this_order();
	right->used = left->used - keep;
	in_this_order();
	left->used = keep;
	forget(ranges, left, cursor.entry);
}

/* ---- Whole leaves ---- */

static bool is_wiped(const struct rf_range *range)
{
	return range->mark == RF_MARK_WIPEONFORK;
}

/* Its mark stays however often it is counted: zeros, as long as one registration wants them. */
static bool is_even(const struct rf_range *range)
{
	return rf_range_wants_mark(range) &&
	       (!is_wiped(range) || rf_range_best_mark(range) == RF_MARK_WIPEONFORK) &&
	       !(range->flags & (RF_RANGE_UNSURE | RF_RANGE_RETRY));
}

static void learn_leaf(struct rf_leaf *leaf)
{
	struct rf_sum *sum = &leaf->sum;
	uint32_t i;

	sum->known = sum->marked = sum->due = true;
	sum->wiped = false;
	sum->even = leaf->used > 0;
	sum->least = UINT32_MAX;
	for (i = 0; i < leaf->used; i++) {
		const struct rf_range *range = &leaf->ranges[i];
		const uint64_t count = is_wiped(range) ? range->counts[RF_FINDS_ZEROS]
						       : rf_range_count(range);

		sum->least = count < sum->least ? (uint32_t)count : sum->least;
		sum->marked &= range->mark != RF_MARK_NONE;
		sum->due &= range->mark || range->flags & RF_RANGE_DUE;
		sum->wiped |= is_wiped(range);
		sum->even &= is_even(range) && (!i || range[-1].end == range->start);
		sum->end = range->end;
	}
}

/* The sum of a leaf. Nothing waits in the sum of its group. */
static struct rf_sum *leaf_sum(const struct rf_ranges *ranges, uint32_t entry)
{
	struct rf_leaf *leaf = rf_ranges_leaf(ranges, entry);

	if (!leaf->sum.known) {
		if (leaf->sum.lazy)
			settle_leaf(leaf);
		learn_leaf(leaf);
	}
	return &leaf->sum;
}

static void learn_group(const struct rf_ranges *ranges, uint32_t entry)
{
	struct rf_sum *group = &rf_ranges_leaf(ranges, entry)->group;
	const struct rf_leaf_entry *directory = directory_of(ranges);
	const uint32_t last = entry + RF_GROUP;

	RF_ASSERT(!group->lazy);
	*group = (struct rf_sum){
		.known = true,
		.even = true,
		.marked = true,
		.due = true,
		.least = UINT32_MAX,
		.end = directory[entry].first,
	};
	for (; entry < last && group->even; entry++) {
		const struct rf_sum *sum = leaf_sum(ranges, entry);

		group->least = sum->least < group->least ? sum->least : group->least;
		group->marked &= sum->marked;
		group->due &= sum->due;
		group->wiped |= sum->wiped;
		group->even &= sum->even && directory[entry].first == group->end;
		group->end = sum->end;
	}
}

/*
 * The sum of the group of leaves that begins at @entry, or else of that leaf; *@count is how
 * many leaves it is of. They begin at @start, end at or before @end, come before @last in the
 * directory, and are even. NULL: there is none.
 */
static inline struct rf_sum *even_sum(const struct rf_ranges *ranges, uint32_t entry,
				      uint32_t last, uintptr_t start, uintptr_t end,
				      uint32_t *count)
{
	struct rf_sum *sum;

	if (entry >= last || directory_of(ranges)[entry].first != start)
		return NULL;
	if (!(entry % RF_GROUP) && entry + RF_GROUP <= last) {
		sum = &rf_ranges_leaf(ranges, entry)->group;
		if (!sum->known)
			learn_group(ranges, entry);
		if (sum->even && sum->end <= end) {
			*count = RF_GROUP;
			return sum;
		}
	}
	if (rf_ranges_group(ranges, entry)->group.lazy)
		settle_group(ranges, entry);
	sum = leaf_sum(ranges, entry);
	*count = 1;
	return sum->even && sum->end <= end ? sum : NULL;
}

uintptr_t rf_ranges_skip_leaves(const struct rf_ranges *ranges, struct rf_cursor *cursor,
				uintptr_t end, uint32_t least)
{
	uintptr_t at = directory_of(ranges)[cursor->entry].first, stop = 0;
	const struct rf_sum *sum;
	uint32_t count;

	for (; (sum = even_sum(ranges, cursor->entry, ranges->leaf_count - 1, at, end, &count));
	     cursor->entry += count) {
		if (!sum->marked || sum->least < least)
			break;
		stop = at = sum->end;
	}
	cursor->leaf = rf_ranges_settled(ranges, cursor->entry);
	return stop;
}

/* Does @change alter only the counts of even ranges that have that @sum, all of them alike? */
static inline bool only_counts(const struct rf_sum *sum, const struct rf_change *change)
{
	if (sum->wiped && change->finds != RF_FINDS_ZEROS)
		return false;
	if (change->count < 0)
		return sum->least >= 2;
	return (!change->remark || sum->marked) && (!change->set || sum->due);
}

/* Count whole leaves once more or less, where nothing else becomes of them. How far that is. */
static uintptr_t count_leaves(struct rf_ranges *ranges, struct rf_cursor place, uintptr_t start,
			      uintptr_t end, const struct rf_change *change)
{
	struct rf_sum *sum;
	uint32_t count;

	if (place.item || ranges->leaf_count == 1 || !change->count || change->set & ~RF_RANGE_DUE)
		return start;
	for (; (sum = even_sum(ranges, place.entry, ranges->leaf_count, start, end, &count));
	     place.entry += count) {
		if (!only_counts(sum, change))
			break;
		count_sum(sum, change->finds, change->count);
		if (count == 1)
			rf_ranges_group(ranges, place.entry)->group.known = false;
		start = sum->end;
	}
	return start;
}

/* ---- Changes ---- */

/* The range at @place, or the room behind the last one. */
static inline struct rf_range *range_at(struct rf_cursor place)
{
	return &place.leaf->ranges[place.item];
}

static inline bool is_at_end(struct rf_cursor place)
{
	return place.item == place.leaf->used;
}

/* A place between two leaves is the end of the first one, if that has room. */
static inline struct rf_cursor place_with_room(const struct rf_ranges *ranges,
					       struct rf_cursor place)
{
	struct rf_leaf *before;

	if (place.item || !place.entry)
		return place;
	before = rf_ranges_settled(ranges, place.entry - 1);
	if (before->used == RF_LEAF_RANGES)
		return place;
	return (struct rf_cursor){ before, place.entry - 1, before->used };
}

/* The leaf of @place is full. Returns the same place, with room for a range at @start. */
static struct rf_cursor split_leaf(struct rf_ranges *ranges, struct rf_cursor place,
				   uintptr_t start)
{
	place = place_with_room(ranges, place);
	while (place.leaf->used == RF_LEAF_RANGES) {
		make_room(ranges, place, start);
		place = place_with_room(ranges, rf_ranges_seek(ranges, start));
	}
	return place;
}

/* Make room for a range at @start, before the one at @place. Returns its place, to be filled. */
static inline struct rf_cursor insert(struct rf_ranges *ranges, struct rf_cursor place,
				      uintptr_t start)
{
	struct rf_range *range, *end;

	if (rf_unlikely(place.leaf->used == RF_LEAF_RANGES))
		place = split_leaf(ranges, place, start);
	range = range_at(place);
	end = place.leaf->ranges + place.leaf->used;
	if (range < end)
		*end = end[-1];
	else
		end->mark = RF_MARK_NONE;
	in_this_order();
	place.leaf->used++;
	for (end--; end > range; end--) {
		in_this_order();
		*end = end[-1];
	}
	in_this_order();
	ranges->count++;
	if (!place.item)
		directory_of(ranges)[place.entry].first = start;
	forget(ranges, place.leaf, place.entry);
	return place;
}

/* The leaf of @place has lost the range that was there, which ended at @end. As erase(). */
static __attribute__((noinline)) struct rf_cursor
shrink_leaf(struct rf_ranges *ranges, struct rf_cursor place, uintptr_t end)
{
	const uint32_t leaves = ranges->leaf_count;

	leaf_tidy(ranges, place.entry);
	if (leaves > ranges->leaf_count)
		return rf_ranges_seek(ranges, end);
	return over_end(ranges, place);
}

/* Take the range at @place out. Returns the place of the next one. */
static struct rf_cursor erase(struct rf_ranges *ranges, struct rf_cursor place)
{
	struct rf_range *range = range_at(place);
	const struct rf_range *last = place.leaf->ranges + place.leaf->used - 1;
	const uintptr_t end = range->end;

	for (; range < last; range++) {
		*range = range[1];
		in_this_order();
	}
	place.leaf->used--;
	ranges->count--;
	if (!place.item && place.leaf->used)
		directory_of(ranges)[place.entry].first = place.leaf->ranges[0].start;
	forget(ranges, place.leaf, place.entry);
	/* An only leaf stays, empty or not: registrations come again. */
	return ranges->leaf_count > 1 ? shrink_leaf(ranges, place, end) : place;
}

/* Cut the range at @place in two. Returns the place of the first, which ends at @address. */
static struct rf_cursor cut(struct rf_ranges *ranges, struct rf_cursor place, uintptr_t address)
{
	struct rf_range first = *range_at(place);
	struct rf_cursor second;

	first.end = address;
	place = insert(ranges, place, first.start);
	*range_at(place) = first;
	in_this_order();
	second = next_place(ranges, place);
	range_at(second)->start = address;
	if (!second.item)
		directory_of(ranges)[second.entry].first = address;
	return place;
}

/* The mark before the range at @place, and the one behind it. */
static inline uint8_t mark_before(const struct rf_ranges *ranges, struct rf_cursor place)
{
	const struct rf_range *range = range_at(place), *before;
	const struct rf_leaf *leaf;

	if (place.item) {
		before = range - 1;
	} else if (place.entry) {
		leaf = rf_ranges_leaf(ranges, place.entry - 1);
		before = &leaf->ranges[leaf->used - 1];
	} else {
		return RF_MARK_NONE;
	}
	return before->end == range->start ? before->mark : RF_MARK_NONE;
}

static inline uint8_t mark_behind(const struct rf_ranges *ranges, struct rf_cursor place)
{
	const struct rf_range *range = range_at(place), *behind;

	if (place.item + 1 < place.leaf->used)
		behind = range + 1;
	else if (place.entry + 1 < ranges->leaf_count)
		behind = rf_ranges_leaf(ranges, place.entry + 1)->ranges;
	else
		return RF_MARK_NONE;
	return behind->start == range->end ? behind->mark : RF_MARK_NONE;
}

/*
 * The range at @place bears that @mark for the @old one. Ranges are inserted and erased without a
 * mark, so edges and bytes are counted here alone.
 */
static inline void set_mark(struct rf_ranges *ranges, struct rf_cursor place, uint8_t old,
			    uint8_t mark)
{
	struct rf_range *range = range_at(place);
	const uint8_t before = mark_before(ranges, place), behind = mark_behind(ranges, place);

	if (old == mark)
		return;
	ranges->mark_edges += (uint32_t)((before != mark) - (before != old) + (behind != mark) -
					 (behind != old));
	if (old)
		ranges->marked_bytes -= range->end - range->start;
	if (mark)
		ranges->marked_bytes += range->end - range->start;
	range->mark = mark;
}

/* Counted once more. Released but marked still: its memory may be another's by now. */
static inline uint8_t count_more(struct rf_range *piece, const struct rf_change *change)
{
	uint8_t set = change->set;

	if (rf_unlikely(!rf_range_is_counted(piece))) {
		piece->flags = RF_RANGE_DOUBT;
		piece->nature = RF_NATURE_UNASKED;
		piece->tries = 0;
	}
	piece->counts[change->finds]++;
	/* A mark that is sure to be there need not be made again. */
	if (piece->mark && !(piece->flags & RF_RANGE_UNSURE))
		set &= (uint8_t)~RF_RANGE_DUE;
	piece->flags |= set;
	if (piece->flags & RF_RANGE_DOUBT)
		piece->nature = RF_NATURE_UNASKED;
	if (!change->remark || piece->mark || !rf_range_wants_mark(piece))
		return piece->mark;
	piece->flags &= (uint8_t)~RF_RANGE_DUE;
	return change->mark;
}

static inline uint8_t count_less(struct rf_ranges *ranges, struct rf_range *piece,
				 const struct rf_change *change)
{
	RF_ASSERT(piece->counts[change->finds]);
	piece->counts[change->finds]--;
	if (rf_range_is_counted(piece))
		return piece->mark;
	piece->flags &= (uint8_t)~(RF_RANGE_UNSURE | RF_RANGE_DUE);
	if (change->finds == RF_FINDS_COPY)
		piece->flags |= RF_RANGE_PARTIAL;
	if (change->remark)
		return change->mark;
	ranges->leftover = true;
	return piece->mark;
}

/* All but the mark of @piece changes. Returns its mark to be. */
static inline uint8_t change_piece(struct rf_ranges *ranges, struct rf_range *piece,
				   const struct rf_change *change)
{
	if (change->count > 0)
		return count_more(piece, change);
	if (change->count < 0)
		return count_less(ranges, piece, change);
	piece->flags = (uint8_t)((piece->flags | change->set) & ~change->clear);
	ranges->retry |= change->set & RF_RANGE_RETRY;
	piece->tries += change->tried && piece->tries < RF_RANGE_TRIES;
	if (change->rename)
		piece->nature = change->nature;
	if (!change->remark)
		return piece->mark;
	piece->tries = 0;
	return change->mark;
}

/*
 * Take the range at @place out if it is neither counted nor marked, or join it with the one before
 * it if they are alike. Returns the next place.
 */
static inline struct rf_cursor pass(struct rf_ranges *ranges, struct rf_cursor place)
{
	struct rf_range *range = range_at(place);

	if (range->mark || rf_range_is_counted(range)) {
		if (!place.item || !is_alike(range - 1, range))
			return next_place(ranges, place);
		range[-1].end = range->end;
		in_this_order();
	}
	return erase(ranges, place);
}

/* Pages of no range are counted. Returns the place of their range, which is new. */
static inline struct rf_cursor add_range(struct rf_ranges *ranges, struct rf_cursor place,
					 uintptr_t start, uintptr_t end,
					 const struct rf_change *change)
{
	struct rf_range *range;

	place = insert(ranges, place, start);
	range = range_at(place);
	*range = (struct rf_range){ .start = start, .end = end, .flags = change->set };
	range->counts[change->finds] = 1;
	set_mark(ranges, place, RF_MARK_NONE, change->remark ? change->mark : RF_MARK_NONE);
	return place;
}

/* [@start, @end) of the range at @place changes. Returns the place of that part. */
static inline struct rf_cursor change_range(struct rf_ranges *ranges, struct rf_cursor place,
					    uintptr_t start, uintptr_t end,
					    const struct rf_change *change)
{
	uint8_t old;

	if (range_at(place)->start < start)
		place = pass(ranges, cut(ranges, place, start));
	if (range_at(place)->end > end)
		place = cut(ranges, place, end);
	old = range_at(place)->mark;
	set_mark(ranges, place, old, change_piece(ranges, range_at(place), change));
	forget(ranges, place.leaf, place.entry);
	return place;
}

void rf_ranges_change_at(struct rf_ranges *ranges, struct rf_cursor place, uintptr_t start,
			 uintptr_t end, const struct rf_change *change)
{
	const struct rf_range *range;
	uintptr_t stop;

	RF_ASSERT(start <= end);
	ranges->version++;
	if (rf_unlikely(!place.leaf)) {
		/* There may be no room yet, either. */
		if (change->count <= 0)
			return;
		leaf_insert(ranges, 0, start);
		place = rf_ranges_seek(ranges, start);
	}
	for (; start < end; start = stop) {
		stop = count_leaves(ranges, place, start, end, change);
		if (stop > start) {
			place = rf_ranges_seek(ranges, stop);
			continue;
		}
		range = is_at_end(place) ? NULL : range_at(place);
		if (range && range->start <= start) {
			stop = range->end < end ? range->end : end;
			place = change_range(ranges, place, start, stop, change);
		} else {
			stop = range && range->start < end ? range->start : end;
			if (change->count <= 0)
				continue;
			place = add_range(ranges, place, start, stop, change);
		}
		place = pass(ranges, place);
	}
	/* The range behind the last change may be like it now. */
	if (!is_at_end(place))
		(void)pass(ranges, place);
	RF_ASSERT(ranges->count <= ranges->capacity);
}

static void check_sum(const struct rf_sum *sum, const struct rf_sum *anew)
{
	RF_ASSERT(sum->even == anew->even);
	RF_ASSERT(!sum->even || (sum->marked == anew->marked && sum->due == anew->due &&
				 sum->wiped == anew->wiped && sum->least == anew->least &&
				 sum->end == anew->end));
	(void)sum, (void)anew;
}

static void check_leaves(const struct rf_ranges *ranges)
{
	uint32_t entry;

	for (entry = 0; entry < ranges->leaf_count; entry++) {
		struct rf_leaf *leaf = rf_ranges_settled(ranges, entry);
		const uint32_t before = entry ? rf_ranges_leaf(ranges, entry - 1)->used : 0;
		const struct rf_sum sum = leaf->sum;

		RF_ASSERT(leaf->used || ranges->leaf_count == 1);
		learn_leaf(leaf);
		if (sum.known)
			check_sum(&sum, &leaf->sum);
		if (leaf->used)
			RF_ASSERT(directory_of(ranges)[entry].first == leaf->ranges[0].start);
		RF_ASSERT(!entry || leaf->used + before >= RF_LEAF_RANGES / 2);
		(void)before;
	}
}

static void check_groups(const struct rf_ranges *ranges)
{
	uint32_t entry;

	for (entry = 0; entry + RF_GROUP <= ranges->leaf_count; entry += RF_GROUP) {
		struct rf_sum *group = &rf_ranges_group(ranges, entry)->group;
		const struct rf_sum sum = *group;

		learn_group(ranges, entry);
		if (sum.known)
			check_sum(&sum, group);
	}
}

void rf_ranges_check(const struct rf_ranges *ranges)
{
	struct rf_cursor cursor = rf_ranges_seek(ranges, 0);
	const struct rf_range *range, *before = NULL;
	uint32_t count = 0, edges = 0;
	uint64_t bytes = 0;
	bool retry = false;
	uint8_t mark = RF_MARK_NONE;

	check_leaves(ranges);
	check_groups(ranges);
	for (range = rf_ranges_at(cursor); range;
	     before = range, range = rf_ranges_next(ranges, &cursor)) {
		RF_ASSERT(range->start < range->end);
		RF_ASSERT(!before || before->end <= range->start);
		RF_ASSERT(!before || !cursor.item || !is_alike(before, range));
		RF_ASSERT(range->mark || rf_range_is_counted(range));
		count++;
		retry |= !!(range->flags & RF_RANGE_RETRY);
		if (before && before->end == range->start)
			edges += mark != range->mark;
		else
			edges += (mark != RF_MARK_NONE) + (range->mark != RF_MARK_NONE);
		mark = range->mark;
		bytes += mark ? range->end - range->start : 0;
	}
	edges += mark != RF_MARK_NONE;
	RF_ASSERT(count == ranges->count);
	RF_ASSERT(edges == ranges->mark_edges);
	RF_ASSERT(bytes == ranges->marked_bytes);
	RF_ASSERT(!retry || ranges->retry);
	(void)count, (void)edges, (void)bytes, (void)retry, (void)before;
}
