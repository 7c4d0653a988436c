/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * libibverbs' own fork support, asked whether any of it is in use. Its range functions
 * begin with a look at a root: NULL until its ibv_fork_init() has been called, and from
 * then on a tree of nodes that counts registrations of every address. As long as nothing
 * is registered there is one node, of all addresses, counted 0, and nothing is marked:
 * whoever takes its calls then takes nothing away. NCCL leaves it so, which opens
 * libibverbs and calls that copy's own ibv_fork_init() before anybody can look.
 */
#ifndef RF_IBV_TREE_H
#define RF_IBV_TREE_H

#include <stdbool.h>
#include <stdint.h>

/* A node as libibverbs has had it since its first: 2007, libibverbs 1.1. */
struct rf_ibv_tree_node {
	int colour;
	struct rf_ibv_tree_node *parent, *left, *right;
	uintptr_t start, end;
	int count;
};

/*
 * Does a libibverbs with these functions mark memory, or may it? 0, 1, or -EAGAIN: it
 * would allocate memory to say so, which when @forking may wait for ever.
 * @status: 0 if it has none.
 */
int rf_ibv_tree_is_used(uintptr_t dontfork_range, uintptr_t status, bool forking);

#endif
