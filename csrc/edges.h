/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Where whole pages leave a child, so do bytes on them that nobody registered: the
 * child's own data. It gets them back: saved as a fork prepares, and put on new
 * pages in the child, where what was registered reads as zeros.
 *
 *	pages       |----------------|----------------|----------------|
 *	registered        [=======A=======]        [====B====]
 *	counted          1                1                 1
 *	A's gaps    |-----]               [-----------|
 *	B's gaps                     |--------------]           [------|
 *	given back  |-----]               [--------]            [------|
 *
 * Every registration counts the bytes of its pages that are not its own, its gaps, in
 * a list like that of the pages. A byte is nobody's where both counts are the same.
 *
 * Zeroing the page at fork in place of omitting it would spare the new mapping, and
 * cost two madvise() calls more at each registration.
 *
 * A fork reads what is shown, whatever another thread is doing to the rest: a
 * snapshot is written where no child looks, says its own size, and is then shown by
 * one store. What is saved is as it was when the fork prepared: a thread that writes
 * there until the child is made writes for the parent alone.
 *
 * No locks: the engine's lock is held, but in a child.
 */
#ifndef RF_EDGES_H
#define RF_EDGES_H

#include "ranges.h"

struct rf_piece {
	uintptr_t start, end;	/* on one page */
	size_t at;		/* of its bytes, in the snapshot */
};

struct rf_snapshot {
	size_t mapped;
	size_t used;
	uint32_t count;
	uint32_t absent;	/* the first so many lie on pages a child does not have */
	struct rf_piece pieces[];
};

/* Counts of pages that leave in one way, and of the gaps on them. */
struct rf_leaving {
	const struct rf_ranges *pages, *gaps;
};

struct rf_edges {
	struct rf_leaving omitted, wiped;
	size_t page_size;
	bool forbidden;		/* the process may not read its own memory: nothing is saved */
	bool leftovers;		/* parts of huge pages may leave that nobody counts */
	struct rf_snapshot *shown, *spare;	/* or NULL */
};

/* Registrations take room for so many bytes in advance; a fork for what is beyond that. */
#define RF_EDGES_ROOM ((uint64_t)64 << 20)

void rf_edges_start(struct rf_edges *edges, size_t page_size);

/*
 * Make room for @nbytes in @gaps in all snapshots, so that a fork finds it. -ENOMEM:
 * nothing has changed.
 */
int rf_edges_reserve(struct rf_edges *edges, uint64_t gaps, uint64_t nbytes);

/*
 * Save what a child made from now on is to get back. What cannot be read, or has no
 * room, is not given back: a guard is in its place.
 */
void rf_edges_save(struct rf_edges *edges);

/*
 * The next of the stretches of pages that a child will have again, in ascending
 * order; *@at is 0 at first. False: there are no more.
 */
bool rf_edges_next(const struct rf_edges *edges, uint32_t *at, uintptr_t *start, uintptr_t *end);

/* In a child, before it maps anything: give back what was saved, where pages are absent. */
void rf_edges_restore(const struct rf_edges *edges);

/* What the snapshots take, as far as they have been written to. */
uint64_t rf_edges_bytes(const struct rf_edges *edges);

/* Drop what was saved. */
void rf_edges_clear(struct rf_edges *edges);

#endif
