/* SPDX-License-Identifier: BSD-3-Clause */
#include "registry.h"

#include <string.h>

void rf_registry_init(struct rf_registry *registry)
{
	memset(registry, 0, sizeof(*registry));
	registry->slots.item_size = sizeof(struct rf_slot);
	registry->origins.item_size = sizeof(struct rf_origin);
	registry->page_mask = rf_sys_page_size() - 1;
	registry->first_listed = RF_SLOT_NONE;
	registry->last_listed = RF_SLOT_NONE;
}

void rf_registry_clear(struct rf_registry *registry, bool torn)
{
	struct rf_memory slots = registry->slots, origins = registry->origins;
	uint64_t last_serial = registry->last_serial;

	if (torn) {
		rf_memory_abandon(&slots);
		rf_memory_abandon(&origins);
	}
	rf_registry_init(registry);
	registry->slots = slots;
	registry->origins = origins;
	registry->last_serial = last_serial;
	registry->inherited = last_serial;
}

uint32_t rf_registry_take_tables(struct rf_registry *registry, struct rf_memory *slots,
				 struct rf_memory *origins)
{
	*slots = registry->slots;
	*origins = registry->origins;
	rf_memory_abandon(&registry->slots);
	rf_memory_abandon(&registry->origins);
	return registry->touched;
}

void rf_registry_check(const struct rf_registry *registry)
{
	uint32_t index, live = 0, listed = 0, waiting = 0, before = RF_SLOT_NONE;
	const struct rf_slot *slot;
	uint64_t page_bytes = 0;

	for (index = 0; index < registry->touched; index++) {
		slot = rf_registry_slot(registry, index);
		RF_ASSERT(slot->serial <= registry->last_serial);
		RF_ASSERT(!slot->serial || slot->serial > registry->inherited);
		live += slot->serial != 0;
		page_bytes += slot->serial ? rf_registry_slot_page_bytes(registry, slot) : 0;
	}
	RF_ASSERT(live == registry->live);
	RF_ASSERT(page_bytes == registry->page_bytes);
	for (index = registry->free_slot; index; index = slot->next) {
		slot = rf_registry_slot(registry, index - 1);
		RF_ASSERT(!slot->serial);
		live++;
	}
	RF_ASSERT(live == registry->touched);
	for (index = registry->first_listed; index != RF_SLOT_NONE; index = slot->next) {
		slot = rf_registry_slot(registry, index);
		RF_ASSERT(slot->serial && slot->flags & RF_SLOT_LISTED);
		RF_ASSERT(slot->prev == before);
		before = index;
		listed++;
		waiting += !(slot->flags & RF_SLOT_COUNTED);
	}
	RF_ASSERT(before == registry->last_listed);
	RF_ASSERT(listed == registry->listed);
	RF_ASSERT(waiting == registry->waiting);
	(void)live, (void)listed, (void)waiting, (void)before, (void)page_bytes;
}
