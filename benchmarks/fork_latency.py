"""What does fork() cost a process with pinned memory, and its child, in time and in memory?

python -m rdmafork.benchmarks.fork_latency [--quick] [--json FILE] [--plot DIR] [--pages KIND ...]

Private memory is pinned through io_uring, as a memory region pins it: one buffer, of base pages,
transparent huge pages or those of the pool; and many unaligned buffers of eight pages each. Each
peer has a process of its own. In each round it registers everything anew and forks: children that
run /bin/true, one that writes to 16 MiB of other memory, and one whose memory is measured.
The peers: nothing (the kernel copies what is pinned), madvise() of the same whole pages and no
more (the floor), libibverbs, rdmafork lazily, eagerly, and with whole pages (eagerly, as on a
kernel whose copying is not trusted), where the child is given back what lies beside registered
bytes. A row says how many rounds it had: large memory has few.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rdmafork import _pins
from rdmafork.cli import machine, terminal

from . import _plots, _tables
from ._forks import Situation, Worker
from ._harness import Document, Measures, Result, Row, main
from ._measures import summary
from ._peers import FLOOR, HUGE, PAGE, WAYS, environments
from ._pool import huge_pages
from ._progress import Progress
from ._workers import Skipped, Skips, Workers, ask_all, interleave, started

PEERS = environments(name for name, way in WAYS.items() if way.forks)
PAGES = ("base", "transparent huge", "huge")
LARGE = 64 << 20  # buffers from this size on are alone; smaller ones are many
OFFSET = 100  # of one of many in its first page: two pages are edges


def mib(value: float) -> str:
    return f"{value / (1 << 20):,.1f} MiB"


PARAMETERS = ("pages", "buffer_bytes", "ranges")
MEASURES: Measures = {
    "first_fork_us": None,  # until fork() has returned in the parent, all just registered
    "fork_us": None,  # and once more
    "child_us": None,  # until it has in the child
    "exec_us": None,  # until a child that runs a program has ended
    "work_us": None,  # until one that writes to memory has
    "child_rss_bytes": mib,
    "child_own_bytes": mib,  # bytes it shares with no process
    "system_bytes": mib,  # anonymous and huge pages that are in use while it lives
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pages", nargs="+", choices=PAGES, default=PAGES, metavar="KIND",
                        help=f"some of {', '.join(map(repr, PAGES))}; default: all")  # fmt: skip


def half_of_memory() -> int:
    """The bytes that a benchmark may take."""
    return machine.memory_available() // 2


def situations(options: argparse.Namespace, room: int) -> Iterator[Situation]:
    """Pinned memory and the kernel's copy of it find room."""
    sizes = [LARGE << 2 * n for n in range(2 if options.quick else 10)]
    for pages in options.pages:
        for nbytes in sizes:
            if 2 * nbytes <= room:
                yield Situation(pages, nbytes)
    if "base" in options.pages:
        for ranges in (1, 1000) if options.quick else (1, 100, 1000, 10_000):
            yield Situation("base", 8 * PAGE, ranges, OFFSET)


def rounds_of(options: argparse.Namespace, nbytes: int) -> int:
    """The kernel copies a GiB in half a second or more, four times a round."""
    if nbytes > 1 << 30:
        return 2
    return 11 if nbytes <= 256 << 20 and not options.quick else 3


def rows_of(
    situation: Situation, workers: Workers, skipped: Skips, rounds: int, room: int
) -> list[Row]:
    """All peers side by side; where their memory does not find room at once, one by one."""
    described = situation._asdict()
    together = situation.pages != "huge" and (len(workers) + 1) * situation.nbytes <= room
    groups = [workers] if together else [{peer: workers[peer]} for peer in workers]
    samples: dict[str, list[Any]] = {}
    for group in groups:
        held = ask_all(group, skipped, "hold", **described)
        try:
            samples |= interleave(group, held, rounds, "sample")
        except Skipped as reason:
            skipped.append({"line": ", ".join(group), **described, "reason": str(reason)})
        ask_all(group, skipped, "drop")
    told = {**{name: described[name] for name in PARAMETERS}, "rounds": rounds}
    return [
        {"line": peer, **told, **{name: summary(s[name] for s in found) for name in MEASURES}}
        for peer, found in samples.items()
    ]


def measure(options: argparse.Namespace, progress: Progress) -> Result:
    return measured(options, progress, half_of_memory())


def measured(options: argparse.Namespace, progress: Progress, room: int) -> Result:
    """room: the bytes of memory that it may take."""
    rows: list[Row] = []
    skipped: Skips = []
    reason = _pins.unavailable()
    if reason:
        return Result(0, [], [{"line": "all", "reason": f"nothing can be pinned: {reason}"}])
    planned = list(situations(options, room))
    with started(Worker, PEERS, skipped) as workers:
        for done, situation in enumerate(planned):
            progress(done / len(planned), in_words(situation))
            # For one peer at a time, and for the kernel's copy.
            wanted = 2 * situation.nbytes // HUGE if situation.pages == "huge" else 0
            rounds = rounds_of(options, situation.nbytes)
            try:
                with huge_pages(wanted):
                    rows += rows_of(situation, workers, skipped, rounds, room)
            except Skipped as why:
                skipped.append({"line": "all", **situation._asdict(), "reason": str(why)})
    return Result(rounds_of(options, 0), rows, skipped)


def in_words(situation: Situation) -> str:
    size = terminal.size(situation.buffer_bytes)
    number = "one buffer" if situation.ranges == 1 else f"{situation.ranges:,} buffers"
    return f"{number} of {size}, {situation.pages} pages"


# ---- tables and figures ------------------------------------------------------------------


def table(document: Document) -> Iterator[str]:
    """A block for each situation, a line a peer."""
    rows = document["rows"]
    for values in dict.fromkeys(tuple(row[name] for name in PARAMETERS) for row in rows):
        chosen = [row for row in rows if tuple(row[name] for name in PARAMETERS) == values]
        yield f"{in_words(Situation(**dict(zip(PARAMETERS, values, strict=True))))}:"
        yield from _tables.aligned(_tables.by_measure(chosen, MEASURES))
        yield ""


def plot(document: Document, directory: Path) -> list[Path]:
    """Three: fork() against size, the child's memory against size, and times against ranges."""
    one = [row for row in document["rows"] if row["buffer_bytes"] >= LARGE]
    many = [row for row in document["rows"] if row["buffer_bytes"] < LARGE]
    kinds = {kind: [row for row in one if row["pages"] == kind] for kind in PAGES}
    sizes = [_plots.Panel(f"{kind} pages", rows) for kind, rows in kinds.items()]
    stages = {
        "first_fork_us": "fork() in the parent, all just registered",
        "fork_us": "fork() in the parent, once more",
        "exec_us": "until the child has run a program",
    }
    ranges = [
        _plots.Panel(title, [{**row, "stage_us": row[stage]} for row in many])
        for stage, title in stages.items()
    ]
    size = _plots.Axis("buffer_bytes", "private memory pinned", nbytes=True)
    count = _plots.Axis("ranges", "buffers of 32 KiB registered")
    figures = {
        "size": (sizes, size, _plots.Axis("fork_us", "fork() in the parent, ms", unit=1e3)),
        "memory": (
            sizes, size, _plots.Axis("child_own_bytes", "the child's own memory, MiB", unit=1 << 20)
        ),
        "ranges": (ranges, count, _plots.Axis("stage_us", "ms", unit=1e3)),
    }  # fmt: skip
    return [
        path for name, (panels, x, y) in figures.items()
        for path in _plots.lines(
            directory / f"fork_latency-{name}.svg", document, panels, x, y, FLOOR
        )
    ]  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main("fork_latency"))
