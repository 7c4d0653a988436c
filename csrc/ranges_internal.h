/* SPDX-License-Identifier: BSD-3-Clause */
/* The leaves of the list and their directory, for the files that change them. */
#ifndef RF_RANGES_INTERNAL_H
#define RF_RANGES_INTERNAL_H

#include "ranges.h"

#include <stddef.h>
#include <string.h>

static inline struct rf_leaf_entry *directory_of(const struct rf_ranges *ranges)
{
	return ranges->directory.items;
}

static inline struct rf_leaf *leaf_at(const struct rf_ranges *ranges, uint32_t entry)
{
	return (struct rf_leaf *)ranges->leaves.items + directory_of(ranges)[entry].leaf;
}

static inline bool is_same(const struct rf_range *left, const struct rf_range *right)
{
	/* All that is not its bytes, in one comparison. */
	const size_t at = offsetof(struct rf_range, count);

	return left->end == right->start &&
	       !memcmp((const char *)left + at, (const char *)right + at, sizeof(*left) - at);
}

/* An empty leaf at @entry of the directory, the start of whose first range is not known yet. */
void rf_leaf_insert(struct rf_ranges *ranges, uint32_t entry);

/*
 * Fewer ranges are left in the leaf of @cursor: drop it or join it with its neighbours. The
 * cursor goes on pointing where it did.
 */
void rf_leaf_shrunk(struct rf_ranges *ranges, struct rf_cursor *cursor);

#endif
