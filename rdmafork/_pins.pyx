# cython: language_level=3, binding=False, embedsignature=True, embedsignature.format=clinic
"""Real pins without RDMA hardware, and what a fork() of them costs.

An io_uring fixed buffer takes the same long-term pins on a process's pages as an
RDMA memory region, and a fixed read or write moves bytes through those pages as a
device would. The demo, the tests and the benchmarks stand on this module.
"""

import errno
import os
import resource
from threading import Lock
from typing import NamedTuple

from cpython.buffer cimport PyObject_CheckBuffer
from cpython.exc cimport PyErr_CheckSignals
from cpython.memoryview cimport PyMemoryView_GET_BUFFER
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

from rdmafork cimport rf_generation
from rdmafork._core cimport was_set

from rdmafork._core import InheritedError


cdef extern from *:
    """
    #include <errno.h>
    #include <poll.h>
    #include <stdint.h>
    #include <string.h>
    #include <sys/mman.h>
    #include <sys/syscall.h>
    #include <sys/uio.h>
    #include <unistd.h>

    /*
     * linux/io_uring.h as of Linux 5.5, named here since build machines have older
     * headers. The call numbers are the same on every architecture but alpha.
     */
    struct pins_params {
        uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle;
        uint32_t features, wq_fd, reserved[3];
        struct { uint32_t head, tail, mask, entries, flags, dropped, array, reserved[3]; } sq;
        struct { uint32_t head, tail, mask, entries, overflow, cqes, flags, reserved[3]; } cq;
    };
    struct pins_sqe {
        uint8_t opcode, flags;
        uint16_t ioprio;
        int32_t fd;
        uint64_t offset, address;
        uint32_t nbytes, rw_flags;
        uint64_t user_data;
        uint16_t buffer, personality;
        uint32_t reserved[5];
    };
    struct pins_cqe {
        uint64_t user_data;
        int32_t result;
        uint32_t flags;
    };

    #define PINS_SETUP 425
    #define PINS_ENTER 426
    #define PINS_REGISTER 427
    #define PINS_REGISTER_BUFFERS 0
    #define PINS_UNREGISTER_BUFFERS 1
    #define PINS_READ_FIXED 4
    #define PINS_WRITE_FIXED 5
    #define PINS_CANCEL 14
    #define PINS_SQ_RING 0
    #define PINS_CQ_RING 0x8000000
    #define PINS_SQES 0x10000000

    struct pins_ring {
        int fd;
        uint64_t serial;        /* user_data of the latest operation */
        char *sq, *cq;
        struct pins_sqe *sqes;
        size_t sq_nbytes, cq_nbytes, sqes_nbytes;
        uint32_t *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
        struct pins_cqe *cqes;
    };

    static void *pins_ring_map(int fd, size_t nbytes, off_t what)
    {
        void *memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_POPULATE, fd, what);

        if (memory == MAP_FAILED)
            return NULL;
        /* A child has no business here, and its close() need not unmap anything. */
        madvise(memory, nbytes, MADV_DONTFORK);
        return memory;
    }

    static void pins_ring_close(struct pins_ring *ring, int inherited)
    {
        /* In a child no lock keeps its threads apart. */
        int fd = __atomic_exchange_n(&ring->fd, -1, __ATOMIC_ACQ_REL);

        if (fd < 0)
            return;
        if (!inherited) {
            /* First: a child's copy of the descriptor would keep the pins alive. */
            syscall(PINS_REGISTER, fd, PINS_UNREGISTER_BUFFERS, NULL, 0);
            if (ring->sq)
                munmap(ring->sq, ring->sq_nbytes);
            if (ring->cq)
                munmap(ring->cq, ring->cq_nbytes);
            if (ring->sqes)
                munmap(ring->sqes, ring->sqes_nbytes);
        }
        close(fd);
    }

    static int pins_ring_open(struct pins_ring *ring)
    {
        struct pins_params p = { 0 };
        int rc;

        memset(ring, 0, sizeof(*ring));
        ring->fd = (int)syscall(PINS_SETUP, 4, &p);
        if (ring->fd < 0)
            return -errno;
        ring->sq_nbytes = p.sq.array + p.sq_entries * sizeof(uint32_t);
        ring->cq_nbytes = p.cq.cqes + p.cq_entries * sizeof(struct pins_cqe);
        ring->sqes_nbytes = p.sq_entries * sizeof(struct pins_sqe);
        ring->sq = pins_ring_map(ring->fd, ring->sq_nbytes, PINS_SQ_RING);
        ring->cq = pins_ring_map(ring->fd, ring->cq_nbytes, PINS_CQ_RING);
        ring->sqes = pins_ring_map(ring->fd, ring->sqes_nbytes, PINS_SQES);
        if (!ring->sq || !ring->cq || !ring->sqes) {
            rc = -errno;
            pins_ring_close(ring, 0);
            return rc;
        }
        ring->sq_tail = (uint32_t *)(ring->sq + p.sq.tail);
        ring->sq_mask = (uint32_t *)(ring->sq + p.sq.mask);
        ring->sq_array = (uint32_t *)(ring->sq + p.sq.array);
        ring->cq_head = (uint32_t *)(ring->cq + p.cq.head);
        ring->cq_tail = (uint32_t *)(ring->cq + p.cq.tail);
        ring->cq_mask = (uint32_t *)(ring->cq + p.cq.mask);
        ring->cqes = (struct pins_cqe *)(ring->cq + p.cq.cqes);
        return 0;
    }

    static int pins_ring_pin(struct pins_ring *ring, const struct iovec *ranges, unsigned int count)
    {
        long rc = syscall(PINS_REGISTER, ring->fd, PINS_REGISTER_BUFFERS, ranges, count);

        return rc < 0 ? -errno : 0;
    }

    /* 0: it is on its way. After a failure the queue is as it was. */
    static int pins_ring_submit(struct pins_ring *ring, uint8_t opcode, int fd, uint64_t address,
                                uint32_t nbytes, uint64_t offset, uint16_t buffer)
    {
        uint32_t tail = *ring->sq_tail, slot = tail & *ring->sq_mask;
        struct pins_sqe *sqe = &ring->sqes[slot];
        long rc;

        memset(sqe, 0, sizeof(*sqe));
        sqe->opcode = opcode;
        sqe->fd = fd;
        sqe->address = address;
        sqe->nbytes = nbytes;
        sqe->offset = offset;
        sqe->buffer = buffer;
        sqe->user_data = ++ring->serial;
        ring->sq_array[slot] = slot;
        __atomic_store_n(ring->sq_tail, tail + 1, __ATOMIC_RELEASE);
        rc = syscall(PINS_ENTER, ring->fd, 1, 0, 0, NULL, 0);
        if (rc == 1)
            return 0;
        __atomic_store_n(ring->sq_tail, tail, __ATOMIC_RELEASE);
        return rc < 0 ? -errno : -EAGAIN;
    }

    /*
     * 0: the operation ended, *result is its return value. -EAGAIN, after 0.1 s: not yet.
     * A signal may have come just before, or to another thread, and ends no system call
     * here. Other completions, of a cancellation, are passed over.
     */
    static int pins_ring_wait(struct pins_ring *ring, uint64_t serial, int32_t *result)
    {
        struct pollfd ended = { .fd = ring->fd, .events = POLLIN };
        int rc;

        for (;;) {
            uint32_t head = *ring->cq_head;
            struct pins_cqe *cqe = &ring->cqes[head & *ring->cq_mask];

            if (__atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE) == head) {
                rc = poll(&ended, 1, 100);
                if (rc > 0)
                    continue;
                return rc < 0 ? -errno : -EAGAIN;
            }
            *result = cqe->result;
            rc = cqe->user_data == serial;
            __atomic_store_n(ring->cq_head, head + 1, __ATOMIC_RELEASE);
            if (rc)
                return 0;
        }
    }

    /*
     * Take back the one operation that is under way: no byte moves after this. The kernel
     * does not find it while it goes from one queue to another, so until it has ended it
     * is asked again.
     */
    static void pins_ring_cancel(struct pins_ring *ring, uint64_t serial)
    {
        int32_t result;
        int rc;

        do {
            (void)pins_ring_submit(ring, PINS_CANCEL, -1, serial, 0, 0, 0);
            do
                rc = pins_ring_wait(ring, serial, &result);
            while (rc == -EINTR);
        } while (rc == -EAGAIN);
    }
    """
    enum:
        PINS_READ_FIXED
        PINS_WRITE_FIXED

    struct iovec:
        void *iov_base
        size_t iov_len

    struct pins_ring:
        int fd
        uint64_t serial

    void pins_ring_close(pins_ring *ring, int inherited) nogil
    int pins_ring_open(pins_ring *ring) nogil
    int pins_ring_pin(pins_ring *ring, const iovec *ranges, unsigned int count) nogil
    int pins_ring_submit(
        pins_ring *ring, uint8_t opcode, int fd, uint64_t address, uint32_t nbytes,
        uint64_t offset, uint16_t buffer) nogil
    int pins_ring_wait(pins_ring *ring, uint64_t serial, int32_t *result) nogil
    void pins_ring_cancel(pins_ring *ring, uint64_t serial) nogil


ENTRY_NBYTES = 1 << 30  # the most the kernel takes for one fixed buffer


def _read_text(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _filtered_by_seccomp():
    for line in _read_text("/proc/thread-self/status").splitlines():
        if line.startswith("Seccomp:"):
            return line.split()[1] != "0"
    return False


def _why_no_ring(code):
    disabled = _read_text("/proc/sys/kernel/io_uring_disabled").strip()
    if code == errno.EPERM and disabled == "2":
        return "io_uring is switched off: /proc/sys/kernel/io_uring_disabled is 2"
    if code == errno.EPERM and disabled == "1" and os.geteuid() != 0:
        return ("io_uring is for privileged processes only: "
                "/proc/sys/kernel/io_uring_disabled is 1 (see io_uring_group beside it)")
    if code in (errno.EPERM, errno.EACCES, errno.ENOSYS) and _filtered_by_seccomp():
        return ("a seccomp filter forbids io_uring, as containers often do "
                "(for Docker: --security-opt seccomp=unconfined)")
    if code == errno.ENOSYS:
        return "this kernel has no io_uring (Linux 5.1 and CONFIG_IO_URING)"
    if code == errno.EPERM:
        return "io_uring is forbidden here, by a security module or the container"
    if code == errno.ENOMEM:
        return f"no memory for an io_uring; {_memlock()}"
    return f"io_uring_setup: {os.strerror(code)}"


def _memlock():
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if soft == resource.RLIM_INFINITY:
        return "RLIMIT_MEMLOCK is unlimited"
    return f"RLIMIT_MEMLOCK is {soft >> 10} KiB (ulimit -l; processes with CAP_IPC_LOCK have none)"


def _why_not_pinned(code, ranges):
    kib = (sum(size for _, size in ranges) + 1023) >> 10
    first = ", ".join(f"[{at:#x}, {at + size:#x})" for at, size in ranges[:3])
    first += ", ..." if len(ranges) > 3 else ""
    if code == errno.ENOMEM:
        return f"cannot pin {kib} KiB: {_memlock()}"
    if code == errno.EFAULT:
        return f"cannot pin {first}: not mapped throughout, not writable, or a file's pages"
    return f"cannot pin {kib} KiB, {first}: {os.strerror(code)}"


def _split(ranges):
    for address, nbytes in ranges:
        while nbytes > 0:
            size = min(nbytes, ENTRY_NBYTES)
            yield address, size
            address += size
            nbytes -= size


cdef class Pins:
    """Long-term pins on a buffer or on (address, nbytes) ranges, held until close().

    A buffer is held as well; ranges are the caller's to keep mapped. Raises OSError:
    EPERM or ENOSYS where io_uring is forbidden, ENOMEM beyond RLIMIT_MEMLOCK, EFAULT.
    Any thread may use it. In a forked child it is the parent's: using it raises
    InheritedError, close() lets go of the descriptor and leaves the parent's pins be.
    """

    cdef pins_ring ring
    cdef uint64_t generation
    cdef object lock
    cdef object held
    cdef bint begun
    cdef readonly tuple entries
    cdef readonly object nbytes

    def __cinit__(self):
        self.ring.fd = -1
        self.generation = rf_generation()
        self.entries = ()
        self.nbytes = 0
        self.lock = Lock()

    def __init__(self, memory):
        if was_set(&self.begun):
            raise RuntimeError("Pins are made once")
        if PyObject_CheckBuffer(memory):
            self.held = memoryview(memory)
            if not self.held.c_contiguous:
                raise BufferError("only C-contiguous memory can be pinned")
            memory = [(<uintptr_t>PyMemoryView_GET_BUFFER(self.held).buf, self.held.nbytes)]
        self.entries = tuple(_split(memory))
        self.nbytes = sum(size for _, size in self.entries)
        if not self.entries:
            raise ValueError("no memory to pin")
        self.pin()

    cdef int pin(self) except -1:
        cdef int rc
        cdef unsigned int count = len(self.entries)
        cdef iovec *ranges
        with nogil:
            rc = pins_ring_open(&self.ring)
        if rc < 0:
            raise OSError(-rc, _why_no_ring(-rc))
        ranges = <iovec *>calloc(count, sizeof(iovec))
        if ranges is NULL:
            pins_ring_close(&self.ring, 0)
            raise MemoryError
        for i, (address, size) in enumerate(self.entries):
            ranges[i].iov_base = <void *><uintptr_t>address
            ranges[i].iov_len = size
        with nogil:
            rc = pins_ring_pin(&self.ring, ranges, count)
            if rc < 0:
                pins_ring_close(&self.ring, 0)
        free(ranges)
        if rc < 0:
            raise OSError(-rc, _why_not_pinned(-rc, self.entries))
        return 0

    @property
    def inherited(self):
        """Whether a parent process made these pins."""
        return self.generation != rf_generation()

    @property
    def closed(self):
        return self.ring.fd < 0

    def fileno(self):
        """The io_uring's descriptor, -1 when closed."""
        return self.ring.fd

    def close(self):
        """Unpin, at once, even while a forked child lives. A second call does nothing."""
        cdef int inherited = self.generation != rf_generation()
        if inherited:  # the lock may have been taken at the fork by a thread that is gone
            with nogil:
                pins_ring_close(&self.ring, 1)
            return
        with self.lock:
            with nogil:
                pins_ring_close(&self.ring, 0)
            self.held = None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def __dealloc__(self):
        pins_ring_close(&self.ring, self.generation != rf_generation())

    def __repr__(self):
        state = "closed" if self.closed else "inherited" if self.inherited else "pinned"
        return f"<rdmafork._pins.Pins {state} nbytes={self.nbytes} entries={len(self.entries)}>"

    def read_fixed(self, int fd, address, nbytes, offset=0):
        """The device writes pinned memory: one IORING_OP_READ_FIXED from fd at offset.

        Returns the number of bytes moved. An offset of -1 is the file's own position.
        """
        return self.transfer(PINS_READ_FIXED, fd, address, nbytes, offset)

    def write_fixed(self, int fd, address, nbytes, offset=0):
        """The device reads pinned memory: one IORING_OP_WRITE_FIXED to fd at offset."""
        return self.transfer(PINS_WRITE_FIXED, fd, address, nbytes, offset)

    cdef object transfer(self, uint8_t opcode, int fd, address, nbytes, offset):
        if self.generation != rf_generation():
            raise InheritedError("these pins are the parent's pages: a child cannot use them")
        entry = self.entry_of(address, nbytes)
        with self.lock:
            return self.run(opcode, fd, address, nbytes, offset, entry)

    cdef object run(self, uint8_t opcode, int fd, address, nbytes, offset, entry):
        cdef uint64_t at = address, where = <uint64_t><int64_t>offset
        cdef uint32_t size = nbytes
        cdef uint16_t buffer = entry
        cdef int rc
        cdef int32_t result = 0
        cdef uint64_t serial
        if self.ring.fd < 0:
            raise ValueError("the pins are closed")
        with nogil:
            rc = pins_ring_submit(&self.ring, opcode, fd, at, size, where, buffer)
        if rc < 0:
            raise OSError(-rc, os.strerror(-rc))
        serial = self.ring.serial
        while True:
            with nogil:
                rc = pins_ring_wait(&self.ring, serial, &result)
            if rc == 0:
                break
            if rc not in (-errno.EINTR, -errno.EAGAIN):
                raise OSError(-rc, os.strerror(-rc))
            try:
                PyErr_CheckSignals()
            except BaseException:
                with nogil:
                    pins_ring_cancel(&self.ring, serial)
                raise
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return result

    cdef object entry_of(self, address, nbytes):
        for i, (start, size) in enumerate(self.entries):
            if start <= address and 0 <= nbytes and address + nbytes <= start + size:
                return i
        raise ValueError(
            f"[{address:#x}, {address + nbytes:#x}) crosses the boundary of a pinned entry "
            f"(entries end after {ENTRY_NBYTES >> 20} MiB)"
        )


def unavailable():
    """Why no page can be pinned here, in words for the user; None: pages can."""
    try:
        Pins(bytearray(1)).close()
    except OSError as error:
        return error.strerror
    return None


# --- What a fork costs ---------------------------------------------------------------------

cdef extern from *:
    """
    #include <fcntl.h>
    #include <stdlib.h>
    #include <sys/wait.h>
    #include <time.h>

    static int64_t clock_ns(void)
    {
        struct timespec now;

        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    }

    /* Bytes that only this process has, or -1. For a forked child: nothing is allocated. */
    static int64_t clock_private_bytes(void)
    {
        static const char *const keys[] = { "Private_Clean:", "Private_Dirty:",
                                            "Private_Hugetlb:" };
        char text[4096];
        int64_t kib = 0;
        ssize_t got;
        int fd = open("/proc/self/smaps_rollup", O_RDONLY | O_CLOEXEC);

        if (fd < 0)
            return -1;
        got = read(fd, text, sizeof(text) - 1);
        close(fd);
        if (got <= 0)
            return -1;
        text[got] = 0;
        for (unsigned int i = 0; i < 3; i++) {
            const char *found = strstr(text, keys[i]);

            if (found)
                kib += strtol(found + strlen(keys[i]), NULL, 10);
        }
        return kib << 10;
    }

    /*
     * fork() of libc, so that every handler runs. 0, -errno of fork(), or the wait status
     * of a child that died. @weigh: the child counts its memory, which is not timed.
     */
    static int clock_fork(int weigh, int64_t *ns, int64_t *private_bytes)
    {
        int fds[2], status = 0, rc = 0;
        int64_t start;
        pid_t child;

        *private_bytes = -1;
        if (pipe2(fds, O_CLOEXEC))
            return -errno;
        start = clock_ns();
        child = fork();
        if (child == 0) {
            int64_t bytes = weigh ? clock_private_bytes() : -1;

            _exit(weigh && write(fds[1], &bytes, sizeof(bytes)) != sizeof(bytes));
        }
        *ns = clock_ns() - start;
        if (child < 0)
            rc = -errno;
        close(fds[1]);
        if (child > 0) {
            if (weigh && read(fds[0], private_bytes, sizeof(*private_bytes)) < 0)
                *private_bytes = -1;
            while (waitpid(child, &status, 0) < 0 && errno == EINTR)
                ;
            rc = status;
        }
        close(fds[0]);
        return rc;
    }
    """
    int clock_fork(int weigh, int64_t *ns, int64_t *private_bytes) nogil


class ForkCost(NamedTuple):
    """What one fork() took: nanoseconds in the parent, and bytes only the child has.

    private_nbytes is None unless it was asked for, and without /proc.
    """

    ns: int
    private_nbytes: "int | None"


def fork_cost(memory=False):
    """Fork once, through libc, and wait for the child, which exits at once.

    With memory, the child first counts the bytes that no other process shares with it:
    what this fork made the kernel allocate. Raises OSError when fork() fails, and
    ChildProcessError when the child dies before it can exit.
    """
    cdef int64_t ns = 0, private_bytes = -1
    cdef int rc, weigh = memory
    with nogil:
        rc = clock_fork(weigh, &ns, &private_bytes)
    if rc < 0:
        raise OSError(-rc, f"fork: {os.strerror(-rc)}")
    if rc > 0:
        raise ChildProcessError(f"the forked child died, wait status {rc:#x}")
    return ForkCost(ns, None if private_bytes < 0 else private_bytes)
