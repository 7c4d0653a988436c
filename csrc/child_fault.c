/* SPDX-License-Identifier: BSD-3-Clause */
#include "child_fault.h"

#include <signal.h>
#include <string.h>
#include <ucontext.h>

struct kept {
	struct rf_areas *areas;
	struct rf_memory slots, origins;
	uint32_t touched;
};

static bool chosen = true;
static struct kept kept[RF_KEPT];
static unsigned int latest; /* in the ring of these, the last fork's; older ones follow */
static struct rf_file error_output;
/* The action that ours replaced last, and the one that it replaced first in this process tree. */
static struct sigaction before, first;
static bool has_first;
/* How often ours was put in front, and where this thread has returned from it since. */
static uint32_t armed;
static __thread struct {
	uint32_t armed;
	uintptr_t address;
} returned __attribute__((tls_model("initial-exec")));

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
	struct kept *last;

	if (!areas)
		return;
	latest = (latest + RF_KEPT - 1) % RF_KEPT;
	last = &kept[latest];
	if (last->areas) {
		rf_sys_unmap(last->areas, last->areas->mapped);
		rf_memory_free(&last->slots);
		rf_memory_free(&last->origins);
	}
	*last = (struct kept){ .areas = areas };
	if (!torn)
		last->touched = rf_registry_take_tables(registry, &last->slots, &last->origins);
}

/* ---- One line, made by hand: no printf() in a signal handler ---- */

/* A process says one at a time, and the stack of its signal handler may be the smallest. */
static struct {
	size_t nbytes;
	char text[768];
} line;

static void put(const char *text)
{
	while (*text && line.nbytes < sizeof(line.text))
		line.text[line.nbytes++] = *text++;
}

static void put_number(uint64_t number, unsigned int base)
{
	char digits[24], *at = digits + sizeof(digits) - 1;

	*at = '\0';
	do
		*--at = "0123456789abcdef"[number % base];
	while (number /= base);
	put(at);
}

static void put_address(uintptr_t address)
{
	put("0x");
	put_number(address, 16);
}

/* A reader that does not read must not make a child hang. */
static void say(void)
{
	if (rf_sys_is_writable(2) > 0)
		(void)rf_sys_write(2, line.text, line.nbytes);
}

void rf_child_fault_tell_refused(const struct rf_refused *refused)
{
	if (rf_likely(!refused->error) || !chosen)
		return;
	line.nbytes = 0;
	put("rdmafork: process ");
	put_number((uint64_t)rf_sys_pid(), 10);
	put(refused->mapped		       ? " cannot protect its copy of "
	    : refused->finds == RF_FINDS_ZEROS ? " cannot get its zeros at "
					       : " cannot get its copy of ");
	put_address(refused->start);
	put("-");
	put_address(refused->end);
	if (refused->error == -EEXIST) {
		put(": other memory is already mapped there, perhaps by the fork handler of "
		    "a library that was loaded earlier.\n");
	} else {
		put(refused->mapped ? ": the kernel refuses it, error "
				    : ": the kernel refuses to map them, error ");
		put_number((uint64_t)-refused->error, 10);
		put(refused->mapped ? ". This child can write to these pages, and execute "
				      "nothing there.\n"
				    : ". This child does not have these pages.\n");
	}
	say();
}

/* The registration of @address; where several overlap, one that omits the pages. */
static const struct rf_slot *find_slot(const struct kept *from, uintptr_t address)
{
	const struct rf_slot *slot = from->slots.items, *end = slot + from->touched, *found = NULL;

	for (; slot < end; slot++)
		if (slot->serial && slot->start <= address && address < slot->end &&
		    (!found || slot->policy == RF_OMIT))
			found = slot;
	return found;
}

static void put_registration(const struct kept *from, const struct rf_slot *slot)
{
	static const char *const calls[RF_FROM / RF_FROM_REGISTER + 1] = {
		"rf_register()", "rdmafork.register()", "rdmafork.register_address()",
		"rdmafork.Buffer()", "ProtectionDomain.register()", "libibverbs"
	};
	const struct rf_origin *origin = from->origins.items;
	const uint32_t index = (uint32_t)(slot - (const struct rf_slot *)from->slots.items);
	const char *call = calls[(slot->flags & RF_SLOT_FROM) / (RF_FROM_REGISTER << 1)];

	put(" (");
	put_number(slot->end - slot->start, 10);
	put(" bytes) with ");
	put(call ? call : calls[0]);
	if (index < from->origins.capacity && origin[index].serial == slot->serial) {
		put(" at ");
		put(origin[index].where);
	}
}

static void put_all(const struct kept *from, const struct rf_area *area,
		    uintptr_t address)
{
	const struct rf_slot *slot = find_slot(from, address);
	const unsigned int kind = slot ? (slot->flags & RF_SLOT_FROM) >> 1 : RF_FROM_LIBIBVERBS;

	line.nbytes = 0;
	put("rdmafork: process ");
	put_number((uint64_t)rf_sys_pid(), 10);
	put(" touched ");
	put_address(address);
	put(slot ? ": its parent registered " : ": its parent registered pages in ");
	put_address(slot ? slot->start : area->start);
	put("-");
	put_address(slot ? slot->end : area->end);
	if (slot)
		put_registration(from, slot);
	put(", so this child does not have that memory. If a child needs it: use shared "
	    "memory, ");
	if (kind != RF_FROM_LIBIBVERBS)
		put(kind ? "register with on_fork=\"wipe\" or \"keep\", "
			 : "register with RF_WIPE or RF_KEEP, ");
	put("or copy it before fork().\n");
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

/* Is it as the fork left it? What the program has mapped since can mostly be read. */
static bool is_missing(bool reserved, uintptr_t address, const siginfo_t *info)
{
	char byte;
	const struct iovec to = { &byte, 1 }, from = { (void *)address, 1 };

	if (!reserved)
		return info->si_code == SEGV_MAPERR;
	return info->si_code == SEGV_ACCERR && rf_sys_copy_readable(&to, &from, 1) != 1;
}

static void explain(const siginfo_t *info)
{
	const uintptr_t address = (uintptr_t)info->si_addr;
	const struct rf_area *area = NULL;
	const struct kept *from = NULL;
	unsigned int i;

	for (i = 0; i < RF_KEPT && !area; i++) {
		from = &kept[(latest + i) % RF_KEPT];
		if (from->areas)
			area = find_area(from->areas, address);
	}
	if (!area || !is_missing(area->reserved && !from->areas->cloned, address, info))
		return;
	if (!rf_sys_is_still(2, &error_output))
		return;
	put_all(from, area, address);
	say();
}

static void on_fault(int signo, siginfo_t *info, void *context);

static bool is_ours(const struct sigaction *action)
{
	return action->sa_flags & SA_SIGINFO && action->sa_sigaction == on_fault;
}

/* Is ours in place? An action that the program has put there meanwhile stays. */
static bool is_in_place(int signo)
{
	struct sigaction now;

	return rf_sys_action(signo, NULL, &now) < 0 || is_ours(&now);
}

/* Where a sandbox refuses the change, the kernel kills at the next fault: it is blocked then. */
static void put_back(int signo, const struct sigaction *action, void *context)
{
	if (rf_sys_action(signo, action, NULL) < 0)
		sigaddset(&((ucontext_t *)context)->uc_sigmask, signo);
}

/* Has the process told already? The first thread to ask tells; the others wait until it has. */
static bool has_told(void)
{
	const int32_t pid = (int32_t)rf_sys_pid();
	unsigned int waited;

	if (__atomic_exchange_n(&teller, pid, __ATOMIC_ACQ_REL) != pid)
		return false;
	for (waited = 0; __atomic_load_n(&told, __ATOMIC_ACQUIRE) != pid && waited < 1000; waited++)
		rf_sys_sleep(1000000);
	return true;
}

/*
 * Called again: a handler that took our place has called ours, or has put it back. Do as the
 * action would have done that ours was in front of when that handler was installed.
 */
static void go_on(int signo, siginfo_t *info, void *context)
{
	if (is_in_place(signo) || first.sa_handler == SIG_DFL) {
		put_back(signo, &first, context);
		if (info->si_code <= 0)
			(void)rf_sys_send_again(signo, info);
	} else if (first.sa_flags & SA_SIGINFO) {
		first.sa_sigaction(signo, info, context);
	} else {
		first.sa_handler(signo);
	}
}

/* Sent, by kill(), raise() or a timer: it does not come again by itself. */
static void on_sent(int signo, siginfo_t *info, void *context)
{
	if (has_told() || !is_in_place(signo)) {
		go_on(signo, info, context);
		return;
	}
	put_back(signo, &before, context);
	(void)rf_sys_send_again(signo, info);
}

static void on_fault(int signo, siginfo_t *info, void *context)
{
	const uintptr_t address = (uintptr_t)info->si_addr;

	if (info->si_code <= 0) {
		on_sent(signo, info, context);
	} else if (!has_told()) {
		explain(info);
		if (is_in_place(signo))
			put_back(signo, &before, context);
	} else if (returned.armed == armed && returned.address == address) {
		go_on(signo, info, context);
	}
	/* A thread that faulted at the same time returns too: the action before ours is back. */
	returned.armed = armed;
	returned.address = address;
	__atomic_store_n(&told, (int32_t)rf_sys_pid(), __ATOMIC_RELEASE);
}

int rf_child_fault_arm(void)
{
	struct sigaction ours = { .sa_sigaction = on_fault }, now;

	if (!kept[latest].areas || rf_sys_identify(2, &error_output) < 0 ||
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
	armed++;
	ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
	sigemptyset(&ours.sa_mask);
	return rf_sys_action(SIGSEGV, &ours, NULL) >= 0;
}
