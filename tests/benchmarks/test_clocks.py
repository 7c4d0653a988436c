"""The loops in C of the demo and the benchmarks tell the truth, and so do peers made of them."""

import errno
import os
import resource

import pytest
from conftest import fresh, run
from memory import PAGE, PLACE, map_at, marked, private_map, unmap, write

import rdmafork
from rdmafork import _clocks
from rdmafork.benchmarks import _in_c, _peers
from rdmafork.benchmarks._workers import Skipped


def test_clocks_tell_a_system_call_from_none():
    memory, address = private_map(64 * PAGE)
    memory[0] = 1
    at = address + 32 * PAGE
    clocks = {
        "null": _clocks.null_call_ns,
        "madvise": lambda loops: _clocks.madvise_pair_ns(at, PAGE, loops),
    }
    seen = _clocks.medians(clocks, rounds=5, budget_ns=100_000)
    assert 0 < seen["null"] < seen["madvise"]
    with pytest.raises(OSError):
        _clocks.madvise_pair_ns(at + 1, PAGE, 3)


@fresh
def test_the_engine_can_be_timed_from_c():
    rdmafork.fork_init()
    memory, address = private_map(64 * PAGE)
    memory[0] = 1
    assert _clocks.engine_pair_ns(address, PAGE, 100) > 0
    assert rdmafork.stats().registrations == 0
    with pytest.raises(OSError) as caught:
        _clocks.engine_pair_ns(2**64 - PAGE, 2 * PAGE, 1)
    assert caught.value.errno == errno.EOVERFLOW


@fresh
def test_a_fork_is_timed_in_the_parent_and_in_the_child():
    here, there = min(_in_c.fork_ns() for _ in range(3))
    assert 0 < here < 10**9 and 0 < there < 10**9
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    if os.geteuid() == 0:  # the limit is not for root
        os.setresuid(65534, 65534, 65534)
    with pytest.raises(OSError) as caught:
        _in_c.fork_ns()
    assert caught.value.errno == errno.EAGAIN


@fresh
def test_memory_that_is_not_held_can_be_registered_from_c():
    rdmafork.fork_init("lazy" if rdmafork.kernel_info().copy_on_fork_trusted else "eager")
    memory, address = private_map(4 * PAGE)
    memory[:] = bytes(4 * PAGE)
    assert _in_c.engine_hold(address, PAGE) == (1, 0)
    before = rdmafork.stats().madvise_calls
    assert _in_c.engine_hold(address + 2 * PAGE, PAGE, held=False) == (1, 0)
    assert rdmafork.stats().madvise_calls > before  # memory that may be unmapped is marked at once


@fresh
def test_libibverbs_own_engine_can_be_timed():
    try:
        peer = _clocks.Libibverbs()
    except OSError as error:
        pytest.skip(f"no libibverbs to compare with: {error}")
    assert os.path.basename(peer.path).startswith("libibverbs.so.1")
    assert peer.status in (0, 2, None)
    peer.fork_init()
    assert peer.status in (1, 2, None)
    map_at(PLACE, 64 * PAGE)
    if peer.status == 2:
        peer.pair_ns(PLACE, PAGE, 1)
        return
    assert peer.pair_ns(PLACE + 32 * PAGE, PAGE, 100) > _clocks.null_call_ns(100)
    assert marked(PLACE, 64 * PAGE) == []
    with pytest.raises(OSError) as caught:
        peer.pair_ns(PLACE + 64 * PAGE, PAGE, 1)
    assert caught.value.errno == errno.ENOMEM
    assert _peers.Libibverbs().hold(PLACE, PAGE) == (1, 0)
    peer.pair_ns(PLACE, PAGE, 3)
    assert marked(PLACE, 64 * PAGE) == [PLACE]  # each pair takes back only its own mark


MARKING = [name for name, way in _peers.WAYS.items() if way.forks and name != _peers.COPIED]


def made(name):
    """A peer, in this process; one of rdmafork's marks at once."""
    rdmafork.fork_init("eager")
    try:
        return _peers.WAYS[name].peer()
    except Skipped as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("name", MARKING)
def test_held_pages_stay_marked_and_the_first_refusal_is_told(name):
    run(_hold_every_second_page, name)


def _hold_every_second_page(name):
    address = map_at(PLACE, 16 * PAGE)
    write(address, b"x")
    unmap(address + 8 * PAGE, 8 * PAGE)
    assert made(name).hold(address, PAGE, 6, 2 * PAGE) == (4, errno.ENOMEM)
    assert marked(address, 8 * PAGE) == [address + i * PAGE for i in (0, 2, 4, 6)]


@pytest.mark.parametrize("name", MARKING)
def test_a_peer_releases_what_it_has_registered(name):
    run(_register_and_release, name)


def _register_and_release(name):
    address = map_at(PLACE, 4 * PAGE)
    write(address, b"x")
    peer = made(name)
    held = peer.register(address + PAGE, 2 * PAGE)
    assert marked(address, 4 * PAGE) == [address + PAGE, address + 2 * PAGE]
    peer.release(address + PAGE, 2 * PAGE, held)
    assert marked(address, 4 * PAGE) == []
