/* SPDX-License-Identifier: BSD-3-Clause */
/* One thread's traffic: a step at random after the other, until there was enough of it. */
#define _GNU_SOURCE
#include "soak.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SLOT (64u << 10)
#define ZONE 7
#define STACK (6u * SOAK_PAGE)
#define PINNED_MOST (128u << 10)

struct soak_worker *soak_workers;
bool soak_enough;

/* ---- Registrations ---- */

static bool is_anonymous(const struct soak_buffer *buffer)
{
	return buffer->kind != SOAK_HUGETLB && buffer->kind != SOAK_FILE &&
	       buffer->kind != SOAK_SHARED;
}

static enum rf_policy some_policy(struct soak_worker *worker, const struct soak_buffer *buffer)
{
	size_t choice = soak_below(&worker->random, 8);

	if (choice == 0 && is_anonymous(buffer))
		return RF_WIPE;
	if (choice == 1 && (soak.trusted || buffer->kind == SOAK_SHARED))
		return RF_KEEP;
	return RF_OMIT;
}

/* Most are small; false: there is nothing that could be registered. */
static bool some_range(struct soak_worker *worker, const struct soak_buffer *buffer, char **start,
		       char **end)
{
	static const size_t most[] = { 64, 2000, 3 * SOAK_PAGE, 3 * SOAK_PAGE, SLOT, SOAK_HUGE };
	uint64_t *random = &worker->random;
	size_t limit = most[soak_below(random, sizeof(most) / sizeof(*most))], from;
	uintptr_t mask = SOAK_PAGE - 1;

	limit = limit < buffer->nbytes ? limit : buffer->nbytes;
	from = soak_below(random, buffer->nbytes - limit + 1);
	*start = buffer->start + from;
	*end = *start + 1 + soak_below(random, limit);
	/* Whole pages, as allocators give. */
	if (soak_below(random, 4) == 0) {
		*start = (char *)((uintptr_t)*start & ~mask);
		*end = (char *)(((uintptr_t)*end + mask) & ~mask);
		*start = *start < buffer->start ? buffer->start : *start;
	}
	if (*end > buffer->start + buffer->nbytes)
		*end = buffer->start + buffer->nbytes;
	/* Whole pages are marked: the rest of them is malloc()'s, and changes meanwhile. */
	if (soak.whole && buffer->kind == SOAK_HEAP) {
		*start = (char *)(((uintptr_t)*start + mask) & ~mask);
		*end = (char *)((uintptr_t)*end & ~mask);
	}
	return *start < *end;
}

static void do_register(struct soak_worker *worker, struct soak_registration *one)
{
	struct rf_error error;
	int rc = rf_register(one->start, (size_t)(one->end - one->start),
			     one->held ? RF_HELD : 0, one->policy, &one->handle, &error);

	if (rc != soak_is_protected())
		soak_failed("rf_register([%p, %p), held %d, policy %d): %d, cause %d [%lx, %lx)",
			    (void *)one->start, (void *)one->end, one->held, one->policy, rc,
			    error.cause, error.start, error.end);
	worker->counts.registrations++;
}

static void do_release(struct soak_worker *worker, struct rf_handle handle)
{
	int rc = rf_release(handle, 0);

	if (rc)
		soak_failed("rf_release: %d", rc);
	worker->counts.releases++;
}

static struct soak_buffer *some_buffer(struct soak_worker *worker)
{
	struct soak_buffer *buffer;

	do
		buffer = &worker->buffer[soak_below(&worker->random, worker->buffers)];
	while (!buffer->start);
	return buffer;
}

/* Registrations that stay over some forks. */
static void add(struct soak_worker *worker)
{
	struct soak_buffer *buffer = some_buffer(worker);
	struct soak_registration *one = &buffer->registrations[buffer->count];

	if (buffer->count == SOAK_REGISTRATIONS)
		return;
	memset(one, 0, sizeof(*one));
	if (buffer->count && soak_below(&worker->random, 6) == 0) {
		*one = buffer->registrations[soak_below(&worker->random, buffer->count)];
		one->pin = NULL;
		one->by_verbs = false;
		if (one->stale)
			return;
	} else if (!some_range(worker, buffer, &one->start, &one->end)) {
		return;
	}
	one->policy = some_policy(worker, buffer);
	one->held = soak_below(&worker->random, 4) != 0;
	if (soak.device && soak_is_protected() && one->end - one->start <= PINNED_MOST &&
	    soak_below(&worker->random, 4) == 0) {
		/* As a program does that never heard of the engine, which then runs unasked. */
		one->policy = RF_OMIT;
		one->held = false;
		one->by_verbs = true;
		one->pin = soak_device_pin(worker->device, one->start, one->end, false);
		if (!one->pin)
			return;
		worker->counts.pins++;
		worker->counts.registrations++;
	} else {
		do_register(worker, one);
	}
	buffer->count++;
}

/* Damage by forks that did not look is seen now. */
static void drop_pin(struct soak_worker *worker, struct soak_buffer *buffer,
		     struct soak_registration *one)
{
	if (!one->pin)
		return;
	soak_pin_check(worker, buffer, one);
	soak_device_unpin(worker->device, one->pin);
	one->pin = NULL;
}

static void drop(struct soak_worker *worker, struct soak_buffer *buffer, unsigned int number)
{
	struct soak_registration *one = &buffer->registrations[number];

	drop_pin(worker, buffer, one);
	if (one->by_verbs)
		worker->counts.releases++;
	else
		do_release(worker, one->handle);
	*one = buffer->registrations[--buffer->count];
}

static void drop_some(struct soak_worker *worker)
{
	struct soak_buffer *buffer = &worker->buffer[soak_below(&worker->random, worker->buffers)];

	if (buffer->count)
		drop(worker, buffer, (unsigned int)soak_below(&worker->random, buffer->count));
}

/* Registered and released, over and over, with a few at once. */
static void burst(struct soak_worker *worker)
{
	struct soak_registration some[6];
	size_t many = rf_mode() == RF_MODE_LAZY ? 400 : 60, at, i;
	struct soak_buffer *buffer = some_buffer(worker);

	for (i = 0; i < 6; i++)
		some[i].start = NULL;
	for (; many--;) {
		at = soak_below(&worker->random, 6);
		if (some[at].start)
			do_release(worker, some[at].handle);
		some[at].start = NULL;
		if (soak_below(&worker->random, 16) == 0)
			buffer = some_buffer(worker);
		if (!some_range(worker, buffer, &some[at].start, &some[at].end)) {
			some[at].start = NULL;
			continue;
		}
		some[at].held = soak_below(&worker->random, 64) != 0;
		some[at].policy = some[at].held ? RF_OMIT : some_policy(worker, buffer);
		do_register(worker, &some[at]);
	}
	for (i = 0; i < 6; i++)
		if (some[i].start)
			do_release(worker, some[i].handle);
}

/* ---- Pins ---- */

static struct soak_registration *some_registration(struct soak_worker *worker,
						   struct soak_buffer **buffer)
{
	*buffer = some_buffer(worker);
	if (!(*buffer)->count)
		return NULL;
	return &(*buffer)->registrations[soak_below(&worker->random, (*buffer)->count)];
}

static void pin(struct soak_worker *worker)
{
	struct soak_buffer *buffer;
	struct soak_registration *one = some_registration(worker, &buffer);

	if (!one || one->stale || one->pin || one->end - one->start > PINNED_MOST)
		return;
	one->pin = soak_device_pin(worker->device, one->start, one->end, true);
	worker->counts.pins += !!one->pin;
}

static void unpin(struct soak_worker *worker)
{
	struct soak_buffer *buffer;
	struct soak_registration *one = some_registration(worker, &buffer);

	if (one && !one->by_verbs)
		drop_pin(worker, buffer, one);
}

static void move(struct soak_worker *worker)
{
	struct soak_buffer *buffer;
	struct soak_registration *one = some_registration(worker, &buffer);

	if (one && one->pin)
		soak_pin_check(worker, buffer, one);
}

/* Copy-on-write of a pinned page that nothing protects. */
static void move_page(struct soak_worker *worker)
{
	struct soak_buffer *buffer;
	struct soak_registration *one = some_registration(worker, &buffer);
	char copy[SOAK_PAGE], *page;

	if (!one || !one->pin || buffer->kind != SOAK_BASE)
		return;
	page = (char *)((uintptr_t)one->start / SOAK_PAGE * SOAK_PAGE);
	memcpy(copy, page, SOAK_PAGE);
	SOAK_CHECK(mmap(page, SOAK_PAGE, PROT_READ | PROT_WRITE,
			MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == page);
	memcpy(page, copy, SOAK_PAGE);
	soak_pin_check(worker, buffer, one);
}

/* ---- Memory ---- */

static size_t some_size(struct soak_worker *worker, const struct soak_buffer *buffer)
{
	if (buffer->kind == SOAK_THP || buffer->kind == SOAK_HUGETLB || buffer->kind == SOAK_STACK)
		return buffer->room;
	if (soak_below(&worker->random, 3) == 0)
		return buffer->room;
	return SOAK_BLOCK + soak_below(&worker->random, buffer->room - SOAK_BLOCK);
}

/* Held memory stays until it is released; of what is not, nobody says so in time. */
static void let_go(struct soak_worker *worker, struct soak_buffer *buffer, bool all)
{
	unsigned int i;

	for (i = buffer->count; i--;) {
		struct soak_registration *one = &buffer->registrations[i];

		if (all || one->held || one->by_verbs || soak_below(&worker->random, 2)) {
			drop(worker, buffer, i);
			continue;
		}
		drop_pin(worker, buffer, one);
		one->stale = true;
	}
}

static void map_anew(struct soak_worker *worker)
{
	struct soak_buffer *buffer = &worker->buffer[soak_below(&worker->random, worker->buffers)];

	if (buffer->kind == SOAK_STACK)
		return;
	if (buffer->start) {
		let_go(worker, buffer, buffer->kind == SOAK_HEAP);
		soak_buffer_unmap(buffer);
		worker->counts.remaps++;
		if (buffer->kind == SOAK_HOLED && soak_below(&worker->random, 2)) {
			worker->counts.holes++;
			return;
		}
	}
	(void)soak_buffer_map(buffer, some_size(worker, buffer));
}

static void write_some(struct soak_worker *worker)
{
	struct soak_buffer *buffer = some_buffer(worker);
	size_t at = soak_below(&worker->random, buffer->nbytes);
	size_t nbytes = 1 + soak_below(&worker->random, 2 * SOAK_PAGE);

	nbytes = nbytes < buffer->nbytes - at ? nbytes : buffer->nbytes - at;
	soak_buffer_write(buffer, at, nbytes);
}

static void compare_all(struct soak_worker *worker)
{
	struct soak_buffer *buffer = some_buffer(worker);
	size_t nbytes = buffer->nbytes, at = 0;

	if (nbytes > 2 * SLOT) {
		at = soak_below(&worker->random, nbytes - SLOT);
		nbytes = SLOT;
	}
	soak_buffer_compare(buffer, at, nbytes, buffer->start + at, "the CPU");
	worker->counts.bytes_compared += nbytes;
}

/* Nothing in [@start, @end) bears a mark. */
static void check_unmarked(uintptr_t start, uintptr_t end)
{
	FILE *smaps = fopen("/proc/self/smaps", "re");
	unsigned long from = 0, to = 0, a, b;
	char line[512];

	SOAK_CHECK(smaps);
	while (fgets(line, sizeof(line), smaps)) {
		if (sscanf(line, "%lx-%lx ", &a, &b) == 2) {
			from = a;
			to = b;
		}
		if (strncmp(line, "VmFlags:", 8))
			continue;
		if (from < end && to > start && (strstr(line, " dc") || strstr(line, " wf")))
			soak_failed("nothing is registered in [%lx, %lx): %s", from, to, line);
	}
	fclose(smaps);
}

/* Advice never outlives its last registration. */
static void check_nothing_left(struct soak_worker *worker)
{
	uintptr_t start = (uintptr_t)worker->zone;
	unsigned int i;

	for (i = 0; i < worker->buffers; i++)
		let_go(worker, &worker->buffer[i], true);
	check_unmarked(start, start + worker->zone_nbytes);
}

/* ---- The thread ---- */

static struct soak_buffer *new_buffer(struct soak_worker *worker, enum soak_kind kind, char *place,
				      size_t room)
{
	struct soak_buffer *buffer = &worker->buffer[worker->buffers++];

	SOAK_CHECK(worker->buffers <= SOAK_BUFFERS);
	buffer->kind = kind;
	buffer->id = worker->number << 16 | worker->buffers;
	buffer->place = place;
	buffer->room = room;
	buffer->generations = calloc(room / SOAK_BLOCK + 1, sizeof(*buffer->generations));
	SOAK_CHECK(buffer->generations);
	(void)soak_buffer_map(buffer, room);
	return buffer;
}

static char *reserve(size_t nbytes)
{
	char *memory = mmap(NULL, nbytes + SOAK_HUGE, PROT_NONE,
			    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	SOAK_CHECK(memory != MAP_FAILED);
	return (char *)(((uintptr_t)memory + SOAK_HUGE - 1) & ~(uintptr_t)(SOAK_HUGE - 1));
}

void soak_worker_prepare(struct soak_worker *worker)
{
	worker->zone_nbytes = SOAK_HUGE + ZONE * (size_t)SLOT;
	worker->zone = reserve(worker->zone_nbytes);
}

/* Side by side, so that mappings merge and registrations touch across them. */
static void make_buffers(struct soak_worker *worker, char *stack)
{
	static const enum soak_kind kinds[ZONE] = {
		[3] = SOAK_FILE,	/* the others are SOAK_BASE */
		[6] = SOAK_FILE,
	};
	char *at, *shared = reserve(4 * SLOT);
	size_t i;

	at = worker->zone;
	(void)new_buffer(worker, SOAK_THP, at, SOAK_HUGE);
	at += SOAK_HUGE;
	for (i = 0; i < ZONE; i++, at += SLOT)
		(void)new_buffer(worker, kinds[i], at, SLOT);
	for (i = 0; i < 2; i++)
		(void)new_buffer(worker, SOAK_SHARED, shared + i * SLOT, SLOT);
	/* A hole is to be one, without a reservation. */
	SOAK_CHECK(!munmap(shared + 2 * SLOT, 2 * SLOT));
	for (i = 0; i < 2; i++)
		(void)new_buffer(worker, SOAK_HOLED, shared + (2 + i) * SLOT, SLOT);
	for (i = 0; i < 3; i++)
		(void)new_buffer(worker, SOAK_HEAP, NULL, i ? SLOT / 2 : 3 * SLOT);
	if (worker->number < soak.huge_pages)
		(void)new_buffer(worker, SOAK_HUGETLB, reserve(SOAK_HUGE), SOAK_HUGE);
	if (!soak.whole)
		(void)new_buffer(worker, SOAK_STACK, stack, STACK);
}

static void step(struct soak_worker *worker)
{
	size_t choice = soak_below(&worker->random, 100);

	if (choice < 40)
		soak_fork(worker);
	else if (choice < 50)
		add(worker);
	else if (choice < 58)
		drop_some(worker);
	else if (choice < 66)
		pin(worker);
	else if (choice < 68)
		unpin(worker);
	else if (choice < 72)
		move(worker);
	else if (choice < 76)
		map_anew(worker);
	else if (choice < 86)
		write_some(worker);
	else if (choice < 89)
		compare_all(worker);
	else
		burst(worker);
	if (soak_below(&worker->random, 4000) == 0)
		check_nothing_left(worker);
	if (soak.fault == SOAK_MOVED && worker->counts.operations > 200)
		move_page(worker);
	__atomic_add_fetch(&worker->counts.operations, 1, __ATOMIC_RELAXED);
}

/* Let go of all that is registered, pinned and mapped. */
static void empty(struct soak_worker *worker)
{
	unsigned int i;

	check_nothing_left(worker);
	for (i = 0; i < worker->buffers; i++) {
		struct soak_buffer *buffer = &worker->buffer[i];

		if (buffer->start) {
			soak_buffer_compare(buffer, 0, buffer->nbytes, buffer->start, "at the end");
			worker->counts.bytes_compared += buffer->nbytes;
			soak_buffer_unmap(buffer);
		}
		free(buffer->generations);
	}
}

void *soak_worker_run(void *argument)
{
	struct soak_worker *worker = argument;
	char stack[STACK];

	worker->random = soak.seed * 0x9e3779b97f4a7c15 + (worker->number + 1) * 0xbf58476d1ce4e5b9;
	worker->random |= !worker->random;
	make_buffers(worker, stack);
	while (!__atomic_load_n(&soak_enough, __ATOMIC_RELAXED))
		step(worker);
	empty(worker);
	__atomic_store_n(&worker->ended, true, __ATOMIC_RELEASE);
	return NULL;
}
