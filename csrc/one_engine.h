/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Two engines in one process would undo each other's advice: their counts know nothing of
 * each other. The loader does not show them to each other where one is in a namespace of
 * dlmopen(), or within the program, which exports no symbols. So all engines go to one page,
 * whose address follows from that of the process's auxiliary vector.
 *
 *	[ mark | engine ]	0, or the address of the one that runs
 *
 * The first to store its address there is the one. A forked child has the page too, and its
 * engine goes on; exec() takes it away. Where the page cannot be had (the place is taken, or
 * beyond a small address space) a second engine is not noticed.
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
