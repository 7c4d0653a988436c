/* SPDX-License-Identifier: BSD-3-Clause */
/* Slots, serials and the list, against a model that keeps every handle it ever saw. */
#include "check.h"
#include "registry.h"

#include <time.h>
#include <unistd.h>

#define LIVE 600
#define DEAD 4096

struct known {
	struct rf_handle handle;
	bool listed;
};

static struct rf_registry registry;
static struct known live[LIVE];
static struct rf_handle dead[DEAD];
static size_t live_count, dead_count;

static struct rf_handle take(void)
{
	const uintptr_t start = 0x10000 + check_below(8 * 4096);
	uint32_t index;
	struct rf_slot *slot;

	CHECK(rf_registry_reserve(&registry) == 0);
	/* Of any length, most often not of whole pages. */
	slot = rf_registry_take(&registry, start, start + check_below(3 * 4096), &index);
	slot->flags = 0;
	return (struct rf_handle){ .serial = slot->serial, .slot = index };
}

static void list(struct rf_handle handle)
{
	rf_registry_list(&registry, rf_registry_slot(&registry, handle.slot), handle.slot);
}

static void unlist(struct rf_handle handle)
{
	rf_registry_unlist(&registry, rf_registry_slot(&registry, handle.slot));
}

static void put(uint32_t index)
{
	rf_registry_put(&registry, rf_registry_slot(&registry, index), index);
}

static void put_known(size_t at)
{
	if (live[at].listed)
		unlist(live[at].handle);
	put(live[at].handle.slot);
	dead[dead_count++ % DEAD] = live[at].handle;
	live[at] = live[--live_count];
}

static void check_handles(void)
{
	size_t i, listed = 0;
	int why;

	for (i = 0; i < live_count; i++) {
		struct rf_slot *slot = rf_registry_find(&registry, live[i].handle, &why);

		CHECK(slot && slot->serial == live[i].handle.serial);
		CHECK(!!(slot->flags & RF_SLOT_LISTED) == live[i].listed);
		listed += live[i].listed;
	}
	for (i = 0; i < dead_count && i < DEAD; i++) {
		CHECK(!rf_registry_find(&registry, dead[i], &why));
		CHECK(why == (dead[i].serial <= registry.inherited ? -ECHILD : -ESTALE));
	}
	CHECK(registry.live == live_count && registry.listed == listed);
}

static void random_operations_agree_with_the_model(void)
{
	unsigned long op, ops = check_scale(400000);
	uint64_t newest = 0;
	struct rf_slot *slot;
	size_t at;

	rf_registry_init(&registry);
	for (op = 0; op < ops; op++) {
		size_t choice = check_below(8);

		if (choice < 3 && live_count < LIVE) {
			live[live_count] = (struct known){ .handle = take() };
			CHECK(live[live_count].handle.serial > newest, "a serial came twice");
			newest = live[live_count++].handle.serial;
		} else if (choice < 5 && live_count) {
			put_known(check_below(live_count));
		} else if (live_count) {
			at = check_below(live_count);
			slot = rf_registry_slot(&registry, live[at].handle.slot);
			if (choice == 7)
				rf_registry_count(&registry, slot);
			else if (live[at].listed)
				unlist(live[at].handle);
			else
				list(live[at].handle);
			live[at].listed ^= choice != 7;
		}
		if (op % 1024 == 0 || op < 1000) {
			rf_registry_check(&registry);
			check_handles();
		}
		if (op % 50000 == 49999) {
			/* As in a child: live handles are inherited now, and dead ones too. */
			rf_registry_clear(&registry, false);
			for (; live_count; live_count--)
				dead[dead_count++ % DEAD] = live[live_count - 1].handle;
			check_handles();
		}
	}
}

static void a_stale_handle_never_names_the_slots_new_owner(void)
{
	struct rf_handle first, second, wrong;
	int why = 0;

	rf_registry_init(&registry);
	first = take();
	put(first.slot);
	second = take();
	CHECK(second.slot == first.slot && second.serial != first.serial);
	CHECK(!rf_registry_find(&registry, first, &why) && why == -ESTALE);
	CHECK(rf_registry_find(&registry, second, &why));
	wrong = second;
	wrong.slot = UINT32_MAX;
	CHECK(!rf_registry_find(&registry, wrong, &why) && why == -ESTALE);
	wrong.slot = second.slot + 1;
	CHECK(!rf_registry_find(&registry, wrong, &why) && why == -ESTALE);
	wrong = (struct rf_handle){ .serial = UINT64_MAX };
	CHECK(!rf_registry_find(&registry, wrong, &why) && why == -ESTALE);
	wrong = (struct rf_handle){ .serial = 0 };
	CHECK(!rf_registry_find(&registry, wrong, &why) && why == -ESTALE);
}

/* As VmPin counts: whole pages, each registration's by themselves. */
static void bytes_are_counted_in_whole_pages(void)
{
	const uint64_t page = rf_sys_page_size();
	uint32_t index, other;

	rf_registry_init(&registry);
	CHECK(rf_registry_reserve(&registry) == 0);
	(void)rf_registry_take(&registry, 4 * page + 1, 5 * page + 1, &index);
	CHECK(registry.page_bytes == 2 * page);
	CHECK(rf_registry_reserve(&registry) == 0);
	(void)rf_registry_take(&registry, 4 * page, 5 * page, &other);
	CHECK(registry.page_bytes == 3 * page);
	CHECK(rf_registry_reserve(&registry) == 0);
	(void)rf_registry_take(&registry, 7 * page + 1, 7 * page + 1, &other);
	CHECK(registry.page_bytes == 3 * page);
	put(index);
	CHECK(registry.page_bytes == page);
	rf_registry_check(&registry);
	rf_registry_clear(&registry, false);
	CHECK(registry.page_bytes == 0);
}

static void the_list_keeps_its_order_whatever_leaves_it(void)
{
	/* All orders in which four leave, and all first members. */
	static const int orders[][4] = {
		{ 0, 1, 2, 3 },
		{ 3, 2, 1, 0 },
		{ 1, 2, 0, 3 },
		{ 2, 1, 3, 0 },
		{ 1, 3, 0, 2 },
		{ 2, 0, 3, 1 },
		{ 0, 3, 1, 2 },
		{ 3, 0, 2, 1 },
		{ 0, 2, 1, 3 },
		{ 3, 1, 2, 0 },
	};
	struct rf_handle handles[4];
	size_t order, i;

	for (order = 0; order < COUNT_OF(orders); order++) {
		uint32_t index, before = 0;

		rf_registry_init(&registry);
		for (i = 0; i < 4; i++) {
			handles[i] = take();
			list(handles[i]);
		}
		for (i = 0; i < 4; i++) {
			rf_registry_check(&registry);
			before = 0;
			for (index = registry.first_listed; index != RF_SLOT_NONE;
			     index = rf_registry_slot(&registry, index)->next) {
				CHECK(index + 1 > before);
				before = index + 1;
			}
			unlist(handles[orders[order][i]]);
		}
		rf_registry_check(&registry);
		CHECK(registry.first_listed == RF_SLOT_NONE);
		CHECK(registry.last_listed == RF_SLOT_NONE);
	}
}

static double seconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static double time_of_pairs(unsigned long pairs)
{
	double from = seconds();
	struct rf_handle handle;

	while (pairs--) {
		handle = take();
		list(handle);
		unlist(handle);
		put(handle.slot);
	}
	return seconds() - from;
}

/* A fork copies the page tables of small pages. */
static void many_slots_lie_in_huge_pages(void)
{
	size_t i;

	rf_registry_init(&registry);
	take();
	CHECK(!(check_flags(registry.slots.items) & CHECK_HG));
	for (i = 0; i < 300000; i++)
		take();
	if (access("/sys/kernel/mm/transparent_hugepage", F_OK))
		check_skip("no transparent huge pages");
	CHECK(check_flags(registry.slots.items) & CHECK_HG);
}

static void a_pair_costs_the_same_with_a_million_live(void)
{
	unsigned long pairs = check_scale(1000000), many = check_scale(1000000), i;
	double few, full;

	rf_registry_init(&registry);
	few = time_of_pairs(pairs);
	for (i = 0; i < many; i++)
		list(take());
	full = time_of_pairs(pairs);
	/* Generous: it is about linear against constant. */
	CHECK(full < 20 * few + 0.05, "%.4f s with none, %.4f s with %lu live", few, full, many);
	rf_registry_check(&registry);
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(random_operations_agree_with_the_model),
		SCENARIO(a_stale_handle_never_names_the_slots_new_owner),
		SCENARIO(bytes_are_counted_in_whole_pages),
		SCENARIO(the_list_keeps_its_order_whatever_leaves_it),
		SCENARIO(many_slots_lie_in_huge_pages),
		SCENARIO(a_pair_costs_the_same_with_a_million_live),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
