/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The fork handlers. Plain C that allocates nothing from malloc() and leaves
 * errno alone, which glibc before 2.33 does not do for its callers.
 */
#include "fork.h"
#include "child_fault.h"
#include "hooks.h"
#include "loader_gate.h"
#include "marks.h"
#include "open_files.h"
#include "prefork.h"
#include "window.h"

#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>

int rf_enter_slowly(unsigned int flags)
{
	const uint64_t patience = (uint64_t)rf_window.patience * 1000000000u;
	uint64_t began = flags & RF_FORKING ? rf_sys_now() : 0;

	if (rf_lock_is_mine(&rf_engine.lock))
		return -EDEADLK;
	if (flags & RF_NOWAIT)
		return -EAGAIN;
	while (!rf_lock_wait(&rf_engine.lock)) {
		if (!rf_notice_child())
			return -EDEADLK;
		/* Its owner may wait for a lock that a fork handler before ours has taken. */
		if (flags & RF_FORKING && rf_sys_now() - began > patience)
			return -ETIMEDOUT;
	}
	return 0;
}

void rf_clear_interrupted(void)
{
	struct rf_engine *engine = &rf_engine;

	/* No handler has run: this does the handler's work. */
	(void)rf_notice_child();
	rf_marks_clear_all(&engine->tracker);
	rf_clear(false);
}

static int show_list(struct rf_engine *engine)
{
	int rc = rf_child_list_make(&engine->list, &engine->tracker, 0, 0);

	if (rf_likely(rc >= 0))
		return rc;
	rf_prefork_leave_given_back(&engine->tracker);
	return rf_child_list_make(&engine->list, &engine->tracker, 0, 0);
}

/* The handler began at @began. */
static void prepare_pages(struct rf_engine *engine, uint64_t began)
{
	if (rf_enter(RF_FORKING) < 0) {
		/*
		 * This is a signal handler inside the engine, or the engine's owner waits for a
		 * lock that this thread has. Pages not marked yet are the kernel's to copy.
		 */
		__atomic_add_fetch(&engine->forks_unmarked, 1, __ATOMIC_RELAXED);
		rf_marks_drop_shared(&engine->tracker);
		return;
	}
	engine->forks++;
	if (engine->mode == RF_MODE_EAGER)
		rf_prefork_count_waiting(&engine->tracker, &engine->registry);
	rf_prefork(&engine->tracker, &engine->registry, &engine->list);
	rf_window_here()->prepared = show_list(engine) >= 0;
	if (rf_has_hooks())
		rf_hooks.prepared(began);
	rf_leave();
}

/*
 * Libc lets signals come before it calls our child handler: a handler of the program's would
 * find pages missing that the child is to have. Not for the kernel's own copies, which are there.
 */
static void block_signals(struct rf_own_forks *here, const struct rf_child_list *list)
{
	if (rf_likely(!__atomic_load_n(&list->mapped_anew, __ATOMIC_RELAXED)) || here->blocked_at)
		return;
	if (rf_sys_block_signals(&here->blocked) >= 0)
		here->blocked_at = here->depth;
}

/* The fork at @depth ends: an outer one needs them blocked still, if it has blocked them. */
static void unblock_signals(struct rf_own_forks *here, int depth)
{
	if (rf_likely(here->blocked_at != depth))
		return;
	/* First, as a handler that comes then may fork. */
	here->blocked_at = 0;
	(void)rf_sys_unblock_signals(here->blocked);
}

static void prepare(void)
{
	struct rf_engine *engine = &rf_engine;
	uint64_t began = rf_sys_now();
	struct rf_own_forks *here;

	(void)rf_notice_child();
	if (rf_has_hooks())
		rf_hooks.prepare();
	rf_window_open();
	rf_loader_gate_fork();
	if (__atomic_load_n(&engine->mode, __ATOMIC_RELAXED) != RF_MODE_NONE)
		prepare_pages(engine, began);
	/* A signal handler may have made a child that goes on here, where they lie elsewhere. */
	here = rf_window_here();
	/* Last, as this thread must have closed its own descriptors by then. */
	here->transients = rf_sys_transients();
	block_signals(here, &engine->list);
}

/* Many saved bytes, after the last fork that needed them. */
static void trim_list(struct rf_engine *engine)
{
	/* Where other forks are under way, a later parent handler does it. */
	if (rf_likely(!__atomic_load_n(&engine->list.mapped_anew, __ATOMIC_RELAXED)) ||
	    rf_enter(RF_NOWAIT) < 0)
		return;
	if (!rf_window_is_open())
		rf_child_list_trim(&engine->list);
	rf_leave();
}

static void parent(void)
{
	struct rf_own_forks *here = rf_window_here();
	const int depth = here->depth;

	rf_window_shut();
	trim_list(&rf_engine);
	unblock_signals(here, depth);
}

static void child(void)
{
	struct rf_own_forks *here;
	int depth;

	/* Where no page can be wiped, this handler alone says that this is a child. */
	rf_engine.unwiped = 0;
	/* rf_notice_child() would read the wiped page first, which is a page fault more. */
	(void)rf_become_child();
	/* This fork is over. An outer one may go on here, for which no list was made. */
	here = rf_window_here();
	depth = here->depth--;
	here->prepared = false;
	/* A call that was interrupted goes on in this child, and closes its own descriptors. */
	if (!rf_lock_is_mine(&rf_engine.lock) && rf_sys_inherits_transients(here->transients))
		rf_open_files_close_transients();
	if (rf_has_hooks())
		rf_hooks.child();
	/* Only after fork(): a child of clone() may share its parent's (CLONE_FILES). */
	rf_descriptors_replace(&rf_engine.descriptors);
	/* After descriptor 2 may have been replaced. A child of clone() may share the actions. */
	rf_child_fault_tell_refused(&rf_engine.list.refused);
	(void)rf_child_fault_arm();
	unblock_signals(here, depth);
}

/*
 * At exit glibc drops a library's handlers as that library's destructors have run. Those of other
 * libraries may fork after that, so ours belong to no library. Musl drops none.
 */
static void add_handlers(void)
{
#ifdef __GLIBC__
	int __register_atfork(void (*)(void), void (*)(void), void (*)(void), void *library);

	(void)__register_atfork(prepare, parent, child, NULL);
#else
	(void)pthread_atfork(prepare, parent, child);
#endif
}

/*
 * Make the engine, in our constructor or at a call before that: of several libraries that
 * are preloaded or linked the loader may run another's constructor first.
 */
static void install(void)
{
	struct rf_engine *engine = &rf_engine;
	void *page = NULL;
	size_t nbytes = 64 * 1024; /* the largest base page */
	uint64_t *alive = &rf_engine.unwiped;

	rf_registry_init(&engine->registry);
	rf_tracker_init(&engine->tracker);
	if (rf_sys_map(nbytes, &page) >= 0 &&
	    rf_sys_madvise((uintptr_t)page, nbytes, MADV_WIPEONFORK) >= 0)
		alive = page;
	engine->generation = 1;
	add_handlers();
	*alive = 1;
	__atomic_store_n(&engine->alive, alive, __ATOMIC_RELEASE);
}

static enum rf_child_of child_of(void)
{
	const struct rf_engine *engine = &rf_engine;
	const struct rf_own_forks *here = rf_window_here();

	if (!here->depth)
		return RF_CHILD_OF_CLONE;
	if (!here->prepared)
		return RF_CHILD_UNPREPARED;
	/* Another thread may have been in the middle of a release. */
	return engine->lock.word || engine->list.version != engine->tracker.ranges.version
		       ? RF_CHILD_PREPARED
		       : RF_CHILD_AS_PREPARED;
}

bool rf_become_child(void)
{
	struct rf_engine *engine = &rf_engine;
	uint64_t before = 0;

	/* The first thread of a raw clone()'s child does it, its others wait. */
	while (!__atomic_compare_exchange_n(engine->alive, &before, rf_lock_self(), false,
					    __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE)) {
		if (before == 1)
			return true;
		if (before == rf_lock_self())
			return false;
		before = 0;
	}
	if (!engine->generation) {
		install();
		__atomic_store_n(&rf_engine.unwiped, 1, __ATOMIC_RELEASE);
		return true;
	}
	/*
	 * Before anything here maps memory. Not only in our child handler: those of libraries
	 * that were loaded before run first, and may call.
	 */
	rf_child_list_apply(&engine->list, child_of());
	engine->generation++;
	rf_window_child();
	if (rf_lock_is_mine(&engine->lock)) {
		engine->clear_when_left = true;
	} else {
		/* Its owner does not exist here: an entry being moved may be nowhere. */
		rf_clear(engine->lock.word);
		__atomic_store_n(&engine->lock.word, 0, __ATOMIC_RELEASE);
	}
	rf_loader_gate_child();
	if (rf_has_hooks())
		rf_hooks.notice();
	__atomic_store_n(engine->alive, 1, __ATOMIC_RELEASE);
	return true;
}

/*
 * Handlers are installed as the library is loaded. A fork under way skips a handler that is
 * installed meanwhile, and glibc before 2.36 deadlocks on pthread_atfork() in a thread that
 * another fork handler waits for.
 */
__attribute__((constructor)) static void begin(void)
{
	(void)rf_notice_child();
}

RF_API uint32_t rf_generation(void)
{
	(void)rf_notice_child();
	return rf_engine.generation;
}

RF_API int rf_explain_faults(void)
{
	int rc = rf_enter(0);

	if (rc < 0)
		return rc;
	rc = rf_child_fault_arm();
	rf_leave();
	return rc;
}

RF_API uint64_t rf_forks(void)
{
	uint64_t begun;

	(void)rf_notice_child();
	/* In this order: prepare opens the window, then counts. */
	begun = __atomic_load_n(&rf_window.begun, __ATOMIC_SEQ_CST);
	return __atomic_load_n(&rf_window.forks, __ATOMIC_SEQ_CST) ? 0 : begun + 1;
}
