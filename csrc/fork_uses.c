/* SPDX-License-Identifier: BSD-3-Clause */
#define _DEFAULT_SOURCE /* sbrk() */
#include "fork_uses.h"
#include "engine.h"

#include <errno.h>
#include <link.h>
#include <stdbool.h>
#include <sys/auxv.h>
#include <unistd.h>

/* glibc's struct pthread, rounded up: 2304 bytes in 2.36. Its TLS lies below it. */
#define CONTROL_BLOCK 4096u

/* The largest heap of an arena, and where all of them are aligned; its headers are smaller. */
#define ARENA_ALIGNMENT ((uintptr_t)64 << 20)
#define ARENA_HEADER 256u
#define ANSWERS 64

#define LACKED "; children do not inherit it and may crash; align the buffer to whole pages"

/* Ours, of which fork() makes use in a child. */
static __thread char local __attribute__((tls_model("initial-exec")));

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

/*
 * The program's TLS is next to the control block, then that of libraries. fork() uses
 * libc's and ours; the TLS between them is in the same mapping.
 */
static bool is_own_tls(uintptr_t page, size_t page_size)
{
	const uintptr_t block = rf_lock_self(), libc = (uintptr_t)&errno, ours = (uintptr_t)&local;
	uintptr_t first = block < libc ? block : libc, last = block > libc ? block : libc;

	first = first < ours ? first : ours;
	last = last > ours ? last : ours;
	return page + page_size > first && page <= last;
}

/* In a program that has the engine linked into it, other data may share pages with it. */
static bool is_engine(uintptr_t page, size_t page_size)
{
	return page + page_size > (uintptr_t)&rf_engine && page < (uintptr_t)(&rf_engine + 1);
}

/* How a heap of an arena begins, glibc's struct heap_info. */
struct heap {
	uintptr_t arena, before;
	size_t nbytes, writable;
};

/* The first heap of an arena: its first word points right behind its head. No fault. */
static bool begins_arena(uintptr_t head, struct heap *heap)
{
	struct iovec to = { heap, sizeof(*heap) }, from = { (void *)head, sizeof(*heap) };

	return rf_sys_copy(&to, &from, 1) == sizeof(*heap) && heap->arena > head &&
	       heap->arena < head + ARENA_HEADER;
}

static bool is_head_of_arena(uintptr_t page)
{
	struct heap heap;

	return !(page & (ARENA_ALIGNMENT - 1)) && begins_arena(page, &heap);
}

/*
 * The kernel is asked once about each stretch of address space, as far as ANSWERS go. An arena
 * that malloc() puts where there was none is not noticed.
 */
static bool is_in_arena(uintptr_t address)
{
	static uintptr_t without[ANSWERS];
	const uintptr_t head = address & ~(ARENA_ALIGNMENT - 1);
	uintptr_t *known = &without[head / ARENA_ALIGNMENT % ANSWERS];
	struct heap heap;

	if (__atomic_load_n(known, __ATOMIC_RELAXED) == head)
		return false;
	if (begins_arena(head, &heap))
		return address - head < heap.nbytes;
	__atomic_store_n(known, head, __ATOMIC_RELAXED);
	return false;
}

/* The end of the program's data: the main heap begins there or somewhat later. */
static uintptr_t end_of_program(void)
{
	static uintptr_t known;
	const ElfW(Phdr) *header = (const void *)getauxval(AT_PHDR);
	const ElfW(Phdr) *last = header + getauxval(AT_PHNUM);
	uintptr_t end = __atomic_load_n(&known, __ATOMIC_RELAXED), base = 0, stop;

	if (end || !header)
		return end ? end : UINTPTR_MAX;
	for (; header < last; header++) {
		stop = base + header->p_vaddr + header->p_memsz;
		if (header->p_type == PT_PHDR)
			base = getauxval(AT_PHDR) - header->p_vaddr;
		else if (header->p_type == PT_LOAD && stop > end)
			end = stop;
	}
	__atomic_store_n(&known, end, __ATOMIC_RELAXED);
	return end;
}

static bool is_in_main_heap(uintptr_t address)
{
	return address >= end_of_program() && address < (uintptr_t)sbrk(0);
}

const char *rf_fork_uses(uintptr_t page, size_t page_size)
{
	if (is_own_stack(page, page_size))
		return "this thread's stack, which fork() uses" LACKED;
	if (is_control_block(page, page_size))
		return "this thread's control block, which fork() uses" LACKED;
	if (is_own_tls(page, page_size))
		return "this thread's TLS, which fork() uses" LACKED;
	if (is_engine(page, page_size))
		return "rdmafork's own data, which fork() uses" LACKED;
	if (is_head_of_arena(page))
		return "the head of a malloc() arena, which fork() uses" LACKED;
	return NULL;
}

const char *rf_malloc_uses(uintptr_t address)
{
	if (!is_in_main_heap(address) && !is_in_arena(address))
		return NULL;
	return "malloc()'s memory: if the program has threads, a child may die in fork() or "
	       "malloc(); align the buffer to whole pages";
}
