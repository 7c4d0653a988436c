"""rdmafork doctor: what stands in the way of RDMA and fork() here, and what to do about it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import rdmafork
from rdmafork.cli import (
    doctor_kernel,
    doctor_limits,
    doctor_merge,
    doctor_process,
    doctor_rdma,
    launchers,
    terminal,
)
from rdmafork.cli.doctor_rows import (
    OK,
    PROBLEM,
    SKIPPED,
    STATUSES,
    WARNING,
    Found,
    Row,
    skipped,
)

DESCRIPTION = """\
Checks everything that RDMA and fork() depend on, on this machine and in this
process. For each check it says what was found and, if something is wrong, what
to do. It changes nothing: experiments run in separate processes.

With --pid it looks at another process: how much of its memory is pinned (in use
by a device), how much a child does not inherit, and what a fork() costs.

With --merge it reads what `rdmafork doctor --json` printed on many ranks or
hosts, and prints each finding once, problems first, with those that have it.
"""

EPILOG = """\
examples:
  rdmafork doctor                         before the first run on a machine
  rdmafork doctor --quiet --strict        in a script: silent if all is well
  rdmafork doctor --pid $(pgrep -n app)   why is its fork() slow?
  srun rdmafork doctor --json | rdmafork doctor --merge
                                          all ranks of a job as one answer;
                                          mpirun works the same
  rdmafork doctor --merge node*.json      the same of one file from each host

Under a launcher each line begins with rank@host, and --json prints one line
for each row, because launchers mix the lines of all ranks.

Exit status: 0 no problem; 1 a problem, or with --strict a warning; 2 wrong
usage, no such process, or no problem found but a check could not be made or
an answer is missing.
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
    parser.add_argument(
        "--merge", action="store_true", help="merge what many ranks or hosts printed with --json"
    )
    parser.add_argument(
        "files", metavar="FILE", nargs="*", help="with --merge: what to read, instead of stdin"
    )
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="print only what is not OK, or nothing"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 for a warning too")
    parser.add_argument("--json", action="store_true", help="print every row as JSON")
    terminal.add_color(parser)


def run(args: argparse.Namespace) -> int:
    paint = terminal.Paint(sys.stdout, args.color)
    if args.merge:
        return _merge(args, paint)
    if args.files:
        print(f"rdmafork doctor: to read {args.files[0]}, add --merge", file=sys.stderr)
        return 2
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
    counts = _counts(row for _, rows in found for row in rows)
    if args.json and rank:
        print("\n".join(doctor_merge.lines(found, launchers.host(), rank, counts)))
    elif args.json:
        print(json.dumps(_document(found, counts), indent=2))
    else:
        prefix = launchers.prefix(rank)
        lines = [f"{prefix}{line}\n" for line in _screen(found, counts, args.quiet, paint)]
        print("".join(lines), end="")  # At once: other ranks write there too.
    return _status(counts, args.strict)


def _merge(args: argparse.Namespace, paint: terminal.Paint) -> int:
    if args.pid is not None:
        print("rdmafork doctor: --merge and --pid cannot be combined", file=sys.stderr)
        return 2
    try:
        merged = doctor_merge.read(args.files or ["-"])
    except (OSError, ValueError) as error:
        text = str(error)
        if isinstance(error, OSError):
            text = f"{error.filename}: {terminal.why(error, str(error.filename))}"
        print(f"rdmafork doctor: {text}", file=sys.stderr)
        return 2
    # A missing answer is a check that could not be made.
    rows = merged.rows + [skipped("merge", text) for text in merged.missing]
    rows.sort(key=lambda row: STATUSES.index(row.status))
    counts = _counts(rows)
    if args.json:
        document = {"summary": merged.head, "counts": counts}
        print(json.dumps(document | {"rows": [row._asdict() for row in rows]}, indent=2))
    else:
        shown = [row for row in rows if row.status != OK or not args.quiet]
        if shown:
            lines = [line for row in shown for line in _lines(row, paint)]
            print("\n".join([*terminal.wrap(merged.head), "", *lines, "", _sum(counts, paint)]))
    return _status(counts, args.strict)


def _status(counts: dict[str, int], strict: bool) -> int:
    if counts[PROBLEM] or (strict and counts[WARNING]):
        return 1
    return 2 if counts[SKIPPED] else 0


def _rows(check: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    try:
        yield from check()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        yield skipped("the other checks", f"could not be made: {where}{error.strerror}")


def _counts(rows: Iterable[Row]) -> dict[str, int]:
    found = Counter(row.status for row in rows)
    return {status: found[status] for status in MARKS}


def _document(found: Found, counts: dict[str, int]) -> dict[str, Any]:
    return {
        "rdmafork": rdmafork.__version__,
        "host": launchers.host(),
        "rank": None,
        "counts": counts,
        "rows": [{"section": name, **row._asdict()} for name, rows in found for row in rows],
    }


def _screen(
    found: Found, counts: dict[str, int], quiet: bool, paint: terminal.Paint
) -> Iterator[str]:
    """All rows; if quiet those that are not OK, so nothing if all is well."""
    if quiet:
        found = [(name, [row for row in rows if row.status != OK]) for name, rows in found]
        found = [(name, rows) for name, rows in found if rows]
        if not found:
            return
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
    yield _sum(counts, paint)


def _sum(counts: dict[str, int], paint: terminal.Paint) -> str:
    problems, warnings = counts[PROBLEM], counts[WARNING]
    unseen = counts[SKIPPED]
    text = f"{terminal.counted(problems, 'problem')}, {terminal.counted(warnings, 'warning')}"
    if unseen:
        text += f", {terminal.counted(unseen, 'check')} could not be made"
    return paint(f"{text}.", "red" if problems else "yellow" if warnings or unseen else "green")


def _lines(row: Row, paint: terminal.Paint) -> Iterator[str]:
    mark, colour = MARKS[row.status]
    indent = " " * 10
    first, *rest = terminal.wrap(f"{row.what}: {row.evidence}", indent)
    yield f"  {paint(f'{mark:8}', colour)}{first[len(indent) :]}"
    yield from rest
    if row.cure:
        yield from terminal.wrap(row.cure, indent + "   ", first=f"{indent}-> ")
