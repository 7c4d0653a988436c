"""Registered memory is held: it stays mapped until its registrations are closed."""

import ctypes
import gc
import weakref

import pytest
from conftest import both_modes, child, fork_once, fresh, needs_lazy
from memory import PAGE, PLACE, Owner, map_at, mappings, marked, pages, private_map, write

import rdmafork
from rdmafork import register, register_address, stats


@both_modes
@fresh
def test_registered_memory_cannot_be_resized_or_freed(mode):
    rdmafork.fork_init(mode)
    array = bytearray(4 * PAGE)
    memory, _ = private_map(4 * PAGE)
    registrations = [register(array), register(memory)]
    for change in (array.clear, lambda: array.extend(b"x"), array.pop, memory.close):
        with pytest.raises(BufferError):
            change()
    with pytest.raises(BufferError):
        memory.resize(8 * PAGE)
    for registration in registrations:
        registration.close()
    array.extend(b"x")
    memory.resize(8 * PAGE)
    memory.close()


@both_modes
@fresh
def test_an_owner_that_ignores_exports_moves_registered_memory(mode):
    """A limit: the registration names freed memory, until it is closed."""
    rdmafork.fork_init(mode)
    array = (ctypes.c_char * (4 * PAGE))()
    registration = register(array)
    try:
        ctypes.resize(array, 64 * PAGE)
    except BufferError:
        pytest.skip("this Python asks")
    assert ctypes.addressof(array) != registration.address
    fork_once()
    registration.close()
    assert stats().registrations == stats().marked_bytes == stats().still_marked_bytes == 0


@both_modes
@fresh
def test_the_buffer_lives_as_long_as_its_registration(mode):
    class Memory(bytearray):
        pass

    rdmafork.fork_init(mode)
    memory = Memory(8 * PAGE)
    seen = weakref.ref(memory)
    registration = register(memory)
    assert registration.obj is memory
    del memory
    gc.collect()
    assert seen() is registration.obj
    registration.close()
    gc.collect()
    assert seen() is None
    owner = Owner()
    seen = weakref.ref(owner)
    registration = register_address(PLACE, 0, owner=owner)
    del owner
    assert seen() is registration.obj
    del registration
    gc.collect()
    assert seen() is None


@both_modes
@fresh
def test_a_registration_that_is_dropped_is_closed(mode):
    rdmafork.fork_init(mode)
    memory, address = private_map(4 * PAGE)
    register(memory)
    assert stats().registrations == 0
    registration = register(memory)
    fork_once()
    assert marked(address, 4 * PAGE) == pages(address, 4)
    ring = [registration]
    ring.append(ring)
    del registration, ring
    gc.collect()
    assert marked(address, 4 * PAGE) == []
    memory.resize(8 * PAGE)


@both_modes
@fresh
def test_registrations_overlap(mode):
    rdmafork.fork_init(mode)
    memory, address = private_map(32 * PAGE)
    spans = [(0, 16), (8, 24), (8, 24), (12, 13), (0, 32), (20, 32)]
    live = {}
    for index, (start, end) in enumerate(spans):
        live[index] = register(memoryview(memory)[start * PAGE : end * PAGE])
    fork_once()
    counts = [sum(s <= i < e for s, e in spans) for i in range(32)]
    listed = {
        page: r.registrations
        for r in rdmafork.protected_ranges()
        for page in range(r.start, r.end, PAGE)
    }
    assert [listed[a] for a in pages(address, 32)] == counts
    for index in (4, 1, 3, 0, 5, 2):
        live.pop(index).close()
        left = [spans[i] for i in live]
        expected = [address + i * PAGE for i in range(32) if any(s <= i < e for s, e in left)]
        assert marked(address, 32 * PAGE) == expected
    assert stats().ranges == 0


@both_modes
@fresh
def test_memory_given_back_is_ordinary(mode):
    """Also for children no handler sees."""
    rdmafork.fork_init(mode)
    array = bytearray(1 << 20)
    registration = register(array)
    span = registration.address, registration.nbytes
    fork_once()
    registration.close()
    assert child(bytes, array) == bytes(array)
    count = len(mappings(*span))
    for _ in range(50):
        with register(array):
            fork_once()
    assert len(mappings(*span)) == count


@needs_lazy
@fresh
def test_marks_do_not_leave_mappings_split():
    """Pages first touched between marked neighbours merge with them again."""
    rdmafork.fork_init("lazy")
    map_at(PLACE, 400 * PAGE)
    registrations = [
        register_address(PLACE + i * PAGE, PAGE, owner=Owner()) for i in range(1, 400, 2)
    ]
    fork_once()
    assert len(mappings(PLACE, 400 * PAGE)) >= 390
    write(PLACE, bytes([1]) * 400 * PAGE)
    for registration in registrations:
        registration.close()
    assert len(mappings(PLACE, 400 * PAGE)) <= 3
