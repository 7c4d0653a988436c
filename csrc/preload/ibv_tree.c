/* SPDX-License-Identifier: BSD-3-Clause */
#include "ibv_tree.h"
#include "patch.h"
#include "sys.h"

#include <errno.h>
#include <string.h>

#define ENABLED 1	/* enum ibv_fork_status */

/*
 * Anything else than the one node, another layout too, is in use. The word compared with zero
 * may be a count in an unknown libibverbs, and no address: the kernel reads it.
 */
static bool is_empty(uintptr_t address)
{
	struct rf_ibv_tree_node root;
	struct iovec to = { &root, sizeof(root) }, from = { (void *)address, sizeof(root) };

	return rf_sys_copy(&to, &from, 1) == sizeof(root) && !root.parent && !root.left &&
	       !root.right && !root.start && root.end == UINTPTR_MAX && !root.count;
}

int rf_ibv_tree_is_used(uintptr_t dontfork_range, uintptr_t status, bool forking)
{
	const uintptr_t *root = rf_patch_compared(dontfork_range);
	int (*ask)(void);

	if (root)
		return *root && !is_empty(*root);
	if (!status)
		return 0;
	memcpy(&ask, &status, sizeof(ask));
	return forking ? -EAGAIN : ask() == ENABLED;
}
