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

/* Unmark what is noted in @block; are there any left that the kernel refused for now? */
static bool unmark(struct rf_wiped_block *block)
{
	struct rf_wiped_note *note = block->notes;
	bool left = false;
	uintptr_t start;
	int rc;

	for (; note < block->notes + RF_WIPED_BLOCK; note++) {
		if (!note->end)
			continue;
		start = note->start & ~RF_WIPED_LATE;
		rc = rf_sys_madvise(start, note->end - start, MADV_KEEPONFORK);
		if (rc == -EAGAIN)
			left = true;
		else
			note->end = 0;
	}
	return left;
}

void rf_wiped_keep(struct rf_wiped *wiped)
{
	struct rf_wiped_block *block = wiped->first;

	for (; block; block = block->next)
		if (unmark(block))
			/* At the limit of VMAs, which the others may have made room under. */
			(void)unmark(block);
	wiped->touched = 0;
	wiped->free_note = 0;
	wiped->late = 0;
	/* A thread of the parent's may have mapped the last one, and not counted it yet. */
	wiped->capacity = 0;
	for (block = wiped->first; block; block = block->next)
		wiped->capacity += RF_WIPED_BLOCK;
}
