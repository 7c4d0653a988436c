/* SPDX-License-Identifier: BSD-3-Clause */
/* What is registered and protected how: for people, so it may take its time. */
#include "fork.h"
#include "hooks.h"
#include "kernel.h"

#include <errno.h>
#include <string.h>

/* A range is touched by a registration of that policy: a flag beside those of ranges.h. */
#define TOUCHED_BY(policy) (uint8_t)(16u << (policy))

/*
 * Every page a registration touches, edges included, which the advisor's own
 * ranges leave out where the kernel copies them. DUE: one of them still waits.
 */
static int touched_pages(const struct rf_engine *engine, struct rf_ranges *touched)
{
	const uintptr_t mask = rf_kernel()->page_size - 1;
	const struct rf_registry *registry = &engine->registry;
	uintptr_t start, end, marked_start, marked_end;
	const struct rf_slot *slot;
	uint32_t index;
	uint8_t flags;

	rf_ranges_init(touched);
	if (rf_ranges_reserve(touched, registry->live) < 0)
		return -ENOMEM;
	for (index = 0; index < registry->touched; index++) {
		slot = rf_registry_slot(registry, index);
		if (!slot->serial || slot->start == slot->end)
			continue;
		start = slot->start & ~mask;
		end = (slot->end + mask) & ~mask;
		flags = slot->flags & RF_SLOT_LISTED && !(slot->flags & RF_SLOT_COUNTED)
				? RF_RANGE_DUE
				: 0;
		if (slot->flags & RF_SLOT_COUNTED) {
			rf_advise_extent(&engine->advisor, slot, &marked_start, &marked_end);
			start = marked_start < start ? marked_start : start;
			end = marked_end > end ? marked_end : end;
		}
		rf_ranges_add(touched, start, end, flags | TOUCHED_BY(slot->policy));
		rf_ranges_tidy(touched, start, end);
	}
	return 0;
}

/* The answer holds up to where *@end goes. */
static bool is_wiped(const struct rf_engine *engine, uintptr_t start, uintptr_t *end)
{
	const struct rf_ranges *ranges = &engine->wiper.ranges;
	const struct rf_range *range = rf_ranges_at(ranges, rf_ranges_seek(ranges, start));
	uintptr_t stop = *end;

	if (range)
		stop = range->start > start ? range->start : range->end;
	*end = stop < *end ? stop : *end;
	return range && range->start <= start && range->mark;
}

/*
 * A mark that may be gone and could not be made again says nothing, nor one that was refused
 * and could not be taken back: it may be there or not.
 */
static bool is_marked(const struct rf_range *advised)
{
	const uint8_t doubted_and_due = RF_RANGE_DOUBT | RF_RANGE_DUE;

	return advised->mark && !(advised->flags & RF_RANGE_RETRY) &&
	       (advised->flags & doubted_and_due) != doubted_and_due;
}

/*
 * What protects @here, a part of which is counted as @advised, or is not, as an edge or
 * before a fold: then it may lie in shared memory, up to where @info's end goes.
 */
static enum rf_protection protection_of(struct rf_engine *engine, const struct rf_range *here,
					const struct rf_range *advised,
					struct rf_range_info *info)
{
	const uintptr_t start = info->start;
	struct rf_vma vma;

	if (engine->mode == RF_MODE_NONE)
		return RF_BY_NOTHING;
	if (advised && is_marked(advised))
		return RF_BY_ADVICE;
	if (here->flags & TOUCHED_BY(RF_WIPE) && is_wiped(engine, start, &info->end)) {
		info->policy = RF_WIPE;
		return RF_BY_ADVICE;
	}
	if (advised && advised->nature == RF_NATURE_SHARED)
		return RF_BY_SHARING;
	if (here->flags & RF_RANGE_DUE)
		return RF_BY_HANDLER;
	if (!advised && engine->advisor.reader.depth &&
	    rf_vma_find(&engine->advisor.reader, start, &vma) >= 0) {
		uintptr_t stop = vma.start > start ? vma.start : vma.end;

		info->end = stop < info->end ? stop : info->end;
		if (vma.start <= start && vma.shared)
			return RF_BY_SHARING;
	}
	return RF_BY_KERNEL;
}

static enum rf_policy policy_of(const struct rf_range *range)
{
	if (range->flags & TOUCHED_BY(RF_OMIT))
		return RF_OMIT;
	return range->flags & TOUCHED_BY(RF_WIPE) ? RF_WIPE : RF_KEEP;
}

struct list {
	struct rf_range_info *out, last;
	size_t capacity, count;
};

/* Append, or widen the last one if it says the same. */
static void append(struct list *list, struct rf_range_info info)
{
	struct rf_range_info *last = &list->last;

	if (list->count && last->end == info.start && last->registrations == info.registrations &&
	    last->policy == info.policy && last->protection == info.protection) {
		last->end = info.end;
		if (list->count <= list->capacity)
			list->out[list->count - 1].end = info.end;
		return;
	}
	*last = info;
	if (list->count++ < list->capacity)
		list->out[list->count - 1] = info;
}

static void list_range(struct rf_engine *engine, struct list *list,
		       const struct rf_range *range)
{
	struct rf_cursor cursor = rf_ranges_seek(&engine->advisor.ranges, range->start);
	const struct rf_range *advised = rf_ranges_at(&engine->advisor.ranges, cursor);
	uintptr_t at = range->start;
	struct rf_range_info info = {
		.registrations = range->count,
	};

	while (at < range->end) {
		bool inside = advised && advised->start <= at;

		info.start = at;
		info.end = range->end;
		info.policy = (uint8_t)policy_of(range);
		if (advised && inside && advised->end < range->end)
			info.end = advised->end;
		else if (advised && !inside && advised->start < range->end)
			info.end = advised->start;
		/* A mark that nobody counts waits to be taken away, or is gone already. */
		info.protection = (uint8_t)protection_of(
			engine, range, inside && advised->count ? advised : NULL, &info);
		append(list, info);
		at = info.end;
		if (inside && at >= advised->end)
			advised = rf_ranges_next(&engine->advisor.ranges, &cursor);
	}
}

RF_API ssize_t rf_list(struct rf_range_info *out, size_t capacity)
{
	struct rf_engine *engine = &rf_engine;
	struct rf_cursor cursor = { 0, 0 };
	struct list list = { .out = out, .capacity = capacity };
	const struct rf_range *range;
	struct rf_ranges touched;
	int rc = rf_enter(0), opened = -1;

	if (rc < 0)
		return rc;
	if (engine->mode != RF_MODE_NONE) {
		opened = rf_vma_open(&engine->advisor.reader);
		rf_advise_settle(&engine->advisor);
	}
	rc = touched_pages(engine, &touched);
	for (range = rf_ranges_at(&touched, cursor); rc >= 0 && range;
	     range = rf_ranges_next(&touched, &cursor))
		list_range(engine, &list, range);
	rf_memory_free(&touched.leaves);
	rf_memory_free(&touched.directory);
	if (opened >= 0)
		rf_vma_close(&engine->advisor.reader);
	rf_leave();
	return rc < 0 ? rc : (ssize_t)list.count;
}

/* Adds what @advisor has. */
static void count_ranges(const struct rf_advisor *advisor, struct rf_stats *stats)
{
	const struct rf_ranges *ranges = &advisor->ranges;
	struct rf_cursor cursor = { 0, 0 };
	const struct rf_range *range;

	stats->ranges += ranges->count;
	stats->marked_ranges += rf_ranges_runs(ranges);
	stats->marked_bytes += ranges->marked_bytes;
	stats->vmas += 2 * (uint64_t)rf_ranges_runs(ranges);
	stats->vma_budget = advisor->vma_budget;
	stats->madvise_calls += advisor->madvise_calls;
	stats->query_calls += advisor->reader.questions;
	/* What has been written to; reserved pages beyond take no memory. */
	stats->engine_bytes += (uint64_t)ranges->leaves_touched * sizeof(struct rf_leaf) +
			       (uint64_t)ranges->leaf_count * sizeof(struct rf_leaf_entry) +
			       (uint64_t)advisor->gaps.leaves_touched * sizeof(struct rf_leaf) +
			       (uint64_t)advisor->gaps.leaf_count * sizeof(struct rf_leaf_entry) +
			       advisor->reader.table.mapped;
	for (range = rf_ranges_at(ranges, cursor); range;
	     range = rf_ranges_next(ranges, &cursor)) {
		if (!range->count) {
			stats->unreleased_bytes += range->end - range->start;
		} else if (rf_range_wants_mark(range) &&
			   (!range->mark || range->flags & RF_RANGE_RETRY)) {
			stats->left_ranges++;
			stats->left_bytes += range->end - range->start;
			stats->marked_bytes -= range->mark ? range->end - range->start : 0;
		}
	}
}

RF_API int rf_stats(struct rf_stats *stats)
{
	const struct rf_engine *engine = &rf_engine;
	int rc = rf_enter(0);

	memset(stats, 0, sizeof(*stats));
	if (rc < 0)
		return rc;
	count_ranges(&engine->advisor, stats);
	count_ranges(&engine->wiper, stats);
	stats->registrations = engine->registry.live;
	stats->pending = engine->registry.listed;
	stats->forks = engine->forks;
	stats->forks_unprepared = __atomic_load_n(&engine->forks_unprepared, __ATOMIC_RELAXED);
	stats->engine_bytes += (uint64_t)engine->registry.touched * sizeof(struct rf_slot) +
			       rf_edges_bytes(&engine->edges);
	if (rf_has_hooks())
		rf_hooks.add_stats(stats);
	rf_leave();
	return 0;
}

RF_API void rf_kernel_info(struct rf_kernel *kernel)
{
	int entered = rf_enter(0);

	*kernel = *rf_kernel();
	if (entered == 0)
		rf_leave();
}
