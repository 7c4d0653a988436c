/* SPDX-License-Identifier: BSD-3-Clause */
/* What the files share that turn counts into advice. The engine's lock is held in all of it. */
#ifndef RF_ADVISE_INTERNAL_H
#define RF_ADVISE_INTERNAL_H

#include "advise.h"

/* Are the pages [@start, @end) that @slot takes its own to the last byte? */
static inline bool has_no_gaps(const struct rf_slot *slot, uintptr_t start, uintptr_t end)
{
	return slot->start <= start && end <= slot->end;
}

/* Touching ranges that one madvise() serves. */
struct rf_run {
	uintptr_t start, end;
	bool unmarked;		/* one of them bears no mark yet */
	bool marked;		/* one of them bears its mark: marking all takes no VMA more */
};

/* The next run in [@at, @end) of ranges that @belongs() picks; false: none. */
bool rf_advise_next_run(const struct rf_advisor *advisor, uintptr_t at, uintptr_t end,
			bool (*belongs)(const struct rf_range *), struct rf_run *run);

/* What of @run bears no mark is to be marked by the operation under way, which may fail. */
void rf_advise_set_fresh(struct rf_advisor *advisor, const struct rf_run *run);

/* It has failed. Marked or not: madvise() advises part of a range before it refuses. */
void rf_advise_unmark_fresh(struct rf_advisor *advisor, uintptr_t start, uintptr_t end);

static inline int rf_advise_call(struct rf_advisor *advisor, uintptr_t start, uintptr_t end,
				 int advice)
{
	advisor->madvise_calls++;
	return rf_sys_madvise(start, end - start, advice);
}

/*
 * Unmark all of [@start, @end), as far as the kernel lets it: what it refuses for
 * now gets RF_RANGE_RETRY, what is left over of a huge page keeps its mark.
 */
void rf_advise_unmark(struct rf_advisor *advisor, uintptr_t start, uintptr_t end);

/* The same of what @belongs() picks there. */
void rf_advise_unmark_runs(struct rf_advisor *advisor, uintptr_t start, uintptr_t end,
			   bool (*belongs)(const struct rf_range *));

/* [@start, @end) together with what touches it and waits to be unmarked. */
void rf_advise_widen(const struct rf_advisor *advisor, uintptr_t *start, uintptr_t *end);

/* Unmark a run that is wanted: the kernel copies it, until a fold marks it again. */
void rf_advise_leave(struct rf_advisor *advisor, const struct rf_run *run);

/* Learn the page sizes at the ends of @slot. The reader is open, here and below. */
int rf_advise_ask_ends(struct rf_advisor *advisor, struct rf_slot *slot);

/*
 * Count @slot, which takes the pages [@start, @end); once less; and what it takes now
 * beyond [@start, @end), which it took before. The ranges are the caller's to tidy.
 */
void rf_advise_count(struct rf_advisor *advisor, const struct rf_slot *slot, uintptr_t start,
		     uintptr_t end);
void rf_advise_uncount(struct rf_advisor *advisor, const struct rf_slot *slot, uintptr_t start,
		       uintptr_t end);
void rf_advise_extend(struct rf_advisor *advisor, const struct rf_slot *slot, uintptr_t start,
		      uintptr_t end, uint8_t flags);

/* Why the kernel said @rc to [@start, @end): *@error, and the errno that says it best. */
int rf_advise_explain(struct rf_advisor *advisor, uintptr_t start, uintptr_t end, int rc,
		      struct rf_error *error);

/*
 * Learn what is mapped in [@start, @end) and record it in the ranges. *@hole is
 * the first address nothing is mapped at, or 0. @will_split: marks will follow.
 */
int rf_advise_ask(struct rf_advisor *advisor, uintptr_t start, uintptr_t end, bool will_split,
		  uintptr_t *hole);

#endif
