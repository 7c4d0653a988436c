/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Two engines in one process would undo each other's advice: their counts know nothing of
 * each other. The loader does not show them to each other where one is in a namespace of
 * dlmopen(), or within the program, which exports no symbols. So all engines go to one word,
 * which the kernel's auxiliary vector leads to: the last one of the main stack. exec() leaves
 * it zero, above the program's name, and nothing uses it (fs/exec.c: bprm_mm_init()).
 *
 *	... environment | AT_EXECFN: "/usr/bin/program" | word ] end of the stack's last page
 *
 * The first to store its address there is the one. A forked child has the word too, and its
 * engine goes on; exec() takes it away. It takes no mapping, which each fork would copy. Where
 * a stack looks different, as in an emulator, a second engine is not noticed.
 */
#ifndef RF_ONE_ENGINE_H
#define RF_ONE_ENGINE_H

#include <stdint.h>

/*
 * Become the one engine that runs, named by any address within it. 0, also if it is that
 * already; -EEXIST: *@other does. Only for an engine that then runs: the name stays.
 */
int rf_one_engine_claim(uintptr_t engine, uintptr_t *other);

#endif
