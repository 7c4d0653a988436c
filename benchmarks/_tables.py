"""A result as a table to read in a terminal: a block for each measure and situation."""

from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from rdmafork.cli import terminal

from ._measures import middle, spread

Row = dict[str, Any]


def table(module: ModuleType, document: dict[str, Any]) -> Iterator[str]:
    """A line a peer; across, the values of the last parameter."""
    *fixed, across = module.PARAMETERS
    for measure in module.MEASURES:
        rows = [row for row in document["rows"] if row.get(measure) is not None]
        for values in dict.fromkeys(tuple(row[name] for name in fixed) for row in rows):
            chosen = [row for row in rows if tuple(row[name] for name in fixed) == values]
            told = [f"{k} {shown(k, v)}" for k, v in zip(fixed, values, strict=True)]
            title = ", ".join([titled(measure), *told])
            yield from block(module, measure, across, chosen, title)


def block(
    module: ModuleType, measure: str, across: str, rows: list[Row], title: str
) -> Iterator[str]:
    columns = list(dict.fromkeys(row[across] for row in rows))
    lines = [[title, *(shown(across, value) for value in columns)]]
    printed = printer(measure, module.MEASURES[measure], (row[measure] for row in rows))
    for peer in dict.fromkeys(row["line"] for row in rows):
        found = {row[across]: row[measure] for row in rows if row["line"] == peer}
        lines.append([peer, *(cell(found.get(value), printed) for value in columns)])
    yield from aligned(lines)
    widest = max(spread(row[measure]) for row in rows)
    if widest:
        yield f"(medians; half of the samples within {widest:.0%} of each)"
    yield ""


_NS = {"ns": 1.0, "us": 1e3}


def titled(measure: str) -> str:
    """Without the unit of the JSON: each cell has its own."""
    name, _, unit = measure.rpartition("_")
    return (name if unit in _NS or unit == "bytes" else measure).replace("_", " ")


def printer(measure: str, printed: Any, values: Iterable[Any]) -> Callable[[float], str]:
    """A function that prints these: times all in one unit, others by printed()."""
    ns = _NS.get(measure.rpartition("_")[2])
    if ns is None:
        return lambda value: str(printed(value))
    show = terminal.durations(middle(value) * ns for value in values if value is not None)
    return lambda value: show(value * ns)


def by_measure(
    rows: list[Row], measures: dict[str, Any], value: Callable[[Any], float] = middle
) -> list[list[str]]:
    """A line a row and a column a measure, below the measures' names."""
    columns = []
    for measure, printed in measures.items():
        found = [None if row.get(measure) is None else value(row[measure]) for row in rows]
        show = printer(measure, printed, found)
        columns.append([titled(measure), *("-" if v is None else show(v) for v in found)])
    return [list(line) for line in zip(["", *(row["line"] for row in rows)], *columns, strict=True)]


def cell(value: Any, printed: Callable[[float], str]) -> str:
    if value is None:
        return "-"
    if not isinstance(value, dict):
        return printed(value)
    ratio = f" {terminal.ratio(value['to_baseline'], 1):>7}" if "to_baseline" in value else ""
    return f"{printed(value['median'])}{ratio}"


def shown(name: str, value: Any) -> str:
    """A parameter's value: sizes by their names, counts with separators."""
    if name.endswith("bytes"):
        return terminal.size(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def aligned(lines: list[list[str]]) -> Iterator[str]:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *rest in lines:
        cells = [f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
        yield "  ".join([f"{first:{widths[0]}}", *cells]).rstrip()
