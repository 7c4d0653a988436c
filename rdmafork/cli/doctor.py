"""rdmafork doctor: what stands in the way of RDMA and fork() here, and what to do about it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import rdmafork
from rdmafork.cli import (
    doctor_kernel,
    doctor_limits,
    doctor_process,
    doctor_rdma,
    launchers,
    terminal,
)
from rdmafork.cli.doctor_rows import OK, PROBLEM, SKIPPED, WARNING, Row, skipped

DESCRIPTION = """\
Looks at everything that RDMA and fork() depend on, on this machine and in this
process. For each thing it says what was found and, if that is not well, what to
do. It changes nothing; what has to be tried is tried in separate processes.

With --pid it looks at another process: how much of its memory is pinned (in use
by a device), how much of that a child will not get, and what a fork() costs it.
"""

EPILOG = """\
examples:
  rdmafork doctor                         before the first run on a new machine
  mpirun -n 2 rdmafork doctor             as each rank sees it, rank@host first
  rdmafork doctor --pid $(pgrep -n app)   why is its fork() slow?
  rdmafork doctor --strict --json         in a script

Exit status: 0 no problem, 1 a problem, or with --strict a warning, 2 wrong
usage, no such process, or no problem found and a check could not be made.
"""

Section = tuple[str, Callable[[], Iterable[Row]]]

SECTIONS: tuple[Section, ...] = (
    ("Kernel", doctor_kernel.kernel),
    ("Limits", doctor_limits.limits),
    ("libibverbs", doctor_rdma.libraries),
    ("Devices", doctor_rdma.devices),
    ("Environment", doctor_rdma.variables),
)

MARKS = {
    OK: ("OK", "green"),
    WARNING: ("WARNING", "yellow"),
    PROBLEM: ("PROBLEM", "red"),
    SKIPPED: ("-", "yellow"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pid", type=int, metavar="N", help="look at process N instead")
    parser.add_argument("--strict", action="store_true", help="warnings fail too (exit status 1)")
    parser.add_argument("--json", action="store_true", help="print every row as JSON")
    terminal.add_color(parser)


def run(args: argparse.Namespace) -> int:
    sections = SECTIONS
    if args.pid is not None:
        try:
            process = doctor_process.Process(args.pid)
        except OSError as error:
            print(f"rdmafork doctor: process {args.pid}: {error.strerror}", file=sys.stderr)
            return 2
        sections = ((f"Process {process.pid} ({process.name})", process.rows),)
    found = [(name, list(_rows(check))) for name, check in sections]
    rank = launchers.launched()
    if args.json:
        print(json.dumps(_document(found, rank), indent=2))
    else:
        prefix = launchers.prefix(rank)
        # At once: other ranks write there too.
        print("\n".join(prefix + line for line in _screen(found, terminal.Paint(sys.stdout, args.color))))
    counts = _counts(found)
    if counts[PROBLEM] or (args.strict and counts[WARNING]):
        return 1
    return 2 if counts[SKIPPED] else 0


def _rows(check: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    try:
        yield from check()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        yield skipped("the rest of this", f"could not be looked at: {where}{error.strerror}")


Found = list[tuple[str, list[Row]]]


def _counts(found: Found) -> dict[str, int]:
    rows = [row for _, rows in found for row in rows]
    return {status: sum(row.status == status for row in rows) for status in MARKS}


def _document(found: Found, rank: launchers.Rank | None) -> dict[str, Any]:
    return {
        "rdmafork": rdmafork.__version__,
        "host": launchers.host(),
        "rank": rank._asdict() if rank else None,
        "counts": _counts(found),
        "rows": [{"section": name, **row._asdict()} for name, rows in found for row in rows],
    }


def _screen(found: Found, paint: terminal.Paint) -> Iterator[str]:
    uname = os.uname()
    python = sys.version.split()[0]
    yield from terminal.wrap(
        f"rdmafork {rdmafork.__version__}, {uname.sysname} {uname.release}, Python {python}"
    )
    for name, rows in found:
        yield ""
        yield paint(name, "bold")
        for row in rows:
            yield from _lines(row, paint)
    yield ""
    counts = _counts(found)
    problems, warnings = counts[PROBLEM], counts[WARNING]
    unseen = counts[SKIPPED]
    text = f"{terminal.counted(problems, 'problem')}, {terminal.counted(warnings, 'warning')}"
    if unseen:
        text += f", {terminal.counted(unseen, 'check')} could not be made"
    yield paint(f"{text}.", "red" if problems else "yellow" if warnings or unseen else "green")


def _lines(row: Row, paint: terminal.Paint) -> Iterator[str]:
    mark, colour = MARKS[row.status]
    indent = " " * 10
    first, *rest = terminal.wrap(f"{row.what}: {row.evidence}", indent)
    yield f"  {paint(f'{mark:8}', colour)}{first[len(indent) :]}"
    yield from rest
    if row.cure:
        yield from terminal.wrap(row.cure, indent + "   ", first=f"{indent}-> ")
