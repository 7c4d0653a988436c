/* SPDX-License-Identifier: BSD-3-Clause */
/* Mappings are short: the budget of the engine's own, and the kernel's limit. */
#include "check.h"
#include "engine.h"
#include "kernel.h"
#include "sys.h"

static struct rf_error error;

#define PIECES 40

static void the_budget_is_kept_and_unmarked_bytes_are_counted(void)
{
	char *memory = check_map(2 * PIECES);
	struct rf_handle handles[PIECES];
	struct rf_stats stats;
	size_t i;

	check_needs_lazy();
	check_start(RF_MODE_EAGER);
	rf_engine.tracker.vma_budget = 32;
	for (i = 0; i < PIECES; i++) {
		handles[i] = check_register(memory + 2 * i * check_page, check_page, RF_HELD);
		CHECK(rf_stats(&stats) == 0 && stats.vmas <= 32);
		CHECK(stats.unmarked_ranges == (i < 16 ? 0 : i - 15));
		CHECK(stats.unmarked_bytes == stats.unmarked_ranges * check_page);
	}
	CHECK(check_marked(memory, 2 * PIECES) == 16);
	check_fork();
	CHECK(check_marked(memory, 2 * PIECES) == 16);
	for (i = 0; i < 10; i++)
		check_release(handles[i]);
	check_sound();
	check_fork();
	CHECK(rf_stats(&stats) == 0 && stats.vmas <= 32 && stats.unmarked_ranges == PIECES - 26);
	CHECK(check_marked(memory, 2 * PIECES) == 16);
	for (; i < PIECES; i++)
		check_release(handles[i]);
	CHECK(check_marked(memory, 2 * PIECES) == 0);
	check_empty();
}

static void a_fork_gives_vmas_to_the_longest_runs(void)
{
	char *memory = check_map(2 * PIECES + 64);
	struct rf_handle handles[PIECES + 1];
	struct rf_stats stats;
	size_t i;

	check_needs_lazy();
	check_start(RF_MODE_LAZY);
	rf_engine.tracker.vma_budget = 32;
	for (i = 0; i < PIECES; i++)
		handles[i] = check_register(memory + 2 * i * check_page, check_page, RF_HELD);
	handles[i] = check_register(memory + 2 * PIECES * check_page, 64 * check_page, RF_HELD);
	check_fork();
	CHECK(rf_stats(&stats) == 0 && stats.vmas == 32);
	CHECK(stats.unmarked_ranges == PIECES + 1 - 16);
	CHECK(check_marked(memory + 2 * PIECES * check_page, 64) == 64);
	for (i = 0; i <= PIECES; i++)
		check_release(handles[i]);
	CHECK(check_marked(memory, 2 * PIECES + 64) == 0);
	check_empty();
}

static void past_the_budget_nothing_is_claimed_where_copying_is_not_trusted(void)
{
	char *memory = check_map(2 * PIECES);
	struct rf_handle handles[PIECES], handle;
	size_t i;

	check_start_untrusted();
	rf_engine.tracker.vma_budget = 2 * PIECES - 2;
	for (i = 0; i < PIECES - 1; i++)
		handles[i] = check_register(memory + 2 * i * check_page, check_page, RF_HELD);
	CHECK(rf_register(memory + 2 * i * check_page, check_page, RF_HELD, RF_OMIT, &handle,
			  &error) == -ENOMEM);
	CHECK(error.cause == RF_CAUSE_VMA_LIMIT);
	CHECK(check_marked(memory, 2 * PIECES) == PIECES - 1);
	check_release(handles[0]);
	handles[0] = check_register(memory + 2 * i * check_page, check_page, RF_HELD);
	CHECK(check_marked(memory, 2 * PIECES) == PIECES - 1);
	for (i = 0; i < PIECES - 1; i++)
		check_release(handles[i]);
	check_empty();
}

static void at_the_budget_memory_beside_a_marked_page_is_marked(void)
{
	char *memory = check_map(2 * PIECES);
	struct rf_handle handles[PIECES], beside, alone;
	size_t i;

	check_needs_lazy();
	check_start(RF_MODE_EAGER);
	rf_engine.tracker.vma_budget = 2 * 10;
	for (i = 0; i < 10; i++)
		handles[i] = check_register(memory + 3 * i * check_page, check_page, RF_HELD);
	beside = check_register(memory + check_page, check_page, RF_HELD);
	CHECK(check_marked(memory, 2 * PIECES) == 11);
	alone = check_register(memory + 35 * check_page, check_page, RF_HELD);
	CHECK(check_marked(memory, 2 * PIECES) == 11);
	for (i = 0; i < 10; i++)
		check_release(handles[i]);
	check_release(beside);
	check_release(alone);
	check_empty();
}

/*
 * At the budget, where nothing more may be marked, memory mapped anew is: its mark, which
 * is gone, is counted already, and what touches it takes no VMA more.
 */
static void at_the_budget_too_memory_mapped_anew_is_protected(void)
{
	char *memory = check_map(2 * PIECES), *at = memory + 4 * check_page;
	struct rf_handle first, wider, other, pieces[PIECES];
	struct rf_range_info info[PIECES];
	ssize_t count;
	size_t i, used = 0;

	check_needs_lazy();
	check_start(RF_MODE_EAGER);
	rf_engine.tracker.vma_budget = 8;
	first = check_register(at, 2 * check_page, 0);
	for (i = 5; i < 12; i++)
		pieces[used++] = check_register(memory + 2 * i * check_page, check_page, RF_HELD);
	CHECK(rf_engine.tracker.ranges.mark_edges == 8);
	check_map_over(at, 2, MAP_PRIVATE);
	CHECK(check_marked(at, 2) == 0);
	wider = check_register(at, 4 * check_page, 0);
	CHECK(check_marked(at, 4) == 4);
	CHECK(rf_engine.tracker.ranges.mark_edges == 8);
	/* A page without any mark waits, and is not listed as marked. */
	other = check_register(memory, check_page, 0);
	CHECK(check_marked(memory, 1) == 0);
	count = rf_list(info, PIECES);
	CHECK(count >= 2 && info[0].start == (uintptr_t)memory);
	CHECK(info[0].protection == RF_BY_KERNEL && info[1].protection == RF_BY_MARK);
	check_release(first);
	check_release(wider);
	check_release(other);
	while (used)
		check_release(pieces[--used]);
	CHECK(check_marked(memory, 2 * PIECES) == 0);
	check_empty();
}

/* A mark that could not be given up is at the next fork, and then may be made again. */
static void a_run_that_could_not_be_left_to_the_kernel_is_left_once(void)
{
	char *memory = check_map(5);
	struct rf_handle handles[5];
	struct rf_stats stats;
	uint64_t calls;
	size_t i;

	check_needs_lazy();
	check_start(RF_MODE_EAGER);
	for (i = 0; i < 5; i++)
		handles[i] = check_register(memory + i * check_page, check_page, RF_HELD);
	rf_engine.tracker.vma_budget = 2;
	/* Its own page is unmarked, and nothing of what is one run too many by that. */
	inject_from(2, ENOMEM);
	check_release(handles[2]);
	inject(0, 0);
	CHECK(rf_stats(&stats) == 0 && stats.unmarked_ranges == 1);
	CHECK(check_marked(memory, 5) == 4);
	check_sound();
	check_fork();
	CHECK(rf_stats(&stats) == 0 && stats.unmarked_ranges == 1);
	CHECK(check_marked(memory, 5) == 2);
	rf_engine.tracker.vma_budget = 32;
	check_fork();
	CHECK(rf_stats(&stats) == 0 && stats.unmarked_ranges == 0);
	CHECK(check_marked(memory, 5) == 4);
	calls = stats.madvise_calls;
	check_fork();
	CHECK(rf_stats(&stats) == 0 && stats.madvise_calls == calls);
	CHECK(check_marked(memory, 5) == 4);
	for (i = 0; i < 5; i++)
		if (i != 2)
			check_release(handles[i]);
	CHECK(check_marked(memory, 5) == 0);
	check_empty();
}

/* Neighbours merged in one VMA, then every second one is given back. */
static void releases_keep_to_the_budget_too(void)
{
	char *memory = check_map(2 * PIECES);
	struct rf_handle handles[2 * PIECES];
	struct rf_stats stats;
	size_t i, vmas;

	check_needs_lazy();
	check_start(RF_MODE_EAGER);
	rf_engine.tracker.vma_budget = 32;
	for (i = 0; i < 2 * PIECES; i++)
		handles[i] = check_register(memory + i * check_page, check_page, RF_HELD);
	CHECK(check_marked(memory, 2 * PIECES) == 2 * PIECES);
	vmas = check_vmas();
	for (i = 0; i < 2 * PIECES; i += 2)
		check_release(handles[i]);
	check_sound();
	CHECK(rf_stats(&stats) == 0);
	CHECK(stats.vmas <= stats.vma_budget, "%lu of %lu VMAs", (unsigned long)stats.vmas,
	      (unsigned long)stats.vma_budget);
	CHECK(check_vmas() <= vmas + 32);
	for (i = 1; i < 2 * PIECES; i += 2)
		check_release(handles[i]);
	CHECK(check_marked(memory, 2 * PIECES) == 0);
	check_empty();
}

static void check_budget(const char *when)
{
	const struct rf_tracker *tracker = &rf_engine.tracker;

	check_sound();
	CHECK(tracker->ranges.mark_edges <= tracker->vma_budget, "%s: %u of %lu", when,
	      tracker->ranges.mark_edges, (unsigned long)tracker->vma_budget);
}

/* A range that touches pages with another mark takes a VMA for itself. */
static void ranges_beside_wiped_pages_keep_to_the_budget(void)
{
	char *memory = check_map(8 * PIECES);
	struct rf_handle handles[3 * PIECES];
	size_t i, used = 0;

	check_needs_lazy();
	check_start(RF_MODE_EAGER);
	rf_engine.tracker.vma_budget = 2 * PIECES + 2;
	for (i = 0; i < PIECES; i++)
		handles[used++] = check_register_as(memory + (8 * i + 2) * check_page, check_page,
						    RF_WIPE);
	check_fork();
	CHECK(check_flags(memory + 2 * check_page) & CHECK_WF);
	check_budget("wiped");
	for (i = 0; i < PIECES; i++) {
		handles[used++] = check_register_as(memory + (8 * i + 1) * check_page, check_page,
						    RF_OMIT);
		handles[used++] = check_register_as(memory + (8 * i + 3) * check_page, check_page,
						    RF_OMIT);
		check_budget("registered beside");
	}
	check_fork();
	check_budget("forked");
	while (used)
		check_release(handles[--used]);
	check_fork();
	check_empty();
}

/* Pages that children are to find absent and wiped by turns, with a budget far too low. */
static char *take_by_turns(struct rf_handle handles[2 * PIECES])
{
	char *memory = check_map(2 * PIECES);
	size_t i;

	check_needs_lazy();
	check_start(RF_MODE_EAGER);
	rf_engine.tracker.vma_budget = 8;
	memset(memory, 7, 2 * PIECES * check_page);
	for (i = 0; i < 2 * PIECES; i++)
		handles[i] = check_register_as(memory + i * check_page, check_page,
					       i % 2 ? RF_WIPE : RF_OMIT);
	check_budget("registered");
	return memory;
}

static void a_fork_that_exchanges_marks_keeps_to_the_budget(void)
{
	struct rf_handle handles[2 * PIECES];
	char *memory = take_by_turns(handles);
	size_t i;

	check_fork();
	check_budget("forked");
	/* Zeros they are all the same. */
	for (i = 0; i < 2 * PIECES; i++)
		CHECK(check_child_reads(memory + i * check_page) == (i % 2), "%zu", i);
	for (i = 0; i < 2 * PIECES; i++)
		check_release(handles[i]);
	check_fork();
	check_empty();
}

/* Runs left to the kernel are to make up for the gap, of any policy. */
static void releases_amid_several_policies_keep_to_the_budget(void)
{
	struct rf_handle handles[2 * PIECES];
	size_t i;

	take_by_turns(handles);
	/* This asks for the nature of the memory. */
	check_fork();
	for (i = 10; i < 2 * PIECES; i += 8) {
		check_release(handles[i]);
		check_budget("released");
	}
	for (i = 0; i < 2 * PIECES; i++)
		if (i < 10 || i % 8 != 2)
			check_release(handles[i]);
	check_fork();
	check_empty();
}

/* A mark that is wrong, as the kernel had no room to exchange it, is exchanged when it has. */
static void a_refused_exchange_of_marks_is_retried(void)
{
	char *memory = check_map(8);
	struct rf_handle wiped, omitted;

	check_needs_lazy();
	check_start(RF_MODE_EAGER);
	memset(memory, 7, 8 * check_page);
	wiped = check_register_as(memory, 8 * check_page, RF_WIPE);
	check_fork();
	CHECK(check_flags(memory) & CHECK_WF);
	check_use_up_vmas(0);
	omitted = check_register_as(memory + 2 * check_page, check_page, RF_OMIT);
	check_fork();
	check_fork();
	check_give_back_vmas();
	check_fork();
	CHECK(check_flags(memory + 2 * check_page) & CHECK_DC);
	CHECK(!check_child_reads(memory + 2 * check_page));
	check_release(omitted);
	check_release(wiped);
	check_empty();
}

static void a_release_at_the_kernels_limit_is_retried(void)
{
	char *memory = check_map(64);
	struct rf_handle handles[8];
	struct rf_stats stats;
	size_t i;

	check_start(RF_MODE_EAGER);
	for (i = 0; i < 8; i++)
		handles[i] = check_register(memory + i * 8 * check_page, 8 * check_page, RF_HELD);
	check_use_up_vmas(0);
	/* The middle ones need a split each, which the kernel refuses. */
	for (i = 1; i < 7; i += 2) {
		check_release(handles[i]);
		CHECK(rf_stats(&stats) == 0);
		CHECK(stats.still_marked_bytes == (i + 1) / 2 * 8 * check_page, "%lu",
		      (unsigned long)stats.still_marked_bytes);
		check_sound();
	}
	/* Registered again meanwhile, and released again. */
	handles[3] = check_register(memory + 3 * 8 * check_page, 8 * check_page, 0);
	CHECK(rf_stats(&stats) == 0 && stats.still_marked_bytes == 2 * 8 * check_page);
	check_release(handles[3]);
	CHECK(rf_stats(&stats) == 0 && stats.still_marked_bytes == 3 * 8 * check_page);
	check_give_back_vmas();
	check_fork();
	CHECK(rf_stats(&stats) == 0 && stats.still_marked_bytes == 0);
	CHECK(check_marked(memory, 64) == 5 * 8);
	for (i = 0; i < 8; i++)
		if (i % 2 == 0 || i == 7)
			check_release(handles[i]);
	CHECK(check_marked(memory, 64) == 0);
	check_empty();
}

/* A registration that fails over a range with a retry must not make it wait for ever. */
static void a_failed_registration_keeps_ranges_to_be_unmarked(void)
{
	char *memory = check_map(24);
	struct rf_handle handles[3], none;
	struct rf_stats stats;
	size_t i;
	int rc;

	check_start(RF_MODE_EAGER);
	check_unmap(memory + 23 * check_page, 1);
	for (i = 0; i < 3; i++)
		handles[i] = check_register(memory + i * 7 * check_page, 7 * check_page, RF_HELD);
	check_use_up_vmas(0);
	check_release(handles[1]);
	CHECK(rf_stats(&stats) == 0 && stats.still_marked_bytes == 7 * check_page, "%lu",
	      (unsigned long)stats.still_marked_bytes);
	rc = rf_register(memory + 7 * check_page, 17 * check_page, 0, RF_OMIT, &none, &error);
	CHECK(rc == -ENOMEM, "%d", rc);
	/* Where maps must be read as text there is no memory for it now: the undoing waits, too. */
	CHECK(rf_stats(&stats) == 0);
	CHECK(stats.still_marked_bytes == 7 * check_page ||
		      (!rf_engine.tracker.kernel->procmap_query &&
		       stats.still_marked_bytes == 10 * check_page),
	      "%lu", (unsigned long)stats.still_marked_bytes);
	check_give_back_vmas();
	check_fork();
	CHECK(rf_stats(&stats) == 0 && stats.still_marked_bytes == 0, "%lu bytes stay marked",
	      (unsigned long)stats.still_marked_bytes);
	CHECK(check_marked(memory, 23) == 14);
	check_release(handles[0]);
	check_release(handles[2]);
	check_empty();
}

/* A held registration waits for room, an unheld one that it overlaps does not. */
static void held_memory_alone_waits_for_room(void)
{
	char *memory = check_map(8), *at = memory + 4 * check_page;
	struct rf_handle first, held, unheld;

	check_needs_lazy();
	check_start(RF_MODE_EAGER);
	rf_engine.tracker.vma_budget = 2;
	first = check_register(memory + check_page, check_page, RF_HELD);
	unheld = check_register(at, check_page, 0);
	held = check_register(at, check_page, RF_HELD);
	CHECK(check_marked(memory, 8) == 1);
	check_release(held);
	check_sound();
	check_release(first);
	/* There is room, but the memory mapped there may be another's by now. */
	check_fork();
	CHECK(check_marked(memory, 8) == 0);
	check_release(unheld);
	first = check_register(memory + check_page, check_page, RF_HELD);
	unheld = check_register(at, check_page, 0);
	held = check_register(at, check_page, RF_HELD);
	check_release(unheld);
	check_release(first);
	CHECK(!check_child_reads(at));
	CHECK(check_marked(memory, 8) == 1);
	check_release(held);
	CHECK(check_marked(memory, 8) == 0);
	check_empty();
}

/* Memory that a release leaves to the kernel may have another owner when there is room again. */
static void memory_left_by_a_release_is_marked_again_if_it_is_held(void)
{
	char *memory = check_map(8), *unheld = memory + 5 * check_page;
	const unsigned int flags[] = { 0, RF_HELD };
	struct rf_handle handles[3];
	size_t i;

	check_needs_lazy();
	check_start(RF_MODE_EAGER);
	for (i = 0; i < COUNT_OF(flags); i++) {
		handles[0] = check_register(memory, 4 * check_page, RF_HELD);
		handles[1] = check_register(memory + 4 * check_page, check_page, RF_HELD);
		handles[2] = check_register(unheld, 2 * check_page, flags[i]);
		rf_engine.tracker.vma_budget = 2;
		check_release(handles[1]);
		CHECK(check_marked(memory, 8) == 4 && check_marked(memory, 4) == 4);
		rf_engine.tracker.vma_budget = 32;
		CHECK(check_child_reads(unheld) == !flags[i]);
		CHECK(check_marked(unheld, 2) == (flags[i] ? 2 : 0));
		check_release(handles[0]);
		check_release(handles[2]);
		CHECK(check_marked(memory, 8) == 0);
	}
	check_empty();
}

/*
 * A child has its copies of both partial pages where its parent has one marked run: three
 * mappings in place of two. What the program itself has must fit beside them, too.
 */
static void a_child_has_room_for_its_copies(void)
{
	const size_t limit = rf_kernel()->max_map_count, many = limit / 4 / check_slowness();
	size_t i, lost = 0, taken;
	char *memory = check_map(4 * many);
	struct rf_handle handle;
	int rc = 1;
	pid_t pid;

	check_start_untrusted();
	memset(memory, 7, 4 * many * check_page);
	for (taken = 0; taken < many; taken += rc == 1) {
		rc = rf_register(memory + 4 * taken * check_page + 100, 2 * check_page + 100,
				 RF_HELD, RF_OMIT, &handle, &error);
		if (rc < 0)
			break;
	}
	CHECK(taken == many || (rc == -ENOMEM && error.cause == RF_CAUSE_VMA_LIMIT));
	/* The program takes its half, but for the areas that a child reserves, and a few. */
	check_use_up_vmas(limit / 2 + 2000 - 2 * taken);
	pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		for (i = 0; i < taken; i++)
			lost += !check_is_readable(memory + 4 * i * check_page) +
				!check_is_readable(memory + (4 * i + 3) * check_page - 1);
		CHECK(!lost, "%zu of %zu pages", lost, 2 * taken);
		_exit(0);
	}
	CHECK(check_wait(pid) == 0);
}

static uint64_t unmarked_bytes(void)
{
	struct rf_stats stats;

	CHECK(rf_stats(&stats) == 0);
	return stats.unmarked_bytes;
}

/* How many of @wanted mappings more the kernel grants; @memory of as many pages is one again. */
static size_t mappings_left(char *memory, size_t wanted)
{
	size_t got = 0;

	while (got + 2 < wanted &&
	       !mprotect(memory + (got + 1) * check_page, check_page, PROT_NONE))
		got += 2;
	CHECK(!mprotect(memory, wanted * check_page, PROT_READ | PROT_WRITE));
	return got;
}

/* The mappings that the program gets back where the kernel has refused a mark. */
#define GIVEN_BACK (rf_kernel()->max_map_count / 64)

/* A program must be able to start threads, however much it has registered. */
static void a_fork_that_is_refused_marks_gives_mappings_back(void)
{
	const size_t many = 4 * GIVEN_BACK;
	char *memory = check_map(2 * many + 64), *longest = memory + 2 * many * check_page;
	struct rf_handle *handles = calloc(many + 1, sizeof(*handles));
	char *probe = check_map(GIVEN_BACK);
	uint64_t unmarked;
	size_t i, left;

	check_needs_lazy();
	check_start(RF_MODE_LAZY);
	for (i = 0; i < many; i++)
		handles[i] = check_register(memory + 2 * i * check_page, check_page, RF_HELD);
	handles[many] = check_register(longest, 64 * check_page, RF_HELD);
	check_use_up_vmas(6 * GIVEN_BACK);
	check_fork();
	check_sound();
	left = mappings_left(probe, GIVEN_BACK);
	CHECK(left >= GIVEN_BACK - 50, "%zu", left);
	/* Not more than that, and never the longest. */
	unmarked = unmarked_bytes() / check_page;
	CHECK(unmarked >= many / 4 && unmarked <= many / 4 + GIVEN_BACK / 2 + 100, "%zu",
	      (size_t)unmarked);
	CHECK(check_marked(longest, 64) == 64);
	/* The next fork ends with the same. */
	check_fork();
	CHECK(unmarked_bytes() / check_page == unmarked, "%lu", unmarked_bytes());
	/* Mappings that a release has freed serve another range. */
	CHECK(check_marked(memory + many * check_page, 1) == 1);
	check_release(handles[many / 2]);
	check_fork();
	CHECK(unmarked_bytes() / check_page == unmarked - 1);
	check_give_back_vmas();
	check_fork();
	CHECK(unmarked_bytes() == 0, "%lu", unmarked_bytes());
	for (i = 0; i <= many; i++)
		if (i != many / 2)
			check_release(handles[i]);
	check_fork();
	check_empty();
}

/* Where its marks are few, they are not the reason. */
static void a_few_marks_are_kept_at_the_kernels_limit(void)
{
	char *memory = check_map(2 * PIECES);
	struct rf_handle handles[PIECES];
	size_t i;

	check_needs_lazy();
	check_start(RF_MODE_LAZY);
	for (i = 0; i < PIECES / 2; i++)
		handles[i] = check_register(memory + 2 * i * check_page, check_page, RF_HELD);
	check_fork();
	check_use_up_vmas(0);
	for (; i < PIECES; i++)
		handles[i] = check_register(memory + 2 * i * check_page, check_page, RF_HELD);
	check_fork();
	CHECK(check_marked(memory, 2 * PIECES) >= PIECES / 2);
	check_give_back_vmas();
	check_fork();
	CHECK(check_marked(memory, 2 * PIECES) == PIECES);
	while (i)
		check_release(handles[--i]);
	check_empty();
}

/* Other code has taken marks away, and the kernel has no mapping left to make them again. */
static void a_mark_that_cannot_be_made_again_is_not_claimed(void)
{
	char *memory = check_map(8), *at = memory + 2 * check_page;
	struct rf_handle handle, more = { 0 };
	struct rf_range_info info[4];
	int round, rc;

	setenv("RDMAV_FORK_SAFE", "0", 1);
	check_start_untrusted();
	handle = check_register(at, 3 * check_page, RF_HELD);
	check_fork();
	for (round = 0; round < 2; round++) {
		CHECK(unmarked_bytes() == 0);
		CHECK(madvise(at, 3 * check_page, MADV_DOFORK) == 0);
		check_use_up_vmas(0);
		check_fork();
		CHECK(check_marked(memory, 8) == 0);
		CHECK(unmarked_bytes() == 3 * check_page, "%lu", unmarked_bytes());
		/* A registration there has no mark either. */
		rc = rf_register(at, check_page, RF_HELD, RF_OMIT, &more, &error);
		CHECK(rc == -ENOMEM && error.cause == RF_CAUSE_VMA_LIMIT, "%d", rc);
		check_sound();
		check_give_back_vmas();
		check_fork();
		CHECK(check_marked(memory, 8) == 3);
		CHECK(rf_list(info, COUNT_OF(info)) == 1 && info[0].protection == RF_BY_MARK);
	}
	/* Listed, too: that takes mappings. */
	inject_from(1, EAGAIN);
	check_fork();
	inject(0, 0);
	CHECK(unmarked_bytes() == 3 * check_page);
	CHECK(rf_list(info, COUNT_OF(info)) == 1 && info[0].protection == RF_BY_KERNEL);
	check_fork();
	CHECK(unmarked_bytes() == 0);
	/* Memory that was unmapped is no reason for doubt: nothing there lacks a mark. */
	check_unmap(at + check_page, 1);
	check_fork();
	CHECK(unmarked_bytes() == 0);
	check_release(handle);
	check_empty();
}

static void a_registration_at_the_kernels_limit_is_made_or_refused(void)
{
	char *memory = check_map(8);
	struct rf_handle handle = { 0 };
	int rc;

	check_needs_lazy();
	check_start(RF_MODE_EAGER);
	check_use_up_vmas(0);
	rc = rf_register(memory + 2 * check_page, 2 * check_page, RF_HELD, RF_OMIT, &handle,
			 &error);
	CHECK(rc == -ENOMEM && error.cause == RF_CAUSE_VMA_LIMIT, "%d, cause %d", rc, error.cause);
	CHECK(check_marked(memory, 8) == 0);
	check_give_back_vmas();
	check_empty();
	handle = check_register(memory + 2 * check_page, 2 * check_page, RF_HELD);
	CHECK(check_marked(memory, 8) == 2);
	check_release(handle);
	check_empty();
}

/* As many isolated pages as the kernel's limit would not bear. */
static void isolated_pages_stop_at_the_budget(void)
{
	size_t many = 40000 / check_slowness(), i;
	char *memory = check_map(2 * many);
	struct rf_handle *handles = calloc(many, sizeof(*handles));
	struct rf_stats stats;

	check_needs_lazy();
	check_start(RF_MODE_EAGER);
	for (i = 0; i < many; i++)
		handles[i] = check_register(memory + 2 * i * check_page, check_page, RF_HELD);
	CHECK(rf_stats(&stats) == 0 && stats.vmas <= stats.vma_budget);
	CHECK(stats.vma_budget == rf_engine.tracker.kernel->max_map_count / 2);
	CHECK(check_vmas() < stats.vma_budget + 1000);
	for (i = 0; i < many; i++)
		check_release(handles[i * 7919 % many]);
	CHECK(check_marked(memory, 2 * many) == 0);
	check_empty();
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(the_budget_is_kept_and_unmarked_bytes_are_counted),
		SCENARIO(a_fork_gives_vmas_to_the_longest_runs),
		SCENARIO(past_the_budget_nothing_is_claimed_where_copying_is_not_trusted),
		SCENARIO(at_the_budget_memory_beside_a_marked_page_is_marked),
		SCENARIO(at_the_budget_too_memory_mapped_anew_is_protected),
		SCENARIO(a_run_that_could_not_be_left_to_the_kernel_is_left_once),
		SCENARIO(releases_keep_to_the_budget_too),
		SCENARIO(ranges_beside_wiped_pages_keep_to_the_budget),
		SCENARIO(a_fork_that_exchanges_marks_keeps_to_the_budget),
		SCENARIO(releases_amid_several_policies_keep_to_the_budget),
		SCENARIO(a_refused_exchange_of_marks_is_retried),
		SCENARIO(a_release_at_the_kernels_limit_is_retried),
		SCENARIO(a_failed_registration_keeps_ranges_to_be_unmarked),
		SCENARIO(held_memory_alone_waits_for_room),
		SCENARIO(memory_left_by_a_release_is_marked_again_if_it_is_held),
		SCENARIO(a_child_has_room_for_its_copies),
		SCENARIO(a_fork_that_is_refused_marks_gives_mappings_back),
		SCENARIO(a_few_marks_are_kept_at_the_kernels_limit),
		SCENARIO(a_mark_that_cannot_be_made_again_is_not_claimed),
		SCENARIO(a_registration_at_the_kernels_limit_is_made_or_refused),
		SCENARIO(isolated_pages_stop_at_the_budget),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
