/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Just before a fork: everything registered since the last one, at once.
 *
 *	for all pending: ask ends > count; then in order of address: ask > mark
 *
 * Nothing here fails: pages that cannot be marked are left to the kernel's copying.
 */
#ifndef RF_PREFORK_H
#define RF_PREFORK_H

#include "child_list.h"

/* Count the listed slots that are not counted; their pages are marked. */
void rf_prefork_count_all_waiting(struct rf_tracker *tracker, struct rf_registry *registry);

static inline void rf_prefork_count_waiting(struct rf_tracker *tracker,
					    struct rf_registry *registry)
{
	if (registry->waiting)
		rf_prefork_count_all_waiting(tracker, registry);
}

/*
 * Count all listed slots, unlist them, and mark the pages due. Pages are wiped only once @list
 * shows them: another thread may be about to make its child, which must make the mark its own.
 */
void rf_prefork(struct rf_tracker *tracker, struct rf_registry *registry,
		struct rf_child_list *list);

/*
 * There is no memory for the child list: leave pages whose content a child needs to the kernel,
 * if its copying is trusted.
 */
void rf_prefork_leave_given_back(struct rf_tracker *tracker);

/* Ask about counted ranges of unknown nature, and unmark the shared ones. */
void rf_prefork_settle(struct rf_tracker *tracker);

#endif
