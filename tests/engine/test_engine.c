/* SPDX-License-Identifier: BSD-3-Clause */
/* The public API's promises: handles, laziness, the list. */
#define _GNU_SOURCE
#include "check.h"
#include "fork.h"

#include <pthread.h>
#include <time.h>

int ibv_dontfork_range(void *base, size_t size);
int ibv_dofork_range(void *base, size_t size);

static struct rf_error error;

/* ---- Handles ---- */

static void a_handle_is_released_once(void)
{
	struct rf_handle first, second, zero = { 0 };
	char *memory = check_map(4);

	check_start(RF_MODE_EAGER);
	first = check_register(memory, 2 * check_page, 0);
	second = check_register(memory, 2 * check_page, 0);
	check_release(first);
	CHECK(rf_release(first, 0) == -ESTALE && rf_release(zero, 0) == -ESTALE);
	CHECK(rf_handle_state(first) == -ESTALE && rf_handle_state(zero) == -ESTALE);
	CHECK(check_marked(memory, 4) == 2);
	check_release(second);
	CHECK(rf_release(second, 0) == -ESTALE && rf_release(first, 0) == -ESTALE);
	first = check_register(memory, 2 * check_page, 0);
	CHECK(first.slot == second.slot && rf_release(second, 0) == -ESTALE);
	CHECK(check_marked(memory, 4) == 2);
	check_release(first);
	check_empty();
}

static void zero_bytes_can_be_registered(void)
{
	struct rf_range_info info;
	struct rf_handle handles[2];
	struct rf_stats stats;

	check_start(RF_MODE_EAGER);
	handles[0] = check_register(NULL, 0, 0);
	handles[1] = check_register((void *)0x1234, 0, RF_HELD);
	CHECK(rf_stats(&stats) == 0 && stats.registrations == 2 && stats.ranges == 0);
	CHECK(rf_list(&info, 1) == 0);
	check_fork();
	check_release(handles[0]);
	check_release(handles[1]);
	check_empty();
}

static void nowait_never_enters_the_kernel(void)
{
	char *memory = check_map(4);
	struct rf_handle handle, marked;
	unsigned long calls;

	check_needs_lazy();
	check_start(RF_MODE_LAZY);
	calls = inject_calls();
	CHECK(rf_register(memory, check_page, RF_NOWAIT, RF_OMIT, &handle, &error) == -EAGAIN);
	handle = check_register(memory, check_page, RF_NOWAIT | RF_HELD);
	CHECK(rf_release(handle, RF_NOWAIT) == 0);
	CHECK(inject_calls() == calls);
	marked = check_register(memory, check_page, RF_HELD);
	check_fork();
	CHECK(rf_release(marked, RF_NOWAIT) == -EAGAIN);
	CHECK(rf_handle_state(marked) == 1 && check_marked(memory, 4) == 1);
	check_release(marked);
	CHECK(rf_register(NULL, 0, RF_NOWAIT, RF_OMIT, &handle, &error) == 1);
	CHECK(rf_release(handle, RF_NOWAIT) == 0);
	check_empty();
}

static void nowait_suffices_where_marks_of_others_cover_it(void)
{
	char *memory = check_map(4);
	struct rf_handle outer, inner;
	unsigned long calls;

	check_start(RF_MODE_EAGER);
	outer = check_register(memory, 4 * check_page, RF_HELD);
	calls = inject_calls();
	inner = check_register(memory + check_page, 2 * check_page, RF_NOWAIT | RF_HELD);
	CHECK(rf_release(inner, RF_NOWAIT) == 0);
	CHECK(inject_calls() == calls);
	check_release(outer);
	check_empty();
}

/* ---- Laziness ---- */

static void lazy_costs_no_system_call(void)
{
	char *memory = check_map(64);
	struct rf_handle handles[100];
	unsigned long calls;
	size_t i, round;

	check_needs_lazy();
	check_start(RF_MODE_LAZY);
	calls = inject_calls();
	for (round = 0; round < 100; round++) {
		for (i = 0; i < 100; i++)
			CHECK(rf_register(memory + i * 777, 5000 + i * 13, RF_HELD,
					  i % 2 ? RF_WIPE : RF_OMIT, &handles[i], &error) == 1);
		for (i = 0; i < 100; i++)
			check_release(handles[i * 37 % 100]);
	}
	CHECK(inject_calls() == calls);
	CHECK(check_marked(memory, 64) == 0);
	check_empty();
}

static void a_fork_marks_and_a_release_unmarks(void)
{
	char *memory = check_map(16);
	struct rf_handle first, second;
	struct rf_stats stats;

	check_needs_lazy();
	check_start(RF_MODE_LAZY);
	first = check_register(memory + 2 * check_page - 8, 4 * check_page, RF_HELD);
	second = check_register(memory + 4 * check_page, 6 * check_page, RF_HELD);
	CHECK(check_marked(memory, 16) == 0);
	CHECK(rf_stats(&stats) == 0 && stats.pending == 2 && stats.registrations == 2);
	CHECK(!check_child_reads(memory + 2 * check_page));
	CHECK(check_marked(memory, 16) == 8);
	CHECK(rf_stats(&stats) == 0 && stats.pending == 0 && stats.forks == 1);
	CHECK(stats.marked_bytes == 8 * check_page && stats.marked_ranges == 1);
	check_release(first);
	CHECK(check_marked(memory, 16) == 6);
	CHECK(check_child_reads(memory + 3 * check_page));
	check_release(second);
	CHECK(check_marked(memory, 16) == 0);
	check_empty();
}

static void unheld_memory_is_marked_at_once_in_lazy_mode(void)
{
	char *memory = check_map(4);
	struct rf_handle handle, held;

	check_needs_lazy();
	check_start(RF_MODE_LAZY);
	handle = check_register(memory, 2 * check_page, 0);
	CHECK(check_marked(memory, 4) == 2);
	held = check_register(memory + check_page, 2 * check_page, RF_HELD);
	check_release(handle);
	CHECK(check_marked(memory, 4) == 0);
	CHECK(!check_child_reads(memory + check_page) && check_child_reads(memory));
	check_release(held);
	check_empty();
}

/* A fork that has nothing new to mark makes no call. */
static void a_fork_with_nothing_new_is_free(void)
{
	char *memory = check_map(16), *shared = check_map_shared(2);
	unsigned long calls;

	check_needs_lazy();
	check_start(RF_MODE_LAZY);
	check_register(memory + 5, 3 * check_page, RF_HELD);
	check_register(memory + 8 * check_page, 3 * check_page, 0);
	check_register(shared, 2 * check_page, 0);
	check_fork();
	check_fork();
	calls = inject_calls();
	check_fork();
	CHECK(inject_calls() == calls, "%lu calls", inject_calls() - calls);
}

/* Areas split before they were touched would stay in pieces for good. */
static void untouched_areas_merge_again(void)
{
	size_t pages = 512;
	char *memory = check_map(pages);
	struct rf_handle handles[64];
	size_t before, i;

	check_needs_lazy();
	check_start(RF_MODE_LAZY);
	before = check_vmas();
	for (i = 0; i < 64; i++)
		handles[i] = check_register(memory + i * 8 * check_page + 2 * check_page,
					    3 * check_page, RF_HELD);
	check_fork();
	CHECK(check_vmas() >= before + 127);
	for (i = 0; i < pages; i++)
		memory[i * check_page] = 1;
	for (i = 0; i < 64; i++)
		check_release(handles[i * 5 % 64]);
	CHECK(check_vmas() <= before, "%zu VMAs, before %zu", check_vmas(), before);
	check_empty();
}

/* The same address again: facts about the area there before are worth nothing. */
static void untouched_areas_merge_again_the_second_time(void)
{
	char *memory = check_map(64);
	size_t round, before, i;
	struct rf_handle handle;

	check_needs_lazy();
	check_start(RF_MODE_LAZY);
	for (round = 0; round < 3; round++) {
		before = check_vmas();
		handle = check_register(memory + 8 * check_page, 8 * check_page, RF_HELD);
		check_fork();
		for (i = 0; i < 64; i++)
			memory[i * check_page] = 1;
		check_release(handle);
		CHECK(check_vmas() <= before, "round %zu", round);
		check_map_over(memory, 64, MAP_PRIVATE);
	}
	check_empty();
}

/* ---- The list ---- */

static void the_list_agrees_with_smaps(void)
{
	char *memory = check_map(16), *shared = check_map_shared(2);
	struct rf_range_info info[16];
	struct rf_handle handles[4];
	ssize_t count, i;

	check_needs_lazy();
	check_start(RF_MODE_LAZY);
	handles[0] = check_register(memory, 4 * check_page, RF_HELD);
	handles[1] = check_register(memory + 2 * check_page, 4 * check_page, 0);
	handles[2] = check_register(memory + 8 * check_page + 1, 64, RF_HELD);
	handles[3] = check_register(shared, 2 * check_page, 0);
	count = rf_list(info, 16);
	CHECK(count == 5, "%zd", count);
	CHECK(rf_list(info, 0) == 5 && rf_list(NULL, 0) == 5);
	CHECK(rf_list(info, 16) == 5);
	for (i = 0; i < count; i++) {
		bool marked = check_flags((void *)info[i].start) & CHECK_DC;

		CHECK(info[i].policy == RF_OMIT && info[i].start < info[i].end);
		CHECK(!i || info[i - 1].end <= info[i].start);
		CHECK(marked == (info[i].protection == RF_BY_MARK), "%zd: %d", i,
		      info[i].protection);
		if (info[i].start == (uintptr_t)shared)
			CHECK(info[i].protection == RF_BY_SHARING && info[i].registrations == 1);
		if (info[i].start == (uintptr_t)memory)
			CHECK(info[i].protection == RF_BY_HANDLER && info[i].registrations == 1);
		if (info[i].start == (uintptr_t)memory + 2 * check_page)
			CHECK(info[i].registrations == 2 && marked);
	}
	check_fork();
	count = rf_list(info, 16);
	CHECK(count == 5, "%zd", count);
	for (i = 0; i < count; i++) {
		bool marked = check_flags((void *)info[i].start) & CHECK_DC;

		CHECK(marked == (info[i].protection == RF_BY_MARK));
		if (info[i].start == (uintptr_t)memory + 8 * check_page)
			CHECK(info[i].protection == RF_BY_KERNEL);
		CHECK(info[i].protection != RF_BY_HANDLER);
	}
	for (i = 0; i < 4; i++)
		check_release(handles[i]);
	check_empty();
}

static double seconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
	return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* Each registration around the one before; released from the outermost inwards. */
static void time_nested(size_t count, enum rf_policy policy, double *listed, double *released)
{
	struct rf_handle *handles = malloc(count * sizeof(*handles));
	char *memory = check_map(2 * count);
	size_t i;

	for (i = 0; i < count; i++)
		CHECK(rf_register(memory + (count - 1 - i) * check_page, 2 * (i + 1) * check_page,
				  RF_HELD, policy, &handles[i], &error) == 1);
	check_fork();
	*listed = seconds();
	CHECK(rf_list(NULL, 0) > 0);
	*listed = seconds() - *listed;
	*released = seconds();
	for (i = count; i; i--)
		check_release(handles[i - 1]);
	*released = seconds() - *released;
	check_empty();
	check_unmap(memory, 2 * count);
	free(handles);
}

static void nested_registrations_cost_no_more_each(enum rf_policy policy)
{
	const size_t few = check_scale(500), many = 8 * few;
	double listed_few, listed, released_few, released;

	check_start(check_best_mode());
	time_nested(few, policy, &listed_few, &released_few);
	time_nested(many, policy, &listed, &released);
	/* Generous: eight times as many take eight times as long, or else 64 times. */
	CHECK(listed < 24 * listed_few + 0.02, "%.4f s for %zu, %.4f for %zu", listed_few, few,
	      listed, many);
	CHECK(released < 24 * released_few + 0.02, "%.4f s for %zu, %.4f for %zu", released_few,
	      few, released, many);
}

static void many_nested_are_listed_and_released(void)
{
	nested_registrations_cost_no_more_each(RF_OMIT);
}

static void many_nested_that_are_wiped_are_listed_and_released(void)
{
	nested_registrations_cost_no_more_each(RF_WIPE);
}

/* ---- Whose memory it is by now ---- */

static void a_release_ignores_memory_moved_away(void)
{
	char *memory = check_map(4), *elsewhere = check_map(4);
	struct rf_handle handle, again;

	check_start(RF_MODE_EAGER);
	handle = check_register(memory, 4 * check_page, 0);
	CHECK(mremap(memory, 4 * check_page, 4 * check_page, MREMAP_MAYMOVE | MREMAP_FIXED,
		     elsewhere) == elsewhere);
	/* The mark went with it; the next registration there owns the memory. */
	again = check_register(elsewhere, 4 * check_page, 0);
	check_release(handle);
	CHECK(check_marked(elsewhere, 4) == 4);
	check_release(again);
	CHECK(check_marked(elsewhere, 4) == 0);
	check_empty();
}

static void the_parents_memory_is_the_childs_to_register(void)
{
	char *memory = check_map(6);
	struct rf_handle handle;
	pid_t child;

	check_needs_lazy();
	check_start(RF_MODE_LAZY);
	handle = check_register(memory + 10, 4 * check_page, RF_HELD);
	child = fork();
	if (!child) {
		/* Pages the child does not have, mapped anew, and partial pages, which it has. */
		check_map_over(memory + check_page, 3, MAP_PRIVATE);
		handle = check_register(memory, 5 * check_page, RF_HELD);
		CHECK(!check_child_reads(memory) && !check_child_reads(memory + 2 * check_page));
		check_release(handle);
		CHECK(check_marked(memory, 6) == 0);
		check_empty();
		_exit(0);
	}
	CHECK(check_wait(child) == 0);
	CHECK(check_marked(memory, 6) == 3);
	check_release(handle);
	check_empty();
}

/* ---- From where it cannot be called ---- */

static char *refused_memory;

static void *call_without_waiting(void *handle)
{
	struct rf_handle other;

	CHECK(rf_register(refused_memory, 1, RF_NOWAIT, RF_OMIT, &other, &error) == -EAGAIN);
	CHECK(error.cause == RF_CAUSE_NONE);
	CHECK(rf_release(*(struct rf_handle *)handle, RF_NOWAIT) == -EAGAIN);
	return NULL;
}

/* As in a signal handler that has come while this thread is in the engine. */
static void a_handler_that_interrupts_the_engine_is_refused(void)
{
	struct rf_handle held, handle;
	struct rf_range_info info;
	struct rf_stats stats;
	pthread_t thread;

	refused_memory = check_map(4);
	CHECK(rf_register(refused_memory, 1, RF_NOWAIT, RF_OMIT, &handle, &error) == -EAGAIN,
	      "the environment is not read without waiting");
	check_start(RF_MODE_EAGER);
	held = check_register(refused_memory, check_page, RF_HELD);
	CHECK(rf_enter(0) == 0);
	CHECK(rf_register(refused_memory, 1, RF_HELD, RF_OMIT, &handle, &error) == -EDEADLK);
	CHECK(error.cause == RF_CAUSE_SIGNAL);
	CHECK(rf_release(held, 0) == -EDEADLK);
	CHECK(rf_handle_state(held) == -EDEADLK);
	CHECK(rf_descriptor_omit(0, 0) == -EDEADLK);
	CHECK(rf_descriptor_release(0) == -EDEADLK);
	CHECK(rf_list(&info, 1) == -EDEADLK);
	memset(&stats, 1, sizeof(stats));
	CHECK(rf_stats(&stats) == -EDEADLK && !stats.registrations);
	CHECK(rf_fork_init(RF_MODE_EAGER, &error) == -EDEADLK && error.cause == RF_CAUSE_SIGNAL);
	CHECK(ibv_dontfork_range(refused_memory, 1) == -1 && errno == EDEADLK);
	CHECK(ibv_dofork_range(refused_memory, 1) == -1 && errno == EDEADLK);
	/* Nor does it wait for another thread if that is not wished. */
	CHECK(!pthread_create(&thread, NULL, call_without_waiting, &held));
	CHECK(!pthread_join(thread, NULL));
	rf_leave();
	CHECK(rf_stats(&stats) == 0 && stats.registrations == 1);
	check_release(held);
	check_empty();
}

/*
 * A child that was made while another thread grew the tables finds pointers to what
 * mremap() had moved by then, and must not follow them.
 */
static void a_child_ignores_half_changed_tables(void)
{
	struct rf_tracker *tracker = &rf_engine.tracker;
	struct rf_memory *tables[] = { &rf_engine.registry.slots, &tracker->ranges.leaves,
				       &tracker->ranges.directory, &tracker->reader.table };
	size_t i;

	check_start(check_best_mode());
	check_register(check_map(1), check_page, RF_HELD);
	check_fork();
	for (i = 0; i < COUNT_OF(tables); i++)
		tables[i]->items = (void *)check_page;
	rf_clear(true);
	check_works();
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(a_handle_is_released_once),
		SCENARIO(zero_bytes_can_be_registered),
		SCENARIO(nowait_never_enters_the_kernel),
		SCENARIO(nowait_suffices_where_marks_of_others_cover_it),
		SCENARIO(lazy_costs_no_system_call),
		SCENARIO(a_fork_marks_and_a_release_unmarks),
		SCENARIO(unheld_memory_is_marked_at_once_in_lazy_mode),
		SCENARIO(a_fork_with_nothing_new_is_free),
		SCENARIO(untouched_areas_merge_again),
		SCENARIO(untouched_areas_merge_again_the_second_time),
		SCENARIO(the_list_agrees_with_smaps),
		SCENARIO(many_nested_are_listed_and_released),
		SCENARIO(many_nested_that_are_wiped_are_listed_and_released),
		SCENARIO(a_release_ignores_memory_moved_away),
		SCENARIO(the_parents_memory_is_the_childs_to_register),
		SCENARIO(a_handler_that_interrupts_the_engine_is_refused),
		SCENARIO(a_child_ignores_half_changed_tables),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
