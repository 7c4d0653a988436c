/* SPDX-License-Identifier: BSD-3-Clause */
#include "window.h"

/* Longer than any call takes on the slowest machine. */
#define PATIENCE 30

struct rf_window rf_window = { .patience = PATIENCE };

void rf_window_open(void)
{
	__atomic_add_fetch(&rf_window.forks, 1, __ATOMIC_SEQ_CST);
	__atomic_add_fetch(&rf_window.begun, 1, __ATOMIC_SEQ_CST);
}

void rf_window_shut(void)
{
	int *forks = &rf_window.forks, seen = __atomic_load_n(forks, __ATOMIC_SEQ_CST);

	while (seen > 0 && !__atomic_compare_exchange_n(forks, &seen, seen - 1, false,
							__ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
		;
}
