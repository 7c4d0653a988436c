"""The demo's checks: each measured value, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rdmafork.cli import terminal

Report = dict[str, Any]
MODES = ("lazy", "eager")
FORK_LIMIT = 1.5  # the check: fork() relative to the same without those pages
_PROTECTION = {"mark": "marked", "kernel": "copied by the kernel"}


class Check(NamedTuple):
    name: str
    verdict: str  # "ok", "failed" or "not checked"
    text: str
    seen: str


def checks(report: Report) -> list[Check]:
    """Each check, what was seen in every mode this kernel has, and the verdict."""
    fork, huge, clocks = report["fork"], report["huge_pages"], report["register_close"]
    baseline = fork["baseline"]["child_nbytes"]
    allowed = max(1 << 20, report["size"]["used"] // 100)
    # A mode that failed at fork() has shown nothing.
    modes = {mode: fork[mode] for mode in MODES if "ns" in fork[mode]}
    found = [
        _judge(
            "fork",
            f"fork() within {FORK_LIMIT}x of one without it",
            {mode: _forked(fork[mode]) for mode in MODES},
        ),
        _judge(
            "memory",
            "pinned memory is not copied for the child",
            {
                mode: _uncopied(seen["child_nbytes"], baseline, allowed)
                for mode, seen in modes.items()
            }
            if report["pins_forbidden"] is None
            else {},
        ),
        _judge(
            "to_parent",
            "the device still writes the parent's pages",
            {
                mode: _exchanged(seen["exchange"], "device_to_parent")
                for mode, seen in modes.items()
            },
        ),
        _judge(
            "to_device",
            "the device still reads the parent's pages",
            {
                mode: _exchanged(seen["exchange"], "parent_to_device")
                for mode, seen in modes.items()
            },
        ),
        _judge(
            "marked",
            "all pages are marked",
            {
                mode: (
                    seen["protected_by"] == ["mark"],
                    " and ".join(_PROTECTION.get(by, by) for by in seen["protected_by"]),
                )
                for mode, seen in modes.items()
            },
        ),
        _judge(
            "partial_pages",
            "the child inherits what was not registered",
            {
                mode: (seen["partial_pages"] == "kept", seen["partial_pages"])
                for mode, seen in modes.items()
            },
        ),
        _judge(
            "huge",
            "fork() works with no huge page free",
            {mode: _forked_huge(huge.get(mode)) for mode in MODES},
        ),
    ]
    if "ns" in clocks["lazy"]:
        calls = clocks["lazy"]["system_calls"]
        seen = {"lazy": (calls == 0, f"{calls} in {clocks['lazy']['pairs']}")}
        found.insert(2, _judge("calls", "registering makes no system call", seen))
    return found


Seen = tuple[bool, str] | None  # did it pass, and what was seen; None if nothing was


def _judge(name: str, text: str, seen: Mapping[str, Seen]) -> Check:
    known = {mode: value for mode, value in seen.items() if value is not None}
    kept = all(kept for kept, _ in known.values())
    verdict = "not checked" if not known else "ok" if kept else "failed"
    words = ", ".join(f"{mode} {value}" for mode, (_, value) in known.items())
    return Check(name, verdict, text, words)


def _forked(seen: dict[str, Any]) -> Seen:
    if "unavailable" in seen:
        return None
    if "error" in seen:
        return False, seen["error"]
    return seen["ratio"] <= FORK_LIMIT, terminal.ratio(seen["ratio"], 1)


def _uncopied(own: int | None, baseline: int | None, allowed: int) -> Seen:
    if own is None or baseline is None:
        return None
    return own - baseline <= allowed, terminal.size(own)


def _exchanged(seen: dict[str, int] | None, key: str) -> Seen:
    if seen is None:
        return None
    return seen[key] == seen["pages"], f"{seen[key]}/{seen['pages']}"


def lost_pages(exchange: dict[str, int] | None) -> int:
    """How many pages the device and the parent no longer share."""
    if exchange is None:
        return 0
    return exchange["pages"] - min(exchange["device_to_parent"], exchange["parent_to_device"])


def _forked_huge(seen: dict[str, Any] | None) -> Seen:
    if seen is None:
        return None
    if "error" in seen:
        return False, seen["error"]
    outcome = seen["registered"]
    if "ns" not in outcome:
        return False, outcome["text"]
    if "exchange" not in outcome:  # not pinned: it would have worked anyway
        return None
    if lost := lost_pages(outcome["exchange"]):
        return False, f"{lost} pages lost"
    return True, terminal.duration(outcome["ns"])
