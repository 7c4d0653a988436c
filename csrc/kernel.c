/* SPDX-License-Identifier: BSD-3-Clause */
#include "kernel.h"
#include "sys.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define COPIES_SINCE 5012
#define TRUSTED_SINCE 5019
#define ROUNDS 3
#define DEFAULT_MAX_MAP_COUNT 65530

/* A file could not be opened for want of descriptors or memory: to be read again. */
static bool unsure;

static int open_file(const char *path)
{
	int fd = rf_sys_open(path, RF_READ);

	unsure |= fd < 0 && fd != -ENOENT && fd != -EACCES && fd != -EPERM;
	return fd;
}

static bool is_digit(char c)
{
	return c >= '0' && c <= '9';
}

unsigned int rf_kernel_parse_version(const char *release)
{
	char *end = NULL;
	unsigned long major = is_digit(*release) ? strtoul(release, &end, 10) : 0, minor;

	if (!major || major > 1000 || *end != '.' || !is_digit(end[1]))
		return 0;
	minor = strtoul(end + 1, NULL, 10);
	return (unsigned int)(major * 1000 + (minor > 999 ? 999 : minor));
}

static uint32_t read_max_map_count(void)
{
	char text[32] = "";
	unsigned long value;
	int fd = open_file("/proc/sys/vm/max_map_count");

	if (fd >= 0) {
		(void)!rf_sys_read(fd, text, sizeof(text) - 1);
		rf_sys_close(fd);
	}
	value = is_digit(*text) ? strtoul(text, NULL, 10) : 0;
	if (!value)
		return DEFAULT_MAX_MAP_COUNT;
	return value > UINT32_MAX ? UINT32_MAX : (uint32_t)value;
}

/* /sys/kernel/mm/hugepages has one folder a size; every possible one is tried. */
static void read_huge_shifts(struct rf_kernel *kernel)
{
	unsigned int shift, count = 0;
	char path[80];
	int fd;

	for (shift = 16; shift <= 34 && count < sizeof(kernel->huge_shifts); shift++) {
		snprintf(path, sizeof(path),
			 "/sys/kernel/mm/hugepages/hugepages-%lukB/nr_hugepages",
			 1ul << (shift - 10));
		fd = open_file(path);
		if (fd < 0)
			continue;
		rf_sys_close(fd);
		kernel->huge_shifts[count++] = (uint8_t)shift;
	}
}

static bool probe_procmap_query(void)
{
	struct rf_vma vma;
	int fd = open_file("/proc/thread-self/maps"), rc;

	if (fd < 0)
		return false;
	rc = rf_sys_procmap_query(fd, (uintptr_t)&vma, &vma);
	rf_sys_close(fd);
	return rc == 0;
}

static int protect_and_back(uintptr_t start, size_t nbytes)
{
	int rc = rf_sys_protect(start, nbytes, PROT_READ);

	return rc < 0 ? rc : rf_sys_protect(start, nbytes, PROT_READ | PROT_WRITE);
}

static int write_behind_pipe(volatile char *memory, size_t page, const int pipe[2], bool forked)
{
	uintptr_t start = (uintptr_t)memory;
	char seen = 0;
	ssize_t rc;

	rc = rf_sys_madvise(start, page, MADV_NOHUGEPAGE);
	/* Some kernels have no huge pages that it could be part of. */
	if (rc < 0 && rc != -EINVAL)
		return (int)rc;
	/* Another thread's fork would share the page. */
	rc = forked ? 0 : rf_sys_madvise(start, page, MADV_DONTFORK);
	if (rc < 0)
		return (int)rc;
	*memory = 'a';
	rc = rf_sys_splice_page(pipe[1], (const void *)memory, 1);
	if (rc < 0)
		return (int)rc;
	rc = forked ? rf_sys_fork_briefly() : protect_and_back(start, page);
	if (rc < 0)
		return (int)rc;
	*memory = 'b';
	rc = rf_sys_read(pipe[0], &seen, 1);
	return rc < 0 ? (int)rc : seen == 'b';
}

int rf_kernel_probe(bool forked)
{
	size_t page = rf_sys_page_size();
	void *memory;
	int pipe[2], rc;

	rc = rf_sys_map(page, &memory);
	if (rc < 0)
		return rc;
	rc = rf_sys_pipe(pipe);
	if (rc >= 0) {
		rc = write_behind_pipe(memory, page, pipe, forked);
		rf_sys_close(pipe[0]);
		rf_sys_close(pipe[1]);
	}
	rf_sys_unmap(memory, page);
	return rc;
}

/*
 * Does it remember which pages are exclusive? The rounds without a child come first: where
 * they say no, as on every mainline kernel from 5.12 to 5.18, no child is made.
 */
static int has_exclusive_pages(void)
{
	unsigned int round;
	int rc;

	for (round = 0; round < 2 * ROUNDS; round++) {
		bool forked = round >= ROUNDS;

		rc = rf_kernel_probe(forked);
		if (rc < 0)
			return rc;
		if (rc != (forked ? 0 : 1))
			return 0;
	}
	return 1;
}

void rf_kernel_judge(struct rf_kernel *kernel, int copies)
{
	unsigned int version = rf_kernel_parse_version(kernel->release);
	int exclusive;

	kernel->copy_how = copies >= 0 ? RF_HOW_NETLINK : RF_HOW_VERSION;
	kernel->copy_on_fork = copies >= 0 ? copies : version >= COPIES_SINCE;
	kernel->trust_how = kernel->copy_on_fork ? RF_HOW_VERSION : kernel->copy_how;
	kernel->copy_trusted = kernel->copy_on_fork && version >= TRUSTED_SINCE;
	if (copies <= 0 || version < COPIES_SINCE || version >= TRUSTED_SINCE)
		return;
	exclusive = has_exclusive_pages();
	if (exclusive < 0)
		return;
	kernel->copy_trusted = exclusive;
	kernel->trust_how = RF_HOW_PROBE;
}

static void read_abilities(struct rf_kernel *kernel)
{
	memset(kernel->huge_shifts, 0, sizeof(kernel->huge_shifts));
	kernel->page_size = (uint32_t)rf_sys_page_size();
	kernel->max_map_count = read_max_map_count();
	kernel->procmap_query = probe_procmap_query();
	read_huge_shifts(kernel);
}

/* @found: the trust as it was judged. @kernel has the one in force. */
static struct rf_kernel kernel;
static struct {
	bool judged;
	uint8_t trusted, how;
} found;

/* Never judged anew, as mode and marks follow from it. */
static void judge_once(void)
{
	struct utsname name;

	if (found.judged)
		return;
	rf_sys_uname(&name);
	memcpy(kernel.release, name.release, sizeof(kernel.release));
	rf_kernel_judge(&kernel, rf_sys_rdma_copy_on_fork());
	found.trusted = kernel.copy_trusted;
	found.how = kernel.trust_how;
	found.judged = true;
}

const struct rf_kernel *rf_kernel(void)
{
	static bool known;

	if (rf_unlikely(!known)) {
		judge_once();
		unsure = false;
		read_abilities(&kernel);
		known = !unsure;
	}
	return &kernel;
}

bool rf_kernel_would_trust(bool distrusted)
{
	(void)rf_kernel();
	return found.trusted && !distrusted;
}

void rf_kernel_distrust(bool distrusted)
{
	kernel.copy_trusted = rf_kernel_would_trust(distrusted);
	kernel.trust_how = found.trusted && distrusted ? RF_HOW_ENVIRONMENT : found.how;
}
