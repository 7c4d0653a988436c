"""From how many pages on is marking pinned memory cheaper than the kernel's copying?

python -m rdmafork.benchmarks.break_even [--quick] [--json FILE] [--plot DIR]

Runs of k pages each, amid other memory, on base pages and on transparent huge pages, all pinned
through io_uring: fork() with the runs copied by the kernel (the floor) and marked by
madvise(MADV_DONTFORK), in turns in one process, so that nothing but the marks differs; registered
with rdmafork, lazily, whose children reserve the addresses too; and with nothing pinned. What a
fork costs is the processor's time that parent and child take until the child, which does nothing,
has ended: copied pages and inherited mappings have to be freed again. A mark pays when such a fork
costs less with it. What the engine marks is read from protected_ranges(), so that its own threshold
stands beside those measured.
"""

import argparse
import ctypes
import mmap
import resource
from collections import ChainMap
from collections.abc import Iterator
from pathlib import Path
from time import process_time_ns
from typing import Any

import rdmafork
from rdmafork import _pins
from rdmafork.cli import terminal

from . import _plots, _tables
from ._harness import Document, Measures, Result, Row, main
from ._measures import middle, quartiles, rounded, summary
from ._peers import (
    COPIED,
    HUGE,
    MADV_DOFORK,
    MADV_HUGEPAGE,
    MADV_NOHUGEPAGE,
    PAGE,
    PRIVATE,
    WAYS,
    advise,
    libc,
)
from ._progress import Progress
from ._workers import Environment, Skips, ask_all, interleave, started

PARAMETERS = ("memory", "pages")
MEASURES: Measures = {
    "fork_us": None,  # until fork() has returned
    "processor_us": None,  # of parent and child, to its end
    "saved_ns": None,  # of that, by each mark
    "mark_ns": None,  # to mark a run, and to unmark it
    "marked": "{:.0%}".format,  # of the runs
}
TITLES = {
    "fork_us": "until fork() returns",
    "processor_us": "processor time of both",
    "saved_ns": "that time saved by a mark",
    "mark_ns": "to mark and unmark a run",
    "marked": "runs with a mark",
}
FLOOR, MARKED, ENGINE, UNPINNED = "copied by the kernel", "marked", "rdmafork lazy", "not pinned"
# The names of these ways where they are the subject.
REGISTERED = {MARKED: WAYS["madvise"], ENGINE: WAYS[ENGINE], UNPINNED: WAYS[COPIED]}
PEERS: dict[str, Environment] = {name: way.environment for name, way in REGISTERED.items()}
ORDER = (FLOOR, MARKED, ENGINE, UNPINNED)
MEMORY = ("base pages", "transparent huge pages")
RUNS = 500
FORKS = 3  # the least of so many is a sample: the rest is other programs' time
PAIRS = 50


class Bench:
    """One peer: so many runs, held as it holds them."""

    def __init__(self, peer: str) -> None:
        self._line, self._peer = peer, REGISTERED[peer].peer()
        self._start = self._stride = self._nbytes = 0
        self._pins: _pins.Pins | None = None
        self._held: list[tuple[tuple[int, int], Any]] = []
        self._marked_first = False

    def prepare(self, memory: str, pages: int) -> None:
        """Runs of pages amid others that are not marked."""
        self._release()
        self._nbytes, self._stride = pages * PAGE, PAGE * max(16, 2 * pages)
        self._memory = mmap.mmap(-1, RUNS * self._stride + HUGE, flags=PRIVATE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        start += -start % HUGE
        huge = memory != MEMORY[0]
        libc.madvise(start, RUNS * self._stride, MADV_HUGEPAGE if huge else MADV_NOHUGEPAGE)
        ctypes.memset(start, 1, RUNS * self._stride)
        self._start = start + PAGE
        if self._line != UNPINNED:
            self._pins = _pins.Pins(self._runs())
        if self._line == ENGINE:
            self._held = [(run, self._peer.register(*run)) for run in self._runs()]
        fork_us()  # huge pages are split, and registered pages are marked

    def _runs(self) -> list[tuple[int, int]]:
        return [(self._start + i * self._stride, self._nbytes) for i in range(RUNS)]

    def _release(self) -> None:
        while self._held:
            run, held = self._held.pop()
            self._peer.release(*run, held)
        if self._pins is not None:
            self._pins.close()
            self._pins = None

    def sample(self) -> dict[str, dict[str, float]]:
        """{peer: its measures}: without and with marks in one process, in either order."""
        if self._line != MARKED:
            return {self._line: fork_us()}
        found = {}
        self._marked_first = not self._marked_first
        for peer in (MARKED, FLOOR) if self._marked_first else (FLOOR, MARKED):
            if peer == MARKED:
                self._peer.hold(self._start, self._nbytes, RUNS, self._stride)
            found[peer] = fork_us()
            advise(self._start, RUNS * self._stride - PAGE, MADV_DOFORK)
        pair = self._peer.pair_ns(self._start + self._stride, self._nbytes, PAIRS)
        found[MARKED]["mark_ns"] = pair
        return found

    def marked(self) -> float:
        """The share of the runs that the engine has marked."""
        ranges = rdmafork.protected_ranges()
        starts = {found.start for found in ranges if found.protected_by == "mark"}
        return rounded(sum(at in starts for at, _ in self._runs()) / RUNS)


def fork_us() -> dict[str, float]:
    returned, spent = [], []
    for _ in range(FORKS):
        start = processor_us()
        returned.append(_pins.fork_cost().ns / 1e3)
        spent.append(processor_us() - start)
    return {"fork_us": min(returned), "processor_us": min(spent)}


def processor_us() -> float:
    """The time it has spent on this process and on its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return process_time_ns() / 1e3 + (children.ru_utime + children.ru_stime) * 1e6


def measure(options: argparse.Namespace, progress: Progress) -> Result:
    rounds, sizes = (5, (1, 4)) if options.quick else (20, (1, 2, 3, 4, 8, 16))
    reason = _pins.unavailable()
    if reason:
        return Result(0, [], [{"line": "all", "reason": f"nothing can be pinned: {reason}"}])
    rows: list[Row] = []
    skipped: Skips = []
    cases = [{"memory": memory, "pages": pages} for memory in MEMORY for pages in sizes]
    with started(Bench, PEERS, skipped) as workers:
        for i, case in enumerate(cases):
            progress(i / len(cases), f"{case['pages']} a run, {case['memory']}")
            ready = ask_all(workers, skipped, "prepare", **case)
            samples = interleave(workers, ready, rounds, "sample")
            found = [dict(ChainMap(*every)) for every in zip(*samples.values(), strict=True)]
            for peer in sorted(found[0], key=ORDER.index):
                row = {"line": peer, **case, **summarised([of[peer] for of in found])}
                if peer in (MARKED, ENGINE):
                    row["saved_ns"] = summary(
                        (of[FLOOR]["processor_us"] - of[peer]["processor_us"]) * 1e3 / RUNS
                        for of in found
                    )
                if peer == ENGINE:
                    row["marked"] = workers[peer].ask("marked")
                rows.append(row)
    return Result(rounds, rows, skipped)


def summarised(samples: list[dict[str, float]]) -> dict[str, Any]:
    return {name: summary(sample[name] for sample in samples) for name in samples[0]}


# ---- tables and figures ------------------------------------------------------------------


def table(document: Document) -> Iterator[str]:
    """Of each memory a block for each measure, in one unit; then the thresholds."""
    for memory in dict.fromkeys(row["memory"] for row in document["rows"]):
        rows = [row for row in document["rows"] if row["memory"] == memory]
        yield from (memory, "")
        for measure in MEASURES:
            yield from _tables.aligned(list(block(measure, rows)))
            yield ""
        saved = {
            peer: {row["pages"]: middle(row["saved_ns"]) for row in rows if row["line"] == peer}
            for peer in (MARKED, ENGINE)
        }
        marks = {row["pages"]: row["marked"] for row in rows if row["line"] == ENGINE}
        yield from terminal.wrap(
            f"A mark saves time for {which(saved[MARKED])}. With rdmafork, which also reserves the "
            f"addresses in the child, it does for {which(saved[ENGINE])}. rdmafork marks "
            f"{which(marks)}."
        )
        yield ""


def block(measure: str, rows: list[Row]) -> Iterator[list[str]]:
    pages = list(dict.fromkeys(row["pages"] for row in rows))
    rows = [row for row in rows if measure in row]
    shown = _tables.printer(measure, MEASURES[measure], (row[measure] for row in rows))
    yield [f"{TITLES[measure]}; pages in a run:", *map(str, pages)]
    for peer in dict.fromkeys(row["line"] for row in rows):
        cells = {row["pages"]: row[measure] for row in rows if row["line"] == peer}
        yield [peer, *(_tables.cell(cells.get(k), shown) for k in pages)]
        if measure == "saved_ns":
            ends = [quartiles(cells[k]) for k in pages]
            yield ["  half of the samples", *(f"{shown(a)} to {shown(b)}" for a, b in ends)]


def which(gains: dict[int, float]) -> str:
    """The runs that gain something, and all longer ones with them."""
    found = [k for k in gains if all(gains[more] > 0 for more in gains if more >= k)]
    if not found:
        return "no run measured" if gains else "an unknown number of runs"
    if min(found) == min(gains):
        return "every run measured"
    return f"runs of {min(found)} or more pages"


def plot(document: Document, directory: Path) -> list[Path]:
    rows = document["rows"]
    panels = [
        _plots.Panel(memory, [row for row in rows if row["memory"] == memory]) for memory in MEMORY
    ]
    x = _plots.Axis("pages", "pages a run")
    y = _plots.Axis("processor_us", "fork() and the child's end, us of processor time")
    return _plots.lines(directory / "break_even.svg", document, panels, x, y, FLOOR)


if __name__ == "__main__":
    raise SystemExit(main("break_even"))
