/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What madvise() has been told, as smaps shows it: eager registrations, holes, memory
 * mapped anew, shared memory.
 */
#include "check.h"
#include "fork.h"
#include "prefork.h"

static struct rf_error error;

static int try_register(const void *start, size_t nbytes, unsigned int flags,
			struct rf_handle *handle)
{
	memset(&error, 0, sizeof(error));
	return rf_register(start, nbytes, flags, RF_OMIT, handle, &error);
}

static void eager_marks_before_returning(void)
{
	char *memory = check_map(8);
	struct rf_handle handle;

	check_start(RF_MODE_EAGER);
	handle = check_register(memory + 2 * check_page, 3 * check_page, 0);
	CHECK(check_marked(memory, 8) == 3);
	CHECK(check_flags(memory + 2 * check_page) & CHECK_DC);
	check_sound();
	check_release(handle);
	CHECK(check_marked(memory, 8) == 0);
	check_empty();
}

static void only_pages_filled_are_marked(void)
{
	char *memory = check_map(8);
	struct rf_handle handle;

	check_needs_lazy();
	check_start(RF_MODE_EAGER);
	handle = check_register(memory + 100, 3 * check_page, RF_HELD);
	CHECK(check_marked(memory, 8) == 2);
	CHECK(!(check_flags(memory) & CHECK_DC));
	CHECK(check_child_reads(memory) && check_child_reads(memory + 3 * check_page));
	CHECK(!check_child_reads(memory + check_page));
	CHECK(check_marked(memory, 8) == 2);
	check_release(handle);
	CHECK(check_marked(memory, 8) == 0);
	check_empty();
}

static void untrusted_all_pages_touched_are_marked(void)
{
	char *memory = check_map(8);
	struct rf_handle handle, tiny;

	check_start_untrusted();
	handle = check_register(memory + 100, 3 * check_page, RF_HELD);
	CHECK(check_marked(memory, 8) == 4);
	tiny = check_register(memory + 6 * check_page + 7, 1, 0);
	CHECK(check_marked(memory, 8) == 5);
	check_fork();
	CHECK(check_marked(memory, 8) == 5);
	check_release(handle);
	CHECK(check_marked(memory, 8) == 1);
	check_release(tiny);
	CHECK(check_marked(memory, 8) == 0);
	check_empty();
}

static void registrations_within_a_page_mark_nothing(void)
{
	char *memory = check_map(2);
	struct rf_handle handles[64];
	size_t i;

	check_needs_lazy();
	check_start(RF_MODE_EAGER);
	for (i = 0; i < 64; i++)
		handles[i] = check_register(memory + i * check_page / 64, check_page / 64,
					    i & 1 ? RF_HELD : 0);
	/* Together they fill a page, but none of them does. */
	CHECK(check_child_reads(memory));
	for (i = 0; i < 64; i++)
		check_release(handles[i * 37 % 64]);
	CHECK(check_marked(memory, 2) == 0);
	check_empty();
}

/* ---- Holes ---- */

static void a_hole_is_named_and_nothing_stays_marked(void)
{
	char *memory = check_map(12), *hole = memory + 5 * check_page;
	struct rf_handle handle = { 0 }, before;
	size_t vmas;
	int rc;

	check_start(RF_MODE_EAGER);
	before = check_register(memory + 2 * check_page, check_page, 0);
	check_unmap(hole, 2);
	vmas = check_vmas();
	rc = try_register(memory, 12 * check_page, 0, &handle);
	CHECK(rc == -ENOMEM && error.cause == RF_CAUSE_NOT_MAPPED, "%d, cause %d", rc, error.cause);
	CHECK(error.start == (uintptr_t)hole && error.end == (uintptr_t)hole + 2 * check_page);
	CHECK(check_marked(memory, 12) == 1);
	CHECK(check_vmas() == vmas);
	CHECK(rf_release(handle, 0) == -ESTALE);
	check_sound();
	/* The whole of it unmapped, and the end beyond all mappings. */
	rc = try_register(hole, check_page, 0, &handle);
	CHECK(rc == -ENOMEM && error.cause == RF_CAUSE_NOT_MAPPED);
	CHECK(error.start == (uintptr_t)hole && error.end == (uintptr_t)hole + check_page);
	/* The failure did not harm its neighbours. */
	check_release(before);
	CHECK(check_marked(memory, 12) == 0);
	before = check_register(memory + 4 * check_page, check_page, RF_HELD);
	CHECK(check_marked(memory, 12) == 1);
	check_release(before);
	check_empty();
}

static void ranges_that_wrap_are_refused(void)
{
	static const struct {
		uintptr_t start;
		size_t nbytes;
	} cases[] = {
		{ UINTPTR_MAX, 2 },
		{ UINTPTR_MAX - 4095, 4096 },
		{ 4096, SIZE_MAX },
		{ 1, SIZE_MAX },
		{ UINTPTR_MAX - 8192, 4096 },
		{ (uintptr_t)1 << 63, SIZE_MAX / 2 + 1 },
	};
	struct rf_handle handle = { 0 };
	size_t i, mode;

	for (mode = 0; mode < 2; mode++) {
		for (i = 0; i < COUNT_OF(cases); i++) {
			int rc = try_register((void *)cases[i].start, cases[i].nbytes,
					      mode ? RF_HELD : 0, &handle);

			CHECK(rc == -EOVERFLOW && error.cause == RF_CAUSE_WRAP, "%zu: %d", i, rc);
		}
		check_empty();
		if (!mode)
			check_start(RF_MODE_EAGER);
	}
	CHECK(try_register((void *)((uintptr_t)1 << 62), check_page, 0, &handle) == -ENOMEM);
	CHECK(error.cause == RF_CAUSE_NOT_MAPPED);
	check_empty();
}

static void memory_mapped_anew_is_protected(void)
{
	char *memory = check_map(6);
	struct rf_handle first, second, third;

	check_start(RF_MODE_EAGER);
	first = check_register(memory + check_page, 4 * check_page, 0);
	check_unmap(memory + check_page, 4);
	check_map_over(memory + check_page, 4, MAP_PRIVATE);
	CHECK(check_marked(memory, 6) == 0);
	second = check_register(memory + check_page, 4 * check_page, 0);
	CHECK(check_marked(memory, 6) == 4);
	/* And for a registration that holds the memory, beside others that do not. */
	check_unmap(memory + check_page, 4);
	check_map_over(memory + check_page, 4, MAP_PRIVATE);
	third = check_register(memory + 2 * check_page, 2 * check_page, RF_HELD);
	CHECK(check_marked(memory, 6) == 2);
	check_release(first);
	check_release(second);
	CHECK(check_marked(memory, 6) == 2);
	check_release(third);
	CHECK(check_marked(memory, 6) == 0);
	check_empty();
}

/* What was shared when somebody who does not hold it registered may be private by now. */
static void a_stale_nature_is_not_believed(enum rf_mode mode, unsigned int flags)
{
	char *memory = check_map(4);
	struct rf_handle first, second;
	int sharing;

	check_start(mode);
	for (sharing = 0; sharing < 2; sharing++) {
		check_map_over(memory, 4, sharing ? MAP_SHARED : MAP_PRIVATE);
		first = check_register(memory, 4 * check_page, 0);
		check_fork();
		CHECK(check_marked(memory, 4) == (sharing ? 0 : 4));
		check_map_over(memory, 4, sharing ? MAP_PRIVATE : MAP_SHARED);
		second = check_register(memory, 4 * check_page, flags);
		CHECK(check_child_reads(memory) == !sharing, "%s",
		      sharing ? "now private, but not marked" : "now shared, but marked");
		CHECK(check_marked(memory, 4) == (sharing ? 4 : 0));
		check_release(first);
		CHECK(check_marked(memory, 4) == (sharing ? 4 : 0));
		check_release(second);
		CHECK(check_marked(memory, 4) == 0);
	}
	check_empty();
}

static void mapped_anew_as_another_kind_eager_held(void)
{
	a_stale_nature_is_not_believed(RF_MODE_EAGER, RF_HELD);
}

static void mapped_anew_as_another_kind_eager_unheld(void)
{
	a_stale_nature_is_not_believed(RF_MODE_EAGER, 0);
}

static void mapped_anew_as_another_kind_lazy_held(void)
{
	check_needs_lazy();
	a_stale_nature_is_not_believed(RF_MODE_LAZY, RF_HELD);
}

/* A refused call has half done its work: marks on memory that has become shared, too. */
static void a_failure_leaves_no_mark_on_shared_memory(void)
{
	char *memory = check_map(8);
	struct rf_handle stale, none = { 0 };

	check_start(RF_MODE_EAGER);
	stale = check_register(memory, 4 * check_page, 0);
	check_fork();
	check_map_over(memory, 4, MAP_SHARED);
	check_unmap(memory + 6 * check_page, 1);
	CHECK(try_register(memory, 8 * check_page, 0, &none) == -ENOMEM);
	CHECK(check_child_reads(memory), "the child has lost shared memory");
	check_release(stale);
	CHECK(check_marked(memory, 8) == 0);
	check_empty();
}

static void memory_unmapped_before_its_release(void)
{
	char *memory = check_map(6);
	struct rf_handle all, middle;

	check_start(RF_MODE_EAGER);
	all = check_register(memory, 6 * check_page, 0);
	middle = check_register(memory + 2 * check_page, 2 * check_page, 0);
	check_unmap(memory + check_page, 2);
	check_release(all);
	check_sound();
	CHECK(check_marked(memory, 6) == 1);
	check_release(middle);
	CHECK(check_marked(memory, 6) == 0);
	check_empty();
}

/* ---- Shared memory ---- */

static void shared_memory_stays_with_the_child(void)
{
	char *memory = check_map_shared(4), *private = check_map(4);
	struct rf_handle handles[4];
	unsigned int mode;

	for (mode = 0; mode < 2; mode++) {
		struct rf_kernel kernel;

		rf_kernel_info(&kernel);
		if (mode && !kernel.copy_trusted)
			break;
		if (mode && fork()) {
			int status;

			wait(&status);
			_exit(WEXITSTATUS(status));
		}
		check_start(mode ? RF_MODE_LAZY : RF_MODE_EAGER);
		handles[0] = check_register(memory, 4 * check_page, 0);
		handles[1] = check_register(memory + 10, 2 * check_page, RF_HELD);
		handles[2] = check_register(private, 4 * check_page, 0);
		handles[3] = check_register(private + 10, 2 * check_page, RF_HELD);
		CHECK(check_child_reads(memory) && check_child_reads(memory + check_page));
		CHECK(!check_child_reads(private + check_page));
		CHECK(check_marked(memory, 4) == 0 && check_marked(private, 4) == 4);
		check_sound();
		check_release(handles[0]);
		check_release(handles[3]);
		CHECK(check_child_reads(memory));
		check_release(handles[2]);
		check_release(handles[1]);
		CHECK(check_marked(memory, 4) == 0 && check_marked(private, 4) == 0);
		check_empty();
	}
}

static void shared_and_private_in_one_registration(void)
{
	char *memory = check_map(9);
	struct rf_handle handle, inner;

	check_map_over(memory + 3 * check_page, 3, MAP_SHARED);
	check_start(RF_MODE_EAGER);
	handle = check_register(memory, 9 * check_page, RF_HELD);
	check_fork();
	CHECK(check_marked(memory, 9) == 6);
	CHECK(check_child_reads(memory + 4 * check_page) && !check_child_reads(memory));
	inner = check_register(memory + 2 * check_page, 2 * check_page, 0);
	CHECK(check_child_reads(memory + 4 * check_page));
	check_release(handle);
	CHECK(check_marked(memory, 9) == 1 || check_marked(memory, 9) == 2);
	check_fork();
	CHECK(check_marked(memory, 9) == 1);
	check_release(inner);
	CHECK(check_marked(memory, 9) == 0);
	check_empty();
}

/* ---- Marks that others take away ---- */

static void marks_that_others_take_away_are_back_at_the_fork(void)
{
	char *memory = check_map(8);
	struct rf_handle held, unheld;

	setenv("RDMAV_FORK_SAFE", "0", 1);
	check_start(RF_MODE_EAGER);
	held = check_register(memory + check_page, 2 * check_page, RF_HELD);
	unheld = check_register(memory + 5 * check_page, 2 * check_page, 0);
	CHECK(madvise(memory, 8 * check_page, MADV_DOFORK) == 0);
	CHECK(check_marked(memory, 8) == 0);
	CHECK(!check_child_reads(memory + check_page));
	CHECK(!check_child_reads(memory + 2 * check_page));
	CHECK(check_child_reads(memory + 3 * check_page));
	/* It may be another's memory by now. */
	CHECK(check_child_reads(memory + 5 * check_page));
	CHECK(check_marked(memory, 8) == 2);
	check_release(unheld);
	check_release(held);
	CHECK(check_marked(memory, 8) == 0);
	check_empty();
}

/*
 * What could not be unmarked while it was shared memory is wanted once other memory is
 * mapped and registered there: nothing tries to unmark that.
 */
static void a_mark_that_is_wanted_again_is_not_taken_away(void)
{
	char *memory = check_map(8), *at = memory + 2 * check_page;
	struct rf_handle unheld, held, other;
	const struct rf_range *range;
	unsigned int retried = 0;
	unsigned long nth;

	check_start(RF_MODE_EAGER);
	for (nth = 1; nth < 20; nth++) {
		check_map_over(at, 1, MAP_SHARED);
		unheld = check_register(at, check_page, 0);
		inject_from(nth, ENOMEM);
		CHECK(rf_enter(0) == 0);
		rf_prefork(&rf_engine.tracker, &rf_engine.registry, &rf_engine.list);
		rf_leave();
		inject(0, 0);
		range = rf_ranges_find(&rf_engine.tracker.ranges, (uintptr_t)at);
		retried += range && range->flags & RF_RANGE_RETRY;
		check_map_over(at, 1, MAP_PRIVATE);
		held = check_register(at, check_page, RF_HELD);
		CHECK(check_marked(at, 1) == 1);
		other = check_register(memory + 5 * check_page, check_page, RF_HELD);
		check_release(other);
		CHECK(check_marked(at, 1) == 1, "call %lu", nth);
		check_fork();
		CHECK(check_marked(at, 1) == 1, "call %lu", nth);
		check_release(unheld);
		check_release(held);
		CHECK(check_marked(memory, 8) == 0);
		check_empty();
	}
	CHECK(retried);
}

/* It drops the marks of registered shared memory, and looks for them in these ranges alone. */
static void a_fork_inside_the_engine_keeps_marks_of_the_program(void)
{
	char *before = check_map_shared(2), *shared = check_map_shared(4);
	char *after = check_map_shared(2);
	struct rf_handle handle;

	check_start(RF_MODE_EAGER);
	CHECK(madvise(before, 2 * check_page, MADV_DONTFORK) == 0);
	CHECK(madvise(after, 2 * check_page, MADV_DONTFORK) == 0);
	handle = check_register(shared, 2 * check_page, RF_HELD);
	CHECK(madvise(shared + 3 * check_page, check_page, MADV_DONTFORK) == 0);
	CHECK(check_marked(shared, 4) == 3);
	/* As a signal handler does it in the middle of a registration. */
	CHECK(rf_enter(0) == 0);
	CHECK(check_child_reads(shared));
	rf_leave();
	CHECK(rf_engine.forks_unmarked == 1);
	CHECK(check_marked(shared, 3) == 0 && check_marked(shared + 3 * check_page, 1) == 1);
	CHECK(check_marked(before, 2) == 2 && check_marked(after, 2) == 2);
	check_release(handle);
	check_empty();
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(a_mark_that_is_wanted_again_is_not_taken_away),
		SCENARIO(eager_marks_before_returning),
		SCENARIO(only_pages_filled_are_marked),
		SCENARIO(untrusted_all_pages_touched_are_marked),
		SCENARIO(registrations_within_a_page_mark_nothing),
		SCENARIO(a_hole_is_named_and_nothing_stays_marked),
		SCENARIO(ranges_that_wrap_are_refused),
		SCENARIO(memory_mapped_anew_is_protected),
		SCENARIO(mapped_anew_as_another_kind_eager_held),
		SCENARIO(mapped_anew_as_another_kind_eager_unheld),
		SCENARIO(mapped_anew_as_another_kind_lazy_held),
		SCENARIO(a_failure_leaves_no_mark_on_shared_memory),
		SCENARIO(memory_unmapped_before_its_release),
		SCENARIO(shared_memory_stays_with_the_child),
		SCENARIO(shared_and_private_in_one_registration),
		SCENARIO(marks_that_others_take_away_are_back_at_the_fork),
		SCENARIO(a_fork_inside_the_engine_keeps_marks_of_the_program),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
