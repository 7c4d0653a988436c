"""The demo's report as one screen of 80 columns, for a reader who knows none of it."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator
from typing import Any

from rdmafork.cli.demo_checks import MODES, lost_pages
from rdmafork.cli.terminal import WIDTH, Paint, counted, duration, durations, ratio, size

Report = dict[str, Any]


def render(report: Report, paint: Paint) -> str:
    parts = (_head(report), _fork(report), _costs(report), _huge(report), _checks(report, paint))
    blocks = []
    for part in parts:
        title, *lines = part
        blocks.append("\n".join([paint(title, "bold"), *lines]))
    return "\n\n".join([*blocks, _verdict(report, paint)])


def _head(report: Report) -> Iterator[str]:
    machine, kernel = report["machine"], report["kernel"]
    yield f"rdmafork {report['rdmafork']} on Linux {machine['kernel']}"
    cpu = f"{machine['cpus']} x {machine['cpu_model'] or machine['architecture']}"
    yield f"{cpu}, {size(machine['memory_nbytes'])}, Python {machine['python']}"
    how = {"netlink": "as it says over RDMA netlink", "version": "known from its version"}
    copies = f"copies pinned pages at fork() ({how[kernel['copy_on_fork_from']]})"
    if kernel["copy_on_fork_trusted"]:
        what = f"This kernel {copies}: safe, but slow."
    elif kernel["copy_on_fork_trusted_from"] == "environment":
        what = f"This kernel {copies}; RDMAFORK_TRUST_COPYING=0 tells rdmafork not to rely on it."
    elif kernel["copy_on_fork"]:
        what = (
            f"This kernel {copies}, but before 5.19 it can lose one that migrates during the fork."
        )
    else:
        copies = copies.replace("copies", "does not reliably copy")
        what = f"This kernel {copies}: a device can then write to pages the parent no longer has."
    what += (
        f" rdmafork's default mode is {report['default_mode']} here. Lazy marks pages as a fork() "
        "begins, so registering makes no system call. Eager marks them when they are registered."
    )
    yield from _wrap(what)
    if report["pins_forbidden"]:
        why = report["pins_forbidden"]
        no_pins = f"Nothing can be pinned: {why}. Checks that need pinned pages are skipped."
        yield from _wrap(no_pins)


def _fork(report: Report) -> Iterator[str]:
    fork, used = report["fork"], report["size"]
    pinned = ", not pinned" if report["pins_forbidden"] else " and pinned (by io_uring)"
    yield f"fork() with {size(used['used'])} of private memory registered{pinned}"
    if used["why"]:
        yield from _wrap(f"Not {size(used['asked'])}: {used['why']}.", "  ")
    yield f"  {'':23}{'fork()':>10}{'baseline':>20}{'ratio':>8}{'copied for child':>17}"
    rows = {
        "baseline: no memory": fork["baseline"],
        "without rdmafork": fork["plain"],
        "with rdmafork, lazy": fork["lazy"],
        "with rdmafork, eager": fork["eager"],
    }
    baseline = fork["baseline"]["ns"]
    measured = [row for row in rows.values() if "ns" in row]
    shown = durations([baseline, *(row["ns"] for row in measured)])
    for name, row in rows.items():
        if "ns" not in row:
            yield f"  {name:23}{row.get('error') or 'not available on this kernel':>55}"
            continue
        # A mode's forks took turns with such without the memory.
        paired = row.get("baseline_ns", baseline)
        cells = [f"{shown(paired):>20}{ratio(row['ns'], paired):>8}", f"{'-':>20}{'-':>8}"]
        child = "unknown" if row["child_nbytes"] is None else size(row["child_nbytes"])
        yield f"  {name:23}{shown(row['ns']):>10}{cells[row is fork['baseline']]}{child:>17}"
        if lost := _lost(row.get("exchange")).strip():
            yield f"    {lost}"


def _costs(report: Report) -> Iterator[str]:
    clocks = report["register_close"]
    ours = {mode: clocks[mode]["ns"] for mode in MODES if "ns" in clocks[mode]}
    any_ns = next(iter(ours.values()))
    pair = statistics.median(ns["madvise_pair"] for ns in ours.values())
    lines: list[tuple[str, float | None, float | None, str]] = [
        ("madvise(DONTFORK), madvise(DOFORK)", pair, None, "")
    ]
    for mode, ns in ours.items():
        lines.append((f"rdmafork, {mode}", ns["c"], ns["python"], ""))
    missing = []
    for key, setting in (
        ("libibverbs", ""),
        ("libibverbs_huge_pages_safe", ", RDMAV_HUGEPAGES_SAFE"),
    ):
        peer = clocks[key]
        if "unavailable" in peer:
            missing.append(f"  libibverbs{setting}: {peer['unavailable']}")
            continue
        version = f" {peer['version']}" if peer["version"] else ""
        ns = peer["ns"]
        # Told "unneeded", release 51 and later does nothing; 44 still does its work.
        idle = peer["status"] == 2 and ns["c"] < ns["madvise_pair"] / 4
        name = f"libibverbs{version}{setting}"
        lines.append((name, ns["c"], None, "  it does nothing" if idle else ""))
    lines.append(("a system call that does nothing", any_ns["null_call"], None, ""))
    lines.append(("memoryview(b).release()", None, any_ns["memoryview"], ""))
    yield "register + close of a page; ratios are relative to the first line"
    yield f"  {'':36}{'from C':>12}{'':8}{'from Python':>12}"
    shown = durations([ns for _, *both, _ in lines for ns in both if isinstance(ns, float)])
    for name, c, python, remark in lines:
        cells = (
            " " * 20 if ns is None else f"{shown(ns):>12}{ratio(ns, pair):>8}" for ns in (c, python)
        )
        yield f"  {name:36}{''.join(cells)}".rstrip() + remark
    yield from missing


def _wrap(text: str, indent: str = "", width: int = WIDTH) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)


def _huge(report: Report) -> Iterator[str]:
    huge = report["huge_pages"]
    if "skipped" in huge:
        yield "fork() with huge pages: not measured"
        yield from _wrap(huge["skipped"], "  ")
        return
    pinned = "registered" if report["pins_forbidden"] else "pinned"
    pages = f"{huge['pages']} huge pages of {size(huge['page_size'])}"
    yield f"fork() with {pages} {pinned}, and no other huge page free"
    modes = [mode for mode in MODES if mode in huge]
    plain = next((huge[mode]["plain"] for mode in modes if "plain" in huge[mode]), None)
    if plain:
        yield f"  {'without rdmafork':34}{_outcome(plain)}"
    for mode in modes:
        outcome = huge[mode].get("registered", {"text": huge[mode].get("error")})
        yield f"  {'with rdmafork, ' + mode:34}{_outcome(outcome)}"


def _outcome(outcome: dict[str, Any]) -> str:
    if "ns" not in outcome:
        return f"   fails: {outcome['text']}"
    return f"{duration(outcome['ns']):>11}{_lost(outcome.get('exchange'))}"


def _lost(exchange: dict[str, int] | None) -> str:
    lost = lost_pages(exchange)
    return (
        f"   but the device lost {lost} of {exchange['pages']} pages" if exchange and lost else ""
    )


MARKS = {"ok": ("OK", "green"), "failed": ("FAILED", "red"), "not checked": ("-", "yellow")}


def _checks(report: Report, paint: Paint) -> Iterator[str]:
    yield "Checks, with this memory registered with rdmafork"
    for check in report["checks"]:
        mark, colour = MARKS[check["verdict"]]
        seen = check["seen"].strip() or "not checked"
        line = f"{check['text']:44}{seen}"
        if len(line) > WIDTH - 9:
            line = f"\n{' ' * 9}".join(_wrap(f"{check['text']}: {seen}", width=WIDTH - 9))
        yield f"  {paint(f'{mark:7}', colour)}{line}"


def _verdict(report: Report, paint: Paint) -> str:
    verdicts = [check["verdict"] for check in report["checks"]]
    seconds = f"{report['seconds']:.0f} s"
    if not report["ok"]:
        failed = counted(verdicts.count("failed"), "check")
        return paint(f"{failed} failed.", "red") + f" {seconds}"
    unchecked = verdicts.count("not checked")
    tail = f"; {counted(unchecked, 'check')} could not run" if unchecked else ""
    return paint("All checks passed", "green") + f"{tail}. {seconds}"
