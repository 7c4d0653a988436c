/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The files this process has open, from the links in /proc/thread-self/fd. For a forked child,
 * where no other thread opens any more. And files of /proc that are open for a moment only, which
 * such a child may inherit.
 */
#ifndef RF_OPEN_FILES_H
#define RF_OPEN_FILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Does @text begin with @with? */
bool rf_open_files_begins(const char *text, const char *with);

/*
 * Call @look for each, with the link's text, cut at 63 bytes. It may close @fd. False: /proc
 * cannot be read, and it is called for none.
 */
bool rf_open_files_list(void (*look)(void *data, int fd, const char *target), void *data);

/*
 * A file of /proc, open for a moment only: see rf_sys_transient(). The engine is entered, so that
 * a signal handler's child, in which the interrupted call goes on, does not close it as well.
 */
int rf_transient_open(const char *path);
void rf_transient_close(int fd);

/* Such a file, line by line. */
struct rf_text {
	int fd;
	size_t used, at;
	unsigned int reads;
	bool cut;		/* the line before goes on */
	char bytes[768];	/* on the stack of signal handlers that fork, too */
};

/*
 * The next line without its end, cut at the buffer's size: the parts that matter
 * come first. 1; 0: there is no more.
 */
int rf_text_next(struct rf_text *text, const char **line, size_t *length);

/* "VmPin:     2048 kB": is that the line of @name? Then *@kib is its number. */
bool rf_text_kib(const char *line, size_t length, const char *name, uint64_t *kib);

/* Close descriptors that look like another thread's transient ones: see rf_sys_transient(). */
void rf_open_files_close_transients(void);

#endif
