"""Reading the lines that the engine writes at the exit of a process, and finding outliers in them.

One JSON object a line. Where a number has parts it is an object: {"total": 12, "live": 3}.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from rdmafork.cli import terminal
from rdmafork.cli.elf import Elf

FAR = 3  # times the median is far from the rest


class Broken(NamedTuple):
    file: str
    line: int | None
    why: str


class Process(NamedTuple):
    """One line: what a process did."""

    host: str
    pid: int
    ppid: int  #: as it began
    exec_pid: int  #: the process that rdmafork exec became; 0 where that is not known
    forked: bool  #: and has called no exec() since
    rank: int | None
    program: str
    mode: str
    registrations: int  #: made, ever
    forks: int
    handler_ns: int  #: in fork handlers, all together
    handler_max_ns: int
    marked_bytes: int  #: not inherited by children, so not copied
    unmarked_bytes: int  #: copied by the kernel, registered here or not
    unbalanced: int  #: releases of what was not registered
    callers: tuple[tuple[str, int], ...]  #: who forked, how often
    troubles: tuple[str, ...]
    line: dict[str, Any]  #: all of it


def read(name: str) -> Iterator[Process | Broken]:
    """Every line of a file, "-" for stdin. OSError: it cannot be read."""
    if name == "-":
        yield from _lines("stdin", sys.stdin.buffer)
        return
    with open(name, "rb") as file:
        yield from _lines(name, file)


def _lines(name: str, file: Iterable[bytes]) -> Iterator[Process | Broken]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            yield _process(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            yield Broken(name, number, _why(error))


def _why(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error.args[0]!r} is missing"
    if isinstance(error, ValueError | RecursionError):
        return "not valid JSON"
    return "not a report of rdmafork exec"


def _process(line: dict[str, Any]) -> Process:
    line["rdmafork"]  # says that it is one
    forks = _part(line, "forks", "total")
    rank = line.get("rank")
    return Process(
        host=str(line["host"]),
        pid=_number(line["pid"]),
        ppid=_part(line, "ppid", "pid"),
        exec_pid=_number(line.get("exec_pid") or 0),
        forked=bool(line.get("forked")),
        rank=None if rank is None else _number(rank),
        program=os.path.basename(str(line.get("program") or "?")),
        mode=str(line.get("mode")),
        registrations=_part(line, "registrations", "total"),
        forks=forks,
        handler_ns=_part(line, "handler_ns", "total"),
        handler_max_ns=_part(line, "handler_ns", "max"),
        marked_bytes=_part(line, "marked_bytes", "total"),
        unmarked_bytes=_part(line, "unmarked_bytes", "total") + _pinned_elsewhere(line),
        unbalanced=_part(line, "unbalanced", "total"),
        callers=tuple(_callers(line.get("fork_callers") or (), forks)),
        troubles=tuple(_troubles(line)),
        line=line,
    )


def _callers(found: Iterable[dict[str, Any]], forks: int) -> Iterator[tuple[str, int]]:
    counts = [(_caller(each), _number(each["count"])) for each in found]
    yield from counts
    others = forks - sum(count for _, count in counts)
    if counts and others > 0:
        yield "other places: a process tells its first 64", others


def _caller(found: dict[str, Any]) -> str:
    """Its place alone where the file has been stripped of names, or is not here."""
    symbol, path, offset = found["symbol"], found["object"], found.get("offset")
    where = os.path.basename(path or "unknown code")
    if not symbol and path and offset is not None:
        symbol = _function_at(path, found.get("build_id"), _number(offset))
        where = where if symbol else f"{where}+{offset:#x}"
    return f"{symbol} in {where}" if symbol else where


def _read_function(path: str, build_id: str | None, address: int) -> str | None:
    """A function that others may not call is not known to the process, only to its file."""
    with contextlib.suppress(OSError, ValueError):
        # Any user may have made the file: opening a named pipe would wait.
        if os.path.isfile(path):
            with Elf(path) as elf:
                return elf.function_at(address) if elf.build_id == build_id else None
    return None


_function_at = functools.cache(_read_function)  # many processes are one program


def _number(value: Any) -> int:
    """An int of 64 bits; the rank is a string, the value of the launcher's variable."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 64:
        raise TypeError
    return value


def _part(line: dict[str, Any], name: str, part: str) -> int:
    value = line.get(name, 0)
    return _number(value.get(part, 0) if isinstance(value, dict) else value)


def _pinned_elsewhere(line: dict[str, Any]) -> int:
    """Bytes pinned without a call that arrived; 0 beside a library that protects its own."""
    protects = any(library.get("protects") for library in line.get("libraries") or ())
    return 0 if protects else _part(line, "pinned_elsewhere", "max")


def _troubles(line: dict[str, Any]) -> Iterator[str]:
    """The troubles of a process, in sentences."""
    for error in line.get("errors") or ():
        yield str(error)
    refused = [library for library in line.get("libraries") or () if library["how"] == "refused"]
    for library in refused:
        yield f"{library['path']} is not intercepted: {library.get('why') or 'no reason given'}"
    if _part(line, "unbalanced", "total"):
        yield "memory was released more often than it was registered"
    if nbytes := _pinned_elsewhere(line):
        kernel = line.get("kernel") or {}
        does = "copies" if kernel.get("copy_trusted") else "may lose"
        by = "something that does not call libibverbs"
        if refused:
            by = f"a libibverbs that is not intercepted, or by {by}"
        pinned = f"at least {terminal.size(nbytes)} pinned by {by}"
        yield f"{pinned}; fork() {does} the private part of it"
    if unread := _part(line, "pinned_elsewhere", "unread"):
        looks = f"{terminal.counted(unread, 'time')}, at forks or at the exit"
        yield (
            f"/proc could not be read, {looks}, so the report cannot say how much was pinned then; "
            "forked children may keep the parent's queues and its /dev/infiniband/rdma_cm"
        )
    if _part(line, "device_without_libibverbs", "total"):
        yield "a device was open and no libibverbs was found: what it registered is not protected"


# ---- outliers ---------------------------------------------------------------------------


_COMPARED = ("unmarked_bytes", "handler_max_ns", "forks", "registrations")


def outliers_first(processes: list[Process]) -> list[Process]:
    """First processes with troubles, then those far from the median, then others by rank."""
    far = {id(process): len(found) for process, found in far_from_the_rest(processes)}
    return sorted(
        processes,
        key=lambda process: (
            -len(process.troubles),
            -far.get(id(process), 0),
            process.rank is None,
            process.rank or 0,
            process.host,
            process.pid,
        ),
    )


def far_from_the_rest(processes: list[Process]) -> Iterator[tuple[Process, list[str]]]:
    """Each process with values of more than FAR times the median, and the names of these values."""
    medians = {
        name: statistics.median(getattr(process, name) for process in processes)
        for name in _COMPARED
        if processes
    }
    for process in processes:
        found = [
            name
            for name, median in medians.items()
            if getattr(process, name) > FAR * max(median, 1)
        ]
        if found:
            yield process, found


def fork_callers(processes: Iterable[Process]) -> list[tuple[str, int]]:
    """The callers of fork() in all of them, the most frequent first."""
    counts: Counter[str] = Counter()
    for process in processes:
        for caller, count in process.callers:
            counts[caller] += count
    return counts.most_common()


def troubles(processes: Iterable[Process]) -> list[tuple[str, list[Process]]]:
    """Each trouble once, with the processes that have it, the most common first."""
    found: dict[str, list[Process]] = {}
    for process in processes:
        for text in process.troubles:
            found.setdefault(text, []).append(process)
    return sorted(found.items(), key=lambda item: -len(item[1]))


# ---- missing reports --------------------------------------------------------------------


class _Family(NamedTuple):
    pid: int
    lines: list[Process]  #: of that pid; none, or several where it was used again
    children: list[Process]

    @property
    def forks(self) -> int:
        return sum(process.forks for process in self.lines)

    @property
    def forked(self) -> int:
        return sum(child.forked for child in self.children)

    @property
    def missing(self) -> int:
        """Forks without a child's line; at least so many, as children are not only forked."""
        return max(0, self.forks - len(self.children))

    @property
    def had_another_program(self) -> bool:
        """Without an engine, or as it ended inside the engine, its forks were not counted."""
        counted = all(p.mode != "None" and not p.line.get("errors") for p in self.lines)
        return bool(self.lines) and counted and self.forked > self.forks


def notes(processes: Iterable[Process]) -> Iterator[str]:
    """Reports that are missing, as far as the others tell. That is no trouble of the programs."""
    families = _families(processes)
    if silent := [family for family in families if not family.lines]:
        children = sum(len(family.children) for family in silent)
        wrote = "wrote no report, and" if len(silent) == 1 else "wrote no reports, and"
        yield f"{_who(silent)} {wrote} {_children(children)} did; {WHY}"
    if missing := [family for family in families if family.missing]:
        count, forks = (sum(getattr(f, n) for f in missing) for n in ("missing", "forks"))
        least = "at least " if any(f.forked < len(f.children) for f in missing) else ""
        yield (
            f"{_who(missing)} forked {terminal.counted(forks, 'time')}; {least}"
            f"{_children(count)} wrote no report: {WHY}"
        )
    if earlier := [family for family in families if family.had_another_program]:
        yield (
            f"{_who(earlier)} forked less often than forked children wrote reports: exec() has "
            "replaced the program that forked them, which wrote none, or clone() made them"
        )


WHY = "exec(), _exit() or a signal ends a program without one, and others may still run"


def _families(processes: Iterable[Process]) -> list[_Family]:
    found: dict[tuple[str, int], _Family] = {}
    for process in processes:
        key = (process.host, process.pid)
        found.setdefault(key, _Family(process.pid, [], [])).lines.append(process)
    for process in list(itertools.chain.from_iterable(f.lines for f in found.values())):
        key = (process.host, process.ppid)
        # The parent of the process that exec became is a shell or a launcher, and init has
        # taken over those without a parent.
        if key in found or (process.ppid > 1 and process.exec_pid not in (0, process.pid)):
            found.setdefault(key, _Family(process.ppid, [], [])).children.append(process)
    return list(found.values())


def _who(families: list[_Family]) -> str:
    pids = ", ".join(str(family.pid) for family in families[:5])
    more = f" and {len(families) - 5:,} more" if len(families) > 5 else ""
    return f"process {pids}{more}" if len(families) == 1 else f"processes {pids}{more}"


def _children(count: int) -> str:
    return "1 child" if count == 1 else f"{count:,} children"
