# cython: language_level=3, binding=False, embedsignature=True, embedsignature.format=clinic
# cython: auto_pickle=False
"""The engine for Python: buffers in, registrations out.

binding=False makes plain built-in functions: a Python-like function costs its caller as
much again as the lock of the engine.

Locking: everything shared between threads is the engine's, in C, under its own
lock. That lock is never waited for with the GIL held: calls are made with
RF_NOWAIT first, and again without the GIL when they would wait or enter the
kernel. The state of one Registration is guarded by its critical section; that
ends where the thread waits, so nothing is read before a wait and used after it.
A child enters none of an inherited object: without the GIL its lock may have been
handed to a thread that the child does not have.
"""

cimport cython
from cpython.buffer cimport PyBUF_FULL_RO, PyBUF_SIMPLE, PyBuffer_IsContiguous, PyBuffer_Release
from cpython.buffer cimport PyObject_CheckBuffer, PyObject_GetBuffer
from cpython.exc cimport PyErr_Clear, PyErr_ExceptionMatches
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.errno cimport EAGAIN, EINVAL
from libc.stdint cimport UINT64_MAX, uintptr_t
from libc.string cimport memcpy, memset

from rdmafork cimport *

import os
import resource
import sys
import warnings
from mmap import mmap
from operator import index

# Their results are loaded with them: typing and enum take longer to import than all the rest.
from rdmafork._errors import InheritedError, SharedPageWarning, UnprotectedWarning

cdef extern from "stdlib.h":
    const char *secure_getenv(const char *name)

cdef extern from "errno.h":
    enum: ECHILD
    enum: EDEADLK

cdef extern from "Python.h":
    # Without Cython's exception check, which here would cost as much as a registration.
    int get_buffer "PyObject_GetBuffer"(object exporter, Py_buffer *view, int flags)

cdef extern from *:
    """
    static void forget_view(Py_buffer *view) { view->obj = NULL; }
    #ifdef Py_GIL_DISABLED
    #define HAS_LOCKS 1
    #else
    #define HAS_LOCKS 0
    #endif
    """
    void forget_view(Py_buffer *view)
    enum: HAS_LOCKS

cdef dict MODES = {"auto": RF_MODE_AUTO, "lazy": RF_MODE_LAZY, "eager": RF_MODE_EAGER}
cdef dict MODE_NAMES = {RF_MODE_LAZY: "lazy", RF_MODE_EAGER: "eager"}
cdef tuple POLICY_NAMES = ("omit", "wipe", "keep")
cdef tuple PROTECTION_NAMES = (None, "mark", "kernel", "pending", "shared")
cdef tuple HOW_NAMES = ("version", "netlink", "probe", "environment")
cdef tuple FATES = ("is not inherited", "was wiped", "is a copy")
cdef str OMIT = "omit"

cdef bint warned = False  # of registrations nothing protects
cdef str PACKAGE = __name__.partition(".")[0]
# Is each registration to remember its line? A set-uid program's user may not choose that.
cdef const char *wish_to_trace = secure_getenv("RDMAFORK_TRACE_REGISTRATIONS")
cdef bint traced = wish_to_trace != NULL and wish_to_trace == b"1"

if rf_abi() != RF_ABI:
    raise ImportError(
        f"another version of librdmafork.so is loaded in this process (ABI {rf_abi()}, this "
        f"package needs {RF_ABI}); is it in LD_PRELOAD? Preload {__name__.split('.')[0]}'s own: "
        f"rdmafork.get_library()")


@cython.final
@cython.internal
cdef class Borrowed:
    """A tensor, and the capsule that keeps its memory in its place."""
    cdef object tensor
    cdef object capsule

    def __init__(self, tensor, capsule):
        self.tensor = tensor
        self.capsule = capsule


@cython.no_gc_clear  # Clearing would drop the buffer without releasing it.
cdef class Registration:
    """Memory whose pages fork() does not move, from register() until close().

    It keeps a reference to its buffer: until it is closed, Python can neither free nor
    resize the memory. It is a context manager. The garbage collector closes it at the
    latest. Any thread may use and close it.

    In a forked child using it raises InheritedError; closing it there does nothing
    and makes no system call.
    """

    def __init__(self):
        raise TypeError("a Registration is made by register() or register_address()")

    def __del__(self):
        # Called before the collector clears any of the garbage that this is part of: a cleared
        # owner may free the memory (ctypes), or crash as its buffer is released (memoryview).
        if not self.open:
            return
        try:
            self.close()
        except OSError:
            # The reference that stays keeps the collector away from the memory, too.
            abandon(self)

    def __dealloc__(self):
        cdef int rc = release(self.slot) if self.open else 0
        # A closed one holds nothing; one that could not be registered does.
        if <PyObject *>self.view.obj != NULL or self.owner is not None:
            let_go(self, rc == -ECHILD)

    def __reduce__(self):
        raise TypeError("a Registration cannot be pickled: it names memory of this process")

    def close(self):
        """End the registration, and drop the reference to the buffer.

        When this returns, pages that no other registration touches are ordinary memory
        again. A second call does nothing. OSError: EDEADLK called by a signal handler
        inside rdmafork; the registration stays open.
        """
        if HAS_LOCKS and self.slot.generation != rf_generation():
            if clear_flag(&self.open):
                let_go(self, True)
            return
        with cython.critical_section(self):
            if self.open:
                let_go(self, unprotect(self) == -ECHILD)

    def __enter__(self):
        check_usable(self)
        return self

    def __exit__(self, kind, value, traceback, /):
        self.close()

    @property
    def obj(self):
        """The object that keeps the memory: the buffer, the tensor, the owner, or None."""
        check_usable(self)
        with cython.critical_section(self):
            check_usable(self)
            if <PyObject *>self.view.obj != NULL:
                return <object>self.view.obj
            if type(self.owner) is Borrowed:
                return (<Borrowed>self.owner).tensor
            return self.owner

    @property
    def address(self):
        """The address of the first byte."""
        check_usable(self)
        return self.start

    @property
    def nbytes(self):
        """How many bytes are registered."""
        check_usable(self)
        return self.length

    @property
    def on_fork(self):
        """What a child gets of the pages that the registration fills: "omit", "wipe" or "keep"."""
        check_usable(self)
        return POLICY_NAMES[self.policy]

    @property
    def protected(self):
        """False if the memory was registered before fork_init()."""
        check_usable(self)
        return self.is_protected

    @property
    def closed(self):
        """True once close() has been called."""
        return not is_set(&self.open)

    @property
    def inherited(self):
        """True in a forked child, if the parent made this registration."""
        return self.slot.generation != rf_generation()

    def __repr__(self):
        return f"<rdmafork.Registration 0x{self.start:x}, {self.length} bytes, {state_of(self)}>"


cdef str state_of(Registration self):
    if not is_set(&self.open):
        return "closed"
    if self.inherited:
        return "inherited"
    return "protected" if self.is_protected else "not protected"


cdef int abandon(Registration self) except -1:
    set_flag(&self.open, False)
    forget_view(&self.view)
    Py_INCREF(self.owner)
    self.owner = None
    return 0


cdef bint is_absent(Registration self):
    """May the allocator hand out pages again that this child does not have?

    Memory freed here goes back to malloc(), unless it is unmapped, as an mmap is.
    """
    if not self.is_protected or self.policy != RF_OMIT:
        return False
    held = <object>self.view.obj if <PyObject *>self.view.obj != NULL else self.owner
    # An owner is of any class: to ask for its base may fail, or lead nowhere for ever.
    try:
        for _ in range(16):
            if held is None or isinstance(held, mmap):
                return held is None
            held = held.obj if isinstance(held, memoryview) else getattr(held, "base", None)
    except Exception:
        pass
    return True


cdef int let_go(Registration self, bint inherited) except -1:
    cdef Py_buffer view
    cdef object _owner
    if inherited and is_absent(self):
        return abandon(self)
    # Forgotten before they are released: their own code may let other threads in.
    view = self.view
    _owner = self.owner
    set_flag(&self.open, False)
    forget_view(&self.view)
    self.owner = None
    if <PyObject *>view.obj != NULL:
        PyBuffer_Release(&view)
    return 0


cdef int check_usable(Registration self) except -1:
    if not is_set(&self.open):
        raise ValueError(f"the {type(self).__name__} is closed")
    if self.slot.generation != rf_generation() and not self.shared:
        raise InheritedError(
            f"the {type(self).__name__} of {self.length} bytes at 0x{self.start:x} belongs to the "
            f"parent process: in this child its memory "
            f"{FATES[self.policy if self.is_protected else RF_KEEP]}; register afresh here")
    return 0


cdef inline int release(rf_handle handle, unsigned int flags = 0) noexcept:
    cdef int rc = rf_release(handle, flags | RF_NOWAIT)
    if rc == -EAGAIN:
        with nogil:
            rc = rf_release(handle, flags)
    return rc


cdef int unprotect(Registration self) except? -1:
    cdef int rc = release(self.slot)
    if rc == -EDEADLK:
        raise failure(-EDEADLK, NULL)
    return rc


cdef int protect(Registration self, unsigned int flags, rf_policy policy) except -1:
    cdef rf_error error
    cdef int rc
    self.policy = policy
    rc = rf_register(
        <const void *>self.start, self.length, flags | RF_NOWAIT, policy, &self.slot, &error)
    if rc == -EAGAIN:
        with nogil:
            rc = rf_register(
                <const void *>self.start, self.length, flags, policy, &self.slot, &error)
    if rc < 0:
        raise failure(rc, &error)
    self.is_protected = rc == 1
    self.open = True
    if rc == 0 and not self.shared:  # fork() does not move shared memory
        warn_unprotected(self)
    elif error.cause == RF_CAUSE_SHARED_PAGE:
        warnings.warn(text_of(rc, &error), SharedPageWarning)
    if traced:
        note_line(self.slot)
    return 0


cdef int note_line(rf_handle handle) except -1:
    """Tell the engine which line of the program registers: the first outside this package."""
    frame = sys._getframe(0)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == PACKAGE:
        frame = frame.f_back
    if frame is None:
        return 0
    # The end of a long path says more than its beginning.
    cdef bytes where = os.fsencode(frame.f_code.co_filename)[-100:] + b":%d" % frame.f_lineno
    cdef const char *text = where
    with nogil:
        rf_registered_at(handle, text)
    return 0


cdef int warn_unprotected(Registration self) except -1:
    if was_set(&warned):
        return 0
    try:
        warnings.warn(
            "memory is registered before rdmafork.fork_init(), so nothing protects it from fork(); "
            "call fork_init() first, or set RDMAV_FORK_SAFE=1", UnprotectedWarning)
    except BaseException:
        # A warning that is an error leaves nothing registered, so fork_init() may still follow;
        # and the next registration is as unprotected.
        self.open = release(self.slot, RF_UNDO) == -EDEADLK
        clear_flag(&warned)
        raise
    return 0


cdef int policy_of(object on_fork) except -1:
    if on_fork is OMIT:
        return RF_OMIT
    if on_fork not in POLICY_NAMES:
        raise ValueError(text_of_value(RF_CAUSE_POLICY, on_fork))
    return POLICY_NAMES.index(on_fork)


cdef int take_strided(Registration self, object buffer) except -1:
    PyObject_GetBuffer(buffer, &self.view, PyBUF_FULL_RO)
    if not PyBuffer_IsContiguous(&self.view, b"A"):
        PyBuffer_Release(&self.view)
        raise BufferError(
            f"cannot register this {type(buffer).__name__}: it is not contiguous; register "
            f"the object it is a view of, or a contiguous copy")
    return 0


cdef int take_tensor(Registration self, object tensor) except -1:
    if not (hasattr(tensor, "__dlpack__") and hasattr(tensor, "__dlpack_device__")):
        raise TypeError(
            f"cannot register {type(tensor).__name__!r}: it has neither the buffer protocol "
            f"(bytearray, memoryview, mmap, numpy array) nor __dlpack__ (a CPU tensor)")
    from rdmafork._dlpack import borrow
    capsule, address, nbytes = borrow(tensor)
    self.owner = Borrowed(tensor, capsule)
    self.start = address
    self.length = nbytes
    return 0


cdef int hold(Registration self, object buffer) except -1:
    if get_buffer(buffer, &self.view, PyBUF_SIMPLE) < 0:
        # A class with __buffer__ may raise an error unrelated to its memory: Ctrl-C.
        if not (PyErr_ExceptionMatches(BufferError) or PyErr_ExceptionMatches(TypeError)
                or PyErr_ExceptionMatches(ValueError)):
            return -1
        PyErr_Clear()
        if not PyObject_CheckBuffer(buffer):
            return take_tensor(self, buffer)
        take_strided(self, buffer)
    self.start = <uintptr_t>self.view.buf
    self.length = <size_t>self.view.len
    return 0


def register(buffer, *, on_fork="omit"):
    """Register a buffer, so that fork() neither moves nor copies its pages.

    buffer: any contiguous object with the buffer protocol, read-only or writable,
    or a CPU tensor with ``__dlpack__``. It may be empty.

    on_fork: what a child gets of the pages that the registration fills. "omit":
    nothing, they are not inherited. "wipe": zeros. "keep": a copy, which the kernel makes,
    so fork() is slow. Where registrations overlap, omit wins over wipe, and wipe
    over keep. The child gets a copy of a page that no single registration fills,
    registered bytes included. Shared memory stays shared.

    In lazy mode this makes no system call: the next fork() marks the pages. In
    eager mode they are marked when this returns. May be called from any thread, and
    in fork handlers.

    TypeError: not memory of this process. BufferError: not contiguous. ValueError:
    no such on_fork; a buffer that is closed or released. OSError: the pages cannot
    be protected (eager mode); ENOTSUP "keep" of private memory where the kernel's
    copying cannot be trusted. After an error nothing has changed.

    Source: madvise(2), MADV_DONTFORK, MADV_WIPEONFORK; Linux mm/memory.c,
    copy_present_page().
    """
    cdef rf_policy policy = <rf_policy>policy_of(on_fork)
    cdef Registration self = Registration.__new__(Registration)
    hold(self, buffer)
    protect(self, RF_HELD | RF_FROM_REGISTER, policy)
    return self


def register_address(address, nbytes, *, on_fork="omit", owner=None):
    """Register nbytes of memory at an address.

    owner: an object that keeps the memory mapped while it lives; the registration
    keeps a reference to it. Without one the memory might be unmapped at any time, so
    its pages are marked when this returns, in lazy mode too.

    Raises as register() does; ValueError for a negative number, OverflowError
    when address + nbytes is beyond the address space.
    """
    cdef rf_policy policy = <rf_policy>policy_of(on_fork)
    address = index(address)
    nbytes = index(nbytes)
    if address < 0 or nbytes < 0:
        raise ValueError(f"address and nbytes must not be negative: {address}, {nbytes}")
    if address > UINT64_MAX or nbytes > UINT64_MAX:  # C has no such numbers
        raise OverflowError(
            f"address 0x{address:x} + {nbytes} bytes is beyond the address space")
    cdef Registration self = Registration.__new__(Registration)
    self.start = address
    self.length = nbytes
    self.owner = owner
    protect(self, RF_FROM_ADDRESS | (RF_HELD if owner is not None else 0), policy)
    return self


def _load_all():
    # A child waits for ever for a module that another thread was importing at the fork.
    try:
        import rdmafork._results
        import rdmafork.devices
        import rdmafork._dlpack
        import rdmafork._verbs
    except ImportError:
        pass  # A sandbox may forbid that code is mapped, here and in children.


def fork_init(mode="auto", *, intercept=False):
    """Start protecting registered memory, before the first registration.

    mode: when pages are marked, so that a child does not inherit them. "lazy": as a fork()
    begins; a registration makes no system call. "eager": at each registration. "auto":
    $RDMAFORK_MODE if set; else lazy where the kernel's copying of pinned pages can be
    trusted (Linux 5.19 and later; see kernel_info()), and eager elsewhere.

    intercept: protect what other libraries (pyverbs, UCX, NCCL) register through libibverbs,
    too. rdmafork then takes over the calls that each libibverbs in this process makes to its
    own fork support. What was registered before is not protected. A libibverbs that is loaded
    later is noticed at the next fork() or stats(), so load it first, or use "rdmafork exec".

    A second call with the same mode, or with "auto", does nothing. A forked child
    inherits the mode, and may choose another before it registers anything.

    ValueError: no such mode. OSError: EINVAL, something was registered before, even if it is
    closed by now, or rdmafork runs in another mode. ENOTSUP, lazy where the kernel's copying
    cannot be trusted. ENOTSUP with intercept, the calls of a libibverbs cannot be taken over;
    its own fork support stays in force, and rdmafork runs and intercepts the others. EEXIST, a
    second copy of rdmafork runs in this process. ENOMEM.

    Source: ibv_fork_init(3).
    """
    cdef rf_error error
    cdef rf_mode wish
    cdef int rc
    if mode not in MODES:
        raise ValueError(text_of_value(RF_CAUSE_UNKNOWN_MODE, mode))
    wish = MODES[mode]
    _load_all()
    with nogil:
        rc = rf_fork_init(wish, &error)
    if rc >= 0 and intercept:
        with nogil:
            rc = rf_intercept(&error)
    if rc < 0:
        raise failure(rc, &error)


def explain_faults(worker_id=None):
    """In a forked child, have a segmentation fault explained again.

    A child that touches memory which its parent registered dies by SIGSEGV, and one line
    on stderr says why. Every forked child does so without this call, until the program
    installs its own SIGSEGV handler there, as torch's DataLoader does in every worker. Call
    this after that. The program's handler runs after the line is written. A second call
    does nothing, and neither does a call in a process that inherited everything.

    worker_id: ignored; a DataLoader calls its worker_init_fn with one.

    OSError: EDEADLK, called by a signal handler inside rdmafork.
    """
    cdef int rc
    with nogil:
        rc = rf_explain_faults()
    if rc < 0:
        raise failure(rc, NULL)


def is_fork_initialized():
    """What protects registered memory from fork(), as a ForkStatus.

    ENABLED: rdmafork. UNNEEDED: the kernel copies pinned pages, which is slow. DISABLED: nothing.

    Source: ibv_is_fork_initialized(3).
    """
    from rdmafork._results import ForkStatus
    if rf_get_mode() != RF_MODE_NONE:
        return ForkStatus.ENABLED
    return ForkStatus.UNNEEDED if kernel_info().copy_on_fork else ForkStatus.DISABLED


def protected_ranges():
    """The pages that registrations touch and what protects them, by address.

    Each element is a ProtectedRange. The call takes time in proportion to the
    number of registrations; other threads that register or release wait for it.
    """
    from rdmafork._results import ProtectedRange
    cdef rf_range_info *out = NULL
    cdef size_t capacity = 64
    cdef ssize_t count
    while True:
        out = <rf_range_info *>PyMem_Malloc(capacity * sizeof(rf_range_info))
        if out == NULL:
            raise MemoryError
        try:
            with nogil:
                count = rf_list(out, capacity)
            if count < 0:
                raise failure(<int>count, NULL)
            if <size_t>count <= capacity:
                return [
                    ProtectedRange(
                        out[i].start, out[i].end, out[i].registrations,
                        POLICY_NAMES[out[i].policy], PROTECTION_NAMES[out[i].protection])
                    for i in range(count)
                ]
            capacity = <size_t>count + 64
        finally:
            PyMem_Free(out)


def stats():
    """The engine's counters, as Stats."""
    from rdmafork._results import Stats
    cdef rf_stats numbers
    cdef int rc
    with nogil:
        rc = rf_get_stats(&numbers)
    if rc < 0:
        raise failure(rc, NULL)
    return Stats(
        mode=MODE_NAMES.get(rf_get_mode()),
        registrations=numbers.registrations,
        pending=numbers.pending,
        ranges=numbers.ranges,
        marked_ranges=numbers.marked_ranges,
        marked_bytes=numbers.marked_bytes,
        vmas=numbers.vmas,
        vma_budget=numbers.vma_budget,
        unmarked_ranges=numbers.unmarked_ranges,
        unmarked_bytes=numbers.unmarked_bytes,
        still_marked_bytes=numbers.still_marked_bytes,
        madvise_calls=numbers.madvise_calls,
        query_calls=numbers.query_calls,
        forks=numbers.forks,
        forks_unmarked=numbers.forks_unmarked,
        engine_bytes=numbers.engine_bytes,
        ibv_ranges=numbers.ibv_ranges,
        ibv_calls=numbers.ibv_calls,
        ibv_unbalanced=numbers.ibv_unbalanced,
        gone_bytes=numbers.gone_bytes,
        ibv_libraries=libraries(),
    )


cdef object text_or_none(const char *text):
    return None if text == NULL else text.decode()


cdef tuple libraries():
    from rdmafork._results import InterceptedLibrary
    cdef rf_library found[16]  # there are no more
    cdef ssize_t count
    with nogil:
        count = rf_libraries(found, 16)
    if count < 0:
        raise failure(<int>count, NULL)
    return tuple([
        InterceptedLibrary(
            os.fsdecode(found[i].path) or sys.executable,
            os.fsdecode(found[i].user) or None,
            rf_library_how_name(found[i].how).decode(),
            text_or_none(found[i].why))
        for i in range(count)
    ])


def kernel_info():
    """What this kernel does at fork() and how that is known, as KernelInfo."""
    from rdmafork._results import KernelInfo
    cdef rf_kernel kernel
    with nogil:
        rf_kernel_info(&kernel)
    return KernelInfo(
        release=kernel.release.decode("ascii", "replace"),
        copy_on_fork=bool(kernel.copy_on_fork),
        copy_on_fork_from=HOW_NAMES[kernel.copy_how],
        copy_on_fork_trusted=bool(kernel.copy_trusted),
        copy_on_fork_trusted_from=HOW_NAMES[kernel.trust_how],
        page_size=kernel.page_size,
        huge_page_sizes=tuple([1 << shift for shift in kernel.huge_shifts[:8] if shift]),
        procmap_query=bool(kernel.procmap_query),
        max_map_count=kernel.max_map_count,
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK),
    )


cdef str text_of(int rc, rf_error *error):
    """The engine's sentence for a call's result."""
    cdef char text[RF_STRERROR_SIZE]
    return rf_strerror(rc, error, text, sizeof(text)).decode("utf-8", "replace")


cdef str text_of_value(rf_cause cause, object value):
    """The engine's sentence for a value that has no number in C."""
    cdef rf_error error
    cdef bytes shown = repr(value).encode("utf-8", "backslashreplace")[:sizeof(error.text) - 1]
    memset(&error, 0, sizeof(error))
    error.cause = cause
    memcpy(error.text, <const char *>shown, len(shown))
    return text_of(-EINVAL, &error)


cdef object failure(int rc, rf_error *error):
    """The exception for a result below zero: the cause, the values, the way out."""
    cdef str text = text_of(rc, error)
    if error != NULL and error.cause == RF_CAUSE_WRAP:
        return OverflowError(text)
    return OSError(-rc, text)
