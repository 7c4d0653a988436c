"""Users of a Buffer's memory: views of it in Python, numpy and others, and its end after them."""

import copy
import ctypes
import gc
import itertools
import pickle
import re
import socket
import struct
import tempfile
import warnings

import pytest
from conftest import both_modes, fork_once, fresh
from memory import PAGE, address_of, is_mapped, map_at, read, smaps, vm_flags, write

import rdmafork
from rdmafork import Buffer, UnprotectedWarning

np = pytest.importorskip("numpy")


@pytest.fixture
def buffer():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnprotectedWarning)
        made = Buffer(5000)
    yield made
    gc.collect()
    made.close()
    assert rdmafork.stats().registrations == 0


def test_a_memoryview_reads_and_writes_it(buffer):
    with memoryview(buffer) as view:
        assert (view.nbytes, view.format, view.itemsize, view.ndim) == (5000, "B", 1, 1)
        assert (view.shape, view.strides, view.readonly) == ((5000,), (1,), False)
        assert view.c_contiguous and view.obj is buffer and not any(view)
        view[7:10] = b"abc"
        view[-1] = 255
        assert bytes(buffer)[7:10] == b"abc" == read(buffer.address + 7, 3)
        assert view.cast("I")[1249] == 255 << 24


def test_views_have_the_fields_asked_for(buffer):
    """A view has the fields that were asked for, and no others."""

    class View(ctypes.Structure):
        _fields_ = (
            ("buf", ctypes.c_void_p),
            ("obj", ctypes.py_object),
            ("len", ctypes.c_ssize_t),
            ("itemsize", ctypes.c_ssize_t),
            ("readonly", ctypes.c_int),
            ("ndim", ctypes.c_int),
            ("format", ctypes.c_char_p),
            ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
            ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
            ("suboffsets", ctypes.c_void_p),
            ("internal", ctypes.c_void_p),
        )

    writable, with_format, shape, strides = 1, 4, 8, 0x18
    for flags in itertools.product((0, writable), (0, with_format), (0, shape, strides)):
        view = View()
        get = ctypes.pythonapi.PyObject_GetBuffer
        assert get(ctypes.py_object(buffer), ctypes.byref(view), sum(flags)) == 0
        assert (view.buf, view.len, view.itemsize) == (buffer.address, 5000, 1)
        assert view.ndim == 1 and not view.readonly and not view.suboffsets
        assert view.format == (b"B" if flags[1] else None)
        assert bool(view.shape) == bool(flags[2]) and bool(view.strides) == (flags[2] == strides)
        assert not flags[2] or view.shape[0] == 5000
        assert flags[2] != strides or view.strides[0] == 1
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))


def test_numpy_arrays_read_and_write_it(buffer):
    array = np.frombuffer(buffer, dtype=np.float32)
    assert array.shape == (1250,) and array.flags.writeable
    assert array.__array_interface__["data"] == (buffer.address, False)
    array[:] = np.arange(1250)
    assert struct.unpack_from("<f", buffer, 4 * 1249) == (1249.0,)
    assert np.array(pickle.loads(pickle.dumps(array))).sum() == array.sum()
    assert np.asarray(buffer).nbytes == 5000


@fresh
def test_a_numpy_array_of_a_gigabyte_keeps_it():
    """As the natural thing: the array alone keeps the memory, and fork() keeps out of it."""
    rdmafork.fork_init()
    array = np.frombuffer(Buffer(1 << 30), dtype=np.float32)
    assert array.size == 1 << 28 and rdmafork.stats().registrations == 1
    array[:: 1 << 20] = 5
    address = array.__array_interface__["data"][0]
    fork_once()
    assert "dc" in vm_flags(address)
    assert array.sum(dtype=np.float64) == 5 * (1 << 8)
    del array
    assert rdmafork.stats().registrations == 0 and not is_mapped(address)


def test_torch_tensors_read_and_write_it(buffer):
    torch = pytest.importorskip("torch")
    tensor = torch.frombuffer(buffer, dtype=torch.float32)
    tensor[:] = 2
    assert np.frombuffer(buffer, dtype=np.float32).sum() == 2500
    assert tensor.data_ptr() == buffer.address


def test_ctypes_struct_sockets_and_files_use_it(buffer):
    assert address_of(buffer) == buffer.address
    struct.pack_into("<Q", buffer, 8, 1 << 40)
    assert (ctypes.c_uint64 * 2).from_buffer(buffer)[1] == 1 << 40
    left, right = socket.socketpair()
    with left, right:
        left.sendall(b"over the wire")
        assert right.recv_into(buffer) == 13
        right.sendall(memoryview(buffer)[:4])
        assert left.recv(100) == b"over"
    with tempfile.TemporaryFile() as file:
        file.write(buffer)
        file.seek(0)
        memoryview(buffer)[:] = bytes(5000)
        assert file.readinto(buffer) == 5000
    assert bytes(buffer)[:13] == b"over the wire"


def test_attributes_are_read_only(buffer):
    assert (len(buffer), buffer.nbytes, buffer.page_size) == (5000, 5000, PAGE)
    assert buffer.address % PAGE == 0 and buffer.on_fork == "omit" and buffer.obj is buffer
    assert not buffer.closed and not buffer.inherited and isinstance(buffer.protected, bool)
    assert isinstance(buffer, rdmafork.Registration)
    assert re.fullmatch(
        rf"<rdmafork\.Buffer 0x{buffer.address:x}, 5000 bytes in pages of 4 KiB, .*protected>",
        repr(buffer),
    )
    for name in ("address", "nbytes", "page_size", "on_fork", "protected", "obj"):
        with pytest.raises(AttributeError):
            setattr(buffer, name, 1)


@pytest.mark.parametrize("copies", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_cannot_be_pickled_or_copied(buffer, copies):
    with pytest.raises(TypeError, match=r"pickle bytes\(buffer\).*shared_memory"):
        copies(buffer)


# ---- the end ------------------------------------------------------------------------------


@both_modes
@fresh
def test_close_is_refused_while_views_are_exported(mode):
    """A view is held by a memoryview, an array or a registration. Nothing has changed then."""
    rdmafork.fork_init(mode)
    buffer = Buffer(5000)
    holders = [memoryview(buffer), np.frombuffer(buffer, np.uint8), rdmafork.register(buffer)]
    holders.append(rdmafork.register(holders[0][100:200]))
    holders.append((ctypes.c_char * 5000).from_buffer(buffer))

    def state():
        # Its own mappings: reading what there are takes memory, which may be one more.
        own = [m for m in smaps() if m.start - PAGE <= buffer.address < m.end + PAGE]
        return rdmafork.protected_ranges(), rdmafork.stats()._replace(query_calls=0), own

    before = state()
    assert before[-1]
    with pytest.raises(BufferError, match="views of it are exported"):
        buffer.close()
    assert state() == before
    assert not buffer.closed and buffer.protected
    holders[0][0] = 9
    assert holders[1][0] == 9
    while holders:
        with pytest.raises(BufferError):
            buffer.close()
        holders.pop(0)
        gc.collect()
    buffer.close()
    assert buffer.closed and "closed" in repr(buffer)


@fresh
def test_a_second_close_does_nothing_and_use_after_it_raises():
    rdmafork.fork_init()
    buffer = Buffer(5000)
    address = buffer.address
    buffer.close()
    assert not is_mapped(address)
    # Another's by now.
    map_at(address, 2 * PAGE)
    write(address, b"mine")
    buffer.close()
    with pytest.raises(ValueError, match="closed"):
        memoryview(buffer)
    for use in ("address", "nbytes", "page_size", "on_fork", "protected", "obj"):
        with pytest.raises(ValueError, match="closed"):
            getattr(buffer, use)
    for use in (len, rdmafork.register, buffer.__class__.__enter__):
        with pytest.raises(ValueError, match="closed"):
            use(buffer)
    del buffer
    assert read(address, 4) == b"mine"


@fresh
def test_a_context_manager_closes_it():
    rdmafork.fork_init()
    with Buffer(1) as buffer:
        assert memoryview(buffer)[0] == 0
    assert buffer.closed
    with pytest.raises(KeyError), Buffer(1) as buffer:
        raise KeyError
    assert buffer.closed and rdmafork.stats().registrations == 0


@both_modes
@fresh
def test_collected_only_after_the_last_view(mode):
    rdmafork.fork_init(mode)
    buffer = Buffer(5000)
    address = buffer.address
    view = memoryview(buffer)
    array = np.frombuffer(view, np.uint8)
    del buffer
    gc.collect()
    view[0] = 3
    del view
    fork_once()
    assert array[0] == 3 and rdmafork.stats().registrations == 1 and is_mapped(address)
    cycle = [array]
    cycle.append(cycle)
    del array, cycle
    gc.collect()
    assert rdmafork.stats().registrations == 0
    assert not any(map(is_mapped, (address - 1, address, address + 2 * PAGE)))
