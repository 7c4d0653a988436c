/* SPDX-License-Identifier: BSD-3-Clause */
/* What the kernel is taken for. */
#include "check.h"
#include "kernel.h"
#include "sys.h"

#include <sys/utsname.h>

static void versions_are_read(void)
{
	static const struct {
		const char *release;
		unsigned int version;
	} cases[] = {
		{ "6.1.0-44-amd64", 6001 },
		{ "5.10.0", 5010 },
		{ "5.12", 5012 },
		{ "5.19.0-rc1+", 5019 },
		{ "3.10.0-1160.el7.x86_64", 3010 },
		{ "10.2", 10002 },
		{ "6.18.44-fc-v595", 6018 },
		{ "5.1000.1", 5999 },
		{ "5.4294967297.1", 5999 },
		{ "4.99999999999999999999", 4999 },
		{ "", 0 },
		{ "6", 0 },
		{ "linux", 0 },
		{ "-6.1", 0 },
		{ "6-1", 0 },
		{ " 6.1", 0 },
		{ ".5", 0 },
		{ "6.", 0 },
		{ "6.x", 0 },
		{ "4294967302.1", 0 },
		{ "99999999999999999999.1", 0 },
	};
	size_t i;

	for (i = 0; i < COUNT_OF(cases); i++)
		CHECK(rf_kernel_parse_version(cases[i].release) == cases[i].version, "%s: %u",
		      cases[i].release, rf_kernel_parse_version(cases[i].release));
}

static void information_is_this_kernels(void)
{
	struct rf_kernel kernel, again;
	struct utsname name;
	long limit = 0;
	FILE *file;
	size_t i;

	rf_kernel_info(&kernel);
	CHECK(uname(&name) == 0 && !strcmp(name.release, kernel.release));
	CHECK(kernel.page_size == check_page);
	CHECK(!kernel.copy_trusted || kernel.copy_on_fork);
	file = fopen("/proc/sys/vm/max_map_count", "r");
	if (file) {
		CHECK(fscanf(file, "%ld", &limit) == 1 && limit == (long)kernel.max_map_count);
		fclose(file);
	}
	for (i = 1; i < COUNT_OF(kernel.huge_shifts) && kernel.huge_shifts[i]; i++)
		CHECK(kernel.huge_shifts[i] > kernel.huge_shifts[i - 1]);
	if (!access("/sys/kernel/mm/hugepages/hugepages-2048kB", F_OK))
		CHECK(memchr(kernel.huge_shifts, 21, sizeof(kernel.huge_shifts)));
	rf_kernel_info(&again);
	CHECK(!memcmp(&kernel, &again, sizeof(kernel)));
}

/* Each call fails once. What cannot be found out is taken for absent, never for there. */
static void what_cannot_be_asked_is_not_claimed(void)
{
	struct rf_kernel kernel;
	unsigned long nth;
	int status;

	for (nth = 1;; nth++) {
		pid_t child = fork();

		CHECK(child >= 0);
		if (!child) {
			rf_sys_fail(nth, ENOMEM);
			rf_kernel_info(&kernel);
			rf_sys_fail(0, 0);
			CHECK(kernel.page_size == check_page);
			/* Never none: half of it is what the engine may use. */
			CHECK(kernel.max_map_count >= 2);
			CHECK(!kernel.copy_trusted || kernel.copy_on_fork);
			_exit(rf_sys_faults() ? 0 : 2);
		}
		status = check_wait(child);
		if (status == 2)
			break;
		CHECK(status == 0, "call %lu: %d", nth, status);
	}
	CHECK(nth > 4, "%lu calls", nth);
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(versions_are_read),
		SCENARIO(information_is_this_kernels),
		SCENARIO(what_cannot_be_asked_is_not_claimed),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
