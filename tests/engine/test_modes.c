/* SPDX-License-Identifier: BSD-3-Clause */
/* rf_fork_init(): the mode that it chooses, when it is late, and what is not protected before. */
#include "check.h"
#include "one_engine.h"

static struct rf_error error;

static int init(enum rf_mode mode)
{
	return rf_fork_init(mode, &error);
}

static void a_second_start_with_the_same_wishes_does_nothing(void)
{
	CHECK(rf_mode() == RF_MODE_NONE && rf_abi() == RF_ABI);
	CHECK(init(RF_MODE_NONE) == -EINVAL && error.cause == RF_CAUSE_UNKNOWN_MODE);
	CHECK(init((enum rf_mode)17) == -EINVAL && error.cause == RF_CAUSE_UNKNOWN_MODE);
	CHECK(init(RF_MODE_EAGER) == 0 && rf_mode() == RF_MODE_EAGER);
	CHECK(init(RF_MODE_EAGER) == 0 && init(RF_MODE_AUTO) == 0);
	CHECK(init(RF_MODE_LAZY) == -EINVAL && error.cause == RF_CAUSE_MODE);
	CHECK(rf_mode() == RF_MODE_EAGER);
}

static void auto_asks_kernel_and_environment(void)
{
	struct rf_kernel kernel;

	rf_kernel_info(&kernel);
	setenv("RDMAFORK_MODE", "sometimes", 1);
	CHECK(init(RF_MODE_AUTO) == -EINVAL && error.cause == RF_CAUSE_ENVIRONMENT);
	CHECK(strstr(error.text, "RDMAFORK_MODE=sometimes"));
	setenv("RDMAFORK_MODE", "", 1);
	setenv("RDMAFORK_TRUST_COPYING", "no", 1);
	CHECK(init(RF_MODE_AUTO) == -EINVAL && error.cause == RF_CAUSE_ENVIRONMENT);
	CHECK(strstr(error.text, "RDMAFORK_TRUST_COPYING=no"));
	CHECK(rf_mode() == RF_MODE_NONE);
	setenv("RDMAFORK_TRUST_COPYING", kernel.copy_trusted ? "" : "0", 1);
	CHECK(init(RF_MODE_AUTO) == 0);
	CHECK(rf_mode() == (kernel.copy_trusted ? RF_MODE_LAZY : RF_MODE_EAGER));
}

static void a_kernel_is_not_trusted_where_the_environment_says_so(void)
{
	struct rf_kernel found, kernel;
	uintptr_t other;
	pid_t child;

	setenv("RDMAFORK_TRUST_COPYING", "1", 1);
	rf_kernel_info(&found);
	CHECK(found.trust_how != RF_HOW_ENVIRONMENT);
	setenv("RDMAFORK_TRUST_COPYING", "0", 1);
	rf_kernel_info(&kernel);
	CHECK(!kernel.copy_trusted && kernel.copy_on_fork == found.copy_on_fork);
	CHECK(kernel.trust_how == (found.copy_trusted ? RF_HOW_ENVIRONMENT : found.trust_how));
	CHECK(init(RF_MODE_LAZY) == -ENOTSUP && error.cause == RF_CAUSE_UNTRUSTED);
	setenv("RDMAFORK_MODE", "lazy", 1);
	CHECK(init(RF_MODE_AUTO) == -ENOTSUP && error.cause == RF_CAUSE_UNTRUSTED);
	unsetenv("RDMAFORK_MODE");
	CHECK(rf_mode() == RF_MODE_NONE);
	/* Nor is it the one engine of the process. */
	child = fork();
	if (!child) {
		CHECK(rf_one_engine_claim(1, &other) == 0);
		CHECK(init(RF_MODE_AUTO) == -EEXIST && error.cause == RF_CAUSE_OTHER_ENGINE);
		_exit(0);
	}
	CHECK(check_wait(child) == 0);
	CHECK(init(RF_MODE_AUTO) == 0 && rf_mode() == RF_MODE_EAGER);
	/* The mode in force stays, however the environment changes. */
	unsetenv("RDMAFORK_TRUST_COPYING");
	CHECK(init(RF_MODE_AUTO) == 0);
	rf_kernel_info(&kernel);
	CHECK(!kernel.copy_trusted);
}

static void a_trusted_kernel_stays_trusted_while_the_engine_runs(void)
{
	struct rf_kernel kernel;
	pid_t child;

	check_needs_lazy();
	CHECK(init(RF_MODE_AUTO) == 0);
	setenv("RDMAFORK_TRUST_COPYING", "0", 1);
	CHECK(init(RF_MODE_AUTO) == 0 && rf_mode() == RF_MODE_LAZY);
	rf_kernel_info(&kernel);
	CHECK(kernel.copy_trusted && kernel.trust_how != RF_HOW_ENVIRONMENT);
	child = fork();
	if (!child) {
		CHECK(init(RF_MODE_AUTO) == 0 && rf_mode() == RF_MODE_LAZY);
		rf_kernel_info(&kernel);
		CHECK(kernel.copy_trusted);
		/* It starts anew, with the environment it has. */
		CHECK(init(RF_MODE_EAGER) == 0 && rf_mode() == RF_MODE_EAGER);
		rf_kernel_info(&kernel);
		CHECK(!kernel.copy_trusted && kernel.trust_how == RF_HOW_ENVIRONMENT);
		_exit(0);
	}
	CHECK(check_wait(child) == 0);
}

/* An inherited mode stays in force where another start is refused. */
static void a_refused_start_changes_no_trust(void)
{
	struct rf_kernel kernel;
	pid_t child;

	check_needs_lazy();
	CHECK(init(RF_MODE_EAGER) == 0);
	child = fork();
	if (!child) {
		setenv("RDMAFORK_TRUST_COPYING", "0", 1);
		CHECK(init(RF_MODE_LAZY) == -ENOTSUP && error.cause == RF_CAUSE_UNTRUSTED);
		rf_kernel_info(&kernel);
		CHECK(kernel.copy_trusted && rf_mode() == RF_MODE_EAGER);
		unsetenv("RDMAFORK_TRUST_COPYING");
		CHECK(init(RF_MODE_LAZY) == 0 && rf_mode() == RF_MODE_LAZY);
		_exit(0);
	}
	CHECK(check_wait(child) == 0);
}

static void a_late_start_is_refused(void)
{
	char *memory = check_map(2);
	struct rf_handle handle;

	CHECK(rf_register(memory, check_page, 0, RF_OMIT, &handle, &error) == 0);
	CHECK(rf_handle_state(handle) == 0);
	CHECK(init(RF_MODE_AUTO) == -EINVAL && error.cause == RF_CAUSE_LATE);
	check_release(handle);
	CHECK(init(RF_MODE_AUTO) == -EINVAL && error.cause == RF_CAUSE_LATE);
	CHECK(check_marked(memory, 2) == 0);
	/* A child starts from nothing. */
	pid_t child = fork();

	if (!child) {
		CHECK(init(RF_MODE_AUTO) == 0);
		handle = check_register(memory, check_page, 0);
		CHECK(check_marked(memory, 2) == 1);
		_exit(0);
	}
	CHECK(check_wait(child) == 0);
}

static void an_undone_registration_leaves_no_trace(void)
{
	struct rf_handle one, other;
	char byte = 0;

	CHECK(rf_register(&byte, 1, 0, RF_OMIT, &one, &error) == 0);
	CHECK(rf_register(&byte, 1, 0, RF_OMIT, &other, &error) == 0);
	CHECK(rf_release(one, RF_UNDO) == 0);
	CHECK(rf_release(one, RF_UNDO) == -ESTALE);
	CHECK(init(RF_MODE_AUTO) == -EINVAL && error.cause == RF_CAUSE_LATE);
	CHECK(rf_release(other, RF_UNDO) == 0);
	CHECK(init(RF_MODE_AUTO) == 0);
	/* A registration has made the choice of a mode, undone or not. */
	CHECK(rf_register(&byte, 1, RF_HELD, RF_OMIT, &one, &error) == 1);
	CHECK(rf_release(one, RF_UNDO) == 0);
}

static void a_failed_registration_is_none(void)
{
	struct rf_handle handle;

	CHECK(rf_register((void *)16, SIZE_MAX, 0, RF_OMIT, &handle, &error) == -EOVERFLOW);
	CHECK(rf_register(&handle, 4, 0, (enum rf_policy)3, &handle, &error) == -EINVAL);
	CHECK(error.cause == RF_CAUSE_POLICY);
	CHECK(rf_register(&handle, 4, 0, (enum rf_policy)77, &handle, &error) == -EINVAL);
	CHECK(init(RF_MODE_EAGER) == 0);
	check_empty();
}

/* Any bit: none is ignored, none is taken for one of the engine's own. */
static void unknown_flags_are_refused_and_change_nothing(void)
{
	struct rf_handle handle, kept, untouched = { .serial = 77 };
	struct rf_stats before, after;
	char *memory = check_map(1);
	unsigned int bit;
	int fds[2];

	CHECK(pipe(fds) == 0);
	setenv("RDMAV_FORK_SAFE", "1", 1);
	CHECK(rf_register(memory, 1, 1u << 31, RF_OMIT, &handle, &error) == -EINVAL);
	CHECK(error.cause == RF_CAUSE_FLAGS && rf_mode() == RF_MODE_NONE);
	CHECK(rf_register(memory, 1, 0, RF_OMIT, &kept, &error) == 1);
	CHECK(rf_stats(&before) == 0);
	for (bit = 1; bit; bit <<= 1) {
		if (!(bit & (RF_HELD | RF_NOWAIT | RF_FROM))) {
			handle = untouched;
			CHECK(rf_register(memory, check_page, bit | RF_HELD, RF_OMIT, &handle,
					  &error) == -EINVAL);
			CHECK(error.cause == RF_CAUSE_FLAGS && handle.serial == untouched.serial);
		}
		if (!(bit & (RF_NOWAIT | RF_UNDO)))
			CHECK(rf_release(kept, bit | RF_NOWAIT) == -EINVAL, "0x%x", bit);
		if (!(bit & RF_MAPPED))
			CHECK(rf_descriptor_omit(fds[0], bit | RF_MAPPED) == -EINVAL, "0x%x", bit);
	}
	CHECK(rf_stats(&after) == 0 && !memcmp(&before, &after, sizeof(after)));
	CHECK(rf_descriptor_release(fds[0]) == -ENOENT);
	CHECK(rf_handle_state(kept) == 1 && rf_release(kept, 0) == 0);
	check_empty();
}

static void variables_of_libibverbs_start_the_engine(void)
{
	static const char *const names[] = { "RDMAV_FORK_SAFE", "IBV_FORK_SAFE" };
	static const char *const values[] = { "0", "", "1" };
	size_t i, j;

	for (i = 0; i < COUNT_OF(names); i++) {
		for (j = 0; j < COUNT_OF(values); j++) {
			pid_t child = fork();

			if (!child) {
				char *memory = check_map(1);

				setenv(names[i], values[j], 1);
				check_register(memory, check_page, 0);
				CHECK(rf_mode() != RF_MODE_NONE && check_marked(memory, 1) == 1);
				_exit(0);
			}
			CHECK(check_wait(child) == 0);
		}
	}
	setenv("RDMAV_FORK_SAFE", "1", 1);
	setenv("RDMAFORK_MODE", "wrong", 1);
	for (i = 0; i < 2; i++) {
		struct rf_handle handle;

		CHECK(rf_register(&i, 8, 0, RF_OMIT, &handle, &error) == -EINVAL);
		CHECK(error.cause == RF_CAUSE_ENVIRONMENT);
	}
}

static void a_child_chooses_its_own_mode(void)
{
	char *memory = check_map(1);
	pid_t child;

	check_needs_lazy();
	check_start(RF_MODE_LAZY);
	check_register(memory, check_page, RF_HELD);
	child = fork();
	if (!child) {
		CHECK(rf_mode() == RF_MODE_LAZY);
		CHECK(init(RF_MODE_EAGER) == 0 && rf_mode() == RF_MODE_EAGER);
		check_empty();
		memory = check_map(1);
		check_register(memory, check_page, RF_HELD);
		CHECK(check_marked(memory, 1) == 1);
		CHECK(init(RF_MODE_LAZY) == -EINVAL);
		_exit(0);
	}
	CHECK(check_wait(child) == 0);
}

static void before_the_start_nothing_is_claimed(void)
{
	char *memory = check_map(2);
	struct rf_range_info info;
	struct rf_handle handle;

	CHECK(rf_register(memory, check_page, RF_HELD, RF_OMIT, &handle, &error) == 0);
	CHECK(rf_list(&info, 1) == 1 && info.protection == RF_BY_NOTHING);
	CHECK(info.start == (uintptr_t)memory && info.end == info.start + check_page);
	CHECK(rf_handle_state(handle) == 0);
	check_release(handle);
	check_empty();
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(a_second_start_with_the_same_wishes_does_nothing),
		SCENARIO(auto_asks_kernel_and_environment),
		SCENARIO(a_kernel_is_not_trusted_where_the_environment_says_so),
		SCENARIO(a_trusted_kernel_stays_trusted_while_the_engine_runs),
		SCENARIO(a_refused_start_changes_no_trust),
		SCENARIO(a_late_start_is_refused),
		SCENARIO(an_undone_registration_leaves_no_trace),
		SCENARIO(a_failed_registration_is_none),
		SCENARIO(unknown_flags_are_refused_and_change_nothing),
		SCENARIO(variables_of_libibverbs_start_the_engine),
		SCENARIO(a_child_chooses_its_own_mode),
		SCENARIO(before_the_start_nothing_is_claimed),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
