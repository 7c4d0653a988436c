/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Registrations found again by their bytes, for callers that keep no handle:
 * ibv_dofork_range() names a range as ibv_dontfork_range() named it before.
 *
 *	entries  [    ] [start end handle] [start end handle] [    ] ...
 *
 * Open addressing, at most half full. A range may be there several times, once a
 * registration; which of them is found first makes no difference. A free entry has
 * a handle with the serial 0.
 *
 * No locks: the engine's lock is held.
 */
#ifndef RF_INDEX_H
#define RF_INDEX_H

#include "memory.h"
#include "rdmafork.h"

#include <stdbool.h>

struct rf_entry {
	uintptr_t start, end;
	struct rf_handle handle;
};

struct rf_index {
	struct rf_memory entries;
	uint32_t used;
};

void rf_index_init(struct rf_index *index);

/* Forget everything, for a child that inherits it: to zero the entries would be to copy them. */
void rf_index_clear(struct rf_index *index);

/* The same where the structure may not fit together: its memory is lost. */
void rf_index_abandon(struct rf_index *index);

/* Room for @count more. -ENOMEM: nothing has changed. */
int rf_index_reserve(struct rf_index *index, uint32_t count);

/* There is room. */
void rf_index_add(struct rf_index *index, const struct rf_entry *entry);

/* One that has just these bytes; NULL: none. */
struct rf_entry *rf_index_find(const struct rf_index *index, uintptr_t start, uintptr_t end);

/*
 * Of those that touch a page of [@start, @end), which is page aligned, the one with
 * the lowest address; NULL: none. Looks at all there are.
 */
struct rf_entry *rf_index_first(const struct rf_index *index, uintptr_t start, uintptr_t end,
				size_t page_size);

/* @entry is the index's own; any other entry may move. */
void rf_index_remove(struct rf_index *index, struct rf_entry *entry);

/* Asserts the invariants (tests). */
void rf_index_check(const struct rf_index *index);

#endif
