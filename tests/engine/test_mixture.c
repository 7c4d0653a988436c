/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Memory of all kinds side by side, registrations of all shapes, and what a child finds on
 * each page of it: the first of nothing, zeros and a copy that a registration wants there.
 * Base pages, huge pages, private files, other protections, shared memory; children of
 * children; /proc as text; copying trusted or not.
 *
 * The model tells one answer a page, as memory stays where it is and no call fails: that of
 * tests/fuzz/fuzz_engine.c follows memory that is moved, and has base pages alone.
 */
#define _GNU_SOURCE /* memfd_create() */
#include "check.h"
#include "engine.h"

#include <fcntl.h>
#include <sys/uio.h>

#define STRETCH CHECK_HUGE
#define STRETCHES 6
#define BYTES ((size_t)STRETCHES * STRETCH)
#define SAMPLE 32  /* base pages of a stretch that are looked at and registered near */
#define LIVE 10

enum kind {
	BASE,
	HUGE,
	PRIVATE_FILE,
	SHARED,
};

static enum kind kinds[STRETCHES] = { BASE, HUGE, HUGE, PRIVATE_FILE, SHARED, HUGE };

struct registration {
	uintptr_t start, end;
	enum rf_policy policy;
	struct rf_handle handle;
};

static char *memory;
static struct registration live[LIVE];
static size_t count;
static unsigned char written[STRETCHES];
static int protections[STRETCHES];

static void map_at(size_t stretch)
{
	char *at = memory + stretch * STRETCH;
	int flags = MAP_FIXED | (kinds[stretch] == SHARED ? MAP_SHARED : MAP_PRIVATE), fd = -1;

	if (kinds[stretch] == PRIVATE_FILE) {
		fd = memfd_create("mixture", MFD_CLOEXEC);
		CHECK(fd >= 0 && !ftruncate(fd, STRETCH));
	} else {
		flags |= MAP_ANONYMOUS;
	}
	if (kinds[stretch] == HUGE)
		flags |= MAP_HUGETLB | (21 << 26);
	if (mmap(at, STRETCH, PROT_READ | PROT_WRITE, flags, fd, 0) != at)
		check_skip("cannot be mapped: %s", strerror(errno));
	if (fd >= 0)
		close(fd);
	protections[stretch] = PROT_READ | PROT_WRITE;
}

static void map_all(void)
{
	uintptr_t start;
	size_t i;

	memory = mmap(NULL, BYTES + 2 * STRETCH, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(memory != MAP_FAILED);
	start = ((uintptr_t)memory + STRETCH) & ~((uintptr_t)STRETCH - 1);
	memory = (char *)start;
	for (i = 0; i < STRETCHES; i++)
		map_at(i);
}

static void write_anew(size_t stretch)
{
	if (!(protections[stretch] & PROT_WRITE))
		return;
	written[stretch] = (unsigned char)(1 + check_below(255));
	memset(memory + stretch * STRETCH, written[stretch], STRETCH);
}

static size_t page_of(size_t stretch)
{
	return kinds[stretch] == HUGE ? CHECK_HUGE : check_page;
}

/* The policy wanted of the page of @nbytes that holds @at. */
static enum rf_finds wanted(uintptr_t at, size_t nbytes)
{
	size_t stretch = (at - (uintptr_t)memory) / STRETCH, i;
	uintptr_t start = at & ~(nbytes - 1), end = start + nbytes;
	enum rf_finds finds = RF_FINDS_COPY;

	if (kinds[stretch] == SHARED)
		return RF_FINDS_COPY;
	for (i = 0; i < count; i++) {
		if (live[i].policy == RF_KEEP || live[i].start > start || live[i].end < end)
			continue;
		if (live[i].policy == RF_OMIT)
			return RF_FINDS_NOTHING;
		finds = RF_FINDS_ZEROS;
	}
	return finds;
}

/* Does one registration want that of the base page that holds @at? */
static bool wants_part(uintptr_t at, bool there)
{
	uintptr_t start = at & ~(check_page - 1), end = start + check_page;
	size_t i;

	for (i = 0; i < count; i++)
		if (live[i].start <= start && end <= live[i].end &&
		    live[i].policy == (there ? RF_WIPE : RF_OMIT))
			return true;
	return false;
}

static bool is_found(enum rf_finds finds, size_t stretch, bool there, unsigned char byte)
{
	return there == (finds != RF_FINDS_NOTHING) &&
	       (!there || byte == (finds == RF_FINDS_ZEROS ? 0 : written[stretch]));
}

static void check_address(uintptr_t at)
{
	size_t stretch = (at - (uintptr_t)memory) / STRETCH;
	enum rf_finds finds = wanted(at, page_of(stretch));
	unsigned char byte = 0xee;
	const struct iovec to = { &byte, 1 }, from = { (void *)at, 1 };
	bool there = process_vm_readv(getpid(), &to, 1, &from, 1, 0) == 1;
	size_t i;

	if (!(protections[stretch] & PROT_READ)) {
		CHECK(!there);
		return;
	}
	if (is_found(finds, stretch, there, byte))
		return;
	/* Of a huge page that is marked already, the registered part may be gone by itself. */
	if (kinds[stretch] == HUGE && wants_part(at, there))
		return;
	for (i = 0; i < count; i++)
		fprintf(stderr, "[%lx, %lx) policy %d\n", live[i].start - (uintptr_t)memory,
			live[i].end - (uintptr_t)memory, live[i].policy);
	CHECK(0, "%lx: %d wanted, %d found: %d", at - (uintptr_t)memory, finds, there, byte);
}

static void check_found(void)
{
	uintptr_t start = (uintptr_t)memory;
	size_t stretch, i;

	for (stretch = 0; stretch < STRETCHES; stretch++, start += STRETCH)
		for (i = 0; i < SAMPLE; i++) {
			check_address(start + i * check_page + check_below(check_page));
			check_address(start + STRETCH - 1 - i * check_page);
			check_address(start + check_below(STRETCH));
		}
}

static uintptr_t choose(void)
{
	size_t stretch = check_below(STRETCHES + 1), pages = check_below(SAMPLE);
	uintptr_t at = (uintptr_t)memory + stretch * STRETCH;

	if (stretch == STRETCHES || (stretch && check_below(2)))
		at -= pages * check_page;
	else
		at += pages * check_page;
	if (check_below(4) == 0)
		at = at & ~((uintptr_t)CHECK_HUGE - 1);
	else if (check_below(2) && at > (uintptr_t)memory + 64)
		at -= check_below(64);
	return at;
}

static void do_register(void)
{
	static const enum rf_policy policies[] = { RF_OMIT, RF_OMIT, RF_WIPE, RF_WIPE, RF_KEEP };
	struct registration new = { .start = choose(), .end = choose() };
	struct rf_error error;
	int rc;

	if (count == LIVE)
		return;
	if (new.end < new.start) {
		new.end = new.start ^ new.end;
		new.start ^= new.end;
		new.end ^= new.start;
	}
	new.policy = policies[check_below(COUNT_OF(policies))];
	rc = rf_register((void *)new.start, new.end - new.start, check_below(3) ? RF_HELD : 0,
			 new.policy, &new.handle, &error);
	if (rc == -ENOTSUP && new.policy == RF_KEEP)
		return;
	CHECK(rc == 1, "[%lx, %lx): %d, cause %d", new.start - (uintptr_t)memory,
	      new.end - (uintptr_t)memory, rc, error.cause);
	live[count++] = new;
}

static void do_release(void)
{
	size_t which = check_below(LIVE);

	if (which >= count)
		return;
	check_release(live[which].handle);
	live[which] = live[--count];
}

static void do_protect(void)
{
	static const int choices[] = { PROT_READ | PROT_WRITE, PROT_READ, PROT_NONE,
				       PROT_READ | PROT_WRITE | PROT_EXEC };
	size_t stretch = check_below(STRETCHES);

	protections[stretch] = choices[check_below(COUNT_OF(choices))];
	CHECK(!mprotect(memory + stretch * STRETCH, STRETCH, protections[stretch]));
}

static void some_steps(size_t steps);

/* Absent memory cannot be used further: the child maps all of it anew. */
static void go_on_in_child(void)
{
	size_t i;

	count = 0;
	CHECK(!munmap(memory, BYTES));
	for (i = 0; i < STRETCHES; i++)
		if (kinds[i] != HUGE)
			map_at(i);
		else
			CHECK(mmap(memory + i * STRETCH, STRETCH, PROT_READ | PROT_WRITE,
				   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED);
}

static void do_fork(void)
{
	static int depth;
	pid_t child;

	child = fork();
	CHECK(child >= 0);
	if (!child) {
		check_found();
		check_empty();
		if (!depth++ && !check_below(4)) {
			struct rf_handle handle;

			go_on_in_child();
			written[0] = 9;
			memset(memory, 9, STRETCH);
			handle = check_register(memory + 100, 3 * check_page, 0);
			CHECK(!check_child_reads(memory + check_page));
			CHECK(check_child_reads(memory + 10));
			check_release(handle);
			check_empty();
		}
		_exit(0);
	}
	CHECK(check_wait(child) == 0);
}

static void some_steps(size_t steps)
{
	while (steps--) {
		size_t op = check_below(20);

		if (op < 7)
			do_register();
		else if (op < 11)
			do_release();
		else if (op < 13)
			do_protect();
		else if (op < 16)
			write_anew(check_below(STRETCHES));
		else
			do_fork();
		check_sound();
	}
}

static void mix(enum rf_mode mode, const char *trust, bool text)
{
	unsigned long round, rounds = check_scale(12);
	size_t i;

	/* Else huge pages that are released are absent from children for good. */
	for (i = 0; check_marks_stay() && i < STRETCHES; i++)
		kinds[i] = kinds[i] == HUGE ? BASE : kinds[i];
	setenv("RDMAFORK_TRUST_COPYING", trust, 1);
	check_start(mode);
	rf_engine.tracker.reader.query &= !text;
	map_all();
	for (round = 0; round < rounds; round++) {
		for (i = 0; i < STRETCHES; i++) {
			protections[i] = PROT_READ | PROT_WRITE;
			CHECK(!mprotect(memory + i * STRETCH, STRETCH, protections[i]));
			write_anew(i);
		}
		some_steps(60);
		while (count)
			check_release(live[--count].handle);
		check_fork();
		check_empty();
		check_read_smaps();
		for (i = 0; i < BYTES; i += check_page)
			CHECK(!(check_flags_read(memory + i) & (CHECK_DC | CHECK_WF)), "%zx", i);
	}
}

static void children_of_mixed_memory_agree_lazily(void)
{
	check_needs_lazy();
	mix(RF_MODE_LAZY, "1", false);
}

static void children_of_mixed_memory_agree_lazily_by_text(void)
{
	check_needs_lazy();
	mix(RF_MODE_LAZY, "1", true);
}

static void children_of_mixed_memory_agree_eagerly(void)
{
	mix(RF_MODE_EAGER, "1", false);
}

static void children_of_mixed_memory_agree_eagerly_by_text(void)
{
	mix(RF_MODE_EAGER, "1", true);
}

static void children_of_mixed_memory_agree_untrusted(void)
{
	mix(RF_MODE_EAGER, "0", false);
}

static void children_of_mixed_memory_agree_untrusted_by_text(void)
{
	mix(RF_MODE_EAGER, "0", true);
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO_HUGE(children_of_mixed_memory_agree_lazily),
		SCENARIO_HUGE(children_of_mixed_memory_agree_lazily_by_text),
		SCENARIO_HUGE(children_of_mixed_memory_agree_eagerly),
		SCENARIO_HUGE(children_of_mixed_memory_agree_eagerly_by_text),
		SCENARIO_HUGE(children_of_mixed_memory_agree_untrusted),
		SCENARIO_HUGE(children_of_mixed_memory_agree_untrusted_by_text),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
