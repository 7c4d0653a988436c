# cython: language_level=3, binding=False, embedsignature=True, embedsignature.format=clinic
"""Memory of its own, made for registration.

One reservation of address space: a guard, the pages, a guard.

    base        start                    start + whole pages     base + span
     | PROT_NONE |  nbytes ......... tail |  PROT_NONE            |

Guards are a page, and the rest that alignment left, which costs nothing but address
space. So nothing else shares the mapping in the middle, and marking it for fork()
splits none: three VMAs, of which neighbouring Buffers share the guards' (one more
Buffer beside another: two).

Shared pages are those of a memfd that cannot shrink: access to them never
faults, in any process.
"""

cimport cython
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES
from libc.errno cimport EAGAIN, EEXIST, EINVAL, ENOMEM, errno
from libc.stdint cimport uintptr_t
from posix.types cimport off_t
from posix.unistd cimport _SC_PAGESIZE, close, ftruncate, sysconf

from rdmafork cimport *
from rdmafork._core cimport Registration, check_usable, failure, is_set, policy_of, protect
from rdmafork._core cimport set_flag, state_of

import os
import resource
from operator import index

from rdmafork import _huge_pages
from rdmafork._core import kernel_info

cdef extern from "errno.h":
    enum: EDEADLK

cdef extern from "<sys/mman.h>" nogil:
    """
    #ifndef MAP_FIXED_NOREPLACE /* glibc 2.27 */
    #define MAP_FIXED_NOREPLACE 0x100000
    #endif
    #define HUGE_SHIFT 26 /* MAP_HUGE_SHIFT and MFD_HUGE_SHIFT, which not every libc has */
    """
    enum:
        HUGE_SHIFT
        MADV_HUGEPAGE
        MADV_NOHUGEPAGE
        MAP_ANONYMOUS
        MAP_FIXED_NOREPLACE
        MAP_HUGETLB
        MAP_PRIVATE
        MAP_SHARED
        PROT_NONE
        PROT_READ
        PROT_WRITE
    void *MAP_FAILED
    void *mmap(void *, size_t, int, int, int, long)
    int munmap(void *, size_t)
    int mprotect(void *, size_t, int)
    int madvise(void *, size_t, int)

cdef extern from "<sys/vfs.h>" nogil:
    """
    #include <fcntl.h>
    #include <sys/stat.h>

    #ifndef MFD_NOEXEC_SEAL /* Linux 6.3 */
    #define MFD_NOEXEC_SEAL 0x0008U
    #endif
    #ifndef MFD_HUGETLB /* glibc 2.27 */
    #define MFD_HUGETLB 0x0004U
    #endif
    #define HUGETLBFS 0x958458f6 /* HUGETLBFS_MAGIC of linux/magic.h */
    #define LASTING_SIZE (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

    /* The size of a memfd that cannot shrink, and of its pages; else 0. */
    static size_t lasting_size(int fd, size_t *page)
    {
        struct statfs system;
        struct stat file;
        int seals = fcntl(fd, F_GET_SEALS);

        if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &file) || fstatfs(fd, &system))
            return 0;
        if ((unsigned long)system.f_type == HUGETLBFS)
            *page = (size_t)system.f_bsize;
        return (size_t)file.st_size;
    }
    """
    enum:
        F_ADD_SEALS
        F_DUPFD_CLOEXEC
        LASTING_SIZE
        MFD_ALLOW_SEALING
        MFD_CLOEXEC
        MFD_HUGETLB
        MFD_NOEXEC_SEAL
    int fcntl(int, int, ...)
    int memfd_create(const char *, unsigned int)
    size_t lasting_size(int, size_t *)

cdef extern from *:
    """
    /* How many views there are, -1 when there may be no more. */
    static int begin_export(Py_ssize_t *exports)
    {
        Py_ssize_t old = __atomic_load_n(exports, __ATOMIC_RELAXED);

        do {
            if (old < 0)
                return 0;
        } while (!__atomic_compare_exchange_n(exports, &old, old + 1, 0, __ATOMIC_ACQUIRE,
                                              __ATOMIC_RELAXED));
        return 1;
    }

    static void end_export(Py_ssize_t *exports)
    {
        __atomic_sub_fetch(exports, 1, __ATOMIC_RELEASE);
    }

    /* 0: done. Else nothing has changed, and this is the errno. */
    static Py_ssize_t end_exports(Py_ssize_t *exports)
    {
        Py_ssize_t none = 0;

        __atomic_compare_exchange_n(exports, &none, -1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
        return none;
    }

    static void begin_exports(Py_ssize_t *exports)
    {
        __atomic_store_n(exports, 0, __ATOMIC_RELEASE);
    }
    """
    bint begin_export(Py_ssize_t *exports)
    void end_export(Py_ssize_t *exports)
    Py_ssize_t end_exports(Py_ssize_t *exports)
    void begin_exports(Py_ssize_t *exports)
    size_t SSIZE_MAX "PY_SSIZE_T_MAX"
    int ctz "__builtin_ctzll"(unsigned long long) nogil

cdef size_t PAGE = sysconf(_SC_PAGESIZE)
cdef size_t LARGE = 2 << 20  # a transparent huge page
cdef int ATTEMPTS = 100
cdef char *BYTES = b"B"  # as struct has it


@cython.final
cdef class Descriptor:
    """Of the memory that a shared Buffer is made of."""
    cdef int number

    def __cinit__(self, int number):
        self.number = number


@cython.final
@cython.no_gc_clear
cdef class Buffer(Registration):
    """Zeroed memory in pages of its own, registered from the start until close().

    It is a Registration, and a context manager.

    nbytes: the length of its views. The memory behind them takes whole pages, which
    nothing else shares, between guard pages that fault when touched.

    page_size: None means base pages; from 2 MiB on, aligned memory that asks for
    transparent huge pages (which take a tenth of the page faults or less). The base page
    size means base pages only. One of kernel_info().huge_page_sizes means huge pages of
    the kernel's pool.

    on_fork: what a child gets of all its pages, as in register().

    shared: children inherit the memory. They read and write the same pages, by views
    that they inherit or make of this Buffer. So do other processes with attach().
    on_fork does not apply.

    It has the buffer protocol, writable: memoryview(buffer), numpy.frombuffer(),
    torch.frombuffer(), socket.recv_into(). Registering any part of it again, with a
    device or with register(), needs no system call to protect it and no further
    mapping. Making one is a registration: before fork_init() it is not protected,
    and raises a warning once, unless it is shared: fork() does not move shared memory.

    Any thread may use and close it. If it is never closed, the memory is freed with
    the last view. In a forked child, unless it is shared, making views raises
    InheritedError and touching inherited views faults (or they read zeros, or a copy, as
    on_fork says). Closing or collecting it there does nothing. A child may make Buffers
    of its own.

    ValueError: nbytes below 1; a page size the kernel does not have; on_fork of shared
    memory. OverflowError: more than an address space. OSError: ENOMEM, not enough memory or
    huge pages; others as for register(). After any failure nothing is mapped or registered.

    Source: mmap(2), MAP_HUGETLB; madvise(2), MADV_HUGEPAGE; memfd_create(2).
    """
    cdef uintptr_t base     # of the reservation
    cdef size_t span        # 0: nothing is mapped
    cdef size_t page
    cdef Py_ssize_t exports
    cdef int fd             # of shared memory, or -1; 0 before __cinit__

    def __cinit__(self, nbytes, *, page_size=None, on_fork="omit", shared=False):
        cdef rf_policy policy = <rf_policy>policy_of(on_fork)
        cdef size_t length, size, alignment
        cdef int error, advice = 0
        cdef int attached = (<Descriptor>shared).number if type(shared) is Descriptor else -1
        self.fd = -1
        self.shared = bool(shared)
        if self.shared and policy != RF_OMIT:
            raise ValueError(
                f"on_fork={on_fork!r} is for private memory: children share a shared Buffer")
        self.page = page_size_of(page_size)
        length = length_of(nbytes, self.page)
        size = (length + self.page - 1) & -self.page
        alignment = self.page
        if self.page == PAGE and size >= LARGE:
            advice = MADV_NOHUGEPAGE
            if page_size is None:
                advice = MADV_HUGEPAGE
                alignment = LARGE
        # Mappings from here on are this process's to unmap.
        self.slot.generation = rf_generation()
        with nogil:
            if self.shared:
                error = open_file(self, length, size, attached)
                if not error:
                    error = map_into_hole(self, size, alignment, MAP_SHARED)
            elif self.page == PAGE:
                error = map_pages(self, size, alignment)
            else:
                error = map_into_hole(
                    self, size, alignment,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | ctz(self.page) << HUGE_SHIFT)
            # Refused by kernels without transparent huge pages: then base pages it is.
            if advice and not error:
                madvise(<void *>self.start, size, advice)
        if error:
            raise refusal(error, length, size, self.page)
        self.length = size
        protect(self, RF_HELD | RF_FROM_BUFFER, policy)
        self.length = length

    def __init__(self, nbytes, *, page_size=None, on_fork="omit", shared=False):
        """Made in __cinit__, which runs once."""

    @staticmethod
    def attach(fileno, /):
        """Make a Buffer of the shared memory behind a descriptor that fileno() returned.

        For a process that did not inherit the Buffer. The descriptor may be another
        process's, received by socket.recv_fds() or inherited by a program (pass_fds of
        subprocess); it stays the caller's. The memory lives until all its Buffers,
        and their descriptors, are closed, in every process. The Buffer is as long as the
        first one; with huge pages it is a whole number of pages long.

        ValueError: the descriptor does not belong to a shared Buffer. OSError as for
        making one; EBADF.

        Source: memfd_create(2), F_SEAL_SHRINK in fcntl(2).
        """
        cdef int fd = index(fileno)
        cdef size_t page = PAGE
        os.fstat(fd)
        cdef size_t size = lasting_size(fd, &page)
        if not size:
            raise ValueError(f"descriptor {fd} does not belong to a shared Buffer")
        return Buffer(
            size, page_size=None if page == PAGE else page, shared=Descriptor(fd))

    def __del__(self):
        """Views may be part of the same garbage. Its memory goes with the last of them."""

    def __dealloc__(self):
        if self.span and self.slot.generation == rf_generation():
            self.open = give_back(self) == -EDEADLK
        elif not self.span:
            close_file(self)

    def __reduce__(self):
        if self.shared:
            raise TypeError(
                "a Buffer cannot be pickled or copied: send its fileno() to the other process, "
                "which calls Buffer.attach()")
        raise TypeError(
            "a Buffer cannot be pickled or copied: it is memory of this process; pickle "
            "bytes(buffer), or share memory (multiprocessing.shared_memory) and register that")

    def __getbuffer__(self, Py_buffer *view, int flags):
        check_usable(self)
        if not begin_export(&self.exports):
            raise ValueError("the Buffer is closed")
        view.obj = self
        view.buf = <void *>self.start
        view.len = <Py_ssize_t>self.length
        view.itemsize = 1
        view.readonly = 0
        view.ndim = 1
        view.format = BYTES if flags & PyBUF_FORMAT else NULL
        view.shape = &view.len if flags & PyBUF_ND else NULL
        view.strides = &view.itemsize if flags & PyBUF_STRIDES == PyBUF_STRIDES else NULL
        view.suboffsets = NULL
        view.internal = NULL

    def __releasebuffer__(self, Py_buffer *view):
        end_export(&self.exports)

    def __len__(self):
        check_usable(self)
        return <Py_ssize_t>self.length

    def close(self):
        """End the registration and free the memory. A second call does nothing.

        BufferError: views of it exist (memoryviews, arrays, registrations); then
        nothing has changed. OSError: EDEADLK as for Registration.close().
        """
        cdef Py_ssize_t exports
        cdef int rc
        if not is_set(&self.open):
            return
        if self.slot.generation != rf_generation():
            set_flag(&self.open, False)
            return
        # No new views from here on.
        exports = end_exports(&self.exports)
        if exports > 0:
            raise BufferError(
                f"cannot close {self!r} while views of it are exported, {exports} now; "
                f"delete or close the arrays, memoryviews and registrations made of it")
        if exports < 0:
            return  # another thread closes it
        set_flag(&self.open, False)
        rc = give_back(self)
        if rc == -EDEADLK:
            begin_exports(&self.exports)
            set_flag(&self.open, True)
            raise failure(-EDEADLK, NULL)
        if rc:
            raise OSError(-rc, f"{self!r} stays mapped: {os.strerror(-rc)}; is it sealed?")

    @property
    def obj(self):
        """The Buffer itself: no other object holds the memory."""
        check_usable(self)
        return self

    @property
    def page_size(self):
        """The size of the pages it was mapped with; transparent huge pages do not count."""
        check_usable(self)
        return self.page

    def fileno(self):
        """The descriptor of the shared memory, for attach() in another process.

        It belongs to the Buffer and is closed with it. A new program inherits it only on request.

        ValueError: the Buffer is not shared.
        """
        check_usable(self)
        if not self.shared:
            raise ValueError("this Buffer is not shared: it has no descriptor")
        return self.fd

    def __repr__(self):
        return (
            f"<rdmafork.Buffer 0x{self.start:x}, {self.length} bytes in pages of "
            f"{readable(self.page)}, {'shared, ' if self.shared else ''}{state_of(self)}>")


cdef int give_back(Buffer self) noexcept:
    """The registration, then the memory. -EDEADLK: neither; -errno of munmap()."""
    cdef int rc
    with nogil:
        # Not registered, where making it has failed: -ESTALE.
        rc = rf_release(self.slot, 0)
        if rc != -EDEADLK:
            rc = -errno if munmap(<void *>self.base, self.span) else 0
            self.span = 0
            close_file(self)
    return rc


cdef void close_file(Buffer self) noexcept nogil:
    if self.shared and self.fd >= 0:
        close(self.fd)
    self.fd = -1


# ---- Mapping: 0 or the errno; __dealloc__ then unmaps the reservation --------------------

cdef int reserve(Buffer self, size_t size, size_t alignment) noexcept nogil:
    cdef size_t span = size + alignment + PAGE
    cdef void *base = mmap(NULL, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    if base == MAP_FAILED:
        return errno
    self.base = <uintptr_t>base
    self.span = span
    self.start = (self.base + PAGE + alignment - 1) & -alignment
    return 0


cdef int map_pages(Buffer self, size_t size, size_t alignment) noexcept nogil:
    cdef int error = reserve(self, size, alignment)
    if error:
        return error
    if mprotect(<void *>self.start, size, PROT_READ | PROT_WRITE):
        return errno
    return 0


cdef int map_into_hole(Buffer self, size_t size, size_t alignment, int flags) noexcept nogil:
    """Into a hole made for it in the reservation, so that no other mapping is replaced.

    Mapped over it, a refusal may leave it as it was or leave a hole, and into that
    another thread maps: then no caller would know which to unmap.
    """
    cdef uintptr_t end
    cdef void *mapped
    cdef int error
    for _ in range(ATTEMPTS):
        error = reserve(self, size, alignment)
        if error:
            return error
        if munmap(<void *>self.start, size):
            return errno
        mapped = mmap(<void *>self.start, size, PROT_READ | PROT_WRITE,
                      flags | MAP_FIXED_NOREPLACE, self.fd, 0)
        if mapped != MAP_FAILED:
            return 0
        error = errno
        end = self.start + size
        munmap(<void *>self.base, self.start - self.base)
        munmap(<void *>end, self.base + self.span - end)
        self.span = 0
        if error != EEXIST:
            return error
    return EAGAIN


cdef int open_file(Buffer self, size_t nbytes, size_t size, int attached) noexcept nogil:
    """self.fd, of memory that keeps its size: a process that maps it must not fault."""
    cdef unsigned int flags = MFD_CLOEXEC | MFD_ALLOW_SEALING
    if attached >= 0:
        self.fd = fcntl(attached, F_DUPFD_CLOEXEC, 3)
        return errno if self.fd < 0 else 0
    if self.page != PAGE:
        nbytes = size  # A file of huge pages has whole ones.
        flags |= MFD_HUGETLB | <unsigned int>ctz(self.page) << HUGE_SHIFT
    self.fd = memfd_create(b"rdmafork", flags | MFD_NOEXEC_SEAL)
    if self.fd < 0 and errno == EINVAL:
        self.fd = memfd_create(b"rdmafork", flags)
    if self.fd < 0 or ftruncate(self.fd, <off_t>nbytes):
        return errno
    return errno if fcntl(self.fd, F_ADD_SEALS, LASTING_SIZE) else 0


# ---- Arguments, and the errors for them --------------------------------------------------

cdef size_t page_size_of(object page_size) except 0:
    if page_size is None:
        return PAGE
    cdef rf_kernel kernel
    page_size = index(page_size)
    with nogil:
        rf_kernel_info(&kernel)
    sizes = [1 << shift for shift in kernel.huge_shifts[:8] if shift]
    if page_size != PAGE and page_size not in sizes:
        raise ValueError(
            f"this kernel has no pages of {page_size} bytes; page_size is None or one of "
            f"{', '.join(map(str, [PAGE, *sizes]))}")
    return page_size


cdef Py_ssize_t length_of(object nbytes, size_t page) except 0:
    nbytes = index(nbytes)
    if nbytes <= 0:
        raise ValueError(f"a Buffer has at least one byte, not {nbytes}")
    # Rounding up, and adding guards, must not wrap either.
    if nbytes > SSIZE_MAX - 4 * (page + LARGE):
        raise OverflowError(f"a Buffer of {nbytes} bytes is larger than the address space")
    return nbytes


cdef str readable(size_t nbytes):
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if not nbytes & ((<size_t>1 << shift) - 1):
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} bytes"


cdef object refusal(int error, object nbytes, size_t size, size_t page):
    """The OSError for memory that could not be mapped: how much, the likely cause, the cure."""
    what = f"cannot make a Buffer of {nbytes} bytes"
    if page != PAGE:
        what += f" in pages of {readable(page)}"
    if error != ENOMEM:
        return OSError(error, f"{what}: {os.strerror(error)}")
    cause = None if page == PAGE else pool_cause(size, page)
    return OSError(error, f"{what}: {os.strerror(error)}; {cause or memory_cause()}")


def pool_cause(size, page):
    """The free pages that the pool lacks for this size, or None."""
    folder = _huge_pages.path(page)
    try:
        total, free = _huge_pages.pool(page)
        with open("/proc/meminfo") as file:
            default = f"Hugepagesize: {page >> 10} kB" in [" ".join(s.split()) for s in file]
    except (OSError, ValueError):
        return None
    needed = size // page
    if free >= needed:
        return None
    knob = "/proc/sys/vm/nr_hugepages" if default else f"{folder}/nr_hugepages"
    return f"{needed} needed, {free} free of the {total} in the pool; raise {knob}"


def memory_cause():
    for name in ("RLIMIT_AS", "RLIMIT_DATA"):
        limit = resource.getrlimit(getattr(resource, name))[0]
        if limit != resource.RLIM_INFINITY:
            return f"{name} allows this process {limit} bytes"
    return (
        f"the kernel does not grant one process so much (vm.overcommit_memory), or the process "
        f"has vm.max_map_count ({kernel_info().max_map_count}) mappings already")
