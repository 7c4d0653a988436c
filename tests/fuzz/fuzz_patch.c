/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Jumps over the entries of functions, beside a copy of their code. The functions begin as
 * libibverbs' do, or nearly, anywhere in a page, two of them perhaps in one unit; calls of
 * the kernel fail; patches are applied twice, and undone when others have changed the code.
 * What is not a jump is as it was, and every function still does what it did, or the jump.
 */
#include "check.h"
#include "fuzz.h"
#include "preload/patch.h"
#include "sys.h"

#if defined(__x86_64__)

#define PAGES 2
#define PAGE 4096
#define FUNCTIONS 4
#define JUMP 6	/* bytes */

static unsigned char *code, expected[PAGES * PAGE];

static struct function {
	size_t entry, first;	/* where it begins, where its first instruction does */
	size_t end;
	bool fits;		/* the instruction that a jump can be laid over, and in one unit */
	bool planned, jumps;
	size_t to;		/* of the plan, and the jump */
	struct rf_patch patch;
	int value;
} functions[FUNCTIONS];

static int go_to_77(void)
{
	return 77;
}

static int go_to_88(void)
{
	return 88;
}

static int (*const places[])(void) = { go_to_77, go_to_88 };

static int call(const struct function *function)
{
	int (*entry)(void);
	void *address = code + function->entry;

	memcpy(&entry, &address, sizeof(entry));
	return entry();
}

static void put(size_t *at, const void *bytes, size_t nbytes)
{
	memcpy(expected + *at, bytes, nbytes);
	*at += nbytes;
}

/* [endbr64], one that compares or another, mov $value, %eax, ret: where @at is left. */
static void write_function(struct function *function, size_t *at)
{
	static const unsigned char mark[] = { 0xf3, 0x0f, 0x1e, 0xfa };
	/* With a displacement, to be filled in, in all but the last two. */
	static const unsigned char firsts[][8] = {
		{ 0x48, 0x83, 0x3d, 0, 0, 0, 0, 0 },	/* cmpq $0, there(%rip) */
		{ 0x48, 0x83, 0x3d, 0, 0, 0, 0, 1 },	/* cmpq $1, there(%rip) */
		{ 0x48, 0x3b, 0x05, 0, 0, 0, 0, 0x90 },	/* cmp there(%rip), %rax; nop */
		{ 0x4c, 0x8b, 0x1d, 0, 0, 0, 0, 0x90 },	/* mov there(%rip), %r11; nop */
		{ 0x55, 0x48, 0x89, 0xe5, 0x5d, 0x90, 0x90, 0x90 },
		{ 0x90, 0x48, 0x83, 0xf8, 0x00, 0x90, 0x90, 0x90 },
	};
	const size_t kind = check_below(COUNT_OF(firsts));
	const int32_t there = (int32_t)(PAGES * PAGE - 8);
	int32_t displacement;

	memset(function, 0, sizeof(*function));
	*at += check_below(32);
	function->entry = *at;
	if (check_below(2))
		put(at, mark, sizeof(mark));
	function->first = *at;
	function->fits = !kind && *at % 16 + JUMP <= 16;
	put(at, firsts[kind], sizeof(firsts[kind]));
	displacement = there - (int32_t)(kind < 2 ? *at : *at - 1);
	if (kind < 4)
		memcpy(expected + function->first + 3, &displacement, sizeof(displacement));
	function->value = 1 + (int)check_below(50);
	put(at, "\xb8", 1);
	put(at, &function->value, sizeof(function->value));
	put(at, "\xc3", 1);
	function->end = *at;
}

static void begin(void)
{
	size_t i, at = check_below(2) ? 0 : PAGE - 64;

	if (!code)
		code = (unsigned char *)check_map(PAGES);
	memset(expected, 0x90, sizeof(expected) - 8);
	memset(expected + sizeof(expected) - 8, 0, 8);
	for (i = 0; i < FUNCTIONS; i++)
		write_function(&functions[i], &at);
	CHECK(!mprotect(code, PAGES * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC));
	memcpy(code, expected, sizeof(expected));
	CHECK(!mprotect(code, PAGES * PAGE, PROT_READ | PROT_EXEC));
}

/* The bytes are those expected; a jump goes where it is to go, by a word that says so. */
static void compare(void)
{
	size_t i;

	CHECK(!memcmp(code, expected, sizeof(expected)));
	for (i = 0; i < FUNCTIONS; i++) {
		const struct function *function = &functions[i];
		uintptr_t entry = (uintptr_t)code + function->entry;

		CHECK(rf_patch_leads(entry, (uintptr_t)places[function->to]) == function->jumps);
		CHECK(!rf_patch_leads(entry, (uintptr_t)places[!function->to]));
		CHECK(call(function) ==
		      (function->jumps ? places[function->to]() : function->value));
	}
}

static void plan(struct function *function, bool fails)
{
	size_t to = check_below(2);
	struct rf_patch planned;
	int rc = rf_patch_plan(&planned, (uintptr_t)code + function->entry, (uintptr_t)places[to]);

	if (!function->fits || function->jumps)
		CHECK(rc == -ENOEXEC, "%d", rc);
	else
		CHECK(!rc || (fails && rc < 0), "%d", rc);
	if (rc)
		return;
	function->to = to;
	function->patch = planned;
	function->planned = true;
}

/* Other code may have changed the unit since: then nothing is written. */
static void apply(struct function *function)
{
	struct rf_patch *patch = &function->patch;
	size_t unit = patch->unit - (uintptr_t)code;
	bool same = !memcmp(expected + unit, patch->before, sizeof(patch->before));
	int rc = rf_patch_open(patch);

	if (rc < 0)
		return;
	rc = rf_patch_apply(patch);
	rf_patch_shut(patch);
	CHECK(rc == (same ? 0 : -EBUSY), "%d", rc);
	if (rc)
		return;
	memcpy(expected + function->first, patch->after + (function->first - unit), JUMP);
	function->jumps = true;
}

static void undo(struct function *function)
{
	struct rf_patch *patch = &function->patch;
	size_t unit = patch->unit - (uintptr_t)code;
	bool same = !memcmp(expected + unit, patch->after, sizeof(patch->after));

	if (rf_patch_open(patch) < 0)
		return;
	rf_patch_undo(patch);
	rf_patch_shut(patch);
	if (!same)
		return;
	memcpy(expected + function->first, patch->before + (function->first - unit), JUMP);
	function->jumps = false;
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t nbytes)
{
	check_play(input, nbytes);
	begin();
	compare();
	while (!check_played()) {
		struct function *function = &functions[check_below(FUNCTIONS)];
		size_t operation = check_below(4);
		bool fails = !check_below(4);

		/* Not the one that makes code read-only again, which is not looked at. */
		inject(fails ? 1 : 0, EACCES);
		if (!operation)
			plan(function, fails);
		else if (function->planned && operation == 1)
			undo(function);
		else if (function->planned)
			apply(function);
		inject(0, 0);
		compare();
	}
	return 0;
}

#else

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t nbytes)
{
	(void)input, (void)nbytes;
	return 0;
}

#endif
