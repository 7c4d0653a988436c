"""Memory to register: mapped in every way, as the kernel sees it, and the pool of huge pages."""

import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
import re
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest

PAGE = mmap.PAGESIZE
HUGE = 2 << 20
PLACE = 0x30_0000_0000  # low, where the kernel puts nothing of its own

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mremap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
]  # fmt: skip

MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
MAP_HUGETLB = 0x40000
MAP_HUGE_2MB = 21 << 26
MAP_FIXED_NOREPLACE = 0x100000
MREMAP_MAYMOVE, MREMAP_FIXED = 1, 2
MADV_DONTFORK, MADV_DOFORK = 10, 11
AT_SYSINFO_EHDR = 33  # of getauxval(3)


def _checked(result):
    if result in (ctypes.c_void_p(-1).value, -1):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def map_at(address, nbytes, *, shared=False, huge=False, prot=3, flags=0, fixed=True):
    """mmap(2), anonymous: the address. address 0 or None: anywhere, else there, replacing."""
    flags |= (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE) | mmap.MAP_ANONYMOUS
    flags |= (MAP_HUGETLB | MAP_HUGE_2MB if huge else 0) | (MAP_FIXED if address and fixed else 0)
    return _checked(libc.mmap(address or None, nbytes, prot, flags, -1, 0))


def unmap(address, nbytes):
    _checked(libc.munmap(address, nbytes))


def remap(address, nbytes, to, to_nbytes=None):
    """mremap(2) to an address, replacing what is there."""
    moved = libc.mremap(address, nbytes, to_nbytes or nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, to)
    return _checked(moved)


def madvise(address, nbytes, advice):
    _checked(libc.madvise(address, nbytes, advice))


def read(address, nbytes=1):
    return ctypes.string_at(address, nbytes)


def write(address, data):
    ctypes.memmove(address, data, len(data))


def pages(start, count):
    return [start + i * PAGE for i in range(count)]


class Cyclic(bytearray):
    """A buffer that can hold the registration that holds it."""


class Owner:
    """Holds memory, as far as rdmafork knows."""


class Tensor:
    """Something with __dlpack__ and nothing else, around a numpy array."""

    def __init__(self, array, device=(1, 0)):
        self.array, self.device = array, device

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.device


def address_of(buffer):
    """Where a writable buffer lies; it is not held."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def protections():
    """(start, end, registrations, protected_by) of each range that rdmafork lists."""
    import rdmafork

    return [(r.start, r.end, r.registrations, r.protected_by) for r in rdmafork.protected_ranges()]


def private_map(nbytes, **options):
    """(mmap object, address) of private anonymous memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | options.pop("flags", 0)
    memory = mmap.mmap(-1, nbytes, flags=flags, **options)
    return memory, address_of(memory)


def shared_map(nbytes):
    """(mmap object, address) of shared anonymous memory, Python's default."""
    memory = mmap.mmap(-1, nbytes)
    return memory, address_of(memory)


def huge_map(npages, shared=False):
    """(mmap object, address) of 2 MiB pages; see the fixture hugepages."""
    flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
    flags |= mmap.MAP_ANONYMOUS | MAP_HUGETLB | MAP_HUGE_2MB
    memory = mmap.mmap(-1, npages * HUGE, flags=flags)
    return memory, address_of(memory)


# ---- the kernel's own view --------------------------------------------------------------


class Mapping(NamedTuple):
    start: int
    end: int
    permissions: str
    page_size: int
    flags: frozenset  # VmFlags: "dc" is not copied at fork, "wf" is wiped


_MAPPING = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) .*\n(?:[A-Z].*\n)*?KernelPageSize: +(\d+) kB\n"
    rb"(?:[A-Z].*\n)*?VmFlags: (.*)\n",
    re.M,
)


def smaps(pid="self"):
    """All mappings, by address."""
    with open(f"/proc/{pid}/smaps", "rb", buffering=0) as file:
        text = file.readall()
    return [
        Mapping(int(s, 16), int(e, 16), p.decode(), int(k) << 10, frozenset(f.decode().split()))
        for s, e, p, k, f in _MAPPING.findall(text)
    ]


def vm_flags(address):
    """VmFlags of the page at address, as a set; the empty set where nothing is mapped."""
    for mapping in smaps():
        if mapping.start <= address < mapping.end:
            return set(mapping.flags)
    return set()


def mappings(start, nbytes):
    """The mappings of [start, start + nbytes): whole ones, which may reach beyond."""
    return [m for m in smaps() if m.start < start + nbytes and start < m.end]


def mappings_now():
    """How many there are, once looking at them takes no memory that it did not take before."""
    count = -1
    while (again := Path("/proc/self/maps").read_bytes().count(b"\n")) != count:
        count = again
    return count


@functools.cache
def marks_stay():
    """Does this kernel never unmark huge pages, as Linux 7.3? To madvise() the vDSO is like one."""
    libc.getauxval.restype = ctypes.c_ulong
    return libc.madvise(libc.getauxval(AT_SYSINFO_EHDR), PAGE, MADV_DOFORK) != 0


# Its string is looked at as that of needs_lazy.
unmarks_huge_pages = pytest.mark.skipif(
    "__import__('memory').marks_stay()", reason="this kernel unmarks no huge page"
)


def marked(start, nbytes):
    """The page addresses in [start, start + nbytes) that a child will not get."""
    maps = [m for m in smaps() if "dc" in m.flags]
    first = start & -PAGE
    return [a for a in range(first, start + nbytes, PAGE) if any(m[0] <= a < m[1] for m in maps)]


def is_mapped(address):
    """Is there memory? A page that a fork left out is none, though its address is reserved."""
    with open("/proc/self/maps") as file:
        for line in file:
            span, permissions = line.split(" ", 2)[:2]
            start, end = (int(bound, 16) for bound in span.split("-"))
            if start <= address < end:
                return permissions != "---p"
    return False


# ---- no mapping left ---------------------------------------------------------------------


class FullTable:
    """This process may have no mappings more than it has: each one taken is given back."""

    def __enter__(self):
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        if limit > 1 << 20:
            pytest.skip(f"vm.max_map_count is {limit}: too many mappings would be needed")
        self.nbytes = (2 * limit + 64) * PAGE
        self.at = map_at(0, self.nbytes, prot=0, flags=MAP_NORESERVE)
        self.used = []
        for index in range(limit):
            page = self.at + (2 * index + 1) * PAGE
            if libc.mprotect(page, PAGE, 1):
                assert ctypes.get_errno() == errno.ENOMEM
                return self
            self.used.append(page)
        raise AssertionError("there is no limit")

    def free(self, count):
        """Room for so many mappings more (each splits or joins two)."""
        for _ in range(count):
            assert not libc.mprotect(self.used.pop(), PAGE, 0)

    def __exit__(self, *exception):
        unmap(self.at, self.nbytes)


# ---- huge pages -------------------------------------------------------------------------

_POOL = Path("/proc/sys/vm/nr_hugepages")
# As in tests/engine/check.c: it is the same file in a root of its own too, where /tmp is another.
_POOL_LOCK = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")


def wait_for_lock(file, patience=120):
    end = time.monotonic() + patience
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                pytest.skip(f"another process has kept {file.name} for {patience} s")
            time.sleep(0.05)


_locked = threading.local()


@contextlib.contextmanager
def pool_lock():
    """No other test changes the pool of huge pages, or takes any of it. May be nested."""
    if not _POOL_LOCK.exists() or getattr(_locked, "here", False):
        yield
        return
    with _POOL_LOCK.open() as lock:
        wait_for_lock(lock)
        wait_for_pins()
        _locked.here = True
        try:
            yield
        finally:
            _locked.here = False


@contextlib.contextmanager
def huge_page_pool(npages):
    """A pool with npages free 2 MiB pages more than are in use; as it was afterwards."""
    if f"Hugepagesize: {HUGE >> 10} kB" not in re.sub(" +", " ", Path("/proc/meminfo").read_text()):
        pytest.skip("the default huge page size is not 2 MiB")
    with pool_lock():
        # A demo's pages are gone when it ends, and are not to be put back then.
        with _POOL.open() as of_demos:
            wait_for_lock(of_demos)
            before = _POOL.read_text()
            in_use = int(before) - free_huge_pages()
            try:
                _POOL.write_text(str(in_use + npages))
            except OSError as error:
                pytest.skip(f"huge pages cannot be reserved: {error}")
        try:
            if free_huge_pages() < npages:
                pytest.skip(f"only {free_huge_pages()} of {npages} huge pages can be reserved")
            yield npages
        finally:
            _POOL.write_text(before)


def wait_for_pins(patience=10):
    """The kernel takes back a dead process's pins later: until then its huge pages are in use."""
    from rdmafork import _huge_pages

    end = time.monotonic() + patience
    while time.monotonic() < end:
        total, free = _huge_pages.pool(HUGE)
        if free == total:
            return
        time.sleep(0.02)


def free_huge_pages():
    from rdmafork import _huge_pages

    return _huge_pages.pool(HUGE)[1]
