/* SPDX-License-Identifier: BSD-3-Clause */
#include "one_engine.h"
#include "sys.h"

#include <errno.h>
#include <stdbool.h>
#include <sys/auxv.h>

#define MARK 0x6b726f66616d6472ull

struct meeting {
	uint64_t mark;
	uintptr_t engine;	/* atomic */
};

/* 2^@bits bytes from @base on, in which kernels place nothing by themselves. */
struct area {
	uintptr_t base;
	unsigned int bits;
};

/*
 * Below the programs (x86), where each sanitizer lets a program map memory; or, of 39 bits
 * of address, above the first quarter.
 */
static const struct area areas[] = {
	{ 0x550000000000, 38 },
	{ 0x002000000000, 36 },
};

/* No secret is in the address, and it is as random as the stack's. */
static uintptr_t address_in(const struct area *area)
{
	const uint64_t random = (uint64_t)getauxval(AT_RANDOM) * 0x9e3779b97f4a7c15;
	const size_t page = rf_sys_page_size();

	return area->base + ((uintptr_t)(random >> (64 - area->bits)) & ~(page - 1));
}

static struct meeting *meet_at(uintptr_t address)
{
	struct meeting *meeting = (struct meeting *)address, seen = { 0, 0 };
	struct iovec to = { &seen, sizeof(seen) }, from = { meeting, sizeof(seen) };
	int rc = rf_sys_map_at(address, rf_sys_page_size(), PROT_READ | PROT_WRITE);

	if (rc >= 0)
		__atomic_store_n(&meeting->mark, MARK, __ATOMIC_SEQ_CST);
	/* Looked at without a fault: it may be another's, and closed. */
	else if (rc != -EEXIST || rf_sys_copy(&to, &from, 1) < 0 || seen.mark != MARK)
		return NULL;
	return meeting;
}

static struct meeting *meet(void)
{
	static struct meeting *met;

	size_t i;

	for (i = 0; !met && i < sizeof(areas) / sizeof(areas[0]); i++)
		met = meet_at(address_in(&areas[i]));
	return met;
}

int rf_one_engine_claim(uintptr_t engine, uintptr_t *other)
{
	struct meeting *meeting = meet();

	*other = 0;
	if (!meeting ||
	    __atomic_compare_exchange_n(&meeting->engine, other, engine, false, __ATOMIC_SEQ_CST,
					__ATOMIC_SEQ_CST))
		return 0;
	return *other == engine ? 0 : -EEXIST;
}
