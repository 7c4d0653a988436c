# cython: language_level=3, binding=False, embedsignature=True, embedsignature.format=clinic
"""Loops that benchmarks time and Python would slow down, beside those of rdmafork/_clocks.pyx."""

import os

from libc.stdint cimport int64_t, uintptr_t

from rdmafork cimport RF_HELD, RF_OMIT, rf_error, rf_handle, rf_register


cdef extern from *:
    """
    #include <errno.h>
    #include <stdint.h>
    #include <sys/mman.h>
    #include <sys/wait.h>
    #include <time.h>
    #include <unistd.h>

    static int64_t fork_now(void)
    {
        struct timespec time;

        clock_gettime(CLOCK_MONOTONIC, &time);
        return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
    }

    /*
     * fork() of libc. Until it has returned here, and in the child, which ends at once.
     * 0, -errno, or the wait status of a child that died.
     */
    static int clock_fork_both(int64_t *here, int64_t *there)
    {
        int64_t start, *shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE,
                                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        int status = 0, rc = 0;
        pid_t child;

        if (shared == MAP_FAILED)
            return -errno;
        start = fork_now();
        child = fork();
        if (child == 0) {
            *shared = fork_now();
            _exit(0);
        }
        *here = fork_now() - start;
        if (child < 0)
            rc = -errno;
        while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR)
            ;
        *there = *shared - start;
        munmap(shared, sizeof(*shared));
        return rc < 0 ? rc : status;
    }
    """
    int clock_fork_both(int64_t *here, int64_t *there) nogil


def fork_ns():
    """Fork once, through libc: nanoseconds until fork() has returned in the parent, in the child.

    Raises OSError when fork() fails, and ChildProcessError when the child dies.
    """
    cdef int64_t here = 0, there = 0
    cdef int rc
    with nogil:
        rc = clock_fork_both(&here, &there)
    if rc < 0:
        raise OSError(-rc, f"fork: {os.strerror(-rc)}")
    if rc > 0:
        raise ChildProcessError(f"the forked child died, wait status {rc:#x}")
    return here, there


def engine_hold(uintptr_t address, size_t nbytes, long count=1, size_t stride=0, bint held=True):
    """rf_register() of count ranges, of held memory or not: (how many, errno of the next or 0)."""
    cdef long i = 0
    cdef unsigned int flags = RF_HELD if held else 0
    cdef int rc = 0
    cdef rf_handle handle
    cdef rf_error error
    with nogil:
        while i < count and rc >= 0:
            rc = rf_register(
                <void *>(address + i * stride), nbytes, flags, RF_OMIT, &handle, &error)
            i += rc >= 0
    return i, -rc if rc < 0 else 0
