/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The registrations themselves: one slot each, taken and given back in constant
 * time, found by index. Slots that wait for the next fork are in a list, from
 * which a release takes them out again: a registration that lives and dies
 * between two forks costs no more than this.
 *
 *	slots  [free] [listed] [  ] [listed] [free] ...
 *	          free list            listed, both ways
 *
 * A slot carries the serial of its registration, 0 when free: a handle with
 * another serial is stale, whoever uses the slot now. Serials only grow, and a
 * child goes on where its parent was, so those of the parent are known for ever.
 *
 * No locks: the engine's lock is held.
 */
#ifndef RF_REGISTRY_H
#define RF_REGISTRY_H

#include "memory.h"
#include "rdmafork.h"

#include <errno.h>
#include <stdbool.h>

#define RF_SLOT_NONE UINT32_MAX

/* Its pages are counted in the ranges. */
#define RF_SLOT_COUNTED		1u
/* The same of rf_register()'s flags. */
#define RF_SLOT_HELD		(RF_HELD << 1)
#define RF_SLOT_FROM		(RF_FROM << 1)
/* In the list: the next fork is to count it, or to ask about the mappings at its ends. */
#define RF_SLOT_LISTED		4u
/* rf_fork_init() came after it, or never: nothing protects it. */
#define RF_SLOT_UNPROTECTED	8u

struct rf_slot {
	uintptr_t start, end;	/* the registered bytes */
	uint64_t serial;
	uint32_t prev, next;	/* listed; next of the free, too */
	uint8_t flags;
	uint8_t policy;
	/* Log2 of the pages the two ends are rounded to; 0 is a base page. */
	uint8_t start_shift, end_shift;
};

/* The line of the program that registered, if rf_registered_at() has told it: by slot index. */
struct rf_origin {
	uint64_t serial;
	char where[120];
};

struct rf_registry {
	struct rf_memory slots, origins;
	uint32_t live;
	uint32_t touched;	/* slots ever used */
	uint32_t free_slot;	/* index + 1 */
	uint32_t listed;
	uint32_t first_listed, last_listed;
	uint32_t waiting;	/* of those listed, the ones that are not counted */
	uint64_t last_serial;
	uint64_t inherited;	/* serials up to here are the parent's */
	uint64_t page_bytes;	/* of all that live, each rounded to base pages, as VmPin has it */
	uintptr_t page_mask;
};

void rf_registry_init(struct rf_registry *registry);

/*
 * Forget everything, in a child: all serials so far are the parent's. The memory is kept, unless
 * the tables are @torn.
 */
void rf_registry_clear(struct rf_registry *registry, bool torn);

/*
 * Hand the tables over, which are the caller's to free: how many slots were ever used. It
 * leaves an empty registry, for rf_registry_clear() next.
 */
uint32_t rf_registry_take_tables(struct rf_registry *registry, struct rf_memory *slots,
				 struct rf_memory *origins);

/* Room for one more. -ENOMEM: nothing has changed. */
static inline int rf_registry_reserve(struct rf_registry *registry)
{
	if (rf_likely(registry->free_slot || registry->touched < registry->slots.capacity))
		return 0;
	return rf_memory_grow(&registry->slots, registry->touched + 1);
}

static inline struct rf_slot *rf_registry_slot(const struct rf_registry *registry, uint32_t index)
{
	return (struct rf_slot *)registry->slots.items + index;
}

static inline uint64_t rf_registry_slot_page_bytes(const struct rf_registry *registry,
						   const struct rf_slot *slot)
{
	const uintptr_t mask = registry->page_mask;

	return slot->start == slot->end ? 0 : ((slot->end + mask) & ~mask) - (slot->start & ~mask);
}

/* Take a slot for [@start, @end); there is room. Its policy and flags are the caller's to set. */
static inline struct rf_slot *rf_registry_take(struct rf_registry *registry, uintptr_t start,
					       uintptr_t end, uint32_t *index)
{
	struct rf_slot *slot;

	if (registry->free_slot) {
		*index = registry->free_slot - 1;
		slot = rf_registry_slot(registry, *index);
		registry->free_slot = slot->next;
	} else {
		RF_ASSERT(registry->touched < registry->slots.capacity);
		*index = registry->touched++;
		slot = rf_registry_slot(registry, *index);
	}
	slot->start = start;
	slot->end = end;
	slot->serial = ++registry->last_serial;
	slot->start_shift = 0;
	slot->end_shift = 0;
	registry->live++;
	registry->page_bytes += rf_registry_slot_page_bytes(registry, slot);
	return slot;
}

/* Give @slot back, which is that of @index and not listed. */
static inline void rf_registry_put(struct rf_registry *registry, struct rf_slot *slot,
				   uint32_t index)
{
	RF_ASSERT(slot->serial && !(slot->flags & RF_SLOT_LISTED));
	registry->page_bytes -= rf_registry_slot_page_bytes(registry, slot);
	slot->serial = 0;
	slot->flags = 0;
	slot->next = registry->free_slot;
	registry->free_slot = index + 1;
	registry->live--;
}

/* Undo the last rf_registry_take(), before any caller has seen the serial. */
static inline void rf_registry_take_back(struct rf_registry *registry, struct rf_slot *slot,
					 uint32_t index)
{
	rf_registry_put(registry, slot, index);
	registry->last_serial--;
}

static inline void rf_registry_list(struct rf_registry *registry, struct rf_slot *slot,
				    uint32_t index)
{
	slot->flags |= RF_SLOT_LISTED;
	slot->next = RF_SLOT_NONE;
	slot->prev = registry->last_listed;
	if (slot->prev == RF_SLOT_NONE)
		registry->first_listed = index;
	else
		rf_registry_slot(registry, slot->prev)->next = index;
	registry->last_listed = index;
	registry->listed++;
	registry->waiting += !(slot->flags & RF_SLOT_COUNTED);
}

/* Its pages are counted now. */
static inline void rf_registry_count(struct rf_registry *registry, struct rf_slot *slot)
{
	registry->waiting -= (slot->flags & (RF_SLOT_LISTED | RF_SLOT_COUNTED)) == RF_SLOT_LISTED;
	slot->flags |= RF_SLOT_COUNTED;
}

static inline void rf_registry_unlist(struct rf_registry *registry, struct rf_slot *slot)
{
	registry->waiting -= !(slot->flags & RF_SLOT_COUNTED);
	slot->flags &= (uint8_t)~RF_SLOT_LISTED;
	if (slot->prev == RF_SLOT_NONE)
		registry->first_listed = slot->next;
	else
		rf_registry_slot(registry, slot->prev)->next = slot->next;
	if (slot->next == RF_SLOT_NONE)
		registry->last_listed = slot->prev;
	else
		rf_registry_slot(registry, slot->next)->prev = slot->prev;
	registry->listed--;
}

/* The live slot of @handle. NULL with *@why -ESTALE or -ECHILD. */
static inline struct rf_slot *rf_registry_find(const struct rf_registry *registry,
					       struct rf_handle handle, int *why)
{
	struct rf_slot *slot;

	if (rf_likely(handle.serial > registry->inherited && handle.slot < registry->touched)) {
		slot = rf_registry_slot(registry, handle.slot);
		if (rf_likely(slot->serial == handle.serial))
			return slot;
	}
	*why = handle.serial && handle.serial <= registry->inherited ? -ECHILD : -ESTALE;
	return NULL;
}

/* Asserts the invariants (tests). */
void rf_registry_check(const struct rf_registry *registry);

#endif
