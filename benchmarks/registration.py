"""What does it cost to register memory, and to release it?

python -m rdmafork.benchmarks.registration [--quick] [--json FILE] [--plot DIR]

A pair of both, over and over, on private memory that is
    new          not registered, amid other memory
    overlapping  registered to its half, or its one page
    adjacent     directly behind what is registered
    inside       in the middle of a registered arena (of rdmafork's own: a Buffer)
    same         registered already: there is only counting left to do
    huge pages   new, one huge page of the pool (as root, a few are reserved if there are none)
Peers: the system calls without any counting (the floor); a system call that does nothing;
libibverbs' fork support, also with RDMAV_HUGEPAGES_SAFE; rdmafork in both modes; and the least
that Python takes to hold a buffer and let it go, memoryview(b).release(). Loops in C, or where it
says so in Python. Nanoseconds of a pair; for one page its system calls, counted by strace, and for
a new one its instructions of user space, by the processor's counter or by callgrind.
"""

import argparse
import contextlib
import ctypes
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rdmafork.cli import terminal

from . import _plots
from ._harness import Document, Measures, Result, Row, main, summary
from ._instructions import Counted
from ._peers import FLOOR, HUGE, HUGETLB, PAGE, WAYS, calibrated, environments, private_memory
from ._pool import huge_pages
from ._progress import Progress
from ._workers import Skipped, Skips, ask_all, interleave, started

PEERS = environments(name for name, way in WAYS.items() if way.pairs)
PARAMETERS = ("situation", "nbytes")
MEASURES: Measures = {
    "pair_ns": None,
    "system_calls": "{:g}".format,
    "instructions": "{:,.0f}".format,
}
SITUATIONS = ("new", "overlapping", "adjacent", "inside", "same")
HUGE_PAGES = "huge pages"
SIZES = (4 << 10, 64 << 10, HUGE, 16 << 20, 256 << 20, 1 << 30)
BUDGET_NS = 2_000_000
MARGIN = 32 << 20  # around the range: its mapping lies alike for every size
COUNTED_NS, MOST_PAIRS = 40_000_000, 20_000  # the pairs that are counted take so long

libc: ctypes.CDLL = ctypes.CDLL(None)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Bench:
    """One peer."""

    def __init__(self, peer: str) -> None:
        self._peer = WAYS[peer].peer()
        self._at = self._nbytes = self._loops = self._margin = 0

    def prepare(self, situation: str, nbytes: int) -> None:
        """Earlier registrations stay: they lie elsewhere."""
        self._nbytes, self._loops, self._margin = nbytes, 0, 0
        if situation == "inside":
            self._at = self._peer.arena(nbytes + 2 * MARGIN) + MARGIN
            return
        if situation == HUGE_PAGES:
            try:
                self._at = private_memory(3 * HUGE, HUGETLB) + HUGE
            except OSError as error:
                raise Skipped(f"huge pages: {error.strerror}") from None
            return
        self._margin = private_memory(2 * nbytes + 2 * MARGIN)
        self._at = self._margin + MARGIN + nbytes
        if situation == "overlapping":
            self._peer.hold(self._at, max(nbytes // 2, PAGE))
        elif situation == "adjacent":
            self._peer.hold(self._at - nbytes, nbytes)
        elif situation == "same":
            self._peer.hold(self._at, nbytes)

    def sample(self) -> float:
        """Nanoseconds of a pair.

        A pair that splits a mapping takes half as long again where that fills a node of the
        kernel's tree, so each sample finds the tree in another state, with more neighbours.
        """
        if self._margin:
            self._margin += 2 * PAGE
            libc.mprotect(self._margin, PAGE, mmap.PROT_READ)
        if not self._loops:
            self._loops = calibrated(self._pairs, BUDGET_NS)
        return self._pairs(self._loops)

    def _pairs(self, loops: int) -> float:
        return self._peer.pair_ns(self._at, self._nbytes, loops)

    def count(self, situation: str, nbytes: int, times: int) -> None:
        """Pairs for a counter to count."""
        self.prepare(situation, nbytes)
        self._pairs(times)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=int, nargs="+", metavar="BYTES", help="instead of these")


def measure(options: argparse.Namespace, progress: Progress) -> Result:
    sizes = options.sizes or (SIZES[:3:2] if options.quick else SIZES)
    skipped: Skips = []
    with contextlib.ExitStack() as stack:
        cases = [(situation, nbytes) for situation in SITUATIONS for nbytes in sizes]
        if HUGE in sizes:
            try:
                stack.enter_context(huge_pages(3 * len(PEERS)))
                cases.append((HUGE_PAGES, HUGE))
            except Skipped as reason:
                skipped.append({"line": "all", "situation": HUGE_PAGES, "reason": str(reason)})
        result = timed(options, cases, progress)
    pages = [row for row in result.rows if row["nbytes"] == PAGE]
    # Counts, unlike times, are not disturbed by other programs.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        counted = pool.map(lambda row: count(row, options.quick), pages)
        for i, row in enumerate(pages):
            progress(0.5 + i / len(pages) / 2, f"counting: {row['line']}, {row['situation']}")
            skipped += next(counted)
    return result._replace(skipped=result.skipped + skipped)


def timed(
    options: argparse.Namespace, cases: Sequence[tuple[str, int]], progress: Progress
) -> Result:
    """How long pairs take in these situations, of so many bytes."""
    rounds = 5 if options.quick else 15
    rows: list[Row] = []
    skipped: Skips = []
    with started(Bench, PEERS, skipped) as workers:
        for i, (situation, nbytes) in enumerate(cases):
            case = {"situation": situation, "nbytes": nbytes}
            progress(i / len(cases) / 2, f"{situation}, {terminal.size(nbytes)}")
            ready = ask_all(workers, skipped, "prepare", **case)
            for peer, samples in interleave(workers, ready, rounds, "sample").items():
                rows.append({"line": peer, **case, "pair_ns": summary(samples)})
    return Result(rounds, rows, skipped)


def count(row: Row, quick: bool) -> Skips:
    """The system calls of a pair into its row, and of a new page the instructions."""
    new = row["situation"] == "new"
    wanted = {"system_calls": new or not quick, "instructions": new and not quick}
    request = {"do": "count", "situation": row["situation"], "nbytes": row["nbytes"]}
    counted = Counted(Bench, {"peer": row["line"]}, PEERS[row["line"]], request)
    times = max(1, min(int(COUNTED_NS / row["pair_ns"]["median"]), MOST_PAIRS))
    return counted.into(row, times, [name for name, is_wanted in wanted.items() if is_wanted])


def plot(document: Document, directory: Path) -> list[Path]:
    panels = [
        _plots.Panel(title, [row for row in document["rows"] if row["situation"] == situation])
        for situation, title in (("new", "a new range"), ("inside", "inside a registered arena"))
    ]
    x = _plots.Axis("nbytes", "bytes registered", nbytes=True)
    y = _plots.Axis("pair_ns", "register + release, ns")
    return _plots.lines(directory / "registration.svg", document, panels, x, y, FLOOR)


if __name__ == "__main__":
    raise SystemExit(main("registration"))
