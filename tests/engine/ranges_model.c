/* SPDX-License-Identifier: BSD-3-Clause */
#include "ranges_model.h"
#include "check.h"
#include "ranges.h"

#define BASE 0x10000000ul

struct page {
	uint32_t counts[RF_FINDS];
	uint8_t mark, nature, flags;
};

/* A registration, and the policy it wants. */
struct registration {
	struct interval pages;
	uint8_t finds;
};

static struct page pages[MODEL_MANY];
static struct registration live[MODEL_MANY];
static size_t live_count;
static struct rf_ranges ranges;
bool model_even, model_wiped;
size_t model_pages;

static uintptr_t address(size_t page)
{
	return BASE + page * 4096;
}

static bool is_counted(const struct page *page)
{
	return page->counts[0] || page->counts[1] || page->counts[2];
}

static bool present(const struct page *page)
{
	return page->mark || is_counted(page);
}

static bool same(const struct page *left, const struct page *right)
{
	return !memcmp(left, right, sizeof(*left));
}

static void compare_page(const struct page *page, const struct rf_range *range, size_t at)
{
	size_t i;

	for (i = 0; i < RF_FINDS; i++)
		CHECK(range->counts[i] == page->counts[i], "page %zu, count %zu", at, i);
	CHECK(range->mark == page->mark, "page %zu: %d, not %d", at, range->mark, page->mark);
	CHECK(range->nature == page->nature, "page %zu: %d, not %d", at, range->nature,
	      page->nature);
	CHECK(range->flags == page->flags, "page %zu: %d, not %d", at, range->flags, page->flags);
	CHECK(rf_ranges_find(&ranges, address(at)) == range);
	CHECK(rf_ranges_find(&ranges, address(at + 1) - 1) == range);
}

/* The list says of every page what the model says, in as few ranges as a leaf can have. */
void model_compare(void)
{
	struct rf_cursor cursor = rf_ranges_seek(&ranges, 0);
	const struct rf_range *range = rf_ranges_at(cursor);
	size_t at, marked = 0, edges = 0, fewest = 0, count = 0;
	uint8_t before = RF_MARK_NONE;

	for (at = 0; at < model_pages; at++) {
		marked += !!pages[at].mark;
		edges += before != pages[at].mark;
		before = pages[at].mark;
		if (!present(&pages[at]))
			continue;
		fewest += !at || !present(&pages[at - 1]) || !same(&pages[at - 1], &pages[at]);
		CHECK(range, "page %zu is missing", at);
		CHECK(range->start <= address(at) && address(at + 1) <= range->end,
		      "page %zu: [%lu, %lu)", at, (range->start - BASE) / 4096,
		      (range->end - BASE) / 4096);
		compare_page(&pages[at], range, at);
		if (range->end > address(at + 1))
			continue;
		range = rf_ranges_next(&ranges, &cursor);
		count++;
	}
	CHECK(!range, "a range too many");
	CHECK(ranges.count == count && count < fewest + ranges.leaf_count + !fewest, "%zu, not %zu",
	      count, fewest);
	CHECK(ranges.mark_edges == edges + (before != RF_MARK_NONE), "%u", ranges.mark_edges);
	CHECK(ranges.marked_bytes == marked * 4096);
}

static void forget_absent(size_t start, size_t end)
{
	for (; start < end; start++)
		if (!present(&pages[start]))
			memset(&pages[start], 0, sizeof(pages[start]));
}

static void change(size_t start, size_t end, const struct rf_change *change)
{
	rf_ranges_change(&ranges, address(start), address(end), change);
}

static void count_page(struct page *page, const struct rf_change *change)
{
	uint8_t set = change->set;

	if (!is_counted(page) && page->mark) {
		page->flags = RF_RANGE_DOUBT;
		page->nature = RF_NATURE_UNASKED;
	}
	if (page->mark && !(page->flags & RF_RANGE_DOUBT))
		set &= (uint8_t)~RF_RANGE_DUE;
	page->counts[change->finds]++;
	page->flags |= set;
	/* Mapped anew, perhaps: a registration here cannot rely on its former nature. */
	if (page->flags & RF_RANGE_DOUBT)
		page->nature = RF_NATURE_UNASKED;
	if (change->remark && !page->mark && page->nature != RF_NATURE_SHARED) {
		page->mark = change->mark;
		page->flags &= (uint8_t)~RF_RANGE_DUE;
	}
}

static void add(size_t start, size_t end)
{
	static const uint8_t flags[] = { 0, RF_RANGE_DOUBT, RF_RANGE_DUE };
	struct rf_change more = {
		.count = 1,
		.finds = (uint8_t)check_below(RF_FINDS),
		.set = flags[check_below(3)],
		.remark = check_below(2),
		.mark = RF_MARK_DONTFORK,
	};
	size_t at;

	if (model_even) {
		more.set = 0;
		more.remark = true;
	}
	if (model_wiped)
		more.finds = check_below(8) ? RF_FINDS_ZEROS : RF_FINDS_COPY;
	CHECK(rf_ranges_reserve(&ranges, (uint32_t)live_count + 1) == 0);
	live[live_count++] = (struct registration){ { start, end }, more.finds };
	change(start, end, &more);
	for (at = start; at < end; at++) {
		if (!present(&pages[at])) {
			pages[at].flags = more.set;
			pages[at].mark = more.remark ? more.mark : RF_MARK_NONE;
			pages[at].counts[more.finds] = 1;
		} else {
			count_page(&pages[at], &more);
		}
	}
}

static void sub(size_t which)
{
	struct registration old = live[which];
	struct rf_change less = {
		.count = -1,
		.finds = old.finds,
		.remark = check_below(2),
		.mark = RF_MARK_NONE,
	};
	struct page *page;

	less.remark |= model_even;
	live[which] = live[--live_count];
	change(old.pages.start, old.pages.end, &less);
	for (page = pages + old.pages.start; page < pages + old.pages.end; page++) {
		page->counts[old.finds]--;
		if (is_counted(page))
			continue;
		page->flags &= (uint8_t)~(RF_RANGE_DOUBT | RF_RANGE_DUE);
		if (less.finds == RF_FINDS_COPY)
			page->flags |= RF_RANGE_PARTIAL;
		if (less.remark)
			page->mark = RF_MARK_NONE;
	}
	forget_absent(old.pages.start, old.pages.end);
}

static void set_as(size_t start, size_t end, const struct rf_change *what)
{
	struct page *page;

	CHECK(rf_ranges_reserve(&ranges, (uint32_t)live_count) == 0);
	change(start, end, what);
	for (page = pages + start; page < pages + end; page++) {
		if (!present(page))
			continue;
		page->mark = what->remark ? what->mark : page->mark;
		page->nature = what->rename ? what->nature : page->nature;
		page->flags = (uint8_t)((page->flags | what->set) & ~what->clear);
	}
	forget_absent(start, end);
}

static void set(size_t start, size_t end)
{
	static const uint8_t some[] = { RF_RANGE_DOUBT, RF_RANGE_DUE, RF_RANGE_RETRY,
					RF_RANGE_DUE | RF_RANGE_RETRY };
	struct rf_change what = { .set = 0 };

	switch (check_below(3)) {
	case 0:
		what.remark = true;
		what.mark = (uint8_t)check_below(3);
		break;
	case 1:
		what.rename = true;
		what.nature = (uint8_t)check_below(4);
		break;
	default:
		what.set = some[check_below(4)];
		what.clear = some[check_below(4)];
	}
	set_as(start, end, &what);
}

static void wipe_all(void)
{
	const struct rf_change wiped = {
		.remark = true,
		.mark = RF_MARK_WIPEONFORK,
		.rename = true,
		.nature = RF_NATURE_WIPEABLE,
	};

	set_as(0, model_pages, &wiped);
}

void model_step(struct interval next)
{
	size_t choice = check_below(10);

	if (model_wiped && !check_below(16))
		wipe_all();
	if (live_count == model_pages / 3 || (choice < 3 && live_count)) {
		sub(check_below(live_count));
	} else if (choice < 7 || model_even) {
		add(next.start, next.end);
	} else {
		size_t start = check_below(model_pages);

		set(start, start + 1 + check_below(model_pages - start));
	}
	rf_ranges_check(&ranges);
}

void model_begin(size_t count)
{
	model_pages = count;
	if (!ranges.leaves.item_size)
		rf_ranges_init(&ranges);
}

void model_end(void)
{
	const struct rf_change unmark = { .remark = true, .mark = RF_MARK_NONE };

	while (live_count)
		sub(live_count - 1);
	change(0, model_pages, &unmark);
	memset(pages, 0, sizeof(pages));
	rf_ranges_check(&ranges);
	model_compare();
	CHECK(!ranges.count && ranges.leaf_count <= 1);
}
