"""A result as a table to read in a terminal: a block for each measure and situation."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from rdmafork.cli import terminal

from ._measures import spread

Row = dict[str, Any]


def table(module: ModuleType, document: dict[str, Any]) -> Iterator[str]:
    """A line a peer; across, the values of the last parameter."""
    *fixed, across = module.PARAMETERS
    for measure in module.MEASURES:
        rows = [row for row in document["rows"] if row.get(measure) is not None]
        for values in dict.fromkeys(tuple(row[name] for name in fixed) for row in rows):
            chosen = [row for row in rows if tuple(row[name] for name in fixed) == values]
            told = [f"{k} {shown(k, v)}" for k, v in zip(fixed, values, strict=True)]
            title = ", ".join([measure.replace("_", " "), *told])
            yield from block(module, measure, across, chosen, title)


def block(
    module: ModuleType, measure: str, across: str, rows: list[Row], title: str
) -> Iterator[str]:
    columns = list(dict.fromkeys(row[across] for row in rows))
    lines = [[title, *(shown(across, value) for value in columns)]]
    for peer in dict.fromkeys(row["peer"] for row in rows):
        found = {row[across]: row[measure] for row in rows if row["peer"] == peer}
        lines.append(
            [peer, *(cell(found.get(value), module.MEASURES[measure]) for value in columns)]
        )
    yield from aligned(lines)
    widest = max(spread(row[measure]) for row in rows)
    if widest:
        yield f"(medians; half of the samples within {widest:.0%} of each)"
    yield ""


def cell(value: Any, printed: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, dict):
        return str(printed(value))
    ratio = f" {terminal.ratio(value['to_floor'], 1):>6}" if "to_floor" in value else ""
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
