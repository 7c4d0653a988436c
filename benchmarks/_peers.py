"""The ways to register memory that are compared, each in a process of its own.

A new peer is a class here, with register() and release(), and a line of WAYS: `registration` then
times pairs of both, and `fork_latency` forks with memory that is registered so.
"""

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterable
from itertools import repeat
from time import perf_counter_ns
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import rdmafork
from rdmafork import _clocks
from rdmafork.cli import machine, terminal

from . import _in_c
from ._workers import Environment, Skipped

PAGE = mmap.PAGESIZE
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
MAP_NORESERVE = 0x4000
HUGE = 2 << 20
HUGETLB = 0x40000 | 21 << 26  # MAP_HUGETLB | MAP_HUGE_2MB
MADV_DONTFORK, MADV_DOFORK, MADV_HUGEPAGE, MADV_NOHUGEPAGE = 10, 11, 14, 15
TOGETHER = 2 << 30  # bytes that all peers may take at once
KEPT: list[object] = []  # for as long as the process lives

libc = ctypes.CDLL(None, use_errno=True)
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


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


def advise(address: int, nbytes: int, advice: int) -> None:
    """madvise() of the whole pages that hold these bytes."""
    start = address & -PAGE
    if libc.madvise(start, (address + nbytes + PAGE - 1 & -PAGE) - start, advice):
        refused("madvise", nbytes, ctypes.get_errno())


def refused(call: str, nbytes: int, code: int) -> NoReturn:
    raise OSError(code, f"{call}() of {nbytes:,} bytes: {os.strerror(code)}")


# ---- the ways ---------------------------------------------------------------------------


class Peer:
    """A way to register memory, which has register() and release() of its own.

    Loops in Python make hold() and pair_ns() of these; a way that C can call has loops in C.
    """

    def register(self, address: int, nbytes: int) -> Any:
        """Returns whatever its release needs beside the range. Raises OSError."""

    def release(self, address: int, nbytes: int, held: Any) -> None:
        """Undoes one register() of the same range."""

    def hold(self, address: int, nbytes: int, count: int = 1, stride: int = 0) -> tuple[int, int]:
        """Registers for good: (of count ranges how many it could, errno of the next or 0)."""
        for i in range(count):
            try:
                held = self.register(address + i * stride, nbytes)
            except OSError as error:
                return i, error.errno or 0
            if held is not None:
                KEPT.append(held)
        return count, 0

    def pair_ns(self, address: int, nbytes: int, loops: int) -> float:
        """Nanoseconds of a registration and its release."""
        start = perf_counter_ns()
        for _ in repeat(None, loops):
            self.release(address, nbytes, self.register(address, nbytes))
        return (perf_counter_ns() - start) / loops

    def arena(self, nbytes: int) -> int:
        """The address of memory that is registered for good."""
        address = private_memory(nbytes)
        self.hold(address, nbytes)
        return address


class NullCall(Peer):
    def pair_ns(self, address: int, nbytes: int, loops: int) -> float:
        return _clocks.null_call_ns(loops)


class Madvise(Peer):
    """The two system calls, and no counting."""

    def register(self, address: int, nbytes: int) -> None:
        advise(address, nbytes, MADV_DONTFORK)

    def release(self, address: int, nbytes: int, held: None) -> None:
        advise(address, nbytes, MADV_DOFORK)

    def pair_ns(self, address: int, nbytes: int, loops: int) -> float:
        return _clocks.madvise_pair_ns(address, nbytes, loops)


class Libibverbs(Peer):
    """Its own fork support."""

    def __init__(self) -> None:
        try:
            self._library = _clocks.Libibverbs()
            self._library.fork_init()
        except OSError as error:
            raise Skipped(error.strerror) from None
        if self._library.status == rdmafork.ForkStatus.UNNEEDED:
            raise Skipped("this libibverbs marks nothing where the kernel copies pinned pages")
        library = ctypes.CDLL("libibverbs.so.1", use_errno=True)
        self._dontfork, self._dofork = library.ibv_dontfork_range, library.ibv_dofork_range
        for call in (self._dontfork, self._dofork):
            call.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def _call(self, call: Any, address: int, nbytes: int) -> None:
        code = call(address, nbytes)
        if code:  # old versions return -1 and set errno
            refused(call.__name__, nbytes, ctypes.get_errno() if code < 0 else code)

    def register(self, address: int, nbytes: int) -> None:
        self._call(self._dontfork, address, nbytes)

    def release(self, address: int, nbytes: int, held: None) -> None:
        self._call(self._dofork, address, nbytes)

    def pair_ns(self, address: int, nbytes: int, loops: int) -> float:
        return self._library.pair_ns(address, nbytes, loops)


class Engine(Peer):
    def __init__(self) -> None:
        try:
            rdmafork.fork_init()
        except OSError as error:  # lazy, where the kernel does not copy at fork
            raise Skipped(error.strerror) from None

    def register(self, address: int, nbytes: int) -> rdmafork.Registration:
        return rdmafork.register_address(address, nbytes, owner=self)

    def release(self, address: int, nbytes: int, held: rdmafork.Registration) -> None:
        held.close()

    def hold(
        self, address: int, nbytes: int, count: int = 1, stride: int = 0, held: bool = True
    ) -> tuple[int, int]:
        """held: the memory stays mapped until it is released, as the caller promises."""
        return _in_c.engine_hold(address, nbytes, count, stride, held)

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
    pairs: bool = True  #: `registration` times it
    forks: bool = True  #: `fork_latency` forks with memory that it has registered


LAZY, EAGER = {"RDMAFORK_MODE": "lazy"}, {"RDMAFORK_MODE": "eager"}
# One variable makes any kernel one whose copying at fork is not trusted.
WHOLE_PAGES = EAGER | {"RDMAFORK_TRUST_COPYING": "0"}
COPIED, FLOOR = "not registered", "madvise"
ENGINES = ("rdmafork lazy", "rdmafork eager", "rdmafork whole pages")
WAYS = {
    COPIED: Way(Peer, pairs=False),
    FLOOR: Way(Madvise),
    "null system call": Way(NullCall, forks=False),
    "libibverbs": Way(Libibverbs),
    "libibverbs, huge pages safe": Way(Libibverbs, {"RDMAV_HUGEPAGES_SAFE": "1"}, forks=False),
    "rdmafork lazy": Way(Engine, LAZY),
    "rdmafork eager": Way(Engine, EAGER),
    "rdmafork whole pages": Way(Engine, WHOLE_PAGES, pairs=False),
    "rdmafork lazy, Python": Way(Python, LAZY, forks=False),
    "rdmafork eager, Python": Way(Python, EAGER, forks=False),
    "memoryview, Python": Way(View, forks=False),
}


def environments(names: Iterable[str]) -> dict[str, Environment]:
    """The environment of each of these ways."""
    return {name: WAYS[name].environment for name in names}


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


def need_memory(nbytes: int) -> None:
    """Raises Skipped where a peer cannot have so much memory, and a fork copy it."""
    free = machine.memory_available()
    if 2 * nbytes > free * 3 // 4:
        raise Skipped(f"{terminal.size(2 * nbytes)} are needed, {terminal.size(free)} available")
