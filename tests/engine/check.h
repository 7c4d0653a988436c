/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Helpers of the engine's tests. A program is a list of scenarios. Each runs in a
 * process of its own, as a process has one engine, under a watchdog: a deadlock
 * is a failure too.
 *
 *	SEED=n		repeats a random run
 *	SCALE=n		multiplies the amount of work, with a part of 1 too
 *	RDMAFORK_TEST_SLOWNESS=n	how much slower than usual this machine is
 *	program NAME	runs the scenarios with NAME in their name
 */
#ifndef CHECK_H
#define CHECK_H

#include "inject.h"
#include "rdmafork.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(__SANITIZE_THREAD__)
#define CHECK_TSAN 1
#define CHECK_SLOWNESS 20
#elif defined(__SANITIZE_ADDRESS__)
#define CHECK_TSAN 0
#define CHECK_SLOWNESS 5
#else
#define CHECK_TSAN 0
#define CHECK_SLOWNESS 1
#endif

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

/* CHECK(x) or CHECK(x, "format", ...): ends the process if x is false. */
#define CHECK(x, ...)                                                          \
	do {                                                                   \
		if (!(x))                                                      \
			check_failed(__FILE__, __LINE__, #x, " " __VA_ARGS__); \
	} while (0)

__attribute__((noreturn, format(printf, 4, 5))) void
check_failed(const char *file, int line, const char *what, const char *format, ...);

/* End this scenario as skipped. */
__attribute__((noreturn, format(printf, 1, 2))) void check_skip(const char *format, ...);

struct check_scenario {
	const char *name;
	void (*run)(void);
	bool huge;		/* with a pool of huge pages */
};

#define SCENARIO(function)	{ #function, function, false }
#define SCENARIO_HUGE(function) { #function, function, true }

/* Runs them all; the exit status for main(). */
int check_run(const struct check_scenario *scenarios, size_t count, int argc, char **argv);

/* The errors that callers tell apart, and some that sandboxes and limits give. */
#define CHECK_ERRORS { ENOMEM, EAGAIN, EINVAL, EPERM, EACCES, ENOSYS, EMFILE, EIO }

/* The kernel refuses that system call from here on, to this thread and all it starts. */
void check_refuse(unsigned int call, int error);
/* The same of madvise() with that advice alone. */
void check_refuse_advice(int advice, int error);

/* How much slower than usual this build is, on this machine. */
unsigned int check_slowness(void);
/* $SCALE, or 1. */
double check_share(void);
/* @amount for that and $SCALE, at least 1. */
unsigned long check_scale(unsigned long amount);
/* Wait until another thread has set @flag with the next. */
void check_await(const bool *flag);
void check_tell(bool *flag);
/* Ends this process where it hangs. */
void check_alarm(unsigned int seconds);

/* Random numbers, from $SEED or one of their own, which is printed. */
void check_seed(void);
uint64_t check_random(void);
/* A choice, from 0 to @limit - 1: at random, or the next of an input. */
size_t check_below(size_t limit);

/*
 * From now on choices are those of an input, 0 where it has ended, and a failure ends by
 * abort(), for a fuzzer to see.
 */
void check_play(const void *input, size_t nbytes);
bool check_played(void);

/* ---- Memory ---- */

extern size_t check_page;

/* Private or shared memory that merges with no other mapping. */
char *check_map(size_t pages);
char *check_map_shared(size_t pages);
void check_unmap(void *start, size_t pages);
/* In the place of what is there; @sharing: MAP_PRIVATE or MAP_SHARED. */
void check_map_over(void *start, size_t pages, int sharing);

/* Huge pages of 2 MiB, or a skip with the reason; in a scenario with a pool of them. */
#define CHECK_HUGE (2u << 20)
char *check_map_huge(size_t pages, int sharing);
/* The same where the kernel never unmarks them, as Linux 7.3. */
char *check_map_huge_any(size_t pages, int sharing);
/* Does it keep marks on these? Then to madvise() the vDSO is like one. */
bool check_marks_stay(void);

#define CHECK_MAPPED	1u
#define CHECK_DC	2u	/* VmFlags: MADV_DONTFORK */
#define CHECK_SHARED	4u
#define CHECK_HUGETLB	8u
#define CHECK_WF	16u	/* VmFlags: MADV_WIPEONFORK */
#define CHECK_HG	32u	/* VmFlags: MADV_HUGEPAGE */
#define CHECK_RD	64u	/* VmFlags: its protection */
#define CHECK_WR	128u
#define CHECK_EX	256u

/* Reads smaps, for the next two; up to the first mapping from @end on. */
void check_read_smaps(void);
void check_read_smaps_to(uintptr_t end);
unsigned int check_flags_read(const void *address);
size_t check_vmas_read(void);

/* The same, read anew. */
unsigned int check_flags(const void *address);
size_t check_vmas(void);
/* What mprotect() gave it, or -1 where nothing is mapped. */
int check_protection(const void *address);
/* Pages of [@start, @start + @pages) that are marked. */
size_t check_marked(const void *start, size_t pages);

/* Take all VMAs the kernel grants but @spare; give them back. */
void check_use_up_vmas(size_t spare);
void check_give_back_vmas(void);

/* ---- The engine ---- */

void check_start(enum rf_mode mode);
/* From now on the kernel's copying is not trusted, as before 5.19: modes are eager. */
void check_distrust_copying(void);
/* Starts so: whole pages are marked, and parts of them copied for the child. */
void check_start_untrusted(void);
/* Nothing is registered any more: the engine is as it was before check_start(). */
void check_stop(void);
/* Skips the scenario where the kernel's copying is not trusted: lazy is refused there. */
void check_needs_lazy(void);
/* Skips it where the kernel refuses them to all: proc_mem.force_override=, as Debian's 7.3. */
void check_needs_inaccessible_bytes(void);
/* Lazy where it may be, else eager. */
enum rf_mode check_best_mode(void);
struct rf_handle check_register(const void *start, size_t nbytes, unsigned int flags);
/* Held, with that @policy. */
struct rf_handle check_register_as(const void *start, size_t nbytes, enum rf_policy policy);
void check_release(struct rf_handle handle);

/* A thread's: register and release until the bool at @stop is true. */
void *check_register_until(void *stop);

/* The structures are sound. */
void check_sound(void);
/* And there is nothing in them. */
void check_empty(void);

/* fork() a child that does nothing. */
void check_fork(void);
/* A child that no fork handler sees. */
pid_t check_clone(void);
/* Wait for @child: its exit status, or minus the signal that ended it. */
int check_wait(pid_t child);
/* Does a child made by fork() find @address? */
bool check_child_reads(const void *address);
/* The byte that it finds there, or -1 where it finds none. */
int check_child_finds(const void *address);
/* Can this process read @address? It asks the kernel, so that nothing faults. */
bool check_is_readable(const void *address);
/* A process just made: it starts from nothing and is protected against its own children. */
void check_works(void);
/* A child can do nothing with handles of its parent. */
void check_inherited(struct rf_handle handle);

#endif
