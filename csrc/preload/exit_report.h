/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The one line of JSON that a program under "rdmafork exec" writes at exit: its name, its
 * registrations, how its forks went, which libibverbs it had and how each was served.
 *
 *	RDMAFORK_REPORT=PATH		where the line is appended; - is stderr
 *	RDMAFORK_RANK=TEXT		of the process, for the line
 *	RDMAFORK_PID=N			the process that "rdmafork exec" became, for the line
 *
 * _exit() writes no line: it is how children of vfork() end, in their parent's memory,
 * and handlers of fatal signals, with any lock held.
 */
#ifndef RF_EXIT_REPORT_H
#define RF_EXIT_REPORT_H

#include "rdmafork.h"

#include <stdbool.h>

/*
 * In a constructor: descriptor 2 is stderr as long as it is the file that it is now. @on: from
 * now on forks are counted, and at exit the line is written.
 */
void rf_exit_report_begin(bool on);

/* The engine was not started: say so at once, on stderr, and in the line. */
void rf_exit_report_failure(int rc, const struct rf_error *error);

/*
 * ibv_dontfork_range() has registered memory on a page that fork() or malloc() uses, as @error
 * says, which its caller cannot see: say it, once for each text, in the same places. errno is left
 * alone.
 */
void rf_exit_report_shared_page(const struct rf_error *error);

/*
 * In a child's handler: the child does not have the device that its parent has open. If the child
 * registers something through libibverbs without a device of its own, say so once, in the same
 * places.
 */
void rf_exit_report_device_gone(void);
void rf_exit_report_registers(void);

/* Hooks: a fork has been prepared, by a handler that began at @began; this is a child. */
void rf_exit_report_fork(uint64_t began);
void rf_exit_report_child(void);
/* The same, once no interrupted call goes on here: begin anew. */
void rf_exit_report_clear(void);

#endif
