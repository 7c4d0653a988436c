/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * One fork: what the child was promised, what it does, and what the parent has after it.
 *
 *	parent   fork ----------------- wait | write, device reads, device writes, read ... reap
 *	child         look, write over, | gate opens ............................. end
 *
 * Most children are not met: they do all this while the parent goes on. Absent
 * memory is looked for with process_vm_readv(), which fails where a load would fault, and
 * would fail at a guard too.
 */
#define _GNU_SOURCE
#include "soak.h"

#include <errno.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum end {
	END_NOW,
	END_EXIT,
	END_SIGNAL,	/* by itself */
	END_KILLED,	/* by the parent */
	ENDS,
};

struct plan {
	bool raw;	/* clone() that no handler sees */
	bool met;	/* the parent looks while it lives */
	bool thorough;	/* everything there is, and a child of its own */
	bool swift;	/* looks at a page or two, and is gone */
	unsigned int buffers;	/* looked at */
	size_t pages;	/* of each, beside the pages where memory is registered */
	enum end end;
	struct soak_buffer *shared;	/* the child writes there, for both; or NULL */
	size_t at;
};

enum gate {
	SHUT,
	LOOKED,
	LEAVE,
};

/* ---- Promises to a child ---- */

struct promise {
	bool omitted, wiped;	/* by one that fills the page */
	bool partial;		/* one only touches it, and it is copied by the engine */
	bool stale;		/* by one that speaks of earlier memory there */
	char *page;		/* which is marked as one */
	size_t nbytes;
};

static bool touches(const struct soak_registration *one, const struct promise *promise)
{
	return one->start < promise->page + promise->nbytes && one->end > promise->page;
}

static bool fills(const struct soak_registration *one, const struct promise *promise)
{
	return one->start <= promise->page && one->end >= promise->page + promise->nbytes;
}

static struct promise promised(const struct soak_buffer *buffer, char *page, bool raw)
{
	struct promise promise = { .nbytes = SOAK_PAGE };
	unsigned int i;

	if (buffer->kind == SOAK_HUGETLB)
		promise.nbytes = SOAK_HUGE;
	promise.page = (char *)((uintptr_t)page / promise.nbytes * promise.nbytes);
	/* Eager marks first and asks at the next fork() what is shared: a raw child may lack it. */
	if (buffer->kind == SOAK_SHARED) {
		promise.stale = raw;
		return promise;
	}
	for (i = 0; i < buffer->count; i++) {
		const struct soak_registration *one = &buffer->registrations[i];

		if (one->policy == RF_KEEP || !touches(one, &promise))
			continue;
		if (!fills(one, &promise)) {
			promise.partial |= soak.whole || buffer->kind == SOAK_HUGETLB;
			promise.stale |= one->stale && promise.partial;
			continue;
		}
		promise.stale |= one->stale;
		promise.omitted |= !one->stale && one->policy == RF_OMIT;
		promise.wiped |= !one->stale && one->policy == RF_WIPE;
	}
	return promise;
}

static const char *who = "a child";

static void wrong_page(const struct soak_buffer *buffer, const char *page, const char *what)
{
	char text[160];

	snprintf(text, sizeof(text), "%s, %s buffer %u of %zu: %s", who,
		 soak_kind_names[buffer->kind], buffer->id, buffer->nbytes, what);
	soak_wrong(text, page, 0, 0);
}

static void check_zeros(const struct soak_buffer *buffer, const char *page, const char *found,
			size_t nbytes)
{
	size_t i;

	for (i = 0; i < nbytes; i++)
		if (found[i])
			wrong_page(buffer, page + i, "wiped, and not zero");
}

/* Each byte is the parent's, or zero. */
static void check_either(const struct soak_buffer *buffer, const char *from, const char *found,
			 size_t nbytes)
{
	char expected[SOAK_PAGE];
	size_t i;

	soak_buffer_expected(buffer, (size_t)(from - buffer->start), nbytes, expected);
	for (i = 0; i < nbytes; i++)
		if (found[i] && found[i] != expected[i])
			wrong_page(buffer, from + i, "a stranger's byte");
}

static bool copied(void *to, const char *from, size_t nbytes)
{
	struct iovec local = { to, nbytes }, remote = { (void *)from, nbytes };
	ssize_t n = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);

	if (n < 0 && errno != EFAULT)
		soak_failed("process_vm_readv: %s", strerror(errno));
	return n == (ssize_t)nbytes;
}

/* Of a child that is met the parent writes nothing meanwhile, to shared memory too. */
static void look_at_page(const struct soak_buffer *buffer, char *page, const struct plan *plan)
{
	struct promise promise = promised(buffer, page, plan->raw);
	char *from = page > buffer->start ? page : buffer->start;
	char *end = buffer->start + buffer->nbytes, found[SOAK_PAGE];
	bool registered = promise.omitted || promise.wiped || promise.partial, present;
	size_t nbytes;

	end = page + SOAK_PAGE < end ? page + SOAK_PAGE : end;
	nbytes = (size_t)(end - from);
	present = copied(found, from, nbytes);
	soak_count(&soak_children->pages_looked_at, 1);
	soak_count(&soak_children->pages_absent, !present);
	soak_count(&soak_children->pages_wiped, promise.wiped && present);
	if (promise.stale || (plan->raw && registered)) {
		/* No handler has marked pending memory, or copied partial pages. */
		if (present && buffer->kind != SOAK_SHARED)
			check_either(buffer, from, found, nbytes);
	} else if (promise.omitted) {
		if (present)
			wrong_page(buffer, page, "omitted, and there");
	} else if (promise.wiped) {
		if (!present)
			wrong_page(buffer, page, "wiped, and absent");
		check_zeros(buffer, from, found, nbytes);
	} else {
		if (!present)
			wrong_page(buffer, page, "not filled by a registration, and absent");
		if (buffer->kind != SOAK_SHARED || plan->met)
			soak_buffer_compare(buffer, (size_t)(from - buffer->start), nbytes, found,
					    who);
		soak_count(&soak_children->bytes_compared, nbytes);
	}
}

static char *page_of(const char *at)
{
	return (char *)((uintptr_t)at / SOAK_PAGE * SOAK_PAGE);
}

static void look_at_buffer(struct soak_worker *worker, const struct soak_buffer *buffer,
			   const struct plan *plan)
{
	char *first = page_of(buffer->start), *page;
	size_t pages = (size_t)(buffer->start + buffer->nbytes - first + SOAK_PAGE - 1) / SOAK_PAGE;
	size_t i;

	if (pages <= plan->pages)
		for (i = 0; i < pages; i++)
			look_at_page(buffer, first + i * SOAK_PAGE, plan);
	for (i = 0; pages > plan->pages && i < plan->pages; i++) {
		page = first + soak_below(&worker->random, pages) * SOAK_PAGE;
		look_at_page(buffer, page, plan);
	}
	/* Where there is something registered, at its ends most of all. */
	for (i = 0; i < buffer->count; i++) {
		const struct soak_registration *one = &buffer->registrations[i];

		if (!plan->thorough && i != worker->random % buffer->count)
			continue;
		if (one->start < buffer->start || one->end > buffer->start + buffer->nbytes)
			continue;
		look_at_page(buffer, page_of(one->start), plan);
		look_at_page(buffer, page_of(one->end - 1), plan);
		page = one->start + soak_below(&worker->random, (size_t)(one->end - one->start));
		look_at_page(buffer, page_of(page), plan);
	}
}

static void look(struct soak_worker *worker, const struct plan *plan)
{
	unsigned int i;

	for (i = 0; i < plan->buffers; i++) {
		unsigned int chosen = i;

		if (!plan->thorough)
			chosen = (unsigned int)soak_below(&worker->random, worker->buffers);
		if (worker->buffer[chosen].start)
			look_at_buffer(worker, &worker->buffer[chosen], plan);
	}
}

/* ---- A child's work ---- */

static void write_over_page(char *at, size_t nbytes)
{
	static char filler[64];
	struct iovec local = { filler, nbytes < 64 ? nbytes : 64 }, remote = { at, local.iov_len };

	memset(filler, 0xee, sizeof(filler));
	if (process_vm_writev(getpid(), &local, 1, &remote, 1, 0) > 0)
		soak_count(&soak_children->pages_written_over, 1);
}

static void write_over_buffer(const struct soak_buffer *buffer, size_t stride)
{
	size_t at;

	for (at = 0; at < buffer->nbytes; at += stride)
		write_over_page(buffer->start + at, buffer->nbytes - at);
}

/* Its memory of its parent's thread; thorough, of other threads too. */
static void write_over(struct soak_worker *worker, const struct plan *plan)
{
	unsigned int i;
	size_t at;

	for (i = 0; i < worker->buffers; i++) {
		const struct soak_buffer *buffer = &worker->buffer[i];

		if (!buffer->start || buffer->kind == SOAK_SHARED)
			continue;
		if (buffer->nbytes > SOAK_HUGE / 2)
			write_over_buffer(buffer, 127 * SOAK_PAGE);
		else if (plan->thorough || soak_below(&worker->random, 10) == 0)
			write_over_buffer(buffer, SOAK_PAGE);
	}
	for (i = 0; plan->thorough && i < soak.threads; i++)
		for (at = 0; at < worker->zone_nbytes; at += 11 * SOAK_PAGE)
			write_over_page(soak_workers[i].zone + at, SOAK_PAGE);
}

static void let_go(const struct soak_worker *worker)
{
	unsigned int i, j;

	for (i = 0; i < worker->buffers; i++)
		for (j = 0; j < worker->buffer[i].count; j++) {
			struct soak_registration one = worker->buffer[i].registrations[j];

			if (one.by_verbs)
				continue;
			SOAK_CHECK(rf_handle_state(one.handle) == -ECHILD);
			SOAK_CHECK(rf_release(one.handle, 0) == -ECHILD);
		}
}

/* 99 if it found a wrong byte. */
static void expect_end(pid_t child, int expected, const char *whose)
{
	int status;

	while (waitpid(child, &status, 0) < 0)
		SOAK_CHECK(errno == EINTR);
	if (WIFEXITED(status) && WEXITSTATUS(status) == 99)
		_exit(99);
	if (status != expected)
		soak_failed("%s ended with status %#x, not %#x", whose, (unsigned int)status,
			    (unsigned int)expected);
}

/* A child registers afresh, and its own child is promised the same. */
static void begin_afresh(struct soak_worker *worker)
{
	static const struct plan plan = { .thorough = true, .pages = 16 };
	static struct soak_buffer buffer;
	struct soak_registration *one = &buffer.registrations[0];
	struct rf_error error;
	pid_t child;
	int rc;

	memset(&buffer, 0, sizeof(buffer));
	buffer.id = worker->number << 16 | 0xffff;
	buffer.room = 16 * (size_t)SOAK_PAGE;
	buffer.place = mmap(NULL, buffer.room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	buffer.generations = calloc(buffer.room / SOAK_BLOCK, sizeof(*buffer.generations));
	SOAK_CHECK(buffer.place != MAP_FAILED && buffer.generations);
	SOAK_CHECK(soak_buffer_map(&buffer, buffer.room));
	one->start = buffer.start + soak_below(&worker->random, 3 * SOAK_PAGE);
	one->end = one->start + 1 + soak_below(&worker->random, 12 * SOAK_PAGE);
	one->policy = soak_below(&worker->random, 2) ? RF_OMIT : RF_WIPE;
	one->held = soak_below(&worker->random, 2);
	rc = rf_register(one->start, (size_t)(one->end - one->start), one->held ? RF_HELD : 0,
			 one->policy, &one->handle, &error);
	if (rc != 1)
		soak_failed("rf_register() in a child: %d, cause %d", rc, error.cause);
	buffer.count = 1;
	soak_count(&soak_children->registrations, 1);
	child = fork();
	SOAK_CHECK(child >= 0);
	if (!child) {
		look_at_buffer(worker, &buffer, &plan);
		write_over_buffer(&buffer, SOAK_PAGE);
		_exit(0);
	}
	soak_count(&soak_children->forks, 1);
	expect_end(child, 0, "a child's child");
	soak_buffer_compare(&buffer, 0, buffer.nbytes, buffer.start, "a child, of its own");
	SOAK_CHECK(rf_release(one->handle, 0) == 0);
	soak_count(&soak_children->releases, 1);
}

static void use_heap(void)
{
	void *blocks[20];
	size_t i;

	for (i = 0; i < 20; i++) {
		blocks[i] = malloc(1 + i * i * 297);
		SOAK_CHECK(blocks[i]);
		memset(blocks[i], 0xdd, 1 + i * i * 297);
	}
	for (i = 0; i < 20; i++)
		free(blocks[i]);
}

/* ---- The gate ---- */

static void gate_open(uint32_t *gate, uint32_t value)
{
	__atomic_store_n(gate, value, __ATOMIC_RELEASE);
	syscall(SYS_futex, gate, FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* False if it will never open. */
static bool gate_wait(uint32_t *gate, uint32_t value, bool (*goes_on)(pid_t), pid_t other)
{
	const struct timespec second = { .tv_sec = 1 };
	uint32_t seen;

	while ((seen = __atomic_load_n(gate, __ATOMIC_ACQUIRE)) < value) {
		if (!goes_on(other))
			return __atomic_load_n(gate, __ATOMIC_ACQUIRE) >= value;
		syscall(SYS_futex, gate, FUTEX_WAIT, seen, &second, NULL, 0);
	}
	return true;
}

static bool is_parent(pid_t parent)
{
	return getppid() == parent;
}

static bool is_alive(pid_t child)
{
	siginfo_t info = { 0 };

	return !waitid(P_PID, (id_t)child, &info, WEXITED | WNOHANG | WNOWAIT) && !info.si_pid;
}

/* ---- Both sides ---- */

__attribute__((noreturn)) static void be_child(struct soak_worker *worker,
					       const struct plan *plan, pid_t parent)
{
	who = plan->raw ? "a raw child" : "a child";
	if (soak.fault != SOAK_LOST) {
		look(worker, plan);
		if (plan->thorough)
			let_go(worker);
	}
	if (!plan->swift)
		write_over(worker, plan);
	if (plan->thorough && !plan->raw) {
		use_heap();
		if (soak_is_protected())
			begin_afresh(worker);
	}
	if (plan->shared)
		soak_buffer_write(plan->shared, plan->at, 1);
	if (plan->met) {
		gate_open(worker->gate, LOOKED);
		if (!gate_wait(worker->gate, LEAVE, is_parent, parent))
			_exit(0);
	}
	if (plan->end == END_EXIT)
		exit(0);
	if (plan->end == END_SIGNAL)
		kill(getpid(), SIGTERM);
	_exit(0);
}

void soak_pin_check(struct soak_worker *worker, struct soak_buffer *buffer,
		    struct soak_registration *registration)
{
	char *bounce = soak_device_bounce(worker->device), *at;
	char *start = registration->start, *end = registration->end;
	size_t nbytes = (size_t)(end - start), offset = (size_t)(start - buffer->start), first, n;

	/* The parent writes to every page: it is then that copy-on-write would move it. */
	for (at = start; at < end; at = page_of(at) + SOAK_PAGE)
		soak_buffer_write(buffer, (size_t)(at - buffer->start), 1);
	soak_device_read(worker->device, registration->pin, start, nbytes);
	soak_buffer_compare(buffer, offset, nbytes, bounce, "the device reads");
	/* And the device to some blocks of it. */
	first = (offset + SOAK_BLOCK - 1) / SOAK_BLOCK * SOAK_BLOCK;
	n = (offset + nbytes) / SOAK_BLOCK * SOAK_BLOCK;
	if (first < n) {
		first += soak_below(&worker->random, (n - first) / SOAK_BLOCK) * SOAK_BLOCK;
		n = SOAK_BLOCK + soak_below(&worker->random, (n - first) / SOAK_BLOCK) * SOAK_BLOCK;
		soak_buffer_renew(buffer, first, n);
		soak_buffer_expected(buffer, first, n, bounce);
		soak_device_write(worker->device, registration->pin, buffer->start + first, n);
		worker->counts.device_writes++;
		worker->counts.bytes_by_device += n;
	}
	soak_buffer_compare(buffer, offset, nbytes, start, "after the device wrote");
	worker->counts.device_reads++;
	worker->counts.bytes_by_device += nbytes;
	worker->counts.bytes_compared += 2 * nbytes;
}

/* All if the child is met, else some: each is looked at again before it is given up. */
static void check_pins(struct soak_worker *worker, const struct plan *plan)
{
	size_t every = soak.device || plan->swift ? 16 : 5;
	unsigned int i, j;

	if (plan->met && (plan->thorough || !soak.device))
		every = 1;
	for (i = 0; i < worker->buffers; i++)
		for (j = 0; j < worker->buffer[i].count; j++) {
			struct soak_buffer *buffer = &worker->buffer[i];
			struct soak_registration *one = &buffer->registrations[j];

			if (one->pin && soak_below(&worker->random, every) == 0)
				soak_pin_check(worker, buffer, one);
		}
}

static struct soak_buffer *some_shared(struct soak_worker *worker)
{
	unsigned int i, from = (unsigned int)soak_below(&worker->random, worker->buffers);

	for (i = 0; i < worker->buffers; i++) {
		struct soak_buffer *buffer = &worker->buffer[(from + i) % worker->buffers];

		if (buffer->kind == SOAK_SHARED && buffer->start)
			return buffer;
	}
	return NULL;
}

static struct plan make_plan(struct soak_worker *worker)
{
	struct plan plan = { 0 };

	plan.raw = !SOAK_TSAN && soak_below(&worker->random, 10) == 0;
	plan.thorough = soak_below(&worker->random, 64) == 0;
	plan.end = soak_below(&worker->random, ENDS);
	plan.swift = !plan.thorough && soak_below(&worker->random, 3) != 0;
	/* exit() is for children whose locks fork() has seen to. */
	if ((plan.raw && plan.end == END_EXIT) || (plan.swift && plan.end == END_KILLED))
		plan.end = END_NOW;
	plan.met = !plan.swift &&
		   (plan.end == END_KILLED || soak_below(&worker->random, 4) == 0);
	plan.buffers = plan.thorough ? worker->buffers : 1u + !plan.swift;
	plan.pages = plan.thorough ? 24 : 1 + !plan.swift;
	plan.shared = plan.met && !plan.raw ? some_shared(worker) : NULL;
	plan.at = plan.shared ? soak_below(&worker->random, plan.shared->nbytes) : 0;
	return plan;
}

static pid_t make_child(const struct plan *plan)
{
	return plan->raw ? (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) : fork();
}

static void count_end(struct soak_counts *counts, const struct plan *plan)
{
	uint64_t *const ends[] = {
		[END_NOW] = &counts->by_exit_now,
		[END_EXIT] = &counts->by_exit,
		[END_SIGNAL] = &counts->by_signal,
		[END_KILLED] = &counts->killed,
	};

	++*(plan->raw ? &counts->clones : &counts->forks);
	++*ends[plan->end];
}

void soak_fork(struct soak_worker *worker)
{
	static const int ends[] = { [END_SIGNAL] = SIGTERM, [END_KILLED] = SIGKILL };
	struct plan plan = make_plan(worker);
	pid_t parent = getpid(), child;

	__atomic_store_n(worker->gate, SHUT, __ATOMIC_RELEASE);
	child = make_child(&plan);
	if (!child)
		be_child(worker, &plan, parent);
	if (child < 0) {
		/* Of pinned huge pages that wait for a handler the kernel needs copies. */
		if (!(plan.raw && errno == ENOMEM && soak.huge_pages) && errno != EAGAIN)
			soak_failed("%s: %s", plan.raw ? "clone" : "fork", strerror(errno));
		worker->counts.forks_refused++;
		return;
	}
	if (plan.met)
		(void)gate_wait(worker->gate, LOOKED, is_alive, child);
	if (plan.shared) {
		soak_buffer_renew(plan.shared, plan.at, 1);
		soak_buffer_compare(plan.shared, plan.at, 1, plan.shared->start + plan.at,
				    "a child wrote to shared memory");
	}
	check_pins(worker, &plan);
	if (plan.met && plan.end == END_KILLED)
		kill(child, SIGKILL);
	else if (plan.met)
		gate_open(worker->gate, LEAVE);
	expect_end(child, plan.end < (int)(sizeof(ends) / sizeof(*ends)) ? ends[plan.end] : 0,
		   plan.raw ? "a raw child" : "a child");
	count_end(&worker->counts, &plan);
}
