"""Does a registration inside one registered arena cost the same however many there are?

python -m rdmafork.benchmarks.arena [--mode lazy|eager] [--live N ...]

Registers a 1 GiB arena and N - 1 pieces of it, then times register + close of one more piece,
from Python, before and after a fork has marked the arena. The peer is memoryview + release of the
same piece in the same rounds. Medians; JSON on standard output.
"""

import argparse
import ctypes
import json
import mmap
import os
import statistics
import sys
from collections.abc import Callable
from time import perf_counter_ns

import rdmafork

from ._facts import facts

ARENA = 1 << 30
PIECE = 64 << 10
LOOPS = 2000
ROUNDS = 15


def per_loop(action: Callable[[], None]) -> float:
    start = perf_counter_ns()
    for _ in range(LOOPS):
        action()
    return (perf_counter_ns() - start) / LOOPS


def clocks(piece: object) -> dict[str, float]:
    ways: dict[str, Callable[[], None]] = {
        "register_close_ns": lambda: rdmafork.register(piece).close(),  # type: ignore[arg-type]
        "memoryview_release_ns": lambda: memoryview(piece).release(),  # type: ignore[arg-type]
    }
    rounds = [{name: per_loop(way) for name, way in ways.items()} for _ in range(ROUNDS)]
    return {name: round(statistics.median(r[name] for r in rounds), 1) for name in ways}


def fork() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)


def measure(live: list[int]) -> list[dict[str, object]]:
    arena = mmap.mmap(-1, ARENA, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    piece = (ctypes.c_char * PIECE).from_buffer(arena, ARENA // 2)
    base = ctypes.addressof(piece) - ARENA // 2
    held = [rdmafork.register(arena)]
    rows: list[dict[str, object]] = []
    for count in sorted(live):
        while len(held) < count:
            at = len(held) * 1024 % (ARENA - PIECE)
            held.append(rdmafork.register_address(base + at, PIECE, owner=arena))
        pending = clocks(piece)
        fork()
        rows.append({"live": count, "before_a_fork": pending, "after_a_fork": clocks(piece)})
        print(f"{count:>9} live: {pending['register_close_ns']} ns", file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=["lazy", "eager"], default="lazy")
    parser.add_argument("--live", type=int, nargs="+", default=[1, 1000, 100_000, 1_000_000])
    options = parser.parse_args()
    rdmafork.fork_init(options.mode)
    rows = measure(options.live)
    json.dump({"machine": facts(), "mode": options.mode, "rows": rows}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
