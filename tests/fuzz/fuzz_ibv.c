/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * ibv_dontfork_range() and ibv_dofork_range() as an input says, of any bytes in any order,
 * with system calls that fail and forks between. The model is what libibverbs counts: how
 * often each page is registered. A release takes one from each page it touches, whatever
 * ranges those were registered as, or nothing where one of them has none.
 */
#include "check.h"
#include "engine.h"
#include "fuzz.h"
#include "kernel.h"

#define PAGES 16
/* So low that its mapping is the first that smaps tells of. */
#define ARENA ((uintptr_t)0x200000)
#define PAGE ((uintptr_t)4096)

/* infiniband/verbs.h need not be there. */
int ibv_dontfork_range(void *base, size_t size);
int ibv_dofork_range(void *base, size_t size);

static unsigned int counts[PAGES];
static unsigned int made, unbalanced;
static bool whole;
static bool lingering;	/* a call failed: marks may wait for the next fork to take them */

static size_t first_page(uintptr_t start)
{
	return (start - ARENA) / PAGE;
}

static size_t last_page(uintptr_t end)
{
	return (end - 1 - ARENA) / PAGE;
}

static void choose_bytes(uintptr_t *start, uintptr_t *end)
{
	size_t page = check_below(PAGES), shape = check_below(4);

	*start = ARENA + page * PAGE + (shape & 1 ? check_below(PAGE) : 0);
	*end = ARENA + (page + 1 + check_below(PAGES - page)) * PAGE;
	*end -= shape & 2 ? check_below(PAGE) : 0;
	if (*end <= *start)
		*end = *start + 1;
}

/* ---- Against the engine and the kernel ---- */

static void read_counts(unsigned int found[PAGES])
{
	struct rf_range_info list[2 * PAGES];
	ssize_t count = rf_list(list, COUNT_OF(list)), i;
	uintptr_t at;

	memset(found, 0, PAGES * sizeof(*found));
	CHECK(count >= 0 && count <= (ssize_t)COUNT_OF(list), "%zd", count);
	for (i = 0; i < count; i++)
		for (at = list[i].start; at < list[i].end; at += PAGE)
			found[first_page(at)] = list[i].registrations;
}

static void check_counts(void)
{
	unsigned int found[PAGES];
	struct rf_stats stats;
	size_t page;

	check_sound();
	read_counts(found);
	for (page = 0; page < PAGES; page++)
		CHECK(found[page] == counts[page], "page %zu: %u, not %u", page, found[page],
		      counts[page]);
	CHECK(rf_stats(&stats) == 0 && stats.ibv_unbalanced == unbalanced);
	CHECK(stats.registrations == stats.ibv_ranges);
}

static void check_marks(void)
{
	size_t page;

	check_read_smaps_to(ARENA + PAGES * PAGE);
	for (page = 0; page < PAGES; page++) {
		unsigned int flags = check_flags_read((void *)(ARENA + page * PAGE));

		/* Pages that are only touched are the kernel's to copy, or leave whole. */
		CHECK(flags & CHECK_DC ? counts[page] : !counts[page] || !whole, "page %zu: %u",
		      page, counts[page]);
	}
}

/* ---- Operations ---- */

static void arm(bool failing)
{
	static const int errors[] = { ENOMEM, EAGAIN, EINVAL, EPERM };

	if (failing) {
		unsigned long nth = 1 + check_below(8);

		rf_sys_fail(nth, errors[check_below(COUNT_OF(errors))]);
	}
}

static void op_register(bool failing)
{
	uintptr_t start, end;
	size_t page;
	int rc;

	choose_bytes(&start, &end);
	arm(failing);
	rc = ibv_dontfork_range((void *)start, end - start);
	rf_sys_fail(0, 0);
	CHECK(rc == 0 || (failing && rc == -1 && errno));
	for (page = first_page(start); rc == 0 && page <= last_page(end); page++)
		counts[page]++;
	made += rc == 0;
}

/* Where it fails midway, what it has released before stays so. */
static void note_failed(size_t first, size_t last)
{
	unsigned int found[PAGES];
	size_t page;
	bool released = true;

	read_counts(found);
	for (page = first; page <= last; page++) {
		CHECK(found[page] == counts[page] || (released && found[page] + 1 == counts[page]),
		      "page %zu: %u of %u", page, found[page], counts[page]);
		released = found[page] < counts[page];
		counts[page] = found[page];
	}
}

static void op_release(bool failing)
{
	bool balanced = true;
	uintptr_t start, end;
	size_t first, last, page;
	int rc;

	choose_bytes(&start, &end);
	first = first_page(start);
	last = last_page(end);
	for (page = first; page <= last; page++)
		balanced &= counts[page] > 0;
	arm(failing);
	rc = ibv_dofork_range((void *)start, end - start);
	rf_sys_fail(0, 0);
	CHECK(rc == 0 || (failing && rc == -1 && errno));
	if (rc < 0) {
		note_failed(first, last);
		return;
	}
	unbalanced += !balanced;
	for (page = first; balanced && page <= last; page++)
		counts[page]--;
}

static void step(void)
{
	size_t op = check_below(16);
	bool failing = op >= 13;

	lingering |= failing;
	if (op == 12 && !check_below(8)) {
		check_fork();
		lingering = false;
	} else if (op % 2) {
		op_release(failing);
	} else {
		op_register(failing);
	}
	check_counts();
	if (!lingering)
		check_marks();
}

/* ---- One input ---- */

static void start(void)
{
	size_t wish = check_below(8);
	struct rf_kernel kernel;
	struct rf_error error;

	CHECK(mmap((void *)ARENA, PAGES * PAGE, PROT_READ | PROT_WRITE,
		   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == (void *)ARENA);
	setenv("RDMAFORK_TRUST_COPYING", wish & 1 ? "0" : "1", 1);
	unsetenv("RDMAFORK_MODE");
	rf_kernel_info(&kernel);
	whole = !kernel.copy_trusted;
	CHECK(rf_fork_init(wish & 2 && !whole ? RF_MODE_LAZY : RF_MODE_EAGER, &error) == 0,
	      "cause %d", error.cause);
}

/* What is left goes page by page, and then nothing is. */
static void stop(void)
{
	size_t page;

	for (page = 0; page < PAGES; page++)
		for (; counts[page]; counts[page]--)
			CHECK(ibv_dofork_range((void *)(ARENA + page * PAGE), PAGE) == 0);
	check_fork();
	check_counts();
	check_marks();
	check_stop();
	CHECK(!munmap((void *)ARENA, PAGES * PAGE));
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t nbytes)
{
	check_play(input, nbytes);
	memset(counts, 0, sizeof(counts));
	made = 0;
	unbalanced = 0;
	lingering = false;
	start();
	while (!check_played() && made < 100)
		step();
	stop();
	return 0;
}
