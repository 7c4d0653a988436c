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
 * then refused. So success over unmarked pages alone says something, and undoing
 * is by what is mapped.
 *
 * No locks: the engine's lock is held.
 */
#ifndef RF_ADVISE_H
#define RF_ADVISE_H

#include "ranges.h"
#include "registry.h"
#include "vma.h"

struct rf_advisor {
	struct rf_ranges ranges;
	const struct rf_kernel *kernel;
	bool whole;		/* mark every page touched, not only those filled */
	bool contested;		/* others may take marks away: every fold marks again */
	bool dirty;		/* something is unasked or due: the next fold walks */
	uint64_t vma_budget;
	uintptr_t touched;	/* the mapping touched last before it was split */
	uint64_t madvise_calls;
	struct rf_vma_reader reader;
};

void rf_advisor_init(struct rf_advisor *advisor);

/*
 * Nothing is counted yet. @whole: mark whole pages even where copying is trusted.
 * @contested: somebody else in the process advises the same pages. Where copying is
 * not trusted that is assumed, as a mark that is gone is data that is lost.
 */
void rf_advisor_start(struct rf_advisor *advisor, const struct rf_kernel *kernel, bool whole,
		      bool contested);

/* Forget everything and keep the memory, for a child that inherits it. */
void rf_advisor_clear(struct rf_advisor *advisor);

/*
 * Count @slot, which is neither counted nor listed, and mark its pages before
 * returning. *@ask is set if what is mapped at its ends is to be asked by the
 * next fold. @forking: a child is being made, so shared memory may not bear a mark
 * for a moment. Negative: nothing has changed, and *@error says why.
 */
int rf_advise_now(struct rf_advisor *advisor, struct rf_slot *slot, bool forking, bool *ask,
		  struct rf_error *error);

/* Count all listed slots, unlist them, and mark what is due. Nothing to report: see above. */
void rf_advise_fold(struct rf_advisor *advisor, struct rf_registry *registry);

/* Ask what is not known of the counted ranges, and unmark what is shared. */
void rf_advise_settle(struct rf_advisor *advisor);

/*
 * For a fork inside the engine, where our own tables may be half changed: what the
 * kernel has mapped as shared is unmarked, whoever marked it, as some of it may be
 * unasked yet. What we hold to be marked is unmarked once more by the next fold.
 */
void rf_advise_unmark_all_shared(const struct rf_kernel *kernel);

/* Take a counted slot out and unmark what nobody counts any more. */
void rf_advise_release(struct rf_advisor *advisor, struct rf_slot *slot);

/* The pages of @slot that are counted; start >= end if there are none. */
void rf_advise_extent(const struct rf_advisor *advisor, const struct rf_slot *slot,
		      uintptr_t *start, uintptr_t *end);

#endif
