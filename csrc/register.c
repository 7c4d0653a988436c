/* SPDX-License-Identifier: BSD-3-Clause */
/* The ways in and out: of registrations, and of descriptors no child shall have. */
#include "ask.h"
#include "error_text.h"
#include "fork.h"
#include "fork_uses.h"
#include "kernel.h"
#include "prefork.h"
#include "protect.h"
#include "start.h"
#include "window.h"

#include <errno.h>
#include <stdio.h>

/* Each call refuses flags it does not take: a later release may give another bit a meaning. */
#define REGISTER_FLAGS (RF_HELD | RF_NOWAIT | RF_FROM)
#define RELEASE_FLAGS (RF_NOWAIT | RF_UNDO)
#define OMIT_FLAGS RF_MAPPED

/* Refuse arguments that could never be registered, before anything is taken. */
static int check_arguments(uintptr_t start, size_t nbytes, unsigned int flags,
			   enum rf_policy policy, struct rf_error *error)
{
	/* Rounding up to the largest page must not wrap either. */
	const uintptr_t largest_page = (uintptr_t)1 << 34;
	uintptr_t end;

	error->start = start;
	error->end = start + nbytes;
	error->address = start;
	error->nbytes = nbytes;
	if (__builtin_add_overflow(start, nbytes, &end) || end > UINTPTR_MAX - largest_page) {
		error->cause = RF_CAUSE_WRAP;
		return -EOVERFLOW;
	}
	if ((unsigned int)policy >= RF_POLICIES) {
		error->cause = RF_CAUSE_POLICY;
		snprintf(error->text, sizeof(error->text), "%d", (int)policy);
		return -EINVAL;
	}
	if (rf_unlikely(flags & ~REGISTER_FLAGS)) {
		error->cause = RF_CAUSE_FLAGS;
		snprintf(error->text, sizeof(error->text), "0x%x", flags & ~REGISTER_FLAGS);
		return -EINVAL;
	}
	return 0;
}

/* Nothing to mark: the kernel copies, or there is nothing to copy. */
static int keep(struct rf_engine *engine, const struct rf_slot *slot, struct rf_error *error)
{
	int rc;

	if (rf_tracker_trusts(&engine->tracker))
		return 0;
	rc = rf_ask_is_shared(&engine->tracker, slot->start, slot->end);
	if (rc > 0)
		return 0;
	error->cause = RF_CAUSE_NO_PROC;
	if (rc < 0)
		return rc;
	error->cause = RF_CAUSE_POLICY;
	rf_error_untrusted(error);
	return -ENOTSUP;
}

/* The slot is counted. */
static void uncount(struct rf_engine *engine, struct rf_slot *slot)
{
	/* Registrations that wait uncounted rely on others' marks, which may be these. */
	if (engine->mode == RF_MODE_EAGER)
		rf_prefork_count_waiting(&engine->tracker, &engine->registry);
	rf_protect_release(&engine->tracker, slot);
}

/*
 * Take now the room for the bytes that forks must save, so that no fork need ask for memory.
 * A registration that waits has two partial base pages at most, where they are marked.
 */
static inline int reserve_list(struct rf_engine *engine)
{
	const struct rf_tracker *tracker = &engine->tracker;
	uint64_t nbytes = tracker->partial_bytes;

	if (rf_unlikely(!rf_tracker_trusts(tracker)))
		nbytes += 2ull * engine->registry.waiting * tracker->kernel->page_size;
	return rf_child_list_reserve(&engine->list, tracker->ranges.capacity, nbytes);
}

/* Tell of @page, which children lack or get with old content; @why is NULL: they do not. */
static bool name_page(uintptr_t page, size_t page_size, const char *why, struct rf_error *error)
{
	if (rf_likely(!why))
		return false;
	error->start = page;
	error->end = page + page_size;
	error->cause = RF_CAUSE_SHARED_PAGE;
	snprintf(error->text, sizeof(error->text), "%s", why);
	return true;
}

/*
 * The same of the page @slot begins in, or else the one it ends in, if it does not fill them.
 * Malloc's blocks lie in one heap, so one end is enough there.
 */
static __attribute__((noinline)) void name_lost_pages(const struct rf_engine *engine,
						      const struct rf_slot *slot,
						      struct rf_error *error)
{
	const size_t page_size = engine->tracker.kernel->page_size;
	const uintptr_t mask = page_size - 1;
	const uintptr_t first = slot->start & ~mask, last = slot->end & ~mask;
	const bool begins = !slot->start_shift && slot->start & mask;
	const bool ends = !slot->end_shift && slot->end & mask;

	if (!(begins || ends))
		return;
	if (begins && name_page(first, page_size, rf_fork_uses(first, page_size), error))
		return;
	if (ends && name_page(last, page_size, rf_fork_uses(last, page_size), error))
		return;
	/* No system call inside others' marked pages: their registration was warned of these. */
	if (slot->flags & RF_SLOT_COUNTED)
		(void)name_page(begins ? first : last, page_size,
				rf_malloc_uses(begins ? slot->start : slot->end - 1), error);
}

/*
 * The slot is counted, or waits for that. Negative: a fork would have no room for it, and
 * that is undone.
 */
static inline int settle(struct rf_engine *engine, struct rf_slot *slot, struct rf_error *error)
{
	if (rf_unlikely(reserve_list(engine) < 0)) {
		if (slot->flags & RF_SLOT_LISTED)
			rf_registry_unlist(&engine->registry, slot);
		if (slot->flags & RF_SLOT_COUNTED)
			uncount(engine, slot);
		error->cause = RF_CAUSE_ENGINE_MEMORY;
		return -ENOMEM;
	}
	return 0;
}

/* Mark its pages now. */
static int protect_now(struct rf_engine *engine, struct rf_slot *slot, uint32_t index,
		       unsigned int flags, struct rf_error *error)
{
	const bool lazy = engine->mode == RF_MODE_LAZY && flags & RF_HELD;
	unsigned int how = rf_window_is_open() ? RF_PROTECT_FORKING : 0;
	int rc;

	how |= flags & RF_NOWAIT ? RF_PROTECT_NOWAIT : 0;
	/* Memory that is not held puts pages in doubt: first count the slots waiting there. */
	if (engine->mode == RF_MODE_EAGER && !(flags & (RF_HELD | RF_NOWAIT)))
		rf_prefork_count_waiting(&engine->tracker, &engine->registry);
	rc = rf_protect(&engine->tracker, &engine->list, slot, how, error);
	/* In the window, refused: the kernel copies it in the fork under way. */
	if (rc < 0 && lazy && !(how & RF_PROTECT_NOWAIT)) {
		error->cause = RF_CAUSE_NONE;
		rc = RF_PROTECT_COVERED;
	}
	if (rc < 0)
		return rc;
	if (rc != RF_PROTECT_COVERED)
		slot->flags |= RF_SLOT_COUNTED;
	if (rc)
		rf_registry_list(&engine->registry, slot, index);
	rc = settle(engine, slot, error);
	if (rf_unlikely(rc >= 0 && !rf_tracker_trusts(&engine->tracker)))
		name_lost_pages(engine, slot, error);
	return rc;
}

/* -EAGAIN: with RF_NOWAIT, where this would have to call the kernel. */
static inline int protect(struct rf_engine *engine, struct rf_slot *slot, uint32_t index,
			  unsigned int flags, struct rf_error *error)
{
	if (slot->start == slot->end)
		return 0;
	if (rf_unlikely(slot->policy == RF_KEEP)) {
		if (flags & RF_NOWAIT && !rf_tracker_trusts(&engine->tracker))
			return -EAGAIN;
		return keep(engine, slot, error);
	}
	/* In the window no fork handler is to come that would mark it. */
	if (engine->mode == RF_MODE_EAGER || !(flags & RF_HELD) || rf_window_is_open())
		return protect_now(engine, slot, index, flags, error);
	rf_registry_list(&engine->registry, slot, index);
	return 0;
}

/* The engine is entered. */
static int register_entered(uintptr_t start, size_t nbytes, unsigned int flags,
			    enum rf_policy policy, struct rf_handle *handle,
			    struct rf_error *error)
{
	struct rf_engine *engine = &rf_engine;
	struct rf_slot *slot;
	uint32_t index;
	int rc;

	rc = rf_registry_reserve(&engine->registry);
	if (rf_likely(rc >= 0))
		rc = rf_ranges_reserve(&engine->tracker.ranges, engine->registry.live + 1);
	if (rf_likely(rc >= 0))
		rc = rf_child_list_reserve(&engine->list, engine->tracker.ranges.capacity, 0);
	if (rf_unlikely(rc < 0)) {
		error->cause = RF_CAUSE_ENGINE_MEMORY;
		return -ENOMEM;
	}
	slot = rf_registry_take(&engine->registry, start, start + nbytes, &index);
	slot->policy = (uint8_t)policy;
	slot->flags = (uint8_t)((flags & (RF_HELD | RF_FROM)) << 1);
	handle->serial = slot->serial;
	handle->slot = index;
	handle->generation = engine->generation;
	if (rf_unlikely(engine->mode == RF_MODE_NONE)) {
		slot->flags |= RF_SLOT_UNPROTECTED;
		engine->registered++;
		return 0;
	}
	rc = protect(engine, slot, index, flags, error);
	if (rf_unlikely(rc < 0)) {
		rf_registry_take_back(&engine->registry, slot, index);
		handle->serial = 0;
		return rc;
	}
	engine->registered = 1;
	return 1;
}

RF_API int rf_register(const void *address, size_t nbytes, unsigned int flags,
		       enum rf_policy policy, struct rf_handle *handle, struct rf_error *error)
{
	struct rf_engine *engine = &rf_engine;
	struct rf_error unasked;
	int rc;

	error = error ? error : &unasked;
	error->cause = RF_CAUSE_NONE;
	rc = check_arguments((uintptr_t)address, nbytes, flags, policy, error);
	if (rf_unlikely(rc < 0))
		return rc;
	if (rf_unlikely(!__atomic_load_n(&engine->environment_read, __ATOMIC_RELAXED))) {
		if (flags & RF_NOWAIT)
			return -EAGAIN;
		rc = rf_start_by_environment(error);
		if (rc < 0)
			return rc;
		/* rf_start_by_environment() has cleared *@error. */
		error->address = (uintptr_t)address;
		error->nbytes = nbytes;
	}
	rc = rf_enter(flags);
	if (rf_unlikely(rc < 0)) {
		error->cause = rc == -EDEADLK ? RF_CAUSE_SIGNAL : RF_CAUSE_NONE;
		return rc;
	}
	rc = register_entered((uintptr_t)address, nbytes, flags, policy, handle, error);
	rf_leave();
	return rc;
}

/* The engine is entered. */
static int note_origin(struct rf_registry *registry, struct rf_handle handle, const char *where)
{
	struct rf_origin *origin;
	int rc = 0;

	if (!rf_registry_find(registry, handle, &rc))
		return rc;
	rc = rf_memory_grow(&registry->origins, handle.slot + 1);
	if (rc < 0)
		return rc;
	origin = (struct rf_origin *)registry->origins.items + handle.slot;
	origin->serial = handle.serial;
	snprintf(origin->where, sizeof(origin->where), "%s", where);
	return 0;
}

RF_API int rf_registered_at(struct rf_handle handle, const char *where)
{
	int rc = rf_enter(0);

	if (rc < 0)
		return rc;
	rc = note_origin(&rf_engine.registry, handle, where);
	rf_leave();
	return rc;
}

RF_API int rf_release(struct rf_handle handle, unsigned int flags)
{
	struct rf_engine *engine = &rf_engine;
	struct rf_slot *slot;
	int rc, why;

	if (rf_unlikely(flags & ~RELEASE_FLAGS))
		return -EINVAL;
	rc = rf_enter(flags);
	if (rf_unlikely(rc < 0))
		return rc;
	slot = rf_registry_find(&engine->registry, handle, &why);
	if (rf_unlikely(!slot)) {
		rc = why;
	} else if (rf_unlikely(flags & RF_NOWAIT && slot->flags & RF_SLOT_COUNTED)) {
		rc = -EAGAIN;
	} else {
		if (slot->flags & RF_SLOT_LISTED)
			rf_registry_unlist(&engine->registry, slot);
		if (slot->flags & RF_SLOT_COUNTED)
			uncount(engine, slot);
		if (rf_unlikely(flags & RF_UNDO && slot->flags & RF_SLOT_UNPROTECTED))
			engine->registered--;
		rf_registry_put(&engine->registry, slot, handle.slot);
	}
	rf_leave();
	return rc;
}

RF_API int rf_handle_state(struct rf_handle handle)
{
	struct rf_slot *slot;
	int rc = rf_enter(0), why;

	if (rc < 0)
		return rc;
	slot = rf_registry_find(&rf_engine.registry, handle, &why);
	rc = slot ? !(slot->flags & RF_SLOT_UNPROTECTED) : why;
	rf_leave();
	return rc;
}

RF_API int rf_descriptor_omit(int fd, unsigned int flags)
{
	int rc;

	if (flags & ~OMIT_FLAGS)
		return -EINVAL;
	rc = rf_enter(0);
	if (rc < 0)
		return rc;
	rc = rf_descriptors_add(&rf_engine.descriptors, fd, flags & RF_MAPPED);
	rf_leave();
	return rc;
}

RF_API int rf_descriptor_release(int fd)
{
	int rc = rf_enter(0);

	if (rc < 0)
		return rc;
	rc = rf_descriptors_remove(&rf_engine.descriptors, fd);
	rf_leave();
	return rc;
}
