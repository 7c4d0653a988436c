"""Doctor's rows about the kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator

import rdmafork
from rdmafork import _pins
from rdmafork.cli import doctor_probe
from rdmafork.cli.doctor_rows import Row, ok, problem, skipped, warning


def kernel() -> Iterator[Row]:
    yield copying()
    yield engine()
    yield proc()
    yield page_sizes()
    yield pins()


def copying() -> Row:
    info = rdmafork.kernel_info()
    known = {"netlink": "as it says over RDMA netlink", "version": "known from its version"}
    how = f"Linux {info.release}, {known[info.copy_on_fork_from]}"
    what = "pinned pages at fork()"
    if info.copy_on_fork_trusted_from == "environment":
        text = "the kernel copies them; RDMAFORK_TRUST_COPYING=0 tells rdmafork not to rely on it"
        return ok(what, f"{text} ({how})")
    if info.copy_on_fork_trusted_from == "probe" and info.copy_on_fork_trusted:
        how += "; it treats pages as Linux 5.19 does"
    if info.copy_on_fork_trusted:
        return ok(what, f"the kernel copies them: safe, but slow ({how})")
    cure = "call rdmafork.fork_init() first, or start programs with rdmafork exec"
    if info.copy_on_fork:
        text = (
            "the kernel copies them, but before 5.19 it can lose one that migrates during the "
            f"fork ({how})"
        )
        return warning(what, text, cure)
    text = f"the kernel does not copy them, so a program that forks can lose data ({how})"
    return warning(what, text, cure)


def engine() -> Row:
    """Not here: it would stay."""
    what = "rdmafork"
    try:
        found = doctor_probe.ask("engine")
    except doctor_probe.NotAsked as error:
        return skipped(what, str(error.strerror))
    except OSError as error:
        return problem(what, f"cannot start: {error.strerror}")
    if not found["absent"]:
        text = f"mode {found['mode']}; a registered page is copied by the kernel"
        return problem(what, f"{text} ({found['protected_by']}), so fork() is slow")
    return ok(what, f"mode {found['mode']}; tested: a child did not inherit a registered page")


def proc() -> Row:
    what = "/proc"
    for name in ("maps", "smaps"):
        try:
            with open(f"/proc/self/{name}", "rb") as file:
                file.read(1)
        except OSError as error:
            return problem(
                what,
                f"/proc/self/{name} cannot be read ({error.strerror}): the kernel copies newly "
                f"registered pages at fork()",
                "mount -t proc proc /proc; in a container, do not hide it",
            )
    return ok(what, "the maps of this process can be read")


def page_sizes() -> Row:
    what = "PROCMAP_QUERY"
    if not os.path.exists("/proc/self"):
        return skipped(what, "unknown without /proc")
    if rdmafork.kernel_info().procmap_query:
        return ok(what, "available: rdmafork looks up a mapping in 0.5 us")
    return ok(what, "not available before Linux 6.11: rdmafork reads /proc/self/smaps where needed")


def pins() -> Row:
    what = "io_uring"
    reason = _pins.unavailable()
    if reason is None:
        return ok(what, "can pin pages without a device: the demo and the benchmarks work")
    text = f"{reason}: the demo and the benchmarks cannot pin pages; RDMA is not affected"
    return warning(what, text)
