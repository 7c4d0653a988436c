"""rdmafork doctor in every broken situation that can be made here."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TIMEOUT, compile_c, environment, fork_once, needs_pins, run
from memory import MADV_DONTFORK, PAGE, libc, madvise, private_map, shared_map
from seccomp import refuse
from sysfs import a_tree, an_open_tmp_path, as_nobody, forbid, port, vendors

import rdmafork
from rdmafork import _clocks, _huge_pages, _pins
from rdmafork.cli import doctor as doctor_command
from rdmafork.cli import doctor_kernel, doctor_limits, doctor_process, doctor_rdma, machine, main
from rdmafork.cli.doctor_process import Mapping
from rdmafork.cli.doctor_rows import ok, problem, skipped

COMMAND = [sys.executable, "-m", "rdmafork", "doctor"]
CAPS = "--bounding-set=-ipc_lock"


def doctor(*arguments, prefix=(), env=None, **options):
    return subprocess.run(
        [*prefix, *COMMAND, *arguments],
        env=environment(env or {}),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
        **options,
    )


def rows(*arguments, **options):
    """{what: row} of its output, by --json; "" is the exit status."""
    done = doctor("--json", *arguments, **options)
    assert done.stderr == "", done.stderr
    document = json.loads(done.stdout)
    return {row["what"]: row for row in document["rows"]} | {"": done.returncode}


def expect(row, status, *words):
    assert row["status"] == status, row
    said = f"{row['evidence']} -> {row['cure']}"
    assert all(word in said for word in words), said


needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("setpriv"),
    reason="needs root, unshare and setpriv",
)


def in_namespace(*commands):
    """The prefix that runs a program in a mount namespace of its own, after shell commands."""
    script = " && ".join([*commands, 'exec "$@"'])
    done = subprocess.run(["unshare", "-m", "sh", "-ec", " && ".join(commands) or "true"],
                          capture_output=True, check=False)  # fmt: skip
    if done.returncode:
        pytest.skip(f"this root may not do that: {done.stderr.decode()}")
    return ["unshare", "-m", "sh", "-ec", script, "sh"]


# ---- where all is well ------------------------------------------------------------------


def test_every_row_has_its_evidence_and_each_trouble_its_cure():
    found = rows()
    assert {
        "pinned pages at fork()", "rdmafork", "/proc", "PROCMAP_QUERY", "io_uring",
        "vm.max_map_count", "locked memory", "huge pages", "transparent huge pages",
        "user namespace", "memory limit", "libibverbs",
    } <= set(found)  # fmt: skip
    del found[""]
    for row in found.values():
        assert set(row) == {"section", "status", "what", "evidence", "cure"}
        assert row["evidence"]
        assert row["status"] == "ok" or row["cure"] or row["what"] in ("io_uring", "memory limit")
    info = rdmafork.kernel_info()
    chosen = info.copy_on_fork_trusted_from == "environment"
    status = "ok" if info.copy_on_fork_trusted or chosen else "warning"
    expect(found["pinned pages at fork()"], status, info.release)
    mode = "lazy" if info.copy_on_fork_trusted else "eager"
    expect(found["rdmafork"], "ok", f"mode {mode}", "did not inherit")
    expect(found["vm.max_map_count"], "ok", f"{info.max_map_count:,}")


@pytest.mark.parametrize(
    ("trusted", "known_from", "status", "words"),
    [
        (True, "version", "ok", "safe, but slow"),
        (True, "probe", "ok", "treats pages as Linux 5.19 does"),
        (False, "environment", "ok", "RDMAFORK_TRUST_COPYING=0"),
        (False, "probe", "warning", "before 5.19 it can lose one that migrates"),
        (False, "version", "warning", "before 5.19 it can lose one that migrates"),
    ],
)
def test_how_its_copying_is_known_is_told(monkeypatch, trusted, known_from, status, words):
    info = rdmafork.kernel_info()._replace(
        copy_on_fork=True, copy_on_fork_trusted=trusted, copy_on_fork_trusted_from=known_from
    )
    monkeypatch.setattr(rdmafork, "kernel_info", lambda: info)
    row = doctor_kernel.copying()
    assert row.status == status and words in row.evidence


def test_one_screen_of_eighty_columns():
    done = doctor()
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80 and done.stdout.isascii() and done.stderr == ""
    first = " ".join(lines[:2])
    assert first.startswith(f"rdmafork {rdmafork.__version__}, Linux {os.uname().release}, Python")
    assert [line for line in lines if line.isalpha()] == [
        "Kernel", "Limits", "libibverbs", "Devices", "Environment",
    ]  # fmt: skip
    assert lines[-1].endswith(".") and "problem" in lines[-1] and "\033" not in done.stdout


def test_the_exit_status_tells_problems_and_with_strict_warnings():
    found = rows(env={"RDMAV_HUGEPAGES_SAFE": "1"})
    problems = [row for row in found.values() if row and row["status"] == "problem"]
    assert found[""] == bool(problems)
    assert doctor("--strict", env={"RDMAV_HUGEPAGES_SAFE": "1"}).returncode == 1
    assert doctor(env={"RDMAFORK_MODE": "fast"}).returncode == 1
    assert doctor("--nonsense").returncode == 2


def test_it_starts_no_engine_here():
    code = """
        import rdmafork
        from rdmafork.cli import main
        main(["doctor"]), rdmafork.stats().mode
    """
    status, mode = run(code)
    assert status in (0, 1) and mode is None


@pytest.mark.parametrize(
    ("env", "prefix"),
    [
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"}, "3@"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "1"}, "0@"),
    ],
)
def test_under_a_launcher_every_line_names_its_rank(env, prefix):
    done = doctor(env=env)
    host = os.uname().nodename.partition(".")[0]
    assert all(line.startswith(f"{prefix}{host}: ") for line in done.stdout.splitlines())
    for line in doctor("--json", env=env).stdout.splitlines():
        document = json.loads(line)
        assert (document["rank"], document["host"]) == (int(prefix[0]), host)


def test_quiet_prints_only_rows_that_are_not_ok():
    done = doctor("-q", env={"RDMAV_HUGEPAGES_SAFE": "1"})
    assert "  WARNING RDMAV_HUGEPAGES_SAFE=1: " in done.stdout and "  OK " not in done.stdout
    assert "Kernel" in doctor().stdout and done.stdout.count("\n\n") >= 2


# ---- broken situations ------------------------------------------------------------------


def libibverbs_path():
    try:
        return _clocks.Libibverbs().path
    except OSError as error:
        pytest.skip(f"libibverbs is not installed: {error}")


@needs_root
def test_without_libibverbs(tree):
    path = libibverbs_path()
    prefix = in_namespace(f"mount --bind /dev/null {path}")
    expect(rows(prefix=prefix)["libibverbs"], "warning" if not has_devices() else "problem",
           "cannot be loaded", "install libibverbs1")  # fmt: skip
    # Where there is a device to use it for, it is a problem.
    tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    found = rows(prefix=prefix, env={"SYSFS_PATH": str(tree.root)})
    expect(found["libibverbs"], "problem", "cannot be loaded")
    expect(found["mlx5_0"], "problem", "cannot be used")
    assert found[""] == 1


def has_devices():
    try:
        return bool(rdmafork.get_device_list(all=True))
    except OSError:
        return False


@needs_root
def test_a_mount_namespace_without_dev_infiniband(tree):
    libibverbs_path()
    tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    hide = "if [ -d /dev/infiniband ]; then mount -t tmpfs none /dev/infiniband; fi"
    found = rows(prefix=in_namespace(hide), env={"SYSFS_PATH": str(tree.root)})
    expect(found["mlx5_0"], "problem", "does not exist", "--device=/dev/infiniband/uverbs0")


def test_no_permission_on_the_device(tree):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    forbid(tree)

    def look():
        return list(doctor_rdma.devices())

    (row,) = as_nobody(look)
    assert row.status == "problem" and "no permission" in row.evidence
    assert "udev rule" in row.evidence


@needs_root
def test_little_memory_may_be_locked():
    found = rows(prefix=["prlimit", f"--memlock={64 << 10}", "setpriv", CAPS])
    expect(found["locked memory"], "problem", "64 KiB soft, 64 KiB hard", "LimitMEMLOCK=infinity")
    assert found[""] == 1


@pytest.mark.parametrize(
    ("memlock", "allowed", "status", "words"),
    [
        ((-1, -1), False, "ok", "unlimited"),
        ((64 << 10, 64 << 10), True, "ok", "CAP_IPC_LOCK lifts it"),
        ((64 << 10, -1), False, "warning", "64 KiB soft, unlimited hard"),
        ((8 << 20, 8 << 20), False, "problem", "8 MiB soft, 8 MiB hard"),
        ((1 << 30, 1 << 30), False, "warning", "1 GiB soft, 1 GiB hard"),
    ],
)
def test_locked_memory_is_judged(monkeypatch, memlock, allowed, status, words):
    info = rdmafork.kernel_info()._replace(memlock=memlock)
    monkeypatch.setattr(rdmafork, "kernel_info", lambda: info)
    monkeypatch.setattr(doctor_limits, "_may_lock", lambda: allowed)
    expect(doctor_limits.locked_memory()._asdict(), status, words)


@needs_root
def test_few_mappings_are_allowed(tmp_path):
    (tmp_path / "count").write_text("1000\n")
    prefix = in_namespace(f"mount --bind {tmp_path}/count /proc/sys/vm/max_map_count")
    row = rows(prefix=prefix)["vm.max_map_count"]
    assert row["status"] in ("warning", "problem")  # a larger process may run beside
    expect(row, row["status"], "1,000 mappings", "sysctl -w vm.max_map_count")
    (tmp_path / "count").write_text("20\n")
    expect(rows(prefix=prefix)["vm.max_map_count"], "problem", "has the most")


def test_seccomp_forbids_io_uring():
    done = doctor("--json", preexec_fn=lambda: refuse("io_uring_setup", errno.EPERM))
    (row,) = [row for row in json.loads(done.stdout)["rows"] if row["what"] == "io_uring"]
    expect(row, "warning", "seccomp", "RDMA is not affected")


def test_a_user_namespace():
    if subprocess.run(["unshare", "-Ur", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    found = rows(prefix=["unshare", "-Ur"])
    expect(found["user namespace"], "warning", "uid_map", "--device=/dev/infiniband")
    if rdmafork.kernel_info().memlock[0] != -1:
        assert found["locked memory"]["status"] != "ok"  # its root's capability lifts nothing


@needs_root
def test_a_container_has_little_shared_memory():
    prefix = in_namespace("mount -t tmpfs -o size=64m none /dev/shm")
    expect(rows(prefix=prefix)["/dev/shm"], "warning", "64 MiB of 64 MiB", "--shm-size")
    prefix = in_namespace("mount -t tmpfs none /dev", "mknod /dev/null c 1 3")
    expect(rows(prefix=prefix)["/dev/shm"], "warning", "No such file", "mount -t tmpfs")


@needs_root
def test_proc_is_hidden():
    found = rows(prefix=in_namespace("mount -t tmpfs none /proc"))
    expect(found["/proc"], "problem", "mount -t proc proc /proc")
    assert found["rdmafork"]["status"] == ("problem" if machine_is_lazy() else "ok")
    for what in ("vm.max_map_count", "user namespace", "PROCMAP_QUERY"):
        expect(found[what], "skipped", "without /proc")
    done = doctor("--pid", "1", prefix=in_namespace("mount -t tmpfs none /proc"))
    assert done.returncode == 2 and "/proc is not mounted" in done.stderr


def machine_is_lazy():
    return rdmafork.kernel_info().copy_on_fork_trusted


def test_the_pool_of_huge_pages_is_used_up(monkeypatch):
    numbers = {"nr_hugepages": 8, "free_hugepages": 4, "resv_hugepages": 4}
    monkeypatch.setattr(_huge_pages, "_number", lambda path: numbers[os.path.basename(path)])
    for row in doctor_limits.huge_pages():
        expect(row._asdict(), "warning", "0 of 8 of", "nr_hugepages")
    numbers["resv_hugepages"] = 0
    assert {row.status for row in doctor_limits.huge_pages()} <= {"ok"}


@pytest.mark.parametrize(
    ("free", "reserved", "left"),
    [(8, 3, 5), (0, 2**64 - 8, 0), (6, 2**64 - 2, 6), (2, 6, 0), (8, 2**64 - 4, 0)],
)
def test_the_counters_of_a_pool_wrap(monkeypatch, free, reserved, left):
    """Seen on Linux 6.18 after the end of processes that had pinned huge pages."""
    numbers = {"nr_hugepages": 8, "free_hugepages": free, "resv_hugepages": reserved}
    monkeypatch.setattr(_huge_pages, "_number", lambda path: numbers[os.path.basename(path)])
    assert _huge_pages.pool(2 << 20) == (8, left)


@pytest.mark.parametrize(("used", "status"), [(100 << 20, "ok"), (200 << 20, "warning")])
def test_a_control_group_leaves_too_little_to_copy(monkeypatch, used, status):
    monkeypatch.setattr(machine, "memory_limits", lambda: iter([(300 << 20, used)]))
    expect(doctor_limits.memory_limit()._asdict(), status, "300 MiB of a control group")


def test_no_rdma_in_the_kernel_is_no_problem_of_fork(tree):
    found = rows(env={"SYSFS_PATH": str(tree.root)})
    expect(found["RDMA"], "warning", "no RDMA", "modprobe ib_uverbs")
    tree.classes()
    found = rows(env={"SYSFS_PATH": str(tree.root)})
    expect(found["RDMA"], "warning", "supports RDMA, but has no device", "rdma link add")


def test_devices_are_usable_or_not_and_why(tree):
    vendors(tree)
    tree.add("mlx5_9", "9803:9b03:0067:ac2a", ports={1: port(state="1: DOWN")})
    found = {row.what: row for row in doctor_rdma.devices()}
    assert found["mlx5_0"] == ("ok", "mlx5_0", "usable, port 1 ACTIVE", None)
    expect(found["mlx5_9"]._asdict(), "warning", "port 1 DOWN", "cable")


# ---- libibverbs -------------------------------------------------------------------------


def test_doctor_has_tried_ibv_fork_init():
    path = libibverbs_path()
    found = rows()
    assert path in found["libibverbs"]["evidence"]
    said = found["its ibv_fork_init()"]["evidence"]
    assert ("children do not inherit them" in said) != ("does nothing" in said)


@pytest.mark.parametrize(
    ("found", "trusted", "status", "words"),
    [
        ({"error": None, "after": 2, "absent": False}, True, "ok", "copies all pinned memory"),
        ({"error": None, "after": 2, "absent": False}, False, "warning", "Before Linux 5.19"),
        ({"error": None, "after": 1, "absent": True}, False, "ok", "not inherit them"),
        ({"error": errno.ENOSYS, "after": 0, "absent": False}, True, "warning", "not implemented"),
    ],
)
def test_the_effect_of_ibv_fork_init_is_judged(monkeypatch, found, trusted, status, words):
    info = rdmafork.kernel_info()._replace(
        copy_on_fork_trusted=trusted, copy_on_fork_trusted_from="version"
    )
    monkeypatch.setattr(rdmafork, "kernel_info", lambda: info)
    row = doctor_rdma.fork_support(found)
    assert row.status == status and words in row.evidence


@pytest.fixture
def built(tmp_path):
    """built(*flags): a stand-in for libibverbs, linked so."""
    source = tmp_path / "verbs.c"
    source.write_text(
        "int ibv_dontfork_range(void *base, unsigned long size) { return !base + !size; }\n"
        "int ibv_dofork_range(void *base, unsigned long size) { return !base + !size; }\n"
        "int ibv_reg_mr(void *b) { return ibv_dontfork_range(b, 1) + ibv_dofork_range(b, 1); }\n"
    )

    def build(name, *flags):
        return compile_c(tmp_path / name, "-shared", "-fPIC", "-O0", *flags, source)

    return build


@pytest.mark.parametrize("flags", [(), ("-Wl,-z,now",), ("-fno-plt",)])
def test_a_library_that_calls_by_symbol_can_be_answered(built, flags):
    assert doctor_rdma.interception(built("libibverbs.so.1", *flags)).status == "ok"


def test_a_library_bound_inside_cannot(built):
    row = doctor_rdma.interception(built("libibverbs.so.1", "-Wl,-Bsymbolic-functions"))
    assert row.status == "warning" and "as in Ubuntu" in row.evidence and row.cure


def test_copies_that_wheels_bring_are_found(built, tmp_path, monkeypatch):
    (tmp_path / "mooncake.libs").mkdir()
    path = built("mooncake.libs/libibverbs-1a2b3c.so.1.14", "-Wl,-Bsymbolic-functions")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert doctor_rdma.bundled() == [path]


def test_a_library_that_is_none_is_no_crash(tmp_path):
    (tmp_path / "libibverbs.so.1").write_bytes(b"\x7fELF" + b"\xff" * 60)
    assert doctor_rdma.interception(str(tmp_path / "libibverbs.so.1")).status == "warning"


# ---- variables --------------------------------------------------------------------------


def said(monkeypatch, **env):
    for name in ("RDMAV_FORK_SAFE", "IBV_FORK_SAFE", "RDMAV_HUGEPAGES_SAFE", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return {row.what: row for row in doctor_rdma.variables()}


def test_RDMAV_FORK_SAFE_0_is_warned_of(monkeypatch):
    found = said(monkeypatch, RDMAV_FORK_SAFE="0", RDMAV_HUGEPAGES_SAFE="0")
    expect(found["RDMAV_FORK_SAFE=0"]._asdict(), "warning", "before rdma-core 40", "unset")
    expect(
        found["RDMAV_HUGEPAGES_SAFE=0"]._asdict(), "warning", "any value switches that on", "unset"
    )


@pytest.mark.parametrize("value", ["0", "", "1", "no"])
def test_the_trap_of_zero_is_as_doctor_says(value):
    """libibverbs of rdma-core 40 and later: only 0 means no, and its tracker tells."""
    path = libibverbs_path()
    version = _clocks.Libibverbs().version
    if version is None:
        pytest.skip(f"the version of {path} cannot be known")
    if version >= 51 and rdmafork.kernel_info().copy_on_fork:
        pytest.skip("this libibverbs does nothing where the kernel copies")
    code = (
        "import ctypes; verbs = ctypes.CDLL('libibverbs.so.1'); n = ctypes.c_int()\n"
        "verbs.ibv_get_device_list(ctypes.byref(n))\n"
        "import mmap; m = mmap.mmap(-1, 4096, flags=34)\n"
        "verbs.ibv_dontfork_range(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(m))), "
        "ctypes.c_size_t(4096))\n"
        "from rdmafork.cli.doctor_probe import _absent_from_a_child as absent; print(absent(m))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment({"RDMAV_FORK_SAFE": value}),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(value != "0" or version < 40)


def test_variables_that_mean_nothing(monkeypatch):
    found = said(monkeypatch, RDMAFORK_MODE="fast", RDMAFORK_TRUST_COPYING="0")
    expect(found["RDMAFORK_MODE=fast"]._asdict(), "problem", "EINVAL", "lazy")
    assert found["RDMAFORK_TRUST_COPYING=0"].status == "ok"
    found = said(monkeypatch, RDMAFORK_EXPLAIN_FAULTS="off", RDMAFORK_TRACE_REGISTRATIONS="yes")
    expect(found["RDMAFORK_EXPLAIN_FAULTS=off"]._asdict(), "problem", "EINVAL", "0 or 1")
    expect(found["RDMAFORK_TRACE_REGISTRATIONS=yes"]._asdict(), "problem", "EINVAL", "0 or 1")
    found = said(monkeypatch, RDMAFORK_MODE="", RDMAFORK_TRUST_COPYING="no")
    assert found["RDMAFORK_MODE="].status == "ok"
    expect(found["RDMAFORK_TRUST_COPYING=no"]._asdict(), "problem", "EINVAL", "0 or 1")


def test_another_installations_library_is_preloaded(monkeypatch):
    found = said(monkeypatch, LD_PRELOAD="/opt/other/librdmafork.so:/x.so")
    expect(found["LD_PRELOAD"]._asdict(), "problem", "/opt/other/librdmafork.so")
    found = said(monkeypatch, LD_PRELOAD=rdmafork.get_library())
    assert found["LD_PRELOAD"].status == "ok"


# ---- another process --------------------------------------------------------------------


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
    found = {row.what: row for row in doctor_process.Process(pid).rows()}
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

    found = {row.what: row for row in doctor_process.Process(process(hold)).rows()}
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
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        found = {row.what: row for row in doctor_process.Process(process.pid).rows()}
        process.kill()
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
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        found = {row.what: row for row in doctor_process.Process(process.pid).rows()}
        process.kill()
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
    with subprocess.Popen(
        [program], env=environment({"LD_PRELOAD": other}), stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == b"ready\n"
        found = {row.what: row for row in doctor_process.Process(process.pid).rows()}
        process.kill()
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

    found = {row.what: row for row in doctor_process.Process(process(mark)).rows()}
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


def test_an_interpreter_that_cannot_be_started_is_no_problem_of_libraries(monkeypatch, tmp_path):
    """As of another user's Python below /root."""
    (tmp_path / "python").touch(mode=0o600)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    found = {row.what: row for row in [doctor_kernel.engine(), *doctor_rdma.libraries()]}
    for what in ("rdmafork", "libibverbs"):
        text = f"{sys.executable} cannot be started to test it: Permission denied"
        assert found[what] == skipped(what, text)


def test_a_problem_counts_more_than_a_check_that_could_not_be_made(monkeypatch, capsys):
    found = [skipped("memory", "may not be read"), ok("kernel", "fine")]
    monkeypatch.setattr(doctor_command, "SECTIONS", (("Here", lambda: found),))
    assert main(["doctor"]) == 2
    assert "no problems, no warnings, 1 check could not be made." in capsys.readouterr().out
    found.append(problem("limit", "reached"))
    assert main(["doctor"]) == 1


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
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        found = {row.what: row for row in doctor_process.Process(process.pid).rows()}
        process.kill()
    assert "8 MiB" in found["pinned pages"].evidence
    assert "librdmafork.so" in found["libraries"].evidence


def test_any_bytes_may_be_the_name_of_a_process():
    name = r"b'a\x1b[31m\xff\n'"
    code = f"import ctypes; ctypes.CDLL(None).prctl(15, {name}, 0, 0, 0); print(input())"
    with subprocess.Popen(
        [sys.executable, "-uc", code + "; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdin.write(b"ready\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"ready\n"
        done = doctor("--pid", str(process.pid))
        process.kill()
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Process {process.pid} (a\\x1b[31m\\xff)" in done.stdout


def test_a_process_as_json():
    found = rows("--pid", str(os.getpid()))
    assert found["mappings"]["section"].startswith(f"Process {os.getpid()} (")
    assert Path("/proc/self/comm").read_text().strip() in found["mappings"]["section"]
    assert found[""] == 0
