"""How many registrations can live at once, and what do they cost each other and a fork?

python -m rdmafork.benchmarks.scale [--quick] [--json FILE] [--plot DIR]

Registrations are made and kept, of pages that are present and, where io_uring allows it, pinned.
"arena": pieces of 64 KiB inside one registered arena of 64 MiB, each 64 bytes behind the one
before. "isolated": every second page of a stretch of memory. Then, with all of them live, this is
measured: nanoseconds of one more register + release, before a fork and after; the memory for each,
by the growth of the process and, for rdmafork, by the size of its own tables; the first fork(),
which has everything to mark, and the next ones; and how many mappings were added.
Peers: nothing, so that the kernel copies what is pinned (the floor of a fork); libibverbs; rdmafork
in both modes. A peer that can register no more shows how far it came.
"""

import argparse
import errno
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import rdmafork
from rdmafork import _pins
from rdmafork.cli import machine

from . import _plots
from ._harness import Document, Measures, Result, Row, main, summary
from ._peers import (
    COPIED,
    PAGE,
    WAYS,
    Engine,
    calibrated,
    in_turns,
    need_memory,
    private_memory,
    touch,
)
from ._progress import Progress
from ._workers import Skipped, Skips, Workers, ask_all, interleave, started

PARAMETERS = ("layout", "live")
MEASURES: Measures = {
    "reached": "{:,}".format,
    "pair_ns": None,
    "pair_after_fork_ns": None,
    "bytes_each": "{:,.0f}".format,
    "counted_bytes_each": "{:,.1f}".format,
    "first_fork_ns": None,
    "fork_ns": None,
    "mappings": "{:,}".format,
}
FLOOR = "copied by the kernel"
MARKING = ("libibverbs", "rdmafork eager", "rdmafork lazy")
PEERS = {FLOOR: WAYS[COPIED]} | {name: WAYS[name] for name in MARKING}
ARENA, PIECE, STEP = 64 << 20, 64 << 10, 64
COUNTS, QUICK = (1, 1_000, 10_000, 100_000, 1_000_000), (1, 1_000, 40_000)
PIN_ENTRIES = 1 << 14  # the most of one io_uring
ENOUGH = 1_000  # registrations to divide their memory by
BUDGET_NS = 2_000_000


class Bench:
    """One peer with so many live registrations."""

    def __init__(self, peer: str) -> None:
        self._line, self._peer = peer, PEERS[peer].peer()
        self._pins: list[_pins.Pins] = []
        self._next = self._nbytes = self._loops = self._mappings = 0

    def prepare(self, layout: str, live: int, pinned: bool) -> Row:
        """How many could be registered, why no more, and their time and memory."""
        if layout == "arena":
            start, self._nbytes, stride = self._peer.arena(ARENA), PIECE, STEP
            touch(start, ARENA)
            spans = [(start, ARENA)]
        else:
            start, self._nbytes, stride = private_memory(2 * PAGE * (live + 1)), PAGE, 2 * PAGE
            touch(start, stride * (live + 1), stride)
            spans = [(start + i * stride, PAGE) for i in range(live)]
        if pinned:
            parts = range(0, len(spans), PIN_ENTRIES)
            self._pins = [_pins.Pins(spans[at : at + PIN_ENTRIES]) for at in parts]
        self._next = start + live * stride
        self._mappings = mappings()
        return self._hold(start, live, stride)

    def _hold(self, start: int, live: int, stride: int) -> Row:
        resident, counted = resident_bytes(), rdmafork.stats().engine_bytes
        reached, code = self._peer.hold(start, self._nbytes, live, stride)
        row: Row = {"reached": reached}
        if code:
            row["error"] = errno.errorcode[code]
        if live >= ENOUGH and self._line != FLOOR:
            row["bytes_each"] = round((resident_bytes() - resident) / reached, 1)
        if live >= ENOUGH and isinstance(self._peer, Engine):
            counted = rdmafork.stats().engine_bytes - counted
            row["counted_bytes_each"] = round(counted / reached, 1)
        return row

    def sample(self) -> float:
        """Nanoseconds of one more registration and its release."""
        if not self._loops:
            self._loops = calibrated(self._pairs, BUDGET_NS)
        return self._pairs(self._loops)

    def _pairs(self, loops: int) -> float:
        return self._peer.pair_ns(self._next, self._nbytes, loops)

    def fork(self) -> int:
        return _pins.fork_cost().ns

    def mappings(self) -> int:
        """How many there are more."""
        return mappings() - self._mappings


def mappings() -> int:
    with open("/proc/self/maps", "rb") as maps:
        return sum(1 for _ in maps)


def resident_bytes() -> int:
    return int((machine.field("/proc/self/status", "RssAnon") or "0").split()[0]) << 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--live", type=int, nargs="+", metavar="N", help="instead of 1 to 1000000")


def measure(options: argparse.Namespace, progress: Progress) -> Result:
    counts = options.live or (QUICK if options.quick else COUNTS)
    rounds = 5 if options.quick else 9
    skipped: Skips = []
    rows: list[Row] = []
    no_pins = _pins.unavailable()
    if no_pins:
        skipped.append({"line": "all", "reason": f"the pages are not pinned: {no_pins}"})
    cases = [(layout, live) for layout in ("arena", "isolated") for live in counts]
    for i, (layout, live) in enumerate(cases):
        case = {"layout": layout, "live": live}
        nbytes = ARENA if layout == "arena" else live * PAGE
        try:
            need_memory(nbytes)
        except Skipped as reason:
            skipped.append({"line": "all", **case, "reason": str(reason)})
            continue
        for peers in in_turns(PEERS, nbytes):
            progress(i / len(cases), f"{layout}, {live:,} live: {', '.join(peers)}")
            environments = {peer: PEERS[peer].environment for peer in peers}
            with started(Bench, environments, skipped) as workers:
                rows += live_rows(workers, skipped, case, no_pins is None, rounds)
    return Result(rounds, rows, skipped)


def live_rows(
    workers: Workers, skipped: Skips, case: dict[str, Any], pinned: bool, rounds: int
) -> Iterable[Row]:
    """A row for each of these peers."""
    ready = ask_all(workers, skipped, "prepare", **case, pinned=pinned)
    rows = {peer: {"line": peer, **case, **answer} for peer, answer in ready.items()}
    for peer, row in rows.items():
        if "error" in row:
            reason = f"no more than {row['reached']:,}: {row['error']}"
            skipped.append({"line": peer, **case, "reason": reason})
    full = [peer for peer, row in rows.items() if "error" not in row]
    marking = [peer for peer in full if peer != FLOOR]

    def samples(key: str, peers: list[str], count: int, do: str) -> None:
        for peer, found in interleave(workers, peers, count, do).items():
            rows[peer][key] = summary(found)

    samples("pair_ns", marking, rounds, "sample")
    samples("first_fork_ns", full, 1, "fork")
    samples("fork_ns", full, 3 if len(workers) > 1 else 2, "fork")
    samples("pair_after_fork_ns", marking, rounds, "sample")
    for peer in full:
        rows[peer]["mappings"] = workers[peer].ask("mappings")
    return rows.values()


def plot(document: Document, directory: Path) -> list[Path]:
    x = _plots.Axis("live", "live registrations")
    figures = {
        "scale_registration.svg": _plots.Axis("pair_ns", "one more register + release, ns"),
        "scale_fork.svg": _plots.Axis("first_fork_ns", "the fork() that comes next, ms", unit=1e6),
    }
    panels = []
    for layout, title in (("arena", "inside one arena"), ("isolated", "isolated pages")):
        rows = [row for row in document["rows"] if row["layout"] == layout]
        stops = {
            row["line"]: f", no more than {row['reached']:,}" for row in rows if "error" in row
        }
        panels.append(_plots.Panel(title, rows, stops))
    return [
        path for name, y in figures.items()
        for path in _plots.lines(directory / name, document, panels, x, y, FLOOR)
    ]  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main("scale"))
