/* SPDX-License-Identifier: BSD-3-Clause */
#include "descriptors.h"
#include "vma.h"

#include <errno.h>
#include <string.h>

/* Order matters to forks alone, which see all that their thread and others have stored. */
static void set_number(int *to, int number)
{
	__atomic_store_n(to, number, __ATOMIC_RELEASE);
}

/* The item of @number, or with 0 a free one; NULL: none. */
static struct rf_descriptor *find(struct rf_descriptors *descriptors, int number)
{
	size_t i;

	for (; descriptors; descriptors = descriptors->next)
		for (i = 0; i < RF_DESCRIPTORS_BLOCK; i++)
			if (descriptors->items[i].number == number)
				return &descriptors->items[i];
	return NULL;
}

static int add_block(struct rf_descriptors *descriptors, struct rf_descriptor **item)
{
	struct rf_descriptors *more;
	void *memory;

	if (rf_sys_map(sizeof(*more), &memory) < 0)
		return -ENOMEM;
	more = memory;
	while (descriptors->next)
		descriptors = descriptors->next;
	__atomic_store_n(&descriptors->next, more, __ATOMIC_RELEASE);
	*item = &more->items[0];
	return 0;
}

/* "/proc/thread-self/fd/5" */
static const char *link_of(int fd, char *path, size_t nbytes)
{
	static const char directory[] = "/proc/thread-self/fd/";
	char *at = path + nbytes;

	*--at = '\0';
	do
		*--at = (char)('0' + fd % 10);
	while (fd /= 10);
	return memcpy(at - (sizeof(directory) - 1), directory, sizeof(directory) - 1);
}

/* The kinds of anonymous files are told apart by the text of their link, where /proc is. */
static int identify(int fd, struct rf_file *file)
{
	char path[40], kind[64];
	uint64_t hash = 0;
	const char *at;
	int rc = rf_sys_identify(fd, file);

	if (rc < 0 || file->special != RF_ANONYMOUS ||
	    rf_sys_read_link(link_of(fd, path, sizeof(path)), kind, sizeof(kind)) < 0)
		return rc;
	for (at = kind; *at; at++)
		hash = hash * 31 + (unsigned char)*at;
	file->special = hash;
	return 0;
}

static bool is_still(const struct rf_descriptor *item)
{
	struct rf_file file;
	int rc = identify(item->number - 1, &file);

	return rc < 0 ? rc != -EBADF : rf_sys_is_same(&file, &item->file);
}

int rf_descriptors_add(struct rf_descriptors *descriptors, int fd, bool mapped)
{
	struct rf_descriptor *item;
	struct rf_file file;
	int rc = identify(fd, &file);

	if (rc < 0)
		return rc;
	/* Its number may be that of one that was closed behind our back. */
	item = find(descriptors, fd + 1);
	if (item && is_still(item)) {
		item->mapped |= mapped;
		return 0;
	}
	if (!item)
		item = find(descriptors, 0);
	if (!item)
		rc = add_block(descriptors, &item);
	if (rc < 0)
		return rc;
	set_number(&item->number, 0);
	item->file = file;
	item->mapped = mapped;
	set_number(&item->number, fd + 1);
	return 0;
}

int rf_descriptors_remove(struct rf_descriptors *descriptors, int fd)
{
	struct rf_descriptor *item = fd < 0 ? NULL : find(descriptors, fd + 1);

	if (!item)
		return -ENOENT;
	set_number(&item->number, 0);
	return 0;
}

/*
 * For reading alone, so that a command written to it fails: after one that succeeded librdmacm
 * would wait for its outcome for ever. After chroot() there may be none: then a pipe's end.
 */
static int open_null(void)
{
	int null = rf_sys_open("/dev/null", RF_READ), pipe[2];

	if (null >= 0 || rf_sys_pipe(pipe) < 0)
		return null;
	rf_sys_close(pipe[1]);
	return pipe[0];
}

/* If its number were free, the next file would get it, and commands for the device. */
static int open_over(int fd)
{
	int null = open_null(), rc;

	if (null < 0) {
		/* No other number was free: the next file gets this one. */
		rf_sys_close(fd);
		null = open_null();
	}
	if (null < 0 || null == fd)
		return null;
	rc = rf_sys_duplicate(null, fd);
	rf_sys_close(null);
	return rc;
}

int rf_descriptor_replace(int fd, const struct rf_file *mapped, int null)
{
	int rc = null < 0 ? open_over(fd) : rf_sys_duplicate(null, fd);

	if (rc < 0)
		rf_sys_close(fd);
	if (mapped)
		rf_vma_replace_file(mapped);
	return rc < 0 ? null : fd;
}

void rf_descriptors_replace(struct rf_descriptors *descriptors)
{
	int null = -1;
	size_t i;

	for (; descriptors; descriptors = descriptors->next) {
		for (i = 0; i < RF_DESCRIPTORS_BLOCK; i++) {
			struct rf_descriptor *item = &descriptors->items[i];

			if (!item->number)
				continue;
			if (is_still(item))
				null = rf_descriptor_replace(item->number - 1,
							     item->mapped ? &item->file : NULL,
							     null);
			set_number(&item->number, 0);
		}
	}
}
