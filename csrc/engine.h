/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The one engine of a process: its state, who may enter, and how a fork passes.
 *
 *	any thread      enter > registry, advise > leave
 *	fork, prepare   enter > fold, open the window > leave
 *	      parent    shut the window
 *	      child     new generation, fresh lock, everything inherited is dead
 *
 * No lock is held across fork(): other libraries register and release in their
 * own handlers, take the GIL there, or fork in a signal handler. Between prepare
 * and parent, in the window, lazy registrations are eager instead, as the fold is
 * over. Where a signal handler forks inside the engine, prepare finds the lock
 * its own and leaves the state as it is; the child then clears it only when the
 * interrupted call, which goes on there too, leaves.
 *
 * A child that no handler sees (raw clone(), _Fork()) is noticed at its first
 * call, or as the call that it was made in leaves: the word @alive lies in a page
 * that is wiped at fork.
 */
#ifndef RF_ENGINE_H
#define RF_ENGINE_H

#include "advise.h"
#include "descriptors.h"
#include "edges.h"
#include "guards.h"
#include "index.h"
#include "lock.h"
#include "registry.h"
#include "wiped.h"

#include <errno.h>

struct rf_engine {
	struct rf_lock lock;
	uint64_t *alive;	/* 1; 0 once wiped; or the thread that makes it 1 again */
	enum rf_mode mode;
	unsigned int patience;	/* seconds a fork waits for the lock */
	int window;		/* forks under way, atomic */
	uint64_t begun;		/* forks ever, atomic; counted with their window open */
	bool mode_inherited;	/* from the parent: a child may choose anew */
	bool environment_read;
	uint64_t registered;	/* ever in this process, but for RF_UNDO; of protected ones 1 */
	bool clear_when_left;
	uint32_t generation;
	uint64_t forks, forks_unprepared;
	struct rf_registry registry;
	struct rf_advisor advisor, wiper;	/* of RF_OMIT, of RF_WIPE */
	struct rf_index ibv_ranges;	/* what came through ibv_dontfork_range() */
	uint64_t ibv_calls, ibv_unbalanced;
	struct rf_descriptors descriptors;
	struct rf_wiped wiped;
	struct rf_edges edges;
	struct rf_guards guards;
};

/* Between rf_enter() and rf_leave(), but for what is said to be atomic. */
extern struct rf_engine rf_engine;

/*
 * Where @alive points before there is an engine, and where a page that is wiped at fork
 * cannot be had: raw clones go unnoticed.
 */
extern uint64_t rf_unwiped;

/*
 * Make the engine, in our constructor or at a call before that: of several libraries that
 * are preloaded or linked the loader may run another's constructor first.
 */
void rf_install(void);

/*
 * This is a child of the process whose state it finds, or the first to call at all. False
 * in a signal handler that has interrupted just this.
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

/* Forget what the parent had registered. */
void rf_clear(void);
/* The same after an interrupted call has gone on in this child: its marks are taken away. */
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
	/* A fork came after rf_leave() had looked at it, and before the unlocking. */
	if (rf_unlikely(rf_engine.clear_when_left))
		rf_clear_interrupted();
	return 0;
}

/* Is what is left here the parent's? */
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
