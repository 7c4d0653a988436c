/* SPDX-License-Identifier: BSD-3-Clause */
/* Mappings: one line of text, the whole table, and the kernel's own answer. */
#define _GNU_SOURCE
#include "check.h"
#include "kernel.h"
#include "vma.h"

#include <fcntl.h>
#include <sys/stat.h>

static void lines_are_parsed(void)
{
	static const struct {
		const char *line;
		bool good;
		uintptr_t start, end;
		bool shared, writable, anonymous;
	} cases[] = {
		{ "7f00-7f10 rw-p 00000000 00:00 0 ", true, 0x7f00, 0x7f10, false, true, true },
		{ "7f00-7f10 rw-p 00000000 00:00 0", true, 0x7f00, 0x7f10, false, true, true },
		{ "55d0c0000000-55d0c0021000 rw-p 00000000 00:00 0                [heap]", true,
		  0x55d0c0000000, 0x55d0c0021000, false, true, true },
		{ "7f0000000000-7f0000001000 r--s 00001000 fd:01 123456   /a file", true,
		  0x7f0000000000, 0x7f0000001000, true, false, false },
		{ "7f0000000000-7f0000001000 r-xp 1000 fd:01 9 /a\\012b 7f-80 rw-p 0 0:0 0", true,
		  0x7f0000000000, 0x7f0000001000, false, false, false },
		{ "ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0      [vsyscall]", true,
		  0xffffffffff600000, 0xffffffffff601000, false, false, true },
		{ "0-ffffffffffffffff rw-s ffffffffffffffff ff:ff 18446744073709551615", true, 0,
		  UINTPTR_MAX, true, true, false },
		{ "", false, 0, 0, false, false, false },
		{ "-", false, 0, 0, false, false, false },
		{ "7f00", false, 0, 0, false, false, false },
		{ "7f00-", false, 0, 0, false, false, false },
		{ "7f00-7f10", false, 0, 0, false, false, false },
		{ "7f00-7f10 ", false, 0, 0, false, false, false },
		{ "7f00-7f10 rw-p", false, 0, 0, false, false, false },
		{ "7f00-7f10 rw-p ", false, 0, 0, false, false, false },
		{ "7f00-7f10 rw-p 0", false, 0, 0, false, false, false },
		{ "7f00-7f10 rw-p 0 0", false, 0, 0, false, false, false },
		{ "7f00-7f10 rw-p 0 0:", false, 0, 0, false, false, false },
		{ "7f00-7f10 rw-p 0 0:0", false, 0, 0, false, false, false },
		{ "7f00-7f10 rw-p 0 0:0 ", false, 0, 0, false, false, false },
		{ "7f10-7f00 rw-p 0 0:0 0", false, 0, 0, false, false, false },
		{ "7f00-7f00 rw-p 0 0:0 0", false, 0, 0, false, false, false },
		{ "7f00-7f10 rw-p 0 0:0 x", false, 0, 0, false, false, false },
		{ "7f00-7f10  rw-p 0 0:0 0", false, 0, 0, false, false, false },
		{ " 7f00-7f10 rw-p 0 0:0 0", false, 0, 0, false, false, false },
		{ "7F00-7F10 rw-p 0 0:0 0", false, 0, 0, false, false, false },
		{ "10000000000007f00-10000000000007f10 r--p 0 0:0 0", false, 0, 0, false, false,
		  false },
		{ "Size:                  4 kB", false, 0, 0, false, false, false },
		{ "VmFlags: rd wr mr mw me dc", false, 0, 0, false, false, false },
	};
	size_t i, cut;

	for (i = 0; i < COUNT_OF(cases); i++) {
		size_t length = strlen(cases[i].line);
		/* In a mapping's last bytes, so that a read too far is a fault. */
		char *page = check_map(1), *line = page + check_page - length;
		struct rf_file file;
		struct rf_vma vma;
		bool good;

		memcpy(line, cases[i].line, length);
		good = rf_vma_parse(line, length, &vma, &file);
		CHECK(good == cases[i].good, "\"%s\"", cases[i].line);
		if (good) {
			CHECK(vma.start == cases[i].start && vma.end == cases[i].end);
			CHECK(vma.shared == cases[i].shared, "\"%s\"", cases[i].line);
			CHECK(!!(vma.protection & PROT_WRITE) == cases[i].writable);
			CHECK(vma.anonymous == cases[i].anonymous, "\"%s\"", cases[i].line);
			CHECK(1ul << vma.shift == check_page);
		}
		for (cut = 0; cut <= length; cut++) {
			memmove(page + check_page - cut, cases[i].line, cut);
			(void)rf_vma_parse(page + check_page - cut, cut, &vma, &file);
		}
	}
}

static void garbage_is_survived(void)
{
	static const char letters[] = "0123456789abcdef- :rwxps\n/\\.xX";
	unsigned long round, rounds = check_scale(300000);
	char line[80];
	size_t i;

	for (round = 0; round < rounds; round++) {
		size_t length = check_below(sizeof(line));
		struct rf_file file;
		struct rf_vma vma;

		if (round & 1)
			strcpy(line, "7f0000000000-7f0000001000 r--s 0001000 fd:01 123456 /a file");
		for (i = 0; i < length; i++)
			if (!(round & 1) || !check_below(20))
				line[i] = letters[check_below(sizeof(letters) - 1)];
		if (rf_vma_parse(line, length, &vma, &file))
			CHECK(vma.start < vma.end);
	}
}

static struct rf_vma_reader by_query, by_text;

static void open_both(void)
{
	struct rf_kernel kernel;

	rf_kernel_info(&kernel);
	if (!kernel.procmap_query)
		check_skip("%s has no PROCMAP_QUERY", kernel.release);
	rf_vma_init(&by_query, true, rf_kernel_huge_shift(&kernel));
	rf_vma_init(&by_text, false, rf_kernel_huge_shift(&kernel));
	/* The table's first growth maps memory, which is not to be news to it. */
	CHECK(rf_vma_open(&by_text) == 0);
	rf_vma_close(&by_text);
	CHECK(rf_vma_open(&by_text) == 0);
	CHECK(rf_vma_open(&by_query) == 0);
}

static void close_both(void)
{
	rf_vma_close(&by_query);
	rf_vma_close(&by_text);
}

static void compare_at(uintptr_t address)
{
	struct rf_vma query = { 0 }, text = { 0 };
	int query_rc = rf_vma_find(&by_query, address, &query);
	int text_rc = rf_vma_find(&by_text, address, &text);

	/* The vsyscall page is no mapping, but maps lists it. */
	if (text_rc == 0 && text.start == 0xffffffffff600000)
		return;
	CHECK(query_rc == text_rc, "%lx: %d, %d", address, query_rc, text_rc);
	if (query_rc < 0) {
		CHECK(query_rc == -ENOENT);
		return;
	}
	CHECK(query.start == text.start && query.end == text.end,
	      "%lx: [%lx, %lx) by query, [%lx, %lx) by text", address, query.start, query.end,
	      text.start, text.end);
	CHECK(query.shift == text.shift, "[%lx, %lx): shift %d, %d by text", query.start, query.end,
	      query.shift, text.shift);
	CHECK(query.shared == text.shared && query.protection == text.protection);
	CHECK(query.anonymous == text.anonymous, "[%lx, %lx)", query.start, query.end);
	CHECK(query.end > address);
}

static void compare_everywhere(void)
{
	uintptr_t address = 0;
	struct rf_vma vma;

	open_both();
	while (rf_vma_find(&by_query, address, &vma) == 0) {
		compare_at(vma.start ? vma.start - 1 : 0);
		compare_at(vma.start);
		compare_at(vma.end - 1);
		compare_at(vma.end);
		address = vma.end;
	}
	compare_at(address);
	compare_at(UINTPTR_MAX);
	compare_at(UINTPTR_MAX / 2);
	compare_at(0);
	close_both();
}

static void text_and_query_agree(void)
{
	char *memory = check_map(40), name[] = "/tmp/rdmafork-test-XXXXXX";
	int fd = mkstemp(name), i;

	CHECK(fd >= 0 && !unlink(name) && !ftruncate(fd, 1 << 20));
	CHECK(mmap(memory, check_page, PROT_READ, MAP_PRIVATE | MAP_FIXED, fd, 0) == memory);
	CHECK(mmap(memory + 2 * check_page, check_page, PROT_READ | PROT_WRITE,
		   MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED);
	for (i = 5; i < 40; i += 2)
		CHECK(!mprotect(memory + (size_t)i * check_page, check_page, PROT_READ));
	check_map_shared(3);
	compare_everywhere();
}

static void descriptor_0_is_one_like_others(void)
{
	/* A program that has closed its standard input: /proc is opened in its place. */
	CHECK(close(0) == 0);
	compare_everywhere();
	CHECK(close(0) == -1);
}

static void huge_pages_are_known(void)
{
	char *private = check_map_huge_any(2, MAP_PRIVATE);
	char *shared = check_map_huge_any(1, MAP_SHARED);
	struct rf_vma vma;

	open_both();
	/* The file that is opened for a page's size may be descriptor 0. */
	CHECK(close(0) == 0);
	CHECK(rf_vma_find(&by_text, (uintptr_t)private + 5, &vma) == 0 && vma.shift == 21);
	CHECK(rf_vma_find(&by_query, (uintptr_t)private + 5, &vma) == 0 && vma.shift == 21);
	CHECK(rf_vma_find(&by_query, (uintptr_t)shared, &vma) == 0 && vma.shared);
	CHECK(rf_vma_find(&by_text, (uintptr_t)shared, &vma) == 0 && vma.shared);
	close_both();
	compare_everywhere();
}

/* A path longer than one read, of which a piece looks like a line of maps. */
static void a_long_path_is_no_mapping(void)
{
	static const char fake[] = "1000-7fffffff0000 rw-p 00000000 00:00 0 ";
	char folder[] = "/tmp/rdmafork-test-XXXXXX", command[64], part[256], name[64], *memory;
	int top, at, next, fd, depth;
	bool deceived = false;
	size_t shift;
	uint32_t i;

	CHECK(mkdtemp(folder));
	top = open(folder, O_RDONLY | O_DIRECTORY);
	CHECK(top >= 0 && !mkdirat(top, "y", 0700));
	at = openat(top, "y", O_RDONLY | O_DIRECTORY);
	memset(part, 'x', sizeof(part));
	for (shift = 0; shift + sizeof(fake) < 250; shift += sizeof(fake) - 1)
		memcpy(part + shift, fake, sizeof(fake) - 1);
	part[shift] = '\0';
	for (depth = 0; depth < 24; depth++) {
		CHECK(at >= 0 && !mkdirat(at, part, 0700), "%s", strerror(errno));
		next = openat(at, part, O_RDONLY | O_DIRECTORY);
		close(at);
		at = next;
	}
	fd = openat(at, "file", O_RDWR | O_CREAT, 0600);
	CHECK(fd >= 0);
	memory = mmap(NULL, check_page, PROT_READ, MAP_PRIVATE, fd, 0);
	CHECK(memory != MAP_FAILED);
	/* The first folder's name moves the rest of the path: one of the moves hits the cut. */
	strcpy(name, "y");
	for (shift = 0; shift < sizeof(fake); shift++) {
		char before[64];

		strcpy(before, name);
		strcat(name, "y");
		CHECK(!renameat(top, before, top, name));
		open_both();
		for (i = 0; i < by_text.count; i++)
			deceived |= ((struct rf_vma *)by_text.table.items)[i].start == 0x1000;
		compare_at((uintptr_t)memory);
		close_both();
	}
	snprintf(command, sizeof(command), "rm -rf %s", folder);
	CHECK(!system(command));
	CHECK(!deceived, "a file's name was taken for a mapping");
}

static void rounds_share_their_answers(void)
{
	struct rf_vma vma;
	uint64_t asked;

	open_both();
	CHECK(rf_vma_find(&by_query, (uintptr_t)&vma, &vma) == 0);
	asked = by_query.questions;
	CHECK(rf_vma_open(&by_query) == 0 && by_query.depth == 2);
	CHECK(rf_vma_find(&by_query, (uintptr_t)&vma, &vma) == 0);
	CHECK(by_query.questions == asked);
	rf_vma_close(&by_query);
	CHECK(by_query.fd >= 0 && by_query.depth == 1);
	close_both();
	CHECK(by_query.fd < 0 && by_text.fd < 0);
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(lines_are_parsed),
		SCENARIO(garbage_is_survived),
		SCENARIO(text_and_query_agree),
		SCENARIO(descriptor_0_is_one_like_others),
		SCENARIO_HUGE(huge_pages_are_known),
		SCENARIO(a_long_path_is_no_mapping),
		SCENARIO(rounds_share_their_answers),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
