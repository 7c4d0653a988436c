/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A fork at every instruction of the engine.
 *
 *	step VARIANT OPERATION MODE
 *
 * The trap flag stops the operation after each of its instructions. At the n-th
 * one in librdmafork's text, for every n, the process is forked:
 *
 *	signal	by fork() in the signal handler
 *	clone	by a raw clone() there, which runs no fork handler
 *	window	by another thread, whose fork handlers of ours are over by then
 *	thread	by a raw clone() in another thread
 *
 * In the child what is interrupted goes on where its thread lives on. Then all
 * must be as in any child: nothing of the parent's, registrations that protect.
 * Prints how often it has forked.
 */
#define _GNU_SOURCE
#include <rdmafork.h>

#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#define PAGE 4096ul
#define TRAP 0x100ul

enum variant {
	SIGNAL,
	CLONE,
	WINDOW,
	THREAD
};
enum operation {
	REGISTER,
	RELEASE,
	UNHELD,
	DROP,
	GROW,
	LIST,
	FORK
};

static const char *const variants[] = { "signal", "clone", "window", "thread", NULL };
static const char *const operations[] = { "register", "release", "unheld", "drop", "grow",
					  "list", "fork", NULL };

static enum variant variant;
static enum operation operation;
static uintptr_t text_start, text_end;
static pid_t parent;
static long seen, stop_at;
static const char *failed;
static char *memory; /* the operation's */
static char own[3 * PAGE] __attribute__((aligned(4096)));
static struct rf_handle *parents; /* registrations */
static unsigned int parents_count;
static enum rf_mode mode;
static struct rf_handle held, unheld;

#define CHECK(x)                                   \
	do {                                       \
		if (!(x))                          \
			return fail(#x, __LINE__); \
	} while (0)

static int fail(const char *what, int line)
{
	if (!failed)
		dprintf(2, "%s %s, %s, instruction %ld: line %d: %s\n", variants[variant],
			operations[operation], getpid() == parent ? "parent" : "child", stop_at,
			line, what);
	failed = what;
	return 1;
}

static char *map(size_t npages)
{
	char *at = mmap(NULL, npages * PAGE, PROT_READ | PROT_WRITE,
			MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (at == MAP_FAILED)
		abort();
	memset(at, 1, npages * PAGE);
	return at;
}

static int is_absent(const char *at)
{
	int ends[2], absent;

	CHECK(pipe(ends) == 0);
	/* The kernel reads it, and says where there is nothing to read. */
	absent = write(ends[1], at, 1) < 0 && errno == EFAULT;
	close(ends[0]);
	close(ends[1]);
	return absent;
}

/* Is what is registered here kept from a child of fork(), and ours alone? */
static int check_engine(unsigned int others)
{
	char *at = map(5);
	struct rf_handle handle;
	struct rf_error error;
	struct rf_stats stats;
	int status, rc;
	pid_t pid;

	rc = rf_register(at + PAGE, 3 * PAGE, RF_HELD, RF_OMIT, &handle, &error);
	CHECK(rc == 1);
	CHECK(rf_handle_state(handle) == 1);
	CHECK(rf_stats(&stats) == 0 && stats.registrations == others + 1);
	pid = fork();
	CHECK(pid >= 0);
	if (!pid)
		_exit(is_absent(at + PAGE) && is_absent(at + 3 * PAGE) && !is_absent(at) &&
				      rf_release(handle, 0) == -ECHILD
			      ? 0
			      : 9);
	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
	CHECK(rf_release(handle, 0) == 0);
	CHECK(rf_handle_state(handle) == -ESTALE);
	CHECK(rf_stats(&stats) == 0 && stats.registrations == others);
	CHECK(stats.still_marked_bytes == 0);
	CHECK(others || stats.marked_bytes == 0);
	/* Lazy is lazy again. */
	rc = rf_register(at + PAGE, 3 * PAGE, RF_HELD, RF_OMIT, &handle, &error);
	CHECK(rc == 1);
	CHECK(rf_stats(&stats) == 0);
	CHECK(mode == RF_MODE_EAGER || stats.pending > 0);
	CHECK(rf_release(handle, 0) == 0);
	munmap(at, 5 * PAGE);
	return 0;
}

static int check_child(void)
{
	struct rf_handle first;
	struct rf_error error;
	unsigned int i;

	/* Whatever comes first: it must not be lost as the parent's are. */
	CHECK(rf_register(own + PAGE, PAGE, RF_HELD, RF_OMIT, &first, &error) == 1);
	CHECK(rf_handle_state(first) == 1);
	CHECK(rf_release(first, 0) == 0);
	CHECK(rf_generation() != 1);
	/* If it was interrupted early enough it is the child's own. */
	rf_release(held, 0);
	rf_release(unheld, 0);
	for (i = 0; i < parents_count; i++)
		CHECK(rf_release(parents[i], 0) == -ECHILD || !parents[i].serial);
	return check_engine(0) || check_engine(0);
}

static void finish_child(void)
{
	alarm(20);
	_exit(check_child());
}

static void wait_for(pid_t pid)
{
	int status;

	if (pid < 0 || waitpid(pid, &status, 0) != pid)
		fail("fork", __LINE__);
	else if (WIFSIGNALED(status))
		fail(strsignal(WTERMSIG(status)), __LINE__);
	else if (status)
		failed = "in the child";
}

static pid_t raw_clone(void)
{
	return (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
}

/* ---- the other thread: 0 idle, 1 asked to fork, 3 in the window ---------------------- */

static int forker_state;
static int stopped; /* the stepped thread stands still inside the engine */

static void set(int *word, int value)
{
	__atomic_store_n(word, value, __ATOMIC_SEQ_CST);
	syscall(SYS_futex, word, 1 /* FUTEX_WAKE */, 99, NULL, NULL, 0);
}

static void await(int *word, int value)
{
	int now;

	while ((now = __atomic_load_n(word, __ATOMIC_SEQ_CST)) != value)
		syscall(SYS_futex, word, 0 /* FUTEX_WAIT */, now, NULL, NULL, 0);
}

/* Runs after the engine's prepare handler, as it is installed before that. */
static void late_prepare(void)
{
	if (variant != WINDOW || getpid() != parent ||
	    __atomic_load_n(&forker_state, __ATOMIC_SEQ_CST) != 1)
		return;
	set(&forker_state, 3); /* the window is open: step */
	await(&stopped, 1);
}

static void preinit(void)
{
	pthread_atfork(late_prepare, NULL, NULL);
}

__attribute__((section(".preinit_array"), used)) static void (*install)(void) = preinit;

static void *forker(void *unused)
{
	pid_t pid;

	for (;;) {
		await(&forker_state, 1);
		pid = variant == WINDOW ? fork() : raw_clone();
		if (!pid)
			finish_child();
		wait_for(pid);
		set(&forker_state, 0);
	}
	return unused;
}

/* ---- stepping ------------------------------------------------------------------------- */

/* Where all signals are about to be blocked (fork() of glibc 2.43): a blocked trap kills. */
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

static void on_trap(int signal, siginfo_t *info, void *data)
{
	greg_t *registers = ((ucontext_t *)data)->uc_mcontext.gregs;
	uintptr_t at = (uintptr_t)registers[REG_RIP];
	pid_t pid = 0;

	(void)signal, (void)info;
	keep_traps(registers);
	if (at < text_start || at >= text_end || seen++ != stop_at)
		return;
	registers[REG_EFL] &= ~(greg_t)TRAP;
	if (getpid() != parent)
		return;
	switch (variant) {
	case SIGNAL:
		pid = fork();
		break;
	case CLONE:
		pid = raw_clone();
		break;
	case THREAD:
		set(&forker_state, 1);
		/* fallthrough */
	case WINDOW:
		set(&stopped, 1);
		await(&forker_state, 0);
		return;
	}
	if (pid)
		wait_for(pid);
}

static struct rf_range_info infos[16];

static void before(void)
{
	struct rf_error error;
	int rc = 1;

	if (operation == RELEASE || operation == FORK)
		rc = rf_register(memory + PAGE, 2 * PAGE, RF_HELD, RF_OMIT, &held, &error);
	if (operation == DROP)
		rc = rf_register(memory + PAGE, 2 * PAGE, 0, RF_OMIT, &unheld, &error);
	if (operation == LIST)
		rc = rf_register(memory + 100, 2 * PAGE, RF_HELD, RF_OMIT, &held, &error);
	if (rc != 1)
		fail("before", __LINE__);
}

static void operate(void)
{
	struct rf_error error;
	pid_t pid;

	switch (operation) {
	case REGISTER:
	case GROW:
		rf_register(memory + PAGE, 2 * PAGE, RF_HELD, RF_OMIT, &held, &error);
		break;
	case UNHELD:
		rf_register(memory + PAGE, 2 * PAGE, 0, RF_OMIT, &unheld, &error);
		break;
	case RELEASE:
		rf_release(held, 0);
		break;
	case DROP:
		rf_release(unheld, 0);
		break;
	case LIST:
		rf_list(infos, 16);
		break;
	case FORK:
		pid = fork();
		if (!pid && getppid() == parent)
			_exit(0);
		if (pid > 0)
			waitpid(pid, NULL, 0);
		break;
	}
}

static void after(void)
{
	if (operation == REGISTER || operation == GROW || operation == LIST ||
	    operation == FORK)
		rf_release(held, 0);
	if (operation == UNHELD)
		rf_release(unheld, 0);
}

/* Operate, with a fork at the engine's @n-th instruction. False: it has not so many. */
static int step(long n)
{
	seen = 0;
	stop_at = n;
	set(&stopped, 0);
	before();
	if (variant == WINDOW) {
		set(&forker_state, 1);
		await(&forker_state, 3);
	}
	__builtin_ia32_writeeflags_u64(__builtin_ia32_readeflags_u64() | TRAP);
	operate();
	__builtin_ia32_writeeflags_u64(__builtin_ia32_readeflags_u64() & ~TRAP);
	if (getpid() != parent)
		finish_child();
	after();
	if (variant == WINDOW && !stopped) {
		set(&stopped, 1);
		await(&forker_state, 0);
	}
	return n >= 0 && seen > n;
}

/* ---- around it ------------------------------------------------------------------------ */

static int find_text(struct dl_phdr_info *object, size_t size, void *data)
{
	int i;

	(void)size, (void)data;
	if (!strstr(object->dlpi_name, "librdmafork.so"))
		return 0;
	for (i = 0; i < object->dlpi_phnum; i++) {
		if (object->dlpi_phdr[i].p_type == PT_LOAD && object->dlpi_phdr[i].p_flags & PF_X) {
			text_start = object->dlpi_addr + object->dlpi_phdr[i].p_vaddr;
			text_end = text_start + object->dlpi_phdr[i].p_memsz;
		}
	}
	return 1;
}

static int find(const char *const *names, const char *name)
{
	int i;

	for (i = 0; names[i]; i++)
		if (!strcmp(names[i], name))
			return i;
	fprintf(stderr, "unknown: %s\n", name);
	exit(2);
}

/* The parent has a few registrations, some of them marked by a fork. */
static void furnish(unsigned int count)
{
	struct rf_error error;
	unsigned int i;
	char *at = map(2 * (count + 1));
	int rc;

	parents = (struct rf_handle *)map(count * sizeof(*parents) / PAGE + 1);
	for (i = 0; i < count; i++) {
		rc = rf_register(at + 2 * i * PAGE, PAGE + 10, RF_HELD, RF_OMIT, &parents[i],
				 &error);
		if (rc != 1)
			abort();
	}
	parents_count = count;
}

/* The engine's: its tables always move as they grow. */
static int moves;

void *mremap(void *old, size_t old_nbytes, size_t nbytes, int flags, ...)
{
	void *to = mmap(NULL, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	moves++;
	return (void *)syscall(SYS_mremap, old, old_nbytes, nbytes, flags | MREMAP_FIXED, to);
}

/* Register until a table moves: how many that took, @count at most. */
static long fill(long count)
{
	struct rf_handle handle;
	struct rf_error error;
	long i = 0;

	for (moves = 0; i != count && !moves; i++)
		rf_register(NULL, 0, RF_HELD, RF_OMIT, &handle, &error);
	return i;
}

/* The tables are full: at the engine's @n-th instruction from here on they move. */
static int grow_once(long count, long n)
{
	fill(count - 1);
	if (!step(n))
		return 1;
	if (moves != 1)
		fail("no table has moved", __LINE__);
	return failed ? 3 : 0;
}

/* Every n in a process of its own. */
static int grow(char **argv)
{
	char count[24], at[24];
	char *arguments[] = { argv[0], argv[1], argv[2], argv[3], argv[4], count, at, NULL };
	long n, stride = 1 + 400 / atol(argv[4]), forks = 0;
	int status = 0;
	pid_t pid;

	snprintf(count, sizeof(count), "%ld", fill(-1));
	for (n = 0; !status && n < 400; n += stride) {
		snprintf(at, sizeof(at), "%ld", n);
		pid = fork();
		if (!pid) {
			execv("/proc/self/exe", arguments);
			_exit(127);
		}
		waitpid(pid, &status, 0);
		forks++;
	}
	printf("%ld, every %ld\n", forks - 1, stride);
	return status != 0 && status != 1 << 8;
}

int main(int argc, char **argv)
{
	struct sigaction action = { .sa_sigaction = on_trap, .sa_flags = SA_SIGINFO };
	struct rf_error error;
	struct rf_stats stats;
	pthread_t thread;
	long n, stride, forks = 0;

	if (argc < 5)
		return 2;
	alarm(100);
	variant = (enum variant)find(variants, argv[1]);
	operation = (enum operation)find(operations, argv[2]);
	mode = strcmp(argv[3], "lazy") ? RF_MODE_EAGER : RF_MODE_LAZY;
	parent = getpid();
	memory = map(4);
	dl_iterate_phdr(find_text, NULL);
	sigaction(SIGTRAP, &action, NULL);
	if (rf_fork_init(mode, &error) < 0)
		return 3;
	furnish(3);
	if (variant == WINDOW || variant == THREAD)
		pthread_create(&thread, NULL, forker, NULL);
	if (operation == GROW)
		return argc == 7 ? grow_once(atol(argv[5]), atol(argv[6])) : grow(argv);
	step(-1);
	step(-1);
	stride = 1 + seen / atol(argv[4]);
	for (n = 0; !failed && step(n); n += stride)
		forks++;
	if (!failed) {
		if (rf_stats(&stats) < 0 || stats.registrations != 3)
			fail("stats", __LINE__);
		check_engine(3);
	}
	printf("%ld, every %ld\n", forks, stride);
	return failed != NULL;
}
