"""A device fills memory, a pool of forked workers reads it: one copy, and no crash.

    python examples/numpy_workers.py [MiB]

Two arrays are registered. The inbox is shared memory: fork() never moves it, so rdmafork leaves it
with the children, and they read what has arrived without a copy. The outbox is private: it is the
parent's alone, and a child that touches it dies of SIGSEGV, as the last worker shows.

Needs numpy.
"""

import mmap
import multiprocessing
import signal
import sys
import time

import numpy as np

import rdmafork

MIB = int(sys.argv[1]) if len(sys.argv) > 1 else 64
WORKERS = 4

inbox = np.frombuffer(mmap.mmap(-1, MIB << 20), dtype=np.int64)  # mmap's default is shared
outbox = np.zeros(MIB << 17, dtype=np.int64)


def add_up(part: int) -> int:
    return int(inbox[part::WORKERS].sum())


def touch_the_parents() -> None:
    outbox[outbox.size // 2] = 1


def main() -> None:
    rdmafork.fork_init()  # once, before anything is registered
    # At a device: Context("mlx5_0").alloc_pd().register(inbox), with the same meaning here.
    with rdmafork.register(inbox), rdmafork.register(outbox):
        inbox[:] = np.arange(inbox.size)  # as the device would
        fork = multiprocessing.get_context("fork")
        start = time.perf_counter()
        with fork.Pool(WORKERS) as pool:
            started = (time.perf_counter() - start) / WORKERS
            total = sum(pool.map(add_up, range(WORKERS)))
        assert total == inbox.size * (inbox.size - 1) // 2
        print(f"{2 * MIB} MiB registered; {WORKERS} workers, {started * 1000:.1f} ms each to start")
        print(f"they read the shared array: {total}")

        worker = fork.Process(target=touch_the_parents)
        worker.start()
        worker.join()
        assert worker.exitcode == -signal.SIGSEGV and not outbox.any()
        print("one that wrote to the private array ended by SIGSEGV")
        for entry in rdmafork.protected_ranges():
            print(entry)


if __name__ == "__main__":
    main()
