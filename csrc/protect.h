/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * One registration: counted and marked before the call returns, and taken out again.
 *
 *	simple		ask the ranges > madvise() > count
 *	else		count > madvise() > (EINVAL) ask /proc, madvise() | undo
 *	release		ask the ranges > madvise() > discount, or discount > unmark
 *
 * Eager or not, a page gets MADV_DONTFORK first, whatever a child is to find there: the
 * next fork chooses the mark that serves best.
 */
#ifndef RF_PROTECT_H
#define RF_PROTECT_H

#include "child_list.h"

/*
 * A child is being made: shared memory may not bear a mark even for a moment, and the
 * child list is made anew.
 */
#define RF_PROTECT_FORKING	1u
/* -EAGAIN rather than a call of the kernel: nothing has changed. */
#define RF_PROTECT_NOWAIT	2u

/*
 * Other registrations have all its pages marked, so it is not counted: it may wait for
 * the next fork, as long as rf_prefork_count_waiting() comes before a release.
 */
#define RF_PROTECT_COVERED	1

/* The next fork has to ask what is mapped at its ends. */
#define RF_PROTECT_ASK		2

/*
 * Count @slot, which is neither counted nor listed, and mark its pages before
 * returning. 0 or one of these. Negative: nothing has changed, and *@error, which names no
 * cause before, says why.
 */
int rf_protect(struct rf_tracker *tracker, struct rf_child_list *list, struct rf_slot *slot,
	       unsigned int how, struct rf_error *error);

/* Take a counted slot out and unmark the pages that no registration counts any more. */
void rf_protect_release(struct rf_tracker *tracker, const struct rf_slot *slot);

#endif
