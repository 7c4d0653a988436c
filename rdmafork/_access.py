"""The access a device may have to memory, and why memory was refused it."""

from __future__ import annotations

import errno
import os
import re
import resource
from enum import IntFlag


class Access(IntFlag):
    """What a device may do with a memory region; reading it locally is always allowed.

    Source: ibv_reg_mr(3).
    """

    __module__ = "rdmafork"

    LOCAL_WRITE = 1
    REMOTE_WRITE = 2
    REMOTE_READ = 4
    REMOTE_ATOMIC = 8
    MW_BIND = 16
    ZERO_BASED = 32
    ON_DEMAND = 64
    HUGETLB = 128
    FLUSH_GLOBAL = 256
    FLUSH_PERSISTENT = 512
    RELAXED_ORDERING = 1 << 20


NEEDS_LOCAL_WRITE = Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
WRITES = Access.LOCAL_WRITE | NEEDS_LOCAL_WRITE


def access_text(flags: int) -> str:
    return "|".join([str(flag.name) for flag in Access if flag & flags]) or "local read"


def refusal(error: int, start: int, nbytes: int, flags: int, place: str) -> OSError:
    """The OSError for a region the device refused: the range, the access, the likely cause."""
    end = start + nbytes
    if error == errno.ENOMEM:
        cause = memory_cause(nbytes)
    elif error == errno.EFAULT:
        cause = mapping_cause(start, end, flags)
    elif error == errno.EINVAL and not nbytes:
        cause = "a region needs at least one byte"
    elif error == errno.EINVAL and flags & NEEDS_LOCAL_WRITE and not flags & Access.LOCAL_WRITE:
        cause = "REMOTE_WRITE and REMOTE_ATOMIC need LOCAL_WRITE too"
    elif error in (errno.EINVAL, errno.EOPNOTSUPP):
        cause = "the device does not support this access: ask for less"
    else:
        cause = "the device refuses it; dmesg may say why"
    return OSError(
        error,
        f"cannot register 0x{start:x}-0x{end:x} ({nbytes} bytes, access {access_text(flags)}) "
        f"{place}: {os.strerror(error)}; {cause}",
    )


def memory_cause(nbytes: int) -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = re.search(r"VmPin:\s*(\d+) kB", _proc_self("status"))
    pinned = int(found[1]) << 10 if found else 0
    if limit == resource.RLIM_INFINITY or pinned + nbytes <= limit:
        return "the kernel or the device is out of memory for it: register less at once"
    return (
        f"RLIMIT_MEMLOCK allows this process {limit} pinned bytes, {pinned} are pinned; raise it: "
        f"ulimit -l, LimitMEMLOCK= of its systemd unit, memlock in limits.conf"
    )


def mapping_cause(start: int, end: int, flags: int) -> str:
    maps = _proc_self("maps")
    at = start
    for line in maps.splitlines():
        span, permissions, *_ = line.split(" ", 2)
        first, last = (int(bound, 16) for bound in span.split("-"))
        if last <= at:
            continue
        if first > at or at >= end:
            break
        if flags & WRITES and permissions[1] != "w":
            return (
                f"0x{first:x}-0x{last:x} is mapped {permissions}, not for writing: "
                f"register it without write access, or map it writable"
            )
        at = last
    if maps and at < end:
        return f"nothing is mapped at 0x{at:x}: register memory before it is freed"
    return "the device cannot pin this kind of mapping: register ordinary memory"


def _proc_self(name: str) -> str:
    """Nothing without /proc: the cause is a guess, and the error is told all the same."""
    try:
        # Names of processes and of mapped files may be no UTF-8.
        with open(f"/proc/thread-self/{name}", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""
