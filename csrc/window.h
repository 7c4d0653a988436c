/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The forks under way: each is in the window from its prepare handler to its parent handler.
 * Atomic, and of no lock: a registration reads it under the engine's, the gate of the loader
 * under none.
 */
#ifndef RF_WINDOW_H
#define RF_WINDOW_H

#include "rdmafork.h"

#include <stdbool.h>

struct rf_window {
	int forks;		/* under way */
	uint64_t begun;		/* ever; counted with the window open */
	unsigned int patience;	/* seconds a fork waits, and others wait for one */
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

/* In a prepare handler. */
void rf_window_open(void);
/* In a parent handler. A child that was made in the window goes on from there, with its own. */
void rf_window_shut(void);

#endif
