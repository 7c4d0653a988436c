"""The kernel's pools of huge pages, a pool for each page size."""

from __future__ import annotations


def path(page_size: int) -> str:
    return f"/sys/kernel/mm/hugepages/hugepages-{page_size >> 10}kB"


def pool(page_size: int) -> tuple[int, int]:
    """How many pages it has, and how many of them are free and promised to nobody.

    OSError or ValueError: the kernel does not say, or has no pages of that size.
    """
    total, free, reserved = (
        _number(f"{path(page_size)}/{name}")
        for name in ("nr_hugepages", "free_hugepages", "resv_hugepages")
    )
    # "Reserved" wraps below zero while the pins of a process that has ended are taken back.
    left = (free - reserved) % (1 << 64)
    return total, min(free, left) if left <= total else 0


def _number(name: str) -> int:
    with open(name) as file:
        return int(file.read())
