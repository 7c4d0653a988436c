/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Arrays that grow, from mmap() and never from malloc(): the engine grows them
 * inside fork handlers, where an allocator's own handler may hold its lock, and
 * inside other libraries' registration calls. Items move when an array grows, so
 * they are named by index. Pages not yet used take no memory.
 */
#ifndef RF_MEMORY_H
#define RF_MEMORY_H

#include "sys.h"

struct rf_memory {
	void *items;
	size_t mapped;		/* bytes */
	uint32_t capacity;	/* items */
	uint32_t item_size;
};

/*
 * Make room for @count items, new ones zeroed. 0 or -ENOMEM, and then nothing
 * has changed.
 */
int rf_memory_grow(struct rf_memory *memory, uint32_t count);
/* Forget it without a look: its fields may not fit together. */
void rf_memory_abandon(struct rf_memory *memory);
void rf_memory_free(struct rf_memory *memory);

#endif
