/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * From counts to advice. The rules:
 *
 *  - Where copying at fork is trusted only pages that one registration fills are
 *    marked (the kernel copies the edges, so the child keeps what it owns);
 *    elsewhere, and in huge pages everywhere, every page it touches.
 *  - Shared memory is never left marked: fork() does not move it.
 *  - At most half of vm.max_map_count goes to marks.
 *  - Try, then ask. madvise() is tried at base pages. What is mapped is asked when
 *    it refuses, or else by the next fold: until a child is made nobody can see
 *    the difference between shared and private, or miss a huge page's edge.
 *
 *	now (eager)	count > try > (EINVAL) ask > apply | undo
 *	fold (lazy)	for all listed: ask ends > count; then in order of address:
 *			ask > apply, in batches; what fails is left to the kernel
 *	release		discount > unmark what nobody counts | keep it for a retry
 *
 * madvise() is not exact: over marked pages a misaligned call in a huge page
 * succeeds and changes nothing, and a range with a hole is advised around it and
 * then refused. So only success over unmarked pages means anything, and undoing
 * goes mapping by mapping.
 *
 * No locks: the engine's lock is held.
 */
#ifndef RF_ADVISE_H
#define RF_ADVISE_H

#include "edges.h"
#include "registry.h"
#include "vma.h"

/* To pages of 1 << @shift bytes. */
static inline uintptr_t rf_down(uintptr_t address, unsigned int shift)
{
	return address >> shift << shift;
}

static inline uintptr_t rf_up(uintptr_t address, unsigned int shift)
{
	return rf_down(address + ((uintptr_t)1 << shift) - 1, shift);
}

/*
 * One for each advice: MADV_DONTFORK for RF_OMIT, MADV_WIPEONFORK for RF_WIPE. To
 * the kernel they are independent, and a page with both is absent. What is to read
 * as zeros has no substitute: it is marked at once or refused, in either mode.
 */
struct rf_advisor {
	enum rf_policy policy;
	bool required;		/* what is not marked is not left to the kernel */
	const struct rf_advisor *beside;	/* the other one: they share the VMA budget */
	struct rf_ranges ranges;
	struct rf_ranges gaps;	/* what of them is not registered: see edges.h */
	uint64_t gap_bytes;	/* each as often as it is counted there */
	struct rf_edges *edges;
	const struct rf_kernel *kernel;
	bool whole;		/* mark every page touched, not only those filled */
	bool contested;		/* others may take marks away: every fold marks again */
	bool dirty;		/* something is unasked or due: the next fold walks */
	uint64_t vma_budget;
	uintptr_t touched;	/* the mapping touched last before it was split */
	uint64_t madvise_calls;
	struct rf_vma_reader reader;
};

void rf_advisor_init(struct rf_advisor *advisor, enum rf_policy policy,
		     const struct rf_advisor *beside, struct rf_edges *edges);

/*
 * Nothing is counted yet. @contested: somebody else in the process advises the same pages.
 * Where copying is not trusted that is assumed, as a mark that is gone is data that is lost.
 */
void rf_advisor_start(struct rf_advisor *advisor, const struct rf_kernel *kernel, bool contested);

/* Forget everything and keep the memory, for a child that inherits it. */
void rf_advisor_clear(struct rf_advisor *advisor);

/* The same where the structures may not fit together: their memory is lost. */
void rf_advisor_abandon(struct rf_advisor *advisor);

/* Make room for @registrations, those counted included. -ENOMEM: nothing has changed. */
static inline int rf_advise_reserve(struct rf_advisor *advisor, uint32_t registrations)
{
	int rc = rf_ranges_reserve(&advisor->ranges, registrations);

	return rc < 0 ? rc : rf_ranges_reserve(&advisor->gaps, 2 * registrations);
}

/* Where marked meets unmarked, in all advisors: each such address takes at most one VMA more. */
static inline uint64_t rf_advise_edges(const struct rf_advisor *advisor)
{
	return (uint64_t)advisor->ranges.mark_edges + advisor->beside->ranges.mark_edges;
}

/*
 * A child is being made: shared memory may not bear a mark even for a moment, and what the
 * child is to get back is saved anew.
 */
#define RF_ADVISE_FORKING	1u
/* -EAGAIN rather than a call of the kernel: nothing has changed. */
#define RF_ADVISE_NOWAIT	2u

/*
 * Its pages are all marked by others, so it is not counted: it may wait for the next
 * fold, as long as rf_advise_count_waiting() comes before a release.
 */
#define RF_ADVISE_COVERED	1

/*
 * Count @slot, which is neither counted nor listed, and mark its pages before
 * returning. *@ask is set if what is mapped at its ends is to be asked by the next
 * fold. Negative: nothing has changed, and *@error says why.
 */
int rf_advise_now(struct rf_advisor *advisor, struct rf_slot *slot, unsigned int how, bool *ask,
		  struct rf_error *error);

/* Count what is listed and was not: its pages are marked. */
void rf_advise_count_all_waiting(struct rf_advisor *advisor, struct rf_registry *registry);

static inline void rf_advise_count_waiting(struct rf_advisor *advisor,
					   struct rf_registry *registry)
{
	if (registry->waiting)
		rf_advise_count_all_waiting(advisor, registry);
}

/* Count all listed slots, unlist them, and mark what is due. What fails is left to the kernel. */
void rf_advise_fold(struct rf_advisor *advisor, struct rf_registry *registry);

/* Is all of [@start, @end) mapped, and shared? 1, 0, or why that cannot be asked. */
int rf_advise_is_shared(struct rf_advisor *advisor, uintptr_t start, uintptr_t end);

/* Ask what is not known of the counted ranges, and unmark what is shared. */
void rf_advise_settle(struct rf_advisor *advisor);

/*
 * For a fork inside the engine, where our own tables may be half changed: what the
 * kernel has mapped as shared is unmarked, whoever marked it, as some of it may be
 * unasked yet. The tables do not learn of it: the next fold unmarks the same again.
 */
void rf_advise_unmark_all_shared(const struct rf_kernel *kernel);

/* Unmark whatever is marked, counted or not: the caller is about to forget it. */
void rf_advise_unmark_all(struct rf_advisor *advisor);

/* Unmark what the kernel refused to before. */
void rf_advise_retry_all(struct rf_advisor *advisor);

static inline void rf_advise_retry(struct rf_advisor *advisor)
{
	if (rf_unlikely(advisor->ranges.retries))
		rf_advise_retry_all(advisor);
}

/* Take a counted slot out and unmark what nobody counts any more. */
void rf_advise_release(struct rf_advisor *advisor, struct rf_slot *slot);

/* The pages of @slot that are counted; start >= end if there are none. */
static inline void rf_advise_extent(const struct rf_advisor *advisor, const struct rf_slot *slot,
				    uintptr_t *start, uintptr_t *end)
{
	unsigned int base = (unsigned int)__builtin_ctz(advisor->kernel->page_size);

	if (slot->start_shift)
		*start = rf_down(slot->start, slot->start_shift);
	else
		*start = advisor->whole ? rf_down(slot->start, base) : rf_up(slot->start, base);
	if (slot->end_shift)
		*end = rf_up(slot->end, slot->end_shift);
	else
		*end = advisor->whole ? rf_up(slot->end, base) : rf_down(slot->end, base);
}

#endif
