"""Doctor's rows about the limits of this process and of its container."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import rdmafork
from rdmafork import _huge_pages
from rdmafork.cli import machine
from rdmafork.cli.doctor_rows import Row, ok, problem, skipped, warning
from rdmafork.cli.terminal import printable, size

DEFAULT_MAP_COUNT = 65530
SMALL_MEMLOCK = 64 << 20
SMALL_SHM = 64 << 20  # Docker's default
CAP_IPC_LOCK = 1 << 14
PROC = "/proc/self/status"
NO_PROC = "unknown without /proc"


def limits() -> Iterator[Row]:
    yield mappings()
    yield locked_memory()
    yield from huge_pages()
    yield transparent_huge_pages()
    yield user_namespace()
    yield memory_limit()
    yield shared_memory()


def mappings() -> Row:
    what = "vm.max_map_count"
    limit = machine.number("/proc/sys/vm/max_map_count")
    if limit is None:
        return skipped(what, NO_PROC)
    text = f"{limit:,} mappings for each process; rdmafork's marks use at most half"
    cure = "as root: sysctl -w vm.max_map_count=262144"
    count, pid, name = max(_mapped(seconds=0.5), default=(0, 0, ""))
    text += f"; process {pid} ({name}) has the most, {count:,}" if count else ""
    if count > limit * 3 // 4:
        return problem(what, text, f"rdmafork doctor --pid {pid}; {cure}")
    if limit < DEFAULT_MAP_COUNT:
        return warning(what, f"{text}; the default is {DEFAULT_MAP_COUNT:,}", cure)
    return ok(what, text)


def _mapped(seconds: float) -> Iterator[tuple[int, int, str]]:
    """(mappings, pid, name) of the processes that this one may look at, as time allows."""
    until = time.monotonic() + seconds
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir("/proc") if name.isdecimal()]
    for name in names:
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/maps", "rb") as maps:
                count = sum(1 for _ in maps)
            with open(f"/proc/{name}/comm", errors="surrogateescape") as comm:
                yield count, int(name), printable(comm.read().strip())
        if time.monotonic() > until:
            return


def locked_memory() -> Row:
    what = "locked memory"
    soft, hard = rdmafork.kernel_info().memlock
    if soft == -1:
        return ok(what, "unlimited (ulimit -l)")
    text = f"{size(soft)} soft, {_limit(hard)} hard (ulimit -l)"
    if not os.path.exists(PROC):
        return skipped(what, f"{text}; whether CAP_IPC_LOCK lifts it is {NO_PROC}")
    if _may_lock():
        return ok(what, f"{text}; CAP_IPC_LOCK lifts it, except for soft-iWARP")
    if hard == -1 or hard >= max(2 * soft, SMALL_MEMLOCK):
        text += ": registering more at a device fails"
        return warning(what, text, "ulimit -S -l hard in the shell; rdmafork exec does that itself")
    tell = problem if hard < SMALL_MEMLOCK else warning
    return tell(
        what,
        f"{text}: registering more at a device fails with ENOMEM",
        "memlock unlimited in /etc/security/limits.d; LimitMEMLOCK=infinity for a service "
        "(sshd, slurmd); docker run --ulimit memlock=-1",
    )


def _limit(value: int) -> str:
    return "unlimited" if value == -1 else size(value)


def _may_lock() -> bool:
    """The machine's CAP_IPC_LOCK: that of a user namespace lifts no limit."""
    effective = machine.field(PROC, "CapEff")
    return bool(int(effective or "0", 16) & CAP_IPC_LOCK) and not _mapped_users()


def _mapped_users() -> str | None:
    """The map of users, where this is not the machine's first user namespace."""
    with contextlib.suppress(OSError), open("/proc/self/uid_map") as file:
        users = " ".join(file.read().split())
        return None if users == "0 0 4294967295" else users
    return None


def huge_pages() -> Iterator[Row]:
    none = True
    for nbytes in rdmafork.kernel_info().huge_page_sizes:
        with contextlib.suppress(OSError, ValueError):
            total, free = _huge_pages.pool(nbytes)
            if total:
                none = False
                yield _pool(nbytes, total, free)
    if none:
        yield ok("huge pages", "none reserved (echo N > /proc/sys/vm/nr_hugepages)")


def _pool(nbytes: int, total: int, free: int) -> Row:
    what, text = "huge pages", f"{free} of {total} of {size(nbytes)} are free"
    if free:
        return ok(what, text)
    text += (
        ": fork() fails in a process that has pinned some without registering them with rdmafork"
    )
    knob = f"{_huge_pages.path(nbytes)}/nr_hugepages"
    return warning(what, text, f"as root: echo {total + 8} > {knob}")


def transparent_huge_pages() -> Row:
    what = "transparent huge pages"
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
            chosen = file.read().partition("[")[2].partition("]")[0]
    except OSError:
        return ok(what, "this kernel has none")
    meaning = {
        "always": "everywhere: for one unmarked pinned byte the kernel copies a whole one",
        "madvise": "where requested by madvise(), as rdmafork.Buffer does",
        "never": "nowhere",
    }
    return ok(what, meaning.get(chosen, chosen))


def user_namespace() -> Row:
    what = "user namespace"
    if not os.path.exists(PROC):
        return skipped(what, NO_PROC)
    users = _mapped_users()
    if users is None:
        return ok(what, "none: this is the host's")
    return warning(
        what,
        f"this process runs in a container (uid_map {users}): its root cannot raise the limit of "
        f"locked memory, and can open only the devices it was given",
        "raise memlock on the host, and pass the devices: --device=/dev/infiniband",
    )


def memory_limit() -> Row:
    what = "memory limit"
    if not os.path.exists(PROC):
        return skipped(what, NO_PROC)
    found = [(limit - used, limit, used) for limit, used in machine.memory_limits()]
    if not found:
        return ok(what, "no control group has one")
    left, limit, used = min(found)
    text = f"{size(limit)} of a control group, {size(used)} used"
    if left < used:
        text += ": a fork() that makes the kernel copy pinned memory may exceed it"
        return warning(what, text, "register the memory with rdmafork, or raise the limit")
    return ok(what, text)


def shared_memory() -> Row:
    what = "/dev/shm"
    try:
        found = os.statvfs(what)
    except OSError as error:
        cure = "mount -t tmpfs tmpfs /dev/shm"
        return warning(what, f"{error.strerror}: shared memory is not available", cure)
    nbytes, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    text = f"{size(free)} of {size(nbytes)} are free"
    if nbytes <= SMALL_SHM:
        text += ": UCX, NCCL and multiprocessing keep shared memory there"
        return warning(what, text, "docker run --shm-size=1g, or --ipc=host")
    return ok(what, text)
