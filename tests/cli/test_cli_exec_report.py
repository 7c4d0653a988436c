"""rdmafork exec --report, from the programs to the table."""

import json
import os
import subprocess
import sys

import pytest
from conftest import TIMEOUT, both_modes, environment, needs_pins
from memory import PAGE
from test_cli_report import line

import rdmafork
from rdmafork.cli import launchers, main

RDMAFORK = [sys.executable, "-m", "rdmafork"]
NBYTES = 64 * PAGE

# 64 pages registered, and so many forks.
FORKING = f"""
import mmap, os, sys, rdmafork
memory = mmap.mmap(-1, {NBYTES}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory[::{PAGE}] = b"x" * 64
with rdmafork.register(memory):
    for _ in range(int(sys.argv[1])):
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
"""


# VmPin with pages pinned by io_uring, which no call here tells of; then so many forks.
PINNING = f"""
import mmap, os, sys, rdmafork
from rdmafork import _pins
registers, forks = map(int, sys.argv[1:])
memory = mmap.mmap(-1, {NBYTES}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)
memory[::{PAGE}] = b"x" * 64
regions = [rdmafork.register(memory) for _ in range(registers)]
with _pins.Pins(memory):
    for _ in range(forks):
        if not os.fork():
            sys.exit()  # with a report of its own
        os.wait()
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmPin")])
"""


def execute(*arguments, env=None):
    done = subprocess.run(
        [*RDMAFORK, "exec", *arguments], env=environment(env or {}), capture_output=True,
        text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ""), done
    return done.stderr


def lines(path):
    return [json.loads(text) for text in path.read_text().splitlines()]


@both_modes
def test_a_process_reports_its_forks_and_registrations(tmp_path, mode):
    path = tmp_path / "r.json"
    program = (sys.executable, "-c", FORKING, "3")
    assert execute("--mode", mode, "--report", str(path), "--", *program) == ""
    (found,) = lines(path)
    assert set(found) == set(line())  # lines for the tests of the table
    assert (found["mode"], found["forks"], found["errors"]) == (mode, 3, [])
    assert found["registrations"] == {"total": 1, "live": 0}
    assert found["marked_bytes"] == {"total": 3 * NBYTES, "last": NBYTES}
    assert found["handler_ns"]["total"] >= found["handler_ns"]["max"] > 0
    assert found["fork_callers"] == [] and found["rank"] is None


def test_each_process_appends_a_line_of_its_own(tmp_path):
    path = tmp_path / "r.json"
    script = "for i in 1 2 3 4 5 6 7 8; do for j in 1 2 3 4 5 6 7 8; do sleep 0 & done; done; wait"
    execute("--report", str(path), "--", "sh", "-c", script)
    found = [each for each in lines(path) if each["program"] == "sleep"]  # dash reports nothing
    assert len({each["pid"] for each in found}) == len(found) == 64
    assert len({each["ppid"] for each in found}) == 1


SILENT = "process {} wrote no report, and 1 child did; exec(), _exit() or a signal ends a program"
MISSING = "process {} forked 3 times; 2 children wrote no report: exec(), _exit() or a signal ends"
REPLACED = "process {} forked less often than forked children wrote reports: exec() has replaced"
PROGRAM = os.path.basename(sys.executable)
# How a program ends that has forked: the program and the forks of its line, and the note.
ENDS = {
    "exit": ("pass", (PROGRAM, 3), MISSING),
    "killed": ("os.kill(os.getpid(), 9)", None, SILENT),
    "_exit": ("os._exit(0)", None, SILENT),
    "exec": ("os.execv('/bin/true', ['true'])", ("true", 0), REPLACED),
    "exec and fork": (
        "os.execv(sys.executable, [sys.executable, '-c', 'import os; os.fork()'])",
        (PROGRAM, 1),
        REPLACED,
    ),
    "descriptors closed": ("os.closerange(0, 999)", (PROGRAM, 3), MISSING),
    "not dumpable": ("ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)", (PROGRAM, 3), MISSING),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_report_is_whole_or_what_it_lacks_is_told(tmp_path, capsys, how):
    """Of three children one is killed, one ends by _exit(), and one writes a report."""
    path = tmp_path / "r.json"
    end, expected, note = ENDS[how]
    source = f"""
import ctypes, os, sys
for end in (lambda: os.kill(os.getpid(), 9), lambda: os._exit(0), sys.exit):
    if not os.fork():
        end()
    os.wait()
{end}
"""
    command = [*RDMAFORK, "exec", "--report", str(path), "--", sys.executable, "-c", source]
    with subprocess.Popen(command, env=environment({}), stderr=subprocess.PIPE) as process:
        assert process.communicate(timeout=TIMEOUT)[1] == b""
    assert process.returncode == (-9 if how == "killed" else 0)
    found = [each for each in lines(path) if each["pid"] == process.pid]
    seen = [(os.path.basename(each["program"]), each["forks"]) for each in found]
    assert seen == ([expected] if expected else [])
    assert not any(each["errors"] for each in found)
    assert main(["report", str(path)]) == 0
    (told,) = " ".join(capsys.readouterr().out.split()).split("Note: ")[1:]
    assert told.startswith(note.format(process.pid))


def test_programs_that_are_killed_leave_no_report(tmp_path, capsys):
    path = tmp_path / "r.json"
    command = [*RDMAFORK, "exec", "--report", str(path), "--", "sh", "-c", "kill -9 $$"]
    assert subprocess.run(command, env=environment({}), check=False).returncode == -9
    assert main(["report", str(path)]) == 2
    assert "no reports: exec(), _exit() or a signal ends a program" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("leaves", "why"),
    [
        ("os.chroot('{0}/root')", "No such file or directory"),
        ("os.chmod('{0}/p', 0o700); os.setuid(65534)", "Permission denied"),
        ("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9, 9))", "File too large"),
    ],
)
def test_a_report_that_cannot_be_written_is_told(tmp_path, leaves, why):
    if os.geteuid():
        pytest.skip("needs root, to chroot() and to become another user")
    path = tmp_path / "p" / "r.json"
    (tmp_path / "root").mkdir()
    path.parent.mkdir()
    source = f"import os; {leaves.format(tmp_path)}; os.write(2, b'%d\\n' % os.getpid())"
    pid, said = execute("--report", str(path), "--", sys.executable, "-c", source).splitlines()
    assert said == f"rdmafork: pid {pid}: report {path} cannot be written: {why}"


@pytest.mark.parametrize("closes", ["os.close(2)", "os.closerange(0, 99)"])
def test_a_report_on_stderr_spoils_no_file_of_the_program(tmp_path, closes):
    """A file that is opened after descriptor 2 was closed may have its number."""
    path = tmp_path / "data"
    source = f"""import os
{closes}
fds = [os.open({str(path)!r}, os.O_CREAT | os.O_WRONLY) for _ in range(3)]
os.write(2, b"data")
if not os.fork():
    raise SystemExit
os.wait()
"""
    assert execute("--report", "-", "--", sys.executable, "-c", source) == ""
    assert path.read_bytes() == b"data"


def report_of(tmp_path, source, *arguments, env=None):
    """The line of the process, the lines of its children, the status of `rdmafork report`."""
    path = tmp_path / "r.json"
    command = [*RDMAFORK, "exec", "--report", str(path), "--", sys.executable, "-c", source]
    done = subprocess.run(
        [*command, *map(str, arguments)], env=environment(env or {}), capture_output=True,
        text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done
    found = lines(path)
    (first,) = [each for each in found if each["ppid"] == os.getpid()]
    return first, [each for each in found if each is not first], main(["report", str(path)])


@needs_pins
@pytest.mark.parametrize("env", [{}, {"RDMAFORK_TRUST_COPYING": "0"}])
def test_memory_pinned_without_libibverbs_is_told(tmp_path, capsys, env):
    found, children, status = report_of(tmp_path, PINNING, 0, 2, env=env)
    assert found["pinned_elsewhere"] == {"max": NBYTES, "unread": 0}
    nothing = {"max": 0, "unread": 0}
    assert [child["pinned_elsewhere"] for child in children] == [nothing] * 2
    assert status == 1
    shown = " ".join(capsys.readouterr().out.split())
    trusted = rdmafork.kernel_info().copy_on_fork_trusted and not env
    does = "fork() copies the private part" if trusted else "fork() may lose the private part"
    assert "at least 256 KiB pinned by something that does not call libibverbs" in shown
    assert does in shown and "0 bytes unmarked: copied by the kernel" not in shown


# It ends with its pages still pinned, and perhaps with 40,000 characters of groups.
PINNED_AT_EXIT = (
    PINNING.replace("with _pins.Pins(memory):", "if pins := _pins.Pins(memory):")
    + """
import ctypes
ctypes.CDLL(None).exit(0)
"""
)
MANY_GROUPS = "import os; os.setgroups(range(1_000_000, 1_005_000))\n"


@needs_pins
@pytest.mark.parametrize("prefix", ["", MANY_GROUPS], ids=["plain", "groups"])
def test_memory_pinned_at_the_end_is_told_without_a_fork(tmp_path, prefix):
    if prefix and os.geteuid():
        pytest.skip("needs root, to have many groups")
    found, _, status = report_of(tmp_path, prefix + PINNED_AT_EXIT, 0, 0)
    assert (found["pinned_elsewhere"], status) == ({"max": NBYTES, "unread": 0}, 1)


def test_an_unknown_amount_of_pinned_memory_is_no_zero(tmp_path, capsys):
    if os.geteuid():
        pytest.skip("needs root, to go where there is no /proc")
    text = execute(
        "--report", "-", "--", sys.executable, "-c", f"import os; os.chroot({str(tmp_path)!r})"
    )
    assert json.loads(text)["pinned_elsewhere"] == {"max": 0, "unread": 1}
    (tmp_path / "r.json").write_text(text)
    assert main(["report", str(tmp_path / "r.json")]) == 1
    assert "/proc could not be read, 1 time, at forks or at the exit" in capsys.readouterr().out


@needs_pins
def test_forks_at_which_proc_could_not_be_read_are_told_beside_others(tmp_path, capsys):
    if os.geteuid():
        pytest.skip("needs root, to go where there is no /proc")
    source = f"""
import os
from rdmafork import _pins
pins = _pins.Pins(bytearray({NBYTES}))
for fork in range(3):
    if not os.fork():
        os._exit(0)
    os.wait()
    if not fork:
        os.chroot({str(tmp_path)!r})
pins.close()
"""
    text = execute("--report", "-", "--", sys.executable, "-c", source)
    found = json.loads(text)["pinned_elsewhere"]
    assert found["max"] >= NBYTES and found["unread"] == 3
    (tmp_path / "r.json").write_text(text)
    assert main(["report", str(tmp_path / "r.json")]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "/proc could not be read, 3 times, at forks or at the exit" in shown
    assert "pinned by something that does not call libibverbs" in shown


@needs_pins
@pytest.mark.parametrize("registers", [0, 1])
def test_the_report_and_doctor_agree(tmp_path, registers):
    path, waits = (
        tmp_path / "r.json",
        PINNED_AT_EXIT.replace("import ctypes", "input(); import ctypes"),
    )
    command = [*RDMAFORK, "exec", "--report", str(path), "--", sys.executable, "-uc", waits]
    command += [str(registers), "0"]
    with subprocess.Popen(command, env=environment({}), stdin=-1, stdout=-1, text=True) as process:
        assert "kB" not in process.stdout.readline()
        done = subprocess.run(
            [*RDMAFORK, "doctor", "--json", "--pid", str(process.pid)],
            capture_output=True,
            text=True,
        )
        process.communicate("\n")
    cost = {row["what"]: row for row in json.loads(done.stdout)["rows"]}["cost of a fork()"]
    elsewhere = lines(path)[0]["pinned_elsewhere"]["max"]
    assert (elsewhere, cost["status"]) == ((0, "ok") if registers else (NBYTES, "warning"))


@needs_pins
@pytest.mark.parametrize("registered", [1, 2])
@pytest.mark.parametrize("env", [{}, {"RDMAFORK_TRUST_COPYING": "0"}])
def test_pinned_memory_that_is_registered_is_not_told(tmp_path, capsys, registered, env):
    found, _, status = report_of(tmp_path, PINNING, registered, 2, env=env)
    assert found["pinned_elsewhere"] == {"max": 0, "unread": 0}
    assert status == 0
    assert "0 bytes unmarked: copied by the kernel" in " ".join(capsys.readouterr().out.split())


def test_ranks_are_merged_into_one_table(tmp_path, capsys):
    for rank, forks in enumerate((1, 1, 1, 9)):
        env = {"PMI_RANK": str(rank), "PMI_SIZE": "4"}
        report = ("--report", f"{tmp_path}/r.json")
        execute(*report, "--", sys.executable, "-c", FORKING, str(forks), env=env)
    paths = sorted(map(str, tmp_path.iterdir()))
    assert paths == [f"{tmp_path}/r.rank{rank}.{launchers.host()}.json" for rank in range(4)]
    assert main(["report", *paths]) == 0
    rows = capsys.readouterr().out.splitlines()
    # A busy machine may make any of them an outlier, by the time in its handlers.
    assert sorted(row.split()[0] for row in rows[1:5]) == ["0", "1", "2", "3"]
    assert "4 processes on 1 host: 4 registrations, 12 forks" in rows[6]


def test_an_engine_that_does_not_start_is_told_and_the_program_runs(tmp_path, capsys):
    path = tmp_path / "r.json"
    said = execute("--report", str(path), "--", "true", env={"RDMAFORK_TRUST_COPYING": "round"})
    assert said.startswith("rdmafork: not started: ") and "RDMAFORK_TRUST_COPYING" in said
    assert main(["report", str(path)]) == 1
    assert "not started" in capsys.readouterr().out


def test_doctor_and_devices_under_exec_report_once(tmp_path):
    path = tmp_path / "r.json"
    command = [*RDMAFORK, "exec", "--report", str(path), *RDMAFORK, "doctor", "--json"]
    done = subprocess.run(command, env=environment({}), capture_output=True, text=True)
    assert {row["what"]: row["status"] for row in json.loads(done.stdout)["rows"]}[
        "rdmafork"
    ] == "ok"
    assert len(lines(path)) == 1  # without its experiments in other processes
    assert lines(path)[0]["ppid"] == os.getpid()


@needs_pins
def test_registered_bytes_are_subtracted_from_pinned_ones(tmp_path):
    """At least so much: a page that is registered may not be the one that is pinned."""
    page = f"mmap.mmap(-1, {PAGE}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)"
    source = PINNING.replace("regions =", f"other = rdmafork.register({page})\nregions =")
    found, _, _ = report_of(tmp_path, source, 0, 1)
    assert found["pinned_elsewhere"] == {"max": NBYTES - PAGE, "unread": 0}
