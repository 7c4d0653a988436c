# cython: language_level=3, binding=False
"""libibverbs.so.1, opened when a device is first used, and the devices it lists.

The functions used are in _ibverbs.pxd. No call of it is made with the GIL held.
"""

cimport cython
from libc.errno cimport ENODEV, ERANGE, errno
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport strcmp
from posix.dlfcn cimport RTLD_LOCAL, RTLD_NOW, dlerror, dlopen, dlsym

from rdmafork cimport rf_generation
from rdmafork._core cimport is_set, set_flag

import os

cdef extern from "errno.h":
    enum: EDEADLK, ELIBACC

cdef extern from "endian.h" nogil:
    uint64_t be64toh(uint64_t)

cdef extern from *:
    """
    /* How many threads list devices, and above it in which process. */
    static uint64_t listing;

    static int begin_listing(uint32_t process)
    {
        uint64_t old = __atomic_load_n(&listing, __ATOMIC_RELAXED), now;

        do {
            now = (uint64_t)process << 32 | 1;
            if (old >> 32 == process)
                now = old + 1;
            else if ((uint32_t)old)
                return 0;
        } while (!__atomic_compare_exchange_n(&listing, &old, now, 0, __ATOMIC_ACQ_REL,
                                              __ATOMIC_RELAXED));
        return 1;
    }

    static void end_listing(void) { __atomic_sub_fetch(&listing, 1, __ATOMIC_ACQ_REL); }
    """
    # libibverbs' list of devices has a lock, which a child inherits locked or unlocked.
    bint begin_listing(uint32_t process)
    void end_listing()


cdef bint loaded = False
cdef object loading = object()


cdef void *symbol(void *library, const char *name) except NULL:
    cdef void *address = dlsym(library, name)
    if address == NULL:
        raise OSError(ELIBACC, f"libibverbs.so.1 has no {name.decode()}; it is not rdma-core's")
    return address


cdef int load() except -1:
    global verbs
    cdef void *library
    cdef ibverbs found
    if is_set(&loaded):
        return 0
    with nogil:
        library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL)
    if library == NULL:
        reason = dlerror()
        raise OSError(
            ELIBACC,
            f"libibverbs.so.1 cannot be loaded; install libibverbs1 and ibverbs-providers (Debian, "
            f"Ubuntu) or libibverbs (Fedora, RHEL): {reason.decode('utf-8', 'replace')}")
    found.get_device_list = <ibv_device **(*)(int *) noexcept nogil>symbol(
        library, "ibv_get_device_list")
    found.free_device_list = <void (*)(ibv_device **) noexcept nogil>symbol(
        library, "ibv_free_device_list")
    found.get_device_name = <const char *(*)(ibv_device *) noexcept nogil>symbol(
        library, "ibv_get_device_name")
    found.get_device_guid = <uint64_t (*)(ibv_device *) noexcept nogil>symbol(
        library, "ibv_get_device_guid")
    found.open_device = <ibv_context *(*)(ibv_device *) noexcept nogil>symbol(
        library, "ibv_open_device")
    found.close_device = <int (*)(ibv_context *) noexcept nogil>symbol(
        library, "ibv_close_device")
    found.query_port = <int (*)(ibv_context *, uint8_t, ibv_port_attr *) noexcept nogil>symbol(
        library, "ibv_query_port")
    found.alloc_pd = <ibv_pd *(*)(ibv_context *) noexcept nogil>symbol(library, "ibv_alloc_pd")
    found.dealloc_pd = <int (*)(ibv_pd *) noexcept nogil>symbol(library, "ibv_dealloc_pd")
    found.reg_mr = <ibv_mr *(*)(ibv_pd *, void *, size_t, int) noexcept nogil>symbol(
        library, "ibv_reg_mr")
    found.reg_mr_iova2 = (
        <ibv_mr *(*)(ibv_pd *, void *, size_t, uint64_t, unsigned int) noexcept nogil>dlsym(
            library, "ibv_reg_mr_iova2"))
    found.dereg_mr = <int (*)(ibv_mr *) noexcept nogil>symbol(library, "ibv_dereg_mr")
    with cython.critical_section(loading):
        if not loaded:
            verbs = found
            set_flag(&loaded, True)
    return 0


cdef ibv_device **list_devices(int *count) except NULL:
    """To be freed."""
    cdef ibv_device **devices
    cdef int error
    load()
    if not begin_listing(rf_generation()):
        raise OSError(
            EDEADLK,
            "this process was forked while another thread of its parent listed devices, so "
            "libibverbs' lock can never be released in this child; exec(), or fork at another "
            "time")
    with nogil:
        devices = verbs.get_device_list(count)
        error = errno
    end_listing()
    if devices == NULL:
        raise OSError(error, f"libibverbs cannot list devices: {os.strerror(error)}")
    return devices


cdef free_list(ibv_device **devices):
    with nogil:
        verbs.free_device_list(devices)


def driven_devices():
    """{name: node GUID} of the devices libibverbs has a driver for."""
    cdef int count
    cdef ibv_device **devices = list_devices(&count)
    try:
        found = {}
        for i in range(count):
            name = os.fsdecode(verbs.get_device_name(devices[i]))
            found[name] = be64toh(verbs.get_device_guid(devices[i]))
        return found
    finally:
        free_list(devices)


cdef ibv_context *open_listed(bytes name, object guid) except NULL:
    """The device of that name, and of that node GUID unless it is None."""
    cdef int count, i, error = ENODEV
    cdef ibv_device **devices = list_devices(&count)
    cdef ibv_context *context = NULL
    try:
        for i in range(count):
            if strcmp(verbs.get_device_name(devices[i]), name) == 0 and (
                    guid is None or guid == be64toh(verbs.get_device_guid(devices[i]))):
                with nogil:
                    context = verbs.open_device(devices[i])
                    error = errno
                break
    finally:
        free_list(devices)
    if context == NULL:
        raise OSError(error, f"cannot open RDMA device {os.fsdecode(name)}: {os.strerror(error)}")
    return context


def port_mtu(device, number):
    """(active, largest) MTU in bytes of a port; the device is opened for the answer."""
    cdef ibv_context *context
    cdef ibv_port_attr attributes
    cdef uint8_t port
    cdef int error
    # Since 5.13 the kernel has more, for adapters that switch for virtual functions.
    if number > 255:
        raise OSError(
            ERANGE, f"port {number} of {device.name}: libibverbs accepts port numbers up to 255")
    port = number
    context = open_listed(os.fsencode(device.name), device.node_guid)
    with nogil:
        error = verbs.query_port(context, port, &attributes)
        verbs.close_device(context)
    if error:
        raise OSError(error, f"port {number} of {device.name}: {os.strerror(error)}")
    return mtu_bytes(attributes.active_mtu), mtu_bytes(attributes.max_mtu)


cdef object mtu_bytes(int mtu):
    if not 1 <= mtu <= 5:
        raise OSError(ERANGE, f"enum ibv_mtu {mtu} is unknown")
    return 128 << mtu
