"""Do registration and fork() cost the same on every rank of an MPI program?

mpirun -n N python -m rdmafork.benchmarks.mpi [--quick] [--json FILE] [--plot DIR]

Every rank measures `registration` (of 4 KiB and 2 MiB) and `fork_latency` (base pages, up to
256 MiB) at the same time as all others, and rank 0 reduces their tables to one: of the ranks'
medians the least, the median and the greatest, and which rank is farthest from the median, on which
host. The peers are those of the two.
Needs mpi4py and an MPI to start it: pip install 'rdmafork[mpi]'.
"""

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from . import _plots, _tables, fork_latency, registration
from ._forks import Situation
from ._harness import Document, Result, Row, main, parser
from ._measures import middle, rounded
from ._peers import FLOOR
from ._progress import Progress
from ._workers import Skips, WorkerError

PARAMETERS = ("measure", "situation")
MEASURES = {"minimum": None, "median": None, "maximum": None}  # printed as the measure is
REDUCED: dict[ModuleType, tuple[str, ...]] = {
    registration: ("pair_ns",),
    fork_latency: ("first_fork_us", "fork_us", "exec_us", "child_own_bytes"),
}
SHOWN: dict[str, Any] = {**registration.MEASURES, **fork_latency.MEASURES}


SIZES, LARGEST = (4 << 10, 2 << 20), 256 << 20  # more tells no more of ranks apart


class Silence(Progress):
    """Of the ranks that have no terminal."""

    def __call__(self, done: float, text: str) -> None:
        pass


# ---- one rank ----------------------------------------------------------------------------


def own_tables(quick: bool, progress: Progress, world: Any, room: int) -> Result:
    """This rank's rows, and the peers it lacks; a failure is told, as others wait for it."""
    rows: list[Row] = []
    skipped: Skips = []
    rounds = 0
    arguments = ["--quick"] if quick else []
    for module, measures in REDUCED.items():
        name = module.__name__.rpartition(".")[2]
        world.Barrier()
        try:
            if module is registration:
                options = parser(name).parse_args(arguments)
                cases = [(s, n) for s in registration.SITUATIONS for n in SIZES]
                result = registration.timed(options, cases, progress)
            else:
                options = parser(name).parse_args([*arguments, "--pages", "base"])
                result = fork_latency.measured(options, progress, room)
        except (WorkerError, OSError) as error:
            skipped.append({"line": name, "reason": str(error)})
            continue
        rounds = result.rounds
        skipped += result.skipped
        for row in result.rows:
            case = {"line": row["line"], "situation": in_words(module, row)}
            rows += [case | {"measure": key, "value": middle(row[key])} for key in measures]
    return Result(rounds, rows, skipped)


def in_words(module: ModuleType, row: Row) -> str:
    parameters = {name: row[name] for name in module.PARAMETERS}
    if module is fork_latency:
        return fork_latency.in_words(Situation(**parameters))
    return ", ".join(_tables.shown(name, value) for name, value in parameters.items())


# ---- all of them -------------------------------------------------------------------------


def measure(options: argparse.Namespace, progress: Progress) -> Result:
    """Collective: every rank calls it, and rank 0 has the result of all."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        reason = f"no MPI ({error}): pip install 'rdmafork[mpi]'"
        return Result(0, [], [{"line": "all", "reason": reason}])
    world = MPI.COMM_WORLD
    if world.size == 1:
        reason = "one rank alone: mpirun -n N python -m rdmafork.benchmarks.mpi"
        return Result(0, [], [{"line": "all", "reason": reason}])
    neighbours = world.Split_type(MPI.COMM_TYPE_SHARED).size
    room = min(fork_latency.half_of_memory() // neighbours, 2 * LARGEST)
    own = own_tables(options.quick, progress, world, room)
    ranks = world.gather((MPI.Get_processor_name(), own.rows, own.skipped))
    if ranks is None:
        return own
    hosts = [host for host, _, _ in ranks]
    rows = reduced(hosts, [rows for _, rows, _ in ranks])
    return Result(own.rounds, rows, merged([skipped for _, _, skipped in ranks]))


def reduced(hosts: list[str], tables: list[list[Row]]) -> list[Row]:
    """A row made of the same row of several ranks."""
    found: dict[tuple[str, ...], dict[int, float]] = {}
    for rank, rows in enumerate(tables):
        for row in rows:
            key = (row["line"], *(row[name] for name in PARAMETERS))
            found.setdefault(key, {})[rank] = row["value"]
    return [
        {"line": peer, "measure": measure, "situation": situation, **spread(values, hosts)}
        for (peer, measure, situation), values in found.items()
    ]


def spread(values: dict[int, float], hosts: list[str]) -> Row:
    middle = statistics.median(values.values())
    # Of two that are as far, the one that has more.
    far = {rank: (rounded(abs(value - middle)), value) for rank, value in values.items()}
    farthest = max(far, key=far.__getitem__)
    return {
        "minimum": min(values.values()),
        "median": rounded(middle),
        "maximum": max(values.values()),
        "outlier_rank": farthest,
        "outlier_host": hosts[farthest],
        "by_rank": {str(rank): value for rank, value in values.items()},
    }


def merged(skips: list[Skips]) -> Skips:
    """Peers that several ranks lack for the same reason, each told once."""
    ranks: dict[str, list[int]] = {}
    for rank, skipped in enumerate(skips):
        for skip in skipped:
            ranks.setdefault(json.dumps(skip), []).append(rank)
    return [
        {**json.loads(skip), "ranks": ", ".join(map(str, found))} for skip, found in ranks.items()
    ]


# ---- tables and figures ------------------------------------------------------------------


def table(document: Document) -> Iterator[str]:
    """A block for each measure and situation, a line a peer; the most frequent outlier."""
    rows = document["rows"]
    for measure, situation in dict.fromkeys((row["measure"], row["situation"]) for row in rows):
        lines = [[f"{_tables.titled(measure)}, {situation}", *MEASURES, "farthest"]]
        found = [row for row in rows if (row["measure"], row["situation"]) == (measure, situation)]
        everything = (row[name] for row in found for name in MEASURES)
        shown = _tables.printer(measure, SHOWN[measure], everything)
        lines += [[row["line"], *(shown(row[name]) for name in MEASURES), outlier(row)]
                  for row in found]  # fmt: skip
        yield from _tables.aligned(lines)
        yield ""
    if rows:
        who, times = Counter(map(outlier, rows)).most_common(1)[0]
        yield f"farthest from the median most often: {who}, in {times} of {len(rows)} lines"
        yield ""


def outlier(row: Row) -> str:
    return f"rank {row['outlier_rank']} on {row['outlier_host']}"


def plot(document: Document, directory: Path) -> list[Path]:
    """A line a peer over the ranks: an outlier is seen at once."""
    figures: list[Path] = []
    for measure, label in ("pair_ns", "register + release, ns"), ("fork_us", "fork(), us"):
        rows = [row for row in document["rows"] if row["measure"] == measure]
        panels = []
        for situation in list(dict.fromkeys(row["situation"] for row in rows))[:2]:
            points = [
                {"line": row["line"], "rank": int(rank), "y": value}
                for row in rows if row["situation"] == situation
                for rank, value in row["by_rank"].items()
            ]  # fmt: skip
            panels.append(_plots.Panel(situation, points))
        path = directory / f"mpi-{measure.partition('_')[0]}.svg"
        x, y = _plots.Axis("rank", "rank", log=False), _plots.Axis("y", label)
        figures += _plots.lines(path, document, panels, x, y, FLOOR)
    return figures


def main_of_rank() -> int:
    """Rank 0 is the one that speaks."""
    try:
        from mpi4py import MPI
    except ImportError:
        return main("mpi")
    if MPI.COMM_WORLD.rank == 0:
        return main("mpi")
    with Silence("mpi") as progress:
        measure(parser("mpi").parse_args(sys.argv[1:]), progress)
    return 0


if __name__ == "__main__":
    raise SystemExit(main_of_rank())
