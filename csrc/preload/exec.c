/* SPDX-License-Identifier: BSD-3-Clause */
#define _GNU_SOURCE /* secure_getenv() */
#include "exec.h"
#include "devices.h"
#include "exit_report.h"
#include "fork_callers.h"
#include "ibv.h"

#include <stdlib.h>
#include <string.h>

static bool on, keeps_devices;

static bool is_set(const char *name)
{
	const char *value = secure_getenv(name);

	return value && *value && strcmp(value, "0") != 0;
}

void rf_exec_begin(void)
{
	struct rf_error error;
	int rc;

	on = is_set("RDMAFORK_EXEC");
	rf_exit_report_begin(on);
	if (!on)
		return;
	keeps_devices = is_set("RDMAFORK_KEEP_DEVICES");
	if (is_set("RDMAFORK_TRACE_FORKS"))
		rf_fork_callers_begin();
	rc = rf_fork_init(RF_MODE_AUTO, &error);
	if (rc < 0)
		rf_exit_report_failure(rc, &error);
	else
		rf_ibv_serve_all();
}

/* Whichever of our constructors runs first: the engine makes itself at its first call. */
__attribute__((constructor)) static void begin(void)
{
	rf_exec_begin();
}

void rf_exec_child(void)
{
	if (on && !keeps_devices && rf_intercept_any() && rf_devices_replace())
		rf_exit_report_device_gone();
}
