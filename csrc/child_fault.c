/* SPDX-License-Identifier: BSD-3-Clause */
#include "child_fault.h"

#include <signal.h>
#include <string.h>

struct kept {
	struct rf_areas *areas;
	struct rf_memory slots, origins;
	uint32_t touched;
};

static bool chosen = true;
static struct kept kept[RF_KEPT]; /* the last fork's first */
static struct rf_file error_output;
/* The action that ours replaced last, and the one that it replaced first in this process tree. */
static struct sigaction before, first;
static bool has_first;
/* The one to go on with. A handler that ours gave way to may put ours back, and raise again. */
static const struct sigaction *next = &before;

/*
 * The process that has begun to tell, and the one that has told: each does it once. They are
 * pids, as a child finds its parent's here, and shares them after vfork().
 */
static int32_t teller, told;

void rf_child_fault_choose(bool explain)
{
	chosen = explain;
}

/* ---- The state kept from forks ---- */

void rf_child_fault_keep(struct rf_child_list *list, struct rf_registry *registry, bool torn)
{
	struct rf_areas *areas = chosen ? rf_child_list_take(list) : NULL;
	struct kept *last = &kept[RF_KEPT - 1];

	if (!areas)
		return;
	if (last->areas) {
		rf_sys_unmap(last->areas, last->areas->mapped);
		rf_memory_free(&last->slots);
		rf_memory_free(&last->origins);
	}
	memmove(kept + 1, kept, sizeof(kept) - sizeof(*kept));
	kept[0] = (struct kept){ .areas = areas };
	if (!torn)
		kept[0].touched = rf_registry_take_tables(registry, &kept[0].slots,
							  &kept[0].origins);
}

/* ---- One line, made by hand: no printf() in a signal handler ---- */

struct line {
	size_t nbytes;
	char text[768];
};

static void put(struct line *line, const char *text)
{
	while (*text && line->nbytes < sizeof(line->text))
		line->text[line->nbytes++] = *text++;
}

static void put_number(struct line *line, uint64_t number, unsigned int base)
{
	char digits[24], *at = digits + sizeof(digits) - 1;

	*at = '\0';
	do
		*--at = "0123456789abcdef"[number % base];
	while (number /= base);
	put(line, at);
}

static void put_address(struct line *line, uintptr_t address)
{
	put(line, "0x");
	put_number(line, address, 16);
}

/* A reader that does not read must not make a child hang. */
static void say(const struct line *line)
{
	if (rf_sys_is_writable(2) > 0)
		(void)rf_sys_write(2, line->text, line->nbytes);
}

void rf_child_fault_tell_refused(const struct rf_refused *refused)
{
	static struct line line; /* the stack may be the smallest */

	if (rf_likely(!refused->error) || !chosen)
		return;
	line.nbytes = 0;
	put(&line, "rdmafork: process ");
	put_number(&line, (uint64_t)rf_sys_pid(), 10);
	put(&line, " could not map ");
	put_address(&line, refused->start);
	put(&line, "-");
	put_address(&line, refused->end);
	put(&line, refused->finds == RF_FINDS_ZEROS ? ", where it was to find zeros: "
						    : ", where it was to find a copy: ");
	if (refused->error == -EEXIST) {
		put(&line, "other memory is mapped there, perhaps by the fork handler of a library "
			   "that was loaded earlier.\n");
	} else {
		put(&line, "the kernel refuses, error ");
		put_number(&line, (uint64_t)-refused->error, 10);
		put(&line, ". The child does not have these pages.\n");
	}
	say(&line);
}

static void put_registration(struct line *line, const struct kept *from, const struct rf_area *area,
			     uintptr_t address)
{
	const struct rf_slot *slot = from->slots.items, *end = slot + from->touched;
	const struct rf_origin *origin = from->origins.items;
	uint32_t index;

	while (slot < end && !(slot->serial && slot->start <= address && address < slot->end))
		slot++;
	if (slot >= end) {
		put(line, "part of ");
		put_address(line, area->start);
		put(line, "-");
		put_address(line, area->end);
		put(line, ", pages that its parent registered");
		return;
	}
	put_address(line, slot->start);
	put(line, "-");
	put_address(line, slot->end);
	put(line, " (");
	put_number(line, slot->end - slot->start, 10);
	put(line, " bytes), which its parent registered");
	index = (uint32_t)(slot - (const struct rf_slot *)from->slots.items);
	if (index < from->origins.capacity && origin[index].serial == slot->serial) {
		put(line, " at ");
		put(line, origin[index].where);
	}
}

static void put_all(struct line *line, const struct kept *from, const struct rf_area *area,
		    uintptr_t address)
{
	line->nbytes = 0;
	put(line, "rdmafork: process ");
	put_number(line, (uint64_t)rf_sys_pid(), 10);
	put(line, " touched ");
	put_address(line, address);
	put(line, ": a child does not inherit this memory, ");
	put_registration(line, from, area, address);
	put(line, ". If a child needs it: use shared memory, register with on_fork=\"wipe\" or "
		  "\"keep\", or copy it before fork().\n");
}

/* ---- The handler ---- */

static const struct rf_area *find_area(const struct rf_areas *areas, uintptr_t address)
{
	uint32_t low = 0, high = areas->count, middle;

	while (low < high) {
		middle = low + (high - low) / 2;
		if (areas->areas[middle].end <= address)
			low = middle + 1;
		else
			high = middle;
	}
	if (low == areas->count || areas->areas[low].start > address)
		return NULL;
	return &areas->areas[low];
}

/* Is it still missing? Where the program has mapped something since, that can mostly be read. */
static bool is_missing(uintptr_t address, const siginfo_t *info)
{
	char byte;
	const struct iovec to = { &byte, 1 }, from = { (void *)address, 1 };

	return info->si_code == SEGV_MAPERR ||
	       (info->si_code == SEGV_ACCERR && rf_sys_copy(&to, &from, 1) < 0);
}

static void explain(const siginfo_t *info)
{
	static struct line line; /* the stack may be the smallest */
	const uintptr_t address = (uintptr_t)info->si_addr;
	const struct rf_area *area = NULL;
	struct rf_file now;
	size_t i;

	for (i = 0; i < RF_KEPT && kept[i].areas && !area; i++)
		area = find_area(kept[i].areas, address);
	if (!area || !is_missing(address, info))
		return;
	/* Descriptor 2 may be another file's by now, which this line would spoil. */
	if (rf_sys_identify(2, &now) < 0 || now.device != error_output.device ||
	    now.inode != error_output.inode || now.special != error_output.special)
		return;
	put_all(&line, &kept[i - 1], area, address);
	say(&line);
}

/* The first thread tells; others that fault meanwhile wait, as their fault may end the process. */
static void explain_once(const siginfo_t *info)
{
	const int32_t pid = (int32_t)rf_sys_pid();
	unsigned int waited;

	if (__atomic_exchange_n(&teller, pid, __ATOMIC_ACQ_REL) != pid) {
		explain(info);
		__atomic_store_n(&told, pid, __ATOMIC_RELEASE);
		return;
	}
	for (waited = 0; __atomic_load_n(&told, __ATOMIC_ACQUIRE) != pid && waited < 1000; waited++)
		rf_sys_sleep(1000000);
}

static void on_fault(int signo, siginfo_t *info, void *context);

static bool is_ours(const struct sigaction *action)
{
	return action->sa_flags & SA_SIGINFO && action->sa_sigaction == on_fault;
}

/*
 * Called by a handler that stands in front of ours. Do as the action would have done that
 * ours was in front of when that handler was installed: a sent signal does not come again.
 */
static void go_on(int signo, siginfo_t *info, void *context)
{
	if (first.sa_flags & SA_SIGINFO) {
		first.sa_sigaction(signo, info, context);
	} else if (first.sa_handler != SIG_DFL) {
		first.sa_handler(signo);
	} else {
		(void)rf_sys_action(signo, &first, NULL);
		if (info->si_code <= 0)
			(void)rf_sys_send_again(signo, info);
	}
}

static void on_fault(int signo, siginfo_t *info, void *context)
{
	/* Threads that fault at the same time go on with the same. */
	const struct sigaction *action = __atomic_load_n(&next, __ATOMIC_ACQUIRE);
	struct sigaction now;

	if (rf_sys_action(signo, NULL, &now) >= 0 && !is_ours(&now)) {
		go_on(signo, info, context);
		return;
	}
	if (info->si_code > 0)
		explain_once(info);
	__atomic_store_n(&next, &first, __ATOMIC_RELAXED);
	/* Another thread that faulted may have put an action there meanwhile: that one stays. */
	if (rf_sys_action(signo, NULL, &now) < 0 || is_ours(&now))
		(void)rf_sys_action(signo, action, NULL);
	/* Sent, by kill(), raise() or a timer. */
	if (info->si_code <= 0)
		(void)rf_sys_send_again(signo, info);
}

int rf_child_fault_arm(void)
{
	struct sigaction ours = { .sa_sigaction = on_fault }, now;

	if (!kept[0].areas || rf_sys_identify(2, &error_output) < 0 ||
	    rf_sys_action(SIGSEGV, NULL, &now) < 0)
		return 0;
	__atomic_store_n(&told, 0, __ATOMIC_RELAXED);
	__atomic_store_n(&teller, 0, __ATOMIC_RELEASE);
	if (is_ours(&now))
		return 1;
	if (!(now.sa_flags & SA_SIGINFO) && now.sa_handler == SIG_IGN)
		return 0;
	before = now;
	if (!has_first)
		first = now;
	has_first = true;
	__atomic_store_n(&next, &before, __ATOMIC_RELEASE);
	ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
	sigemptyset(&ours.sa_mask);
	return rf_sys_action(SIGSEGV, &ours, NULL) >= 0;
}
