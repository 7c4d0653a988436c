"""This machine's memory and limits, as /proc and control groups tell them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


def field(path: str, key: str) -> str | None:
    """The value in a line "key: value" or "key value" of a file of the kernel's."""
    with contextlib.suppress(OSError), open(path, errors="surrogateescape") as lines:
        for line in lines:
            name, _, value = line.replace(":", " ", 1).partition(" ")
            if name == key:
                return value.strip()
    return None


def number(path: str) -> int | None:
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        return int(file.read())
    return None


def memory_available() -> int:
    """Bytes that can be used now: the machine's, or what a control group leaves."""
    kib = (field("/proc/meminfo", "MemAvailable") or "0 kB").split()[0]
    available = int(kib) << 10 or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return min([available, *(limit - used for limit, used in memory_limits())])


def memory_limits() -> Iterator[tuple[int, int]]:
    """(limit, of it in use and not to be had back) of every control group that has a limit."""
    for group, limit_name, used_name in _control_groups():
        limit, used = number(f"{group}/{limit_name}"), number(f"{group}/{used_name}")
        if limit is not None and used is not None and limit < 1 << 60:
            cache = int(field(f"{group}/memory.stat", "inactive_file") or 0)
            yield limit, min(max(used - cache, 0), limit)


def _control_groups() -> Iterator[tuple[str, str, str]]:
    """Control groups whose limits count for this process: (directory, its limit, its usage)."""
    groups = "/proc/self/cgroup"
    with contextlib.suppress(OSError), open(groups, errors="surrogateescape") as lines:
        for line in lines:
            hierarchy, controllers, path = line.rstrip("\n").split(":", 2)
            if hierarchy == "0":
                root, names = "/sys/fs/cgroup", ("memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                root = "/sys/fs/cgroup/memory"
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            else:
                continue
            while path:  # a container may see only the last ones, or all at the root
                yield root + path, *names
                path = path.rpartition("/")[0]
            yield root, *names


def facts() -> dict[str, Any]:
    uname = os.uname()
    model = None
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        model = next(
            (x.partition(":")[2].strip() for x in lines if x.startswith("model name")), None
        )
    return {
        "kernel": uname.release,
        "architecture": uname.machine,
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_model": model,
        "memory_nbytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "memory_available_nbytes": memory_available(),
        "python": sys.version.split()[0],
    }
