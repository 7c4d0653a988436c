/* SPDX-License-Identifier: BSD-3-Clause */
/* Why the kernel refused an advice. */
#ifndef RF_EXPLAIN_H
#define RF_EXPLAIN_H

#include "tracker.h"

/*
 * Why the kernel said @rc to [@start, @end): *@error, unless that names a cause already,
 * and the errno that says it best.
 */
int rf_explain(struct rf_tracker *tracker, uintptr_t start, uintptr_t end, int rc,
	       struct rf_error *error);

#endif
