"""Doctor's rows about libibverbs, the devices, and the variables that steer both."""

from __future__ import annotations

import errno
import glob
import os
import sys
from collections.abc import Iterator
from typing import Any

import rdmafork
from rdmafork.cli import doctor_probe
from rdmafork.cli.doctor_rows import Row, ok, problem, skipped, warning
from rdmafork.cli.elf import Elf, NotElf
from rdmafork.cli.terminal import printable

INSTALL = "install libibverbs1 and ibverbs-providers (Debian, Ubuntu) or libibverbs (Fedora, RHEL)"
# A registration calls these: the library that answers is libibverbs' fork support.
RANGES = {"ibv_dontfork_range", "ibv_dofork_range"}


# ---- libibverbs -------------------------------------------------------------------------


def libraries() -> Iterator[Row]:
    try:
        found = doctor_probe.ask("libibverbs")
    except doctor_probe.NotAsked as error:
        yield skipped("libibverbs", str(error.strerror))
    except OSError as error:
        # No matter where there is nothing to use it for.
        tell = problem if _kernel_devices() else warning
        cure = None if error.errno == errno.ECHILD else INSTALL
        yield tell("libibverbs", f"cannot be loaded: {error.strerror}", cure)
    else:
        version = f"rdma-core {found['version']}" if found["version"] else "version unknown"
        yield ok("libibverbs", f"{version}, {found['path']}")
        yield fork_support(found)
        yield interception(found["path"])
    for path in bundled():
        yield interception(path)


def _kernel_devices() -> list[rdmafork.Device]:
    try:
        return rdmafork.get_device_list(all=True)
    except OSError:
        return []


def fork_support(found: dict[str, Any]) -> Row:
    """A row about its own ibv_fork_init(); found: what doctor_probe saw."""
    what = "its ibv_fork_init()"
    info = rdmafork.kernel_info()
    if found["error"]:
        return warning(what, f"fails with {os.strerror(found['error'])}")
    states = {0: "DISABLED", 1: "ENABLED", 2: "UNNEEDED", None: "nothing, because it is too old"}
    status = f"ibv_is_fork_initialized() then says {states.get(found['after'], found['after'])}"
    if found["absent"]:
        text = "marks whole pages with two system calls for each registration"
        return ok(what, f"{text}; children do not inherit them; {status}")
    text = f"does nothing, because this kernel copies pinned pages; {status}"
    if info.copy_on_fork_trusted or info.copy_on_fork_trusted_from == "environment":
        return ok(what, f"{text}: safe, but every fork() copies all pinned memory")
    return warning(
        what,
        f"{text}. Before Linux 5.19 it can still lose a page that migrates during the fork",
        "rdmafork.fork_init(), or rdmafork exec",
    )


def interception(path: str) -> Row:
    """Whether its calls of its own fork support can be answered by another library."""
    what = f"calls in {os.path.basename(path)}"
    try:
        with Elf(path) as library:
            imports = library.imports()
    except (OSError, NotElf) as error:
        return warning(what, f"{path} cannot be read: {error}")
    if imports >= RANGES:
        return ok(what, "interceptable by rdmafork exec")
    return warning(
        what,
        f"bound inside {path} (-Bsymbolic-functions, as in Ubuntu): rdmafork exec has to patch "
        f"two of its functions in memory, or libibverbs' own fork support stays in force",
        "`rdmafork exec --report - -- PROGRAM` says which; registering the memory with rdmafork "
        "too always works",
    )


def bundled() -> list[str]:
    """Copies that wheels have brought along, under names of their own."""
    found = set()
    for directory in sys.path:
        found |= set(glob.glob(f"{glob.escape(directory)}/*.libs/libibverbs*.so*"))
    return sorted(found)


# ---- devices ----------------------------------------------------------------------------


def devices() -> Iterator[Row]:
    try:
        found = rdmafork.get_device_list(all=True)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        yield warning(
            "RDMA",
            f"{error.strerror}",
            "modprobe ib_uverbs and the driver of the device; without hardware modprobe rdma_rxe",
        )
        return
    if not found:
        yield warning(
            "RDMA",
            "the kernel supports RDMA, but has no device",
            "modprobe the driver of the device; without hardware: rdma link add rxe0 type rxe "
            "netdev eth0; in a container: --device=/dev/infiniband and its host's network",
        )
    for device in found:
        yield device_row(device)


def device_row(device: rdmafork.Device) -> Row:
    what = printable(device.name)
    if device.problem is not None:
        return problem(what, f"cannot be used: {device.problem}")
    try:
        states = [(port.number, port.state.name) for port in device.ports]
    except OSError as error:
        return warning(what, f"usable, but its ports cannot be read: {error.strerror}")
    text = ", ".join(f"port {number} {state}" for number, state in states) or "no ports"
    if any(state == "ACTIVE" for _, state in states):
        return ok(what, f"usable, {text}")
    cure = "check the cable, ip link set NETDEV up, or on InfiniBand the subnet manager"
    return warning(what, f"usable, but {text}", cure)


# ---- variables --------------------------------------------------------------------------


def variables() -> Iterator[Row]:
    rows = [row for check in (fork_safe, huge_pages_safe, engine, preload) for row in check()]
    yield from rows or [ok("variables", "none is set that affects RDMA or fork()")]


def fork_safe() -> Iterator[Row]:
    for name in ("RDMAV_FORK_SAFE", "IBV_FORK_SAFE"):
        value = os.environ.get(name)
        if value is None:
            continue
        what = f"{name}={value}"
        if value == "0":
            yield warning(
                what,
                "switches protection on in rdmafork and in libibverbs before rdma-core 40; later "
                "libibverbs and librdmacm ignore it",
                f"unset {name} for no protection, {name}=1 for protection",
            )
        elif rdmafork.kernel_info().copy_on_fork_trusted:
            yield warning(
                what,
                "not needed on this kernel: libibverbs ignores it since rdma-core 51; before, "
                "it makes registering slow; libfabric's EFA stops using huge pages, or aborts",
                f"unset {name}; rdmafork.fork_init() and rdmafork exec need no variable",
            )
        else:
            yield ok(what, "switches protection on in libibverbs and rdmafork")


def huge_pages_safe() -> Iterator[Row]:
    name = "RDMAV_HUGEPAGES_SAFE"
    value = os.environ.get(name)
    if value is not None:
        yield warning(
            f"{name}={value}",
            "libibverbs reads all of /proc/self/smaps at every registration, which takes 0.2 ms "
            "or more; any value switches that on, even 0 or an empty one",
            f"unset {name}: rdmafork always handles huge pages, without that cost",
        )


def engine() -> Iterator[Row]:
    allowed = {
        "RDMAFORK_MODE": ("", "auto", "lazy", "eager"),
        "RDMAFORK_TRUST_COPYING": ("", "0", "1"),
        "RDMAFORK_EXPLAIN_FAULTS": ("", "0", "1"),
        "RDMAFORK_TRACE_REGISTRATIONS": ("", "0", "1"),
    }
    for name, values in allowed.items():
        value = os.environ.get(name)
        if value is None:
            continue
        if value in values:
            yield ok(f"{name}={value}", "set")
        else:
            yield problem(
                f"{name}={value}",
                "not a valid value: fork_init() fails with EINVAL",
                f"{name}={' or '.join(filter(None, values))}, or unset it",
            )


def preload() -> Iterator[Row]:
    value = os.environ.get("LD_PRELOAD", "")
    for path in value.replace(":", " ").split():
        if os.path.basename(path) != "librdmafork.so":
            continue
        if os.path.realpath(path) == os.path.realpath(rdmafork.get_library()):
            yield ok("LD_PRELOAD", "has librdmafork.so: programs started from here load it")
        else:
            yield problem(
                "LD_PRELOAD",
                f"has {path}, but this installation's is {rdmafork.get_library()}: a process "
                f"can load only one",
                "unset LD_PRELOAD, or start the program with that installation's rdmafork exec",
            )
