"""What the functions of rdmafork answer."""

from enum import IntEnum
from typing import NamedTuple


class ForkStatus(IntEnum):
    """What protects registered memory from fork(); see is_fork_initialized()."""

    __module__ = "rdmafork"

    DISABLED = 0  #: nothing: neither rdmafork nor the kernel
    ENABLED = 1  #: rdmafork
    UNNEEDED = 2  #: the kernel copies pinned pages: safe, but fork() is slow


class ProtectedRange(NamedTuple):
    """Pages that registrations touch, half open; see protected_ranges()."""

    start: int
    end: int
    registrations: int  #: how many touch them
    on_fork: str  #: "omit", "wipe" or "keep": the first of these that a registration wants
    protected_by: str | None
    """ "advice": marked (``dc`` or ``wf`` in VmFlags of /proc/self/smaps), so a child finds
    nothing there, zeros, or a copy where no single registration fills the page.
    "kernel": the kernel copies them at fork. "pending": the next fork() decides.
    "shared": shared memory, which fork() never moves. None: nothing, it was registered
    before fork_init()."""

    def __repr__(self) -> str:
        return (
            f"ProtectedRange(0x{self.start:x}-0x{self.end:x}, "
            f"registrations={self.registrations}, on_fork={self.on_fork!r}, "
            f"protected_by={self.protected_by!r})"
        )


class InterceptedLibrary(NamedTuple):
    """A libibverbs in this process, and how its calls reach rdmafork; see fork_init()."""

    path: str
    needed_by: str | None  #: a library that was linked with it, or None
    how: str
    """ "ours": the loader has sent them here (LD_PRELOAD). "rewritten": rdmafork has changed the
    slots that it calls through. "patched": it has no slots, and a jump lies over its two functions.
    "refused": neither is possible, and its own fork support stays as it is."""
    why: str | None  #: the reason if it is refused


class Stats(NamedTuple):
    """What the engine of this process holds and has done; see stats()."""

    mode: str | None  #: "lazy", "eager", or None before fork_init()
    registrations: int  #: live
    pending: int  #: of these, waiting for the next fork()
    ranges: int  #: distinct page ranges counted
    marked_ranges: int  #: runs of pages that are marked in the kernel
    marked_bytes: int
    vmas: int  #: mappings that the marks add, at most
    vma_budget: int  #: half of vm.max_map_count: no mark goes beyond it
    left_ranges: int  #: ranges left to the kernel's copying
    left_bytes: int
    unreleased_bytes: int  #: released, but the kernel has not unmarked them: children lack them
    madvise_calls: int  #: system calls made, since the process began
    query_calls: int  #: questions asked of /proc
    forks: int  #: through libc, since fork_init()
    forks_unprepared: int  #: besides these, while the engine was busy: nothing new was marked
    engine_bytes: int  #: memory the engine's own tables take
    ibv_ranges: int  #: registrations made by others through ibv_dontfork_range(), live
    ibv_calls: int  #: calls of ibv_dontfork_range() and ibv_dofork_range() that came here
    ibv_unbalanced: int  #: of these, releases of what was not registered
    #: kept from children, and unmapped before their release or moved by mremap(), which takes
    #: the mark along: as realloc() of a large block does, then children lack it at its new place
    gone_bytes: int
    ibv_libraries: tuple[InterceptedLibrary, ...]  #: since fork_init(intercept=True)


class KernelInfo(NamedTuple):
    """What this kernel does at fork(); see kernel_info()."""

    release: str
    copy_on_fork: bool  #: pinned pages are copied for the child
    copy_on_fork_from: str  #: how that is known: "netlink" or "version"
    copy_on_fork_trusted: bool  #: and no race loses them (5.19 and later, some before)
    #: how that is known: "version", "netlink", "probe" (from what the kernel does with a page)
    #: or "environment" (RDMAFORK_TRUST_COPYING=0)
    copy_on_fork_trusted_from: str
    page_size: int
    huge_page_sizes: tuple[int, ...]
    procmap_query: bool  #: what is mapped can be asked address by address (6.11)
    process_madvise: bool  #: one system call marks many ranges
    max_map_count: int  #: vm.max_map_count
    memlock: tuple[int, int]  #: RLIMIT_MEMLOCK, soft and hard, in bytes; -1: unlimited
