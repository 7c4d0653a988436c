/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A lock that knows its owner, for code that a signal handler may interrupt and
 * that must come out of fork() free.
 *
 * The word is 0, or the owner's thread pointer, plus 1 when somebody waits. The
 * owner is in the word itself: with a variable beside it, a signal between the
 * two stores makes a handler wait for its own thread. A thread pointer, unlike a
 * thread id, costs no system call and is the same in the child's one thread.
 */
#ifndef RF_LOCK_H
#define RF_LOCK_H

#include "sys.h"

#include <pthread.h>
#include <stdbool.h>

struct rf_lock {
	uint64_t word;
};

#define RF_LOCK_WAITERS 1ull

static inline uint64_t rf_lock_self(void)
{
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
	return (uint64_t)(uintptr_t)__builtin_thread_pointer();
#elif defined(__aarch64__)
	return (uint64_t)(uintptr_t)__builtin_thread_pointer();
#else
	return (uint64_t)(uintptr_t)pthread_self();
#endif
}

/* Does the calling thread hold it (seen from a signal handler or a fork handler)? */
static inline bool rf_lock_is_mine(const struct rf_lock *lock)
{
	uint64_t word = __atomic_load_n(&lock->word, __ATOMIC_RELAXED);

	return (word & ~RF_LOCK_WAITERS) == rf_lock_self();
}

static inline bool rf_lock_try(struct rf_lock *lock)
{
	uint64_t expected = 0;

	return __atomic_compare_exchange_n(&lock->word, &expected, rf_lock_self(), false,
					   __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}

/*
 * Take it, or wait for a while, a shorter one if a signal comes or futexes are refused. The
 * caller has seen that rf_lock_try() fails and that the lock is not its own. False: not
 * taken; see whether this is a child by now, and call again.
 * A raw clone()'s child that goes on from here would wait for a thread that it does not have.
 */
bool rf_lock_wait(struct rf_lock *lock);
void rf_lock_wake(struct rf_lock *lock);

static inline void rf_lock_drop(struct rf_lock *lock)
{
	RF_ASSERT(rf_lock_is_mine(lock));
	if (rf_unlikely(__atomic_exchange_n(&lock->word, 0, __ATOMIC_RELEASE) & RF_LOCK_WAITERS))
		rf_lock_wake(lock);
}

#endif
