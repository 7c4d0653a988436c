"""From how many pages on does marking pinned memory pay, against the kernel's copying?

python -m rdmafork.benchmarks.break_even [--runs N] [--pages N ...]

Pins N runs of k pages each, amid other memory, on base pages and on transparent huge pages, and
times fork() with the pages left to the kernel and with them marked (madvise(MADV_DONTFORK)), and
the marking itself. A run pays at the first fork it saves more than the mark and unmark cost, and
in the long run when it saves anything. Medians; JSON on standard output. Needs io_uring.
"""

import argparse
import ctypes
import json
import mmap
import statistics
import sys
from time import perf_counter_ns

from rdmafork import _pins

from ._facts import facts

PAGE = mmap.PAGESIZE
HUGE = 2 << 20
MADV_DONTFORK, MADV_DOFORK, MADV_HUGEPAGE, MADV_NOHUGEPAGE = 10, 11, 14, 15
libc = ctypes.CDLL(None, use_errno=True)
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def fork_ns() -> float:
    return statistics.median(_pins.fork_cost().ns for _ in range(11))


def advise_ns(runs: list[tuple[int, int]], advice: int) -> float:
    start = perf_counter_ns()
    for address, nbytes in runs:
        libc.madvise(address, nbytes, advice)
    return (perf_counter_ns() - start) / len(runs)


def measure(count: int, pages: int, huge: bool) -> dict[str, object]:
    stride = PAGE * max(16, 2 * pages)
    memory = mmap.mmap(-1, count * stride + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    start = address + -address % HUGE
    libc.madvise(start, count * stride, MADV_HUGEPAGE if huge else MADV_NOHUGEPAGE)
    ctypes.memset(start, 1, count * stride)
    runs = [(start + i * stride + PAGE, pages * PAGE) for i in range(count)]
    unpinned = fork_ns()
    with _pins.Pins(runs):
        copied = fork_ns()
        mark = advise_ns(runs, MADV_DONTFORK)
        marked = fork_ns()
        unmark = advise_ns(runs, MADV_DOFORK)
    return {
        "pages": pages,
        "transparent_huge_pages": huge,
        "fork_unpinned_us": round(unpinned / 1e3),
        "fork_copied_us": round(copied / 1e3),
        "fork_marked_us": round(marked / 1e3),
        "saved_per_run_and_fork_ns": round((copied - marked) / count),
        "mark_and_unmark_per_run_ns": round(mark + unmark),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--pages", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    options = parser.parse_args()
    reason = _pins.available()
    if reason:
        sys.exit(f"skipped: {reason}")
    rows = []
    for huge in (False, True):
        for pages in options.pages:
            rows.append(measure(options.runs, pages, huge))
            print(rows[-1], file=sys.stderr)
    json.dump({"machine": facts(), "runs": options.runs, "rows": rows}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
