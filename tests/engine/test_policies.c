/* SPDX-License-Identifier: BSD-3-Clause */
/* A child gets nothing, zeros, or a copy, as the policy says. */
#define _GNU_SOURCE
#include "check.h"
#include "fork.h"
#include "prefork.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>

static struct rf_error error;

static int try_register(const void *start, size_t nbytes, enum rf_policy policy,
			struct rf_handle *handle)
{
	memset(&error, 0, sizeof(error));
	return rf_register(start, nbytes, RF_HELD, policy, handle, &error);
}

static void start(enum rf_mode mode)
{
	check_needs_lazy();
	check_start(mode);
}

static void a_child_reads_zeros(enum rf_mode mode)
{
	char *memory = check_map(8);
	struct rf_handle handle;

	start(mode);
	memset(memory, 7, 8 * check_page);
	handle = check_register_as(memory + check_page, 3 * check_page, RF_WIPE);
	CHECK(check_child_finds(memory) == 7 && check_child_finds(memory + 4 * check_page) == 7);
	CHECK(check_flags(memory + check_page) & CHECK_WF);
	CHECK(!(check_flags(memory + check_page) & CHECK_DC));
	CHECK(!(check_flags(memory) & CHECK_WF));
	CHECK(check_child_finds(memory + check_page) == 0 &&
	      check_child_finds(memory + 3 * check_page) == 0);
	CHECK(memory[check_page] == 7);
	check_sound();
	check_release(handle);
	CHECK(check_child_finds(memory + check_page) == 7);
	CHECK(!(check_flags(memory + check_page) & CHECK_WF));
	check_empty();
}

static void a_child_reads_zeros_lazy(void)
{
	a_child_reads_zeros(RF_MODE_LAZY);
}

static void a_child_reads_zeros_eager(void)
{
	a_child_reads_zeros(RF_MODE_EAGER);
}

static void partial_pages_are_copied(void)
{
	char *memory = check_map(4);
	struct rf_handle handle;

	start(RF_MODE_LAZY);
	memset(memory, 7, 4 * check_page);
	handle = check_register_as(memory + 100, 2 * check_page, RF_WIPE);
	CHECK(check_child_finds(memory + 200) == 7 && check_child_finds(memory + check_page) == 0);
	CHECK(check_child_finds(memory + 2 * check_page) == 7);
	check_release(handle);
	check_empty();
}

/* The kernel cannot wipe them: zeros are mapped in a child, as the parent has them mapped. */
static void private_files_are_wiped(enum rf_mode mode)
{
	char *memory = check_map(6), *file = memory + 2 * check_page;
	int fd = open("/proc/self/exe", O_RDONLY);
	struct rf_handle handle;
	pid_t pid;

	start(mode);
	memset(memory, 7, 6 * check_page);
	CHECK(mmap(file, check_page, PROT_READ, MAP_PRIVATE | MAP_FIXED, fd, 0) != MAP_FAILED);
	close(fd);
	CHECK(check_child_finds(file) == 0x7f && check_child_finds(file - 1) == 7);
	handle = check_register_as(memory, 6 * check_page, RF_WIPE);
	CHECK(check_child_finds(file) == 0 && check_child_finds(file - 1) == 0);
	CHECK(check_child_finds(file + check_page) == 0 && *file == 0x7f);
	CHECK(check_flags(file) & CHECK_DC && check_flags(file - 1) & CHECK_WF);
	pid = fork();
	if (!pid) {
		signal(SIGSEGV, SIG_DFL); /* a sanitizer's handler would exit */
		*(volatile char *)(file - 1) = 1;
		*(volatile char *)file = 1;
		_exit(0);
	}
	CHECK(check_wait(pid) == -SIGSEGV);
	check_release(handle);
	CHECK(check_child_finds(file) == 0x7f);
	check_empty();
}

static void private_files_are_wiped_lazy(void)
{
	private_files_are_wiped(RF_MODE_LAZY);
}

static void private_files_are_wiped_eager(void)
{
	private_files_are_wiped(RF_MODE_EAGER);
}

static void huge_pages_are_wiped(enum rf_mode mode)
{
	char *huge = check_map_huge(3, MAP_PRIVATE);
	struct rf_handle handle;

	start(mode);
	memset(huge, 7, 3 * CHECK_HUGE);
	handle = check_register_as(huge, 2 * CHECK_HUGE + 100, RF_WIPE);
	CHECK(check_child_finds(huge) == 0 && check_child_finds(huge + 2 * CHECK_HUGE - 1) == 0);
	/* It does not fill the third. */
	CHECK(check_child_finds(huge + 2 * CHECK_HUGE) == 7);
	CHECK(check_child_finds(huge + 3 * CHECK_HUGE - 1) == 7);
	CHECK(huge[0] == 7);
	check_release(handle);
	CHECK(check_child_finds(huge) == 7);
	check_empty();
}

static void huge_pages_are_wiped_lazy(void)
{
	huge_pages_are_wiped(RF_MODE_LAZY);
}

static void huge_pages_are_wiped_eager(void)
{
	huge_pages_are_wiped(RF_MODE_EAGER);
}

static void shared_memory_stays_shared(void)
{
	char *shared = check_map_shared(2);
	struct rf_handle handle;

	start(RF_MODE_EAGER);
	shared[0] = 7;
	handle = check_register_as(shared, 2 * check_page, RF_WIPE);
	CHECK(check_child_finds(shared) == 7);
	check_release(handle);
	check_empty();
}

static void a_hole_is_not_wiped(void)
{
	char *memory = check_map(4);
	struct rf_handle handle;

	start(RF_MODE_EAGER);
	check_unmap(memory + 2 * check_page, 1);
	CHECK(try_register(memory, 4 * check_page, RF_WIPE, &handle) == -ENOMEM);
	CHECK(error.cause == RF_CAUSE_NOT_MAPPED &&
	      error.start == (uintptr_t)memory + 2 * check_page);
	CHECK(!(check_flags(memory) & (CHECK_WF | CHECK_DC)));
	check_empty();
}

static void a_child_reads_kept_pages(void)
{
	char *memory = check_map(4), *shared = check_map_shared(1);
	struct rf_handle handle, other;
	struct rf_range_info info[4];
	unsigned long calls;

	start(RF_MODE_LAZY);
	memset(memory, 7, 4 * check_page);
	memset(shared, 8, check_page);
	calls = inject_calls();
	handle = check_register_as(memory, 4 * check_page, RF_KEEP);
	other = check_register_as(shared, check_page, RF_KEEP);
	CHECK(inject_calls() == calls);
	CHECK(check_child_finds(memory) == 7 && check_child_finds(shared) == 8);
	CHECK(rf_list(info, 4) == 2);
	CHECK(info[0].policy == RF_KEEP && info[1].policy == RF_KEEP);
	CHECK(info[shared < memory].protection == RF_BY_KERNEL);
	CHECK(info[memory < shared].protection == RF_BY_SHARING);
	check_release(handle);
	check_release(other);
	check_empty();
}

static void nothing_private_is_kept_where_copying_is_not_trusted(void)
{
	char *memory = check_map(4), *shared = check_map_shared(2);
	struct rf_handle handle;

	check_start_untrusted();
	CHECK(try_register(memory, check_page, RF_KEEP, &handle) == -ENOTSUP);
	CHECK(error.cause == RF_CAUSE_POLICY);
	check_empty();
	handle = check_register_as(shared + 10, check_page, RF_KEEP);
	CHECK(check_child_reads(shared));
	check_release(handle);
	/* Half of it is private. */
	CHECK(mmap(shared + check_page, check_page, PROT_READ,
		   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED);
	CHECK(try_register(shared, 2 * check_page, RF_KEEP, &handle) == -ENOTSUP);
	check_unmap(shared + check_page, 1);
	CHECK(try_register(shared, 2 * check_page, RF_KEEP, &handle) == -ENOTSUP);
	check_empty();
}

static void omit_comes_before_wipe_before_keep(void)
{
	char *memory = check_map(3);
	struct rf_handle omit, wipe, keep;
	struct rf_range_info info[4];

	start(RF_MODE_LAZY);
	memset(memory, 7, 3 * check_page);
	keep = check_register_as(memory, 3 * check_page, RF_KEEP);
	wipe = check_register_as(memory, 2 * check_page, RF_WIPE);
	omit = check_register_as(memory, check_page, RF_OMIT);
	CHECK(check_child_finds(memory) == -1);
	CHECK(check_child_finds(memory + check_page) == 0);
	CHECK(check_child_finds(memory + 2 * check_page) == 7);
	CHECK(rf_list(info, 4) == 3);
	CHECK(info[0].policy == RF_OMIT && info[0].protection == RF_BY_MARK &&
	      info[0].registrations == 3);
	CHECK(info[1].policy == RF_WIPE && info[1].protection == RF_BY_MARK &&
	      info[1].registrations == 2);
	CHECK(info[2].policy == RF_KEEP && info[2].protection == RF_BY_KERNEL &&
	      info[2].registrations == 1);
	check_release(omit);
	CHECK(check_child_finds(memory) == 0);
	check_release(wipe);
	CHECK(check_child_finds(memory) == 7 && check_child_finds(memory + check_page) == 7);
	check_release(keep);
	check_empty();
}

static void a_failure_changes_nothing(void)
{
	char *memory = check_map(8);
	struct rf_handle held, handle;
	unsigned long nth, faults = 0, seen;
	size_t pages;
	int rc;

	start(RF_MODE_EAGER);
	held = check_register_as(memory + 2 * check_page, check_page, RF_WIPE);
	for (nth = 1; nth < 20; nth++) {
		seen = inject_faults();
		inject(nth, ENOMEM);
		rc = try_register(memory, 8 * check_page, RF_WIPE, &handle);
		inject(0, 0);
		if (rc == 1) {
			check_release(handle);
		} else {
			CHECK(rc == -ENOMEM, "%d", rc);
		}
		faults += inject_faults() - seen;
		check_fork();
		check_read_smaps();
		for (pages = 0; pages < 8; pages++)
			CHECK(!(check_flags_read(memory + pages * check_page) & CHECK_WF) !=
				      (pages == 2),
			      "call %lu, page %zu", nth, pages);
		check_sound();
		if (inject_faults() == seen)
			break;
	}
	CHECK(faults);
	check_release(held);
	check_empty();
}

static void wiping_keeps_to_the_budget(void)
{
	char *memory = check_map(64);
	struct rf_handle handles[32];
	struct rf_stats stats;
	size_t i;

	start(RF_MODE_EAGER);
	memset(memory, 7, 64 * check_page);
	rf_engine.tracker.vma_budget = 20;
	for (i = 0; i < 32; i++)
		handles[i] = check_register_as(memory + 2 * i * check_page, check_page,
					       i < 4 ? RF_OMIT : RF_WIPE);
	CHECK(rf_stats(&stats) == 0 && stats.marked_ranges == 10 && stats.unmarked_ranges == 22);
	CHECK(check_child_finds(memory) == -1 && check_child_finds(memory + 8 * check_page) == 0);
	/* Ranges beyond it are left to the kernel, which copies. */
	CHECK(check_child_finds(memory + 62 * check_page) == 7);
	for (i = 0; i < 32; i++)
		check_release(handles[i]);
	check_empty();
}

/* In a child that the handlers never saw, too. */
static void children_unmark_any_number_of_wiped_pages(void)
{
	const size_t count = 5000;
	struct rf_handle *handles = malloc(count * sizeof(*handles));
	char *memory = check_map(2 * count);
	size_t i, round;
	pid_t pid;

	start(RF_MODE_LAZY);
	for (round = 0; round < 2; round++) {
		for (i = 0; i < count; i++)
			handles[i] = check_register_as(memory + 2 * i * check_page, check_page,
						       RF_WIPE);
		check_fork();
		CHECK(check_flags(memory) & CHECK_WF);
		pid = round ? check_clone() : fork();
		if (!pid) {
			(void)rf_generation();
			check_read_smaps();
			for (i = 0; i < count; i++)
				CHECK(!(check_flags_read(memory + 2 * i * check_page) & CHECK_WF));
			handles[0] = check_register_as(memory, check_page, RF_WIPE);
			check_release(handles[0]);
			check_empty();
			_exit(0);
		}
		CHECK(check_wait(pid) == 0);
		for (i = 0; i < count; i++)
			check_release(handles[i * 1999 % count]);
		check_empty();
	}
	free(handles);
}

/*
 * A release that the kernel refuses leaves its mark. A child that is made before that is made up
 * for has the mark too, and unmarks it: else its own children would find zeros there.
 */
static void a_mark_that_waits_is_unmarked_in_a_child(void)
{
	char *memory = check_map(24);
	struct rf_handle handles[3];
	struct rf_stats stats;
	size_t i;
	pid_t pid;

	start(RF_MODE_LAZY);
	for (i = 0; i < 3; i++)
		handles[i] = check_register_as(memory + 8 * i * check_page, 8 * check_page,
					       RF_WIPE);
	check_fork();
	check_use_up_vmas(0);
	check_release(handles[1]);
	CHECK(rf_stats(&stats) == 0 && stats.still_marked_bytes == 8 * check_page);
	check_give_back_vmas();
	/* No handler tries again. */
	pid = check_clone();
	if (!pid) {
		(void)rf_generation();
		for (i = 0; i < 3; i++)
			CHECK(!(check_flags(memory + 8 * i * check_page) & CHECK_WF), "%zu", i);
		_exit(0);
	}
	CHECK(check_wait(pid) == 0);
	check_fork();
	CHECK(rf_stats(&stats) == 0 && stats.still_marked_bytes == 0);
	/* From then on its mark is not this engine's. */
	CHECK(!madvise(memory + 8 * check_page, 8 * check_page, MADV_WIPEONFORK));
	pid = fork();
	if (!pid) {
		CHECK(check_flags(memory + 8 * check_page) & CHECK_WF);
		_exit(0);
	}
	CHECK(check_wait(pid) == 0);
	check_release(handles[0]);
	check_release(handles[2]);
	check_empty();
}

/* Registrations that touch are one stretch to the kernel, which has no room to split it. */
static void a_child_at_the_kernels_limit_unmarks_wiped_pages_together(void)
{
	const size_t count = 500;
	char *memory = check_map(count);
	struct rf_handle handles[500];
	unsigned long calls;
	size_t i;
	pid_t pid;

	start(RF_MODE_LAZY);
	for (i = 0; i < count; i++)
		handles[i] = check_register_as(memory + i * check_page, check_page, RF_WIPE);
	check_fork();
	check_use_up_vmas(0);
	for (i = 99; i < count; i += 100)
		check_release(handles[i]);
	calls = inject_calls();
	pid = fork();
	if (!pid) {
		/* Not one for each. Maps that is read as text takes many more, before the fork. */
		CHECK(inject_calls() - calls < count / 2 ||
			      !rf_engine.tracker.kernel->procmap_query,
		      "%lu", inject_calls() - calls);
		check_give_back_vmas();
		check_read_smaps();
		for (i = 0; i < count; i++)
			CHECK(!(check_flags_read(memory + i * check_page) & CHECK_WF), "%zu", i);
		_exit(0);
	}
	CHECK(check_wait(pid) == 0);
	check_give_back_vmas();
	for (i = 0; i < count; i++)
		if (i % 100 != 99)
			check_release(handles[i]);
	check_empty();
}

/* Another thread may be in the middle of its own fork's marking. */
static void zeros_are_a_child_s_own_before_the_next_list_is_made(void)
{
	char *memory = check_map(4);
	struct rf_handle handle;
	pid_t pid;

	start(RF_MODE_LAZY);
	handle = check_register_as(memory, 4 * check_page, RF_WIPE);
	CHECK(rf_enter(0) == 0);
	rf_prefork(&rf_engine.tracker, &rf_engine.registry, &rf_engine.list);
	rf_leave();
	CHECK(check_flags(memory) & CHECK_WF);
	pid = check_clone();
	if (!pid) {
		(void)rf_generation();
		/* Its own children are to find this, and not zeros. */
		memory[0] = 9;
		CHECK(check_child_finds(memory) == 9);
		_exit(0);
	}
	CHECK(check_wait(pid) == 0);
	check_release(handle);
	check_empty();
}

/* Nothing can be shown to a child, which would not know that its children lose its bytes. */
static void without_memory_a_child_keeps_its_own_writes(void)
{
	const struct rlimit none = { 0, RLIM_INFINITY }, any = { RLIM_INFINITY, RLIM_INFINITY };
	char *memory = check_map(2);
	struct rf_handle handle;
	pid_t pid;

	if (CHECK_TSAN)
		check_skip("ThreadSanitizer needs memory of its own");
	start(RF_MODE_LAZY);
	memset(memory, 7, check_page);
	handle = check_register_as(memory, check_page, RF_WIPE);
	CHECK(!setrlimit(RLIMIT_AS, &none));
	pid = fork();
	CHECK(!setrlimit(RLIMIT_AS, &any));
	if (!pid) {
		memory[0] = 8;
		CHECK(check_child_finds(memory) == 8);
		_exit(0);
	}
	CHECK(check_wait(pid) == 0);
	CHECK(check_child_finds(memory) == 0);
	check_release(handle);
	check_empty();
}

/* A fork that finds no memory leaves no mark to its child. */
static void zeros_are_a_child_s_own_whatever_fails(void)
{
	char *memory = check_map(4);
	struct rf_handle handle;
	unsigned long nth, faults = 0, seen;
	pid_t pid;

	start(RF_MODE_LAZY);
	memset(memory, 7, 4 * check_page);
	for (nth = 1; nth < 30; nth++) {
		handle = check_register_as(memory, 4 * check_page, RF_WIPE);
		seen = inject_faults();
		inject(nth, ENOMEM);
		pid = fork();
		if (!pid) {
			inject(0, 0);
			signal(SIGSEGV, SIG_DFL);
			memory[0] = 9;
			CHECK(check_child_finds(memory) == 9);
			_exit(0);
		}
		inject(0, 0);
		faults += inject_faults() - seen;
		CHECK(check_wait(pid) == 0, "call %lu", nth);
		check_fork();
		check_release(handle);
		check_fork();
		check_empty();
	}
	CHECK(faults > 2, "%lu", faults);
}

static void a_child_starts_from_nothing(void)
{
	char *memory = check_map(2);
	struct rf_handle handle;
	pid_t pid;

	start(RF_MODE_LAZY);
	memset(memory, 7, check_page);
	handle = check_register_as(memory, check_page, RF_WIPE);
	pid = fork();
	if (!pid) {
		CHECK(rf_handle_state(handle) == -ECHILD);
		check_empty();
		/* Bytes it writes there are its own, and its children's. */
		CHECK(!(check_flags(memory) & CHECK_WF));
		memory[0] = 8;
		CHECK(check_child_finds(memory) == 8);
		memory[0] = 9;
		handle = check_register_as(memory, check_page, RF_WIPE);
		CHECK(check_child_finds(memory) == 0);
		check_release(handle);
		CHECK(check_child_finds(memory) == 9);
		_exit(0);
	}
	CHECK(check_wait(pid) == 0);
	CHECK(memory[0] == 7);
	check_release(handle);
	check_empty();
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(a_child_reads_zeros_lazy),
		SCENARIO(a_child_reads_zeros_eager),
		SCENARIO(partial_pages_are_copied),
		SCENARIO(private_files_are_wiped_lazy),
		SCENARIO(private_files_are_wiped_eager),
		SCENARIO_HUGE(huge_pages_are_wiped_lazy),
		SCENARIO_HUGE(huge_pages_are_wiped_eager),
		SCENARIO(shared_memory_stays_shared),
		SCENARIO(a_hole_is_not_wiped),
		SCENARIO(a_child_reads_kept_pages),
		SCENARIO(nothing_private_is_kept_where_copying_is_not_trusted),
		SCENARIO(omit_comes_before_wipe_before_keep),
		SCENARIO(a_failure_changes_nothing),
		SCENARIO(wiping_keeps_to_the_budget),
		SCENARIO(zeros_are_a_child_s_own_before_the_next_list_is_made),
		SCENARIO(zeros_are_a_child_s_own_whatever_fails),
		SCENARIO(a_child_starts_from_nothing),
		SCENARIO(without_memory_a_child_keeps_its_own_writes),
		SCENARIO(children_unmark_any_number_of_wiped_pages),
		SCENARIO(a_mark_that_waits_is_unmarked_in_a_child),
		SCENARIO(a_child_at_the_kernels_limit_unmarks_wiped_pages_together),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
