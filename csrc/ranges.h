/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * How many registrations want which pages, and which advice the kernel was given
 * about them, the mark. Registrations overlap, and end where no other ends; advice is
 * per page. So: a step function over the address space, as the sorted list of its steps.
 *
 *	registrations    |-------A-------|      |--C--|
 *	                      |----B----|
 *	ranges           | 1  |    2    |1|     |  1  |
 *
 *	directory  [first, leaf] [first, leaf] ...       binary search
 *	                |              |
 *	leaf       [range range ...]  [range ...]        binary search
 *
 * Two levels suffice: a million ranges are some 32 000 leaves, and a leaf is
 * split or joined once in dozens of changes.
 *
 * A registration counts each of its pages once, by the content it wants a child to find
 * there. A page that it does not fill holds other data as well, so there it wants
 * a copy. A child finds the first of these that any registration wants:
 *
 *	nothing		an RF_OMIT registration fills the page
 *	zeros		an RF_WIPE registration fills it
 *	a copy		registrations only touch it; or none does, as part of a huge page
 *
 * One function changes the list, rf_ranges_change(): it cuts the ranges at both ends of the
 * change, changes each range between them, and joins those that are alike then. A
 * registration over many ranges counts whole leaves in one step, and whole groups of
 * leaves: a change that is the same for all their ranges waits until one of them is read.
 *
 * Invariants (rf_ranges_check):
 *  - ranges are half open, page aligned, not empty, sorted, disjoint;
 *  - each has a count above zero or a mark;
 *  - touching ranges of one leaf differ in something;
 *  - no leaf is empty but an only one; two neighbours hold at least half of a leaf's ranges.
 *
 * No locks: the engine's lock is held. Only rf_ranges_reserve() can fail.
 */
#ifndef RF_RANGES_H
#define RF_RANGES_H

#include "memory.h"
#include "rdmafork.h"

#include <stdbool.h>

/* The content of a page in a child. */
enum rf_finds {
	RF_FINDS_NOTHING = 0,
	RF_FINDS_ZEROS = 1,
	RF_FINDS_COPY = 2,
	RF_FINDS = 3,
};

/* The advice in force. To the kernel the two are independent; here a page bears one. */
enum rf_mark {
	RF_MARK_NONE = 0,
	RF_MARK_DONTFORK = 1,
	RF_MARK_WIPEONFORK = 2,
};

/* The kind of mapping. */
enum rf_nature {
	RF_NATURE_UNASKED = 0,
	RF_NATURE_PRIVATE = 1,
	RF_NATURE_WIPEABLE = 2,	/* private too; the kernel takes MADV_WIPEONFORK */
	RF_NATURE_SHARED = 3,
};

/*
 * The memory may have been unmapped and mapped anew since it was marked, as
 * a registration counts here that does not hold it: every registration marks it again.
 */
#define RF_RANGE_DOUBT	1u
/* Held, and to be marked by the next fork if it wants a mark. */
#define RF_RANGE_DUE	2u
/* Released, but the kernel would not unmark it yet. */
#define RF_RANGE_RETRY	4u
/* Its last registration did not fill it: while it is marked a child has its bytes. */
#define RF_RANGE_PARTIAL 8u
/* Other code may have taken its mark away, and the kernel has refused to make it again. */
#define RF_RANGE_LOST	16u

struct rf_range {
	uintptr_t start, end;
	uint32_t counts[RF_FINDS];	/* registrations, by the content they want */
	uint8_t mark;
	uint8_t nature;
	uint8_t flags;
	uint8_t tries;		/* to unmark it, in vain and not for want of mappings */
};

/* The mark may be gone. */
#define RF_RANGE_UNSURE (RF_RANGE_DOUBT | RF_RANGE_LOST)

/* So many, and its mark is stuck: see rf_range_is_stuck(). */
#define RF_RANGE_TRIES	8

#define RF_LEAF_RANGES	31
/* Two neighbours that have so many together, or fewer, become one leaf. */
#define RF_LEAF_JOIN	23
/* Leaves are grouped by their place in the directory. */
#define RF_GROUP	16

/* Room beyond that of the registrations: see rf_ranges_reserve(). */
#define RF_RANGES_SPARE	64

/* The common properties of some ranges, and how much more each of them is to be counted. */
struct rf_sum {
	int32_t more[RF_FINDS];
	uint32_t least;		/* registrations of any page; of a wiped one, that want zeros */
	uintptr_t end;
	bool even;		/* they touch and are steady */
	bool marked, due;	/* all bear a mark; all bear one or are due */
	bool wiped;		/* some bear MADV_WIPEONFORK */
	bool known;		/* all above but .more */
	bool lazy;		/* .more is not zero */
};

struct rf_leaf {
	uint32_t used;
	uint32_t next_free;
	struct rf_sum sum;
	struct rf_sum group;	/* of RF_GROUP leaves, the first of which this is */
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
	uint32_t mark_edges;	/* addresses where the mark changes */
	uint64_t marked_bytes;
	uint64_t version;	/* changes with every change */
	bool retry;		/* some range has RF_RANGE_RETRY, or had it */
	bool leftover;		/* some uncounted range was left with a mark */
};

/* A place in the list. Any change to the list makes it stale. */
struct rf_cursor {
	struct rf_leaf *leaf;	/* no change waits for it; NULL: there are no leaves */
	uint32_t entry, item;
};

void rf_ranges_init(struct rf_ranges *ranges);

/*
 * Forget everything, for a child that inherits it. @torn: its structures may not fit together, so
 * their memory is lost; else it is kept.
 */
void rf_ranges_clear(struct rf_ranges *ranges, bool torn);

/* Make room for @count ranges. -ENOMEM: nothing has changed. */
int rf_ranges_grow(struct rf_ranges *ranges, uint32_t count);

/*
 * Make room for @registrations, those counted already included, so that counting
 * and releasing them in any order finds memory. Every step of the function is
 * one of a visible range, or one of the four of a registration, hidden where another
 * begins as this one ends; pages a release cannot unmark take a few more.
 */
static inline int rf_ranges_reserve(struct rf_ranges *ranges, uint32_t registrations)
{
	uint64_t needed = 2 * (uint64_t)ranges->count + 4 * (uint64_t)registrations +
			  RF_RANGES_SPARE;

	ranges->registrations = registrations;
	if (rf_likely(needed <= ranges->capacity))
		return 0;
	return rf_ranges_grow(ranges, needed > UINT32_MAX ? UINT32_MAX : (uint32_t)needed);
}

/* The leaf at @entry, as it lies there: without the changes that wait for it. */
static inline struct rf_leaf *rf_ranges_leaf(const struct rf_ranges *ranges, uint32_t entry)
{
	const struct rf_leaf_entry *directory = ranges->directory.items;

	return (struct rf_leaf *)ranges->leaves.items + directory[entry].leaf;
}

/* The first leaf of the group of the leaf at @entry. */
static inline struct rf_leaf *rf_ranges_group(const struct rf_ranges *ranges, uint32_t entry)
{
	return rf_ranges_leaf(ranges, entry - entry % RF_GROUP);
}

/* Apply the changes that wait for the leaf at @entry and its ranges. */
void rf_ranges_settle(const struct rf_ranges *ranges, uint32_t entry);

/* Does a change wait for the leaf at @entry? */
static inline bool rf_ranges_waits(const struct rf_ranges *ranges, uint32_t entry)
{
	return rf_ranges_leaf(ranges, entry)->sum.lazy ||
	       (ranges->leaf_count >= RF_GROUP && rf_ranges_group(ranges, entry)->group.lazy);
}

static inline struct rf_leaf *rf_ranges_settled(const struct rf_ranges *ranges, uint32_t entry)
{
	if (rf_unlikely(rf_ranges_waits(ranges, entry)))
		rf_ranges_settle(ranges, entry);
	return rf_ranges_leaf(ranges, entry);
}

/* The first range that ends after @address. */
struct rf_cursor rf_ranges_seek(const struct rf_ranges *ranges, uintptr_t address);

/* NULL past the end. */
static inline const struct rf_range *rf_ranges_at(struct rf_cursor cursor)
{
	if (!cursor.leaf || cursor.item >= cursor.leaf->used)
		return NULL;
	return &cursor.leaf->ranges[cursor.item];
}

const struct rf_range *rf_ranges_next(const struct rf_ranges *ranges, struct rf_cursor *cursor);
/* The range that holds @address, or NULL. */
const struct rf_range *rf_ranges_find(const struct rf_ranges *ranges, uintptr_t address);

/*
 * At the first range of a leaf: go on over leaves that touch and end at or before @end, all of
 * whose ranges touch, bear beyond doubt a mark that they want, and are counted @least times; if
 * they are wiped, by registrations that want zeros. Returns the end of the last of them; 0: there
 * is none.
 */
uintptr_t rf_ranges_skip_leaves(const struct rf_ranges *ranges, struct rf_cursor *cursor,
				uintptr_t end, uint32_t least);

static inline uintptr_t rf_ranges_skip_marked(const struct rf_ranges *ranges,
					      struct rf_cursor *cursor, uintptr_t end,
					      uint32_t least)
{
	if (rf_likely(cursor->item || cursor->entry + 1 >= ranges->leaf_count))
		return 0;
	return rf_ranges_skip_leaves(ranges, cursor, end, least);
}

/*
 * A change of each page of [start, end). Pages that are not in the list stay out of
 * it, unless they are counted now; a range with no count and no mark leaves it.
 */
struct rf_change {
	int8_t count;		/* 1 or -1 in counts[finds]; 0: as it is */
	uint8_t finds;
	uint8_t set, clear;	/* flags */
	bool tried;		/* in vain, to unmark it */
	bool remark, rename;	/* do the next two count? */
	uint8_t mark;		/* counting: for unmarked ranges; discounting: for those left */
	uint8_t nature;
};

/*
 * rf_ranges_reserve() has made room. A page keeps each property that the change does not name.
 * @place is that of @start, for callers that have looked there.
 */
void rf_ranges_change_at(struct rf_ranges *ranges, struct rf_cursor place, uintptr_t start,
			 uintptr_t end, const struct rf_change *change);

static inline void rf_ranges_change(struct rf_ranges *ranges, uintptr_t start, uintptr_t end,
				    const struct rf_change *change)
{
	rf_ranges_change_at(ranges, rf_ranges_seek(ranges, start), start, end, change);
}

static inline uint64_t rf_range_count(const struct rf_range *range)
{
	return (uint64_t)range->counts[RF_FINDS_NOTHING] + range->counts[RF_FINDS_ZEROS] +
	       range->counts[RF_FINDS_COPY];
}

static inline bool rf_range_is_counted(const struct rf_range *range)
{
	return (range->counts[RF_FINDS_NOTHING] | range->counts[RF_FINDS_ZEROS] |
		range->counts[RF_FINDS_COPY]) != 0;
}

/* The child's content of these pages, if they are kept from it. */
static inline enum rf_finds rf_range_finds(const struct rf_range *range)
{
	if (range->counts[RF_FINDS_NOTHING])
		return RF_FINDS_NOTHING;
	return range->counts[RF_FINDS_ZEROS] ? RF_FINDS_ZEROS : RF_FINDS_COPY;
}

/* fork() does not move shared memory. */
static inline bool rf_range_wants_mark(const struct rf_range *range)
{
	return range->nature != RF_NATURE_SHARED && rf_range_is_counted(range);
}

static inline bool rf_range_is_marked_but_shared(const struct rf_range *range)
{
	return range->mark && range->nature == RF_NATURE_SHARED;
}

/* Its mark is wanted, and the memory is the one that was marked. */
static inline bool rf_range_is_marked_and_held(const struct rf_range *range)
{
	return range->mark && rf_range_wants_mark(range) && !(range->flags & RF_RANGE_DOUBT);
}

static inline bool rf_range_is_unmarked(const struct rf_range *range)
{
	return !range->mark;
}

/* Which mark serves it best. Any mark keeps its pages where they are. */
static inline enum rf_mark rf_range_best_mark(const struct rf_range *range)
{
	if (!rf_range_wants_mark(range))
		return RF_MARK_NONE;
	return range->nature == RF_NATURE_WIPEABLE && rf_range_finds(range) == RF_FINDS_ZEROS
		       ? RF_MARK_WIPEONFORK
		       : RF_MARK_DONTFORK;
}

/* Never unmarked while it is mapped: huge pages on 7.3, [vvar] everywhere. Forks alone try. */
static inline bool rf_range_is_stuck(const struct rf_range *range)
{
	return range->tries == RF_RANGE_TRIES;
}

/* It is counted no more, or it is shared: its mark waits to be taken away. */
static inline bool rf_range_is_unwanted(const struct rf_range *range)
{
	return range->mark && !rf_range_is_stuck(range) && !rf_range_wants_mark(range);
}

/* Runs of marked pages: each takes at most two VMAs more. */
static inline uint32_t rf_ranges_runs(const struct rf_ranges *ranges)
{
	return ranges->mark_edges / 2;
}

/* Asserts the invariants (tests). */
void rf_ranges_check(const struct rf_ranges *ranges);

#endif
