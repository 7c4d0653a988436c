/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Every system call of every operation fails once, with every errno that callers
 * tell apart and some that sandboxes and limits give. A call that fails leaves all
 * as it was; one that succeeds really protects; and in the end everything can be
 * given back.
 */
#include "check.h"
#include "fork.h"
#include "prefork.h"

#define PAGES 16
#define MAX_LIVE 8

/* The memory that an operation works on. */
static char *memory, *huge;
static struct rf_handle live[MAX_LIVE], made;
static size_t live_count;
static struct rf_error error;

struct operation {
	const char *name;
	enum rf_mode mode;
	void (*before)(void);
	int (*act)(void);
	/* After success, and a fork if the mode is lazy. */
	void (*after)(void);
	bool uses_huge;
};

struct snapshot {
	struct rf_stats stats;
	unsigned char pages[PAGES], huge[4];
	struct rf_range_info list[32];
	ssize_t listed;
};

static void take_snapshot(struct snapshot *snapshot)
{
	size_t i;

	memset(snapshot, 0, sizeof(*snapshot));
	snapshot->listed = rf_list(snapshot->list, COUNT_OF(snapshot->list));
	CHECK(snapshot->listed >= 0);
	CHECK(rf_stats(&snapshot->stats) == 0);
	/* Numbers that may grow, and numbers that say how much was done. */
	snapshot->stats.madvise_calls = 0;
	snapshot->stats.query_calls = 0;
	snapshot->stats.engine_bytes = 0;
	snapshot->stats.forks = 0;
	check_read_smaps();
	for (i = 0; memory && i < PAGES; i++)
		snapshot->pages[i] = (unsigned char)check_flags_read(memory + i * check_page);
	for (i = 0; huge && i < 4; i++)
		snapshot->huge[i] = (unsigned char)check_flags_read(huge + i * CHECK_HUGE / 2);
}

static void keep(struct rf_handle handle)
{
	CHECK(live_count < MAX_LIVE);
	live[live_count++] = handle;
}

static int registered(const void *start, size_t nbytes, unsigned int flags)
{
	int rc = rf_register(start, nbytes, flags, RF_OMIT, &made, &error);

	if (rc >= 0)
		keep(made);
	return rc;
}

/* ---- Operations ---- */

static int act_start_lazy(void)
{
	return rf_fork_init(RF_MODE_AUTO, &error);
}

static int act_start_eager(void)
{
	return rf_fork_init(RF_MODE_EAGER, &error);
}

static void after_start(void)
{
	char *page = check_map(1);

	keep(check_register(page, check_page, 0));
	CHECK(check_marked(page, 1) == 1);
}

static int act_fresh(void)
{
	return registered(memory + 3 * check_page, 5 * check_page, RF_HELD);
}

static void after_fresh(void)
{
	CHECK(check_marked(memory + 3 * check_page, 5) == 5);
}

static int act_unheld_edges(void)
{
	return registered(memory + 3 * check_page - 10, 5 * check_page + 20, 0);
}

static void before_overlap(void)
{
	keep(check_register(memory + 2 * check_page, 3 * check_page, RF_HELD));
	keep(check_register(memory + 7 * check_page, 3 * check_page, 0));
}

static void before_hole(void)
{
	before_overlap();
	check_unmap(memory + 6 * check_page, 1);
}

static void after_hole(void)
{
	CHECK(0, "a hole was registered");
}

/* Some of it mapped anew since another registered it, and some gone. */
static void before_doubt(void)
{
	keep(check_register(memory + 2 * check_page, 5 * check_page, 0));
	check_map_over(memory + 4 * check_page, 2, MAP_PRIVATE);
}

static void before_shared(void)
{
	check_map_over(memory + 4 * check_page, 2, MAP_SHARED);
}

static void after_shared(void)
{
	/* A mark matters only when a child is made. */
	CHECK(check_child_reads(memory + 4 * check_page));
	CHECK(check_marked(memory + 3 * check_page, 5) == 3);
	CHECK(!check_child_reads(memory + 3 * check_page));
}

static int act_huge(void)
{
	return registered(huge + CHECK_HUGE + 4096, 64, 0);
}

static void after_huge(void)
{
	/* Without /proc part of a huge page is the kernel's to copy, and pending until asked. */
	check_read_smaps();
	CHECK(!(check_flags_read(huge) & CHECK_DC));
}

static void before_whole(void)
{
	static struct rf_kernel kernel;

	kernel = *rf_engine.tracker.kernel;
	kernel.copy_trusted = 0;
	rf_engine.tracker.kernel = &kernel;
}

static int act_huge_held(void)
{
	return registered(huge + CHECK_HUGE / 2, CHECK_HUGE, RF_HELD);
}

static void after_huge_whole(void)
{
	check_read_smaps();
	CHECK(check_flags_read(huge) & CHECK_DC);
	CHECK(check_flags_read(huge + CHECK_HUGE) & CHECK_DC);
}

static void before_text(void)
{
	before_whole();
	rf_engine.tracker.reader.query = false;
}

/* As if the tables were full. */
static void before_growth(void)
{
	struct rf_registry *registry = &rf_engine.registry;

	CHECK(registered(memory, 0, RF_HELD) == 1);
	registry->slots.capacity = registry->touched;
	rf_engine.tracker.ranges.capacity = 0;
	rf_engine.tracker.ranges.leaves.capacity = 0;
	rf_engine.tracker.ranges.directory.capacity = 0;
}

static void after_lazy(void)
{
	check_fork();
	after_fresh();
}

static void before_release(void)
{
	before_overlap();
	keep(check_register(memory + 4 * check_page, 4 * check_page, RF_HELD));
}

static int act_release(void)
{
	return rf_release(live[--live_count], 0);
}

static void before_release_hole(void)
{
	keep(check_register(memory + 2 * check_page, 8 * check_page, 0));
	check_unmap(memory + 4 * check_page, 2);
}

static void before_release_huge(void)
{
	struct rf_handle all = check_register(huge, 2 * CHECK_HUGE, 0);

	before_whole();
	keep(check_register(huge + CHECK_HUGE / 2, CHECK_HUGE, RF_HELD));
	keep(all);
}

static void before_prefork(void)
{
	keep(check_register(memory + 100, 3 * check_page, RF_HELD));
	keep(check_register(memory + 6 * check_page, 2 * check_page, RF_HELD));
	keep(check_register(memory + 10 * check_page, 2 * check_page, RF_HELD));
}

static void before_prefork_mixed(void)
{
	before_shared();
	before_prefork();
	keep(check_register(memory, PAGES * check_page, RF_HELD));
	if (huge)
		keep(check_register(huge + CHECK_HUGE / 2, 64, RF_HELD));
}

/* A fork handler's work, without a fork. */
static int act_prefork(void)
{
	CHECK(rf_enter(0) == 0);
	rf_prefork(&rf_engine.tracker, &rf_engine.registry, &rf_engine.list);
	rf_leave();
	return 0;
}

static void after_prefork(void)
{
	check_sound();
	check_fork();
	CHECK(check_marked(memory + 6 * check_page, 2) == 2);
	CHECK(check_marked(memory + 10 * check_page, 2) == 2);
	CHECK(check_marked(memory + 100, 3) == 2);
}

static void after_prefork_mixed(void)
{
	check_sound();
	CHECK(check_child_reads(memory + 4 * check_page));
	CHECK(check_marked(memory, PAGES) == PAGES - 2);
	if (huge)
		CHECK(check_flags(huge) & CHECK_DC);
}

static void before_list(void)
{
	before_shared();
	keep(check_register(memory, PAGES * check_page, RF_HELD));
}

static int act_list(void)
{
	struct rf_range_info info[8];
	ssize_t count = rf_list(info, 8);

	return count < 0 ? (int)count : 0;
}

static void after_list(void)
{
	CHECK(check_child_reads(memory + 4 * check_page));
	CHECK(!check_child_reads(memory));
}

static int act_stats(void)
{
	struct rf_stats stats;

	return rf_stats(&stats);
}

static const struct operation operations[] = {
	{ "rf_fork_init lazy", RF_MODE_NONE, NULL, act_start_lazy, after_start, false },
	{ "rf_fork_init eager", RF_MODE_NONE, NULL, act_start_eager, after_start, false },
	{ "register", RF_MODE_EAGER, NULL, act_fresh, after_fresh, false },
	{ "register unheld, edges", RF_MODE_EAGER, NULL, act_unheld_edges, after_fresh, false },
	{ "register over others", RF_MODE_EAGER, before_overlap, act_fresh, after_fresh, false },
	{ "register a hole", RF_MODE_EAGER, before_hole, act_fresh, after_hole, false },
	{ "register in doubt", RF_MODE_EAGER, before_doubt, act_fresh, after_fresh, false },
	{ "register shared", RF_MODE_EAGER, before_shared, act_fresh, after_shared, false },
	{ "register in a huge page", RF_MODE_EAGER, NULL, act_huge, after_huge, true },
	{ "register huge, whole", RF_MODE_EAGER, before_whole, act_huge_held, after_huge_whole,
	  true },
	{ "register huge, by text", RF_MODE_EAGER, before_text, act_huge_held, after_huge_whole,
	  true },
	{ "register, tables full", RF_MODE_EAGER, before_growth, act_fresh, after_fresh, false },
	{ "register lazily", RF_MODE_LAZY, NULL, act_fresh, after_lazy, false },
	{ "register lazily, full", RF_MODE_LAZY, before_growth, act_fresh, after_lazy, false },
	{ "release", RF_MODE_EAGER, before_release, act_release, NULL, false },
	{ "release a hole", RF_MODE_EAGER, before_release_hole, act_release, NULL, false },
	{ "release huge", RF_MODE_EAGER, before_release_huge, act_release, NULL, true },
	{ "prefork", RF_MODE_LAZY, before_prefork, act_prefork, after_prefork, false },
	{ "prefork eager shared", RF_MODE_EAGER, before_list, act_prefork, after_list, false },
	{ "prefork mixed", RF_MODE_LAZY, before_prefork_mixed, act_prefork, after_prefork_mixed,
	  true },
	{ "list", RF_MODE_EAGER, before_list, act_list, after_list, false },
	{ "stats", RF_MODE_EAGER, before_overlap, act_stats, NULL, false },
};

/* ---- The walk over all calls ---- */

#define DONE 2 /* exit status: the operation made fewer calls */

static void give_all_back(void)
{
	size_t i;

	while (live_count)
		check_release(live[--live_count]);
	if (rf_mode() == RF_MODE_NONE)
		return;
	/* Memory that the kernel refused to unmark is tried again at each fork. */
	check_fork();
	check_empty();
	CHECK(check_marked(memory, PAGES) == 0, "a page stays marked");
	for (i = 0; huge && i < 2; i++)
		CHECK(!(check_flags(huge + i * CHECK_HUGE) & CHECK_DC), "a huge page stays marked");
}

static void run_once(const struct operation *operation, unsigned long nth, int with)
{
	static struct snapshot before, now;
	unsigned long faults, calls;
	size_t lived;
	int rc;

	memory = check_map(PAGES);
	huge = operation->uses_huge ? check_map_huge(2, MAP_PRIVATE) : NULL;
	if (operation->mode != RF_MODE_NONE)
		check_start(operation->mode);
	if (operation->before)
		operation->before();
	/* Asks what is mapped, as prefork is to do, and none of its calls is refused. */
	if (operation->act != act_prefork && operation->act != act_list)
		take_snapshot(&before);
	lived = live_count;
	faults = inject_faults();
	calls = inject_calls();
	errno = 12345;
	inject(nth, with);
	rc = operation->act();
	inject(0, 0);
	CHECK(errno == 12345, "errno is %d", errno);
	faults = inject_faults() - faults;
	calls = inject_calls() - calls;
	CHECK(faults == (nth <= calls), "%lu faults in %lu calls", faults, calls);
	check_sound();
	if (rc < 0 && operation->act != act_list) {
		CHECK(live_count == lived);
		take_snapshot(&now);
		/* Undone at the next fork, when /proc failed too where a hole must be found. */
		if (operation->after == after_hole && now.stats.still_marked_bytes) {
			check_fork();
			take_snapshot(&now);
		}
		CHECK(!memcmp(&before.stats, &now.stats, sizeof(now.stats)), "statistics differ");
		CHECK(!memcmp(before.pages, now.pages, sizeof(now.pages)), "marks differ");
		CHECK(!memcmp(before.huge, now.huge, sizeof(now.huge)), "huge marks differ");
		CHECK(before.listed == now.listed &&
			      !memcmp(before.list, now.list, sizeof(now.list)),
		      "the list differs");
	}
	/* It can be done yet. */
	if (rc < 0 && operation->after != after_hole) {
		rc = operation->act();
		CHECK(rc >= 0, "the second attempt: %d, cause %d", rc, error.cause);
	}
	if (rc >= 0 && operation->after)
		operation->after();
	check_sound();
	give_all_back();
	_exit(faults ? 0 : DONE);
}

static const struct operation *under_test;

static void fail_every_call(void)
{
	static const int errors[] = CHECK_ERRORS;
	size_t i, kinds = CHECK_TSAN ? 1 : COUNT_OF(errors);
	unsigned long nth = 0, total = 0;
	int status;

	if (under_test->mode == RF_MODE_LAZY)
		check_needs_lazy();
	for (i = 0; i < kinds; i++) {
		for (nth = 1;; nth++) {
			pid_t child = fork();

			CHECK(child >= 0);
			if (!child)
				run_once(under_test, nth, errors[i]);
			status = check_wait(child);
			if (status == DONE || status == 77)
				break;
			CHECK(status == 0, "call %lu with %s: %d", nth, strerror(errors[i]),
			      status);
			CHECK(nth < 1000);
			total++;
		}
		if (status == 77)
			check_skip("no huge pages");
	}
	printf("        %lu faults\n", total);
	fflush(stdout);
	/* Where nothing is called nothing can fail: of these two that is the promise. */
	CHECK(total || !strcmp(under_test->name, "stats") ||
		      !strcmp(under_test->name, "register lazily"),
	      "no fault was injected");
	CHECK(!total || (strcmp(under_test->name, "stats") &&
			 strcmp(under_test->name, "register lazily")),
	      "it makes system calls");
}

int main(int argc, char **argv)
{
	struct check_scenario scenarios[COUNT_OF(operations)];
	int failed = 0;
	size_t i;

	for (i = 0; i < COUNT_OF(operations); i++) {
		if (argc > 1 && !strstr(operations[i].name, argv[1]))
			continue;
		under_test = &operations[i];
		scenarios[i].name = operations[i].name;
		scenarios[i].run = fail_every_call;
		scenarios[i].huge = operations[i].uses_huge;
		failed |= check_run(&scenarios[i], 1, 1, argv);
	}
	return failed;
}
