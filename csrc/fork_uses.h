/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Memory that a child uses before it can be given anything back: glibc's fork() goes on in
 * the child on the stack of the thread that called it, with its thread control block,
 * resets the lock of every malloc() arena, and only then calls handlers. A page of
 * these that the child does not have kills it inside fork().
 *
 *	main thread     [ ... frame | stack ... ]     [TLS | control block]
 *	other threads   [ ... frame | stack ... | TLS | control block]
 *	arenas          [heap_info | malloc_state | blocks ...]   at 64 MiB
 *
 * The engine's own state is read by the child handler before it gives anything back. Where the
 * engine is linked into the program, the program's data may share pages with it.
 *
 * Not known here: FILE objects, other threads' stacks, the name service's state; of malloc's
 * memory the second and later heaps of an arena. Any other partial page of that is given back
 * in time, but as it was when the fork was prepared: a thread that calls malloc() until the
 * child is made leaves lists there that do not fit the arena's head.
 */
#ifndef RF_FORK_USES_H
#define RF_FORK_USES_H

#include "sys.h"

/* Names the data that fork() itself uses on the page at @page, and the consequence, or NULL. */
const char *rf_fork_uses(uintptr_t page, size_t page_size);

/* The same if @address is malloc()'s. It costs a small copy now and then. */
const char *rf_malloc_uses(uintptr_t address);

#endif
