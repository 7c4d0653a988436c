/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What madvise() has been told, as smaps shows it: eager registrations, holes, the
 * limits of VMAs, huge pages.
 */
#include "check.h"
#include "engine.h"

#include <signal.h>

static struct rf_error error;

static int try_register(const void *start, size_t nbytes, unsigned int flags,
			struct rf_handle *handle)
{
	memset(&error, 0, sizeof(error));
	return rf_register(start, nbytes, flags, RF_OMIT, handle, &error);
}

/* As where copying at fork is not to be trusted: whole pages, and refusals. */
static void distrust_the_kernel(void)
{
	static struct rf_kernel kernel;

	kernel = *rf_engine.advisor.kernel;
	kernel.copy_trusted = 0;
	rf_engine.advisor.kernel = &kernel;
	rf_engine.advisor.whole = true;
	rf_engine.advisor.contested = true;
	rf_engine.advisor.required = true;
}

static void need_trust(void)
{
	struct rf_kernel kernel;

	rf_kernel_info(&kernel);
	if (!kernel.copy_trusted)
		check_skip("copying at fork is not trusted on %s", kernel.release);
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

	need_trust();
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

static void whole_edges_mark_all_pages_touched(void)
{
	char *memory = check_map(8);
	struct rf_handle handle, tiny;

	setenv("RDMAFORK_EDGES", "whole", 1);
	check_start(RF_MODE_EAGER);
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

static void tiny_registrations_do_no_harm(void)
{
	char *memory = check_map(2);
	struct rf_handle handles[64];
	size_t i;

	need_trust();
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

#define AREA 24
#define MANY 7

static void neighbours_and_overlaps_part_in_any_order(void)
{
	char *memory = check_map(AREA);
	struct rf_handle handles[MANY];
	size_t starts[MANY], ends[MANY], order[MANY], i, j, page;
	unsigned long round, rounds = check_scale(300);

	check_start(RF_MODE_EAGER);
	for (round = 0; round < rounds; round++) {
		for (i = 0; i < MANY; i++) {
			starts[i] = check_below(AREA);
			ends[i] = starts[i] + 1 + check_below(AREA - starts[i]);
			handles[i] = check_register(memory + starts[i] * check_page,
						    (ends[i] - starts[i]) * check_page,
						    check_below(2) ? RF_HELD : 0);
			order[i] = i;
		}
		for (i = MANY; i; i--) {
			size_t which = check_below(i), nth = order[which];

			check_release(handles[nth]);
			starts[nth] = ends[nth] = 0;
			order[which] = order[i - 1];
			check_sound();
			check_read_smaps();
			for (page = 0; page < AREA; page++) {
				bool wanted = false;

				for (j = 0; j < MANY; j++)
					wanted |= starts[j] <= page && page < ends[j];
				CHECK(wanted == !!(check_flags_read(memory + page * check_page) &
						   CHECK_DC));
			}
		}
	}
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
	CHECK(rc == -ENOMEM && error.cause == RF_CAUSE_HOLE, "%d, cause %d", rc, error.cause);
	CHECK(error.start == (uintptr_t)hole && error.end == (uintptr_t)hole + 2 * check_page);
	CHECK(check_marked(memory, 12) == 1);
	CHECK(check_vmas() == vmas);
	CHECK(rf_release(handle, 0) == -ESTALE);
	check_sound();
	/* The whole of it unmapped, and the end beyond all mappings. */
	rc = try_register(hole, check_page, 0, &handle);
	CHECK(rc == -ENOMEM && error.cause == RF_CAUSE_HOLE);
	CHECK(error.start == (uintptr_t)hole && error.end == (uintptr_t)hole + check_page);
	/* What failed did not poison its neighbours. */
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
	CHECK(error.cause == RF_CAUSE_HOLE);
	check_empty();
}

static void memory_mapped_anew_is_protected(void)
{
	char *memory = check_map(6);
	struct rf_handle first, second, third;

	check_start(RF_MODE_EAGER);
	first = check_register(memory + check_page, 4 * check_page, 0);
	check_unmap(memory + check_page, 4);
	CHECK(mmap(memory + check_page, 4 * check_page, PROT_READ | PROT_WRITE,
		   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED);
	CHECK(check_marked(memory, 6) == 0);
	second = check_register(memory + check_page, 4 * check_page, 0);
	CHECK(check_marked(memory, 6) == 4);
	/* And for one that holds the memory, beside those that do not. */
	check_unmap(memory + check_page, 4);
	CHECK(mmap(memory + check_page, 4 * check_page, PROT_READ | PROT_WRITE,
		   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED);
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
static void remap(char *memory, int sharing)
{
	CHECK(mmap(memory, 4 * check_page, PROT_READ | PROT_WRITE,
		   sharing | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == memory);
}

static void a_stale_nature_is_not_believed(enum rf_mode mode, unsigned int flags)
{
	char *memory = check_map(4);
	struct rf_handle first, second;
	int sharing;

	check_start(mode);
	for (sharing = 0; sharing < 2; sharing++) {
		remap(memory, sharing ? MAP_SHARED : MAP_PRIVATE);
		first = check_register(memory, 4 * check_page, 0);
		check_fork();
		CHECK(check_marked(memory, 4) == (sharing ? 0 : 4));
		remap(memory, sharing ? MAP_PRIVATE : MAP_SHARED);
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
	need_trust();
	a_stale_nature_is_not_believed(RF_MODE_LAZY, RF_HELD);
}

/* What a refused call has half done includes marks on what has become shared. */
static void a_failure_leaves_no_mark_on_shared_memory(void)
{
	char *memory = check_map(8);
	struct rf_handle stale, none = { 0 };

	check_start(RF_MODE_EAGER);
	stale = check_register(memory, 4 * check_page, 0);
	check_fork();
	remap(memory, MAP_SHARED);
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

	CHECK(mmap(memory + 3 * check_page, 3 * check_page, PROT_READ | PROT_WRITE,
		   MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED);
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

/* ---- Limits of VMAs ---- */

#define PIECES 40

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

/* The second registration found its page marked, and has not learned that it is huge. */
static void marks_that_others_take_from_huge_pages_are_back_too(void)
{
	char *huge = check_map_huge(1, MAP_PRIVATE);
	struct rf_handle first, second, third;
	unsigned int whole;

	memset(huge, 7, CHECK_HUGE);
	setenv("RDMAV_FORK_SAFE", "", 1);
	setenv("RDMAFORK_EDGES", check_random() & 1 ? "whole" : "", 1);
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

static void the_budget_is_kept_and_what_is_left_is_counted(void)
{
	char *memory = check_map(2 * PIECES);
	struct rf_handle handles[PIECES];
	struct rf_stats stats;
	size_t i;

	need_trust();
	check_start(RF_MODE_EAGER);
	rf_engine.advisor.vma_budget = 32;
	for (i = 0; i < PIECES; i++) {
		handles[i] = check_register(memory + 2 * i * check_page, check_page, RF_HELD);
		CHECK(rf_stats(&stats) == 0 && stats.vmas <= 32);
		CHECK(stats.left_ranges == (i < 16 ? 0 : i - 15));
		CHECK(stats.left_bytes == stats.left_ranges * check_page);
	}
	CHECK(check_marked(memory, 2 * PIECES) == 16);
	check_fork();
	CHECK(check_marked(memory, 2 * PIECES) == 16);
	for (i = 0; i < 10; i++)
		check_release(handles[i]);
	check_sound();
	check_fork();
	CHECK(rf_stats(&stats) == 0 && stats.vmas <= 32 && stats.left_ranges == PIECES - 26);
	CHECK(check_marked(memory, 2 * PIECES) == 16);
	for (; i < PIECES; i++)
		check_release(handles[i]);
	CHECK(check_marked(memory, 2 * PIECES) == 0);
	check_empty();
}

static void the_fold_gives_vmas_to_the_longest(void)
{
	char *memory = check_map(2 * PIECES + 64);
	struct rf_handle handles[PIECES + 1];
	struct rf_stats stats;
	size_t i;

	need_trust();
	check_start(RF_MODE_LAZY);
	rf_engine.advisor.vma_budget = 32;
	for (i = 0; i < PIECES; i++)
		handles[i] = check_register(memory + 2 * i * check_page, check_page, RF_HELD);
	handles[i] = check_register(memory + 2 * PIECES * check_page, 64 * check_page, RF_HELD);
	check_fork();
	CHECK(rf_stats(&stats) == 0 && stats.vmas == 32);
	CHECK(stats.left_ranges == PIECES + 1 - 16);
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

	check_start(RF_MODE_EAGER);
	distrust_the_kernel();
	rf_engine.advisor.vma_budget = 2 * PIECES - 2;
	for (i = 0; i < PIECES - 1; i++)
		handles[i] = check_register(memory + 2 * i * check_page, check_page, RF_HELD);
	CHECK(try_register(memory + 2 * i * check_page, check_page, RF_HELD, &handle) == -ENOMEM);
	CHECK(error.cause == RF_CAUSE_VMA_LIMIT);
	CHECK(check_marked(memory, 2 * PIECES) == PIECES - 1);
	check_release(handles[0]);
	handles[0] = check_register(memory + 2 * i * check_page, check_page, RF_HELD);
	CHECK(check_marked(memory, 2 * PIECES) == PIECES - 1);
	for (i = 0; i < PIECES - 1; i++)
		check_release(handles[i]);
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

	need_trust();
	check_start(RF_MODE_EAGER);
	rf_engine.advisor.vma_budget = 8;
	first = check_register(at, 2 * check_page, 0);
	for (i = 5; i < 12; i++)
		pieces[used++] = check_register(memory + 2 * i * check_page, check_page, RF_HELD);
	CHECK(rf_engine.advisor.ranges.mark_edges == 8);
	CHECK(mmap(at, 2 * check_page, PROT_READ | PROT_WRITE,
		   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at);
	CHECK(check_marked(at, 2) == 0);
	wider = check_register(at, 4 * check_page, 0);
	CHECK(check_marked(at, 4) == 4);
	CHECK(rf_engine.advisor.ranges.mark_edges == 8);
	/* What has no mark at all waits, and is not said to have one. */
	other = check_register(memory, check_page, 0);
	CHECK(check_marked(memory, 1) == 0);
	count = rf_list(info, PIECES);
	CHECK(count >= 2 && info[0].start == (uintptr_t)memory);
	CHECK(info[0].protection == RF_BY_KERNEL && info[1].protection == RF_BY_ADVICE);
	check_release(first);
	check_release(wider);
	check_release(other);
	while (used)
		check_release(pieces[--used]);
	CHECK(check_marked(memory, 2 * PIECES) == 0);
	check_empty();
}

/* Neighbours merged in one VMA, then every second one is given back. */
static void releases_keep_to_the_budget_too(void)
{
	char *memory = check_map(2 * PIECES);
	struct rf_handle handles[2 * PIECES];
	struct rf_stats stats;
	size_t i, vmas;

	need_trust();
	check_start(RF_MODE_EAGER);
	rf_engine.advisor.vma_budget = 32;
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

static void a_release_at_the_kernels_limit_is_made_up_for(void)
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
		CHECK(stats.unreleased_bytes == (i + 1) / 2 * 8 * check_page, "%lu",
		      (unsigned long)stats.unreleased_bytes);
		check_sound();
	}
	/* Registered again meanwhile, and released again. */
	handles[3] = check_register(memory + 3 * 8 * check_page, 8 * check_page, 0);
	CHECK(rf_stats(&stats) == 0 && stats.unreleased_bytes == 2 * 8 * check_page);
	check_release(handles[3]);
	CHECK(rf_stats(&stats) == 0 && stats.unreleased_bytes == 3 * 8 * check_page);
	check_give_back_vmas();
	check_fork();
	CHECK(rf_stats(&stats) == 0 && stats.unreleased_bytes == 0);
	CHECK(check_marked(memory, 64) == 5 * 8);
	for (i = 0; i < 8; i++)
		if (i % 2 == 0 || i == 7)
			check_release(handles[i]);
	CHECK(check_marked(memory, 64) == 0);
	check_empty();
}

/* A registration that fails over what waits to be unmarked must not make it wait for ever. */
static void a_failure_does_not_forget_what_waits(void)
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
	CHECK(rf_stats(&stats) == 0 && stats.unreleased_bytes == 7 * check_page, "%lu",
	      (unsigned long)stats.unreleased_bytes);
	rc = try_register(memory + 7 * check_page, 17 * check_page, 0, &none);
	CHECK(rc == -ENOMEM, "%d", rc);
	/* Where maps must be read as text there is no memory for it now: the undoing waits, too. */
	CHECK(rf_stats(&stats) == 0);
	CHECK(stats.unreleased_bytes == 7 * check_page ||
		      (!rf_engine.advisor.kernel->procmap_query &&
		       stats.unreleased_bytes == 10 * check_page),
	      "%lu", (unsigned long)stats.unreleased_bytes);
	check_give_back_vmas();
	check_fork();
	CHECK(rf_stats(&stats) == 0 && stats.unreleased_bytes == 0, "%lu bytes stay marked",
	      (unsigned long)stats.unreleased_bytes);
	CHECK(check_marked(memory, 23) == 14);
	check_release(handles[0]);
	check_release(handles[2]);
	check_empty();
}

static void a_registration_at_the_kernels_limit(void)
{
	char *memory = check_map(8);
	struct rf_handle handle = { 0 };
	int rc;

	need_trust();
	check_start(RF_MODE_EAGER);
	check_use_up_vmas(0);
	rc = try_register(memory + 2 * check_page, 2 * check_page, RF_HELD, &handle);
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
static void isolated_pages_without_end(void)
{
	size_t many = 40000 / check_slowness(), i;
	char *memory = check_map(2 * many);
	struct rf_handle *handles = calloc(many, sizeof(*handles));
	struct rf_stats stats;

	need_trust();
	check_start(RF_MODE_EAGER);
	for (i = 0; i < many; i++)
		handles[i] = check_register(memory + 2 * i * check_page, check_page, RF_HELD);
	CHECK(rf_stats(&stats) == 0 && stats.vmas <= stats.vma_budget);
	CHECK(check_vmas() < stats.vma_budget + 1000);
	for (i = 0; i < many; i++)
		check_release(handles[i * 7919 % many]);
	CHECK(check_marked(memory, 2 * many) == 0);
	check_empty();
}

/* ---- Huge pages ---- */

static void huge_pages_go_whole(void)
{
	char *memory = check_map_huge(3, MAP_PRIVATE);
	struct rf_handle tiny, across, all;
	unsigned int mode;

	need_trust();
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

static void huge_pages_wait_for_the_fork(void)
{
	char *memory = check_map_huge(3, MAP_PRIVATE);
	struct rf_handle tiny, across;

	need_trust();
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

/* Base pages, huge pages, base pages; every pair of partly overlapping ranges, every order. */
static void mixed_pages(bool query, bool whole)
{
	char *huge = check_map_huge(4, MAP_PRIVATE), *below, *above;
	static const size_t cuts[] = { 0, 100, CHECK_HUGE / 2, CHECK_HUGE, CHECK_HUGE + 4096,
				       2 * CHECK_HUGE - 64, 2 * CHECK_HUGE, 3 * CHECK_HUGE };
	struct rf_handle handles[3];
	unsigned long round, rounds = check_scale(400);
	size_t i;

	/* The first and the last huge page give way to base pages. */
	CHECK(!munmap(huge, CHECK_HUGE) && !munmap(huge + 3 * CHECK_HUGE, CHECK_HUGE));
	below = mmap(huge, CHECK_HUGE, PROT_READ | PROT_WRITE,
		     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	above = mmap(huge + 3 * CHECK_HUGE, CHECK_HUGE, PROT_READ | PROT_WRITE,
		     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	CHECK(below == huge && above == huge + 3 * CHECK_HUGE);
	if (whole)
		setenv("RDMAFORK_EDGES", "whole", 1);
	check_start(RF_MODE_EAGER);
	if (!query)
		rf_engine.advisor.reader.query = false;
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
				/* Nobody's: not marked. Untouched edges wait for the fork. */
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

static void mixed_pages_whole(void)
{
	mixed_pages(true, true);
}

static void mixed_pages_whole_by_text(void)
{
	mixed_pages(false, true);
}

/* Shared huge pages are never marked after a fork, nor left so by partial releases. */
static void shared_huge_pages(bool query)
{
	char *memory = check_map_huge(2, MAP_SHARED);
	struct rf_handle all, part;
	unsigned int order;

	setenv("RDMAFORK_EDGES", "whole", 1);
	check_start(RF_MODE_EAGER);
	if (!query)
		rf_engine.advisor.reader.query = false;
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

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(eager_marks_before_returning),
		SCENARIO(only_pages_filled_are_marked),
		SCENARIO(whole_edges_mark_all_pages_touched),
		SCENARIO(tiny_registrations_do_no_harm),
		SCENARIO(neighbours_and_overlaps_part_in_any_order),
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
		SCENARIO_HUGE(marks_that_others_take_from_huge_pages_are_back_too),
		SCENARIO(the_budget_is_kept_and_what_is_left_is_counted),
		SCENARIO(the_fold_gives_vmas_to_the_longest),
		SCENARIO(past_the_budget_nothing_is_claimed_where_copying_is_not_trusted),
		SCENARIO(at_the_budget_too_memory_mapped_anew_is_protected),
		SCENARIO(releases_keep_to_the_budget_too),
		SCENARIO(a_release_at_the_kernels_limit_is_made_up_for),
		SCENARIO(a_failure_does_not_forget_what_waits),
		SCENARIO(a_registration_at_the_kernels_limit),
		SCENARIO(isolated_pages_without_end),
		SCENARIO_HUGE(huge_pages_go_whole),
		SCENARIO_HUGE(huge_pages_wait_for_the_fork),
		SCENARIO_HUGE(mixed_pages_asked_by_query),
		SCENARIO_HUGE(mixed_pages_asked_by_text),
		SCENARIO_HUGE(mixed_pages_whole),
		SCENARIO_HUGE(mixed_pages_whole_by_text),
		SCENARIO_HUGE(shared_huge_pages_by_query),
		SCENARIO_HUGE(shared_huge_pages_by_text),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
