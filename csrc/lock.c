/* SPDX-License-Identifier: BSD-3-Clause */
#include "lock.h"

#include <errno.h>

#define SPINS 64
#define WHILE_NS 100000000
#define REFUSED_NS 1000000

/* The futex is the half of the word that holds the waiters' bit. */
static const uint32_t *futex_of(const struct rf_lock *lock)
{
	const uint32_t *halves = (const uint32_t *)&lock->word;

	return halves + (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__);
}

bool rf_lock_wait(struct rf_lock *lock)
{
	uint64_t word;
	int rc, spins;

	for (spins = 0; spins < SPINS; spins++) {
		if (!__atomic_load_n(&lock->word, __ATOMIC_RELAXED) && rf_lock_try(lock))
			return true;
		__asm__ volatile("" ::: "memory");
	}
	for (;;) {
		word = __atomic_load_n(&lock->word, __ATOMIC_RELAXED);
		if (!word) {
			/* Others may sleep still, so it is taken with the waiters' bit. */
			if (__atomic_compare_exchange_n(&lock->word, &word,
							rf_lock_self() | RF_LOCK_WAITERS, false,
							__ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
				return true;
			continue;
		}
		if (!(word & RF_LOCK_WAITERS) &&
		    !__atomic_compare_exchange_n(&lock->word, &word, word | RF_LOCK_WAITERS, false,
						 __ATOMIC_RELAXED, __ATOMIC_RELAXED))
			continue;
		rc = rf_sys_futex_wait(futex_of(lock), (uint32_t)(word | RF_LOCK_WAITERS),
				       WHILE_NS);
		if (rc >= 0 || rc == -EAGAIN)
			continue;
		/* A seccomp filter refuses futexes: sleep a little, which no release ends. */
		if (rc != -ETIMEDOUT && rc != -EINTR)
			rf_sys_sleep(REFUSED_NS);
		/* Signals may end each wait early, so the caller counts the time. */
		return false;
	}
}

void rf_lock_wake(struct rf_lock *lock)
{
	rf_sys_futex_wake(futex_of(lock));
}
