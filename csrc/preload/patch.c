/* SPDX-License-Identifier: BSD-3-Clause */
#include "patch.h"
#include "sys.h"

#include <errno.h>
#include <string.h>

#if defined(__x86_64__)

#define UNIT 16
/* Less than the reach of a signed 32-bit displacement, by more than a library is long. */
#define REACH ((uintptr_t)1 << 30)
#define STEP ((uintptr_t)1 << 20)

/* A page of addresses to go to, near the functions that go there. */
static uintptr_t *near_page;
static size_t near_used;

static bool is_in_reach(uintptr_t from, uintptr_t to)
{
	return from - to < REACH || to - from < REACH;
}

static int map_near(uintptr_t entry, size_t page_size)
{
	const int protection = PROT_READ | PROT_WRITE;
	uintptr_t start = entry & ~(STEP - 1), distance, at;
	int rc = -ENOMEM;

	if (near_page && near_used < page_size / sizeof(*near_page) &&
	    is_in_reach(entry, (uintptr_t)near_page))
		return 0;
	for (distance = STEP; distance < REACH; distance += STEP) {
		at = start - distance;
		rc = start > distance ? rf_sys_map_at(at, page_size, protection) : -EEXIST;
		if (rc < 0) {
			at = start + distance;
			rc = rf_sys_map_at(at, page_size, protection);
		}
		if (rc >= 0)
			break;
	}
	if (rc < 0)
		return -ENOMEM;
	near_page = (uintptr_t *)at;
	near_used = 0;
	return 0;
}

/* The address of a word that holds @to. */
static int store_near(uintptr_t entry, uintptr_t to, uintptr_t *word)
{
	const size_t page_size = rf_sys_page_size();
	int rc = map_near(entry, page_size);

	if (rc >= 0)
		rc = rf_sys_protect((uintptr_t)near_page, page_size, PROT_READ | PROT_WRITE);
	if (rc < 0)
		return rc;
	near_page[near_used] = to;
	*word = (uintptr_t)&near_page[near_used++];
	return rf_sys_protect((uintptr_t)near_page, page_size, PROT_READ);
}

static const unsigned char jump[] = { 0xff, 0x25 };

static const unsigned char *first_instruction(uintptr_t entry)
{
	static const unsigned char endbr64[] = { 0xf3, 0x0f, 0x1e, 0xfa };
	const unsigned char *code = (const unsigned char *)entry;

	return memcmp(code, endbr64, sizeof(endbr64)) != 0 ? code : code + sizeof(endbr64);
}

/* cmpq $0, there(%rip), eight bytes; NULL: @entry begins otherwise. */
static const unsigned char *find_compare(uintptr_t entry)
{
	static const unsigned char compare[] = { 0x48, 0x83, 0x3d };
	const unsigned char *code = first_instruction(entry);

	return !memcmp(code, compare, sizeof(compare)) && !code[7] ? code : NULL;
}

/* The word that an instruction names by the displacement at @at, relative to its @end. */
static const uintptr_t *named_word(const unsigned char *at, const unsigned char *end)
{
	int32_t displacement;

	memcpy(&displacement, at, sizeof(displacement));
	return (const uintptr_t *)((uintptr_t)end + (uintptr_t)(intptr_t)displacement);
}

const uintptr_t *rf_patch_compared(uintptr_t entry)
{
	const unsigned char *code = find_compare(entry);

	return code ? named_word(code + 3, code + 8) : NULL;
}

bool rf_patch_leads(uintptr_t entry, uintptr_t to)
{
	const unsigned char *code = first_instruction(entry);

	return !memcmp(code, jump, sizeof(jump)) && *named_word(code + 2, code + 6) == to;
}

int rf_patch_plan(struct rf_patch *patch, uintptr_t entry, uintptr_t to)
{
	const unsigned char *code = find_compare(entry);
	size_t at = (uintptr_t)code % UNIT;
	int32_t displacement;
	uintptr_t word;
	int rc;

	if (!code || at + 6 > UNIT)
		return -ENOEXEC;
	rc = store_near(entry, to, &word);
	if (rc < 0)
		return rc;
	patch->unit = (uintptr_t)code - at;
	memcpy(patch->before, (const void *)patch->unit, UNIT);
	memcpy(patch->after, patch->before, UNIT);
	displacement = (int32_t)(word - ((uintptr_t)code + 6));
	memcpy(patch->after + at, jump, sizeof(jump));
	memcpy(patch->after + at + sizeof(jump), &displacement, sizeof(displacement));
	return 0;
}

/* One step for whoever executes it meanwhile. */
static bool exchange(uintptr_t unit, const unsigned char *before, const unsigned char *after)
{
	uint64_t old[2], new[2];
	bool done;

	memcpy(old, before, UNIT);
	memcpy(new, after, UNIT);
	__asm__ volatile("lock cmpxchg16b %1"
			 : "=@ccz"(done), "+m"(*(unsigned char(*)[UNIT])unit), "+a"(old[0]),
			   "+d"(old[1])
			 : "b"(new[0]), "c"(new[1])
			 : "memory");
	return done;
}

#else

const uintptr_t *rf_patch_compared(uintptr_t entry)
{
	(void)entry;
	return NULL;
}

bool rf_patch_leads(uintptr_t entry, uintptr_t to)
{
	(void)entry, (void)to;
	return false;
}

int rf_patch_plan(struct rf_patch *patch, uintptr_t entry, uintptr_t to)
{
	(void)patch, (void)entry, (void)to;
	return -ENOTSUP;
}

static bool exchange(uintptr_t unit, const unsigned char *before, const unsigned char *after)
{
	(void)unit, (void)before, (void)after;
	return false;
}

#endif

static int protect(const struct rf_patch *patch, int protection)
{
	const size_t page_size = rf_sys_page_size();

	return rf_sys_protect(patch->unit & ~(page_size - 1), page_size, protection);
}

int rf_patch_open(const struct rf_patch *patch)
{
	return protect(patch, PROT_READ | PROT_WRITE | PROT_EXEC);
}

void rf_patch_shut(const struct rf_patch *patch)
{
	(void)protect(patch, PROT_READ | PROT_EXEC);
}

int rf_patch_apply(const struct rf_patch *patch)
{
	return exchange(patch->unit, patch->before, patch->after) ? 0 : -EBUSY;
}

void rf_patch_undo(const struct rf_patch *patch)
{
	(void)exchange(patch->unit, patch->after, patch->before);
}
