/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The one seam to the kernel. Every function returns >= 0 or a negated errno
 * and leaves errno as it was: the callers run inside other people's malloc and
 * fork. All of them are safe in a signal handler, and none is a point of
 * cancellation: a thread that ended here would take a lock along. Tests count and
 * fail these calls one by one (RF_TESTING).
 */
#ifndef RF_SYS_H
#define RF_SYS_H

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/utsname.h>

#if defined(RF_TESTING) || !defined(NDEBUG)
#include <assert.h>
#define RF_ASSERT(x) assert(x)
#else
#define RF_ASSERT(x) ((void)0)
#endif

#define rf_likely(x) __builtin_expect(!!(x), 1)
#define rf_unlikely(x) __builtin_expect(!!(x), 0)

/* One VMA as PROCMAP_QUERY and /proc/self/smaps describe it. */
struct rf_vma {
	uintptr_t start, end;
	uint8_t shift;		/* log2 of its page size */
	uint8_t shared;		/* MAP_SHARED */
	uint8_t protection;	/* PROT_READ ... */
	uint8_t anonymous;	/* no file behind it */
};

int rf_sys_madvise(uintptr_t start, size_t nbytes, int advice);

/* Anonymous private memory, zeroed. Never from malloc(): see memory.h. */
int rf_sys_map(size_t nbytes, void **out);
int rf_sys_remap(void *old, size_t old_nbytes, size_t nbytes, void **out);
int rf_sys_protect(uintptr_t start, size_t nbytes, int protection);
int rf_sys_unmap(void *start, size_t nbytes);
/*
 * Is the page of @nbytes at @address shared memory? Found without /proc: nothing else can be
 * mapped a second time. 1, or 0, which may also be a huge page; -errno: a device's, or none.
 */
int rf_sys_is_shared(uintptr_t address, size_t nbytes);
/*
 * Is the page of @nbytes at @address, which begins no huge page, part of one? 1, or 0, also
 * where nothing is mapped; -errno: the kernel does not say. Linux 5.16 and later do.
 */
int rf_sys_is_in_huge_page(uintptr_t address, size_t nbytes);
/* Put private zeros in the place of the mappings in [@start, @start + @nbytes). */
int rf_sys_map_over(uintptr_t start, size_t nbytes);

/* 1: something is mapped on every page of @nbytes. -ENOMEM: not so; or the kernel's refusal. */
int rf_sys_is_mapped(uintptr_t start, size_t nbytes);
/* Private zeros, with that protection, where nothing is mapped. -EEXIST: something is. */
int rf_sys_map_at(uintptr_t start, size_t nbytes, int protection);
/*
 * Copy from @count stretches of this process's memory to one, faulting at none, by
 * process_vm_readv(): only what the program may read. Returns the bytes copied, up to the first
 * that cannot be. -EFAULT: the first already. A sandbox may refuse the call itself.
 */
ssize_t rf_sys_copy_readable(const struct iovec *to, const struct iovec *from, unsigned int count);
/*
 * The same from /proc/thread-self/mem, which has memory too that the program may not read. The
 * file may be refused as well: without /proc or a descriptor, and to other users than root
 * where the process is not dumpable.
 */
ssize_t rf_sys_copy_inaccessible(const struct iovec *to, const struct iovec *from,
				 unsigned int count);
/* By the first, or by the second where a sandbox refuses that. */
ssize_t rf_sys_copy(const struct iovec *to, const struct iovec *from, unsigned int count);

/*
 * Transient descriptors, open for a moment only: files of /proc. A child that another thread
 * makes meanwhile inherits them. Each is counted before it is opened, and no more once it is
 * closed, as a child gets its descriptors before its memory.
 */
void rf_sys_transient(bool opens);
/* The count, another one after each change. */
uint64_t rf_sys_transients(void);
/* In a child: may it have one? @before is the count as its fork was prepared. */
bool rf_sys_inherits_transients(uint64_t before);

#define RF_READ		0
#define RF_APPEND	1	/* to a file that is there; not waited for */
#define RF_CREATE	2	/* the same; made if it is not, and -ELOOP for a link */
#define RF_READ_SIGNED	3	/* RF_READ, so that rf_sys_is_signed() knows it again */

int rf_sys_open(const char *path, int access);
/* A pipe that never blocks: @fds[0] reads the bytes written to @fds[1]. */
int rf_sys_pipe(int fds[2]);
/* vmsplice(): the pipe @fd refers to the page of @nbytes there, and holds no copy of them. */
int rf_sys_splice_page(int fd, const void *memory, size_t nbytes);
ssize_t rf_sys_read(int fd, void *buffer, size_t nbytes);
/* Without the signals that some failures raise. */
ssize_t rf_sys_write(int fd, const void *buffer, size_t nbytes);
/* 1: a line can be written to it now, without a wait. */
int rf_sys_is_writable(int fd);
int rf_sys_close(int fd);
/* struct dirent64 of an open directory; 0: no more. */
ssize_t rf_sys_list(int fd, void *entries, size_t nbytes);
/* The target of a symbolic link, cut to @nbytes with its final 0. */
int rf_sys_read_link(const char *path, char *target, size_t nbytes);

/* Which file it is that a descriptor names. */
struct rf_file {
	uint64_t device, inode;
	uint64_t special;	/* the device it is, 0 of other files */
};

/* In @special: all files without a name (an epoll, an eventfd) share one inode. */
#define RF_ANONYMOUS UINT64_MAX

int rf_sys_identify(int fd, struct rf_file *file);
bool rf_sys_is_same(const struct rf_file *one, const struct rf_file *other);
/* Does @fd still name @file? It may be another file's by now, which a line would spoil. */
bool rf_sys_is_still(int fd, const struct rf_file *file);
/* 1: @fd is an open uverbsN. The driver is asked, so that it needs no name and no number. */
int rf_sys_is_uverbs(int fd);
/* Descriptors lie below it, unless there are very many: at least 1024, at most 65536. */
int rf_sys_descriptor_limit(void);
/* Was that very file opened with RF_READ_SIGNED, here or by a parent? */
int rf_sys_is_signed(int fd);
/* Let @onto name the file of @fd, in one step, until exec(). */
int rf_sys_duplicate(int fd, int onto);

/*
 * PROCMAP_QUERY (Linux 6.11) on an open maps file of /proc: the VMA that holds
 * @address or the first after it. -ENOENT: none. -ENOTTY: not supported.
 */
int rf_sys_procmap_query(int fd, uintptr_t address, struct rf_vma *vma);

/* uname(2). All is "" if it fails. */
void rf_sys_uname(struct utsname *name);

size_t rf_sys_page_size(void);

/*
 * Make a child that exits at once, and wait for it. The program does not notice: no fork
 * handler, no signal handler and no exit handler runs, and no SIGCHLD is sent.
 */
int rf_sys_fork_briefly(void);

/*
 * Block all signals in this thread but those that the processor raises, where a block would kill,
 * and libc's own, which another thread may wait for. @blocked: those that were not blocked before.
 */
int rf_sys_block_signals(uint64_t *blocked);
int rf_sys_unblock_signals(uint64_t blocked);

/* sigaction(2) */
int rf_sys_action(int signo, const struct sigaction *action, struct sigaction *before);
/* Send this thread the signal again that its handler was given, with all that came with it. */
int rf_sys_send_again(int signo, const siginfo_t *info);

pid_t rf_sys_pid(void);
pid_t rf_sys_ppid(void);

/* Nanoseconds since some time. */
uint64_t rf_sys_now(void);

/* -ETIMEDOUT after @ns nanoseconds, less than a second. */
int rf_sys_futex_wait(const uint32_t *word, uint32_t expected, long ns);
int rf_sys_futex_wake(const uint32_t *word);
void rf_sys_sleep(long ns);

/* RDMA_NLDEV_SYS_ATTR_COPY_ON_FORK: 0 or 1, negative when the kernel does not say. */
int rf_sys_rdma_copy_on_fork(void);

#ifdef RF_TESTING
/* Before each call: 0, or the errno that it fails with instead of being made. It is the tests'. */
int rf_sys_injected(void);
#endif

#endif
