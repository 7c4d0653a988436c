"""The tables of programs that rdmafork was tried with, in docs/tried-with.md and README.md.

    python docs/tried_with.py [FOLDER...]

Each folder is what tests/vm/test_field.py has left on one kernel: its rows replace those of the
same program and the same series of kernels in docs/tried-with.json, of which the tables are made.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs/tried-with.json"
PAGES = [ROOT / "docs/tried-with.md", ROOT / "README.md"]
SECTION = re.compile(r"(<!-- tried: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

Row = dict[str, Any]


def series(row: Row) -> str:
    return ".".join(re.findall(r"\d+", row["kernel"])[:2])


def key(row: Row) -> tuple[str, str, list[int]]:
    return row["source"], row["program"].lower(), [int(n) for n in series(row).split(".")]


def merged(old: list[Row], new: list[Row]) -> list[Row]:
    """Sorted: PyPI's, all of which are libraries, first."""
    rows = {(row["program"], series(row)): row for row in [*old, *new]}
    return sorted(rows.values(), key=lambda row: (row["source"] != "PyPI", *key(row)))


def fork(row: Row, where: str) -> str:
    return f"{row[where]['fork_ms']:,.0f} ms" if where in row else "-"


def children(row: Row) -> str:
    if row["result"] != "works":
        return row["result"]
    if "exec" not in row:
        return "the same" if row.get("forks") else "none"
    broken = row["alone"]["after_destructors"] != "arrived"
    return "safe under exec only" if broken else "the same"


def transfers(run: Row) -> str:
    """Did the device reach the parent after a child had run the library's destructors?"""
    return "yes" if run["after_destructors"] == "arrived" else "no"


def name(row: Row) -> str:
    return row["package"] if row["source"] == "PyPI" else row["program"]


def remarks(row: Row) -> tuple[str, str]:
    """Of the program alone, and under exec."""
    alone, under = [], []
    for remark in row.get("remarks", []):
        text = remark.removeprefix("alone, ").removeprefix("under exec ")
        text = text.removesuffix(", alone too")
        if not remark.startswith("under exec "):
            alone.append(text)
        if "exec" in row and not remark.startswith("alone, "):
            under.append(text)
    return "; ".join(alone) or "-", "; ".join(under) or "-"


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def everything(rows: list[Row]) -> Iterator[str]:
    yield from (":::{table}", ":class: wide", "")
    yield line("program", "version", "registers by", "kernel", "`fork()` alone", "under exec",
               "children", "remarks, alone", "under exec", "tried on")  # fmt: skip
    yield line(*["---"] * 10)
    for row in rows:
        yield line(
            f"{name(row)} ({row['source']})", row["version"] or "-", row["registers"], series(row),
            fork(row, "alone"), fork(row, "exec"), children(row),
            *remarks(row), row["date"],
        )  # fmt: skip
    yield ":::"


def best(rows: list[Row]) -> Iterator[str]:
    """Where exec matters most, on the newest kernel."""
    measured = [row for row in rows if row["result"] == "works" and "exec" in row]
    if not measured:
        return
    newest = max(key(row)[2] for row in measured)
    yield line("64 MiB registered by", "`fork()`, alone", "under exec",
               "the device works after a child's `exit()`, alone", "under exec")  # fmt: skip
    yield line(*["---"] * 5)
    for row in measured:
        if key(row)[2] == newest and row["alone"]["kept"] < row["exec"]["kept"]:
            yield line(
                f"{name(row)} {row['version']}", fork(row, "alone"), fork(row, "exec"),
                *(transfers(row[where]) for where in ("alone", "exec")),
            )  # fmt: skip
    yield ""
    dates = sorted({row["date"] for row in measured if key(row)[2] == newest})
    where = f"Linux {'.'.join(map(str, newest))}, {', '.join(dates)}"
    yield f"({where}; everything is slow there: compare the columns.)"


TABLES = {"everything": everything, "best": best}


def written(text: str) -> str:
    """The same with its tables as they are to be."""
    rows = json.loads(RESULTS.read_text())

    def section(found: re.Match[str]) -> str:
        return "\n".join([found[1], *TABLES[found[2]](rows), "", found[3]])

    return SECTION.sub(section, text)


def main(folders: list[str]) -> None:
    old = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    new = [
        json.loads(file.read_text()) for folder in folders for file in Path(folder).glob("*.json")
    ]
    RESULTS.write_text(json.dumps(merged(old, new), indent=1) + "\n")
    for page in PAGES:
        page.write_text(written(page.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
