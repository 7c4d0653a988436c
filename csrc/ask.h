/* SPDX-License-Identifier: BSD-3-Clause */
/* The mappings that registrations lie in, learned from /proc and recorded in the ranges. */
#ifndef RF_ASK_H
#define RF_ASK_H

#include "tracker.h"

/* Learn the page sizes at the ends of @slot. The reader is open. */
int rf_ask_ends(struct rf_tracker *tracker, struct rf_slot *slot);

/* The same in a round of its own. */
int rf_ask_ends_alone(struct rf_tracker *tracker, struct rf_slot *slot);

/*
 * Learn what is mapped in [@start, @end) and record it. *@hole is the first address
 * nothing is mapped at, or 0. @will_split: marks will follow. The reader is open.
 */
int rf_ask(struct rf_tracker *tracker, uintptr_t start, uintptr_t end, bool will_split,
	   uintptr_t *hole);

/* Is all of [@start, @end) mapped, and shared? 1, 0, or why that cannot be asked. */
int rf_ask_is_shared(struct rf_tracker *tracker, uintptr_t start, uintptr_t end);

#endif
