/* SPDX-License-Identifier: BSD-3-Clause */
/* What is mapped from one file, found in /proc/self/maps. */
#ifndef RF_MAPPINGS_H
#define RF_MAPPINGS_H

#include "sys.h"

/*
 * In a forked child: put private zeros in the place of all that is mapped from
 * @file, so that the file is not kept open and a stale pointer into a device's
 * queue reads and writes nothing of it. What cannot be read or mapped stays.
 */
void rf_mappings_replace(const struct rf_file *file);

#endif
