"""rdmafork report: the lines that `rdmafork exec --report` left, as one table."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from rdmafork.cli import report_lines, terminal
from rdmafork.cli.report_lines import Broken, Process

DESCRIPTION = """\
Merges the reports of many processes, also from many ranks and hosts, into one
table: first those with errors, then those far from the median, then the others.
"""

EPILOG = """\
examples:
  rdmafork report r.json
  rdmafork report r.rank*.json --all          all processes, not the first 20
  rdmafork report r.rank*.json --json | jq .totals
  rdmafork report - < log                     names lines that are not reports
  rdmafork report r.json | c++filt            C++ names as the source has them

columns:
  regs       registrations made
  forks      calls of fork() through libc
  handlers   the longest time that rdmafork's fork handlers took in one fork()
  marked     bytes that children did not inherit, of all forks together
  unmarked   registered bytes that could not be marked, and bytes pinned
             without libibverbs, or by one that is not intercepted. The kernel
             copies them: slow, and safe only if its copying can be trusted, see
             `rdmafork doctor`. Without those registered with on_fork="keep"

A process that ended by a signal or by _exit(), as dash and the workers of
Python's multiprocessing do, wrote no report, nor did a program that called
exec(). Notes below the table say how many are missing, as far as the others'
reports tell. That is not an error.

Exit status: 0 no errors; 1 a process met an error, the fork support of a
library could not be intercepted, or a line could not be read; 2 no reports.
"""

SHOWN = 20
_COLUMNS = (
    ("rank", ">"), ("host", "<"), ("pid", ">"), ("program", "<"), ("regs", ">"), ("forks", ">"),
    ("handlers", ">"), ("marked", ">"), ("unmarked", ">"),
)  # fmt: skip
_NAME = 10  # columns at most for a host, a program


class Totals(NamedTuple):
    """Over all processes."""

    processes: int
    hosts: int
    registrations: int
    forks: int
    handler_ns: int
    marked_bytes: int
    unmarked_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", metavar="FILE", nargs="+", help="reports of `rdmafork exec --report`; - is stdin"
    )
    parser.add_argument("--all", action="store_true", help=f"show more than {SHOWN} processes")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    terminal.add_color(parser)


def run(args: argparse.Namespace) -> int:
    processes: list[Process] = []
    broken: list[Broken] = []
    for name in args.files:
        try:
            for found in report_lines.read(name):
                broken.append(found) if isinstance(found, Broken) else processes.append(found)
        except OSError as error:
            broken.append(Broken(name, None, terminal.why(error, name)))
    processes = report_lines.outliers_first(processes)
    if args.json:
        print(json.dumps(_document(processes, broken), indent=2))
    else:
        _tell(broken)
        paint = terminal.Paint(sys.stdout, args.color)
        shown = processes if args.all else processes[:SHOWN]
        if processes:
            print("\n".join(_screen(processes, shown, paint)))
    if not processes:
        print(f"rdmafork report: no reports: {report_lines.WHY}", file=sys.stderr)
        return 2
    return 1 if broken or any(process.troubles for process in processes) else 0


def _document(processes: list[Process], broken: list[Broken]) -> dict[str, Any]:
    return {
        "totals": _totals(processes)._asdict(),
        "processes": [{**p.line, "troubles": p.troubles} for p in processes],
        "fork_callers": dict(report_lines.fork_callers(processes)),
        "notes": list(report_lines.notes(processes)),
        "broken": [found._asdict() for found in broken],
    }


def _totals(processes: list[Process]) -> Totals:
    sums = (sum(getattr(process, name) for process in processes) for name in Totals._fields[2:])
    return Totals(len(processes), len({process.host for process in processes}), *sums)


def _tell(broken: list[Broken]) -> None:
    """On stderr, the first few of each file."""
    told: dict[str, int] = {}
    for file, line, why in broken:
        told[file] = told.get(file, 0) + 1
        if told[file] <= 3:
            where = f"{file}:{line}" if line else file
            print(f"rdmafork report: {terminal.printable(where)}: {why}", file=sys.stderr)
    for file, count in told.items():
        if count > 3:
            print(f"rdmafork report: {file}: {count - 3:,} more such lines", file=sys.stderr)


def _screen(processes: list[Process], shown: list[Process], paint: terminal.Paint) -> Iterator[str]:
    rows = [_cells(process) for process in shown]
    names = [name for name, _ in _COLUMNS]
    widths = [max(len(row[i]) for row in [names, *rows]) for i in range(len(_COLUMNS))]
    yield paint(_line(names, widths), "bold")
    far = {id(process) for process, _ in report_lines.far_from_the_rest(processes)}
    for process, row in zip(shown, rows, strict=True):
        colour = "red" if process.troubles else "yellow" if id(process) in far else None
        yield paint(_line(row, widths), colour)
    if len(shown) < len(processes):
        yield f"... and {len(processes) - len(shown):,} more; --all shows them"
    yield ""
    yield from terminal.wrap(_sentence(_totals(processes)))
    for note in report_lines.notes(processes):
        yield from terminal.wrap(f"Note: {note}.")
    yield from _callers(processes, paint)
    yield from _problems(processes, paint)


def _cells(process: Process) -> list[str]:
    return [
        "-" if process.rank is None else str(process.rank),
        terminal.printable(process.host)[:_NAME],
        str(process.pid),
        terminal.printable(process.program)[:_NAME],
        f"{process.registrations:,}",
        f"{process.forks:,}",
        terminal.duration(process.handler_max_ns),
        terminal.size(process.marked_bytes),
        terminal.size(process.unmarked_bytes),
    ]


def _line(cells: Iterable[str], widths: list[int]) -> str:
    gap = "  " if sum(widths) + 2 * len(widths) <= terminal.WIDTH else " "
    sides = (side for _, side in _COLUMNS)
    return gap.join(f"{c:{s}{w}}" for c, s, w in zip(cells, sides, widths, strict=True)).rstrip()


def _sentence(totals: Totals) -> str:
    forks = terminal.counted(totals.forks, "fork")
    if totals.forks:
        each = terminal.duration(totals.handler_ns / totals.forks)
        forks += f" with {each} in handlers each"
    return (
        f"{terminal.counted(totals.processes, 'process')} on "
        f"{terminal.counted(totals.hosts, 'host')}: "
        f"{terminal.counted(totals.registrations, 'registration')}, {forks}; "
        f"{terminal.size(totals.marked_bytes)} marked: not inherited, not copied; "
        f"{terminal.size(totals.unmarked_bytes)} unmarked: copied by the kernel."
    )


def _callers(processes: list[Process], paint: terminal.Paint) -> Iterator[str]:
    callers = report_lines.fork_callers(processes)
    if callers:
        yield ""
        yield paint("who forked", "bold")
    for caller, count in callers:
        yield f"{count:>9,}  {terminal.printable(caller)}"


def _problems(processes: list[Process], paint: terminal.Paint) -> Iterator[str]:
    found = report_lines.troubles(processes)
    if found:
        yield ""
        yield paint("problems", "bold")
    for text, those in found:
        ranks = [str(process.rank) for process in those if process.rank is not None]
        who = f"rank {', '.join(ranks[:5])}" if ranks else f"process {those[0].pid}"
        if len(those) > 5:
            who += f" and {len(those) - 5:,} more"
        yield from terminal.wrap(f"{terminal.printable(text)} ({who})", "  ")
