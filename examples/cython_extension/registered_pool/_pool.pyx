# cython: language_level=3, freethreading_compatible=True
"""A pool as in a transfer library: its blocks are registered when a transfer takes them."""

from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free
from posix.mman cimport MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap, munmap

from rdmafork cimport (
    RF_HELD, RF_OMIT, RF_STRERROR_SIZE, rf_error, rf_handle, rf_register, rf_release, rf_strerror
)


cdef int check(int rc, const rf_error *error) except -1:
    cdef char text[RF_STRERROR_SIZE]
    if rc < 0:
        raise OSError(-rc, rf_strerror(rc, error, text, sizeof(text)).decode())
    return rc


cdef class Pool:
    """count blocks of nbytes each.

    The pool releases the blocks that are still taken when it is freed. Only one thread at a time
    may use it.
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
        """The address of a block, which children do not inherit. IndexError when all are taken."""
        cdef rf_error error
        cdef int rc
        if self.taken == self.count:
            raise IndexError(f"all {self.count} blocks are taken")
        with nogil:
            rc = rf_register(self.memory + self.taken * self.nbytes, self.nbytes, RF_HELD,
                             RF_OMIT, &self.handles[self.taken], &error)
        check(rc, &error)
        self.taken += 1
        return <uintptr_t>(self.memory + (self.taken - 1) * self.nbytes)

    def give_back(self):
        """Give back the block that was taken last. IndexError when none is taken."""
        cdef int rc
        if not self.taken:
            raise IndexError("none is taken")
        with nogil:
            rc = rf_release(self.handles[self.taken - 1], 0)
        check(rc, NULL)
        self.taken -= 1
