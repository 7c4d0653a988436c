/* SPDX-License-Identifier: BSD-3-Clause */
#include "devices.h"

#include <dirent.h>
#include <stddef.h>
#include <string.h>

#define DIRECTORY "/proc/thread-self/fd/"

/* The kernel's struct linux_dirent64, wherever off_t has 64 bits. musl has no dirent64. */
_Static_assert(offsetof(struct dirent, d_reclen) == 16 && offsetof(struct dirent, d_name) == 19,
	       "struct dirent is not what getdents64() fills");

static bool begins(const char *text, const char *with)
{
	return !strncmp(text, with, strlen(with));
}

/* The number of an entry of the directory; -1: it is none. */
static int parse_number(const char *name)
{
	int number = 0;

	if (!*name)
		return -1;
	for (; *name; name++) {
		if (*name < '0' || *name > '9' || number > 100000000)
			return -1;
		number = 10 * number + (*name - '0');
	}
	return number;
}

static void omit_if_device(struct rf_descriptors *descriptors, const char *name)
{
	char path[sizeof(DIRECTORY) + 16] = DIRECTORY, target[64];
	int fd = parse_number(name);
	bool device;

	if (fd < 0)
		return;
	strcpy(path + sizeof(DIRECTORY) - 1, name);
	if (rf_sys_read_link(path, target, sizeof(target)) < 0)
		return;
	device = begins(target, "/dev/infiniband/uverbs");
	if (!device && !begins(target, "/dev/infiniband/rdma_cm") &&
	    !begins(target, "anon_inode:[infinibandevent]"))
		return;
	if (rf_descriptors_add(descriptors, fd, device) < 0)
		rf_sys_close(fd);
}

void rf_devices_omit(struct rf_descriptors *descriptors)
{
	_Alignas(struct dirent) char entries[2048];
	int directory = rf_sys_open(DIRECTORY, RF_READ);
	ssize_t count, at;

	if (directory < 0)
		return;
	while ((count = rf_sys_list(directory, entries, sizeof(entries))) > 0) {
		for (at = 0; at < count;) {
			const struct dirent *entry = (const void *)(entries + at);

			omit_if_device(descriptors, entry->d_name);
			at += entry->d_reclen;
		}
	}
	rf_sys_close(directory);
}
