# cython: language_level=3, binding=False, embedsignature=True, embedsignature.format=clinic
"""The memory of a CPU tensor, through __dlpack__."""

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint64_t, uintptr_t


cdef struct Tensor:  # DLTensor of dlpack.h
    void *data
    int32_t device_type
    int32_t device_id
    int32_t ndim
    uint8_t type_code
    uint8_t type_bits
    uint16_t type_lanes
    int64_t *shape
    int64_t *strides
    uint64_t byte_offset


# DLDeviceType. The host's own memory is what fork() moves.
_HOST = (1, 3, 11)
_DEVICES = {
    1: "cpu", 2: "cuda", 3: "cuda_host", 4: "opencl", 7: "vulkan", 8: "metal", 9: "vpi",
    10: "rocm", 11: "rocm_host", 12: "ext_dev", 13: "cuda_managed", 14: "oneapi",
    15: "webgpu", 16: "hexagon", 17: "maia", 18: "trainium",
}


def borrow(tensor):
    """(capsule, address, nbytes) of a contiguous CPU tensor.

    The memory stays where it is while the capsule lives. TypeError: on another
    device. BufferError: not contiguous, or no tensor at all.
    """
    kind, number = tensor.__dlpack_device__()
    kind = int(kind)
    if kind not in _HOST:
        raise TypeError(
            f"cannot register memory on {_DEVICES.get(kind, f'device type {kind}')}:{number}: "
            f"fork() does not affect it; register a tensor on the CPU")
    # A tensor that takes part in autograd does not export itself; its data is the same.
    if getattr(tensor, "requires_grad", False):
        tensor = tensor.detach()
    capsule = tensor.__dlpack__()
    if not PyCapsule_IsValid(capsule, "dltensor"):
        raise BufferError(
            f"cannot register this {type(tensor).__name__}: its __dlpack__() returned no tensor, "
            f"or one that was already used; it must export a new one at each call")
    cdef Tensor *dl = <Tensor *>PyCapsule_GetPointer(capsule, "dltensor")
    if dl.ndim < 0 or (dl.ndim and dl.shape == NULL):
        raise BufferError(f"cannot register a tensor of {dl.ndim} dimensions without a shape")
    shape = [dl.shape[i] for i in range(dl.ndim)]
    strides = [dl.strides[i] for i in range(dl.ndim)] if dl.strides != NULL else None
    count = 1
    for extent in shape:
        count *= extent
    if strides is not None and count:
        expected = 1
        for stride, extent in sorted(zip(strides, shape)):
            if extent != 1 and stride != expected:
                raise BufferError(
                    f"cannot register a tensor that is not contiguous (shape {shape}, strides "
                    f"{strides} elements): register the tensor it is a view of")
            expected *= extent
    nbytes = (count * dl.type_bits * dl.type_lanes + 7) // 8
    return capsule, <uintptr_t>dl.data + dl.byte_offset, nbytes
