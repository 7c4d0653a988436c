/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The step function of ranges.h against an array with one entry a page, which tells the
 * truth. What is done is chosen by check_below(): at random, or by the bytes of an input.
 */
#ifndef RANGES_MODEL_H
#define RANGES_MODEL_H

#include <stdbool.h>
#include <stddef.h>

/* Few pages are registered in all ways; of many, groups of leaves are counted at once. */
#define MODEL_FEW 320
#define MODEL_MANY 2560

struct interval {
	size_t start, end;	/* pages */
};

/* All that is registered is marked at once, and nothing else is done, with @even. */
extern bool model_even;
/* Beside that all memory is wiped now and then, and a child is to find zeros or a copy. */
extern bool model_wiped;
extern size_t model_pages;
void model_begin(size_t count);
/* One operation on both; if it is a registration, of @next. */
void model_step(struct interval next);
/* The list says of every page what the model says, in as few ranges as can be. */
void model_compare(void);
/* Take all away: nothing is left. */
void model_end(void);

#endif
