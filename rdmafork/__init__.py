"""fork() with RDMA-registered memory: safe and cheap, at no cost per registration."""

import os
import sys

if sys.platform != "linux":
    raise ImportError(
        f"rdmafork needs Linux: it keeps registered pages out of forked children with "
        f"madvise(MADV_DONTFORK), which {sys.platform} does not have"
    )

try:
    from rdmafork._buffer import Buffer
except ImportError as _error:
    if _error.name == "rdmafork._buffer":
        raise ImportError(
            f"{os.path.dirname(os.path.abspath(__file__))} has no modules for this Python: it is "
            f"rdmafork's source, not built, or built for another Python, or an archive. Start "
            f"Python in another directory if you have installed it, or else: make build"
        ) from None
    if "version `RDMAFORK_" not in str(_error):
        raise
    raise ImportError(
        f"another version of librdmafork.so is loaded in this process ({_error}); is it in "
        f"LD_PRELOAD? Preload this package's own: {os.path.dirname(__file__)}/librdmafork.so"
    ) from None
from rdmafork._core import (
    Registration,
    explain_faults,
    fork_init,
    is_fork_initialized,
    kernel_info,
    protected_ranges,
    register,
    register_address,
    stats,
)
from rdmafork._errors import InheritedError, SharedPageWarning, UnprotectedWarning

TYPE_CHECKING = False  # typing takes longer to import than all of this package
if TYPE_CHECKING:
    from rdmafork._access import Access
    from rdmafork._results import ForkStatus, InterceptedLibrary, KernelInfo, ProtectedRange, Stats
    from rdmafork._verbs import Context, MemoryRegion, ProtectionDomain
    from rdmafork._version import __version__
    from rdmafork.devices import (
        Device,
        DeviceWarning,
        Gid,
        GidType,
        LinkLayer,
        NodeType,
        PhysicalState,
        Port,
        PortState,
        Transport,
        get_device_list,
    )

__all__ = [
    "fork_init",
    "is_fork_initialized",
    "ForkStatus",
    "explain_faults",
    "register",
    "register_address",
    "Registration",
    "Buffer",
    "InheritedError",
    "UnprotectedWarning",
    "SharedPageWarning",
    "protected_ranges",
    "ProtectedRange",
    "stats",
    "Stats",
    "InterceptedLibrary",
    "kernel_info",
    "KernelInfo",
    "get_device_list",
    "Device",
    "Port",
    "Gid",
    "NodeType",
    "Transport",
    "PortState",
    "PhysicalState",
    "LinkLayer",
    "GidType",
    "DeviceWarning",
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


if not os.environ.keys().isdisjoint(("RDMAV_FORK_SAFE", "IBV_FORK_SAFE", "RDMAFORK_EXEC")):
    # The engine runs without fork_init(), which does this elsewhere.
    from rdmafork._core import _load_all

    _load_all()

if os.environ.get("RDMAFORK_TRACE_FORKS", "0") not in ("", "0"):
    from rdmafork import _sysfs, _trace

    if not _sysfs.secure():
        _trace.begin()


if not TYPE_CHECKING:
    # Imported when first used, or by fork_init(): enums and named tuples take longer to make than
    # all else to import.
    _LATER = {
        "_access": ("Access",),
        "_results": ("ForkStatus", "InterceptedLibrary", "KernelInfo", "ProtectedRange", "Stats"),
        "_verbs": ("Context", "MemoryRegion", "ProtectionDomain"),
        "_version": ("__version__",),
    }

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        module = next((module for module, names in _LATER.items() if name in names), "devices")
        value = globals()[name] = getattr(import_module(f"rdmafork.{module}"), name)
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
