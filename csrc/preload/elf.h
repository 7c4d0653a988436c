/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * One object as the loader has made it: the symbols it defines, and its GOT: the words
 * with the addresses of the symbols that it refers to.
 *
 * Read in memory, in a callback of dl_iterate_phdr(), after which it may be unloaded.
 * DT_RELR and relative relocations name no symbols and are passed over.
 *
 * The loader has mapped the loaded segments. All else that the object says of itself may
 * be wrong, as it never has to be right for a program that runs: only bytes in those
 * segments are read.
 */
#ifndef RF_ELF_H
#define RF_ELF_H

#include <link.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef ElfW(Sym) rf_elf_symbol;
typedef ElfW(Rela) rf_elf_relocation;
typedef ElfW(Dyn) rf_elf_entry;
typedef ElfW(Phdr) rf_elf_header;

struct rf_elf {
	const char *name;		/* as the loader has it: see rf_elf_path() */
	uintptr_t base, start, end;	/* where it lies */
	uintptr_t relro_start, relro_end;
	const rf_elf_header *headers;
	size_t header_count;
	/* Tables, and how many items are there or could be; NULL and 0: none. */
	const rf_elf_symbol *symbols;
	const char *strings;		/* the last is a NUL */
	const uint32_t *gnu_hash, *hash;
	const rf_elf_relocation *calls, *others;
	const rf_elf_entry *dynamic;
	size_t symbol_count, string_bytes, gnu_hash_words, hash_words;
	size_t call_count, other_count, entry_count;
	const char *soname;		/* "": none */
};

/* False if it has no dynamic symbols. */
bool rf_elf_read(struct rf_elf *object, const struct dl_phdr_info *info);

/* The path of its file, cut to @nbytes. The loader gives the program no name: it is found out. */
void rf_elf_path(const char *name, char *path, size_t nbytes);

/* Which file it is, in hexadecimal, whatever lies at its path later; "": it does not say. */
void rf_elf_build_id(const struct rf_elf *object, char *hex, size_t nbytes);

/* The address of a function it defines, in code that can be read; 0: none. */
uintptr_t rf_elf_find(const struct rf_elf *object, const char *name);

/*
 * The next GOT entry from *@at on, which begins as 0, and its symbol. NULL: no more. An
 * entry lies in a writable segment.
 */
uintptr_t *rf_elf_next_got(const struct rf_elf *object, size_t *at, const char **name);

/*
 * Has the loader filled its GOT? Other threads see an object as soon as it is mapped. True
 * too if it has no RELRO to tell by, which is made read-only last.
 */
bool rf_elf_is_relocated(const struct rf_elf *object);

/* May a GOT entry hold @value before that, as an address without the base or nothing? */
bool rf_elf_is_raw(const struct rf_elf *object, uintptr_t value);

/* Is that GOT entry made read-only once the loader has filled it? */
bool rf_elf_is_read_only(const struct rf_elf *object, const uintptr_t *got);

/* Make all such entries writable, and read-only again. 0, or mprotect()'s error. */
int rf_elf_open(const struct rf_elf *object);
int rf_elf_shut(const struct rf_elf *object);

/* Does it name @library as one it needs? */
bool rf_elf_needs(const struct rf_elf *object, const char *library);

#endif
