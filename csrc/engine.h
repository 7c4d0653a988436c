/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The one engine of a process: its state, and the tables that belong to it.
 *
 *	any thread	enter > registry, protect > leave
 *	a fork		enter > prefork, child_list > leave; the window
 *	a child		forgets all that it has inherited
 *
 * fork.h says who may enter and how a child is noticed. What lies above the engine, as
 * libibverbs' ranges, has its state there (hooks.h).
 */
#ifndef RF_ENGINE_H
#define RF_ENGINE_H

#include "child_list.h"
#include "descriptors.h"
#include "lock.h"
#include "registry.h"
#include "tracker.h"

struct rf_engine {
	struct rf_lock lock;
	uint64_t *alive;	/* 1; 0 once wiped; or the thread that makes it 1 again */
	/* Where that points before there is an engine, and where no page can be wiped at fork. */
	uint64_t unwiped;
	enum rf_mode mode;
	bool mode_inherited;	/* from the parent: a child may choose anew */
	bool environment_read;
	uint64_t registered;	/* ever in this process, but for RF_UNDO; of protected ones 1 */
	bool clear_when_left;
	uint32_t generation;
	uint64_t forks, forks_unprepared;
	struct rf_registry registry;
	struct rf_tracker tracker;
	struct rf_child_list list;
	struct rf_descriptors descriptors;
};

/* Between rf_enter() and rf_leave(), but for what is said to be atomic. */
extern struct rf_engine rf_engine;

/* Its tables, empty. */
void rf_engine_init(void);

/*
 * Forget what the parent had registered. @torn: a thread that is not here had them, so what
 * was being moved may be nowhere.
 */
void rf_clear(bool torn);

#endif
