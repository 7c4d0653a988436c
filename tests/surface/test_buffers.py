"""Buffers, tensors and addresses of all kinds: some can be registered, some cannot."""

import ctypes
import gc
import mmap
import signal
import weakref

import pytest
from conftest import both_modes, child, fork_once, fresh
from memory import PAGE, PLACE, Tensor, marked, private_map, read

import rdmafork
from rdmafork import register, register_address, stats

# ---- memory of all kinds -------------------------------------------------------------------


@both_modes
@fresh
def test_tensors_through_dlpack(mode):
    np = pytest.importorskip("numpy")
    rdmafork.fork_init(mode)
    base = np.zeros((64, 1024), dtype="f4")
    for array in (base, base.T, base[8:32], base[3], base.reshape(4, 16, 1024), base[:, :1][:1]):
        tensor = Tensor(array)
        registration = register(tensor)
        assert registration.obj is tensor
        assert registration.address == array.__array_interface__["data"][0]
        assert registration.nbytes == array.nbytes
        registration.close()
    registration = register(Tensor(base))
    fork_once()
    address = base.__array_interface__["data"][0]
    filled = range(address + -address % PAGE, address + base.nbytes - PAGE + 1, PAGE)
    if rdmafork.kernel_info().copy_on_fork_trusted:
        assert marked(address, base.nbytes) == list(filled)
    assert child(read, filled[3]) == signal.SIGSEGV
    registration.close()
    assert child(read, filled[3]) == b"\0"
    assert register(Tensor(np.zeros((0, 5)))).nbytes == 0


@fresh
def test_a_tensor_s_memory_lives_as_long_as_its_registration():
    np = pytest.importorskip("numpy")
    rdmafork.fork_init()
    array = np.zeros(100_000)
    seen = weakref.ref(array)
    registration = register(Tensor(array))
    address = registration.address
    del array
    gc.collect()
    assert seen() is not None
    assert registration.obj.array.__array_interface__["data"][0] == address
    registration.close()
    gc.collect()
    assert seen() is None


@fresh
def test_an_owner_may_be_anything():
    rdmafork.fork_init()
    memory, address = private_map(PAGE)
    for owner in (memory, (memory, "and more"), [memory], "a name", 0):
        with register_address(address, PAGE, owner=owner) as registration:
            assert registration.obj is owner


@fresh
def test_torch_tensors():
    torch = pytest.importorskip("torch")
    rdmafork.fork_init()
    parameter = torch.zeros(100, requires_grad=True)
    with register(parameter) as registration:
        assert registration.address == parameter.data_ptr()
        assert registration.obj is parameter
    tensor = torch.zeros(64, 1024)
    with register(tensor) as registration:
        assert registration.address == tensor.data_ptr()
        assert registration.nbytes == 64 * 1024 * 4
        assert registration.obj is tensor
    with pytest.raises(BufferError):
        register(tensor[:, ::2])


@both_modes
@fresh
def test_buffers_of_all_kinds(mode, tmp_path):
    np = pytest.importorskip("numpy")
    rdmafork.fork_init(mode)
    (tmp_path / "file").write_bytes(b"f" * 3 * PAGE)
    with open(tmp_path / "file", "rb") as file:
        read_only = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        private = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    array = np.arange(24 * 4096, dtype="i4").reshape(8, 12, 1024)
    fixed = np.arange(100_000)
    fixed.flags.writeable = False
    whole = bytearray(10 * PAGE)
    buffers = [
        b"bytes" * 10_000,
        whole,
        memoryview(whole)[100:-100],
        memoryview(whole)[::-1][:1],
        memoryview(whole).cast("I"),
        memoryview(whole).cast("B", (10, PAGE)),
        array,
        np.asfortranarray(array[:, :, 0]),
        array.T,
        array[3:5],
        np.zeros((5, 1, 3))[:, :, :],
        fixed,
        np.zeros(1000, dtype=[("a", "i2"), ("b", "f8")]),
        np.float64(1.5),
        (ctypes.c_long * 3000)(),
        read_only,
        private,
    ]
    registrations = []
    for buffer in buffers:
        registration = register(buffer)
        view = memoryview(buffer)
        assert registration.nbytes == view.nbytes
        pointer = np.frombuffer(buffer, "u1") if view.c_contiguous else buffer
        assert registration.address == pointer.__array_interface__["data"][0]
        assert registration.protected
        registrations.append(registration)
    fork_once()
    assert child(len, b"x") == 1
    for registration in registrations:
        registration.close()
    assert stats()[1:6] == (0, 0, 0, 0, 0)
    for strided in (array[:, ::2], memoryview(whole)[::2], array.transpose(1, 0, 2)):
        with pytest.raises(BufferError, match="contiguous"):
            register(strided)
    with pytest.raises(ValueError):
        memory, _ = private_map(PAGE)
        memory.close()
        register(memory)
    assert stats().registrations == 0


@both_modes
@fresh
def test_a_read_only_mapping_is_protected_too(mode):
    rdmafork.fork_init(mode)
    memory = mmap.mmap(-1, 4 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=1)
    with register(memory) as registration:
        assert child(read, registration.address) == signal.SIGSEGV


@both_modes
@fresh
def test_empty_buffers(mode):
    np = pytest.importorskip("numpy")
    rdmafork.fork_init(mode)
    for buffer in (b"", bytearray(), memoryview(b""), np.zeros((0, 5)), np.zeros(5)[2:2]):
        with register(buffer) as registration:
            assert registration.nbytes == 0
            assert registration.protected
            assert rdmafork.protected_ranges() == []
            fork_once()
            assert rdmafork.protected_ranges() == []
    array = bytearray()
    with register(array), pytest.raises(BufferError):
        array.append(1)
    for address in (0, 1, 2**64 - 1, PLACE):
        try:
            register_address(address, 0).close()
        except OverflowError:
            assert address == 2**64 - 1
    assert stats()[1:7] == (0, 0, 0, 0, 0, 0)
    assert stats().madvise_calls == stats().query_calls == 0
