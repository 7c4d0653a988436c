/* SPDX-License-Identifier: BSD-3-Clause */
/* A jump over the entry of a function that is known, and over no other. */
#include "check.h"
#include "preload/patch.h"
#include "sys.h"

#if defined(__x86_64__)

/* As compilers begin libibverbs' range functions, with and without -fcf-protection. */
__asm__(".text\n"
	".balign 16\nplain_function: cmpq $0, compared_word(%rip)\nmovl $1, %eax\nret\n"
	".balign 16\nmarked_function: endbr64\ncmpq $0, compared_word(%rip)\nmovl $2, %eax\nret\n"
	".balign 16\nother_function: pushq %rbp\nmovl $3, %eax\npopq %rbp\nret\n"
	".balign 16\none_function: cmpq $1, compared_word(%rip)\nmovl $4, %eax\nret\n"
	".balign 16\n.skip 12, 0x90\n"
	"crossing_function: cmpq $0, compared_word(%rip)\nmovl $5, %eax\nret\n");

int plain_function(void), marked_function(void), other_function(void), one_function(void);
int crossing_function(void);

__attribute__((used)) uintptr_t compared_word = 0;

static int elsewhere(void)
{
	return 77;
}

static int plan(struct rf_patch *patch, int (*function)(void))
{
	return rf_patch_plan(patch, (uintptr_t)function, (uintptr_t)elsewhere);
}

static int apply(const struct rf_patch *patch)
{
	int rc = rf_patch_open(patch);

	if (rc < 0)
		return rc;
	rc = rf_patch_apply(patch);
	rf_patch_shut(patch);
	return rc;
}

static void undo(const struct rf_patch *patch)
{
	CHECK(rf_patch_open(patch) == 0);
	rf_patch_undo(patch);
	rf_patch_shut(patch);
}

static void check_there_and_back(int (*volatile function)(void), int value)
{
	struct rf_patch patch;

	CHECK(rf_patch_compared((uintptr_t)function) == &compared_word);
	CHECK(plan(&patch, function) == 0);
	CHECK(function() == value);
	CHECK(apply(&patch) == 0);
	CHECK(function() == 77);
	CHECK(rf_patch_leads((uintptr_t)function, (uintptr_t)elsewhere));
	CHECK(!rf_patch_leads((uintptr_t)function, (uintptr_t)other_function));
	CHECK(apply(&patch) == -EBUSY);
	CHECK(function() == 77);
	undo(&patch);
	CHECK(!rf_patch_leads((uintptr_t)function, (uintptr_t)elsewhere));
	CHECK(function() == value);
}

static void a_jump_is_put_there_and_taken_away(void)
{
	unsigned int i;

	for (i = 0; i < 2000; i++) {
		check_there_and_back(plain_function, 1);
		check_there_and_back(marked_function, 2);
	}
}

/* The pages where the jump's address could be, on one side of the code. */
static void occupy(bool above)
{
	const uintptr_t step = 1 << 20, start = (uintptr_t)plain_function & ~(step - 1);
	uintptr_t distance, at;

	for (distance = step; distance < 1 << 30; distance += step) {
		at = above ? start + distance : start - distance;
		(void)rf_sys_map_at(at, check_page, PROT_NONE);
	}
}

static void a_page_below_the_code_will_do(void)
{
	occupy(true);
	check_there_and_back(plain_function, 1);
}

static void a_page_above_the_code_will_do(void)
{
	occupy(false);
	check_there_and_back(plain_function, 1);
}

static void other_code_is_not_touched(void)
{
	int (*const others[])(void) = { other_function, one_function };
	struct rf_patch patch;
	size_t i;

	for (i = 0; i < COUNT_OF(others); i++) {
		CHECK(plan(&patch, others[i]) == -ENOEXEC);
		CHECK(rf_patch_compared((uintptr_t)others[i]) == NULL);
		CHECK(others[i]() == (int)i + 3);
	}
	/* Known, but not to be written in one step. */
	CHECK(plan(&patch, crossing_function) == -ENOEXEC);
	CHECK(crossing_function() == 5);
}

static void a_failure_changes_nothing(void)
{
	int (*volatile function)(void) = marked_function;
	unsigned long nth, faults = 0;
	struct rf_patch patch;
	int rc;

	for (nth = 1;; nth++) {
		inject(nth, EACCES);
		rc = plan(&patch, function);
		if (rc == 0)
			rc = apply(&patch);
		inject(0, 0);
		CHECK(function() == (rc < 0 ? 2 : 77));
		if (rc == 0)
			undo(&patch);
		if (inject_faults() == faults)
			break;
		faults = inject_faults();
	}
	CHECK(faults >= 3, "%lu", faults);
	CHECK(function() == 2);
}

#else

static void there_is_no_jump_on_this_machine(void)
{
	struct rf_patch patch;

	CHECK(rf_patch_plan(&patch, (uintptr_t)check_run, (uintptr_t)check_run) == -ENOTSUP);
	CHECK(rf_patch_compared((uintptr_t)check_run) == NULL);
}

#endif

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
#if defined(__x86_64__)
		SCENARIO(a_jump_is_put_there_and_taken_away),
		SCENARIO(a_page_below_the_code_will_do),
		SCENARIO(a_page_above_the_code_will_do),
		SCENARIO(other_code_is_not_touched),
		SCENARIO(a_failure_changes_nothing),
#else
		SCENARIO(there_is_no_jump_on_this_machine),
#endif
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
