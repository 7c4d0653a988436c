/* SPDX-License-Identifier: BSD-3-Clause */
/* On partial pages that are marked a child finds every byte that was not registered. */
#define _GNU_SOURCE
#include "check.h"
#include "engine.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/uio.h>

#define PAGES 24

enum state {
	PRESENT,
	ZERO,
	ABSENT
};

static char *memory;
/* The value that a child must find of each byte of @memory. */
static unsigned char expected[4 << 20];
static size_t nbytes;

static unsigned char value_at(size_t at)
{
	return (unsigned char)(1 + at % 251);
}

static void fill(void)
{
	size_t at;

	for (at = 0; at < nbytes; at++)
		memory[at] = (char)value_at(at);
}

static void prepare_memory(size_t pages)
{
	nbytes = pages * check_page;
	memory = check_map(pages);
	fill();
}

/* Reads without a fault; false where nothing can be read. */
static bool read_page(const char *from, char *to)
{
	struct iovec into = { to, check_page }, out = { (void *)from, check_page };

	return process_vm_readv(getpid(), &into, 1, &out, 1, 0) == (ssize_t)check_page;
}

static void check_bytes(void)
{
	static char page[1 << 16];
	size_t first, at;

	for (first = 0; first < nbytes; first += check_page) {
		bool readable = read_page(memory + first, page);

		for (at = first; at < first + check_page; at++) {
			enum state found = !readable	      ? ABSENT
					   : page[at - first] ? PRESENT
							      : ZERO;

			CHECK(found == expected[at], "byte %zu of page %zu: %d, not %d",
			      at - first, first / check_page, found, expected[at]);
			CHECK(found != PRESENT ||
				      (unsigned char)page[at - first] == value_at(at),
			      "byte %zu is another's", at);
		}
	}
}

/* In a child, and in a child of that, which has the same. */
static void check_children(void)
{
	pid_t pid = fork();

	CHECK(pid >= 0);
	if (!pid) {
		check_bytes();
		pid = fork();
		if (!pid) {
			check_bytes();
			_exit(0);
		}
		_exit(check_wait(pid));
	}
	CHECK(check_wait(pid) == 0);
	check_sound();
}

struct region {
	size_t start, end;
	enum rf_policy policy;
	struct rf_handle handle;
};

static void expect(size_t start, size_t end, enum state state)
{
	memset(expected + start, (int)state, end - start);
}

static bool fills(const struct region *region, size_t first, size_t page_size)
{
	return region->start <= first && first + page_size <= region->end;
}

/* A page that a registration fills goes by its policy, the others are copied as a whole. */
static void model_pages(const struct region *regions, size_t count, size_t page_size)
{
	size_t first, i;

	expect(0, nbytes, PRESENT);
	for (first = 0; first < nbytes; first += page_size) {
		bool omitted = false, wiped = false;

		for (i = 0; i < count; i++) {
			omitted |= regions[i].policy == RF_OMIT &&
				   fills(&regions[i], first, page_size);
			wiped |= regions[i].policy == RF_WIPE &&
				 fills(&regions[i], first, page_size);
		}
		if (omitted || wiped)
			expect(first, first + page_size, omitted ? ABSENT : ZERO);
	}
}

static void model(const struct region *regions, size_t count)
{
	model_pages(regions, count, check_page);
}

static void add(struct region *region, size_t start, size_t end, enum rf_policy policy)
{
	struct rf_error error;

	region->start = start;
	region->end = end;
	region->policy = policy;
	CHECK(rf_register(memory + start, end - start, RF_HELD, policy, &region->handle,
			  &error) == 1);
	CHECK(error.cause == RF_CAUSE_NONE);
}

static void bytes_beside_registered_ones_stay(void)
{
	struct region regions[3];

	prepare_memory(PAGES);
	check_start_untrusted();
	add(&regions[0], check_page + 100, 4 * check_page + 7, RF_OMIT);
	add(&regions[1], 6 * check_page + 1, 6 * check_page + 65, RF_OMIT);
	add(&regions[2], 8 * check_page, 10 * check_page, RF_OMIT);
	model(regions, 3);
	check_children();
	/* Of this moment, not of the fork before. */
	memory[check_page] = 0;
	check_fork();
	fill();
	check_children();
	check_release(regions[0].handle);
	model(regions + 1, 2);
	check_children();
	check_release(regions[1].handle);
	check_release(regions[2].handle);
	model(NULL, 0);
	check_children();
	check_empty();
}

/* Any regions that overlap and share pages, of either policy, coming and going. */
static void many_registrations_share_pages(void)
{
	struct region regions[40];
	unsigned long round, rounds = check_scale(400);
	size_t count = 0, first, length;

	prepare_memory(PAGES);
	check_start_untrusted();
	for (round = 0; round < rounds; round++) {
		if (count && (count == COUNT_OF(regions) || check_below(5) < 2)) {
			size_t gone = check_below(count);

			check_release(regions[gone].handle);
			regions[gone] = regions[--count];
		} else {
			length = 1 + check_below(check_below(2) ? 300 : 3 * check_page);
			first = check_below(nbytes - length);
			if (!check_below(4))
				first = first / check_page * check_page;
			add(&regions[count++], first, first + length,
			    check_below(3) ? RF_OMIT : RF_WIPE);
		}
		if (check_below(4))
			continue;
		model(regions, count);
		check_children();
	}
	while (count)
		check_release(regions[--count].handle);
	model(NULL, 0);
	check_children();
	check_empty();
}

static void parts_of_huge_pages(enum rf_mode mode)
{
	static const size_t ends[][2] = {
		{ 100, 164 },
		{ 4096, 12288 },
		{ (1 << 20) + 5, (2 << 20) - 1 },
		{ (2 << 20) - 9, (2 << 20) + 9 },
		{ 0, (2 << 20) + 5 },
	};
	struct region regions[COUNT_OF(ends)];
	size_t i;

	nbytes = 2 * CHECK_HUGE;
	memory = check_map_huge(2, MAP_PRIVATE);
	fill();
	check_start(mode);
	for (i = 0; i < COUNT_OF(ends); i++) {
		add(&regions[i], ends[i][0], ends[i][1], RF_OMIT);
		model_pages(regions, i + 1, CHECK_HUGE);
		check_children();
	}
	for (i = 0; i < COUNT_OF(ends); i++) {
		check_release(regions[i].handle);
		model_pages(regions + i + 1, COUNT_OF(ends) - i - 1, CHECK_HUGE);
		check_children();
	}
	check_empty();
}

static void parts_of_huge_pages_eager(void)
{
	parts_of_huge_pages(RF_MODE_EAGER);
}

static void parts_of_huge_pages_lazy(void)
{
	check_needs_lazy();
	parts_of_huge_pages(RF_MODE_LAZY);
}

/* To each of them the same huge page is a partial page: room for copies has a limit. */
static void many_registrations_share_a_huge_page(void)
{
	struct region regions[1000];
	size_t i;

	nbytes = CHECK_HUGE;
	memory = check_map_huge(1, MAP_PRIVATE);
	fill();
	check_start(RF_MODE_EAGER);
	for (i = 0; i < COUNT_OF(regions); i++)
		add(&regions[i], 2 * i * 1000, (2 * i + 1) * 1000, RF_OMIT);
	check_fork();
	CHECK(rf_engine.list.spare->mapped <= (size_t)256 << 20);
	model_pages(regions, COUNT_OF(regions), CHECK_HUGE);
	check_children();
	for (i = 0; i < COUNT_OF(regions); i++)
		check_release(regions[i].handle);
	check_empty();
}

/* A library's data, say. */
static void bytes_beside_a_registered_private_file_stay(void)
{
	char name[] = "/tmp/edges-XXXXXX";
	struct region region;
	int fd = mkstemp(name);

	CHECK(fd >= 0 && unlink(name) == 0);
	nbytes = 4 * check_page;
	CHECK(ftruncate(fd, (off_t)nbytes) == 0);
	memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
	CHECK(memory != MAP_FAILED);
	fill();
	check_start_untrusted();
	add(&region, check_page + 1, 3 * check_page - 1, RF_OMIT);
	model(&region, 1);
	check_children();
}

/* Memory that is not held may be gone, or inaccessible, when a fork saves its bytes. */
static void pages_that_cannot_be_read_do_no_harm(void)
{
	struct region region, closed, gone;

	prepare_memory(PAGES);
	check_start_untrusted();
	add(&region, 100, 200, RF_OMIT);
	add(&closed, 4 * check_page + 100, 4 * check_page + 200, RF_OMIT);
	add(&gone, 8 * check_page + 100, 8 * check_page + 200, RF_OMIT);
	CHECK(mprotect(memory + 4 * check_page, check_page, PROT_NONE) == 0);
	CHECK(munmap(memory + 8 * check_page, check_page) == 0);
	model(&region, 1);
	expect(4 * check_page, 5 * check_page, ABSENT);
	expect(8 * check_page, 9 * check_page, ABSENT);
	check_children();
	CHECK(mprotect(memory + 4 * check_page, check_page, PROT_READ | PROT_WRITE) == 0);
	check_release(closed.handle);
	check_release(gone.handle);
	check_release(region.handle);
	check_empty();
}

/* In children of @first and of itself: inaccessible, and then the parent's bytes. */
static void check_opened_by_a_child(size_t first, size_t length)
{
	pid_t pid = fork();
	size_t at;

	CHECK(pid >= 0);
	if (!pid) {
		CHECK(check_protection(memory + first) == PROT_NONE);
		CHECK(mprotect(memory + first, length, PROT_READ | PROT_WRITE) == 0);
		for (at = first; at < first + length; at++)
			CHECK((unsigned char)memory[at] == value_at(at), "byte %zu", at);
		_exit(0);
	}
	CHECK(check_wait(pid) == 0);
	CHECK(check_protection(memory + first) == PROT_NONE);
}

/* A read barrier has a page inaccessible for a moment, and opens it when it is touched. */
static void inaccessible_pages_keep_their_bytes(void)
{
	struct region regions[2];

	check_needs_inaccessible_bytes();
	prepare_memory(PAGES);
	check_start_untrusted();
	/* One of a stretch that is read at once, with others on both sides. */
	add(&regions[0], check_page + 100, check_page + 200, RF_OMIT);
	add(&regions[1], 2 * check_page + 100, 4 * check_page + 200, RF_OMIT);
	CHECK(mprotect(memory + 2 * check_page, check_page, PROT_NONE) == 0);
	check_opened_by_a_child(2 * check_page, check_page);
	model(regions, 2);
	expect(2 * check_page, 3 * check_page, ABSENT);
	check_children();
	check_release(regions[0].handle);
	check_release(regions[1].handle);
	check_empty();
}

static void inaccessible_huge_pages_keep_their_bytes(void)
{
	struct region region;

	check_needs_inaccessible_bytes();
	nbytes = CHECK_HUGE;
	memory = check_map_huge(1, MAP_PRIVATE);
	fill();
	check_start(check_best_mode());
	add(&region, 100, 164, RF_OMIT);
	CHECK(mprotect(memory, nbytes, PROT_NONE) == 0);
	check_opened_by_a_child(0, nbytes);
	check_release(region.handle);
	check_empty();
}

static void copied_pages_have_the_parent_s_protection(void)
{
	static const int protections[] = { PROT_READ, PROT_READ | PROT_EXEC, PROT_READ | PROT_WRITE,
					   PROT_NONE };
	static const enum rf_policy policies[] = { RF_OMIT, RF_WIPE };
	const int fd = memfd_create("file", MFD_CLOEXEC);
	struct region regions[2 * COUNT_OF(protections)];
	size_t i, first;
	pid_t pid;

	check_needs_inaccessible_bytes();
	prepare_memory(PAGES);
	/* Of a private file, whose zeros the child maps itself. */
	CHECK(ftruncate(fd, (off_t)nbytes) == 0);
	CHECK(mmap(memory, nbytes / 2, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd, 0) ==
	      memory);
	fill();
	check_start_untrusted();
	for (i = 0; i < COUNT_OF(regions); i++) {
		first = 3 * i * check_page;
		add(&regions[i], first + 100, first + 2 * check_page + 100, policies[i % 2]);
		CHECK(mprotect(memory + first, 3 * check_page, protections[i / 2]) == 0);
	}
	model(regions, COUNT_OF(regions));
	/* Nothing can be read there. */
	expect(18 * check_page, 24 * check_page, ABSENT);
	check_children();
	pid = fork();
	CHECK(pid >= 0);
	for (i = 0; !pid && i < COUNT_OF(regions); i++) {
		const char *at = memory + 3 * i * check_page;

		CHECK(check_protection(at) == protections[i / 2], "page %zu", 3 * i);
		CHECK(check_protection(at + 2 * check_page) == protections[i / 2]);
		CHECK(i % 2 == 0 || check_protection(at + check_page) == protections[i / 2]);
	}
	if (!pid)
		_exit(0);
	CHECK(check_wait(pid) == 0);
	for (i = 0; i < COUNT_OF(regions); i++)
		check_release(regions[i].handle);
	check_empty();
}

/* Each of a fork's system calls fails: a byte is as it was or cannot be read, never another. */
static bool is_sane(void)
{
	static char page[1 << 16];
	size_t first, at;

	for (first = 0; first < nbytes; first += check_page) {
		if (!read_page(memory + first, page))
			continue;
		for (at = first; at < first + check_page; at++)
			if (page[at - first] &&
			    (unsigned char)page[at - first] != value_at(at))
				return false;
			else if (!page[at - first] && expected[at] == PRESENT)
				return false;
	}
	return true;
}

static void a_failed_copy_shows_no_wrong_bytes(void)
{
	struct region regions[3];
	unsigned long nth, faults = 0, before;
	pid_t pid;

	prepare_memory(PAGES);
	check_start_untrusted();
	add(&regions[0], 100, check_page + 7, RF_OMIT);
	add(&regions[1], 3 * check_page + 100, 3 * check_page + 200, RF_OMIT);
	add(&regions[2], 5 * check_page + 1, 6 * check_page, RF_OMIT);
	model(regions, 3);
	for (nth = 1; nth < 60; nth++) {
		before = inject_faults();
		inject(nth, ENOMEM);
		pid = fork();
		if (!pid)
			_exit(is_sane() ? 0 : 1);
		inject(0, 0);
		faults += inject_faults() - before;
		CHECK(check_wait(pid) == 0, "call %lu", nth);
	}
	CHECK(faults > 2);
	check_children();
}

/* Where there is no room for the bytes that a fork must save, the registration fails. */
static void room_is_taken_at_the_registration(void)
{
	struct rf_handle handle;
	struct rf_error error;
	unsigned long nth;
	int rc = -ENOMEM;

	prepare_memory(PAGES);
	check_start_untrusted();
	for (nth = 1; rc == -ENOMEM; nth++) {
		inject(nth, ENOMEM);
		rc = rf_register(memory + 100, 100, RF_HELD, RF_OMIT, &handle, &error);
		inject(0, 0);
		CHECK(rc == 1 || error.cause == RF_CAUSE_ENGINE_MEMORY ||
			      error.cause == RF_CAUSE_VMA_LIMIT || error.cause == RF_CAUSE_REFUSED,
		      "%d", error.cause);
		if (rc < 0) {
			CHECK(check_marked(memory, PAGES) == 0);
			check_empty();
		}
	}
	/* Where marks stay the first call is a question, which the next one answers as well. */
	CHECK(rc == 1 && nth > (check_marks_stay() ? 1 : 2));
	check_release(handle);
	check_empty();
}

static struct region in_window = { .start = 9 * 4096 + 9, .end = 10 * 4096 + 9 };
static bool registering;

static void register_in_the_window(void)
{
	if (!registering)
		return;
	registering = false;
	add(&in_window, in_window.start, in_window.end, in_window.policy);
}

__attribute__((constructor(101))) static void install_before(void)
{
	pthread_atfork(register_in_the_window, NULL, NULL);
}

/* Saved bytes are not kept for ever: here twice 160 MB, of a byte on each page. */
static void much_room_for_copies_is_freed(void)
{
	const size_t count = 40000;
	struct rf_handle *handles = malloc(count * sizeof(*handles));
	size_t i;

	check_start_untrusted();
	memory = check_map(count);
	for (i = 0; i < count; i++)
		handles[i] = check_register(memory + i * check_page, 1, RF_HELD);
	for (i = 0; i < 2; i++)
		check_fork();
	CHECK(rf_engine.list.shown->mapped > count * (check_page - 1));
	CHECK(rf_engine.list.spare->mapped > count * (check_page - 1));
	for (i = 0; i < count; i++)
		check_release(handles[i]);
	check_fork();
	CHECK(!rf_engine.list.shown && !rf_engine.list.spare);
	check_empty();
	/* And it is taken again. */
	handles[0] = check_register(memory, 1, RF_HELD);
	memory[1] = 5;
	CHECK(check_child_reads(memory + 1));
	check_release(handles[0]);
	/* The usual room stays: registrations come again. */
	check_fork();
	CHECK(rf_engine.list.shown && rf_engine.list.spare);
	free(handles);
}

/* A byte of each page, as the child finds it; a page that it lacks is in order if @any is. */
static bool finds_each_page(size_t count, bool any)
{
	static char page[1 << 16];
	size_t i;

	for (i = 0; i < count; i++) {
		if (!read_page(memory + i * check_page, page) ? !any
							      : page[5] != (char)value_at(i))
			return false;
	}
	return true;
}

static void check_fork_finds_each_page(size_t count, bool any)
{
	pid_t pid = fork();

	CHECK(pid >= 0);
	if (!pid)
		_exit(finds_each_page(count, any) ? 0 : 1);
	inject(0, 0);
	CHECK(check_wait(pid) == 0);
}

static bool wants_huge_pages(const struct rf_areas *areas)
{
	const uintptr_t mask = CHECK_HUGE - 1;

	return check_flags((void *)(((uintptr_t)areas + areas->bytes_at + mask) & ~mask)) &
	       CHECK_HG;
}

/* Many of them, so that they are not faulted in page by page. No refusal does harm. */
static void many_saved_bytes_want_huge_pages(void)
{
	const size_t count = 4 * CHECK_HUGE / check_page, few = 4;
	unsigned long nth, faults;
	size_t i;

	if (access("/sys/kernel/mm/transparent_hugepage/enabled", F_OK))
		check_skip("this kernel has no transparent huge pages");
	check_start_untrusted();
	memory = check_map(count);
	for (i = 0; i < count; i++) {
		memory[i * check_page + 5] = (char)value_at(i);
		if (i >= few)
			continue;
		check_register(memory + i * check_page, 1, RF_HELD);
	}
	check_fork_finds_each_page(few, false);
	CHECK(!wants_huge_pages(rf_engine.list.shown));
	for (i = few; i < count; i++)
		check_register(memory + i * check_page, 1, RF_HELD);
	check_fork_finds_each_page(count, false);
	CHECK(wants_huge_pages(rf_engine.list.shown));
	faults = inject_faults();
	/* The child's calls come after the parent's. */
	for (nth = 1; nth < 20; nth++) {
		inject(nth, ENOMEM);
		check_fork_finds_each_page(count, true);
	}
	CHECK(inject_faults() > faults + 2);
	check_refuse_advice(MADV_HUGEPAGE, EINVAL);
	check_fork_finds_each_page(count, false);
}

/* Absent pages are reserved with the mappings that are left. */
static void pages_are_copied_before_addresses_are_reserved(void)
{
	const size_t many = 128;
	struct region *regions = malloc(many * sizeof(*regions));
	size_t i;

	prepare_memory(5 * many);
	check_start_untrusted();
	for (i = 0; i < many; i++)
		add(&regions[i], 5 * i * check_page + 100, (5 * i + 3) * check_page + 100,
		    RF_OMIT);
	model(regions, many);
	check_children();
	/* The child lacks one mapping a registration, and maps two copies and one reserved area. */
	check_use_up_vmas(many + many / 4);
	check_children();
	check_give_back_vmas();
	for (i = 0; i < many; i++)
		check_release(regions[i].handle);
	check_empty();
	free(regions);
}

/* After the marks are made, before the child is. */
static void a_registration_while_a_fork_is_under_way_is_protected(void)
{
	static const enum rf_policy policies[] = { RF_OMIT, RF_WIPE };
	struct region region, both[2];
	size_t i;

	prepare_memory(PAGES);
	check_start_untrusted();
	add(&region, 100, 200, RF_OMIT);
	for (i = 0; i < COUNT_OF(policies); i++) {
		in_window.policy = policies[i];
		both[0] = region;
		both[1] = in_window;
		model(both, 2);
		registering = true;
		check_children();
		CHECK(!registering);
		check_children();
		check_release(in_window.handle);
	}
	check_release(region.handle);
	check_empty();
}

static bool over;

static void *come_and_go(void *first)
{
	size_t offset = (size_t)(uintptr_t)first;

	while (!__atomic_load_n(&over, __ATOMIC_SEQ_CST))
		check_release(check_register(memory + offset, 1 + offset % 5000, RF_HELD));
	return NULL;
}

/* Other threads' pages may be whole or in parts: bytes never registered are there. */
static void threads_register_while_others_fork(void)
{
	static const size_t offsets[] = { 64, 5 * 4096 + 100, 6 * 4096 + 3000 };
	unsigned long round, rounds = check_scale(1500);
	pthread_t threads[COUNT_OF(offsets)];
	size_t i;

	prepare_memory(PAGES);
	check_start_untrusted();
	expect(0, nbytes, PRESENT);
	for (i = 0; i < COUNT_OF(offsets); i++) {
		expect(offsets[i], offsets[i] + 1 + offsets[i] % 5000, ZERO);
		CHECK(!pthread_create(&threads[i], NULL, come_and_go,
				      (void *)(uintptr_t)offsets[i]));
	}
	for (round = 0; round < rounds; round++) {
		pid_t pid = fork();

		if (!pid) {
			for (i = 0; i < nbytes; i++)
				if (expected[i] == PRESENT)
					CHECK((unsigned char)memory[i] == value_at(i), "%zu", i);
			_exit(0);
		}
		CHECK(check_wait(pid) == 0, "round %lu", round);
	}
	__atomic_store_n(&over, true, __ATOMIC_SEQ_CST);
	for (i = 0; i < COUNT_OF(offsets); i++)
		pthread_join(threads[i], NULL);
	check_empty();
}

/* It cannot be copied in time: the caller that registers is told. */
static void memory_that_fork_itself_uses_is_named(void)
{
	/* A sanitizer moves arrays elsewhere, not this. */
	char *on_stack = __builtin_alloca(100), *arena;
	struct rf_handle handle;
	struct rf_error error;

	check_start_untrusted();
	CHECK(rf_register(on_stack, 100, RF_HELD, RF_OMIT, &handle, &error) == 1);
	CHECK(error.cause == RF_CAUSE_SHARED_PAGE, "%d at %p", (int)error.cause, (void *)on_stack);
	CHECK(error.start <= (uintptr_t)on_stack && error.end > (uintptr_t)on_stack);
	check_release(handle);
	arena = mmap(NULL, (size_t)128 << 20, PROT_READ | PROT_WRITE,
		     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	CHECK(arena != MAP_FAILED);
	arena = (char *)(((uintptr_t)arena + (64 << 20) - 1) & ~(((uintptr_t)64 << 20) - 1));
	CHECK(rf_register(arena + 3000, 100, RF_HELD, RF_OMIT, &handle, &error) == 1);
	CHECK(error.cause == RF_CAUSE_NONE);
	check_release(handle);
	*(uintptr_t *)arena = (uintptr_t)arena + 48;
	CHECK(rf_register(arena + 3000, 100, RF_HELD, RF_OMIT, &handle, &error) == 1);
	CHECK(error.cause == RF_CAUSE_SHARED_PAGE && error.start == (uintptr_t)arena);
	check_release(handle);
	/* Filled by it, there is nothing else on it. */
	CHECK(rf_register(arena, check_page, RF_HELD, RF_OMIT, &handle, &error) == 1);
	CHECK(error.cause == RF_CAUSE_NONE);
	check_release(handle);
	check_empty();
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(bytes_beside_registered_ones_stay),
		SCENARIO(many_registrations_share_pages),
		SCENARIO_HUGE(parts_of_huge_pages_eager),
		SCENARIO_HUGE(parts_of_huge_pages_lazy),
		SCENARIO_HUGE(many_registrations_share_a_huge_page),
		SCENARIO(bytes_beside_a_registered_private_file_stay),
		SCENARIO(pages_that_cannot_be_read_do_no_harm),
		SCENARIO(inaccessible_pages_keep_their_bytes),
		SCENARIO_HUGE(inaccessible_huge_pages_keep_their_bytes),
		SCENARIO(copied_pages_have_the_parent_s_protection),
		SCENARIO(a_failed_copy_shows_no_wrong_bytes),
		SCENARIO(room_is_taken_at_the_registration),
		SCENARIO(much_room_for_copies_is_freed),
		SCENARIO(many_saved_bytes_want_huge_pages),
		SCENARIO(pages_are_copied_before_addresses_are_reserved),
		SCENARIO(a_registration_while_a_fork_is_under_way_is_protected),
		SCENARIO(threads_register_while_others_fork),
		SCENARIO(memory_that_fork_itself_uses_is_named),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
