/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * In a control group that is at its memory limit: the kernel has no memory for what splits
 * a mapping, nor for a child, and refuses in the middle of what it does. Of cgroup v1 the
 * group is, as there a process that takes too much can be made to wait, not killed.
 */
#define _GNU_SOURCE /* unshare() */
#include "check.h"
#include "engine.h"
#include "sys.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>

#define PIECES 1500
#define STEPS 24
#define STEP (128u << 10)

static struct rf_handle handles[PIECES];
static bool live[PIECES];
static struct rf_error error;
static char group[64];
static int limit_fd, usage_fd, oom_fd;

/* ---- The group ---- */

static int open_file(const char *name, int flags)
{
	char path[128];
	int fd;

	snprintf(path, sizeof(path), "%s/%s", group, name);
	fd = open(path, flags | O_CLOEXEC);
	CHECK(fd >= 0, "%s: %s", path, strerror(errno));
	return fd;
}

static int put(int fd, unsigned long value)
{
	char text[24];
	int nbytes = snprintf(text, sizeof(text), "%lu", value);

	return pwrite(fd, text, (size_t)nbytes, 0) == nbytes ? 0 : -errno;
}

/* Where the machine has no hierarchy of it, a private one. */
static const char *find_hierarchy(void)
{
	static const char folder[] = "/sys/fs/cgroup/memory";

	if (!access(folder, W_OK))
		return folder;
	if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
	    mount("rdmafork", "/tmp", "cgroup", 0, "memory"))
		check_skip("no memory cgroup of version 1: %s", strerror(errno));
	return "/tmp";
}

static void loosen(void)
{
	CHECK(put(limit_fd, 4ul << 30) == 0);
}

/* From now on this process gets @spare bytes and no more. */
static void tighten(size_t spare)
{
	char text[24];
	int tries, rc = -EBUSY;

	/* Memory it takes between the two counts too. */
	for (tries = 0; rc < 0 && tries < 100; tries++) {
		ssize_t nbytes = pread(usage_fd, text, sizeof(text) - 1, 0);

		CHECK(nbytes > 0);
		text[nbytes] = '\0';
		rc = put(limit_fd, strtoul(text, NULL, 10) + spare);
	}
	CHECK(rc == 0, "%s", strerror(-rc));
}

static void enter_group(void)
{
	int fd = open_file("cgroup.procs", O_WRONLY);

	CHECK(put(fd, (unsigned long)getpid()) == 0);
	close(fd);
}

/*
 * Until @pid has ended. Who touches memory that there is none for waits, parent and child
 * after a fork, and is given it.
 */
static void keep(pid_t pid)
{
	siginfo_t ended = { .si_pid = 0 };
	char text[64];
	ssize_t nbytes;

	for (;;) {
		CHECK(waitid(P_PID, (id_t)pid, &ended, WEXITED | WNOHANG | WNOWAIT) == 0);
		if (ended.si_pid)
			return;
		nbytes = pread(oom_fd, text, sizeof(text) - 1, 0);
		CHECK(nbytes > 0);
		text[nbytes] = '\0';
		if (strstr(text, "under_oom 1"))
			loosen();
		usleep(1000);
	}
}

/* ---- The calls there ---- */

static char *memory;
static bool *lacked;	/* by the child, which shares it */

/* Apart, so that each mark splits a mapping. */
static char *piece(size_t i)
{
	return memory + (2 * i + 1) * check_page;
}

static size_t register_all(enum rf_policy policy)
{
	size_t i, count = 0;
	int rc;

	for (i = 0; i < PIECES; i++) {
		if (live[i])
			continue;
		rc = rf_register(piece(i), check_page, RF_HELD, policy, &handles[i], &error);
		CHECK(rc == 1 || (rc == -ENOMEM && error.cause == RF_CAUSE_VMA_LIMIT), "%d, %d",
		      rc, error.cause);
		live[i] = rc == 1;
		count += live[i];
	}
	return count;
}

static void release_every(size_t nth)
{
	size_t i;

	for (i = 0; i < PIECES; i += nth) {
		if (live[i])
			check_release(handles[i]);
		live[i] = false;
	}
}

/* Registered memory is marked, if it is to be, and nothing else. */
static void check_marks(bool marked, unsigned int flag)
{
	size_t i;

	check_sound();
	check_read_smaps();
	for (i = 0; i < PIECES; i++)
		CHECK(!(check_flags_read(piece(i)) & flag) == !(marked && live[i]), "page %zu", i);
}

/* True if there is a child, which lacks the memory marked to be absent, and nothing else. */
static bool fork_tight(size_t spare)
{
	char byte;
	struct iovec to = { &byte, 1 };
	int status;
	pid_t pid;
	size_t i;

	tighten(spare);
	pid = fork();
	if (!pid) {
		for (i = 0; i < PIECES; i++)
			lacked[i] = rf_sys_copy(&to, &(struct iovec){ piece(i), 1 }, 1) != 1;
		_exit(0);
	}
	loosen();
	CHECK(pid > 0 || errno == ENOMEM || errno == EAGAIN, "%s", strerror(errno));
	if (pid < 0)
		return false;
	status = check_wait(pid);
	CHECK(status == 0, "%d with %zu bytes to spare", status, spare);
	check_read_smaps();
	for (i = 0; i < PIECES; i++)
		CHECK(lacked[i] == !!(check_flags_read(piece(i)) & CHECK_DC), "page %zu", i);
	return true;
}

/* All that this process does at the limit it has done before, and touches nothing new. */
static void rehearse(enum rf_policy policy)
{
	const size_t nbytes = (2 * PIECES + 1) * check_page;

	memory = check_map(2 * PIECES + 1);
	/* Of a huge page that is used in part the rest is taken back at the limit. */
	CHECK(madvise(memory, nbytes, MADV_NOHUGEPAGE) == 0 || errno == EINVAL);
	memset(memory, 1, nbytes);
	lacked = (bool *)check_map_shared(PIECES / check_page + 1);
	CHECK(register_all(policy) == PIECES);
	check_fork();
	release_every(1);
	check_fork();
	check_empty();
	CHECK(mlockall(MCL_CURRENT) == 0, "%s", strerror(errno));
}

static void eager(enum rf_policy policy, unsigned int flag)
{
	size_t count, refused = 0, step;

	check_start(RF_MODE_EAGER);
	rehearse(policy);
	tighten(0);
	count = register_all(policy);
	loosen();
	CHECK(count < PIECES, "nothing was refused");
	check_marks(true, flag);
	tighten(0);
	release_every(2);
	loosen();
	/* Memory that could not be unmarked is unmarked at the next fork. */
	check_fork();
	check_marks(true, flag);
	CHECK(register_all(policy) > 0);
	check_marks(true, flag);
	for (step = 0; step < STEPS; step++)
		refused += !fork_tight(step * STEP);
	printf("        %zu of %u registrations, %zu of %u forks refused\n", PIECES - count, PIECES,
	       refused, STEPS);
	CHECK(refused > 0 && refused < STEPS);
	check_marks(true, flag);
	release_every(1);
	check_fork();
	check_marks(true, flag);
	check_empty();
}

static void eager_omitted(void)
{
	eager(RF_OMIT, CHECK_DC);
}

static void eager_wiped(void)
{
	/* Until a fork, as all that is kept from children. */
	eager(RF_WIPE, CHECK_DC | CHECK_WF);
}

static void lazy_folded(void)
{
	size_t step, refused = 0;

	check_start(RF_MODE_LAZY);
	rehearse(RF_OMIT);
	for (step = 0; step < STEPS; step++) {
		tighten(0);
		CHECK(register_all(RF_OMIT) > 0, "lazily, nothing is asked of the kernel");
		loosen();
		refused += !fork_tight(step * STEP);
		check_sound();
		/* The same marks as if there had never been a limit. */
		check_fork();
		check_marks(true, CHECK_DC);
		release_every(1 + step % 3);
		check_fork();
		check_marks(true, CHECK_DC);
	}
	printf("        %zu of %u forks refused\n", refused, STEPS);
	CHECK(refused > 0 && refused < STEPS);
	release_every(1);
	check_fork();
	check_marks(true, CHECK_DC);
	check_empty();
}

/* ---- In a child, so that the group is empty in the end ---- */

static void in_a_group(void (*act)(void))
{
	int status;
	pid_t pid;

	if (CHECK_SLOWNESS > 1)
		check_skip("a sanitizer touches memory as it goes");
	snprintf(group, sizeof(group), "%s/rdmafork-test-%d", find_hierarchy(), getpid());
	if (mkdir(group, 0755))
		check_skip("no memory cgroup can be made: %s", strerror(errno));
	limit_fd = open_file("memory.limit_in_bytes", O_WRONLY);
	usage_fd = open_file("memory.usage_in_bytes", O_RDONLY);
	oom_fd = open_file("memory.oom_control", O_RDWR);
	CHECK(put(oom_fd, 1) == 0);
	pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		check_alarm(60);
		enter_group();
		act();
		fflush(stdout);
		_exit(0);
	}
	keep(pid);
	status = check_wait(pid);
	CHECK(rmdir(group) == 0, "%s", strerror(errno));
	CHECK(status == 0, "%d", status);
}

static void at_the_limit_registrations_are_made_or_refused(void)
{
	in_a_group(eager_omitted);
}

static void at_the_limit_wiped_registrations_are_made_or_refused(void)
{
	in_a_group(eager_wiped);
}

static void at_the_limit_a_fork_marks_as_much_as_it_can(void)
{
	check_needs_lazy();
	in_a_group(lazy_folded);
}

int main(int argc, char **argv)
{
	const struct check_scenario scenarios[] = {
		SCENARIO(at_the_limit_registrations_are_made_or_refused),
		SCENARIO(at_the_limit_wiped_registrations_are_made_or_refused),
		SCENARIO(at_the_limit_a_fork_marks_as_much_as_it_can),
	};

	/*
	 * The kernel writes to what glibc has it tell the processor by, after a fork to a copy,
	 * and ends a process there is no memory for that for.
	 */
	if (!getenv("GLIBC_TUNABLES")) {
		CHECK(setenv("GLIBC_TUNABLES", "glibc.pthread.rseq=0", 1) == 0);
		execv("/proc/self/exe", argv);
	}
	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
