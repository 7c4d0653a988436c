# cython: language_level=3, freethreading_compatible=True
"""What a transfer library does: its blocks are registered when a transfer takes them."""

from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free
from posix.mman cimport MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap, munmap

from rdmafork cimport RF_HELD, RF_OMIT, rf_error, rf_handle, rf_register, rf_release

import os


cdef int check(int rc, const char *what) except -1:
    if rc < 0:
        raise OSError(-rc, f"{what.decode()}: {os.strerror(-rc)}")
    return rc


cdef class Pool:
    """count blocks of nbytes each.

    A block must be given back before close(). Not for several threads at once.
    """
    cdef char *memory
    cdef rf_handle *handles
    cdef size_t count, nbytes, taken

    def __cinit__(self, size_t count, size_t nbytes):
        self.count, self.nbytes = count, nbytes
        self.handles = <rf_handle *>calloc(count, sizeof(rf_handle))
        memory = mmap(NULL, count * nbytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
        if self.handles == NULL or memory == MAP_FAILED:
            raise MemoryError()
        self.memory = <char *>memory

    def __dealloc__(self):
        if self.memory != NULL:
            while self.taken:
                self.taken -= 1
                rf_release(self.handles[self.taken], 0)
            munmap(self.memory, self.count * self.nbytes)
        free(self.handles)

    def take(self):
        """The address of a block, which no child will have. IndexError when all are taken."""
        cdef rf_error error
        cdef int rc
        if self.taken == self.count:
            raise IndexError(f"all {self.count} blocks are taken")
        with nogil:
            rc = rf_register(self.memory + self.taken * self.nbytes, self.nbytes, RF_HELD,
                             RF_OMIT, &self.handles[self.taken], &error)
        check(rc, "rf_register")
        self.taken += 1
        return <uintptr_t>(self.memory + (self.taken - 1) * self.nbytes)

    def give_back(self):
        """The block that was taken last."""
        cdef int rc
        if not self.taken:
            raise IndexError("none is taken")
        with nogil:
            rc = rf_release(self.handles[self.taken - 1], 0)
        check(rc, "rf_release")
        self.taken -= 1
