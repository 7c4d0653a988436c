"""What does importing rdmafork cost a program?

python -m rdmafork.benchmarks.import_time [--quick] [--json FILE] [--plot DIR]

Fresh interpreters, their bytecode compiled, started in turn: one that does nothing (the floor),
import rdmafork, that and what most programs do next, fork_init(), and for comparison an import of
ctypes and one of asyncio. With -S, so that no .pth file of the environment (an editable install's,
say) has imported half of it beforehand, and with what Python then imports of itself at a start
imported first. The time to start and end, what is more than the floor's in the same round, the
threads that are left, and the system calls, counted by strace: all, and those that do anything
else than find, read and map files and memory, by name.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter_ns

import rdmafork

from . import _plots, _tables
from ._harness import Document, Measures, Result, Row, main
from ._measures import summary
from ._progress import Progress
from ._workers import Skipped, Skips, environment

PARAMETERS = ("python",)
MEASURES: Measures = {
    "start_ns": None,
    "over_ns": None,
    "threads": "{:,}".format,
    "system_calls": "{:,}".format,
}
FLOOR = "nothing"
PEERS = {
    FLOOR: "",
    "import rdmafork": "import rdmafork",
    "import rdmafork, fork_init()": "import rdmafork; rdmafork.fork_init()",
    "import ctypes": "import ctypes",
    "import asyncio": "import asyncio",
}
THREADS = "; print(len(os.listdir('/proc/self/task')))"
# Of finding, reading and mapping files, and of memory.
PLAIN = re.compile(
    r"access|brk|close|fcntl|fstat|getcwd|getdents|ioctl|lseek|mmap|mprotect|mremap|munmap|newfstatat"
    r"|open|pread|read|stat"
)


def command(peer: str) -> list[str]:
    return [sys.executable, "-S", "-c", f"import os, site; {PEERS[peer]}"]


def variables() -> dict[str, str]:
    """With the directory that has rdmafork first, and leave to write bytecode."""
    kept = environment({"PYTHONPATH": str(Path(rdmafork.__file__).parents[1])})
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    return kept


def start_ns(peer: str) -> int:
    start = perf_counter_ns()
    subprocess.run(command(peer), env=variables(), check=True)
    return perf_counter_ns() - start


def threads(peer: str) -> int:
    *python, code = command(peer)
    done = subprocess.run(
        [*python, code.removesuffix("; ") + THREADS],
        env=variables(), stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return int(done.stdout)


def system_calls(peer: str) -> Counter[str]:
    """By name. Raises Skipped where strace is not to be had."""
    with tempfile.NamedTemporaryFile("r") as output:
        strace = ["strace", "-f", "-o", output.name]
        try:
            done = subprocess.run(
                [*strace, *command(peer)], env=variables(), capture_output=True, text=True
            )
        except FileNotFoundError:
            raise Skipped("strace is not installed") from None
        if done.returncode:
            raise Skipped(f"strace: {done.stderr.strip()[-200:]}")
        return Counter(re.findall(r"^\d+ +(\w+)\(", output.read(), re.M))


def measure(options: argparse.Namespace, progress: Progress) -> Result:
    rounds = 5 if options.quick else 40
    skipped: Skips = []
    ways = {}
    for peer in PEERS:
        try:
            start_ns(peer)  # the first writes the bytecode
        except subprocess.CalledProcessError as error:
            skipped.append({"line": peer, "reason": f"exit status {error.returncode}"})
            continue
        ways[peer] = [0] * rounds
    for i in range(rounds):
        progress(i / rounds, f"{len(ways)} interpreters a round")
        for peer, samples in ways.items():
            samples[i] = start_ns(peer)
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    rows: list[Row] = []
    for peer, samples in ways.items():
        over = [ns - floor for ns, floor in zip(samples, ways[FLOOR], strict=True)]
        rows.append(
            {
                "line": peer,
                "python": python,
                "start_ns": summary(samples),
                "over_ns": summary(over),
                "threads": threads(peer),
            }
        )
    count(rows, skipped)
    return Result(rounds, rows, skipped)


def count(rows: list[Row], skipped: Skips) -> None:
    """System calls into the rows: all, and by name all but PLAIN and the floor's."""
    try:
        floor = system_calls(FLOOR)
        for row in rows:
            found = system_calls(row["line"])
            row["system_calls"] = found.total()
            row["other_calls"] = {
                name: number for name, number in sorted((found - floor).items())
                if not PLAIN.match(name)
            }  # fmt: skip
    except Skipped as reason:
        skipped.append({"line": "all", "counting": "system_calls", "reason": str(reason)})


def table(document: Document) -> Iterator[str]:
    lines = [["", "start and end", "over nothing", "threads", "system calls", "notable ones"]]
    rows = document["rows"]
    printers = {
        name: _tables.printer(name, shown, (row.get(name) for row in rows))
        for name, shown in MEASURES.items()
    }
    for row in rows:
        others = row.get("other_calls", {})
        lines.append([
            row["line"],
            *(_tables.cell(row.get(name), shown) for name, shown in printers.items()),
            ", ".join(f"{name} {number}" for name, number in others.items()) or "-",
        ])  # fmt: skip
    yield from _tables.aligned(lines)
    yield ""


def plot(document: Document, directory: Path) -> list[Path]:
    """A bar a peer: its time beyond the floor's."""
    rows = [row for row in document["rows"] if row["line"] != FLOOR][::-1]
    peers = [row["line"] for row in rows]
    path = directory / "import_time.svg"
    with _plots.bars(path, document, len(rows)) as axis:
        middles = [row["over_ns"]["median"] / 1e6 for row in rows]
        quartiles = [[ns / 1e6 for ns in row["over_ns"]["quartiles"]] for row in rows]
        spread = [
            [max(middle - low, 0) for middle, (low, _) in zip(middles, quartiles, strict=True)],
            [max(high - middle, 0) for middle, (_, high) in zip(middles, quartiles, strict=True)],
        ]
        colours = ["#0072B2" if "rdmafork" in peer else "#999999" for peer in peers]
        axis.barh(peers, middles, xerr=spread, height=0.55, color=colours, ecolor="#333333")
        axis.axvline(0, color=_plots.BLACK, linestyle="--", linewidth=1)
        axis.spines["left"].set_visible(False)  # the floor is there
        axis.set_xlabel("ms more than an interpreter that does nothing (dashed)")
    return [path]


if __name__ == "__main__":
    raise SystemExit(main("import_time"))
