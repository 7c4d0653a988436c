"""The part that all benchmarks have in common: the command line, the JSON, the running.

A benchmark is a module of this package whose docstring asks its question in the first line, gives
the command in the second paragraph, and describes then the measurement and the peers, by their
names in _peers.py. It has

    PARAMETERS   the keys that, with "line", tell its rows apart; the last goes across a table
    MEASURES     {key: how it is printed, or None: a time, in the unit that its key ends in}
    FLOOR        the peer that the others are divided by
    measure(options, progress) -> Result
    plot(document, directory) -> the files written; from the JSON, to be drawn again any time
    add_arguments(parser), table(document) -> lines     where it needs its own

A row is flat: "line", the parameters, and of each measure a number, or what summary() makes.
"""

import argparse
import importlib
import json
import os
import pkgutil
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import rdmafork
from rdmafork.cli import terminal

from ._facts import facts, in_words

# "as": benchmarks have what they need of measures from here.
from ._measures import median as median
from ._measures import rounded as rounded
from ._measures import summary as summary
from ._plots import NoPlots, require
from ._progress import Progress
from ._tables import table
from ._workers import Skips, WorkerError

Row = dict[str, Any]
Document = dict[str, Any]
Measures = dict[str, Callable[[float], str] | None]


class Result(NamedTuple):
    rounds: int
    rows: list[Row]
    skipped: Skips  #: {"line" or a parameter: ..., "reason": ...}


def names() -> list[str]:
    found = [module.name for module in pkgutil.iter_modules([os.path.dirname(__file__)])]
    return [name for name in found if not name.startswith("_")]


def load(name: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{name}")


def question(name: str) -> str:
    return (load(name).__doc__ or "").splitlines()[0]


def add_ratios(module: ModuleType, rows: list[Row]) -> None:
    """To each summary the ratio of its median to the floor's, of the same parameters."""

    def situation(row: Row) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in module.PARAMETERS)

    floors = {situation(row): row for row in rows if row["line"] == module.FLOOR}
    for row in rows:
        for measure in module.MEASURES:
            floor = median(floors.get(situation(row), {}), measure)
            if floor and isinstance(row.get(measure), dict):
                row[measure]["to_baseline"] = rounded(row[measure]["median"] / floor)


def parser(name: str) -> argparse.ArgumentParser:
    module = load(name)
    made = argparse.ArgumentParser(
        prog=f"python -m {module.__name__}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_arguments(made)
    if hasattr(module, "add_arguments"):
        module.add_arguments(made)
    return made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer rows and rounds: seconds each")
    parser.add_argument("--json", metavar="FILE", help="write measurements as JSON; - prints them")
    parser.add_argument("--plot", metavar="DIR", type=Path, help="draw figures, with matplotlib")


def run(name: str, argv: Sequence[str]) -> Document:
    """Run one benchmark with these options. Raises WorkerError where a peer fails."""
    module, options, machine = load(name), parser(name).parse_args(argv), facts()
    with Progress(name) as progress:
        result: Result = module.measure(options, progress)
    add_ratios(module, result.rows)
    return {
        "benchmark": name,
        "question": question(name),
        "command": shlex.join(["python", "-m", module.__name__, *argv]),
        "commit": rdmafork.__version__,
        "machine": machine,
        **result._asdict(),
    }


def show(document: Document) -> str:
    module = load(document["benchmark"])
    rows = list(module.table(document) if hasattr(module, "table") else table(module, document))
    lines = [document["question"], *rows]
    if any(" 1.00x" in line for line in rows):
        lines[1:1] = [f"(1.20x is 1.2 times {module.FLOOR!r} in the same column)"]
    lines.insert(-len(rows), "")
    lines += [f"skipped: {told(skip)}" for skip in document["skipped"]]
    return "\n".join([*lines, in_words(document["machine"])])


def told(skip: dict[str, Any]) -> str:
    what = [str(v) if k == "line" else f"{k} {v}" for k, v in skip.items() if k != "reason"]
    return f"{', '.join(what)}: {skip['reason']}"


def draw(document: Document, directory: Path) -> list[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    files: list[Path] = load(document["benchmark"]).plot(document, directory)
    return files


def as_json(document: Document) -> str:
    """A field a line, and of a list a row a line: two runs are compared by diff."""
    fields = []
    for name, value in document.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in value) + "\n ]"
        fields.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}"


def write(documents: list[Document], file: str) -> None:
    """One document, or the list of several, to a file or with "-" to standard output."""
    text = ",\n".join(map(as_json, documents))
    if len(documents) > 1:
        text = f"[\n{text}\n]"
    if file == "-":
        print(text)
    else:
        Path(file).write_text(f"{text}\n")


def ready(options: argparse.Namespace) -> None:
    """NoPlots or OSError where the figures asked for cannot be drawn or written."""
    if options.plot:
        require()
        options.plot.mkdir(parents=True, exist_ok=True)
    # The reader of a pipe would take its closing for the end.
    if options.json not in (None, "-") and not Path(options.json).is_fifo():
        with open(options.json, "a"):
            pass


def run_all(
    wanted: Sequence[str],
    argv: Sequence[str],
    options: argparse.Namespace,
    prog: str = "rdmafork bench",
) -> int:
    """Run these benchmarks, show, draw and write their results. The exit status."""
    documents, failed = [], False
    try:
        ready(options)  # before minutes of measuring
    except NoPlots as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        file = str(error.filename)
        print(f"{prog}: {file or repr(file)}: {terminal.why(error, file)}", file=sys.stderr)
        return 2
    for name in wanted:
        try:
            documents.append(run(name, argv))
        except (WorkerError, OSError) as error:
            print(f"{prog}: {name} failed: {error}", file=sys.stderr)
            failed = True
            continue
        if options.json != "-":
            print(show(documents[-1]), end="\n\n")
    if options.json is not None and documents:
        write(documents, options.json)
    for document in documents:
        if options.plot and document["rows"]:
            print(*draw(document, options.plot), sep="\n", file=sys.stderr)
    return 1 if failed else 0


def main(name: str) -> int:
    argv = sys.argv[1:]
    made = parser(name)
    return run_all([name], argv, made.parse_args(argv), made.prog)
