"""Memory registered in shapes that cost most, and forks of the process that has it: for shapes."""

import ctypes
import errno
import mmap
import os
import platform
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import rdmafork
from rdmafork import _pins

from . import _in_c
from ._peers import (
    ENGINES,
    HUGE,
    HUGETLB,
    PAGE,
    WAYS,
    Engine,
    Peer,
    environments,
    private_memory,
    touch,
)
from ._workers import Environment, Skipped

FLOOR, PINNED, MADVISE = "without rdmafork", "without, pinned", "madvise"
PEERS: dict[str, Environment] = {FLOOR: {}, PINNED: {}, **environments((MADVISE, *ENGINES))}
PIN_ENTRIES = 1 << 14  # the most of one io_uring
FORKS, ENOUGH_NS = 5, 1_000_000_000  # so many later forks, or as many as begin in that time
UNHELD = 1_000


class Run(NamedTuple):
    """So many ranges, each so far behind the one before."""

    address: int
    nbytes: int
    number: int = 1
    stride: int = 0


class Memory(NamedTuple):
    blocks: list[Run]  #: to be registered
    pages: Run  #: that hold them


class Shape(NamedTuple):
    make: Callable[[int], Memory]
    number: int  #: of blocks; the half of it is measured too
    quick: int
    bytes_each: float  #: of memory
    counted: str = "registrations"
    huge_pages: Callable[[int], int] = lambda count: 0
    held: bool = True
    query: bool = True  #: PROCMAP_QUERY may be used

    def peers(self) -> dict[str, Environment]:
        """Memory that is not held is no device's: there is nothing to pin or to mark."""
        return PEERS if self.held else {FLOOR: {}, **environments(ENGINES)}


# ---- the shapes -------------------------------------------------------------------------


def base_pages(nbytes: int) -> int:
    start = private_memory(nbytes)
    touch(start, nbytes)
    return start


def huge_pages(count: int) -> int:
    try:
        start = private_memory(count * HUGE, HUGETLB)
    except OSError as error:
        raise Skipped(f"huge pages: {error.strerror}") from None
    touch(start, count * HUGE, HUGE)
    return start


def scattered(count: int) -> Memory:
    start = base_pages(count * PAGE)
    return Memory([Run(start + 100, 64, count, PAGE)], Run(start, count * PAGE))


def dense(count: int) -> Memory:
    """As malloc(64) lays them out: behind a header of 16 bytes."""
    nbytes = -(-count * 80 // PAGE) * PAGE
    start = base_pages(nbytes)
    return Memory([Run(start + 16, 64, count, 80)], Run(start, nbytes))


def one_huge_page(count: int) -> Memory:
    start = huge_pages(1)
    return Memory([Run(start + 4, 8, count, 256)], Run(start, HUGE))


def each_huge_page(count: int) -> Memory:
    start = huge_pages(count)
    return Memory([Run(start + 100, 64, count, HUGE)], Run(start, count * HUGE))


def nested(count: int) -> Memory:
    """Each begins and ends a page inside the one before, on parts of pages."""
    nbytes = 2 * count * PAGE
    start = base_pages(nbytes)
    spans = range(100, 100 + count * PAGE, PAGE)
    return Memory([Run(start + at, nbytes - 2 * at) for at in spans], Run(start, nbytes))


def nested_outwards(count: int) -> Memory:
    """Each lies around the one before."""
    blocks, pages = nested(count)
    return Memory(blocks[::-1], pages)


def overlapping(count: int) -> Memory:
    """Slices of one buffer, half as long as it is, each a page behind the one before."""
    nbytes = 2 * count * PAGE
    start = base_pages(nbytes)
    return Memory([Run(start + 100, count * PAGE, count, PAGE)], Run(start, nbytes))


def two_pages(count: int) -> Memory:
    """64 bytes each, at every byte in turn, over and over."""
    start, places = base_pages(4 * PAGE) + PAGE, 2 * PAGE - 64
    full, rest = divmod(count, places)
    blocks = [Run(start, 64, places, 1)] * full + [Run(start, 64, rest, 1)] * bool(rest)
    return Memory(blocks, Run(start, 2 * PAGE))


def isolated(count: int) -> Memory:
    start = private_memory(2 * PAGE * count)
    touch(start, 2 * PAGE * count, 2 * PAGE)
    pages = Run(start, PAGE, count, 2 * PAGE)
    return Memory([pages], pages)


def amid_mappings(count: int) -> Memory:
    """Parts of pages, in a process with so many mappings more."""
    made = private_memory(count * PAGE)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for at in range(made, made + count * PAGE, 2 * PAGE):
        if libc.mprotect(at, PAGE, mmap.PROT_READ):
            raise Skipped(f"{count:,} mappings: {os.strerror(ctypes.get_errno())}")
    start = base_pages(2 * UNHELD * PAGE)
    pages = Run(start, PAGE, UNHELD, 2 * PAGE)
    return Memory([Run(start + 100, 64, UNHELD, 2 * PAGE)], pages)


SHAPES = {
    "64 bytes on each page": Shape(scattered, 100_000, 2_000, PAGE),
    "64 bytes, as malloc() lays them": Shape(dense, 100_000, 2_000, 80),
    "8 bytes, in one huge page": Shape(
        one_huge_page, 8_192, 512, 256, huge_pages=lambda count: 1
    ),
    "64 bytes in each huge page": Shape(
        each_huge_page, 20, 4, HUGE, huge_pages=lambda count: count
    ),
    "nested inwards": Shape(nested, 8_000, 200, 2 * PAGE),
    "nested outwards": Shape(nested_outwards, 8_000, 200, 2 * PAGE),
    "overlapping slices": Shape(overlapping, 20_000, 200, 2 * PAGE),
    "on two pages": Shape(two_pages, 1_000_000, 10_000, 0),
    "isolated pages": Shape(isolated, 500_000, 2_000, PAGE),
    "not held": Shape(amid_mappings, 10_000, 500, 0, "mappings", held=False),
    "not held, no PROCMAP_QUERY": Shape(
        amid_mappings, 10_000, 500, 0, "mappings", held=False, query=False
    ),
}  # fmt: skip


# ---- one peer with one shape, once ------------------------------------------------------


class Bench:
    """A process that registers once: its first fork has everything to do."""

    def __init__(self, peer: str, shape: str, count: int) -> None:
        self._line, self._shape = peer, SHAPES[shape]
        if peer in ENGINES and not self._shape.query:
            refuse_query()
        self._peer = WAYS[peer].peer() if peer in WAYS else Peer()
        self._memory = self._shape.make(count)
        self._pins: list[_pins.Pins] = []

    def register(self) -> dict[str, float]:
        """How many could be registered, why no more, and the time that each took."""
        start = time.perf_counter_ns()
        if self._line == PINNED:
            self._pin()
        elif self._line == MADVISE:
            self._mark()
        elif isinstance(self._peer, Engine):
            reached, code = self._hold(self._peer)
            each = (time.perf_counter_ns() - start) / max(reached, 1)
            found: dict[str, Any] = {"reached": reached, "register_ns": each}
            return found | ({"error": errno.errorcode[code]} if code else {})
        return {"reached": sum(run.number for run in self._memory.blocks)}

    def _pin(self) -> None:
        spans = [(at, self._memory.pages.nbytes) for at in starts(self._memory.pages)]
        try:
            for at in range(0, len(spans), PIN_ENTRIES):
                self._pins.append(_pins.Pins(spans[at : at + PIN_ENTRIES]))
        except OSError as error:
            raise Skipped(error.strerror) from None

    def unpin(self) -> None:
        """Pages that an ended process leaves pinned for a while are missing from the pool."""
        while self._pins:
            self._pins.pop().close()

    def _mark(self) -> None:
        """The cost no engine can spare, where pages are marked: of as many as rdmafork marks."""
        pages = self._memory.pages
        kernel = rdmafork.kernel_info()
        most = kernel.max_map_count // (4 if kernel.copy_on_fork_trusted else 6)
        self._peer.hold(pages.address, pages.nbytes, min(pages.number, most), pages.stride)

    def _hold(self, engine: Engine) -> tuple[int, int]:
        reached = 0
        for run in self._memory.blocks:
            some, code = engine.hold(*run, held=self._shape.held)
            reached += some
            if code:
                return reached, code
        return reached, 0

    def fork(self) -> tuple[float, float]:
        """Microseconds until fork() has returned here, and in the child."""
        try:
            here, there = _in_c.fork_ns()
        except OSError as error:
            # The kernel copies pinned huge pages at once, or refuses.
            raise Skipped(f"fork() fails: {error.strerror}") from None
        return here / 1e3, there / 1e3

    def forks(self) -> list[tuple[float, float]]:
        """Some more, with nothing new."""
        until, found = time.perf_counter_ns() + ENOUGH_NS, [self.fork()]
        while len(found) < FORKS and time.perf_counter_ns() < until:
            found.append(self.fork())
        return found

    def engine_bytes(self) -> int:
        return rdmafork.stats().engine_bytes


def starts(run: Run) -> Iterator[int]:
    return (run.address + i * run.stride for i in range(run.number))


# ---- a kernel before 6.11 ---------------------------------------------------------------

PROCMAP_QUERY = 0xC0686611
IOCTL = {"x86_64": 16, "aarch64": 29}
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
LOAD, EQUAL, RETURN, ALLOW, ERRNO = 0x20, 0x15, 0x06, 0x7FFF0000, 0x50000


def refuse_query() -> None:
    """From here on ioctl(PROCMAP_QUERY) is ENOTTY in this process, by seccomp(2)."""
    number = IOCTL.get(platform.machine())
    if number is None:
        raise Skipped(f"the number of ioctl() on {platform.machine()} is not known here")
    lines = [
        (LOAD, 0, 0, 0), (EQUAL, 0, 3, number), (LOAD, 0, 0, 24), (EQUAL, 0, 1, PROCMAP_QUERY),
        (RETURN, 0, 0, ERRNO | errno.ENOTTY), (RETURN, 0, 0, ALLOW),
    ]  # fmt: skip
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(lines), ctypes.addressof(code))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program):
        raise Skipped(f"no seccomp filter: {os.strerror(ctypes.get_errno())}")
    if rdmafork.kernel_info().procmap_query:
        raise Skipped("PROCMAP_QUERY was asked for before it could be refused")
