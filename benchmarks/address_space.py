"""Does a registration cost more in a large address space?

python -m rdmafork.benchmarks.address_space [--quick] [--json FILE] [--plot DIR]

Nanoseconds of register + release of a new page: in a process with many more mappings, at lower
addresses, but little memory; and in one with much resident memory but few mappings. Peers: the two
system calls alone (the floor); libibverbs' fork support, also with RDMAV_HUGEPAGES_SAFE, for which
it reads /proc/self/smaps; rdmafork in both modes.
"""

import argparse
import ctypes
import os
from pathlib import Path

import rdmafork

from . import _plots
from ._harness import Document, Measures, Result, Row, main, summary
from ._peers import (
    FLOOR,
    PAGE,
    WAYS,
    calibrated,
    environments,
    in_turns,
    need_memory,
    private_memory,
)
from ._progress import Progress
from ._workers import Skipped, Skips, ask_all, interleave, started

PARAMETERS = ("of", "amount")
MEASURES: Measures = {"pair_ns": None}
PEERS = (FLOOR, "libibverbs", "libibverbs, huge pages safe", "rdmafork eager", "rdmafork lazy")
MAPPINGS, RESIDENT = "mappings", "resident MiB"
BUDGET_NS = 2_000_000
LEAD = 16 << 20  # around the page: its mapping is one of its own
PROT_READ = 1

libc: ctypes.CDLL = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Bench:
    """One peer in one address space."""

    def __init__(self, peer: str) -> None:
        self._peer = WAYS[peer].peer()
        self._at = private_memory(2 * LEAD) + LEAD
        self._loops = 0

    def prepare(self, of: str, amount: int) -> None:
        if of == MAPPINGS:
            split(amount)
        else:
            ctypes.memset(private_memory(amount << 20), 1, amount << 20)
        self._loops = calibrated(self._pairs, BUDGET_NS)

    def sample(self) -> float:
        """Nanoseconds of a pair."""
        return self._pairs(self._loops)

    def _pairs(self, loops: int) -> float:
        return self._peer.pair_ns(self._at, PAGE, loops)


def split(mappings: int) -> None:
    """So many mappings, by every second page of one that cannot be written."""
    limit = rdmafork.kernel_info().max_map_count
    if mappings > limit - 1000:
        raise Skipped(f"vm.max_map_count is {limit:,}")
    start = private_memory(mappings * PAGE)
    for at in range(start, start + mappings * PAGE, 2 * PAGE):
        if libc.mprotect(at, PAGE, PROT_READ):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def measure(options: argparse.Namespace, progress: Progress) -> Result:
    counts = (10, 10_000) if options.quick else (10, 100, 1_000, 10_000, 60_000)
    sizes = (64,) if options.quick else (64, 512, 4096)
    rounds = 5 if options.quick else 9
    rows: list[Row] = []
    skipped: Skips = []
    cases = [(MAPPINGS, count) for count in counts] + [(RESIDENT, size) for size in sizes]
    for i, (of, amount) in enumerate(cases):
        nbytes = amount << 20 if of == RESIDENT else 0
        case = {"of": of, "amount": amount}
        try:
            need_memory(nbytes // 2)  # nothing copies it
        except Skipped as reason:
            skipped.append({"line": "all", **case, "reason": str(reason)})
            continue
        for peers in in_turns(PEERS, nbytes):
            progress(i / len(cases), f"{amount:,} {of}: {', '.join(peers)}")
            with started(Bench, environments(peers), skipped) as workers:
                ready = ask_all(workers, skipped, "prepare", **case)
                for peer, samples in interleave(workers, ready, rounds, "sample").items():
                    rows.append({"line": peer, **case, "pair_ns": summary(samples)})
    return Result(rounds, rows, skipped)


def plot(document: Document, directory: Path) -> list[Path]:
    panels = [
        _plots.Panel(title, [row for row in document["rows"] if row["of"] == of])
        for of, title in ((MAPPINGS, "more mappings"), (RESIDENT, "more resident memory, MiB"))
    ]
    x = _plots.Axis("amount", "")
    y = _plots.Axis("pair_ns", "register + release of a page, ns")
    return _plots.lines(directory / "address_space.svg", document, panels, x, y, FLOOR)


if __name__ == "__main__":
    raise SystemExit(main("address_space"))
