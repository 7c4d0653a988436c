/* SPDX-License-Identifier: BSD-3-Clause */
#include "devices.h"
#include "descriptors.h"
#include "open_files.h"

#define UVERBS "/dev/infiniband/uverbs"

struct replacement {
	int null;	/* in the place of one before; -1: none */
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

static void replace_if_device(void *data, int fd, const char *target)
{
	struct replacement *replacement = data;
	bool device = rf_open_files_begins(target, UVERBS), mapped;
	struct rf_file file;

	if (!device && !rf_open_files_begins(target, "/dev/infiniband/rdma_cm") &&
	    !rf_open_files_begins(target, "anon_inode:[infinibandevent]"))
		return;
	replacement->device |= device;
	mapped = device && rf_sys_identify(fd, &file) >= 0;
	replacement->null = rf_descriptor_replace(fd, mapped ? &file : NULL, replacement->null);
}

bool rf_devices_replace(void)
{
	struct replacement replacement = { .null = -1 };

	list(replace_if_device, &replacement);
	return replacement.device;
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
