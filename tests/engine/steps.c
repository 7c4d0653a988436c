/* SPDX-License-Identifier: BSD-3-Clause */
#define _GNU_SOURCE
#include "steps.h"

#ifdef STEPS

#include "fork.h"
#include "prefork.h"
#include "window.h"

#include <signal.h>
#include <sys/syscall.h>
#include <ucontext.h>

#define TRAP_FLAG 0x100

static bool (*call)(void);
static pid_t stepped;
static bool is_forking;
unsigned long steps, made_children;
bool in_child;

/* A small $SCALE stops short operations as often: for so many steps near_stride holds. */
#define NEAR 200
static unsigned long near_stride = 1, stride = 1, only;

void steps_set_stride(unsigned long usual)
{
	/* Sanitized code has many more instructions than the same on a slow machine. */
	usual *= CHECK_SLOWNESS > 1 ? 7 : 1;
	near_stride = check_share() > 1 ? 1 : usual;
	stride = check_share() > 1 ? 1 : (unsigned long)((double)usual / check_share());
	only = 0;
}

void steps_stop_at(unsigned long step)
{
	only = step;
}

static bool is_due(void)
{
	steps++;
	return only ? steps == only : steps % (steps < NEAR ? near_stride : stride) == 0;
}

/*
 * A fork waits for locks of libc that a fork, or the thread that stands still, may hold: then
 * the engine's steps alone count.
 */
static bool is_elsewhere(uintptr_t at)
{
	extern const char __executable_start[], etext[];

	return (is_forking || only) &&
	       (at < (uintptr_t)__executable_start || at >= (uintptr_t)etext);
}

/* Where all signals are about to be blocked, as in fork() of glibc 2.43: a blocked trap kills. */
static void keep_traps(greg_t *registers)
{
	static unsigned long set;

	if (memcmp((void *)registers[REG_RIP], "\x0f\x05", 2) ||
	    registers[REG_RAX] != SYS_rt_sigprocmask || !registers[REG_RSI])
		return;
	memcpy(&set, (void *)registers[REG_RSI], sizeof(set));
	set &= ~(1ul << (SIGTRAP - 1));
	registers[REG_RSI] = (greg_t)&set;
}

static void on_step(int signal, siginfo_t *info, void *context)
{
	greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
	int saved = errno;

	(void)signal, (void)info;
	keep_traps(registers);
	/* A child that the operation makes is not stepped. */
	if (!call || getpid() != stepped ||
	    (!is_elsewhere((uintptr_t)registers[REG_RIP]) && is_due() && call()))
		registers[REG_EFL] &= ~TRAP_FLAG;
	errno = saved;
}

/* The red zone is stepped over. */
#define SET_FLAGS(operation)                                              \
	__asm__ volatile("lea -128(%%rsp), %%rsp\n\tpushfq\n\t" operation \
			 " (%%rsp)\n\tpopfq\n\tlea 128(%%rsp), %%rsp" ::  \
				 : "memory", "cc")

void steps_begin(bool (*at_step)(void))
{
	struct sigaction action = { .sa_sigaction = on_step, .sa_flags = SA_SIGINFO };

	sigaction(SIGTRAP, &action, NULL);
	steps = made_children = 0;
	stepped = getpid();
	call = at_step;
	SET_FLAGS("orq $0x100,");
}

void steps_end(void)
{
	SET_FLAGS("andq $-257,");
	call = NULL;
	if (!in_child && !only)
		dprintf(STDOUT_FILENO, "        %lu instructions, %lu children\n", steps,
			made_children);
}

/* ---- Operations ---- */

char *memory, *shared;
struct rf_handle first_held, second_held, made;
int made_rc;
static struct rf_handle unheld, filling[128];
static size_t filled;
static struct rf_error error;

static void register_one(unsigned int flags)
{
	made_rc = rf_register(memory + 3 * check_page + 5, 4 * check_page, flags, RF_OMIT, &made,
			      &error);
}

void register_held(void)
{
	register_one(RF_HELD);
}

static void register_unheld(void)
{
	register_one(0);
}

void release_one(void)
{
	made_rc = rf_release(first_held, 0);
}

static void release_unheld(void)
{
	made_rc = rf_release(unheld, 0);
}

void prefork(void)
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

void look_at_libraries(void)
{
	struct rf_library library;

	(void)rf_libraries(&library, 1);
}

static void register_and_grow_ranges(void)
{
	register_one(0);
}

static void register_and_grow_slots(void)
{
	register_one(RF_HELD);
}

static void fork_a_child(void)
{
	pid_t child = fork();
	int status = 0;

	CHECK(child >= 0);
	if (!child) {
		if (in_child)
			check_child_works();
		_exit(0);
	}
	/* Once that child is there it is the parent's, and no child's of a later step. */
	CHECK(waitpid(child, &status, 0) == child || (in_child && errno == ECHILD));
	CHECK(status == 0, "step %lu", steps);
}

const struct operation operations[] = {
	{ "register lazily", register_held, RF_MODE_LAZY },
	{ "register in lazy mode, unheld", register_unheld, RF_MODE_LAZY },
	{ "register eagerly", register_held, RF_MODE_EAGER },
	{ "release lazily", release_one, RF_MODE_LAZY },
	{ "release in lazy mode, unheld", release_unheld, RF_MODE_LAZY },
	{ "release eagerly", release_one, RF_MODE_EAGER },
	{ "prefork", prefork, RF_MODE_LAZY },
	{ "fork", fork_a_child, RF_MODE_LAZY },
	{ "list", list, RF_MODE_EAGER },
	{ "list lazily", list, RF_MODE_LAZY },
	{ "register to be wiped", register_wiped, RF_MODE_EAGER },
	{ "look at libraries", look_at_libraries, RF_MODE_EAGER },
	{ "grow the ranges", register_and_grow_ranges, RF_MODE_EAGER },
	{ "grow the slots", register_and_grow_slots, RF_MODE_EAGER },
	{ "grow the slots lazily", register_and_grow_slots, RF_MODE_LAZY },
};
const size_t operations_count = COUNT_OF(operations);

/* Leave a table a page, with something behind it: growing means moving. */
static void leave_a_page(struct rf_memory *table)
{
	char *rest = (char *)table->items + check_page;

	CHECK(mmap(rest, table->mapped - check_page, PROT_NONE,
		   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == rest);
	table->mapped = check_page;
	table->capacity = (uint32_t)(check_page / table->item_size);
}

static void fill_ranges(void)
{
	leave_a_page(&rf_engine.tracker.ranges.leaves);
	rf_engine.tracker.ranges.capacity = 0;
}

static void fill_slots(void)
{
	struct rf_registry *registry = &rf_engine.registry;

	leave_a_page(&registry->slots);
	while (registry->touched < registry->slots.capacity) {
		CHECK(filled < COUNT_OF(filling));
		filling[filled++] = check_register(NULL, 0, RF_HELD);
	}
}

void set_up(enum rf_mode mode, void (*act)(void))
{
	memory = check_map(16);
	shared = check_map_shared(2);
	check_start(mode);
	first_held = check_register(memory + 2 * check_page, 3 * check_page, RF_HELD);
	second_held = check_register(memory + 6 * check_page, 3 * check_page, RF_HELD);
	is_forking = act == fork_a_child;
	if (act == release_unheld)
		unheld = check_register(memory + 10 * check_page, 2 * check_page, 0);
	if (act == register_and_grow_ranges)
		fill_ranges();
	if (act == register_and_grow_slots)
		fill_slots();
}

void tear_down(void)
{
	if (made_rc == 1 && made.serial)
		check_release(made);
	if (rf_handle_state(first_held) == 1)
		check_release(first_held);
	if (rf_handle_state(unheld) == 1)
		check_release(unheld);
	check_release(second_held);
	while (filled)
		check_release(filling[--filled]);
	CHECK(check_marked(memory, 16) == 0);
	check_empty();
}

void check_child_works(void)
{
	struct rf_handle handle, other;
	struct rf_stats stats;
	char *fresh;

	call = NULL;
	/* The operation may have begun and ended here. */
	if (made_rc == 1 && rf_handle_state(made) == 1)
		check_release(made);
	fresh = check_map(4);
	handle = check_register(fresh + check_page, check_page, RF_HELD);
	other = check_register(fresh + 2 * check_page + 7, check_page, 0);
	CHECK(rf_handle_state(handle) == 1, "what the child registered is lost");
	CHECK(rf_handle_state(first_held) == -ECHILD && rf_handle_state(second_held) == -ECHILD);
	CHECK(rf_release(first_held, 0) == -ECHILD && rf_release(second_held, 0) == -ECHILD);
	CHECK(!unheld.serial || rf_release(unheld, 0) == -ECHILD);
	CHECK(!filled || rf_release(filling[filled - 1], 0) == -ECHILD);
	CHECK(!rf_engine.clear_when_left && !rf_window.forks);
	CHECK(!rf_engine.lock.word, "the lock is held");
	CHECK(rf_stats(&stats) == 0 && stats.registrations == 2);
	CHECK(rf_engine.mode == RF_MODE_EAGER || stats.pending, "lazy is not lazy here");
	CHECK(check_child_reads(fresh) && !check_child_reads(fresh + check_page));
	CHECK(check_child_reads(shared));
	look_at_libraries();
	check_release(handle);
	check_release(other);
	CHECK(check_marked(fresh, 4) == 0);
	check_unmap(fresh, 4);
	check_empty();
}

void check_nothing_is_marked(void)
{
	size_t page;

	check_read_smaps();
	for (page = 0; page < 16; page++)
		CHECK(!(check_flags_read(memory + page * check_page) & (CHECK_DC | CHECK_WF)),
		      "page %zu stays marked, step %lu", page, steps);
}

bool is_possible(size_t i)
{
	struct rf_kernel kernel;

	rf_kernel_info(&kernel);
	return operations[i].mode != RF_MODE_LAZY || kernel.copy_trusted;
}

int run_operation(size_t i, void (*run)(size_t))
{
	pid_t child = fork();

	CHECK(child >= 0);
	if (!child) {
		check_alarm(50);
		set_up(operations[i].mode, operations[i].act);
		run(i);
		_exit(0);
	}
	return check_wait(child);
}

void for_each_operation(void (*run)(size_t))
{
	size_t i;

	for (i = 0; i < operations_count; i++) {
		int status = is_possible(i) ? run_operation(i, run) : 0;

		CHECK(status == 0, "%s: %d", operations[i].name, status);
	}
}

#endif
