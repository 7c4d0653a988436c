/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The calls libibverbs makes to its own fork support shall come here, in a process
 * where this library does not come first in the search for symbols, or where that is
 * not enough. The way is read from the loader's results, never assumed:
 *
 *	a libibverbs is any object that defines ibv_dontfork_range(), whatever its name;
 *	its own calls to the range functions go
 *
 *	through the GOT, which names ours	OURS, nothing to do
 *	through the GOT, which names others'	REWRITTEN, the GOT of its drivers too
 *	direct (linked -Bsymbolic-functions)	PATCHED, a jump over the two entries
 *	direct, and no jump can be put there	REFUSED, its own support is left in force
 *
 * A GOT entry is one aligned word, and the jump lies within one instruction, in one aligned
 * unit of 16 bytes: other threads run the old code or the new. A jump is tried out
 * before it is relied on.
 *
 * Not reached: a libibverbs that is linked statically, without dynamic symbols, and
 * range functions that a compiler has inlined into their callers.
 *
 * A lock of its own: the loader's are taken inside, so the engine's is not held.
 */
#ifndef RF_INTERCEPT_H
#define RF_INTERCEPT_H

#include "rdmafork.h"

#include <stdbool.h>

#define RF_LIBRARIES 16

/* The functions that calls are to arrive at: a constant. */
struct rf_ibv_functions {
	int (*dofork_range)(void *base, size_t size);
	int (*dontfork_range)(void *base, size_t size);
	int (*fork_init)(void);
	int (*is_fork_initialized)(void);
};

/* Interception is on from now; in a constructor. */
void rf_intercept_begin(const struct rf_ibv_functions *ours);

/* rf_intercept() */
int rf_intercept_all(const struct rf_ibv_functions *ours, struct rf_error *error);

/* Has there been a libibverbs in this process? */
bool rf_intercept_any(void);

/*
 * If interception is on: serve libraries loaded since. Waits for no lock of ours.
 * @forking: in a fork handler, where nothing may allocate memory.
 */
void rf_intercept_look(bool forking);

/* The same in ibv_fork_init(): ask those not served to protect themselves. 0 or an errno. */
int rf_intercept_forward(const struct rf_ibv_functions *ours);

/* In a child, as it is noticed. */
void rf_intercept_child(void);

/* The range functions have been called to see whether that arrives here. True if so. */
bool rf_intercept_is_trial(void);

#endif
