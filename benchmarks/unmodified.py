"""What does fork() cost a program that was not changed, with and without "rdmafork exec"?

python -m rdmafork.benchmarks.unmodified [--device NAME] [--quick] [--json FILE] [--plot DIR]

The programs fork with 128 MiB registered: one through pyverbs; one that takes libibverbs' functions
by dlvsym() and calls its ibv_fork_init() first, as NCCL does. Those of perftest and UCX, where they
are installed, have a library preloaded that forks in them, with as much registered as they do.
Where there is no device: a program that makes the calls libibverbs makes, with io_uring's pins. The
peers: alone, and the same under exec (the floor). How long fork() takes in the parent, how much is
copied for its child, and whether the registered pages stay where they are, which only root can see.
`make bench-vm` measures all of this with a soft-RoCE device in a virtual machine.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rdmafork.cli import terminal

from . import _compiled, _forked_programs, _plots
from ._harness import Document, Measures, Result, Row, main
from ._measures import summary
from ._progress import Progress
from ._workers import Skipped, Skips

PROGRAM = str(Path(__file__).with_name("_unmodified_program.py"))
FLOOR = "under exec"
PEERS: dict[str, list[str]] = {"alone": [], FLOOR: [sys.executable, "-m", "rdmafork", "exec", "--"]}
PARAMETERS = ("program",)
MEASURES: Measures = {
    "fork_ns": None,
    "child_own_bytes": terminal.size,
    "in_place": str,
}
NBYTES = 128 << 20

# A caller like libibverbs' drivers, which reach its function through the GOT.
CALLER = """
#include <stddef.h>
int ibv_dontfork_range(void *base, size_t size);
int dontfork(void *base, size_t size) { return ibv_dontfork_range(base, size); }
"""

Way = Callable[[list[str]], dict[str, Any]]  # its result, started by this command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="default: the first one")


def start(arguments: list[str], prefix: list[str]) -> dict[str, Any]:
    command = [*prefix, sys.executable, PROGRAM, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise Skipped(f"exit status {done.returncode}: {last}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def ways(device: str | None, forks: int, directory: str, skipped: Skips) -> dict[str, Way]:
    sizes = [str(NBYTES), str(forks)]
    if not device:
        skipped.append({"program": "all that need a device", "reason": "there is no RDMA device"})
        caller = _compiled.library(directory, CALLER, "-l:libibverbs.so.1")
        return {"ranges": partial(start, ["ranges", "", *sizes, caller])}
    forker = _compiled.library(directory, _forked_programs.FORKER)
    found: dict[str, Way] = {n: partial(start, [n, device, *sizes]) for n in ("pyverbs", "dlvsym")}
    for name in _forked_programs.PROGRAMS:
        if shutil.which(name):
            found[name] = partial(_forked_programs.run, name, device, forker, forks)
        else:
            skipped.append({"program": name, "reason": "it is not installed"})
    return found


def measure(options: argparse.Namespace, progress: Progress) -> Result:
    forks = 3 if options.quick else 7
    rows: list[Row] = []
    skipped: Skips = []
    with tempfile.TemporaryDirectory() as directory:
        try:
            found = ways(options.device or first_device(), forks, directory, skipped)
        except Skipped as reason:
            return Result(forks, rows, [*skipped, {"program": "all", "reason": str(reason)}])
        for i, (program, way) in enumerate(found.items()):
            progress(i / len(found), program)
            try:
                rows += [row(program, peer, way(command)) for peer, command in PEERS.items()]
            except Skipped as reason:
                skipped.append({"program": program, "reason": str(reason)})
    return Result(forks, rows, skipped)


def row(program: str, peer: str, found: dict[str, Any]) -> Row:
    made = {"line": peer, "program": program, "registered_bytes": found["nbytes"]}
    made["fork_ns"] = summary(found["fork_ns"])
    made["child_own_bytes"] = found["child_nbytes"]
    return made | ({"in_place": found["in_place"]} if "in_place" in found else {})


def first_device() -> str | None:
    try:
        return min(os.listdir("/sys/class/infiniband"), default=None)
    except FileNotFoundError:
        return None


def plot(document: Document, directory: Path) -> list[Path]:
    """Two bars a program: fork() alone, and under exec."""
    path, rows = directory / "unmodified.svg", document["rows"][::-1]
    colours = {"alone": "#999999", FLOOR: _plots.COLOURS["rdmafork lazy"]}
    with _plots.bars(path, document, len(rows)) as axis:
        for at, bar in enumerate(rows):
            value = bar["fork_ns"]["median"] / 1e6
            name = f"{bar['program']} ({terminal.size(bar['registered_bytes'])}), {bar['line']}"
            axis.barh(name, value, height=0.6, color=colours[bar["line"]])
            axis.annotate(
                terminal.duration(bar["fork_ns"]["median"]), (value, at),
                xytext=(4, 0), textcoords="offset points", va="center", fontsize=7,
            )  # fmt: skip
        axis.set_xscale("log")
        axis.margins(x=0.15)
        axis.set_xlabel("fork() with so much registered, ms")
    return [path]


if __name__ == "__main__":
    raise SystemExit(main("unmodified"))
