/* SPDX-License-Identifier: BSD-3-Clause */
#include "ranges.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>

/* The most ranges that one step of a change puts in the place of others. */
#define PIECES 8
/* The most that one old range becomes, cut at both ends, with the gap after it. */
#define PIECES_OF_ONE 4

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

	if (rf_unlikely(rf_ranges_group(ranges, entry)->group.lazy))
		settle_group(ranges, entry);
	if (rf_unlikely(leaf->sum.lazy))
		settle_leaf(leaf);
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
	leaf = rf_ranges_leaf(ranges, low);
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

const struct rf_range *rf_ranges_next(const struct rf_ranges *ranges, struct rf_cursor *cursor)
{
	cursor->item++;
	if (cursor->item >= rf_ranges_leaf(ranges, cursor->entry)->used &&
	    cursor->entry + 1 < ranges->leaf_count) {
		cursor->entry++;
		cursor->item = 0;
	}
	return rf_ranges_at(ranges, *cursor);
}

const struct rf_range *rf_ranges_find(const struct rf_ranges *ranges, uintptr_t address)
{
	const struct rf_range *range = rf_ranges_at(ranges, rf_ranges_seek(ranges, address));

	return range && range->start <= address ? range : NULL;
}

/* ---- Leaves ---- */

static inline bool is_alike(const struct rf_range *left, const struct rf_range *right)
{
	/* All fields but the addresses, in one comparison. */
	const size_t at = offsetof(struct rf_range, counts);

	return left->end == right->start &&
	       !memcmp((const char *)left + at, (const char *)right + at, sizeof(*left) - at);
}

/* The leaf at @entry changes. */
static inline void forget(struct rf_ranges *ranges, uint32_t entry)
{
	rf_ranges_leaf(ranges, entry)->sum.known = false;
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
	struct rf_leaf_entry *directory = directory_of(ranges);
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
	memmove(directory + entry + 1, directory + entry,
		(ranges->leaf_count - entry) * sizeof(*directory));
	ranges->leaf_count++;
	directory[entry].leaf = index;
	directory[entry].first = first;
}

static void leaf_remove(struct rf_ranges *ranges, uint32_t entry)
{
	struct rf_leaf_entry *directory = directory_of(ranges);

	forget_groups(ranges, entry);
	rf_ranges_settled(ranges, entry)->next_free = ranges->free_leaf;
	ranges->free_leaf = directory[entry].leaf + 1;
	ranges->leaf_count--;
	memmove(directory + entry, directory + entry + 1,
		(ranges->leaf_count - entry) * sizeof(*directory));
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
	left->used += right->used - skipped;
	forget(ranges, entry);
	leaf_remove(ranges, entry + 1);
}

/* Few ranges are in it. An only leaf stays, empty or not: registrations come again. */
static void leaf_shrunk(struct rf_ranges *ranges, uint32_t entry)
{
	if (ranges->leaf_count == 1)
		return;
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
	right->used = left->used - keep;
	memcpy(right->ranges, left->ranges + keep, right->used * sizeof(*right->ranges));
	left->used = keep;
	forget(ranges, cursor.entry);
}

/* ---- Whole leaves ---- */

/* Its mark, made or due, stays however often it is counted: zeros might not. */
static bool is_even(const struct rf_range *range)
{
	return rf_range_wants_mark(range) && range->mark != RF_MARK_WIPEONFORK &&
	       !(range->flags & (RF_RANGE_UNSURE | RF_RANGE_RETRY | RF_RANGE_STUCK)) &&
	       (range->mark || range->flags & RF_RANGE_DUE);
}

static void learn_leaf(struct rf_leaf *leaf)
{
	struct rf_sum *sum = &leaf->sum;
	uint32_t i;

	sum->known = sum->marked = true;
	sum->even = leaf->used > 0;
	sum->least = UINT32_MAX;
	for (i = 0; i < leaf->used; i++) {
		const struct rf_range *range = &leaf->ranges[i];
		const uint64_t count = rf_range_count(range);

		sum->least = count < sum->least ? (uint32_t)count : sum->least;
		sum->marked &= range->mark == RF_MARK_DONTFORK;
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
		.least = UINT32_MAX,
		.end = directory[entry].first,
	};
	for (; entry < last && group->even; entry++) {
		const struct rf_sum *sum = leaf_sum(ranges, entry);

		group->least = sum->least < group->least ? sum->least : group->least;
		group->marked &= sum->marked;
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
	return stop;
}

/* Count whole leaves once more or less, where nothing else becomes of them. How far that is. */
static uintptr_t count_leaves(struct rf_ranges *ranges, struct rf_cursor *cursor,
			      uintptr_t start, uintptr_t end, const struct rf_change *change)
{
	struct rf_sum *sum;
	uint32_t count;

	if (cursor->item || !change->count || change->set & ~RF_RANGE_DUE)
		return start;
	for (; (sum = even_sum(ranges, cursor->entry, ranges->leaf_count, start, end, &count));
	     cursor->entry += count) {
		if (change->count < 0 ? sum->least < 2 : change->remark && !sum->marked)
			break;
		count_sum(sum, change->finds, change->count);
		if (count == 1)
			rf_ranges_group(ranges, cursor->entry)->group.known = false;
		start = sum->end;
	}
	return start;
}

/* ---- Changes ---- */

/* The ranges [first, first + replaced) of one leaf become the pieces. */
struct step {
	struct rf_cursor first;
	struct rf_leaf *leaf;
	uint32_t replaced, count;
	bool remarked;		/* the mark of some page changes */
	struct rf_range pieces[PIECES];
};

/* Append @range, joined with the piece before it where they are alike. */
static inline void put(struct step *step, const struct rf_range *range)
{
	struct rf_range *last = step->pieces + step->count - 1;

	if (step->count && is_alike(last, range))
		last->end = range->end;
	else
		step->pieces[step->count++] = *range;
}

static inline void put_part(struct step *step, const struct rf_range *range, uintptr_t start,
			    uintptr_t end)
{
	struct rf_range part = *range;

	part.start = start;
	part.end = end;
	put(step, &part);
}

/* [@start, @end) is not in the list yet. */
static inline void put_new(struct step *step, const struct rf_change *change, uintptr_t start,
			   uintptr_t end)
{
	struct rf_range piece = { .start = start, .end = end, .flags = change->set };

	if (change->count <= 0)
		return;
	piece.counts[change->finds] = 1;
	if (change->remark) {
		piece.mark = change->mark;
		step->remarked = true;
	}
	put(step, &piece);
}

/* Counted once more. Released but marked still: its memory may be another's by now. */
static inline void count_more(struct rf_range *piece, const struct rf_change *change)
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
	if (change->remark && !piece->mark && rf_range_wants_mark(piece)) {
		piece->mark = change->mark;
		piece->flags &= (uint8_t)~RF_RANGE_DUE;
	}
}

static inline void count_less(struct rf_range *piece, const struct rf_change *change)
{
	RF_ASSERT(piece->counts[change->finds]);
	piece->counts[change->finds]--;
	if (rf_range_is_counted(piece))
		return;
	piece->flags &= (uint8_t)~(RF_RANGE_UNSURE | RF_RANGE_DUE);
	if (change->finds == RF_FINDS_COPY)
		piece->flags |= RF_RANGE_PARTIAL;
	if (change->remark)
		piece->mark = change->mark;
}

static inline void change_piece(struct rf_range *piece, const struct rf_change *change)
{
	if (change->count > 0) {
		count_more(piece, change);
		return;
	}
	if (change->count < 0) {
		count_less(piece, change);
		return;
	}
	piece->flags = (uint8_t)((piece->flags | change->set) & ~change->clear);
	if (rf_unlikely(change->tried)) {
		piece->tries += piece->tries < RF_RANGE_TRIES;
		if (piece->tries == RF_RANGE_TRIES)
			piece->flags = (uint8_t)((piece->flags | RF_RANGE_STUCK) & ~RF_RANGE_RETRY);
	}
	if (change->remark) {
		piece->mark = change->mark;
		piece->tries = 0;
	}
	if (change->rename)
		piece->nature = change->nature;
}

/* All of @range, of which [@start, @end) changes. */
static inline void put_changed(struct step *step, const struct rf_range *range,
			       const struct rf_change *change, uintptr_t start, uintptr_t end)
{
	struct rf_range piece = *range;

	if (range->start < start)
		put_part(step, range, range->start, start);
	piece.start = start;
	piece.end = end;
	change_piece(&piece, change);
	step->remarked |= piece.mark != range->mark;
	if (piece.mark || rf_range_is_counted(&piece))
		put(step, &piece);
	if (range->end > end)
		put_part(step, range, end, range->end);
}

/* How often the mark changes from one address to the next, in [@range, @last) and around it. */
static uint32_t count_edges(const struct rf_range *range, const struct rf_range *last,
			    const struct rf_range *before, const struct rf_range *after)
{
	uintptr_t end = before ? before->end : 0;
	uint8_t mark = before ? before->mark : RF_MARK_NONE;
	uint32_t edges = 0;

	for (; range < last; range++) {
		if (range->start == end)
			edges += mark != range->mark;
		else
			edges += (mark != RF_MARK_NONE) + (range->mark != RF_MARK_NONE);
		mark = range->mark;
		end = range->end;
	}
	if (after && after->start == end)
		return edges + (mark != after->mark);
	return edges + (mark != RF_MARK_NONE) + (after && after->mark != RF_MARK_NONE);
}

static uint64_t count_bytes(const struct rf_range *range, const struct rf_range *last)
{
	uint64_t bytes = 0;

	for (; range < last; range++)
		bytes += range->mark ? range->end - range->start : 0;
	return bytes;
}

/* The ranges before and after those of @step; NULL: none. */
static struct rf_range *range_before(const struct rf_ranges *ranges, const struct step *step)
{
	struct rf_leaf *leaf = step->leaf;

	if (step->first.item)
		return &leaf->ranges[step->first.item - 1];
	if (!step->first.entry)
		return NULL;
	leaf = rf_ranges_settled(ranges, step->first.entry - 1);
	return &leaf->ranges[leaf->used - 1];
}

static struct rf_range *range_after(const struct rf_ranges *ranges, const struct step *step)
{
	const uint32_t item = step->first.item + step->replaced;

	if (item < step->leaf->used)
		return &step->leaf->ranges[item];
	if (step->first.entry + 1 >= ranges->leaf_count)
		return NULL;
	return &rf_ranges_settled(ranges, step->first.entry + 1)->ranges[0];
}

static void count_marks(struct rf_ranges *ranges, const struct step *step)
{
	const struct rf_range *old = step->leaf->ranges + step->first.item;
	const struct rf_range *before = range_before(ranges, step);
	const struct rf_range *after = range_after(ranges, step);

	ranges->mark_edges -= count_edges(old, old + step->replaced, before, after);
	ranges->marked_bytes -= count_bytes(old, old + step->replaced);
	old = step->pieces;
	ranges->mark_edges += count_edges(old, old + step->count, before, after);
	ranges->marked_bytes += count_bytes(old, old + step->count);
}

/* Put the pieces in the place of the ranges they replace. */
static inline void commit(struct rf_ranges *ranges, const struct step *step)
{
	struct rf_leaf *leaf = step->leaf;
	const uint32_t item = step->first.item;
	struct rf_range *at = leaf->ranges + item;
	uint32_t i, more, after = leaf->used - item - step->replaced;

	forget(ranges, step->first.entry);
	if (step->remarked)
		count_marks(ranges, step);
	more = step->count - step->replaced;
	if (more) {
		if (after)
			memmove(at + step->count, at + step->replaced, after * sizeof(*at));
		leaf->used += more;
		ranges->count += more;
	}
	for (i = 0; i < step->count; i++)
		at[i] = step->pieces[i];
	if (!item && leaf->used)
		directory_of(ranges)[step->first.entry].first = leaf->ranges[0].start;
	if (step->count < step->replaced)
		leaf_shrunk(ranges, step->first.entry);
}

/*
 * Plan the pieces of [@at, @end) as far as one leaf and one step go; returns how far
 * that is. Nothing has changed yet.
 */
static inline uintptr_t plan(const struct rf_ranges *ranges, struct rf_cursor cursor,
			     uintptr_t at, uintptr_t end, const struct rf_change *change,
			     struct step *step)
{
	const struct rf_range *range, *last;
	uintptr_t stop;

	step->count = 0;
	step->remarked = false;
	step->leaf = rf_ranges_settled(ranges, cursor.entry);
	/* New ranges between two leaves go to the end of the first, if that has room. */
	if (rf_unlikely(!cursor.item) && cursor.entry && step->leaf->used &&
	    step->leaf->ranges[0].start > at &&
	    rf_ranges_settled(ranges, cursor.entry - 1)->used < RF_LEAF_RANGES) {
		step->leaf = rf_ranges_settled(ranges, --cursor.entry);
		cursor.item = step->leaf->used;
	}
	range = step->leaf->ranges + cursor.item;
	last = step->leaf->ranges + step->leaf->used;
	if (cursor.item && range[-1].end == at) {
		put(step, range - 1);
		cursor.item--;
	}
	step->first = cursor;
	while (at < end && step->count <= PIECES - PIECES_OF_ONE) {
		if (range < last && range->start <= at) {
			stop = range->end < end ? range->end : end;
			put_changed(step, range++, change, at, stop);
		} else if (range < last) {
			stop = range->start < end ? range->start : end;
			put_new(step, change, at, stop);
		} else {
			stop = end;
			if (cursor.entry + 1 < ranges->leaf_count &&
			    directory_of(ranges)[cursor.entry + 1].first < end)
				stop = directory_of(ranges)[cursor.entry + 1].first;
			/* The first range of the next leaf belongs to another step. */
			if (stop == at)
				break;
			put_new(step, change, at, stop);
		}
		at = stop;
	}
	if (at == end && range < last && range->start == end)
		put(step, range++);
	step->replaced = (uint32_t)(range - step->leaf->ranges) - cursor.item;
	return at;
}

/*
 * Ranges that lie in [@start, @end) as a whole, and are as many afterwards. Not the last of
 * them, which the one after it may join. Returns how far that is.
 */
static inline uintptr_t change_in_place(struct rf_ranges *ranges, struct rf_cursor *cursor,
					uintptr_t start, uintptr_t end,
					const struct rf_change *change)
{
	struct rf_leaf *leaf;
	struct rf_range *range, piece;

	leaf = rf_ranges_settled(ranges, cursor->entry);
	range = leaf->ranges + cursor->item;
	for (; cursor->item < leaf->used && range->start == start && range->end < end; range++) {
		piece = *range;
		change_piece(&piece, change);
		if (piece.mark != range->mark || !(piece.mark || rf_range_is_counted(&piece)) ||
		    (cursor->item && is_alike(range - 1, &piece)))
			break;
		*range = piece;
		start = piece.end;
		cursor->item++;
		forget(ranges, cursor->entry);
	}
	if (cursor->item == leaf->used && cursor->entry + 1 < ranges->leaf_count) {
		cursor->entry++;
		cursor->item = 0;
	}
	return start;
}

static inline void count_mark(struct rf_ranges *ranges, const struct rf_range *range, int sign)
{
	if (!range->mark)
		return;
	ranges->mark_edges += 2 * (uint32_t)sign;
	ranges->marked_bytes += (uint64_t)sign * (range->end - range->start);
}

/*
 * The common case, in place: all of [@start, @end) comes or goes as one range, and nothing
 * touches it. False: nothing has changed.
 */
static inline bool change_alone(struct rf_ranges *ranges, struct rf_cursor cursor,
				uintptr_t start, uintptr_t end, const struct rf_change *change)
{
	struct rf_leaf *leaf = rf_ranges_settled(ranges, cursor.entry);
	struct rf_range *range = leaf->ranges + cursor.item, *next = range;
	const uint32_t after = leaf->used - cursor.item;
	const bool more = change->count > 0;

	if (cursor.item ? range[-1].end == start : cursor.entry)
		return false;
	if (!more) {
		if (!after || range->start != start || range->end != end ||
		    rf_range_count(range) != 1 || (range->mark && !change->remark))
			return false;
		next++;
	}
	if (next < leaf->ranges + leaf->used ? next->start <= end
					     : cursor.entry + 1 < ranges->leaf_count)
		return false;
	if (more) {
		if (leaf->used == RF_LEAF_RANGES)
			return false;
		memmove(range + 1, range, after * sizeof(*range));
		*range = (struct rf_range){ .start = start, .end = end, .flags = change->set };
		range->counts[change->finds] = 1;
		range->mark = change->remark ? change->mark : RF_MARK_NONE;
		count_mark(ranges, range, 1);
		leaf->used++;
		ranges->count++;
	} else {
		count_mark(ranges, range, -1);
		memmove(range, next, (after - 1) * sizeof(*range));
		leaf->used--;
		ranges->count--;
	}
	forget(ranges, cursor.entry);
	if (!cursor.item && leaf->used)
		directory_of(ranges)[cursor.entry].first = leaf->ranges[0].start;
	if (!more)
		leaf_shrunk(ranges, cursor.entry);
	return true;
}

void rf_ranges_change_at(struct rf_ranges *ranges, struct rf_cursor cursor, uintptr_t start,
			 uintptr_t end, const struct rf_change *change)
{
	uintptr_t stop;
	struct step step;

	RF_ASSERT(start <= end);
	ranges->version++;
	ranges->retry |= change->set & RF_RANGE_RETRY;
	ranges->leftover |= change->count < 0 && !change->remark;
	if (rf_unlikely(!ranges->leaf_count)) {
		/* There may be no room yet, either. */
		if (change->count <= 0)
			return;
		leaf_insert(ranges, 0, start);
	}
	if (rf_likely(change->count) && change_alone(ranges, cursor, start, end, change))
		return;
	while (start < end) {
		stop = count_leaves(ranges, &cursor, start, end, change);
		if (stop == start)
			stop = change_in_place(ranges, &cursor, start, end, change);
		if (stop > start) {
			start = stop;
			if (cursor.entry == ranges->leaf_count)
				cursor = rf_ranges_seek(ranges, start);
			continue;
		}
		stop = plan(ranges, cursor, start, end, change, &step);
		if (rf_likely(step.leaf->used + step.count - step.replaced <= RF_LEAF_RANGES)) {
			commit(ranges, &step);
			start = stop;
		} else {
			/* A gap stays out of the list, unless it is counted now. */
			make_room(ranges, step.first,
				  start < step.pieces[0].start ? step.pieces[0].start : start);
		}
		if (rf_unlikely(start < end))
			cursor = rf_ranges_seek(ranges, start);
	}
	RF_ASSERT(ranges->count <= ranges->capacity);
}

static void check_sum(const struct rf_sum *sum, const struct rf_sum *anew)
{
	RF_ASSERT(sum->even == anew->even);
	RF_ASSERT(!sum->even || (sum->marked == anew->marked && sum->least == anew->least &&
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
	struct rf_cursor cursor = { 0, 0 };
	const struct rf_range *range, *before = NULL;
	uint32_t count = 0, edges = 0;
	uint64_t bytes = 0;
	bool retry = false;
	uint8_t mark = RF_MARK_NONE;

	check_leaves(ranges);
	check_groups(ranges);
	for (range = rf_ranges_at(ranges, cursor); range;
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
