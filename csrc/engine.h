/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The one engine of a process: its state, and the tables that belong to it. fork.h says when
 * a thread may enter and how a child is noticed. Layers above the engine, as libibverbs' ranges,
 * keep their own state (hooks.h).
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
	uint64_t forks, forks_unmarked;
	struct rf_registry registry;
	struct rf_tracker tracker;
	struct rf_child_list list;
	struct rf_descriptors descriptors;
};

/* Between rf_enter() and rf_leave(), except for fields said to be atomic. */
extern struct rf_engine rf_engine;

/*
 * Forget the parent's registrations. @torn: a thread that is not here had the tables, so an
 * entry that was being moved may be nowhere.
 */
void rf_clear(bool torn);

#endif
