/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What this kernel does at fork(), and whether that can be relied on.
 *
 *	before 5.12	pinned pages are not copied; 5.10 loses private hugetlb
 *	5.12 to 5.18	copied, but a page migrated while a fork runs loses its pin
 *	5.19 on		copied, and trusted
 *
 * RDMA netlink says whether the kernel copies (distributions have ported that to
 * older versions), nobody but the version says whether the race is gone.
 */
#ifndef RF_KERNEL_H
#define RF_KERNEL_H

#include "rdmafork.h"

#include <stdbool.h>

/* Read at the first call that can read it all. The engine's lock is held. */
const struct rf_kernel *rf_kernel(void);

/* Log2 of the smallest huge page, 0 if there are none. */
static inline unsigned int rf_kernel_huge_shift(const struct rf_kernel *kernel)
{
	return kernel->huge_shifts[0];
}

/* "6.1.0-44-amd64" is 6 * 1000 + 1; 0 if it does not read as a version. */
unsigned int rf_kernel_parse_version(const char *release);

#endif
