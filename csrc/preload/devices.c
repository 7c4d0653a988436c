/* SPDX-License-Identifier: BSD-3-Clause */
#include "devices.h"
#include "open_files.h"

#define UVERBS "/dev/infiniband/uverbs"

struct omission {
	struct rf_descriptors *descriptors;
	bool device;	/* one of them is, and not only the connection manager's */
};

/* After chroot() there may be no /proc: then each number is asked whether it is a device's. */
static void list(void (*look)(void *data, int fd, const char *target), void *data)
{
	int fd, limit;

	if (rf_open_files_list(look, data))
		return;
	limit = rf_sys_descriptor_limit();
	for (fd = 0; fd < limit; fd++)
		if (rf_sys_is_uverbs(fd) > 0)
			look(data, fd, UVERBS);
}

/* /dev/null may not be there either. The number stays taken, as that is. */
static void replace_by_pipe(int fd)
{
	int pipe[2];

	if (rf_sys_pipe(pipe) < 0) {
		rf_sys_close(fd);
		return;
	}
	if (rf_sys_duplicate(pipe[0], fd) < 0)
		rf_sys_close(fd);
	rf_sys_close(pipe[0]);
	rf_sys_close(pipe[1]);
}

static void omit_if_device(void *data, int fd, const char *target)
{
	struct omission *omission = data;
	bool device = rf_open_files_begins(target, UVERBS);

	if (!device && !rf_open_files_begins(target, "/dev/infiniband/rdma_cm") &&
	    !rf_open_files_begins(target, "anon_inode:[infinibandevent]"))
		return;
	omission->device |= device;
	if (rf_descriptors_add(omission->descriptors, fd, device) < 0)
		replace_by_pipe(fd);
}

bool rf_devices_omit(struct rf_descriptors *descriptors)
{
	struct omission omission = { .descriptors = descriptors };

	list(omit_if_device, &omission);
	return omission.device;
}

static void note_device(void *found, int fd, const char *target)
{
	(void)fd;
	*(bool *)found |= rf_open_files_begins(target, UVERBS);
}

bool rf_devices_are_open(void)
{
	bool found = false;

	list(note_device, &found);
	return found;
}
