/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The fork handlers. Plain C that allocates nothing from malloc() and leaves
 * errno alone, which glibc before 2.33 does not do for its callers.
 */
#include "devices.h"
#include "engine.h"
#include "intercept.h"
#include "loader.h"
#include "witness.h"

#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>

/* How long a fork waits for the engine: longer than any call takes on the slowest machine. */
#define PATIENCE 30

/* What the child of the fork under way is to get back has been saved for it. */
static __thread bool saved __attribute__((tls_model("initial-exec")));

/* Its number to rf_vma_close_inherited(). */
static __thread uint64_t fork_number __attribute__((tls_model("initial-exec")));

static void prepare(void)
{
	struct rf_engine *engine = &rf_engine;
	uint64_t began = rf_sys_now();

	saved = false;
	(void)rf_notice_child();
	rf_intercept_look(true);
	__atomic_add_fetch(&engine->window, 1, __ATOMIC_SEQ_CST);
	__atomic_add_fetch(&engine->begun, 1, __ATOMIC_SEQ_CST);
	fork_number = rf_vma_fork();
	rf_loader_fork();
	if (__atomic_load_n(&engine->mode, __ATOMIC_RELAXED) == RF_MODE_NONE)
		return;
	if (rf_enter(RF_FORKING) < 0) {
		/*
		 * This is a signal handler inside the engine, or the engine's owner waits for a
		 * lock that this thread has. What is not marked yet is the kernel's to copy.
		 */
		__atomic_add_fetch(&engine->forks_unprepared, 1, __ATOMIC_RELAXED);
		fork_number = 0;
		rf_advise_unmark_all_shared(engine->advisor.kernel);
		return;
	}
	engine->forks++;
	if (engine->mode == RF_MODE_EAGER)
		rf_advise_count_waiting(&engine->advisor, &engine->registry);
	rf_advise_fold(&engine->advisor, &engine->registry);
	rf_advise_retry(&engine->wiper);
	if (!engine->wiper.ranges.retries)
		rf_wiped_remove_late(&engine->wiped);
	rf_edges_save(&engine->edges);
	saved = true;
	rf_guards_plan(&engine->guards, &engine->edges);
	rf_witness_fork(began);
	rf_leave();
}

static void parent(void)
{
	int *window = &rf_engine.window, seen = __atomic_load_n(window, __ATOMIC_SEQ_CST);

	rf_loader_forked();
	/* A child that was made in the window goes on from here, with a window of its own. */
	while (seen > 0 && !__atomic_compare_exchange_n(window, &seen, seen - 1, false,
							__ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
		;
}

static void child(void)
{
	rf_unwiped = 0;
	/* Before anything here maps memory. What is shown without it is another fork's. */
	if (saved)
		rf_edges_restore(&rf_engine.edges);
	rf_guards_raise(&rf_engine.guards);
	(void)rf_notice_child();
	/* An interrupted call goes on here, and closes what it has opened. */
	if (!rf_lock_is_mine(&rf_engine.lock))
		rf_vma_close_inherited(fork_number);
	if (rf_witness_omits_devices())
		rf_devices_omit(&rf_engine.descriptors);
	/* Here alone: a raw clone()'s descriptors may be its parent's own (CLONE_FILES). */
	rf_descriptors_replace(&rf_engine.descriptors);
}

void rf_install(void)
{
	struct rf_engine *engine = &rf_engine;
	void *page = NULL;
	size_t nbytes = 64 * 1024; /* the largest base page */
	uint64_t *alive = &rf_unwiped;

	rf_registry_init(&engine->registry);
	rf_index_init(&engine->ibv_ranges);
	rf_advisor_init(&engine->advisor, RF_OMIT, &engine->wiper, &engine->edges);
	rf_advisor_init(&engine->wiper, RF_WIPE, &engine->advisor, &engine->edges);
	engine->edges.omitted.pages = &engine->advisor.ranges;
	engine->edges.omitted.gaps = &engine->advisor.gaps;
	engine->edges.wiped.pages = &engine->wiper.ranges;
	engine->edges.wiped.gaps = &engine->wiper.gaps;
	if (rf_sys_map(nbytes, &page) >= 0 &&
	    rf_sys_madvise((uintptr_t)page, nbytes, MADV_WIPEONFORK) >= 0)
		alive = page;
	engine->generation = 1;
	engine->patience = PATIENCE;
	pthread_atfork(prepare, parent, child);
	*alive = 1;
	__atomic_store_n(&engine->alive, alive, __ATOMIC_RELEASE);
}

/*
 * As the library is loaded: a handler that is installed while another thread
 * forks is skipped for that fork, and glibc before 2.36 deadlocks on
 * pthread_atfork() in a thread that another fork handler waits for.
 */
__attribute__((constructor)) static void begin(void)
{
	(void)rf_notice_child();
	rf_witness_begin();
}
