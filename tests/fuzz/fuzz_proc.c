/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What the engine reads of the kernel's: /proc/self/maps and smaps, RDMA netlink, a
 * version. Either any bytes, which may only be taken for something or not; or what a
 * kernel could say, made up here, which must be understood.
 *
 * Linked with --wrap: the files that are opened are those of this file.
 */
#include "check.h"
#include "fuzz.h"
#include "kernel.h"
#include "vma.h"

#include <ctype.h>
#include <linux/netlink.h>
#include <stdarg.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <errno.h>
#include <sys/sysmacros.h>

#define MAPPINGS 24
#define MAPS 1000
#define SMAPS 1001

static struct {
	char bytes[1 << 18];
	size_t used, at;
} maps, smaps, message;

static size_t most_read;

/* ---- The kernel ---- */

int __wrap_rf_sys_open(const char *path, int access);
ssize_t __wrap_rf_sys_read(int fd, void *buffer, size_t nbytes);
int __wrap_rf_sys_close(int fd);
int __wrap_rf_sys_map_over(uintptr_t start, size_t nbytes);
int __wrap_socket(int domain, int type, int protocol);
int __wrap_setsockopt(int fd, int level, int name, const void *value, socklen_t nbytes);
long __wrap_syscall(long number, ...);
long __real_syscall(long number, ...);
ssize_t __real_rf_sys_read(int fd, void *buffer, size_t nbytes);
int __real_rf_sys_open(const char *path, int access);
int __real_rf_sys_close(int fd);

int __wrap_rf_sys_open(const char *path, int access)
{
	if (!strcmp(path, "/proc/thread-self/maps")) {
		maps.at = 0;
		return MAPS;
	}
	if (!strcmp(path, "/proc/thread-self/smaps")) {
		smaps.at = 0;
		return SMAPS;
	}
	return __real_rf_sys_open(path, access);
}

ssize_t __wrap_rf_sys_read(int fd, void *buffer, size_t nbytes)
{
	size_t left;

	if (fd != MAPS && fd != SMAPS)
		return __real_rf_sys_read(fd, buffer, nbytes);
	left = fd == MAPS ? maps.used - maps.at : smaps.used - smaps.at;
	nbytes = nbytes < left ? nbytes : left;
	nbytes = nbytes < most_read ? nbytes : most_read;
	memcpy(buffer, fd == MAPS ? maps.bytes + maps.at : smaps.bytes + smaps.at, nbytes);
	*(fd == MAPS ? &maps.at : &smaps.at) += nbytes;
	return (ssize_t)nbytes;
}

int __wrap_rf_sys_close(int fd)
{
	return fd == MAPS || fd == SMAPS ? 0 : __real_rf_sys_close(fd);
}

static uintptr_t replaced[MAPPINGS][2];
static size_t replaced_count;

int __wrap_rf_sys_map_over(uintptr_t start, size_t nbytes)
{
	if (replaced_count < MAPPINGS) {
		replaced[replaced_count][0] = start;
		replaced[replaced_count++][1] = start + nbytes;
	}
	return 0;
}

int __wrap_socket(int domain, int type, int protocol)
{
	(void)domain, (void)type, (void)protocol;
	return MAPS;
}

/* The system call that is refused; NULL: none. */
static const char *refused;

static int refuse(const char *call)
{
	if (!refused || strcmp(refused, call) != 0)
		return 0;
	errno = EPERM;
	return -1;
}

int __wrap_setsockopt(int fd, int level, int name, const void *value, socklen_t nbytes)
{
	(void)fd, (void)level, (void)name, (void)value, (void)nbytes;
	return refuse("setsockopt");
}

/* sendto() and recvfrom(), and all other calls as they are. */
long __wrap_syscall(long number, ...)
{
	long arguments[6];
	va_list values;
	size_t i;

	va_start(values, number);
	for (i = 0; i < COUNT_OF(arguments); i++)
		arguments[i] = va_arg(values, long);
	va_end(values);
	if (number == SYS_sendto)
		return refuse("sendto") ? -1 : arguments[2];
	if (number != SYS_recvfrom)
		return __real_syscall(number, arguments[0], arguments[1], arguments[2],
				      arguments[3], arguments[4], arguments[5]);
	if ((size_t)arguments[2] > message.used)
		arguments[2] = (long)message.used;
	memcpy((void *)arguments[1], message.bytes, (size_t)arguments[2]);
	return refuse("recvfrom") ? -1 : arguments[2];
}

/* ---- Any bytes ---- */

static void take_rest(char *bytes, size_t *used, size_t most)
{
	for (*used = 0; !check_played() && *used < most; ++*used)
		bytes[*used] = (char)check_below(256);
}

static void any_maps(void)
{
	const struct rf_file file = { .device = makedev(8, 1), .inode = 7 };
	struct rf_vma_reader reader;
	struct rf_vma vma;
	uintptr_t at;
	size_t tries;

	take_rest(maps.bytes, &maps.used, sizeof(maps.bytes));
	memcpy(smaps.bytes, maps.bytes, maps.used);
	smaps.used = maps.used;
	rf_vma_init(&reader, false, 12);
	if (rf_vma_open(&reader) >= 0) {
		at = 0;
		for (tries = 0; tries < 64 && rf_vma_find(&reader, at, &vma) >= 0; tries++) {
			CHECK(vma.start < vma.end && vma.shift < 64);
			at = vma.end;
		}
		rf_vma_close(&reader);
	}
	rf_memory_free(&reader.table);
	rf_vma_replace_file(&file);
}

static void any_message(void)
{
	int rc;

	take_rest(message.bytes, &message.used, 5000);
	rc = rf_sys_rdma_copy_on_fork();
	CHECK(rc <= 1);
}

static void any_version(void)
{
	char text[64];
	unsigned long major, minor;
	unsigned int expected = 0;
	size_t used;
	char *end;

	take_rest(text, &used, sizeof(text) - 1);
	text[used] = '\0';
	major = isdigit((unsigned char)*text) ? strtoul(text, &end, 10) : 0;
	if (major && major <= 1000 && *end == '.' && isdigit((unsigned char)end[1])) {
		minor = strtoul(end + 1, NULL, 10);
		expected = (unsigned int)(major * 1000 + (minor > 999 ? 999 : minor));
	}
	CHECK(rf_kernel_parse_version(text) == expected, "%s: %u, not %u", text,
	      rf_kernel_parse_version(text), expected);
}

/* ---- Answers of a kernel ---- */

struct mapping {
	struct rf_vma vma;
	struct rf_file file;
};

static struct mapping mappings[MAPPINGS];
static size_t mapping_count;

__attribute__((format(printf, 1, 2))) static void print(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	maps.used += (size_t)vsnprintf(maps.bytes + maps.used, sizeof(maps.bytes) - maps.used,
				       format, arguments);
	va_end(arguments);
}

/* One that may look like another line, or fill the reader's buffer. */
static void print_path(void)
{
	static const char *const paths[] = {
		"",
		"[heap]",
		"/dev/shm/a b",
		"/7f00-7f10 rw-p 0 0:0 0",
		"/KernelPageSize: 2048 kB",
		"/x (deleted)",
	};
	size_t length = check_below(4) ? 0 : check_below(9000);

	print("%*s%s", (int)check_below(30), "", paths[check_below(COUNT_OF(paths))]);
	memset(maps.bytes + maps.used, 'a', length);
	maps.used += length;
	print("\n");
}

/* The same line goes to both files, and its details to smaps. */
static void print_mapping(const struct mapping *mapping)
{
	const struct rf_vma *vma = &mapping->vma;
	size_t before = maps.used;

	print("%08lx-%08lx %c%c%c%c %08lx %02x:%02x %lu", (unsigned long)vma->start,
	      (unsigned long)vma->end, vma->protection & PROT_READ ? 'r' : '-',
	      vma->protection & PROT_WRITE ? 'w' : '-', vma->protection & PROT_EXEC ? 'x' : '-',
	      vma->shared ? 's' : 'p', (unsigned long)check_below(99),
	      major(mapping->file.device), minor(mapping->file.device),
	      (unsigned long)mapping->file.inode);
	print_path();
	memcpy(smaps.bytes + smaps.used, maps.bytes + before, maps.used - before);
	smaps.used += maps.used - before;
	smaps.used += (size_t)sprintf(smaps.bytes + smaps.used,
				      "Size: %18d kB\nKernelPageSize: %8lu kB\nMMUPageSize: 4 kB\n"
				      "VmFlags: rd wr mr mw me ac \n",
				      4, 1ul << (vma->shift - 10));
}

static void make_mappings(void)
{
	uintptr_t at = check_below(2) ? 0x7f0000000000 : 0;
	struct mapping *mapping;

	maps.used = smaps.used = mapping_count = 0;
	while (mapping_count < MAPPINGS && !check_played()) {
		bool huge = !check_below(4);

		mapping = &mappings[mapping_count++];
		at += check_below(3) << (huge ? 21 : 12);
		at = huge ? (at + CHECK_HUGE - 1) & ~(uintptr_t)(CHECK_HUGE - 1) : at;
		mapping->vma.start = at;
		at += (1 + check_below(4)) << (huge ? 21 : 12);
		mapping->vma.end = at;
		mapping->vma.shared = (uint8_t)check_below(2);
		mapping->vma.protection = (uint8_t)check_below(8);
		mapping->file.inode = huge ? 1 + check_below(3) : check_below(4);
		mapping->file.device = makedev(check_below(3), check_below(300));
		mapping->vma.anonymous = !mapping->file.inode;
		mapping->vma.shift = huge ? 21 : 12;
		print_mapping(mapping);
	}
	print("ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0      [vsyscall]\n");
}

static void find(struct rf_vma_reader *reader, uintptr_t at)
{
	const struct rf_vma *expected;
	struct rf_vma vma;
	size_t i;
	int rc = rf_vma_find(reader, at, &vma);

	for (i = 0; i < mapping_count && mappings[i].vma.end <= at; i++)
		;
	CHECK(rc == 0, "%d", rc);
	if (i == mapping_count)
		return;
	expected = &mappings[i].vma;
	CHECK(vma.start == expected->start && vma.end == expected->end, "%lx: [%lx, %lx)", at,
	      vma.start, vma.end);
	CHECK(vma.shared == expected->shared && vma.protection == expected->protection &&
	      vma.anonymous == expected->anonymous);
	CHECK(vma.shift == expected->shift, "%lx: %d", at, vma.shift);
}

static void mappings_are_found(void)
{
	struct rf_vma_reader reader;
	struct rf_file file;
	size_t i, count = 0;

	make_mappings();
	rf_vma_init(&reader, false, 21);
	CHECK(rf_vma_open(&reader) == 0);
	for (i = 0; i < mapping_count; i++) {
		find(&reader, mappings[i].vma.start);
		find(&reader, mappings[i].vma.end - 1);
		find(&reader, mappings[i].vma.start - !!mappings[i].vma.start);
	}
	rf_vma_close(&reader);
	rf_memory_free(&reader.table);
	if (!mapping_count)
		return;
	file = mappings[mapping_count / 2].file;
	rf_vma_replace_file(&file);
	for (i = 0; i < mapping_count; i++) {
		if (mappings[i].file.device != file.device || mappings[i].file.inode != file.inode)
			continue;
		CHECK(count < replaced_count && replaced[count][0] == mappings[i].vma.start &&
		      replaced[count][1] == mappings[i].vma.end);
		count++;
	}
	CHECK(count == replaced_count || (!file.inode && !file.device), "%zu, not %zu",
	      replaced_count, count);
}

static void answers_are_understood(void)
{
	static const char *const calls[] = { "setsockopt", "sendto", "recvfrom" };
	struct nlmsghdr header = { .nlmsg_type = (5 << 10) | 6 };
	struct nlattr attribute;
	int expected = 0;
	bool known = false;
	size_t i;

	message.used = NLMSG_HDRLEN;
	memset(message.bytes, 0, 4096);
	while (!check_played() && message.used < 3800) {
		size_t nbytes = check_below(40);

		attribute.nla_type = (uint16_t)(check_below(4) ? 1 + check_below(120) : 93);
		attribute.nla_type |= check_below(8) ? 0 : NLA_F_NESTED;
		attribute.nla_len = (uint16_t)(NLA_HDRLEN + nbytes);
		memcpy(message.bytes + message.used, &attribute, sizeof(attribute));
		memset(message.bytes + message.used + NLA_HDRLEN, (int)check_below(2), nbytes);
		if (!known && nbytes && (attribute.nla_type & NLA_TYPE_MASK) == 93) {
			known = true;
			expected = message.bytes[message.used + NLA_HDRLEN] != 0;
		}
		message.used += NLA_ALIGN(attribute.nla_len);
	}
	header.nlmsg_len = (uint32_t)message.used;
	memcpy(message.bytes, &header, sizeof(header));
	CHECK(rf_sys_rdma_copy_on_fork() == expected, "not %d", expected);
	/* A question that could not be asked has no answer: "does not copy" would be one. */
	for (i = 0; i < COUNT_OF(calls); i++) {
		refused = calls[i];
		CHECK(rf_sys_rdma_copy_on_fork() == -EPERM, "%s", refused);
	}
	refused = NULL;
	message.used = sizeof(header) - 1;
	CHECK(rf_sys_rdma_copy_on_fork() == -EPROTO);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t nbytes)
{
	static void (*const all[])(void) = { any_maps, any_message, any_version,
					     mappings_are_found, answers_are_understood };
	size_t which;

	check_play(input, nbytes);
	replaced_count = 0;
	which = check_below(COUNT_OF(all));
	most_read = 1 + check_below(5000);
	all[which]();
	return 0;
}
