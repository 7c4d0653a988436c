"""rdmafork demo keeps its word, and says so where it cannot: see rdmafork/cli/demo.py."""

import contextlib
import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import TIMEOUT, environment, needs_pins
from memory import huge_page_pool, pool_lock
from seccomp import refuse
from sysfs import as_nobody
from test_cli import on_a_terminal

import rdmafork
from rdmafork.cli import demo, demo_screen, machine, main, terminal
from rdmafork.cli.demo_checks import checks

SMALL = ("demo", "--quick", "--size", "32MiB")
POOL = Path("/proc/sys/vm/nr_hugepages")
COMMAND = [sys.executable, "-c", "import sys; from rdmafork.cli import main; sys.exit(main())"]


@pool_lock()  # a demo takes free huge pages, which another test may count on
def command(*args, **options):
    return subprocess.run(
        [*COMMAND, *args],
        env=environment({}),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        **options,
    )


def verdicts(report):
    return {check["name"]: check["verdict"] for check in report["checks"]}


@pytest.fixture(scope="module")
def done():
    """The demo as a program with --json, with huge pages in the pool where that is possible."""
    try:
        with huge_page_pool(6):
            return command(*SMALL, "--json")
    except pytest.skip.Exception:
        return command(*SMALL, "--json")


@pytest.fixture(scope="module")
def report(done):
    return json.loads(done.stdout)


# ---- its screen -------------------------------------------------------------------------


@needs_pins
def test_every_check_passes(done, report):
    assert (done.returncode, done.stderr, report["ok"]) == (0, "", True)
    skipped = {"huge"} if "skipped" in report["huge_pages"] else set()
    for check in report["checks"]:
        expected = "not checked" if check["name"] in skipped else "ok"
        assert check["verdict"] == expected, check
    lazy = {"calls"} if rdmafork.kernel_info().copy_on_fork_trusted else set()
    assert set(verdicts(report)) == lazy | {
        "fork",
        "memory",
        "to_parent",
        "to_device",
        "marked",
        "partial_pages",
        "huge",
    }


@needs_pins
def test_the_report_has_the_measured_values(report):
    fork, size = report["fork"], report["size"]["used"]
    assert size == report["size"]["asked"] == 32 << 20
    assert report["pins_forbidden"] is None
    assert report["kernel"]["release"] == os.uname().release
    assert report["default_mode"] in ("lazy", "eager")
    for row in ("baseline", "plain", "lazy", "eager"):
        if "unavailable" in fork[row]:
            assert row == "lazy" and not report["kernel"]["copy_on_fork_trusted"]
            continue
        assert 0 < fork[row]["ns_min"] <= fork[row]["ns"]
        assert fork[row]["forks"] >= (1 if row == "plain" else 100)
    if report["kernel"]["copy_on_fork"]:
        assert fork["plain"]["child_nbytes"] >= size
        assert fork["plain"]["ns"] > 3 * fork["baseline"]["ns"]
    assert fork["eager"]["child_nbytes"] < size // 10
    assert 0 < fork["eager"]["ratio"] <= 1.5


def test_registrations_are_compared_with_a_pair_of_the_same_process(report):
    clocks = report["register_close"]
    for name in ("lazy", "eager", "libibverbs", "libibverbs_huge_pages_safe"):
        if "unavailable" not in clocks[name]:
            assert clocks[name]["ns"]["madvise_pair"] > 0 and clocks[name]["ns"]["c"] > 0
    if "ns" in clocks["lazy"]:
        assert clocks["lazy"]["system_calls"] == 0
        assert clocks["lazy"]["ns"]["python"] < clocks["lazy"]["ns"]["madvise_pair"] / 4
    assert clocks["eager"]["system_calls"] > 0


@needs_pins
def test_one_screen_that_anyone_can_read(report):
    screen = demo_screen.render(report, terminal.Paint(sys.stderr))
    lines = screen.splitlines()
    assert len(lines) <= 42 and max(map(len, lines)) <= 80
    for word in ("fork() with 32 MiB", "without rdmafork", "lazy", "eager", "ratio", "Checks"):
        assert word in screen
    assert screen.isascii()
    assert lines[-1].startswith("All checks passed")


@needs_pins
def test_huge_pages_make_fork_fail_only_without_rdmafork():
    with huge_page_pool(6):
        report = json.loads(command(*SMALL, "--json").stdout)
    huge = report["huge_pages"]
    assert "skipped" not in huge, huge
    assert (huge["pages"], huge["pool"], huge["reserved_here"]) == (3, 6, False)
    assert verdicts(report)["huge"] == "ok"
    if report["kernel"]["copy_on_fork"]:
        assert huge["eager"]["plain"]["errno"] == errno.ENOMEM


@pytest.fixture
def empty_pool():
    """The pool of huge pages, which is empty and stays so but for this test."""
    if not os.access(POOL, os.W_OK):
        pytest.skip("the pool of huge pages cannot be had")
    with pool_lock():
        if pages_in_pool():
            pytest.skip("the pool of huge pages is not empty")
        yield


def pages_in_pool():
    """How many there are while no demo, which would hold the lock, has taken some."""
    with POOL.open() as pool:
        fcntl.flock(pool, fcntl.LOCK_EX)
        return int(pool.read())


@needs_pins
def test_the_pool_of_huge_pages_is_as_it_was(empty_pool):
    for _ in range(10):  # a benchmark beside this test may have a pool, which the demo then takes
        report = json.loads(command(*SMALL, "--json").stdout)
        assert pages_in_pool() == 0
        if report["huge_pages"].get("reserved_here"):
            break
    assert report["huge_pages"]["reserved_here"], report["huge_pages"]
    assert verdicts(report)["huge"] == "ok"


def test_the_pool_is_given_back_when_terminated(empty_pool):
    code = (
        "import time; from rdmafork.cli.demo import reserved_huge_pages\n"
        "with reserved_huge_pages(2): print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment({})
    )
    with process:
        assert process.stdout.readline() == b"held\n"
        assert int(POOL.read_text()) == 2
        process.terminate()
    assert process.returncode == 128 + signal.SIGTERM
    assert pages_in_pool() == 0


@needs_pins
def test_a_pool_that_another_program_locks_is_left_alone(empty_pool):
    with POOL.open("r+") as pool:
        fcntl.flock(pool, fcntl.LOCK_EX)
        report = json.loads(command(*SMALL, "--json").stdout)
    assert "locked" in report["huge_pages"]["skipped"]
    assert verdicts(report)["huge"] == "not checked" and report["ok"]


# ---- where something is missing ---------------------------------------------------------


def forbidden():
    refuse("io_uring_setup", errno.EPERM)


def test_without_io_uring_the_rest_is_shown_and_the_reason_said():
    done = command(*SMALL, preexec_fn=forbidden)
    assert done.returncode == 0, done
    text = " ".join(done.stdout.split())
    assert "Nothing can be pinned: a seccomp filter forbids io_uring" in text
    assert "not pinned" in text and "madvise(DONTFORK)" in text
    assert re.search(r"- the device still writes the parent's pages not checked", text)
    assert re.search(r"All checks passed; \d+ checks? could not run", text)


@needs_pins
def test_a_lower_limit_of_locked_memory_makes_it_smaller():
    if os.geteuid() != 0 or not Path("/usr/bin/setpriv").exists():
        pytest.skip("needs root and setpriv, to give CAP_IPC_LOCK away")
    prefix = ["setpriv", "--bounding-set=-ipc_lock", "prlimit", f"--memlock={8 << 20}"]
    done = subprocess.run(
        [*prefix, *COMMAND, *SMALL, "--json"],
        env=environment({}),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    report = json.loads(done.stdout)
    assert done.returncode == 0 and "RLIMIT_MEMLOCK" in (
        report["pins_forbidden"] or report["size"]["why"]
    )
    # A test beside this one may have pinned what the limit allows.
    assert report["pins_forbidden"] or report["size"]["used"] >> 20 in (7, 3, 1)


def test_less_memory_makes_it_smaller():
    assert demo.choose_size(100 << 20, 1 << 30) == (100 << 20, None)
    size, why = demo.choose_size(1 << 30, 1 << 30)
    assert size == int((1 << 30) / 2.2) >> 20 << 20 and "1 GiB of memory is available" in why
    assert machine.memory_available() > 0


def broken(report, path, value):
    """A copy of the report with one thing changed."""
    copy = json.loads(json.dumps(report))
    *way, last = path.split("/")
    place = copy
    for name in way:
        place = place[name]
    place[last] = value
    return {check.name: check.verdict for check in checks(copy)}


@needs_pins
@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("fork", "fork/eager/ratio", 1.6),
        ("memory", "fork/eager/child_nbytes", 32 << 20),
        ("to_parent", "fork/eager/exchange/device_to_parent", 63),
        ("to_device", "fork/eager/exchange/parent_to_device", 63),
        ("marked", "fork/eager/protected_by", ["mark", "kernel"]),
        ("partial_pages", "fork/eager/partial_pages", "SIGSEGV"),
        ("calls", "register_close/lazy/system_calls", 1),
        ("fork", "fork/eager", {"error": "the process died"}),
        ("huge", "huge_pages/eager", {"plain": {}, "registered": {"text": "no memory"}}),
        ("huge", "huge_pages/eager", {"error": "SIGSEGV"}),
    ],
)
def test_a_check_that_fails_is_seen(report, name, path, value):
    if name not in verdicts(report):
        pytest.skip("this kernel has no such check")
    changed = broken(report, path, value)
    assert changed.pop(name) == "failed"
    assert "failed" not in changed.values()


def test_a_check_that_fails_is_the_exit_status(report, monkeypatch, capsys):
    report = report | {"ok": False}
    report["checks"] = [report["checks"][0] | {"verdict": "failed"}]
    monkeypatch.setattr(demo, "measure", lambda *_: report)
    assert main(["demo"]) == 1
    output = capsys.readouterr().out
    assert "FAILED" in output and "1 check failed" in output


def test_a_worker_that_dies_is_named(monkeypatch, capsys):
    with demo.Worker() as worker:
        os.kill(worker._process.pid, signal.SIGKILL)
        with pytest.raises(demo.WorkerDied, match=r"SIGKILL, out of memory\?"):
            worker.ask("clocks")

    def measure(*_):
        raise demo.WorkerDied(-signal.SIGSEGV, "fork")

    monkeypatch.setattr(demo, "measure", measure)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == (
        "rdmafork demo: the process died at 'fork': killed by SIGSEGV\n"
    )


# ---- the command line -------------------------------------------------------------------


def test_a_program_that_cannot_be_started_is_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert main(["demo", "--quick"]) == 2
    message = "rdmafork demo: /no/such/python: No such file or directory"
    assert capsys.readouterr().err.splitlines()[-1].endswith(message)


def test_version_and_help():
    assert command("--version").stdout == f"rdmafork {rdmafork.__version__}\n"
    helped = command("--help")
    assert helped.returncode == 0 and "demo" in helped.stdout and "fork_init" in helped.stdout
    assert "io_uring" in command("demo", "--help").stdout
    nothing = command()
    assert nothing.returncode == 2 and nothing.stdout == helped.stdout
    for size, why in (
        ("1Q", "is not a size"),
        ("1", "is too little: the demo needs 1 MiB or more"),
    ):
        wrong = command("demo", "--size", size)
        assert (wrong.returncode, wrong.stdout) == (2, "")
        assert wrong.stderr.endswith(f"argument --size: {size!r} {why}\n") or size == "1Q"
        assert f"{size!r} {why}" in wrong.stderr and "Traceback" not in wrong.stderr


@needs_pins
def test_the_least_size_is_shown():
    done = command("demo", "--quick", "--size", "1MiB")
    assert "fork() with 1 MiB of private memory" in done.stdout and not done.stderr


def paired(screen):
    """Of each row of fork(): the time, the one that it is compared with, the ratio."""
    number = r"([\d.,]+) (us|ms)"
    return re.findall(rf"^  with.* rdmafork\S* *\w* +{number} +{number} +([\d.,]+)x", screen, re.M)


@needs_pins
def test_each_ratio_stands_beside_its_base(report):
    rows = paired(demo_screen.render(report, terminal.Paint(sys.stderr)))
    assert len(rows) == 1 + sum("ns" in report["fork"][mode] for mode in ("lazy", "eager"))
    for own, unit, other, unit_of_other, ratio in rows:
        own, other, ratio = (float(text.replace(",", "")) for text in (own, other, ratio))
        assert unit == unit_of_other
        assert own / other == pytest.approx(ratio, rel=0.1)


@needs_pins
@pytest.mark.parametrize(("status", "ns", "idle"), [(2, 10, True), (2, 900, False), (0, 10, False)])
def test_a_libibverbs_is_idle_if_it_is_not_needed_and_quick(report, status, ns, idle):
    peer = {"version": "51.0", "status": status, "ns": {"c": ns, "madvise_pair": 400}}
    clocks = report["register_close"] | {"libibverbs": peer}
    text = demo_screen.render(report | {"register_close": clocks}, terminal.Paint(sys.stderr))
    (line,) = (line for line in text.splitlines() if "libibverbs 51.0 " in line)
    assert line.endswith("it does nothing") == idle


@needs_pins
@pytest.mark.parametrize(
    ("copies", "trusted", "source", "words"),
    [
        (True, True, "version", "at fork() (known from its version): safe, but slow"),
        (True, False, "environment", "RDMAFORK_TRUST_COPYING=0 tells rdmafork not to rely on it"),
        (True, False, "version", "before 5.19 it can lose one"),
        (False, False, "version", "does not reliably copy pinned pages"),
    ],
)
def test_how_the_kernel_copies_is_said(report, copies, trusted, source, words):
    kernel = report["kernel"] | {
        "copy_on_fork": copies,
        "copy_on_fork_from": "version",
        "copy_on_fork_trusted": trusted,
        "copy_on_fork_trusted_from": source,
    }
    text = demo_screen.render(report | {"kernel": kernel}, terminal.Paint(sys.stderr))
    assert words in " ".join(text.split())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_why_huge_pages_cannot_be_had_is_said(empty_pool):
    report = {"machine": {"memory_available_nbytes": 1 << 40}, "fork": {}}

    def seen():
        skipped = demo._measure_huge(report)["skipped"]
        assert "Permission denied. To see it: sudo rdmafork demo" in skipped, skipped

    as_nobody(seen)


def test_without_a_mode_that_forked_huge_pages_are_not_measured(report):
    if "pages" not in report["huge_pages"]:
        pytest.skip("no huge pages here")
    failed = report | {"fork": report["fork"] | {m: {"error": "x"} for m in ("lazy", "eager")}}
    with huge_page_pool(6):
        huge = demo._measure_huge(failed)
    assert "could not be measured" in huge["skipped"]
    text = demo_screen.render(failed | {"huge_pages": huge}, terminal.Paint(sys.stderr))
    assert "fork() with huge pages: not measured" in text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1GiB", 1 << 30), ("64K", 64 << 10), ("1.5 MiB", 3 << 19), ("4096", 4096), ("2gb", 2 << 30)],
)
def test_sizes_are_read_in_units(text, nbytes):
    assert terminal.parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "0", "0.5", "-1G", "1X", "GiB", "1e3", "nan", "8388608T", "9" * 400]
)
def test_bad_sizes_are_refused(text):
    with pytest.raises(ValueError):
        terminal.parse_size(text)


def test_sizes_are_printed_in_units():
    assert [terminal.size(n) for n in (1, 4096, 36 << 10, 1 << 30)] == [
        "1 byte",
        "4 KiB",
        "36 KiB",
        "1 GiB",
    ]
    times = (2_650_881_000, 12_340_000, 254_000, 99_000, 4_200, 0)
    assert [terminal.duration(ns) for ns in times] == [
        "2,651 ms",
        "12.3 ms",
        "0.25 ms",
        "99.0 us",
        "4.20 us",
        "0 us",
    ]
    assert terminal.nanoseconds(3899.4) == "3,899 ns"
    assert [terminal.ratio(a, 100) for a in (104, 196_300, 0.4, 50)] == [
        "1.04x",
        "1,963x",
        "0.0040x",
        "0.50x",
    ]
    assert [terminal.ratio(a, 1) for a in (0, 1, 0.09, 12.6)] == ["0x", "1.00x", "0.090x", "13x"]


@pytest.mark.parametrize(
    ("column", "printed"),
    [
        ((19, 5172, 0), ["19 ns", "5,172 ns", "0 ns"]),
        ((19, 5172, 321_600), ["0.019 us", "5.17 us", "322 us"]),
        ((30, 465_200_000), ["0.030 us", "465,200 us"]),
        ((670_000, 1_208_000_000, 34_100_000), ["0.67 ms", "1,208 ms", "34.1 ms"]),
        ((-553, 64_420), ["-0.55 us", "64.4 us"]),
        ((2e9, 90e9), ["2.00 s", "90.0 s"]),
        ((), []),
    ],
)
def test_a_column_of_times_has_one_unit(column, printed):
    assert list(map(terminal.durations(column), column)) == printed


def test_a_closed_output_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.Popen(
        [*COMMAND, *SMALL], stdout=writing, stderr=subprocess.PIPE, env=environment({})
    )
    os.close(writing)
    with process:
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


def test_a_worker_whose_demo_has_ended_is_silent():
    code = "from rdmafork.cli.demo_worker import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment({}),
    ) as worker:  # fmt: skip
        worker.stdout.close()
        worker.stdin.write(b'{"do": "init", "mode": "auto"}\n')
        worker.stdin.close()
        assert worker.stderr.read() == b""


def processes_with(marker):
    """Processes whose environment holds the marker: a program and all that it started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("delay", [0, 0.05, 0.4, 1.5])
@pool_lock()
def test_ctrl_c_ends_it_and_its_workers(delay):
    marker = f"DEMO_TEST={os.getpid()}-{delay}"
    process = subprocess.Popen(
        [*COMMAND, "demo", "--size", "512MiB"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(dict([marker.split("=")])),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        start_new_session=True,
    )
    with process:
        patience = time.monotonic() + 120  # before its first worker it is still being imported
        while len(processes_with(marker)) < 2 and time.monotonic() < patience:
            time.sleep(0.005)
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=TIMEOUT)
    patience = time.monotonic() + 120
    assert (process.returncode, output, errors) == (128 + signal.SIGINT, b"", b"\n")
    while left := processes_with(marker):  # a worker in the middle of a fork ends after it
        assert time.monotonic() < patience, left
        time.sleep(0.05)


def test_colours_and_progress_only_on_a_terminal(done):
    with pool_lock():
        seen = on_a_terminal(*SMALL)
    assert "\033[32mOK" in seen and "forking without rdmafork" in seen
    with pool_lock():
        plain = on_a_terminal(*SMALL, NO_COLOR="1")
    assert "\033[32m" not in plain and "\r\033[K" in plain
    assert "\033" not in done.stdout and done.stderr == ""
