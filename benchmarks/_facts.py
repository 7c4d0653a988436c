"""Facts about the machine: in every result, as no figure means much without them."""

import mmap
import os
import platform
from pathlib import Path
from typing import Any

import rdmafork
from rdmafork import _clocks
from rdmafork.cli import terminal

MITIGATIONS = Path("/sys/devices/system/cpu/vulnerabilities")
GOVERNOR = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"


def _read(path: str | Path) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _cpu() -> str:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _mitigations() -> dict[str, str]:
    """Mitigations of this CPU's vulnerabilities: they are most of a system call's price."""
    if not MITIGATIONS.is_dir():
        return {}
    states = {path.name: _read(path) or "" for path in sorted(MITIGATIONS.iterdir())}
    return {name: state for name, state in states.items() if state != "Not affected"}


def _libibverbs() -> dict[str, Any] | None:
    try:
        peer = _clocks.Libibverbs()
    except OSError:
        return None
    return {"path": peer.path, "rdma_core": peer.version}


def _compiler() -> str | None:
    """The names that GCC and clang leave in the section .comment."""
    library = Path(rdmafork.get_library()).read_bytes()
    start = library.rfind(b"GCC: (")
    return library[start : library.index(b"\0", start)].decode() if start >= 0 else None


def facts() -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE,
        "mitigations": _mitigations(),
        "governor": _read(GOVERNOR),
        "load": os.getloadavg(),
        "thp": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "kernel": rdmafork.kernel_info()._asdict(),
        "libibverbs": _libibverbs(),
        "compiler": _compiler(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
    }


def in_words(machine: dict[str, Any]) -> str:
    """The machine in a line, for the foot of a table or a figure."""
    libibverbs = machine["libibverbs"] and f"libibverbs {machine['libibverbs']['rdma_core']}"
    parts = [
        f"{terminal.counted(machine['cpus'], 'CPU')} {machine['cpu']}",
        f"{machine['memory_bytes'] / (1 << 30):.0f} GiB",
        f"Linux {machine['kernel']['release']}",
        libibverbs or "no libibverbs",
        f"Python {machine['python']}",
    ]
    return ", ".join(parts)
