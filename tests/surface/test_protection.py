"""Registered memory at a fork: each promise, from the child's side too."""

import gc
import mmap
import os
import signal
import struct

import pytest
from conftest import (
    both_modes,
    child,
    fork_once,
    fresh,
    modes_and_trust,
    needs_lazy,
    needs_pins,
    run,
)
from memory import (
    PAGE,
    PLACE,
    Owner,
    libc,
    map_at,
    marked,
    pages,
    private_map,
    protections,
    read,
    shared_map,
    unmap,
    write,
)

import rdmafork
from rdmafork import register, register_address, stats
from rdmafork._pins import Pins

trusted = pytest.mark.skipif(
    not rdmafork.kernel_info().copy_on_fork_trusted,
    reason="the kernel's copying at fork cannot be trusted: whole pages go, eagerly",
)


# ---- lazy: nothing before a fork ----------------------------------------------------------


@needs_lazy
@fresh
def test_lazy_marks_at_the_fork_and_unmarks_at_close():
    rdmafork.fork_init("lazy")
    memory, address = private_map(8 * PAGE)
    registration = register(memory)
    assert registration.protected
    assert marked(address, 8 * PAGE) == []
    assert protections() == [(address, address + 8 * PAGE, 1, "pending")]
    assert stats().pending == 1
    assert child(read, address) == signal.SIGSEGV
    assert marked(address, 8 * PAGE) == pages(address, 8)
    assert protections() == [(address, address + 8 * PAGE, 1, "mark")]
    assert stats().pending == 0
    registration.close()
    assert marked(address, 8 * PAGE) == []
    assert child(read, address) == b"\0"


@needs_lazy
@fresh
def test_a_registration_after_a_fork_waits_for_the_next():
    rdmafork.fork_init("lazy")
    memory, address = private_map(16 * PAGE)
    first = register(memoryview(memory)[: 4 * PAGE])
    fork_once()
    second = register(memoryview(memory)[8 * PAGE : 12 * PAGE])
    assert marked(address, 16 * PAGE) == pages(address, 4)
    calls = stats().madvise_calls
    fork_once()
    assert marked(address, 16 * PAGE) == pages(address, 4) + pages(address + 8 * PAGE, 4)
    # Marked pages stay marked: the next forks do nothing.
    assert stats().madvise_calls > calls
    calls = stats()
    for _ in range(3):
        fork_once()
    assert stats()[11:13] == calls[11:13]
    first.close()
    second.close()
    assert marked(address, 16 * PAGE) == []


# ---- eager ---------------------------------------------------------------------------------


@fresh
def test_eager_marks_before_register_returns():
    rdmafork.fork_init("eager")
    memory, address = private_map(8 * PAGE)
    with register(memoryview(memory)[PAGE : 3 * PAGE]):
        assert marked(address, 8 * PAGE) == pages(address + PAGE, 2)
        assert protections() == [(address + PAGE, address + 3 * PAGE, 1, "mark")]
        assert stats().pending == 0
    assert marked(address, 8 * PAGE) == []


@both_modes
@fresh
def test_memory_that_is_not_held_is_marked_at_once(mode):
    rdmafork.fork_init(mode)
    _memory, address = private_map(8 * PAGE)
    registration = register_address(address + PAGE, 2 * PAGE)
    assert marked(address, 8 * PAGE) == pages(address + PAGE, 2)
    registration.close()
    assert marked(address, 8 * PAGE) == []


# ---- bytes a child keeps -------------------------------------------------------------------


@trusted
@both_modes
@fresh
def test_the_child_keeps_every_byte_that_was_not_registered(mode):
    rdmafork.fork_init(mode)
    memory, address = private_map(16 * PAGE)
    memory[:] = bytes(i * 7 % 251 for i in range(16 * PAGE))
    spans = [(100, 164), (PAGE - 1, PAGE + 1), (3 * PAGE + 8, 6 * PAGE - 8), (8 * PAGE, 9 * PAGE)]
    spans += [(10 * PAGE, 10 * PAGE + 1), (12 * PAGE - 1, 13 * PAGE), (14 * PAGE, 16 * PAGE - 1)]
    registrations = [register(memoryview(memory)[a:b]) for a, b in spans]
    fork_once()
    filled = [a for s, e in spans for a in range(s + -s % PAGE, e - PAGE + 1, PAGE)]
    assert marked(address, 16 * PAGE) == [address + a for a in filled]

    def kept():
        """All the bytes of the pages there are."""
        return b"".join(memory[a : a + PAGE] for a in range(0, 16 * PAGE, PAGE) if a not in filled)

    assert child(kept) == kept()
    for a in filled:
        assert child(read, address + a) == signal.SIGSEGV
        assert child(read, address + a + PAGE - 1) == signal.SIGSEGV
    del registrations[:]
    gc.collect()
    assert marked(address, 16 * PAGE) == []
    assert child(bytes, memory) == bytes(memory)


@trusted
@both_modes
@fresh
def test_a_page_two_registrations_fill_together_is_the_kernel_s(mode):
    rdmafork.fork_init(mode)
    memory, address = private_map(4 * PAGE)
    halves = [
        register(memoryview(memory)[PAGE : PAGE + 2000]),
        register(memoryview(memory)[PAGE + 2000 : 2 * PAGE]),
    ]
    fork_once()
    assert marked(address, 4 * PAGE) == []
    assert protections() == [(address + PAGE, address + 2 * PAGE, 2, "kernel")]
    assert len(halves) == 2


def physical(address):
    """The page frame behind an address, for root."""
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        file.seek(address // PAGE * 8)
        entry = struct.unpack("=Q", file.read(8))[0]
    return entry & (1 << 55) - 1 if entry >> 63 else 0


@both_modes
@fresh
def test_the_parent_s_pages_stay_where_they_are(mode):
    """The point of it all: a fork and a write afterwards give the parent no other page."""
    rdmafork.fork_init(mode)
    memory, address = private_map(16 * PAGE)
    libc.madvise(address, 16 * PAGE, 15)  # MADV_NOHUGEPAGE, where there are such
    memory[:] = b"x" * len(memory)
    if not physical(address):
        pytest.skip("page frames are shown to root alone")
    registration = register(memoryview(memory)[4 * PAGE : 12 * PAGE])
    before = [physical(a) for a in pages(address, 16)]
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.read(reading, 1)
        os._exit(0)
    memory[:] = b"y" * len(memory)
    after = [physical(a) for a in pages(address, 16)]
    os.write(writing, b"x")
    os.waitpid(pid, 0)
    assert after[4:12] == before[4:12]
    assert all(
        a != b for a, b in zip(after[:4] + after[12:], before[:4] + before[12:], strict=True)
    )
    registration.close()


# ---- shared memory -------------------------------------------------------------------------


@modes_and_trust
def test_shared_memory_is_the_child_s_too(mode, trust):
    run(shared_memory, mode, env={"RDMAFORK_TRUST_COPYING": trust})


def shared_memory(mode):
    rdmafork.fork_init(mode)
    memory, address = shared_map(8 * PAGE)
    registrations = [
        register(memory),
        register(memoryview(memory)[100:5000]),
        register_address(address + PAGE, 2 * PAGE),
    ]

    def in_child():
        memory[PAGE + 5] = 77
        return memory[100]

    memory[100] = 7
    for _ in range(2):
        assert child(in_child) == 7
        assert memory[PAGE + 5] == 77
        memory[PAGE + 5] = 0
        assert marked(address, 8 * PAGE) == []
    assert {p[3] for p in protections()} == {"shared"}
    assert stats().marked_bytes == stats().unmarked_bytes == 0
    for registration in registrations:
        registration.close()


@both_modes
@fresh
def test_shared_files_and_memfd(mode, tmp_path):
    rdmafork.fork_init(mode)
    fd = os.memfd_create("rdmafork")
    os.ftruncate(fd, 4 * PAGE)
    (tmp_path / "file").write_bytes(bytes(4 * PAGE))
    with open(tmp_path / "file", "r+b") as file:
        maps = [mmap.mmap(fd, 4 * PAGE), mmap.mmap(file.fileno(), 4 * PAGE)]
    for memory in maps:
        with register(memory):
            assert child(memory.__setitem__, PAGE, 77) is None
            assert memory[PAGE] == 77
            assert {p[3] for p in protections()} == {"shared"}


@both_modes
@fresh
def test_private_and_shared_side_by_side(mode):
    rdmafork.fork_init(mode)
    map_at(PLACE, 12 * PAGE)
    map_at(PLACE + 4 * PAGE, 4 * PAGE, shared=True)
    registration = register_address(PLACE + PAGE, 10 * PAGE, owner=Owner())
    assert child(write, PLACE + 5 * PAGE, b"child") is None
    assert read(PLACE + 5 * PAGE, 5) == b"child"
    expected = pages(PLACE + PAGE, 3) + pages(PLACE + 8 * PAGE, 3)
    assert marked(PLACE, 12 * PAGE) == expected
    assert protections() == [
        (PLACE + PAGE, PLACE + 4 * PAGE, 1, "mark"),
        (PLACE + 4 * PAGE, PLACE + 8 * PAGE, 1, "shared"),
        (PLACE + 8 * PAGE, PLACE + 11 * PAGE, 1, "mark"),
    ]
    registration.close()
    assert marked(PLACE, 12 * PAGE) == []


@needs_lazy
@fresh
def test_partial_pages_of_shared_and_of_unmapped_memory_are_told_apart():
    rdmafork.fork_init("lazy")
    map_at(PLACE, 2 * PAGE)
    registration = register_address(PLACE + PAGE + 8, 64)
    unmap(PLACE + PAGE, PAGE)
    map_at(PLACE + 2 * PAGE, 2 * PAGE, shared=True)
    other = register_address(PLACE + 2 * PAGE + 8, 64)
    fork_once()
    shared = (PLACE + 2 * PAGE, PLACE + 3 * PAGE, 1, "shared")
    assert protections() == [(PLACE + PAGE, PLACE + 2 * PAGE, 1, "kernel"), shared]
    registration.close()
    assert protections() == [shared]
    other.close()
    assert protections() == []


@both_modes
@fresh
def test_a_failed_registration_leaves_the_facts_of_others(mode):
    rdmafork.fork_init(mode)
    map_at(PLACE, 4 * PAGE, shared=True)
    registration = register_address(PLACE, 4 * PAGE, owner=Owner())
    fork_once()
    with pytest.raises(OSError):
        register_address(PLACE, 8 * PAGE)
    fork_once()
    assert protections() == [(PLACE, PLACE + 4 * PAGE, 1, "shared")]
    assert stats().unmarked_bytes == stats().still_marked_bytes == 0
    registration.close()
    assert stats().ranges == 0


# ---- memory that was unmapped ---------------------------------------------------------------


@both_modes
@fresh
def test_one_unmapped_range_does_not_spoil_the_fork(mode):
    """madvise() refuses memory that was not held and is unmapped; all else must be marked."""
    rdmafork.fork_init(mode)
    map_at(PLACE, 64 * PAGE)
    map_at(PLACE + PAGE, PAGE, shared=True)
    unheld = [register_address(PLACE + PAGE, PAGE)]
    held = register_address(PLACE + PAGE, PAGE, owner=Owner())
    fork_once()
    held.close()
    map_at(PLACE + PAGE, PAGE)
    unheld.append(register_address(PLACE + PAGE, PAGE))
    rdmafork.protected_ranges()  # which asks for the mappings
    unmap(PLACE + PAGE, PAGE)
    others = [register_address(PLACE + (8 + 2 * i) * PAGE, PAGE, owner=Owner()) for i in range(20)]
    fork_once()
    expected = [PLACE + (8 + 2 * i) * PAGE for i in range(20)]
    assert marked(PLACE, 64 * PAGE) == expected
    assert stats().pending == 0
    del unheld[:], others[:]
    assert marked(PLACE, 64 * PAGE) == []


@needs_lazy
@pytest.mark.parametrize("shape", ["apart", "touching", "same"])
@fresh
def test_a_broken_promise_to_hold_spoils_nothing_else(shape):
    """An owner that lets its memory be unmapped harms its own registration alone."""
    rdmafork.fork_init("lazy")
    map_at(PLACE, 64 * PAGE)
    broken = register_address(PLACE + 8 * PAGE, 4 * PAGE, owner=Owner())
    first = {"apart": 14, "touching": 12, "same": 10}[shape]
    others = [register_address(PLACE + first * PAGE, 4 * PAGE, owner=Owner())]
    others += [register_address(PLACE + i * PAGE, PAGE, owner=Owner()) for i in range(20, 40, 2)]
    unmap(PLACE + 8 * PAGE, 2 * PAGE)
    for _ in range(2):
        fork_once()
        expected = sorted(
            {*pages(PLACE + 10 * PAGE, 2), *pages(PLACE + first * PAGE, 4)}
            | {PLACE + i * PAGE for i in range(20, 40, 2)}
        )
        found = marked(PLACE, 64 * PAGE)
        # Its own part that is left may stay the kernel's to copy.
        assert set(found) >= set(expected) - set(pages(PLACE + 10 * PAGE, 2))
        assert set(found) <= set(expected)
    broken.close()
    del others[:]
    assert marked(PLACE, 64 * PAGE) == []


# ---- a device ------------------------------------------------------------------------------


@modes_and_trust
@needs_pins
def test_a_device_reaches_the_parent_after_forks(mode, trust, tmp_path):
    run(device, mode, str(tmp_path / "file"), env={"RDMAFORK_TRUST_COPYING": trust})


def device(mode, path):
    """Pinned pages, partial ones among them; after forks each reads what the other has written."""
    rdmafork.fork_init(mode)
    memory, address = private_map(64 * PAGE)
    memory[:] = b"p" * len(memory)
    start, end = PAGE + 100, 60 * PAGE + 7
    data = bytes(i * 31 % 253 for i in range(end - start))
    with open(path, "wb") as file:
        file.write(data)
    with Pins(memoryview(memory)[start:end]) as device, register(memoryview(memory)[start:end]):
        reading, writing = os.pipe()
        pids = []
        for _ in range(3):
            pid = os.fork()
            if not pid:
                os.close(writing)
                os.read(reading, 1)
                os._exit(0)
            pids.append(pid)
            # Each write would copy the page, had the child a share in it.
            for at in range(start, end, 512):
                memory[at] = 0
        with open(path, "r+b", buffering=0) as file:
            assert device.read_fixed(file.fileno(), address + start, end - start) == end - start
            assert memory[start:end] == data
            memory[start:end] = data[::-1]
            assert device.write_fixed(file.fileno(), address + start, end - start) == end - start
            assert file.read() == data[::-1]
        assert memory[:start] == b"p" * start
        assert memory[end:] == b"p" * (len(memory) - end)
        os.close(writing)
        for pid in pids:
            os.waitpid(pid, 0)
