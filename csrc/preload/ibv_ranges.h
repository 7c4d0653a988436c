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
#ifndef RF_IBV_RANGES_H
#define RF_IBV_RANGES_H

#include "memory.h"
#include "rdmafork.h"

#include <stdbool.h>

struct rf_ibv_range {
	uintptr_t start, end;
	struct rf_handle handle;
};

struct rf_ibv_ranges {
	struct rf_memory entries;
	uint32_t used;
};

void rf_ibv_ranges_init(struct rf_ibv_ranges *ranges);

/* Forget everything, for a child that inherits it: to zero the entries would be to copy them. */
void rf_ibv_ranges_clear(struct rf_ibv_ranges *ranges);

/* The same where the structure may not fit together: its memory is lost. */
void rf_ibv_ranges_abandon(struct rf_ibv_ranges *ranges);

/* Room for @count more. -ENOMEM: nothing has changed. */
int rf_ibv_ranges_reserve(struct rf_ibv_ranges *ranges, uint32_t count);

/* There is room. */
void rf_ibv_ranges_add(struct rf_ibv_ranges *ranges, const struct rf_ibv_range *entry);

/* One that has just these bytes; NULL: none. */
struct rf_ibv_range *rf_ibv_ranges_find(const struct rf_ibv_ranges *ranges, uintptr_t start,
					uintptr_t end);

/*
 * Of those that touch a page of [@start, @end), which is page aligned, the one with
 * the lowest address; NULL: none. Looks at all there are.
 */
struct rf_ibv_range *rf_ibv_ranges_first(const struct rf_ibv_ranges *ranges, uintptr_t start,
					 uintptr_t end, size_t page_size);

/* @entry is one of them; any other entry may move. */
void rf_ibv_ranges_remove(struct rf_ibv_ranges *ranges, struct rf_ibv_range *entry);

/* Asserts the invariants (tests). */
void rf_ibv_ranges_check(const struct rf_ibv_ranges *ranges);

#endif
