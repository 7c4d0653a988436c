"""A program that knows nothing of rdmafork: memory registered through pyverbs, and a pool forked.

    python examples/pyverbs_pool.py mlx5_0
    rdmafork exec --report - -- python examples/pyverbs_pool.py mlx5_0

Needs pyverbs (Debian: python3-pyverbs, with Debian's own python3).
"""

import ctypes
import mmap
import multiprocessing
import sys
import time

try:
    from pyverbs.device import Context
    from pyverbs.mr import MR
    from pyverbs.pd import PD
except ImportError as error:
    sys.exit(f"pyverbs_pool.py needs pyverbs (Debian: python3-pyverbs): {error}")

NBYTES = 256 << 20
LOCAL_WRITE = 1
FORKS = 4


def work(number: int) -> int:
    return number * number


def main() -> None:
    memory = mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:: mmap.PAGESIZE] = b"x" * (NBYTES // mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    context = Context(name=sys.argv[1])
    region = MR(PD(context), NBYTES, LOCAL_WRITE, address=address)
    start = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(FORKS) as pool:
        each = (time.perf_counter() - start) / FORKS
        total = sum(pool.map(work, range(100)))
    print(f"{NBYTES >> 20} MiB registered, {FORKS} forks of {each * 1000:.0f} ms, sum {total}")
    region.close()  # fails where a child's end has destroyed it
    print("and still there")


if __name__ == "__main__":
    main()
