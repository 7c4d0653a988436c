"""The demo's report as one screen of 80 columns, for a reader who knows none of it."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator
from typing import Any

from rdmafork.cli.demo_promises import MODES, lost_pages
from rdmafork.cli.terminal import WIDTH, Paint, milliseconds, nanoseconds, ratio, size

Report = dict[str, Any]


def render(report: Report, paint: Paint) -> str:
    parts = (_head(report), _fork(report), _costs(report), _huge(report), _promises(report, paint))
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
    how = {"netlink": "it says so over RDMA netlink", "version": "known from its version"}
    copies = f"copies pinned pages at fork() ({how[kernel['copy_on_fork_from']]})"
    if kernel["copy_on_fork_trusted"]:
        what = f"This kernel {copies}: safe, but slow."
    elif kernel["copy_on_fork_trusted_from"] == "environment":
        what = (
            f"This kernel {copies}, and RDMAFORK_TRUST_COPYING=0 keeps rdmafork from relying on it."
        )
    elif kernel["copy_on_fork"]:
        what = f"This kernel {copies}, but before 5.19 it can lose one that moves meanwhile."
    else:
        copies = copies.replace("copies", "does not promise to copy")
        what = f"This kernel {copies}: a device may then write where the parent does not read."
    what += (
        f" rdmafork runs {report['default_mode']} here. Lazy: no system call to register, the "
        "fork() that needs one makes it. Eager: at once."
    )
    yield from _wrap(what)
    if report["pins_forbidden"]:
        no_pins = f"NO PINS: {report['pins_forbidden']}. What needs them is not checked."
        yield from _wrap(no_pins)


def _fork(report: Report) -> Iterator[str]:
    fork, used = report["fork"], report["size"]
    pinned = ", not pinned" if report["pins_forbidden"] else " and pinned (by io_uring)"
    yield f"fork() with {size(used['used'])} of private memory registered{pinned}"
    if used["why"]:
        yield from _wrap(f"Not {size(used['asked'])}: {used['why']}.", "  ")
    yield f"  {'':34}{'fork()':>11}{'to the floor':>15}{'copied for child':>18}"
    rows = (
        ("the floor: those pages not mapped", fork["floor"]),
        ("without rdmafork", fork["plain"]),
        ("with rdmafork, lazy", fork["lazy"]),
        ("with rdmafork, eager", fork["eager"]),
    )
    for name, row in rows:
        if "ns" not in row:
            yield f"  {name:34}{_first(row.get('error'), 'not to be had on this kernel'):>44}"
            continue
        against = row.get("against_floor", row["ns"] / fork["floor"]["ns"])
        child = "unknown" if row["child_nbytes"] is None else size(row["child_nbytes"])
        yield f"  {name:34}{milliseconds(row['ns']):>11}{ratio(against, 1):>15}{child:>18}"
        if lost := _lost(row.get("exchange")).strip():
            yield f"    {lost}"


def _costs(report: Report) -> Iterator[str]:
    clocks = report["register_close"]
    ours = {mode: clocks[mode]["ns"] for mode in MODES if "ns" in clocks[mode]}
    any_ns = next(iter(ours.values()))
    yield "register + close of a page; ratios to the first line, timed in the same process"
    yield f"  {'':36}{'from C':>12}{'':8}{'from Python':>12}"
    pair = statistics.median(ns["madvise_pair"] for ns in ours.values())
    yield _cost("madvise(DONTFORK), madvise(DOFORK)", pair, pair)
    for mode, ns in ours.items():
        yield _cost(f"rdmafork, {mode}", ns["madvise_pair"], ns["c"], ns["python"])
    for key, setting in (
        ("libibverbs", ""),
        ("libibverbs_huge_pages_safe", ", RDMAV_HUGEPAGES_SAFE"),
    ):
        peer = clocks[key]
        if "unavailable" in peer:
            yield f"  libibverbs{setting}: {peer['unavailable']}"
            continue
        version = f" {peer['version']}" if peer["version"] else ""
        ns = peer["ns"]
        # Told "unneeded", release 51 and later does nothing; 44 still does its work.
        idle = peer["status"] == 2 and ns["c"] < ns["madvise_pair"] / 4
        name = f"libibverbs{version}{setting}"
        yield _cost(name, ns["madvise_pair"], ns["c"]) + ("  it does nothing" if idle else "")
    yield _cost("a system call that does nothing", any_ns["madvise_pair"], any_ns["null_call"])
    yield _cost("memoryview(b).release()", any_ns["madvise_pair"], None, any_ns["memoryview"])


def _cost(name: str, pair: float, c: float | None, python: float | None = None) -> str:
    cells = [f"  {name:36}"]
    for ns, width in ((c, 12), (python, 12)):
        blank = " " * (width + 8)
        cells.append(blank if ns is None else f"{nanoseconds(ns):>{width}}{ratio(ns, pair):>8}")
    return "".join(cells).rstrip()


def _first(*texts: str | None) -> str:
    return next(text for text in texts if text)


def _wrap(text: str, indent: str = "", width: int = WIDTH) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)


def _huge(report: Report) -> Iterator[str]:
    huge = report["huge_pages"]
    if "skipped" in huge:
        yield "Huge pages: not shown"
        yield from _wrap(huge["skipped"], "  ")
        return
    pinned = "registered" if report["pins_forbidden"] else "pinned"
    pages = f"{huge['pages']} huge pages of {size(huge['page_size'])}"
    yield f"fork() with {pages} {pinned}, and the pool used up"
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
    return f"{milliseconds(outcome['ns']):>11}{_lost(outcome.get('exchange'))}"


def _lost(exchange: dict[str, int] | None) -> str:
    lost = lost_pages(exchange)
    return (
        f"   but {lost} of {exchange['pages']} pages lost to the device"
        if exchange and lost
        else ""
    )


MARKS = {"ok": ("OK", "green"), "failed": ("FAILED", "red"), "not checked": ("-", "yellow")}


def _promises(report: Report, paint: Paint) -> Iterator[str]:
    yield "Promises, with those pages registered"
    for promise in report["promises"]:
        mark, colour = MARKS[promise["verdict"]]
        seen = promise["seen"].strip() or "not checked"
        line = f"{promise['text']:44}{seen}"
        if len(line) > WIDTH - 9:
            line = f"\n{' ' * 9}".join(_wrap(f"{promise['text']}: {seen}", width=WIDTH - 9))
        yield f"  {paint(f'{mark:7}', colour)}{line}"


def _verdict(report: Report, paint: Paint) -> str:
    verdicts = [promise["verdict"] for promise in report["promises"]]
    seconds = f"{report['seconds']:.0f} s"
    if not report["ok"]:
        return paint(f"Promises broken: {verdicts.count('failed')}.", "red") + f" {seconds}"
    unchecked = verdicts.count("not checked")
    tail = f" of those that could be checked; {unchecked} could not" if unchecked else ""
    return paint("All promises kept", "green") + f"{tail}. {seconds}"
