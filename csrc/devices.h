/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Which descriptors of this process are RDMA devices', whoever opened them: an open
 * /dev/infiniband/uverbsN, and the channels its events come through. Told by what
 * /proc/self/fd says of each, in a child, where no other thread opens any more.
 */
#ifndef RF_DEVICES_H
#define RF_DEVICES_H

#include "descriptors.h"

/*
 * In a forked child: add those to @descriptors, to be replaced. One that cannot be
 * added is closed. Where /proc cannot be read all stay as they are.
 */
void rf_devices_omit(struct rf_descriptors *descriptors);

#endif
