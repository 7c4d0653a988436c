/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The rules of entering the engine, the course of a fork, and how a child is noticed.
 *
 *	any thread      enter > registry, protect > leave
 *	fork, prepare   open the window, enter > prefork, child list > leave
 *	      parent    shut the window
 *	      child     child list, new generation, fresh lock, everything inherited is dead
 *
 * No lock is held across fork(): other libraries register and release in their
 * own handlers, take the GIL there, or fork in a signal handler. Between prepare
 * and parent, in the window, lazy registrations are eager instead, as prefork is
 * over. Where a signal handler forks inside the engine, prepare finds the lock
 * its own and leaves the state as it is; the child then clears it only when the
 * interrupted call, which goes on there too, leaves.
 *
 * A child that no handler sees (raw clone(), _Fork()) is noticed at its first
 * call, or as the call that it was made in leaves: the word @alive lies in a page
 * that is wiped at fork.
 */
#ifndef RF_FORK_H
#define RF_FORK_H

#include "engine.h"

#include <errno.h>

/*
 * The first call in a process: make the engine, or in a child take it over. False in a signal
 * handler that has interrupted just this.
 */
bool rf_become_child(void);

static inline bool rf_notice_child(void)
{
	return rf_likely(__atomic_load_n(rf_engine.alive, __ATOMIC_ACQUIRE) == 1) ||
	       rf_become_child();
}

/* In a fork handler: do not wait for ever. */
#define RF_FORKING 0x80000000u

/* The rest of rf_enter(), where somebody has the lock. */
int rf_enter_slowly(unsigned int flags);

/*
 * Forget the parent's registrations, after an interrupted call has gone on in this child:
 * the marks that it made are taken away.
 */
void rf_clear_interrupted(void);

/*
 * 0, -EDEADLK in a signal handler inside the engine, -EAGAIN with RF_NOWAIT, -ETIMEDOUT
 * with RF_FORKING.
 */
static inline int rf_enter(unsigned int flags)
{
	if (rf_unlikely(!rf_notice_child()))
		return -EDEADLK;
	if (rf_unlikely(!rf_lock_try(&rf_engine.lock))) {
		int rc = rf_enter_slowly(flags);

		if (rc < 0)
			return rc;
	}
	/* A fork came after rf_leave() had looked for one, and before it unlocked. */
	if (rf_unlikely(rf_engine.clear_when_left))
		rf_clear_interrupted();
	return 0;
}

/* Does this process still have its parent's state? */
static inline bool rf_is_to_clear(void)
{
	return rf_unlikely(rf_engine.clear_when_left) ||
	       rf_unlikely(__atomic_load_n(rf_engine.alive, __ATOMIC_RELAXED) != 1);
}

static inline void rf_leave(void)
{
	if (rf_is_to_clear())
		rf_clear_interrupted();
	rf_lock_drop(&rf_engine.lock);
}

#endif
