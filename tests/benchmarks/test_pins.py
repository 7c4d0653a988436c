"""The pins the demo, the tests and the benchmarks stand on are real: see rdmafork/_pins.pyx."""

import errno
import functools
import mmap
import os
import re
import resource
import signal
import threading
import time
from pathlib import Path

import pytest
from conftest import child, fork_once, fresh, in_threads, needs_pins, run
from memory import PAGE, map_at, private_map, shared_map, unmap
from seccomp import refuse

import rdmafork
from rdmafork import _pins
from rdmafork._pins import Pins
from rdmafork.cli.demo_worker import living_child

copies = pytest.mark.skipif(
    not rdmafork.kernel_info().copy_on_fork, reason="this kernel does not copy pinned pages"
)


def pinned_kib():
    return int(re.search(r"VmPin:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))


def filled(nbytes, fill=b"p"):
    memory, address = private_map(nbytes)
    memory[:] = fill * nbytes
    return memory, address


@pytest.fixture
def device():
    """A file in memory, at the other end of the pinned pages."""
    fd = os.memfd_create("device")
    yield fd
    os.close(fd)


# ---- pins -------------------------------------------------------------------------------


@needs_pins
def test_pins_are_counted_by_the_kernel_and_given_back():
    memory, _ = filled(64 * PAGE)
    before = pinned_kib()
    pins = Pins(memory)
    assert pinned_kib() - before == 64 * PAGE >> 10
    assert (pins.nbytes, pins.closed, pins.inherited) == (64 * PAGE, False, False)
    pins.close()
    assert pinned_kib() == before
    assert pins.closed and pins.fileno() == -1
    pins.close()


@needs_pins
@copies
def test_fork_copies_pinned_pages_and_only_these():
    memory, _ = filled(1024 * PAGE)
    unpinned = _pins.fork_cost(memory=True)
    with Pins(memory):
        pinned = _pins.fork_cost(memory=True)
    again = _pins.fork_cost(memory=True)
    assert pinned.private_nbytes - unpinned.private_nbytes >= 1000 * PAGE
    assert again.private_nbytes - unpinned.private_nbytes < 100 * PAGE
    assert pinned.ns > 0


@needs_pins
@copies
@fresh
def test_registered_pages_are_not_copied():
    memory, _ = filled(1024 * PAGE)
    rdmafork.fork_init()
    before = _pins.fork_cost(memory=True)
    with Pins(memory), rdmafork.register(memory):
        registered = _pins.fork_cost(memory=True)
    assert abs(registered.private_nbytes - before.private_nbytes) < 100 * PAGE


@needs_pins
def test_ranges_are_split_where_the_kernel_wants_it():
    memory, address = filled(4 * PAGE)
    with Pins([(address, PAGE), (address + 2 * PAGE, 2 * PAGE)]) as pins:
        assert pins.entries == ((address, PAGE), (address + 2 * PAGE, 2 * PAGE))
        assert pins.nbytes == 3 * PAGE
    gib = 1 << 30
    if os.sysconf("SC_AVPHYS_PAGES") * PAGE < 3 * gib:
        pytest.skip("2 GiB of memory are needed to pin more than 1 GiB at once")
    large = mmap.mmap(-1, gib + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with Pins(large) as pins:
        start = pins.entries[0][0]
        assert pins.entries == ((start, gib), (start + gib, PAGE))
    large.close()
    assert memory[0] == ord("p")


@needs_pins
def test_a_pinned_buffer_is_held():
    buffer = bytearray(PAGE)
    with Pins(buffer), pytest.raises(BufferError):
        buffer.extend(b"x" * PAGE)
    buffer.extend(b"x")


@needs_pins
def test_memory_that_cannot_be_pinned_is_refused():
    memory, _ = filled(PAGE)
    address = map_at(0, 1 << 28)
    unmap(address + (1 << 27), 1 << 27)  # above the hole, for mappings made meanwhile
    unmap(address + PAGE, PAGE)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="not mapped") as caught:
        Pins([(address, 4 * PAGE)])
    assert caught.value.errno == errno.EFAULT
    map_at(address + PAGE, PAGE)
    with pytest.raises(ValueError, match="no memory"):
        Pins([])
    with pytest.raises(BufferError):
        Pins(memoryview(memory)[::2])
    assert os.listdir("/proc/self/fd") == before


@needs_pins
def test_pins_are_made_once():
    pins = Pins(bytearray(PAGE))
    pins.close()
    with pytest.raises(RuntimeError, match="once"):
        pins.__init__(bytearray(PAGE))
    assert pins.closed


# ---- the device -------------------------------------------------------------------------


@needs_pins
def test_bytes_go_both_ways(device):
    memory, address = filled(4 * PAGE)
    os.pwrite(device, b"from the device", 100)
    with Pins(memory) as pins:
        assert pins.read_fixed(device, address + PAGE - 5, 15, 100) == 15
        assert memory[PAGE - 6 : PAGE + 11] == b"pfrom the devicep"
        memory[:10] = b"the parent"
        assert pins.write_fixed(device, address, 10, 200) == 10
        assert os.pread(device, 10, 200) == b"the parent"
        assert pins.read_fixed(device, address, PAGE, 205) == 5  # the end of the file


@needs_pins
def test_a_pipe_and_the_position_of_a_file(device):
    memory, address = filled(PAGE)
    reading, writing = os.pipe()
    os.write(device, b"abcdef")
    os.lseek(device, 2, os.SEEK_SET)
    with Pins(memory) as pins:
        assert pins.write_fixed(writing, address, 3, -1) == 3
        assert os.read(reading, 10) == b"ppp"
        os.write(writing, b"xyz")
        assert pins.read_fixed(reading, address, 10) == 3
        assert pins.read_fixed(device, address + 3, 2, -1) == 2
    assert memory[:6] == b"xyzcdp"
    os.close(reading)
    os.close(writing)


@needs_pins
def test_errors_of_a_transfer(device):
    memory, address = filled(2 * PAGE)
    pins = Pins([(address, PAGE), (address + PAGE, PAGE)])
    for at, nbytes in ((address - 1, 2), (address + PAGE - 1, 2), (address + 2 * PAGE, 1)):
        with pytest.raises(ValueError, match="crosses the boundary of a pinned entry"):
            pins.read_fixed(device, at, nbytes)
    with pytest.raises(OSError) as caught:
        pins.read_fixed(987654, address, 1)
    assert caught.value.errno == errno.EBADF
    assert pins.write_fixed(device, address, 1) == 1
    pins.close()
    with pytest.raises(ValueError, match="closed"):
        pins.write_fixed(device, address, 1)
    assert memory[0] == ord("p")


@needs_pins
def test_threads_share_one_set_of_pins(device):
    memory, address = filled(8 * PAGE)
    os.pwrite(device, b"".join(bytes([65 + i]) * PAGE for i in range(8)), 0)

    def transfer(index):
        at = index * PAGE
        for _ in range(200):
            memory[at : at + PAGE] = b"-" * PAGE
            pins.read_fixed(device, address + at, PAGE, at)
            assert memory[at : at + PAGE] == bytes([65 + index]) * PAGE

    with Pins(memory) as pins:
        in_threads([functools.partial(transfer, index) for index in range(8)])


class Interrupted(Exception):
    pass


@needs_pins
def test_an_interrupted_transfer_moves_nothing_later():
    memory, address = filled(PAGE)
    reading, writing = os.pipe()

    def interrupt(*_):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with Pins(memory) as pins:
            with pytest.raises(Interrupted):
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                pins.read_fixed(reading, address, 3)  # an empty pipe
            os.write(writing, b"xyz")
            time.sleep(0.05)
            assert memory[:3] == b"ppp"
            assert pins.read_fixed(reading, address, 3) == 3
            assert memory[:3] == b"xyz"
    finally:
        signal.signal(signal.SIGALRM, before)
        os.close(reading)
        os.close(writing)


@needs_pins
def test_a_signal_that_raises_nothing_is_no_interruption():
    memory, address = filled(PAGE)
    reading, writing = os.pipe()
    seen = []

    def on_alarm(*_):
        seen.append(1)
        if len(seen) == 3:
            os.write(writing, b"xyz")

    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        with Pins(memory) as pins:
            signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
            assert pins.read_fixed(reading, address, 3) == 3
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        os.close(reading)
        os.close(writing)
    assert memory[:3] == b"xyz" and len(seen) >= 3


@needs_pins
def test_a_signal_that_another_thread_takes_ends_a_transfer():
    memory, address = filled(PAGE)
    reading, writing = os.pipe()
    done = threading.Event()

    def interrupt(*_):
        raise Interrupted

    other = threading.Thread(target=done.wait)
    other.start()
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    try:
        with Pins(memory) as pins, pytest.raises(Interrupted):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            pins.read_fixed(reading, address, 3)  # an empty pipe
    finally:
        done.set()
        other.join()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
        signal.signal(signal.SIGALRM, before)
        os.close(reading)
        os.close(writing)


# ---- fork -------------------------------------------------------------------------------


@needs_pins
def test_a_child_cannot_use_the_pins_and_closes_them_silently(device):
    memory, address = filled(PAGE)
    pins = Pins(memory)
    before = pinned_kib()

    def in_child():
        with pytest.raises(rdmafork.InheritedError):
            pins.read_fixed(device, address, 1)
        inherited = pins.inherited, repr(pins)
        pins.close()
        pins.close()
        return inherited, pins.closed

    (inherited, text), closed = child(in_child)
    assert inherited and closed and "inherited" in text
    fork_once()  # a child that exits without closing
    assert pinned_kib() == before
    os.pwrite(device, b"x", 0)
    assert pins.read_fixed(device, address, 1, 0) == 1
    assert memory[0] == ord("x")
    pins.close()


@needs_pins
@copies
def test_closing_unpins_while_a_child_holds_the_descriptor():
    memory, _ = filled(1024 * PAGE)
    pins = Pins(memory)
    with living_child():
        pins.close()
        cost = _pins.fork_cost(memory=True)
    assert cost.private_nbytes < 500 * PAGE


# ---- where pins are forbidden -----------------------------------------------------------


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
@fresh
def test_a_seccomp_filter_is_named(error):
    refuse("io_uring_setup", error)
    assert "seccomp" in _pins.unavailable()
    memory, _ = private_map(PAGE)
    with pytest.raises(OSError, match="seccomp") as caught:
        Pins(memory)
    assert caught.value.errno == error
    rdmafork.fork_init()
    with rdmafork.register(memory):
        _pins.fork_cost()


def without_privileges():
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)


@needs_pins
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
@fresh
def test_the_limit_of_locked_memory_is_named():
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
    without_privileges()
    memory, _ = filled(2 << 20)
    with pytest.raises(OSError, match="RLIMIT_MEMLOCK is 1024 KiB") as caught:
        Pins(memory)
    assert caught.value.errno == errno.ENOMEM
    with Pins(memoryview(memory)[: 1 << 19]):
        pass
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    assert "RLIMIT_MEMLOCK is 0 KiB" in _pins.unavailable()


# ---- the cost of a fork ----------------------------------------------------------------


def test_forks_are_of_libc_and_run_handlers():
    assert run(_count_forks) == 3


def _count_forks():
    rdmafork.fork_init()
    before = rdmafork.stats().forks
    for memory in (False, True, True):
        cost = _pins.fork_cost(memory=memory)
        assert cost.ns > 0 and (cost.private_nbytes is not None) == memory
    return rdmafork.stats().forks - before


def test_shared_memory_is_not_the_childs_own():
    memory, _ = shared_map(1024 * PAGE)
    memory[:] = b"s" * len(memory)
    assert _pins.fork_cost(memory=True).private_nbytes < 500 * PAGE
