"""fork() with RDMA-registered memory: safe and cheap.

    import rdmafork

    rdmafork.fork_init()                       # once, before anything is registered
    with rdmafork.register(buffer) as region:  # or Buffer(nbytes): memory of its own
        ...                                    # region.address, region.nbytes
        os.fork()                              # the child does not have the buffer's pages

Protection: fork_init(), register() -> Registration, register_address(), Buffer,
    is_fork_initialized() -> ForkStatus, explain_faults().
What is protected, and what it costs: protected_ranges() -> ProtectedRange, stats() -> Stats,
    kernel_info() -> KernelInfo; Stats has InterceptedLibrary.
Devices: get_device_list() -> Device, with Port and Gid; Context -> ProtectionDomain ->
    MemoryRegion, with Access. Enums: NodeType, Transport, PortState, PhysicalState, LinkLayer,
    GidType.
Errors and warnings: OSError with the errno, the range and the likely cause; InheritedError in a
    child; UnprotectedWarning, SharedPageWarning, DeviceWarning.
For other languages: get_include(), get_library().

help() of each of these, as help(rdmafork.register), explains arguments, errors, threads, forks.
Everything may be called from any thread, and in a forked child.
"""

import os
import sys

if sys.platform != "linux":
    raise ImportError(
        f"rdmafork needs Linux: it keeps registered pages out of forked children with "
        f"madvise(MADV_DONTFORK), which {sys.platform} does not have"
    )

try:
    from rdmafork._buffer import Buffer as Buffer
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
from rdmafork._core import Registration as Registration
from rdmafork._core import (
    explain_faults,
    fork_init,
    is_fork_initialized,
    kernel_info,
    protected_ranges,
    register,
    register_address,
    stats,
)
from rdmafork._errors import InheritedError as InheritedError
from rdmafork._errors import SharedPageWarning as SharedPageWarning
from rdmafork._errors import UnprotectedWarning as UnprotectedWarning

TYPE_CHECKING = False  # typing takes longer to import than all of this package
if TYPE_CHECKING:
    from rdmafork._access import Access as Access
    from rdmafork._results import ForkStatus as ForkStatus
    from rdmafork._results import InterceptedLibrary as InterceptedLibrary
    from rdmafork._results import KernelInfo as KernelInfo
    from rdmafork._results import ProtectedRange as ProtectedRange
    from rdmafork._results import Stats as Stats
    from rdmafork._verbs import Context as Context
    from rdmafork._verbs import MemoryRegion as MemoryRegion
    from rdmafork._verbs import ProtectionDomain as ProtectionDomain
    from rdmafork._version import __version__ as __version__
    from rdmafork.devices import Device as Device
    from rdmafork.devices import DeviceWarning as DeviceWarning
    from rdmafork.devices import Gid as Gid
    from rdmafork.devices import GidType as GidType
    from rdmafork.devices import LinkLayer as LinkLayer
    from rdmafork.devices import NodeType as NodeType
    from rdmafork.devices import PhysicalState as PhysicalState
    from rdmafork.devices import Port as Port
    from rdmafork.devices import PortState as PortState
    from rdmafork.devices import Transport as Transport
    from rdmafork.devices import get_device_list

# help(rdmafork) goes into these: the classes have pages of their own.
__all__ = [
    "fork_init",
    "register",
    "register_address",
    "is_fork_initialized",
    "explain_faults",
    "protected_ranges",
    "stats",
    "kernel_info",
    "get_device_list",
    "get_include",
    "get_library",
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
        "devices": (
            *("Device", "DeviceWarning", "Gid", "GidType", "LinkLayer", "NodeType"),
            *("PhysicalState", "Port", "PortState", "Transport", "get_device_list"),
        ),
    }

    def __getattr__(name):
        for module, names in _LATER.items():
            if name in names:
                from importlib import import_module

                value = globals()[name] = getattr(import_module(f"rdmafork.{module}"), name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        classes = {"Buffer", "InheritedError", "Registration", "SharedPageWarning"}
        classes |= {"UnprotectedWarning", *(name for names in _LATER.values() for name in names)}
        return sorted({*__all__, *classes, *(name for name in globals() if name[:2] == "__")})
