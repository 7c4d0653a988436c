/* SPDX-License-Identifier: BSD-3-Clause */
#include "devices.h"
#include "opened.h"

static void omit_if_device(void *descriptors, int fd, const char *target)
{
	bool device = rf_opened_begins(target, "/dev/infiniband/uverbs");

	if (!device && !rf_opened_begins(target, "/dev/infiniband/rdma_cm") &&
	    !rf_opened_begins(target, "anon_inode:[infinibandevent]"))
		return;
	if (rf_descriptors_add(descriptors, fd, device) < 0)
		rf_sys_close(fd);
}

void rf_devices_omit(struct rf_descriptors *descriptors)
{
	rf_opened_list(omit_if_device, descriptors);
}
