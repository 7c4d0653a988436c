/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Calls of the dynamic loader, and forks. A thread in the loader holds its lock, and a child
 * that another thread's fork makes meanwhile finds it taken for ever. So none of our threads
 * enters the loader while another forks, and a fork waits for those in it. Neither waits for
 * ever: each may hold a lock that the other is waiting for.
 */
#ifndef RF_LOADER_GATE_H
#define RF_LOADER_GATE_H

#include <stdbool.h>

/* Around calls of the loader. They may be nested. False: another thread forks; do not enter. */
bool rf_loader_gate_try(void);
/*
 * The same, but wait for the forks under way, as long as one may take. A child has been
 * noticed: it would wait for its parent's.
 */
void rf_loader_gate_enter(void);
void rf_loader_gate_leave(void);

/* In the prepare handler, with the window open: until no other thread is in the loader. */
void rf_loader_gate_fork(void);

/* In a child, as it is noticed. */
void rf_loader_gate_child(void);

#endif
