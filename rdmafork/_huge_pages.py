"""The kernel's pools of huge pages, a pool for each page size."""

from __future__ import annotations

from typing import NamedTuple


class Pool(NamedTuple):
    total: int
    free: int  # and promised to nobody


def path(page_size: int) -> str:
    return f"/sys/kernel/mm/hugepages/hugepages-{page_size >> 10}kB"


def pool(page_size: int) -> Pool:
    """OSError or ValueError: the kernel does not say, or has no such pages."""
    total, free, reserved = (
        _number(f"{path(page_size)}/{name}")
        for name in ("nr_hugepages", "free_hugepages", "resv_hugepages")
    )
    # "Reserved" wraps below zero while the pins of a process that has ended are taken back.
    left = (free - reserved) % (1 << 64)
    return Pool(total, min(free, left) if left <= total else 0)


def _number(name: str) -> int:
    with open(name) as file:
        return int(file.read())
