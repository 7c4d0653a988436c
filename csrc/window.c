/* SPDX-License-Identifier: BSD-3-Clause */
#include "window.h"

/* Longer than any call takes on the slowest machine. */
#define PATIENCE 30

struct rf_window rf_window = { .patience = PATIENCE };

/* Of a thread that was not the first to fork. */
static __thread struct rf_own_forks here __attribute__((tls_model("initial-exec")));

struct rf_own_forks *rf_window_here(void)
{
	const uint64_t first = __atomic_load_n(&rf_window.first, __ATOMIC_RELAXED);

	return first == rf_lock_self() ? &rf_window.of_first : &here;
}

void rf_window_open(void)
{
	struct rf_own_forks *mine;
	uint64_t none = 0;

	if (rf_unlikely(!__atomic_load_n(&rf_window.first, __ATOMIC_RELAXED)))
		(void)__atomic_compare_exchange_n(&rf_window.first, &none, rf_lock_self(), false,
						  __ATOMIC_RELAXED, __ATOMIC_RELAXED);
	mine = rf_window_here();
	mine->prepared = false;
	mine->depth++;
	__atomic_add_fetch(&rf_window.forks, 1, __ATOMIC_SEQ_CST);
	__atomic_add_fetch(&rf_window.begun, 1, __ATOMIC_SEQ_CST);
}

void rf_window_shut(void)
{
	int *forks = &rf_window.forks, seen = __atomic_load_n(forks, __ATOMIC_SEQ_CST);

	while (seen > 0 && !__atomic_compare_exchange_n(forks, &seen, seen - 1, false,
							__ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
		;
	rf_window_here()->depth--;
}

void rf_window_child(void)
{
	/* The first thread is not here, and a new one may get its address. */
	if (rf_window_here() == &here) {
		rf_window.of_first = here;
		__atomic_store_n(&rf_window.first, rf_lock_self(), __ATOMIC_RELAXED);
	}
	__atomic_store_n(&rf_window.forks, 0, __ATOMIC_RELAXED);
}
