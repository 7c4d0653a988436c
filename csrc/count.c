/* SPDX-License-Identifier: BSD-3-Clause */
/* Which pages a registration takes, and which bytes of them are not its own. */
#include "advise_internal.h"

typedef void gap_change(struct rf_advisor *advisor, uintptr_t start, uintptr_t end);

static void add(struct rf_advisor *advisor, uintptr_t start, uintptr_t end)
{
	rf_ranges_add(&advisor->gaps, start, end, 0);
	rf_ranges_tidy(&advisor->gaps, start, end);
	advisor->gap_bytes += end - start;
}

static void sub(struct rf_advisor *advisor, uintptr_t start, uintptr_t end)
{
	rf_ranges_sub(&advisor->gaps, start, end);
	rf_ranges_tidy(&advisor->gaps, start, end);
	advisor->gap_bytes -= end - start;
}

/* The gaps of @slot on the pages [@start, @end). */
static void change_gaps(struct rf_advisor *advisor, const struct rf_slot *slot, uintptr_t start,
			uintptr_t end, gap_change *change)
{
	if (start < slot->start)
		change(advisor, start, slot->start);
	if (slot->end < end)
		change(advisor, slot->end, end);
}

void rf_advise_count(struct rf_advisor *advisor, const struct rf_slot *slot, uintptr_t start,
		     uintptr_t end)
{
	rf_ranges_add(&advisor->ranges, start, end, 0);
	change_gaps(advisor, slot, start, end, add);
}

void rf_advise_uncount(struct rf_advisor *advisor, const struct rf_slot *slot, uintptr_t start,
		       uintptr_t end)
{
	rf_ranges_sub(&advisor->ranges, start, end);
	change_gaps(advisor, slot, start, end, sub);
}

void rf_advise_extend(struct rf_advisor *advisor, const struct rf_slot *slot, uintptr_t start,
		      uintptr_t end, uint8_t flags)
{
	uintptr_t new_start, new_end;

	rf_advise_extent(advisor, slot, &new_start, &new_end);
	if (new_start >= new_end)
		return;
	if (start < end)
		change_gaps(advisor, slot, start, end, sub);
	else
		start = end = new_end;
	if (new_start < start)
		rf_ranges_add(&advisor->ranges, new_start, start, flags);
	if (end < new_end)
		rf_ranges_add(&advisor->ranges, end, new_end, flags);
	change_gaps(advisor, slot, new_start, new_end, add);
}
