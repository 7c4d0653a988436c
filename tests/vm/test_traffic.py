"""A device's writes after fork() reach the parent, and its reads are of the parent's memory.

Each test moves data over a connection, forks, lets the parent and the child write on every page
(the parent first: it is then that copy-on-write moves its page), and moves data again.
"""

import ctypes
import errno
import mmap
import os

import pytest
from conftest import fork_once, fresh
from memory import MAP_NORESERVE, PAGE, libc, map_at

import rdmafork
from vm.rc import ALL, Forked, Ours, idle_first, memory, pinned, span, start

KINDS = ["base", "thp", "hugetlb", "shared"]
MIB = 1 << 20
# (bytes, distance into its mapping): within a page, across pages, in a page's middle, all.
SMALL = [(1024, 1533), (1024, 3500), (100_001, 777), (MIB + 13, 4096)]
LARGE = (64 * MIB, 0)


class Bare:
    """Memory regions that nothing protects."""

    def __init__(self, rc):
        self.rc = rc
        self.context, self.pd = rc.open()

    def register(self, buffer):
        return self.rc.register(self.pd, buffer)


class Beside(Bare):
    """The same, with rdmafork.register() on the same buffer."""

    def __init__(self, rc):
        super().__init__(rc)
        self.registrations = []

    def register(self, buffer):
        self.registrations.append(rdmafork.register(buffer))
        return super().register(buffer)


def round_trips(rc, ours, kind, sizes):
    """The bytes that went wrong: before fork(), after it, and after the child wrote and ended."""
    pair = rc.pair(ours.context, ours.pd)
    near = rc.register(ours.pd, memory("shared", max(n for n, _ in sizes)))
    regions = [ours.register(memory(kind, nbytes, at)) for nbytes, at in sizes]

    def round_trip(number):
        # Of large regions every page once, when it matters most.
        every = 1 if number == 2 else 32
        return [
            wrong
            for seed, region in enumerate(regions, 10 * number)
            for wrong in pair.exchange(near, region, seed, every=every * (region.nbytes > 4 * MIB))
        ]

    before = round_trip(1)
    spans = [] if kind == "shared" else [(r.address, r.nbytes) for r in regions]
    child = Forked(idle_first, spans)
    after = round_trip(2)
    child.step()
    overwritten = round_trip(3)
    child.finish()
    return before, after, overwritten, round_trip(4)


def right(sizes):
    return tuple([[0, 0] * len(sizes)] * 4)


# ---- without rdmafork: the proof can fail -----------------------------------------------


@fresh
def test_nothing_else_protects_huge_pages_where_fork_does_not_copy_them(rc, huge_pages):
    sizes = [(2 * MIB, 0), (1024, 1533)]
    before, after, *_ = round_trips(rc, Bare(rc), "hugetlb", sizes)
    assert before == [0, 0] * 2
    if rdmafork.kernel_info().copy_on_fork:
        assert after == [0, 0] * 2
    else:
        assert all(after), "this kernel moves no pinned pages: nothing is proven on it"


# ---- with it ----------------------------------------------------------------------------


modes = pytest.mark.parametrize("mode", ["lazy", "eager"])


@pytest.mark.parametrize("kind", KINDS)
@modes
@fresh
def test_a_region_survives_fork_and_its_children_s_writes(rc, huge_pages, mode, kind):
    start(mode)
    sizes = [*SMALL, LARGE]
    assert round_trips(rc, Ours(rc), kind, sizes) == right(sizes)


@modes
@fresh
def test_register_protects_memory_that_others_registered(rc, huge_pages, mode):
    start(mode)
    for kind in KINDS:
        sizes = [(100_001, 777), (1024, 1533)]
        assert round_trips(rc, Beside(rc), kind, sizes) == right(sizes), kind


@fresh
def test_messages_arrive_after_fork(rc, huge_pages):
    rdmafork.fork_init()
    ours = Ours(rc)
    pair = rc.pair(ours.context, ours.pd)
    near, far = (memory("hugetlb", 100_001, at) for at in (5, 4090))
    regions = [ours.register(buffer) for buffer in (near, far)]
    child = Forked(idle_first, [span(near), span(far)])
    near[:] = bytes(i % 251 for i in range(len(near)))
    far[:] = bytes(len(far))
    pair.send(*regions)
    assert far == near
    child.step()
    pair.send(*regions[::-1])
    assert far == near
    child.finish()


@fresh
def test_a_region_over_four_gib_is_reached_to_its_end(rc):
    rdmafork.fork_init()
    chunk, times = 64 * MIB, 80
    fd = os.memfd_create("chunk")
    os.ftruncate(fd, chunk)
    first = map_at(0, chunk * times, prot=0, flags=MAP_NORESERVE)
    for i in range(times):
        at = libc.mmap(first + i * chunk, chunk, 3, mmap.MAP_SHARED | 0x10, fd, 0)
        assert at == first + i * chunk
    buffer = (ctypes.c_char * (chunk * times)).from_address(first)
    ours = Ours(rc)
    pair = rc.pair(ours.context, ours.pd)
    before = pinned()
    try:
        far = ours.register(buffer)
    except OSError as error:
        assert error.errno == errno.ENOMEM
        assert (pinned(), rdmafork.protected_ranges()) == (before, [])
        with pytest.raises(OSError):
            rc.register(ours.pd, buffer)
        # rdma_rxe of 6.12.107 takes it, that of 6.12.117 refuses 3 GiB already.
        pytest.skip(f"{rc.device} takes no region of 5 GiB on {os.uname().release}, bare or not")
    assert far.nbytes == chunk * times and pinned() - before == chunk * times
    near = ours.register(memory("base", 100_001))
    fork_once()
    for at in ((4 << 30) + 12_345, chunk * times - near.nbytes, (2 << 30) - 5):
        near.obj[:] = os.urandom(near.nbytes)
        pair.write(near, far, at=at)
        arrived = os.pread(fd, near.nbytes, at % chunk)
        arrived += os.pread(fd, near.nbytes - len(arrived), 0)
        assert arrived == near.obj, hex(at)
        near.obj[:] = bytes(near.nbytes)
        pair.read(near, far, at=at)
        assert near.obj == arrived, hex(at)
    pair.close()  # rdma_rxe of old kernels holds what was used last
    far.close()
    assert pinned() == before + -(-near.nbytes // PAGE) * PAGE


@fresh
def test_an_on_demand_region_pins_nothing_and_is_left_to_fork(rc):
    rdmafork.fork_init()
    ours = Ours(rc)
    if not rc.on_demand(ours.context):
        pytest.skip(f"{rc.device} serves no on-demand paging on reliable connections")
    pair = rc.pair(ours.context, ours.pd)
    near, target = ours.register(memory("base", MIB)), memory("base", MIB)
    before = pinned(), rdmafork.protected_ranges()
    far = ours.register(target, ALL | rdmafork.Access.ON_DEMAND)
    assert (pinned(), rdmafork.protected_ranges()) == before
    assert not far.protected
    # Each page's first bytes only: rxe on Linux 7.3 takes the bytes of every packet from the
    # start of a page, also without rdmafork and before any fork().
    assert pair.exchange(near, far, 1, every=1) == (0, 0)
    child = Forked(idle_first, [span(target)])
    assert pair.exchange(near, far, 3, every=1) == (0, 0)
    child.step()
    assert pair.exchange(near, far, 5, every=1) == (0, 0)
    child.finish()
