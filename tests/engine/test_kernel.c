/* SPDX-License-Identifier: BSD-3-Clause */
/* Facts about the kernel, and how they are found. */
#include "check.h"
#include "kernel.h"
#include "sys.h"

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <sys/utsname.h>
#include <sys/wait.h>

static void versions_are_read(void)
{
	static const struct {
		const char *release;
		unsigned int version;
	} cases[] = {
		{ "6.1.0-44-amd64", 6001 },
		{ "5.10.0", 5010 },
		{ "5.12", 5012 },
		{ "5.19.0-rc1+", 5019 },
		{ "3.10.0-1160.el7.x86_64", 3010 },
		{ "10.2", 10002 },
		{ "6.18.44-fc-v595", 6018 },
		{ "5.1000.1", 5999 },
		{ "5.4294967297.1", 5999 },
		{ "4.99999999999999999999", 4999 },
		{ "", 0 },
		{ "6", 0 },
		{ "linux", 0 },
		{ "-6.1", 0 },
		{ "6-1", 0 },
		{ " 6.1", 0 },
		{ ".5", 0 },
		{ "6.", 0 },
		{ "6.x", 0 },
		{ "4294967302.1", 0 },
		{ "99999999999999999999.1", 0 },
	};
	size_t i;

	for (i = 0; i < COUNT_OF(cases); i++)
		CHECK(rf_kernel_parse_version(cases[i].release) == cases[i].version, "%s: %u",
		      cases[i].release, rf_kernel_parse_version(cases[i].release));
}

static void information_is_this_kernels(void)
{
	struct rf_kernel kernel, again;
	struct utsname name;
	long limit = 0;
	FILE *file;
	size_t i;

	rf_kernel_info(&kernel);
	CHECK(uname(&name) == 0 && !strcmp(name.release, kernel.release));
	CHECK(kernel.page_size == check_page);
	CHECK(!kernel.copy_trusted || kernel.copy_on_fork);
	file = fopen("/proc/sys/vm/max_map_count", "r");
	if (file) {
		CHECK(fscanf(file, "%ld", &limit) == 1 && limit == (long)kernel.max_map_count);
		fclose(file);
	}
	for (i = 1; i < COUNT_OF(kernel.huge_shifts) && kernel.huge_shifts[i]; i++)
		CHECK(kernel.huge_shifts[i] > kernel.huge_shifts[i - 1]);
	if (!access("/sys/kernel/mm/hugepages/hugepages-2048kB", F_OK))
		CHECK(memchr(kernel.huge_shifts, 21, sizeof(kernel.huge_shifts)));
	rf_kernel_info(&again);
	CHECK(!memcmp(&kernel, &again, sizeof(kernel)));
	CHECK(!(kernel.trust_how == RF_HOW_ENVIRONMENT && kernel.copy_trusted));
}

/* Each call fails once. An ability that cannot be found out is taken for absent. */
static void a_refused_question_claims_nothing(void)
{
	struct rf_kernel kernel;
	unsigned long nth;
	int status;

	for (nth = 1;; nth++) {
		pid_t child = fork();

		CHECK(child >= 0);
		if (!child) {
			inject(nth, ENOMEM);
			rf_kernel_info(&kernel);
			inject(0, 0);
			CHECK(kernel.page_size == check_page);
			/* Never zero: half of it is the engine's budget. */
			CHECK(kernel.max_map_count >= 2);
			CHECK(!kernel.copy_trusted || kernel.copy_on_fork);
			CHECK(!kernel.copy_trusted || kernel.trust_how == RF_HOW_PROBE ||
			      rf_kernel_parse_version(kernel.release) >= 5019);
			_exit(inject_faults() ? 0 : 2);
		}
		status = check_wait(child);
		if (status == 2)
			break;
		CHECK(status == 0, "call %lu: %d", nth, status);
	}
	CHECK(nth > 4, "%lu calls", nth);
}

/* ---- Whether its copying is trusted ---- */

static unsigned int version(void)
{
	struct rf_kernel kernel;

	rf_kernel_info(&kernel);
	return rf_kernel_parse_version(kernel.release);
}

/* Distributions may have ported either behaviour to the versions left out. */
static void probes_show_how_the_kernel_copies(void)
{
	unsigned int round;

	if (version() < 5009 || (version() >= 5012 && version() < 5019))
		check_skip("what the probes are to answer on this kernel is not known");
	for (round = 0; round < 100; round++) {
		CHECK(rf_kernel_probe(false) == (version() >= 5019), "round %u", round);
		CHECK(rf_kernel_probe(true) == 0, "round %u", round);
	}
}

static bool over;

static void *fork_on(void *unused)
{
	while (!__atomic_load_n(&over, __ATOMIC_SEQ_CST))
		check_fork();
	return unused;
}

static void the_first_probe_does_not_mind_forks_of_others(void)
{
	unsigned int round;
	pthread_t thread;

	if (version() < 5019)
		check_skip("this kernel answers as if there were others in any case");
	CHECK(!pthread_create(&thread, NULL, fork_on, NULL));
	for (round = 0; round < check_scale(2000); round++)
		CHECK(rf_kernel_probe(false) == 1, "round %u", round);
	__atomic_store_n(&over, true, __ATOMIC_SEQ_CST);
	pthread_join(thread, NULL);
}

static unsigned int handled;

static void count_signal(int number)
{
	(void)number;
	handled++;
}

static void count_fork(void)
{
	handled++;
}

static unsigned int count_descriptors(void)
{
	DIR *directory = opendir("/proc/self/fd");
	unsigned int count = 0;

	CHECK(directory);
	while (readdir(directory))
		count++;
	closedir(directory);
	return count;
}

static void the_program_does_not_notice_the_probes(void)
{
	static void (*const actions[])(int) = { count_signal, SIG_IGN, SIG_DFL };
	unsigned int descriptors = count_descriptors(), round;
	size_t vmas, i;

	CHECK(!pthread_atfork(count_fork, count_fork, count_fork));
	(void)rf_kernel_probe(true);
	vmas = check_vmas();
	for (i = 0; i < COUNT_OF(actions); i++) {
		signal(SIGCHLD, actions[i]);
		for (round = 0; round < 20; round++) {
			errno = 1234;
			CHECK(rf_kernel_probe(round & 1) >= 0);
			CHECK(errno == 1234);
		}
		CHECK(waitpid(-1, NULL, __WALL) == -1 && errno == ECHILD);
	}
	CHECK(!handled && count_descriptors() == descriptors && check_vmas() == vmas);
}

static void *probe_and_end(void *result)
{
	pthread_cancel(pthread_self());
	*(int *)result = rf_kernel_probe(false) >= 0 && rf_kernel_probe(true) >= 0;
	pthread_testcancel();
	return NULL;
}

static void no_thread_ends_in_a_probe(void)
{
	pthread_t thread;
	void *how;
	int whole = 0;

	CHECK(!pthread_create(&thread, NULL, probe_and_end, &whole));
	pthread_join(thread, &how);
	CHECK(whole && how == PTHREAD_CANCELED);
}

/* This kernel under the names of others: @copies as netlink answers. */
static struct rf_kernel judge(const char *release, int copies)
{
	struct rf_kernel kernel = { .page_size = 1 };

	strcpy(kernel.release, release);
	rf_kernel_judge(&kernel, copies);
	return kernel;
}

static void trust_follows_from_version_or_behaviour(void)
{
	static const struct {
		const char *release;
		int copies;
		bool copy_on_fork, trusted;
		enum rf_how how, trust_how;
		bool probed;	/* trusted if this kernel has exclusive pages */
	} cases[] = {
		{ "6.1.0", -EPROTONOSUPPORT, true, true, RF_HOW_VERSION, RF_HOW_VERSION, false },
		{ "5.19.0", 1, true, true, RF_HOW_NETLINK, RF_HOW_VERSION, false },
		{ "6.1.0", 0, false, false, RF_HOW_NETLINK, RF_HOW_NETLINK, false },
		{ "5.18.0", 1, true, false, RF_HOW_NETLINK, RF_HOW_PROBE, true },
		{ "5.14.0-70.el9", 1, true, false, RF_HOW_NETLINK, RF_HOW_PROBE, true },
		{ "5.12.0", 1, true, false, RF_HOW_NETLINK, RF_HOW_PROBE, true },
		{ "5.14.0-70.el9", -EACCES, true, false, RF_HOW_VERSION, RF_HOW_VERSION, false },
		{ "5.14.0-70.el9", 0, false, false, RF_HOW_NETLINK, RF_HOW_NETLINK, false },
		{ "5.11.0", 1, true, false, RF_HOW_NETLINK, RF_HOW_VERSION, false },
		{ "4.18.0-553.el8", 1, true, false, RF_HOW_NETLINK, RF_HOW_VERSION, false },
		{ "4.18.0-553.el8", 0, false, false, RF_HOW_NETLINK, RF_HOW_NETLINK, false },
		{ "5.10.0", -EPROTONOSUPPORT, false, false, RF_HOW_VERSION, RF_HOW_VERSION, false },
		{ "", -EPROTONOSUPPORT, false, false, RF_HOW_VERSION, RF_HOW_VERSION, false },
	};
	bool exclusive = rf_kernel_probe(false) == 1 && rf_kernel_probe(true) == 0;
	size_t i;

	CHECK(version() < 5019 || exclusive);
	for (i = 0; i < COUNT_OF(cases); i++) {
		unsigned long calls = inject_calls();
		struct rf_kernel kernel = judge(cases[i].release, cases[i].copies);

		CHECK(kernel.copy_on_fork == cases[i].copy_on_fork, "case %zu", i);
		CHECK(kernel.copy_how == cases[i].how, "case %zu", i);
		CHECK(kernel.copy_trusted == (cases[i].trusted || (cases[i].probed && exclusive)),
		      "case %zu", i);
		CHECK(kernel.trust_how == cases[i].trust_how, "case %zu", i);
		/* Nothing is tried where the answer would change nothing. */
		CHECK((inject_calls() != calls) == cases[i].probed, "case %zu", i);
	}
}

/* vmsplice() or anything else that a probe needs is refused: the version decides. */
static void without_an_answer_the_version_decides(void)
{
	static const int errors[] = CHECK_ERRORS;
	unsigned long nth, refused = 0, calls = inject_calls();
	struct rf_kernel kernel, all = judge("5.14.0", 1);
	size_t i;

	calls = inject_calls() - calls;
	for (i = 0; i < COUNT_OF(errors); i++) {
		for (nth = 1;; nth++) {
			unsigned long faults = inject_faults();

			inject(nth, errors[i]);
			kernel = judge("5.14.0", 1);
			inject(0, 0);
			if (inject_faults() == faults)
				break;
			/* munmap() has failed; or MADV_NOHUGEPAGE, where there are none. */
			if (kernel.trust_how == RF_HOW_PROBE) {
				CHECK(kernel.copy_trusted == all.copy_trusted);
				continue;
			}
			CHECK(!kernel.copy_trusted && kernel.trust_how == RF_HOW_VERSION,
			      "%s of call %lu", strerror(errors[i]), nth);
			refused++;
		}
		CHECK(nth - 1 == calls, "%lu of %lu calls", nth - 1, calls);
	}
	/* All but these two: 7 of the 9 calls of a round without a child, 5 of 7 of one with it. */
	CHECK(refused > COUNT_OF(errors) * calls * 2 / 3, "%lu of %lu calls", refused, calls);
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(versions_are_read),
		SCENARIO(information_is_this_kernels),
		SCENARIO(a_refused_question_claims_nothing),
		SCENARIO(probes_show_how_the_kernel_copies),
		SCENARIO(the_first_probe_does_not_mind_forks_of_others),
		SCENARIO(the_program_does_not_notice_the_probes),
		SCENARIO(no_thread_ends_in_a_probe),
		SCENARIO(trust_follows_from_version_or_behaviour),
		SCENARIO(without_an_answer_the_version_decides),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
