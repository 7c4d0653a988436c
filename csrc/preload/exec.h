/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A program under "rdmafork exec": the engine is started by the environment as the library
 * is loaded, every libibverbs is served, and exit_report.h writes its report at exit.
 *
 *	RDMAFORK_EXEC=1			start, and serve every libibverbs
 *	RDMAFORK_KEEP_DEVICES=1		children keep the devices' descriptors
 *	RDMAFORK_TRACE_FORKS=1		count the callers of fork()
 *
 * All are ignored in a set-uid program, and read once: they are the environment of the
 * program that was started, whatever it does to it later. Nothing that fails here
 * keeps a program from running.
 */
#ifndef RF_EXEC_H
#define RF_EXEC_H

/* As the library is loaded. */
void rf_exec_begin(void);

/* A hook, in a child's handler: the devices' descriptors, whoever opened them, are not for it. */
void rf_exec_child(void);

#endif
