/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Which files this process has open, going by what the links in /proc/thread-self/fd say
 * of them. For a forked child, where no other thread opens any more.
 */
#ifndef RF_OPENED_H
#define RF_OPENED_H

#include <stdbool.h>

/* Does @text begin with @with? */
bool rf_opened_begins(const char *text, const char *with);

/*
 * Call @look for each, with the link's text, cut at 63 bytes. It may close @fd. Where /proc
 * cannot be read it is called for none.
 */
void rf_opened_list(void (*look)(void *data, int fd, const char *target), void *data);

/* Close both ends of the pipes through which another thread copied as this child was made. */
void rf_opened_close_copying_pipes(void);

#endif
