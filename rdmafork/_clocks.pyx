# cython: language_level=3, binding=False, embedsignature=True, embedsignature.format=clinic
"""Loops in C that time a registration and its peers.

The demo and the benchmarks stand on this module; benchmarks/_in_c.pyx has what only these need.
Loops run without the GIL, so that threads can run them at once.
"""

import errno
import os
import statistics

from libc.errno cimport errno as c_errno
from libc.stdint cimport int64_t, uintptr_t
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from rdmafork cimport RF_HELD, RF_OMIT, rf_error, rf_handle, rf_register, rf_release


cdef extern from *:
    """
    #include <dlfcn.h>
    #include <errno.h>
    #include <sys/mman.h>
    #include <sys/syscall.h>
    #include <unistd.h>
    """
    ctypedef struct Dl_info:
        const char *dli_fname

    enum:
        RTLD_NOW
        SYS_getppid
        MADV_DONTFORK
        MADV_DOFORK

    void *dlopen(const char *name, int flags) nogil
    void *dlsym(void *library, const char *name) nogil
    int dladdr(void *address, Dl_info *info) nogil
    int madvise(void *start, size_t nbytes, int advice) nogil
    long syscall(long number) nogil


cdef int64_t now() noexcept nogil:
    cdef timespec time
    clock_gettime(CLOCK_MONOTONIC, &time)
    return <int64_t>time.tv_sec * 1000000000 + time.tv_nsec


cdef object per_loop(int64_t ns, long loops, int code):
    if code:
        raise OSError(code, os.strerror(code))
    return ns / loops


def null_call_ns(long loops):
    """Nanoseconds of one system call that does nothing."""
    cdef int64_t start
    cdef long _i
    with nogil:
        start = now()
        for _i in range(loops):
            syscall(SYS_getppid)
        start = now() - start
    return start / loops


def madvise_pair_ns(uintptr_t address, size_t nbytes, long loops):
    """Nanoseconds of one MADV_DONTFORK and one MADV_DOFORK on whole pages."""
    cdef int64_t start
    cdef long _i
    cdef int code = 0
    with nogil:
        start = now()
        for _i in range(loops):
            if (madvise(<void *>address, nbytes, MADV_DONTFORK)
                    or madvise(<void *>address, nbytes, MADV_DOFORK)):
                code = c_errno
                break
        start = now() - start
    return per_loop(start, loops, code)


def engine_pair_ns(uintptr_t address, size_t nbytes, long loops):
    """Nanoseconds of one rf_register() of held memory and its rf_release(), from C."""
    cdef int64_t start
    cdef long _i
    cdef int rc = 0
    cdef rf_handle handle
    cdef rf_error error
    with nogil:
        start = now()
        for _i in range(loops):
            rc = rf_register(<void *>address, nbytes, RF_HELD, RF_OMIT, &handle, &error)
            if rc >= 0:
                rc = rf_release(handle, 0)
            if rc < 0:
                break
        start = now() - start
    return per_loop(start, loops, -rc if rc < 0 else 0)


ctypedef int (*ibv_call)() noexcept nogil
ctypedef int (*ibv_range_call)(void *, size_t) noexcept nogil


cdef inline int ibv_errno(int rc) noexcept nogil:
    """Old versions return -1 and set errno."""
    return c_errno if rc < 0 else rc


cdef class Libibverbs:
    """libibverbs' own fork support, from the library the dynamic loader finds.

    Raises OSError (ENOENT, ENOSYS) where there is none. Its ibv_fork_init() reads
    RDMAV_HUGEPAGES_SAFE once a process: compare settings in fresh processes.
    """

    cdef ibv_call init_call, status_call
    cdef ibv_range_call dontfork, dofork
    cdef readonly object path

    def __cinit__(self):
        cdef Dl_info info
        cdef void *library
        with nogil:
            library = dlopen("libibverbs.so.1", RTLD_NOW)
        if library is NULL:
            raise OSError(errno.ENOENT, "libibverbs.so.1 is not installed")
        self.init_call = <ibv_call>dlsym(library, "ibv_fork_init")
        self.status_call = <ibv_call>dlsym(library, "ibv_is_fork_initialized")
        self.dontfork = <ibv_range_call>dlsym(library, "ibv_dontfork_range")
        self.dofork = <ibv_range_call>dlsym(library, "ibv_dofork_range")
        if self.init_call is NULL or self.dontfork is NULL or self.dofork is NULL:
            raise OSError(errno.ENOSYS, "libibverbs.so.1 has no ibv_dontfork_range to call")
        if dladdr(<void *>self.dontfork, &info):
            self.path = os.path.realpath(os.fsdecode(info.dli_fname))

    @property
    def version(self):
        """The rdma-core release, as in libibverbs.so.1.14.44.0, or None."""
        parts = os.path.basename(self.path or "").partition(".so.")[2].split(".")
        return int(parts[2]) if len(parts) >= 3 and parts[2].isdigit() else None

    @property
    def status(self):
        """ibv_is_fork_initialized(): 0 disabled, 1 enabled, 2 unneeded; None if too old."""
        return None if self.status_call is NULL else self.status_call()

    def fork_init(self):
        cdef int rc = self.init_call()
        if rc:
            raise OSError(rc, f"ibv_fork_init: {os.strerror(rc)}")

    def pair_ns(self, uintptr_t address, size_t nbytes, long loops):
        """Nanoseconds of one ibv_dontfork_range() and its ibv_dofork_range()."""
        cdef int64_t start
        cdef long _i
        cdef int rc = 0
        with nogil:
            start = now()
            for _i in range(loops):
                rc = ibv_errno(self.dontfork(<void *>address, nbytes)
                               or self.dofork(<void *>address, nbytes))
                if rc:
                    break
            start = now() - start
        return per_loop(start, loops, rc)


def medians(clocks, rounds=15, budget_ns=2_000_000):
    """The median of every clock over interleaved rounds: {name: ns}.

    clocks maps a name to a callable that takes a number of loops and returns ns a loop.
    Each round runs every clock for about budget_ns, so that all meet the same noise.
    """
    loops = {}
    for name, clock in clocks.items():
        clock(3)  # the first call pays for page faults and for splitting the VMA
        loops[name] = max(3, min(1_000_000, int(budget_ns / max(clock(10), 1))))
    seen = {name: [] for name in clocks}
    for _ in range(rounds):
        for name, clock in clocks.items():
            seen[name].append(clock(loops[name]))
    return {name: statistics.median(values) for name, values in seen.items()}
