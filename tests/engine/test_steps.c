/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A signal at every instruction. The processor's trap flag stops an operation
 * after each one, and the handler does what is to be safe at any moment: fork,
 * and let the child go on with the interrupted call; register and release; or
 * let another thread make a child in which the interrupted thread is no more.
 * What a storm of timers finds once a week this finds at once.
 */
#define _GNU_SOURCE
#include "check.h"
#include "fork.h"
#include "prefork.h"
#include "window.h"

#if defined(__x86_64__) && !CHECK_TSAN

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <ucontext.h>

#define TRAP_FLAG 0x100

int ibv_dontfork_range(void *base, size_t size);
int ibv_dofork_range(void *base, size_t size);

/* What is done at each step; true in a child, which is to go on unstepped. */
static bool (*at_step)(void);
static unsigned long steps, made_children;
/* A small $SCALE stops short operations as often: for so many steps near_stride holds. */
#define NEAR 200
static unsigned long near_stride = 1, stride = 1;
static bool in_child;

static bool is_due(void)
{
	steps++;
	return steps % (steps < NEAR ? near_stride : stride) == 0;
}

static void on_step(int signal, siginfo_t *info, void *context)
{
	ucontext_t *interrupted = context;
	int saved = errno;

	(void)signal, (void)info;
	if (!at_step || (is_due() && at_step()))
		interrupted->uc_mcontext.gregs[REG_EFL] &= ~TRAP_FLAG;
	errno = saved;
}

/* The red zone is stepped over. */
#define SET_FLAGS(operation)                                              \
	__asm__ volatile("lea -128(%%rsp), %%rsp\n\tpushfq\n\t" operation \
			 " (%%rsp)\n\tpopfq\n\tlea 128(%%rsp), %%rsp" ::  \
				 : "memory", "cc")

static void begin_steps(bool (*what)(void))
{
	struct sigaction action = { .sa_sigaction = on_step, .sa_flags = SA_SIGINFO };

	sigaction(SIGTRAP, &action, NULL);
	steps = 0;
	at_step = what;
	SET_FLAGS("orq $0x100,");
}

static void end_steps(void)
{
	SET_FLAGS("andq $-257,");
	at_step = NULL;
	if (!in_child)
		dprintf(STDOUT_FILENO, "        %lu instructions, %lu children\n", steps,
			made_children);
}

/* ---- Operations ---- */

static char *memory, *shared;
static struct rf_handle first, second, made;
static int made_rc;
static struct rf_error error;

static void register_one(unsigned int flags)
{
	made_rc = rf_register(memory + 3 * check_page + 5, 4 * check_page, flags, RF_OMIT, &made,
			      &error);
}

static void register_held(void)
{
	register_one(RF_HELD);
}

static void register_unheld(void)
{
	register_one(0);
}

static void release_one(void)
{
	made_rc = rf_release(first, 0);
}

static void fold(void)
{
	if (rf_enter(0) == 0) {
		rf_prefork(&rf_engine.tracker, &rf_engine.registry, &rf_engine.list);
		rf_leave();
	}
}

static void list(void)
{
	struct rf_range_info info[4];

	made_rc = (int)rf_list(info, 4);
}

static void register_wiped(void)
{
	made_rc = rf_register(memory + 3 * check_page, 4 * check_page, RF_HELD, RF_WIPE, &made,
			      &error);
}

static void look_at_libraries(void)
{
	struct rf_library library;

	(void)rf_libraries(&library, 1);
}

static void register_and_grow(void)
{
	register_one(0);
}

static const struct {
	const char *name;
	void (*act)(void);
	enum rf_mode mode;
} operations[] = {
	{ "register lazily", register_held, RF_MODE_LAZY },
	{ "register in lazy mode, unheld", register_unheld, RF_MODE_LAZY },
	{ "register eagerly", register_held, RF_MODE_EAGER },
	{ "release lazily", release_one, RF_MODE_LAZY },
	{ "release eagerly", release_one, RF_MODE_EAGER },
	{ "fold", fold, RF_MODE_LAZY },
	{ "list", list, RF_MODE_EAGER },
	{ "register to be wiped", register_wiped, RF_MODE_EAGER },
	{ "look at libraries", look_at_libraries, RF_MODE_EAGER },
	{ "grow", register_and_grow, RF_MODE_EAGER },
};

/* Leave the leaves a page, with something behind it: growing means moving. */
static void make_tables_full(void)
{
	struct rf_ranges *ranges = &rf_engine.tracker.ranges;
	char *rest = (char *)ranges->leaves.items + check_page;

	CHECK(mmap(rest, ranges->leaves.mapped - check_page, PROT_NONE,
		   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == rest);
	ranges->leaves.mapped = check_page;
	ranges->leaves.capacity = (uint32_t)(check_page / ranges->leaves.item_size);
	ranges->capacity = 0;
}

static void set_up(enum rf_mode mode, void (*act)(void))
{
	memory = check_map(16);
	shared = check_map_shared(2);
	check_start(mode);
	first = check_register(memory + 2 * check_page, 3 * check_page, RF_HELD);
	second = check_register(memory + 6 * check_page, 3 * check_page, RF_HELD);
	if (act == register_and_grow)
		make_tables_full();
}

/* A child in whatever state: it can do all that its parent could. */
static void check_child_works(void)
{
	struct rf_handle handle, other;
	char *fresh;

	at_step = NULL;
	fresh = check_map(4);
	handle = check_register(fresh + check_page, check_page, RF_HELD);
	other = check_register(fresh + 2 * check_page + 7, check_page, 0);
	CHECK(rf_handle_state(handle) == 1, "what the child registered is lost");
	CHECK(rf_handle_state(first) == -ECHILD && rf_handle_state(second) == -ECHILD);
	CHECK(rf_release(first, 0) == -ECHILD && rf_release(second, 0) == -ECHILD);
	CHECK(!rf_engine.clear_when_left && !rf_window.forks);
	CHECK(!rf_engine.lock.word, "the lock is held");
	CHECK(!check_child_reads(fresh + check_page));
	CHECK(check_child_reads(shared));
	look_at_libraries();
	check_release(handle);
	check_release(other);
	CHECK(check_marked(fresh, 4) == 0);
	check_empty();
}

/* The interrupted call has gone on in this child: what that has marked is unmarked. */
static void check_nothing_is_marked(void)
{
	size_t page;

	check_read_smaps();
	for (page = 0; page < 16; page++)
		CHECK(!(check_flags_read(memory + page * check_page) & (CHECK_DC | CHECK_WF)),
		      "page %zu stays marked, step %lu", page, steps);
}

/* Every @usual-th step; all of them if $SCALE asks for more, fewer if it asks for less. */
static void set_stride(unsigned long usual)
{
	/* Sanitized code has many more instructions than the same on a slow machine. */
	usual *= CHECK_SLOWNESS > 1 ? 7 : 1;
	near_stride = check_share() > 1 ? 1 : usual;
	stride = check_share() > 1 ? 1 : (unsigned long)((double)usual / check_share());
}

static void for_each_operation(void (*run)(size_t))
{
	size_t i;

	for (i = 0; i < COUNT_OF(operations); i++) {
		struct rf_kernel kernel;
		pid_t child;
		int status;

		rf_kernel_info(&kernel);
		if (operations[i].mode == RF_MODE_LAZY && !kernel.copy_trusted)
			continue;
		child = fork();
		CHECK(child >= 0);
		if (!child) {
			check_alarm(50);
			set_up(operations[i].mode, operations[i].act);
			run(i);
			_exit(0);
		}
		status = check_wait(child);
		CHECK(status == 0, "%s: %d", operations[i].name, status);
	}
}

/* ---- A fork at every instruction ---- */

/* A fork before it would leave the operation nothing to mark. */
static bool fold_first;

static bool too_early(void)
{
	return fold_first && !rf_lock_is_mine(&rf_engine.lock);
}

static pid_t (*make_child)(void) = fork;

static bool fork_here(void)
{
	pid_t child;

	if (too_early())
		return false;
	child = make_child();
	CHECK(child >= 0);
	if (!child) {
		in_child = true;
		check_alarm(20);
		return true;
	}
	made_children++;
	CHECK(check_wait(child) == 0, "step %lu", steps);
	return false;
}

static void fork_everywhere(size_t i)
{
	fold_first = operations[i].act == fold;
	begin_steps(fork_here);
	operations[i].act();
	end_steps();
	if (in_child) {
		/* What had not begun yet is the child's own. */
		if (operations[i].act != release_one && made_rc == 1 && rf_handle_state(made) == 1)
			check_release(made);
		check_child_works();
		check_nothing_is_marked();
		_exit(0);
	}
	CHECK(made_children > 2, "%lu steps", made_children);
	check_sound();
	CHECK(!rf_engine.clear_when_left && !rf_window.forks);
	CHECK(rf_generation() == rf_engine.generation);
	if (made_rc == 1)
		check_release(made);
	if (rf_handle_state(first) == 1)
		check_release(first);
	check_release(second);
	CHECK(check_marked(memory, 16) == 0);
	check_empty();
}

static void a_child_goes_on_from_every_instruction(void)
{
	set_stride(5);
	for_each_operation(fork_everywhere);
}

/* No fork handler runs for it: the call itself finds out where it is. */
static void a_raw_child_goes_on_from_every_instruction(void)
{
	make_child = (pid_t(*)(void))dlsym(RTLD_DEFAULT, "_Fork");
	if (!make_child)
		check_skip("no _Fork() in this libc");
	set_stride(11);
	for_each_operation(fork_everywhere);
}

/* The child ends in the handler, having seen that nothing it does hangs. */
static bool fork_and_exit_here(void)
{
	pid_t child;

	if (too_early())
		return false;
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		struct rf_handle handle;
		int rc = rf_register(memory, check_page, 0, RF_OMIT, &handle, &error);

		check_alarm(20);
		CHECK(rc == 1 || rc == -EDEADLK, "%d", rc);
		CHECK(rc < 0 || rf_release(handle, 0) == 0);
		_exit(0);
	}
	made_children++;
	CHECK(check_wait(child) == 0, "step %lu", steps);
	return false;
}

static void fork_and_exit_everywhere(size_t i)
{
	fold_first = operations[i].act == fold;
	begin_steps(fork_and_exit_here);
	operations[i].act();
	end_steps();
	CHECK(made_children > 2);
	check_sound();
	CHECK(!rf_window.forks);
}

static void a_child_ends_at_every_instruction(void)
{
	set_stride(5);
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

static void shared_memory_is_never_missed(void)
{
	unsigned int flags;

	shared = check_map_shared(2);
	check_start(RF_MODE_EAGER);
	set_stride(5);
	for (flags = 0; flags < 2; flags++) {
		begin_steps(child_has_shared_here);
		made_rc = rf_register(shared, 2 * check_page, flags, RF_OMIT, &made, &error);
		end_steps();
		CHECK(made_rc == 1);
		begin_steps(child_has_shared_here);
		made_rc = rf_release(made, 0);
		end_steps();
	}
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

static void no_byte_is_an_older_one(void)
{
	unsigned int round;

	memory = check_map(16);
	setenv("RDMAFORK_TRUST_COPYING", "0", 1);
	check_start(RF_MODE_EAGER);
	set_stride(3);
	for (round = 0; round < 2; round++) {
		first = check_register(memory + 3 * check_page + 100, 100, RF_HELD);
		check_fork();
		begin_steps(child_has_no_other_bytes);
		register_held();
		end_steps();
		CHECK(made_rc == 1);
		begin_steps(child_has_no_other_bytes);
		release_one();
		end_steps();
		check_release(made);
	}
	check_empty();
}

/* ---- What a release by bytes costs ---- */

static bool go_on(void)
{
	return false;
}

static unsigned long steps_of_release(char *start, size_t nbytes)
{
	begin_steps(go_on);
	made_rc = ibv_dofork_range(start, nbytes);
	end_steps();
	CHECK(made_rc == 0);
	return steps;
}

/* Of one range, of all ranges at once, which is nobody's, and of what nobody registered. */
static unsigned long steps_among(size_t count, bool same)
{
	char *base = check_map_shared(count);
	unsigned long most = 0, one;
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
		one = steps_of_release(start, check_page);
		most = one > most ? one : most;
	}
	check_unmap(base, count);
	return most;
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
	int rc;

	look_at_libraries();
	rc = rf_register(memory + 12 * check_page, check_page, steps & 1 ? RF_HELD : 0, RF_OMIT,
			 &handle, &why);
	if (rc == -EDEADLK) {
		CHECK(why.cause == RF_CAUSE_SIGNAL);
		CHECK(rf_release(second, 0) == -EDEADLK);
		refused++;
		return false;
	}
	CHECK(rc == 1, "%d", rc);
	CHECK(rf_release(handle, 0) == 0);
	allowed++;
	return false;
}

/* Before the first store the handler itself is the first to call, and notices all. */
static bool register_in_noticing(void)
{
	struct rf_handle handle;
	struct rf_error why;
	int rc;

	if (!*(volatile uint64_t *)rf_engine.alive)
		return false;
	rc = rf_register(memory + 12 * check_page, check_page, 0, RF_OMIT, &handle, &why);
	if (rc == -EDEADLK) {
		CHECK(why.cause == RF_CAUSE_SIGNAL);
		CHECK(rf_handle_state(second) == -EDEADLK);
		refused++;
		return false;
	}
	CHECK(rc == 1, "%d", rc);
	CHECK(rf_release(handle, 0) == 0);
	allowed++;
	return false;
}

static void register_everywhere(size_t i)
{
	begin_steps(register_here);
	operations[i].act();
	end_steps();
	/* That has a lock of its own. */
	CHECK((refused || operations[i].act == look_at_libraries) && allowed,
	      "refused %lu, allowed %lu", refused, allowed);
	check_sound();
	CHECK(!rf_engine.lock.word);
	if (made_rc == 1)
		check_release(made);
	if (rf_handle_state(first) == 1)
		check_release(first);
	check_release(second);
	CHECK(check_marked(memory, 16) == 0);
	check_empty();
}

static void a_handler_registers_at_every_instruction(void)
{
	set_stride(1);
	for_each_operation(register_everywhere);
}

/* No handler of fork()'s runs: the first call finds out where it is, and is interrupted there. */
static void a_handler_registers_at_every_instruction_of_the_noticing(void)
{
	pid_t (*raw_fork)(void) = (pid_t(*)(void))dlsym(RTLD_DEFAULT, "_Fork");
	uint32_t generation;
	pid_t child;

	if (!raw_fork)
		check_skip("no _Fork() here");
	set_stride(1);
	set_up(check_best_mode(), register_held);
	generation = rf_generation();
	child = raw_fork();
	CHECK(child >= 0);
	if (!child) {
		check_alarm(50);
		begin_steps(register_in_noticing);
		made_rc = (int)rf_generation();
		end_steps();
		CHECK(made_rc == (int)generation + 1 && rf_generation() == generation + 1);
		CHECK(refused && allowed, "refused %lu, allowed %lu", refused, allowed);
		check_inherited(first);
		check_works();
		_exit(0);
	}
	CHECK(check_wait(child) == 0);
	check_release(first);
	check_release(second);
}

/* ---- The thread inside the engine is no more ---- */

static sem_t stopped, resume;
static bool finished;

static bool stop_here(void)
{
	sem_post(&stopped);
	while (sem_wait(&resume) < 0)
		;
	return false;
}

static void *stepping_thread(void *act)
{
	begin_steps(stop_here);
	(*(void (**)(void))act)();
	end_steps();
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
	unsigned long children = 0;
	pthread_t thread;

	if (!raw_fork)
		check_skip("no _Fork() in this libc");
	sem_init(&stopped, 0, 0);
	sem_init(&resume, 0, 0);
	CHECK(!pthread_create(&thread, NULL, stepping_thread, &act));
	for (;;) {
		pid_t child;

		while (sem_wait(&stopped) < 0)
			;
		if (__atomic_load_n(&finished, __ATOMIC_SEQ_CST))
			break;
		child = raw_fork();
		CHECK(child >= 0);
		if (!child) {
			check_alarm(20);
			at_step = NULL;
			check_child_works();
			_exit(0);
		}
		CHECK(check_wait(child) == 0, "%s, step %lu", operations[i].name, steps);
		children++;
		sem_post(&resume);
	}
	CHECK(!pthread_join(thread, NULL));
	CHECK(children > 2);
	check_sound();
}

static void a_thread_that_is_no_more_leaves_the_child_sane(void)
{
	set_stride(5);
	for_each_operation(thread_gone_everywhere);
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(a_child_goes_on_from_every_instruction),
		SCENARIO(a_raw_child_goes_on_from_every_instruction),
		SCENARIO(a_child_ends_at_every_instruction),
		SCENARIO(shared_memory_is_never_missed),
		SCENARIO(no_byte_is_an_older_one),
		SCENARIO(a_release_takes_as_long_among_thousands),
		SCENARIO(a_handler_registers_at_every_instruction),
		SCENARIO(a_handler_registers_at_every_instruction_of_the_noticing),
		SCENARIO(a_thread_that_is_no_more_leaves_the_child_sane),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}

#else

static void no_steps(void)
{
	check_skip("the trap flag is x86-64's, and ThreadSanitizer delays signals");
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = { SCENARIO(no_steps) };

	return check_run(scenarios, 1, argc, argv);
}

#endif
