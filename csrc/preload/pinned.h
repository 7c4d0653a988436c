/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What this process has pinned, whoever asked for it: for the report to compare with what is
 * registered here.
 */
#ifndef RF_PINNED_H
#define RF_PINNED_H

#include <stdint.h>

/* VmPin in bytes: each pin's pages are counted by themselves. -errno: /proc cannot be read. */
int64_t rf_pinned_bytes(void);

#endif
