# The engine's C API; rdmafork.h says what each function promises.

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t


cdef extern from "rdmafork.h" nogil:
    enum:
        RDMAFORK_VERSION_MAJOR
        RDMAFORK_VERSION_MINOR
        RDMAFORK_VERSION_PATCH
        RDMAFORK_VERSION
        RF_ABI
        RF_HELD
        RF_NOWAIT
        RF_MAPPED
        RF_UNDO
        RF_FROM_REGISTER
        RF_FROM_ADDRESS
        RF_FROM_BUFFER
        RF_FROM_DEVICE
        RF_FROM_LIBIBVERBS
        RF_FROM
        RF_STRERROR_SIZE

    enum rf_mode:
        RF_MODE_NONE
        RF_MODE_AUTO
        RF_MODE_LAZY
        RF_MODE_EAGER

    enum rf_policy:
        RF_OMIT
        RF_WIPE
        RF_KEEP
        RF_POLICIES

    enum rf_cause:
        RF_CAUSE_NONE
        RF_CAUSE_WRAP
        RF_CAUSE_POLICY
        RF_CAUSE_NOT_MAPPED
        RF_CAUSE_VMA_LIMIT
        RF_CAUSE_ENGINE_MEMORY
        RF_CAUSE_REFUSED
        RF_CAUSE_NO_PROC
        RF_CAUSE_SIGNAL
        RF_CAUSE_LATE
        RF_CAUSE_MODE
        RF_CAUSE_ENVIRONMENT
        RF_CAUSE_UNTRUSTED
        RF_CAUSE_OTHER_ENGINE
        RF_CAUSE_SHARED_PAGE
        RF_CAUSE_LIBRARY
        RF_CAUSE_UNKNOWN_MODE
        RF_CAUSE_FLAGS

    struct rf_error:
        rf_cause cause
        uintptr_t start
        uintptr_t end
        uintptr_t address
        size_t nbytes
        char text[256]

    struct rf_handle:
        uint64_t serial
        uint32_t slot
        uint32_t generation

    const char *rf_strerror(int rc, const rf_error *error, char *out, size_t size)
    int rf_version()
    int rf_abi()
    int rf_fork_init(rf_mode mode, rf_error *error)
    rf_mode rf_get_mode "rf_mode"()

    int rf_register(
        const void *address, size_t nbytes, unsigned int flags, rf_policy policy,
        rf_handle *handle, rf_error *error)
    int rf_release(rf_handle handle, unsigned int flags)
    void rf_ranges_own(int yes)

    enum rf_library_how:
        RF_LIBRARY_OURS
        RF_LIBRARY_REWRITTEN
        RF_LIBRARY_PATCHED
        RF_LIBRARY_REFUSED

    struct rf_library:
        char path[256]
        char user[256]
        uint8_t how
        uint8_t protects
        const char *why

    int rf_intercept(rf_error *error)
    ssize_t rf_libraries(rf_library *out, size_t capacity)
    const char *rf_library_how_name(unsigned char how)

    int rf_explain_faults()
    int rf_registered_at(rf_handle handle, const char *where)

    int rf_handle_state(rf_handle handle)
    uint32_t rf_generation()

    int rf_descriptor_omit(int fd, unsigned int flags)
    int rf_descriptor_release(int fd)
    uint64_t rf_forks()

    enum rf_protection:
        RF_BY_NOTHING
        RF_BY_MARK
        RF_BY_KERNEL
        RF_BY_HANDLER
        RF_BY_SHARING

    struct rf_range_info:
        uintptr_t start
        uintptr_t end
        uint32_t registrations
        uint8_t policy
        uint8_t protection
        uint16_t reserved

    ssize_t rf_list(rf_range_info *out, size_t capacity)

    struct rf_stats:
        uint64_t registrations
        uint64_t pending
        uint64_t ranges
        uint64_t marked_ranges
        uint64_t marked_bytes
        uint64_t vmas
        uint64_t vma_budget
        uint64_t unmarked_ranges
        uint64_t unmarked_bytes
        uint64_t still_marked_bytes
        uint64_t madvise_calls
        uint64_t query_calls
        uint64_t forks
        uint64_t forks_unmarked
        uint64_t engine_bytes
        uint64_t ibv_ranges
        uint64_t ibv_calls
        uint64_t ibv_unbalanced
        uint64_t gone_bytes

    int rf_get_stats "rf_stats"(rf_stats *stats)

    enum rf_how:
        RF_HOW_VERSION
        RF_HOW_NETLINK
        RF_HOW_PROBE
        RF_HOW_ENVIRONMENT

    struct rf_kernel:
        char release[65]
        uint8_t copy_on_fork
        uint8_t copy_how
        uint8_t copy_trusted
        uint8_t procmap_query
        uint8_t huge_shifts[8]
        uint8_t trust_how
        uint32_t page_size
        uint32_t max_map_count

    void rf_kernel_info(rf_kernel *kernel)
