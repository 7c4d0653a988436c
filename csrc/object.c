/* SPDX-License-Identifier: BSD-3-Clause */
#define _GNU_SOURCE /* struct dl_phdr_info */
#include "object.h"
#include "sys.h"

#include <string.h>
#include <sys/auxv.h>

#if defined(__x86_64__)
#define IS_SLOT(type) \
	((type) == R_X86_64_JUMP_SLOT || (type) == R_X86_64_GLOB_DAT || (type) == R_X86_64_64)
#elif defined(__aarch64__)
#define IS_SLOT(type)                                                       \
	((type) == R_AARCH64_JUMP_SLOT || (type) == R_AARCH64_GLOB_DAT ||   \
	 (type) == R_AARCH64_ABS64)
#else
#define IS_SLOT(type) ((void)(type), false)
#endif

/* glibc has relocated the addresses in the dynamic section, but in the vDSO's. */
static const void *pointer(const struct rf_object *object, uintptr_t address)
{
	if (!address)
		return NULL;
	return (const void *)(address < object->base ? address + object->base : address);
}

static void read_dynamic(struct rf_object *object)
{
	uintptr_t values[DT_NUM] = { 0 }, gnu_hash = 0;
	const rf_elf_entry *entry;
	size_t relative = 0;

	for (entry = object->dynamic; entry->d_tag != DT_NULL; entry++) {
		if (entry->d_tag > 0 && entry->d_tag < DT_NUM)
			values[entry->d_tag] = entry->d_un.d_ptr;
		else if (entry->d_tag == DT_GNU_HASH)
			gnu_hash = entry->d_un.d_ptr;
		else if (entry->d_tag == DT_RELACOUNT)
			relative = entry->d_un.d_val;
	}
	object->symbols = pointer(object, values[DT_SYMTAB]);
	object->strings = pointer(object, values[DT_STRTAB]);
	object->hash = pointer(object, values[DT_HASH]);
	object->gnu_hash = pointer(object, gnu_hash);
	object->calls = pointer(object, values[DT_JMPREL]);
	object->others = pointer(object, values[DT_RELA]);
	object->soname = values[DT_SONAME];
	if (object->calls && values[DT_PLTREL] == DT_RELA)
		object->call_count = values[DT_PLTRELSZ] / sizeof(*object->calls);
	if (object->others)
		object->other_count = values[DT_RELASZ] / sizeof(*object->others);
	/* The relative ones come first, and are by far the most. */
	if (relative <= object->other_count) {
		object->others += relative;
		object->other_count -= relative;
	}
}

bool rf_object_read(struct rf_object *object, const struct dl_phdr_info *info)
{
	size_t i;

	memset(object, 0, sizeof(*object));
	object->name = info->dlpi_name;
	object->base = info->dlpi_addr;
	object->start = UINTPTR_MAX;
	for (i = 0; i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *header = &info->dlpi_phdr[i];
		uintptr_t start = object->base + header->p_vaddr, end = start + header->p_memsz;

		if (header->p_type == PT_DYNAMIC)
			object->dynamic = (const void *)start;
		if (header->p_type == PT_GNU_RELRO) {
			object->relro_start = start;
			object->relro_end = end;
		}
		if (header->p_type != PT_LOAD)
			continue;
		object->start = start < object->start ? start : object->start;
		object->end = end > object->end ? end : object->end;
	}
	if (object->dynamic)
		read_dynamic(object);
	return object->symbols && object->strings;
}

static bool is_definition(const struct rf_object *object, const rf_elf_symbol *symbol,
			  const char *name)
{
	return symbol->st_shndx != SHN_UNDEF && symbol->st_value &&
	       ELF64_ST_TYPE(symbol->st_info) == STT_FUNC &&
	       !strcmp(object->strings + symbol->st_name, name);
}

/* DT_GNU_HASH: counts, a filter, buckets, and a chain of hashes that ends with an odd one. */
static const rf_elf_symbol *find_by_gnu_hash(const struct rf_object *object, const char *name)
{
	const uint32_t *table = object->gnu_hash, *buckets, *chain;
	uint32_t hash = 5381, bucket_count = table[0], first = table[1], index;
	const char *c;

	for (c = name; *c; c++)
		hash = hash * 33 + (unsigned char)*c;
	buckets = table + 4 + table[2] * sizeof(ElfW(Addr)) / sizeof(uint32_t);
	chain = buckets + bucket_count;
	index = bucket_count ? buckets[hash % bucket_count] : 0;
	for (; index >= first && index; index++) {
		if ((chain[index - first] | 1) == (hash | 1) &&
		    is_definition(object, &object->symbols[index], name))
			return &object->symbols[index];
		if (chain[index - first] & 1)
			break;
	}
	return NULL;
}

uintptr_t rf_object_find(const struct rf_object *object, const char *name)
{
	const rf_elf_symbol *symbol = NULL;
	uint32_t index;

	if (object->gnu_hash) {
		symbol = find_by_gnu_hash(object, name);
	} else if (object->hash) {
		/* The number of chains is that of the symbols. */
		for (index = 1; index < object->hash[1] && !symbol; index++)
			if (is_definition(object, &object->symbols[index], name))
				symbol = &object->symbols[index];
	}
	return symbol ? object->base + symbol->st_value : 0;
}

uintptr_t *rf_object_next_slot(const struct rf_object *object, size_t *at, const char **name)
{
	const rf_elf_relocation *relocation;

	while (*at < object->call_count + object->other_count) {
		if (*at < object->call_count)
			relocation = &object->calls[*at];
		else
			relocation = &object->others[*at - object->call_count];
		++*at;
		if (!ELF64_R_SYM(relocation->r_info) || relocation->r_addend ||
		    !IS_SLOT(ELF64_R_TYPE(relocation->r_info)))
			continue;
		*name = object->strings +
			object->symbols[ELF64_R_SYM(relocation->r_info)].st_name;
		return (uintptr_t *)(object->base + relocation->r_offset);
	}
	return NULL;
}

int rf_object_store(const struct rf_object *object, uintptr_t *slot, uintptr_t value)
{
	const size_t page_size = getauxval(AT_PAGESZ);
	uintptr_t page = (uintptr_t)slot & ~(page_size - 1);
	bool read_only = object->relro_start <= (uintptr_t)slot &&
			 (uintptr_t)slot < (object->relro_end & ~(page_size - 1));
	int rc = read_only ? rf_sys_protect(page, page_size, PROT_READ | PROT_WRITE) : 0;

	if (rc < 0)
		return rc;
	__atomic_store_n(slot, value, __ATOMIC_RELEASE);
	if (read_only)
		(void)rf_sys_protect(page, page_size, PROT_READ);
	return 0;
}

bool rf_object_needs(const struct rf_object *object, const char *library)
{
	const rf_elf_entry *entry;

	for (entry = object->dynamic; entry->d_tag != DT_NULL; entry++)
		if (entry->d_tag == DT_NEEDED &&
		    !strcmp(object->strings + entry->d_un.d_val, library))
			return true;
	return false;
}
