"""What does registering memory at a device cost, bare, and with fork() made safe?

python -m rdmafork.benchmarks.device [--device NAME] [--quick] [--json FILE] [--plot DIR]

One buffer is registered and deregistered over and over, by each peer in a process of its own:
ibv_reg_mr() and ibv_dereg_mr() in a loop in C (the floor), the same with libibverbs' fork support
on, rdmafork's pd.register(buffer).close() from Python, lazily and eagerly, and pyverbs' MR and its
close(), which protects nothing. Nanoseconds of a pair, and for the smallest buffer its system
calls, counted by strace. Needs an RDMA device, and a C compiler. Without one, soft-RoCE in a
virtual machine measures what is the kernel's, at an emulator's speed:

    make bench-vm
"""

import argparse
import ctypes
import os
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from itertools import repeat
from pathlib import Path
from time import perf_counter_ns

import rdmafork
from rdmafork.cli import terminal

from . import _compiled, _plots
from ._harness import Document, Measures, Result, Row, main
from ._instructions import Counted
from ._measures import summary
from ._peers import WAYS, calibrated, environments, private_memory
from ._progress import Progress
from ._workers import Environment, Skipped, Skips, ask_all, interleave, started

PARAMETERS = ("device", "nbytes")
MEASURES: Measures = {
    "pair_ns": None,
    "system_calls": "{:g}".format,
}
FLOOR = "ibv_reg_mr"
LIBIBVERBS, PYVERBS = "libibverbs", "pyverbs MR"
# Registered at a device: a peer in C is compiled here, and pyverbs takes a domain of its own.
PEERS: dict[str, Environment] = {
    FLOOR: {},
    **environments((LIBIBVERBS, "rdmafork lazy", "rdmafork eager")),
    PYVERBS: {},
}
SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20)
ACCESS = 1 | 2 | 4  # local write, remote write, remote read
BUDGET_NS = 5_000_000
TIMES = 50  # pairs that are counted
DISTRIBUTION = "/usr/lib/python3/dist-packages"  # where Debian has pyverbs

# Declared here: libibverbs' headers need not be there.
LOOP = """
#include <stddef.h>
void *ibv_reg_mr(void *pd, void *address, size_t nbytes, int access);
int ibv_dereg_mr(void *mr);

int loop(void *pd, void *address, size_t nbytes, int access, long times)
{
	while (times--) {
		void *mr = ibv_reg_mr(pd, address, nbytes, access);

		if (!mr || ibv_dereg_mr(mr))
			return -1;
	}
	return 0;
}
"""

Loop = Callable[[int, int, int], None]  # address, nbytes, times


# ---- the peers, each in a process of its own ---------------------------------------------


def in_c(device: str, library: str) -> Loop:
    """The engine is not started: rdmafork only opens the device."""
    domain = rdmafork.Context(device).alloc_pd()
    function = ctypes.CDLL(library, use_errno=True).loop
    pointer = ctypes.c_void_p
    function.argtypes = [pointer, pointer, ctypes.c_size_t, ctypes.c_int, ctypes.c_long]

    def loop(address: int, nbytes: int, times: int) -> None:
        if function(domain.address, address, nbytes, ACCESS, times):
            code = ctypes.get_errno()
            raise OSError(code, f"ibv_reg_mr() or ibv_dereg_mr(): {os.strerror(code)}")

    return loop


def with_fork_support(device: str, library: str) -> Loop:
    WAYS[LIBIBVERBS].peer()
    return in_c(device, library)


def ours(device: str, library: str) -> Loop:
    try:
        rdmafork.fork_init()
    except OSError as error:
        raise Skipped(error.strerror) from None
    register = rdmafork.Context(device).alloc_pd().register

    def loop(address: int, nbytes: int, times: int) -> None:
        buffer = (ctypes.c_char * nbytes).from_address(address)
        for _ in repeat(None, times):
            register(buffer, ACCESS).close()

    return loop


def pyverbs(device: str, library: str) -> Loop:
    sys.path.append(DISTRIBUTION)
    try:
        devices, domains, regions = (import_module(f"pyverbs.{n}") for n in ("device", "pd", "mr"))
    except ImportError as error:
        raise Skipped(f"pyverbs cannot be imported: {error}") from None
    domain, region = domains.PD(devices.Context(name=device)), regions.MR

    def loop(address: int, nbytes: int, times: int) -> None:
        for _ in repeat(None, times):
            region(domain, nbytes, ACCESS, address=address).close()

    return loop


class Bench:
    def __init__(self, peer: str, device: str, library: str) -> None:
        makers = {FLOOR: in_c, LIBIBVERBS: with_fork_support, PYVERBS: pyverbs}
        self._loop = makers.get(peer, ours)(device, library)
        self._at = self._nbytes = self._loops = 0

    def prepare(self, nbytes: int) -> None:
        """In the middle of a mapping, as a buffer mostly is."""
        self._at, self._nbytes = private_memory(3 * nbytes) + nbytes, nbytes
        ctypes.memset(self._at, 1, nbytes)
        try:
            self._loops = calibrated(self._pair_ns, BUDGET_NS)
        except OSError as error:  # of locked memory there may be too little
            raise Skipped(str(error)) from None

    def sample(self) -> float:
        """Nanoseconds of a pair."""
        return self._pair_ns(self._loops)

    def _pair_ns(self, loops: int) -> float:
        start = perf_counter_ns()
        self._loop(self._at, self._nbytes, loops)
        return (perf_counter_ns() - start) / loops

    def count(self, nbytes: int, times: int) -> None:
        """Pairs for a counter to count."""
        self._at = private_memory(3 * nbytes) + nbytes
        self._loop(self._at, nbytes, times)


# ---- all of them side by side ------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="NAME", help="default: the first usable one")


def chosen(name: str | None) -> str:
    """The name of a usable device. Raises Skipped."""
    try:
        if name is not None:
            return rdmafork.Context(name).device.name
        devices = rdmafork.get_device_list()
    except OSError as error:
        raise Skipped(f"no RDMA device can be used: {error.strerror}") from None
    if not devices:
        raise Skipped("there is no RDMA device that can be used (rdmafork devices says why)")
    return devices[0].name


def measure(options: argparse.Namespace, progress: Progress) -> Result:
    skipped: Skips = []
    rounds, sizes = (3, SIZES[:3:2]) if options.quick else (15, SIZES)
    rows: list[Row] = []
    try:
        device = chosen(options.device)
        with tempfile.TemporaryDirectory() as directory:
            settings = {
                "device": device,
                "library": _compiled.library(directory, LOOP, "-l:libibverbs.so.1"),
            }
            with started(Bench, PEERS, skipped, **settings) as workers:
                for i, nbytes in enumerate(sizes):
                    progress(i / len(sizes) / 2, f"{device}, {terminal.size(nbytes)}")
                    ready = ask_all(workers, skipped, "prepare", nbytes=nbytes)
                    for peer, samples in interleave(workers, ready, rounds, "sample").items():
                        case = {"line": peer, "device": device, "nbytes": nbytes}
                        rows.append(case | {"pair_ns": summary(samples)})
            smallest = [row for row in rows if row["nbytes"] == sizes[0]]
            for i, row in enumerate(smallest):
                progress(0.5 + i / len(smallest) / 2, f"counting: {row['line']}")
                peer = row["line"]
                request = {"do": "count", "nbytes": row["nbytes"]}
                counted = Counted(Bench, {"peer": peer, **settings}, PEERS[peer], request)
                skipped += counted.into(row, TIMES, ["system_calls"])
    except Skipped as reason:
        skipped.append({"line": "all", "reason": str(reason)})
    return Result(rounds, rows, skipped)


def plot(document: Document, directory: Path) -> list[Path]:
    x = _plots.Axis("nbytes", "bytes registered", nbytes=True)
    y = _plots.Axis("pair_ns", "register + deregister, us", unit=1e3)
    rows = document["rows"]
    panels = [_plots.Panel(f"at {device}", rows) for device in {row["device"] for row in rows}]
    return _plots.lines(directory / "device.svg", document, panels, x, y, FLOOR)


if __name__ == "__main__":
    raise SystemExit(main("device"))
