"""The Python side of rc.c, and other helpers of the tests of this directory.

Everything here works in pytest's process and in a fresh interpreter alike: an Rc can be pickled.
"""

import contextlib
import ctypes
import functools
import json
import mmap
import os
import pickle
import re
import select
import signal
import subprocess
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import pytest
from memory import HUGE, PAGE, address_of, madvise, marks_stay, smaps

import rdmafork

LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ = 1, 2, 4
ALL = LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ

WRITE, READ, SEND = range(3)
PIECE = 64  # bytes of every page, where moving all of them takes too long
TIMEOUT = 60_000  # ms; an emulated processor is slow


# ---- the part in C ----------------------------------------------------------------------


class Job(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("local", "remote", "nbytes", "stride", "piece")),
        *((name, ctypes.c_uint32) for name in ("lkey", "rkey", "timeout_ms")),
    ]


class WorkError(Exception):
    """A completion with an error: .args[0] is its ibv_wc_status."""


def out_pointer():
    return ctypes.c_void_p()


class Rc:
    """rc.c on one device: objects made with libibverbs and nothing else."""

    def __init__(self, device, library):
        self.device, self.library = device, library

    def __reduce__(self):
        return Rc, (self.device, self.library)

    @functools.cached_property
    def lib(self):
        lib = ctypes.CDLL(self.library)
        p, u64, u32, i = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int
        for name, types in {
            "open": [ctypes.c_char_p, p, p],
            "close": [p, p],
            "alloc_pd": [p, p],
            "dealloc_pd": [p],
            "reg": [p, u64, u64, i, p, p, p],
            "dereg": [p],
            "reg_dereg": [p, u64, u64, i, i],
            "on_demand": [p],
            "fds": [p, p],
            "pair_open": [p, p, p],
            "pair_close": [p],
            "move": [p, i, ctypes.POINTER(Job)],
            "fill": [p, ctypes.POINTER(Job), u32],
            "wrong": [p, ctypes.POINTER(Job), u32],
        }.items():
            getattr(lib, f"rc_{name}").argtypes = types
        lib.rc_wrong.restype = u64
        lib.rc_fds.restype = lib.rc_fill.restype = None
        return lib

    def check(self, result):
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        if result:
            raise WorkError(result)

    def open(self):
        """(ibv_context *, ibv_pd *) of our own."""
        context, pd = out_pointer(), out_pointer()
        opened = self.lib.rc_open(
            self.device.encode(), ctypes.byref(context), ctypes.byref(pd)
        )  # fmt: skip
        self.check(opened)
        return context.value, pd.value

    def close(self, context, pd=None):
        self.check(self.lib.rc_close(context, pd))

    def alloc_pd(self, context):
        pd = out_pointer()
        self.check(self.lib.rc_alloc_pd(context, ctypes.byref(pd)))
        return pd.value

    def dealloc_pd(self, pd):
        self.check(self.lib.rc_dealloc_pd(pd))

    def register(self, pd, buffer, access=ALL):
        """ibv_reg_mr and nothing else."""
        return Region(self, pd, buffer, access)

    def register_many(self, pd, address, nbytes, times, access=ALL):
        """ibv_reg_mr and ibv_dereg_mr, in a loop in C."""
        self.check(self.lib.rc_reg_dereg(pd, address, nbytes, access, times))

    def on_demand(self, context):
        answer = self.lib.rc_on_demand(context)
        self.check(min(answer, 0))
        return bool(answer)

    def fds(self, context):
        """The context's command and event descriptors."""
        fds = (ctypes.c_int * 2)()
        self.lib.rc_fds(context, fds)
        return list(fds)

    def pair(self, context, pd):
        return Pair(self, context, pd)

    def objects(self):
        """How many objects of each kind the kernel has for this device: {"mr": 1, "pd": 2, ...}."""
        command = ["rdma", "-j", "resource", "show", self.device]
        shown = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=60).stdout
        return {k: v for k, v in json.loads(shown)[0].items() if not k.startswith("if")}


class Region:
    """A memory region by ibv_reg_mr alone."""

    def __init__(self, rc, pd, buffer, access):
        self.rc, self.buffer = rc, buffer
        self.address, self.nbytes = span(buffer)
        self._mr, lkey, rkey = out_pointer(), ctypes.c_uint32(), ctypes.c_uint32()
        result = rc.lib.rc_reg(
            pd, self.address, self.nbytes, access, *map(ctypes.byref, (self._mr, lkey, rkey))
        )
        rc.check(result)
        self.lkey, self.rkey = lkey.value, rkey.value

    def close(self):
        self.rc.check(self.rc.lib.rc_dereg(self._mr))


class Pair:
    """Two connected queue pairs. Regions are anything with address, nbytes, lkey and rkey."""

    def __init__(self, rc, context, pd):
        self.rc, self._pair = rc, out_pointer()
        rc.check(rc.lib.rc_pair_open(context, pd, ctypes.byref(self._pair)))

    def close(self):
        self.rc.check(self.rc.lib.rc_pair_close(self._pair))

    def move(self, what, near, far, *, at=0, nbytes=None, every=0, timeout=TIMEOUT):
        """at: the distance into far alone. every: some bytes of each so many pages, not all."""
        job = job_of(near.nbytes if nbytes is None else nbytes, every)
        job.local, job.lkey = near.address, near.lkey
        job.remote, job.rkey = far.address + at, far.lkey if what == SEND else far.rkey
        job.timeout_ms = timeout
        self.rc.check(self.rc.lib.rc_move(self._pair, what, ctypes.byref(job)))

    def write(self, near, far, **options):
        self.move(WRITE, near, far, **options)

    def read(self, near, far, **options):
        self.move(READ, near, far, **options)

    def send(self, near, far, **options):
        self.move(SEND, near, far, **options)

    def exchange(self, near, far, seed, **options):
        """The processor touches every page of far and then the device does: bytes gone wrong.

        Two numbers: of what the device read of far, and of what it wrote there.
        """
        job, lib = job_of(far.nbytes, options.get("every", 0)), self.rc.lib
        lib.rc_fill(far.address, job, seed)
        self.read(near, far, nbytes=far.nbytes, **options)
        read = lib.rc_wrong(near.address, job, seed)
        lib.rc_fill(near.address, job, seed + 1)
        self.write(near, far, nbytes=far.nbytes, **options)
        return read, lib.rc_wrong(far.address, job, seed + 1)


class Ours:
    """A context and a protection domain of rdmafork, in the shape rc.c wants."""

    def __init__(self, rc):
        self.device = rdmafork.Context(rc.device)
        self.domain = self.device.alloc_pd()
        self.context, self.pd = self.device.address, self.domain.address

    def register(self, buffer, access=ALL, **options):
        return self.domain.register(buffer, access, **options)

    def close(self):
        self.device.close()


class Window(NamedTuple):
    """A part of a memory region."""

    address: int
    nbytes: int
    lkey: int
    rkey: int


def start(mode):
    """fork_init(mode), where that mode can be had."""
    if mode == "lazy" and not rdmafork.kernel_info().copy_on_fork_trusted:
        pytest.skip("lazy is for kernels whose copying at fork() can be trusted")
    rdmafork.fork_init(mode)


def job_of(nbytes, every=0):
    if every:
        return Job(nbytes=nbytes, stride=every * PAGE, piece=PIECE)
    return Job(nbytes=nbytes, stride=1 << 20, piece=1 << 20)


# ---- memory -----------------------------------------------------------------------------


def span(buffer):
    """(address, bytes) of a buffer, writable or not."""
    with memoryview(buffer) as view:
        if not view.readonly:
            return address_of(view), view.nbytes
    pointer = ctypes.py_object(buffer)
    raw = (ctypes.c_ssize_t * 32)()  # more than a Py_buffer
    if ctypes.pythonapi.PyObject_GetBuffer(pointer, raw, 0):
        raise BufferError
    address, nbytes = raw[0], raw[2]
    ctypes.pythonapi.PyBuffer_Release(raw)
    return address, nbytes


def memory(kind, nbytes, at=0):
    """A writable memoryview of nbytes, at bytes into a mapping of its own.

    kind: "base" pages or transparent huge ones ("thp"), "hugetlb": private; "shared".
    """
    whole = at + nbytes
    if kind == "shared":
        return memoryview(mmap.mmap(-1, whole))[at:]
    if kind == "hugetlb":
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000
        return memoryview(mmap.mmap(-1, -whole % HUGE + whole, flags=flags))[at:whole]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if kind == "base":
        held = mmap.mmap(-1, whole, flags=flags)
        held.madvise(mmap.MADV_NOHUGEPAGE)
        return memoryview(held)[at:]
    rounded = -whole % HUGE + whole
    held = mmap.mmap(-1, rounded + HUGE, flags=flags)
    skip = -address_of(held) % HUGE
    start = address_of(held) + skip
    madvise(start, rounded, mmap.MADV_HUGEPAGE)
    for page in range(skip, skip + rounded, PAGE):
        held[page] = 0
    if not are_huge(start, rounded):
        pytest.skip("the kernel gives no transparent huge pages")
    return memoryview(held)[skip + at : skip + whole]


def are_huge(start, nbytes):
    """Is all of it in transparent huge pages?"""
    text = Path("/proc/self/smaps").read_text()
    huge = 0
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", text, flags=re.M)[1:]:
        first, end = (int(x, 16) for x in mapping.split(" ", 1)[0].split("-"))
        if first < start + nbytes and start < end:
            huge += int(re.search(r"AnonHugePages: +(\d+)", mapping).group(1)) << 10
    return huge >= nbytes


def mapped(start, end):
    """The parts of [start, end) that are private and can be written."""
    for m in smaps():
        if m.start < end and start < m.end and m.permissions.startswith("rw-p"):
            yield max(m.start, start), min(m.end, end)


def pinned(pid="self"):
    """VmPin: the bytes that a process has pinned."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmPin:\s+(\d+) kB", text).group(1)) << 10


def pinned_pages():
    """Pages of the whole machine that are pinned."""
    counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return int(counts["nr_foll_pin_acquired"]) - int(counts["nr_foll_pin_released"])


def marked_mappings():
    lasting = {"ht"} if marks_stay() else set()
    return [m for m in smaps() if {"dc", "wf"} & m.flags and not lasting & m.flags]


def eventually(what, wanted, seconds=20):
    """what() once it is wanted; else what it is in the end."""
    end = time.monotonic() + seconds
    while (value := what()) != wanted and time.monotonic() < end:
        time.sleep(0.05)
    return value


class State(NamedTuple):
    """State that a region which is gone, or was never made, leaves as it was."""

    objects: dict
    pinned: int
    protected: list
    marked: list

    @classmethod
    def now(cls, rc):
        ranges = [r[:3] for r in rdmafork.protected_ranges()]
        return cls(rc.objects(), pinned(), ranges, marked_mappings())


# ---- children that live on --------------------------------------------------------------


class Forked:
    """A child that runs a generator function from one yield to the next whenever told.

    It goes to the first yield by itself. leave: how it ends, os._exit or sys.exit.
    """

    def __init__(self, steps, *args, leave=os._exit):
        here, there = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(here[1])
            os.close(there[0])
            self._answers, self._orders = here[0], there[1]
            self._hear()
            return
        os.close(here[0])
        os.close(there[1])
        try:
            for said in steps(*args):
                self._say(here[1], (True, said))
                order = os.read(there[0], 1)
                if not order:
                    os._exit(3)  # the parent has given up
                if order == b"e":
                    break
        except BaseException:
            self._say(here[1], (False, traceback.format_exc()))
            os._exit(1)
        finally:
            os.close(here[1])
            os.close(there[0])
        leave(0)

    @staticmethod
    def _say(fd, what):
        packed = pickle.dumps(what)
        os.write(fd, len(packed).to_bytes(4, "little") + packed)

    def _hear(self):
        self.said = None
        if not select.select([self._answers], [], [], 120)[0]:
            os.kill(self.pid, signal.SIGKILL)
            raise AssertionError(f"the child hangs: {self.wait()}")
        size = os.read(self._answers, 4)
        if not size:
            raise AssertionError(f"the child died: {self.wait()}")
        fine, self.said = pickle.loads(os.read(self._answers, int.from_bytes(size, "little")))
        if not fine:
            self.wait()
            raise AssertionError(f"in the child:\n{self.said}")

    def step(self):
        """Let it go on to its next yield, and return what it yields."""
        os.write(self._orders, b".")
        self._hear()
        return self.said

    def wait(self):
        """How it ended: 0, or the negative number of a signal."""
        for fd in (self._answers, self._orders):
            with contextlib.suppress(OSError):
                os.close(fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def finish(self):
        """Let it end, which must go well."""
        os.write(self._orders, b"e")
        assert self.wait() == 0, "the child"


def write_over(*spans):
    """Steps of a child: write over all it has of the pages of these spans, again and again."""
    while True:
        for address, nbytes in spans:
            for start, end in mapped(address & -PAGE, (address + nbytes + PAGE - 1) & -PAGE):
                ctypes.memset(start, 0xEE, end - start)
        yield


def idle_first(spans):
    yield
    yield from write_over(*spans)
