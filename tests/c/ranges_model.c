/* SPDX-License-Identifier: BSD-3-Clause */
#include "ranges_model.h"
#include "check.h"
#include "ranges.h"

#define BASE 0x10000000ul

struct page {
	uint32_t count;
	bool mark;
	uint8_t nature, flags;
};

static struct page pages[MODEL_PAGES];
static struct interval live[MODEL_LIVE];
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
void model_compare(void)
{
	size_t at, next, runs = 0, marked = 0, count = 0;
	struct rf_cursor cursor = { 0, 0 };
	const struct rf_range *range = rf_ranges_at(&ranges, cursor);

	for (at = 0; at < MODEL_PAGES; at++) {
		marked += pages[at].mark;
		runs += pages[at].mark && (!at || !pages[at - 1].mark);
	}
	for (at = 0; at < MODEL_PAGES; at = next) {
		next = at + 1;
		if (!present(&pages[at]))
			continue;
		while (next < MODEL_PAGES && present(&pages[next]) &&
		       same(&pages[at], &pages[next]))
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

void model_step(struct interval next)
{
	size_t choice = check_below(10);

	if (live_count == MODEL_LIVE || (choice < 3 && live_count)) {
		sub(check_below(live_count));
	} else if (choice < 7) {
		add(next.start, next.end, check_below(3) ? 0 : RF_RANGE_DOUBT);
	} else {
		size_t start = check_below(MODEL_PAGES);

		set(start, start + 1 + check_below(MODEL_PAGES - start));
	}
	rf_ranges_check(&ranges);
}

void model_begin(void)
{
	if (!ranges.leaves.item_size)
		rf_ranges_init(&ranges);
}

void model_end(void)
{
	size_t page;

	while (live_count)
		sub(live_count - 1);
	for (page = 0; page < MODEL_PAGES; page++) {
		if (!pages[page].mark)
			continue;
		pages[page].mark = false;
		rf_ranges_cut(&ranges, address(page));
		rf_ranges_cut(&ranges, address(page + 1));
		rf_ranges_set_mark(&ranges, address(page), address(page + 1), false);
		tidy(page, page + 1);
	}
	tidy(0, MODEL_PAGES);
	rf_ranges_check(&ranges);
	model_compare();
	CHECK(!ranges.count && ranges.leaf_count <= 1 && !ranges.retries);
}
