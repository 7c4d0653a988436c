"""What the machine is: in every result, as no figure means much without it."""

import os
import platform
from pathlib import Path

import rdmafork


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def facts() -> dict[str, object]:
    cpu = [line for line in (_read("/proc/cpuinfo") or "").splitlines() if "model name" in line]
    return {
        "rdmafork": rdmafork.__version__,
        "kernel": rdmafork.kernel_info()._asdict(),
        "cpu": cpu[0].split(":", 1)[1].strip() if cpu else platform.machine(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
        "thp": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "python": platform.python_version(),
    }
