/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The kernel refuses, once the engine runs, to answer a question or to copy: a seccomp
 * filter, or no /proc. What a child finds is the same as without.
 */
#define _GNU_SOURCE
#include "check.h"
#include "engine.h"
#include "fork.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/syscall.h>

/* The kernel's own answers among them. */
static const int refusals[] = { EPERM, ENOSYS, EACCES, ENOMEM, ENOENT };

static int open_descriptors(void)
{
	int fd, count = 0;

	for (fd = 0; fd < 256; fd++)
		count += fcntl(fd, F_GETFD) >= 0;
	return count;
}

/* Run @test in a child of its own, once for each errno. */
static void with_each_errno(void (*test)(int error))
{
	size_t i;
	int status;
	pid_t pid;

	for (i = 0; i < COUNT_OF(refusals); i++) {
		pid = check_clone();
		CHECK(pid >= 0);
		if (!pid) {
			test(refusals[i]);
			_exit(0);
		}
		status = check_wait(pid);
		/* It has said why it was skipped. */
		if (status == 77)
			_exit(status);
		CHECK(status == 0, "%s: %d", strerror(refusals[i]), status);
	}
}

/* ---- Copying ---- */

static bool holds(const char *memory, char byte, size_t nbytes)
{
	while (nbytes && *memory == byte)
		memory++, nbytes--;
	return !nbytes;
}

static void bytes_beside_are_copied_if(int error)
{
	char *memory = check_map(64);
	int before;
	size_t i;
	pid_t pid;

	memset(memory, 'x', 64 * check_page);
	check_start_untrusted();
	for (i = 0; i < 16; i++)
		check_register(memory + (4 * i + 1) * check_page - 100, check_page + 200, 0);
	check_refuse(SYS_process_vm_readv, error);
	before = open_descriptors();
	pid = fork();
	if (!pid) {
		for (i = 0; i < 16; i++) {
			char *at = memory + 4 * i * check_page;

			CHECK(holds(at, 'x', check_page - 100), "registration %zu", i);
			CHECK(holds(at + 2 * check_page + 100, 'x', 2 * check_page - 100));
		}
		CHECK(open_descriptors() == before);
		_exit(0);
	}
	CHECK(check_wait(pid) == 0);
	CHECK(open_descriptors() == before);
}

static void bytes_beside_are_copied_where_process_vm_readv_is_refused(void)
{
	with_each_errno(bytes_beside_are_copied_if);
}

/* The same answers as process_vm_readv() gives, beside memory that is missing or read-only. */
static void compare_answers(void)
{
	const size_t many = 40 * check_page;
	char *from = check_map(42), *to = check_map(42);
	struct iovec target = { to, many }, sources[3];
	const int before = open_descriptors();
	size_t i;

	for (i = 0; i < many; i++)
		from[i] = (char)(i * 7 + i / check_page);
	errno = 77;
	sources[0] = (struct iovec){ from, many };
	CHECK(rf_sys_copy(&target, sources, 1) == (ssize_t)many && !memcmp(from, to, many));
	memset(to, 0, many);
	sources[0] = (struct iovec){ from + 5, 100 };
	sources[1] = (struct iovec){ from + check_page - 3, 7 };
	sources[2] = (struct iovec){ from + 3 * check_page + 1, 17 * check_page };
	target.iov_len = 107 + 17 * check_page;
	CHECK(rf_sys_copy(&target, sources, 3) == (ssize_t)target.iov_len);
	CHECK(!memcmp(to, from + 5, 100) && !memcmp(to + 100, from + check_page - 3, 7));
	CHECK(!memcmp(to + 107, from + 3 * check_page + 1, 17 * check_page));
	/* Less room than there is to copy. */
	target.iov_len = 102;
	memset(to, 0, many);
	CHECK(rf_sys_copy(&target, sources, 3) == 102 && !to[102]);
	/* Up to the first page that is not there, in the middle of a stretch or at its start. */
	target.iov_len = many;
	check_unmap(from + 2 * check_page, 1);
	sources[0] = (struct iovec){ from, 4 * check_page };
	CHECK(rf_sys_copy(&target, sources, 2) == (ssize_t)(2 * check_page));
	sources[0] = (struct iovec){ from, 2 * check_page };
	sources[1] = (struct iovec){ from + 2 * check_page, check_page };
	CHECK(rf_sys_copy(&target, sources, 3) == (ssize_t)(2 * check_page));
	CHECK(rf_sys_copy(&target, sources + 1, 2) == -EFAULT);
	/* A page that cannot be written: rf_elf_is_relocated() asks so. */
	CHECK(!mprotect(to, check_page, PROT_READ));
	target.iov_len = 1;
	sources[0] = (struct iovec){ to, 1 };
	CHECK(rf_sys_copy(&target, sources, 1) == -EFAULT);
	CHECK(errno == 77 && open_descriptors() == before);
}

static void a_copy_answers_the_same_where_it_is_refused(void)
{
	compare_answers();
	check_refuse(SYS_process_vm_readv, EPERM);
	compare_answers();
}

/* Its own descriptor, and no more. */
static void without_a_descriptor_a_copy_is_refused(void)
{
	char from[8] = "from", to[8] = "";
	struct iovec target = { to, 8 }, source = { from, 8 };
	int fd;

	check_refuse(SYS_process_vm_readv, EPERM);
	while ((fd = dup(0)) >= 0)
		;
	CHECK(rf_sys_copy(&target, &source, 1) == -EMFILE);
	close(5);
	CHECK(rf_sys_copy(&target, &source, 1) == 8 && !strcmp(to, "from"));
	CHECK(dup(0) == 5);
}

/* The bytes there are copied. The program itself cannot read them, with either call. */
static void inaccessible_memory_is_copied_when_asked_for(void)
{
	char *memory = check_map(4), to[100];
	struct iovec target = { to, 100 };
	struct iovec sources[] = { { memory, 50 }, { memory + check_page, 50 } };
	const int before = open_descriptors();

	check_needs_inaccessible_bytes();
	memset(memory, 'x', 4 * check_page);
	CHECK(!mprotect(memory + check_page, check_page, PROT_NONE));
	errno = 77;
	CHECK(rf_sys_copy_readable(&target, sources, 2) == 50);
	CHECK(rf_sys_copy_readable(&target, sources + 1, 1) == -EFAULT);
	CHECK(rf_sys_copy(&target, sources, 2) == 50);
	CHECK(rf_sys_copy(&target, sources + 1, 1) == -EFAULT);
	CHECK(rf_sys_copy_inaccessible(&target, sources, 2) == 100 && holds(to, 'x', 100));
	check_unmap(memory + check_page, 1);
	CHECK(rf_sys_copy_readable(&target, sources + 1, 1) == -EFAULT);
	CHECK(rf_sys_copy_inaccessible(&target, sources, 2) == 50);
	CHECK(rf_sys_copy_inaccessible(&target, sources + 1, 1) == -EFAULT);
	CHECK(errno == 77 && open_descriptors() == before);
}

static bool stop;

static void *copy_on(void *unused)
{
	char from[8] = "from", to[8] = "";
	struct iovec target = { to, 8 }, source = { from, 8 };

	while (!__atomic_load_n(&stop, __ATOMIC_SEQ_CST))
		CHECK(rf_sys_copy(&target, &source, 1) == 8);
	return unused;
}

static void no_child_keeps_a_file_of_another_thread_s_copy(void)
{
	unsigned long round, rounds = check_scale(600) / CHECK_SLOWNESS;
	int program = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
	const int before = open_descriptors();
	pthread_t thread;
	pid_t pid;

	CHECK(program >= 0);
	check_start_untrusted();
	check_refuse(SYS_process_vm_readv, EPERM);
	CHECK(!pthread_create(&thread, NULL, copy_on, NULL));
	for (round = 0; round < rounds; round++) {
		pid = fork();
		CHECK(pid >= 0);
		if (!pid)
			_exit(open_descriptors() != before);
		CHECK(check_wait(pid) == 0, "child %lu", round);
	}
	__atomic_store_n(&stop, true, __ATOMIC_SEQ_CST);
	CHECK(!pthread_join(thread, NULL));
	CHECK(open_descriptors() == before);
}

/* ---- Waiting ---- */

/* Not a loop that takes a core until the lock is free. */
static void a_wait_that_is_refused_sleeps(void)
{
	struct rf_lock taken = { .word = UINT64_MAX };
	uint64_t began;

	check_refuse(SYS_futex, EPERM);
	began = rf_sys_now();
	CHECK(!rf_lock_wait(&taken));
	CHECK(rf_sys_now() - began >= 1000000);
}

/* ---- Asking ---- */

/* Shared memory stays, private memory is omitted, and memory that is not registered stays. */
static void check_children(const char *shared, const char *private, size_t pages)
{
	pid_t pid = fork();
	size_t i;

	CHECK(pid >= 0);
	if (!pid) {
		for (i = 0; i < pages; i++)
			CHECK(shared[i * check_page] == 's');
		_exit(0);
	}
	CHECK(check_wait(pid) == 0, "shared memory is absent");
	CHECK(!check_child_reads(private) && !check_child_reads(private + check_page));
}

static void shared_memory_stays_if_ioctl_fails_with(int error)
{
	char *shared = check_map_shared(4), *private = check_map(4);
	struct rf_vma_reader reader;
	struct rf_vma vma;

	memset(shared, 's', 4 * check_page);
	check_start_untrusted();
	check_register(shared, 4 * check_page, 0);
	check_register(private, 4 * check_page, 0);
	check_refuse(SYS_ioctl, error);
	check_children(shared, private, 4);
	/* In the middle of a round, too. */
	rf_vma_init(&reader, true, 0);
	CHECK(rf_vma_open(&reader) == 0);
	CHECK(rf_vma_find(&reader, (uintptr_t)shared + 1, &vma) == 0 && vma.shared);
	CHECK(rf_vma_find(&reader, (uintptr_t)private + 1, &vma) == 0 && !vma.shared);
	CHECK(rf_vma_find(&reader, UINTPTR_MAX - 4096, &vma) == -ENOENT);
	rf_vma_close(&reader);
	CHECK(reader.fd < 0);
}

static void shared_memory_stays_where_ioctl_is_refused(void)
{
	with_each_errno(shared_memory_stays_if_ioctl_fails_with);
}

/* Also where private memory lies between two shared mappings, with no gap. */
static void shared_memory_stays_if_open_fails_with(int error)
{
	char *apart = check_map_shared(4), *private = check_map(4), *memory = check_map(12);

	check_map_over(memory, 4, MAP_SHARED);
	check_map_over(memory + 8 * check_page, 4, MAP_SHARED);
	memset(apart, 's', 4 * check_page);
	memset(memory, 's', 12 * check_page);
	check_start_untrusted();
	check_register(apart, 4 * check_page, 0);
	check_register(private, 4 * check_page, RF_HELD);
	check_register(memory, 4 * check_page, 0);
	check_register(memory + 4 * check_page, 4 * check_page, 0);
	check_register(memory + 8 * check_page, 4 * check_page - 100, RF_HELD);
	check_refuse(SYS_openat, error);
	check_children(apart, private, 4);
	check_children(memory, memory + 4 * check_page, 4);
	check_children(memory + 8 * check_page, memory + 6 * check_page, 4);
	/* Registered when /proc is gone. */
	check_register(apart, 2 * check_page, 0);
	check_children(apart, private, 4);
	/* Nothing that asking has mapped is left. */
	check_sound();
}

static void shared_memory_stays_without_proc(void)
{
	with_each_errno(shared_memory_stays_if_open_fails_with);
}

/* Blocks of shared pages at both ends and private ones between, in one registration. */
#define BLOCK 8
#define BLOCKS 512

/* The bytes of all blocks that this process can read, of the shared pages or of the others. */
static size_t readable(const char *memory, bool shared)
{
	size_t page, count = 0;

	for (page = 0; page < BLOCK * BLOCKS; page++)
		if ((page % BLOCK == 0 || page % BLOCK == BLOCK - 1) == shared)
			count += check_is_readable(memory + page * check_page);
	return count;
}

static void private_pages_between_shared_ones_stay_marked_without_proc(void)
{
	char *memory = check_map(BLOCK * BLOCKS);
	struct rf_handle handle;
	size_t page;
	pid_t pid;

	for (page = 0; page < BLOCK * BLOCKS; page++)
		if (page % BLOCK == 0 || page % BLOCK == BLOCK - 1)
			check_map_over(memory + page * check_page, 1, MAP_SHARED);
	check_start_untrusted();
	handle = check_register(memory, BLOCK * BLOCKS * check_page, RF_HELD);
	check_refuse(SYS_openat, EACCES);
	pid = fork();
	if (!pid) {
		CHECK(readable(memory, false) == 0, "%zu", readable(memory, false));
		CHECK(readable(memory, true) == 2 * BLOCKS, "%zu", readable(memory, true));
		_exit(0);
	}
	CHECK(check_wait(pid) == 0);
	check_release(handle);
	check_sound();
}

/* A fork asks about so many pages. It knows nothing of the rest, where the marks stay. */
static void pages_beyond_those_asked_about_stay_marked_without_proc(void)
{
	const size_t asked = 65536;
	char *memory = check_map(asked + 1), *shared = memory + (asked - 1) * check_page;
	pid_t pid;

	check_map_over(shared, 2, MAP_SHARED);
	check_start_untrusted();
	check_register(memory, (asked + 1) * check_page, RF_HELD);
	check_refuse(SYS_openat, EACCES);
	pid = fork();
	if (!pid) {
		CHECK(!check_is_readable(memory) && !check_is_readable(shared - check_page));
		CHECK(check_is_readable(shared) && !check_is_readable(shared + check_page));
		_exit(0);
	}
	CHECK(check_wait(pid) == 0);
}

/* They cannot be told from private ones by what mremap() does, on older kernels. */
static void asking_maps_no_huge_page(void)
{
	char *shared = check_map_huge_any(2, MAP_SHARED);
	size_t before = check_vmas();

	CHECK(rf_sys_is_shared((uintptr_t)shared + check_page, check_page) <= 0);
	CHECK(rf_sys_is_shared((uintptr_t)shared, check_page) >= 0);
	CHECK(check_vmas() == before);
}

static void shared_memory_is_known_without_proc(void)
{
	char *memory = check_map(4), *shared = check_map_shared(4);
	size_t before = check_vmas();

	errno = 77;
	CHECK(rf_sys_is_shared((uintptr_t)memory, check_page) == 0);
	CHECK(rf_sys_is_shared((uintptr_t)shared + check_page, check_page) == 1);
	CHECK(!mprotect(shared, check_page, PROT_NONE));
	CHECK(rf_sys_is_shared((uintptr_t)shared, check_page) == 1);
	CHECK(!mprotect(shared, check_page, PROT_READ | PROT_WRITE));
	check_unmap(memory, 1);
	CHECK(rf_sys_is_shared((uintptr_t)memory, check_page) == -EFAULT);
	CHECK(errno == 77 && check_vmas() <= before);
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(bytes_beside_are_copied_where_process_vm_readv_is_refused),
		SCENARIO(a_copy_answers_the_same_where_it_is_refused),
		SCENARIO(without_a_descriptor_a_copy_is_refused),
		SCENARIO(inaccessible_memory_is_copied_when_asked_for),
		SCENARIO(no_child_keeps_a_file_of_another_thread_s_copy),
		SCENARIO(a_wait_that_is_refused_sleeps),
		SCENARIO(shared_memory_stays_where_ioctl_is_refused),
		SCENARIO(shared_memory_stays_without_proc),
		SCENARIO(private_pages_between_shared_ones_stay_marked_without_proc),
		SCENARIO(pages_beyond_those_asked_about_stay_marked_without_proc),
		SCENARIO(shared_memory_is_known_without_proc),
		SCENARIO_HUGE(asking_maps_no_huge_page),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
