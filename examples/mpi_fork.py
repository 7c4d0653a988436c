"""MPI ranks that fork: each registers memory, and has a pool of workers of its own.

    mpirun -n 4 python examples/mpi_fork.py [DEVICE] [MiB]

With the name of an RDMA device (`rdmafork devices` lists them) the memory is registered with that
device, too. fork_init(intercept=True) also protects the memory that the MPI library registers.
`mpirun -n 4 rdmafork exec -- ...` does that for a program that does not call rdmafork.

Needs mpi4py.
"""

import multiprocessing
import sys
import time
from contextlib import ExitStack

try:
    from mpi4py import MPI
except ImportError as error:
    sys.exit(f"mpi_fork.py needs mpi4py and an MPI library: {error}")

import rdmafork

DEVICE = sys.argv[1] if len(sys.argv) > 1 else ""
MIB = int(sys.argv[2]) if len(sys.argv) > 2 else 64
WORKERS = 2


def work(number: int) -> int:
    return number * number


def main() -> None:
    world = MPI.COMM_WORLD
    rdmafork.fork_init()
    with ExitStack() as opened:
        memory = opened.enter_context(rdmafork.Buffer(MIB << 20))
        if DEVICE:
            context = opened.enter_context(rdmafork.Context(DEVICE))
            region = opened.enter_context(context.alloc_pd().register(memory))
            keys = f"lkey {region.lkey:#x} at {DEVICE}"
        else:
            keys = "no device"
        with memoryview(memory) as view:
            view[:6] = b"parent"
        world.Barrier()
        start = time.perf_counter()
        with multiprocessing.get_context("fork").Pool(WORKERS) as pool:
            took = (time.perf_counter() - start) / WORKERS
            squares = pool.map(work, range(world.rank, 1000, world.size))
        with memoryview(memory) as view:
            assert bytes(view[:6]) == b"parent"
        line = f"rank {world.rank}: {MIB} MiB, {keys}, {took * 1e3:.1f} ms a fork"
    lines = world.gather(line)
    total = world.allreduce(sum(squares))
    if lines is not None:
        print(*lines, f"sum of squares {total}", sep="\n")


if __name__ == "__main__":
    main()
