/* SPDX-License-Identifier: BSD-3-Clause */
#include "opened.h"
#include "sys.h"

#include <dirent.h>
#include <string.h>

#define DIRECTORY "/proc/thread-self/fd/"

/* The kernel's struct linux_dirent64, wherever off_t has 64 bits. musl has no dirent64. */
_Static_assert(offsetof(struct dirent, d_reclen) == 16 && offsetof(struct dirent, d_name) == 19,
	       "struct dirent is not what getdents64() fills");

bool rf_opened_begins(const char *text, const char *with)
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

void rf_opened_list(void (*look)(void *data, int fd, const char *target), void *data)
{
	char path[sizeof(DIRECTORY) + 16] = DIRECTORY, target[64];
	/* On the stack of signal handlers that fork, too. */
	_Alignas(struct dirent) char entries[1024];
	int directory = rf_sys_open(DIRECTORY, RF_READ), fd;
	ssize_t count, at;

	if (directory < 0)
		return;
	while ((count = rf_sys_list(directory, entries, sizeof(entries))) > 0) {
		for (at = 0; at < count;) {
			const struct dirent *entry = (const void *)(entries + at);

			at += entry->d_reclen;
			fd = parse_number(entry->d_name);
			if (fd < 0)
				continue;
			strcpy(path + sizeof(DIRECTORY) - 1, entry->d_name);
			if (rf_sys_read_link(path, target, sizeof(target)) >= 0)
				look(data, fd, target);
		}
	}
	rf_sys_close(directory);
}

static void name_if_copying(void *data, int fd, const char *target)
{
	char *name = data;

	if (!*name && rf_opened_begins(target, "pipe:[") && rf_sys_is_copying_pipe(fd) > 0)
		strcpy(name, target);
}

static void close_if_named(void *data, int fd, const char *target)
{
	if (!strcmp(target, data))
		rf_sys_close(fd);
}

void rf_opened_close_copying_pipes(void)
{
	/* As long as @target is, above. */
	char name[64];

	do {
		*name = '\0';
		rf_opened_list(name_if_copying, name);
		if (*name)
			rf_opened_list(close_if_named, name);
	} while (*name);
}
