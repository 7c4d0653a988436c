/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * libibverbs' own fork support, with this engine behind it: the four functions that
 * libibverbs, its drivers and programs reach through the dynamic symbol table.
 * Where this library comes first in that (LD_PRELOAD), every RDMA program in the
 * process is protected, unmodified.
 *
 * The caller keeps no handle and does not hold the memory, so it is marked at once,
 * unless $RDMAFORK_MODE says lazy. The program need not ask for protection first. Other
 * than in libibverbs, a release of an unregistered range changes nothing.
 *
 * Contract: ibv_fork_init(3); the other three are declared in infiniband/verbs.h and
 * infiniband/driver.h. fork_init returns 0 or an errno, the range functions 0, or -1
 * with errno set.
 */
#ifndef RF_IBV_H
#define RF_IBV_H

#include "intercept.h"

/* In a constructor: the calls of every libibverbs shall come here. */
void rf_ibv_serve_all(void);

/* Hooks: the engine is entered, or this is a child. See hooks.h. */
void rf_ibv_clear(bool torn);
void rf_ibv_add_stats(struct rf_stats *stats);

/* Asserts the invariants (tests). The engine is entered. */
void rf_ibv_check(void);

#endif
