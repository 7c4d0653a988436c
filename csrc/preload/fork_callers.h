/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Which code has called fork(), and how often: the first return address that lies neither
 * in this library nor in libc.
 */
#ifndef RF_FORK_CALLERS_H
#define RF_FORK_CALLERS_H

#include "json.h"

#define RF_FORK_CALLERS 64	/* different ones that are counted */

/* In a constructor: all that takes the loader's locks, or memory, and a fork handler must not. */
void rf_fork_callers_begin(void);

/* In the prepare handler, with the engine's lock: count the caller, if that has begun. */
void rf_fork_callers_count(void);

/* In a child: its parent's forks are not its own. */
void rf_fork_callers_clear(void);

/*
 * A list of them: symbol, object, build_id, offset, count. The loader knows symbols that others
 * may call; for the rest the offset, the address as that build of the file has it, leads to its
 * name there.
 */
void rf_fork_callers_put(struct rf_json *json, const char *name);

#endif
