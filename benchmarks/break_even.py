"""From how many pages on does marking pinned memory pay, against the kernel's copying?

python -m rdmafork.benchmarks.break_even [--quick] [--json FILE] [--plot DIR]

Runs of k pages each, amid other memory, on base pages and on transparent huge pages, all pinned
through io_uring: fork() with the runs left to the kernel (the floor), marked by
madvise(MADV_DONTFORK), and registered with rdmafork, lazily; and with nothing pinned. A run pays
in the long run when a fork with it marked takes less time, and at the first fork when it saves more
than the mark and its removal cost. What the engine marks is read from protected_ranges(), so that
the threshold it has stands beside the one measured.
"""

import argparse
import ctypes
import mmap
import statistics
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import rdmafork
from rdmafork import _pins
from rdmafork.cli import terminal

from . import _plots, _tables
from ._forks import (
    HUGE,
    MADV_DOFORK,
    MADV_DONTFORK,
    MADV_HUGEPAGE,
    MADV_NOHUGEPAGE,
    PAGE,
    PRIVATE,
    libc,
)
from ._harness import Document, Result, Row, main
from ._measures import middle, rounded, summary
from ._progress import Progress
from ._workers import Environment, Skipped, Skips, ask_all, interleave, started

PARAMETERS = ("memory", "pages")
MEASURES = {
    "fork_us": lambda us: terminal.milliseconds(us * 1e3),
    "saved_ns": terminal.nanoseconds,  # of a fork, for each run
    "mark_ns": terminal.nanoseconds,  # and unmark a run
    "marked": "{:.0%}".format,  # of the runs
}
FLOOR, MARKED, ENGINE = "left to the kernel", "marked", "rdmafork lazy"
PEERS: dict[str, Environment] = {
    FLOOR: {},
    MARKED: {},
    ENGINE: {"RDMAFORK_MODE": "lazy"},
    "not pinned": {},
}
MEMORY = ("base pages", "transparent huge pages")
FORKS = 3  # a sample is the median of so many


class Bench:
    """One peer: so many runs, held as it holds them."""

    def __init__(self, peer: str, runs: int) -> None:
        self._peer, self._count = peer, runs
        self._runs: list[tuple[int, int]] = []
        self._pins: _pins.Pins | None = None
        self._held: list[rdmafork.Registration] = []
        if peer == ENGINE:
            try:
                rdmafork.fork_init()
            except OSError as error:
                raise Skipped(error.strerror) from None

    def prepare(self, memory: str, pages: int) -> None:
        """Runs amid pages that are in nobody's way."""
        self._release()
        stride = PAGE * max(16, 2 * pages)
        self._memory = mmap.mmap(-1, self._count * stride + HUGE, flags=PRIVATE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        start += -start % HUGE
        huge = memory != MEMORY[0]
        libc.madvise(start, self._count * stride, MADV_HUGEPAGE if huge else MADV_NOHUGEPAGE)
        ctypes.memset(start, 1, self._count * stride)
        starts = range(start + PAGE, start + self._count * stride, stride)
        self._runs = [(at, pages * PAGE) for at in starts]
        if self._peer != "not pinned":
            self._pins = _pins.Pins(self._runs)
        if self._peer == ENGINE:
            self._held = [rdmafork.register_address(*run, owner=self) for run in self._runs]
            _pins.fork_cost()

    def _release(self) -> None:
        while self._held:
            self._held.pop().close()
        if self._pins is not None:
            self._pins.close()
            self._pins = None

    def sample(self) -> dict[str, float]:
        mark = self._advise(MADV_DONTFORK) if self._peer == MARKED else 0
        found = {"fork_us": statistics.median(_pins.fork_cost().ns for _ in range(FORKS)) / 1e3}
        if self._peer == MARKED:
            found["mark_ns"] = mark + self._advise(MADV_DOFORK)
        return found

    def _advise(self, advice: int) -> float:
        """Nanoseconds for each run."""
        start = perf_counter_ns()
        for run in self._runs:
            libc.madvise(*run, advice)
        return (perf_counter_ns() - start) / len(self._runs)

    def marked(self) -> float:
        """The share of the runs that the engine has marked."""
        ranges = rdmafork.protected_ranges()
        starts = {found.start for found in ranges if found.protected_by == "advice"}
        return rounded(sum(at in starts for at, _ in self._runs) / len(self._runs))


def measure(options: argparse.Namespace, progress: Progress) -> Result:
    rounds, runs, sizes = (5, 100, (1, 4)) if options.quick else (15, 500, (1, 2, 3, 4, 8, 16))
    reason = _pins.available()
    if reason:
        return Result(0, [], [{"peer": "all", "reason": f"nothing can be pinned: {reason}"}])
    rows: list[Row] = []
    skipped: Skips = []
    cases = [{"memory": memory, "pages": pages} for memory in MEMORY for pages in sizes]
    with started(Bench, PEERS, skipped, runs=runs) as workers:
        for i, case in enumerate(cases):
            progress(i / len(cases), f"{case['pages']} a run, {case['memory']}")
            ready = ask_all(workers, skipped, "prepare", **case)
            samples = interleave(workers, ready, rounds, "sample")
            for peer, found in samples.items():
                rows.append({"peer": peer, **case, **summarised(found)})
                if peer == MARKED:
                    rows[-1]["saved_ns"] = saved(samples, runs)
                elif peer == ENGINE:
                    rows[-1]["marked"] = workers[peer].ask("marked")
    return Result(rounds, rows, skipped)


def summarised(samples: list[dict[str, float]]) -> dict[str, Any]:
    return {name: summary(sample[name] for sample in samples) for name in samples[0]}


def saved(samples: dict[str, list[dict[str, float]]], runs: int) -> dict[str, Any]:
    """Nanoseconds of a fork for each run that is marked, a round at a time."""
    pairs = zip(samples[FLOOR], samples[MARKED], strict=True)
    return summary((left["fork_us"] - marked["fork_us"]) * 1e3 / runs for left, marked in pairs)


# ---- what is shown -----------------------------------------------------------------------


def table(document: Document) -> Iterator[str]:
    """A block for each memory, and the thresholds: the one measured and the engine's."""
    for memory in dict.fromkeys(row["memory"] for row in document["rows"]):
        rows = [row for row in document["rows"] if row["memory"] == memory]
        pages = list(dict.fromkeys(row["pages"] for row in rows))
        lines = [[f"{memory}; pages a run", *map(str, pages)]]
        for measure, shown in MEASURES.items():
            for peer in PEERS:
                cells = {row["pages"]: row[measure] for row in rows
                         if row["peer"] == peer and measure in row}  # fmt: skip
                if cells:
                    name = f"{peer}, {measure.replace('_', ' ')}"
                    lines.append([name, *(_tables.cell(cells.get(k), shown) for k in pages)])
        yield from _tables.aligned(lines)
        pays = threshold({row["pages"]: middle(row["saved_ns"]) for row in rows
                          if row["peer"] == MARKED})  # fmt: skip
        has = threshold({row["pages"]: row["marked"] for row in rows if row["peer"] == ENGINE})
        yield f"marking pays from {pays} on; the engine marks from {has} on"
        yield ""


def threshold(gains: dict[int, float]) -> str:
    """The fewest pages from which on all gain something."""
    found = [k for k in gains if all(gains[more] > 0 for more in gains if more >= k)]
    return terminal.counted(min(found), "page") if found else "no number of pages measured"


def plot(document: Document, directory: Path) -> list[Path]:
    rows = document["rows"]
    panels = [
        _plots.Panel(memory, [row for row in rows if row["memory"] == memory]) for memory in MEMORY
    ]
    if not rows:
        return []
    x = _plots.Axis("pages", "pages a run")
    y = _plots.Axis("fork_us", "fork(), us")
    return [_plots.lines(directory / "break_even.svg", document, panels, x, y, FLOOR)]


if __name__ == "__main__":
    raise SystemExit(main("break_even"))
