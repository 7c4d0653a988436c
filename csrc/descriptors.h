/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * File descriptors that a child must not have: a device's. Through an inherited
 * one a child that only exits destroys its parent's memory regions, and one that
 * lives on keeps them pinned when the parent is gone. So the child handler puts
 * /dev/null in their place before fork() returns there: their numbers stay taken,
 * and a command still written to them reaches no device.
 *
 *	[number file] [number file] ... -> [number file] [number file] ... -> ...
 *
 * Read by the child handler of a fork that may come between any two stores, so an
 * item's number is stored last and cleared first, blocks never go away, and
 * nothing is counted. A number alone does not say that it is still the file that
 * was named: where it was closed, and the number is another file's, that file stays.
 * Files are told apart by their inode, and anonymous files, which have one between
 * them, by their kind: of two event channels one may be taken for the other.
 *
 * A mapping keeps its file open as a descriptor does, and a queue of a device is
 * one. Where such may exist the child looks through its maps in /proc, which takes a
 * microsecond a mapping, and puts zeros of its own in their place.
 *
 * Writers hold the engine's lock.
 */
#ifndef RF_DESCRIPTORS_H
#define RF_DESCRIPTORS_H

#include "sys.h"

#include <stdbool.h>

struct rf_descriptor {
	int number;		/* the descriptor + 1; 0: a free item */
	bool mapped;		/* mappings of the file go too */
	struct rf_file file;
};

#define RF_DESCRIPTORS_BLOCK 16

struct rf_descriptors {
	struct rf_descriptor items[RF_DESCRIPTORS_BLOCK];
	struct rf_descriptors *next;
};

/*
 * -EBADF, -ENOMEM: nothing has changed. Once more for the same file: it is mapped if either says
 * so.
 */
int rf_descriptors_add(struct rf_descriptors *descriptors, int fd, bool mapped);

/* -ENOENT: it is not there. */
int rf_descriptors_remove(struct rf_descriptors *descriptors, int fd);

/*
 * In a forked child: /dev/null takes the place of @fd, or a pipe's end, or else @fd is closed.
 * Private zeros take the place of what is mapped from the file @mapped, which may be NULL.
 * @null is the result for an earlier one, which need not be opened again, or -1.
 */
int rf_descriptor_replace(int fd, const struct rf_file *mapped, int null);

/* In a forked child: do that with all of them, and forget them. */
void rf_descriptors_replace(struct rf_descriptors *descriptors);

#endif
