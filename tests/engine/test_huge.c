/* SPDX-License-Identifier: BSD-3-Clause */
/* Huge pages are marked as a whole, alone and among base pages. */
#include "check.h"
#include "engine.h"

#include <signal.h>
#include <sys/resource.h>

static void huge_pages_are_marked_whole(void)
{
	char *memory = check_map_huge(3, MAP_PRIVATE);
	struct rf_handle tiny, across, all;
	unsigned int mode;

	check_needs_lazy();
	for (mode = 0; mode < 2; mode++) {
		unsigned int flags = mode ? RF_HELD : 0;

		check_start(RF_MODE_EAGER);
		tiny = check_register(memory + CHECK_HUGE + 100, 64, flags);
		check_fork();
		check_read_smaps();
		CHECK(check_flags_read(memory + CHECK_HUGE) & CHECK_DC);
		CHECK(!(check_flags_read(memory) & CHECK_DC));
		CHECK(!(check_flags_read(memory + 2 * CHECK_HUGE) & CHECK_DC));
		across = check_register(memory + CHECK_HUGE - check_page, 2 * check_page, flags);
		check_fork();
		CHECK(check_flags(memory) & CHECK_DC);
		all = check_register(memory, 3 * CHECK_HUGE, flags);
		CHECK(check_flags(memory + 2 * CHECK_HUGE) & CHECK_DC);
		check_sound();
		check_release(across);
		check_release(all);
		check_read_smaps();
		CHECK(!(check_flags_read(memory) & CHECK_DC));
		CHECK(check_flags_read(memory + CHECK_HUGE) & CHECK_DC);
		CHECK(!(check_flags_read(memory + 2 * CHECK_HUGE) & CHECK_DC));
		check_release(tiny);
		CHECK(!(check_flags(memory + CHECK_HUGE) & CHECK_DC));
		check_empty();
	}
}

/* Memory that is not held cannot wait for the round of questions of the next fork. */
static void small_buffers_on_base_pages_are_registered_without_proc(void)
{
	char *memory = check_map(4), *huge = check_map_huge(1, MAP_PRIVATE);
	struct rf_handle small, across, in_huge;
	uint64_t questions;

	check_needs_lazy();
	check_start(RF_MODE_LAZY);
	rf_engine.tracker.reader.query = false;
	questions = rf_engine.tracker.reader.questions;
	small = check_register(memory + 100, 64, 0);
	across = check_register(memory + 2 * check_page - 8, check_page + 16, 0);
	CHECK(rf_engine.tracker.reader.questions == questions);
	in_huge = check_register(huge + 100, 64, 0);
	CHECK(rf_engine.tracker.reader.questions > questions);
	CHECK(check_flags(huge) & CHECK_DC);
	CHECK(check_marked(memory, 4) == 1);
	check_release(in_huge);
	check_release(small);
	check_release(across);
	check_empty();
}

/* Nothing can be saved for the child, so the kernel copies. */
static void without_memory_for_copies_partial_huge_pages_are_the_kernel_s(void)
{
	const struct rlimit none = { 0, RLIM_INFINITY }, any = { RLIM_INFINITY, RLIM_INFINITY };
	char *memory = check_map_huge(2, MAP_PRIVATE);
	struct rf_handle handle;
	pid_t child;

	if (CHECK_TSAN)
		check_skip("ThreadSanitizer needs memory of its own");
	check_needs_lazy();
	check_start(RF_MODE_LAZY);
	memset(memory, 7, 2 * CHECK_HUGE);
	handle = check_register(memory + CHECK_HUGE + 100, 64, RF_HELD);
	CHECK(!setrlimit(RLIMIT_AS, &none));
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		signal(SIGSEGV, SIG_DFL);
		_exit(memory[CHECK_HUGE]);
	}
	CHECK(!setrlimit(RLIMIT_AS, &any));
	CHECK(check_wait(child) == 7);
	check_sound();
	check_fork();
	CHECK(check_flags(memory + CHECK_HUGE) & CHECK_DC);
	check_release(handle);
	check_empty();
}

static void huge_pages_wait_for_the_fork(void)
{
	char *memory = check_map_huge(3, MAP_PRIVATE);
	struct rf_handle tiny, across;

	check_needs_lazy();
	check_start(RF_MODE_LAZY);
	tiny = check_register(memory + CHECK_HUGE + 100, 64, RF_HELD);
	across = check_register(memory + 2 * CHECK_HUGE - 64, 128, RF_HELD);
	CHECK(!(check_flags(memory + CHECK_HUGE) & CHECK_DC));
	check_fork();
	check_read_smaps();
	CHECK(check_flags_read(memory + CHECK_HUGE) & CHECK_DC);
	CHECK(check_flags_read(memory + 2 * CHECK_HUGE) & CHECK_DC);
	CHECK(!(check_flags_read(memory) & CHECK_DC));
	check_release(tiny);
	CHECK(check_flags(memory + CHECK_HUGE) & CHECK_DC);
	check_release(across);
	CHECK(!(check_flags(memory + CHECK_HUGE) & CHECK_DC));
	check_empty();
}

/* Before a fork too: a raw child would have it. Either half of the page is the other's. */
static void a_huge_page_that_another_wants_stays_marked(void)
{
	char *memory = check_map_huge(1, MAP_PRIVATE);
	struct rf_handle all, half;
	size_t i;

	check_start(RF_MODE_EAGER);
	for (i = 0; i < 2; i++) {
		all = check_register(memory, CHECK_HUGE, RF_HELD);
		half = check_register(memory + i * CHECK_HUGE / 2, CHECK_HUGE / 2, RF_HELD);
		check_release(all);
		CHECK(check_flags(memory) & CHECK_DC, "half %zu", i);
		check_release(half);
		CHECK(!(check_flags(memory) & CHECK_DC));
		check_empty();
	}
}

/* A fork does not ask about the ends of memory that is not held: they may be another's by now. */
static void huge_pages_that_come_after_memory_stay(void)
{
	const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
	const int protection = PROT_READ | PROT_WRITE;
	const size_t nbytes = 3 * CHECK_HUGE;
	char *place = check_map_huge(3, MAP_PRIVATE);
	struct rf_handle handle;

	CHECK(mmap(place, nbytes, protection, flags, -1, 0) == place);
	check_start(RF_MODE_EAGER);
	handle = check_register(place, 2 * CHECK_HUGE + 100, 0);
	CHECK(mmap(place, nbytes, protection, flags | MAP_HUGETLB | (21 << 26), -1, 0) == place);
	CHECK(check_child_reads(place));
	check_release(handle);
	check_empty();
}

static void a_failure_among_huge_pages_leaves_no_mark(void)
{
	char *huge = check_map_huge(3, MAP_PRIVATE) + CHECK_HUGE, *at = huge - 2 * check_page;
	static const size_t ends[] = { 4096 + 64, 5 * 4096, CHECK_HUGE + 4096 };
	struct rf_handle handle;
	struct rf_error error;
	size_t i;

	/* Base pages below, and holes on both sides. */
	check_unmap(huge - CHECK_HUGE, CHECK_HUGE / check_page);
	check_unmap(huge + CHECK_HUGE, CHECK_HUGE / check_page);
	check_map_over(at, 1, MAP_PRIVATE);
	check_start(RF_MODE_EAGER);
	for (i = 0; i < COUNT_OF(ends); i++) {
		CHECK(rf_register(at, check_page + ends[i], 0, RF_OMIT, &handle, &error) ==
		      -ENOMEM);
		CHECK(error.cause == RF_CAUSE_NOT_MAPPED);
		check_read_smaps();
		CHECK(!(check_flags_read(at) & CHECK_DC) && !(check_flags_read(huge) & CHECK_DC));
	}
	CHECK(rf_register(huge + CHECK_HUGE - 5 * check_page, 6 * check_page, 0, RF_OMIT, &handle,
			  &error) == -ENOMEM);
	CHECK(!(check_flags(huge) & CHECK_DC));
	check_fork();
	CHECK(!(check_flags(huge) & CHECK_DC));
	check_empty();
}

/* The mark of the base page that was there divides the ranges, and the huge page has none yet. */
static void a_huge_page_over_a_marked_base_page_is_marked_whole(void)
{
	const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
	const int protection = PROT_READ | PROT_WRITE;
	char *place = check_map_huge(1, MAP_PRIVATE);
	struct rf_handle stale, held;

	CHECK(mmap(place, CHECK_HUGE, protection, flags, -1, 0) == place);
	check_start(RF_MODE_EAGER);
	stale = check_register(place + 3 * check_page, check_page, 0);
	CHECK(mmap(place, CHECK_HUGE, protection, flags | MAP_HUGETLB | (21 << 26), -1, 0) ==
	      place);
	held = check_register(place + CHECK_HUGE / 2 + 100, 64, RF_HELD);
	check_fork();
	CHECK(check_flags(place) & CHECK_DC);
	check_sound();
	check_release(held);
	check_release(stale);
	CHECK(!(check_flags(place) & CHECK_DC));
	check_empty();
}

/* Base pages, huge pages, base pages; every pair of partly overlapping ranges, every order. */
static void mixed_pages(bool query, bool whole)
{
	char *huge = check_map_huge(4, MAP_PRIVATE);
	static const size_t cuts[] = { 0, 100, CHECK_HUGE / 2, CHECK_HUGE, CHECK_HUGE + 4096,
				       2 * CHECK_HUGE - 64, 2 * CHECK_HUGE, 3 * CHECK_HUGE };
	struct rf_handle handles[3];
	unsigned long round, rounds = check_scale(400);
	size_t i;

	/* The first and the last huge page give way to base pages. */
	check_map_over(huge, CHECK_HUGE / check_page, MAP_PRIVATE);
	check_map_over(huge + 3 * CHECK_HUGE, CHECK_HUGE / check_page, MAP_PRIVATE);
	if (whole)
		check_distrust_copying();
	check_start(RF_MODE_EAGER);
	if (!query)
		rf_engine.tracker.reader.query = false;
	for (round = 0; round < rounds; round++) {
		size_t used = 0, left = 3;
		const char *starts[3], *ends[3];

		for (i = 0; i < 3; i++) {
			size_t from = cuts[check_below(COUNT_OF(cuts))] + CHECK_HUGE / 2;
			size_t nbytes = 1 + cuts[check_below(COUNT_OF(cuts) - 1)];

			if (from + nbytes > 4 * CHECK_HUGE)
				nbytes = 4 * CHECK_HUGE - from;
			starts[i] = huge + from;
			ends[i] = starts[i] + nbytes;
			handles[i] = check_register(starts[i], nbytes,
						    check_below(2) ? RF_HELD : 0);
			used++;
		}
		if (check_below(2))
			check_fork();
		while (left) {
			size_t which = check_below(left), page;

			check_release(handles[which]);
			left--;
			handles[which] = handles[left];
			starts[which] = starts[left];
			ends[which] = ends[left];
			check_sound();
			if (check_below(2))
				check_fork();
			check_read_smaps();
			for (page = 0; page < 2; page++) {
				char *at = huge + (1 + page) * CHECK_HUGE;
				bool touched = false;

				for (i = 0; i < left; i++)
					touched |= starts[i] < at + CHECK_HUGE && at < ends[i];
				/* Not registered: not marked. Pending ends wait for the fork. */
				CHECK(touched || !(check_flags_read(at) & CHECK_DC),
				      "round %lu: a huge page nobody registered is marked", round);
			}
		}
		check_empty();
		check_read_smaps();
		for (i = 0; i < 4 * CHECK_HUGE; i += check_page)
			CHECK(!(check_flags_read(huge + i) & CHECK_DC));
	}
}

static void mixed_pages_asked_by_query(void)
{
	mixed_pages(true, false);
}

static void mixed_pages_asked_by_text(void)
{
	mixed_pages(false, false);
}

static void mixed_pages_untrusted(void)
{
	mixed_pages(true, true);
}

static void mixed_pages_untrusted_by_text(void)
{
	mixed_pages(false, true);
}

/* Shared huge pages are never marked after a fork, nor left so by partial releases. */
static void shared_huge_pages(bool query)
{
	char *memory = check_map_huge(2, MAP_SHARED);
	struct rf_handle all, part;
	unsigned int order;

	check_start_untrusted();
	if (!query)
		rf_engine.tracker.reader.query = false;
	for (order = 0; order < 4; order++) {
		all = check_register(memory, 2 * CHECK_HUGE, 0);
		part = check_register(memory + CHECK_HUGE / 2, CHECK_HUGE, RF_HELD);
		if (order & 2) {
			check_fork();
			CHECK(!(check_flags(memory) & CHECK_DC));
		}
		check_release(order & 1 ? all : part);
		check_release(order & 1 ? part : all);
		check_read_smaps();
		CHECK(!(check_flags_read(memory) & CHECK_DC), "order %u: marked for good", order);
		CHECK(!(check_flags_read(memory + CHECK_HUGE) & CHECK_DC));
		check_empty();
	}
}

static void shared_huge_pages_by_query(void)
{
	shared_huge_pages(true);
}

static void shared_huge_pages_by_text(void)
{
	shared_huge_pages(false);
}

/* The second registration found its page marked, and has not learned that it is huge. */
static void marks_that_others_take_from_huge_pages_are_back_too(void)
{
	char *huge = check_map_huge(1, MAP_PRIVATE);
	struct rf_handle first, second, third;
	unsigned int whole;

	memset(huge, 7, CHECK_HUGE);
	setenv("RDMAV_FORK_SAFE", "", 1);
	setenv("RDMAFORK_TRUST_COPYING", check_random() & 1 ? "0" : "1", 1);
	check_start(RF_MODE_EAGER);
	for (whole = 0; whole < 2; whole++) {
		first = check_register(huge + 777, 100001, RF_HELD);
		second = check_register(huge + 777, 100001, RF_HELD);
		check_release(first);
		CHECK(madvise(huge, CHECK_HUGE, MADV_DOFORK) == 0);
		/* Beside it, before the fork: the page is marked as a whole. */
		if (whole) {
			third = check_register(huge + (1 << 20), 5000, RF_HELD);
			CHECK(check_flags(huge) & CHECK_DC);
			check_release(third);
			CHECK(madvise(huge, CHECK_HUGE, MADV_DOFORK) == 0);
		}
		check_fork();
		CHECK(check_flags(huge) & CHECK_DC);
		check_release(second);
		CHECK(!(check_flags(huge) & CHECK_DC));
		check_empty();
	}
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO_HUGE(marks_that_others_take_from_huge_pages_are_back_too),
		SCENARIO_HUGE(huge_pages_are_marked_whole),
		SCENARIO_HUGE(without_memory_for_copies_partial_huge_pages_are_the_kernel_s),
		SCENARIO_HUGE(huge_pages_wait_for_the_fork),
		SCENARIO_HUGE(small_buffers_on_base_pages_are_registered_without_proc),
		SCENARIO_HUGE(a_huge_page_that_another_wants_stays_marked),
		SCENARIO_HUGE(huge_pages_that_come_after_memory_stay),
		SCENARIO_HUGE(a_failure_among_huge_pages_leaves_no_mark),
		SCENARIO_HUGE(a_huge_page_over_a_marked_base_page_is_marked_whole),
		SCENARIO_HUGE(mixed_pages_asked_by_query),
		SCENARIO_HUGE(mixed_pages_asked_by_text),
		SCENARIO_HUGE(mixed_pages_untrusted),
		SCENARIO_HUGE(mixed_pages_untrusted_by_text),
		SCENARIO_HUGE(shared_huge_pages_by_query),
		SCENARIO_HUGE(shared_huge_pages_by_text),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
