"""rdmafork doctor in every broken situation of a machine that can be made here."""

import errno
import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import TIMEOUT, compile_c, environment, run
from seccomp import refuse
from sysfs import a_tree, an_open_tmp_path, as_nobody, forbid, port, vendors

import rdmafork
from rdmafork import _clocks, _huge_pages
from rdmafork.cli import doctor as doctor_command
from rdmafork.cli import doctor_kernel, doctor_limits, doctor_rdma, machine, main
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


# ---- checks that could not be made ---------------------------------------------------------


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
