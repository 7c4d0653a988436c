"""What does a registration cost while many threads register?

python -m rdmafork.benchmarks.threads [--quick] [--json FILE] [--plot DIR]

Threads register and release a page over and over, all at once: "disjoint", each a page of its own,
far from the others' in one mapping, or "shared", all the same one. Loops in C, without the GIL, or
where it says so in Python, with it. Pairs per second of all threads together. Peers: the two
system calls alone (the floor), libibverbs, rdmafork in both modes, memoryview(b).release().
"""

import argparse
import threading
from pathlib import Path
from time import perf_counter_ns

from . import _plots
from ._harness import Document, Measures, Result, Row, main, summary
from ._peers import FLOOR, PAGE, WAYS, calibrated, environments, private_memory
from ._progress import Progress
from ._workers import Skips, interleave, started

PARAMETERS = ("ranges", "threads")
MEASURES: Measures = {"pairs_per_second": "{:,.0f}".format}
PEERS = (
    FLOOR,
    "libibverbs",
    "rdmafork eager",
    "rdmafork lazy",
    "rdmafork lazy, Python",
    "memoryview, Python",
)
THREADS = (1, 2, 4, 8)
APART = 64 * PAGE
BUDGET_NS = 20_000_000


class Bench:
    """One peer."""

    def __init__(self, peer: str) -> None:
        self._peer = WAYS[peer].peer()
        self._start = private_memory((THREADS[-1] + 1) * APART) + APART // 2
        self._loops = calibrated(self._pairs, BUDGET_NS)

    def _pairs(self, loops: int) -> float:
        return self._peer.pair_ns(self._start, PAGE, loops)

    def sample(self, ranges: str, threads: int) -> float:
        """Pairs per second, from the start of the first thread to the end of the last."""
        ready = threading.Barrier(threads)
        loops = max(1, self._loops // threads)
        starts: list[int] = []
        ends: list[int] = []

        def work(i: int) -> None:
            address = self._start + (i * APART if ranges == "disjoint" else 0)
            ready.wait()
            starts.append(perf_counter_ns())
            self._peer.pair_ns(address, PAGE, loops)
            ends.append(perf_counter_ns())

        workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return len(ends) * loops * 1e9 / (max(ends) - min(starts))


def measure(options: argparse.Namespace, progress: Progress) -> Result:
    rounds, counts = (5, THREADS[:2]) if options.quick else (15, THREADS)
    cases = [(ranges, threads) for ranges in ("disjoint", "shared") for threads in counts]
    rows: list[Row] = []
    skipped: Skips = []
    with started(Bench, environments(PEERS), skipped) as workers:
        for i, (ranges, threads) in enumerate(cases):
            case = {"ranges": ranges, "threads": threads}
            progress(i / len(cases), f"{threads} threads, {ranges} ranges")
            for peer, samples in interleave(workers, workers, rounds, "sample", **case).items():
                rows.append({"line": peer, **case, "pairs_per_second": summary(samples)})
    return Result(rounds, rows, skipped)


def plot(document: Document, directory: Path) -> list[Path]:
    panels = [
        _plots.Panel(f"{ranges} ranges", [r for r in document["rows"] if r["ranges"] == ranges])
        for ranges in ("disjoint", "shared")
    ]
    x = _plots.Axis("threads", "threads")
    y = _plots.Axis("pairs_per_second", "register + release, pairs per second")
    return _plots.lines(directory / "threads.svg", document, panels, x, y, FLOOR)


if __name__ == "__main__":
    raise SystemExit(main("threads"))
