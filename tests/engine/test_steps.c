/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A signal at every instruction. The handler does what is to be safe at any moment:
 * fork, and let the child go on with the interrupted call; register and release; or
 * let another thread make a child, in which the interrupted thread is no more.
 * A storm of timers would find once a week what this finds at once.
 */
#define _GNU_SOURCE
#include "fork.h"
#include "steps.h"
#include "window.h"

#ifdef STEPS

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>

int ibv_dontfork_range(void *base, size_t size);
int ibv_dofork_range(void *base, size_t size);

static struct rf_error error;

/* ---- A fork at every instruction ---- */

/* A fork before it would leave the operation nothing to mark. */
static bool prefork_first;

static bool too_early(void)
{
	return prefork_first && !rf_lock_is_mine(&rf_engine.lock);
}

static pid_t (*make_child)(void) = fork;

/* True in the child. */
static bool is_child_here(void)
{
	pid_t child;

	if (too_early())
		return false;
	child = make_child();
	CHECK(child >= 0);
	if (!child) {
		check_alarm(20);
		return true;
	}
	made_children++;
	CHECK(check_wait(child) == 0, "step %lu", steps);
	return false;
}

static bool fork_here(void)
{
	in_child = is_child_here();
	return in_child;
}

static void fork_everywhere(size_t i)
{
	prefork_first = operations[i].act == prefork;
	steps_begin(fork_here);
	operations[i].act();
	steps_end();
	if (in_child) {
		check_child_works();
		check_nothing_is_marked();
		_exit(0);
	}
	CHECK(made_children > 2, "%lu steps", made_children);
	check_sound();
	CHECK(!rf_engine.clear_when_left && !rf_window.forks);
	CHECK(rf_generation() == rf_engine.generation);
	tear_down();
}

static void a_child_goes_on_from_every_instruction(void)
{
	steps_set_stride(5);
	for_each_operation(fork_everywhere);
}

/* No fork handler runs for it: the call itself finds out where it is. */
static void a_raw_child_goes_on_from_every_instruction(void)
{
	make_child = (pid_t(*)(void))dlsym(RTLD_DEFAULT, "_Fork");
	if (!make_child)
		check_skip("no _Fork() in this libc");
	steps_set_stride(11);
	for_each_operation(fork_everywhere);
}

/* The child ends in the handler, having seen that nothing it does hangs. */
static bool fork_and_exit_here(void)
{
	if (is_child_here()) {
		struct rf_handle handle;
		int rc = rf_register(memory, check_page, 0, RF_OMIT, &handle, &error);

		CHECK(rc == 1 || rc == -EDEADLK, "%d", rc);
		CHECK(rc < 0 || rf_release(handle, 0) == 0);
		_exit(0);
	}
	return false;
}

static void fork_and_exit_everywhere(size_t i)
{
	prefork_first = operations[i].act == prefork;
	steps_begin(fork_and_exit_here);
	operations[i].act();
	steps_end();
	CHECK(made_children > 2);
	check_sound();
	CHECK(!rf_window.forks);
}

static void a_child_ends_at_every_instruction(void)
{
	steps_set_stride(5);
	for_each_operation(fork_and_exit_everywhere);
}

/* Shared memory just registered: no moment at which a child would miss it. */
static bool child_has_shared_here(void)
{
	pid_t child = fork();

	CHECK(child >= 0);
	if (!child) {
		signal(SIGSEGV, SIG_DFL);
		(void)*(volatile char *)shared;
		_exit(0);
	}
	made_children++;
	CHECK(check_wait(child) == 0, "step %lu: the child has lost shared memory", steps);
	return false;
}

static void children_always_have_shared_memory(void)
{
	unsigned int flags;

	shared = check_map_shared(2);
	check_start(RF_MODE_EAGER);
	steps_set_stride(5);
	for (flags = 0; flags < 2; flags++) {
		steps_begin(child_has_shared_here);
		made_rc = rf_register(shared, 2 * check_page, flags, RF_OMIT, &made, &error);
		steps_end();
		CHECK(made_rc == 1);
		steps_begin(child_has_shared_here);
		made_rc = rf_release(made, 0);
		steps_end();
	}
	check_empty();
}

/* Every other page, each in a range of its own, in two leaves; and one range of three pages. */
#define MOVED 33
#define MOVED_PAGES (2 * MOVED + 3)

static char *moved;

static char *moved_page(size_t page)
{
	return moved + page * check_page;
}

/* As if each of them had been marked just now. */
static bool child_has_all_moved_here(void)
{
	size_t page;
	pid_t child;

	if (!rf_lock_is_mine(&rf_engine.lock))
		return false;
	for (page = 0; page < MOVED_PAGES; page += page < 2 * MOVED ? 2 : 1)
		CHECK(madvise(moved_page(page), check_page, MADV_DONTFORK) == 0);
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		signal(SIGSEGV, SIG_DFL);
		for (page = 0; page < MOVED_PAGES; page += page < 2 * MOVED ? 2 : 1)
			(void)*(volatile char *)moved_page(page);
		_exit(0);
	}
	made_children++;
	CHECK(check_wait(child) == 0, "step %lu: the child has lost shared memory", steps);
	return false;
}

/* Registers @page in single steps, and releases it again. */
static void step_through_page(size_t page)
{
	steps_begin(child_has_all_moved_here);
	made_rc = rf_register(moved_page(page), check_page, RF_HELD, RF_WIPE, &made, &error);
	steps_end();
	CHECK(made_rc == 1, "%d", made_rc);
	steps_begin(child_has_all_moved_here);
	made_rc = rf_release(made, 0);
	steps_end();
	CHECK(made_rc == 0, "%d", made_rc);
}

static void children_have_shared_memory_that_the_ranges_move(void)
{
	struct rf_handle handles[MOVED + 1];
	size_t i;

	moved = check_map_shared(MOVED_PAGES);
	check_start(RF_MODE_EAGER);
	steps_set_stride(1);
	for (i = 0; i <= MOVED; i++)
		handles[i] = check_register(moved_page(2 * i), (i < MOVED ? 1 : 3) * check_page,
					    RF_HELD);
	CHECK(rf_engine.tracker.ranges.leaf_count == 2);
	/* The first leaf is full: it is split, and joined again. */
	step_through_page(1);
	/* A range is cut in three, and is one again. */
	step_through_page(2 * MOVED + 1);
	for (i = 0; i <= MOVED; i++)
		check_release(handles[i]);
	check_empty();
}

/*
 * Where partial pages are marked, a fork inside the engine has saved nothing of this moment:
 * the child may lack its own bytes then, but never has those of another.
 */
static bool child_has_no_other_bytes(void)
{
	volatile char *beside = memory + 3 * check_page;
	pid_t child;

	*beside = (char)(1 + steps % 100);
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		signal(SIGSEGV, SIG_DFL);
		_exit(*beside == (char)(1 + steps % 100) ? 0 : 1);
	}
	made_children++;
	CHECK(check_wait(child) != 1, "step %lu: the child reads what was there before", steps);
	return false;
}

static void a_child_never_reads_stale_bytes(void)
{
	unsigned int round;

	memory = check_map(16);
	check_start_untrusted();
	steps_set_stride(3);
	for (round = 0; round < 2; round++) {
		first_held = check_register(memory + 3 * check_page + 100, 100, RF_HELD);
		check_fork();
		steps_begin(child_has_no_other_bytes);
		register_held();
		steps_end();
		CHECK(made_rc == 1);
		steps_begin(child_has_no_other_bytes);
		release_one();
		steps_end();
		check_release(made);
	}
	check_empty();
}

/* ---- One fork, within the release that applies the changes waiting for a leaf ---- */

#define LEAVES_PAGES (3 * RF_LEAF_RANGES)

static struct rf_handle pages[LEAVES_PAGES], again[LEAVES_PAGES / 2];

/* The counts of the ranges of whole leaves wait: a registration over all of them was released. */
static void make_changes_wait(void)
{
	char *leaves = check_map(LEAVES_PAGES);
	struct rf_handle all;
	size_t page;

	memory = check_map(16);
	check_start(RF_MODE_EAGER);
	for (page = 0; page < LEAVES_PAGES; page++)
		pages[page] = check_register(leaves + page * check_page, check_page, RF_HELD);
	for (page = 0; page < COUNT_OF(again); page++)
		again[page] = check_register(leaves + 2 * page * check_page, check_page, RF_HELD);
	all = check_register(leaves, LEAVES_PAGES * check_page, RF_HELD);
	prefork();
	check_release(all);
}

/* A process of its own, as a fork applies the changes that wait. 1: the step was not reached. */
static int fork_once(unsigned long step)
{
	const size_t middle = LEAVES_PAGES / 2;
	size_t i;

	make_changes_wait();
	steps_stop_at(step);
	steps_begin(fork_and_exit_here);
	made_rc = rf_release(pages[middle], 0);
	steps_end();
	CHECK(made_rc == 0);
	if (steps < step)
		return 1;
	check_sound();
	for (i = 0; i < LEAVES_PAGES; i++)
		if (i != middle)
			check_release(pages[i]);
	for (i = 0; i < COUNT_OF(again); i++)
		check_release(again[i]);
	check_empty();
	return 0;
}

static void waiting_changes_are_applied_once(void)
{
	/* A process each; sanitized code has many more instructions. */
	const unsigned long stride = (check_share() < 1 ? 29 : 7) * (CHECK_SLOWNESS > 1 ? 9 : 1);
	unsigned long step;
	int ended = 0;

	for (step = 1; !ended; step += stride) {
		pid_t child = fork();

		if (!child)
			_exit(fork_once(step));
		ended = check_wait(child);
		CHECK(ended == 0 || ended == 1, "step %lu", step);
	}
	CHECK(step > 100 * stride / 7, "%lu steps", step);
}

/* ---- The cost of a release by bytes ---- */

static bool go_on(void)
{
	return false;
}

static unsigned long steps_of_release(char *start, size_t nbytes)
{
	steps_begin(go_on);
	made_rc = ibv_dofork_range(start, nbytes);
	steps_end();
	CHECK(made_rc == 0);
	return steps;
}

/*
 * Of one range, of all ranges at once, which is nobody's, and of what nobody registered. Now and
 * then a release splits or joins leaves of the ranges, so that of one range is a mean.
 */
static unsigned long steps_among(size_t count, bool same)
{
	char *base = check_map_shared(count);
	unsigned long most = 0, sum = 0, one;
	size_t i;

	for (i = 0; i < count; i++)
		CHECK(ibv_dontfork_range(base + (same ? 0 : i) * check_page, check_page) == 0);
	one = steps_of_release(base, count * check_page);
	most = one > most ? one : most;
	one = steps_of_release(base + 5, check_page);
	most = one > most ? one : most;
	for (i = 0; i < count; i++) {
		char *start = base + (same ? 0 : i * 7919 % count) * check_page;

		if (i % (count / 16)) {
			CHECK(ibv_dofork_range(start, check_page) == 0);
			continue;
		}
		sum += steps_of_release(start, check_page);
	}
	check_unmap(base, count);
	return most > sum / 16 ? most : sum / 16;
}

static void a_release_takes_as_long_among_thousands(void)
{
	unsigned int same;

	check_start(RF_MODE_EAGER);
	for (same = 0; same < 2; same++) {
		const unsigned long few = steps_among(16, same), many = steps_among(16384, same);

		CHECK(many < 3 * few, "%lu instructions among few, %lu among many", few, many);
	}
	check_empty();
}

/* ---- Registering at every instruction ---- */

static unsigned long refused, allowed;

static bool register_here(void)
{
	struct rf_handle handle;
	struct rf_error why;
	int rc = rf_register(memory + 12 * check_page, check_page, steps & 1 ? RF_HELD : 0,
			     RF_OMIT, &handle, &why);

	if (rc == -EDEADLK) {
		CHECK(why.cause == RF_CAUSE_SIGNAL);
		CHECK(rf_handle_state(second_held) == -EDEADLK);
		CHECK(rf_release(second_held, 0) == -EDEADLK);
		refused++;
		return false;
	}
	CHECK(rc == 1, "%d", rc);
	CHECK(rf_release(handle, 0) == 0);
	allowed++;
	return false;
}

static bool look_and_register_here(void)
{
	look_at_libraries();
	return register_here();
}

/* Before the first store the handler itself is the first to call, and notices all. */
static bool register_in_noticing(void)
{
	return *(volatile uint64_t *)rf_engine.alive && register_here();
}

static void register_everywhere(size_t i)
{
	steps_begin(look_and_register_here);
	operations[i].act();
	steps_end();
	/* That has a lock of its own. */
	CHECK((refused || operations[i].act == look_at_libraries) && allowed,
	      "refused %lu, allowed %lu", refused, allowed);
	check_sound();
	CHECK(!rf_engine.lock.word);
	tear_down();
}

static void a_handler_registers_at_every_instruction(void)
{
	steps_set_stride(1);
	for_each_operation(register_everywhere);
}

/* No handler of fork()'s runs: the first call finds out where it is, and is interrupted there. */
static void a_handler_registers_while_a_child_is_noticed(void)
{
	pid_t (*raw_fork)(void) = (pid_t(*)(void))dlsym(RTLD_DEFAULT, "_Fork");
	uint32_t generation;
	pid_t child;

	if (!raw_fork)
		check_skip("no _Fork() here");
	steps_set_stride(1);
	set_up(check_best_mode(), register_held);
	generation = rf_generation();
	child = raw_fork();
	CHECK(child >= 0);
	if (!child) {
		check_alarm(50);
		steps_begin(register_in_noticing);
		made_rc = (int)rf_generation();
		steps_end();
		CHECK(made_rc == (int)generation + 1 && rf_generation() == generation + 1);
		CHECK(refused && allowed, "refused %lu, allowed %lu", refused, allowed);
		check_inherited(first_held);
		check_works();
		_exit(0);
	}
	CHECK(check_wait(child) == 0);
	check_release(first_held);
	check_release(second_held);
}

/* ---- The thread inside the engine is no more ---- */

static sem_t stopped, resume;
static bool finished;

static void wait_for(sem_t *semaphore)
{
	while (sem_wait(semaphore) < 0)
		;
}

static bool stop_here(void)
{
	sem_post(&stopped);
	wait_for(&resume);
	return false;
}

static void *stepping_thread(void *act)
{
	steps_begin(stop_here);
	(*(void (**)(void))act)();
	steps_end();
	__atomic_store_n(&finished, true, __ATOMIC_SEQ_CST);
	sem_post(&stopped);
	return NULL;
}

/*
 * No fork handler runs for such a child. One made by fork() can find the engine
 * the same, with a thread that came into it after the handler.
 */
static void thread_gone_everywhere(size_t i)
{
	pid_t (*raw_fork)(void) = (pid_t(*)(void))dlsym(RTLD_DEFAULT, "_Fork");
	void (*act)(void) = operations[i].act;
	pthread_t thread;

	if (!raw_fork)
		check_skip("no _Fork() in this libc");
	sem_init(&stopped, 0, 0);
	sem_init(&resume, 0, 0);
	CHECK(!pthread_create(&thread, NULL, stepping_thread, &act));
	for (;;) {
		pid_t child;

		wait_for(&stopped);
		if (__atomic_load_n(&finished, __ATOMIC_SEQ_CST))
			break;
		child = raw_fork();
		CHECK(child >= 0);
		if (!child) {
			check_alarm(20);
			check_child_works();
			_exit(0);
		}
		CHECK(check_wait(child) == 0, "%s, step %lu", operations[i].name, steps);
		made_children++;
		sem_post(&resume);
	}
	CHECK(!pthread_join(thread, NULL));
	CHECK(made_children > 2);
	check_sound();
}

static void a_child_works_without_the_interrupted_thread(void)
{
	steps_set_stride(5);
	for_each_operation(thread_gone_everywhere);
}

/* ---- Within the fork of another thread ---- */

/* Numbers of this scenario's processes: steps of the last, children of all. */
static struct {
	unsigned long steps, children;
} *told;
static sem_t in_window, stands_still, forked;
static __thread bool is_forker;
static bool has_forked;

static void wait_in_window(void)
{
	if (is_forker) {
		sem_post(&in_window);
		wait_for(&stands_still);
	}
}

/* Installed before the engine's own: it prepares after that, in the engine's window. */
__attribute__((constructor(101))) static void install_before(void)
{
	pthread_atfork(wait_in_window, NULL, NULL);
}

static void *forking_thread(void *unused)
{
	pid_t child;

	is_forker = true;
	child = fork();
	is_forker = false;
	CHECK(child >= 0);
	if (!child) {
		check_alarm(20);
		check_child_works();
		_exit(0);
	}
	CHECK(check_wait(child) == 0);
	sem_post(&forked);
	return unused;
}

static bool let_it_fork(void)
{
	sem_post(&stands_still);
	wait_for(&forked);
	has_forked = true;
	return true;
}

static void fork_within_window(size_t i)
{
	pthread_t thread;

	CHECK(!sem_init(&in_window, 0, 0) && !sem_init(&stands_still, 0, 0) &&
	      !sem_init(&forked, 0, 0));
	CHECK(!pthread_create(&thread, NULL, forking_thread, NULL));
	wait_for(&in_window);
	CHECK(rf_window.forks == 1);
	steps_begin(let_it_fork);
	operations[i].act();
	steps_end();
	told->steps = steps;
	told->children += has_forked;
	if (!has_forked)
		let_it_fork();
	CHECK(!pthread_join(thread, NULL));
	check_sound();
	CHECK(!rf_engine.clear_when_left && !rf_window.forks);
	tear_down();
}

/* One window is one fork: each step is that of a process of its own. */
static void a_fork_under_way_goes_on_at_every_instruction(void)
{
	const double share = check_share() > 1 ? check_share() : 1;
	unsigned long step, all, stride;
	size_t i;

	told = (void *)check_map_shared(1);
	for (i = 0; i < operations_count; i++) {
		if (!is_possible(i))
			continue;
		steps_stop_at(ULONG_MAX);
		CHECK(run_operation(i, fork_within_window) == 0, "%s", operations[i].name);
		all = told->steps;
		stride = (unsigned long)((double)all / (25 * share));
		stride += !stride;
		told->children = 0;
		for (step = 1; step <= all; step += stride) {
			steps_stop_at(step);
			CHECK(run_operation(i, fork_within_window) == 0, "%s, step %lu",
			      operations[i].name, step);
		}
		CHECK(told->children >= 20, "%lu of %lu steps", told->children, all);
		dprintf(STDOUT_FILENO, "        %lu instructions, %lu children\n", all,
			told->children);
	}
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(a_child_goes_on_from_every_instruction),
		SCENARIO(a_raw_child_goes_on_from_every_instruction),
		SCENARIO(a_child_ends_at_every_instruction),
		SCENARIO(children_always_have_shared_memory),
		SCENARIO(children_have_shared_memory_that_the_ranges_move),
		SCENARIO(a_child_never_reads_stale_bytes),
		SCENARIO(waiting_changes_are_applied_once),
		SCENARIO(a_release_takes_as_long_among_thousands),
		SCENARIO(a_handler_registers_at_every_instruction),
		SCENARIO(a_handler_registers_while_a_child_is_noticed),
		SCENARIO(a_child_works_without_the_interrupted_thread),
		SCENARIO(a_fork_under_way_goes_on_at_every_instruction),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}

#else

static void stepping_needs_the_trap_flag(void)
{
	check_skip("the trap flag is x86-64's, and ThreadSanitizer delays signals");
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = { SCENARIO(stepping_needs_the_trap_flag) };

	return check_run(scenarios, 1, argc, argv);
}

#endif
