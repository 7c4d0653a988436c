/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The engine as an input says: registrations of all policies, held or not, of memory that
 * is mapped, unmapped and moved meanwhile; forks, and registrations in the middle of them;
 * system calls that fail. Against the rules of tests/surface/model.py for base pages:
 *
 *  - A page is kept from children where a registration in force takes it: one that fills it
 *    or, where copying is not trusted, one that touches it.
 *  - It is not where none does, and where it is shared memory, from a fork on.
 *  - What a child finds goes by the registrations that fill it: nothing if one omits it,
 *    else zeros if one wipes it; a copy if none fills it.
 *  - What was mapped or moved there after it was registered may be either.
 *
 * The kernel says by smaps which it is, and a child by what it can read.
 *
 * Memory is mapped anew under registrations here, and calls fail: the model has "either".
 * That of tests/engine/test_mixture.c tells one answer, of pages of every kind and size.
 *
 *	TRACE=1 fuzz_engine FILE	tells what is done
 */
#define _GNU_SOURCE /* mremap() */
#include "check.h"
#include "engine.h"
#include "fuzz.h"
#include "kernel.h"
#include "window.h"

#include <stdarg.h>
#include <sys/uio.h>

#define PAGES 24
#define LIVE 12
/*
 * So low that its mappings are the first that smaps tells of. More of them follow, for a
 * reader that goes on to the end of its buffer not to come to a sanitizer's.
 */
#define ARENA ((uintptr_t)0x200000)
#define FOLLOWING 16
#define PAGE ((uintptr_t)4096)

enum verdict {
	KEPT,
	LEFT,
	EITHER,
};

struct page {
	bool mapped, shared;
	bool moved;		/* here by mremap(), registered where it came from */
	bool doubted;		/* a registration that does not hold it was tried */
	unsigned char tag;	/* the byte it is full of */
	unsigned int born;
};

struct registration {
	uintptr_t start, end;
	bool held, in_window;
	bool left;		/* a fork may have left it to the kernel, for good */
	enum rf_policy policy;
	unsigned int made;
	uintptr_t first, last;	/* pages it touched when it was made */
	struct rf_handle handle;
};

static struct page pages[PAGES];
static struct registration live[LIVE];
static size_t live_count;
static unsigned int now, forked;
static bool lazy, trusted, tight;
static bool window;		/* a fork is under way */
static bool lingering;		/* a call failed: marks may wait for the next fork to take them */
static bool shaken;		/* one failed in a fork: what was due may wait for the next */
static bool ever_split;
static struct rf_handle stale;

static void tell(const char *format, ...)
{
	va_list arguments;

	if (!getenv("TRACE"))
		return;
	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
}

/* ---- The fork handlers, which can be run without a fork ---- */

static struct {
	void (*prepare)(void), (*parent)(void);
} handlers;

int __real___register_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void),
			     void *library);
int __wrap___register_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void),
			     void *library);

int __wrap___register_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void),
			     void *library)
{
	handlers.prepare = prepare;
	handlers.parent = parent;
	return __real___register_atfork(prepare, parent, child, library);
}

/* ---- The rules ---- */

static uintptr_t address(size_t page)
{
	return ARENA + page * PAGE;
}

static uintptr_t down(uintptr_t at)
{
	return at & ~(PAGE - 1);
}

static uintptr_t up(uintptr_t at)
{
	return down(at + PAGE - 1);
}

/* Is one, or with @all each, page that [@start, @end) touches mapped, and shared if @shared? */
static bool are(uintptr_t start, uintptr_t end, bool shared, bool all)
{
	uintptr_t at;

	for (at = down(start); at < end; at += PAGE) {
		size_t page = (at - ARENA) / PAGE;
		bool is = page < PAGES && pages[page].mapped && (!shared || pages[page].shared);

		if (is != all)
			return !all;
	}
	return all;
}

static bool touches(const struct registration *registration, size_t page)
{
	return registration->start < registration->end && registration->start < address(page + 1) &&
	       address(page) < registration->end;
}

static bool fills(const struct registration *registration, size_t page)
{
	return registration->start <= address(page) && address(page + 1) <= registration->end;
}

static bool takes(const struct registration *registration, size_t page)
{
	return trusted ? fills(registration, page) : touches(registration, page);
}

/* Does it speak of memory that was mapped there before? */
static bool is_stale_near(const struct registration *registration, size_t page)
{
	return registration->policy != RF_KEEP && registration->made < pages[page].born &&
	       registration->first < address(page + 1) && address(page) < registration->last;
}

static bool is_certain(size_t page)
{
	size_t i;

	if (pages[page].moved)
		return false;
	for (i = 0; i < live_count; i++)
		if (is_stale_near(&live[i], page))
			return false;
	return true;
}

static bool is_in_force(const struct registration *registration)
{
	return !lazy || !registration->held || registration->in_window ||
	       registration->made < forked;
}

/* Where the kernel copies it may be left to that. */
static bool may_be_left(const struct registration *registration)
{
	return trusted && (tight || shaken || registration->left);
}

/* Does it bear a mark? @now_forked: a fork has just been prepared. */
static enum verdict judge(size_t page, bool now_forked)
{
	enum verdict verdict = is_certain(page) && !lingering ? LEFT : EITHER;
	size_t i;

	if (pages[page].shared)
		return !now_forked || shaken || pages[page].moved || lingering ? EITHER : LEFT;
	for (i = 0; i < live_count; i++) {
		if (live[i].policy == RF_KEEP || live[i].made < pages[page].born ||
		    !takes(&live[i], page) || !is_in_force(&live[i]))
			continue;
		if (!may_be_left(&live[i]))
			return KEPT;
		verdict = EITHER;
	}
	return verdict;
}

/* A child's finding on a page that is kept from it. */
static enum rf_finds finds(size_t page)
{
	enum rf_finds best = RF_FINDS_COPY;
	size_t i;

	for (i = 0; i < live_count; i++) {
		if (live[i].policy == RF_KEEP || !fills(&live[i], page))
			continue;
		if (live[i].policy == RF_OMIT)
			return RF_FINDS_NOTHING;
		best = RF_FINDS_ZEROS;
	}
	return best;
}

/* ---- Against the kernel ---- */

static void check_page_flags(size_t page, unsigned int flags, bool now_forked)
{
	enum verdict verdict = judge(page, now_forked);

	CHECK(!!(flags & CHECK_MAPPED) == pages[page].mapped, "page %zu", page);
	if (!pages[page].mapped)
		return;
	CHECK(verdict == EITHER || !!(flags & (CHECK_DC | CHECK_WF)) == (verdict == KEPT),
	      "page %zu is to be %s, forked %d", page, verdict == KEPT ? "kept" : "left",
	      now_forked);
	/* Zeros are no answer where a copy is to be found, or nothing. */
	if (now_forked && verdict == KEPT && !shaken && is_certain(page))
		CHECK(!(flags & CHECK_WF) || finds(page) == RF_FINDS_ZEROS, "page %zu", page);
}

static void check_pages(bool now_forked)
{
	size_t page, marked = 0;
	bool certain = true;

	check_sound();
	check_read_smaps_to(address(PAGES));
	for (page = 0; page < PAGES; page++) {
		unsigned int flags = check_flags_read((void *)address(page));

		check_page_flags(page, flags, now_forked);
		certain &= is_certain(page) && (pages[page].mapped || !live_count);
		marked += !!(flags & (CHECK_DC | CHECK_WF));
	}
	if (!now_forked || !certain || lingering || shaken)
		return;
	CHECK(rf_engine.tracker.ranges.marked_bytes == marked * PAGE);
}

/* Nothing is said to be protected that is not. */
static void check_list(void)
{
	struct rf_range_info list[2 * PAGES + 4 * LIVE];
	ssize_t count = rf_list(list, COUNT_OF(list)), i;
	struct rf_stats stats;
	uintptr_t at, before = 0;

	tell("list: %zd\n", count);
	CHECK(count >= 0 && count <= (ssize_t)COUNT_OF(list));
	CHECK(rf_stats(&stats) == 0 && stats.registrations == live_count);
	/* Shared memory among what is marked makes two runs of one, and a wish that must hold. */
	CHECK(ever_split || !trusted || stats.vmas <= stats.vma_budget);
	check_read_smaps_to(address(PAGES));
	for (i = 0; i < count; i++) {
		CHECK(before <= list[i].start && list[i].start < list[i].end);
		before = list[i].end;
		for (at = list[i].start; at < list[i].end; at += PAGE) {
			size_t page = (at - ARENA) / PAGE;
			unsigned int flags = check_flags_read((void *)at);

			if (page >= PAGES || !pages[page].mapped || !is_certain(page))
				continue;
			/* A range with a retry counts as marked. */
			if (list[i].protection == RF_BY_MARK && !lingering)
				CHECK(flags & (CHECK_DC | CHECK_WF), "page %zu", page);
			if (list[i].protection == RF_BY_SHARING)
				CHECK(pages[page].shared, "page %zu", page);
		}
	}
}

/* ---- Against a child ---- */

static void check_child_page(size_t page)
{
	enum verdict verdict = judge(page, true);
	enum rf_finds found = verdict == KEPT ? finds(page) : RF_FINDS_COPY;
	static unsigned char bytes[4096];
	const struct iovec to = { bytes, PAGE }, from = { (void *)address(page), PAGE };
	bool there;
	size_t at;

	if (!pages[page].mapped || verdict == EITHER || !is_certain(page))
		return;
	there = process_vm_readv(getpid(), &to, 1, &from, 1, 0) == (ssize_t)PAGE;
	CHECK(there == (found != RF_FINDS_NOTHING), "page %zu", page);
	for (at = 0; there && at < PAGE; at++)
		CHECK(bytes[at] == (found == RF_FINDS_ZEROS ? 0 : pages[page].tag),
		      "page %zu, byte %zu: %d", page, at, bytes[at]);
}

static void check_child(void)
{
	struct rf_error error;
	struct rf_handle handle;
	size_t page;

	for (page = 0; !shaken && page < PAGES; page++)
		check_child_page(page);
	if (live_count)
		CHECK(rf_release(live[0].handle, 0) == -ECHILD);
	check_empty();
	for (page = 0; page < PAGES && !(pages[page].shared && is_certain(page)); page++)
		;
	if (page < PAGES && !shaken) {
		CHECK(rf_register((void *)address(page), PAGE, 0, RF_OMIT, &handle, &error) == 1);
		CHECK(rf_release(handle, 0) == 0);
		check_empty();
	}
	_exit(0);
}

/* ---- Operations ---- */

/* The next calls of the kernel's go well but one, perhaps. */
static unsigned long arm(bool failing)
{
	static const int errors[] = { ENOMEM, EAGAIN, EINVAL, EPERM, EACCES, EMFILE, EFAULT };

	if (failing) {
		unsigned long nth = 1 + check_below(12);
		int error = errors[check_below(COUNT_OF(errors))];

		tell("call %lu fails: %s\n", nth, strerror(error));
		inject(nth, error);
	}
	return inject_faults();
}

static bool disarm(unsigned long before)
{
	inject(0, 0);
	return inject_faults() != before;
}

static bool is_held(uintptr_t start, uintptr_t end)
{
	size_t i;

	for (i = 0; i < live_count; i++)
		if (live[i].held && live[i].start < end && start < live[i].end)
			return true;
	return false;
}

static void choose_bytes(uintptr_t *start, uintptr_t *end)
{
	size_t page = check_below(PAGES), shape = check_below(8);

	*start = address(page);
	*end = *start + (1 + check_below(8)) * PAGE;
	if (*end > address(PAGES))
		*end = address(PAGES);
	if (shape == 3 || shape == 5)
		*start += check_below(PAGE);
	if (shape == 4 || shape == 5)
		*end -= check_below(PAGE);
	if (shape == 6) {
		*start += check_below(PAGE);
		*end = *start + check_below(200);
	}
	if (*end < *start || *end > address(PAGES))
		*end = *start;
}

/* Must the engine refuse it? */
static bool is_refusable(const struct registration *new)
{
	uintptr_t start = trusted ? up(new->start) : down(new->start);
	uintptr_t end = trusted ? down(new->end) : up(new->end);

	if (new->start == new->end)
		return false;
	if (new->policy == RF_KEEP)
		return !trusted && !are(new->start, new->end, true, true);
	if (start >= end)
		return false;
	return !(lazy && new->held && !window) && !are(start, end, false, true);
}

static void op_register(bool failing)
{
	static const uint8_t policies[] = { RF_OMIT, RF_OMIT, RF_OMIT, RF_OMIT, RF_OMIT, RF_OMIT,
					    RF_OMIT, RF_OMIT, RF_WIPE, RF_WIPE, RF_WIPE, RF_WIPE,
					    RF_WIPE, RF_WIPE, RF_KEEP, RF_KEEP };
	struct registration new = { .policy = RF_OMIT, .in_window = window };
	unsigned int flags = 0;
	struct rf_error error;
	unsigned long before;
	bool refusable, faulted;
	size_t page;
	int rc;

	choose_bytes(&new.start, &new.end);
	new.policy = policies[check_below(COUNT_OF(policies))];
	new.held = check_below(2) && are(new.start, new.end, false, true);
	flags = (new.held ? RF_HELD : 0) | (check_below(8) ? 0 : RF_NOWAIT);
	if (live_count == LIVE)
		return;
	refusable = is_refusable(&new);
	before = arm(failing);
	rc = rf_register((void *)new.start, new.end - new.start, flags, new.policy, &new.handle,
			 &error);
	faulted = disarm(before);
	tell("register [%lx, %lx) policy %d%s%s: %d, cause %d\n", new.start, new.end, new.policy,
	     new.held ? " held" : "", faulted ? " failed" : "", rc, error.cause);
	lingering |= faulted;
	if (flags & RF_NOWAIT && rc == -EAGAIN)
		return;
	if (rc < 0) {
		/* No room for another mark, where there must be one. */
		CHECK(refusable || faulted || (tight && !trusted),
		      "[%lx, %lx): %d, cause %d", new.start, new.end, rc, error.cause);
		return;
	}
	CHECK(rc == 1);
	/* No room for another mark: nothing is asked of the kernel. */
	CHECK(!refusable || (tight && trusted && new.policy != RF_KEEP), "[%lx, %lx)", new.start,
	      new.end);
	CHECK(rf_handle_state(new.handle) == 1);
	/* The kernel copies it, in the fork under way. */
	new.in_window &= !faulted;
	for (page = 0; page < PAGES && !new.held; page++)
		pages[page].doubted |= touches(&new, page);
	new.made = ++now;
	new.first = down(new.start);
	new.last = new.start < new.end ? up(new.end) : new.first;
	live[live_count++] = new;
	ever_split |= new.policy == RF_WIPE;
}

static void op_release(bool failing)
{
	struct rf_handle handle;
	unsigned long before;
	size_t which;
	int rc;

	if (!live_count)
		return;
	which = check_below(live_count);
	handle = live[which].handle;
	if (!check_below(8)) {
		rc = rf_release(handle, RF_NOWAIT);
		CHECK(rc == 0 || rc == -EAGAIN);
	} else {
		before = arm(failing);
		rc = rf_release(handle, 0);
		lingering |= disarm(before);
		CHECK(rc == 0, "%d", rc);
	}
	tell("release [%lx, %lx)%s: %d\n", live[which].start, live[which].end,
	     lingering ? " failed" : "", rc);
	if (rc < 0)
		return;
	stale = handle;
	live[which] = live[--live_count];
	CHECK(rf_release(stale, 0) == -ESTALE && rf_handle_state(stale) == -ESTALE);
}

static void fill(size_t page)
{
	static unsigned char tag;

	tag += 1 + (tag == 255);
	pages[page].tag = tag;
	memset((void *)address(page), tag, PAGE);
}

static void map(size_t first, size_t count, bool shared)
{
	size_t page;

	tell("map [%lx, %lx)%s\n", address(first), address(first + count), shared ? " shared" : "");
	CHECK(mmap((void *)address(first), count * PAGE, PROT_READ | PROT_WRITE,
		   (shared ? MAP_SHARED : MAP_PRIVATE) | MAP_ANONYMOUS | MAP_FIXED, -1,
		   0) == (void *)address(first));
	now++;
	ever_split |= shared;
	for (page = first; page < first + count; page++) {
		pages[page] = (struct page){
			.mapped = true,
			.shared = shared,
			.born = now,
			.doubted = pages[page].doubted,
		};
		fill(page);
	}
}

static void op_map(bool mapping)
{
	size_t first = check_below(PAGES), count = 1 + check_below(6), page;
	bool shared = !check_below(3);

	if (count > PAGES - first)
		count = PAGES - first;
	if (is_held(address(first), address(first + count)))
		return;
	if (mapping) {
		map(first, count, shared);
		return;
	}
	tell("unmap [%lx, %lx)\n", address(first), address(first + count));
	CHECK(!munmap((void *)address(first), count * PAGE));
	now++;
	for (page = first; page < first + count; page++)
		pages[page] = (struct page){ .born = now, .doubted = pages[page].doubted };
}

static void op_move(void)
{
	size_t from = check_below(PAGES), to = check_below(PAGES), i;
	bool moved = pages[from].moved || lingering || shaken;

	if (from == to || !pages[from].mapped || is_held(address(from), address(from + 1)) ||
	    is_held(address(to), address(to + 1)))
		return;
	for (i = 0; i < live_count; i++)
		moved |= live[i].policy != RF_KEEP &&
			 (touches(&live[i], from) || is_stale_near(&live[i], from));
	tell("move %lx to %lx\n", address(from), address(to));
	CHECK(mremap((void *)address(from), PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED,
		     address(to)) == (void *)address(to));
	pages[from].doubted |= pages[to].doubted;
	pages[to] = pages[from];
	pages[to].moved = moved;
	pages[to].born = ++now;
	pages[from] = (struct page){ .born = now, .doubted = pages[from].doubted };
}

/* A fork that fails leaves such pages to the kernel for good, as they may be another's. */
static bool is_doubted(const struct registration *registration)
{
	size_t page;

	for (page = 0; page < PAGES; page++)
		if (pages[page].doubted && touches(registration, page))
			return true;
	return false;
}

static void note_fork(bool faulted)
{
	size_t i;

	forked = ++now;
	lingering = faulted;
	shaken = faulted;
	for (i = 0; i < live_count; i++)
		live[i].left |= faulted && is_doubted(&live[i]);
}

static void step(void);

static void op_prepare(bool failing)
{
	unsigned long before;
	size_t ops;

	if (window)
		return;
	before = arm(failing);
	handlers.prepare();
	note_fork(disarm(before));
	tell("prepare%s\n", shaken ? " failed" : "");
	check_pages(true);
	window = true;
	for (ops = check_below(4); ops; ops--)
		step();
	check_pages(false);
	handlers.parent();
	tell("parent\n");
	window = false;
	CHECK(!rf_window.forks);
}

static void op_fork(void)
{
	pid_t child;

	if (window)
		return;
	note_fork(false);
	tell("fork\n");
	child = fork();
	CHECK(child >= 0, "%s", strerror(errno));
	if (!child)
		check_child();
	CHECK(check_wait(child) == 0, "in the child");
	check_pages(true);
}

static void step(void)
{
	bool failing = false;
	size_t op = check_below(32);

	if (op >= 28) {
		failing = true;
		op = check_below(28);
	}
	if (op < 10)
		op_register(failing);
	else if (op < 17)
		op_release(failing);
	else if (op < 20)
		op_map(true);
	else if (op < 22)
		op_map(false);
	else if (op < 23)
		op_move();
	else if (op < 26)
		op_prepare(failing);
	else if (op < 27)
		check_list();
	else if (!check_below(4))
		op_fork();
	check_pages(false);
}

/* ---- One input ---- */

static void map_following(void)
{
	size_t page;

	for (page = PAGES + 1; page < PAGES + 1 + FOLLOWING; page++)
		CHECK(mmap((void *)address(page), PAGE, page % 2 ? PROT_READ : PROT_NONE,
			   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
			   0) == (void *)address(page));
}

static void start(void)
{
	static struct rf_kernel real;
	struct rf_kernel *kernel = (struct rf_kernel *)rf_kernel();
	unsigned int wish = (unsigned int)check_below(256);
	struct rf_error error;
	unsigned long before;
	int rc;

	if (!real.page_size) {
		real = *kernel;
		map_following();
	}
	*kernel = real;
	trusted = real.copy_trusted && !(wish & 16);
	lazy = trusted && wish & 1;
	tight = wish & 32;
	kernel->procmap_query &= !(wish & 4);
	if (tight)
		kernel->max_map_count = (trusted ? 2 : 3) * (2 + wish % 5);
	setenv("RDMAFORK_TRUST_COPYING", trusted ? "1" : "0", 1);
	if (wish & 64)
		setenv("RDMAV_FORK_SAFE", "1", 1);
	else
		unsetenv("RDMAV_FORK_SAFE");
	tell("%s%s%s\n", lazy ? "lazy" : "eager", trusted ? "" : " untrusted",
	     tight ? " tight" : "");
	before = arm(wish & 128);
	rc = rf_fork_init(lazy ? RF_MODE_LAZY : RF_MODE_EAGER, &error);
	CHECK(disarm(before) || rc == 0, "%d, cause %d", rc, error.cause);
	if (rc < 0)
		CHECK(rf_fork_init(lazy ? RF_MODE_LAZY : RF_MODE_EAGER, &error) == 0);
}

/* As it was before rf_fork_init(). */
static void stop(void)
{
	while (live_count)
		CHECK(rf_release(live[--live_count].handle, 0) == 0);
	handlers.prepare();
	handlers.parent();
	note_fork(false);
	check_pages(true);
	check_stop();
	CHECK(!munmap((void *)ARENA, PAGES * PAGE));
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t nbytes)
{
	check_play(input, nbytes);
	now = forked = 0;
	lingering = shaken = ever_split = false;
	memset(pages, 0, sizeof(pages));
	start();
	map(0, PAGES, false);
	check_pages(false);
	while (!check_played())
		step();
	stop();
	return 0;
}
