"""Huge pages are marked whole, and a child gets back the bytes that were not registered."""

import errno
import itertools
import os
import signal

import pytest
from conftest import both_modes, child, fork_once, modes_and_trust, needs_pins, run
from memory import (
    HUGE,
    PAGE,
    huge_map,
    map_at,
    marked,
    pages,
    private_map,
    protections,
    read,
    unmap,
    unmarks_huge_pages,
    write,
)

import rdmafork
from rdmafork import register, register_address, stats
from rdmafork._pins import Pins


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
    assert protections() == [(address + HUGE, address + 2 * HUGE, 1, "mark")]
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
