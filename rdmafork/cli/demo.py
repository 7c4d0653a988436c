"""rdmafork demo: what fork() does to pinned memory here, without and with rdmafork."""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import rdmafork
from rdmafork import _huge_pages, _pins
from rdmafork.cli import demo_screen, machine, terminal
from rdmafork.cli.demo_checks import FORK_LIMIT, MODES, checks

DESCRIPTION = """\
Shows on one screen what rdmafork does on this machine. It needs no RDMA
hardware.

It registers private memory and pins it with io_uring, which pins pages as an
RDMA memory region does. Then it forks, without rdmafork and in both modes of
rdmafork. It measures how long fork() takes, how much memory is copied for the
child and what a registration costs, and checks that a device still reads and
writes the parent's pages.
"""

EPILOG = """\
It needs about 2.2 times SIZE of memory, because the kernel copies all of it
once; with less memory it uses a smaller size. The part about huge pages needs
some that are reserved and free. As root, if none are reserved, it reserves
8 and releases them at the end.

Exit status: 0 all checks passed, 1 a check failed, 2 wrong usage, or it could
not measure.
"""

PAIRS = 1000  # registrations during which system calls are counted
HUGE_PAGES_SAFE = "libibverbs_huge_pages_safe"
HUGE_POOL = 8  # pages to reserve where there are none
NEEDED = 2.2  # memory for the pages, the child's copy of them, and the rest
POOL = "/proc/sys/vm/nr_hugepages"
LEAST = 1 << 20  # bytes: less disappears in the cost of any fork()

Report = dict[str, Any]


def _size(text: str) -> int:
    try:
        nbytes = terminal.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if nbytes < LEAST:
        least = terminal.size(LEAST)
        raise argparse.ArgumentTypeError(f"{text!r} is too little: the demo needs {least} or more")
    return nbytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--size",
        type=_size,
        help="how much memory to register and pin, 1MiB or more (default: 1GiB; "
        "with --quick 128MiB)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="less memory and fewer rounds: a few seconds"
    )
    parser.add_argument("--json", action="store_true", help="print all measurements as JSON")
    terminal.add_color(parser)


def run(args: argparse.Namespace) -> int:
    progress = terminal.Progress()
    try:
        report = measure(args.size or (128 << 20 if args.quick else 1 << 30), args.quick, progress)
    except (OSError, WorkerDied) as error:
        progress()
        print(f"rdmafork demo: {_text(error)}", file=sys.stderr)
        return 2
    finally:
        progress()
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print(demo_screen.render(report, terminal.Paint(sys.stdout, args.color)))
    return 0 if report["ok"] else 1


# --- Workers: see demo_worker.py -----------------------------------------------------


class WorkerDied(Exception):
    """A worker ended before it answered; code is its exit status, negative for a signal."""

    def __init__(self, code: int, doing: str) -> None:
        self.code = code
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        if code == -signal.SIGKILL:
            how += ", out of memory? (see --size)"
        super().__init__(f"the process died at {doing!r}: {how}")


class Worker:
    """A fresh interpreter that does as it is asked: worker.ask("fork", rounds=3)."""

    # The caller's sys.path, as multiprocessing does: modules of the directory do not come first.
    _CODE = (
        "import sys; sys.path[:] = sys.argv[1:]; from rdmafork.cli.demo_worker import main; main()"
    )

    def __init__(self, **environment: str) -> None:
        # The worker's settings are compared: the caller's must not mix in.
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RDMAV_", "IBV_", "RDMAFORK_"))
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", self._CODE, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=inherited | environment,
            text=True,
            # Ctrl-C is for this process, which ends its workers: they may still be starting.
            start_new_session=True,
        )

    def ask(self, do: str, **arguments: Any) -> Any:
        """Raises the worker's failure as OSError, and WorkerDied."""
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"do": do} | arguments), file=self._process.stdin, flush=True)
        reply = self._process.stdout.readline()
        if not reply:
            raise WorkerDied(self._process.wait(), do)
        answer = json.loads(reply)
        if "error" in answer:
            raise OSError(*answer["error"])
        return answer["result"]

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.__exit__(None, None, None)


# --- Measuring -----------------------------------------------------------------------


def choose_size(asked: int, available: int) -> tuple[int, str | None]:
    """The size that memory allows, in whole MiB, and why it is not what was asked."""
    if asked * NEEDED <= available:
        return asked, None
    why = f"{terminal.size(available)} of memory is available, and {NEEDED} times SIZE is needed"
    return max(int(available / NEEDED) >> 20, 1) << 20, why


def measure(asked: int, quick: bool, progress: terminal.Progress) -> Report:
    start = time.monotonic()
    progress("looking at this machine ...")
    facts = machine.facts()
    size, why = choose_size(asked, facts["memory_available_nbytes"])
    report: Report = {
        "rdmafork": rdmafork.__version__,
        "machine": facts,
        "kernel": rdmafork.kernel_info()._asdict(),
        "size": {"asked": asked, "used": size, "why": why},
        "pins_forbidden": _pins.unavailable(),
    }
    with Worker() as worker:
        report["default_mode"] = worker.ask("init", mode="auto")
    progress("timing registrations ...")
    report["register_close"] = clocks = _time_registrations(8 if quick else 20)
    report["fork"] = fork = {}
    baseline_ns: list[int] = []
    with Worker() as baseline:
        for mode in MODES:
            if "unavailable" in clocks[mode]:
                fork[mode] = clocks[mode]
                continue
            with Worker() as worker:
                worker.ask("init", mode=mode)
                fork[mode] = _measure_mode(
                    report, mode, worker, baseline, 100 if quick else 200, progress
                )
                baseline_ns += fork[mode].pop("baseline_each_ns")
                if mode == report["default_mode"]:
                    progress("forking without rdmafork, which can take seconds ...")
                    fork["plain"] = _plain_forks(worker, report["pins_forbidden"] is None)
        fork["baseline"] = _summary(baseline_ns) | {
            "child_nbytes": baseline.ask("child_memory", registered=False)
        }
    progress("forking with the huge pages used up ...")
    report["huge_pages"] = _measure_huge(report)
    report["checks"] = [check._asdict() for check in checks(report)]
    report["ok"] = all(check["verdict"] != "failed" for check in report["checks"])
    report["seconds"] = round(time.monotonic() - start, 1)
    return report


def _summary(seen: list[int]) -> dict[str, Any]:
    return {"ns": statistics.median(seen), "ns_min": min(seen), "forks": len(seen)}


def _time_registrations(rounds: int) -> dict[str, dict[str, Any]]:
    """The clocks of each mode and of libibverbs, by turns, each with the pair of its process."""
    result: dict[str, dict[str, Any]] = {}
    seen: dict[str, list[dict[str, float]]] = {}
    with contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(Worker()) for name in (*MODES, "libibverbs")}
        workers[HUGE_PAGES_SAFE] = stack.enter_context(Worker(RDMAV_HUGEPAGES_SAFE="1"))
        for name, worker in workers.items():
            try:
                if name in MODES:
                    result[name] = {"mode": worker.ask("init", mode=name)}
                else:
                    result[name] = worker.ask("libibverbs")
                seen[name] = []
            except OSError as error:
                result[name] = {"unavailable": error.strerror}
        for _ in range(rounds):
            for name, turns in seen.items():
                turns.append(workers[name].ask("clocks"))
        for name, turns in seen.items():
            ns = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
            result[name]["ns"] = ns
            if name in MODES:
                result[name]["pairs"] = PAIRS
                result[name]["system_calls"] = workers[name].ask("system_calls", pairs=PAIRS)
    return result


def _measure_mode(
    report: Report,
    mode: str,
    worker: Worker,
    baseline: Worker,
    rounds: int,
    progress: terminal.Progress,
) -> dict[str, Any]:
    progress(f"{mode}: mapping, touching and pinning {terminal.size(report['size']['used'])} ...")
    _hold(report, worker)
    pin = report["pins_forbidden"] is None
    progress(f"{mode}: forking ...")
    base: list[int] = baseline.ask("fork", registered=False)
    try:
        own = _interleaved_forks(baseline, worker, rounds, base)
        return _summary(own) | {
            "baseline_each_ns": base,
            "baseline_ns": statistics.median(base),
            "ratio": statistics.median(own) / statistics.median(base),
            "child_nbytes": worker.ask("child_memory", registered=True),
            "protected_by": worker.ask("protection"),
            "exchange": worker.ask("exchange", registered=True) if pin else None,
            "partial_pages": worker.ask("partial_pages"),
        }
    except (OSError, WorkerDied) as error:
        return {"baseline_each_ns": base, "error": _text(error)}


def _hold(report: Report, worker: Worker) -> None:
    """Take the memory, and less, noted in the report, if RLIMIT_MEMLOCK wants it so."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    size = report["size"]["used"]
    while report["pins_forbidden"] is None:
        try:
            worker.ask("hold", nbytes=size, pin=True)
            if size < report["size"]["used"]:
                report["size"]["used"] = size
                report["size"]["why"] = "RLIMIT_MEMLOCK (ulimit -l) allows no more to be pinned"
            return
        except OSError as error:
            if error.errno != errno.ENOMEM or limit == resource.RLIM_INFINITY:
                raise
        # CAP_IPC_LOCK lifts it, but not in a user namespace: only trying tells.
        size = min(size // 2, limit * 7 // 8) >> 20 << 20
        if not size:
            report["pins_forbidden"] = (
                "RLIMIT_MEMLOCK (ulimit -l) leaves less than 1 MiB to pin; it counts the pins of "
                "all processes of a user"
            )
    worker.ask("hold", nbytes=report["size"]["used"], pin=False)


def _interleaved_forks(baseline: Worker, worker: Worker, rounds: int, base: list[int]) -> list[int]:
    """Forks without the pages (added to base) and with them registered, by turns.

    Both on one CPU, so that a busy machine slows both alike; and a ratio
    in doubt is looked at for longer.
    """
    cpu = max(os.sched_getaffinity(0))
    for one in (baseline, worker):
        one.ask("stay_on", cpu=cpu)
    own: list[int] = []
    for attempt in range(6):
        for _ in range(rounds):
            base += baseline.ask("fork", registered=False)
            own += worker.ask("fork", registered=True)
        in_doubt = FORK_LIMIT * (0.85 if attempt == 0 else 0.97)
        if statistics.median(own) < statistics.median(base) * in_doubt:
            break
        time.sleep(0.1)
    return own


def _plain_forks(worker: Worker, pin: bool) -> dict[str, Any]:
    """As many as 4 seconds allow. On a machine short of memory the first may be the last."""
    seen: list[int] = []
    until = time.monotonic() + 4
    try:
        while not seen or (len(seen) < 5 and time.monotonic() + seen[-1] / 1e9 < until):
            seen += worker.ask("fork", registered=False)
        return _summary(seen) | {
            "child_nbytes": worker.ask("child_memory", registered=False),
            "exchange": worker.ask("exchange", registered=False) if pin else None,
        }
    except (OSError, WorkerDied) as error:
        return {"error": _text(error)}


def _text(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) else None
    if text and isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {text}"
    return text or str(error)


# --- Huge pages ----------------------------------------------------------------------


def _raise_exit(number: int, _: object) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def reserved_huge_pages(pages: int) -> Iterator[None]:
    """A few huge pages where there were none, given back however this ends.

    The pool is the whole machine's: programs that lock its file take turns. Raises
    OSError where that is not permitted, BlockingIOError when another keeps the lock.
    """
    handlers = {
        number: signal.signal(number, _raise_exit)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        with open(POOL, "r+") as pool:
            _lock(pool.fileno(), patience=3)
            os.pwrite(pool.fileno(), b"%d" % pages, 0)
            try:
                yield
            finally:
                if (machine.number(POOL) or 0) <= pages:  # else it was set meanwhile
                    os.pwrite(pool.fileno(), b"0", 0)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _lock(fd: int, patience: float) -> None:
    until = time.monotonic() + patience
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
        time.sleep(0.05)


def _measure_huge(report: Report) -> dict[str, Any]:
    kib = (machine.field("/proc/meminfo", "Hugepagesize") or "0").split()[0]
    page = int(kib) << 10
    result: dict[str, Any] = {"page_size": page, "reserved_here": False}
    try:
        total, _ = _huge_pages.pool(page)
    except (OSError, ValueError):
        return result | {"skipped": "this kernel has no huge pages"}
    try:
        with contextlib.ExitStack() as stack:
            if total == 0:
                if page * HUGE_POOL > report["machine"]["memory_available_nbytes"] // 8:
                    few = f"{HUGE_POOL} huge pages of {terminal.size(page)}"
                    text = "would take more than an eighth of the available memory"
                    return result | {"skipped": f"{few} {text}"}
                stack.enter_context(reserved_huge_pages(HUGE_POOL))
                result["reserved_here"] = True
            return result | _fork_with_huge(report, page)
    except BlockingIOError:
        text = f"another program, such as another demo, has locked {POOL}"
        return result | {"skipped": text}
    except OSError as error:
        text = f"no huge pages are reserved, and this process cannot reserve any: {error.strerror}"
        how = f"sudo rdmafork demo, or as root: echo {HUGE_POOL} > {POOL}"
        return result | {"skipped": f"{text}. To see it: {how}"}


def _fork_with_huge(report: Report, page: int) -> dict[str, Any]:
    total, free = _huge_pages.pool(page)
    if free < total:
        # A demo must not use up pages that others may need next.
        text = f"other programs use some of the {total} huge pages, and could need the others"
        return {"skipped": text}
    if not free:
        text = "the kernel found no contiguous memory for a huge page"
        return {"skipped": f"{text}; as root: echo 1 > /proc/sys/vm/compact_memory"}
    if not any("ns" in report["fork"][mode] for mode in MODES):
        return {"skipped": "fork() with rdmafork could not be measured above"}
    result: dict[str, Any] = {"pool": total}
    for mode in MODES:
        if "ns" not in report["fork"][mode]:
            continue
        with Worker() as worker:
            worker.ask("init", mode=mode)
            try:
                result["pages"] = _hold_huge(worker, page, free, report["pins_forbidden"] is None)
            except OSError as error:
                text = f"cannot take {free} huge pages: {_text(error)}"
                return {"skipped": f"{text}; another program may use them"}
            except WorkerDied as error:  # SIGBUS: a control group's limit, met at first touch
                return {"skipped": str(error)}
            try:
                result[mode] = worker.ask("fork_huge", page=page)
            except (OSError, WorkerDied) as error:
                result[mode] = {"error": _text(error)}
    return result


def _hold_huge(worker: Worker, page: int, free: int, pin: bool) -> int:
    """Pin up to 4 huge pages, as many as RLIMIT_MEMLOCK allows; how many they are."""
    pages = max(1, min(4, free // 2))
    while True:
        try:
            worker.ask("hold_huge", page=page, pages=pages, rest=free - pages, pin=pin)
            return pages
        except OSError:
            if pages == 1:
                raise
            pages //= 2
