/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * ibv_dontfork_range() and ibv_dofork_range() as an input says, of any bytes in any order,
 * with system calls that fail and forks between. The model is the list of ranges that are
 * registered. A release takes one from it with the same bytes, or else one with the same
 * start and the same last page, or nothing.
 *
 * It counts ranges of libibverbs' calls, which have no policies and hold nothing: what a
 * child finds is the model of tests/fuzz/fuzz_engine.c and tests/engine/test_mixture.c.
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

#define RANGES 100

static struct bytes {
	uintptr_t start, end;
} ranges[RANGES];
static unsigned int counts[PAGES];
static unsigned int made, live, unbalanced;
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
	CHECK(stats.registrations == live && stats.ibv_ranges == live);
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

		inject(nth, errors[check_below(COUNT_OF(errors))]);
	}
}

static void count(const struct bytes *range, int change)
{
	size_t page;

	for (page = first_page(range->start); page <= last_page(range->end); page++)
		counts[page] += change;
}

static void op_register(bool failing)
{
	struct bytes *range = &ranges[live];
	int rc;

	choose_bytes(&range->start, &range->end);
	arm(failing);
	rc = ibv_dontfork_range((void *)range->start, range->end - range->start);
	inject(0, 0);
	made++;
	if (rc < 0) {
		CHECK(failing && rc == -1 && errno);
		return;
	}
	count(range, 1);
	live++;
}

/* @unclear: several have those pages and not those bytes; which is released is not promised. */
static struct bytes *find(const struct bytes *wanted, bool *unclear)
{
	struct bytes *range, *similar = NULL;

	*unclear = false;
	for (range = ranges; range < ranges + live; range++) {
		if (range->start != wanted->start ||
		    last_page(range->end) != last_page(wanted->end))
			continue;
		if (range->end == wanted->end) {
			*unclear = false;
			return range;
		}
		*unclear |= similar && similar->end != range->end;
		similar = range;
	}
	return similar;
}

static void op_release(bool failing)
{
	struct bytes wanted, *range;
	bool unclear;
	int rc;

	choose_bytes(&wanted.start, &wanted.end);
	/* By chance alone few would be found. */
	if (live && check_below(4)) {
		wanted = ranges[check_below(live)];
		if (!check_below(4))
			wanted.end = ARENA + (last_page(wanted.end) + 1) * PAGE;
	}
	range = find(&wanted, &unclear);
	if (unclear)
		return;
	arm(failing);
	rc = ibv_dofork_range((void *)wanted.start, wanted.end - wanted.start);
	inject(0, 0);
	CHECK(rc == 0, "%d", errno);
	if (!range) {
		unbalanced++;
		return;
	}
	count(range, -1);
	*range = ranges[--live];
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

static void stop(void)
{
	while (live) {
		const struct bytes *range = &ranges[--live];

		CHECK(ibv_dofork_range((void *)range->start, range->end - range->start) == 0);
		count(range, -1);
	}
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
	made = live = 0;
	unbalanced = 0;
	lingering = false;
	start();
	while (!check_played() && made < RANGES)
		step();
	stop();
	return 0;
}
