"""Eager registrations of pages that others have marked already: no cost, and no less protected."""

import random

from conftest import PAGE, fork_once, fresh, marked, private_map

import rdmafork
from rdmafork import register, register_address, stats

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
def test_it_keeps_its_pages_when_the_other_is_closed():
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
def test_memory_that_nobody_holds_is_marked_again_all_the_same():
    rdmafork.fork_init()
    _outer, start = some_memory()
    calls = stats().madvise_calls
    register_address(start, PAGE).close()
    assert stats().madvise_calls > calls


@fresh(env={"RDMAFORK_MODE": "eager"})
def test_any_order_of_closing_leaves_what_is_registered_marked():
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
