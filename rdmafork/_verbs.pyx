# cython: language_level=3, binding=False, embedsignature=True, embedsignature.format=clinic
"""Devices through libibverbs: contexts, protection domains, memory regions.

Nothing of libibverbs is called in a forked child through an object of the parent's,
and no verbs call is made with the GIL held.

Closing: a context knows its protection domains and a domain its regions,
by address alone, and each holds its parent. So a parent that is closed closes its
children first, and one that is collected has none any more. A child is closed and
leaves its parent's list in its finalizer, where it may still be referred to anew, and
never in its __dealloc__, where it may not: an entry of the list is an object whose
reference take() gets, or one whose finalizer another thread is about to run. Calls
under way in other threads are counted, and the closing thread waits for them.

A region is registered with the engine before libibverbs sees it. Where the engine
is libibverbs' own fork support too, it would hear of the region a second time: the
calls that pin and unpin say that it is ours (rf_ranges_own()).
"""

cimport cython
from cpython.object cimport PyObject
from libc.errno cimport EBUSY, EIO, errno
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from posix.unistd cimport getpid, usleep

from rdmafork cimport *
from rdmafork._core cimport Registration, abandon, check_usable, clear_flag, hold, is_set
from rdmafork._core cimport let_go, policy_of, protect, set_flag, unprotect, was_set
from rdmafork._ibverbs cimport *

import os
from operator import index

from rdmafork._access import WRITES as ALL_WRITES
from rdmafork._access import Access, access_text, refusal
from rdmafork._errors import InheritedError

cdef extern from "errno.h":
    enum: EAGAIN, EDEADLK

cdef extern from *:
    """
    /*
     * take() is a new reference to an object that only its address is known of: 0, and
     * none, where its last one has gone already.
     */
    #ifndef Py_GIL_DISABLED
    #define make_takable(object)
    /* Its finalizer runs, and refers to it, before another thread does. */
    static inline int take(PyObject *object) { Py_INCREF(object); return 1; }
    #else
    #if PY_VERSION_HEX < 0x030E0000
    #ifndef Py_BUILD_CORE
    #define Py_BUILD_CORE 1
    #endif
    #include <internal/pycore_object.h>
    #define PyUnstable_EnableTryIncRef _PyObject_SetMaybeWeakref
    #define PyUnstable_TryIncRef _Py_TryIncref
    #endif
    #define make_takable PyUnstable_EnableTryIncRef
    #define take PyUnstable_TryIncRef
    #endif
    """
    void make_takable(PyObject *)
    bint take(PyObject *)

cdef extern from "Python.h":
    void drop "Py_DECREF"(PyObject *)
    unsigned long PyThread_get_thread_ident()


cdef unsigned int WRITE = Access.LOCAL_WRITE
cdef unsigned int UNPINNED = Access.ON_DEMAND
cdef unsigned int WRITES = ALL_WRITES
cdef unsigned int OPTIONAL = 0x3ff << 20  # ignored by devices that do not know it


# ---- Parents -------------------------------------------------------------------------

cdef struct Link:
    # In each child, so that to join its parent and to leave it takes no memory.
    Link *before
    Link *after
    PyObject *child     # NULL: it is in no list


@cython.internal
@cython.no_gc_clear  # Its children leave it as they are finalized.
cdef class Parent:
    """An object with children, used by several threads while one closes it."""
    cdef Link *children
    cdef Link link          # in its own parent's
    cdef uint32_t generation
    cdef int pid            # of the process that made it
    cdef int users          # verbs calls under way on it or a child
    cdef bint open

    def __reduce__(self):
        raise TypeError(f"a {type(self).__name__} cannot be pickled: it names a device's object")

    @property
    def closed(self):
        """close() has been called."""
        return not is_set(&self.open)

    @property
    def inherited(self):
        """It is the parent's, and this is a forked child."""
        return self.generation != rf_generation()

    def __enter__(self):
        check_open(self)
        return self

    def __exit__(self, kind, value, traceback, /):
        self.close()


cdef int check_open(Parent self) except -1:
    if not is_set(&self.open):
        raise ValueError(f"the {type(self).__name__} is closed")
    if self.generation != rf_generation():
        raise InheritedError(
            f"the {type(self).__name__} was opened before fork() in pid {self.pid}; open the "
            f"device afresh in this child")
    return 0


cdef int wait_for_users(Parent self) except -1:
    while True:
        with cython.critical_section(self):
            if not self.users:
                return 0
        with nogil:
            usleep(50)


cdef int enter(Parent self) except -1:
    check_open(self)
    with cython.critical_section(self):
        check_open(self)
        self.users += 1
    return 0


cdef void leave(Parent self) noexcept:
    with cython.critical_section(self):
        self.users -= 1


cdef int close_children(Parent self) except -1:
    """The parent is closing, so that no child is added meanwhile."""
    cdef Link *link
    cdef PyObject *child
    cdef bint taken, remains
    while True:
        wait_for_users(self)
        with cython.critical_section(self):
            if self.children == NULL:
                return 0
            link = self.children
            child = link.child
            taken = take(child)
        if taken:
            try:
                (<object>child).close()
                refuse_to_wait_for_oneself(self, <object>child)
            finally:
                drop(child)
        with cython.critical_section(self):
            remains = self.children == link
        # Another thread closes or finalizes it, and needs the GIL for that.
        if remains:
            with nogil:
                usleep(50)


cdef int refuse_to_wait_for_oneself(Parent self, object child) except -1:
    """An object that a domain's closing lets go of may have a finalizer that closes the context."""
    if isinstance(child, ProtectionDomain) and (
            (<ProtectionDomain>child).closing == PyThread_get_thread_ident()):
        raise OSError(
            EDEADLK, f"{self!r} cannot be closed: this thread is closing {child!r}; close "
            f"it when that is done")
    return 0


cdef void add_child(Parent self, object child, Link *link) noexcept:
    make_takable(<PyObject *>child)
    with cython.critical_section(self):
        link.child = <PyObject *>child
        link.before = NULL
        link.after = self.children
        if link.after != NULL:
            link.after.before = link
        self.children = link


cdef void drop_child(Parent self, Link *link) noexcept:
    # No lock in a child, where no thread closes an inherited parent's children.
    if self.generation != rf_generation():
        return
    with cython.critical_section(self):
        if link.child == NULL:
            return
        link.child = NULL
        if link.after != NULL:
            link.after.before = link.before
        if link.before != NULL:
            link.before.after = link.after
        else:
            self.children = link.after


cdef void enter_to_close(Parent self) noexcept:
    with cython.critical_section(self):
        self.users += 1


cdef str describe(object state, Parent self):
    return "closed" if not is_set(&self.open) else "inherited" if self.inherited else state


# ---- Contexts ------------------------------------------------------------------------

@cython.final
@cython.no_gc_clear
cdef class Context(Parent):
    """An open RDMA device. A context manager.

    device: a name, "mlx5_0" for example, or a Device. OSError: ENODEV, there is no such
    device (any more); ELIBACC, libibverbs is not installed; EAGAIN, other threads fork so
    often that it cannot be opened between two forks; others say what keeps this process
    from using the device, as Device.problem does.

    Closing it first closes the objects made from it. Any thread may use and close it; a
    close waits for registrations under way in other threads. In a forked child it raises
    InheritedError when it is used, and makes no verbs call. Its descriptors are /dev/null
    there before fork() returns. A child may open the device itself.

    Source: ibv_open_device(3).
    """
    cdef ibv_context *context
    cdef bint begun         # to be opened
    cdef bint has_queues    # or may have, of other code
    cdef readonly object device

    def __init__(self, device):
        if was_set(&self.begun):
            raise TypeError("a Context cannot be opened twice")
        from rdmafork.devices import find_device
        found = find_device(device)
        self.context = open_between_forks(os.fsencode(found.name), found.node_guid)
        self.device = found
        self.generation = rf_generation()
        self.pid = getpid()
        self.open = True

    def __dealloc__(self):
        if self.open and self.generation == rf_generation():
            close_context(self.context)

    def close(self):
        """Close the objects made from it, then the device. A second call does nothing.

        OSError, and it stays open: EBUSY as for ProtectionDomain.close(); EDEADLK if a
        finalizer calls it while this thread closes one of its domains.
        """
        if not clear_flag(&self.open) or self.inherited:
            return
        try:
            close_children(self)
        except BaseException:
            set_flag(&self.open, True)
            raise
        close_context(self.context)

    @property
    def address(self):
        """The address of its struct ibv_context, for other verbs code while this is open."""
        enter(self)
        try:
            expect_queues(self)
            return <uintptr_t>self.context
        finally:
            leave(self)

    def alloc_pd(self):
        """A new ProtectionDomain. Source: ibv_alloc_pd(3)."""
        cdef ProtectionDomain domain = ProtectionDomain.__new__(ProtectionDomain)
        cdef int error
        domain.context = self
        enter(self)
        try:
            add_child(self, domain, &domain.link)
            with nogil:
                domain.pd = verbs.alloc_pd(self.context)
                error = errno
            domain.generation = self.generation
            domain.pid = self.pid
            set_flag(&domain.open, domain.pd != NULL)
        finally:
            if not domain.open:
                drop_child(self, &domain.link)
            leave(self)
        if not domain.open:
            raise OSError(
                error, f"cannot allocate a protection domain at {self.device.name}: "
                f"{os.strerror(error)}")
        return domain

    def __repr__(self):
        return f"<rdmafork.Context {getattr(self.device, 'name', '-')}, {describe('open', self)}>"


cdef int expect_queues(Context self) except -1:
    """Other code may make queues, mapped from the device's file: a child gets none of them."""
    cdef int rc
    if is_set(&self.has_queues):
        return 0
    with nogil:
        rc = rf_descriptor_omit(self.context.cmd_fd, RF_MAPPED)
    set_flag(&self.has_queues, rc >= 0)
    if rc < 0:
        raise OSError(-rc, f"the queues of {self.device.name} cannot be kept from children: "
                      f"{os.strerror(-rc)}")
    return 0


cdef int close_context(ibv_context *context) except -1:
    with nogil:
        # A child made after this may keep the descriptors, of a context that has nothing.
        rf_descriptor_release(context.cmd_fd)
        rf_descriptor_release(context.async_fd)
        verbs.close_device(context)
    return 0


cdef ibv_context *open_between_forks(bytes name, object guid) except NULL:
    """A fork between open and omit would give a child the descriptors: then once more."""
    cdef ibv_context *context
    cdef uint64_t before
    cdef int rc
    for _ in range(2000):
        before = rf_forks()
        if not before:
            with nogil:
                usleep(500)
            continue
        context = open_listed(name, guid)
        with nogil:
            rc = rf_descriptor_omit(context.cmd_fd, 0)
            if rc >= 0:
                rc = rf_descriptor_omit(context.async_fd, 0)
        if rc >= 0 and rf_forks() == before:
            return context
        close_context(context)
        if rc < 0:
            raise OSError(
                -rc, f"the descriptors of {os.fsdecode(name)} cannot be kept from children: "
                f"{os.strerror(-rc)}")
    raise OSError(
        EAGAIN, f"{os.fsdecode(name)} could not be opened: other threads kept forking")


# ---- Protection domains --------------------------------------------------------------

@cython.final
@cython.no_gc_clear  # It is finalized before its context is deallocated.
cdef class ProtectionDomain(Parent):
    """A protection domain: regions and queue pairs work together only in one. A context manager.

    Context.alloc_pd() makes one; from_address() wraps one that other code made. Threads,
    forks and closing: as Context.

    Source: ibv_alloc_pd(3).
    """
    cdef readonly Context context   # None: other code's domain
    cdef object owner               # of that
    cdef unsigned long closing      # the thread that does it, or 0
    cdef ibv_pd *pd

    def __init__(self):
        raise TypeError("a ProtectionDomain is made by Context.alloc_pd() or from_address()")

    def __del__(self):
        try:
            self.close()
        except OSError:
            pass  # Other code still uses the domain, and no caller can get the error.
        finally:
            if self.context is not None:
                drop_child(self.context, &self.link)

    @staticmethod
    def from_address(address, *, owner=None):
        """Wrap the protection domain that other code made, at the address of its struct ibv_pd.

        Closing this object does not close that domain, which must live longer; this object
        keeps a reference to owner. rdmafork does not replace the descriptors of its context in
        children. Regions made here are like any others. ValueError: address 0.
        """
        cdef ProtectionDomain self = ProtectionDomain.__new__(ProtectionDomain)
        cdef uintptr_t pd = index(address)
        if not pd:
            raise ValueError("no protection domain lies at address 0")
        load()
        self.pd = <ibv_pd *>pd
        self.owner = owner
        self.generation = rf_generation()
        self.pid = getpid()
        self.open = True
        return self

    def close(self):
        """Close its regions, then the domain. A second call does nothing.

        OSError: EBUSY, other code still has objects in it, queue pairs for example. Its
        regions are closed then, the domain is not.
        """
        cdef int rc = 0
        if not clear_flag(&self.open) or self.inherited:
            return
        self.closing = PyThread_get_thread_ident()
        try:
            close_children(self)
            if self.context is not None:
                with nogil:
                    rc = verbs.dealloc_pd(self.pd)
            if rc and rc != EIO:
                raise OSError(rc, f"{self!r} cannot be closed: " + (
                    "queue pairs or other objects in it still exist"
                    if rc == EBUSY else os.strerror(rc)))
        except BaseException:
            set_flag(&self.open, True)
            raise
        finally:
            self.closing = 0
        if self.context is not None:
            drop_child(self.context, &self.link)
        self.owner = None

    @property
    def address(self):
        """The address of its struct ibv_pd, for other verbs code while this is open."""
        enter(self)
        try:
            if self.context is not None:
                expect_queues(self.context)
            return <uintptr_t>self.pd
        finally:
            leave(self)

    def register(self, buffer, access=None, on_fork="omit"):
        """Register a buffer with the device, as a MemoryRegion; fork() does not move its pages.

        buffer, on_fork: as rdmafork.register() takes them. access: Access flags;
        None is LOCAL_WRITE where the buffer is writable, else none.

        The pages are protected before the device pins them. ON_DEMAND regions pin
        nothing and are not protected. After any failure nothing is registered.

        BufferError: write access to a read-only buffer. OSError, which names range,
        access and likely cause: ENOMEM, often RLIMIT_MEMLOCK; EFAULT, not mapped
        or not writable; EINVAL, EOPNOTSUPP, access that the device does not support.

        Source: ibv_reg_mr(3).
        """
        cdef MemoryRegion region = MemoryRegion.__new__(MemoryRegion)
        cdef rf_policy policy = <rf_policy>policy_of(on_fork)
        cdef int error = 0
        check_open(self)
        region.domain = self
        hold(region, buffer)
        region.access_flags = access_of(region, access)
        if region.access_flags & UNPINNED:
            region.slot.generation = rf_generation()
            region.policy = policy
            region.open = True
        else:
            protect(region, RF_HELD | RF_FROM_DEVICE, policy)
        enter(self)
        try:
            add_child(self, region, &region.link)
            error = pin(region)
        finally:
            if region.mr == NULL:
                drop_child(self, &region.link)
            leave(self)
        if error:
            raise refusal(
                error, region.start, region.length, region.access_flags, place(self))
        return region

    def __repr__(self):
        return f"<rdmafork.ProtectionDomain {place(self)}, {describe('open', self)}>"


cdef str place(ProtectionDomain self):
    return "of another library" if self.context is None else f"at {self.context.device.name}"


cdef unsigned int access_of(Registration region, object access) except? 0xffffffff:
    cdef bint readonly = <PyObject *>region.view.obj != NULL and region.view.readonly
    if access is None:
        return 0 if readonly else WRITE
    flags = index(access)
    if not 0 <= flags <= 0x7fffffff:
        raise ValueError(f"access must be flags of rdmafork.Access, not {access!r}")
    if readonly and flags & WRITES:
        raise BufferError(
            f"cannot register this {type(region.view.obj).__name__} with access "
            f"{access_text(flags)}: it is read-only; use a writable buffer, or access=0 or "
            f"REMOTE_READ")
    return flags


cdef int pin(MemoryRegion region) except -1:
    """0, or the errno."""
    cdef unsigned int access = region.access_flags
    cdef ibv_pd *pd = region.domain.pd
    cdef int error
    with nogil:
        rf_ranges_own(True)
        if access & OPTIONAL and verbs.reg_mr_iova2 != NULL:
            region.mr = verbs.reg_mr_iova2(
                pd, <void *>region.start, region.length, region.start, access)
        else:
            region.mr = verbs.reg_mr(
                pd, <void *>region.start, region.length, <int>(access & ~OPTIONAL))
        error = errno
        rf_ranges_own(False)
    return 0 if region.mr != NULL else error or EIO


cdef int unpin(ibv_mr *mr) noexcept:
    """0, or the errno."""
    cdef int rc
    with nogil:
        rf_ranges_own(True)
        rc = verbs.dereg_mr(mr)
        rf_ranges_own(False)
    return rc


# ---- Memory regions ------------------------------------------------------------------

@cython.final
@cython.no_gc_clear  # It is finalized before its domain is deallocated.
cdef class MemoryRegion(Registration):
    """Memory that a device may use, and that fork() does not move, until close().

    A Registration; made by ProtectionDomain.register(). The device knows it by
    two keys: lkey in this process's work requests, rkey in those of remote processes.
    """
    cdef ProtectionDomain domain
    cdef Link link
    cdef ibv_mr *mr
    cdef unsigned int access_flags

    def __init__(self):
        raise TypeError("a MemoryRegion is made by ProtectionDomain.register()")

    def __del__(self):
        if self.domain is None:
            return
        try:
            if close_region(self):
                # The device may use it still: it stays registered, and the memory held.
                abandon(self)
        finally:
            drop_child(self.domain, &self.link)

    def close(self):
        """Deregister it, then end protection and drop the reference to the buffer.

        A second call does nothing. OSError: the device refuses (EBUSY: memory windows
        are bound to it); then it is registered as before.
        """
        cdef int rc = close_region(self)
        if rc:
            raise OSError(rc, f"{self!r} cannot be deregistered: " + (
                "memory windows are bound to it" if rc == EBUSY else os.strerror(rc)))

    @property
    def lkey(self):
        """The key by which this process's work requests name the region."""
        check_usable(self)
        with cython.critical_section(self):
            check_made(self)
            return self.mr.lkey

    @property
    def rkey(self):
        """The key by which remote reads, writes and atomics name the region."""
        check_usable(self)
        with cython.critical_section(self):
            check_made(self)
            return self.mr.rkey

    @property
    def handle(self):
        """The kernel's number for the region."""
        check_usable(self)
        with cython.critical_section(self):
            check_made(self)
            return self.mr.handle

    @property
    def access(self):
        """What the device may do with the region, as Access."""
        check_usable(self)
        return Access(self.access_flags)

    def __repr__(self):
        cdef uint32_t lkey, rkey
        try:
            lkey, rkey = self.lkey, self.rkey
        except InheritedError:
            state = "inherited"
        except ValueError:
            state = "closed"
        else:
            state = f"lkey 0x{lkey:x}, rkey 0x{rkey:x}, " + (
                "protected" if self.is_protected else "not protected")
        return f"<rdmafork.MemoryRegion 0x{self.start:x}, {self.length} bytes, {state}>"


cdef int check_made(MemoryRegion self) except -1:
    """The collector's lists show it to other threads before the device has made it."""
    check_usable(self)
    if self.mr == NULL:
        raise ValueError("the MemoryRegion has not been registered yet")
    return 0


cdef int close_region(MemoryRegion self) except? -1:
    """0, or the errno with which the device refuses: it is registered as before."""
    cdef int rc = 0
    if self.slot.generation != rf_generation():
        if clear_flag(&self.open):
            let_go(self, True)
        return 0
    with cython.critical_section(self):
        if not clear_flag(&self.open):
            return 0
    enter_to_close(self.domain)
    try:
        if self.mr != NULL:
            rc = unpin(self.mr)
        if rc and rc != EIO:
            set_flag(&self.open, True)
            return rc
        self.mr = NULL
        unprotect(self)
    finally:
        if self.mr == NULL:
            drop_child(self.domain, &self.link)
        leave(self.domain)
    let_go(self, False)
    return 0
