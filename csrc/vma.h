/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The mapping at an address: shared or private, and its page size.
 *
 * Linux 6.11 answers one address at a time (PROCMAP_QUERY, half a microsecond).
 * Before, and in a sandbox that refuses the question, /proc/self/maps is read as text,
 * once for a round of questions. It does not know page sizes, so a mapping that could
 * be hugetlb (private, of a file, aligned to a huge page at both ends) is looked up in
 * smaps, which is slow.
 *
 * /proc is opened anew for every round: a descriptor kept open answers for the
 * parent in a child, and its number may be another's by then. "thread-self" is right in
 * every PID namespace, a pid in the path is not, and "self" is not once the main thread
 * has ended by pthread_exit().
 */
#ifndef RF_VMA_H
#define RF_VMA_H

#include "memory.h"

#include <stdbool.h>

struct rf_vma_reader {
	bool query;		/* PROCMAP_QUERY works */
	unsigned int huge_shift; /* log2 of the smallest huge page, 0: there are none */
	uint64_t questions;	/* reads and queries so far, for the statistics */
	struct rf_memory table;	/* text mode: struct rf_vma, sorted */
	/* The round under way: */
	unsigned int depth;	/* rounds within it, which share its answers */
	int fd;
	int text;		/* 1: the table is asked; negative: and could not be read */
	uint32_t count;		/* of the table */
	struct rf_vma last;	/* the answer before */
};

void rf_vma_init(struct rf_vma_reader *reader, bool query, unsigned int huge_shift);

/*
 * Begin a round of questions; mappings the engine's own marks split in it are
 * answered for as they were. -errno: /proc cannot be read, or -ENOMEM; nothing
 * is open then.
 */
int rf_vma_open(struct rf_vma_reader *reader);
void rf_vma_close(struct rf_vma_reader *reader);

/*
 * The mapping that holds @address, or else the first one after it. -ENOENT:
 * nothing is mapped there or above.
 */
int rf_vma_find(struct rf_vma_reader *reader, uintptr_t address, struct rf_vma *vma);

/*
 * The first part of [@start, @end) with one answer ends at *@stop. 1: it lies in @vma. 0: nothing
 * is mapped there. -errno: not answered, and *@stop is as it was.
 */
int rf_vma_part(struct rf_vma_reader *reader, uintptr_t start, uintptr_t end, struct rf_vma *vma,
		uintptr_t *stop);

/* Read one line of maps, with base pages assumed; false if it is no such line. */
bool rf_vma_parse(const char *line, size_t length, struct rf_vma *vma, struct rf_file *file);

/*
 * In a forked child: put private zeros in the place of all that is mapped from
 * @file, so that the file is not kept open and a stale pointer into a device's
 * queue reads and writes nothing of it. A page that cannot be read or mapped stays.
 */
void rf_vma_replace_file(const struct rf_file *file);

#endif
