/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What a child must make ordinary again. MADV_WIPEONFORK comes along into a child,
 * where the registration that asked for it is dead: left there, the child's own
 * children would find zeros where it put its data. So each marked range is noted
 * here before it is marked and until after it is unmarked, and the child goes
 * through the notes.
 *
 *	block  [start end] [start end] ... -> block -> ...
 *
 * A fork may come between any two stores of a writer, so a note's end is stored
 * last and cleared first, and blocks never move or go away.
 *
 * Writers hold the engine's lock.
 */
#ifndef RF_WIPED_H
#define RF_WIPED_H

#include "sys.h"

struct rf_wiped_note {
	/* With RF_WIPED_LATE; or, of a free note, the next free one's number + 1. */
	uintptr_t start;
	uintptr_t end;		/* 0: free */
};

/* It is registered no more, but the kernel may not have unmarked it yet. */
#define RF_WIPED_LATE ((uintptr_t)1)

#define RF_WIPED_BLOCK 4095

struct rf_wiped_block {
	struct rf_wiped_note notes[RF_WIPED_BLOCK];
	struct rf_wiped_block *next;
};

struct rf_wiped {
	struct rf_wiped_block *first;
	uint32_t capacity;
	uint32_t touched;	/* notes ever used */
	uint32_t free_note;	/* number + 1 */
	uint32_t late;		/* notes with RF_WIPED_LATE */
};

/* Note [@start, @end): *@number names the note. -ENOMEM. */
int rf_wiped_add(struct rf_wiped *wiped, uintptr_t start, uintptr_t end, uint32_t *number);
void rf_wiped_remove(struct rf_wiped *wiped, uint32_t number);

/* Remove it when rf_wiped_remove_late() says that all is unmarked: until then a child needs it. */
void rf_wiped_set_late(struct rf_wiped *wiped, uint32_t number);
void rf_wiped_remove_late(struct rf_wiped *wiped);

/* In a child: unmark all that is noted, and forget it. */
void rf_wiped_keep(struct rf_wiped *wiped);

#endif
