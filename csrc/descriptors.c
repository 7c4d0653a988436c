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
	struct rf_descriptor_block *block = &descriptors->first;
	size_t i;

	for (; block; block = block->next)
		for (i = 0; i < RF_DESCRIPTORS_BLOCK; i++)
			if (block->items[i].number == number)
				return &block->items[i];
	return NULL;
}

static bool is_empty(const struct rf_descriptors *descriptors)
{
	const struct rf_descriptor_block *block = &descriptors->first;
	size_t i;

	for (; block; block = block->next)
		for (i = 0; i < RF_DESCRIPTORS_BLOCK; i++)
			if (block->items[i].number)
				return false;
	return true;
}

static int add_block(struct rf_descriptors *descriptors, struct rf_descriptor **item)
{
	struct rf_descriptor_block *block, *last = &descriptors->first;
	void *memory;

	if (rf_sys_map(sizeof(*block), &memory) < 0)
		return -ENOMEM;
	block = memory;
	while (last->next)
		last = last->next;
	__atomic_store_n(&last->next, block, __ATOMIC_RELEASE);
	*item = &block->items[0];
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
	int rc;

	if (!item->number)
		return false;
	rc = identify(item->number - 1, &file);
	return rc < 0 ? rc != -EBADF : rf_sys_is_same(&file, &item->file);
}

/* Ours, and not a file of the program's that has got its number. */
static bool is_null_still(int null)
{
	int rc = null ? rf_sys_is_signed(null - 1) : 0;

	return rc < 0 ? rc != -EBADF : rc;
}

static void close_null(struct rf_descriptors *descriptors)
{
	int fd = descriptors->null - 1;
	bool ours = is_null_still(descriptors->null);

	set_number(&descriptors->null, 0);
	if (ours)
		rf_sys_close(fd);
}

/*
 * Opened before it is needed: a child may have no descriptor left, or another root. For
 * reading alone, so that a command written to it fails: after one that succeeded librdmacm
 * would wait for its outcome for ever.
 */
static int open_null(struct rf_descriptors *descriptors)
{
	int fd;

	if (is_null_still(descriptors->null))
		return 0;
	/* The program has closed ours, and another file may have its number. */
	set_number(&descriptors->null, 0);
	fd = rf_sys_open("/dev/null", RF_READ_SIGNED);
	if (fd < 0)
		return fd;
	set_number(&descriptors->null, fd + 1);
	return 0;
}

int rf_descriptors_add(struct rf_descriptors *descriptors, int fd, bool mapped)
{
	struct rf_descriptor *item;
	struct rf_file file;
	int rc = identify(fd, &file);

	if (rc < 0)
		return rc;
	rc = open_null(descriptors);
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
	if (is_empty(descriptors))
		close_null(descriptors);
	return 0;
}

static void replace(int null, const struct rf_descriptor *item)
{
	int fd = item->number - 1;

	/* If its number were free, the next file would get it, and commands for the device. */
	if (!null || rf_sys_duplicate(null - 1, fd) < 0)
		rf_sys_close(fd);
}

void rf_descriptors_replace(struct rf_descriptors *descriptors)
{
	struct rf_descriptor_block *block = &descriptors->first;
	size_t i;

	if (is_empty(descriptors))
		return;
	(void)open_null(descriptors);
	for (; block; block = block->next) {
		for (i = 0; i < RF_DESCRIPTORS_BLOCK; i++) {
			if (is_still(&block->items[i])) {
				replace(descriptors->null, &block->items[i]);
				if (block->items[i].mapped)
					rf_vma_replace_file(&block->items[i].file);
			}
			set_number(&block->items[i].number, 0);
		}
	}
	close_null(descriptors);
}
