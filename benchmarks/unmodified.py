"""What does fork() cost a program that was not changed, with and without "rdmafork exec"?

python -m rdmafork.benchmarks.unmodified [--device NAME] [--mebibytes N] [--forks N]

The programs fork with that much memory registered: one through pyverbs; one that takes libibverbs'
functions by dlvsym() and calls its ibv_fork_init() first, as NCCL does. Those of perftest and UCX,
where they are installed, have a library preloaded that forks in them, with as much registered as
they do. Where there is no device: a program that makes the calls libibverbs makes, with io_uring's
pins. A C compiler is needed. Median nanoseconds of fork(), what its child had for itself, whether
the registered pages stayed where they are, and the ratio of the two. JSON on standard output.
"""

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rdmafork.benchmarks import _forked_programs
from rdmafork.benchmarks._facts import facts

PROGRAM = str(Path(__file__).with_name("_unmodified_program.py"))
EXEC = [sys.executable, "-m", "rdmafork", "exec", "--"]

# A caller like libibverbs' drivers, which reach its function through slots.
CALLER = """
#include <stddef.h>
int ibv_dontfork_range(void *base, size_t size);
int dontfork(void *base, size_t size) { return ibv_dontfork_range(base, size); }
"""

Way = Callable[[list[str]], dict[str, Any]]  # what it found, started by this command


def build(directory: str, source: str, *options: str) -> str:
    path, library = (os.path.join(directory, name) for name in ("library.c", "library.so"))
    with open(path, "w") as file:
        file.write(source)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, "-shared", "-fPIC", "-O2", "-pthread", path, *options, "-o", library]
    subprocess.run(command, check=True)
    return library


def start(arguments: list[str], prefix: list[str]) -> dict[str, Any]:
    command = [*prefix, sys.executable, PROGRAM, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"exit status {done.returncode} of {shlex.join(command)}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def ways(device: str | None, options: argparse.Namespace, directory: str) -> dict[str, Way]:
    sizes = [str(options.mebibytes << 20), str(options.forks)]
    if not device:
        caller = build(directory, CALLER, "-l:libibverbs.so.1")
        return {"ranges": partial(start, ["ranges", "", *sizes, caller])}
    forker = build(directory, _forked_programs.FORKER)
    own: dict[str, Way] = {n: partial(start, [n, device, *sizes]) for n in ("pyverbs", "dlvsym")}
    others: dict[str, Way] = {
        name: partial(_forked_programs.run, name, device, forker, options.forks)
        for name in _forked_programs.PROGRAMS
        if shutil.which(name)
    }
    return own | others


def compare(name: str, way: Way) -> dict[str, Any]:
    alone, executed = way([]), way(EXEC)
    for found in (alone, executed):
        found["fork_ns"] = round(statistics.median(found["fork_ns"]))
    ratio = round(executed["fork_ns"] / alone["fork_ns"], 4)
    print(f"{name:>12}: {alone} alone, {executed} under exec: {ratio}", file=sys.stderr)
    return {"alone": alone, "exec": executed, "fork_ratio": ratio}


def first_device() -> str | None:
    try:
        return min(os.listdir("/sys/class/infiniband"), default=None)
    except FileNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device")
    parser.add_argument("--mebibytes", type=int, default=128)
    parser.add_argument("--forks", type=int, default=7)
    options = parser.parse_args()
    device = options.device or first_device()
    with tempfile.TemporaryDirectory() as directory:
        found = {n: compare(n, way) for n, way in ways(device, options, directory).items()}
    json.dump({"machine": facts(), "device": device, "programs": found}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
