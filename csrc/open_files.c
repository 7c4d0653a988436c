/* SPDX-License-Identifier: BSD-3-Clause */
#include "open_files.h"
#include "sys.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>

#define DIRECTORY "/proc/thread-self/fd/"

/* The kernel's struct linux_dirent64, wherever off_t has 64 bits. musl has no dirent64. */
_Static_assert(offsetof(struct dirent, d_reclen) == 16 && offsetof(struct dirent, d_name) == 19,
	       "struct dirent is not the one getdents64() fills");

bool rf_open_files_begins(const char *text, const char *with)
{
	return !strncmp(text, with, strlen(with));
}

bool rf_open_files_list(void (*look)(void *data, int fd, const char *target), void *data)
{
	char path[sizeof(DIRECTORY) + 16] = DIRECTORY, target[64];
	/* On the stack of signal handlers that fork, too. */
	_Alignas(struct dirent) char entries[1024];
	int directory = rf_sys_open(DIRECTORY, RF_READ);
	ssize_t count, at;

	if (directory < 0)
		return false;
	while ((count = rf_sys_list(directory, entries, sizeof(entries))) > 0) {
		for (at = 0; at < count;) {
			const struct dirent *entry = (const void *)(entries + at);

			at += entry->d_reclen;
			if (*entry->d_name == '.')
				continue;
			strcpy(path + sizeof(DIRECTORY) - 1, entry->d_name);
			if (rf_sys_read_link(path, target, sizeof(target)) >= 0)
				look(data, atoi(entry->d_name), target);
		}
	}
	rf_sys_close(directory);
	return true;
}

int rf_transient_open(const char *path)
{
	int fd;

	rf_sys_transient(true);
	fd = rf_sys_open(path, RF_READ_SIGNED);
	if (fd < 0)
		rf_sys_transient(false);
	return fd;
}

void rf_transient_close(int fd)
{
	rf_sys_close(fd);
	rf_sys_transient(false);
}

int rf_text_next(struct rf_text *text, const char **line, size_t *length)
{
	char *newline;
	ssize_t rc;
	bool rest;

	for (;;) {
		newline = memchr(text->bytes + text->at, '\n', text->used - text->at);
		if (newline || text->used - text->at == sizeof(text->bytes)) {
			*line = text->bytes + text->at;
			*length = newline ? (size_t)(newline - *line) : sizeof(text->bytes);
			text->at += *length + (newline != NULL);
			rest = text->cut;
			text->cut = !newline;
			if (rest)
				continue;
			return 1;
		}
		memmove(text->bytes, text->bytes + text->at, text->used - text->at);
		text->used -= text->at;
		text->at = 0;
		rc = rf_sys_read(text->fd, text->bytes + text->used,
				 sizeof(text->bytes) - text->used);
		text->reads++;
		if (rc <= 0)
			return (int)rc;
		text->used += (size_t)rc;
	}
}

bool rf_text_kib(const char *line, size_t length, const char *name, uint64_t *kib)
{
	size_t at = strlen(name);

	if (length < at || memcmp(line, name, at) != 0)
		return false;
	while (at < length && (line[at] == ' ' || line[at] == '\t'))
		at++;
	for (*kib = 0; at < length && line[at] >= '0' && line[at] <= '9' && *kib >> 50 == 0; at++)
		*kib = *kib * 10 + (uint64_t)(line[at] - '0');
	return true;
}

/* The program may have the same file open; its flags are not ours. */
static void close_if_of_proc(void *unused, int fd, const char *target)
{
	(void)unused;
	if (rf_open_files_begins(target, "/proc/") && rf_sys_is_signed(fd) > 0)
		rf_sys_close(fd);
}

void rf_open_files_close_transients(void)
{
	rf_open_files_list(close_if_of_proc, NULL);
}
