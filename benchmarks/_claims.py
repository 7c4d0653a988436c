"""Claims about rdmafork's costs, held against what this machine measures.

python -m rdmafork.benchmarks._claims

Benchmarks are run twice: the same code against itself, and the quartiles of each row, tell how far
noise moves a value. A claim is broken when the lesser of both values is beyond its bound by more
than twice that, or by a twentieth where a value is made of the least of several samples, which
leaves noise out. What a bound falls short of is its aim, and said.
"""

import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from . import _harness
from ._harness import Document, Row
from ._measures import middle, spread
from ._peers import ENGINES
from ._shapes import SHAPES
from ._tables import aligned
from ._workers import WorkerError


class Claim(NamedTuple):
    """Of each row of ours, the measure divided by that of their row: the largest is the value."""

    text: str
    benchmark: str
    measure: str
    ours: dict[str, Any]  #: the peer, and parameters where not all of them are meant
    theirs: dict[str, Any]  #: the peer, and parameters that are not those of our row
    most: float  #: that the value may be
    aim: float | None = None  #: where `most` is but what was reached
    difference: bool = False  #: what ours has more, rather than the ratio
    least: bool = False  #: it is made of the least of samples: runs that differ excuse nothing


class Verdict(NamedTuple):
    claim: Claim
    value: float | None
    margin: float
    why_not: str = ""  #: it could not be checked

    @property
    def broken(self) -> bool:
        return self.value is not None and self.value > self.claim.most * (1 + self.margin)


LEAST_MARGIN = 0.05
# The options of both runs: counts, unlike times, need no second one. Minutes in all.
RUNS = {
    "registration": (["--sizes", "4096", "2097152"], ["--quick"]),
    "fork_latency": (["--quick", "--pages", "base"],) * 2,
    "import_time": (["--quick"],) * 2,
    "scale": (["--live", "1000", "1000000"], ["--live", "1000000"]),
    "shapes": ([],) * 2,
    "small_process": ([],) * 2,
}
LAZY, EAGER = {"line": "rdmafork lazy"}, {"line": "rdmafork eager"}
PAIR, LIBIBVERBS = {"line": "madvise"}, {"line": "libibverbs"}
NEW, MILLION = {"situation": "new"}, {"layout": "isolated", "live": 1_000_000}
PINNED = {"pages": "base", "buffer_bytes": 256 << 20}
# Of each shape and each way of rdmafork's, and the bound.
NO_CLIFFS = {
    "fork_times": ("fork(), to that without rdmafork", 2),
    "child_times": ("until it returns in the child, to that without", 3),
    "first_ns_each": ("ns that the first fork takes longer for each registration", 1000),
    "growth": ("a fork with twice the number", 2.3),
    "register_growth": ("registering twice the number", 2.3),
}
# Where that is but an aim, and why.
WHOLE = "rdmafork whole pages"
REACHED: dict[tuple[str, str], dict[str, float]] = {
    # Bytes beside registered ones are copied twice: as the fork begins, and in the child.
    ("64 bytes on each page", WHOLE): {"fork_times": 20, "child_times": 35},
    ("64 bytes, as malloc() lays them", WHOLE): {"fork_times": 12, "child_times": 20},
    ("not held, no PROCMAP_QUERY", WHOLE): {"fork_times": 3, "child_times": 4},
    # Huge pages leave as a whole: the same, 2 MiB at a time.
    **{("8 bytes, in one huge page", peer): {"fork_times": 2.5, "child_times": 4}
       for peer in ENGINES},
    **{("64 bytes in each huge page", peer):
       {"fork_times": 40, "child_times": 60, "first_ns_each": 60_000} for peer in ENGINES},
    # The kernel copies as many mappings as the pages that are marked, as after madvise() alone.
    **{("isolated pages", peer): {"fork_times": 2.5} for peer in ENGINES},
}  # fmt: skip


# Of a small C process with 1 GiB registered and pinned, beyond the same after madvise() alone.
SMALL = {
    "fork_us": ("fork() of a small process, to that after madvise() alone", 1.25, 1.1, False),
    "child_us": ("until it returns in the child, to that after madvise()", 1.6, None, False),
    "parent_faults": ("page faults of its parent, beyond those", 2, 1, True),
    "child_faults": ("page faults of its child, beyond those", 11, None, True),
    "mappings": ("mappings that it copies, beyond those", 9, None, True),
}


def small_claims() -> Iterator[Claim]:
    for peer, measure in itertools.product((LAZY, EAGER), SMALL):
        text, most, aim, difference = SMALL[measure]
        yield Claim(
            f"{peer['line']}: {text}",
            *("small_process", measure, peer, PAIR),
            most=most,
            aim=aim,
            difference=difference,
            least=not difference,
        )


def shape_claims() -> Iterator[Claim]:
    for shape, peer, measure in itertools.product(SHAPES, ENGINES, NO_CLIFFS):
        text, aim = NO_CLIFFS[measure]
        # Registrations of memory that is not held are counted at once, and leave nothing to a fork.
        if measure == "first_ns_each" and not SHAPES[shape].held:
            continue
        most = REACHED.get((shape, peer), {}).get(measure, aim)
        yield Claim(
            f"{shape}, {peer}: {text}",
            *("shapes", measure, {"line": peer, "shape": shape, "count": SHAPES[shape].number}, {}),
            most=most,
            aim=aim if aim < most else None,
            least=True,
        )


CLAIMS = (
    Claim(
        "lazy, from C: a hundredth of the two system calls",
        *("registration", "pair_ns", LAZY | NEW, PAIR),
        most=0.01,
    ),
    Claim(
        "lazy, from C: no slower than libibverbs' counting alone",
        *("registration", "pair_ns", LAZY | NEW, LIBIBVERBS | {"situation": "same"}),
        most=1,
    ),
    Claim(
        "lazy, from C: ahead of libibverbs in every situation",
        *("registration", "pair_ns", LAZY, LIBIBVERBS),
        most=1,
    ),
    Claim(
        "lazy, from Python: to memoryview(b).release()",
        *("registration", "pair_ns", {"line": "rdmafork lazy, Python"} | NEW),
        {"line": "memoryview, Python"},
        most=0.9,
        aim=0.8,
    ),
    Claim(
        "lazy, from C: of a huge page, to as many base pages",
        *("registration", "pair_ns", LAZY | {"situation": "huge pages"}, LAZY | NEW),
        most=1.05,
    ),
    Claim(
        "eager, new range: to the two system calls",
        *("registration", "pair_ns", EAGER | NEW, PAIR),
        most=1.3,
    ),
    Claim(
        "eager, new range: system calls beyond these two",
        *("registration", "system_calls", EAGER | NEW, PAIR),
        most=0.05,
        difference=True,
    ),
    Claim(
        "eager, new range: instructions beyond theirs",
        *("registration", "instructions", EAGER | NEW, PAIR),
        most=1100,
        difference=True,
    ),
    Claim(
        "eager, new range: to libibverbs",
        *("registration", "pair_ns", EAGER | NEW, LIBIBVERBS),
        most=1.2,
        aim=1,
    ),
    Claim(
        "eager: to libibverbs in the worst situation",
        *("registration", "pair_ns", EAGER, LIBIBVERBS),
        most=1.6,
        aim=1,
    ),
    Claim(
        "lazy: a fork with 256 MiB pinned, to the kernel's copying",
        *("fork_latency", "fork_us", LAZY | PINNED, {"line": "not registered"}),
        most=0.05,
    ),
    Claim(
        "lazy: a fork with 256 MiB pinned, to one after madvise() alone",
        *("fork_latency", "fork_us", LAZY | PINNED, {"line": "madvise"}),
        most=1.3,
    ),
    Claim(
        "lazy: the child's own memory then, in bytes",
        *("fork_latency", "child_own_bytes", LAZY | PINNED, {}),
        most=4 << 20,
    ),
    Claim(
        "import rdmafork: to import ctypes",
        *("import_time", "over_ns", {"line": "import rdmafork"}, {"line": "import ctypes"}),
        most=1.5,
    ),
    Claim(
        "lazy: bytes for each live registration in an arena",
        *("scale", "counted_bytes_each", LAZY | {"layout": "arena"}, {}),
        most=48,
    ),
    Claim(
        "lazy: 1 000 000 isolated pages, to those that could be registered",
        *("scale", "reached", {"line": "copied by the kernel"} | MILLION, LAZY),
        most=1,
    ),
    Claim(
        "lazy: a fork then, to the kernel's own copying",
        *("scale", "fork_ns", LAZY | MILLION, {"line": "copied by the kernel"}),
        most=1.3,
        aim=1.1,
    ),
    *shape_claims(),
    *small_claims(),
    *(
        Claim(
            f"not held, {peer}: a registration without PROCMAP_QUERY, to one with it",
            *("shapes", "register_ns"),
            {"line": peer, "shape": "not held, no PROCMAP_QUERY", "count": 10_000},
            {"line": peer, "shape": "not held"},
            most=10,
        )
        for peer in ENGINES
    ),
)


def values(claim: Claim, document: Document) -> Iterator[tuple[float, float]]:
    """(the value, the spread of its samples) of each row of ours."""
    parameters = _harness.load(claim.benchmark).PARAMETERS
    for row in selected(document["rows"], claim.measure, claim.ours):
        ours = row[claim.measure]
        if not claim.theirs:
            yield middle(ours), spread(ours)
            continue
        same = {name: row[name] for name in parameters} | claim.theirs
        for other in selected(document["rows"], claim.measure, same):
            theirs = other[claim.measure]
            both = spread(ours) + spread(theirs)
            if claim.difference:
                yield middle(ours) - middle(theirs), both
            else:
                yield middle(ours) / middle(theirs), both


def selected(rows: Iterable[Row], measure: str, wanted: dict[str, Any]) -> Iterator[Row]:
    return (row for row in rows if measure in row and wanted.items() <= row.items())


def judged(claim: Claim, documents: list[Document]) -> Verdict:
    found = [max(values(claim, document), default=None) for document in documents]
    seen = [pair for pair in found if pair is not None]
    if not seen:
        reasons = [_harness.told(skip) for document in documents for skip in document["skipped"]]
        why = "; ".join(dict.fromkeys(reasons)) or "the rows it needs were not measured"
        return Verdict(claim, None, 0, why)
    least, most = min(seen)[0], max(seen)[0]
    if claim.least:
        return Verdict(claim, least, LEAST_MARGIN)
    apart = most / least - 1 if least > 0 else 0
    noise = max(apart, *(spread for _, spread in seen))
    # Counts have no noise, and no margin.
    return Verdict(claim, least, max(LEAST_MARGIN, 2 * noise) if noise else 0)


def shown(verdict: Verdict) -> list[str]:
    claim, value = verdict.claim, verdict.value
    word = "not checked" if value is None else "BROKEN" if verdict.broken else "holds"
    aim = "" if claim.aim is None else f"aim {printed(claim.aim)}"
    measured = "-" if value is None else printed(value)
    bound = f"<= {printed(claim.most)}"
    return [f"{word}: {claim.text}", measured, bound, f"+{verdict.margin:.0%}", aim]


def printed(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def main() -> int:
    failed = False
    for name, runs in RUNS.items():
        try:
            documents = [_harness.run(name, argv) for argv in runs]
        except (WorkerError, OSError) as error:
            print(f"{name} failed: {error}", file=sys.stderr)
            failed = True
            continue
        verdicts = [judged(claim, documents) for claim in CLAIMS if claim.benchmark == name]
        print(*aligned([shown(verdict) for verdict in verdicts]), sep="\n")
        for verdict in verdicts:
            if verdict.why_not:
                print(f"  {verdict.claim.text}: {verdict.why_not}")
        failed |= any(verdict.broken for verdict in verdicts)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
