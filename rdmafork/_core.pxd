# A registration, for the modules that make other kinds of it.

from libc.stdint cimport uintptr_t

from rdmafork cimport rf_error, rf_handle, rf_policy


cdef extern from *:
    """
    /* For fields written under a lock and read without it. */
    #define FLAG_IS_SET(flag) __atomic_load_n(flag, __ATOMIC_ACQUIRE)
    #define SET_FLAG(flag, value) __atomic_store_n(flag, value, __ATOMIC_RELEASE)
    #define CLEAR_FLAG(flag) __atomic_exchange_n(flag, 0, __ATOMIC_ACQ_REL)
    #define SET_ONCE(flag) __atomic_exchange_n(flag, 1, __ATOMIC_RELAXED)
    """
    bint is_set "FLAG_IS_SET"(bint *flag) nogil
    void set_flag "SET_FLAG"(bint *flag, bint value) nogil
    bint clear_flag "CLEAR_FLAG"(bint *flag) nogil  # was it set?
    bint was_set "SET_ONCE"(bint *flag) nogil       # it is now


cdef class Registration:
    cdef Py_buffer view      # .obj NULL: the memory is held by owner instead
    cdef object owner        # or None
    cdef rf_handle slot
    cdef uintptr_t start
    cdef size_t length
    cdef rf_policy policy
    cdef bint open
    cdef bint is_protected
    cdef bint shared         # children have the memory too, and may use it

# Hold buffer, and take start and length from it.
cdef int hold(Registration self, object buffer) except -1
cdef int let_go(Registration self, bint inherited) except -1
# Leave it registered and held for ever: a device may still write to it.
cdef int abandon(Registration self) except -1
# Register held memory with the engine, and give that back: -ECHILD if it is the parent's.
cdef int protect(Registration self, unsigned int flags, rf_policy policy) except -1
cdef int unprotect(Registration self) except? -1
# ValueError when it is closed, InheritedError in a child that does not share the memory.
cdef int check_usable(Registration self) except -1
# "protected", "closed" and so on, for repr().
cdef str state_of(Registration self)
# An rf_policy.
cdef int policy_of(object on_fork) except -1
# The exception for a call the engine refused.
cdef object failure(int rc, rf_error *error)
