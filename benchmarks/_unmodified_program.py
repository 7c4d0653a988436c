"""A program that forks with memory registered and knows nothing of rdmafork: see unmodified.py.

    python _unmodified_program.py HOW DEVICE NBYTES FORKS [LIBRARY]

It prints, as JSON: the nanoseconds of each fork(), how much memory the children had for themselves,
and whether the registered pages are where they were, which is where the device reads and writes.
"""

import ctypes
import json
import mmap
import os
import struct
import sys
from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import Any

PAGE = mmap.PAGESIZE
LOCAL_WRITE = 1
P, N = ctypes.c_void_p, ctypes.c_size_t
libc = ctypes.CDLL(None)


# ---- how memory is registered: the result is to be kept --------------------------------------


def by_pyverbs(device: str, address: int, nbytes: int, _library: str) -> Any:
    sys.path.append("/usr/lib/python3/dist-packages")
    from pyverbs.device import Context
    from pyverbs.mr import MR
    from pyverbs.pd import PD

    context = Context(name=device)
    domain = PD(context)
    return context, domain, MR(domain, nbytes, LOCAL_WRITE, address=address)


def by_dlvsym(device: str, address: int, nbytes: int, _library: str) -> Any:
    """As NCCL does: all of libibverbs by its handle, and its ibv_fork_init() before the rest."""
    library = ctypes.CDLL("libibverbs.so.1")
    libc.dlvsym.restype = P
    libc.dlvsym.argtypes = [P, ctypes.c_char_p, ctypes.c_char_p]

    def call(name: str, result: Any, *args: Any) -> Any:
        function = libc.dlvsym(library._handle, name.encode(), b"IBVERBS_1.1")
        value = ctypes.CFUNCTYPE(result, *map(type, args))(function)(*args)
        if result is P and not value:
            raise OSError(f"{name}() failed")
        return value

    if call("ibv_fork_init", ctypes.c_int):
        raise OSError("ibv_fork_init() failed")
    devices = ctypes.cast(call("ibv_get_device_list", P, P(None)), ctypes.POINTER(P))
    names = (
        call("ibv_get_device_name", ctypes.c_char_p, P(found)) for found in until_null(devices)
    )
    index = [name.decode() for name in names].index(device)
    context = call("ibv_open_device", P, P(devices[index]))
    domain = call("ibv_alloc_pd", P, P(context))
    return call("ibv_reg_mr", P, P(domain), P(address), N(nbytes), ctypes.c_int(LOCAL_WRITE))


def until_null(pointers: Any) -> Iterator[int]:
    index = 0
    while pointers[index]:
        yield pointers[index]
        index += 1


def by_ranges(_device: str, address: int, nbytes: int, library: str) -> Any:
    """Without a device: libibverbs' calls for fork() as it registers, and pins of io_uring."""
    from rdmafork._pins import Pins

    ranges = ctypes.CDLL(library)
    if ranges.dontfork(P(address), N(nbytes)):
        raise OSError("ibv_dontfork_range() failed")
    return Pins([(address, nbytes)])


WAYS: dict[str, Callable[[str, int, int, str], Any]] = {
    "pyverbs": by_pyverbs,
    "dlvsym": by_dlvsym,
    "ranges": by_ranges,
}


# ---- the cost of a fork ----------------------------------------------------------------------


def private_nbytes() -> int:
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Private_"))


def fork() -> tuple[int, int]:
    """(nanoseconds in fork(), bytes copied for the child)"""
    reading, writing = os.pipe()
    before = perf_counter_ns()
    child = os.fork()
    if not child:
        os.write(writing, b"%d" % private_nbytes())
        os._exit(0)
    taken = perf_counter_ns() - before
    os.waitpid(child, 0)
    nbytes = int(os.read(reading, 32))
    os.close(reading)
    os.close(writing)
    return taken, nbytes


def frames(address: int, nbytes: int) -> list[int]:
    """The physical addresses of every 64th page; all 0 without root."""
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        entries = os.pread(file.fileno(), nbytes // PAGE * 8, address // PAGE * 8)
    return [entry & (1 << 55) - 1 for (entry,) in struct.iter_unpack("<Q", entries)][::64]


def main() -> None:
    how, device, size, forks = sys.argv[1:5]
    nbytes = int(size)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[::PAGE] = b"x" * (nbytes // PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    kept = WAYS[how](device, address, nbytes, "".join(sys.argv[5:]))
    before = frames(address, nbytes)
    costs = [fork() for _ in range(int(forks))]
    memory[::PAGE] = b"y" * (nbytes // PAGE)
    found = {
        "nbytes": nbytes,
        "fork_ns": [ns for ns, _ in costs],
        "child_nbytes": max(nbytes for _, nbytes in costs),
        "in_place": frames(address, nbytes) == before,
    }
    print(json.dumps(found), flush=True)
    del kept


if __name__ == "__main__":
    main()
