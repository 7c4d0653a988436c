/* SPDX-License-Identifier: BSD-3-Clause */
#include "ibv_ranges.h"

#include <string.h>

/* Links are one more than the index of the item they name; 0 names none. */
struct item {
	struct rf_ibv_range range;
	uint32_t next;	/* in its bucket, or among the unused */
	uint32_t head;	/* of the bucket with this item's number */
};

static struct item *item_at(const struct rf_ibv_ranges *ranges, uint32_t link)
{
	return (struct item *)ranges->table.items + link - 1;
}

static uint32_t *head_of(const struct rf_ibv_ranges *ranges, uintptr_t start, uintptr_t end)
{
	const uintptr_t last_page = (end - 1) & -(uintptr_t)rf_sys_page_size();
	uint64_t hash = (uint64_t)start * 0x9e3779b97f4a7c15 + last_page;

	hash = (hash ^ hash >> 29) * 0xbf58476d1ce4e5b9;
	return &item_at(ranges, 1 + (uint32_t)((hash >> 32) * ranges->table.capacity >> 32))->head;
}

static void init(struct rf_ibv_ranges *ranges)
{
	memset(ranges, 0, sizeof(*ranges));
	ranges->table.item_size = sizeof(struct item);
}

void rf_ibv_ranges_clear(struct rf_ibv_ranges *ranges, bool torn)
{
	if (torn)
		rf_memory_abandon(&ranges->table);
	else if (ranges->used)
		rf_memory_free(&ranges->table);
	else
		return;
	ranges->used = ranges->made = ranges->unused = 0;
}

int rf_ibv_ranges_reserve(struct rf_ibv_ranges *ranges)
{
	struct rf_ibv_ranges grown;
	uint32_t link;
	int rc;

	if (rf_likely(ranges->used < ranges->table.capacity))
		return 0;
	init(&grown);
	rc = rf_memory_grow(&grown.table, 2 * ranges->used + 1);
	if (rc < 0)
		return rc;
	/* No item is unused: there was no room. */
	for (link = 1; link <= ranges->used; link++)
		rf_ibv_ranges_add(&grown, &item_at(ranges, link)->range);
	rf_memory_free(&ranges->table);
	*ranges = grown;
	return 0;
}

void rf_ibv_ranges_add(struct rf_ibv_ranges *ranges, const struct rf_ibv_range *range)
{
	uint32_t *head = head_of(ranges, range->start, range->end);
	uint32_t link = ranges->unused;
	struct item *item;

	RF_ASSERT(ranges->used < ranges->table.capacity);
	if (!link)
		link = ++ranges->made;
	item = item_at(ranges, link);
	if (ranges->unused)
		ranges->unused = item->next;
	item->range = *range;
	item->next = *head;
	*head = link;
	ranges->used++;
}

/* The link to one with just these bytes, or else to one of the same pages; NULL: none. */
static uint32_t *find(const struct rf_ibv_ranges *ranges, uintptr_t start, uintptr_t end)
{
	const size_t page_size = rf_sys_page_size();
	uint32_t *link, *similar = NULL;

	if (!ranges->used)
		return NULL;
	for (link = head_of(ranges, start, end); *link; link = &item_at(ranges, *link)->next) {
		const struct rf_ibv_range *range = &item_at(ranges, *link)->range;

		if (range->start != start || ((range->end - 1) ^ (end - 1)) >= page_size)
			continue;
		if (range->end == end)
			return link;
		if (!similar)
			similar = link;
	}
	return similar;
}

bool rf_ibv_ranges_take(struct rf_ibv_ranges *ranges, uintptr_t start, uintptr_t end,
			struct rf_handle *handle)
{
	uint32_t *link = find(ranges, start, end);
	uint32_t taken;
	struct item *item;

	if (!link)
		return false;
	taken = *link;
	item = item_at(ranges, taken);
	*handle = item->range.handle;
	*link = item->next;
	item->next = ranges->unused;
	ranges->unused = taken;
	ranges->used--;
	return true;
}

void rf_ibv_ranges_check(const struct rf_ibv_ranges *ranges)
{
	uint32_t bucket, link, used = 0, unused = 0;

	for (bucket = 1; bucket <= ranges->table.capacity; bucket++) {
		const uint32_t *head = &item_at(ranges, bucket)->head;

		for (link = *head; link; link = item_at(ranges, link)->next) {
			const struct rf_ibv_range *range = &item_at(ranges, link)->range;

			RF_ASSERT(link <= ranges->made && ++used <= ranges->used);
			RF_ASSERT(head_of(ranges, range->start, range->end) == head);
			(void)range;
		}
	}
	for (link = ranges->unused; link; link = item_at(ranges, link)->next)
		RF_ASSERT(link <= ranges->made && ++unused <= ranges->made);
	RF_ASSERT(used == ranges->used && used + unused == ranges->made);
	RF_ASSERT(ranges->made <= ranges->table.capacity);
	(void)used, (void)unused;
}
