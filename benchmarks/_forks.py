"""A process with pinned memory that one peer registers, and its forks: for fork_latency."""

import contextlib
import ctypes
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

import rdmafork
from rdmafork import _clocks, _pins

from ._workers import Environment, Skipped

PAGE = mmap.PAGESIZE
HUGE = 2 << 20
TOUCHED = 16 << 20  # by a child that works
MAP_HUGETLB = 0x40000
MADV_DONTFORK, MADV_DOFORK, MADV_HUGEPAGE, MADV_NOHUGEPAGE = 10, 11, 14, 15
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

COPIED = "not registered"
FLOOR = "madvise"
PEERS: dict[str, Environment] = {
    COPIED: {},
    FLOOR: {},
    "libibverbs": {},
    "rdmafork lazy": {"RDMAFORK_MODE": "lazy"},
    "rdmafork eager": {"RDMAFORK_MODE": "eager"},
    "rdmafork whole pages": {"RDMAFORK_TRUST_COPYING": "0"},
}

libc = ctypes.CDLL(None, use_errno=True)
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

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


# ---- the ways to register -----------------------------------------------------------------


class Nothing:
    def register(self, spans: Sequence[Span]) -> None:
        pass

    def release(self) -> None:
        pass


class Marks(Nothing):
    """Calls that take an address and a size, and answer 0 or -1 and errno."""

    def __init__(self, mark: Callable[..., int], unmark: Callable[..., int]) -> None:
        self._calls = mark, unmark
        self._spans: Sequence[Span] = ()

    def _call(self, which: int) -> None:
        for span in self._spans:
            if self._calls[which](*span):
                code = ctypes.get_errno()
                raise OSError(code, f"cannot mark {span[1]:,} bytes: {os.strerror(code)}")

    def register(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._call(0)

    def release(self) -> None:
        self._call(1)
        self._spans = ()


def advises(advice: int) -> Callable[[int, int], int]:
    def advise(address: int, nbytes: int) -> int:
        start = address & -PAGE
        nbytes = (address + nbytes + PAGE - 1 & -PAGE) - start
        status: int = libc.madvise(start, nbytes, advice)
        return status

    return advise


def libibverbs() -> Marks:
    try:
        _clocks.Libibverbs().fork_init()
    except OSError as error:
        raise Skipped(error.strerror) from None
    library = ctypes.CDLL("libibverbs.so.1", use_errno=True)
    calls = library.ibv_dontfork_range, library.ibv_dofork_range
    for call in calls:
        call.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    probe = mmap.mmap(-1, PAGE, flags=PRIVATE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(probe))
    if calls[0](address, PAGE) or not is_marked(address):
        raise Skipped("this libibverbs marks nothing where the kernel copies pinned pages")
    return Marks(*calls)


def is_marked(address: int) -> bool:
    """Whether a child will lack the mapping that begins there."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith((f"{address:x}-", f"{address:08x}-")):
            flags = next(line for line in lines if line.startswith("VmFlags:"))
            return "dc" in flags.split()
    return False


class Engine(Nothing):
    def __init__(self) -> None:
        try:
            rdmafork.fork_init()
        except OSError as error:
            raise Skipped(error.strerror) from None
        self._held: list[rdmafork.Registration] = []

    def register(self, spans: Sequence[Span]) -> None:
        self._held = [rdmafork.register_address(*span, owner=self) for span in spans]

    def release(self) -> None:
        while self._held:
            self._held.pop().close()


def way(peer: str) -> Nothing:
    if peer == COPIED:
        return Nothing()
    if peer == FLOOR:
        return Marks(advises(MADV_DONTFORK), advises(MADV_DOFORK))
    return libibverbs() if peer == "libibverbs" else Engine()


# ---- the memory, and the forks ------------------------------------------------------------


class Worker:
    """One peer, in a process of its own."""

    def __init__(self, peer: str) -> None:
        self._way = way(peer)
        self._spans: list[Span] = []
        self._pins: _pins.Pins | None = None
        self._memory: mmap.mmap | None = None
        self._other = bytearray(TOUCHED)
        self._returned = mmap.mmap(-1, PAGE)  # shared: when fork() returned in the child

    def hold(self, **described: Any) -> None:
        """Map, touch and pin what a situation wants."""
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
        self._way.register(self._spans)
        try:
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
            self._way.release()

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
