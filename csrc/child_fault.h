/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A child that touches memory which its parent had registered dies by SIGSEGV, and nothing
 * says why. So a child handler puts an action in front of the one there is:
 *
 *	fault > ours: is the address in an area that was kept from this child?
 *		    one line on stderr
 *		the action that was there before is put back
 *	return > the instruction faults again, with the same siginfo, and all goes on as it
 *		 would have: default action, core dump, faulthandler, the program's handler
 *
 * Two things of the parent's are kept for that: the areas of the child list, without bytes,
 * and its table of registrations. Both are the parent's pages, so a fork copies nothing. A
 * child that has all it touches keeps nothing and has no action.
 *
 * A system call that is given such an address returns EFAULT, and nothing is said. SIGBUS is
 * not ours: the kernel raises it where something is mapped. Of reserved memory that the child
 * has unmapped nothing is said either. Two things cannot be told from pages as the fork left
 * them: a PROT_NONE mapping of the program's own where an area was reserved, and, where none
 * was, memory that the child has mapped and unmapped there. A fault there names the registration,
 * too.
 *
 * A signal that was sent is not explained, but it puts the action back: the program's handler
 * is to run with its own mask and flags, so the kernel must call it. Ours is not in front after
 * that, until rf_explain_faults().
 *
 * Threads that fault at the same time all enter ours. The first one tells and puts the action
 * back. The others wait for that and return, so their instructions fault again too. A thread
 * that comes back with the same fault was called by a handler in front of ours: only then ours
 * calls on.
 *
 * The handler allocates nothing and takes no lock. Its state changes as a process becomes a
 * child, and in rf_child_fault_arm().
 */
#ifndef RF_CHILD_FAULT_H
#define RF_CHILD_FAULT_H

#include "child_list.h"
#include "registry.h"

/* Is a fault to be explained? From the environment, as the engine starts. */
void rf_child_fault_choose(bool explain);

/*
 * Take the handler's state from @list and @registry, which are the parent's. Those of
 * the last RF_KEPT forks on the way to this process are kept. @torn: the registry may be
 * in the middle of a change.
 */
#define RF_KEPT 4
void rf_child_fault_keep(struct rf_child_list *list, struct rf_registry *registry, bool torn);

/* Say on stderr which areas this child could not have, if there are any. */
void rf_child_fault_tell_refused(const struct rf_refused *refused);

/*
 * Put ours in front, if anything is kept: 1. 0: it is not; SIGSEGV is ignored, which exec()
 * would hand on; or the kernel refuses. Not from two threads at once.
 */
int rf_child_fault_arm(void);

#endif
