/* SPDX-License-Identifier: BSD-3-Clause */
/* System calls of the engine that fail: its one seam to the kernel asks here before each. */
#ifndef INJECT_H
#define INJECT_H

/*
 * Fail the @nth call from now (1 is the next) with @error, or, with @nth 0, none; with the
 * second, those after it too.
 */
void inject(unsigned long nth, int error);
void inject_from(unsigned long nth, int error);
/* The failures injected, and all calls. */
unsigned long inject_faults(void);
unsigned long inject_calls(void);

#endif
