/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Traffic on pinned memory, forks amid it, and a model that says what every byte is.
 *
 *	thread  [buffers: base pages, THP, hugetlb, a file's, shared, heap, stack]
 *	         register, release, pin, unpin, map anew, write by CPU and by device,
 *	         fork: the child looks for what it was promised, and writes over it
 *	   x n        the parent writes and has the device read, and the other way round
 *	mover   move_pages(), compaction, MADV_COLLAPSE, MADV_PAGEOUT on all of it
 *	main    progress, and an end where a thread hangs
 *
 * A byte is known by its buffer, its place, and how often its block was written, so a
 * byte that is stale, another's, or zero is told from the right one. A thread has
 * buffers of its own: what one of its children finds there is certain, whatever other
 * threads do meanwhile. The device is io_uring, whose fixed buffers take the same pins
 * as a memory region, or a pair of reliable connections.
 *
 * Whatever is not as it is to be ends the program: it says what and where.
 */
#ifndef SOAK_H
#define SOAK_H

#include "rdmafork.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define SOAK_PAGE 4096u
#define SOAK_HUGE (2u << 20)
#define SOAK_BLOCK 512u		/* written as one */
#define SOAK_REGISTRATIONS 8	/* of one buffer, at once */
#define SOAK_BUFFERS 20		/* of one thread, at most */
#define SOAK_BOUNCE (1u << 20)	/* the most that a device moves at once */

#if defined(__SANITIZE_THREAD__)
#define SOAK_TSAN 1
#else
#define SOAK_TSAN 0
#endif

/* Faults made on purpose, to see them found. */
enum soak_fault {
	SOAK_SOUND,
	SOAK_UNSEEN,	/* no rf_fork_init(): children find bytes they should not */
	SOAK_LOST,	/* the same, and no child looks: the device's writes may be lost */
	SOAK_MOVED,	/* a pinned page is replaced by its copy, as copy-on-write would */
};

struct soak_settings {
	double seconds;
	uint64_t forks;	/* at least */
	uint64_t seed;
	unsigned int threads;
	enum rf_mode mode;
	const char *device;	/* NULL: io_uring */
	unsigned int huge_pages;	/* of the pool, one each for the first threads */
	enum soak_fault fault;
	bool whole;		/* pages leave whole: copying is not trusted, or not wanted */
	bool trusted;
};

extern struct soak_settings soak;

static inline bool soak_is_protected(void)
{
	return soak.fault != SOAK_UNSEEN && soak.fault != SOAK_LOST;
}

/* Counts of the work: each thread its own, and children in memory they share. */
struct soak_counts {
	uint64_t operations;	/* of any kind: does it go on? */
	uint64_t registrations, releases, refusals, remaps, holes;
	uint64_t pins, device_reads, device_writes;
	uint64_t bytes_compared, bytes_by_device;
	uint64_t forks, clones, forks_refused;
	uint64_t by_exit_now, by_exit, by_signal, killed;
	uint64_t pages_looked_at, pages_absent, pages_wiped, pages_written_over;
};

/* Another process's counts too: only ever added to. */
extern struct soak_counts *soak_children;

static inline void soak_count(uint64_t *counter, uint64_t n)
{
	__atomic_add_fetch(counter, n, __ATOMIC_RELAXED);
}

/* Ends the program, a child with 99, and says what and why. */
__attribute__((noreturn, format(printf, 1, 2))) void soak_failed(const char *format, ...);
/* The same of a byte. */
__attribute__((noreturn)) void soak_wrong(const char *who, const char *address,
					  unsigned int expected, unsigned int found);

#define SOAK_CHECK(x, ...)                                                              \
	do {                                                                            \
		if (!(x))                                                               \
			soak_failed("%s:%d: %s: %s", __FILE__, __LINE__, #x, "" __VA_ARGS__); \
	} while (0)

static inline uint64_t soak_random(uint64_t *state)
{
	*state ^= *state >> 12;
	*state ^= *state << 25;
	*state ^= *state >> 27;
	return *state * 0x2545f4914f6cdd1dull;
}

static inline size_t soak_below(uint64_t *state, size_t limit)
{
	return (size_t)((soak_random(state) >> 16) % limit);
}

/* ---- Devices: device.c ---- */

struct soak_device;	/* of one thread */
struct soak_pin;

struct soak_device *soak_device_open(void);
void soak_device_close(struct soak_device *device);

/* Transfers go from here, and come here: SOAK_BOUNCE bytes that children share. */
char *soak_device_bounce(struct soak_device *device);

/*
 * Pin [@start, @end). NULL: there are as many as there can be. @own: it is registered with
 * the engine already; else libibverbs registers it, through the symbols the engine has.
 */
struct soak_pin *soak_device_pin(struct soak_device *device, char *start, char *end, bool own);
void soak_device_unpin(struct soak_device *device, struct soak_pin *pin);

/* Move @nbytes at @at of pinned memory to the bounce buffer; or from there. */
void soak_device_read(struct soak_device *device, struct soak_pin *pin, char *at, size_t nbytes);
void soak_device_write(struct soak_device *device, struct soak_pin *pin, char *at, size_t nbytes);

/* ---- Buffers: buffer.c ---- */

enum soak_kind {
	SOAK_BASE,
	SOAK_HOLED,	/* the same, unmapped for a while at times */
	SOAK_THP,
	SOAK_HUGETLB,
	SOAK_FILE,	/* privately mapped */
	SOAK_SHARED,
	SOAK_HEAP,
	SOAK_STACK,
	SOAK_KINDS,
};

struct soak_registration {
	struct rf_handle handle;
	char *start, *end;
	enum rf_policy policy;
	bool held;
	bool stale;		/* of earlier mappings here */
	bool by_verbs;		/* no handle: libibverbs has it */
	struct soak_pin *pin;	/* or NULL */
};

struct soak_buffer {
	enum soak_kind kind;
	uint32_t id;
	char *start;		/* NULL: not mapped now */
	char *place;		/* where it is mapped, or NULL */
	size_t nbytes, room;
	uint32_t *generations;	/* of each block of the room */
	unsigned int count;
	struct soak_registration registrations[SOAK_REGISTRATIONS];
};

extern const char *const soak_kind_names[SOAK_KINDS];

/* False: it cannot be mapped there now. Its bytes are those of a new generation. */
bool soak_buffer_map(struct soak_buffer *buffer, size_t nbytes);
void soak_buffer_unmap(struct soak_buffer *buffer);

/* The bytes that [@at, @at + @nbytes) is to have, to @to. */
void soak_buffer_expected(const struct soak_buffer *buffer, size_t at, size_t nbytes, char *to);
/* The blocks that [@at, @at + @nbytes) touches are written anew by the CPU. */
void soak_buffer_write(struct soak_buffer *buffer, size_t at, size_t nbytes);
/* The same, to be written by a child or the device. */
void soak_buffer_renew(struct soak_buffer *buffer, size_t at, size_t nbytes);
/* Are these the bytes that [@at, @at + @nbytes) is to have? Ends the program if not. */
void soak_buffer_compare(const struct soak_buffer *buffer, size_t at, size_t nbytes,
			 const char *found, const char *who);

/* ---- Threads: worker.c ---- */

struct soak_worker {
	unsigned int number;
	uint64_t random;
	struct soak_device *device;
	unsigned int buffers;
	struct soak_buffer buffer[SOAK_BUFFERS];
	char *zone;		/* private memory, never unmapped; a huge page first */
	size_t zone_nbytes;
	uint32_t *gate;		/* shared with a child: see child.c */
	struct soak_counts counts;
	bool ended;
};

extern struct soak_worker *soak_workers;
extern bool soak_enough;	/* atomic */

/* Before any thread runs: its zone is for the mover, and others' children, too. */
void soak_worker_prepare(struct soak_worker *worker);
void *soak_worker_run(void *worker);

/* ---- Forks: child.c ---- */

/* Fork once, in a way chosen at random, and see that nothing of it reaches the parent. */
void soak_fork(struct soak_worker *worker);
/* All that the device reads of @registration's pinned pages, and all it writes there. */
void soak_pin_check(struct soak_worker *worker, struct soak_buffer *buffer,
		    struct soak_registration *registration);

/* ---- Migration: mover.c ---- */

struct soak_moves {
	uint64_t asked, moved, busy, there;	/* pages, by move_pages()'s status of them */
	uint64_t compactions, collapses, collapsed, page_outs;
	uint64_t migrated;	/* by the whole machine meanwhile, says /proc/vmstat */
	unsigned int nodes;
};

extern struct soak_moves soak_moves;

void *soak_mover_run(void *unused);

#endif
