/* SPDX-License-Identifier: BSD-3-Clause */
#include "explain.h"

#include <errno.h>

int rf_explain(struct rf_tracker *tracker, uintptr_t start, uintptr_t end, int rc,
	       struct rf_error *error)
{
	struct rf_vma vma;
	uintptr_t at;
	int found = 0;

	error->start = start;
	error->end = end;
	if (error->cause != RF_CAUSE_NONE)
		return rc;
	error->cause = RF_CAUSE_VMA_LIMIT;
	if (rc == -EDQUOT || rc == -EAGAIN)
		return -ENOMEM;
	if (rc != -ENOMEM) {
		error->cause = RF_CAUSE_REFUSED;
		return rc;
	}
	if (rf_vma_open(&tracker->reader) < 0)
		return rc;
	for (at = start; at < end; at = vma.end) {
		found = rf_vma_find(&tracker->reader, at, &vma);
		if (found < 0 || vma.start > at)
			break;
	}
	rf_vma_close(&tracker->reader);
	if (at >= end || (found < 0 && found != -ENOENT))
		return rc;
	error->cause = RF_CAUSE_HOLE;
	error->start = at;
	error->end = found < 0 || vma.start > end ? end : vma.start;
	return rc;
}
