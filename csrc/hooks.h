/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The one door between the engine and the storey above it, csrc/preload/. The engine names
 * nothing that lies there: it calls these, if that storey is linked in.
 *
 *	prepare handler	prepare		before the window opens, with no lock held
 *			prepared	the last call under the engine's lock
 *	a child		notice		as it is noticed, by its handler or by its first call
 *			clear		as the parent's registrations are forgotten
 *	child handler	child		when all that is done, before descriptors are replaced
 *	rf_stats()	add_stats	the engine is entered
 *
 * A constant that the linker fills in, and nothing that is registered as a library is loaded:
 * other libraries' constructors may call, and fork, before one of ours has run. No lock, no
 * order of constructors and no first call have to be thought of.
 */
#ifndef RF_HOOKS_H
#define RF_HOOKS_H

#include "rdmafork.h"

#include <stdbool.h>

struct rf_hooks {
	void (*prepare)(void);
	/* The handler began at @began, as rf_sys_now() has it. */
	void (*prepared)(uint64_t began);
	void (*notice)(void);
	/* @torn: by a thread that is not here, in the middle of a change. */
	void (*clear)(bool torn);
	void (*child)(void);
	void (*add_stats)(struct rf_stats *stats);
};

/* All of them are there, or it is not: weak, for programs that have the engine alone. */
extern const struct rf_hooks rf_hooks __attribute__((weak));

static inline bool rf_has_hooks(void)
{
	return &rf_hooks != NULL;
}

#endif
