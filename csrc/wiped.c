/* SPDX-License-Identifier: BSD-3-Clause */
#include "wiped.h"

#include <errno.h>
#include <stdbool.h>
#include <sys/mman.h>

static struct rf_wiped_note *note_at(const struct rf_wiped *wiped, uint32_t number)
{
	struct rf_wiped_block *block = wiped->first;

	for (; number >= RF_WIPED_BLOCK; number -= RF_WIPED_BLOCK)
		block = block->next;
	return &block->notes[number];
}

static int add_block(struct rf_wiped *wiped)
{
	struct rf_wiped_block **last = &wiped->first;
	void *memory;

	if (rf_sys_map(sizeof(struct rf_wiped_block), &memory) < 0)
		return -ENOMEM;
	while (*last)
		last = &(*last)->next;
	__atomic_store_n(last, memory, __ATOMIC_RELEASE);
	wiped->capacity += RF_WIPED_BLOCK;
	return 0;
}

int rf_wiped_add(struct rf_wiped *wiped, uintptr_t start, uintptr_t end, uint32_t *number)
{
	struct rf_wiped_note *note;

	if (wiped->free_note) {
		*number = wiped->free_note - 1;
		note = note_at(wiped, *number);
		wiped->free_note = (uint32_t)note->start;
	} else {
		if (wiped->touched == wiped->capacity && add_block(wiped) < 0)
			return -ENOMEM;
		*number = wiped->touched++;
		note = note_at(wiped, *number);
	}
	note->start = start;
	__atomic_store_n(&note->end, end, __ATOMIC_RELEASE);
	return 0;
}

void rf_wiped_remove(struct rf_wiped *wiped, uint32_t number)
{
	struct rf_wiped_note *note = note_at(wiped, number);

	__atomic_store_n(&note->end, 0, __ATOMIC_RELEASE);
	__atomic_signal_fence(__ATOMIC_SEQ_CST);
	note->start = wiped->free_note;
	wiped->free_note = number + 1;
}

void rf_wiped_set_late(struct rf_wiped *wiped, uint32_t number)
{
	note_at(wiped, number)->start |= RF_WIPED_LATE;
	wiped->late++;
}

void rf_wiped_remove_late(struct rf_wiped *wiped)
{
	const struct rf_wiped_note *note;
	uint32_t number;

	for (number = 0; wiped->late && number < wiped->touched; number++) {
		note = note_at(wiped, number);
		if (!note->end || !(note->start & RF_WIPED_LATE))
			continue;
		rf_wiped_remove(wiped, number);
		wiped->late--;
	}
}

static uintptr_t start_of(const struct rf_wiped_note *note)
{
	return note->start & ~RF_WIPED_LATE;
}

/*
 * The first note after those from @note on that one call serves: free ones, and those of one
 * stretch, [@start, @end).
 */
static struct rf_wiped_note *next_stretch(struct rf_wiped_note *note,
					  const struct rf_wiped_note *last, uintptr_t *start,
					  uintptr_t *end)
{
	*start = start_of(note);
	*end = note->end;
	while (++note < last) {
		if (!note->end)
			continue;
		if (note->end < *start || start_of(note) > *end)
			break;
		*start = start_of(note) < *start ? start_of(note) : *start;
		*end = note->end > *end ? note->end : *end;
	}
	return note;
}

/* Unmark what is noted in @block; is there any left that the kernel refused for now? */
static bool unmark(struct rf_wiped_block *block, bool together)
{
	struct rf_wiped_note *note = block->notes, *next, *last = note + RF_WIPED_BLOCK;
	bool left = false;
	uintptr_t start, end;
	int rc;

	for (; note < last; note = next) {
		next = note + 1;
		if (!note->end)
			continue;
		next = next_stretch(note, together ? last : next, &start, &end);
		rc = rf_sys_madvise(start, end - start, MADV_KEEPONFORK);
		/* Of several the first refusal may have kept the others from being asked. */
		if (rc == -EAGAIN || (rc < 0 && together))
			left = true;
		else
			for (; note < next; note++)
				note->end = 0;
	}
	return left;
}

void rf_wiped_keep(struct rf_wiped *wiped)
{
	struct rf_wiped_block *block = wiped->first;

	/*
	 * Together there are fewer calls, and at the limit of VMAs they need no split where
	 * they touch. Then one by one, twice: the others may have made room.
	 */
	for (; block; block = block->next)
		if (unmark(block, true) && unmark(block, false))
			(void)unmark(block, false);
	wiped->touched = 0;
	wiped->free_note = 0;
	wiped->late = 0;
	/* A thread of the parent's may have mapped the last one, and not counted it yet. */
	wiped->capacity = 0;
	for (block = wiped->first; block; block = block->next)
		wiped->capacity += RF_WIPED_BLOCK;
}
