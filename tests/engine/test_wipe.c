/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * on_fork="wipe" where the kernel has little to give: limits of memory, holes that another
 * library's child handler has filled, memory whose page faults a process serves.
 */
#define _GNU_SOURCE
#include "check.h"
#include "sys.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

static char said[4096];

/* A private file, this program, whose first byte is 0x7f. */
static char *map_file(size_t pages, int protection)
{
	char *memory = check_map(pages + 2);
	int fd = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);

	CHECK(mmap(memory + check_page, pages * check_page, protection, MAP_PRIVATE | MAP_FIXED, fd,
		   0) != MAP_FAILED);
	close(fd);
	return memory + check_page;
}

/*
 * What a child finds at each of @addresses: a byte, or -1. Its stderr is in @said. False: fork()
 * is refused.
 */
static bool try_children_find(char *const *addresses, int *found, size_t count)
{
	int bytes[2], errors[2], before = dup(2);
	ssize_t nbytes;
	size_t i;
	pid_t pid;

	CHECK(pipe2(bytes, O_NONBLOCK) == 0 && pipe2(errors, O_NONBLOCK) == 0);
	CHECK(dup2(errors[1], 2) == 2);
	pid = fork();
	CHECK(dup2(before, 2) == 2);
	if (!pid) {
		/* Memory that the process cannot read is not written to the pipe. */
		for (i = 0; i < count; i++)
			if (write(bytes[1], addresses[i], 1) == 1)
				CHECK(write(bytes[1], &i, sizeof(i)) == sizeof(i));
		_exit(0);
	}
	CHECK(pid < 0 || check_wait(pid) == 0);
	for (i = 0; i < count; i++)
		found[i] = -1;
	for (;;) {
		char byte;

		if (read(bytes[0], &byte, 1) != 1)
			break;
		CHECK(read(bytes[0], &i, sizeof(i)) == sizeof(i) && i < count);
		found[i] = (unsigned char)byte;
	}
	nbytes = read(errors[0], said, sizeof(said) - 1);
	said[nbytes < 0 ? 0 : nbytes] = '\0';
	close(bytes[0]);
	close(bytes[1]);
	close(errors[0]);
	close(errors[1]);
	close(before);
	return pid >= 0;
}

static void children_find(char *const *addresses, int *found, size_t count)
{
	CHECK(try_children_find(addresses, found, count), "%s", strerror(errno));
}

static int child_finds(char *address)
{
	int found;

	children_find(&address, &found, 1);
	return found;
}

/* The child was told of [@start, @start + @pages) that could not be mapped for it, for @why. */
static void check_said(const char *start, size_t pages, int why)
{
	char line[256];

	snprintf(line, sizeof(line), " %p-%p: ", (const void *)start,
		 (const void *)(start + pages * check_page));
	CHECK(strstr(said, line) && strstr(said, why == EEXIST ? "mapped there" : "refuse"),
	      "'%s' has no '%s'", said, line);
	CHECK(!strchr(strchr(said, '\n') + 1, '\n'), "%s", said);
}

/* ---- Registrations ---- */

static void check_child_has(const char *address, int protection)
{
	pid_t pid = fork();

	if (!pid)
		_exit(check_protection(address) != protection ||
		      check_flags(address) & CHECK_SHARED);
	CHECK(check_wait(pid) == 0, "%d", protection);
}

static void protections_are_kept(void)
{
	static const int all[] = { PROT_READ, PROT_READ | PROT_WRITE, PROT_READ | PROT_EXEC,
				   PROT_NONE };
	char *huge = check_map_huge(COUNT_OF(all), MAP_PRIVATE);
	char *file = map_file(COUNT_OF(all), PROT_READ);
	char *memory = check_map(COUNT_OF(all));
	struct rf_handle handles[3];
	size_t i;

	check_start(check_best_mode());
	handles[0] = check_register_as(huge, COUNT_OF(all) * CHECK_HUGE, RF_WIPE);
	handles[1] = check_register_as(file, COUNT_OF(all) * check_page, RF_WIPE);
	handles[2] = check_register_as(memory, COUNT_OF(all) * check_page, RF_WIPE);
	for (i = 0; i < COUNT_OF(all); i++) {
		CHECK(!mprotect(huge + i * CHECK_HUGE, CHECK_HUGE, all[i]));
		CHECK(!mprotect(file + i * check_page, check_page, all[i]));
		CHECK(!mprotect(memory + i * check_page, check_page, all[i]));
	}
	for (i = 0; i < COUNT_OF(all); i++) {
		check_child_has(huge + i * CHECK_HUGE, all[i]);
		check_child_has(file + i * check_page, all[i]);
		check_child_has(memory + i * check_page, all[i]);
	}
	for (i = 0; i < COUNT_OF(handles); i++)
		check_release(handles[i]);
	check_empty();
}

/* As a kernel refuses that is to let nothing writable be executed (PR_SET_MDWE). */
static void a_copy_that_stays_writable_is_told(void)
{
	char *memory = check_map(4), *at = memory + check_page;
	struct rf_handle handle;

	check_start_untrusted();
	memset(memory, 7, 4 * check_page);
	handle = check_register_as(at + 100, check_page, RF_WIPE);
	CHECK(!mprotect(at, 2 * check_page, PROT_READ | PROT_EXEC));
	CHECK(child_finds(at) == 7 && !said[0], "%s", said);
	check_refuse(SYS_mprotect, EACCES);
	CHECK(child_finds(at) == 7);
	check_said(at, 2, EACCES);
	CHECK(strstr(said, " cannot protect its copy of "), "%s", said);
	CHECK(strstr(said, "can write to these pages"), "%s", said);
	check_child_has(at, PROT_READ | PROT_WRITE);
	check_release(handle);
	check_empty();
}

/* ---- Limits ---- */

/* The number that a line of /proc gives in KiB. */
static unsigned long proc_kib(const char *path, const char *format)
{
	FILE *file = fopen(path, "re");
	unsigned long kib = 0;
	char line[256];

	CHECK(file, "%s: %s", path, strerror(errno));
	while (fgets(line, sizeof(line), file))
		if (sscanf(line, format, &kib) == 1)
			break;
	fclose(file);
	return kib;
}

/* All that is counted against RLIMIT_DATA. */
static unsigned long data_bytes(void)
{
	return proc_kib("/proc/self/status", "VmData: %lu kB") << 10;
}

static void set_data_limit(unsigned long nbytes)
{
	const struct rlimit limit = { nbytes, RLIM_INFINITY };

	CHECK(!setrlimit(RLIMIT_DATA, &limit));
}

#define FILE_PAGES 64

static char *limited[4]; /* base pages, a file, a huge page, and a part of another one */
static struct rf_handle limited_handles[3];

static void register_limited(void)
{
	char *huge = check_map_huge(2, MAP_PRIVATE);

	limited[0] = check_map(FILE_PAGES);
	limited[1] = map_file(FILE_PAGES, PROT_READ | PROT_WRITE);
	limited[2] = huge;
	limited[3] = huge + CHECK_HUGE + 100;
	check_start(check_best_mode());
	memset(limited[0], 7, FILE_PAGES * check_page);
	memset(huge, 7, 2 * CHECK_HUGE);
	limited_handles[0] = check_register_as(limited[0], FILE_PAGES * check_page, RF_WIPE);
	limited_handles[1] = check_register_as(limited[1], FILE_PAGES * check_page, RF_WIPE);
	limited_handles[2] = check_register_as(huge, CHECK_HUGE + 50, RF_WIPE);
}

static void release_limited(void)
{
	size_t i;

	for (i = 0; i < COUNT_OF(limited_handles); i++)
		check_release(limited_handles[i]);
	check_empty();
}

/* A child's new mapping takes the room of the memory it lacks. */
static void zeros_fit_in_the_data_limit(void)
{
	int found[4];
	int round;

	if (CHECK_SLOWNESS > 1)
		check_skip("sanitizers need memory of their own");
	register_limited();
	/* The lists are made once; then nothing more is to be had. */
	check_fork();
	set_data_limit(data_bytes());
	CHECK(mmap(NULL, check_page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) ==
	      MAP_FAILED);
	for (round = 0; round < 3; round++) {
		children_find(limited, found, 4);
		CHECK(found[0] == 0 && found[1] == 0 && found[2] == 0 && found[3] == 7,
		      "%d %d %d %d", found[0], found[1], found[2], found[3]);
		CHECK(!said[0], "%s", said);
	}
	set_data_limit(RLIM_INFINITY);
	release_limited();
}

/* A limit lowered below the use: memory the kernel wipes is there, the rest is told. */
static void beyond_the_data_limit_pages_are_absent_and_told(void)
{
	int found[4];
	pid_t pid;

	if (CHECK_SLOWNESS > 1)
		check_skip("sanitizers need memory of their own");
	register_limited();
	check_fork();
	set_data_limit(check_page);
	children_find(limited, found, 4);
	CHECK(found[0] == 0 && found[1] == -1 && found[2] == -1 && found[3] == -1, "%d %d %d %d",
	      found[0], found[1], found[2], found[3]);
	/* The lowest of them. */
	CHECK(strstr(said, " cannot get its zeros at 0x") && strstr(said, "refuse"), "%s", said);
	/* They are reserved, as absent pages are: nothing else lands there. */
	pid = fork();
	if (!pid) {
		CHECK(mmap(limited[1], check_page, PROT_READ,
			   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1,
			   0) == MAP_FAILED);
		CHECK(errno == EEXIST, "%s", strerror(errno));
		_exit(0);
	}
	CHECK(check_wait(pid) == 0);
	set_data_limit(RLIM_INFINITY);
	release_limited();
}

/* Without a reservation the kernel grants more than there is. */
static void memory_without_reservation_is_wiped(void)
{
	const size_t nbytes = (size_t)64 << 30;
	char *memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	char file[] = "/tmp/test_wipe.XXXXXX", *places[4];
	int found[4], fd = mkstemp(file);
	struct rf_handle handles[2];
	size_t i;

	CHECK(fd >= 0 && !unlink(file));
	if (memory == MAP_FAILED || ftruncate(fd, (off_t)nbytes))
		check_skip("64 GiB without a reservation: %s", strerror(errno));
	places[0] = memory + nbytes / 2;
	places[1] = memory + nbytes - 1;
	places[2] = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0);
	CHECK(places[2] != MAP_FAILED);
	places[3] = places[2] + nbytes - 1;
	check_start(check_best_mode());
	for (i = 0; i < 4; i++)
		*places[i] = 7;
	handles[0] = check_register_as(memory, nbytes, RF_WIPE);
	handles[1] = check_register_as(places[2], nbytes, RF_WIPE);
	children_find(places, found, 4);
	for (i = 0; i < 4; i++)
		CHECK(found[i] == 0 && *places[i] == 7, "%zu: %d", i, found[i]);
	CHECK(!said[0], "%s", said);
	check_release(handles[0]);
	check_release(handles[1]);
	check_empty();
}

static void put_number(const char *path, unsigned long number)
{
	char text[24];
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	ssize_t nbytes = snprintf(text, sizeof(text), "%lu", number);

	CHECK(fd >= 0 && write(fd, text, (size_t)nbytes) == nbytes, "%s: %s", path,
	      strerror(errno));
	close(fd);
}

static unsigned long committed_kib(void)
{
	return proc_kib("/proc/meminfo", "Committed_AS: %lu kB");
}

#define OVERCOMMIT "/proc/sys/vm/overcommit_"

/*
 * The kernel commits no more than it is allowed. It refuses fork(), and nothing has changed; or a
 * child's zeros, which is told; or nothing.
 */
static void memory_is_wiped_where_nothing_is_overcommitted(void)
{
	unsigned long kib, refused = 0, absent = 0, zeros = 0, more;
	int found[4];

	if (!getenv("RDMAFORK_TEST_GUEST"))
		check_skip("vm.overcommit_memory is that of the whole machine: in a VM alone");
	register_limited();
	check_fork();
	kib = committed_kib();
	put_number(OVERCOMMIT "kbytes", 1);
	put_number(OVERCOMMIT "memory", 2);
	for (more = 0; more < 64 << 10 && zeros < 3; more += 128) {
		if (!try_children_find(limited, found, 4)) {
			refused++;
		} else if (found[1] == 0 && found[2] == 0 && found[3] == 7) {
			CHECK(found[0] == 0 && !said[0], "%d %s", found[0], said);
			zeros++;
		} else {
			CHECK(found[0] == 0, "%d", found[0]);
			CHECK(found[1] <= 0 && found[2] <= 0, "%d %d", found[1], found[2]);
			CHECK(strstr(said, "refuse"), "%s", said);
			absent++;
		}
		put_number(OVERCOMMIT "kbytes", kib + more);
	}
	put_number(OVERCOMMIT "memory", 0);
	printf("refused %lu times, absent %lu times\n", refused, absent);
	CHECK(refused && zeros == 3, "%lu %lu", refused, zeros);
	check_sound();
	CHECK(child_finds(limited[1]) == 0);
	release_limited();
}

/* ---- A library that was loaded earlier: its child handler is run before ours ---- */

static char *occupied;		/* its mapping in the child */
static size_t occupied_pages[2];	/* the first of them, and one more */

static void map_in_child(void)
{
	size_t i;
	char *memory;

	for (i = 0; occupied && i < 2; i++) {
		char *at = occupied + occupied_pages[i] * check_page;

		if (i && !occupied_pages[i])
			break;
		/* Not by force: the addresses are free there. */
		memory = mmap(at, check_page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
			      -1, 0);
		if (memory != at)
			_exit(99);
		*memory = 9;
	}
}

__attribute__((constructor(101))) static void install_before(void)
{
	pthread_atfork(NULL, NULL, map_in_child);
}

#define PAGES 16

/* That library's mapping stays its own, the other pages are zeros, and it is told. */
static void an_occupied_page_is_told(void)
{
	char *file = map_file(PAGES, PROT_READ | PROT_WRITE), *places[PAGES];
	struct rf_handle handle;
	int found[PAGES];
	size_t one, other, i;

	check_start(check_best_mode());
	for (i = 0; i < PAGES; i++) {
		places[i] = file + i * check_page;
		*places[i] = 7;
	}
	handle = check_register_as(file, PAGES * check_page, RF_WIPE);
	children_find(places, found, PAGES);
	CHECK(!said[0], "%s", said);
	for (one = 0; one < PAGES; one++) {
		for (other = 0; other < PAGES; other++) {
			if (other && other <= one)
				continue;
			occupied = file;
			occupied_pages[0] = one;
			occupied_pages[1] = other;
			children_find(places, found, PAGES);
			for (i = 0; i < PAGES; i++)
				CHECK(found[i] == (i == one || (other && i == other) ? 9 : 0),
				      "page %zu, %zu and %zu: %d", i, one, other, found[i]);
			check_said(file, PAGES, EEXIST);
		}
	}
	occupied = NULL;
	check_release(handle);
	check_empty();
}

/* A partial page of huge ones is a copy, made by us. */
static void an_occupied_copy_is_told(void)
{
	char *huge = check_map_huge(1, MAP_PRIVATE);
	struct rf_handle handle;

	check_start(check_best_mode());
	memset(huge, 7, CHECK_HUGE);
	handle = check_register_as(huge + 100, check_page, RF_WIPE);
	CHECK(child_finds(huge) == 7 && !said[0]);
	occupied = huge;
	occupied_pages[0] = 0;
	occupied_pages[1] = 0;
	CHECK(child_finds(huge) == 9);
	check_said(huge, 1, EEXIST);
	CHECK(child_finds(huge + check_page) == 7 && child_finds(huge + CHECK_HUGE - 1) == 7);
	occupied = NULL;
	check_release(handle);
	check_empty();
}

static void map_anew(char *memory, size_t pages)
{
	check_map_over(memory, pages, MAP_PRIVATE);
	memset(memory, 9, pages * check_page);
}

/* As malloc() does with large blocks: memory that is not held has a new owner, and no mark. */
static void memory_mapped_anew_is_not_told(void)
{
	char *memory = check_map(8), *file = map_file(4, PROT_READ | PROT_WRITE);
	struct rf_handle handles[3];
	struct rf_error error;

	check_start_untrusted();
	memset(memory, 7, 8 * check_page);
	handles[0] = check_register(memory + 100, 3 * check_page, 0);
	CHECK(rf_register(file, 4 * check_page, 0, RF_WIPE, &handles[1], &error) == 1);
	/* Beside them held memory is told of as before. */
	handles[2] = check_register_as(memory + 6 * check_page + 100, 200, RF_WIPE);
	map_anew(memory, 4);
	map_anew(file, 4);
	CHECK(child_finds(memory) == 9 && !said[0], "%s", said);
	CHECK(child_finds(memory + 3 * check_page) == 9 && child_finds(file) == 9);
	occupied = memory + 6 * check_page;
	occupied_pages[0] = 0;
	occupied_pages[1] = 0;
	CHECK(child_finds(memory + 6 * check_page) == 9);
	check_said(memory + 6 * check_page, 1, EEXIST);
	occupied = NULL;
	check_release(handles[0]);
	check_release(handles[1]);
	check_release(handles[2]);
	check_empty();
}

/* A release while the fork is under way leaves its pages to the child, and that is in order. */
static struct rf_handle to_release;

static void release_in_window(void)
{
	if (to_release.serial)
		check_release(to_release);
	to_release = (struct rf_handle){ 0 };
}

__attribute__((constructor(102))) static void install_release(void)
{
	pthread_atfork(release_in_window, NULL, NULL);
}

static void marks_left_by_a_release_are_not_told(void)
{
	char *file = map_file(4, PROT_READ | PROT_WRITE);

	check_start(check_best_mode());
	*file = 7;
	to_release = check_register_as(file, 4 * check_page, RF_WIPE);
	CHECK(child_finds(file) == 7);
	CHECK(!said[0], "%s", said);
	check_empty();
}

/* ---- userfaultfd ---- */

static int faults_fds[64]; /* the process's own, then its children's */
static unsigned int forks_seen;

/* Pages full of 5. No malloc(): fork() has its locks until its event is read. */
static void serve(int fd, uintptr_t address)
{
	static _Alignas(65536) char page[65536];
	struct uffdio_copy copy = { .dst = address & ~(check_page - 1), .len = check_page };

	memset(page, 5, sizeof(page));
	copy.src = (uintptr_t)page;
	CHECK(!ioctl(fd, UFFDIO_COPY, &copy) || errno == EEXIST, "%s", strerror(errno));
}

static void *serve_all(void *argument)
{
	const int fd = *(int *)argument;
	struct uffd_msg message;
	int *child;
	pthread_t thread;

	while (read(fd, &message, sizeof(message)) == sizeof(message)) {
		if (message.event == UFFD_EVENT_FORK) {
			child = &faults_fds[__atomic_add_fetch(&forks_seen, 1, __ATOMIC_SEQ_CST)];
			*child = (int)message.arg.fork.ufd;
			CHECK(!pthread_create(&thread, NULL, serve_all, child));
		} else if (message.event == UFFD_EVENT_PAGEFAULT) {
			serve(fd, (uintptr_t)message.arg.pagefault.address);
		}
	}
	return NULL;
}

static char *map_served(size_t pages, uint64_t features)
{
	struct uffdio_api api = { .api = UFFD_API, .features = features };
	struct uffdio_register range;
	char *memory = check_map(pages);
	pthread_t thread;

	faults_fds[0] = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
	if (faults_fds[0] < 0 || ioctl(faults_fds[0], UFFDIO_API, &api))
		check_skip("no userfaultfd: %s", strerror(errno));
	range = (struct uffdio_register){ .range = { (uintptr_t)memory, pages * check_page },
					  .mode = UFFDIO_REGISTER_MODE_MISSING };
	CHECK(!ioctl(faults_fds[0], UFFDIO_REGISTER, &range), "%s", strerror(errno));
	CHECK(!pthread_create(&thread, NULL, serve_all, &faults_fds[0]));
	return memory;
}

/* The kernel ends the service in the child: it finds zeros. */
static void memory_of_a_userfaultfd_is_wiped(void)
{
	char *memory = map_served(8, 0);
	struct rf_handle handle;

	check_start(check_best_mode());
	memory[2 * check_page] = 7;
	handle = check_register_as(memory + check_page, 4 * check_page, RF_WIPE);
	CHECK(child_finds(memory + check_page) == 0 && child_finds(memory + 2 * check_page) == 0);
	CHECK(memory[2 * check_page] == 7 && memory[check_page] == 5);
	check_release(handle);
	CHECK(child_finds(memory + 2 * check_page) == 7);
	check_empty();
}

/* A program that asked to serve children decides what is there; fork() does not hang. */
static void a_userfaultfd_that_serves_children_decides(void)
{
	char *memory = map_served(8, UFFD_FEATURE_EVENT_FORK);
	struct rf_handle handle;

	check_start(check_best_mode());
	memory[2 * check_page] = 7;
	handle = check_register_as(memory + check_page, 4 * check_page, RF_WIPE);
	CHECK(child_finds(memory + 2 * check_page) == 5);
	CHECK(__atomic_load_n(&forks_seen, __ATOMIC_SEQ_CST));
	CHECK(memory[2 * check_page] == 7);
	check_release(handle);
	CHECK(child_finds(memory + 2 * check_page) == 7);
	check_empty();
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO_HUGE(protections_are_kept),
		SCENARIO(a_copy_that_stays_writable_is_told),
		SCENARIO_HUGE(zeros_fit_in_the_data_limit),
		SCENARIO_HUGE(beyond_the_data_limit_pages_are_absent_and_told),
		SCENARIO(memory_without_reservation_is_wiped),
		SCENARIO_HUGE(memory_is_wiped_where_nothing_is_overcommitted),
		SCENARIO(an_occupied_page_is_told),
		SCENARIO_HUGE(an_occupied_copy_is_told),
		SCENARIO(memory_mapped_anew_is_not_told),
		SCENARIO(marks_left_by_a_release_are_not_told),
		SCENARIO(memory_of_a_userfaultfd_is_wiped),
		SCENARIO(a_userfaultfd_that_serves_children_decides),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
