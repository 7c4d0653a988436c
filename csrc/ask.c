/* SPDX-License-Identifier: BSD-3-Clause */
#include "ask.h"
#include "kernel.h"
#include "marks.h"

#include <errno.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE /* Linux 5.14 */
#define MADV_POPULATE_WRITE 23
#endif

static bool has_base_pages(const struct rf_tracker *tracker, const struct rf_vma *vma)
{
	return 1ull << vma->shift <= tracker->kernel->page_size;
}

/* The page size one end is rounded to: 0 for base pages and where nothing is mapped. */
static int ask_end(struct rf_tracker *tracker, uintptr_t address, uint8_t *shift)
{
	struct rf_vma vma;
	int rc = rf_vma_find(&tracker->reader, address, &vma);

	if (rc == -ENOENT)
		return 0;
	if (rc < 0)
		return rc;
	if (vma.start <= address && !vma.shared && !has_base_pages(tracker, &vma))
		*shift = vma.shift;
	return 0;
}

int rf_ask_ends(struct rf_tracker *tracker, struct rf_slot *slot)
{
	int rc = ask_end(tracker, slot->start, &slot->start_shift);

	return rc < 0 ? rc : ask_end(tracker, slot->end - 1, &slot->end_shift);
}

/*
 * Do both ends of @slot lie on base pages? The second base page of a huge one tells. One system
 * call, or two, where /proc/self/maps may have to be read as text. False if the kernel does not
 * say.
 */
static bool has_base_ends(const struct rf_tracker *tracker, const struct rf_slot *slot)
{
	const struct rf_kernel *kernel = tracker->kernel;
	const unsigned int shift = rf_kernel_huge_shift(kernel);
	const uintptr_t first = rf_down(slot->start, shift) + kernel->page_size;
	const uintptr_t last = rf_down(slot->end - 1, shift) + kernel->page_size;

	/* A kernel that is trusted for its version is later than 5.16. */
	if (!shift || !kernel->copy_trusted || kernel->trust_how != RF_HOW_VERSION)
		return false;
	return !rf_sys_is_in_huge_page(first, kernel->page_size) &&
	       (first == last || !rf_sys_is_in_huge_page(last, kernel->page_size));
}

int rf_ask_ends_alone(struct rf_tracker *tracker, struct rf_slot *slot)
{
	int rc;

	if (has_base_ends(tracker, slot))
		return 0;
	rc = rf_vma_open(&tracker->reader);
	if (rc < 0)
		return rc;
	rc = rf_ask_ends(tracker, slot);
	rf_vma_close(&tracker->reader);
	return rc;
}

/*
 * Advice on part of an area that was never touched splits it for good: each part
 * gets an anon_vma of its own at its first fault, and such parts do not merge.
 * One page touched before the first split lets them share one.
 */
static void touch_before_split(struct rf_tracker *tracker, const struct rf_vma *vma,
			       uintptr_t start, uintptr_t end)
{
	if (tracker->touched == vma->start || !vma->anonymous || vma->shared ||
	    !(vma->protection & PROT_WRITE) || (start == vma->start && end == vma->end) ||
	    !has_base_pages(tracker, vma))
		return;
	tracker->touched = vma->start;
	rf_marks_call(tracker, start, start + tracker->kernel->page_size, MADV_POPULATE_WRITE);
}

static uint8_t nature_of(const struct rf_tracker *tracker, const struct rf_vma *vma)
{
	if (vma->shared)
		return RF_NATURE_SHARED;
	return vma->anonymous && has_base_pages(tracker, vma) ? RF_NATURE_WIPEABLE
							      : RF_NATURE_PRIVATE;
}

int rf_ask(struct rf_tracker *tracker, uintptr_t start, uintptr_t end, bool will_split,
	   uintptr_t *hole)
{
	struct rf_change named = { .rename = true };
	struct rf_ranges *ranges = &tracker->ranges;
	struct rf_vma vma;
	uintptr_t at, stop;
	int rc, mapped;

	*hole = 0;
	for (at = start; at < end; at = stop) {
		mapped = rf_vma_part(&tracker->reader, at, end, &vma, &stop);
		if (mapped < 0)
			return mapped;
		if (mapped && will_split)
			touch_before_split(tracker, &vma, at, stop);
		if (!mapped && !*hole)
			*hole = at;
		rc = rf_ranges_reserve(ranges, ranges->registrations);
		if (rc < 0)
			return rc;
		named.nature = mapped ? nature_of(tracker, &vma) : RF_NATURE_UNASKED;
		rf_ranges_change(ranges, at, stop, &named);
	}
	return 0;
}

int rf_ask_is_shared(struct rf_tracker *tracker, uintptr_t start, uintptr_t end)
{
	int rc = rf_vma_open(&tracker->reader);
	struct rf_vma vma;
	uintptr_t stop = end;

	if (rc < 0)
		return rc;
	for (rc = 1; rc > 0 && start < end; start = stop) {
		rc = rf_vma_part(&tracker->reader, start, end, &vma, &stop);
		if (rc > 0)
			rc = vma.shared;
	}
	rf_vma_close(&tracker->reader);
	return rc;
}
