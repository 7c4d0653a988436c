"""What does pd.register() + close cost beside ibv_reg_mr() + ibv_dereg_mr() alone?

python -m rdmafork.benchmarks.memory_region [--device NAME] [--mode lazy|eager] [--nbytes N ...]

Both register the same buffer in the same rounds, one from Python, one in a loop in C (a C compiler
is needed). Medians in nanoseconds; and the instructions of user space each takes, which no other
load disturbs, by the processor's counter (perf) or callgrind (valgrind). JSON on standard output.
"""

import argparse
import ctypes
import json
import mmap
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from time import perf_counter_ns

import rdmafork

from ._facts import facts

LOOPS = 50
ROUNDS = 15
ACCESS = rdmafork.Access.LOCAL_WRITE | rdmafork.Access.REMOTE_WRITE | rdmafork.Access.REMOTE_READ

# Declared here: libibverbs' headers need not be there.
RIVAL = """
#include <stddef.h>
void *ibv_reg_mr(void *pd, void *address, size_t nbytes, int access);
int ibv_dereg_mr(void *mr);

int loop(void *pd, void *address, size_t nbytes, int access, int times)
{
	while (times--) {
		void *mr = ibv_reg_mr(pd, address, nbytes, access);

		if (!mr || ibv_dereg_mr(mr))
			return -1;
	}
	return 0;
}
"""


def build_rival(directory: str) -> str:
    source, library = (os.path.join(directory, name) for name in ("rival.c", "rival.so"))
    with open(source, "w") as file:
        file.write(RIVAL)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    link = ["-shared", "-fPIC", "-O2", source, "-l:libibverbs.so.1", "-o", library]
    subprocess.run([*compiler, *link], check=True)
    return library


class Bench:
    """One buffer, and the two ways to register it."""

    def __init__(self, device: str, mode: str, library: str, nbytes: int) -> None:
        rdmafork.fork_init(mode)
        self.domain = rdmafork.Context(device).alloc_pd()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.buffer = mmap.mmap(-1, nbytes, flags=flags)
        self.buffer[:] = b"x" * nbytes
        self.rival = ctypes.CDLL(library).loop
        pointer = ctypes.c_void_p
        self.rival.argtypes = [pointer, pointer, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]

    def bare(self, times: int) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        if self.rival(self.domain.address, address, len(self.buffer), int(ACCESS), times):
            raise RuntimeError("ibv_reg_mr() failed")

    def ours(self, times: int) -> None:
        register, buffer = self.domain.register, self.buffer
        access = int(ACCESS)
        for _ in range(times):
            register(buffer, access).close()

    def nanoseconds(self) -> dict[str, float]:
        rounds = [{"bare": ns(self.bare), "ours": ns(self.ours)} for _ in range(ROUNDS)]
        return {way: round(statistics.median(r[way] for r in rounds)) for way in ("bare", "ours")}


def ns(way: Callable[[int], None]) -> float:
    start = perf_counter_ns()
    way(LOOPS)
    return (perf_counter_ns() - start) / LOOPS


# ---- instructions -----------------------------------------------------------------------

PERF = ["perf", "stat", "-x,", "-e", "instructions:u"]
CALLGRIND = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
COUNTED = {"perf": r"^(\d+),[^,]*,instructions:u", "valgrind": r"Collected : (\d+)"}


def counted(counter: list[str], worker: list[str]) -> int | None:
    """The instructions of one worker, or None where this counter cannot be had."""
    # Dictionaries laid out by chance would be a difference between two workers.
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    try:
        done = subprocess.run([*counter, *worker], stderr=subprocess.PIPE, env=environment)
    except FileNotFoundError:
        return None
    found = re.search(COUNTED[counter[0]], done.stderr.decode(errors="replace"), re.M)
    return int(found[1]) if found and done.returncode == 0 else None


def instructions(options: argparse.Namespace, library: str) -> dict[str, object] | None:
    """Of user space, a registration and its close: what more of them add to a worker's."""
    settings = ["--device", options.device, "--mode", options.mode, "--library", library]
    worker = [sys.executable, "-m", "rdmafork.benchmarks.memory_region", *settings]
    for counter in (PERF, CALLGRIND):
        found: dict[str, object] = {"by": counter[0]}
        for way in ("bare", "ours"):
            few, many = (
                counted(counter, [*worker, "--worker", way, "--times", str(times)])
                for times in (1, 1 + LOOPS)
            )
            if few is None or many is None:
                break
            found[way] = round((many - few) / LOOPS)
        else:
            return found
    return None


def first_device() -> str:
    names = sorted(os.listdir("/sys/class/infiniband"))
    if not names:
        raise SystemExit("there is no RDMA device")
    return names[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device")
    parser.add_argument("--mode", choices=["auto", "lazy", "eager"], default="auto")
    parser.add_argument("--nbytes", type=int, nargs="+", default=[4096, 1 << 20])
    parser.add_argument("--worker", choices=["bare", "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--times", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--library", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.device = options.device or first_device()
    if options.worker:
        bench = Bench(options.device, options.mode, options.library, 4096)
        getattr(bench, options.worker)(options.times)
        return
    with tempfile.TemporaryDirectory() as directory:
        library = build_rival(directory)
        rows = []
        for nbytes in options.nbytes:
            row = Bench(options.device, options.mode, library, nbytes).nanoseconds()
            print(f"{nbytes:>9} bytes: {row} ns", file=sys.stderr)
            rows.append({"nbytes": nbytes, "ns": row, "ratio": round(row["ours"] / row["bare"], 3)})
        result = {
            "machine": facts(),
            "device": options.device,
            "mode": rdmafork.stats().mode,
            "rows": rows,
            "user_instructions": instructions(options, library),
        }
    json.dump(result, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
