"""Doctor's rows about another process: what is pinned and marked there, what a fork() costs it.

A page of a process is, for fork(),

    marked            VmFlags dc or wf: no child gets it, nothing is copied
    shared            never copied
    private, pinned   copied for the child, which is what makes fork() slow
    private, other    shared until somebody writes

and /proc says how much is pinned (VmPin), but not which pages: what fork() copies lies between
bounds. What is registered with rdmafork may be marked as a fork() begins and not before. How much
that is, its library says in the memory of the process.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

import rdmafork
from rdmafork.cli import machine
from rdmafork.cli.doctor_rows import Row, ok, problem, skipped, warning
from rdmafork.cli.elf import Elf, NotElf
from rdmafork.cli.terminal import counted, printable, size

_ENDED = "the process has ended"
MUCH = 64 << 20  # bytes copied at a fork() that are worth a warning: some 20 ms


class Mapping(NamedTuple):
    nbytes: int
    resident: int
    shared: bool
    flags: frozenset[str]
    path: str
    start: int = 0

    @property
    def marked(self) -> bool:
        """By a program: the kernel marks some of its own, the rings of io_uring for one."""
        own = self.flags & {"io", "pf"} or self.path.startswith("anon_inode:")
        return not own and bool(self.flags & {"dc", "wf"})

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    @property
    def is_engine(self) -> bool:
        return os.path.basename(self.path).startswith("librdmafork")


class Process:
    """Process pid of /proc. OSError: there is none, or permission is denied."""

    def __init__(self, pid: int):
        self.pid = pid
        self.directory: str = f"/proc/{pid}"  #: of its first thread that has memory
        if pid <= 0 or not os.path.isdir(self.directory):
            if not os.path.exists("/proc/self"):
                raise OSError(errno.ENOENT, "/proc is not mounted: mount -t proc proc /proc")
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        with open(f"{self.directory}/comm", errors="surrogateescape") as file:
            self.name: str = printable(file.read().strip())
        # The main thread may end before the others. It then has neither memory nor descriptors.
        for task in (self.directory, *glob.glob(f"{self.directory}/task/*")):
            if machine.field(f"{task}/status", "VmPin"):
                self.directory = task
                break

    def rows(self) -> Iterator[Row]:
        pinned = self._status("VmPin")
        if pinned is None:
            yield skipped("memory", self._why_it_has_none())
            return
        try:
            mappings = list(_mappings(f"{self.directory}/smaps"))
        except PermissionError:
            yield skipped("memory", "it cannot be read: permission denied", self._as_root())
            return
        except (FileNotFoundError, ProcessLookupError):
            mappings = []
        if not mappings:
            yield skipped("memory", _ENDED)
            return
        yield _marked(mappings)
        yield _pinned(pinned, self._limit("Max locked memory"))
        yield self._cost(pinned, mappings)
        yield _count(len(mappings), sum(mapping.marked for mapping in mappings))
        yield _libraries(mappings)
        yield self._devices(mappings)

    def _status(self, name: str) -> int | None:
        """Bytes. None: it has no memory."""
        kib = machine.field(f"{self.directory}/status", name)
        return int(kib.split()[0]) << 10 if kib else None

    def _why_it_has_none(self) -> str:
        state = machine.field(f"{self.directory}/status", "State")
        return _ENDED if not state or state[0] in "ZX" else "a kernel thread has none"

    def _limit(self, name: str) -> str:
        with contextlib.suppress(OSError), open(f"{self.directory}/limits") as file:
            found = re.search(rf"^{name} +(\S+) +(\S+)", file.read(), re.MULTILINE)
            if found:
                soft, hard = ((int(n) if n.isdecimal() else None) for n in found.groups())
                names = ["unlimited" if n is None else size(n) for n in (soft, hard)]
                return (
                    "unlimited" if set(names) == {"unlimited"} else " soft, ".join(names) + " hard"
                )
        return "unknown"

    def _cost(self, pinned: int, mappings: list[Mapping]) -> Row:
        engine = next((m for m in mappings if m.is_engine), None)
        if not pinned or not engine:
            return _cost(pinned, mappings)
        try:
            registered = self._registered(engine)
            return _cost(pinned, mappings, registered, self._has_libibverbs(mappings))
        except (OSError, NotElf) as error:
            why = error.strerror if isinstance(error, OSError) else error
            text = f"{size(pinned)} is pinned; how much of it is registered cannot be read: {why}"
            cure = self._as_root() if isinstance(error, PermissionError) else None
            return skipped("cost of a fork()", text, cure)

    def _as_root(self) -> str:
        if os.geteuid():
            return f"sudo rdmafork doctor --pid {self.pid}"
        return "look from the host; in a container root needs CAP_SYS_PTRACE to read a process"

    def _registered(self, engine: Mapping) -> int:
        """The value that rf_registered_bytes points to, in the memory of the process."""
        with self._engine_elf(engine) as elf:
            symbol, nbytes = elf.address_of("rf_registered_bytes"), elf.machine.bits // 8
        if symbol is None:
            raise NotElf("its version of rdmafork does not report this")
        with open(f"{self.directory}/mem", "rb", buffering=0) as memory:

            def read(at: int, count: int) -> int:
                return int.from_bytes(os.pread(memory.fileno(), count, at), sys.byteorder)

            # The loader maps a library from its first byte on, in order.
            return read(read(engine.start + symbol, nbytes), 8)

    def _elf(self, path: str) -> Elf:
        return Elf(f"{self.directory}/root{path}")

    def _engine_elf(self, engine: Mapping) -> Elf:
        try:
            return self._elf(engine.path)
        except FileNotFoundError:  # deleted, as by an upgrade, or mounted over: for root alone
            return Elf(f"/proc/{self.pid}/map_files/{engine.start:x}-{engine.end:x}")

    def _devices(self, mappings: list[Mapping]) -> Row:
        what = "devices"
        try:
            fds = os.listdir(f"{self.directory}/fd")
        except OSError as error:
            return skipped(what, f"cannot read its descriptors: {error.strerror}")
        found = set()
        for fd in fds:
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"{self.directory}/fd/{fd}"))
        names = sorted(os.path.basename(p) for p in found if p.startswith("/dev/infiniband/"))
        text = f"{', '.join(names)} open" if names else "none is open"
        if any(name.startswith("uverbs") for name in names) and not self._has_libibverbs(mappings):
            cure = "link it with libibverbs.so: rdmafork exec cannot intercept a static libibverbs"
            text += ", and no libibverbs.so is there: what is registered there is not protected"
            return warning(what, text, cure)
        return ok(what, text)

    def _has_libibverbs(self, mappings: list[Mapping]) -> bool:
        """Is it an object that others may call to have memory protected, by any name?"""
        paths = {m.path for m in mappings if m.path.startswith("/") and not m.is_engine}
        if any(_is_libibverbs(path) for path in paths):
            return True
        for path in paths:
            with contextlib.suppress(OSError, NotElf), self._elf(path) as elf:
                if elf.address_of("ibv_dontfork_range") is not None:
                    return True
        return False


def _is_libibverbs(path: str) -> bool:
    return "libibverbs" in os.path.basename(path)


_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \S+ *(.*)")


def _mappings(path: str) -> Iterator[Mapping]:
    with open(path, errors="surrogateescape") as smaps:
        start, nbytes, resident, shared, name = 0, 0, 0, False, ""
        for line in smaps:
            if head := _HEAD.match(line):
                start, nbytes = int(head[1], 16), int(head[2], 16) - int(head[1], 16)
                resident, shared, name = 0, head[3].endswith("s"), head[4]
            # Huge pages have fields of their own and no Rss.
            elif line.startswith(("Rss:", "Shared_Hugetlb:", "Private_Hugetlb:")):
                resident += int(line.split()[1]) << 10
            elif line.startswith("VmFlags:"):
                yield Mapping(nbytes, resident, shared, frozenset(line.split()[1:]), name, start)


def _marked(mappings: list[Mapping]) -> Row:
    what = "marked pages"
    absent = [mapping for mapping in mappings if mapping.marked and "dc" in mapping.flags]
    wiped = [mapping for mapping in mappings if mapping.marked and "dc" not in mapping.flags]
    parts = [
        f"{size(sum(m.nbytes for m in group))} {does}, in {counted(len(group), 'mapping')}"
        for group, does in (
            (absent, "that children do not inherit (dc)"),
            (wiped, "that children read as zeros (wf)"),
        )
        if group
    ]
    shared = sum(m.nbytes for m in absent if m.shared)
    text = ", ".join(parts) or "none"
    if shared:
        text += f"; {size(shared)} of that is shared memory, which fork() never copies"
        cure = "libibverbs' own fork support marks it; rdmafork exec does not"
        return warning(what, text, cure)
    return ok(what, text)


def _pinned(pinned: int, limit: str) -> Row:
    return ok("pinned pages", f"{size(pinned)} (VmPin); the limit of locked memory is {limit}")


def _unprotected(pinned: int, mappings: list[Mapping]) -> tuple[int, int]:
    """At least and at most so many pinned bytes are private and not marked."""
    marked = sum(m.resident for m in mappings if m.marked)
    shared = sum(m.resident for m in mappings if m.shared and not m.marked)
    private = sum(m.resident for m in mappings if not m.shared and not m.marked)
    most = min(pinned, private)
    return min(max(pinned - marked - shared, 0), most), most


def _cost(
    pinned: int,
    mappings: list[Mapping],
    registered: int | None = None,
    has_libibverbs: bool = False,
) -> Row:
    """registered: with the engine that runs there; None: none does."""
    what = "cost of a fork()"
    least, most = _unprotected(pinned, mappings)
    cure = "register it: rdmafork.register(), or rdmafork exec from the start"
    if registered is None:
        between = size(least) if size(least) == size(most) else f"{size(least)} to {size(most)}"
        pages, much = f"{between} of pinned private pages", least >= MUCH
    elif pinned <= registered:
        text = f"copies little or nothing, if the {size(pinned)} that is pinned is part of the"
        kept = 'and not registered with on_fork="keep"'
        return ok(what, f"{text} {size(registered)} that is registered with rdmafork, {kept}")
    else:
        least, much = min(pinned - registered, most), True
        by = "something that does not call libibverbs"
        by = f"a libibverbs that is not intercepted, or by {by}" if has_libibverbs else by
        pages = f"up to {size(least)} pinned by {by}"
    if not least:
        text = "all pinned pages are marked or shared" if pinned else "no page is pinned"
        return ok(what, f"copies little or nothing: {text}")
    if not rdmafork.kernel_info().copy_on_fork_trusted:
        return problem(
            what, f"may make the device lose {pages}, once either process writes there", cure
        )
    text = f"copies {pages}, which takes 0.3 s for each GiB or more, and as much memory again"
    return warning(what, text, cure) if much else ok(what, text)


def _count(count: int, marked: int) -> Row:
    what = "mappings"
    limit = machine.number("/proc/sys/vm/max_map_count")
    text = f"{count:,}, {marked:,} marked"
    if limit is None:
        return ok(what, f"{text}; vm.max_map_count cannot be read")
    text += f", of {limit:,} (vm.max_map_count)"
    cure = "as root: sysctl -w vm.max_map_count=262144; register larger pieces of memory"
    if count > limit * 9 // 10:
        return problem(what, f"{text}: malloc() and registrations fail soon", cure)
    return warning(what, text, cure) if count > limit // 2 else ok(what, text)


def _libraries(mappings: list[Mapping]) -> Row:
    what = "libraries"
    engines = sorted({m.path for m in mappings if m.is_engine})
    found = sorted({m.path for m in mappings if _is_libibverbs(m.path)})
    names = [printable(path) for path in [*engines, *found]]
    if found and not engines:
        return ok(what, f"{', '.join(names)}; rdmafork is not loaded")
    return ok(what, ", ".join(names) or "neither libibverbs nor rdmafork is loaded")
