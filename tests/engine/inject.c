/* SPDX-License-Identifier: BSD-3-Clause */
#include "inject.h"
#include "sys.h"

static unsigned long fail_at, faults, calls;
static int fail_with;
static bool fail_after;

void inject(unsigned long nth, int error)
{
	fail_with = error;
	fail_after = false;
	__atomic_store_n(&fail_at, nth, __ATOMIC_SEQ_CST);
}

void inject_from(unsigned long nth, int error)
{
	fail_with = error;
	fail_after = true;
	__atomic_store_n(&fail_at, nth, __ATOMIC_SEQ_CST);
}

unsigned long inject_faults(void)
{
	return __atomic_load_n(&faults, __ATOMIC_SEQ_CST);
}

unsigned long inject_calls(void)
{
	return __atomic_load_n(&calls, __ATOMIC_SEQ_CST);
}

int rf_sys_injected(void)
{
	__atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
	if (!__atomic_load_n(&fail_at, __ATOMIC_SEQ_CST) ||
	    __atomic_sub_fetch(&fail_at, 1, __ATOMIC_SEQ_CST))
		return 0;
	if (fail_after)
		__atomic_store_n(&fail_at, 1, __ATOMIC_SEQ_CST);
	__atomic_add_fetch(&faults, 1, __ATOMIC_SEQ_CST);
	return fail_with;
}
