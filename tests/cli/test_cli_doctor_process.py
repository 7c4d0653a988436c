"""rdmafork doctor --pid: another process, its pinned pages, and what a fork() costs it."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import compile_c, environment, fork_once, needs_pins
from memory import MADV_DONTFORK, PAGE, libc, madvise, private_map, shared_map
from sysfs import as_nobody
from test_cli_doctor import doctor, expect, in_namespace, rows

import rdmafork
from rdmafork import _pins
from rdmafork.cli import doctor_process, machine, main
from rdmafork.cli.doctor_process import Mapping


def looked_at(pid):
    """{what: row} of the process."""
    return {row.what: row for row in doctor_process.Process(pid).rows()}


@contextlib.contextmanager
def waiting(command, **options):
    """The pid of a program that has printed "ready" and waits; then it is ended."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, **options) as process:
        try:
            assert process.stdout.readline() == b"ready\n"
            yield process.pid
        finally:
            process.kill()


def holding(registered):
    """In a child: 64 MiB pinned, half of it registered; it waits to be ended."""
    memory, _ = private_map(64 << 20)
    memory[::4096] = b"x" * (len(memory) // 4096)
    pins, region = _pins.Pins(memory), None
    if registered:
        rdmafork.fork_init()
        region = rdmafork.register(memoryview(memory)[: 32 << 20])
        fork_once()
        assert region.protected
    return pins, region


@pytest.fixture
def process():
    """process(function, *args): a child that has run it and waits."""
    pids = []

    def start(function, *args):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                held = function(*args)
                os.write(writing, b"x")
                signal.pause()
                assert held
            finally:
                os._exit(1)
        pids.append(pid)
        os.close(writing)
        with open(reading, "rb") as pipe:
            assert pipe.read(1) == b"x"
        return pid

    yield start
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@needs_pins
@pytest.mark.parametrize("registered", [False, True])
def test_another_process_is_looked_at(process, registered):
    pid = process(holding, registered)
    found = looked_at(pid)
    assert "64 MiB (VmPin)" in found["pinned pages"].evidence
    absent = "32 MiB that children do not inherit (dc), in 1 mapping"
    assert (absent in found["marked pages"].evidence) == registered
    # As the report of rdmafork exec has it: pinned, and by no registration here.
    elsewhere = "32 MiB" if registered else "64 MiB"
    expect(
        found["cost of a fork()"]._asdict(), "warning", f"copies up to {elsewhere}", "libibverbs"
    )
    assert "librdmafork.so" in found["libraries"].evidence
    with open(f"/proc/{pid}/maps") as maps:
        assert found["mappings"].evidence.startswith(f"{sum(1 for _ in maps):,}, ")


@needs_pins
def test_pinned_memory_that_is_registered_costs_a_fork_nothing(process):
    """It is marked as a fork() begins, and none has."""

    def hold():
        memory, _ = private_map(8 << 20)
        rdmafork.fork_init()
        return rdmafork.register(memory), _pins.Pins(memory)

    found = looked_at(process(hold))
    part = "if the 8 MiB that is pinned is part of the 8 MiB that is registered with rdmafork"
    expect(found["cost of a fork()"]._asdict(), "ok", part)


# It takes its library out of reach, as an upgrade does, and has a mebibyte registered of two.
OUT_OF_REACH = """if True:
    import os, subprocess, rdmafork
    from rdmafork import _pins
    memory = bytearray(2 << 20)
    pins = _pins.Pins(memory)
    rdmafork.fork_init()
    region = rdmafork.register(memoryview(memory)[: 1 << 20])
    over = os.path.dirname(rdmafork.get_library())
    subprocess.run(["mount", "-t", "tmpfs", "none", over], check=True)
    input(print("ready"))
"""


@needs_pins
def test_registrations_are_read_though_the_library_has_been_replaced():
    """Root finds the file by its mapping."""
    command = [*in_namespace(), sys.executable, "-uc", OUT_OF_REACH]
    with waiting(command) as pid:
        found = looked_at(pid)
    row = found["cost of a fork()"]._asdict()
    if os.geteuid():
        unread = "2 MiB is pinned; how much of it is registered cannot be read: Operation not"
        expect(row, "skipped", unread, "sudo rdmafork doctor")
    else:
        expect(row, "warning", "copies up to 1 MiB pinned by something")


def test_a_device_that_no_libibverbs_serves():
    made = ("mount -t tmpfs none /dev", "mkdir /dev/infiniband")
    device = "mknod /dev/infiniband/uverbs0 c 1 5"
    source = "device = open('/dev/infiniband/uverbs0'); input(print('ready'))"
    command = [*in_namespace(*made, device), sys.executable, "-uc", source]
    with waiting(command) as pid:
        found = looked_at(pid)
    expect(found["devices"]._asdict(), "warning", "uverbs0 open, and no libibverbs.so", "static")


# Pins a mebibyte with io_uring, and waits.
PINS = """
#include <linux/io_uring.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
int main(void)
{
	struct iovec memory = { .iov_len = 1 << 20 };
	struct io_uring_params params = { 0 };
	long fd = syscall(SYS_io_uring_setup, 4, &params);

	memory.iov_base = mmap(NULL, memory.iov_len, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	puts(syscall(SYS_io_uring_register, fd, IORING_REGISTER_BUFFERS, &memory, 1) ? "" : "ready");
	fflush(stdout);
	return getchar();
}
"""


@needs_pins
def test_another_version_s_registrations_are_unknown_also_to_root(tmp_path):
    (tmp_path / "pins.c").write_text(PINS)
    (tmp_path / "empty.c").touch()
    program = compile_c(tmp_path / "pins", tmp_path / "pins.c")
    other = compile_c(tmp_path / "librdmafork.so", "-shared", tmp_path / "empty.c")
    with waiting([program], env=environment({"LD_PRELOAD": other})) as pid:
        found = looked_at(pid)
    row = found["cost of a fork()"]
    expect(row._asdict(), "skipped", "1 MiB is pinned", "its version of rdmafork does not")
    assert row.cure is None


def test_a_library_that_is_not_intercepted_may_have_pinned_memory():
    row = doctor_process._cost(100 << 20, [mapping(100)], 0, has_libibverbs=True)
    assert "100 MiB pinned by a libibverbs that is not intercepted, or by something" in row.evidence


def mapping(mib, flags="", shared=False, path="", resident=None):
    resident = mib if resident is None else resident
    return Mapping(mib << 20, resident << 20, shared, frozenset(flags.split()), path)


def test_a_mapping_is_as_resident_as_its_pages():
    memory, address = private_map(16 * PAGE)
    madvise(address, 16 * PAGE, MADV_DONTFORK)  # so that it is not one with its neighbours
    memory[: 3 * PAGE] = bytes(3 * PAGE)
    (found,) = (m for m in doctor_process._mappings("/proc/self/smaps") if m.start == address)
    assert (found.nbytes, found.resident, found.shared) == (16 * PAGE, 3 * PAGE, False)


@pytest.mark.parametrize(
    ("pinned", "mappings", "status", "words"),
    [
        (0, [mapping(100)], "ok", "no page is pinned"),
        (100, [mapping(100)], "warning", "copies 100 MiB of"),
        (100, [mapping(100, "dc")], "ok", "copies little"),
        (100, [mapping(100, "wf")], "ok", "copies little"),
        (100, [mapping(100, shared=True)], "ok", "copies little"),
        (100, [mapping(80, "dc"), mapping(20)], "ok", "copies 20 MiB of"),
        (200, [mapping(100, "dc"), mapping(300)], "warning", "copies 100 MiB to 200 MiB"),
        (100, [mapping(80, shared=True), mapping(90)], "ok", "copies 20 MiB to 90 MiB"),
    ],
)
def test_doctor_tells_the_cost_of_a_fork(monkeypatch, pinned, mappings, status, words):
    for copies in (True, False):
        info = rdmafork.kernel_info()._replace(copy_on_fork_trusted=copies)
        monkeypatch.setattr(rdmafork, "kernel_info", lambda info=info: info)
        row = doctor_process._cost(pinned << 20, mappings)
        if copies or "copies little" in row.evidence:
            assert row.status == status and words in row.evidence, row
        else:
            assert row.status == "problem" and "device lose" in row.evidence, row


@pytest.mark.parametrize(
    ("pinned", "registered", "mappings", "status", "words"),
    [
        (100, 100, [mapping(100)], "ok", "100 MiB that is registered with rdmafork, and not"),
        (100, 200, [mapping(200)], "ok", 'and not registered with on_fork="keep"'),
        (100, 60, [mapping(60), mapping(300)], "warning", "copies up to 40 MiB pinned by"),
        (
            100,
            60,
            [mapping(20), mapping(300, shared=True)],
            "warning",
            "copies up to 20 MiB pinned",
        ),
        (100, 60, [mapping(60, "dc"), mapping(40, shared=True)], "ok", "are marked or shared"),
    ],
)
def test_doctor_tells_the_cost_of_a_fork_where_the_engine_runs(
    monkeypatch, pinned, registered, mappings, status, words
):
    for copies in (True, False):
        info = rdmafork.kernel_info()._replace(copy_on_fork_trusted=copies)
        monkeypatch.setattr(rdmafork, "kernel_info", lambda info=info: info)
        row = doctor_process._cost(pinned << 20, mappings, registered << 20)
        if copies or status == "ok":
            assert row.status == status and words in row.evidence, row
        else:
            assert row.status == "problem" and "device lose up to" in row.evidence, row


@pytest.mark.parametrize(
    ("mappings", "status", "words"),
    [
        ([], "ok", "none"),
        ([mapping(1, "dc io pf", path="/dev/infiniband/uverbs0", shared=True)], "ok", "none"),
        ([mapping(1, "dc", path="anon_inode:[io_uring]", shared=True)], "ok", "none"),
        ([mapping(4, "dc", path="/dev/shm/x", shared=True)], "warning", "4 MiB of that is shared"),
        (
            [mapping(4, "dc"), mapping(4, "wf")],
            "ok",
            "4 MiB that children do not inherit (dc), in 1 mapping, 4 MiB",
        ),
    ],
)
def test_marked_pages_are_a_programs(mappings, status, words):
    row = doctor_process._marked(mappings)
    assert row.status == status and words in row.evidence, row


def test_shared_memory_that_is_marked_is_seen(process):
    def mark():
        memory, address = shared_map(1 << 20)
        assert libc.madvise(address, 1 << 20, 10) == 0
        return memory

    found = looked_at(process(mark))
    assert "1 MiB of that is shared memory" in found["marked pages"].evidence


@pytest.mark.parametrize(("count", "status"), [(100, "ok"), (600, "warning"), (950, "problem")])
def test_mappings_against_the_limit(monkeypatch, count, status):
    monkeypatch.setattr(machine, "number", lambda path: 1000)
    assert doctor_process._count(count, 1).status == status


def test_another_users_process_is_not_seen_into(process):
    pid = process(lambda: True)
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    (row,) = as_nobody(lambda: list(doctor_process.Process(pid).rows()))
    assert row.status == "skipped" and f"sudo rdmafork doctor --pid {pid}" in row.cure


@pytest.mark.parametrize("options", [(), ("--strict",), ("--json",)])
def test_a_check_that_could_not_be_made_is_a_failure_to_look(process, options):
    pid = process(lambda: True)
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    assert as_nobody(lambda: main(["doctor", f"--pid={pid}", *options])) == 2


def test_a_process_that_is_not_there(capsys):
    with open("/proc/sys/kernel/pid_max") as file:
        beyond = int(file.read()) + 1
    for pid in (beyond, 0, -1):
        assert main(["doctor", f"--pid={pid}"]) == 2
        assert "No such process" in capsys.readouterr().err


def test_a_process_without_memory_was_not_looked_at(capsys):
    zombie = os.fork()
    if not zombie:
        os._exit(0)
    try:
        os.waitid(os.P_PID, zombie, os.WEXITED | os.WNOWAIT)
        assert main(["doctor", f"--pid={zombie}"]) == 2
        assert "memory: the process has ended" in capsys.readouterr().out
    finally:
        os.waitpid(zombie, 0)
    if machine.field("/proc/2/status", "PPid") == "0" and not machine.field(
        "/proc/2/status", "VmPin"
    ):  # a container may show another process here, or none
        assert main(["doctor", "--pid=2"]) == 2
        assert "memory: a kernel thread has none" in capsys.readouterr().out


@needs_pins
def test_a_process_whose_main_thread_has_ended_is_looked_at():
    source = """if True:
        import ctypes, platform, threading
        from rdmafork import _pins
        pins = _pins.Pins(bytearray(8 << 20))
        main = threading.main_thread().native_id
        def last():
            while "Z" not in open(f"/proc/self/task/{main}/stat").read():
                pass
            input(print("ready"))
        threading.Thread(target=last).start()
        exit = {"x86_64": 60, "aarch64": 93}[platform.machine()]  # of the thread alone
        ctypes.CDLL(None).syscall(exit, 0)
    """
    command = [sys.executable, "-uc", source]
    with waiting(command) as pid:
        found = looked_at(pid)
    assert "8 MiB" in found["pinned pages"].evidence
    assert "librdmafork.so" in found["libraries"].evidence


def test_any_bytes_may_be_the_name_of_a_process():
    name = r"b'a\x1b[31m\xff\n'"
    code = f"import ctypes; ctypes.CDLL(None).prctl(15, {name}, 0, 0, 0); input(print('ready'))"
    with waiting([sys.executable, "-uc", code]) as pid:
        done = doctor("--pid", str(pid))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Process {pid} (a\\x1b[31m\\xff)" in done.stdout


def test_a_process_as_json():
    found = rows("--pid", str(os.getpid()))
    assert found["mappings"]["section"].startswith(f"Process {os.getpid()} (")
    assert Path("/proc/self/comm").read_text().strip() in found["mappings"]["section"]
    assert found[""] == 0
