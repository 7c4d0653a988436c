/* SPDX-License-Identifier: BSD-3-Clause */
#define _GNU_SOURCE /* secure_getenv(), dladdr() */
#include "start.h"
#include "child_fault.h"
#include "error_text.h"
#include "fork.h"
#include "kernel.h"
#include "loader_gate.h"
#include "one_engine.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int wrong_value(struct rf_error *error, const char *name, const char *value)
{
	error->cause = RF_CAUSE_ENVIRONMENT;
	snprintf(error->text, sizeof(error->text), "%s=%.64s", name, value);
	return -EINVAL;
}

/* The mode the environment asks for in place of RF_MODE_AUTO; AUTO if none. */
static int mode_of_environment(enum rf_mode *mode, struct rf_error *error)
{
	const char *value = secure_getenv("RDMAFORK_MODE");

	*mode = RF_MODE_AUTO;
	if (!value || !*value || !strcmp(value, "auto"))
		return 0;
	if (!strcmp(value, "lazy"))
		*mode = RF_MODE_LAZY;
	else if (!strcmp(value, "eager"))
		*mode = RF_MODE_EAGER;
	else
		return wrong_value(error, "RDMAFORK_MODE", value);
	return 0;
}

/* Read a variable that is 0, 1 or not set: then *@value stays as it is. */
static int switch_variable(const char *name, bool *value, struct rf_error *error)
{
	const char *text = secure_getenv(name);

	if (!text || !*text)
		return 0;
	if (strcmp(text, "0") && strcmp(text, "1"))
		return wrong_value(error, name, text);
	*value = *text == '1';
	return 0;
}

/* The other variables of an engine that starts. */
struct wishes {
	bool trust, explain, trace;
};

static int wishes_of_environment(struct wishes *wishes, struct rf_error *error)
{
	int rc;

	*wishes = (struct wishes){ .trust = true, .explain = true };
	rc = switch_variable("RDMAFORK_TRUST_COPYING", &wishes->trust, error);
	if (rc >= 0)
		rc = switch_variable("RDMAFORK_EXPLAIN_FAULTS", &wishes->explain, error);
	if (rc >= 0)
		rc = switch_variable("RDMAFORK_TRACE_REGISTRATIONS", &wishes->trace, error);
	return rc;
}

/* The variables that make libibverbs track its registrations, too. */
static bool environment_starts(void)
{
	return secure_getenv("RDMAV_FORK_SAFE") || secure_getenv("IBV_FORK_SAFE");
}

static const char *mode_name(enum rf_mode mode)
{
	return mode == RF_MODE_LAZY ? "lazy" : "eager";
}

static int other_mode(enum rf_mode wished, enum rf_mode running, struct rf_error *error)
{
	error->cause = RF_CAUSE_MODE;
	snprintf(error->text, sizeof(error->text),
		 "fork_init(mode='%s'): rdmafork runs in mode '%s'", mode_name(wished),
		 mode_name(running));
	return -EINVAL;
}

/* The engine is entered. -EEXIST: *@other runs. */
static int start(enum rf_mode mode, bool any, const struct wishes *wishes, uintptr_t *other,
		 struct rf_error *error)
{
	struct rf_engine *engine = &rf_engine;
	const struct rf_kernel *kernel = rf_kernel();
	bool trusted = rf_kernel_would_trust(!wishes->trust);

	if (engine->mode != RF_MODE_NONE && (any || mode == engine->mode))
		return 0;
	if (engine->mode != RF_MODE_NONE && !(engine->mode_inherited && !engine->registered))
		return other_mode(mode, engine->mode, error);
	if (engine->registered) {
		error->cause = RF_CAUSE_LATE;
		return -EINVAL;
	}
	if (mode == RF_MODE_LAZY && !trusted) {
		error->cause = RF_CAUSE_UNTRUSTED;
		rf_error_untrusted(error);
		return -ENOTSUP;
	}
	if (mode == RF_MODE_AUTO)
		mode = trusted ? RF_MODE_LAZY : RF_MODE_EAGER;
	if (rf_registry_reserve(&engine->registry) < 0 ||
	    rf_ranges_reserve(&engine->tracker.ranges, 1) < 0 ||
	    rf_child_list_reserve(&engine->list, engine->tracker.ranges.capacity, 0) < 0) {
		error->cause = RF_CAUSE_ENGINE_MEMORY;
		return -ENOMEM;
	}
	/* When nothing else can fail: there is no way back. */
	if (rf_one_engine_claim((uintptr_t)engine, other) < 0)
		return -EEXIST;
	rf_kernel_distrust(!wishes->trust);
	rf_child_fault_choose(wishes->explain);
	rf_tracker_start(&engine->tracker, kernel, environment_starts());
	__atomic_store_n(&engine->environment_read, true, __ATOMIC_RELAXED);
	/* Last: a child of another thread's fork that sees the mode needs all of the above. */
	__atomic_store_n(&engine->mode, mode, __ATOMIC_RELEASE);
	return 0;
}

/* Without the engine's lock: the loader may wait for a thread that waits for that lock. */
static void name_second_engine(uintptr_t other, struct rf_error *error)
{
	const char *name = NULL;
	Dl_info where;

	rf_loader_gate_enter();
	if (dladdr((void *)other, &where))
		name = where.dli_fname;
	error->cause = RF_CAUSE_OTHER_ENGINE;
	snprintf(error->text, sizeof(error->text), "%.255s", name ? name : "");
	rf_loader_gate_leave();
}

static int unknown_mode(enum rf_mode mode, struct rf_error *error)
{
	error->cause = RF_CAUSE_UNKNOWN_MODE;
	snprintf(error->text, sizeof(error->text), "%d", (int)mode);
	return -EINVAL;
}

RF_API int rf_fork_init(enum rf_mode mode, struct rf_error *error)
{
	/* A caller that names no mode joins whatever runs. */
	bool any = mode == RF_MODE_AUTO;
	struct rf_error unasked;
	struct wishes wishes;
	uintptr_t other = 0;
	int rc;

	error = error ? error : &unasked;
	*error = (struct rf_error){ .cause = RF_CAUSE_NONE };
	if (mode != RF_MODE_AUTO && mode != RF_MODE_LAZY && mode != RF_MODE_EAGER)
		return unknown_mode(mode, error);
	rc = any ? mode_of_environment(&mode, error) : 0;
	if (rc >= 0)
		rc = wishes_of_environment(&wishes, error);
	if (rc < 0)
		return rc;
	rc = rf_enter(0);
	if (rc < 0) {
		error->cause = RF_CAUSE_SIGNAL;
		return rc;
	}
	rc = start(mode, any, &wishes, &other, error);
	rf_leave();
	if (rc == -EEXIST)
		name_second_engine(other, error);
	return rc;
}

int rf_start_by_environment(struct rf_error *error)
{
	if (environment_starts())
		return rf_fork_init(RF_MODE_AUTO, error);
	__atomic_store_n(&rf_engine.environment_read, true, __ATOMIC_RELAXED);
	return 0;
}

RF_API void rf_kernel_info(struct rf_kernel *kernel)
{
	struct rf_error error;
	struct wishes wishes;
	int entered;

	(void)wishes_of_environment(&wishes, &error);
	entered = rf_enter(0);
	/* From its start on the engine relies on the setting in force then. */
	if (entered == 0 && rf_engine.mode == RF_MODE_NONE)
		rf_kernel_distrust(!wishes.trust);
	*kernel = *rf_kernel();
	if (entered == 0)
		rf_leave();
}
