"""Eager registrations of pages that others have marked already: no cost, and no less protected."""

import ctypes
import random
import resource

import pytest
from conftest import UNTRUSTED, child, fork_once, fresh
from memory import PAGE, marked, private_map, read

import rdmafork
from rdmafork import SharedPageWarning, register, register_address, stats

PAGES = 64


def marked_of(start):
    return {(address - start) // PAGE for address in marked(start, PAGES * PAGE)}


def some_memory():
    memory, start = private_map(PAGES * PAGE)
    memory[:] = b"x" * len(memory)
    return register(memory), start


def inside(outer, first, end):
    start = outer.address + first * PAGE
    return register_address(start, (end - first) * PAGE, owner=outer.obj)


@fresh(env={"RDMAFORK_MODE": "eager"})
def test_an_inner_registration_outlives_the_outer():
    rdmafork.fork_init()
    outer, start = some_memory()
    calls = stats().madvise_calls
    inner = [inside(outer, 4, 8), inside(outer, 8, 9), inside(outer, 63, 64)]
    assert stats().madvise_calls == calls
    outer.close()
    assert marked_of(start) == {4, 5, 6, 7, 8, 63}
    fork_once()
    assert marked_of(start) == {4, 5, 6, 7, 8, 63}
    for registration in inner:
        registration.close()
    assert marked_of(start) == set()


@fresh(env={"RDMAFORK_MODE": "eager"})
def test_it_costs_no_system_call_before_a_fork_and_after():
    rdmafork.fork_init()
    outer, _ = some_memory()
    fork_once()
    calls = stats().madvise_calls
    for _ in range(100):
        inside(outer, 1, 9).close()
    assert stats().madvise_calls == calls


@fresh(env={"RDMAFORK_MODE": "eager"})
def test_memory_that_is_not_held_is_marked_again_all_the_same():
    rdmafork.fork_init()
    _outer, start = some_memory()
    calls = stats().madvise_calls
    register_address(start, PAGE).close()
    assert stats().madvise_calls > calls


@fresh(env={"RDMAFORK_MODE": "eager"})
def test_any_order_of_closing_leaves_registered_pages_marked():
    rdmafork.fork_init()
    chance = random.Random(4)
    for _ in range(100):
        outer, start = some_memory()
        memory = outer.obj  # stays mapped
        held = {outer: set(range(PAGES))}
        for _ in range(chance.randrange(1, 12)):
            first = chance.randrange(PAGES)
            end = chance.randrange(first, PAGES) + 1
            held[inside(outer, first, end)] = set(range(first, end))
            if chance.random() < 0.05:
                fork_once()
        for registration in chance.sample(list(held), len(held)):
            registration.close()
            del held[registration]
            assert marked_of(start) == set().union(*held.values())
        memory.close()


# ---- where partial pages are marked: a child gets a copy of them ----------------------------


@fresh(env=UNTRUSTED)
def test_room_for_copies_of_partial_pages_is_taken_at_once():
    rdmafork.fork_init()
    memory, start = private_map(5000 * PAGE)
    memory[:] = b"x" * len(memory)
    with register(memory):
        inner = [register_address(start + i * PAGE + 100, 50, owner=memory) for i in range(5000)]
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * PAGE
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (1 << 20), resource.RLIM_INFINITY))
    for at in (start, start + 4999 * PAGE):
        assert child(read, at, PAGE) == b"x" * PAGE
    del inner


@fresh(env=UNTRUSTED)
def test_a_partial_page_that_fork_itself_uses_is_warned_of():
    rdmafork.fork_init()
    libc = ctypes.CDLL(None)
    libc.pthread_self.restype = ctypes.c_void_p
    page = libc.pthread_self() & -PAGE
    # All of its pages, none of which it shares: no warning.
    with (
        register_address(page, PAGE, owner=libc),
        pytest.warns(SharedPageWarning, match="control block"),
    ):
        register_address(page + 2048, 8, owner=libc).close()
