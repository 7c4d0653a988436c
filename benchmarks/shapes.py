"""For which shapes of registered memory does fork() cost more than without rdmafork?

python -m rdmafork.benchmarks.shapes [--quick] [--json FILE] [--plot DIR] [--shapes NAME ...]

A row a shape: many tiny blocks, nested and overlapping ones, isolated pages. Each is measured with
so many registrations and with half of them, so that its growth is seen ("not held": 1000
registrations amid so many mappings of the process). In each round each peer is a new process that
registers, forks (the first fork has everything to do) and forks again with nothing new. A fork is
timed until it has returned in the parent, and until it has in the child.
Peers: the same memory, touched and not registered (the floor); pinned through io_uring and not
registered, so that the kernel copies it; madvise(MADV_DONTFORK) of the pages that hold the blocks,
which is what any engine has to do where pages leave; rdmafork in both modes; and with whole pages
(eagerly, where the kernel's copying is not trusted). Only the second has its memory pinned, and it
is measured in one round alone. A row says how many rounds it had: slow ones have few.
From the least of several forks: how many times the floor's time a fork with nothing new takes, in
the parent and in the child; how much longer the first fork takes, for each registration, which it
counts; and how many times as long as with half the number the slowest of all takes.
"""

import argparse
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Any

from rdmafork import _pins
from rdmafork.cli import terminal

from . import _plots, _tables
from ._harness import Document, Measures, Result, Row, main
from ._measures import rounded, summary
from ._peers import ENGINES, in_turns, need_memory
from ._pool import huge_pages
from ._progress import Progress
from ._shapes import FLOOR, MADVISE, PINNED, SHAPES, Bench, Shape
from ._shapes import PEERS as PEERS
from ._workers import Skipped, Skips, started


def times_as_long(value: float) -> str:
    return terminal.ratio(value, 1)


PARAMETERS = ("shape", "count")
MEASURES: Measures = {
    "register_ns": None,  # each
    "first_fork_us": None,
    "first_child_us": None,
    "fork_us": None,
    "child_us": None,
    "engine_bytes": terminal.size,
    "fork_times": times_as_long,  # the floor's
    "child_times": times_as_long,
    "first_ns_each": terminal.nanoseconds,  # of the first fork, beyond a later one
    "growth": times_as_long,  # of the fork that grows most, with twice the count
    "register_growth": times_as_long,  # of the time that all registrations take
}
FORKS = ("first_fork_us", "first_child_us", "fork_us", "child_us")
ROUNDS, QUICK = 7, 1
FEWEST, ENOUGH_S = 3, 30.0  # after so many rounds of a case none begins later


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="NAME",
                        help=f"some of {', '.join(map(repr, SHAPES))}; default: all")  # fmt: skip


def measure(options: argparse.Namespace, progress: Progress) -> Result:
    rows: list[Row] = []
    skipped: Skips = []
    rounds = QUICK if options.quick else ROUNDS
    no_pins = _pins.unavailable()
    if no_pins:
        skipped.append({"line": PINNED, "reason": f"nothing can be pinned: {no_pins}"})
    cases = []
    for name in options.shapes:
        full = SHAPES[name].quick if options.quick else SHAPES[name].number
        cases += [(name, full // 2), (name, full)]
    for i, (name, count) in enumerate(cases):
        progress(i / len(cases), f"{name}, {count:,}")
        shape, case = SHAPES[name], {"shape": name, "count": count}
        peers = [peer for peer in shape.peers() if peer != PINNED or not no_pins]
        try:
            need_memory(int(count * shape.bytes_each))
            # One more for the copy of the pinned bytes.
            with huge_pages((len(peers) + 1) * shape.huge_pages(count)):
                rows += case_rows(shape, case, peers, rounds, skipped)
        except Skipped as reason:
            skipped.append({"line": "all", **case, "reason": str(reason)})
    compare(rows)
    return Result(rounds, rows, unique(skipped))


def unique(skipped: Skips) -> Skips:
    """A shape that is skipped is skipped in each round."""
    return [skip for i, skip in enumerate(skipped) if skip not in skipped[:i]]


def case_rows(
    shape: Shape, case: dict[str, Any], peers: list[str], rounds: int, skipped: Skips
) -> list[Row]:
    """A row for each peer that could register all."""
    found: dict[str, list[dict[str, Any]]] = {peer: [] for peer in peers}
    shuffle = random.Random(rounds).shuffle
    until = monotonic() + ENOUGH_S
    for done in range(rounds):
        if done >= FEWEST and monotonic() > until:
            break
        # Pinned memory is copied each time, for seconds: it is there to compare, and has no claim.
        order = [peer for peer in peers if peer != PINNED or not done]
        shuffle(order)
        for group in in_turns(order, int(case["count"] * shape.bytes_each)):
            for peer, sample in samples(shape, case, group, skipped):
                found[peer].append(sample)
    return [{"line": peer, **case, **row_of(some)} for peer, some in found.items() if some]


def samples(
    shape: Shape, case: dict[str, Any], peers: list[str], skipped: Skips
) -> Iterator[tuple[str, dict[str, Any]]]:
    """One of each peer, side by side, each in a new process."""
    environments = {peer: shape.peers()[peer] for peer in peers}
    with started(Bench, environments, skipped, **case) as workers, ExitStack() as ended:
        ready: dict[str, dict[str, Any]] = {}
        for peer, worker in workers.items():
            if peer == PINNED:
                ended.callback(worker.ask, "unpin")
            try:
                ready[peer] = worker.ask("register")
                reached = ready[peer]["reached"]
                if "error" in ready[peer]:
                    raise Skipped(f"no more than {reached:,} registrations: {ready[peer]['error']}")
                ready[peer]["first"] = worker.ask("fork")
            except Skipped as reason:
                skipped.append({"line": peer, **case, "reason": str(reason)})
                ready.pop(peer, None)
        for peer, sample in ready.items():
            sample["later"] = workers[peer].ask("forks")
            if peer in ENGINES:
                sample["engine_bytes"] = workers[peer].ask("engine_bytes")
            yield peer, sample


def row_of(found: list[dict[str, Any]]) -> Row:
    first = [sample["first"] for sample in found]
    later = [fork for sample in found for fork in sample["later"]]
    row: Row = {
        "rounds": len(found),
        "reached": found[0]["reached"],
        "first_fork_us": least(here for here, _ in first),
        "first_child_us": least(there for _, there in first),
        "fork_us": least(here for here, _ in later),
        "child_us": least(there for _, there in later),
    }
    if "register_ns" in found[0]:
        row["register_ns"] = least(sample["register_ns"] for sample in found)
        row["engine_bytes"] = max(sample["engine_bytes"] for sample in found)
    return row


def least(samples: Any) -> dict[str, Any]:
    """A summary, and the least: the rest is other programs' time."""
    values = list(samples)
    return summary(values) | {"minimum": rounded(min(values))}


def compare(rows: list[Row]) -> None:
    """Each row with its floor, and with the row of half the number."""
    at = {(row["line"], row["shape"], row["count"]): row for row in rows}
    for row in rows:
        floor = at.get((FLOOR, row["shape"], row["count"]))
        half = at.get((row["line"], row["shape"], row["count"] // 2))
        if floor and floor is not row:
            row["fork_times"] = times(row, floor, "fork_us")
            row["child_times"] = times(row, floor, "child_us")
            more = first_more(row) - first_more(floor)
            row["first_ns_each"] = rounded(max(more, 0) * 1e3 / row["reached"])
        if half:
            row["growth"] = max(times(row, half, name) for name in FORKS)
            if "register_ns" in row:
                each = times(row, half, "register_ns")
                row["register_growth"] = rounded(each * row["reached"] / half["reached"])


def times(row: Row, other: Row, measure: str) -> float:
    return rounded(row[measure]["minimum"] / other[measure]["minimum"])


def first_more(row: Row) -> float:
    return float(row["first_fork_us"]["minimum"] - row["fork_us"]["minimum"])


# ---- tables and figures ------------------------------------------------------------------


def table(document: Document) -> Iterator[str]:
    """A block for each shape and count, a line a peer."""
    rows = document["rows"]
    for shape, count in dict.fromkeys((row["shape"], row["count"]) for row in rows):
        yield f"{shape}, {count:,} {SHAPES[shape].counted} (the least of several):"
        found = [row for row in rows if (row["shape"], row["count"]) == (shape, count)]
        yield from _tables.aligned(_tables.by_measure(found, MEASURES, smallest))
        yield ""


def smallest(value: Any) -> float:
    return float(value["minimum"] if isinstance(value, dict) else value)


def plot(document: Document, directory: Path) -> list[Path]:
    """A line a shape, a mark a peer: fork() in the parent, relative to the floor's."""
    most = {row["shape"]: row["count"] for row in document["rows"]}
    shapes, peers = list(most)[::-1], (PINNED, MADVISE, *ENGINES)
    path, colours = directory / "shapes.svg", _plots.coloured([*peers], FLOOR)
    with _plots.bars(path, document, len(shapes)) as axis:
        axis.grid(axis="y", visible=True)
        axis.axvline(1, color=_plots.BLACK, linestyle="--", linewidth=1)
        for i, peer in enumerate(peers):
            found = {row["shape"]: row["fork_times"] for row in document["rows"]
                     if (row["line"], row["count"]) == (peer, most[row["shape"]])
                     and "fork_times" in row}  # fmt: skip
            # One beside the other where they are alike.
            at = [shapes.index(shape) + 0.13 * (len(peers) // 2 - i) for shape in found]
            axis.plot(list(found.values()), at, "o", color=colours[peer], markersize=5, label=peer)
        axis.set_yticks(range(len(shapes)), labels=shapes)
        axis.set_xscale("log")
        axis.set_xlabel("fork() in the parent, times as long as without rdmafork (dashed)")
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    return [path]


if __name__ == "__main__":
    raise SystemExit(main("shapes"))
