/* SPDX-License-Identifier: BSD-3-Clause */
/* A child is noticed by one call of one thread. */
#define _GNU_SOURCE
#include "check.h"
#include "fork.h"

#include <dlfcn.h>
#include <pthread.h>

static bool noticed;

static void *notice(void *generation)
{
	*(uint32_t *)generation = rf_generation();
	check_tell(&noticed);
	return NULL;
}

/* Its first thread's, as far as the engine can tell. */
static void a_second_thread_waits_while_another_becomes_the_child(void)
{
	static uint64_t another[8];
	uint32_t generation, seen = 0;
	pthread_t thread;

	check_start(check_best_mode());
	generation = rf_generation();
	__atomic_store_n(rf_engine.alive, (uint64_t)(uintptr_t)another, __ATOMIC_SEQ_CST);
	CHECK(!pthread_create(&thread, NULL, notice, &seen));
	usleep(50000);
	CHECK(!__atomic_load_n(&noticed, __ATOMIC_SEQ_CST));
	__atomic_store_n(rf_engine.alive, 1, __ATOMIC_SEQ_CST);
	CHECK(!pthread_join(thread, NULL));
	CHECK(seen == generation && rf_generation() == generation);
	check_works();
}

static pthread_barrier_t together;

static void *notice_together(void *generation)
{
	pthread_barrier_wait(&together);
	return notice(generation);
}

static void check_noticed_once(uint32_t before, struct rf_handle inherited)
{
	uint32_t seen[4] = { 0 };
	pthread_t threads[4];
	size_t i;

	check_alarm(30);
	CHECK(!pthread_barrier_init(&together, NULL, COUNT_OF(threads)));
	for (i = 0; i < COUNT_OF(threads); i++)
		CHECK(!pthread_create(&threads[i], NULL, notice_together, &seen[i]));
	for (i = 0; i < COUNT_OF(threads); i++) {
		CHECK(!pthread_join(threads[i], NULL));
		CHECK(seen[i] == before + 1, "thread %zu: %u", i, seen[i]);
	}
	check_inherited(inherited);
	check_works();
	_exit(0);
}

static void all_threads_of_a_raw_child_see_one_generation(void)
{
	unsigned long round, rounds = check_scale(300);
	struct rf_handle handle;
	pid_t child;
	pid_t (*raw_fork)(void) = (pid_t(*)(void))dlsym(RTLD_DEFAULT, "_Fork");

	if (!raw_fork || CHECK_TSAN)
		check_skip("no _Fork() here");
	check_start(check_best_mode());
	handle = check_register(check_map(1), check_page, RF_HELD);
	for (round = 0; round < rounds; round++) {
		child = raw_fork();
		CHECK(child >= 0);
		if (!child)
			check_noticed_once(rf_engine.generation, handle);
		CHECK(check_wait(child) == 0, "round %lu", round);
	}
	CHECK(rf_handle_state(handle) == 1);
}

/* A signal handler has interrupted the noticing: it is refused, and may fork. */
static void a_handler_that_interrupts_the_noticing_is_refused(void)
{
	char *memory = check_map(1);
	struct rf_handle handle, made;
	struct rf_error error;
	struct rf_stats stats;
	uint32_t generation;
	pid_t child;

	check_start(check_best_mode());
	handle = check_register(memory, check_page, RF_HELD);
	generation = rf_generation();
	check_alarm(20);
	__atomic_store_n(rf_engine.alive, rf_lock_self(), __ATOMIC_SEQ_CST);
	CHECK(rf_register(memory, check_page, RF_HELD, RF_OMIT, &made, &error) == -EDEADLK);
	CHECK(error.cause == RF_CAUSE_SIGNAL);
	CHECK(rf_release(handle, 0) == -EDEADLK && rf_stats(&stats) == -EDEADLK);
	CHECK(rf_descriptor_omit(0, 0) == -EDEADLK);
	CHECK(rf_generation() == generation && !rf_engine.lock.word);
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		CHECK(rf_generation() == generation + 1);
		check_inherited(handle);
		check_works();
		_exit(0);
	}
	CHECK(check_wait(child) == 0);
	CHECK(rf_engine.forks_unmarked == 1);
	__atomic_store_n(rf_engine.alive, 1, __ATOMIC_SEQ_CST);
	check_release(handle);
	check_works();
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(a_second_thread_waits_while_another_becomes_the_child),
		SCENARIO(all_threads_of_a_raw_child_see_one_generation),
		SCENARIO(a_handler_that_interrupts_the_noticing_is_refused),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
