/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The memory that this process has pinned, by whatever library. The report compares it with
 * the memory that is registered here.
 */
#ifndef RF_PINNED_H
#define RF_PINNED_H

#include <stdint.h>

/*
 * VmPin in bytes: each pin's pages are counted by themselves. -errno: /proc cannot be read.
 * The engine is entered.
 */
int64_t rf_pinned_bytes(void);

#endif
