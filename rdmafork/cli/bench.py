"""rdmafork bench: what registrations and forks cost here, beside every peer."""

from __future__ import annotations

import argparse
import sys

from rdmafork.benchmarks import _harness
from rdmafork.cli import terminal


def _listed() -> str:
    names = _harness.names()
    width = max(map(len, names))
    lines = [
        line
        for name in names
        for line in terminal.wrap(
            _harness.question(name), " " * (width + 4), first=f"  {name:{width}}  "
        )
    ]
    return "\n".join(lines)


DESCRIPTION = f"""\
Measures on this machine what it costs to register memory, and to fork with it:
without protection, with libibverbs' fork support and with rdmafork. Without a
NAME it runs all of these:

{_listed()}

Benchmarks that this machine cannot run are skipped, with the reason. "1.20x" is
relative to the line of the same column that has 1.00x.
"""

EPILOG = """\
examples:
  rdmafork bench --quick                     all of them, in a minute or two
  rdmafork bench registration                one in full, as a table
  rdmafork bench --json all.json --plot .    everything, to keep and to look at

Each is a program as well, some with options of their own:
  python -m rdmafork.benchmarks.registration --help

Exit status: 0 all ran, 1 one failed, 2 it could not begin.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="*", metavar="NAME", help="one of the above")
    _harness.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    names = _harness.names()
    for name in args.name:
        if name not in names:
            near = terminal.did_you_mean(name, names) or f" The benchmarks are {', '.join(names)}."
            print(f"rdmafork bench: there is no benchmark {name}.{near}", file=sys.stderr)
            return 2
    argv = ["--quick"] if args.quick else []
    status: int = _harness.run_all(args.name or names, argv, args)
    return status
