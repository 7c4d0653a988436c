/* SPDX-License-Identifier: BSD-3-Clause */
#include "index.h"

#include <string.h>

static struct rf_entry *entry_at(const struct rf_index *index, uint32_t place)
{
	return (struct rf_entry *)index->entries.items + place;
}

static bool is_free(const struct rf_entry *entry)
{
	return !entry->handle.serial;
}

/* Mapped sizes are powers of two, and so is the number of entries. */
static uint32_t next(const struct rf_index *index, uint32_t place)
{
	return (place + 1) & (index->entries.capacity - 1);
}

static uint32_t home(const struct rf_index *index, uintptr_t start, uintptr_t end)
{
	uint64_t hash = (uint64_t)start * 0x9e3779b97f4a7c15 + end;

	hash = (hash ^ hash >> 29) * 0xbf58476d1ce4e5b9;
	return (uint32_t)(hash >> 32) & (index->entries.capacity - 1);
}

void rf_index_init(struct rf_index *index)
{
	memset(index, 0, sizeof(*index));
	index->entries.item_size = sizeof(struct rf_entry);
}

void rf_index_clear(struct rf_index *index)
{
	if (index->used)
		rf_memory_free(&index->entries);
	index->used = 0;
}

void rf_index_abandon(struct rf_index *index)
{
	rf_memory_abandon(&index->entries);
	index->used = 0;
}

int rf_index_reserve(struct rf_index *index, uint32_t count)
{
	struct rf_index grown;
	uint32_t place;
	int rc;

	if (rf_likely(2 * ((uint64_t)index->used + count) <= index->entries.capacity))
		return 0;
	rf_index_init(&grown);
	rc = rf_memory_grow(&grown.entries, 2 * (index->used + count));
	if (rc < 0)
		return rc;
	for (place = 0; place < index->entries.capacity; place++)
		if (!is_free(entry_at(index, place)))
			rf_index_add(&grown, entry_at(index, place));
	rf_memory_free(&index->entries);
	*index = grown;
	return 0;
}

void rf_index_add(struct rf_index *index, const struct rf_entry *entry)
{
	uint32_t place = home(index, entry->start, entry->end);

	RF_ASSERT(2 * (index->used + 1) <= index->entries.capacity);
	while (!is_free(entry_at(index, place)))
		place = next(index, place);
	*entry_at(index, place) = *entry;
	index->used++;
}

struct rf_entry *rf_index_find(const struct rf_index *index, uintptr_t start, uintptr_t end)
{
	struct rf_entry *entry;
	uint32_t place;

	if (!index->used)
		return NULL;
	place = home(index, start, end);
	for (; !is_free(entry = entry_at(index, place)); place = next(index, place))
		if (entry->start == start && entry->end == end)
			return entry;
	return NULL;
}

struct rf_entry *rf_index_first(const struct rf_index *index, uintptr_t start, uintptr_t end,
				size_t page_size)
{
	struct rf_entry *entry, *first = NULL;
	uint32_t place;

	for (place = 0; index->used && place < index->entries.capacity; place++) {
		entry = entry_at(index, place);
		if (is_free(entry) || (entry->start & ~(page_size - 1)) >= end ||
		    entry->end <= start)
			continue;
		if (!first || entry->start < first->start)
			first = entry;
	}
	return first;
}

void rf_index_remove(struct rf_index *index, struct rf_entry *entry)
{
	uint32_t mask = index->entries.capacity - 1;
	uint32_t hole = (uint32_t)(entry - entry_at(index, 0)), place = hole, wanted;

	/* What follows moves up, unless that is before where a search for it begins. */
	for (;;) {
		place = next(index, place);
		entry = entry_at(index, place);
		if (is_free(entry))
			break;
		wanted = home(index, entry->start, entry->end);
		if (((place - wanted) & mask) >= ((place - hole) & mask)) {
			*entry_at(index, hole) = *entry;
			hole = place;
		}
	}
	memset(entry_at(index, hole), 0, sizeof(*entry));
	index->used--;
}

void rf_index_check(const struct rf_index *index)
{
	uint32_t place, used = 0;

	for (place = 0; place < index->entries.capacity; place++) {
		const struct rf_entry *entry = entry_at(index, place);
		uint32_t at;

		if (is_free(entry))
			continue;
		used++;
		for (at = home(index, entry->start, entry->end); at != place; at = next(index, at))
			RF_ASSERT(!is_free(entry_at(index, at)));
	}
	RF_ASSERT(used == index->used);
	RF_ASSERT(2 * used <= index->entries.capacity);
	(void)used;
}
