/* SPDX-License-Identifier: BSD-3-Clause */
/* A libibverbs' own fork support is in use as soon as anything but nothing is counted. */
#include "check.h"
#include "preload/ibv_tree.h"

static int status;

static int answer(void)
{
	return status;
}

static bool is_used(void (*range)(void))
{
	return rf_ibv_tree_is_used((uintptr_t)range, (uintptr_t)answer, false) == 1;
}

/* Code that begins with no comparison names no root. */
static void other_function(void)
{
}

static void an_unknown_tree_is_asked_for_its_status(void)
{
	for (status = 0; status <= 2; status++)
		CHECK(is_used(other_function) == (status == 1));
	CHECK(rf_ibv_tree_is_used((uintptr_t)other_function, (uintptr_t)answer, true) == -EAGAIN);
	CHECK(rf_ibv_tree_is_used((uintptr_t)other_function, 0, true) == 0);
}

#if defined(__x86_64__)

__asm__(".text\n.balign 16\nrange_function: cmpq $0, tree_root(%rip)\nret\n");
void range_function(void);

__attribute__((used)) struct rf_ibv_tree_node *tree_root;

static void an_empty_tree_is_unused(void)
{
	struct rf_ibv_tree_node node = { .end = UINTPTR_MAX }, other = node;

	status = 1;
	tree_root = NULL;
	CHECK(!is_used(range_function));
	tree_root = &node;
	CHECK(!is_used(range_function));
	node.colour = 1;
	CHECK(!is_used(range_function));
	node.count = 1;
	CHECK(is_used(range_function));
	node = other;
	node.left = &other;
	CHECK(is_used(range_function));
	node = other;
	node.right = &other;
	CHECK(is_used(range_function));
	node = other;
	node.start = 4096;
	CHECK(is_used(range_function));
	node = other;
	node.end = 4095;
	CHECK(is_used(range_function));
}

#endif

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(an_unknown_tree_is_asked_for_its_status),
#if defined(__x86_64__)
		SCENARIO(an_empty_tree_is_unused),
#endif
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
