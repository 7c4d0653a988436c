/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * In a child the addresses of absent pages are free: its first mmap() may land
 * there, and a pointer the child still has would then read and write somebody
 * else's memory. So the child handler reserves them, inaccessible: such a pointer
 * faults. About a microsecond each, so their number has a limit, and the longest
 * holes come first.
 *
 * The child may be made while another thread is in the middle of any change, the
 * ranges' and that of another fork's plan too: a plan is written where no child
 * looks, and then shown.
 */
#ifndef RF_GUARDS_H
#define RF_GUARDS_H

#include "edges.h"

#define RF_GUARDS 1024

struct rf_guard_plan {
	uint32_t count;
	struct {
		uintptr_t start, end;
	} holes[RF_GUARDS];
};

struct rf_guards {
	struct rf_guard_plan plans[2];
	uint32_t shown;		/* which of them a child goes by */
	uint64_t marks;		/* of the advised ranges, as it was planned */
	bool around;		/* pages that are given back */
};

/*
 * The engine's lock is held: plan for the marks there are, less what is given back, which
 * has been saved.
 */
void rf_guards_plan(struct rf_guards *guards, const struct rf_edges *edges);

/* In a child: reserve what was planned, where nothing is mapped. */
void rf_guards_raise(const struct rf_guards *guards);

/* Forget what was planned. */
void rf_guards_clear(struct rf_guards *guards);

#endif
