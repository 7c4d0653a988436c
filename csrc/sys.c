/* SPDX-License-Identifier: BSD-3-Clause */
#define _GNU_SOURCE /* mremap(), dup3(), pipe2() */
#include "sys.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/netlink.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifdef RF_TESTING
#define RETURN_IF_INJECTED()                    \
	do {                                    \
		int error_ = rf_sys_injected(); \
		if (error_)                     \
			return -error_;         \
	} while (0)
#else
#define RETURN_IF_INJECTED() ((void)0)
#endif

/*
 * Call the kernel; errno is read here and nowhere else, and put back: only a failure sets it. Calls
 * that libc makes points of cancellation are made through syscall(), which is none.
 */
#define KERNEL(call)                               \
	({                                         \
		const int saved_ = errno;          \
		__typeof__(call) result_ = (call); \
		if (result_ == -1) {               \
			result_ = -errno;          \
			errno = saved_;            \
		}                                  \
		result_;                           \
	})

/* sizeof(sigset_t) of the kernel, which reads that much. */
#define KERNEL_SIGSET 8

int rf_sys_madvise(uintptr_t start, size_t nbytes, int advice)
{
	RETURN_IF_INJECTED();
	return KERNEL(madvise((void *)start, nbytes, advice));
}

/* @rc is the result of mmap(): an address, or a negated errno. */
static int mapped_at(intptr_t rc, void **out)
{
	if (rc < 0 && rc > -4096)
		return (int)rc;
	*out = (void *)rc;
	return 0;
}

static int map(uintptr_t start, size_t nbytes, int protection, int flags, void **out)
{
	intptr_t rc;

	RETURN_IF_INJECTED();
	rc = KERNEL((intptr_t)mmap((void *)start, nbytes, protection,
				   MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0));
	return mapped_at(rc, out);
}

int rf_sys_map(size_t nbytes, void **out)
{
	return map(0, nbytes, PROT_READ | PROT_WRITE, 0, out);
}

int rf_sys_map_at(uintptr_t start, size_t nbytes, int protection)
{
	void *memory;

	return map(start, nbytes, protection, MAP_NORESERVE | MAP_FIXED_NOREPLACE, &memory);
}

int rf_sys_map_over(uintptr_t start, size_t nbytes)
{
	void *memory;

	return map(start, nbytes, PROT_READ | PROT_WRITE, MAP_NORESERVE | MAP_FIXED, &memory);
}

int rf_sys_remap(void *old, size_t old_nbytes, size_t nbytes, void **out)
{
	intptr_t rc;

	RETURN_IF_INJECTED();
	rc = KERNEL((intptr_t)mremap(old, old_nbytes, nbytes, MREMAP_MAYMOVE));
	return mapped_at(rc, out);
}

int rf_sys_is_shared(uintptr_t address, size_t nbytes)
{
	void *again;
	intptr_t rc;
	int mapped;

	RETURN_IF_INJECTED();
	rc = KERNEL((intptr_t)mremap((void *)address, 0, nbytes, MREMAP_MAYMOVE));
	mapped = mapped_at(rc, &again);
	if (mapped < 0)
		return mapped == -EINVAL ? 0 : mapped;
	/* A whole huge page was mapped, if it is one. */
	do {
		rc = KERNEL(munmap(again, nbytes));
		nbytes *= 2;
	} while (rc == -EINVAL && nbytes <= (size_t)1 << 34);
	return 1;
}

int rf_sys_is_in_huge_page(uintptr_t address, size_t nbytes)
{
	void *same;
	intptr_t rc;
	int mapped;

	RETURN_IF_INJECTED();
	/* To the same place and size: nothing changes. It must not begin inside a huge page. */
	rc = KERNEL((intptr_t)mremap((void *)address, nbytes, nbytes, 0));
	mapped = mapped_at(rc, &same);
	if (mapped == -EINVAL)
		return 1;
	return mapped == -EFAULT ? 0 : mapped;
}

int rf_sys_protect(uintptr_t start, size_t nbytes, int protection)
{
	RETURN_IF_INJECTED();
	return KERNEL(mprotect((void *)start, nbytes, protection));
}

int rf_sys_unmap(void *start, size_t nbytes)
{
	RETURN_IF_INJECTED();
	return KERNEL(munmap(start, nbytes));
}

int rf_sys_is_mapped(uintptr_t start, size_t nbytes)
{
	int rc;

	RETURN_IF_INJECTED();
	/* MS_ASYNC writes nothing. Not mincore(), which needs a byte for each page. */
	rc = KERNEL((int)syscall(SYS_msync, start, nbytes, MS_ASYNC));
	return rc < 0 ? rc : 1;
}

/* Flags that mean nothing to a reader, so that no program opens a file for reading with them. */
#define SIGNATURE (O_APPEND | O_DSYNC)

int rf_sys_open(const char *path, int access)
{
	static const int flags[] = {
		[RF_READ] = O_RDONLY,
		[RF_APPEND] = O_WRONLY | O_APPEND | O_NOCTTY | O_NONBLOCK,
		[RF_CREATE] = O_WRONLY | O_APPEND | O_NOCTTY | O_NONBLOCK | O_CREAT | O_NOFOLLOW,
		[RF_READ_SIGNED] = O_RDONLY | SIGNATURE,
	};
	int rc;

	RETURN_IF_INJECTED();
	rc = KERNEL((int)syscall(SYS_openat, AT_FDCWD, path, flags[access] | O_CLOEXEC, 0666));
	/* O_NONBLOCK was for open(), which waits for the reader of a named pipe. */
	if (rc >= 0 && flags[access] & O_NONBLOCK)
		(void)!fcntl(rc, F_SETFL, O_APPEND);
	return rc;
}

int rf_sys_pipe(int fds[2])
{
	RETURN_IF_INJECTED();
	return KERNEL(pipe2(fds, O_CLOEXEC | O_NONBLOCK));
}

int rf_sys_splice_page(int fd, const void *memory, size_t nbytes)
{
	const struct iovec bytes = { (void *)memory, nbytes };
	RETURN_IF_INJECTED();
	return KERNEL((int)syscall(SYS_vmsplice, fd, &bytes, 1, 0));
}

ssize_t rf_sys_read(int fd, void *buffer, size_t nbytes)
{
	ssize_t rc;

	RETURN_IF_INJECTED();
	do {
		rc = KERNEL(syscall(SYS_read, fd, buffer, nbytes));
	} while (rc == -EINTR);
	return rc;
}

/* The signal that comes with a write's failure, which would end the program; 0: none. */
static int signal_of(ssize_t rc)
{
	if (rc == -EPIPE)
		return SIGPIPE;
	return rc == -EFBIG ? SIGXFSZ : 0;
}

ssize_t rf_sys_write(int fd, const void *buffer, size_t nbytes)
{
	const struct timespec now = { .tv_sec = 0 };
	sigset_t raised, before, pending;
	int saved = errno;
	ssize_t rc;

	RETURN_IF_INJECTED();
	sigemptyset(&raised);
	sigaddset(&raised, SIGPIPE);
	sigaddset(&raised, SIGXFSZ);
	pthread_sigmask(SIG_BLOCK, &raised, &before);
	sigpending(&pending);
	do {
		rc = KERNEL(syscall(SYS_write, fd, buffer, nbytes));
	} while (rc == -EINTR);
	/* The pending signal is ours, unless one of its kind was pending before. */
	if (signal_of(rc) && !sigismember(&pending, signal_of(rc))) {
		sigemptyset(&raised);
		sigaddset(&raised, signal_of(rc));
		(void)KERNEL(syscall(SYS_rt_sigtimedwait, &raised, NULL, &now, KERNEL_SIGSET));
	}
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	errno = saved;
	return rc;
}

int rf_sys_is_writable(int fd)
{
	const struct timespec now = { .tv_sec = 0 };
	struct pollfd asked = { .fd = fd, .events = POLLOUT };
	int rc;

	RETURN_IF_INJECTED();
	rc = KERNEL((int)syscall(SYS_ppoll, &asked, 1, &now, NULL, KERNEL_SIGSET));
	return rc < 0 ? rc : !!(asked.revents & POLLOUT);
}

ssize_t rf_sys_copy_readable(const struct iovec *to, const struct iovec *from, unsigned int count)
{
	RETURN_IF_INJECTED();
	/* The process's pid has no memory once the main thread has ended. */
	return KERNEL(process_vm_readv((pid_t)syscall(SYS_gettid), to, 1, from, count, 0));
}

/* The lower half says how many are open, the upper half how many ever were. */
static uint64_t transients;

#define EVER_OPENED ((uint64_t)1 << 32)
#define STILL_OPEN (EVER_OPENED - 1)

void rf_sys_transient(bool opens)
{
	if (opens)
		__atomic_add_fetch(&transients, EVER_OPENED + 1, __ATOMIC_SEQ_CST);
	else
		__atomic_sub_fetch(&transients, 1, __ATOMIC_SEQ_CST);
}

uint64_t rf_sys_transients(void)
{
	return __atomic_load_n(&transients, __ATOMIC_SEQ_CST);
}

bool rf_sys_inherits_transients(uint64_t before)
{
	const uint64_t now = rf_sys_transients();

	/* The threads that had them open are not in this process. */
	if (now & STILL_OPEN)
		__atomic_store_n(&transients, now & ~STILL_OPEN, __ATOMIC_SEQ_CST);
	return now != before || now & STILL_OPEN;
}

static ssize_t read_at(int fd, void *to, size_t nbytes, uintptr_t from)
{
	RETURN_IF_INJECTED();
	return KERNEL(syscall(SYS_pread64, fd, to, nbytes, from));
}

ssize_t rf_sys_copy_inaccessible(const struct iovec *to, const struct iovec *from,
				 unsigned int count)
{
	size_t done = 0, nbytes = 0;
	ssize_t rc = 0;
	int fd;

	rf_sys_transient(true);
	fd = rf_sys_open("/proc/thread-self/mem", RF_READ_SIGNED);
	for (; fd >= 0 && rc == (ssize_t)nbytes && count && done < to->iov_len; count--, from++) {
		nbytes = to->iov_len - done;
		nbytes = from->iov_len < nbytes ? from->iov_len : nbytes;
		rc = read_at(fd, (char *)to->iov_base + done, nbytes, (uintptr_t)from->iov_base);
		done += rc < 0 ? 0 : (size_t)rc;
	}
	if (fd >= 0)
		rf_sys_close(fd);
	rf_sys_transient(false);
	if (done)
		return (ssize_t)done;
	/* The file says EIO where nothing is mapped. */
	return fd < 0 ? fd : -EFAULT;
}

ssize_t rf_sys_copy(const struct iovec *to, const struct iovec *from, unsigned int count)
{
	ssize_t rc = rf_sys_copy_readable(to, from, count);

	/* A sandbox may refuse the call itself. */
	if (rf_unlikely(rc < 0 && rc != -EFAULT))
		return rf_sys_copy_inaccessible(to, from, count);
	return rc;
}

ssize_t rf_sys_list(int fd, void *entries, size_t nbytes)
{
	RETURN_IF_INJECTED();
	return KERNEL(syscall(SYS_getdents64, fd, entries, nbytes));
}

int rf_sys_read_link(const char *path, char *target, size_t nbytes)
{
	ssize_t rc;

	RETURN_IF_INJECTED();
	rc = KERNEL(readlink(path, target, nbytes - 1));
	if (rc < 0)
		return (int)rc;
	target[rc] = '\0';
	return 0;
}

/* Tests do not fail it, as Linux closes the descriptor whatever it returns. */
int rf_sys_close(int fd)
{
	return KERNEL((int)syscall(SYS_close, fd));
}

int rf_sys_identify(int fd, struct rf_file *file)
{
	struct stat status;
	int rc;

	RETURN_IF_INJECTED();
	/* libc's fstat() is newfstatat(), whose path takes a child two page faults. */
	rc = KERNEL((int)syscall(SYS_fstat, fd, &status));
	if (rc < 0)
		return rc;
	file->device = status.st_dev;
	file->inode = status.st_ino;
	file->special = status.st_mode & S_IFMT ? status.st_rdev : RF_ANONYMOUS;
	return 0;
}

bool rf_sys_is_same(const struct rf_file *one, const struct rf_file *other)
{
	return one->device == other->device && one->inode == other->inode &&
	       (one->special == other->special || one->special == RF_ANONYMOUS ||
		other->special == RF_ANONYMOUS);
}

bool rf_sys_is_still(int fd, const struct rf_file *file)
{
	struct rf_file now;

	return rf_sys_identify(fd, &now) >= 0 && rf_sys_is_same(&now, file);
}

/* rdma/ib_user_ioctl_cmds.h: a command without attributes, in a form that does not exist. */
static const struct verbs_command {
	uint16_t nbytes, object, method, attributes;
	uint64_t reserved1;
	uint32_t driver, reserved2;
} no_command = { .nbytes = sizeof(no_command), .reserved1 = 1 };

#define RDMA_VERBS_IOCTL _IOWR(0x1b, 1, struct verbs_command)

int rf_sys_is_uverbs(int fd)
{
	struct stat status;
	int rc;

	RETURN_IF_INJECTED();
	rc = KERNEL(fstat(fd, &status));
	if (rc < 0 || !S_ISCHR(status.st_mode))
		return rc;
	/* Its major number may be any. Of a terminal, say, this is -ENOTTY. */
	rc = KERNEL(ioctl(fd, RDMA_VERBS_IOCTL, &no_command));
	return rc == -EPROTONOSUPPORT;
}

int rf_sys_descriptor_limit(void)
{
	struct rlimit limit = { .rlim_cur = 0 };
	int rc;

	rc = KERNEL(getrlimit(RLIMIT_NOFILE, &limit));
	/* The limit may have been lowered after descriptors were opened. */
	if (rc < 0 || limit.rlim_cur < 1024)
		return 1024;
	return limit.rlim_cur < 65536 ? (int)limit.rlim_cur : 65536;
}

int rf_sys_is_signed(int fd)
{
	int rc;

	RETURN_IF_INJECTED();
	rc = KERNEL(fcntl(fd, F_GETFL));
	return rc < 0 ? rc : (rc & (O_ACCMODE | SIGNATURE)) == (O_RDONLY | SIGNATURE);
}

int rf_sys_duplicate(int fd, int onto)
{
	int rc;

	RETURN_IF_INJECTED();
	do {
		rc = KERNEL(dup3(fd, onto, O_CLOEXEC));
	} while (rc == -EINTR || rc == -EBUSY);
	return rc;
}

/* linux/fs.h of Linux 6.11, named here since build machines have older headers. */
struct procmap_query {
	uint64_t size;
	uint64_t query_flags;
	uint64_t query_addr;
	uint64_t vma_start;
	uint64_t vma_end;
	uint64_t vma_flags;
	uint64_t vma_page_size;
	uint64_t vma_offset;
	uint64_t inode;
	uint32_t dev_major;
	uint32_t dev_minor;
	uint32_t vma_name_size;
	uint32_t build_id_size;
	uint64_t vma_name_addr;
	uint64_t build_id_addr;
};

#define PROCMAP_QUERY _IOWR('f', 17, struct procmap_query)
#define PROCMAP_QUERY_VMA_READABLE 0x01
#define PROCMAP_QUERY_VMA_WRITABLE 0x02
#define PROCMAP_QUERY_VMA_EXECUTABLE 0x04
#define PROCMAP_QUERY_VMA_SHARED 0x08
#define PROCMAP_QUERY_COVERING_OR_NEXT_VMA 0x10

int rf_sys_procmap_query(int fd, uintptr_t address, struct rf_vma *vma)
{
	struct procmap_query query = {
		.size = sizeof(query),
		.query_flags = PROCMAP_QUERY_COVERING_OR_NEXT_VMA,
		.query_addr = address,
	};
	int rc;

	RETURN_IF_INJECTED();
	rc = KERNEL(ioctl(fd, PROCMAP_QUERY, &query));
	if (rc < 0)
		return rc;
	vma->start = query.vma_start;
	vma->end = query.vma_end;
	vma->shift = (uint8_t)__builtin_ctzll(query.vma_page_size);
	vma->shared = !!(query.vma_flags & PROCMAP_QUERY_VMA_SHARED);
	vma->protection = (query.vma_flags & PROCMAP_QUERY_VMA_READABLE ? PROT_READ : 0) |
			  (query.vma_flags & PROCMAP_QUERY_VMA_WRITABLE ? PROT_WRITE : 0) |
			  (query.vma_flags & PROCMAP_QUERY_VMA_EXECUTABLE ? PROT_EXEC : 0);
	vma->anonymous = !query.inode;
	return 0;
}

void rf_sys_uname(struct utsname *name)
{
	memset(name, 0, sizeof(*name));
	(void)KERNEL(uname(name));
}

size_t rf_sys_page_size(void)
{
	static size_t nbytes;

	/* A child that called libc here would take a page fault for it. */
	if (rf_unlikely(!nbytes))
		nbytes = getauxval(AT_PAGESZ);
	return nbytes;
}

/* Its exit signal is 0: no SIGCHLD handler runs, and wait() without __WCLONE does not find it. */
static pid_t clone_and_exit(void)
{
	pid_t pid = KERNEL((pid_t)syscall(SYS_clone, 0L, 0L, 0L, 0L, 0L));
	if (!pid)
		_exit(0);
	return pid;
}

int rf_sys_fork_briefly(void)
{
	sigset_t all, before;
	pid_t pid;
	int rc;

	RETURN_IF_INJECTED();
	/* A signal for the whole process group would run the program's handlers in the child. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	pid = clone_and_exit();
	rc = pid < 0 ? pid : 0;
	if (pid > 0) {
		do {
			rc = KERNEL((int)syscall(SYS_wait4, pid, NULL, __WCLONE, NULL));
		} while (rc == -EINTR);
	}
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	/* -ECHILD: a wait4() with __WALL in another thread was faster. */
	return rc == -ECHILD || rc > 0 ? 0 : rc;
}

#define BIT(signo) ((uint64_t)1 << ((signo) - 1))

int rf_sys_block_signals(uint64_t *blocked)
{
	uint64_t wanted = ~(BIT(SIGSEGV) | BIT(SIGBUS) | BIT(SIGILL) | BIT(SIGFPE) | BIT(SIGTRAP) |
			    BIT(SIGSYS));
	uint64_t before = 0;
	int rc, signo;

	RETURN_IF_INJECTED();
	for (signo = 32; signo < SIGRTMIN; signo++)
		wanted &= ~BIT(signo);
	/* The kernel's mask: libc's functions leave libc's own signals out of theirs. */
	rc = KERNEL((int)syscall(SYS_rt_sigprocmask, SIG_BLOCK, &wanted, &before, sizeof(wanted)));
	*blocked = wanted & ~before;
	return rc;
}

/* Tests do not fail it, as Linux does not. */
int rf_sys_unblock_signals(uint64_t blocked)
{
	return KERNEL((int)syscall(SYS_rt_sigprocmask, SIG_UNBLOCK, &blocked, NULL,
				   sizeof(blocked)));
}

int rf_sys_action(int signo, const struct sigaction *action, struct sigaction *before)
{
	RETURN_IF_INJECTED();
	return KERNEL(sigaction(signo, action, before));
}

int rf_sys_send_again(int signo, const siginfo_t *info)
{
	RETURN_IF_INJECTED();
	return KERNEL((int)syscall(SYS_rt_tgsigqueueinfo, getpid(), syscall(SYS_gettid), signo,
				   info));
}

pid_t rf_sys_pid(void)
{
	return getpid();
}

pid_t rf_sys_ppid(void)
{
	return getppid();
}

uint64_t rf_sys_now(void)
{
	struct timespec now = { .tv_sec = 0 };

	(void)KERNEL(clock_gettime(CLOCK_MONOTONIC, &now));
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Tests do not fail it, as a futex may return early at any time anyway. */
int rf_sys_futex_wait(const uint32_t *word, uint32_t expected, long ns)
{
	const struct timespec patience = { .tv_nsec = ns };

	return KERNEL((int)syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, &patience, NULL,
				   0));
}

int rf_sys_futex_wake(const uint32_t *word)
{
	return KERNEL((int)syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0));
}

void rf_sys_sleep(long ns)
{
	const struct timespec time = { .tv_nsec = ns };

	(void)KERNEL(syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, &time, NULL));
}

/* rdma/rdma_netlink.h: old headers lack the attribute. */
#define NETLINK_RDMA_PROTOCOL 20
#define NLDEV_CLIENT 5
#define NLDEV_CMD_SYS_GET 6
#define NLDEV_SYS_ATTR_COPY_ON_FORK 93

static int copy_on_fork_of(const unsigned char *message, size_t nbytes)
{
	struct nlmsghdr header;
	size_t at = NLMSG_HDRLEN;

	if (nbytes < sizeof(header))
		return -EPROTO;
	memcpy(&header, message, sizeof(header));
	if (header.nlmsg_type == NLMSG_ERROR || header.nlmsg_len > nbytes)
		return -EOPNOTSUPP;
	while (at + NLA_HDRLEN <= header.nlmsg_len) {
		struct nlattr attribute;

		memcpy(&attribute, message + at, sizeof(attribute));
		if (attribute.nla_len < NLA_HDRLEN || at + attribute.nla_len > header.nlmsg_len)
			return -EPROTO;
		if ((attribute.nla_type & NLA_TYPE_MASK) == NLDEV_SYS_ATTR_COPY_ON_FORK &&
		    attribute.nla_len > NLA_HDRLEN)
			return message[at + NLA_HDRLEN] != 0;
		at += NLA_ALIGN(attribute.nla_len);
	}
	/* The kernel answers and does not know the attribute: before 5.12. */
	return 0;
}

static int ask_rdma(int fd)
{
	struct {
		struct nlmsghdr header;
		uint32_t padding;
	} request = {
		.header = {
			.nlmsg_len = NLMSG_HDRLEN,
			.nlmsg_type = (NLDEV_CLIENT << 10) | NLDEV_CMD_SYS_GET,
			.nlmsg_flags = NLM_F_REQUEST,
		},
	};
	const struct timeval patience = { .tv_sec = 1 };
	unsigned char answer[4096];
	ssize_t rc;

	rc = KERNEL(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)));
	if (rc < 0)
		return (int)rc;
	rc = KERNEL(syscall(SYS_sendto, fd, &request, NLMSG_HDRLEN, 0, NULL, 0));
	if (rc < 0)
		return (int)rc;
	rc = KERNEL(syscall(SYS_recvfrom, fd, answer, sizeof(answer), 0, NULL, NULL));
	if (rc < 0)
		return (int)rc;
	return copy_on_fork_of(answer, (size_t)rc);
}

int rf_sys_rdma_copy_on_fork(void)
{
	int fd, rc;

	RETURN_IF_INJECTED();
	fd = KERNEL(socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_RDMA_PROTOCOL));
	if (fd < 0)
		return fd;
	rc = ask_rdma(fd);
	rf_sys_close(fd);
	return rc;
}
