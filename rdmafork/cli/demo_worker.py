"""A fresh process that holds memory, pins it, and forks when told to.

The engine's mode and libibverbs' settings are fixed once a process, so the demo starts
one worker a setting. A worker reads one JSON request a line, {"do": name, ...}, and
answers each with one line: {"result": ...} or {"error": [errno, text]}.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter_ns
from typing import Any

import rdmafork
from rdmafork import _clocks, _pins

PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
HUGETLB: int = getattr(mmap, "MAP_HUGETLB", 0x40000)
SAMPLES = 64  # pages that the device and the parent exchange bytes through
EDGE = 100  # unregistered bytes at each end when partial pages are looked at


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def private_memory(nbytes: int, flags: int = 0, step: int = mmap.PAGESIZE) -> mmap.mmap:
    """Memory that fork() would move: private, each page present."""
    memory = mmap.mmap(-1, nbytes, flags=PRIVATE | flags)
    for at in range(0, nbytes, step):
        memory[at] = 1
    return memory


@contextlib.contextmanager
def living_child() -> Iterator[None]:
    """A forked child that shares every page it got for as long as this lasts."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    os.close(read_end)
    try:
        yield
    finally:
        os.close(write_end)
        os.waitpid(child, 0)


def exchange(pins: _pins.Pins, memory: mmap.mmap, step: int) -> dict[str, int]:
    """Fork, then count the pages whose bytes arrive from the device and at the device.

    The parent writes each page first: that is when copy-on-write would move it. The
    device is a memfd at the other end of fixed reads and writes.
    """
    base = address_of(memory)
    pages = sorted({(len(memory) - step) * i // (SAMPLES - 1) // step for i in range(SAMPLES)})
    device = os.memfd_create("device")
    result = {"pages": len(pages), "device_to_parent": 0, "parent_to_device": 0}
    try:
        with living_child():
            for page in pages:
                at = page * step
                memory[at] = 2
                sent, answer = b"device%010d" % page, b"parent%010d" % page
                os.pwrite(device, sent, 0)
                pins.read_fixed(device, base + at + 64, 16, 0)
                result["device_to_parent"] += memory[at + 64 : at + 80] == sent
                memory[at + 64 : at + 80] = answer
                pins.write_fixed(device, base + at + 64, 16, 32)
                result["parent_to_device"] += os.pread(device, 16, 32) == answer
    finally:
        os.close(device)
    return result


class Worker:
    """The requests; a method each."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._pins: _pins.Pins | None = None
        self._rest: mmap.mmap | None = None
        self._few_pages: mmap.mmap | None = None
        self._peer: _clocks.Libibverbs | None = None

    def init(self, mode: str) -> str | None:
        """Start the engine, as a program does; the mode it chose."""
        rdmafork.fork_init(mode)
        return rdmafork.stats().mode

    def hold(self, nbytes: int, pin: bool) -> None:
        """Map, touch and pin private memory."""
        self._memory = private_memory(nbytes)
        self._pins = _pins.Pins(self._memory) if pin else None

    def _registered(self, registered: bool) -> AbstractContextManager[Any]:
        return rdmafork.register(self._memory) if registered else nullcontext()  # type: ignore[arg-type]

    def stay_on(self, cpu: int) -> None:
        os.sched_setaffinity(0, {cpu})

    def fork(self, registered: bool, rounds: int = 1) -> list[int]:
        """Nanoseconds of forks, each with a registration of its own."""
        seen = []
        for _ in range(rounds):
            with self._registered(registered):
                seen.append(_pins.fork_cost().ns)
        return seen

    def child_memory(self, registered: bool) -> int | None:
        """Bytes the kernel allocated for a forked child."""
        with self._registered(registered):
            return _pins.fork_cost(memory=True).private_nbytes

    def protection(self) -> list[str]:
        """How the registered pages are protected once a fork has been."""
        with self._registered(True):
            _pins.fork_cost()
            return sorted(
                {found.protected_by or "nothing" for found in rdmafork.protected_ranges()}
            )

    def exchange(self, registered: bool) -> dict[str, int]:
        assert self._memory and self._pins
        with self._registered(registered):
            return exchange(self._pins, self._memory, mmap.PAGESIZE)

    def partial_pages(self) -> str:
        """The child's own bytes that it finds on pages where registered ones begin and end."""
        memory = private_memory(64 * mmap.PAGESIZE)
        length = len(memory)
        memory[:EDGE] = memory[length - EDGE :] = b"m" * EDGE
        with rdmafork.register_address(address_of(memory) + EDGE, length - 2 * EDGE, owner=memory):
            child = os.fork()
            if child == 0:
                kept = memory[:EDGE] == memory[length - EDGE :] == b"m" * EDGE
                os._exit(0 if kept else 1)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status < 0:
            return signal.Signals(-status).name
        return "changed" if status else "kept"

    def libibverbs(self) -> dict[str, Any]:
        """Start libibverbs' own engine: the clocks of this worker are its."""
        self._peer = _clocks.Libibverbs()
        self._peer.fork_init()
        return {
            "path": self._peer.path,
            "version": self._peer.version,
            "status": self._peer.status,
        }

    def clocks(self) -> dict[str, float]:
        """Ns of register + close of one page amid a mapping, and of what it compares to."""
        if self._few_pages is None:
            self._few_pages = private_memory(1024 * mmap.PAGESIZE)
        at, page = address_of(self._few_pages) + 512 * mmap.PAGESIZE, mmap.PAGESIZE
        clocks: dict[str, Callable[[int], float]] = {
            "madvise_pair": lambda loops: _clocks.madvise_pair_ns(at, page, loops)
        }
        if self._peer:
            peer = self._peer
            clocks["c"] = lambda loops: peer.pair_ns(at, page, loops)
            return _clocks.medians(clocks, rounds=1)
        # The page itself as an object: a view of a view would be another measure.
        buffer = (ctypes.c_char * page).from_buffer(self._few_pages, 512 * page)
        clocks["c"] = lambda loops: _clocks.engine_pair_ns(at, page, loops)
        clocks["python"] = lambda loops: python_ns(register_loop, buffer, loops)
        clocks["memoryview"] = lambda loops: python_ns(release_loop, buffer, loops)
        clocks["null_call"] = _clocks.null_call_ns
        return _clocks.medians(clocks, rounds=1)

    def system_calls(self, pairs: int) -> int:
        """System calls that the engine made for some pairs of register + close."""
        before = rdmafork.stats()
        register_loop(private_memory(mmap.PAGESIZE), pairs)
        after = rdmafork.stats()
        return after.madvise_calls - before.madvise_calls + after.query_calls - before.query_calls

    def hold_huge(self, page: int, pages: int, rest: int, pin: bool) -> None:
        """Map, touch and pin huge pages, and reserve the rest of the pool: none is left."""
        self._memory = private_memory(page * pages, HUGETLB, step=page)
        self._pins = _pins.Pins(self._memory) if pin else None
        self._rest = mmap.mmap(-1, page * rest, flags=PRIVATE | HUGETLB) if rest else None

    def fork_huge(self, page: int) -> dict[str, Any]:
        """Fork with these, without and with a registration."""
        return {"plain": self._fork_huge(page, False), "registered": self._fork_huge(page, True)}

    def _fork_huge(self, page: int, registered: bool) -> dict[str, Any]:
        assert self._memory
        with self._registered(registered):
            try:
                result: dict[str, Any] = {"ns": _pins.fork_cost().ns}
            except OSError as error:
                return {"errno": error.errno, "text": os.strerror(error.errno or 0)}
            if self._pins:
                result["exchange"] = exchange(self._pins, self._memory, page)
            return result


def python_ns(loop: Callable[[Any, int], None], buffer: Any, loops: int) -> float:
    start = perf_counter_ns()
    loop(buffer, loops)
    return (perf_counter_ns() - start) / loops


def release_loop(buffer: Any, loops: int) -> None:
    for _ in range(loops):
        memoryview(buffer).release()


def register_loop(buffer: Any, loops: int, register: Any = rdmafork.register) -> None:
    for _ in range(loops):
        register(buffer).close()


def main() -> None:
    warnings.simplefilter("ignore")  # lazy where copying is not trusted: the demo says so itself
    worker = Worker()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {"result": getattr(worker, request.pop("do"))(**request)}
        except OSError as error:
            reply = {"error": [error.errno, error.strerror or str(error)]}
        try:
            print(json.dumps(reply), flush=True)
        except BrokenPipeError:  # the demo has ended
            os._exit(1)
