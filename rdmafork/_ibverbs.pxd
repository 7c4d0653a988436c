# The functions of libibverbs.so.1 in use: its binary interface, the same since 2005, so that
# neither its headers nor the library itself is needed to build or to import.

from libc.stdint cimport uint8_t, uint32_t, uint64_t


cdef struct ibv_device  # its fields are asked by function

cdef struct ibv_context:
    ibv_device *device
    void *ops[32]
    int cmd_fd
    int async_fd

cdef struct ibv_pd:
    ibv_context *context
    uint32_t handle

cdef struct ibv_mr:
    ibv_context *context
    ibv_pd *pd
    void *addr
    size_t length
    uint32_t handle
    uint32_t lkey
    uint32_t rkey

cdef struct ibv_port_attr:
    int state
    int max_mtu     # enum ibv_mtu: 1 is 256 bytes, 5 is 4096
    int active_mtu
    uint8_t others[256]

cdef struct ibverbs:
    ibv_device **(*get_device_list)(int *) noexcept nogil
    void (*free_device_list)(ibv_device **) noexcept nogil
    const char *(*get_device_name)(ibv_device *) noexcept nogil
    uint64_t (*get_device_guid)(ibv_device *) noexcept nogil  # network byte order
    ibv_context *(*open_device)(ibv_device *) noexcept nogil
    int (*close_device)(ibv_context *) noexcept nogil
    int (*query_port)(ibv_context *, uint8_t, ibv_port_attr *) noexcept nogil
    ibv_pd *(*alloc_pd)(ibv_context *) noexcept nogil
    int (*dealloc_pd)(ibv_pd *) noexcept nogil
    ibv_mr *(*reg_mr)(ibv_pd *, void *, size_t, int) noexcept nogil
    # Knows of optional access; NULL before rdma-core 28.
    ibv_mr *(*reg_mr_iova2)(ibv_pd *, void *, size_t, uint64_t, unsigned int) noexcept nogil
    int (*dereg_mr)(ibv_mr *) noexcept nogil


cdef ibverbs verbs  # once load() has returned


cdef int load() except -1
cdef ibv_context *open_listed(bytes name, object guid) except NULL
