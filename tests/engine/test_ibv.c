/* SPDX-License-Identifier: BSD-3-Clause */
/* The engine as libibverbs' fork support: ranges without handles. */
#include "check.h"
#include "engine.h"

#include <pthread.h>

int ibv_fork_init(void);
int ibv_is_fork_initialized(void);
int ibv_dontfork_range(void *base, size_t size);
int ibv_dofork_range(void *base, size_t size);

#define PAGES 16

static struct rf_stats stats(void)
{
	struct rf_stats stats;

	CHECK(rf_stats(&stats) == 0);
	return stats;
}

static void take(char *memory, size_t first, size_t end)
{
	errno = 77;
	CHECK(ibv_dontfork_range(memory + first * check_page, (end - first) * check_page) == 0);
	CHECK(errno == 77);
}

static void give(char *memory, size_t first, size_t end)
{
	errno = 77;
	CHECK(ibv_dofork_range(memory + first * check_page, (end - first) * check_page) == 0);
	CHECK(errno == 77);
}

static void dontfork_range_starts_the_engine(void)
{
	char *memory = check_map(PAGES);

	CHECK(rf_mode() == RF_MODE_NONE);
	take(memory, 2, 6);
	CHECK(rf_mode() != RF_MODE_NONE);
	CHECK(check_marked(memory, PAGES) == 4);
	CHECK(!check_child_reads(memory + 3 * check_page));
	CHECK(stats().ibv_ranges == 1 && stats().registrations == 1);
	give(memory, 2, 6);
	CHECK(check_marked(memory, PAGES) == 0);
	CHECK(stats().ibv_calls == 2 && !stats().ibv_unbalanced);
	CHECK(ibv_fork_init() == 0);
	check_empty();
}

static void an_empty_range_is_ignored(void)
{
	char *memory = check_map(PAGES);

	CHECK(ibv_dontfork_range(NULL, check_page) == 0);
	CHECK(ibv_dofork_range(NULL, check_page) == 0);
	CHECK(ibv_dontfork_range(memory, 0) == 0);
	CHECK(ibv_dofork_range(memory, 0) == 0);
	CHECK(rf_mode() == RF_MODE_NONE && !stats().ibv_calls);
	CHECK(ibv_fork_init() == 0);
	check_empty();
}

static void a_late_call_is_refused_and_protects_nothing(void)
{
	char *memory = check_map(PAGES);
	struct rf_handle handle;
	struct rf_error error;

	CHECK(rf_register(memory, check_page, RF_HELD, RF_OMIT, &handle, &error) == 0);
	CHECK(ibv_fork_init() == EINVAL);
	take(memory, 2, 6);
	CHECK(check_marked(memory, PAGES) == 0);
	CHECK(ibv_fork_init() == EINVAL);
	give(memory, 2, 6);
	check_release(handle);
	CHECK(ibv_fork_init() == EINVAL);
	CHECK(rf_mode() == RF_MODE_NONE);
	check_empty();
}

static void answers_are_the_ones_that_libraries_act_on(void)
{
	struct rf_kernel kernel;

	rf_kernel_info(&kernel);
	CHECK(ibv_is_fork_initialized() == (kernel.copy_trusted ? 2 : 0));
	CHECK(ibv_fork_init() == 0);
	CHECK(ibv_fork_init() == 0);
	CHECK(ibv_is_fork_initialized() == (kernel.copy_trusted ? 2 : 1));
}

static void failures_have_an_errno(void)
{
	char *memory = check_map(PAGES);

	check_unmap(memory + 4 * check_page, 1);
	CHECK(ibv_dontfork_range(memory, 8 * check_page) == -1 && errno == ENOMEM);
	CHECK(ibv_dontfork_range(memory, SIZE_MAX - 5) == -1 && errno == EOVERFLOW);
	CHECK(check_marked(memory, 4) == 0);
	check_empty();
	CHECK(ibv_dofork_range(memory, SIZE_MAX - 5) == 0);
	CHECK(stats().ibv_unbalanced == 1);
	take(memory, 0, 4);
	CHECK(check_marked(memory, 4) == 4);
	give(memory, 0, 4);
	check_empty();
}

static void MODE_lazy_defers_ibv_marks(void)
{
	char *memory = check_map(PAGES);

	check_needs_lazy();
	setenv("RDMAFORK_MODE", "lazy", 1);
	take(memory, 2, 6);
	CHECK(rf_mode() == RF_MODE_LAZY);
	CHECK(check_marked(memory, PAGES) == 0 && stats().pending == 1);
	CHECK(!check_child_reads(memory + 3 * check_page));
	CHECK(check_marked(memory, PAGES) == 4);
	give(memory, 2, 6);
	CHECK(check_marked(memory, PAGES) == 0);
	check_empty();
}

static void one_release_too_many_changes_nothing(void)
{
	char *memory = check_map(PAGES);
	struct rf_handle handle;

	check_start(RF_MODE_EAGER);
	handle = check_register(memory + 2 * check_page, 4 * check_page, RF_HELD);
	take(memory, 6, 8);
	take(memory, 4, 8);
	give(memory, 4, 8);
	give(memory, 4, 8);
	CHECK(check_marked(memory, PAGES) == 6 && stats().ibv_unbalanced == 1);
	give(memory, 6, 8);
	give(memory, 0, PAGES);
	give(memory, 2, 6);
	CHECK(check_marked(memory, PAGES) == 4);
	CHECK(stats().ibv_unbalanced == 3);
	take(memory, 4, 8);
	give(memory, 4, 8);
	give(memory, 4, 8);
	CHECK(check_marked(memory, PAGES) == 4);
	take(memory, 0, 2);
	CHECK(check_marked(memory, PAGES) == 6);
	give(memory, 0, 2);
	check_release(handle);
	CHECK(stats().ibv_unbalanced == 4);
	check_empty();
}

/* libibverbs counts pages. Neither it nor its drivers release memory that was not registered. */
static void only_registered_ranges_are_released(void)
{
	char *memory = check_map(PAGES);

	take(memory, 0, 4);
	take(memory, 4, 8);
	give(memory, 0, 8);
	give(memory, 1, 3);
	give(memory, 1, 4);
	give(memory, 0, 3);
	CHECK(stats().ibv_unbalanced == 4 && stats().ibv_ranges == 2);
	CHECK(check_marked(memory, PAGES) == 8);
	give(memory, 0, 4);
	CHECK(check_marked(memory, 4) == 0 && check_marked(memory + 4 * check_page, 4) == 4);
	give(memory, 4, 8);
	CHECK(stats().ibv_unbalanced == 4);
	check_empty();
}

/* mlx4, mthca and vmw_pvrdma register the bytes of a queue and release whole pages. */
static void an_end_may_move_to_the_end_of_its_page(void)
{
	char *memory = check_map(PAGES);

	CHECK(ibv_dontfork_range(memory, 3 * check_page + 100) == 0);
	CHECK(check_marked(memory, 3) == 3);
	give(memory, 0, 3);
	give(memory, 0, 5);
	CHECK(stats().ibv_unbalanced == 2 && check_marked(memory, 3) == 3);
	give(memory, 0, 4);
	CHECK(stats().ibv_ranges == 0 && check_marked(memory, PAGES) == 0);
	/* But one with just these bytes first, as the other one fills a page less. */
	take(memory, 0, 4);
	CHECK(ibv_dontfork_range(memory, 3 * check_page + 100) == 0);
	CHECK(check_marked(memory, PAGES) == 4);
	give(memory, 0, 4);
	CHECK(check_marked(memory, 3) == 3);
	CHECK(ibv_dofork_range(memory, 3 * check_page + 100) == 0);
	CHECK(stats().ibv_unbalanced == 2);
	check_empty();
}

static void memory_mapped_anew_is_marked_anew(void)
{
	char *memory = check_map(PAGES);

	take(memory, 0, 8);
	check_map_over(memory, 8, MAP_PRIVATE);
	CHECK(check_marked(memory, PAGES) == 0);
	take(memory, 0, 8);
	CHECK(check_marked(memory, PAGES) == 8);
	give(memory, 0, 8);
	CHECK(check_marked(memory, PAGES) == 8);
	give(memory, 0, 8);
	CHECK(check_marked(memory, PAGES) == 0);
	check_empty();
}

static void huge_pages_are_marked_whole_and_unmarked(void)
{
	char *huge = check_map_huge(2, MAP_PRIVATE);

	CHECK(ibv_dontfork_range(huge + 64, 64) == 0);
	CHECK(check_flags(huge) & CHECK_DC);
	CHECK(!(check_flags(huge + CHECK_HUGE) & CHECK_DC));
	CHECK(ibv_dofork_range(huge + 64, 64) == 0);
	CHECK(!(check_flags(huge) & CHECK_DC));
	CHECK(ibv_dontfork_range(huge, 2 * CHECK_HUGE) == 0);
	CHECK(check_flags(huge + CHECK_HUGE) & CHECK_DC);
	CHECK(ibv_dofork_range(huge, 2 * CHECK_HUGE) == 0);
	CHECK(!(check_flags(huge + CHECK_HUGE) & CHECK_DC));
	check_empty();
}

static void a_range_registered_by_both_apis_counts_once(void)
{
	char *memory = check_map(PAGES);
	struct rf_handle handle;

	check_start(RF_MODE_EAGER);
	handle = check_register(memory, 4 * check_page, RF_HELD);
	rf_ranges_own(1);
	take(memory, 0, 4);
	rf_ranges_own(0);
	CHECK(stats().registrations == 1 && !stats().ibv_calls);
	take(memory, 0, 4);
	CHECK(stats().registrations == 2);
	rf_ranges_own(1);
	give(memory, 0, 4);
	rf_ranges_own(0);
	check_release(handle);
	CHECK(stats().ibv_ranges == 1 && check_marked(memory, PAGES) == 4);
	give(memory, 0, 4);
	check_empty();
}

/* The counts a child inherits are of memory it does not have. */
static void a_child_starts_without_ibv_ranges(void)
{
	char *memory = check_map(PAGES);
	pid_t pid;

	take(memory, 0, 4);
	pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		CHECK(!stats().ibv_ranges);
		give(memory, 0, 4);
		check_map_over(memory, 4, MAP_PRIVATE);
		take(memory, 0, 4);
		CHECK(check_marked(memory, 4) == 4 && stats().ibv_ranges == 1);
		CHECK(!check_child_reads(memory));
		give(memory, 0, 4);
		CHECK(check_marked(memory, 4) == 0);
		check_empty();
		_exit(0);
	}
	CHECK(check_wait(pid) == 0);
	CHECK(check_marked(memory, PAGES) == 4 && stats().ibv_ranges == 1);
	give(memory, 0, 4);
	check_empty();
}

/* A child forgets its parent's ranges, however many they were, and takes no memory for that. */
static void a_child_does_not_pay_for_its_parent_s_ranges(void)
{
	const size_t count = 100000;
	char *memory = check_map(count);
	size_t i;
	pid_t pid;

	check_start(RF_MODE_EAGER);
	take(memory, 0, count);
	for (i = 0; i < count; i++)
		take(memory, i, i + 1);
	pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		CHECK(stats().engine_bytes < 4 * count, "%lu", (unsigned long)stats().engine_bytes);
		_exit(0);
	}
	CHECK(check_wait(pid) == 0);
	CHECK(stats().ibv_ranges == count + 1);
	for (i = 0; i < count; i++)
		give(memory, i, i + 1);
	give(memory, 0, count);
	check_empty();
}

/* Against the naive truth: how often each range was registered more than released. */
static void any_ranges_in_any_order(void)
{
	static unsigned int counts[PAGES][PAGES + 1];
	unsigned long round, rounds = check_scale(3000);
	unsigned int pages[PAGES] = { 0 };
	char *memory = check_map(PAGES);
	size_t first, end, i, unbalanced = 0;

	check_start(RF_MODE_EAGER);
	for (round = 0; round < rounds; round++) {
		int change;

		first = check_below(PAGES);
		end = first + 1 + check_below(PAGES - first);
		if (check_below(9) < 2) {
			take(memory, first, end);
			change = 1;
		} else {
			change = counts[first][end] ? -1 : 0;
			unbalanced += !change;
			give(memory, first, end);
		}
		counts[first][end] += change;
		CHECK(stats().ibv_unbalanced == unbalanced);
		check_read_smaps();
		for (i = 0; i < PAGES; i++) {
			pages[i] += i >= first && i < end ? change : 0;
			CHECK(!(check_flags_read(memory + i * check_page) & CHECK_DC) == !pages[i],
			      "page %zu, counted %u", i, pages[i]);
		}
		check_sound();
	}
	for (first = 0; first < PAGES; first++)
		for (end = 0; end <= PAGES; end++)
			while (counts[first][end]--)
				give(memory, first, end);
	check_empty();
}

static void thousands_of_ranges_are_found_again(void)
{
	const size_t count = 20000;
	char *memory = check_map_shared(count);
	size_t i;

	check_start(RF_MODE_EAGER);
	for (i = 0; i < count; i++)
		CHECK(ibv_dontfork_range(memory + i * check_page + i % 64, 64) == 0);
	CHECK(stats().ibv_ranges == count);
	check_sound();
	for (i = 0; i < count; i++) {
		size_t at = i * 7919 % count;

		CHECK(ibv_dofork_range(memory + at * check_page + at % 64, 64) == 0);
		if (i % 1000 == 0)
			check_sound();
	}
	CHECK(!stats().ibv_unbalanced);
	check_empty();
}

/* With every system call of it failing once: all of it, or nothing and an errno. */
static void a_failure_changes_nothing(void)
{
	char *memory = check_map(PAGES);
	unsigned long nth, faults = 0;
	struct rf_stats before;
	int rc;

	check_start(RF_MODE_EAGER);
	take(memory, 0, 8);
	for (nth = 1;; nth++) {
		before = stats();
		inject(nth, ENOMEM);
		rc = ibv_dontfork_range(memory + 4 * check_page, 8 * check_page);
		inject(0, 0);
		check_sound();
		if (rc == 0)
			give(memory, 4, 12);
		else
			CHECK(rc == -1 && errno == ENOMEM);
		CHECK(stats().ibv_ranges == before.ibv_ranges);
		CHECK(stats().registrations == before.registrations);
		CHECK(check_marked(memory, PAGES) == 8);
		CHECK(check_marked(memory, PAGES) == 8);
		if (inject_faults() == faults)
			break;
		faults = inject_faults();
	}
	/* A question about each end, or one about both, and the advice. */
	CHECK(faults > 1, "%lu", faults);
	give(memory, 0, 8);
	check_empty();
}

struct work {
	char *memory;
	unsigned long rounds;
};

static void *take_and_give(void *argument)
{
	const struct work *work = argument;
	unsigned long i;

	for (i = 0; i < work->rounds; i++) {
		take(work->memory, 0, 8);
		take(work->memory, i % 8, i % 8 + 1);
		give(work->memory, 0, 8);
		give(work->memory, i % 8, i % 8 + 1);
	}
	return NULL;
}

static void threads_release_each_other_s_ranges(void)
{
	struct work work = { check_map(PAGES), check_scale(300) };
	pthread_t threads[4];
	size_t i;

	check_start(RF_MODE_EAGER);
	for (i = 0; i < COUNT_OF(threads); i++)
		CHECK(pthread_create(&threads[i], NULL, take_and_give, &work) == 0);
	for (i = 0; i < COUNT_OF(threads); i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	CHECK(check_marked(work.memory, PAGES) == 0);
	CHECK(!stats().ibv_unbalanced);
	check_empty();
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(dontfork_range_starts_the_engine),
		SCENARIO(an_empty_range_is_ignored),
		SCENARIO(a_late_call_is_refused_and_protects_nothing),
		SCENARIO(answers_are_the_ones_that_libraries_act_on),
		SCENARIO(failures_have_an_errno),
		SCENARIO(MODE_lazy_defers_ibv_marks),
		SCENARIO(one_release_too_many_changes_nothing),
		SCENARIO(only_registered_ranges_are_released),
		SCENARIO(an_end_may_move_to_the_end_of_its_page),
		SCENARIO(memory_mapped_anew_is_marked_anew),
		SCENARIO_HUGE(huge_pages_are_marked_whole_and_unmarked),
		SCENARIO(a_range_registered_by_both_apis_counts_once),
		SCENARIO(a_child_starts_without_ibv_ranges),
		SCENARIO(a_child_does_not_pay_for_its_parent_s_ranges),
		SCENARIO(any_ranges_in_any_order),
		SCENARIO(thousands_of_ranges_are_found_again),
		SCENARIO(a_failure_changes_nothing),
		SCENARIO(threads_release_each_other_s_ranges),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
