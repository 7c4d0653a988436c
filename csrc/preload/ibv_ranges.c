/* SPDX-License-Identifier: BSD-3-Clause */
#include "ibv_ranges.h"

#include <string.h>

static struct rf_ibv_range *entry_at(const struct rf_ibv_ranges *ranges, uint32_t place)
{
	return (struct rf_ibv_range *)ranges->entries.items + place;
}

static bool is_free(const struct rf_ibv_range *entry)
{
	return !entry->handle.serial;
}

/* Mapped sizes are powers of two, and so is the number of entries. */
static uint32_t next(const struct rf_ibv_ranges *ranges, uint32_t place)
{
	return (place + 1) & (ranges->entries.capacity - 1);
}

static uint32_t home(const struct rf_ibv_ranges *ranges, uintptr_t start, uintptr_t end)
{
	uint64_t hash = (uint64_t)start * 0x9e3779b97f4a7c15 + end;

	hash = (hash ^ hash >> 29) * 0xbf58476d1ce4e5b9;
	return (uint32_t)(hash >> 32) & (ranges->entries.capacity - 1);
}

void rf_ibv_ranges_init(struct rf_ibv_ranges *ranges)
{
	memset(ranges, 0, sizeof(*ranges));
	ranges->entries.item_size = sizeof(struct rf_ibv_range);
}

void rf_ibv_ranges_clear(struct rf_ibv_ranges *ranges)
{
	if (ranges->used)
		rf_memory_free(&ranges->entries);
	ranges->used = 0;
}

void rf_ibv_ranges_abandon(struct rf_ibv_ranges *ranges)
{
	rf_memory_abandon(&ranges->entries);
	ranges->used = 0;
}

int rf_ibv_ranges_reserve(struct rf_ibv_ranges *ranges, uint32_t count)
{
	struct rf_ibv_ranges grown;
	uint32_t place;
	int rc;

	if (rf_likely(2 * ((uint64_t)ranges->used + count) <= ranges->entries.capacity))
		return 0;
	rf_ibv_ranges_init(&grown);
	rc = rf_memory_grow(&grown.entries, 2 * (ranges->used + count));
	if (rc < 0)
		return rc;
	for (place = 0; place < ranges->entries.capacity; place++)
		if (!is_free(entry_at(ranges, place)))
			rf_ibv_ranges_add(&grown, entry_at(ranges, place));
	rf_memory_free(&ranges->entries);
	*ranges = grown;
	return 0;
}

void rf_ibv_ranges_add(struct rf_ibv_ranges *ranges, const struct rf_ibv_range *entry)
{
	uint32_t place = home(ranges, entry->start, entry->end);

	RF_ASSERT(2 * (ranges->used + 1) <= ranges->entries.capacity);
	while (!is_free(entry_at(ranges, place)))
		place = next(ranges, place);
	*entry_at(ranges, place) = *entry;
	ranges->used++;
}

struct rf_ibv_range *rf_ibv_ranges_find(const struct rf_ibv_ranges *ranges, uintptr_t start,
					uintptr_t end)
{
	struct rf_ibv_range *entry;
	uint32_t place;

	if (!ranges->used)
		return NULL;
	place = home(ranges, start, end);
	for (; !is_free(entry = entry_at(ranges, place)); place = next(ranges, place))
		if (entry->start == start && entry->end == end)
			return entry;
	return NULL;
}

struct rf_ibv_range *rf_ibv_ranges_first(const struct rf_ibv_ranges *ranges, uintptr_t start,
					 uintptr_t end, size_t page_size)
{
	struct rf_ibv_range *entry, *first = NULL;
	uint32_t place;

	for (place = 0; ranges->used && place < ranges->entries.capacity; place++) {
		entry = entry_at(ranges, place);
		if (is_free(entry) || (entry->start & ~(page_size - 1)) >= end ||
		    entry->end <= start)
			continue;
		if (!first || entry->start < first->start)
			first = entry;
	}
	return first;
}

void rf_ibv_ranges_remove(struct rf_ibv_ranges *ranges, struct rf_ibv_range *entry)
{
	uint32_t mask = ranges->entries.capacity - 1;
	uint32_t hole = (uint32_t)(entry - entry_at(ranges, 0)), place = hole, wanted;

	/* What follows moves up, unless that is before where a search for it begins. */
	for (;;) {
		place = next(ranges, place);
		entry = entry_at(ranges, place);
		if (is_free(entry))
			break;
		wanted = home(ranges, entry->start, entry->end);
		if (((place - wanted) & mask) >= ((place - hole) & mask)) {
			*entry_at(ranges, hole) = *entry;
			hole = place;
		}
	}
	memset(entry_at(ranges, hole), 0, sizeof(*entry));
	ranges->used--;
}

void rf_ibv_ranges_check(const struct rf_ibv_ranges *ranges)
{
	uint32_t place, used = 0;

	for (place = 0; place < ranges->entries.capacity; place++) {
		const struct rf_ibv_range *entry = entry_at(ranges, place);
		uint32_t at;

		if (is_free(entry))
			continue;
		used++;
		at = home(ranges, entry->start, entry->end);
		for (; at != place; at = next(ranges, at))
			RF_ASSERT(!is_free(entry_at(ranges, at)));
	}
	RF_ASSERT(used == ranges->used);
	RF_ASSERT(2 * used <= ranges->entries.capacity);
	(void)used;
}
