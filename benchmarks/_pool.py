"""Huge pages of 2 MiB from the kernel's pool, which is the whole machine's."""

import contextlib
from collections.abc import Iterator

from rdmafork.cli import machine
from rdmafork.cli.demo import POOL, reserved_huge_pages

from ._workers import Skipped

FREE = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"


@contextlib.contextmanager
def huge_pages(wanted: int) -> Iterator[None]:
    """So many are free: of a pool there is, or of one that is given back. Raises Skipped."""
    with contextlib.ExitStack() as stack:
        if wanted and not machine.number(POOL):
            try:
                stack.enter_context(reserved_huge_pages(wanted))
            except OSError as error:
                raise Skipped(f"huge pages cannot be reserved: {error.strerror}") from None
        free = machine.number(FREE) or 0
        if free < wanted:
            raise Skipped(f"of {wanted} huge pages of 2 MiB only {free} are free")
        yield
