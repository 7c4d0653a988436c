/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Which pages a registration counts, and the facts known of them. The rules:
 *
 *  - Where the kernel's copying at fork is trusted only pages that one registration
 *    fills are marked: the kernel copies partial pages, so the child keeps what it owns.
 *    Elsewhere, and in huge pages everywhere, every page it touches is marked, and the
 *    child is given a copy of partial pages.
 *  - Shared memory is never left marked: fork() does not move it.
 *  - At most half of vm.max_map_count goes to marks, a third where partial pages are marked.
 *  - Try, then ask. madvise() is tried at base pages. The mapping is asked about when it
 *    refuses, or else as the next fork is prepared: until a child is made the difference
 *    between shared and private, or a huge page's partial end, has no effect.
 *
 *	ranges, vma, kernel
 *	tracker			counts of ranges; runs of ranges that are alike
 *	marks			advice to the kernel, and how it is taken back
 *	ask			questions about mappings
 *	protect, prefork	one registration, now; all that is pending, before a fork
 *	child_list		a child's content for pages kept from it
 *
 * No locks: the engine's lock is held.
 */
#ifndef RF_TRACKER_H
#define RF_TRACKER_H

#include "ranges.h"
#include "registry.h"
#include "vma.h"

struct rf_tracker {
	struct rf_ranges ranges;
	const struct rf_kernel *kernel;
	uint8_t base_shift;	/* log2 of a base page */
	bool contested;		/* other code may take marks away: every fork marks again */
	bool marks_stay;	/* the kernel unmarks no huge page, nor a driver's mapping */
	bool dirty;		/* something may be unasked or due: the next fork looks */
	bool left;		/* something may be due still, as the budget was used up */
	uint64_t vma_budget;
	uint64_t partial_bytes;	/* of partial pages, as often as they are counted */
	uintptr_t retry_at;	/* where a release goes on unmarking */
	uintptr_t touched;	/* the mapping touched last before it was split */
	uint64_t madvise_calls;
	uint64_t hole_bytes;	/* that were to be unmarked, and not mapped */
	uint64_t gone_bytes;	/* of these, by a release */
	uintptr_t announced_start, announced_end; /* where the last mark was about to be made */
	struct rf_vma_reader reader;
};

void rf_tracker_init(struct rf_tracker *tracker);

/*
 * Nothing is counted yet. @contested: other code in the process advises the same pages.
 * That is assumed where copying is not trusted, as a page without its mark is lost data there.
 */
void rf_tracker_start(struct rf_tracker *tracker, const struct rf_kernel *kernel, bool contested);

/* Forget everything, for a child that inherits it: as rf_ranges_clear() does. */
void rf_tracker_clear(struct rf_tracker *tracker, bool torn);

/* Are partial pages, and pages that could not be marked, the kernel's to copy? */
static inline bool rf_tracker_trusts(const struct rf_tracker *tracker)
{
	return tracker->kernel->copy_trusted;
}

/* Rounded to pages of 1 << @shift bytes. */
static inline uintptr_t rf_down(uintptr_t address, unsigned int shift)
{
	return address >> shift << shift;
}

static inline uintptr_t rf_up(uintptr_t address, unsigned int shift)
{
	return rf_down(address + ((uintptr_t)1 << shift) - 1, shift);
}

/* The pages [start, end) of a registration, of which it fills [fill_start, fill_end). */
struct rf_extent {
	uintptr_t start, end;	/* start >= end: there are none */
	uintptr_t fill_start, fill_end;
};

/* The rest of rf_tracker_extent(), where partial pages may be marked. */
struct rf_extent rf_tracker_extent_partial(const struct rf_tracker *tracker,
					   const struct rf_slot *slot);

static inline struct rf_extent rf_tracker_extent(const struct rf_tracker *tracker,
						 const struct rf_slot *slot)
{
	const uintptr_t start = rf_up(slot->start, tracker->base_shift);
	const uintptr_t end = rf_down(slot->end, tracker->base_shift);

	if (rf_unlikely(!rf_tracker_trusts(tracker) || slot->start_shift || slot->end_shift))
		return rf_tracker_extent_partial(tracker, slot);
	return (struct rf_extent){ start, end, start, end };
}

/* The content that a registration wants for a child where it fills the pages. */
static inline uint8_t rf_tracker_finds(const struct rf_slot *slot)
{
	return slot->policy == RF_OMIT ? RF_FINDS_NOTHING : RF_FINDS_ZEROS;
}

/* Count the pages [@start, @end), if there are any, which a registration does not fill. */
void rf_tracker_count_partial(struct rf_tracker *tracker, uintptr_t start, uintptr_t end,
			      struct rf_change change);

/*
 * Count the pages of @extent, of which there are some: the partial ones as such, and those that
 * are filled as @change says, whose .finds is that of rf_tracker_finds(). @cursor is that of the
 * first page.
 */
static inline void rf_tracker_count_at(struct rf_tracker *tracker, struct rf_cursor cursor,
				       struct rf_extent extent, const struct rf_change *change)
{
	if (rf_unlikely(extent.start < extent.fill_start || extent.fill_end < extent.end)) {
		rf_tracker_count_partial(tracker, extent.start, extent.fill_start, *change);
		rf_tracker_count_partial(tracker, extent.fill_end, extent.end, *change);
		if (extent.fill_start >= extent.fill_end)
			return;
		cursor = rf_ranges_seek(&tracker->ranges, extent.fill_start);
	}
	rf_ranges_change_at(&tracker->ranges, cursor, extent.fill_start, extent.fill_end, change);
}

static inline void rf_tracker_count(struct rf_tracker *tracker, struct rf_extent extent,
				    const struct rf_change *change)
{
	rf_tracker_count_at(tracker, rf_ranges_seek(&tracker->ranges, extent.start), extent,
			    change);
}

/* Its ends are known better than when it was counted as @old, or not at all: count it anew. */
void rf_tracker_count_again(struct rf_tracker *tracker, const struct rf_slot *slot,
			    const struct rf_extent *old, uint8_t flags);

/* Touching ranges that one madvise() serves. */
struct rf_run {
	uintptr_t start, end;
	uint8_t mark;		/* of those that bear one: all the same */
	uint8_t best;		/* mark for all of them */
	bool unmarked;		/* one of them bears none */
};

/*
 * The next run of ranges that @belongs() picks in [@run->end, @end); false: none. The first one is
 * looked for from .end on, and each call goes on after the one before.
 */
bool rf_tracker_next_run(const struct rf_tracker *tracker, uintptr_t end,
			 bool (*belongs)(const struct rf_range *), struct rf_run *run);

/*
 * The same, and faster: ranges that steadily bear a mark they want are passed over, many at a time,
 * so @belongs() must pick none of them.
 */
bool rf_tracker_next_odd(const struct rf_tracker *tracker, uintptr_t end,
			 bool (*belongs)(const struct rf_range *), struct rf_run *run);

#endif
