/* SPDX-License-Identifier: BSD-3-Clause */
/* All that the engine calls of this storey. */
#include "hooks.h"
#include "exec.h"
#include "exit_report.h"
#include "ibv.h"

static void prepare(void)
{
	rf_intercept_look(true);
}

static void notice(void)
{
	rf_intercept_child();
	rf_exit_report_child();
}

static void clear(bool torn)
{
	rf_ibv_clear(torn);
	rf_exit_report_clear();
}

const struct rf_hooks rf_hooks = {
	.prepare = prepare,
	.prepared = rf_exit_report_fork,
	.notice = notice,
	.clear = clear,
	.child = rf_exec_child,
	.add_stats = rf_ibv_add_stats,
};
