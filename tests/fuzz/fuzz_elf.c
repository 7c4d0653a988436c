/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The reader of loaded objects. What it is told of an object is what the loader has mapped,
 * its loaded segments, which end where nothing is mapped; all else, its other headers, its
 * dynamic section and every table, is any bytes: nothing else may be read, and what is
 * found lies in the segments. Or an object is made up as a linker would, and what it
 * defines, what it refers to and what it needs must be found, and nothing else.
 */
#define _GNU_SOURCE /* struct dl_phdr_info */
#include "check.h"
#include "fuzz.h"
#include "preload/elf.h"

#define SEGMENTS 4
#define SEGMENT_PAGES 2
#define PAGE ((uintptr_t)4096)
#define IMAGE_PAGES (SEGMENTS * (SEGMENT_PAGES + 1) + 1)
#define NAMES 6

#if defined(__x86_64__)
#define SLOT_TYPES { R_X86_64_JUMP_SLOT, R_X86_64_GLOB_DAT, R_X86_64_64, R_X86_64_RELATIVE }
#else
#define SLOT_TYPES { R_AARCH64_JUMP_SLOT, R_AARCH64_GLOB_DAT, R_AARCH64_ABS64, R_AARCH64_RELATIVE }
#endif

static const uint32_t slot_types[] = SLOT_TYPES;

static const char *const names[NAMES] = {
	"ibv_dofork_range",
	"ibv_dontfork_range",
	"ibv_fork_init",
	"ibv_is_fork_initialized",
	"rf_abi",
	"x",
};

static char *image;
#define HEADERS (SEGMENTS + 4)

static rf_elf_header headers[HEADERS + 2]; /* and notes: the last page of a segment, and all */
static struct dl_phdr_info info;

static struct segment {
	uintptr_t start, end;
	unsigned int flags;
} segments[SEGMENTS];

static size_t segment_count;

static bool lies(uintptr_t start, size_t nbytes, unsigned int flags)
{
	size_t i;

	for (i = 0; i < segment_count; i++)
		if (segments[i].start <= start && start < segments[i].end)
			return segments[i].end - start >= nbytes &&
			       (segments[i].flags & flags) == flags;
	return false;
}

static void add_header(uint32_t type, unsigned int flags, uintptr_t start, uintptr_t end)
{
	headers[info.dlpi_phnum++] = (rf_elf_header){
		.p_type = type,
		.p_flags = flags,
		.p_vaddr = start - info.dlpi_addr,
		.p_memsz = end - start,
	};
}

/* Each ends with a page, so that a byte beyond it is a fault. */
static void add_segment(unsigned int flags, size_t pages, size_t skipped)
{
	struct segment *segment = &segments[segment_count];
	char *first = image + (segment_count++ * (SEGMENT_PAGES + 1) + 1) * PAGE;

	CHECK(!mprotect(first, pages * PAGE, PROT_READ | PROT_WRITE));
	memset(first, 0, pages * PAGE);
	segment->start = (uintptr_t)first + skipped;
	segment->end = (uintptr_t)first + pages * PAGE;
	segment->flags = flags;
	add_header(PT_LOAD, flags, segment->start, segment->end);
}

static void begin(void)
{
	size_t nbytes = IMAGE_PAGES * PAGE;

	if (!image)
		image = mmap(NULL, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(image != MAP_FAILED);
	CHECK(!mprotect(image, nbytes, PROT_NONE));
	segment_count = 0;
	info = (struct dl_phdr_info){
		.dlpi_name = "made up",
		.dlpi_phdr = headers,
		.dlpi_addr = (uintptr_t)image,
	};
}

static void use(void)
{
	struct rf_elf object;
	const char *name = NULL;
	uintptr_t *slot, found;
	size_t i, at = 0, slots = 0;
	char build_id[41];

	add_header(PT_NOTE, PF_R, segments[0].end - PAGE, segments[0].end);
	add_header(PT_NOTE, PF_R, segments[0].start, UINTPTR_MAX);
	(void)rf_elf_read(&object, &info);
	rf_elf_build_id(&object, build_id, sizeof(build_id));
	CHECK(strlen(build_id) < sizeof(build_id));
	if (!rf_elf_read(&object, &info))
		return;
	for (i = 0; i < NAMES; i++) {
		found = rf_elf_find(&object, names[i]);
		CHECK(!found || lies(found, 1, PF_R | PF_X));
		(void)rf_elf_needs(&object, names[i]);
	}
	(void)strlen(object.soname);
	while ((slot = rf_elf_next_got(&object, &at, &name))) {
		CHECK(lies((uintptr_t)slot, sizeof(*slot), PF_R | PF_W));
		slots += *slot + strlen(name);
	}
	(void)slots;
}

/* ---- Any bytes ---- */

static uint64_t any_word(void)
{
	uint64_t value = 0;
	size_t i;

	for (i = 0; i < 8; i++)
		value = value << 8 | check_below(256);
	return value;
}

/* Mostly one that lies somewhere near. */
static uintptr_t any_address(void)
{
	const struct segment *segment = &segments[check_below(segment_count)];
	size_t shape = check_below(8);

	if (!shape)
		return (uintptr_t)any_word();
	if (shape == 1)
		return segment->end - check_below(64);
	if (shape == 2)
		return segment->start + check_below(64) - 32;
	return (segment->start + check_below(segment->end - segment->start)) & ~(uintptr_t)7;
}

static uint64_t any_value(void)
{
	size_t shape = check_below(4);

	if (!shape)
		return any_word();
	return shape == 1 ? any_address() : check_below(shape == 2 ? 8 : 5000);
}

static void any_object(void)
{
	static const int64_t tags[] = {
		DT_SYMTAB,
		DT_STRTAB,
		DT_STRSZ,
		DT_HASH,
		DT_GNU_HASH,
		DT_JMPREL,
		DT_PLTREL,
		DT_PLTRELSZ,
		DT_RELA,
		DT_RELASZ,
		DT_RELACOUNT,
		DT_SONAME,
		DT_NEEDED,
		DT_NULL,
	};
	static const unsigned int flags[] = { PF_R, PF_R | PF_W, PF_R | PF_X, PF_X };
	rf_elf_entry *dynamic;
	size_t i, count = 1 + check_below(SEGMENTS);

	for (i = 0; i < count; i++)
		add_segment(flags[check_below(COUNT_OF(flags))], 1 + check_below(SEGMENT_PAGES),
			    check_below(2) ? 0 : check_below(PAGE));
	for (i = check_below(5); i; i--)
		add_header(check_below(2) ? PT_DYNAMIC : PT_GNU_RELRO, PF_R, any_address(),
			   any_address());
	/* One that can be read, as none of the rest is looked at else. */
	dynamic = (rf_elf_entry *)((segments[0].start + 7) & ~(uintptr_t)7);
	if (info.dlpi_phnum < HEADERS)
		add_header(PT_DYNAMIC, PF_R, (uintptr_t)dynamic, segments[0].end);
	for (i = 0; !check_played() && (uintptr_t)(dynamic + 1) <= segments[0].end && i < 24; i++) {
		dynamic->d_tag = check_below(16) ? tags[check_below(COUNT_OF(tags) - 1)]
						 : (int64_t)any_word();
		dynamic++->d_un.d_val = any_value();
	}
	/* A DT_NULL may follow, or the end. */
	while (!check_played()) {
		uintptr_t at = any_address();
		uint64_t value = any_value();

		if (lies(at, sizeof(value), 0))
			memcpy((void *)at, &value, sizeof(value));
		else if (lies(at, 1, 0))
			*(char *)at = (char)value;
	}
	use();
}

/* ---- Objects as a linker writes them ---- */

static rf_elf_entry *entries;

static void add_entry(int64_t tag, uint64_t value)
{
	entries->d_tag = tag;
	entries++->d_un.d_val = value;
}

static uint32_t gnu_hash_of(const char *name)
{
	uint32_t hash = 5381;

	for (; *name; name++)
		hash = hash * 33 + (unsigned char)*name;
	return hash;
}

/* Symbol n + 1 is the name order[n]; symbols from @first on are in the table. */
static void write_gnu_hash(uint32_t *table, const size_t *order, size_t first, uint32_t buckets)
{
	uint32_t *heads = table + 4 + 2, *chain = heads + buckets, hash, bucket;
	size_t i;

	table[0] = buckets;
	table[1] = (uint32_t)first + 1;
	table[2] = 1;
	for (i = first; i < NAMES; i++) {
		hash = gnu_hash_of(names[order[i]]);
		bucket = hash % buckets;
		if (!heads[bucket])
			heads[bucket] = (uint32_t)i + 1;
		chain[i - first] = hash & ~1u;
		if (i + 1 == NAMES || gnu_hash_of(names[order[i + 1]]) % buckets != bucket)
			chain[i - first] |= 1;
	}
}

static struct {
	uintptr_t defined[NAMES];
	uintptr_t *slots;
	rf_elf_relocation *relocations;
	rf_elf_symbol *symbols;
	char *strings;
	size_t slot_count;
} linked;

/* Sorted by their bucket, each name at most once; the first of them are not defined. */
static void choose_symbols(size_t *order, size_t first, uint32_t buckets)
{
	size_t i, j, name;

	for (i = 0; i < NAMES; i++)
		order[i] = i;
	for (i = first; i < NAMES; i++) {
		for (j = i; j > first; j--) {
			if (gnu_hash_of(names[order[j - 1]]) % buckets <=
			    gnu_hash_of(names[order[j]]) % buckets)
				break;
			name = order[j];
			order[j] = order[j - 1];
			order[j - 1] = name;
		}
	}
}

static size_t write_symbols(const size_t *order, size_t first)
{
	size_t i, used = 1;

	for (i = 0; i < NAMES; i++) {
		rf_elf_symbol *symbol = &linked.symbols[i + 1];
		size_t name = order[i];

		linked.defined[name] = i < first ? 0 : segments[1].start + 32 * i;
		symbol->st_name = (uint32_t)used;
		symbol->st_info = STT_FUNC;
		symbol->st_shndx = i < first ? SHN_UNDEF : 7;
		symbol->st_value = i < first ? 0 : linked.defined[name] - info.dlpi_addr;
		used += (size_t)sprintf(linked.strings + used, "%s", names[name]) + 1;
	}
	return used;
}

static void write_slots(void)
{
	size_t i;

	linked.slot_count = 1 + check_below(8);
	for (i = 0; i < linked.slot_count; i++) {
		rf_elf_relocation *relocation = &linked.relocations[i];

		relocation->r_offset = (uintptr_t)&linked.slots[i] - info.dlpi_addr;
		relocation->r_info = ELF64_R_INFO((uint64_t)1 + check_below(NAMES),
						  slot_types[check_below(COUNT_OF(slot_types))]);
		relocation->r_addend = !check_below(4);
	}
}

static void link_object(void)
{
	const bool gnu = check_below(2);
	const uint32_t buckets = 1 + (uint32_t)check_below(3);
	const size_t first = check_below(NAMES + 1);
	/* Addresses are relocated, but in the vDSO. */
	const uintptr_t base = check_below(2) ? info.dlpi_addr : 0;
	size_t order[NAMES], used, needed;
	uint32_t *table;

	add_segment(PF_R, 1, 0);
	add_segment(PF_R | PF_X, 1, 0);
	add_segment(PF_R | PF_W, 1, 0);
	linked.symbols = (rf_elf_symbol *)segments[0].start;
	linked.strings = (char *)(linked.symbols + NAMES + 1);
	linked.slots = (uintptr_t *)segments[2].start;
	choose_symbols(order, first, buckets);
	used = needed = write_symbols(order, first);
	used += (size_t)sprintf(linked.strings + used, "libneeded.so.1") + 1;
	table = (uint32_t *)((uintptr_t)(linked.strings + used + 7) & ~(uintptr_t)7);
	linked.relocations = (rf_elf_relocation *)(table + 32);
	write_slots();
	if (gnu) {
		write_gnu_hash(table, order, first, buckets);
	} else {
		table[0] = 1;
		table[1] = NAMES + 1;
	}
	entries = (rf_elf_entry *)(linked.slots + 16);
	add_header(PT_DYNAMIC, PF_R, (uintptr_t)entries, segments[2].end);
	add_entry(DT_SYMTAB, (uintptr_t)linked.symbols - base);
	add_entry(DT_STRTAB, (uintptr_t)linked.strings - base);
	add_entry(DT_STRSZ, used);
	add_entry(gnu ? DT_GNU_HASH : DT_HASH, (uintptr_t)table);
	add_entry(DT_NEEDED, needed);
	add_entry(DT_RELA, (uintptr_t)linked.relocations);
	add_entry(DT_RELASZ, linked.slot_count * sizeof(*linked.relocations));
}

static void a_linked_object(void)
{
	struct rf_elf object;
	const char *name = NULL;
	size_t i, at = 0;

	link_object();
	CHECK(rf_elf_read(&object, &info));
	for (i = 0; i < NAMES; i++)
		CHECK(rf_elf_find(&object, names[i]) == linked.defined[i], "%s: %lx, not %lx",
		      names[i], rf_elf_find(&object, names[i]), linked.defined[i]);
	CHECK(rf_elf_needs(&object, "libneeded.so.1") && !rf_elf_needs(&object, "needed"));
	for (i = 0; i < linked.slot_count; i++) {
		const rf_elf_relocation *relocation = &linked.relocations[i];
		const rf_elf_symbol *symbol = &linked.symbols[ELF64_R_SYM(relocation->r_info)];

		if (relocation->r_addend ||
		    ELF64_R_TYPE(relocation->r_info) == slot_types[COUNT_OF(slot_types) - 1])
			continue;
		CHECK(rf_elf_next_got(&object, &at, &name) == &linked.slots[i], "slot %zu", i);
		CHECK(!strcmp(name, linked.strings + symbol->st_name));
	}
	CHECK(!rf_elf_next_got(&object, &at, &name));
}

/* The same, some of whose words are others. */
static void a_changed_object(void)
{
	uint64_t *words[3];
	size_t i, which, at;

	link_object();
	for (i = 0; i < 3; i++)
		words[i] = (uint64_t *)segments[i].start;
	while (!check_played()) {
		which = 2 * check_below(2);
		at = check_below(96);
		if (check_below(2))
			words[which][at] = any_value();
		else
			((uint32_t *)words[which])[2 * at + check_below(2)] =
				(uint32_t)any_value();
	}
	use();
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t nbytes)
{
	static void (*const all[])(void) = { any_object, a_changed_object, a_changed_object,
					     a_linked_object };

	check_play(input, nbytes);
	begin();
	all[check_below(COUNT_OF(all))]();
	return 0;
}
