/* SPDX-License-Identifier: BSD-3-Clause */
#include "fork_uses.h"
#include "lock.h"

#include <stdbool.h>
#include <sys/auxv.h>

/* Of glibc's struct pthread, rounded up: 2304 bytes in 2.36, its TLS below it. */
#define CONTROL_BLOCK 4096u

/* The largest heap of an arena, and where all of them are aligned; its headers are smaller. */
#define ARENA_ALIGNMENT ((uintptr_t)64 << 20)
#define ARENA_HEADER 256u

static bool is_own_stack(uintptr_t page, size_t page_size)
{
	uintptr_t frame = (uintptr_t)__builtin_frame_address(0), end = rf_lock_self();

	/* The control block of a thread ends its stack; the program's name the main thread's. */
	end = end > frame ? end + CONTROL_BLOCK : getauxval(AT_EXECFN);
	return page + page_size > frame && page < end;
}

static bool is_control_block(uintptr_t page, size_t page_size)
{
	uintptr_t block = rf_lock_self();

	return page + page_size > block - page_size && page < block + CONTROL_BLOCK;
}

/* Its first word points right behind itself. Looked at without a fault. */
static bool is_arena(uintptr_t page)
{
	uintptr_t arena = 0;
	struct iovec to = { &arena, sizeof(arena) };
	struct iovec from = { (void *)page, sizeof(arena) };

	if (page & (ARENA_ALIGNMENT - 1))
		return false;
	return rf_sys_copy(&to, &from, 1) == sizeof(arena) && arena > page &&
	       arena < page + ARENA_HEADER;
}

const char *rf_fork_uses(uintptr_t page, size_t page_size)
{
	if (is_own_stack(page, page_size))
		return "this thread's stack, on which fork() goes on";
	if (is_control_block(page, page_size))
		return "this thread's control block, which fork() uses";
	return is_arena(page) ? "the head of a malloc() arena, which fork() uses" : NULL;
}
