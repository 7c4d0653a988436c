/* SPDX-License-Identifier: BSD-3-Clause */
#include "memory.h"

#include <errno.h>
#include <sys/mman.h>

/*
 * Doubled from here, so that the mapped size is a multiple of every page size. No more, as small
 * mappings fit beside each other, and the kernel then makes one of them: each costs a fork time.
 */
#define FIRST_BYTES(item_size) ((item_size) > 64 ? 128u * 1024 : 64u * 1024)
/* From this size on they ask for huge pages, whose page tables a fork need not copy. */
#define HUGE ((size_t)4 << 20)

int rf_memory_grow(struct rf_memory *memory, uint32_t count)
{
	size_t needed = (size_t)count * memory->item_size;
	size_t mapped = memory->mapped ? memory->mapped : FIRST_BYTES(memory->item_size);
	const uint32_t before = memory->capacity;
	void *items;
	int rc;

	if (count <= memory->capacity)
		return 0;
	while (mapped < needed)
		mapped *= 2;
	/* A signal handler that interrupts this sees that the items may be nowhere. */
	memory->capacity = 0;
	__atomic_signal_fence(__ATOMIC_SEQ_CST);
	if (memory->items)
		rc = rf_sys_remap(memory->items, memory->mapped, mapped, &items);
	else
		rc = rf_sys_map(mapped, &items);
	if (rc < 0) {
		memory->capacity = before;
		return -ENOMEM;
	}
	memory->items = items;
	memory->mapped = mapped;
	if (mapped >= HUGE)
		(void)rf_sys_madvise((uintptr_t)items, mapped, MADV_HUGEPAGE);
	__atomic_signal_fence(__ATOMIC_SEQ_CST);
	memory->capacity = (uint32_t)(mapped / memory->item_size);
	return 0;
}

void rf_memory_abandon(struct rf_memory *memory)
{
	memory->items = NULL;
	memory->mapped = 0;
	memory->capacity = 0;
}

void rf_memory_free(struct rf_memory *memory)
{
	if (memory->items)
		rf_sys_unmap(memory->items, memory->mapped);
	rf_memory_abandon(memory);
}
