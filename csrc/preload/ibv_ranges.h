/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Registrations found again by their bytes, for callers that keep no handle.
 * ibv_dofork_range() names a range as ibv_dontfork_range() named it before, or with its
 * end moved to the end of its last page, as mlx4, mthca and vmw_pvrdma do. libibverbs and
 * its drivers (rdma-core 65) never release in another way, so a part of a range, or
 * several ranges at once, are not looked for.
 *
 *	heads   [ 3 ] [   ] [ 2 ] [   ]		a bucket's newest range
 *	ranges  [ A ] [ B ] [ C ] [   ]		and a link to the next one of its bucket
 *
 * Both lie in one array of items. A bucket is chosen by the start and the last page. A
 * range may be there several times, once a registration; which of them is found makes no
 * difference.
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
	struct rf_memory table;
	uint32_t used;		/* ranges */
	uint32_t made;		/* items that were ever used */
	uint32_t unused;	/* the first of those that hold no range any more */
};

/*
 * Forget everything, for a child that inherits it: to zero the items would be to copy them.
 * @torn: the structure may not fit together, so its memory is lost.
 */
void rf_ibv_ranges_clear(struct rf_ibv_ranges *ranges, bool torn);

/* Room for one more. -ENOMEM: nothing has changed. */
int rf_ibv_ranges_reserve(struct rf_ibv_ranges *ranges);

/* rf_ibv_ranges_reserve() has made room. */
void rf_ibv_ranges_add(struct rf_ibv_ranges *ranges, const struct rf_ibv_range *range);

/* Take out one with just these bytes, or else with that start and that last page; false: none. */
bool rf_ibv_ranges_take(struct rf_ibv_ranges *ranges, uintptr_t start, uintptr_t end,
			struct rf_handle *handle);

/* Asserts the invariants (tests). */
void rf_ibv_ranges_check(const struct rf_ibv_ranges *ranges);

#endif
