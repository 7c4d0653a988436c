/* SPDX-License-Identifier: BSD-3-Clause */
#include "devices.h"
#include "opened.h"

struct omission {
	struct rf_descriptors *descriptors;
	bool device;	/* one of them is, and not only the connection manager's */
};

static void omit_if_device(void *data, int fd, const char *target)
{
	struct omission *omission = data;
	bool device = rf_opened_begins(target, "/dev/infiniband/uverbs");

	if (!device && !rf_opened_begins(target, "/dev/infiniband/rdma_cm") &&
	    !rf_opened_begins(target, "anon_inode:[infinibandevent]"))
		return;
	omission->device |= device;
	if (rf_descriptors_add(omission->descriptors, fd, device) < 0)
		rf_sys_close(fd);
}

bool rf_devices_omit(struct rf_descriptors *descriptors)
{
	struct omission omission = { .descriptors = descriptors };

	rf_opened_list(omit_if_device, &omission);
	return omission.device;
}

static void note_device(void *found, int fd, const char *target)
{
	(void)fd;
	*(bool *)found |= rf_opened_begins(target, "/dev/infiniband/uverbs");
}

bool rf_devices_are_open(void)
{
	bool found = false;

	rf_opened_list(note_device, &found);
	return found;
}
