/* SPDX-License-Identifier: BSD-3-Clause */
#define _GNU_SOURCE
#include "check.h"
#include "fork.h"
#include "preload/ibv.h"
#include "sys.h"
#include "window.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/file.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>

/* Seconds after which a scenario is taken to hang, however busy the machine is. */
#define HANGS 240
#define STATUS_FAILED 99
#define STATUS_SKIPPED 77

size_t check_page = 4096;
static uint64_t seed, state;
static const char *running = "";
static const unsigned char *input, *input_end;

/* One write(), so that lines of several processes stay apart. */
static void say(const char *what, const char *format, va_list arguments)
{
	char text[1024];
	int used = snprintf(text, sizeof(text), "        %s: %s", running, what);

	used += vsnprintf(text + used, sizeof(text) - (size_t)used - 1, format, arguments);
	if (used > (int)sizeof(text) - 2)
		used = sizeof(text) - 2;
	text[used++] = '\n';
	(void)!write(STDERR_FILENO, text, (size_t)used);
}

void check_failed(const char *file, int line, const char *what, const char *format, ...)
{
	char where[256];
	va_list arguments;

	snprintf(where, sizeof(where), "%s:%d: %s:", file, line, what);
	va_start(arguments, format);
	say(where, format, arguments);
	va_end(arguments);
	if (input)
		abort();
	_exit(STATUS_FAILED);
}

void check_skip(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	say("skipped: ", format, arguments);
	va_end(arguments);
	_exit(STATUS_SKIPPED);
}

static unsigned int machine_slowness(void)
{
	const char *text = getenv("RDMAFORK_TEST_SLOWNESS");
	unsigned long slowness = text ? strtoul(text, NULL, 10) : 1;

	return slowness && slowness < 1000 ? (unsigned int)slowness : 1;
}

unsigned int check_slowness(void)
{
	return CHECK_SLOWNESS * machine_slowness();
}

static unsigned int stretched(unsigned int seconds)
{
	return seconds * (CHECK_SLOWNESS > 1 ? 4 : 1) * machine_slowness();
}

void check_await(const bool *flag)
{
	while (!__atomic_load_n(flag, __ATOMIC_SEQ_CST))
		usleep(1000);
}

void check_tell(bool *flag)
{
	__atomic_store_n(flag, true, __ATOMIC_SEQ_CST);
}

void check_alarm(unsigned int seconds)
{
	alarm(stretched(seconds));
}

double check_share(void)
{
	const char *scale = getenv("SCALE");
	double share = scale ? strtod(scale, NULL) : 1;

	return share > 0 ? share : 1;
}

unsigned long check_scale(unsigned long amount)
{
	amount = (unsigned long)((double)amount * check_share() / check_slowness());
	return amount ? amount : 1;
}

void check_seed(void)
{
	const char *text = getenv("SEED");

	if (seed)
		return;
	seed = text ? strtoull(text, NULL, 0) : (uint64_t)time(NULL) * 1000003 + (uint64_t)getpid();
	seed |= !seed;
	state = seed;
	printf("SEED=%llu\n", (unsigned long long)seed);
}

uint64_t check_random(void)
{
	state ^= state >> 12;
	state ^= state << 25;
	state ^= state >> 27;
	return state * 0x2545f4914f6cdd1dull;
}

size_t check_below(size_t limit)
{
	size_t value = 0, most;

	if (!input)
		return (size_t)(check_random() % limit);
	for (most = limit - 1; most && input < input_end; most >>= 8)
		value = value << 8 | *input++;
	return value % limit;
}

void check_play(const void *bytes, size_t nbytes)
{
	input = nbytes ? bytes : (const void *)"";
	input_end = input + nbytes;
	check_page = (size_t)sysconf(_SC_PAGESIZE);
}

bool check_played(void)
{
	return input == input_end;
}

/* ---- The pool of huge pages, which belongs to the whole machine ---- */

#define POOL "/proc/sys/vm/nr_hugepages"
/* The same file in a root or a process namespace of its own, where /tmp and /proc are others. */
#define POOL_LOCK "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"
#define POOL_PAGES 16

static int pool = -1, pool_lock = -1;
static long pool_before;

static long pool_read(void)
{
	char text[32] = "";

	return pread(pool, text, sizeof(text) - 1, 0) > 0 ? atol(text) : -1;
}

static void pool_write(long pages)
{
	char text[32];
	int length = snprintf(text, sizeof(text), "%ld\n", pages);

	(void)!pwrite(pool, text, (size_t)length, 0);
}

/* Other tests of this project may run beside this one: they use the same lock. */
static void pool_take(void)
{
	unsigned int patience = 120 * 20;

	pool = open(POOL, O_RDWR | O_CLOEXEC);
	pool_lock = open(POOL_LOCK, O_RDONLY | O_CLOEXEC);
	while (pool_lock >= 0 && flock(pool_lock, LOCK_EX | LOCK_NB) && patience--)
		usleep(50000);
	if (pool < 0)
		return;
	pool_before = pool_read();
	pool_write(pool_before + POOL_PAGES);
}

static void pool_give_back(void)
{
	if (pool >= 0) {
		pool_write(pool_before);
		close(pool);
	}
	if (pool_lock >= 0)
		close(pool_lock);
	pool = -1;
	pool_lock = -1;
}

char *check_map_huge_any(size_t pages, int sharing)
{
	char *memory = mmap(NULL, pages * CHECK_HUGE, PROT_READ | PROT_WRITE,
			    sharing | MAP_ANONYMOUS | MAP_HUGETLB | (21 << 26 /* MAP_HUGE_2MB */),
			    -1, 0);

	if (memory == MAP_FAILED)
		check_skip("no %zu huge pages: %s", pages, strerror(errno));
	return memory;
}

bool check_marks_stay(void)
{
	return madvise((void *)getauxval(AT_SYSINFO_EHDR), check_page, MADV_DOFORK) != 0;
}

char *check_map_huge(size_t pages, int sharing)
{
	if (check_marks_stay())
		check_skip("this kernel unmarks no huge page");
	return check_map_huge_any(pages, sharing);
}

/* ---- Scenarios ---- */

/* Its end, or SIGALRM if it takes too long: not by a timer of its own, which could hang too. */
static int wait_for(pid_t child, unsigned int seconds)
{
	unsigned long naps = seconds * 1000ul;
	int status;

	for (; naps; naps--) {
		if (waitpid(child, &status, WNOHANG) == child)
			return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
		usleep(1000);
	}
	kill(child, SIGKILL);
	check_wait(child);
	return -SIGALRM;
}

static int run_one(const struct check_scenario *scenario)
{
	pid_t child;
	int status;

	fflush(NULL);
	if (scenario->huge)
		pool_take();
	child = fork();
	CHECK(child >= 0, "%s", strerror(errno));
	if (!child) {
		running = scenario->name;
		setpgid(0, 0);
		state = seed;
		scenario->run();
		_exit(0);
	}
	setpgid(child, child);
	status = wait_for(child, stretched(HANGS));
	/* The children and zombies that it has left. */
	kill(-child, SIGKILL);
	if (scenario->huge)
		pool_give_back();
	return status;
}

int check_run(const struct check_scenario *scenarios, size_t count, int argc, char **argv)
{
	const struct rlimit no_core = { 0, 0 };
	unsigned int failed = 0, ran = 0;
	size_t i;

	check_page = (size_t)sysconf(_SC_PAGESIZE);
	check_seed();
	setrlimit(RLIMIT_CORE, &no_core);
	/* But not RDMAFORK_TRUST_COPYING: with 0 all of them run as on an untrusted kernel. */
	unsetenv("RDMAFORK_MODE");
	unsetenv("RDMAV_FORK_SAFE");
	unsetenv("IBV_FORK_SAFE");
	for (i = 0; i < count; i++) {
		struct timespec from, to;
		int status;

		if (argc > 1 && !strstr(scenarios[i].name, argv[1]))
			continue;
		clock_gettime(CLOCK_MONOTONIC, &from);
		status = run_one(&scenarios[i]);
		clock_gettime(CLOCK_MONOTONIC, &to);
		ran++;
		failed += status && status != STATUS_SKIPPED;
		if (status == STATUS_SKIPPED)
			printf("skip   ");
		else
			printf(status ? "FAILED " : "ok     ");
		printf("%s %.2fs", scenarios[i].name,
		       (double)(to.tv_sec - from.tv_sec) +
			       (double)(to.tv_nsec - from.tv_nsec) / 1e9);
		if (status == -SIGALRM)
			printf(" (hung)");
		else if (status && status != STATUS_SKIPPED)
			printf(" (%d)", status);
		printf("\n");
	}
	if (!ran)
		printf("no such scenario\n");
	return failed || !ran;
}

/* ---- Memory ---- */

static char *map(size_t pages, int sharing)
{
	size_t nbytes = pages * check_page;
	char *memory = mmap(NULL, nbytes + 2 * check_page, PROT_NONE, sharing | MAP_ANONYMOUS, -1,
			    0);

	CHECK(memory != MAP_FAILED, "%s", strerror(errno));
	memory += check_page;
	CHECK(!mprotect(memory, nbytes, PROT_READ | PROT_WRITE), "%s", strerror(errno));
	return memory;
}

char *check_map(size_t pages)
{
	return map(pages, MAP_PRIVATE);
}

char *check_map_shared(size_t pages)
{
	return map(pages, MAP_SHARED);
}

void check_unmap(void *start, size_t pages)
{
	CHECK(!munmap(start, pages * check_page), "%s", strerror(errno));
}

void check_map_over(void *start, size_t pages, int sharing)
{
	CHECK(mmap(start, pages * check_page, PROT_READ | PROT_WRITE,
		   sharing | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == start,
	      "%s", strerror(errno));
}

struct vma {
	uintptr_t start, end;
	unsigned int flags;
};

static struct vma vmas[150000];
static size_t vma_count;

static unsigned int parse_flags(const char *at)
{
	static const struct {
		char name[4];
		unsigned int flag;
	} known[] = {
		{ " dc", CHECK_DC },
		{ " wf", CHECK_WF },
		{ " hg", CHECK_HG },
		{ " sh", CHECK_SHARED },
		{ " ht", CHECK_HUGETLB },
		{ " rd", CHECK_RD },
		{ " wr", CHECK_WR },
		{ " ex", CHECK_EX },
	};
	unsigned int flags = CHECK_MAPPED;
	size_t i;

	for (; *at; at++)
		for (i = 0; i < COUNT_OF(known); i++)
			if (!strncmp(at, known[i].name, 3))
				flags |= known[i].flag;
	return flags;
}

static void parse_line(char *line)
{
	unsigned long start, end;

	if (!strncmp(line, "VmFlags:", 8)) {
		CHECK(vma_count);
		vmas[vma_count - 1].flags = parse_flags(line + 8);
	} else if (((*line >= '0' && *line <= '9') || (*line >= 'a' && *line <= 'f')) &&
		   sscanf(line, "%lx-%lx", &start, &end) == 2) {
		CHECK(vma_count < COUNT_OF(vmas));
		vmas[vma_count].start = start;
		vmas[vma_count].end = end;
		vmas[vma_count++].flags = CHECK_MAPPED;
	}
}

void check_read_smaps(void)
{
	check_read_smaps_to(UINTPTR_MAX);
}

/* Nothing is allocated: that would change the list of mappings. */
void check_read_smaps_to(uintptr_t end)
{
	static char text[1 << 16];
	size_t used = 0, at;
	ssize_t got;
	char *newline;
	int fd = open("/proc/thread-self/smaps", O_RDONLY | O_CLOEXEC);

	CHECK(fd >= 0, "%s", strerror(errno));
	vma_count = 0;
	while ((!vma_count || vmas[vma_count - 1].start < end) &&
	       (got = read(fd, text + used, sizeof(text) - 1 - used)) > 0) {
		used += (size_t)got;
		at = 0;
		while ((newline = memchr(text + at, '\n', used - at))) {
			*newline = '\0';
			parse_line(text + at);
			at = (size_t)(newline - text) + 1;
		}
		memmove(text, text + at, used - at);
		used -= at;
	}
	close(fd);
}

unsigned int check_flags_read(const void *address)
{
	size_t low = 0, high = vma_count, middle;

	while (low < high) {
		middle = low + (high - low) / 2;
		if (vmas[middle].end <= (uintptr_t)address)
			low = middle + 1;
		else
			high = middle;
	}
	return low < vma_count && vmas[low].start <= (uintptr_t)address ? vmas[low].flags : 0;
}

size_t check_vmas_read(void)
{
	return vma_count;
}

unsigned int check_flags(const void *address)
{
	check_read_smaps();
	return check_flags_read(address);
}

size_t check_vmas(void)
{
	check_read_smaps();
	return vma_count;
}

int check_protection(const void *address)
{
	const unsigned int flags = check_flags(address);

	if (!(flags & CHECK_MAPPED))
		return -1;
	return (flags & CHECK_RD ? PROT_READ : 0) | (flags & CHECK_WR ? PROT_WRITE : 0) |
	       (flags & CHECK_EX ? PROT_EXEC : 0);
}

size_t check_marked(const void *start, size_t pages)
{
	size_t i, marked = 0;

	check_read_smaps();
	for (i = 0; i < pages; i++)
		marked += !!(check_flags_read((const char *)start + i * check_page) & CHECK_DC);
	return marked;
}

static char *hoard;
static size_t hoard_bytes;

void check_use_up_vmas(size_t spare)
{
	size_t limit, at;
	struct rf_kernel kernel;

	if (CHECK_TSAN)
		check_skip("ThreadSanitizer needs VMAs of its own");
	rf_kernel_info(&kernel);
	limit = kernel.max_map_count;
	if (limit > 200000)
		check_skip("vm.max_map_count is %zu", limit);
	hoard_bytes = (limit + 16) * check_page;
	hoard = mmap(NULL, hoard_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
		     -1, 0);
	CHECK(hoard != MAP_FAILED);
	/* Every second page differs; the first refusal says that the limit is reached. */
	for (at = 1; !mprotect(hoard + at * check_page, check_page, PROT_READ); at += 2)
		;
	CHECK(at > 3 && errno == ENOMEM, "%s", strerror(errno));
	/* Give some back, from the end: two for each page. */
	for (at -= 2; spare >= 2; spare -= 2, at -= 2)
		CHECK(!mprotect(hoard + at * check_page, check_page, PROT_NONE));
}

void check_give_back_vmas(void)
{
	CHECK(!munmap(hoard, hoard_bytes));
}

static void install_filter(struct sock_filter *filters, unsigned short count)
{
	const struct sock_fprog program = { count, filters };

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
	    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		check_skip("no seccomp filter: %s", strerror(errno));
}

void check_refuse(unsigned int call, int error)
{
	struct sock_filter filters[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned int)error),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};

	install_filter(filters, COUNT_OF(filters));
}

void check_refuse_advice(int advice, int error)
{
	struct sock_filter filters[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 0, 3),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned int)advice, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned int)error),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};

	install_filter(filters, COUNT_OF(filters));
}

/* ---- The engine ---- */

void check_start(enum rf_mode mode)
{
	struct rf_error error;
	int rc = rf_fork_init(mode, &error);

	CHECK(rc == 0, "rf_fork_init: %d, cause %d", rc, error.cause);
}

void check_distrust_copying(void)
{
	setenv("RDMAFORK_TRUST_COPYING", "0", 1);
}

void check_start_untrusted(void)
{
	check_distrust_copying();
	check_start(RF_MODE_EAGER);
}

void check_stop(void)
{
	check_empty();
	rf_clear(false);
	rf_engine.mode = RF_MODE_NONE;
	rf_engine.mode_inherited = false;
	rf_engine.environment_read = false;
}

void check_needs_lazy(void)
{
	struct rf_kernel kernel;

	rf_kernel_info(&kernel);
	if (!kernel.copy_trusted)
		check_skip("copying at fork is not trusted on %s", kernel.release);
}

void check_needs_inaccessible_bytes(void)
{
	char byte, *page = check_map(1);
	struct iovec to = { &byte, 1 }, from = { page, 1 };

	CHECK(mprotect(page, check_page, PROT_NONE) == 0);
	if (rf_sys_copy_inaccessible(&to, &from, 1) < 0)
		check_skip("the kernel gives nobody the bytes of inaccessible memory");
	check_unmap(page, 1);
}

enum rf_mode check_best_mode(void)
{
	struct rf_kernel kernel;

	rf_kernel_info(&kernel);
	return kernel.copy_trusted ? RF_MODE_LAZY : RF_MODE_EAGER;
}

static struct rf_handle register_with(const void *start, size_t nbytes, unsigned int flags,
				      enum rf_policy policy)
{
	struct rf_handle handle;
	struct rf_error error;
	int rc = rf_register(start, nbytes, flags, policy, &handle, &error);

	CHECK(rc == 1, "rf_register(%p, %zu): %d, cause %d", start, nbytes, rc, error.cause);
	return handle;
}

struct rf_handle check_register(const void *start, size_t nbytes, unsigned int flags)
{
	return register_with(start, nbytes, flags, RF_OMIT);
}

struct rf_handle check_register_as(const void *start, size_t nbytes, enum rf_policy policy)
{
	return register_with(start, nbytes, RF_HELD, policy);
}

void check_release(struct rf_handle handle)
{
	int rc = rf_release(handle, 0);

	CHECK(rc == 0, "rf_release: %d", rc);
}

void *check_register_until(void *stop)
{
	char *memory = check_map(8);
	struct rf_handle handles[4];
	size_t i;

	while (!__atomic_load_n((bool *)stop, __ATOMIC_RELAXED)) {
		for (i = 0; i < 4; i++)
			handles[i] = check_register(memory + i * check_page + 7 * (i & 1),
						    3 * check_page, i & 2 ? RF_HELD : 0);
		for (i = 0; i < 4; i++)
			check_release(handles[i]);
	}
	check_unmap(memory, 8);
	return NULL;
}

void check_sound(void)
{
	rf_ranges_check(&rf_engine.tracker.ranges);
	rf_registry_check(&rf_engine.registry);
	rf_ibv_check();
	CHECK(!rf_engine.tracker.reader.depth, "a round of questions was left open");
}

void check_empty(void)
{
	struct rf_range_info info;
	struct rf_stats stats;

	check_sound();
	CHECK(rf_stats(&stats) == 0);
	CHECK(!stats.registrations, "%lu", (unsigned long)stats.registrations);
	CHECK(!stats.pending, "%lu", (unsigned long)stats.pending);
	CHECK(!stats.still_marked_bytes, "%lu", (unsigned long)stats.still_marked_bytes);
	CHECK(!stats.ranges, "%lu", (unsigned long)stats.ranges);
	CHECK(!stats.ibv_ranges, "%lu", (unsigned long)stats.ibv_ranges);
	CHECK(!stats.marked_ranges && !stats.marked_bytes && !stats.vmas);
	CHECK(!stats.unmarked_ranges && !stats.unmarked_bytes);
	CHECK(!rf_engine.tracker.partial_bytes);
	CHECK(rf_list(&info, 1) == 0);
}

int check_wait(pid_t child)
{
	int status;

	while (waitpid(child, &status, 0) < 0)
		CHECK(errno == EINTR, "waitpid: %s", strerror(errno));
	return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

void check_fork(void)
{
	pid_t child = fork();

	CHECK(child >= 0, "fork: %s", strerror(errno));
	if (!child)
		_exit(0);
	CHECK(check_wait(child) == 0);
}

pid_t check_clone(void)
{
	return (pid_t)syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL);
}

bool check_child_reads(const void *address)
{
	pid_t child = fork();
	int status;

	CHECK(child >= 0, "fork: %s", strerror(errno));
	if (!child) {
		/* The sanitizers' own handler is loud. */
		signal(SIGSEGV, SIG_DFL);
		signal(SIGBUS, SIG_DFL);
		(void)*(const volatile char *)address;
		_exit(0);
	}
	status = check_wait(child);
	CHECK(status == 0 || status == -SIGSEGV, "%d", status);
	return status == 0;
}

int check_child_finds(const void *address)
{
	unsigned char byte = 0;
	int ends[2];
	ssize_t got;
	pid_t child;

	CHECK(pipe(ends) == 0);
	child = fork();
	CHECK(child >= 0, "fork: %s", strerror(errno));
	/* The kernel does not write to the pipe from memory that the process cannot read. */
	if (!child)
		_exit(write(ends[1], address, 1) != 1);
	check_wait(child);
	close(ends[1]);
	got = read(ends[0], &byte, 1);
	close(ends[0]);
	return got == 1 ? byte : -1;
}

bool check_is_readable(const void *address)
{
	char byte;
	struct iovec to = { &byte, 1 }, from = { (void *)(uintptr_t)address, 1 };

	return rf_sys_copy(&to, &from, 1) == 1;
}

void check_works(void)
{
	struct rf_handle held, unheld;
	char *memory = check_map(4);

	/* A fork while rf_leave() unlocked leaves the clearing to the next caller. */
	CHECK(rf_handle_state((struct rf_handle){ 0 }) == -ESTALE);
	CHECK(!rf_window.forks && !rf_engine.lock.word && !rf_engine.clear_when_left);
	held = check_register(memory, check_page, RF_HELD);
	unheld = check_register(memory + 2 * check_page, check_page, 0);
	CHECK(!check_child_reads(memory));
	CHECK(check_marked(memory, 4) == 2);
	check_release(held);
	check_release(unheld);
	CHECK(check_marked(memory, 4) == 0);
	check_empty();
	check_unmap(memory, 4);
}

void check_inherited(struct rf_handle handle)
{
	CHECK(rf_handle_state(handle) == -ECHILD, "%d", rf_handle_state(handle));
	CHECK(rf_release(handle, 0) == -ECHILD);
	CHECK(rf_release(handle, RF_NOWAIT) == -ECHILD);
}
