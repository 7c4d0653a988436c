/* SPDX-License-Identifier: BSD-3-Clause */
/* Reports of registrations and their protection: for people, so they may take their time. */
#include "fork.h"
#include "hooks.h"
#include "kernel.h"
#include "prefork.h"

#include <errno.h>
#include <string.h>

/*
 * Every page a registration touches, partial ones included, which the tracker's own
 * ranges leave out where the kernel copies them. They are counted by policy here. DUE:
 * one of them still waits.
 */
static int touched_pages(const struct rf_engine *engine, struct rf_ranges *touched)
{
	const uintptr_t mask = rf_kernel()->page_size - 1;
	const struct rf_registry *registry = &engine->registry;
	struct rf_change more = { .count = 1 };
	const struct rf_slot *slot;
	struct rf_extent extent;
	uintptr_t start, end;
	uint32_t index;

	rf_ranges_init(touched);
	if (rf_ranges_reserve(touched, registry->live) < 0)
		return -ENOMEM;
	for (index = 0; index < registry->touched; index++) {
		slot = rf_registry_slot(registry, index);
		if (!slot->serial || slot->start == slot->end)
			continue;
		start = slot->start & ~mask;
		end = (slot->end + mask) & ~mask;
		more.finds = slot->policy;
		more.set = slot->flags & RF_SLOT_LISTED && !(slot->flags & RF_SLOT_COUNTED)
				   ? RF_RANGE_DUE
				   : 0;
		if (slot->flags & RF_SLOT_COUNTED) {
			extent = rf_tracker_extent(&engine->tracker, slot);
			start = extent.start < start ? extent.start : start;
			end = extent.end > end ? extent.end : end;
		}
		rf_ranges_change(touched, start, end, &more);
	}
	return 0;
}

/*
 * A mark that may be gone and could not be made again says nothing, nor one that was refused
 * and could not be taken back: it may be there or not.
 */
static bool is_marked(const struct rf_range *advised)
{
	const uint8_t doubted_and_due = RF_RANGE_DOUBT | RF_RANGE_DUE;

	return advised->mark && !(advised->flags & (RF_RANGE_RETRY | RF_RANGE_LOST)) &&
	       (advised->flags & doubted_and_due) != doubted_and_due;
}

/*
 * The protection of @here, a part of which is counted as @advised, or is not, as a partial
 * page or a pending one: then it may lie in shared memory, up to where @info's end goes.
 */
static enum rf_protection protection_of(struct rf_engine *engine, const struct rf_range *here,
					const struct rf_range *advised,
					struct rf_range_info *info)
{
	struct rf_vma vma;

	if (engine->mode == RF_MODE_NONE)
		return RF_BY_NOTHING;
	if (advised && is_marked(advised)) {
		if (rf_range_finds(advised) == RF_FINDS_ZEROS)
			info->policy = RF_WIPE;
		return RF_BY_MARK;
	}
	if (advised && advised->nature == RF_NATURE_SHARED)
		return RF_BY_SHARING;
	if (here->flags & RF_RANGE_DUE)
		return RF_BY_HANDLER;
	if (!advised && engine->tracker.reader.depth &&
	    rf_vma_part(&engine->tracker.reader, info->start, info->end, &vma, &info->end) > 0 &&
	    vma.shared)
		return RF_BY_SHARING;
	return RF_BY_KERNEL;
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
	struct rf_cursor cursor = rf_ranges_seek(&engine->tracker.ranges, range->start);
	const struct rf_range *advised = rf_ranges_at(cursor);
	uintptr_t at = range->start;
	struct rf_range_info info = {
		.registrations = (uint32_t)rf_range_count(range),
	};

	while (at < range->end) {
		bool inside = advised && advised->start <= at;

		info.start = at;
		info.end = range->end;
		info.policy = (uint8_t)rf_range_finds(range);
		if (advised && inside && advised->end < range->end)
			info.end = advised->end;
		else if (advised && !inside && advised->start < range->end)
			info.end = advised->start;
		/* An uncounted mark waits to be taken away, or is gone already. */
		info.protection = (uint8_t)protection_of(
			engine, range, inside && rf_range_is_counted(advised) ? advised : NULL,
			&info);
		append(list, info);
		at = info.end;
		if (inside && at >= advised->end)
			advised = rf_ranges_next(&engine->tracker.ranges, &cursor);
	}
}

RF_API ssize_t rf_list(struct rf_range_info *out, size_t capacity)
{
	struct rf_engine *engine = &rf_engine;
	struct rf_cursor cursor;
	struct list list = { .out = out, .capacity = capacity };
	const struct rf_range *range;
	struct rf_ranges touched;
	int rc = rf_enter(0), opened = -1;

	if (rc < 0)
		return rc;
	if (engine->mode != RF_MODE_NONE) {
		opened = rf_vma_open(&engine->tracker.reader);
		rf_prefork_settle(&engine->tracker);
	}
	rc = touched_pages(engine, &touched);
	cursor = rf_ranges_seek(&touched, 0);
	for (range = rf_ranges_at(cursor); rc >= 0 && range;
	     range = rf_ranges_next(&touched, &cursor))
		list_range(engine, &list, range);
	rf_memory_free(&touched.leaves);
	rf_memory_free(&touched.directory);
	if (opened >= 0)
		rf_vma_close(&engine->tracker.reader);
	rf_leave();
	return rc < 0 ? rc : (ssize_t)list.count;
}

static void count_ranges(const struct rf_tracker *tracker, struct rf_stats *stats)
{
	const struct rf_ranges *ranges = &tracker->ranges;
	struct rf_cursor cursor = rf_ranges_seek(ranges, 0);
	const struct rf_range *range;

	stats->ranges = ranges->count;
	stats->marked_ranges = rf_ranges_runs(ranges);
	stats->marked_bytes = ranges->marked_bytes;
	stats->vmas = 2 * (uint64_t)rf_ranges_runs(ranges);
	stats->vma_budget = tracker->vma_budget;
	stats->madvise_calls = tracker->madvise_calls;
	stats->gone_bytes = tracker->gone_bytes;
	stats->query_calls = tracker->reader.questions;
	/* Memory that has been written to; reserved pages beyond take none. */
	stats->engine_bytes = (uint64_t)ranges->leaves_touched * sizeof(struct rf_leaf) +
			      (uint64_t)ranges->leaf_count * sizeof(struct rf_leaf_entry) +
			      tracker->reader.table.mapped;
	for (range = rf_ranges_at(cursor); range; range = rf_ranges_next(ranges, &cursor)) {
		const uint64_t nbytes = range->end - range->start;

		if (!rf_range_is_counted(range)) {
			stats->still_marked_bytes += nbytes;
		} else if (rf_range_wants_mark(range) &&
			   (!range->mark || range->flags & (RF_RANGE_RETRY | RF_RANGE_LOST))) {
			stats->unmarked_ranges++;
			stats->unmarked_bytes += nbytes;
			stats->marked_bytes -= range->mark ? nbytes : 0;
		}
	}
}

RF_API const uint64_t *const rf_registered_bytes = &rf_engine.registry.page_bytes;

RF_API int rf_stats(struct rf_stats *stats)
{
	const struct rf_engine *engine = &rf_engine;
	int rc = rf_enter(0);

	memset(stats, 0, sizeof(*stats));
	if (rc < 0)
		return rc;
	count_ranges(&engine->tracker, stats);
	stats->registrations = engine->registry.live;
	stats->pending = engine->registry.listed;
	stats->forks = engine->forks;
	stats->forks_unmarked = __atomic_load_n(&engine->forks_unmarked, __ATOMIC_RELAXED);
	stats->engine_bytes += (uint64_t)engine->registry.touched * sizeof(struct rf_slot) +
			       rf_child_list_bytes(&engine->list);
	if (rf_has_hooks())
		rf_hooks.add_stats(stats);
	rf_leave();
	return 0;
}
