/* SPDX-License-Identifier: BSD-3-Clause */
/* Why the kernel refused an advice: what is mapped there, once it has. */
#include "advise_internal.h"

#include <errno.h>

/* Only private anonymous memory in base pages can be wiped: name what else is there. */
static void name_unwipeable(struct rf_advisor *advisor, struct rf_error *error)
{
	struct rf_vma vma;
	uintptr_t at;

	if (rf_vma_open(&advisor->reader) < 0)
		return;
	for (at = error->start; at < error->end; at = vma.end) {
		/* Unmapped meanwhile, by those who say that they hold it: nothing to name. */
		if (rf_vma_find(&advisor->reader, at, &vma) < 0 || vma.start >= error->end)
			break;
		if (vma.anonymous && !vma.shared)
			continue;
		error->start = vma.start > at ? vma.start : at;
		error->end = vma.end < error->end ? vma.end : error->end;
		break;
	}
	rf_vma_close(&advisor->reader);
}

int rf_advise_explain(struct rf_advisor *advisor, uintptr_t start, uintptr_t end, int rc,
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
	if (rc == -EINVAL && advisor->policy == RF_WIPE) {
		error->cause = RF_CAUSE_WIPE;
		name_unwipeable(advisor, error);
		return rc;
	}
	if (rc != -ENOMEM) {
		error->cause = RF_CAUSE_REFUSED;
		return rc;
	}
	if (rf_vma_open(&advisor->reader) < 0)
		return rc;
	for (at = start; at < end; at = vma.end) {
		found = rf_vma_find(&advisor->reader, at, &vma);
		if (found < 0 || vma.start > at)
			break;
	}
	rf_vma_close(&advisor->reader);
	if (at >= end || (found < 0 && found != -ENOENT))
		return rc;
	error->cause = RF_CAUSE_HOLE;
	error->start = at;
	error->end = found < 0 || vma.start > end ? end : vma.start;
	return rc;
}
