/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Which descriptors of this process are RDMA devices', whoever opened them: an open
 * /dev/infiniband/uverbsN, the channels its events come through, and the connection
 * manager's rdma_cm. That takes no command from a child, but as long as a child has it
 * a dead parent's identifiers live on, and its ports stay taken.
 */
#ifndef RF_DEVICES_H
#define RF_DEVICES_H

#include <stdbool.h>

/*
 * In a forked child: /dev/null takes their place, and zeros that of their mappings. Without /proc
 * this finds uverbsN alone, by a system call for each possible descriptor. True: an uverbsN was
 * open.
 */
bool rf_devices_replace(void);

/* Is an uverbsN open? */
bool rf_devices_are_open(void);

#endif
