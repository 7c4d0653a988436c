/* SPDX-License-Identifier: BSD-3-Clause */
#include "guards.h"

/* In bytes, of the holes that are taken in each round; the next takes the shorter ones. */
static const size_t shortest[] = { 1u << 24, 1u << 20, 1u << 16, 0 };

#define ROUNDS (sizeof(shortest) / sizeof(*shortest))

static void take(struct rf_guard_plan *plan, uintptr_t start, uintptr_t end, size_t round)
{
	size_t nbytes = end - start;

	if (plan->count == RF_GUARDS || nbytes < shortest[round] ||
	    (round && nbytes >= shortest[round - 1]))
		return;
	plan->holes[plan->count].start = start;
	plan->holes[plan->count++].end = end;
}

/* A place among the stretches that a child will have again. */
struct edge {
	uint32_t at;
	bool found;
	uintptr_t start, end;
};

static void next_edge(const struct rf_edges *edges, struct edge *edge)
{
	edge->found = rf_edges_next(edges, &edge->at, &edge->start, &edge->end);
}

/* A run of marked pages, less what is given back of it. */
static void take_run(struct rf_guard_plan *plan, const struct rf_edges *edges, struct edge *edge,
		     uintptr_t start, uintptr_t end, size_t round)
{
	while (edge->found && edge->end <= start)
		next_edge(edges, edge);
	for (; edge->found && edge->start < end; next_edge(edges, edge)) {
		if (start < edge->start)
			take(plan, start, edge->start, round);
		start = edge->end;
		if (end <= start)
			return;
	}
	if (start < end)
		take(plan, start, end, round);
}

static void take_round(struct rf_guard_plan *plan, const struct rf_edges *edges, size_t round)
{
	const struct rf_ranges *ranges = edges->omitted.pages;
	struct rf_cursor cursor = { 0, 0 };
	const struct rf_range *range = rf_ranges_at(ranges, cursor);
	struct edge edge = { .at = 0 };
	uintptr_t start = 0, end = 0;

	next_edge(edges, &edge);
	for (; range; range = rf_ranges_next(ranges, &cursor)) {
		if (!range->mark)
			continue;
		if (range->start != end) {
			take_run(plan, edges, &edge, start, end, round);
			start = range->start;
		}
		end = range->end;
	}
	take_run(plan, edges, &edge, start, end, round);
}

void rf_guards_plan(struct rf_guards *guards, const struct rf_edges *edges)
{
	struct rf_guard_plan *plan = &guards->plans[!guards->shown];
	const uint64_t marks = edges->omitted.pages->marks;
	const bool around = edges->shown && edges->shown->absent;
	size_t round;

	/* Which pages are given back may change while no mark does. */
	if (guards->marks == marks && !guards->around && !around)
		return;
	plan->count = 0;
	for (round = 0; round < ROUNDS && plan->count < RF_GUARDS; round++)
		take_round(plan, edges, round);
	__atomic_store_n(&guards->shown, !guards->shown, __ATOMIC_RELEASE);
	guards->marks = marks;
	guards->around = around;
}

void rf_guards_raise(const struct rf_guards *guards)
{
	const struct rf_guard_plan *plan = &guards->plans[guards->shown];
	uint32_t i;

	for (i = 0; i < plan->count; i++)
		(void)rf_sys_map_at(plan->holes[i].start,
				    plan->holes[i].end - plan->holes[i].start, RF_NO_ACCESS);
}

void rf_guards_clear(struct rf_guards *guards)
{
	guards->plans[0].count = 0;
	guards->plans[1].count = 0;
	guards->marks = UINT64_MAX;
}
