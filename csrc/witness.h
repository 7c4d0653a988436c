/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What a program under "rdmafork exec" tells of itself: the engine is started by the
 * environment as the library is loaded, and at exit one line of JSON says what it did.
 *
 *	RDMAFORK_EXEC=1			start, and serve every libibverbs
 *	RDMAFORK_KEEP_DEVICES=1		children keep the devices' descriptors
 *	RDMAFORK_REPORT=PATH		where the line is appended; - is stderr
 *	RDMAFORK_RANK=TEXT		of the process, for the line
 *	RDMAFORK_TRACE_FORKS=1		the line names who called fork()
 *
 * _exit() writes no line: it is how children of vfork() end, in their parent's memory,
 * and handlers of fatal signals, with any lock held.
 *
 * All are ignored in a set-uid program, and read once: they are the environment of the
 * program that was started, whatever it does to it later. Nothing that fails here
 * keeps a program from running.
 */
#ifndef RF_WITNESS_H
#define RF_WITNESS_H

#include "sys.h"

#include <stdbool.h>

/* As the library is loaded. */
void rf_witness_begin(void);

/* Are the devices' descriptors, whoever opened them, not for children? */
bool rf_witness_omits_devices(void);

/* In the fork handler: it began at @since (rf_sys_now()), and the engine is entered. */
void rf_witness_fork(uint64_t since);

/* The engine has forgotten what its parent had: so does this. */
void rf_witness_clear(void);

#endif
