/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The kernel's behaviour at fork(), and whether it can be relied on.
 *
 *	before 5.12	pinned pages are not copied; 5.10 loses private hugetlb
 *	5.12 to 5.18	copied, but a page migrated while a fork runs loses its pin
 *	5.19 on		copied, and trusted
 *
 * RDMA netlink says whether the kernel copies (distributions have ported that to
 * older versions). The race is gone where the kernel remembers which anonymous pages
 * are exclusive to a process: since 5.19, or where a distribution has ported that too,
 * which the behaviour of a page shows. Trust is one fact, found once and in force from
 * rf_fork_init() on; the engine asks for nothing else about the kernel's copying.
 */
#ifndef RF_KERNEL_H
#define RF_KERNEL_H

#include "rdmafork.h"

#include <stdbool.h>

/*
 * Its copying is judged at the first call; the rest is read at the first call that can
 * read it all. The engine's lock is held, here and below.
 */
const struct rf_kernel *rf_kernel(void);

/* Would its copying be trusted after rf_kernel_distrust(@distrusted)? Nothing changes. */
bool rf_kernel_would_trust(bool distrusted);

/* Trust as judged from now on, or none if @distrusted. */
void rf_kernel_distrust(bool distrusted);

/*
 * Fill in how @kernel, of that release, behaves at fork(). @copies: the result of
 * rf_sys_rdma_copy_on_fork().
 */
void rf_kernel_judge(struct rf_kernel *kernel, int copies);

/*
 * A page is written to that a pipe refers to. 1: the pipe sees the new bytes, as the
 * page stayed the process's own; 0: it does not, as the process got a copy; or why that
 * cannot be found out. Between, the page is protected from writing for a moment, or with
 * @forked, a child is made and is gone.
 *
 *	the kernel looks at		protected	@forked
 *	exclusive pages (5.19)		1		0
 *	references (5.9)		0		0
 *	mappings (before)		1		1
 */
int rf_kernel_probe(bool forked);

/* Log2 of the smallest huge page, 0 if there are none. */
static inline unsigned int rf_kernel_huge_shift(const struct rf_kernel *kernel)
{
	return kernel->huge_shifts[0];
}

/* "6.1.0-44-amd64" is 6 * 1000 + 1; 0 if it does not read as a version. */
unsigned int rf_kernel_parse_version(const char *release);

#endif
