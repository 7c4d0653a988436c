"""A process with pinned memory that one peer registers, and its forks: for fork_latency."""

import contextlib
import ctypes
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

from rdmafork import _pins

from ._peers import HUGE, MADV_HUGEPAGE, MADV_NOHUGEPAGE, PAGE, PRIVATE, WAYS, libc
from ._workers import Skipped

TOUCHED = 16 << 20  # by a child that works
MAP_HUGETLB = 0x40000

Span = tuple[int, int]  # address, nbytes


class Situation(NamedTuple):
    pages: str
    buffer_bytes: int
    ranges: int = 1
    offset: int = 0  #: of each buffer in its first page

    @property
    def stride(self) -> int:
        """From one buffer to the next; where they lie on parts of pages, with pages between."""
        return self.buffer_bytes + (4 * PAGE if self.offset else 0)

    @property
    def nbytes(self) -> int:
        return self.ranges * self.stride


class Worker:
    """One peer, in a process of its own."""

    def __init__(self, peer: str) -> None:
        self._peer = WAYS[peer].peer()
        self._spans: list[Span] = []
        self._pins: _pins.Pins | None = None
        self._memory: mmap.mmap | None = None
        self._other = bytearray(TOUCHED)
        self._returned = mmap.mmap(-1, PAGE)  # shared: when fork() returned in the child

    def hold(self, **described: Any) -> None:
        """Map, touch and pin the memory of a situation."""
        wanted = Situation(**described)
        try:
            self._memory = memory = mapped(wanted)
            self._spans = spans(wanted, memory)
            self._pins = _pins.Pins(self._spans)
        except OSError as error:
            self.drop()
            raise Skipped(error.strerror) from None

    def drop(self) -> None:
        if self._pins is not None:
            self._pins.close()
        self._pins = self._memory = None

    def sample(self) -> dict[str, float]:
        """Registers anew, and forks four times."""
        held: list[Any] = []
        try:
            held.extend(self._peer.register(*span) for span in self._spans)
            first, _, _ = self._fork(run_true)
            fork, child, ran = self._fork(run_true)
            _, _, worked = self._fork(self._work)
            return {
                "first_fork_us": first,
                "fork_us": fork,
                "child_us": child,
                "exec_us": ran,
                "work_us": worked,
                **self._weigh(),
            }
        finally:
            # Where one of them could not be registered, the ones before it.
            for span, registered in zip(self._spans, held, strict=False):
                self._peer.release(*span, registered)

    def _fork(self, act: Callable[[], None]) -> tuple[float, float, float]:
        """Microseconds until fork() has returned here, and there, and the child has ended."""
        start = perf_counter_ns()
        pid = fork()
        now = perf_counter_ns()
        if not pid:
            struct.pack_into("q", self._returned, 0, now)
            with contextlib.suppress(BaseException):
                act()
            os._exit(1)
        status = os.waitpid(pid, 0)[1]
        end = perf_counter_ns()
        if status:
            raise ChildProcessError(f"a child died, wait status {status:#x}")
        in_child: int = struct.unpack_from("q", self._returned)[0]
        return (now - start) / 1e3, (in_child - start) / 1e3, (end - start) / 1e3

    def _work(self) -> None:
        self._other[:: PAGE // 2] = bytes(len(self._other[:: PAGE // 2]))
        os._exit(0)

    def _weigh(self) -> dict[str, float]:
        """The memory of a child that does nothing."""
        read_end, write_end = os.pipe()
        before = system_bytes()
        pid = fork()
        if not pid:
            os.close(write_end)
            os.read(read_end, 1)
            os._exit(0)
        try:
            taken = system_bytes() - before
            resident, own = child_bytes(pid)
        finally:
            os.close(read_end)
            os.close(write_end)
            os.waitpid(pid, 0)
        return {"child_rss_bytes": resident, "child_own_bytes": own, "system_bytes": taken}


def mapped(wanted: Situation) -> mmap.mmap:
    if wanted.pages == "huge":
        return mmap.mmap(-1, wanted.nbytes, flags=PRIVATE | MAP_HUGETLB)
    return mmap.mmap(-1, wanted.nbytes + HUGE, flags=PRIVATE)


def spans(wanted: Situation, memory: mmap.mmap) -> list[Span]:
    """The buffers in this memory, every page of which is there."""
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    base += -base % HUGE if wanted.pages == "transparent huge" else 0
    if wanted.pages != "huge":
        advice = MADV_NOHUGEPAGE if wanted.pages == "base" else MADV_HUGEPAGE
        libc.madvise(base, wanted.nbytes, advice)
    ctypes.memset(base, 1, wanted.nbytes)
    starts = range(base + wanted.offset, base + wanted.nbytes, wanted.stride)
    return [(start, wanted.buffer_bytes) for start in starts]


def fork() -> int:
    """With pinned huge pages and none left for their copies it fails."""
    try:
        return os.fork()
    except OSError as error:
        raise Skipped(f"fork() fails: {error.strerror}") from None


def run_true() -> None:
    os.execv("/bin/true", ["true"])


def system_bytes() -> int:
    """Anonymous memory of the whole machine, and the pool's pages in use."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kib = {words[0]: int(words[1]) for words in lines}
    huge = kib.get("HugePages_Total:", 0) - kib.get("HugePages_Free:", 0)
    return (kib["AnonPages:"] + huge * kib.get("Hugepagesize:", 0)) << 10


def child_bytes(pid: int) -> tuple[int, int]:
    """(resident, its own alone) of a process, huge pages included."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {name: int(value.split()[0]) for name, value in (line.split(":") for line in lines)}
    own = sum(value for name, value in kib.items() if name.startswith("Private_"))
    resident = kib["Rss"] + kib.get("Private_Hugetlb", 0) + kib.get("Shared_Hugetlb", 0)
    return resident << 10, own << 10
