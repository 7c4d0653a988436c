"""The tables of what it costs, in README and the documentation, from benchmarks/results.

    rdmafork demo --json > docs/demo.json
    python docs/costs.py

Between "<!-- costs: NAME -->" and "<!-- end -->" it writes the table of that name, made of what
the demo, `make bench` and `make bench-vm` measured last.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rdmafork.benchmarks import _peers, _shapes, _tables, fork_latency, small_process
from rdmafork.benchmarks._facts import in_words
from rdmafork.cli import terminal

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs/benchmarks.md"]
SECTION = re.compile(r"(<!-- costs: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

Row = dict[str, Any]


def document(name: str) -> dict[str, Any]:
    path = "docs/demo.json" if name == "demo" else f"benchmarks/results/{name}.json"
    found: dict[str, Any] = json.loads((ROOT / path).read_text())
    return found


def rows(name: str, **wanted: Any) -> dict[str, Row]:
    """{line: its row} of that situation."""
    return {row["line"]: row for row in document(name)["rows"] if wanted.items() <= row.items()}


def table(*lines: list[str]) -> Iterator[str]:
    heading, *rest = lines
    for line in (heading, ["---"] * len(heading), *rest):
        yield f"| {' | '.join(line)} |"


def column(found: dict[str, Row], measure: str) -> dict[str, str]:
    """Of each line the median, all in one unit, and how it compares with the baseline's."""
    values = {peer: row[measure] for peer, row in found.items() if measure in row}
    show = _tables.printer(measure, str, values.values())
    return {
        peer: f"{show(value['median'])}, {terminal.ratio(value['to_baseline'], 1)}"
        if "to_baseline" in value
        else show(value["median"])
        for peer, value in values.items()
    }


def demo() -> Iterator[str]:
    """`rdmafork demo --json`: without rdmafork and in both modes."""
    report = document("demo")
    lines = {"without rdmafork": "plain", "with rdmafork, lazy": "lazy",
             "with rdmafork, eager": "eager"}  # fmt: skip
    found = {name: report["fork"][key] for name, key in lines.items()}
    show = terminal.durations(row["ns"] for row in found.values())
    yield from table(
        [f"{terminal.size(report['size']['used'])} registered and pinned", "`fork()` takes",
         "memory copied for the child"],
        *([name, show(row["ns"]), terminal.size(row["child_nbytes"])]
          for name, row in found.items()),
    )  # fmt: skip


def fork() -> Iterator[str]:
    kinds = {
        kind: rows("fork_latency", pages=kind, buffer_bytes=1 << 30, ranges=1)
        for kind in fork_latency.PAGES
    }
    base = kinds["base"]
    measured = {kind: column(found, "fork_us") for kind, found in kinds.items() if found}
    yield from table(
        ["1 GiB registered and pinned", *(f"`fork()`, {kind} pages" for kind in measured),
         "memory copied for the child"],
        *(
            [peer, *(shown[peer] for shown in measured.values()),
             terminal.size(base[peer]["child_own_bytes"]["median"])]
            for peer in base
        ),
    )  # fmt: skip


def small() -> Iterator[str]:
    base, huge = (rows("small_process", pages=kind) for kind in small_process.PAGES)
    columns = [column(base, "fork_us"), column(huge, "fork_us"), column(base, "child_us")]
    yield from table(
        ["1 GiB registered and pinned", "`fork()`, base pages", "`fork()`, transparent huge pages",
         "until it returns in the child", "page faults, parent", "page faults, child"],
        *(
            [peer, *(shown[peer] for shown in columns), f"{row['parent_faults']}",
             f"{row['child_faults']}"]
            for peer, row in base.items()
        ),
    )  # fmt: skip


def handlers() -> Iterator[str]:
    """The work of fork() beyond one after madvise() alone: instructions, and calls by name."""
    found = rows("small_process", pages="base")
    floor = found.pop(small_process.FLOOR)
    measured = ("parent_instructions", "child_instructions")
    lines = []
    for peer, row in found.items():
        more = [f"{row[m] - floor[m]:,}" if m in row and m in floor else "-" for m in measured]
        calls = {
            name: number - floor.get("calls", {}).get(name, 0)
            for name, number in row.get("calls", {}).items()
        }
        named = [f"{number} `{name}`" for name, number in calls.items() if number > 0]
        lines.append([peer, *more, ", ".join(named) or "none"])
    yield from table(
        ["beyond `fork()` after `madvise()`", "instructions, parent", "instructions, child",
         "system calls of both"],
        *lines,
    )  # fmt: skip


def registration() -> Iterator[str]:
    new, inside = (
        rows("registration", nbytes=4096, situation=situation) for situation in ("new", "inside")
    )
    alone, arena = column(new, "pair_ns"), column(inside, "pair_ns")
    yield from table(
        ["register and release a page", "not yet registered", "system calls",
         "inside registered pages"],
        *([peer, alone[peer], f"{row['system_calls']:g}" if "system_calls" in row else "-",
           arena.get(peer, "-")] for peer, row in new.items()),
    )  # fmt: skip


def many() -> Iterator[str]:
    found = rows("fork_latency", pages="base", ranges=10_000)
    columns = [column(found, m) for m in ("first_fork_us", "fork_us", "child_us")]
    yield from table(
        ["10,000 unaligned buffers of 32 KiB", "the first `fork()`", "each after it",
         "until it returns in the child"],
        *([peer, *(shown[peer] for shown in columns)] for peer in found),
    )  # fmt: skip


def scale() -> Iterator[str]:
    """Of as many as were tried at most. A line with a ratio for its fork has registered all."""
    most = max(row["live"] for row in document("scale")["rows"])
    isolated, arena = (
        rows("scale", live=most, layout=layout) for layout in ("isolated", "arena")
    )  # fmt: skip
    pairs, forks = column(isolated, "pair_ns"), column(isolated, "fork_ns")
    yield from table(
        [f"of {most:,} isolated pages", "registered", "bytes for each", "of as many in an arena",
         "to register and release one more", "a `fork()` then"],
        *(
            [peer, f"{row['reached']:,}",
             *(f"{found['bytes_each']:,.0f}" if "bytes_each" in found else "-"
               for found in (row, arena[peer])),
             pairs.get(peer, "-"), forks.get(peer, "-")]
            for peer, row in isolated.items()
        ),
    )  # fmt: skip


def unmodified() -> Iterator[str]:
    alone, inside = (
        {row["program"]: row for row in document("unmodified")["rows"] if row["line"] == peer}
        for peer in ("alone", "under exec")
    )
    show = _tables.printer(
        "fork_ns", str, (row["fork_ns"] for rows in (alone, inside) for row in rows.values())
    )
    yield from table(
        ["an unmodified program forks", "registered, at least", "`fork()`, alone",
         "under `rdmafork exec`", "memory copied for its child, alone",
         "under `rdmafork exec`"],
        *(
            [NAMES.get(program, program), terminal.size(row["registered_bytes"]),
             *(show(r["fork_ns"]["median"]) for r in (row, inside[program])),
             *(terminal.size(r["child_own_bytes"]) for r in (row, inside[program]))]
            for program, row in alone.items()
        ),
    )  # fmt: skip


def shapes() -> Iterator[str]:
    """Of each shape with as many registrations as were tried at most: a table a measure."""
    most = {row["shape"]: row["count"] for row in document("shapes")["rows"]}
    found = {shape: rows("shapes", shape=shape, count=count) for shape, count in most.items()}
    names = {s: f"{s}: {n:,} {_shapes.SHAPES[s].counted}" for s, n in most.items()}
    for title, time, ratio in (
        ("`fork()` returns in the parent", "fork_us", "fork_times"),
        ("`fork()` returns in the child", "child_us", "child_times"),
    ):
        base = {shape: found[shape][_shapes.FLOOR][time]["minimum"] for shape in most}
        show = _tables.printer(time, str, base.values())
        others = (_shapes.PINNED, _shapes.MADVISE, *_peers.ENGINES)
        yield from table(
            [title, f"{_shapes.FLOOR} (1.00x)", *others],
            *(
                [names[shape], show(base[shape]),
                 *(terminal.ratio(found[shape][line][ratio], 1) if line in found[shape] else "-"
                   for line in others)]
                for shape in most
            ),
        )  # fmt: skip
        yield ""
    more = {(s, line): row["first_ns_each"] for s in most for line, row in found[s].items()
            if line in _peers.ENGINES}  # fmt: skip
    show = _tables.printer("first_ns", str, more.values())
    yield from table(
        ["more time of the first `fork()`, for each registration", *_peers.ENGINES],
        *(
            [names[s], *(show(more[s, line]) if (s, line) in more else "-"
                         for line in _peers.ENGINES)]
            for s in most
        ),
    )  # fmt: skip


def source(name: str) -> str:
    """How the numbers are obtained, and on what machine."""
    machine = document(name)["machine"]
    if name == "demo":
        cpus = f"{machine['cpus']} CPUs {machine['cpu_model']}"
        memory = terminal.size(machine["memory_nbytes"])
        return (
            f"(`rdmafork demo`; {cpus}, {memory}, Linux {machine['kernel']}, "
            f"Python {machine['python']}.)"
        )
    return f"(`rdmafork bench {name}`; {in_words(machine)}.)"


NAMES = {
    "pyverbs": "through pyverbs",
    "dlvsym": "after its own `ibv_fork_init()`",
}
TABLES: dict[str, tuple[Callable[[], Iterator[str]], str]] = {
    "demo": (demo, "demo"),
    "fork": (fork, "fork_latency"),
    "small": (small, "small_process"),
    "handlers": (handlers, "small_process"),
    "registration": (registration, "registration"),
    "many": (many, "fork_latency"),
    "scale": (scale, "scale"),
    "unmodified": (unmodified, "unmodified"),
    "shapes": (shapes, "shapes"),
}


def written(text: str) -> str:
    """The same with its tables as they are to be."""

    def section(found: re.Match[str]) -> str:
        make, name = TABLES[found[2]]
        return "\n".join([found[1], *make(), "", source(name), "", found[3]])

    return SECTION.sub(section, text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page.read_text()))
