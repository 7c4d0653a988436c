"""fork() with RDMA-registered memory: safe and cheap, at no cost per registration."""

import os
import sys

if sys.platform != "linux":
    raise ImportError(
        f"rdmafork needs Linux: it keeps registered pages out of forked children with "
        f"madvise(MADV_DONTFORK), which {sys.platform} does not have"
    )

from rdmafork._core import (
    Registration,
    fork_init,
    is_fork_initialized,
    kernel_info,
    protected_ranges,
    register,
    register_address,
    stats,
)
from rdmafork._results import (
    ForkStatus,
    InheritedError,
    KernelInfo,
    ProtectedRange,
    Stats,
    UnprotectedWarning,
)
from rdmafork._verbs import Access, Context, MemoryRegion, ProtectionDomain
from rdmafork._version import __version__

__all__ = [
    "fork_init",
    "is_fork_initialized",
    "ForkStatus",
    "register",
    "register_address",
    "Registration",
    "InheritedError",
    "UnprotectedWarning",
    "protected_ranges",
    "ProtectedRange",
    "stats",
    "Stats",
    "kernel_info",
    "KernelInfo",
    "Context",
    "ProtectionDomain",
    "MemoryRegion",
    "Access",
    "get_include",
    "get_library",
    "__version__",
]


def get_include() -> str:
    """The directory that holds rdmafork.h."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "include")


def get_library() -> str:
    """The path of librdmafork.so: the file to link with, or to name in LD_PRELOAD."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "librdmafork.so")
