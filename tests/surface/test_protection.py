"""What a fork does to registered memory: each promise, from the child's side too."""

import ctypes
import errno
import gc
import inspect
import itertools
import mmap
import os
import signal
import struct
import weakref

import pytest
from conftest import (
    HUGE,
    PAGE,
    PLACE,
    UNTRUSTED,
    Owner,
    both_modes,
    child,
    fork_once,
    fresh,
    huge_map,
    libc,
    map_at,
    mappings,
    marked,
    modes_and_trust,
    needs_lazy,
    needs_pins,
    pages,
    private_map,
    read,
    run,
    shared_map,
    smaps,
    unmap,
    unmarks_huge_pages,
    write,
)

import rdmafork
from rdmafork import register, register_address, stats
from rdmafork._pins import Pins

trusted = pytest.mark.skipif(
    not rdmafork.kernel_info().copy_on_fork_trusted,
    reason="the kernel's copying at fork cannot be trusted: whole pages go, eagerly",
)


def protections():
    return [(r.start, r.end, r.registrations, r.protected_by) for r in rdmafork.protected_ranges()]


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
    assert protections() == [(address, address + 8 * PAGE, 1, "advice")]
    assert stats().pending == 0
    registration.close()
    assert marked(address, 8 * PAGE) == []
    assert child(read, address) == b"\0"


@needs_lazy
@fresh
def test_what_was_never_registered_at_a_fork_costs_no_system_call(tmp_path):
    rdmafork.fork_init("lazy")
    memory, _ = private_map(8 * PAGE)
    keep = register(memory)
    before = stats()
    for size in range(1, 2000):
        register(memory).close()
        register_address(0x1000, size, owner=memory).close()
        with register(bytearray(size)):
            pass
    after = stats()
    assert after.madvise_calls == before.madvise_calls == 0
    assert after.query_calls == before.query_calls
    assert after.ranges == 0
    fork_once()
    assert stats().marked_bytes == len(memory)
    keep.close()


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
    # What is marked stays marked: the next forks do nothing.
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
        assert protections() == [(address + PAGE, address + 3 * PAGE, 1, "advice")]
        assert stats().pending == 0
    assert marked(address, 8 * PAGE) == []


@both_modes
@fresh
def test_memory_nobody_holds_is_marked_at_once(mode):
    rdmafork.fork_init(mode)
    _memory, address = private_map(8 * PAGE)
    registration = register_address(address + PAGE, 2 * PAGE)
    assert marked(address, 8 * PAGE) == pages(address + PAGE, 2)
    registration.close()
    assert marked(address, 8 * PAGE) == []


# ---- what a child keeps --------------------------------------------------------------------


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


@fresh(env=UNTRUSTED)
def test_partial_pages_are_marked_and_copied():
    rdmafork.fork_init()
    memory, address = private_map(8 * PAGE)
    registrations = [
        register(memoryview(memory)[PAGE + 100 : PAGE + 164]),
        register(memoryview(memory)[3 * PAGE - 1 : 3 * PAGE + 1]),
    ]
    assert marked(address, 8 * PAGE) == pages(address + PAGE, 3)
    fork_once()
    assert marked(address, 8 * PAGE) == pages(address + PAGE, 3)
    memory[:] = b"w" * len(memory)
    assert child(read, address, 8 * PAGE) == b"w" * 8 * PAGE
    assert {p[3] for p in protections()} == {"advice"}
    for registration in registrations:
        registration.close()
    assert marked(address, 8 * PAGE) == []


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
    assert stats().marked_bytes == stats().left_bytes == 0
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
        (PLACE + PAGE, PLACE + 4 * PAGE, 1, "advice"),
        (PLACE + 4 * PAGE, PLACE + 8 * PAGE, 1, "shared"),
        (PLACE + 8 * PAGE, PLACE + 11 * PAGE, 1, "advice"),
    ]
    registration.close()
    assert marked(PLACE, 12 * PAGE) == []


@needs_lazy
@fresh
def test_edges_of_shared_and_of_unmapped_memory_are_told_apart():
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
def test_a_failed_registration_leaves_what_is_known_of_others(mode):
    rdmafork.fork_init(mode)
    map_at(PLACE, 4 * PAGE, shared=True)
    registration = register_address(PLACE, 4 * PAGE, owner=Owner())
    fork_once()
    with pytest.raises(OSError):
        register_address(PLACE, 8 * PAGE)
    fork_once()
    assert protections() == [(PLACE, PLACE + 4 * PAGE, 1, "shared")]
    assert stats().left_bytes == stats().unreleased_bytes == 0
    registration.close()
    assert stats().ranges == 0


# ---- memory is held ------------------------------------------------------------------------


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
def test_who_does_not_ask_moves_registered_memory(mode):
    """A limit: the registration names what was freed, until it is closed."""
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
    assert stats().registrations == stats().marked_bytes == stats().unreleased_bytes == 0


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


# ---- within a fork -------------------------------------------------------------------------

WINDOW = """
    import ctypes, os, sys
    from conftest import *

    # Registered before the engine is loaded, so the engine's own prepare handler runs first.
    def prepare():
        if "rdmafork" in sys.modules:
            events.append("prepare")
            seen.update(actions["prepare"]())

    def parent():
        if "rdmafork" in sys.modules:
            seen.update(actions["parent"]())

    events, seen = [], {}
    HANDLER = ctypes.CFUNCTYPE(None)
    handlers = [HANDLER(prepare), HANDLER(parent), HANDLER()]
    assert libc.__register_atfork(*handlers, None) == 0
    import rdmafork

    rdmafork.fork_init(args[0])
    memory, address = private_map(16 * PAGE)
    other, elsewhere = private_map(16 * PAGE)
    shared, shared_at = shared_map(4 * PAGE)
    early = rdmafork.register(memoryview(memory)[:4 * PAGE])
    gone = rdmafork.register(memoryview(other)[:4 * PAGE])
    fork_once() if args[0] == "lazy" else None

    def in_prepare():
        gone.close()
        late = rdmafork.register(memoryview(memory)[8 * PAGE:12 * PAGE])
        edge = rdmafork.register(memoryview(memory)[14 * PAGE + 8:14 * PAGE + 64])
        common = rdmafork.register(shared)
        return dict(late=late, edge=edge, common=common, marks=marked(address, 16 * PAGE))

    def in_parent():
        return dict(after=rdmafork.register(memoryview(other)[8 * PAGE:12 * PAGE]))

    actions = dict(prepare=lambda: {}, parent=lambda: {})
    fork_once()
    actions = dict(prepare=in_prepare, parent=in_parent)
    found = []
    pid = os.fork()
    if not pid:
        shared[5] = 77
        missing = [i for i in range(16) if not is_mapped(address + i * PAGE)]
        os._exit(0 if missing == [0, 1, 2, 3, 8, 9, 10, 11] and other[0] == 0 else 1)
    status = os.waitpid(pid, 0)[1]
    actions = dict(prepare=lambda: {}, parent=lambda: {})
    marks = [(a - address) // PAGE for a in seen.pop("marks")]
    late_marks = [(a - elsewhere) // PAGE for a in marked(elsewhere, 16 * PAGE)]
    fork_once()
    later_marks = [(a - elsewhere) // PAGE for a in marked(elsewhere, 16 * PAGE)]
    for registration in [*seen.values(), early]:
        assert registration.protected
        registration.close()
    clean = marked(address, 16 * PAGE), marked(elsewhere, 16 * PAGE), rdmafork.stats().ranges
    (status, shared[5], marks, late_marks, later_marks, clean)
"""


@both_modes
def test_registered_and_released_within_the_fork(mode):
    """By other libraries' fork handlers, after the engine's own has run."""
    status, byte, marks, late_marks, later_marks, clean = run(inspect.cleandoc(WINDOW), mode)
    assert marks == [0, 1, 2, 3, 8, 9, 10, 11]
    assert status == 0, "the child has what was registered in the window, or has lost more"
    assert byte == 77
    assert late_marks == later_marks == [8, 9, 10, 11]
    assert clean == ([], [], 0)


@both_modes
@fresh
def test_one_unmapped_range_does_not_spoil_the_fork(mode):
    """What nobody held, and was unmapped, is refused by madvise(); all others must be marked."""
    rdmafork.fork_init(mode)
    map_at(PLACE, 64 * PAGE)
    map_at(PLACE + PAGE, PAGE, shared=True)
    unheld = [register_address(PLACE + PAGE, PAGE)]
    held = register_address(PLACE + PAGE, PAGE, owner=Owner())
    fork_once()
    held.close()
    map_at(PLACE + PAGE, PAGE)
    unheld.append(register_address(PLACE + PAGE, PAGE))
    rdmafork.protected_ranges()  # which asks what is mapped
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


@needs_lazy
@fresh
def test_no_more_than_half_of_the_mappings():
    """20 000 pages apart would take 40 000 mappings: what is over is left to the kernel."""
    count = 20_000
    limit = rdmafork.kernel_info().max_map_count
    if limit > 70_000:
        pytest.skip(f"vm.max_map_count is {limit}: too many pages would be needed")
    rdmafork.fork_init("lazy")
    map_at(PLACE, 2 * count * PAGE, flags=0x4000)
    map_at(PLACE + (1 << 40), 64 * PAGE)
    registrations = [
        register_address(PLACE + 2 * i * PAGE, PAGE, owner=Owner()) for i in range(count)
    ]
    large = register_address(PLACE + (1 << 40), 64 * PAGE, owner=Owner())
    fork_once()
    numbers = stats()
    assert numbers.vma_budget == limit // 2
    assert numbers.vmas <= numbers.vma_budget
    assert numbers.left_ranges > 0
    assert numbers.left_ranges + numbers.marked_ranges == count + 1
    assert len(smaps()) < limit * 0.6
    # The longest first: they cost the kernel most.
    assert marked(PLACE + (1 << 40), 64 * PAGE) == pages(PLACE + (1 << 40), 64)
    kinds = [p[3] for p in protections()]
    assert kinds.count("kernel") == numbers.left_ranges
    assert bytearray(1 << 22)  # malloc still works
    # What is given back is for others to have.
    for registration in registrations[::2]:
        registration.close()
    del registrations[::2]
    fork_once()
    assert stats().left_ranges == 0
    assert stats().marked_ranges == len(registrations) + 1
    large.close()
    del registrations[:]
    numbers = stats()
    assert numbers[1:6] == (0, 0, 0, 0, 0)
    assert len(smaps()) < 1000


# ---- huge pages ----------------------------------------------------------------------------


@modes_and_trust
def test_a_few_bytes_of_a_huge_page_take_all_of_it(mode, trust, hugepages):
    hugepages(3)
    run(few_bytes_of_a_huge_page, mode, env={"RDMAFORK_TRUST_COPYING": trust})


def few_bytes_of_a_huge_page(mode):
    rdmafork.fork_init(mode)
    memory, address = huge_map(3)
    memory[:] = b"h" * len(memory)
    registration = register(memoryview(memory)[HUGE + 100 : HUGE + 164])
    if mode == "lazy":
        assert marked(address, 3 * HUGE) == []
    # The pool is used up: one huge page to copy and this fork would fail, were it pinned.
    assert child(read, address + HUGE, HUGE) == b"h" * HUGE
    assert marked(address, 3 * HUGE) == pages(address + HUGE, 512)
    assert protections() == [(address + HUGE, address + 2 * HUGE, 1, "advice")]
    assert child(read, address, 5) == b"hhhhh"
    registration.close()
    assert marked(address, 3 * HUGE) == []
    assert child(read, address + HUGE, 5) == b"hhhhh"


@modes_and_trust
@pytest.mark.parametrize("holds", ["held", "not held"])
def test_a_part_of_a_marked_huge_page_does_not_fill_it(mode, trust, holds, hugepages):
    """madvise() takes any part of a huge page that is marked already, and says nothing."""
    hugepages(1)
    run(part_of_a_marked_huge_page, mode, holds, env={"RDMAFORK_TRUST_COPYING": trust})


def part_of_a_marked_huge_page(mode, holds):
    rdmafork.fork_init(mode)
    # A huge page, and base pages after it.
    memory, address = private_map(3 * HUGE)
    address += -address % HUGE
    map_at(address, HUGE, huge=True)
    nbytes = HUGE + 4 * PAGE
    write(address, b"h" * nbytes)
    owner = memory if holds == "held" else None
    first = register_address(address, HUGE, owner=owner)
    parts = [
        # Of marked pages alone, and with pages that bear no mark yet.
        register_address(address + PAGE, PAGE, owner=owner),
        register_address(address + HUGE // 2, HUGE // 2, on_fork="wipe", owner=owner),
        register_address(address + HUGE // 2, HUGE // 2 + PAGE, on_fork="wipe", owner=owner),
    ]
    assert child(read, address + PAGE) == signal.SIGSEGV
    first.close()
    expected = b"h" * HUGE + bytes(PAGE) + b"h" * 3 * PAGE
    for part in parts:
        assert child(read, address, nbytes) == expected
        part.close()
    assert child(read, address, nbytes) == b"h" * nbytes
    unmap(address, HUGE)


@modes_and_trust
@pytest.mark.parametrize("holds", ["held", "not held"])
def test_all_base_pages_of_a_huge_page_do_not_fill_it(mode, trust, holds, hugepages):
    """madvise() takes them, as together they are the huge page."""
    hugepages(1)
    run(all_base_pages_of_a_huge_page, mode, holds, env={"RDMAFORK_TRUST_COPYING": trust})


def all_base_pages_of_a_huge_page(mode, holds):
    rdmafork.fork_init(mode)
    memory, address = huge_map(1)
    memory[:] = b"h" * HUGE
    owner = memory if holds == "held" else None
    for start, end in ((0, HUGE - 100), (100, HUGE), (100, HUGE - 100)):
        with register_address(address + start, end - start, owner=owner):
            assert child(read, address, HUGE) == b"h" * HUGE
    with register_address(address, HUGE, owner=owner):
        assert child(read, address) == signal.SIGSEGV


@both_modes
@needs_pins
def test_pinned_huge_pages_and_an_empty_pool(mode, hugepages):
    hugepages(2)
    run(pinned_huge_pages, mode)


def pinned_huge_pages(mode):
    rdmafork.fork_init(mode)
    memory, address = huge_map(2)
    memory[:] = b"h" * len(memory)
    with Pins(memory):
        try:
            pid = os.fork()
        except OSError as error:
            assert error.errno == errno.ENOMEM
        else:
            if not pid:
                os._exit(0)
            os.waitpid(pid, 0)
            pytest.skip("this kernel does not need huge pages to fork with pinned ones")
        # A byte in each is enough, and each fork works.
        with register(memoryview(memory)[HUGE - 1 : HUGE + 1]):
            assert child(len, "x") == 1
            assert child(read, address, 2 * HUGE) == b"h" * 2 * HUGE


@unmarks_huge_pages
@both_modes
def test_huge_pages_of_several_registrations(mode, hugepages):
    hugepages(4)
    run(several_registrations_of_huge_pages, mode)


def several_registrations_of_huge_pages(mode):
    rdmafork.fork_init(mode)
    memory, address = huge_map(4)
    view = memoryview(memory)
    spans = [(10, 20), (HUGE - 5, HUGE + 5), (HUGE, 2 * HUGE), (3 * HUGE, 3 * HUGE + PAGE)]
    for order in itertools.permutations(range(4)):
        live = {i: register(view[slice(*spans[i])]) for i in order}
        fork_once()
        for i in order:
            expected = {
                page for k in live for page in range(spans[k][0] // HUGE, -(-spans[k][1] // HUGE))
            }
            found = {(a - address) // HUGE for a in marked(address, 4 * HUGE)}
            assert found == expected, (order, i)
            live.pop(i).close()
        assert marked(address, 4 * HUGE) == []
        assert stats().ranges == 0


@both_modes
def test_shared_huge_pages_are_never_marked(mode, hugepages):
    hugepages(2)
    run(shared_huge_pages, mode)


def shared_huge_pages(mode):
    rdmafork.fork_init(mode)
    memory, address = huge_map(2, shared=True)
    view = memoryview(memory)
    live = [register(view[5:10]), register(view[:HUGE]), register(view[HUGE - PAGE : HUGE + PAGE])]
    live.append(register_address(address + PAGE, PAGE))
    for _ in range(5):
        assert child(view.__setitem__, PAGE, 77) is None
        assert memory[PAGE] == 77
        memory[PAGE] = 0
        assert marked(address, 2 * HUGE) == []
        if live:
            live.pop(0).close()


# ---- a device ------------------------------------------------------------------------------


@modes_and_trust
@needs_pins
def test_a_device_reaches_the_parent_after_forks(mode, trust, tmp_path):
    run(device, mode, str(tmp_path / "file"), env={"RDMAFORK_TRUST_COPYING": trust})


def device(mode, path):
    """Pinned pages, edges among them; what the device writes after forks is what is read."""
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
        with open(path, "rb") as file:
            assert device.read_fixed(file.fileno(), address + start, end - start) == end - start
        assert memory[start:end] == data
        assert memory[:start] == b"p" * start
        assert memory[end:] == b"p" * (len(memory) - end)
        os.close(writing)
        for pid in pids:
            os.waitpid(pid, 0)
