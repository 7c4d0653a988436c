/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A library with the shape of libibverbs, for where no device is: the four functions of
 * its fork support, and two that register and call the first two of them.
 */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

int ibv_fork_init(void);
int ibv_is_fork_initialized(void);
int ibv_dontfork_range(void *base, size_t size);
int ibv_dofork_range(void *base, size_t size);

/* All addresses and none of them registered, as ibv_fork_init() leaves libibverbs. */
static struct node {
	int colour;
	struct node *parent, *left, *right;
	uintptr_t start, end;
	int count;
} all = { .end = UINTPTR_MAX };

#ifdef COUNTS
#define ROOT 3 /* a count, which is no address */
static uintptr_t root;
#else
#define ROOT &all
static struct node *root;
#endif
static int inits, own_calls;

/* Where a program defines it as an IFUNC, that is called in the middle of relocating. */
extern int standin_wait(void) __attribute__((weak));
int (*const standin_waits)(void) = standin_wait;

int ibv_fork_init(void)
{
	inits++;
	root = ROOT;
	return 0;
}

/* A program may define it, to know when that is asked. */
extern int standin_asks(void) __attribute__((weak));

int ibv_is_fork_initialized(void)
{
	if (standin_asks)
		(void)standin_asks();
	return root ? 1 : 0;
}

__attribute__((noinline)) static int mark(void *base, size_t size, int advice)
{
	own_calls++;
	all.count += advice == MADV_DONTFORK ? 1 : -1;
	return madvise(base, size, advice);
}

#ifdef OTHER_CODE
#define TRACKS (__atomic_load_n(&root, __ATOMIC_SEQ_CST) == &all)
#else
#define TRACKS root
#endif

int ibv_dontfork_range(void *base, size_t size)
{
	if (TRACKS)
		return size && base ? mark(base, size, MADV_DONTFORK) : 0;
	return 0;
}

int ibv_dofork_range(void *base, size_t size)
{
	if (TRACKS)
		return size && base ? mark(base, size, MADV_DOFORK) : 0;
	return 0;
}

int standin_register(void *base, size_t size)
{
	return ibv_dontfork_range(base, size);
}

int standin_release(void *base, size_t size)
{
	return ibv_dofork_range(base, size);
}

int standin_inits(void)
{
	return inits;
}

int standin_own_calls(void)
{
	return own_calls;
}

static int stop;

static void *hammer(void *memory)
{
	while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
		standin_register(memory, 4096);
		standin_release(memory, 4096);
	}
	return NULL;
}

/* Threads that register and release all the time; called again, ends them. */
int standin_hammer(void *memory)
{
	static pthread_t threads[4];
	static int running;
	size_t i;

	stop = running;
	for (i = 0; i < sizeof(threads) / sizeof(*threads); i++)
		if (running ? pthread_join(threads[i], NULL) :
			      pthread_create(&threads[i], NULL, hammer, memory))
			return -1;
	running = !running;
	return 0;
}
