"""The results of rdmafork's functions."""

from enum import IntEnum
from typing import Any, NamedTuple


def fields(cls: type[Any]) -> dict[str, str]:
    """The sentence for each field in the docstring of cls: "name: text" on lines of its own."""
    said: dict[str, str] = {}
    known = getattr(cls, "__annotations__", {})
    for line in (cls.__doc__ or "").splitlines():
        name, colon, text = line.strip().partition(": ")
        if colon and name in known:
            last, said[name] = name, text
        elif said and line.strip():
            said[last] += f" {line.strip()}"
    return said


def describe(cls: type[Any]) -> None:
    """Put that where help() looks for it."""
    for name, text in fields(cls).items():
        getattr(cls, name).__doc__ = text


class ForkStatus(IntEnum):
    """What protects registered memory from fork(); is_fork_initialized() explains the values."""

    __module__ = "rdmafork"

    DISABLED = 0  #: nothing: neither rdmafork nor the kernel
    ENABLED = 1  #: rdmafork
    UNNEEDED = 2  #: the kernel copies pinned pages: safe, but fork() is slow


class ProtectedRange(NamedTuple):
    """Pages that registrations touch, half open; see protected_ranges().

    start: the address of the first byte
    end: the address after the last byte
    registrations: how many registrations touch these pages
    on_fork: "omit", "wipe" or "keep": the first of these that a registration wants
    protected_by: "mark": marked (``dc`` or ``wf`` in VmFlags of /proc/self/smaps), so a child
        finds nothing there, zeros, or a copy where no single registration fills the page.
        "kernel": the kernel copies them at fork. "pending": the next fork() decides. "shared":
        shared memory, which fork() never moves. None: nothing, it was registered before
        fork_init().
    """

    start: int
    end: int
    registrations: int
    on_fork: str
    protected_by: str | None

    def __repr__(self) -> str:
        return (
            f"ProtectedRange(0x{self.start:x}-0x{self.end:x}, "
            f"registrations={self.registrations}, on_fork={self.on_fork!r}, "
            f"protected_by={self.protected_by!r})"
        )


class InterceptedLibrary(NamedTuple):
    """A libibverbs in this process, and how its calls reach rdmafork; see fork_init().

    path: the library's file
    needed_by: a library that was linked with it, or None
    how: "ours": the loader sends its calls here (LD_PRELOAD). "rewritten": rdmafork changed
        its GOT, through which it calls. "patched": it calls directly, so rdmafork wrote a jump
        over its two functions. "refused": neither is possible, and its own fork support works.
    why: the reason if it is refused
    """

    path: str
    needed_by: str | None
    how: str
    why: str | None


class Stats(NamedTuple):
    """Counters of this process's engine; see stats().

    mode: "lazy", "eager", or None before fork_init()
    registrations: registrations that are open now
    pending: how many of them wait for the next fork()
    ranges: separate ranges of registered pages
    marked_ranges: separate ranges of pages that are marked
    marked_bytes: bytes in those ranges
    vmas: mappings that the marks add, at most
    vma_budget: how many mappings marks may add: half of vm.max_map_count, a third where the
        kernel's copying is not trusted
    unmarked_ranges: ranges that could be marked, but are copied by the kernel
    unmarked_bytes: bytes in those ranges
    still_marked_bytes: bytes that are released, but that the kernel has not unmarked: children do
        not inherit them
    madvise_calls: madvise() calls that rdmafork made, since fork_init()
    query_calls: how often rdmafork asked /proc what is mapped
    forks: forks through libc, since fork_init()
    forks_unmarked: forks during a call of rdmafork, not counted above: nothing new was marked
    engine_bytes: memory the engine's own tables take
    ibv_ranges: live registrations that other code made through ibv_dontfork_range()
    ibv_calls: calls of ibv_dontfork_range() and ibv_dofork_range() that came here
    ibv_unbalanced: of these, releases of ranges that were not registered
    gone_bytes: marked bytes that were unmapped, or moved by mremap(), before their release. Moved
        memory keeps its mark, also if realloc() of a large block moved it: children do not
        inherit it at its new place
    ibv_libraries: each libibverbs in this process, since fork_init(intercept=True)
    """

    mode: str | None
    registrations: int
    pending: int
    ranges: int
    marked_ranges: int
    marked_bytes: int
    vmas: int
    vma_budget: int
    unmarked_ranges: int
    unmarked_bytes: int
    still_marked_bytes: int
    madvise_calls: int
    query_calls: int
    forks: int
    forks_unmarked: int
    engine_bytes: int
    ibv_ranges: int
    ibv_calls: int
    ibv_unbalanced: int
    gone_bytes: int
    ibv_libraries: tuple[InterceptedLibrary, ...]


class KernelInfo(NamedTuple):
    """What this kernel does at fork(); see kernel_info().

    release: the kernel's version, as uname -r prints it
    copy_on_fork: fork() copies pinned pages for the child
    copy_on_fork_from: how that is known: "netlink" or "version"
    copy_on_fork_trusted: that copying never loses a pinned page (Linux 5.19 and later, and some
        older kernels)
    copy_on_fork_trusted_from: how that is known: "version", "netlink", "probe" (from what the
        kernel does with a page) or "environment" (RDMAFORK_TRUST_COPYING=0)
    page_size: the size of a base page, in bytes
    huge_page_sizes: the sizes that huge pages of the pool can have, in bytes, ascending
    procmap_query: the kernel answers what is mapped at an address (6.11)
    max_map_count: vm.max_map_count
    memlock: RLIMIT_MEMLOCK, soft and hard, in bytes; -1: unlimited
    """

    release: str
    copy_on_fork: bool
    copy_on_fork_from: str
    copy_on_fork_trusted: bool
    copy_on_fork_trusted_from: str
    page_size: int
    huge_page_sizes: tuple[int, ...]
    procmap_query: bool
    max_map_count: int
    memlock: tuple[int, int]


for _cls in ProtectedRange, InterceptedLibrary, Stats, KernelInfo:
    describe(_cls)
