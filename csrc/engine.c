/* SPDX-License-Identifier: BSD-3-Clause */
#include "engine.h"
#include "child_fault.h"
#include "hooks.h"

struct rf_engine rf_engine = { .alive = &rf_engine.unwiped };

void rf_clear(bool torn)
{
	struct rf_engine *engine = &rf_engine;

	rf_child_fault_keep(&engine->list, &engine->registry, torn);
	rf_registry_clear(&engine->registry, torn);
	rf_tracker_clear(&engine->tracker, torn);
	rf_child_list_clear(&engine->list);
	engine->mode_inherited = engine->mode != RF_MODE_NONE;
	/* The parent may have been in the middle of rf_fork_init(), which does not go on here. */
	if (!engine->mode_inherited)
		__atomic_store_n(&engine->environment_read, false, __ATOMIC_RELAXED);
	engine->registered = 0;
	engine->clear_when_left = false;
	engine->forks = 0;
	engine->forks_unmarked = 0;
	if (rf_has_hooks())
		rf_hooks.clear(torn);
}

RF_API int rf_version(void)
{
	return RDMAFORK_VERSION;
}

RF_API int rf_abi(void)
{
	return RF_ABI;
}

RF_API enum rf_mode rf_mode(void)
{
	return __atomic_load_n(&rf_engine.mode, __ATOMIC_RELAXED);
}
