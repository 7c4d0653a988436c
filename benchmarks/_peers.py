"""Who registers memory: the ways that are compared, each to be tried in a process of its own."""

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Iterable
from itertools import repeat
from time import perf_counter_ns
from types import MappingProxyType
from typing import NamedTuple

import rdmafork
from rdmafork import _clocks
from rdmafork.cli import machine, terminal

from ._workers import Environment, Skipped

PAGE = mmap.PAGESIZE
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
MAP_NORESERVE = 0x4000
HUGETLB = 0x40000 | 21 << 26  # MAP_HUGETLB | MAP_HUGE_2MB
TOGETHER = 2 << 30  # bytes that all peers may take at once
KEPT: list[object] = []  # for as long as the process lives


def private_memory(nbytes: int, flags: int = 0) -> int:
    """The address of private memory, mapped until this process ends.

    On base pages, or with HUGETLB as flags on huge ones: OSError where the pool has none left. One
    byte is written before anything splits the mapping: its parts can merge again.
    """
    memory = mmap.mmap(-1, nbytes, flags=PRIVATE | (flags or MAP_NORESERVE))
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory[0] = 1
    KEPT.append(memory)
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def touch(start: int, nbytes: int, step: int = PAGE) -> None:
    """Make a page every so many bytes present."""
    for at in range(start, start + nbytes, step):
        ctypes.memset(at, 1, 1)


class Peer:
    """hold() registers for good; pair_ns() times a registration and its release."""

    def hold(self, address: int, nbytes: int, count: int = 1, stride: int = 0) -> tuple[int, int]:
        """(of count ranges how many could be registered, errno of the next or 0)."""
        return count, 0

    def pair_ns(self, address: int, nbytes: int, loops: int) -> float:
        raise NotImplementedError

    def arena(self, nbytes: int) -> int:
        """The address of memory that is registered for good."""
        address = private_memory(nbytes)
        self.hold(address, nbytes)
        return address


class NullCall(Peer):
    def pair_ns(self, address: int, nbytes: int, loops: int) -> float:
        return _clocks.null_call_ns(loops)


class Madvise(Peer):
    def hold(self, address: int, nbytes: int, count: int = 1, stride: int = 0) -> tuple[int, int]:
        return _clocks.madvise_hold(address, nbytes, count, stride)

    def pair_ns(self, address: int, nbytes: int, loops: int) -> float:
        return _clocks.madvise_pair_ns(address, nbytes, loops)


class Libibverbs(Peer):
    def __init__(self) -> None:
        try:
            self._library = _clocks.Libibverbs()
            self._library.fork_init()
        except OSError as error:
            raise Skipped(error.strerror) from None
        if self._library.status == rdmafork.ForkStatus.UNNEEDED:
            raise Skipped("this libibverbs tracks nothing where the kernel copies pinned pages")

    def hold(self, address: int, nbytes: int, count: int = 1, stride: int = 0) -> tuple[int, int]:
        return self._library.hold(address, nbytes, count, stride)

    def pair_ns(self, address: int, nbytes: int, loops: int) -> float:
        return self._library.pair_ns(address, nbytes, loops)


class Engine(Peer):
    def __init__(self) -> None:
        try:
            rdmafork.fork_init()
        except OSError as error:  # lazy, where the kernel does not copy at fork
            raise Skipped(error.strerror) from None

    def hold(self, address: int, nbytes: int, count: int = 1, stride: int = 0) -> tuple[int, int]:
        return _clocks.engine_hold(address, nbytes, count, stride)

    def pair_ns(self, address: int, nbytes: int, loops: int) -> float:
        return _clocks.engine_pair_ns(address, nbytes, loops)

    def arena(self, nbytes: int) -> int:
        buffer = rdmafork.Buffer(nbytes, page_size=PAGE)
        KEPT.append(buffer)
        return buffer.address


class Python(Engine):
    def pair_ns(self, address: int, nbytes: int, loops: int) -> float:
        register, buffer = rdmafork.register, (ctypes.c_char * nbytes).from_address(address)
        start = perf_counter_ns()
        for _ in repeat(None, loops):
            register(buffer).close()
        return (perf_counter_ns() - start) / loops


class View(Peer):
    def pair_ns(self, address: int, nbytes: int, loops: int) -> float:
        buffer = (ctypes.c_char * nbytes).from_address(address)
        start = perf_counter_ns()
        for _ in repeat(None, loops):
            memoryview(buffer).release()
        return (perf_counter_ns() - start) / loops


class Way(NamedTuple):
    peer: type[Peer]
    environment: Environment = MappingProxyType({})


LAZY, EAGER = {"RDMAFORK_MODE": "lazy"}, {"RDMAFORK_MODE": "eager"}
FLOOR = "madvise pair"
WAYS = {
    FLOOR: Way(Madvise),
    "null system call": Way(NullCall),
    "libibverbs": Way(Libibverbs),
    "libibverbs, huge pages safe": Way(Libibverbs, {"RDMAV_HUGEPAGES_SAFE": "1"}),
    "rdmafork eager": Way(Engine, EAGER),
    "rdmafork lazy": Way(Engine, LAZY),
    "rdmafork eager, Python": Way(Python, EAGER),
    "rdmafork lazy, Python": Way(Python, LAZY),
    "memoryview, Python": Way(View),
}


def environments(*names: str) -> dict[str, Environment]:
    """The environment of each of these ways, or of all."""
    return {name: WAYS[name].environment for name in names or WAYS}


def calibrated(pair_ns: Callable[[int], float], budget_ns: int) -> int:
    """The loops that take so long; the first pays for page faults and for splitting the VMA."""
    if pair_ns(1) > budget_ns:
        return 1
    least = min(pair_ns(3) for _ in range(5))  # others run here too
    return max(1, min(1_000_000, int(budget_ns / max(least, 1))))


def in_turns(peers: Iterable[str], nbytes_each: int) -> list[list[str]]:
    """All peers at once, or one after the other where their memory would be too much."""
    names = list(peers)
    return [names] if len(names) * nbytes_each <= TOGETHER else [[name] for name in names]


def available(nbytes: int) -> None:
    """Raises Skipped where a peer cannot have so much memory, and a fork copy it."""
    free = machine.memory_available()
    if 2 * nbytes > free * 3 // 4:
        raise Skipped(f"{terminal.size(2 * nbytes)} are needed, {terminal.size(free)} available")
