/* SPDX-License-Identifier: BSD-3-Clause */
/* Choosing the mode: the environment, the kernel, and a second engine. */
#ifndef RF_START_H
#define RF_START_H

#include "rdmafork.h"

/*
 * Once a process: rf_fork_init() if RDMAV_FORK_SAFE or IBV_FORK_SAFE is set, to
 * whatever value. Not inside the engine. A failure is reported again each time.
 */
int rf_start_by_environment(struct rf_error *error);

#endif
