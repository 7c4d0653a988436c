"""What do many registrations cost a fork() and its child?

python -m rdmafork.benchmarks.children [--registrations N ...] [--pages N] [--touch MiB] ...

Each way to hold so many unaligned buffers of so many pages, pinned through io_uring where that
works, has a process of its own, and in each round each of them forks: at once after all was
registered anew ("first"), and once more ("exec"), children that run /bin/true; and a child that
writes to so many MiB of memory ("work"). Microseconds until fork() has returned to the parent,
until it has in the child, its edges back and its holes reserved, and until the child has ended:
the median, the quartiles, and the median's ratio to the floor's, which marks the same pages by
madvise() and does no more, as libibverbs. JSON on standard output.
"""

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import statistics
import struct
import subprocess
import sys
from collections.abc import Iterator
from time import perf_counter_ns

import rdmafork
from rdmafork import _pins

from ._facts import facts

PAGE = mmap.PAGESIZE
OFFSET = 100  # of a buffer in its first page: two pages are edges
MADV_DONTFORK, MADV_DOFORK = 10, 11
libc = ctypes.CDLL(None, use_errno=True)
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

# The environment of the process that does it so.
WAYS: dict[str, dict[str, str]] = {
    "not registered": {},
    "madvise": {},
    "lazy": {"RDMAFORK_MODE": "lazy"},
    "eager": {"RDMAFORK_MODE": "eager"},
    "whole pages": {"RDMAFORK_EDGES": "whole"},
}
FLOOR = "madvise"
CHILDREN = ("first", "exec", "work")
CLOCKS = ("parent", "child", "end")

Sample = dict[str, list[float]]  # microseconds by CLOCKS, for each of CHILDREN


# ---- one way, in a process of its own ------------------------------------------------------


class Worker:
    def __init__(self, options: argparse.Namespace) -> None:
        self.way: str = options.worker
        self.nbytes = options.pages * PAGE
        count, stride = options.registrations[0], self.nbytes + 4 * PAGE
        self.memory = mmap.mmap(-1, count * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.starts = range(base, base + count * stride, stride)
        for start in self.starts:
            ctypes.memset(start, 1, self.nbytes + PAGE)
        self.heap = bytearray(options.touch << 20)
        self.returned = mmap.mmap(-1, PAGE)  # shared: when fork() returned in the child
        self.held: list[rdmafork.Registration] = []
        spans = [(start + OFFSET, self.nbytes) for start in self.starts]
        self.pins = None if options.unpinned else _pins.Pins(spans)
        if self.way not in ("not registered", FLOOR):
            rdmafork.fork_init()

    def register_anew(self) -> None:
        if self.way == FLOOR:
            for advice in (MADV_DOFORK, MADV_DONTFORK):
                for start in self.starts:
                    if libc.madvise(start, self.nbytes + PAGE, advice):
                        raise OSError(ctypes.get_errno(), "madvise")
        elif self.way != "not registered":
            while self.held:
                self.held.pop().close()
            for start in self.starts:
                at = start + OFFSET
                self.held.append(rdmafork.register_address(at, self.nbytes, owner=self.memory))

    def fork(self, works: bool) -> list[float]:
        start = perf_counter_ns()
        pid = os.fork()
        now = perf_counter_ns()
        if not pid:
            struct.pack_into("q", self.returned, 0, now)
            if works:
                self.heap[:: PAGE // 2] = bytes(len(self.heap[:: PAGE // 2]))
                os._exit(0)
            os.execv("/bin/true", ["true"])
        if os.waitpid(pid, 0)[1]:
            raise ChildProcessError(f"{self.way}: the child died")
        in_child = struct.unpack_from("q", self.returned)[0]
        return [(clock - start) / 1e3 for clock in (now, in_child, perf_counter_ns())]

    def sample(self) -> Sample:
        self.register_anew()
        return {name: self.fork(works=name == "work") for name in CHILDREN}


def serve(options: argparse.Namespace) -> None:
    """A sample for each line of standard input."""
    worker = Worker(options)
    for _ in sys.stdin:
        print(json.dumps(worker.sample()), flush=True)


# ---- all ways side by side -----------------------------------------------------------------


@contextlib.contextmanager
def worker(way: str, count: int, options: argparse.Namespace) -> Iterator[subprocess.Popen[str]]:
    settings = ["--worker", way, "--registrations", str(count)]
    settings += ["--pages", str(options.pages), "--touch", str(options.touch)]
    settings += ["--unpinned"] if options.unpinned else []
    process = subprocess.Popen(
        [sys.executable, "-m", "rdmafork.benchmarks.children", *settings],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | WAYS[way],
    )
    with process:
        yield process
        assert process.stdin
        process.stdin.close()


def ask(process: subprocess.Popen[str]) -> Sample:
    assert process.stdin and process.stdout
    process.stdin.write("\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise ChildProcessError(f"{process.args!r}: status {process.wait()}")
    sample: Sample = json.loads(line)
    return sample


def measure(count: int, options: argparse.Namespace) -> list[dict[str, object]]:
    with contextlib.ExitStack() as stack:
        workers = {way: stack.enter_context(worker(way, count, options)) for way in WAYS}
        rounds = [
            {way: ask(process) for way, process in workers.items()} for _ in range(options.rounds)
        ]
    rows: list[dict[str, object]] = []
    for child in CHILDREN:
        for way in WAYS:
            row: dict[str, object] = {"registrations": count, "child": child, "way": way}
            for i, clock in enumerate(CLOCKS):
                low, middle, high = statistics.quantiles(r[way][child][i] for r in rounds)
                floor = statistics.median(r[FLOOR][child][i] for r in rounds)
                row[f"{clock}_us"] = {
                    "median": round(middle),
                    "quartiles": [round(low), round(high)],
                    "to_the_floor": round(middle / floor, 2),
                }
            rows.append(row)
            show(row)
    return rows


def show(row: dict[str, object]) -> None:
    cells = [f"{row['registrations']:>7} {row['child']:<6} {row['way']:<15}"]
    for clock in CLOCKS:
        cell = row[f"{clock}_us"]
        assert isinstance(cell, dict)
        low, high = cell["quartiles"]
        spread = f"({low:,}-{high:,})"
        cells.append(f"{clock} {cell['median']:>8,} {spread:<17} {cell['to_the_floor']:>5}x")
    print("  ".join(cells), file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--registrations", type=int, nargs="+", default=[1, 100, 10_000])
    parser.add_argument("--pages", type=int, default=8)
    parser.add_argument("--touch", type=int, default=16, metavar="MiB")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--unpinned", action="store_true")
    parser.add_argument("--worker", choices=list(WAYS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(options)
        return
    reason = _pins.available()
    if reason and not options.unpinned:
        print(f"not pinned: {reason}", file=sys.stderr)
        options.unpinned = True
    rows = [row for count in options.registrations for row in measure(count, options)]
    result = {
        "machine": facts(),
        "pages": options.pages,
        "pinned": not options.unpinned,
        "touched_mib": options.touch,
        "rounds": options.rounds,
        "rows": rows,
    }
    json.dump(result, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
