/* SPDX-License-Identifier: BSD-3-Clause */
/* The step function against an array with one entry a page, which tells the truth. */
#include "check.h"
#include "ranges.h"

#define PAGES 320
#define LIVE 96
#define BASE 0x10000000ul

struct page {
	uint32_t count;
	bool mark;
	uint8_t nature, flags;
};

struct interval {
	size_t start, end;
};

static struct page pages[PAGES];
static struct interval live[LIVE];
static size_t live_count;
static struct rf_ranges ranges;

static uintptr_t address(size_t page)
{
	return BASE + page * 4096;
}

static bool present(const struct page *page)
{
	return page->count || page->mark;
}

static bool same(const struct page *left, const struct page *right)
{
	return left->count == right->count && left->mark == right->mark &&
	       left->nature == right->nature && left->flags == right->flags;
}

/* The list says of every page what the model says, in as few ranges as can be. */
static void compare(void)
{
	size_t at, next, runs = 0, marked = 0, count = 0;
	struct rf_cursor cursor = { 0, 0 };
	const struct rf_range *range = rf_ranges_at(&ranges, cursor);

	for (at = 0; at < PAGES; at++) {
		marked += pages[at].mark;
		runs += pages[at].mark && (!at || !pages[at - 1].mark);
	}
	for (at = 0; at < PAGES; at = next) {
		next = at + 1;
		if (!present(&pages[at]))
			continue;
		while (next < PAGES && present(&pages[next]) && same(&pages[at], &pages[next]))
			next++;
		CHECK(range, "page %zu is missing", at);
		CHECK(range->start == address(at) && range->end == address(next),
		      "pages %zu to %zu: [%lu, %lu)", at, next, (range->start - BASE) / 4096,
		      (range->end - BASE) / 4096);
		CHECK(range->count == pages[at].count, "page %zu", at);
		CHECK(range->mark == pages[at].mark, "page %zu", at);
		CHECK(range->nature == pages[at].nature, "page %zu: %d, not %d", at, range->nature,
		      pages[at].nature);
		CHECK(range->flags == pages[at].flags, "page %zu: %d, not %d", at, range->flags,
		      pages[at].flags);
		CHECK(rf_ranges_find(&ranges, address(at)) == range);
		CHECK(rf_ranges_find(&ranges, address(next) - 1) == range);
		range = rf_ranges_next(&ranges, &cursor);
		count++;
	}
	CHECK(!range, "a range too many");
	CHECK(ranges.count == count && rf_ranges_runs(&ranges) == runs);
	CHECK(ranges.marked_bytes == marked * 4096);
}

static void tidy(size_t start, size_t end)
{
	size_t at;

	rf_ranges_tidy(&ranges, address(start), address(end));
	for (at = start; at < end; at++)
		if (!present(&pages[at]))
			memset(&pages[at], 0, sizeof(pages[at]));
}

static size_t plans_made, plans_wanted;

/* What a plan marks, or unmarks, is just what changes its mark. */
static void check_planned(const struct rf_plan *plan, size_t start, size_t end,
			  bool (*changes)(const struct page *))
{
	size_t at;

	for (at = start; at < end; at++)
		CHECK(changes(&pages[at]) ==
			      (plan->start <= address(at) && address(at) < plan->end),
		      "page %zu of [%zu, %zu)", at, start, end);
	CHECK(plan->start == plan->end ||
	      (plan->start >= address(start) && plan->end <= address(end)));
	plans_made++;
}

static bool is_unmarked(const struct page *page)
{
	return !page->mark;
}

static bool is_last_marked(const struct page *page)
{
	return page->mark && page->count == 1;
}

static bool never(const struct page *page)
{
	(void)page;
	return false;
}

static bool add_planned(size_t start, size_t end, uint8_t flags)
{
	bool mark = check_below(2);
	struct rf_plan plan;
	struct page *page;

	plans_wanted++;
	if (!rf_ranges_plan_add(&ranges, rf_ranges_seek(&ranges, address(start)), address(start),
				address(end), mark, flags, &plan))
		return false;
	check_planned(&plan, start, end, mark ? is_unmarked : never);
	rf_ranges_commit(&ranges, &plan);
	for (page = pages + start; page < pages + end; page++) {
		CHECK(!page->count || !((page->flags | flags) & RF_RANGE_DOUBT));
		CHECK(!(page->flags & RF_RANGE_RETRY) && (page->count || !page->mark));
		page->count++;
		page->flags |= page->mark ? 0 : flags;
		page->mark |= mark;
	}
	return true;
}

static bool sub_planned(size_t start, size_t end)
{
	struct rf_plan plan;
	struct page *page;

	plans_wanted++;
	if (!rf_ranges_plan_sub(&ranges, address(start), address(end), &plan))
		return false;
	check_planned(&plan, start, end, is_last_marked);
	rf_ranges_commit(&ranges, &plan);
	for (page = pages + start; page < pages + end; page++) {
		CHECK(page->count == 1 || !(page->flags & RF_RANGE_DOUBT));
		CHECK(!(page->flags & RF_RANGE_RETRY));
		if (!--page->count)
			memset(page, 0, sizeof(*page));
	}
	return true;
}

static void add(size_t start, size_t end, uint8_t flags)
{
	struct page *page;

	CHECK(rf_ranges_reserve(&ranges, (uint32_t)live_count + 1) == 0);
	live[live_count++] = (struct interval){ start, end };
	if (check_below(2) && add_planned(start, end, flags))
		return;
	rf_ranges_add(&ranges, address(start), address(end), flags);
	for (page = pages + start; page < pages + end; page++) {
		if (!page->count && page->mark) {
			page->flags = RF_RANGE_DOUBT;
			page->nature = RF_NATURE_UNASKED;
		}
		page->count++;
		page->flags |= flags;
		/* Mapped anew, perhaps: whoever registers here now cannot rely on what it was. */
		if (page->flags & RF_RANGE_DOUBT)
			page->nature = RF_NATURE_UNASKED;
	}
	tidy(start, end);
}

static void sub(size_t which)
{
	struct interval old = live[which];
	struct page *page;

	live[which] = live[--live_count];
	if (check_below(2) && sub_planned(old.start, old.end))
		return;
	rf_ranges_sub(&ranges, address(old.start), address(old.end));
	for (page = pages + old.start; page < pages + old.end; page++) {
		page->count--;
		if (!page->count)
			page->flags &= (uint8_t)~(RF_RANGE_DOUBT | RF_RANGE_DUE);
	}
	tidy(old.start, old.end);
}

static void set(size_t start, size_t end)
{
	static const uint8_t some[] = { RF_RANGE_DOUBT, RF_RANGE_DUE, RF_RANGE_RETRY,
					RF_RANGE_DUE | RF_RANGE_RETRY };
	uint8_t flags = some[check_below(4)], clear = some[check_below(4)];
	uint8_t value = (uint8_t)check_below(3);
	size_t what = check_below(4), at;

	while (start < end && !present(&pages[start]))
		start++;
	if (start == end)
		return;
	for (at = start; what == 0 && at < end; at++)
		if (!present(&pages[at]))
			end = at;
	CHECK(rf_ranges_reserve(&ranges, (uint32_t)live_count) == 0);
	if (what != 1) {
		rf_ranges_cut(&ranges, address(start));
		rf_ranges_cut(&ranges, address(end));
	}
	if (what == 0)
		rf_ranges_set_mark(&ranges, address(start), address(end), value & 1);
	else if (what == 1)
		rf_ranges_set_nature(&ranges, address(start), address(end), value);
	else if (what == 2)
		rf_ranges_set_flags(&ranges, address(start), address(end), flags, clear);
	for (at = start; at < end; at++) {
		if (!present(&pages[at]))
			continue;
		if (what == 0)
			pages[at].mark = value & 1;
		else if (what == 1)
			pages[at].nature = value;
		else if (what == 2)
			pages[at].flags = (uint8_t)((pages[at].flags | flags) & ~clear);
	}
	tidy(start, end);
}

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
	size_t start = 2 * check_below(PAGES / 2);

	(void)nth;
	return (struct interval){ start, start + 1 };
}

static struct interval ascending(unsigned long nth)
{
	size_t start = 3 * nth % (PAGES - 4);

	return (struct interval){ start, start + 2 };
}

static struct interval descending(unsigned long nth)
{
	struct interval up = ascending(nth);

	return (struct interval){ PAGES - up.end, PAGES - up.start };
}

static struct interval anywhere(unsigned long nth)
{
	size_t start = check_below(PAGES), end = start + 1 + check_below(PAGES - start);

	(void)nth;
	return (struct interval){ start, end };
}

/* All of it, and what an allocator hands out of it, one piece beside another. */
static struct interval arena(unsigned long nth)
{
	size_t size = (size_t)1 << check_below(6), start = size * check_below(PAGES / size);

	if (nth % 64 == 0)
		return (struct interval){ 0, PAGES };
	return (struct interval){ start, start + size };
}

static void run_shape(shape *next)
{
	unsigned long op, ops = check_scale(60000);

	rf_ranges_init(&ranges);
	for (op = 0; op < ops; op++) {
		size_t choice = check_below(10);

		if (live_count == LIVE || (choice < 3 && live_count)) {
			sub(check_below(live_count));
		} else if (choice < 7) {
			struct interval new = next(op);

			add(new.start, new.end, check_below(3) ? 0 : RF_RANGE_DOUBT);
		} else {
			size_t start = check_below(PAGES);

			set(start, start + 1 + check_below(PAGES - start));
		}
		rf_ranges_check(&ranges);
		if (op % 8 == 0)
			compare();
	}
	fprintf(stderr, "plans: %zu of %zu\n", plans_made, plans_wanted);
	while (live_count)
		sub(live_count - 1);
	for (op = 0; op < PAGES; op++) {
		if (!pages[op].mark)
			continue;
		pages[op].mark = false;
		rf_ranges_cut(&ranges, address(op));
		rf_ranges_cut(&ranges, address(op + 1));
		rf_ranges_set_mark(&ranges, address(op), address(op + 1), false);
	}
	tidy(0, PAGES);
	rf_ranges_check(&ranges);
	compare();
	CHECK(!ranges.count && ranges.leaf_count == 1 && !ranges.retries);
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
		rf_ranges_add(&ranges, start, start + 4096, 0);
		rf_ranges_tidy(&ranges, start, start + 4096);
	}
	rf_ranges_check(&ranges);
	CHECK(ranges.count == MANY);
	used = (uint64_t)ranges.leaves_touched * sizeof(struct rf_leaf) +
	       (uint64_t)ranges.leaf_count * sizeof(struct rf_leaf_entry);
	return (double)used / MANY;
}

static void a_range_takes_less_than_64_bytes(void)
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
	CHECK(ascending_bytes < 64 && descending_bytes < 64 && random_bytes < 64,
	      "ascending %.1f, descending %.1f, random %.1f", ascending_bytes, descending_bytes,
	      random_bytes);
}

/* ---- Room ---- */

/* Capacity is asked for by registrations alone; RF_ASSERT in the list notices a lack of it. */
static void add_one(uint32_t nth, uint32_t registrations)
{
	uintptr_t start = BASE + nth * 4096ul;

	CHECK(rf_ranges_reserve(&ranges, registrations) == 0);
	rf_ranges_add(&ranges, start, start + 4096, 0);
	rf_ranges_tidy(&ranges, start, start + 4096);
}

static void sub_one(uint32_t nth, bool marked)
{
	uintptr_t start = BASE + nth * 4096ul;

	rf_ranges_sub(&ranges, start, start + 4096);
	if (marked)
		rf_ranges_set_mark(&ranges, start, start + 4096, false);
	rf_ranges_tidy(&ranges, start, start + 4096);
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
			rf_ranges_set_mark(&ranges, BASE, BASE + many * 4096ul, true);
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
	uint32_t many = (uint32_t)check_scale(20000) & ~1u, i;

	rf_ranges_init(&ranges);
	for (i = 0; i < many; i++)
		add_one(i, i + 1);
	/* Every third page is shared: as the engine does, with a reservation each. */
	for (i = 0; i < many; i += 3) {
		CHECK(rf_ranges_reserve(&ranges, many) == 0);
		rf_ranges_set_nature(&ranges, BASE + i * 4096ul, BASE + (i + 1) * 4096ul,
				     RF_NATURE_SHARED);
	}
	rf_ranges_tidy(&ranges, 0, UINTPTR_MAX);
	for (i = 0; i < many; i += 2)
		sub_one(i, false);
	rf_ranges_check(&ranges);
	for (i = 1; i < many; i += 2)
		sub_one(i, false);
	CHECK(!ranges.count);
}

/* The last reservation may have been for few, when most of what lives was hidden. */
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
			rf_ranges_clear(&ranges);
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
		rf_ranges_add(&ranges, BASE + (i & 1 ? 0 : i + 1) * 4096ul,
			      BASE + (i & 1 ? i : many + 1) * 4096ul, 0);
		rf_ranges_tidy(&ranges, 0, UINTPTR_MAX);
	}
	for (i = many; i; i--) {
		uint32_t which = (uint32_t)check_below(i), nth = order[which];

		order[which] = order[i - 1];
		rf_ranges_sub(&ranges, BASE + (nth & 1 ? 0 : nth + 1) * 4096ul,
			      BASE + (nth & 1 ? nth : many + 1) * 4096ul);
		rf_ranges_tidy(&ranges, 0, UINTPTR_MAX);
		rf_ranges_check(&ranges);
	}
	CHECK(!ranges.count);
}

static void the_list_reaches_the_ends_of_the_address_space(void)
{
	uintptr_t last = UINTPTR_MAX - 4095;

	rf_ranges_init(&ranges);
	CHECK(rf_ranges_reserve(&ranges, 4) == 0);
	CHECK(!rf_ranges_find(&ranges, 0) && !rf_ranges_find(&ranges, UINTPTR_MAX));
	rf_ranges_add(&ranges, 0, 4096, 0);
	rf_ranges_add(&ranges, last - 4096, last, 0);
	rf_ranges_set_mark(&ranges, 0, 4096, true);
	rf_ranges_set_mark(&ranges, last - 4096, last, true);
	rf_ranges_tidy(&ranges, 0, UINTPTR_MAX);
	rf_ranges_check(&ranges);
	CHECK(ranges.count == 2 && rf_ranges_runs(&ranges) == 2);
	CHECK(rf_ranges_find(&ranges, 0) && rf_ranges_find(&ranges, last - 1));
	CHECK(!rf_ranges_find(&ranges, last) && !rf_ranges_find(&ranges, UINTPTR_MAX));
	rf_ranges_set_mark(&ranges, 0, 4096, false);
	rf_ranges_set_mark(&ranges, last - 4096, last, false);
	rf_ranges_sub(&ranges, 0, 4096);
	rf_ranges_sub(&ranges, last - 4096, last);
	rf_ranges_tidy(&ranges, 0, UINTPTR_MAX);
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
		SCENARIO(a_range_takes_less_than_64_bytes),
		SCENARIO(neighbours_merge_and_part_again),
		SCENARIO(natures_cut_and_registrations_part),
		SCENARIO(a_small_reservation_forgets_no_one),
		SCENARIO(nested_registrations_part_in_any_order),
		SCENARIO(the_list_reaches_the_ends_of_the_address_space),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
