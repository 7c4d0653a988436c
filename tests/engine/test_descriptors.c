/* SPDX-License-Identifier: BSD-3-Clause */
/* A child finds /dev/null in the place of descriptors it must not have. */
#define _GNU_SOURCE
#include "check.h"
#include "engine.h"
#include "preload/devices.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

/* Stands for a device: a special file that is not /dev/null. */
static int open_device(void)
{
	int fd = open("/dev/zero", O_RDWR | O_CLOEXEC);

	CHECK(fd >= 0);
	return fd;
}

static bool names(int fd, const char *path)
{
	char link[64], target[256];
	ssize_t length;

	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	length = readlink(link, target, sizeof(target) - 1);
	if (length < 0)
		return !path;
	target[length] = '\0';
	return path && !strcmp(target, path);
}

static size_t descriptors(void)
{
	size_t count = 0;
	int fd;

	for (fd = 0; fd < 512; fd++)
		count += fcntl(fd, F_GETFD) >= 0;
	return count;
}

/* In a child: true if @check(@fd) holds there. */
static bool in_child(bool (*check)(int), int fd)
{
	pid_t pid = fork();

	CHECK(pid >= 0);
	if (!pid)
		_exit(check(fd) ? 0 : 1);
	return check_wait(pid) == 0;
}

static bool is_null(int fd)
{
	return names(fd, "/dev/null") && fcntl(fd, F_GETFD) == FD_CLOEXEC &&
	       write(fd, "", 1) < 0;
}

static bool is_device(int fd)
{
	return names(fd, "/dev/zero");
}

static bool is_closed(int fd)
{
	return fcntl(fd, F_GETFD) < 0;
}

static bool is_null_for_grandchildren(int fd)
{
	return is_null(fd) && in_child(is_null, fd);
}

static bool has_as_many(int count)
{
	return descriptors() == (size_t)count;
}

static void a_child_finds_dev_null(void)
{
	int device = open_device(), event = eventfd(0, EFD_CLOEXEC), other = open_device();
	size_t before = descriptors();

	CHECK(rf_descriptor_omit(device, 0) == 0 && rf_descriptor_omit(event, 0) == 0);
	CHECK(in_child(is_null_for_grandchildren, device));
	CHECK(in_child(is_null, event));
	CHECK(in_child(is_device, other));
	CHECK(descriptors() == before && in_child(has_as_many, (int)before));
	CHECK(is_device(device));
	CHECK(rf_descriptor_release(device) == 0);
	CHECK(in_child(is_device, device));
	CHECK(in_child(is_null, event));
	CHECK(rf_descriptor_release(event) == 0);
	CHECK(rf_descriptor_release(event) == -ENOENT);
	CHECK(descriptors() == before);
}

static void any_number_of_descriptors_is_replaced(void)
{
	int fds[200];
	size_t i;

	for (i = 0; i < COUNT_OF(fds); i++) {
		fds[i] = open_device();
		CHECK(rf_descriptor_omit(fds[i], 0) == 0);
	}
	for (i = 0; i < COUNT_OF(fds); i++)
		CHECK(in_child(is_null, fds[i]));
	for (i = 0; i < COUNT_OF(fds); i++)
		CHECK(rf_descriptor_release(fds[(i * 77) % COUNT_OF(fds)]) == 0);
	for (i = 0; i < COUNT_OF(fds); i++)
		CHECK(in_child(is_device, fds[i]));
}

static void a_number_that_names_another_file_stays(void)
{
	int device = open_device(), other = open("/dev/full", O_RDWR);

	CHECK(rf_descriptor_omit(device, 0) == 0);
	CHECK(dup2(other, device) == device);
	CHECK(!in_child(is_null, device));
	/* And may be omitted in its turn. */
	CHECK(rf_descriptor_omit(device, 0) == 0);
	CHECK(in_child(is_null, device));
	CHECK(rf_descriptor_release(device) == 0);
	CHECK(!in_child(is_null, device));
	CHECK(rf_descriptor_release(device) == -ENOENT);
}

static bool is_epoll(int fd)
{
	return names(fd, "anon_inode:[eventpoll]");
}

/* An epoll, an eventfd and a device's event channel all have the one anonymous inode. */
static void a_number_that_names_another_anonymous_file_stays(void)
{
	int event = eventfd(0, EFD_CLOEXEC), epoll = epoll_create1(EPOLL_CLOEXEC);

	CHECK(rf_descriptor_omit(event, 0) == 0);
	CHECK(in_child(is_null, event));
	CHECK(dup2(epoll, event) == event);
	CHECK(in_child(is_epoll, event));
	CHECK(rf_descriptor_omit(event, 0) == 0);
	CHECK(in_child(is_null, event) && in_child(is_epoll, epoll));
	CHECK(rf_descriptor_release(event) == 0);
	CHECK(in_child(is_epoll, event));
}

static char *from_file, *of_another;

static bool is_private_zeros(int unused)
{
	(void)unused;
	if (from_file[0] || from_file[check_page] || of_another[0] != 'b')
		return false;
	from_file[0] = 'c';
	return true;
}

static bool is_shared(int unused)
{
	(void)unused;
	from_file[1] = 'd';
	return from_file[0] == 'a';
}

static char *map_file(int *fd, char first)
{
	char *memory;

	/* Not in /tmp: an overlay's files have another number in maps than from fstat(). */
	*fd = memfd_create("mapped", MFD_CLOEXEC);
	CHECK(*fd >= 0);
	CHECK(ftruncate(*fd, (off_t)(2 * check_page)) == 0);
	memory = mmap(NULL, 2 * check_page, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
	CHECK(memory != MAP_FAILED);
	memset(memory, first, 2 * check_page);
	return memory;
}

/* A device's queues, say, which keep it open as its descriptor does. */
static void mappings_of_the_device_go_too(void)
{
	int fd, other;

	from_file = map_file(&fd, 'a');
	of_another = map_file(&other, 'b');
	CHECK(rf_descriptor_omit(fd, 0) == 0 && rf_descriptor_omit(other, 0) == 0);
	CHECK(in_child(is_shared, 0) && from_file[1] == 'd');
	CHECK(rf_descriptor_omit(fd, RF_MAPPED) == 0);
	/* Once said it stays so. */
	CHECK(rf_descriptor_omit(fd, 0) == 0);
	CHECK(in_child(is_private_zeros, 0) && in_child(is_null, fd));
	CHECK(from_file[0] == 'a');
	CHECK(rf_descriptor_release(fd) == 0);
	CHECK(in_child(is_shared, 0));
	CHECK(rf_descriptor_omit(fd, 0) == 0);
	CHECK(in_child(is_shared, 0));
	CHECK(rf_descriptor_release(fd) == 0 && rf_descriptor_release(other) == 0);
}

/* More text than is read at once, and names that are longer. */
static void device_mappings_are_found_among_thousands(void)
{
	char *memory = check_map(4000), name[200];
	size_t i;
	int fd, other;

	for (i = 0; i < 4000; i += 2)
		CHECK(mprotect(memory + i * check_page, check_page, PROT_READ) == 0);
	for (i = 0; i < 40; i++) {
		snprintf(name, sizeof(name), "/tmp/%0*zu-%d", (int)(20 + 3 * i), i, getpid());
		fd = open(name, O_RDWR | O_CREAT, 0600);
		CHECK(fd >= 0 && unlink(name) == 0);
		CHECK(ftruncate(fd, (off_t)check_page) == 0);
		CHECK(mmap(NULL, check_page, PROT_READ, MAP_SHARED, fd, 0) != MAP_FAILED);
		close(fd);
	}
	from_file = map_file(&fd, 'a');
	of_another = map_file(&other, 'b');
	CHECK(rf_descriptor_omit(fd, RF_MAPPED) == 0);
	CHECK(in_child(is_private_zeros, 0));
	CHECK(rf_descriptor_release(fd) == 0);
}

static void bad_numbers_are_refused(void)
{
	size_t before = descriptors();

	CHECK(rf_descriptor_omit(-1, 0) == -EBADF && rf_descriptor_omit(500, 0) == -EBADF);
	CHECK(rf_descriptor_release(-1) == -ENOENT && rf_descriptor_release(500) == -ENOENT);
	CHECK(descriptors() == before);
}

static void a_child_needs_no_free_number(void)
{
	const struct rlimit few = { 64, 64 }, none = { 0, 0 };
	int device = open_device(), event = eventfd(0, EFD_CLOEXEC);

	CHECK(rf_descriptor_omit(device, 0) == 0 && rf_descriptor_omit(event, 0) == 0);
	CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
	while (dup(device) >= 0)
		;
	CHECK(in_child(is_null, device) && in_child(is_null, event));
	/* Not even that number may be opened. */
	CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
	CHECK(in_child(is_closed, device) && in_child(is_closed, event));
	CHECK(is_device(device));
	CHECK(rf_descriptor_release(device) == 0 && rf_descriptor_release(event) == 0);
}

static void the_first_descriptor_is_one_like_another(void)
{
	int device = open_device();

	CHECK(dup2(device, 0) == 0);
	CHECK(rf_descriptor_omit(0, 0) == 0);
	CHECK(in_child(is_null_for_grandchildren, 0) && in_child(is_device, device));
	CHECK(is_device(0));
	CHECK(rf_descriptor_release(0) == 0 && rf_descriptor_release(0) == -ENOENT);
	CHECK(in_child(is_device, 0));
	/* And it may be the number that /dev/null gets first. */
	close(0);
	CHECK(rf_descriptor_omit(device, 0) == 0);
	CHECK(in_child(is_null, device) && in_child(is_closed, 0));
	CHECK(rf_descriptor_release(device) == 0);
	CHECK(is_closed(0) && is_device(device));
}

static bool fails_at_every_call(int fd)
{
	unsigned long nth, faults = inject_faults();

	for (nth = 1; nth < 8; nth++) {
		unsigned long seen = inject_faults();
		size_t before = descriptors();
		int rc;

		inject(nth, EMFILE);
		rc = rf_descriptor_omit(fd, 0);
		inject(0, 0);
		if (inject_faults() == seen) {
			CHECK(rc == 0 && rf_descriptor_release(fd) == 0);
			break;
		}
		if (rc < 0) {
			CHECK(rc == -EMFILE || rc == -ENOMEM);
			CHECK(!in_child(is_null, fd));
			CHECK(rf_descriptor_release(fd) == -ENOENT);
		} else {
			CHECK(rf_descriptor_release(fd) == 0);
		}
		CHECK(descriptors() == before);
	}
	return inject_faults() > faults;
}

static void failures_change_nothing(void)
{
	int device = open_device(), fds[RF_DESCRIPTORS_BLOCK];
	size_t i;

	CHECK(fails_at_every_call(device));
	for (i = 0; i < COUNT_OF(fds); i++) {
		fds[i] = open_device();
		CHECK(rf_descriptor_omit(fds[i], 0) == 0);
	}
	/* Where a block is to be had, too. */
	CHECK(fails_at_every_call(device));
	for (i = 0; i < COUNT_OF(fds); i++)
		CHECK(in_child(is_null, fds[i]));
}

int __real_ioctl(int fd, unsigned long command, void *argument);
int __wrap_ioctl(int fd, unsigned long command, void *argument);

/* A device answers as the kernel does for an uverbs one. */
int __wrap_ioctl(int fd, unsigned long command, void *argument)
{
	struct stat status, device;

	if (command != 0xc0181b01)
		return __real_ioctl(fd, command, argument);
	CHECK(!fstat(fd, &status) && S_ISCHR(status.st_mode) && !stat("/dev/zero", &device));
	errno = status.st_rdev == device.st_rdev ? EPROTONOSUPPORT : ENOTTY;
	return -1;
}

/* The @nth system call fails: the first opens /proc. */
static bool replaces_devices(unsigned long nth)
{
	bool found;

	inject(nth, ENOENT);
	found = rf_devices_replace();
	inject(0, 0);
	return found;
}

static bool finds_it_without_proc(int fd)
{
	return !replaces_devices(0) && is_device(fd) && replaces_devices(1) && is_null(fd) &&
	       !replaces_devices(1);
}

static bool finds_it_without_a_free_number(int fd)
{
	struct rlimit limit = { 0, 0 };

	CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
	limit.rlim_cur = 0;
	CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	CHECK(replaces_devices(0) && is_closed(fd));
	limit.rlim_cur = limit.rlim_max;
	CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	return true;
}

static void without_proc_each_number_is_asked(void)
{
	int device = open_device(), other = open("/dev/full", O_RDWR);

	CHECK(other >= 0 && eventfd(0, EFD_CLOEXEC) >= 0);
	CHECK(in_child(finds_it_without_proc, device));
	CHECK(in_child(finds_it_without_a_free_number, device));
	/* Beyond the present limit. */
	CHECK(dup2(device, 1000) == 1000 && !close(device));
	CHECK(in_child(finds_it_without_a_free_number, 1000));
	CHECK(!in_child(finds_it_without_proc, other));
}

static unsigned long failing;
/* The child's observations, in memory it shares with its parent. */
static struct refusal {
	unsigned long faults;
	bool closed, pipe;
} *refusal;

static void fail_in_child(void)
{
	inject(failing, EBADF);
}

static bool is_out_of_reach(int fd)
{
	struct stat status;

	inject(0, 0);
	refusal->faults = inject_faults();
	refusal->closed = is_closed(fd);
	refusal->pipe = !fstat(fd, &status) && S_ISFIFO(status.st_mode);
	return refusal->closed || (refusal->pipe && write(fd, "", 1) < 0) || is_null(fd);
}

/* The handlers of a child run in the order they were installed in. */
__attribute__((constructor(101))) static void install_before(void)
{
	pthread_atfork(NULL, NULL, fail_in_child);
}

static void a_child_that_cannot_put_dev_null_there_has_no_device(void)
{
	int device = open_device();

	refusal = (struct refusal *)check_map_shared(1);
	CHECK(rf_descriptor_omit(device, 0) == 0);
	/* After a look at the device the second call opens /dev/null, the third duplicates it. */
	failing = 2;
	CHECK(in_child(is_out_of_reach, device));
	CHECK(refusal->faults == 1 && refusal->pipe);
	failing = 3;
	CHECK(in_child(is_out_of_reach, device));
	CHECK(refusal->faults == 1 && refusal->closed);
	failing = 0;
	CHECK(in_child(is_null, device));
}

static void a_raw_clone_may_share_descriptors(void)
{
	int device = open_device();
	pid_t pid;

	CHECK(rf_descriptor_omit(device, 0) == 0);
	pid = (pid_t)syscall(SYS_clone, CLONE_FILES | SIGCHLD, NULL, NULL, NULL, NULL);
	if (!pid) {
		(void)rf_generation();
		syscall(SYS_exit_group, is_device(device) ? 0 : 1);
	}
	CHECK(check_wait(pid) == 0);
	CHECK(is_device(device));
}

static uint64_t forks_seen[3];

static void look_prepare(void)
{
	forks_seen[0] = rf_forks();
}

static void look_parent(void)
{
	forks_seen[1] = rf_forks();
}

static void forks_are_counted(void)
{
	uint64_t before = rf_forks();

	pthread_atfork(look_prepare, look_parent, NULL);
	CHECK(before && rf_forks() == before);
	check_fork();
	/* Installed later: before the engine's own as it prepares, after it in the parent. */
	CHECK(forks_seen[0] == before && forks_seen[1] > before);
	CHECK(rf_forks() == forks_seen[1]);
}

/* Bit n: descriptor n is one of the device's that is open and omitted, as its opener knows. */
static int omitted[64];
static bool over;

static void *open_and_close(void *unused)
{
	(void)unused;
	while (!__atomic_load_n(&over, __ATOMIC_SEQ_CST)) {
		uint64_t before = rf_forks();
		int fd = open("/dev/full", O_RDWR | O_CLOEXEC);

		CHECK(fd >= 0 && fd < (int)COUNT_OF(omitted));
		CHECK(rf_descriptor_omit(fd, 0) == 0);
		if (before && rf_forks() == before) {
			__atomic_store_n(&omitted[fd], 1, __ATOMIC_SEQ_CST);
			sched_yield();
			__atomic_store_n(&omitted[fd], 0, __ATOMIC_SEQ_CST);
		}
		CHECK(rf_descriptor_release(fd) == 0);
		close(fd);
	}
	return NULL;
}

static bool none_reaches_the_device(int unused)
{
	size_t fd;

	(void)unused;
	for (fd = 0; fd < COUNT_OF(omitted); fd++)
		if (omitted[fd] && !is_null((int)fd))
			return false;
	return true;
}

static void threads_open_and_close_while_others_fork(void)
{
	unsigned long round, rounds = check_scale(2000);
	pthread_t threads[3];
	size_t i;

	for (i = 0; i < COUNT_OF(threads); i++)
		CHECK(!pthread_create(&threads[i], NULL, open_and_close, NULL));
	for (round = 0; round < rounds; round++) {
		CHECK(in_child(none_reaches_the_device, 0));
		usleep((useconds_t)check_below(300));
	}
	__atomic_store_n(&over, true, __ATOMIC_SEQ_CST);
	for (i = 0; i < COUNT_OF(threads); i++)
		pthread_join(threads[i], NULL);
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(a_child_finds_dev_null),
		SCENARIO(any_number_of_descriptors_is_replaced),
		SCENARIO(a_number_that_names_another_file_stays),
		SCENARIO(a_number_that_names_another_anonymous_file_stays),
		SCENARIO(mappings_of_the_device_go_too),
		SCENARIO(device_mappings_are_found_among_thousands),
		SCENARIO(bad_numbers_are_refused),
		SCENARIO(a_child_needs_no_free_number),
		SCENARIO(the_first_descriptor_is_one_like_another),
		SCENARIO(failures_change_nothing),
		SCENARIO(without_proc_each_number_is_asked),
		SCENARIO(a_child_that_cannot_put_dev_null_there_has_no_device),
		SCENARIO(a_raw_clone_may_share_descriptors),
		SCENARIO(forks_are_counted),
		SCENARIO(threads_open_and_close_while_others_fork),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
