/* SPDX-License-Identifier: BSD-3-Clause */
#include "prefork.h"
#include "ask.h"
#include "kernel.h"
#include "marks.h"
#include "window.h"

#include <errno.h>
#include <sys/mman.h>

#define REFUSALS 64

/* Pages that a fork asks about where the kernel tells of single pages only: a microsecond each. */
#define PAGES_ASKED 65536

/*
 * The longest runs are marked first: they cost the kernel most to copy, and it may grant fewer
 * VMAs than there are runs. On 6.18 a mark pays from two base pages on, from four if
 * the child reserves their addresses; one page costs 1 to 3 us a fork more than
 * its copy. But in a transparent huge page, which nothing tells from the others, a
 * single page that is left costs 50 us (benchmarks/break_even.py).
 */
#define LONGEST_PAGES 4096
#define SHORTER 16

struct marking {
	unsigned int refused;
	bool may_wipe;
	bool lacking;		/* the kernel grants no more VMAs */
	bool full;		/* lacking, or too many refusals: mark no more */
};

/* ---- Which ranges ---- */

static bool is_unasked(const struct rf_range *range)
{
	return range->nature == RF_NATURE_UNASKED && rf_range_is_counted(range);
}

static bool is_marked_and_unasked(const struct rf_range *range)
{
	return range->mark && is_unasked(range);
}

static bool is_due(const struct rf_range *range)
{
	return range->flags & RF_RANGE_DUE && range->nature != RF_NATURE_UNASKED &&
	       rf_range_wants_mark(range) && (!range->mark || range->flags & RF_RANGE_UNSURE);
}

static bool is_due_and_marked(const struct rf_range *range)
{
	return range->mark && is_due(range);
}

static bool is_due_and_unmarked(const struct rf_range *range)
{
	return !range->mark && is_due(range);
}

/* Another mark would serve the range better, and its memory is known to be mapped. */
static bool is_marked_otherwise(const struct rf_range *range)
{
	return rf_range_is_marked_and_held(range) && range->nature != RF_NATURE_UNASKED &&
	       range->mark != rf_range_best_mark(range);
}

static bool is_to_be_wiped(const struct rf_range *range)
{
	return range->mark != RF_MARK_WIPEONFORK &&
	       rf_range_best_mark(range) == RF_MARK_WIPEONFORK;
}

static bool is_to_do(const struct rf_range *range)
{
	return is_unasked(range) || is_due(range) || is_marked_otherwise(range);
}

/*
 * Where the budget is used up. With MADV_DONTFORK the child maps zeros itself: an exchange is not
 * worth the last VMAs.
 */
static bool is_to_do_all_the_same(const struct rf_range *range)
{
	return is_unasked(range) || is_due_and_marked(range) ||
	       (is_marked_otherwise(range) && !is_to_be_wiped(range));
}

static bool has_any(const struct rf_tracker *tracker, bool (*belongs)(const struct rf_range *))
{
	struct rf_run run = { .end = 0 };

	return rf_tracker_next_run(tracker, UINTPTR_MAX, belongs, &run);
}

static bool has_budget(const struct rf_tracker *tracker)
{
	return tracker->ranges.mark_edges + 2ull <= tracker->vma_budget;
}

/* Ranges that only lack budget wait for a release. */
static void look_for_work(struct rf_tracker *tracker)
{
	tracker->left = !has_budget(tracker);
	tracker->dirty = has_any(tracker, tracker->left ? is_to_do_all_the_same : is_to_do);
}

/* ---- Counting ---- */

/* Learn in which pages the ends of listed slots lie, and count them rounded to those. */
static void count_listed(struct rf_tracker *tracker, struct rf_registry *registry)
{
	uint32_t index = registry->first_listed, next;
	struct rf_extent old;
	struct rf_slot *slot;
	int rc;

	for (; index != RF_SLOT_NONE; index = next) {
		slot = rf_registry_slot(registry, index);
		next = slot->next;
		old = (struct rf_extent){ .start = 0 };
		if (slot->flags & RF_SLOT_COUNTED)
			old = rf_tracker_extent(tracker, slot);
		rc = rf_ask_ends(tracker, slot);
		rf_tracker_count_again(tracker, slot, &old, RF_RANGE_DUE);
		rf_registry_count(registry, slot);
		/* Without an answer the slot stays listed, and the next fork asks again. */
		if (rc >= 0)
			rf_registry_unlist(registry, slot);
	}
}

/*
 * Slots that wait are the last of the list. They are counted in the order of the list, as it takes
 * least time to count a registration within one that is counted already. They stay listed: no
 * madvise() has told whether they are part of a huge page.
 */
void rf_prefork_count_all_waiting(struct rf_tracker *tracker, struct rf_registry *registry)
{
	const struct rf_extent none = { .start = 0 };
	uint32_t index = RF_SLOT_NONE, left = registry->waiting;
	struct rf_slot *slot;

	while (left) {
		index = index == RF_SLOT_NONE ? registry->last_listed : slot->prev;
		slot = rf_registry_slot(registry, index);
		left -= !(slot->flags & RF_SLOT_COUNTED);
	}
	for (; registry->waiting; index = slot->next) {
		slot = rf_registry_slot(registry, index);
		if (slot->flags & RF_SLOT_COUNTED)
			continue;
		rf_tracker_count_again(tracker, slot, &none, 0);
		rf_registry_count(registry, slot);
	}
}

/* ---- Asking ---- */

static void ask_unasked(struct rf_tracker *tracker)
{
	struct rf_run run = { .end = 0 };
	uintptr_t hole;

	tracker->touched = 0;
	while (rf_tracker_next_run(tracker, UINTPTR_MAX, is_unasked, &run))
		if (rf_ask(tracker, run.start, run.end, run.unmarked, &hole) < 0)
			break;
}

static void unmark_shared(struct rf_tracker *tracker)
{
	struct rf_run run = { .end = 0 };
	uintptr_t start, end;

	while (rf_tracker_next_run(tracker, UINTPTR_MAX, rf_range_is_marked_but_shared, &run)) {
		start = run.start;
		end = run.end;
		/* The rest of a huge page beside it is not wanted by any registration now. */
		rf_marks_widen(tracker, &start, &end);
		rf_marks_clear_runs(tracker, start, end, rf_range_is_unwanted);
	}
}

/* To the kernel, which copies it. */
static void leave_all(struct rf_tracker *tracker, bool (*belongs)(const struct rf_range *))
{
	struct rf_run run = { .end = 0 };

	while (rf_tracker_next_run(tracker, UINTPTR_MAX, belongs, &run))
		rf_marks_leave(tracker, &run);
}

/* Is that page shared? False where the kernel does not say. */
static bool is_shared_page(const struct rf_tracker *tracker, uintptr_t page)
{
	return rf_sys_is_shared(page, tracker->kernel->page_size) > 0;
}

static void leave_part(struct rf_tracker *tracker, const struct rf_run *part)
{
	struct rf_ranges *ranges = &tracker->ranges;

	if (part->start < part->end && rf_ranges_reserve(ranges, ranges->registrations) >= 0)
		rf_marks_leave(tracker, part);
}

/*
 * Where the kernel's copying is not trusted, memory that may be private stays marked. One
 * system call a page tells shared memory from it; pages that are not asked about may be private.
 */
static void leave_shared(struct rf_tracker *tracker)
{
	const size_t page_size = tracker->kernel->page_size;
	struct rf_run run = { .end = 0 }, part;
	unsigned int left = PAGES_ASKED;
	uintptr_t page;

	while (left && rf_tracker_next_run(tracker, UINTPTR_MAX, is_marked_and_unasked, &run)) {
		part = run;
		part.end = part.start;
		for (page = run.start; left && page < run.end; page += page_size, left--) {
			if (is_shared_page(tracker, page)) {
				part.end = page + page_size;
				continue;
			}
			leave_part(tracker, &part);
			part.start = part.end = page + page_size;
		}
		leave_part(tracker, &part);
	}
}

/* ---- Marking ---- */

/* The pages, huge ones perhaps, in which @run begins and ends, and those between them. */
static int find_whole_pages(struct rf_tracker *tracker, const struct rf_run *run,
			    struct rf_extent *extent)
{
	struct rf_slot ends = { .start = run->start, .end = run->end };
	int rc = rf_ask_ends_alone(tracker, &ends);

	*extent = rf_tracker_extent(tracker, &ends);
	return rc;
}

/*
 * A mark that an earlier mapping bore, and that no release has taken from the ranges, divides
 * the ranges of a huge page mapped there since. madvise() takes that page as a whole.
 */
static int mark_divided_page(struct rf_tracker *tracker, const struct rf_run *run)
{
	struct rf_extent extent;
	struct rf_run whole;

	if (find_whole_pages(tracker, run, &extent) < 0)
		return -EINVAL;
	whole.end = extent.start;
	if (!rf_tracker_next_run(tracker, extent.end, rf_range_wants_mark, &whole) ||
	    whole.start != extent.start || whole.end != extent.end)
		return -EINVAL;
	return rf_marks_set(tracker, &whole, RF_MARK_DONTFORK);
}

/* ENOMEM: older kernels lack VMAs, or memory that should be held was unmapped. */
static bool is_for_hole(const struct rf_run *run, int rc)
{
	return rc == -ENOMEM && rf_sys_is_mapped(run->start, run->end - run->start) <= 0;
}

/* A run that the kernel refuses to mark is left to its copying, unless it was marked before. */
static void mark_run(struct rf_tracker *tracker, struct marking *marking, const struct rf_run *run)
{
	int rc = rf_marks_set(tracker, run, run->best);

	if (rc == -EINVAL)
		rc = mark_divided_page(tracker, run);
	if (rc >= 0)
		return;
	marking->lacking = (rc == -EAGAIN || rc == -ENOMEM) && !is_for_hole(run, rc);
	marking->full = marking->lacking || ++marking->refused == REFUSALS;
}

/*
 * Mark pages again whose mark may be gone, in doubt and held by a later registration, or lost:
 * that takes no more VMAs than are counted.
 */
static void mark_doubted(struct rf_tracker *tracker)
{
	struct marking marking = { .refused = 0 };
	struct rf_run run = { .end = 0 };

	while (!marking.full && rf_tracker_next_run(tracker, UINTPTR_MAX, is_due_and_marked, &run))
		mark_run(tracker, &marking, &run);
}

/* Mark due runs of at least @nbytes while there is room for them. True: there are shorter ones. */
static bool mark_due(struct rf_tracker *tracker, struct marking *marking, size_t nbytes)
{
	struct rf_run run = { .end = 0 };
	bool shorter = false;

	while (!marking->full && has_budget(tracker) &&
	       rf_tracker_next_run(tracker, UINTPTR_MAX, is_due_and_unmarked, &run)) {
		if (run.end - run.start < nbytes) {
			shorter = true;
			continue;
		}
		if (!marking->may_wipe)
			run.best = RF_MARK_DONTFORK;
		mark_run(tracker, marking, &run);
	}
	return shorter;
}

static void mark_all_due(struct rf_tracker *tracker, bool may_wipe)
{
	struct marking marking = { .may_wipe = may_wipe };
	size_t nbytes = LONGEST_PAGES * (size_t)tracker->kernel->page_size;

	while (mark_due(tracker, &marking, nbytes))
		nbytes /= SHORTER;
	if (rf_unlikely(marking.lacking))
		rf_marks_give_back(tracker);
}

static void exchange_marks(struct rf_tracker *tracker)
{
	struct rf_run run = { .end = 0 };

	while (rf_tracker_next_run(tracker, UINTPTR_MAX, is_marked_otherwise, &run))
		if (run.best != RF_MARK_WIPEONFORK || has_budget(tracker))
			(void)rf_marks_exchange(tracker, &run);
}

static void mark_all(struct rf_tracker *tracker, struct rf_child_list *list)
{
	bool may_wipe = true;

	/* A child that another fork makes meanwhile must know of the marks that follow. */
	if (has_any(tracker, is_to_be_wiped) ||
	    (rf_window_forks() > 1 && has_any(tracker, is_to_do)))
		may_wipe = rf_child_list_make(list, tracker, 0, UINTPTR_MAX) >= 0;
	mark_doubted(tracker);
	if (may_wipe)
		exchange_marks(tracker);
	mark_all_due(tracker, may_wipe);
	/* Where the kernel has refused, the next fork tries again. */
	look_for_work(tracker);
}

/*
 * A registration that found its pages marked has not learned of the huge page they
 * are part of: madvise() takes any part of a marked mapping. 0 without an answer, too.
 */
static int mark_whole_pages(struct rf_tracker *tracker, const struct rf_run *run)
{
	struct rf_extent extent;

	if (find_whole_pages(tracker, run, &extent) < 0)
		return 0;
	return rf_marks_call(tracker, extent.start, extent.end, rf_marks_advice(run->mark));
}

/*
 * Others advise the same pages: an MADV_DOFORK of libibverbs' own tracker, which knows
 * nothing of our counts, takes our marks away. Memory that is not held may be another's
 * by now. A mark that is lost waits for the walk, of this fork or a later one.
 */
static void mark_again(struct rf_tracker *tracker)
{
	const struct rf_change lost = { .set = RF_RANGE_LOST | RF_RANGE_DUE };
	struct rf_run run = { .end = 0 };
	int rc;

	while (rf_tracker_next_run(tracker, UINTPTR_MAX, rf_range_is_marked_and_held, &run)) {
		rc = rf_marks_call(tracker, run.start, run.end, rf_marks_advice(run.mark));
		if (rc == -EINVAL)
			rc = mark_whole_pages(tracker, &run);
		/* Around a hole the kernel has marked the rest. */
		if (rc >= 0 || is_for_hole(&run, rc))
			continue;
		rf_ranges_change(&tracker->ranges, run.start, run.end, &lost);
		tracker->dirty = true;
	}
}

/* ---- All of it ---- */

void rf_prefork(struct rf_tracker *tracker, struct rf_registry *registry,
		struct rf_child_list *list)
{
	if (tracker->contested)
		mark_again(tracker);
	rf_marks_retry_all(tracker);
	if (tracker->dirty || (tracker->left && has_budget(tracker)))
		look_for_work(tracker);
	if (!registry->listed && !tracker->dirty)
		return;
	if (rf_vma_open(&tracker->reader) < 0) {
		/* It may be private or shared. */
		if (rf_tracker_trusts(tracker))
			leave_all(tracker, is_marked_and_unasked);
		else
			leave_shared(tracker);
		return;
	}
	count_listed(tracker, registry);
	ask_unasked(tracker);
	unmark_shared(tracker);
	mark_all(tracker, list);
	rf_vma_close(&tracker->reader);
}

static bool is_given_back(const struct rf_range *range)
{
	return range->mark == RF_MARK_DONTFORK && rf_range_wants_mark(range) &&
	       rf_range_finds(range) != RF_FINDS_NOTHING;
}

void rf_prefork_leave_given_back(struct rf_tracker *tracker)
{
	if (rf_tracker_trusts(tracker))
		leave_all(tracker, is_given_back);
}

void rf_prefork_settle(struct rf_tracker *tracker)
{
	if (!tracker->dirty || rf_vma_open(&tracker->reader) < 0)
		return;
	ask_unasked(tracker);
	unmark_shared(tracker);
	rf_vma_close(&tracker->reader);
}
