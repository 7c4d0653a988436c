/* SPDX-License-Identifier: BSD-3-Clause */
#include "tracker.h"
#include "kernel.h"

#include <string.h>
#include <sys/auxv.h>

void rf_tracker_init(struct rf_tracker *tracker)
{
	memset(tracker, 0, sizeof(*tracker));
	rf_ranges_init(&tracker->ranges);
}

/*
 * The vDSO, which bears no mark, is for madvise() like a huge page or a driver's mapping. Where
 * there is none (valgrind hides it) the version decides.
 */
static bool marks_stay(const struct rf_kernel *kernel)
{
	const uintptr_t vdso = getauxval(AT_SYSINFO_EHDR);

	if (!vdso)
		return rf_kernel_parse_version(kernel->release) >= 7000;
	return rf_sys_madvise(vdso, kernel->page_size, MADV_DOFORK) < 0;
}

void rf_tracker_start(struct rf_tracker *tracker, const struct rf_kernel *kernel, bool contested)
{
	tracker->kernel = kernel;
	tracker->base_shift = (uint8_t)__builtin_ctz(kernel->page_size);
	tracker->contested = contested || !kernel->copy_trusted;
	tracker->marks_stay = marks_stay(kernel);
	/* Of a run with partial pages a child has three: two copies, and the next bytes. */
	tracker->vma_budget = kernel->max_map_count / (kernel->copy_trusted ? 2 : 3);
	rf_memory_free(&tracker->reader.table);
	rf_vma_init(&tracker->reader, kernel->procmap_query, rf_kernel_huge_shift(kernel));
}

void rf_tracker_clear(struct rf_tracker *tracker, bool torn)
{
	rf_ranges_clear(&tracker->ranges, torn);
	if (torn)
		rf_memory_abandon(&tracker->reader.table);
	tracker->dirty = false;
	tracker->left = false;
	tracker->partial_bytes = 0;
	tracker->retry_at = 0;
	tracker->madvise_calls = 0;
	tracker->hole_bytes = 0;
	tracker->gone_bytes = 0;
	tracker->reader.questions = 0;
	/* Another thread may have had a round under way: its descriptor speaks of the parent. */
	tracker->reader.depth = 0;
	tracker->reader.fd = -1;
}

struct rf_extent rf_tracker_extent_partial(const struct rf_tracker *tracker,
					   const struct rf_slot *slot)
{
	unsigned int first = slot->start_shift ? slot->start_shift : tracker->base_shift;
	unsigned int last = slot->end_shift ? slot->end_shift : tracker->base_shift;
	bool partial = !rf_tracker_trusts(tracker);
	struct rf_extent extent;

	extent.fill_start = rf_up(slot->start, first);
	extent.fill_end = rf_down(slot->end, last);
	extent.start = partial || slot->start_shift ? rf_down(slot->start, first)
						    : extent.fill_start;
	extent.end = partial || slot->end_shift ? rf_up(slot->end, last) : extent.fill_end;
	/* It fills no page. */
	if (extent.fill_start > extent.fill_end)
		extent.fill_start = extent.fill_end = extent.end;
	return extent;
}

void rf_tracker_count_partial(struct rf_tracker *tracker, uintptr_t start, uintptr_t end,
			      struct rf_change change)
{
	if (start >= end)
		return;
	change.finds = RF_FINDS_COPY;
	rf_ranges_change(&tracker->ranges, start, end, &change);
	tracker->partial_bytes += (uint64_t)(int64_t)change.count * (end - start);
}

void rf_tracker_count_again(struct rf_tracker *tracker, const struct rf_slot *slot,
			    const struct rf_extent *old, uint8_t flags)
{
	const struct rf_extent extent = rf_tracker_extent(tracker, slot);
	const uint8_t finds = rf_tracker_finds(slot);
	const struct rf_change more = { .count = 1, .finds = finds, .set = flags };
	const struct rf_change less = { .count = -1, .finds = finds };

	if (!memcmp(old, &extent, sizeof(extent)))
		return;
	if (extent.start < extent.end)
		rf_tracker_count(tracker, extent, &more);
	/* Second, so that no page is without a count in between. */
	if (old->start < old->end)
		rf_tracker_count(tracker, *old, &less);
}

/* A huge page is advised as a whole, whichever of its parts bear their mark. */
static bool may_join(const struct rf_run *run, const struct rf_range *range)
{
	return rf_range_best_mark(range) == run->best &&
	       (range->mark == RF_MARK_WIPEONFORK) == (run->mark == RF_MARK_WIPEONFORK);
}

static inline bool next_run(const struct rf_tracker *tracker, uintptr_t end,
			    bool (*belongs)(const struct rf_range *), bool odd,
			    struct rf_run *run)
{
	const struct rf_ranges *ranges = &tracker->ranges;
	const uintptr_t at = run->end;
	struct rf_cursor cursor = rf_ranges_seek(ranges, at);
	const struct rf_range *range = rf_ranges_at(cursor);

	while (range && range->start < end && !belongs(range))
		if (odd && rf_ranges_skip_marked(ranges, &cursor, end, 1))
			range = rf_ranges_at(cursor);
		else
			range = rf_ranges_next(ranges, &cursor);
	if (!range || range->start >= end || at >= end)
		return false;
	run->start = range->start > at ? range->start : at;
	run->mark = range->mark;
	run->best = (uint8_t)rf_range_best_mark(range);
	run->unmarked = false;
	do {
		run->end = range->end;
		run->unmarked |= !range->mark;
		run->mark = range->mark ? range->mark : run->mark;
		range = rf_ranges_next(ranges, &cursor);
	} while (range && range->start == run->end && range->start < end && belongs(range) &&
		 may_join(run, range));
	/* Ranges that are alike are one, whatever they belong to. */
	run->end = run->end < end ? run->end : end;
	return true;
}

bool rf_tracker_next_run(const struct rf_tracker *tracker, uintptr_t end,
			 bool (*belongs)(const struct rf_range *), struct rf_run *run)
{
	return next_run(tracker, end, belongs, false, run);
}

bool rf_tracker_next_odd(const struct rf_tracker *tracker, uintptr_t end,
			 bool (*belongs)(const struct rf_range *), struct rf_run *run)
{
	return next_run(tracker, end, belongs, true, run);
}
