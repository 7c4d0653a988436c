/* SPDX-License-Identifier: BSD-3-Clause */
#define _GNU_SOURCE /* struct dl_phdr_info */
#include "elf.h"
#include "sys.h"

#include <string.h>
#include <sys/auxv.h>

#if defined(__x86_64__)
#define IS_GOT(type) \
	((type) == R_X86_64_JUMP_SLOT || (type) == R_X86_64_GLOB_DAT || (type) == R_X86_64_64)
#elif defined(__aarch64__)
#define IS_GOT(type)                                                        \
	((type) == R_AARCH64_JUMP_SLOT || (type) == R_AARCH64_GLOB_DAT ||   \
	 (type) == R_AARCH64_ABS64)
#else
#define IS_GOT(type) ((void)(type), false)
#endif

/* Bytes from @address to the end of the loaded segment it lies in, if that has @flags; else 0. */
static size_t room_at(const struct rf_elf *object, uintptr_t address, unsigned int flags)
{
	size_t i;

	for (i = 0; i < object->header_count; i++) {
		const rf_elf_header *header = &object->headers[i];
		uintptr_t offset = address - (object->base + header->p_vaddr);

		if (header->p_type == PT_LOAD && offset < header->p_memsz)
			return (header->p_flags & flags) == flags ? header->p_memsz - offset : 0;
	}
	return 0;
}

/*
 * A table of items of @size bytes, and how many there is room for. glibc has relocated the
 * addresses in the dynamic section, but in the vDSO's.
 */
static const void *table_at(const struct rf_elf *object, uintptr_t address, size_t size,
			    size_t *count)
{
	const uintptr_t mask = size < sizeof(address) ? size - 1 : sizeof(address) - 1;

	if (address && address < object->base)
		address += object->base;
	*count = address && !(address & mask) ? room_at(object, address, PF_R) / size : 0;
	return *count ? (const void *)address : NULL;
}

static const char *string_at(const struct rf_elf *object, size_t offset)
{
	return offset < object->string_bytes ? object->strings + offset : "";
}

static void read_strings(struct rf_elf *object, uintptr_t address, size_t nbytes)
{
	object->strings = table_at(object, address, 1, &object->string_bytes);
	if (object->string_bytes > nbytes)
		object->string_bytes = nbytes;
	if (!object->string_bytes || object->strings[object->string_bytes - 1])
		object->strings = NULL;
	if (!object->strings)
		object->string_bytes = 0;
}

/* At most @nbytes of them. */
static const rf_elf_relocation *relocations_at(const struct rf_elf *object, uintptr_t address,
					       size_t nbytes, size_t *count)
{
	const rf_elf_relocation *table = table_at(object, address, sizeof(*table), count);

	if (*count > nbytes / sizeof(*table))
		*count = nbytes / sizeof(*table);
	return table;
}

static void read_dynamic(struct rf_elf *object)
{
	uintptr_t values[DT_NUM] = { 0 }, gnu_hash = 0;
	const rf_elf_entry *entry = object->dynamic;
	size_t relative = 0, i;

	for (i = 0; i < object->entry_count && entry->d_tag != DT_NULL; i++, entry++) {
		if (entry->d_tag > 0 && entry->d_tag < DT_NUM)
			values[entry->d_tag] = entry->d_un.d_ptr;
		else if (entry->d_tag == DT_GNU_HASH)
			gnu_hash = entry->d_un.d_ptr;
		else if (entry->d_tag == DT_RELACOUNT)
			relative = entry->d_un.d_val;
	}
	object->entry_count = i;
	object->symbols = table_at(object, values[DT_SYMTAB], sizeof(*object->symbols),
				   &object->symbol_count);
	read_strings(object, values[DT_STRTAB], values[DT_STRSZ]);
	object->hash = table_at(object, values[DT_HASH], sizeof(*object->hash),
				&object->hash_words);
	object->gnu_hash = table_at(object, gnu_hash, sizeof(*object->gnu_hash),
				    &object->gnu_hash_words);
	object->calls = relocations_at(object, values[DT_JMPREL],
				       values[DT_PLTREL] == DT_RELA ? values[DT_PLTRELSZ] : 0,
				       &object->call_count);
	object->others = relocations_at(object, values[DT_RELA], values[DT_RELASZ],
					&object->other_count);
	object->soname = string_at(object, values[DT_SONAME]);
	/* The relative ones come first, and are by far the most. */
	if (relative && relative <= object->other_count) {
		object->others += relative;
		object->other_count -= relative;
	}
}

bool rf_elf_read(struct rf_elf *object, const struct dl_phdr_info *info)
{
	uintptr_t dynamic = 0;
	size_t i;

	memset(object, 0, sizeof(*object));
	object->name = info->dlpi_name;
	object->base = info->dlpi_addr;
	object->headers = info->dlpi_phdr;
	object->header_count = info->dlpi_phnum;
	object->start = UINTPTR_MAX;
	object->soname = "";
	for (i = 0; i < info->dlpi_phnum; i++) {
		const rf_elf_header *header = &info->dlpi_phdr[i];
		uintptr_t start = object->base + header->p_vaddr, end = start + header->p_memsz;

		if (header->p_type == PT_DYNAMIC)
			dynamic = start;
		if (header->p_type == PT_GNU_RELRO) {
			object->relro_start = start;
			object->relro_end = end;
		}
		if (header->p_type != PT_LOAD)
			continue;
		object->start = start < object->start ? start : object->start;
		object->end = end > object->end ? end : object->end;
	}
	object->dynamic = table_at(object, dynamic, sizeof(*object->dynamic),
				   &object->entry_count);
	if (object->dynamic)
		read_dynamic(object);
	return object->symbols && object->strings;
}

void rf_elf_path(const char *name, char *path, size_t nbytes)
{
	size_t length;

	if (!*name && rf_sys_read_link("/proc/self/exe", path, nbytes) >= 0)
		return;
	if (!*name)
		name = (const char *)getauxval(AT_EXECFN);
	length = name ? strlen(name) : 0;
	length = length < nbytes ? length : nbytes - 1;
	memcpy(path, name ? name : "", length);
	path[length] = '\0';
}

/* The next note after @note, in @left bytes; NULL: it is cut short. */
static const char *next_note(const ElfW(Nhdr) * note, size_t left)
{
	const uint64_t nbytes = sizeof(*note) + (((uint64_t)note->n_namesz + 3) & ~3ull) +
				(((uint64_t)note->n_descsz + 3) & ~3ull);

	return nbytes <= left ? (const char *)note + nbytes : NULL;
}

/* Look for the build id in one segment of notes. */
static bool find_build_id(uintptr_t at, size_t left, char *hex, size_t nbytes)
{
	const uintptr_t end = at + left;
	const unsigned char *id;
	const ElfW(Nhdr) * note;
	const char *next;
	size_t i;

	while (end - at >= sizeof(*note) && !(at & 3)) {
		note = (const void *)at;
		next = next_note(note, end - at);
		if (!next)
			return false;
		at = (uintptr_t)next;
		if (note->n_type != NT_GNU_BUILD_ID || note->n_namesz != sizeof("GNU") ||
		    memcmp(note + 1, "GNU", sizeof("GNU")) != 0)
			continue;
		id = (const unsigned char *)(note + 1) + sizeof("GNU");
		for (i = 0; i < note->n_descsz && 2 * i + 2 < nbytes; i++) {
			hex[2 * i] = "0123456789abcdef"[id[i] >> 4];
			hex[2 * i + 1] = "0123456789abcdef"[id[i] & 15];
		}
		hex[2 * i] = '\0';
		return true;
	}
	return false;
}

void rf_elf_build_id(const struct rf_elf *object, char *hex, size_t nbytes)
{
	size_t i, left;

	*hex = '\0';
	for (i = 0; i < object->header_count; i++) {
		const rf_elf_header *header = &object->headers[i];
		uintptr_t at = object->base + header->p_vaddr;

		left = header->p_type == PT_NOTE ? room_at(object, at, PF_R) : 0;
		left = left < header->p_memsz ? left : header->p_memsz;
		if (find_build_id(at, left, hex, nbytes))
			return;
	}
}

/* The symbol, if it defines that function. */
static const rf_elf_symbol *definition(const struct rf_elf *object, size_t index,
				       const char *name)
{
	const rf_elf_symbol *symbol;

	if (index >= object->symbol_count)
		return NULL;
	symbol = object->symbols + index;
	if (symbol->st_shndx != SHN_UNDEF && symbol->st_value &&
	    ELF64_ST_TYPE(symbol->st_info) == STT_FUNC &&
	    !strcmp(string_at(object, symbol->st_name), name))
		return symbol;
	return NULL;
}

/* DT_GNU_HASH: counts, a filter, buckets, and a chain of hashes that ends with an odd one. */
static const rf_elf_symbol *find_by_gnu_hash(const struct rf_elf *object, const char *name)
{
	const uint32_t *table = object->gnu_hash;
	const rf_elf_symbol *symbol;
	size_t words = object->gnu_hash_words, buckets, chain, index;
	uint32_t hash = 5381;
	const char *c;

	if (words < 4 || !table[0])
		return NULL;
	for (c = name; *c; c++)
		hash = hash * 33 + (unsigned char)*c;
	buckets = 4 + (size_t)table[2] * sizeof(ElfW(Addr)) / sizeof(*table);
	chain = buckets + table[0];
	if (chain > words)
		return NULL;
	index = table[buckets + hash % table[0]];
	for (; index && index >= table[1] && index - table[1] < words - chain; index++) {
		uint32_t other = table[chain + index - table[1]];

		symbol = (other | 1) == (hash | 1) ? definition(object, index, name) : NULL;
		if (symbol || other & 1)
			return symbol;
	}
	return NULL;
}

/* A jump is written in a unit of that many bytes, which is looked at before. */
#define CODE_BYTES 16

uintptr_t rf_elf_find(const struct rf_elf *object, const char *name)
{
	const rf_elf_symbol *symbol = NULL;
	uintptr_t address;
	size_t index;

	if (object->gnu_hash) {
		symbol = find_by_gnu_hash(object, name);
	} else if (object->hash_words > 1) {
		/* The number of chains is that of the symbols. */
		for (index = 1; index < object->hash[1] && index < object->symbol_count && !symbol;
		     index++)
			symbol = definition(object, index, name);
	}
	address = symbol ? object->base + symbol->st_value : 0;
	return room_at(object, address, PF_R | PF_X) >= CODE_BYTES ? address : 0;
}

uintptr_t *rf_elf_next_got(const struct rf_elf *object, size_t *at, const char **name)
{
	const rf_elf_relocation *relocation;
	uintptr_t got;
	size_t symbol;

	while (*at < object->call_count + object->other_count) {
		if (*at < object->call_count)
			relocation = &object->calls[*at];
		else
			relocation = &object->others[*at - object->call_count];
		++*at;
		symbol = ELF64_R_SYM(relocation->r_info);
		got = object->base + relocation->r_offset;
		if (!symbol || symbol >= object->symbol_count || relocation->r_addend ||
		    !IS_GOT(ELF64_R_TYPE(relocation->r_info)) || got % sizeof(got) ||
		    room_at(object, got, PF_R | PF_W) < sizeof(got))
			continue;
		*name = string_at(object, object->symbols[symbol].st_name);
		return (uintptr_t *)got;
	}
	return NULL;
}

/* The loader protects whole pages. */
static uintptr_t page_of(uintptr_t address)
{
	return address & ~(rf_sys_page_size() - 1);
}

bool rf_elf_is_read_only(const struct rf_elf *object, const uintptr_t *got)
{
	return page_of(object->relro_start) <= (uintptr_t)got &&
	       (uintptr_t)got < page_of(object->relro_end);
}

bool rf_elf_is_relocated(const struct rf_elf *object)
{
	/* Copied onto itself, which its page lets happen or not. Tags never change. */
	struct iovec tag = { (void *)object->dynamic, 1 };

	return !rf_elf_is_read_only(object, (const uintptr_t *)object->dynamic) ||
	       rf_sys_copy(&tag, &tag, 1) != 1;
}

bool rf_elf_is_raw(const struct rf_elf *object, uintptr_t value)
{
	return object->base && value < object->end - object->base;
}

static int protect(const struct rf_elf *object, int protection)
{
	uintptr_t start = page_of(object->relro_start);

	return rf_sys_protect(start, page_of(object->relro_end) - start, protection);
}

int rf_elf_open(const struct rf_elf *object)
{
	return protect(object, PROT_READ | PROT_WRITE);
}

int rf_elf_shut(const struct rf_elf *object)
{
	return protect(object, PROT_READ);
}

bool rf_elf_needs(const struct rf_elf *object, const char *library)
{
	const rf_elf_entry *entry = object->dynamic;

	for (; entry < object->dynamic + object->entry_count; entry++)
		if (entry->d_tag == DT_NEEDED &&
		    !strcmp(string_at(object, entry->d_un.d_val), library))
			return true;
	return false;
}
