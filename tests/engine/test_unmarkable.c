/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Memory whose mark the kernel never takes back: madvise() marks VM_IO memory and does not
 * unmark it. [vvar], which has no file, is some in every process.
 */
#define _GNU_SOURCE
#include "check.h"

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
	CHECK(!!(check_flags(vvar) & CHECK_DC) == (stats.unreleased_bytes == check_page));
	CHECK(stats.unreleased_bytes || check_child_reads(vvar));
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

/* Once it has been given up, nothing tries again: neither a release nor a fork. */
static void a_mark_that_stays_is_given_up(void)
{
	char *vvar = find_vvar(), *memory = check_map(1);
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
	CHECK(after.madvise_calls - before.madvise_calls <= 200, "%lu calls",
	      (unsigned long)(after.madvise_calls - before.madvise_calls));
	/* It is told as long as it is so. */
	CHECK((after.unreleased_bytes > 0) == !!(check_flags(vvar) & CHECK_DC));
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(vvar_released_is_there_in_children_or_told_lazily),
		SCENARIO(vvar_released_is_there_in_children_or_told_eagerly),
		SCENARIO(a_mark_that_stays_is_given_up),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
