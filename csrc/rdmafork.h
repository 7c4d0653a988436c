/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * rdmafork: fork() with registered memory, safe and cheap.
 *
 * RDMA hardware reads and writes the physical pages of a buffer. fork() makes
 * private pages copy-on-write, so the parent can lose the page that the device
 * writes to. Newer kernels copy pinned pages for the child instead, which is slow.
 * This engine keeps registered pages out of the child by marking them with
 * madvise(MADV_DONTFORK). Where the kernel's own copying can be trusted as a safety
 * net, it does so in a fork handler: a registration then costs no system call.
 *
 *	rf_fork_init(RF_MODE_AUTO, &error);
 *	rf_register(address, nbytes, RF_HELD, RF_OMIT, &handle, &error);
 *	...			fork() here is safe
 *	rf_release(handle, 0);
 *
 * Every function may be called from any thread at any time, other libraries'
 * fork handlers included. From a signal handler that interrupted the engine in
 * the same thread, rf_register() and rf_release() return -EDEADLK; fork() works.
 * Functions return >= 0, or a negated errno; errno itself does not change.
 * After any failure the state is as it was before the call.
 */
#ifndef RDMAFORK_H
#define RDMAFORK_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RF_API __attribute__((visibility("default")))

/* The release that this header belongs to, or the next one to come. */
#define RDMAFORK_VERSION_MAJOR 0
#define RDMAFORK_VERSION_MINOR 1
#define RDMAFORK_VERSION_PATCH 0

/* As one number, which #if can compare: 1.2.3 is 10203. */
#define RDMAFORK_VERSION                                                    \
	(RDMAFORK_VERSION_MAJOR * 10000 + RDMAFORK_VERSION_MINOR * 100 + \
	 RDMAFORK_VERSION_PATCH)

/*
 * Changes when a caller compiled against an older header would misbehave. The symbols
 * carry it as their version (RDMAFORK_6): glibc's loader refuses a program that was
 * linked with another. musl's does not look: compare rf_abi().
 */
#define RF_ABI 6

enum rf_mode {
	RF_MODE_NONE = 0,	/* rf_fork_init() has not been called */
	RF_MODE_AUTO = 1,	/* $RDMAFORK_MODE, else lazy where copying is trusted */
	RF_MODE_LAZY = 2,	/* a fork handler marks the pages, just before the fork */
	RF_MODE_EAGER = 3,	/* the pages are marked when rf_register() returns */
};

/*
 * The content a child gets in private pages that a registration fills. It gets a copy of pages
 * that no single registration fills. Where registrations overlap, RF_OMIT wins over
 * RF_WIPE, and RF_WIPE over RF_KEEP. Shared memory stays shared.
 */
enum rf_policy {
	RF_OMIT = 0,		/* nothing: the pages are not inherited */
	RF_WIPE = 1,		/* zeros, which are the child's own */
	RF_KEEP = 2,		/* a copy: the kernel's, where it can be trusted */
	RF_POLICIES = 3,
};

/* Facts about the memory that the caller knows. */
#define RF_HELD		1u	/* it stays mapped, as it is, until rf_release() */
/* Return -EAGAIN rather than wait for a lock or enter the kernel. */
#define RF_NOWAIT	2u
/* Children do not get the descriptor's mappings either. */
#define RF_MAPPED	4u
/* With rf_release(), before rf_fork_init(): later that works as if nothing had been registered. */
#define RF_UNDO		8u
/* With rf_register(): the call that rf_explain_faults() names, instead of rf_register(). */
#define RF_FROM_REGISTER	0x10u	/* Python's rdmafork.register() */
#define RF_FROM_ADDRESS		0x20u	/* rdmafork.register_address() */
#define RF_FROM_BUFFER		0x30u	/* rdmafork.Buffer() */
#define RF_FROM_DEVICE		0x40u	/* ProtectionDomain.register() */
#define RF_FROM_LIBIBVERBS	0x50u	/* libibverbs' ibv_dontfork_range() */
#define RF_FROM			0x70u	/* the bits of these */

/*
 * Why a call failed, where the errno that it returns can have several causes. A caller that does
 * not ask passes NULL for the struct rf_error.
 */
enum rf_cause {
	RF_CAUSE_NONE = 0,
	RF_CAUSE_WRAP,		/* EOVERFLOW: address + nbytes is beyond the address space */
	RF_CAUSE_POLICY,	/* EINVAL: unknown; ENOTSUP: RF_KEEP, copying is not trusted */
	RF_CAUSE_NOT_MAPPED,	/* ENOMEM: [start, end) of the range is not mapped */
	RF_CAUSE_VMA_LIMIT,	/* ENOMEM: over a third of vm.max_map_count, or no memory */
	RF_CAUSE_ENGINE_MEMORY,	/* ENOMEM: the engine's own tables cannot grow */
	RF_CAUSE_REFUSED,	/* the kernel's madvise() refused [start, end): sealed, special */
	RF_CAUSE_NO_PROC,	/* the page size of [start, end) is unknown without /proc */
	RF_CAUSE_SIGNAL,	/* EDEADLK: called by a signal handler inside the engine */
	RF_CAUSE_LATE,		/* EINVAL: a registration was made before rf_fork_init() */
	RF_CAUSE_MODE,		/* EINVAL: the engine runs with another mode already */
	RF_CAUSE_ENVIRONMENT,	/* EINVAL: a variable's value is not valid */
	RF_CAUSE_UNTRUSTED,	/* ENOTSUP: lazy, where the kernel's copying is not trusted */
	RF_CAUSE_OTHER_ENGINE,	/* EEXIST: another copy of librdmafork runs in this process */
	/* No error: registered, but a child may lack other memory on the page [start, end). */
	RF_CAUSE_SHARED_PAGE,
	RF_CAUSE_LIBRARY,	/* ENOTSUP: a libibverbs cannot be intercepted: text */
	RF_CAUSE_UNKNOWN_MODE,	/* EINVAL: there is no such mode: text */
	RF_CAUSE_FLAGS,		/* EINVAL: the call has no such flags: text */
};

struct rf_error {
	enum rf_cause cause;
	uintptr_t start, end;	/* the range the cause speaks of, page aligned */
	uintptr_t address;	/* of the memory to register */
	size_t nbytes;		/* 0 where nothing was */
	char text[256];		/* the value, engine, library, kernel or memory at fault */
};

/* Room for any text of rf_strerror(), and its final 0. */
#define RF_STRERROR_SIZE 1024

/*
 * Names one registration. The serial is never used again, in this process or in
 * any child, so a released handle is -ESTALE and one of the parent's -ECHILD for
 * ever. A zeroed handle is -ESTALE.
 */
struct rf_handle {
	uint64_t serial;
	uint32_t slot;
	uint32_t generation;	/* of the process that registered, as rf_generation() */
};

/*
 * Why a call returned @rc, in one sentence with the values that were wrong and what to do:
 * the text of Python's exception. @error is what that call filled, NULL for a call that fills
 * none. After rf_register() returned 1 with RF_CAUSE_SHARED_PAGE it is the warning's text.
 * Writes at most @size bytes to @out, ends them with 0, and returns @out. Allocates nothing,
 * but libc may load the translations of strerror(). Any thread may call it.
 *
 *	char text[RF_STRERROR_SIZE];
 *
 *	rc = rf_register(address, nbytes, RF_HELD, RF_OMIT, &handle, &error);
 *	if (rc < 0)
 *		puts(rf_strerror(rc, &error, text, sizeof(text)));
 */
RF_API const char *rf_strerror(int rc, const struct rf_error *error, char *out, size_t size);

/* RDMAFORK_VERSION and RF_ABI of the library that is loaded. */
RF_API int rf_version(void);
RF_API int rf_abi(void);

/*
 * Start protecting registered memory. A second call with the same mode, or with
 * RF_MODE_AUTO, does nothing. @mode: RF_MODE_AUTO, RF_MODE_LAZY or RF_MODE_EAGER. A
 * forked child inherits the mode and may choose another before it registers.
 * In the environment RDMAFORK_TRUST_COPYING=0: the kernel's copying is not trusted;
 * RDMAFORK_EXPLAIN_FAULTS=0: no child says why it dies (rf_explain_faults()).
 * -EINVAL (UNKNOWN_MODE, LATE, MODE, ENVIRONMENT), -ENOTSUP, -ENOMEM, -EEXIST.
 */
RF_API int rf_fork_init(enum rf_mode mode, struct rf_error *error);

/* The mode in force, RF_MODE_NONE before rf_fork_init(). */
RF_API enum rf_mode rf_mode(void);

/*
 * Register [@address, @address + @nbytes). @flags: RF_HELD, RF_NOWAIT, one of RF_FROM_...; any
 * other bit is -EINVAL. With RF_HELD the memory stays mapped until it is released. Without it
 * the memory may be unmapped before, so its pages are marked at once in either mode. The first
 * registration reads RDMAV_FORK_SAFE and IBV_FORK_SAFE; if one is set it calls rf_fork_init()
 * and fails as that does.
 * Returns 1 if the memory is protected, 0 if rf_fork_init() was never called;
 * *@handle names the registration. @nbytes may be 0.
 * RF_CAUSE_SHARED_PAGE goes with success: where partial pages are kept from children,
 * a child is given copies of them, but fork() itself uses this one before that, or it is
 * malloc()'s, and another thread may call malloc() meanwhile. The text says which.
 */
RF_API int rf_register(const void *address, size_t nbytes, unsigned int flags,
		       enum rf_policy policy, struct rf_handle *handle,
		       struct rf_error *error);

/*
 * End a registration. Marked pages that no other registration touches are unmarked
 * when this returns (where the kernel's VMA limit forbids it, as soon as possible).
 * -ESTALE: released already. -ECHILD: the parent made it; no system call is made.
 * @flags: RF_NOWAIT (-EAGAIN), RF_UNDO; any other bit is -EINVAL. -EDEADLK.
 */
RF_API int rf_release(struct rf_handle handle, unsigned int flags);

/*
 * Where the loader finds this library before libibverbs (LD_PRELOAD), it takes the
 * place of its fork support: ibv_fork_init(), ibv_is_fork_initialized(),
 * ibv_dontfork_range() and ibv_dofork_range(). After rf_ranges_own(1) calls of the last two
 * by this thread do nothing, until rf_ranges_own(0). It is for a caller that registers memory
 * with libibverbs which it has registered here itself.
 */
RF_API void rf_ranges_own(int yes);

/*
 * A forked child that touches memory it did not inherit dies. Before that, one line on stderr
 * says why: the address, the registration, what to do. The child's fork handler puts a SIGSEGV
 * action in front of the one there is. A program that installs its own later, or survives a
 * SIGSEGV that is sent, calls this after that. SIGBUS, and EFAULT of a system call, are not
 * explained.
 * 1: rdmafork's action is in front. 0: this process inherited everything, SIGSEGV is ignored, or
 * RDMAFORK_EXPLAIN_FAULTS=0 was in the environment at rf_fork_init(). -EDEADLK.
 */
RF_API int rf_explain_faults(void);

/*
 * Remember where @handle was registered, for the line of rf_explain_faults(): "file:line", of
 * which at most 119 bytes are kept.
 * -ESTALE, -ECHILD, -ENOMEM, -EDEADLK.
 */
RF_API int rf_registered_at(struct rf_handle handle, const char *where);

enum rf_library_how {
	RF_LIBRARY_OURS = 0,		/* its GOT names ours: found first, as by LD_PRELOAD */
	RF_LIBRARY_REWRITTEN = 1,	/* its GOT named its own functions, or another's */
	RF_LIBRARY_PATCHED = 2,		/* not by its GOT: a jump lies over the two functions */
	RF_LIBRARY_REFUSED = 3,		/* neither is possible: its own support is in force */
};

/* A libibverbs in this process. */
struct rf_library {
	char path[256];
	char user[256];		/* an object that needs it, if one says so by its name */
	uint8_t how;		/* enum rf_library_how */
	uint8_t protects;	/* refused, as its own fork support protects what it registers */
	const char *why;	/* the reason if it is refused, a constant; else NULL */
};

/*
 * Where this library is not found first: take over the calls that every libibverbs in
 * the process makes to its own fork support. Those loaded later follow at the next
 * fork, ibv_fork_init() or rf_libraries(). Their earlier marks stay.
 * Returns how many are intercepted. -ENOTSUP: one cannot be; the others are.
 * -EDEADLK.
 */
RF_API int rf_intercept(struct rf_error *error);

/*
 * The libibverbs in this process since rf_intercept(). Writes at most @capacity of them to
 * @out, and returns how many there are. -EDEADLK.
 */
RF_API ssize_t rf_libraries(struct rf_library *out, size_t capacity);

/* The word for how its calls arrive: "ours" and so on. */
RF_API const char *rf_library_how_name(uint8_t how);

/* 1 live and protected, 0 live and not protected, -ESTALE, -ECHILD. */
RF_API int rf_handle_state(struct rf_handle handle);

/* A number that changes in every forked child, raw clone() included. */
RF_API uint32_t rf_generation(void);

/*
 * Give forked children /dev/null in the place of descriptor @fd, before fork() returns
 * there; after chroot() to where there is none, a pipe's end. @fd is a device's: through it a
 * child would reach the parent's objects.
 * A mapping keeps a file open too: with RF_MAPPED in @flags, in this call or a later
 * one, private zeros also take the place of all that is mapped from the file. The child
 * looks for that, a microsecond for each of its mappings. Works without rf_fork_init().
 * In a child of a raw clone() nothing is replaced.
 * To open a device and name its descriptors without a fork in between:
 *
 *	do {
 *		before = rf_forks();
 *		open, rf_descriptor_omit()
 *	} while ((!before || rf_forks() != before) && (close, true));
 *
 * Call rf_descriptor_release() before closing it. -EBADF, -ENOMEM, -EDEADLK;
 * -EINVAL: @flags has more than RF_MAPPED; -ENOENT: it was not omitted.
 */
RF_API int rf_descriptor_omit(int fd, unsigned int flags);
RF_API int rf_descriptor_release(int fd);

/* A number that grows with every fork() through libc; 0 while one is under way. */
RF_API uint64_t rf_forks(void);

enum rf_protection {
	RF_BY_NOTHING = 0,	/* registered before rf_fork_init() */
	RF_BY_MARK = 1,	/* marked: "dc" in VmFlags of /proc/self/smaps */
	RF_BY_KERNEL = 2,	/* copied by the kernel at fork: slow, safe */
	RF_BY_HANDLER = 3,	/* pending: the next fork() decides */
	RF_BY_SHARING = 4,	/* shared memory, which fork() never moves */
};

struct rf_range_info {
	uintptr_t start, end;		/* page aligned, half open */
	uint32_t registrations;		/* how many touch these pages */
	uint8_t policy;			/* enum rf_policy in force */
	uint8_t protection;		/* enum rf_protection */
	uint16_t reserved;
};

/*
 * Lists the registered pages in order of address. Writes at most @capacity entries to @out,
 * and returns how many there are. Looks up mappings that are not known yet.
 * -ENOMEM, -EDEADLK.
 */
RF_API ssize_t rf_list(struct rf_range_info *out, size_t capacity);

struct rf_stats {
	uint64_t registrations;		/* live */
	uint64_t pending;		/* of these, waiting for a fork */
	uint64_t ranges;		/* separate ranges of registered pages */
	uint64_t marked_ranges;		/* of these, marked in the kernel */
	uint64_t marked_bytes;
	uint64_t vmas;			/* upper bound of VMAs the marks add */
	/* No mark goes beyond it: half of vm.max_map_count, a third without copy_trusted. */
	uint64_t vma_budget;
	uint64_t unmarked_ranges;	/* could be marked, but copied by the kernel */
	uint64_t unmarked_bytes;
	uint64_t still_marked_bytes;	/* released, still marked: not inherited */
	uint64_t madvise_calls;		/* since fork_init */
	uint64_t query_calls;		/* how often /proc was asked what is mapped */
	uint64_t forks;			/* forks through libc seen by the handlers */
	uint64_t forks_unmarked;	/* while the engine was busy: nothing new was marked */
	uint64_t engine_bytes;		/* memory the engine's tables take */
	uint64_t ibv_ranges;		/* registrations that ibv_dontfork_range() made, live */
	uint64_t ibv_calls;		/* of ibv_dontfork_range() and ibv_dofork_range() */
	uint64_t ibv_unbalanced;	/* of these, releases of unregistered ranges */
	uint64_t gone_bytes;		/* marked, and unmapped or moved before their release */
};

/* Fills *@stats. 0, or -EDEADLK. */
RF_API int rf_stats(struct rf_stats *stats);

/*
 * Points to the number of bytes that the live registrations touch. It counts whole pages, once
 * for each registration, so VmPin is larger only if something pins unregistered memory. It is
 * for programs that read another process's memory, as "rdmafork doctor --pid" does.
 */
RF_API extern const uint64_t *const rf_registered_bytes;

enum rf_how {
	RF_HOW_VERSION = 0,	/* from the kernel's version */
	RF_HOW_NETLINK = 1,	/* the kernel says so over RDMA netlink */
	RF_HOW_PROBE = 2,	/* from its treatment of a page: as 5.19, or not */
	RF_HOW_ENVIRONMENT = 3,	/* RDMAFORK_TRUST_COPYING=0 */
};

struct rf_kernel {
	char release[65];
	uint8_t copy_on_fork;		/* pinned pages are copied at fork() */
	uint8_t copy_how;		/* enum rf_how */
	uint8_t copy_trusted;		/* and no race loses them: 5.19 and later, some before */
	uint8_t procmap_query;
	uint8_t huge_shifts[8];		/* log2 of the huge page sizes, 0 ends */
	uint8_t trust_how;		/* enum rf_how: of copy_trusted */
	uint32_t page_size;
	uint32_t max_map_count;
};

/*
 * Fills *@kernel; reads the kernel at the first call and remembers. Until rf_fork_init(),
 * copy_trusted follows the environment as it is.
 */
RF_API void rf_kernel_info(struct rf_kernel *kernel);

#ifdef __cplusplus
}
#endif
#endif /* RDMAFORK_H */
