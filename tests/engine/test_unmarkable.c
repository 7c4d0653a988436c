/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Memory whose mark the kernel never takes back: madvise() marks VM_IO memory and does not
 * unmark it. [vvar], which has no file, is some in every process. Linux 7.3 unmarks no huge
 * page either; a filter makes other kernels do as it does.
 */
#define _GNU_SOURCE
#include "check.h"
#include "engine.h"
#include "kernel.h"

#include <link.h>
#include <sys/auxv.h>

/* The first page of [vvar], which the clock is read from. */
static char *find_vvar(void)
{
	unsigned long start = 0;
	char line[256];
	FILE *maps = fopen("/proc/self/maps", "re");

	CHECK(maps);
	while (fgets(line, sizeof(line), maps))
		if (strstr(line, "[vvar]") && sscanf(line, "%lx-", &start) == 1)
			break;
	fclose(maps);
	if (!start)
		check_skip("no [vvar] here");
	return (char *)start;
}

/* Refused, or registered and released. */
static void register_vvar(char *vvar, unsigned int flags)
{
	struct rf_handle handle;
	struct rf_error error;
	int rc = rf_register(vvar, check_page, flags, RF_OMIT, &handle, &error);

	CHECK(rc == 1 || rc == -EINVAL || rc == -ENOTSUP, "%d", rc);
	check_fork();
	if (rc == 1)
		check_release(handle);
}

/* Nothing is different afterwards, or, where the kernel keeps the mark, that is told. */
static void children_keep_vvar(enum rf_mode mode, unsigned int flags)
{
	char *vvar = find_vvar();
	struct rf_stats stats;

	check_start(mode);
	CHECK(check_child_reads(vvar));
	register_vvar(vvar, flags);
	CHECK(rf_stats(&stats) == 0);
	CHECK(!!(check_flags(vvar) & CHECK_DC) == (stats.still_marked_bytes == check_page));
	CHECK(stats.still_marked_bytes || check_child_reads(vvar));
}

static void vvar_released_is_there_in_children_or_told_lazily(void)
{
	check_needs_lazy();
	children_keep_vvar(RF_MODE_LAZY, RF_HELD);
}

static void vvar_released_is_there_in_children_or_told_eagerly(void)
{
	children_keep_vvar(RF_MODE_EAGER, 0);
}

/* Once releases have given it up, only forks try again: it may have been unmapped. */
static void a_mark_that_stays_is_given_up(void)
{
	char *vvar = find_vvar(), *memory = check_map(1);
	const bool stay = check_marks_stay();
	struct rf_stats before, after;
	unsigned int i;

	check_start(RF_MODE_EAGER);
	register_vvar(vvar, 0);
	for (i = 0; i < 1000; i++) {
		check_release(check_register(memory, check_page, 0));
		if (i % 100 == 0)
			check_fork();
	}
	CHECK(rf_stats(&before) == 0);
	for (i = 0; i < 100; i++)
		check_release(check_register(memory, check_page, 0));
	CHECK(rf_stats(&after) == 0);
	CHECK(after.madvise_calls - before.madvise_calls <= (stay ? 300 : 200), "%lu calls",
	      (unsigned long)(after.madvise_calls - before.madvise_calls));
	/* It is told as long as it is so. */
	CHECK((after.still_marked_bytes > 0) == !!(check_flags(vvar) & CHECK_DC));
}

/* Nothing but huge pages may be marked and unmarked after this. */
static void unmark_no_huge_page(void)
{
	if (!check_marks_stay())
		check_refuse_advice(MADV_DOFORK, EINVAL);
}

static void huge_pages_that_stay_marked_are_given_up(void)
{
	char *huge = check_map_huge_any(1, MAP_PRIVATE);
	const struct rf_ranges *ranges = &rf_engine.tracker.ranges;
	const struct rf_range *range;
	unsigned int i;

	unmark_no_huge_page();
	check_start(RF_MODE_EAGER);
	check_release(check_register(huge, CHECK_HUGE, RF_HELD));
	range = rf_ranges_find(ranges, (uintptr_t)huge);
	CHECK(range && range->flags & RF_RANGE_RETRY);
	for (i = 0; i < RF_RANGE_TRIES; i++)
		check_fork();
	range = rf_ranges_find(ranges, (uintptr_t)huge);
	CHECK(range && rf_range_is_stuck(range));
}

static bool child_reads_huge(const char *huge)
{
	return check_child_reads(huge) && check_child_reads(huge + CHECK_HUGE - 1);
}

/*
 * Huge pages that a registration has filled are absent from children once they are released,
 * too. That is told until they are unmapped.
 */
static void released_huge_pages_are_told(enum rf_mode mode)
{
	char *huge = check_map_huge_any(3, MAP_PRIVATE);
	char *other = check_map_huge_any(1, MAP_PRIVATE);
	struct rf_handle whole, part;
	struct rf_stats stats;

	memset(huge, 7, 3 * CHECK_HUGE);
	unmark_no_huge_page();
	check_start(mode);
	whole = check_register(huge, CHECK_HUGE, RF_HELD);
	part = check_register(huge + CHECK_HUGE + 777, 5000, RF_HELD);
	check_fork();
	CHECK(!check_child_reads(huge) && child_reads_huge(huge + CHECK_HUGE));
	check_release(whole);
	check_release(part);
	check_fork();
	CHECK(rf_stats(&stats) == 0 && stats.still_marked_bytes == 2 * CHECK_HUGE, "%lu",
	      (unsigned long)stats.still_marked_bytes);
	CHECK(!check_child_reads(huge) && child_reads_huge(huge + 2 * CHECK_HUGE));
	/* Memory that was never registered is not lost. */
	CHECK(child_reads_huge(huge + CHECK_HUGE));
	/* Registered once more, it is like any other. */
	part = check_register(huge + 777, 5000, RF_HELD);
	check_fork();
	CHECK(child_reads_huge(huge));
	check_release(part);
	CHECK(munmap(huge, 3 * CHECK_HUGE) == 0);
	check_release(check_register(other, CHECK_HUGE, RF_HELD));
	check_fork();
	CHECK(rf_stats(&stats) == 0);
	CHECK(stats.still_marked_bytes == (mode == RF_MODE_LAZY ? 0 : CHECK_HUGE), "%lu",
	      (unsigned long)stats.still_marked_bytes);
}

static void released_huge_pages_are_told_lazily(void)
{
	check_needs_lazy();
	released_huge_pages_are_told(RF_MODE_LAZY);
}

static void released_huge_pages_are_told_eagerly(void)
{
	released_huge_pages_are_told(RF_MODE_EAGER);
}

/* Not even for a moment do they bear a mark. */
static void children_keep_shared_huge_pages(void)
{
	char *huge = check_map_huge_any(2, MAP_SHARED);
	struct rf_handle all, held;

	memset(huge, 7, 2 * CHECK_HUGE);
	unmark_no_huge_page();
	check_start(RF_MODE_EAGER);
	all = check_register(huge, 2 * CHECK_HUGE, 0);
	CHECK(child_reads_huge(huge));
	held = check_register(huge + 777, CHECK_HUGE, RF_HELD);
	CHECK(child_reads_huge(huge));
	check_release(all);
	check_release(held);
	CHECK(child_reads_huge(huge) && child_reads_huge(huge + CHECK_HUGE));
	check_empty();
}

static char **arguments;

/* Environment and auxiliary vector follow the arguments. */
static void hide_vdso(void)
{
	ElfW(auxv_t) * entry;
	char **at = arguments;

	while (*at++)
		;
	while (*at++)
		;
	for (entry = (void *)at; entry->a_type != AT_NULL; entry++)
		if (entry->a_type == AT_SYSINFO_EHDR)
			entry->a_type = AT_IGNORE;
	CHECK(!getauxval(AT_SYSINFO_EHDR));
}

static bool may_stay_on(const char *release)
{
	struct rf_kernel kernel = *rf_kernel();
	struct rf_tracker tracker;

	snprintf(kernel.release, sizeof(kernel.release), "%s", release);
	rf_tracker_init(&tracker);
	rf_tracker_start(&tracker, &kernel, false);
	return tracker.marks_stay;
}

/* As under valgrind, which hides it. */
static void without_a_vdso_the_version_tells_whether_marks_stay(void)
{
	const bool stay = check_marks_stay();
	struct rf_handle handle;
	char *memory = check_map(4);

	CHECK(may_stay_on("6.18.44") == stay && may_stay_on("7.3.0") == stay);
	hide_vdso();
	CHECK(!may_stay_on("5.10.0") && !may_stay_on("6.18.44") && !may_stay_on(""));
	CHECK(may_stay_on("7.0.0") && may_stay_on("7.3-rc1"));
	CHECK(may_stay_on(rf_kernel()->release) == stay);
	check_start(RF_MODE_EAGER);
	handle = check_register(memory + 100, 2 * check_page, 0);
	CHECK(!check_child_reads(memory + check_page) && check_child_reads(memory + 99));
	check_release(handle);
	CHECK(check_child_reads(memory + check_page));
	check_empty();
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(vvar_released_is_there_in_children_or_told_lazily),
		SCENARIO(vvar_released_is_there_in_children_or_told_eagerly),
		SCENARIO(a_mark_that_stays_is_given_up),
		SCENARIO_HUGE(huge_pages_that_stay_marked_are_given_up),
		SCENARIO_HUGE(released_huge_pages_are_told_lazily),
		SCENARIO_HUGE(released_huge_pages_are_told_eagerly),
		SCENARIO_HUGE(children_keep_shared_huge_pages),
		SCENARIO(without_a_vdso_the_version_tells_whether_marks_stay),
	};

	arguments = argv;
	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
