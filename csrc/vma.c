/* SPDX-License-Identifier: BSD-3-Clause */
#include "vma.h"
#include "open_files.h"

#include <errno.h>
#include <string.h>
#include <sys/sysmacros.h>

static uint8_t base_shift(void)
{
	return (uint8_t)__builtin_ctzl(rf_sys_page_size());
}

void rf_vma_init(struct rf_vma_reader *reader, bool query, unsigned int huge_shift)
{
	memset(reader, 0, sizeof(*reader));
	reader->query = query;
	reader->huge_shift = huge_shift;
	reader->table.item_size = sizeof(struct rf_vma);
	reader->fd = -1;
}

/* Hexadecimal digits from *@at on, no more than fit, and @after behind them. */
static bool parse_hex(const char *line, size_t length, size_t *at, char after, uint64_t *value)
{
	const size_t first = *at;
	unsigned int digit;

	*value = 0;
	for (; *at < length && *at - first < 16; ++*at) {
		char c = line[*at];

		if (c >= '0' && c <= '9')
			digit = (unsigned int)(c - '0');
		else if (c >= 'a' && c <= 'f')
			digit = (unsigned int)(c - 'a' + 10);
		else
			break;
		*value = *value << 4 | digit;
	}
	return *at > first && *at < length && line[(*at)++] == after;
}

/* "7f00-7f10 rw-p 00000000 00:00 0     path" */
bool rf_vma_parse(const char *line, size_t length, struct rf_vma *vma, struct rf_file *file)
{
	uint64_t start, end, skipped, device_major, device_minor;
	size_t at = 0, permissions;

	if (!parse_hex(line, length, &at, '-', &start) ||
	    !parse_hex(line, length, &at, ' ', &end) || start >= end || end > UINTPTR_MAX)
		return false;
	permissions = at;
	at += 5;
	if (at >= length || line[at - 1] != ' ' ||
	    !parse_hex(line, length, &at, ' ', &skipped) ||
	    !parse_hex(line, length, &at, ':', &device_major) ||
	    !parse_hex(line, length, &at, ' ', &device_minor) ||
	    at >= length || line[at] < '0' || line[at] > '9')
		return false;
	vma->start = (uintptr_t)start;
	vma->end = (uintptr_t)end;
	vma->protection = (line[permissions] == 'r' ? PROT_READ : 0) |
			  (line[permissions + 1] == 'w' ? PROT_WRITE : 0) |
			  (line[permissions + 2] == 'x' ? PROT_EXEC : 0);
	vma->shared = line[permissions + 3] == 's';
	vma->shift = base_shift();
	vma->anonymous = line[at] == '0';
	file->device = makedev((unsigned int)device_major, (unsigned int)device_minor);
	for (file->inode = 0; at < length && line[at] >= '0' && line[at] <= '9'; at++)
		file->inode = 10 * file->inode + (uint64_t)(line[at] - '0');
	return true;
}

void rf_vma_replace_file(const struct rf_file *file)
{
	struct rf_text text = { .fd = rf_transient_open("/proc/thread-self/maps") };
	struct rf_file mapped;
	struct rf_vma vma;
	const char *line;
	size_t length;

	if (text.fd < 0)
		return;
	while (rf_text_next(&text, &line, &length) > 0)
		if (rf_vma_parse(line, length, &vma, &mapped) && mapped.device == file->device &&
		    mapped.inode == file->inode)
			(void)rf_sys_map_over(vma.start, vma.end - vma.start);
	rf_transient_close(text.fd);
}

/* All of maps into the table. */
static int read_table(struct rf_vma_reader *reader)
{
	struct rf_text text = { .fd = reader->fd };
	struct rf_file file;
	struct rf_vma vma;
	const char *line;
	size_t length;
	int rc;

	while ((rc = rf_text_next(&text, &line, &length)) > 0) {
		if (!rf_vma_parse(line, length, &vma, &file))
			continue;
		rc = rf_memory_grow(&reader->table, reader->count + 1);
		if (rc < 0)
			break;
		((struct rf_vma *)reader->table.items)[reader->count++] = vma;
	}
	reader->questions += text.reads;
	return rc;
}

/* The rest of the round is answered from the table. */
static int use_table(struct rf_vma_reader *reader)
{
	int rc = read_table(reader);

	reader->text = rc < 0 ? rc : 1;
	return rc;
}

int rf_vma_open(struct rf_vma_reader *reader)
{
	int rc;

	if (reader->depth) {
		reader->depth++;
		return 0;
	}
	reader->fd = rf_transient_open("/proc/thread-self/maps");
	if (reader->fd < 0)
		return reader->fd;
	reader->depth = 1;
	reader->text = 0;
	reader->count = 0;
	reader->last.start = 0;
	reader->last.end = 0;
	rc = reader->query ? 0 : use_table(reader);
	if (rc < 0)
		rf_vma_close(reader);
	return rc;
}

void rf_vma_close(struct rf_vma_reader *reader)
{
	if (--reader->depth)
		return;
	rf_transient_close(reader->fd);
	reader->fd = -1;
}

/* The page size of @vma, from smaps. */
static int find_page_size(struct rf_vma_reader *reader, struct rf_vma *vma)
{
	struct rf_text text = { .fd = rf_transient_open("/proc/thread-self/smaps") };
	struct rf_file file;
	struct rf_vma header;
	const char *line;
	bool found = false;
	uint64_t kib = 0;
	size_t length;
	int rc;

	if (text.fd < 0)
		return text.fd;
	while ((rc = rf_text_next(&text, &line, &length)) > 0) {
		if (rf_vma_parse(line, length, &header, &file))
			found = header.start <= vma->start && vma->start < header.end;
		else if (found && rf_text_kib(line, length, "KernelPageSize:", &kib))
			break;
	}
	rf_transient_close(text.fd);
	reader->questions += text.reads;
	if (kib && !(kib & (kib - 1)))
		vma->shift = (uint8_t)(10 + __builtin_ctzll(kib));
	return rc < 0 ? rc : 0;
}

static bool may_be_huge(const struct rf_vma_reader *reader, const struct rf_vma *vma)
{
	uintptr_t mask = ((uintptr_t)1 << reader->huge_shift) - 1;

	return reader->huge_shift && !vma->anonymous && !(vma->start & mask) &&
	       !(vma->end & mask);
}

static int find_in_table(struct rf_vma_reader *reader, uintptr_t address, struct rf_vma *vma)
{
	const struct rf_vma *table = reader->table.items;
	uint32_t low = 0, high = reader->count, middle;

	while (low < high) {
		middle = low + (high - low) / 2;
		if (table[middle].end <= address)
			low = middle + 1;
		else
			high = middle;
	}
	if (low == reader->count)
		return -ENOENT;
	*vma = table[low];
	return may_be_huge(reader, vma) ? find_page_size(reader, vma) : 0;
}

/*
 * Each failure may be a sandbox's refusal, with any errno. -ENOENT may be the kernel's answer,
 * above the stack: the text says the same.
 */
static int query(struct rf_vma_reader *reader, uintptr_t address, struct rf_vma *vma)
{
	int rc;

	reader->questions++;
	rc = rf_sys_procmap_query(reader->fd, address, vma);
	if (rc >= 0)
		return rc;
	rc = use_table(reader);
	return rc < 0 ? rc : find_in_table(reader, address, vma);
}

int rf_vma_find(struct rf_vma_reader *reader, uintptr_t address, struct rf_vma *vma)
{
	int rc;

	if (reader->last.start <= address && address < reader->last.end) {
		*vma = reader->last;
		return 0;
	}
	if (reader->text < 0)
		return reader->text;
	rc = reader->text ? find_in_table(reader, address, vma) : query(reader, address, vma);
	if (rc >= 0)
		reader->last = *vma;
	return rc;
}

int rf_vma_part(struct rf_vma_reader *reader, uintptr_t start, uintptr_t end, struct rf_vma *vma,
		uintptr_t *stop)
{
	int rc = rf_vma_find(reader, start, vma);
	uintptr_t next;

	if (rc < 0 && rc != -ENOENT)
		return rc;
	if (rc < 0) {
		*stop = end;
		return 0;
	}
	next = vma->start <= start ? vma->end : vma->start;
	*stop = next < end ? next : end;
	return vma->start <= start;
}
