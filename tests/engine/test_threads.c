/* SPDX-License-Identifier: BSD-3-Clause */
/* Many threads and one engine, for the sanitizers to look at. */
#include "check.h"
#include "engine.h"

#include <pthread.h>

#define THREADS 4
#define HANDLES 12

static char *common;
static unsigned long rounds;
static enum rf_mode mode;
static bool may_keep;
static int descriptor;

int ibv_dontfork_range(void *base, size_t size);
int ibv_dofork_range(void *base, size_t size);

static void one_round(char *own, uint64_t *state, bool forking)
{
	struct rf_handle handles[HANDLES];
	static const enum rf_policy policies[] = { RF_OMIT, RF_OMIT, RF_WIPE, RF_KEEP };
	struct rf_range_info info[4];
	struct rf_library library;
	struct rf_stats stats;
	struct rf_error error;
	size_t i;

	for (i = 0; i < HANDLES; i++) {
		*state = *state * 6364136223846793005ull + 1442695040888963407ull;
		char *memory = *state >> 40 & 1 ? own : common;
		size_t from = *state >> 41 & 15, pages = 1 + (*state >> 45 & 7);

		enum rf_policy policy = policies[may_keep ? *state >> 54 & 3 : *state >> 54 & 1];

		CHECK(rf_register(memory + from * check_page + (*state >> 49 & 15),
				  pages * check_page, *state >> 53 & 1 ? RF_HELD : 0, policy,
				  &handles[i], &error) == 1);
	}
	for (i = 1; i < 4; i++)
		CHECK(ibv_dontfork_range(own + i * check_page, check_page) == 0);
	CHECK(rf_stats(&stats) == 0 && stats.registrations >= HANDLES);
	if (forking)
		check_fork();
	CHECK(rf_list(info, 4) > 0);
	CHECK(rf_intercept(&error) == 0);
	CHECK(rf_libraries(&library, 1) == 0 && rf_forks() + 1 > 0);
	/* Not often: the sanitizer keeps something of each dlopen(). */
	if (forking)
		CHECK(rf_fork_init(RF_MODE_AUTO, &error) == 0);
	if (*state >> 56 & 1)
		CHECK(rf_descriptor_omit(descriptor, 0) == 0);
	/* The middle one first. */
	CHECK(ibv_dofork_range(own + 2 * check_page, check_page) == 0);
	CHECK(ibv_dofork_range(own + check_page, check_page) == 0);
	CHECK(ibv_dofork_range(own + 3 * check_page, check_page) == 0);
	for (i = 0; i < HANDLES; i++) {
		CHECK(rf_handle_state(handles[i * 5 % HANDLES]) == 1);
		check_release(handles[i * 5 % HANDLES]);
		CHECK(rf_release(handles[i * 5 % HANDLES], 0) == -ESTALE);
	}
}

static void *thread(void *argument)
{
	uint64_t state = *(uint64_t *)argument;
	char *own = check_map(32);
	unsigned long i;

	for (i = 0; i < rounds; i++)
		one_round(own, &state, i % 16 == 0);
	CHECK(rf_generation() == rf_engine.generation);
	return own;
}

static void stress(void)
{
	pthread_t threads[THREADS];
	uint64_t seeds[THREADS];
	char *own[THREADS];
	struct rf_kernel kernel;
	size_t i;

	rounds = check_scale(1500);
	common = check_map(32);
	check_start(mode);
	rf_kernel_info(&kernel);
	may_keep = kernel.copy_trusted;
	descriptor = dup(STDERR_FILENO);
	for (i = 0; i < THREADS; i++)
		seeds[i] = check_random();
	for (i = 0; i < THREADS; i++)
		CHECK(!pthread_create(&threads[i], NULL, thread, &seeds[i]));
	for (i = 0; i < THREADS; i++)
		CHECK(!pthread_join(threads[i], (void **)&own[i]));
	CHECK(rf_descriptor_release(descriptor) == 0);
	check_fork();
	check_empty();
	CHECK(check_marked(common, 32) == 0);
	for (i = 0; i < THREADS; i++)
		CHECK(check_marked(own[i], 32) == 0);
}

static void eager_threads_end_with_nothing(void)
{
	mode = RF_MODE_EAGER;
	stress();
}

static void lazy_threads_end_with_nothing(void)
{
	check_needs_lazy();
	mode = RF_MODE_LAZY;
	stress();
}

/* The first registrations of a process, side by side, with nothing started. */
static void *register_early(void *argument)
{
	struct rf_handle handle;
	struct rf_error error;
	int rc;

	(void)argument;
	rc = rf_register(common, check_page, 0, RF_OMIT, &handle, &error);
	CHECK(rc == 0 || rc == 1);
	CHECK(rf_release(handle, 0) == 0);
	return NULL;
}

static void *start_early(void *argument)
{
	struct rf_error error;
	int rc = rf_fork_init(RF_MODE_AUTO, &error);

	(void)argument;
	CHECK(rc == 0 || (rc == -EINVAL && error.cause == RF_CAUSE_LATE), "%d", rc);
	CHECK(rf_mode() != RF_MODE_AUTO);
	return NULL;
}

static void race_to_start(bool environment)
{
	pthread_t threads[THREADS];
	size_t i;

	common = check_map(1);
	if (environment)
		setenv("RDMAV_FORK_SAFE", "", 1);
	for (i = 0; i < THREADS; i++)
		CHECK(!pthread_create(&threads[i], NULL, i & 1 ? start_early : register_early,
				      NULL));
	for (i = 0; i < THREADS; i++)
		CHECK(!pthread_join(threads[i], NULL));
	CHECK(!environment || rf_mode() != RF_MODE_NONE);
	CHECK(check_marked(common, 1) == 0);
	check_empty();
}

static void threads_race_to_start(void)
{
	unsigned long i, many = check_scale(100);

	for (i = 0; i < many; i++) {
		pid_t child = fork();

		CHECK(child >= 0);
		if (!child) {
			race_to_start(i & 1);
			_exit(0);
		}
		CHECK(check_wait(child) == 0);
	}
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(eager_threads_end_with_nothing),
		SCENARIO(lazy_threads_end_with_nothing),
		SCENARIO(threads_race_to_start),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
