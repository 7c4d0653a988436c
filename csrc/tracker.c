/* SPDX-License-Identifier: BSD-3-Clause */
#include "tracker.h"
#include "patch.h"

#include <errno.h>
#include <string.h>

#define ENABLED 1	/* enum ibv_fork_status */

/* Anything else than the one node, another layout too, is in use. */
static bool is_empty(const struct rf_tracker_node *root)
{
	return !root->parent && !root->left && !root->right && !root->start &&
	       root->end == UINTPTR_MAX && !root->count;
}

int rf_tracker_is_used(uintptr_t dontfork_range, uintptr_t status, bool forking)
{
	const uintptr_t *root = rf_patch_compared(dontfork_range);
	int (*ask)(void);

	if (root)
		return *root && !is_empty((const struct rf_tracker_node *)*root);
	if (!status)
		return 0;
	memcpy(&ask, &status, sizeof(ask));
	return forking ? -EAGAIN : ask() == ENABLED;
}
