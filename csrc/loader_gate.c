/* SPDX-License-Identifier: BSD-3-Clause */
#include "loader_gate.h"
#include "sys.h"
#include "window.h"

/* How long a fork waits for threads in the loader. */
#define PATIENCE 1 /* seconds */

/* How often the loader has been entered, and not left. */
static int inside;
static __thread int inside_here __attribute__((tls_model("initial-exec")));

/* Sleep a moment. False: so many seconds have passed since @began. */
static bool rest(uint64_t began, unsigned int seconds)
{
	rf_sys_sleep(100000);
	return rf_sys_now() - began < (uint64_t)seconds * 1000000000u;
}

/* First say that it is entered, then look for forks: a fork does it the other way round. */
static bool enter(bool regardless)
{
	/* Another library's fork handler may have called: forks of this thread do not count. */
	__atomic_add_fetch(&inside, 1, __ATOMIC_SEQ_CST);
	if (__atomic_load_n(&rf_window.forks, __ATOMIC_SEQ_CST) > rf_window_here()->depth &&
	    !regardless) {
		__atomic_sub_fetch(&inside, 1, __ATOMIC_SEQ_CST);
		return false;
	}
	inside_here++;
	return true;
}

bool rf_loader_gate_try(void)
{
	return enter(false);
}

void rf_loader_gate_enter(void)
{
	const uint64_t began = rf_sys_now();
	bool patient = true;

	while (!enter(!patient))
		patient = rest(began, rf_window.patience);
}

void rf_loader_gate_leave(void)
{
	inside_here--;
	__atomic_sub_fetch(&inside, 1, __ATOMIC_SEQ_CST);
}

void rf_loader_gate_fork(void)
{
	uint64_t began;

	if (__atomic_load_n(&inside, __ATOMIC_SEQ_CST) <= inside_here)
		return;
	began = rf_sys_now();
	while (rest(began, PATIENCE) && __atomic_load_n(&inside, __ATOMIC_SEQ_CST) > inside_here)
		;
}

void rf_loader_gate_child(void)
{
	__atomic_store_n(&inside, inside_here, __ATOMIC_SEQ_CST);
}
