"""Whatever becomes of a region, its pins and the device's objects are what they were before it."""

import contextlib
import gc
import itertools
import os
import signal

import pytest
from conftest import fork_once, fresh
from memory import PAGE

import rdmafork
from vm.rc import Forked, Ours, State, eventually, memory, pinned, pinned_pages, start

SIZE = 100_001  # touches 26 pages, at 777 bytes into the first
PINNED = 25 * PAGE


def buffers(n):
    return [memory("base", SIZE, 777) for _ in range(n)]


@pytest.mark.parametrize("mode", ["lazy", "eager"])
@fresh
def test_close_gives_everything_back(rc, mode):
    start(mode)
    before = State.now(rc)
    context = rdmafork.Context(rc.device)
    pd = context.alloc_pd()
    region = pd.register(buffers(1)[0])
    during = State.now(rc)
    assert during.pinned == before.pinned + PINNED
    assert during.objects["mr"] == before.objects["mr"] + 1
    assert during.objects["pd"] == before.objects["pd"] + 1
    assert during.protected and not before.protected
    fork_once()  # marks what lazy had left
    assert len(State.now(rc).marked) == len(before.marked) + 1
    for closing, gone in ((region, "mr"), (pd, "pd"), (context, "ctx")):
        closing.close()
        closing.close()  # a second time does nothing
        assert closing.closed
        if gone in before.objects:
            assert rc.objects()[gone] == before.objects[gone], gone
    assert State.now(rc) == before


@fresh
def test_an_exception_gives_everything_back(rc):
    rdmafork.fork_init()
    before = State.now(rc)
    with pytest.raises(ZeroDivisionError):
        with rdmafork.Context(rc.device) as context, context.alloc_pd() as pd:
            with pd.register(buffers(1)[0]) as region:
                assert not region.closed and pinned() == before.pinned + PINNED
                raise ZeroDivisionError
    assert region.closed and pd.closed and context.closed
    assert State.now(rc) == before


@fresh
def test_del_in_any_order_gives_everything_back(rc):
    rdmafork.fork_init()
    gc.disable()  # nothing here waits for it
    memories = buffers(2)
    before = State.now(rc)
    for order in itertools.permutations(["context", "pd", "one", "two"]):
        context = rdmafork.Context(rc.device)
        pd = context.alloc_pd()
        held = {"context": context, "pd": pd}
        held |= {name: pd.register(m) for name, m in zip(("one", "two"), memories, strict=True)}
        del context, pd
        assert pinned() == before.pinned + 2 * PINNED
        for name in order:
            # Regions still held work, whichever are gone.
            for left in held.keys() & {"one", "two"}:
                assert not held[left].closed and held[left].lkey is not None, (order, name)
            del held[name]
        assert pinned() == before.pinned and State.now(rc) == before, order


@fresh
def test_the_garbage_collector_gives_everything_back(rc):
    rdmafork.fork_init()
    gc.disable()  # not before it is told to
    before = State.now(rc)

    class Holder:
        pass

    for first in range(4):  # which is the first that the collector comes to
        holder = Holder()
        holder.itself, holder.parts = holder, []
        gc.collect(0)  # it is older, so the collector comes to it later
        context = rdmafork.Context(rc.device)
        pd = context.alloc_pd()
        parts = [context, pd, *(pd.register(m) for m in buffers(2))]
        holder.parts += parts[first:] + parts[:first]
        del holder, context, pd, parts
        assert pinned() == before.pinned + 2 * PINNED
        gc.collect()
        assert State.now(rc) == before, first


@fresh
def test_a_parent_closed_first_closes_its_children(rc):
    rdmafork.fork_init()
    before = State.now(rc)
    for close in ("context", "pd"):
        context = rdmafork.Context(rc.device)
        domains = [context.alloc_pd() for _ in range(2)]
        regions = [pd.register(m) for pd in domains for m in buffers(2)]
        if close == "context":
            context.close()
        else:
            for pd in domains:
                pd.close()
        assert all(x.closed for x in domains + regions)
        assert pinned() == before.pinned
        for use in (lambda: regions[0].lkey, lambda: domains[0].register(bytearray(1))):  # noqa: B023
            with pytest.raises(ValueError, match="closed"):
                use()
        for region in regions:
            region.close()
        context.close()
        assert State.now(rc) == before, close


@fresh
def test_the_same_buffer_twice_counts_twice(rc):
    rdmafork.fork_init()
    before = State.now(rc)
    with contextlib.closing(Ours(rc)) as ours:
        buffer = buffers(1)[0]
        regions = [ours.register(buffer) for _ in range(2)]
        assert pinned() == before.pinned + 2 * PINNED
        assert rc.objects()["mr"] == before.objects["mr"] + 2
        assert {r.registrations for r in rdmafork.protected_ranges()} == {2}
        pair = rc.pair(ours.context, ours.pd)
        regions.pop(0).close()
        assert pinned() == before.pinned + PINNED
        near = ours.register(memory("shared", SIZE))
        fork_once()
        assert pair.exchange(near, regions[0], 1) == (0, 0)
        pair.close()
    assert State.now(rc) == before


@fresh
def test_a_killed_process_leaves_nothing(rc):
    rdmafork.fork_init()
    before, pages = State.now(rc), pinned_pages()

    def steps():
        ours = Ours(rc)
        regions = [ours.register(m) for m in buffers(4)]
        pair = rc.pair(ours.context, ours.pd)
        yield pinned()
        del regions, pair

    child = Forked(steps)
    assert child.said == 4 * PINNED
    assert rc.objects()["mr"] == before.objects["mr"] + 4
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert eventually(rc.objects, before.objects) == before.objects
    assert eventually(pinned_pages, pages) == pages
