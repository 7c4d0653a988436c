/* SPDX-License-Identifier: BSD-3-Clause */
/* Where registered pages are absent, a child has nothing that a stray access could hit. */
#define _GNU_SOURCE
#include "check.h"
#include "engine.h"

#include <alloca.h>
#include <pthread.h>
#include <signal.h>

/* True where a page is mapped that can be neither read nor written. */
static bool is_reserved(const char *address)
{
	unsigned char present;
	int ends[2];
	bool readable;

	if (mincore((void *)address, check_page, &present) < 0)
		return false;
	CHECK(pipe(ends) == 0);
	readable = write(ends[1], address, 1) == 1;
	close(ends[0]);
	close(ends[1]);
	return !readable;
}

/* Nothing the child can map lands there. */
static void fill_up(const char *start, const char *end)
{
	size_t i;

	for (i = 0; i < 3000; i++) {
		char *memory = mmap(NULL, check_page * (1 + i % 3), PROT_READ | PROT_WRITE,
				    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		CHECK(memory != MAP_FAILED);
		CHECK(memory >= end || memory + 3 * check_page <= start, "%p", (void *)memory);
	}
}

static void absent_addresses_are_reserved(void)
{
	char *memory = check_map(64);
	struct rf_handle handle;
	pid_t pid;

	check_start(check_best_mode());
	handle = check_register(memory + 8 * check_page, 16 * check_page, RF_HELD);
	pid = fork();
	if (!pid) {
		size_t page;

		for (page = 0; page < 64; page++)
			CHECK(is_reserved(memory + page * check_page) == (page >= 8 && page < 24),
			      "page %zu", page);
		fill_up(memory + 8 * check_page, memory + 24 * check_page);
		signal(SIGSEGV, SIG_DFL); /* a sanitizer's handler would exit */
		memory[9 * check_page] = 1;
		_exit(0);
	}
	CHECK(check_wait(pid) == -SIGSEGV);
	check_release(handle);
	pid = fork();
	if (!pid)
		_exit(memory[9 * check_page]);
	CHECK(check_wait(pid) == 0);
	check_empty();
}

static void a_mapping_already_there_stays(void)
{
	static char *memory;
	struct rf_handle handle;
	pid_t pid;

	memory = check_map(8);
	check_start(check_best_mode());
	handle = check_register(memory, 8 * check_page, 0);
	check_fork();
	/* Unheld, and another's by now: its mark went with it, and the list is old news. */
	check_map_over(memory + 2 * check_page, 1, MAP_PRIVATE);
	memory[2 * check_page] = 5;
	pid = fork();
	if (!pid)
		_exit(memory[2 * check_page]);
	CHECK(check_wait(pid) == 5);
	check_release(handle);
}

/* The bytes beside a registration can be read, then not, then again. */
static void a_page_that_cannot_be_copied_is_reserved(void)
{
	const int protections[] = { PROT_READ | PROT_WRITE, PROT_NONE, PROT_READ | PROT_WRITE };
	char *memory = check_map(4);
	struct rf_handle handle;
	size_t i;
	pid_t pid;

	check_start_untrusted();
	memory[0] = 7;
	handle = check_register(memory + 100, 2 * check_page, 0);
	for (i = 0; i < COUNT_OF(protections); i++) {
		CHECK(mprotect(memory, 3 * check_page, protections[i]) == 0);
		pid = fork();
		if (!pid) {
			bool readable = protections[i] != PROT_NONE;

			CHECK(is_reserved(memory) == !readable, "fork %zu", i);
			CHECK(is_reserved(memory + check_page), "fork %zu", i);
			CHECK(is_reserved(memory + 2 * check_page) == !readable, "fork %zu", i);
			_exit(readable ? memory[0] : 7);
		}
		CHECK(check_wait(pid) == 7, "fork %zu", i);
	}
	check_release(handle);
	check_empty();
}

/* A page behind the end of its file is mapped as readable, and cannot be read. */
static void a_page_that_cannot_be_read_is_reserved(void)
{
	const int protection = PROT_READ | PROT_WRITE;
	char *memory = check_map(4);
	int fd = memfd_create("short", MFD_CLOEXEC);
	pid_t pid;

	CHECK(fd >= 0 && ftruncate(fd, (off_t)check_page) == 0);
	CHECK(mmap(memory, 3 * check_page, protection, MAP_PRIVATE | MAP_FIXED, fd, 0) == memory);
	check_start_untrusted();
	memory[0] = 7;
	check_register(memory + 100, 2 * check_page, 0);
	pid = fork();
	if (!pid) {
		CHECK(is_reserved(memory + check_page) && is_reserved(memory + 2 * check_page));
		_exit(memory[0]);
	}
	CHECK(check_wait(pid) == 7);
}

/* A page that another registration fills is given back no more, though no mark has changed. */
static void a_page_that_is_filled_is_copied_no_more(void)
{
	static const enum rf_policy policies[] = { RF_OMIT, RF_WIPE };
	char *memory = check_map(1);
	struct rf_handle handle, other;
	struct rf_error error;
	size_t i;

	check_start_untrusted();
	memset(memory, 7, check_page);
	handle = check_register(memory + 100, 100, RF_HELD);
	for (i = 0; i < 2 * COUNT_OF(policies); i++) {
		bool filled = i % 2, omitted = filled && policies[i / 2] == RF_OMIT;
		pid_t pid;

		if (filled)
			CHECK(rf_register(memory, check_page, RF_HELD, policies[i / 2], &other,
					  &error) == 1);
		pid = fork();
		if (!pid) {
			CHECK(is_reserved(memory) == omitted);
			_exit(omitted || memory[0] == (filled ? 0 : 7) ? 0 : 1);
		}
		CHECK(check_wait(pid) == 0, "fork %zu", i);
		if (filled)
			check_release(other);
	}
	check_release(handle);
	check_empty();
}

static void the_longest_areas_are_reserved_first(void)
{
	const size_t small = 2000, large = 600;
	char *memory = check_map(2 * small + 32 * large), *big = memory + 2 * small * check_page;
	struct rf_handle *handles = malloc((small + large) * sizeof(*handles));
	size_t i, reserved = 0;
	pid_t pid;

	check_start(check_best_mode());
	for (i = 0; i < small; i++)
		handles[i] = check_register(memory + 2 * i * check_page, check_page, RF_HELD);
	for (i = 0; i < large; i++)
		handles[small + i] = check_register(big + 32 * i * check_page, 31 * check_page,
						    RF_HELD);
	pid = fork();
	if (!pid) {
		for (i = 0; i < large; i++)
			CHECK(is_reserved(big + 32 * i * check_page), "large %zu", i);
		for (i = 0; i < small; i++)
			reserved += is_reserved(memory + 2 * i * check_page);
		CHECK(reserved == RF_RESERVED - large, "%zu", reserved);
		_exit(0);
	}
	CHECK(check_wait(pid) == 0);
	for (i = 0; i < small + large; i++)
		check_release(handles[i]);
	free(handles);
	check_empty();
}

static void a_child_reserves_for_its_own_children(void)
{
	char *memory = check_map(8);
	pid_t pid, inner;

	check_start(check_best_mode());
	(void)check_register(memory, check_page, RF_HELD);
	pid = fork();
	if (!pid) {
		(void)check_register(memory + 4 * check_page, check_page, RF_HELD);
		inner = fork();
		if (!inner)
			_exit(is_reserved(memory + 4 * check_page) && is_reserved(memory) ? 0 : 1);
		_exit(check_wait(inner));
	}
	CHECK(check_wait(pid) == 0);
	/* As does one that no handler saw. */
	pid = check_clone();
	if (!pid) {
		(void)rf_generation();
		inner = fork();
		if (!inner)
			_exit(is_reserved(memory) ? 1 : 0);
		_exit(check_wait(inner));
	}
	CHECK(check_wait(pid) == 0);
}

static void a_refused_reservation_is_no_failure(void)
{
	char *memory = check_map(8);
	struct rf_handle handle;

	check_start(check_best_mode());
	handle = check_register(memory, 8 * check_page, RF_HELD);
	check_fork();
	inject(1, ENOMEM);
	/* Nothing is new, so the child's reserving is the next call. */
	CHECK(!check_child_reads(memory));
	inject(0, 0);
	check_release(handle);
	check_empty();
}

/* Of a buffer in its own frame a child lacks the pages it fills; all else goes on. */
static void *fork_with_a_buffer_on_the_stack(void *unused)
{
	size_t nbytes = 6 * check_page, i;
	char *buffer = alloca(nbytes), *page;
	struct rf_handle handle;
	pid_t pid;

	memset(buffer, 7, nbytes);
	handle = check_register(buffer, nbytes, RF_HELD);
	pid = fork();
	if (!pid) {
		page = (char *)(((uintptr_t)buffer + check_page - 1) & -check_page);
		for (i = 0; i < 5; i++)
			CHECK(is_reserved(page + i * check_page));
		CHECK(!check_child_reads(page));
		_exit(0);
	}
	CHECK(check_wait(pid) == 0);
	check_release(handle);
	for (i = 0; i < nbytes; i++)
		CHECK(buffer[i] == 7);
	return unused;
}

static void a_hole_in_a_stack_is_reserved(void)
{
	pthread_t thread;

	check_needs_lazy(); /* or partial pages are marked, and the frame with them */
	check_start(RF_MODE_LAZY);
	fork_with_a_buffer_on_the_stack(NULL);
	CHECK(!pthread_create(&thread, NULL, fork_with_a_buffer_on_the_stack, NULL));
	pthread_join(thread, NULL);
	check_empty();
}

static char *area;
static bool over;

static void *register_and_release(void *at)
{
	while (!__atomic_load_n(&over, __ATOMIC_SEQ_CST))
		check_release(check_register((char *)at, 3 * check_page, RF_HELD));
	return NULL;
}

/* A child never loses a mapping, whatever other threads are doing. */
static void reserved_areas_change_during_forks(void)
{
	unsigned long round, rounds = check_scale(600);
	struct rf_handle handle;
	pthread_t threads[3];
	size_t i;

	area = check_map(64);
	memset(area, 1, 64 * check_page);
	check_start(check_best_mode());
	handle = check_register(area + 32 * check_page, 2 * check_page, RF_HELD);
	check_fork();
	for (i = 0; i < COUNT_OF(threads); i++)
		CHECK(!pthread_create(&threads[i], NULL, register_and_release,
				      area + 8 * i * check_page));
	for (round = 0; round < rounds; round++) {
		pid_t pid = fork();

		if (!pid) {
			CHECK(is_reserved(area + 32 * check_page));
			CHECK(is_reserved(area + 33 * check_page));
			for (i = 35; i < 64; i++)
				CHECK(area[i * check_page] == 1);
			_exit(0);
		}
		CHECK(check_wait(pid) == 0);
	}
	__atomic_store_n(&over, true, __ATOMIC_SEQ_CST);
	for (i = 0; i < COUNT_OF(threads); i++)
		pthread_join(threads[i], NULL);
	check_release(handle);
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(absent_addresses_are_reserved),
		SCENARIO(a_mapping_already_there_stays),
		SCENARIO(a_page_that_cannot_be_copied_is_reserved),
		SCENARIO(a_page_that_cannot_be_read_is_reserved),
		SCENARIO(a_page_that_is_filled_is_copied_no_more),
		SCENARIO(the_longest_areas_are_reserved_first),
		SCENARIO(a_child_reserves_for_its_own_children),
		SCENARIO(a_refused_reservation_is_no_failure),
		SCENARIO(a_hole_in_a_stack_is_reserved),
		SCENARIO(reserved_areas_change_during_forks),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
