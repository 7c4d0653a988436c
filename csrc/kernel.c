/* SPDX-License-Identifier: BSD-3-Clause */
#include "kernel.h"
#include "sys.h"

#include <errno.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>

#define COPIES_SINCE 5012
#define TRUSTED_SINCE 5019
#define DEFAULT_MAX_MAP_COUNT 65530

/* A file could not be opened for want of descriptors or memory: to be read again. */
static bool unsure;

static int open_file(const char *path)
{
	int fd = rf_sys_open(path, RF_READ);

	unsure |= fd < 0 && fd != -ENOENT && fd != -EACCES && fd != -EPERM;
	return fd;
}

static unsigned int parse_number(const char **text)
{
	unsigned int value = 0;

	for (; **text >= '0' && **text <= '9' && value < 100000; ++*text)
		value = value * 10 + (unsigned int)(**text - '0');
	return value;
}

unsigned int rf_kernel_parse_version(const char *release)
{
	unsigned int major = parse_number(&release), minor;

	if (*release != '.' || !major || major > 1000)
		return 0;
	release++;
	if (*release < '0' || *release > '9')
		return 0;
	minor = parse_number(&release);
	return major * 1000 + (minor > 999 ? 999 : minor);
}

static uint32_t read_max_map_count(void)
{
	char text[32] = "";
	const char *at = text;
	unsigned long value = 0;
	int fd = open_file("/proc/sys/vm/max_map_count");

	if (fd >= 0) {
		(void)!rf_sys_read(fd, text, sizeof(text) - 1);
		rf_sys_close(fd);
	}
	for (; *at >= '0' && *at <= '9' && value < UINT32_MAX; at++)
		value = value * 10 + (unsigned long)(*at - '0');
	if (!value)
		return DEFAULT_MAX_MAP_COUNT;
	return value > UINT32_MAX ? UINT32_MAX : (uint32_t)value;
}

/* /sys/kernel/mm/hugepages has one folder a size; every possible one is tried. */
static void read_huge_shifts(struct rf_kernel *kernel)
{
	char path[80], digits[24];
	unsigned int shift, used, count = 0;
	unsigned long kilobytes;
	int fd;

	for (shift = 16; shift <= 34 && count < sizeof(kernel->huge_shifts); shift++) {
		kilobytes = 1ul << (shift - 10);
		for (used = 0; kilobytes; kilobytes /= 10)
			digits[used++] = (char)('0' + kilobytes % 10);
		strcpy(path, "/sys/kernel/mm/hugepages/hugepages-");
		while (used)
			strncat(path, &digits[--used], 1);
		strcat(path, "kB/nr_hugepages");
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

/* process_madvise() knows MADV_DONTFORK for the caller itself on some kernels only. */
static bool probe_process_madvise(void)
{
	size_t page = getauxval(AT_PAGESZ);
	struct iovec range = { .iov_len = page };
	bool works;

	if (rf_sys_map(page, &range.iov_base) < 0)
		return false;
	works = rf_sys_madvise_many(&range, 1, MADV_DONTFORK) == (ssize_t)page;
	rf_sys_unmap(range.iov_base, page);
	return works;
}

bool rf_kernel_has_dontfork(void)
{
	size_t page = getauxval(AT_PAGESZ);
	void *memory;
	int rc;

	if (rf_sys_map(page, &memory) < 0)
		return true;
	rc = rf_sys_madvise((uintptr_t)memory, page, MADV_DONTFORK);
	rf_sys_unmap(memory, page);
	return rc != -EINVAL;
}

static void read_kernel(struct rf_kernel *kernel)
{
	unsigned int version;
	int copies;

	memset(kernel, 0, sizeof(*kernel));
	rf_sys_release(kernel->release, sizeof(kernel->release));
	version = rf_kernel_parse_version(kernel->release);
	copies = rf_sys_rdma_copy_on_fork();
	kernel->copy_how = copies >= 0 ? RF_HOW_NETLINK : RF_HOW_VERSION;
	kernel->copy_on_fork = copies >= 0 ? copies : version >= COPIES_SINCE;
	kernel->copy_trusted = kernel->copy_on_fork && version >= TRUSTED_SINCE;
	kernel->page_size = (uint32_t)getauxval(AT_PAGESZ);
	kernel->max_map_count = read_max_map_count();
	kernel->procmap_query = probe_procmap_query();
	kernel->process_madvise = probe_process_madvise();
	read_huge_shifts(kernel);
}

const struct rf_kernel *rf_kernel(void)
{
	static struct rf_kernel kernel;
	static bool known;

	if (rf_unlikely(!known)) {
		unsure = false;
		read_kernel(&kernel);
		known = !unsure;
	}
	return &kernel;
}
