/* SPDX-License-Identifier: BSD-3-Clause */
#define _GNU_SOURCE /* secure_getenv(), dl_iterate_phdr() */
#include "start.h"
#include "engine.h"
#include "kernel.h"
#include "loader.h"

#include <dlfcn.h>
#include <errno.h>
#include <link.h>
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

/* *@distrusted: the kernel's copying is not to be trusted, whatever the kernel is. */
static int trust_of_environment(bool *distrusted, struct rf_error *error)
{
	const char *value = secure_getenv("RDMAFORK_TRUST_COPYING");

	*distrusted = value && !strcmp(value, "0");
	if (*distrusted || !value || !*value || !strcmp(value, "1"))
		return 0;
	return wrong_value(error, "RDMAFORK_TRUST_COPYING", value);
}

/* The variables with which libibverbs, too, tracks what is registered through it. */
static bool environment_starts(void)
{
	return secure_getenv("RDMAV_FORK_SAFE") || secure_getenv("IBV_FORK_SAFE");
}

struct object_name {
	size_t wanted, at;
	char text[4096];
};

static int copy_name(struct dl_phdr_info *object, size_t size, void *data)
{
	struct object_name *name = data;

	(void)size;
	if (name->at++ < name->wanted)
		return 0;
	snprintf(name->text, sizeof(name->text), "%s", object->dlpi_name);
	return 1;
}

/* Is there an engine in the object of that name, not this one, that runs? Its path. */
static bool runs_another(const char *name, struct rf_error *error)
{
	enum rf_mode (*other_mode)(void) = NULL;
	Dl_info where;
	/* RTLD_NOLOAD: a look at what is there, which loads and runs nothing. */
	void *handle = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);

	if (!handle)
		return false;
	*(void **)&other_mode = dlsym(handle, "rf_mode");
	dlclose(handle);
	if (!other_mode || other_mode == rf_mode || other_mode() == RF_MODE_NONE)
		return false;
	/* The object may only depend on the one that holds it. */
	if (dladdr(*(void **)&other_mode, &where))
		name = where.dli_fname;
	snprintf(error->text, sizeof(error->text), "%.255s", name);
	return true;
}

/*
 * Two engines would undo each other's advice: their counts know nothing of each
 * other. The objects are looked at one by one, as dl_iterate_phdr() holds a lock
 * of the loader's under which dlopen() must not be called.
 */
static int refuse_second_engine(struct rf_error *error)
{
	struct object_name name;

	for (name.wanted = 0;; name.wanted++) {
		name.at = 0;
		if (!dl_iterate_phdr(copy_name, &name))
			return 0;
		if (runs_another(name.text, error))
			break;
	}
	error->cause = RF_CAUSE_OTHER_ENGINE;
	return -EEXIST;
}

/* The engine is entered. */
static int start(enum rf_mode mode, bool any, bool distrusted, struct rf_error *error)
{
	struct rf_engine *engine = &rf_engine;
	const struct rf_kernel *kernel = rf_kernel();
	bool trusted = rf_kernel_would_trust(distrusted);

	if (engine->mode != RF_MODE_NONE && (any || mode == engine->mode))
		return 0;
	if (engine->mode != RF_MODE_NONE && !(engine->mode_inherited && !engine->registered)) {
		error->cause = RF_CAUSE_MODE;
		return -EINVAL;
	}
	if (engine->registered) {
		error->cause = RF_CAUSE_LATE;
		return -EINVAL;
	}
	if (mode == RF_MODE_LAZY && !trusted) {
		error->cause = RF_CAUSE_UNTRUSTED;
		return -ENOTSUP;
	}
	if (mode == RF_MODE_AUTO)
		mode = trusted ? RF_MODE_LAZY : RF_MODE_EAGER;
	if (rf_registry_reserve(&engine->registry) < 0 ||
	    rf_advise_reserve(&engine->advisor, 1) < 0) {
		error->cause = RF_CAUSE_ENGINE_MEMORY;
		return -ENOMEM;
	}
	rf_kernel_distrust(distrusted);
	rf_advisor_start(&engine->advisor, kernel, environment_starts());
	rf_advisor_start(&engine->wiper, kernel, false);
	rf_edges_start(&engine->edges, kernel->page_size);
	__atomic_store_n(&engine->environment_read, true, __ATOMIC_RELAXED);
	/* After all that a child of another thread's fork finds with it. */
	__atomic_store_n(&engine->mode, mode, __ATOMIC_RELEASE);
	return 0;
}

RF_API int rf_fork_init(enum rf_mode mode, struct rf_error *error)
{
	/* Who does not care joins whatever runs. */
	bool any = mode == RF_MODE_AUTO, distrusted;
	int rc;

	error->cause = RF_CAUSE_MODE;
	error->start = 0;
	error->end = 0;
	if (mode != RF_MODE_AUTO && mode != RF_MODE_LAZY && mode != RF_MODE_EAGER)
		return -EINVAL;
	error->cause = RF_CAUSE_NONE;
	rc = any ? mode_of_environment(&mode, error) : 0;
	if (rc >= 0)
		rc = trust_of_environment(&distrusted, error);
	/* Outside the lock: the loader may be waiting for whoever holds it. */
	if (rc >= 0) {
		rf_loader_enter();
		rc = refuse_second_engine(error);
		rf_loader_leave();
	}
	if (rc < 0)
		return rc;
	rc = rf_enter(0);
	if (rc < 0) {
		error->cause = RF_CAUSE_SIGNAL;
		return rc;
	}
	rc = start(mode, any, distrusted, error);
	rf_leave();
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
	bool distrusted;
	int entered;

	(void)trust_of_environment(&distrusted, &error);
	entered = rf_enter(0);
	/* From its start on the engine relies on what was in force then. */
	if (entered == 0 && rf_engine.mode == RF_MODE_NONE)
		rf_kernel_distrust(distrusted);
	*kernel = *rf_kernel();
	if (entered == 0)
		rf_leave();
}
