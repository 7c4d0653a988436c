/* SPDX-License-Identifier: BSD-3-Clause */
#include "engine.h"
#include "intercept.h"
#include "loader.h"
#include "witness.h"

#include <errno.h>

uint64_t rf_unwiped;
struct rf_engine rf_engine = { .alive = &rf_unwiped };

int rf_enter_slowly(unsigned int flags)
{
	const uint64_t patience = (uint64_t)rf_engine.patience * 1000000000u;
	uint64_t began = flags & RF_FORKING ? rf_sys_now() : 0;

	if (rf_lock_is_mine(&rf_engine.lock))
		return -EDEADLK;
	if (flags & RF_NOWAIT)
		return -EAGAIN;
	while (!rf_lock_wait(&rf_engine.lock)) {
		if (!rf_notice_child())
			return -EDEADLK;
		/* Its owner may wait for a lock that a fork handler before ours has taken. */
		if (flags & RF_FORKING && rf_sys_now() - began > patience)
			return -ETIMEDOUT;
	}
	return 0;
}

void rf_clear(void)
{
	struct rf_engine *engine = &rf_engine;

	rf_registry_clear(&engine->registry);
	rf_advisor_clear(&engine->advisor);
	rf_advisor_clear(&engine->wiper);
	rf_edges_clear(&engine->edges);
	rf_guards_clear(&engine->guards);
	rf_index_clear(&engine->ibv_ranges);
	rf_witness_clear();
	engine->mode_inherited = engine->mode != RF_MODE_NONE;
	/* The parent may have been in the middle of rf_fork_init(), which does not go on here. */
	if (!engine->mode_inherited)
		__atomic_store_n(&engine->environment_read, false, __ATOMIC_RELAXED);
	engine->registered = 0;
	engine->clear_when_left = false;
	engine->forks = 0;
	engine->forks_unprepared = 0;
	engine->ibv_calls = 0;
	engine->ibv_unbalanced = 0;
}

void rf_clear_interrupted(void)
{
	struct rf_engine *engine = &rf_engine;

	/* No handler has run: this does what it would have done. */
	(void)rf_notice_child();
	rf_advise_unmark_all(&engine->advisor);
	rf_advise_unmark_all(&engine->wiper);
	rf_wiped_keep(&engine->wiped);
	rf_clear();
}

bool rf_become_child(void)
{
	struct rf_engine *engine = &rf_engine;
	uint64_t before = 0;

	/* The first thread of a raw clone()'s child does it, its others wait. */
	while (!__atomic_compare_exchange_n(engine->alive, &before, rf_lock_self(), false,
					    __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE)) {
		if (before == 1)
			return true;
		if (before == rf_lock_self())
			return false;
		before = 0;
	}
	if (!engine->generation) {
		rf_install();
		__atomic_store_n(&rf_unwiped, 1, __ATOMIC_RELEASE);
		return true;
	}
	engine->generation++;
	engine->registry.inherited = engine->registry.last_serial;
	rf_wiped_keep(&engine->wiped);
	__atomic_store_n(&engine->window, 0, __ATOMIC_RELAXED);
	if (rf_lock_is_mine(&engine->lock)) {
		engine->clear_when_left = true;
	} else {
		/* Held by a thread that does not exist here: what it was moving may be nowhere. */
		if (engine->lock.word) {
			rf_memory_abandon(&engine->registry.slots);
			rf_advisor_abandon(&engine->advisor);
			rf_advisor_abandon(&engine->wiper);
			rf_index_abandon(&engine->ibv_ranges);
		}
		rf_clear();
		__atomic_store_n(&engine->lock.word, 0, __ATOMIC_RELEASE);
	}
	rf_loader_child();
	rf_intercept_child();
	__atomic_store_n(engine->alive, 1, __ATOMIC_RELEASE);
	return true;
}

RF_API int rf_abi(void)
{
	return RF_ABI;
}

RF_API enum rf_mode rf_mode(void)
{
	return __atomic_load_n(&rf_engine.mode, __ATOMIC_RELAXED);
}

RF_API uint32_t rf_generation(void)
{
	(void)rf_notice_child();
	return rf_engine.generation;
}

RF_API uint64_t rf_forks(void)
{
	uint64_t begun;

	(void)rf_notice_child();
	/* In this order: prepare opens the window, then counts. */
	begun = __atomic_load_n(&rf_engine.begun, __ATOMIC_SEQ_CST);
	return __atomic_load_n(&rf_engine.window, __ATOMIC_SEQ_CST) ? 0 : begun + 1;
}
