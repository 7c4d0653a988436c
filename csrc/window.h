/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The forks under way: each is in the window from its prepare handler to its parent handler.
 * Atomic, and under no lock: a registration reads it with the engine's lock, the loader gate
 * without one. A thread has more words about its own forks, and its child inherits them.
 *
 * After a fork the first store to a page copies it, which takes a twentieth of a small
 * process's fork. So the first thread that forks, which is mostly the only one, has its forks
 * here, beside the engine's other words, and each other thread in a variable of its own.
 */
#ifndef RF_WINDOW_H
#define RF_WINDOW_H

#include "lock.h"
#include "rdmafork.h"

#include <stdbool.h>

/*
 * The forks of one thread: several, where a signal handler forks in another library's fork
 * handler. A child has those of the thread that made it.
 */
struct rf_own_forks {
	int depth;		/* its forks under way */
	bool prepared;		/* the child list is of the last of them */
	uint64_t transients;	/* rf_sys_transients() when it was prepared */
	int blocked_at;		/* the depth of the fork that has blocked signals; 0: none has */
	uint64_t blocked;	/* those that it has */
};

struct rf_window {
	int forks;		/* under way */
	uint64_t begun;		/* ever; counted with the window open */
	unsigned int patience;	/* seconds a fork waits, and others wait for one */
	uint64_t first;		/* the thread that has forked first; 0: none yet */
	struct rf_own_forks of_first;
};

/* Hidden: each registration reads it, and needs no look at where it is. */
extern struct rf_window rf_window __attribute__((visibility("hidden")));

static inline int rf_window_forks(void)
{
	return __atomic_load_n(&rf_window.forks, __ATOMIC_RELAXED);
}

static inline bool rf_window_is_open(void)
{
	return rf_window_forks();
}

/* This thread's. */
struct rf_own_forks *rf_window_here(void);

/* In a prepare handler: this thread has one more fork under way, which is not prepared. */
void rf_window_open(void);
/* In a parent handler. A child that was made in the window goes on from there, with its own. */
void rf_window_shut(void);
/* In a child, as it is noticed: the forks of its parent's other threads are not under way here. */
void rf_window_child(void);

#endif
