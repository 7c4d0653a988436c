/* SPDX-License-Identifier: BSD-3-Clause */
/* Just before a fork: everything registered since the last one, at once. */
#include "advise_internal.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#define BATCH 64
#define REFUSALS 64

/*
 * Where VMAs are short the longest runs get them: they cost the kernel most to copy.
 * Else every run is marked. On 6.18 a mark pays from two base pages on, from four with
 * what the child reserves of their addresses; one page costs 1 to 3 us a fork more than
 * its copy. But in a transparent huge page, which nothing tells from the others, a
 * single page that is left costs 50 us (benchmarks/break_even.py).
 */
static const size_t page_steps[] = { 4096, 256, 16, 1 };

#define STEPS (sizeof(page_steps) / sizeof(*page_steps))

struct batch {
	struct iovec runs[BATCH];
	unsigned int count;
	unsigned int refused;
	bool full;		/* the kernel grants no more VMAs */
};

static bool is_unasked(const struct rf_range *range)
{
	return range->nature == RF_NATURE_UNASKED && range->count;
}

static bool is_marked_but_shared(const struct rf_range *range)
{
	return range->mark && range->nature == RF_NATURE_SHARED;
}

static bool is_marked_and_unasked(const struct rf_range *range)
{
	return range->mark && is_unasked(range);
}

static bool is_due(const struct rf_range *range)
{
	return range->flags & RF_RANGE_DUE && range->nature == RF_NATURE_PRIVATE &&
	       rf_range_wants_mark(range) && (!range->mark || range->flags & RF_RANGE_DOUBT);
}

static bool is_due_and_marked(const struct rf_range *range)
{
	return range->mark && is_due(range);
}

/* Another registration had marked it, or a later one has. */
static bool is_due_no_more(const struct rf_range *range)
{
	return range->flags & RF_RANGE_DUE && range->mark && !(range->flags & RF_RANGE_DOUBT);
}

static bool is_marked_and_held(const struct rf_range *range)
{
	return range->mark && rf_range_wants_mark(range) && !(range->flags & RF_RANGE_DOUBT);
}

/* Is there anything to ask or to mark? */
static bool remains(const struct rf_advisor *advisor)
{
	struct rf_run run;

	return rf_advise_next_run(advisor, 0, UINTPTR_MAX, is_due, &run) ||
	       rf_advise_next_run(advisor, 0, UINTPTR_MAX, is_unasked, &run);
}

/* The common case of what follows. False: nothing has changed. */
static bool count_planned(struct rf_advisor *advisor, const struct rf_slot *slot, uint8_t flags)
{
	struct rf_plan plan;
	uintptr_t start, end;

	rf_advise_extent(advisor, slot, &start, &end);
	if (start >= end || !has_no_gaps(slot, start, end) ||
	    !rf_ranges_plan_add(&advisor->ranges, rf_ranges_seek(&advisor->ranges, start), start,
				end, false, flags, &plan))
		return false;
	rf_ranges_commit(&advisor->ranges, &plan);
	return true;
}

/* Learn what the ends of listed slots lie in, and count them rounded to that. */
static void count_listed(struct rf_advisor *advisor, struct rf_registry *registry)
{
	uint32_t index = registry->first_listed, next;
	uintptr_t start, end;
	struct rf_slot *slot;
	int rc;

	for (; index != RF_SLOT_NONE; index = next) {
		slot = rf_registry_slot(registry, index);
		next = slot->next;
		start = 0;
		end = 0;
		if (slot->flags & RF_SLOT_COUNTED)
			rf_advise_extent(advisor, slot, &start, &end);
		rc = rf_advise_ask_ends(advisor, slot);
		if (start < end || !count_planned(advisor, slot, RF_RANGE_DUE)) {
			rf_advise_extend(advisor, slot, start, end, RF_RANGE_DUE);
			rf_advise_extent(advisor, slot, &start, &end);
			if (start < end)
				rf_ranges_tidy(&advisor->ranges, start, end);
		}
		rf_registry_count(registry, slot);
		/* Not answered: the next fold asks again. */
		if (rc >= 0)
			rf_registry_unlist(registry, index);
	}
}

/* From the end of the list: those that wait have come last. */
void rf_advise_count_all_waiting(struct rf_advisor *advisor, struct rf_registry *registry)
{
	uint32_t index = registry->last_listed, before;
	uintptr_t mask = advisor->kernel->page_size - 1, start, end;
	struct rf_slot *slot;

	for (; registry->waiting; index = before) {
		slot = rf_registry_slot(registry, index);
		before = slot->prev;
		if (slot->flags & RF_SLOT_COUNTED)
			continue;
		if (!count_planned(advisor, slot, 0)) {
			rf_advise_extent(advisor, slot, &start, &end);
			rf_advise_count(advisor, slot, start, end);
			rf_ranges_tidy(&advisor->ranges, start, end);
		}
		rf_registry_count(registry, slot);
		/* As with all that is marked at once, only ends within a page are asked about. */
		if (!((slot->start | slot->end) & mask))
			rf_registry_unlist(registry, index);
	}
}

static void ask_unasked(struct rf_advisor *advisor)
{
	uintptr_t at, hole;
	struct rf_run run;

	advisor->touched = 0;
	for (at = 0; rf_advise_next_run(advisor, at, UINTPTR_MAX, is_unasked, &run); at = run.end)
		if (rf_advise_ask(advisor, run.start, run.end, run.unmarked, &hole) < 0)
			break;
}

static void unmark_shared(struct rf_advisor *advisor)
{
	struct rf_run run;
	uintptr_t at;

	for (at = 0; rf_advise_next_run(advisor, at, UINTPTR_MAX, is_marked_but_shared, &run);
	     at = run.end) {
		/* What was left over of a huge page beside it is wanted by nobody now. */
		rf_advise_widen(advisor, &run.start, &run.end);
		rf_advise_unmark(advisor, run.start, run.end);
	}
}

static void note_marked(struct rf_advisor *advisor, const struct iovec *run)
{
	uintptr_t start = (uintptr_t)run->iov_base, end = start + run->iov_len;

	rf_ranges_set_mark(&advisor->ranges, start, end, true);
	rf_ranges_set_flags(&advisor->ranges, start, end, 0, RF_RANGE_DUE);
}

/* What the kernel refuses is left to its copying, unless it was marked before. */
static void mark_run(struct rf_advisor *advisor, struct batch *batch, const struct iovec *run)
{
	uintptr_t start = (uintptr_t)run->iov_base, end = start + run->iov_len;
	struct rf_run whole = { .start = start, .end = end };
	int rc = rf_advise_call(advisor, start, end, MADV_DONTFORK);

	if (rc >= 0) {
		note_marked(advisor, run);
		return;
	}
	/* ENOMEM: the limit on older kernels, or somebody unmapped what he said he holds. */
	batch->full = rc == -EAGAIN || ++batch->refused == REFUSALS;
	rf_advise_set_fresh(advisor, &whole);
	rf_advise_unmark_fresh(advisor, start, end);
}

static void flush(struct rf_advisor *advisor, struct batch *batch)
{
	unsigned int done = 0;
	ssize_t advised = 0;

	if (batch->count > 1 && advisor->kernel->process_madvise) {
		advisor->madvise_calls++;
		advised = rf_sys_madvise_many(batch->runs, batch->count, MADV_DONTFORK);
	}
	while (done < batch->count && advised >= (ssize_t)batch->runs[done].iov_len) {
		advised -= (ssize_t)batch->runs[done].iov_len;
		note_marked(advisor, &batch->runs[done++]);
	}
	while (done < batch->count && !batch->full)
		mark_run(advisor, batch, &batch->runs[done++]);
	batch->count = 0;
}

/* Mark pages in doubt again that a later registration holds: that takes no more VMAs. */
static void mark_doubted(struct rf_advisor *advisor)
{
	struct batch batch = { .count = 0 };
	struct rf_run run;
	struct iovec pages;
	uintptr_t at;

	for (at = 0; !batch.full &&
		     rf_advise_next_run(advisor, at, UINTPTR_MAX, is_due_and_marked, &run);
	     at = run.end) {
		pages.iov_base = (void *)run.start;
		pages.iov_len = run.end - run.start;
		mark_run(advisor, &batch, &pages);
	}
}

/* Mark due runs of at least @nbytes while there is room for them. */
static void mark_due(struct rf_advisor *advisor, size_t nbytes)
{
	struct batch batch = { .count = 0 };
	uint64_t taken = rf_advise_edges(advisor);
	struct rf_run run;
	uintptr_t at;

	for (at = 0; !batch.full && taken + 2 <= advisor->vma_budget &&
		     rf_advise_next_run(advisor, at, UINTPTR_MAX, is_due, &run);
	     at = run.end) {
		if (run.end - run.start < nbytes)
			continue;
		batch.runs[batch.count].iov_base = (void *)run.start;
		batch.runs[batch.count].iov_len = run.end - run.start;
		taken += 2;
		if (++batch.count < BATCH)
			continue;
		flush(advisor, &batch);
		taken = rf_advise_edges(advisor);
	}
	flush(advisor, &batch);
}

static void walk(struct rf_advisor *advisor, bool marking)
{
	uint64_t due_runs = 0;
	struct rf_run run;
	uintptr_t at;
	size_t step;

	ask_unasked(advisor);
	unmark_shared(advisor);
	if (marking) {
		mark_doubted(advisor);
		for (at = 0; rf_advise_next_run(advisor, at, UINTPTR_MAX, is_due, &run);
		     at = run.end)
			due_runs++;
		step = 2 * due_runs + rf_advise_edges(advisor) <= advisor->vma_budget ? STEPS - 1
										      : 0;
		for (; due_runs && step < STEPS; step++)
			mark_due(advisor, page_steps[step] * advisor->kernel->page_size);
		for (at = 0; rf_advise_next_run(advisor, at, UINTPTR_MAX, is_due_no_more, &run);
		     at = run.end)
			rf_ranges_set_flags(&advisor->ranges, run.start, run.end, 0, RF_RANGE_DUE);
	}
	rf_ranges_tidy(&advisor->ranges, 0, UINTPTR_MAX);
	advisor->dirty = remains(advisor);
}

/*
 * /proc cannot be opened, so nothing tells private from shared: what may be either
 * is left to the kernel, if that copies.
 */
static void leave_unasked(struct rf_advisor *advisor)
{
	struct rf_run run;
	uintptr_t at;

	if (!advisor->kernel->copy_trusted)
		return;
	for (at = 0; rf_advise_next_run(advisor, at, UINTPTR_MAX, is_marked_and_unasked, &run);
	     at = run.end)
		rf_advise_leave(advisor, &run);
}

/*
 * A registration that found its pages marked has not learned of the huge page they
 * are part of: madvise() takes any part of what is marked already.
 */
static void mark_whole_pages(struct rf_advisor *advisor, uintptr_t start, uintptr_t end)
{
	struct rf_slot ends = { .start = start, .end = end };
	uintptr_t first = start, last = end;

	if (rf_vma_open(&advisor->reader) < 0)
		return;
	if (rf_advise_ask_ends(advisor, &ends) >= 0) {
		rf_advise_extent(advisor, &ends, &first, &last);
		(void)rf_advise_call(advisor, first, last, MADV_DONTFORK);
	}
	rf_vma_close(&advisor->reader);
}

/*
 * Others advise the same pages: an MADV_DOFORK of libibverbs' own tracker, which knows
 * nothing of our counts, takes our marks away. Memory that is not held may be another's
 * by now.
 */
static void mark_again(struct rf_advisor *advisor)
{
	struct rf_run run;
	uintptr_t at;

	for (at = 0; rf_advise_next_run(advisor, at, UINTPTR_MAX, is_marked_and_held, &run);
	     at = run.end)
		if (rf_advise_call(advisor, run.start, run.end, MADV_DONTFORK) == -EINVAL)
			mark_whole_pages(advisor, run.start, run.end);
}

void rf_advise_fold(struct rf_advisor *advisor, struct rf_registry *registry)
{
	if (advisor->contested)
		mark_again(advisor);
	rf_advise_retry(advisor);
	advisor->dirty = advisor->dirty && remains(advisor);
	if (!registry->listed && !advisor->dirty)
		return;
	if (rf_vma_open(&advisor->reader) < 0) {
		leave_unasked(advisor);
		return;
	}
	count_listed(advisor, registry);
	walk(advisor, true);
	rf_vma_close(&advisor->reader);
}

void rf_advise_settle(struct rf_advisor *advisor)
{
	if (!advisor->dirty || rf_vma_open(&advisor->reader) < 0)
		return;
	walk(advisor, false);
	advisor->dirty = true;
	rf_vma_close(&advisor->reader);
}

void rf_advise_unmark_all_shared(const struct rf_kernel *kernel)
{
	struct rf_vma_reader reader;
	struct rf_vma vma;
	uintptr_t at = 0;

	rf_vma_init(&reader, kernel->procmap_query, 0);
	if (rf_vma_open(&reader) >= 0) {
		for (; rf_vma_find(&reader, at, &vma) >= 0; at = vma.end)
			if (vma.shared)
				(void)rf_sys_madvise(vma.start, vma.end - vma.start, MADV_DOFORK);
		rf_vma_close(&reader);
	}
	rf_memory_free(&reader.table);
}
