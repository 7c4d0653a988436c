/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The single-stepper: the processor's trap flag stops an operation of the engine
 * after each instruction, and a function of the test runs there, in the handler.
 */
#ifndef STEPS_H
#define STEPS_H

#include "check.h"

#if defined(__x86_64__) && !CHECK_TSAN
#define STEPS 1

#include <sys/types.h>

/* Here each instruction is stepped and each is_due() one calls @at_step; true ends the stepping. */
void steps_begin(bool (*at_step)(void));
void steps_end(void);
/* Call it at every @usual-th step: at all of them if $SCALE asks for more, at fewer for less. */
void steps_set_stride(unsigned long usual);
/* Call it at this step alone. */
void steps_stop_at(unsigned long step);

extern unsigned long steps;	    /* since steps_begin() */
extern unsigned long made_children; /* by the test */
extern bool in_child;      /* this process was made at a step, and goes on from there */

/* ---- Operations ---- */

struct operation {
	const char *name;
	void (*act)(void);
	enum rf_mode mode;
};

extern const struct operation operations[];
extern const size_t operations_count;

extern char *memory, *shared;
/* Registered before the operation; by it. */
extern struct rf_handle first_held, second_held, made;
extern int made_rc;

void register_held(void);
void release_one(void);
void prefork(void);
void look_at_libraries(void);

/* Start the engine for that operation. */
void set_up(enum rf_mode mode, void (*act)(void));
/* After it, in the process that began it: release all; nothing is left. */
void tear_down(void);
/* A child in any state: it can do all that its parent could. */
void check_child_works(void);
/* The interrupted call has gone on in this child: it has unmarked all. */
void check_nothing_is_marked(void);

/* Does the kernel allow operation @i? */
bool is_possible(size_t i);
/* Set up operation @i in a process of its own, and @run it there: as check_wait() has it. */
int run_operation(size_t i, void (*run)(size_t));
void for_each_operation(void (*run)(size_t));

#endif
#endif
