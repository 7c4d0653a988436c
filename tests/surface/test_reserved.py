"""In a child the addresses of absent pages are reserved: nothing it maps lands there.

A stale pointer faults, then, and neither reads nor writes another's memory. Each promise has its
control, in a process that marks the same pages as libibverbs does: their addresses are free in a
child.
"""

import ctypes
import errno
import mmap
import os
import random
import signal

import pytest
from conftest import both_modes, child, fresh, modes_and_trust, run
from memory import (
    MADV_DONTFORK,
    MAP_NORESERVE,
    PAGE,
    address_of,
    libc,
    madvise,
    map_at,
    private_map,
    read,
    write,
)

import rdmafork


def protect(mode, address, nbytes):
    """Returns objects to be kept. mode "none" marks the pages and no more."""
    if mode == "none":
        start, end = address + -address % PAGE, address + nbytes & -PAGE
        return madvise(start, end - start, MADV_DONTFORK)
    rdmafork.fork_init(mode)
    return rdmafork.register_address(address, nbytes, owner=protect)


# ---- mappings of a child ------------------------------------------------------------------


def map_everything(found, most):
    """Map all addresses there are, the largest pieces first: [start, end) each, into found."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    count, nbytes = 0, 1 << 46
    while nbytes >= PAGE:
        address = libc.mmap(None, nbytes, 0, flags, -1, 0)
        if address == ctypes.c_void_p(-1).value:
            nbytes >>= 1
            continue
        assert count < most
        found[2 * count], found[2 * count + 1] = address, address + nbytes
        count += 1
    # Room for the interpreter again.
    for i in range(count):
        libc.munmap(found[2 * i], found[2 * i + 1] - found[2 * i])
    return count


def landed(mode):
    """How many pages of those it does not get a child can map, when it maps all it can."""
    holes = []
    for nbytes in (64 << 20, 1 << 20, 5 * PAGE, PAGE):
        memory, address = private_map(nbytes + 2 * PAGE)
        write(address, b"n" * len(memory))
        holes.append((address + PAGE, address + PAGE + nbytes, memory))
    kept = [protect(mode, start, end - start) for start, end, _ in holes]
    most = 20_000
    found = (ctypes.c_uint64 * (2 * most))()

    def hit():
        count = map_everything(found, most)
        total = sum(found[2 * i + 1] - found[2 * i] for i in range(count))
        assert total > 100 << 40, "these were not nearly all addresses"
        return sum(
            max(0, min(end, found[2 * i + 1]) - max(start, found[2 * i]))
            for i in range(count)
            for start, end, _ in holes
        )

    def hinted():
        return [map_at(start, PAGE, fixed=False) == start for start, _, _ in holes]

    result = child(hit) // PAGE, sum(child(hinted))
    assert len(kept) == len(holes)
    assert all(bytes(memory) == b"n" * len(memory) for _, _, memory in holes)
    return result


@both_modes
def test_a_child_that_maps_all_it_can_lands_in_no_hole(mode):
    assert run(landed, mode) == (0, 0)


def test_without_reserved_addresses_a_child_lands_in_holes():
    pages, hinted = run(landed, "none")
    assert pages > 16_000 and hinted == 4


# ---- stale pointers -----------------------------------------------------------------------


def kernel_writes(address):
    """Have read(2) write there: the number of the error, or 0."""
    zeros = os.open("/dev/zero", os.O_RDONLY)
    try:
        os.readv(zeros, [(ctypes.c_char * 8).from_address(address)])
        return 0
    except OSError as error:
        return error.errno
    finally:
        os.close(zeros)


def pointers(mode):
    """Ways to write into registered memory, and addresses amid it, of many sizes and owners."""
    np = pytest.importorskip("numpy")
    memory, at = private_map(9 * PAGE)
    block = bytearray(3 << 20)
    array = np.zeros(300_000, "i8")
    owned = [memory, block, array]
    spans = [(at, 9 * PAGE), (address_of(block), len(block)), (array.ctypes.data, array.nbytes)]
    for nbytes in random.Random(1).choices(range(2 * PAGE, 90 * PAGE), k=60):
        owned.append(private_map(nbytes)[0])
        spans.append((address_of(owned[-1]), nbytes))
    registrations = [protect(mode, *span) for span in spans]
    view = memoryview(block)
    ways = {
        "mmap": lambda: memory.write(b"stale"),
        "memoryview": lambda: view.__setitem__(1 << 20, 1),
        "numpy": lambda: array[1000:200_000].fill(1),
        "ctypes": lambda: ctypes.memset(at + 5 * PAGE, 1, 9),
    }
    if mode != "none":
        buffer = rdmafork.Buffer(5 * PAGE)
        shown = memoryview(buffer)
        ways["Buffer's view"] = lambda: shown.__setitem__(0, 1)
        ways["Buffer"] = lambda: memoryview(buffer).__setitem__(0, 1)
        ways["Buffer.address"] = lambda: write(buffer.address, b"stale")
        ways["Registration.address"] = lambda: write(registrations[0].address, b"stale")
        ways["Registration.obj"] = lambda: registrations[0].obj.write(b"stale")
    addresses = [
        page
        for start, nbytes in spans
        for page in range((start + -start % PAGE), (start + nbytes & -PAGE), 16 * PAGE)
    ]
    return ways, addresses, (owned, registrations)


def how_it_ends(way):
    try:
        way()
    except rdmafork.InheritedError:
        return "InheritedError"
    return "nothing happened"


def use_stale_pointers(mode):
    """In a child with memory of its own: how each use ends, and how much of the child's is hit."""
    ways, addresses, kept = pointers(mode)
    before = [bytes(memory) for memory in kept[0]]

    def live():
        order = random.Random(2)
        own = [private_map(order.randrange(1, 40) * PAGE)[0] for _ in range(300)]
        for memory in own:
            memory[:] = b"c" * len(memory)
        written = [kernel_writes(address) for address in addresses]
        ends = {name: child(how_it_ends, way) for name, way in ways.items()}
        hit = sum(len(memory) - memory[:].count(b"c") for memory in own)
        return ends, set(written), hit

    result = child(live)
    assert [bytes(memory) for memory in kept[0]] == before, "the parent's"
    return result


DEATHS = {
    "mmap": signal.SIGSEGV,
    "memoryview": signal.SIGSEGV,
    "numpy": signal.SIGSEGV,
    "ctypes": signal.SIGSEGV,
    "Buffer's view": signal.SIGSEGV,
    "Buffer": "InheritedError",
    "Buffer.address": "InheritedError",
    "Registration.address": "InheritedError",
    "Registration.obj": "InheritedError",
}


@modes_and_trust
def test_a_stale_pointer_faults_and_hits_no_other_mapping(mode, trust):
    ends, written, hit = run(use_stale_pointers, mode, env={"RDMAFORK_TRUST_COPYING": trust})
    assert ends == DEATHS
    assert written == {errno.EFAULT}
    assert hit == 0


def test_in_unreserved_addresses_it_hits_the_child_s_own():
    _, written, hit = run(use_stale_pointers, "none")
    assert 0 in written and hit > 0


# ---- holes that are not reserved ----------------------------------------------------------


def main_stack():
    """Three pages of the main thread's stack, below what it is at."""
    with open("/proc/self/maps") as maps:
        line = next(line for line in maps if line.endswith("[stack]\n"))
    start = int(line.split("-")[0], 16) + 2 * PAGE
    write(start, b"s" * 3 * PAGE)
    return start


def reads(address):
    reading, writing = os.pipe()
    try:
        os.write(writing, (ctypes.c_char * 8).from_address(address))
        return os.read(reading, 8)
    except OSError as error:
        return error.errno
    finally:
        os.close(reading)
        os.close(writing)


@both_modes
@fresh
def test_of_too_many_holes_the_shortest_are_not_reserved(mode):
    """They fault until something is mapped there. That of a stack grows, and reads zeros."""
    start = main_stack()
    long, short = 20 * PAGE, 2 * PAGE
    memory, at = private_map(1100 * (long + PAGE) + short)
    write(at, b"n" * len(memory))
    last = at + 1100 * (long + PAGE)
    kept = [protect(mode, at + i * (long + PAGE), long) for i in range(1100)]
    kept += [protect(mode, last, short), protect(mode, start, 3 * PAGE)]

    def look():
        assert reads(last) == errno.EFAULT
        free = map_at(last, PAGE, fixed=False) == last
        reserved = map_at(at, PAGE, fixed=False) != at
        return reserved, free, reads(start + PAGE)

    assert child(look) == (True, True, bytes(8))
    assert len(kept) == 1102 and memory[-1] == ord("n") and read(start, 8) == b"s" * 8
