/* SPDX-License-Identifier: BSD-3-Clause */
/* Beside the traffic: all calls that make the kernel put a page elsewhere. */
#define _GNU_SOURCE
#include "soak.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define BATCH 64
#define MOVE_ALL 4	/* MPOL_MF_MOVE_ALL: pages that children share, too */

#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 21
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

struct soak_moves soak_moves;

static unsigned int count_nodes(void)
{
	DIR *folder = opendir("/sys/devices/system/node");
	struct dirent *entry;
	unsigned int nodes = 0, number;
	char rest;

	while (folder && (entry = readdir(folder)))
		nodes += sscanf(entry->d_name, "node%u%c", &number, &rest) == 1;
	if (folder)
		closedir(folder);
	return nodes ? nodes : 1;
}

/* Pages that were migrated, by any process of this machine. */
static uint64_t migrated(void)
{
	char text[16384], *at;
	int fd = open("/proc/vmstat", O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof(text) - 1);

	close(fd);
	text[n > 0 ? n : 0] = 0;
	at = strstr(text, "pgmigrate_success ");
	return at ? strtoull(at + strlen("pgmigrate_success "), NULL, 10) : 0;
}

static void move_pages(uint64_t *random, const struct soak_worker *worker)
{
	size_t pages = worker->zone_nbytes / SOAK_PAGE, i;
	void *at[BATCH];
	int nodes[BATCH], before[BATCH], after[BATCH];
	int node = (int)soak_below(random, soak_moves.nodes);

	for (i = 0; i < BATCH; i++) {
		at[i] = worker->zone + soak_below(random, pages) * SOAK_PAGE;
		nodes[i] = node;
		before[i] = after[i] = -1;
	}
	/* Without nodes it says where they are. */
	if (syscall(SYS_move_pages, 0, (unsigned long)BATCH, at, NULL, before, 0) < 0 ||
	    syscall(SYS_move_pages, 0, (unsigned long)BATCH, at, nodes, after, MOVE_ALL) < 0)
		return;
	for (i = 0; i < BATCH; i++) {
		soak_moves.asked++;
		soak_moves.moved += before[i] >= 0 && before[i] != node && after[i] == node;
		soak_moves.busy += after[i] == -EBUSY;
		soak_moves.there += before[i] == node;
	}
}

static void compact(void)
{
	int fd = open("/proc/sys/vm/compact_memory", O_WRONLY | O_CLOEXEC);

	if (fd < 0)
		return;
	soak_moves.compactions += write(fd, "1", 1) == 1;
	close(fd);
}

/* Registered or not, pinned or not: it is for the kernel to know. */
static void advise(uint64_t *random, const struct soak_worker *worker)
{
	size_t small = worker->zone_nbytes - SOAK_HUGE;

	if (soak_below(random, 2)) {
		soak_moves.collapses++;
		soak_moves.collapsed += !madvise(worker->zone, SOAK_HUGE, MADV_COLLAPSE);
	} else {
		soak_moves.page_outs += !madvise(worker->zone + SOAK_HUGE, small, MADV_PAGEOUT);
	}
}

void *soak_mover_run(void *unused)
{
	const struct timespec nap = { .tv_nsec = 2000000 };
	uint64_t random = soak.seed * 31 + 7, before = migrated(), round;

	(void)unused;
	soak_moves.nodes = count_nodes();
	for (round = 0; !__atomic_load_n(&soak_enough, __ATOMIC_RELAXED); round++) {
		const struct soak_worker *worker = &soak_workers[round % soak.threads];

		move_pages(&random, worker);
		if (round % 8 == 0)
			advise(&random, worker);
		/* It takes all of the machine's memory in hand: not too often. */
		if (round % 2000 == 1000)
			compact();
		nanosleep(&nap, NULL);
	}
	soak_moves.migrated = migrated() - before;
	return NULL;
}
