/* SPDX-License-Identifier: BSD-3-Clause */
/* The step function: against its model, and the memory it takes. */
#include "check.h"
#include "ranges.h"
#include "ranges_model.h"

#define BASE 0x10000000ul

static struct rf_ranges ranges;

static const struct rf_change more = { .count = 1 }, less = { .count = -1 },
			      last = { .count = -1, .remark = true },
			      mark = { .remark = true, .mark = RF_MARK_DONTFORK },
			      unmark = { .remark = true };

/* Where the next registration goes. */
typedef struct interval shape(unsigned long nth);

static struct interval dense(unsigned long nth)
{
	size_t start = check_below(48), end = start + 1 + check_below(16);

	(void)nth;
	return (struct interval){ start, end };
}

static struct interval isolated(unsigned long nth)
{
	size_t start = 2 * check_below(model_pages / 2);

	(void)nth;
	return (struct interval){ start, start + 1 };
}

static struct interval ascending(unsigned long nth)
{
	size_t start = 3 * nth % (model_pages - 4);

	return (struct interval){ start, start + 2 };
}

static struct interval descending(unsigned long nth)
{
	struct interval up = ascending(nth);

	return (struct interval){ model_pages - up.end, model_pages - up.start };
}

static struct interval anywhere(unsigned long nth)
{
	size_t start = check_below(model_pages), end = start + 1 + check_below(model_pages - start);

	(void)nth;
	return (struct interval){ start, end };
}

/* All of it, and the pieces that an allocator hands out, one beside another. */
static struct interval arena(unsigned long nth)
{
	size_t size = (size_t)1 << check_below(6), start = size * check_below(model_pages / size);

	if (nth % 64 == 0)
		return (struct interval){ 0, model_pages };
	return (struct interval){ start, start + size };
}

static void run_on(size_t pages, shape *next, unsigned long ops)
{
	unsigned long op;

	model_begin(pages);
	for (op = 0; op < ops; op++) {
		model_step(next(op));
		if (op % 8 == 0)
			model_compare();
	}
	model_end();
}

static void run_shape(shape *next)
{
	run_on(MODEL_FEW, next, check_scale(60000));
}

static void dense_overlaps_agree(void)
{
	run_shape(dense);
}

static void isolated_pages_agree(void)
{
	run_shape(isolated);
}

static void ascending_ranges_agree(void)
{
	run_shape(ascending);
}

static void descending_ranges_agree(void)
{
	run_shape(descending);
}

static void random_ranges_agree(void)
{
	run_shape(anywhere);
}

static void arenas_agree(void)
{
	run_shape(arena);
}

/* Where all bear their mark long registrations count whole leaves, and groups, in one step. */
static void registrations_over_many_agree(void)
{
	model_even = true;
	run_shape(anywhere);
	run_on(MODEL_MANY, anywhere, check_scale(20000));
	run_on(MODEL_MANY, ascending, check_scale(10000));
	model_wiped = true;
	run_on(MODEL_MANY, anywhere, check_scale(20000));
	model_even = model_wiped = false;
	run_on(MODEL_MANY, anywhere, check_scale(5000));
}

/* ---- Memory ---- */

#define MANY 100000u

static double bytes_a_range(const uint32_t *order)
{
	uint64_t used;
	uint32_t i;

	rf_ranges_init(&ranges);
	for (i = 0; i < MANY; i++) {
		uintptr_t start = BASE + order[i] * 8192ul;

		CHECK(rf_ranges_reserve(&ranges, i + 1) == 0);
		rf_ranges_change(&ranges, start, start + 4096, &more);
	}
	rf_ranges_check(&ranges);
	CHECK(ranges.count == MANY);
	used = (uint64_t)ranges.leaves_touched * sizeof(struct rf_leaf) +
	       (uint64_t)ranges.leaf_count * sizeof(struct rf_leaf_entry);
	return (double)used / MANY;
}

static void a_range_takes_less_than_72_bytes(void)
{
	static uint32_t up[MANY], down[MANY], shuffled[MANY];
	double ascending_bytes, descending_bytes, random_bytes;
	uint32_t i;

	for (i = 0; i < MANY; i++) {
		up[i] = shuffled[i] = i;
		down[i] = MANY - 1 - i;
	}
	for (i = MANY - 1; i; i--) {
		uint32_t other = (uint32_t)check_below(i + 1), kept = shuffled[i];

		shuffled[i] = shuffled[other];
		shuffled[other] = kept;
	}
	ascending_bytes = bytes_a_range(up);
	descending_bytes = bytes_a_range(down);
	random_bytes = bytes_a_range(shuffled);
	CHECK(ascending_bytes < 72 && descending_bytes < 72 && random_bytes < 72,
	      "ascending %.1f, descending %.1f, random %.1f", ascending_bytes, descending_bytes,
	      random_bytes);
}

/* ---- Groups of leaves ---- */

#define PAGES (2 * RF_GROUP * RF_LEAF_RANGES)
/* At the beginning of a leaf in the midst of a group. */
#define ODD (RF_GROUP / 2 * RF_LEAF_RANGES)

/* Full leaves of pages that touch and differ. All but @hole bear marks; @due is to get one. */
static void fill_leaves(uint32_t hole, uint32_t due)
{
	const uint32_t finds[] = { RF_FINDS_NOTHING, RF_FINDS_COPY };
	uint32_t i;

	rf_ranges_init(&ranges);
	CHECK(rf_ranges_reserve(&ranges, PAGES + 2) == 0);
	for (i = 0; i < PAGES; i++) {
		const struct rf_change page = {
			.count = 1,
			.finds = (uint8_t)finds[i % 2],
			.set = i == due ? RF_RANGE_DUE : 0,
			.remark = i != due,
			.mark = RF_MARK_DONTFORK,
		};

		if (i != hole)
			rf_ranges_change(&ranges, BASE + i * 4096ul, BASE + (i + 1) * 4096ul,
					 &page);
	}
}

/* An odd leaf is not passed over with its group. */
static void a_group_counts_its_leaves_alike(void)
{
	const struct rf_change all = { .count = 1, .remark = true, .mark = RF_MARK_DONTFORK };
	uint32_t odd, at, round;

	for (odd = 0; odd < 2; odd++) {
		fill_leaves(odd ? ODD : PAGES, odd ? PAGES : ODD);
		for (round = 1; round < 3; round++) {
			rf_ranges_change(&ranges, BASE, BASE + PAGES * 4096ul, &all);
			rf_ranges_check(&ranges);
			CHECK(ranges.marked_bytes == PAGES * 4096ul);
			for (at = 0; at < PAGES; at += ODD / 2)
				CHECK(rf_range_count(rf_ranges_find(&ranges, BASE + at * 4096ul)) ==
				      round + (at != ODD || !odd));
		}
	}
}

/* ---- Room ---- */

/* Capacity is asked for by registrations alone; RF_ASSERT in the list notices a lack of it. */
static void add_one(uint32_t nth, uint32_t registrations)
{
	uintptr_t start = BASE + nth * 4096ul;

	CHECK(rf_ranges_reserve(&ranges, registrations) == 0);
	rf_ranges_change(&ranges, start, start + 4096, &more);
}

static void sub_one(uint32_t nth, bool marked)
{
	uintptr_t start = BASE + nth * 4096ul;

	rf_ranges_change(&ranges, start, start + 4096, marked ? &last : &less);
	CHECK(ranges.count <= ranges.capacity);
}

static void neighbours_merge_and_part_again(void)
{
	uint32_t many = (uint32_t)check_scale(20000) & ~1u, i, step;
	bool marked;

	for (step = 0; step < 6; step++) {
		marked = step & 1;
		rf_ranges_init(&ranges);
		for (i = 0; i < many; i++)
			add_one(i, i + 1);
		CHECK(ranges.count == 1);
		if (marked)
			rf_ranges_change(&ranges, BASE, BASE + many * 4096ul, &mark);
		for (i = step >= 4; i < many; i += 2)
			sub_one(step & 2 ? many - 2 - i : i, marked);
		CHECK(ranges.count == many / 2);
		rf_ranges_check(&ranges);
		for (i = 1; i < many; i += 2)
			sub_one(step & 4 ? i - 1 : (step & 2 ? many - i : i), marked);
		CHECK(!ranges.count);
	}
}

static void natures_cut_and_registrations_part(void)
{
	const struct rf_change shared = { .rename = true, .nature = RF_NATURE_SHARED };
	uint32_t many = (uint32_t)check_scale(20000) & ~1u, i;

	rf_ranges_init(&ranges);
	for (i = 0; i < many; i++)
		add_one(i, i + 1);
	/* Every third page is shared: as the engine does, with a reservation each. */
	for (i = 0; i < many; i += 3) {
		CHECK(rf_ranges_reserve(&ranges, many) == 0);
		rf_ranges_change(&ranges, BASE + i * 4096ul, BASE + (i + 1) * 4096ul, &shared);
	}
	for (i = 0; i < many; i += 2)
		sub_one(i, false);
	rf_ranges_check(&ranges);
	for (i = 1; i < many; i += 2)
		sub_one(i, false);
	CHECK(!ranges.count);
}

/* The last reservation may have been for few, when most live registrations were hidden. */
static void a_small_reservation_forgets_no_one(void)
{
	uint32_t many = (uint32_t)check_scale(4000) & ~1u, i, round;

	rf_ranges_init(&ranges);
	for (round = 0; round < 20; round++) {
		for (i = 0; i < many; i++)
			add_one(i, i + 1);
		for (i = 0; i < many - 2; i++)
			sub_one((i * 7919u) % (many - 2), false);
		CHECK(rf_ranges_reserve(&ranges, 2) == 0);
		sub_one(many - 2, false);
		sub_one(many - 1, false);
		CHECK(!ranges.count);
		if (round == 10)
			rf_ranges_clear(&ranges, false);
	}
}

/* Registrations that nest: each hides its ends in the next one's. */
static void nested_registrations_part_in_any_order(void)
{
	uint32_t many = (uint32_t)check_scale(600), i;
	uint32_t order[600];

	rf_ranges_init(&ranges);
	for (i = 0; i < many; i++) {
		order[i] = i;
		CHECK(rf_ranges_reserve(&ranges, i + 1) == 0);
		/* [i, many) and then [0, i): every second end is hidden. */
		rf_ranges_change(&ranges, BASE + (i & 1 ? 0 : i + 1) * 4096ul,
				 BASE + (i & 1 ? i : many + 1) * 4096ul, &more);
	}
	for (i = many; i; i--) {
		uint32_t which = (uint32_t)check_below(i), nth = order[which];

		order[which] = order[i - 1];
		rf_ranges_change(&ranges, BASE + (nth & 1 ? 0 : nth + 1) * 4096ul,
				 BASE + (nth & 1 ? nth : many + 1) * 4096ul, &less);
		rf_ranges_check(&ranges);
	}
	CHECK(!ranges.count);
}

/* A change that begins in the gap before a full leaf, and cuts its first range. */
static void a_gap_before_a_full_leaf_takes_no_leaf(void)
{
	const struct rf_change marked = { .remark = true, .mark = RF_MARK_DONTFORK };
	uint32_t i;

	rf_ranges_init(&ranges);
	CHECK(rf_ranges_reserve(&ranges, 200) == 0);
	for (i = 0; i < RF_LEAF_RANGES; i++)
		rf_ranges_change(&ranges, BASE + (10 + i * 10) * 4096ul,
				 BASE + (12 + i * 10) * 4096ul, &more);
	rf_ranges_change(&ranges, BASE, BASE + 11 * 4096ul, &marked);
	rf_ranges_check(&ranges);
	CHECK(ranges.count == RF_LEAF_RANGES + 1 && ranges.marked_bytes == 4096);
}

/* A leaf that is cut where it is not quite full, beside one that holds a single range. */
static void two_neighbours_are_never_nearly_empty(void)
{
	uint32_t i, few;

	for (few = 0; few < 8; few++) {
		rf_ranges_init(&ranges);
		CHECK(rf_ranges_reserve(&ranges, 200) == 0);
		for (i = 0; i <= RF_LEAF_RANGES; i++)
			rf_ranges_change(&ranges, BASE + i * 10 * 4096ul,
					 BASE + (i * 10 + 5) * 4096ul, &more);
		CHECK(ranges.leaf_count == 2);
		rf_ranges_check(&ranges);
		for (i = 0; i < few; i++)
			rf_ranges_change(&ranges, BASE + (i * 20 + 205) * 4096ul,
					 BASE + (i * 20 + 210) * 4096ul, &more);
		rf_ranges_check(&ranges);
		/* The cuts add two ranges each. */
		for (i = 0; i < 8; i++) {
			rf_ranges_change(&ranges, BASE + (i * 10 + 1) * 4096ul,
					 BASE + (i * 10 + 2) * 4096ul, &more);
			rf_ranges_check(&ranges);
		}
		rf_memory_free(&ranges.leaves);
		rf_memory_free(&ranges.directory);
	}
}

static void the_list_reaches_the_ends_of_the_address_space(void)
{
	uintptr_t top = UINTPTR_MAX - 4095;

	rf_ranges_init(&ranges);
	CHECK(rf_ranges_reserve(&ranges, 4) == 0);
	CHECK(!rf_ranges_find(&ranges, 0) && !rf_ranges_find(&ranges, UINTPTR_MAX));
	rf_ranges_change(&ranges, 0, 4096, &more);
	rf_ranges_change(&ranges, top - 4096, top, &more);
	rf_ranges_change(&ranges, 0, UINTPTR_MAX, &mark);
	rf_ranges_check(&ranges);
	CHECK(ranges.count == 2 && rf_ranges_runs(&ranges) == 2);
	CHECK(rf_ranges_find(&ranges, 0) && rf_ranges_find(&ranges, top - 1));
	CHECK(!rf_ranges_find(&ranges, top) && !rf_ranges_find(&ranges, UINTPTR_MAX));
	rf_ranges_change(&ranges, 0, UINTPTR_MAX, &unmark);
	rf_ranges_change(&ranges, 0, 4096, &less);
	rf_ranges_change(&ranges, top - 4096, top, &less);
	CHECK(!ranges.count);
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(dense_overlaps_agree),
		SCENARIO(isolated_pages_agree),
		SCENARIO(ascending_ranges_agree),
		SCENARIO(descending_ranges_agree),
		SCENARIO(random_ranges_agree),
		SCENARIO(arenas_agree),
		SCENARIO(registrations_over_many_agree),
		SCENARIO(a_range_takes_less_than_72_bytes),
		SCENARIO(a_group_counts_its_leaves_alike),
		SCENARIO(neighbours_merge_and_part_again),
		SCENARIO(natures_cut_and_registrations_part),
		SCENARIO(a_small_reservation_forgets_no_one),
		SCENARIO(nested_registrations_part_in_any_order),
		SCENARIO(a_gap_before_a_full_leaf_takes_no_leaf),
		SCENARIO(two_neighbours_are_never_nearly_empty),
		SCENARIO(the_list_reaches_the_ends_of_the_address_space),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
