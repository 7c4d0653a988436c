"""rdmafork exec becomes the program, and refuses programs that no library is preloaded into."""

import json
import os
import platform
import resource
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TIMEOUT, environment
from sysfs import an_open_tmp_path, as_nobody

import rdmafork
from rdmafork.cli import exec as command
from rdmafork.cli import launchers, programs
from rdmafork.cli.elf import Elf
from rdmafork.cli.programs import Refused, check

EXEC = [sys.executable, "-m", "rdmafork", "exec"]
LIBRARY = rdmafork.get_library()
PRELOADED = f"/$LIB/../../../..{LIBRARY}"  # which glibc's loader alone follows
TRUSTED = rdmafork.kernel_info().copy_on_fork_trusted

# A program's view of its own start.
SEEN = """
import json, os, resource, signal, sys
status = dict(line.split(":\\t") for line in open("/proc/self/status") if ":\\t" in line)
print(json.dumps({
    "argv": sys.argv, "environ": dict(os.environ), "pid": os.getpid(), "ppid": os.getppid(),
    "ignored": int(status["SigIgn"], 16), "blocked": int(status["SigBlk"], 16),
    "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK), "cwd": os.getcwd(),
    "umask": os.umask(0), "fds": sorted(os.listdir("/proc/self/fd")),
    "loaded": "librdmafork.so" in open("/proc/self/maps").read(), "stdin": sys.stdin.read(),
}))
"""


def execute(*arguments, env=None, **options):
    return subprocess.run(
        [*EXEC, *arguments], env=environment(env or {}), capture_output=True, text=True,
        timeout=TIMEOUT, check=False, **options,
    )  # fmt: skip


def seen(*arguments, env=None, program=(sys.executable, "-c", SEEN), **options):
    """The view of a program started so."""
    done = execute(*arguments, *program, env=env, input="words", **options)
    assert (done.returncode, done.stderr) == (0, ""), done
    return json.loads(done.stdout)


# ---- the program's environment ----------------------------------------------------------


def test_the_program_sees_only_the_promised_environment():
    plain = subprocess.run(
        [sys.executable, "-c", SEEN], env=environment({}), input="words", text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    without, under = json.loads(plain.stdout), seen("--")
    added = {"LD_PRELOAD": PRELOADED, "RDMAFORK_EXEC": "1"}
    if not TRUSTED:
        added |= {"RDMAV_FORK_SAFE": "1", "RDMAV_HUGEPAGES_SAFE": "1"}
    assert under.pop("environ") == without.pop("environ") | added
    assert (under.pop("loaded"), without.pop("loaded")) == (True, False)
    assert under.pop("memlock") == [resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]] * 2
    assert under.pop("ppid") == without.pop("ppid") == os.getpid()
    for name in ("memlock", "pid"):
        without.pop(name)
        under.pop(name, None)
    assert under == without


@pytest.mark.parametrize("name", ["mpirun", "mpiexec.hydra", "mpirun.openmpi", "accelerate"])
@pytest.mark.parametrize(
    "wrapper", [(), ("env", "X=1"), ("timeout", "-s", "KILL", "60", "nice", "-n", "1")]
)
def test_before_a_launcher_it_says_where_it_belongs(tmp_path, name, wrapper):
    launcher = tmp_path / name
    launcher.write_text("#!/bin/sh\necho launched\n")
    launcher.chmod(0o755)
    for options in ((), ("--report", str(tmp_path / "r.json"))):
        done = execute(*options, "--", *wrapper, str(launcher))
        assert (done.returncode, done.stdout) == (0, "launched\n")
        said = " ".join(done.stderr.split())
        assert said.startswith(
            f"rdmafork exec: {name} launches other processes; put rdmafork exec after"
        )
        assert said.endswith("does not know the ranks") == (not options)
    # As a rank of another launcher it is where it belongs.
    rank = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    assert not execute("--", *wrapper, str(launcher), env=rank).stderr


def test_before_a_launcher_that_is_a_module_it_says_where_it_belongs(tmp_path):
    (tmp_path / "torch/distributed").mkdir(parents=True)
    (tmp_path / "torch/distributed/run.py").write_text("print('launched')")
    command = [sys.executable, "-m", "torch.distributed.run", "x.py"]
    done = execute("--", *command, env={"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (0, "launched\n")
    assert done.stderr.startswith("rdmafork exec: torch.distributed.run launches other processes")


@pytest.mark.parametrize("wrapper", [(), ("env", "X=1"), ("timeout", "-s", "KILL", "60")])
def test_a_program_with_the_name_of_a_launcher_among_its_arguments_is_none(wrapper):
    done = execute("--", *wrapper, "echo", "mpirun", "nice", "srun")
    assert (done.stdout, done.stderr) == ("mpirun nice srun\n", "")


@pytest.mark.parametrize(
    "rank",
    [
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.1"},
        {"RANK": "1", "TORCHELASTIC_RUN_ID": "none", "OMPI_COMM_WORLD_RANK": "0"},
    ],
    ids=["mpirun", "srun", "torchrun in mpirun"],
)
def test_a_rank_of_open_mpi_does_not_warn_of_forks(rank):
    assert seen(env=rank)["environ"]["OMPI_MCA_mpi_warn_on_fork"] == "0"
    asked = rank | {"OMPI_MCA_mpi_warn_on_fork": "1"}
    assert seen(env=asked)["environ"]["OMPI_MCA_mpi_warn_on_fork"] == "1"
    assert "OMPI_MCA_mpi_warn_on_fork" not in seen()["environ"]


def test_its_argv_is_left_as_it_is():
    arguments = ["--", "--mode", "x", "-h", "", "--report=y", "a b", "--version", "\udcff"]
    program = [sys.executable, "-c", "import sys; print(ascii(sys.argv))"]
    for before in ((), ("--",), ("--mode", "eager", "--"), ("--trace-forks",)):
        done = execute(*before, *program, *arguments)
        assert done.stdout == f"{['-c', *arguments]!a}\n", done


def test_it_becomes_the_program_and_leaves_nothing_between():
    with subprocess.Popen(
        [*EXEC, "sh", "-c", "echo $$; read line"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=environment({}),
    ) as process:  # fmt: skip
        assert int(process.stdout.readline()) == process.pid
        assert os.readlink(f"/proc/{process.pid}/exe") == os.path.realpath(shutil.which("sh"))
        process.stdin.write(b"\n")


@pytest.mark.parametrize("status", [0, 1, 2, 125, 255])
def test_the_exit_status_is_the_programs(status):
    assert execute("--", "sh", "-c", f"exit {status}").returncode == status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGPIPE])
def test_a_signal_ends_it_as_it_ends_the_program(number):
    with subprocess.Popen(
        [*EXEC, "sh", "-c", "echo up; while :; do sleep 1; done"], stdout=subprocess.PIPE,
        env=environment({}), start_new_session=True,
        # A test run in the background may have been started with it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        assert process.stdout.readline() == b"up\n"
        os.killpg(process.pid, number)
    assert process.returncode == -number


def test_the_c_locale_is_not_made_another():
    under = seen(env={"LC_ALL": None, "LC_CTYPE": None, "LANG": None, "PYTHONCOERCECLOCALE": "0"})
    assert "LC_CTYPE" not in under["environ"]
    done = execute("env", env={"LC_ALL": None, "LC_CTYPE": None, "LANG": None})
    assert "LC_CTYPE" not in done.stdout
    assert "LC_CTYPE=POSIX" in execute("env", env={"LC_ALL": None, "LC_CTYPE": "POSIX"}).stdout


def test_options_are_variables(tmp_path):
    under = seen(
        "--mode", "eager", "--trace-forks", "--keep-devices", "--report", "r.json", "--",
        cwd=tmp_path,
        env={
            "PYTHONPATH": str(Path(rdmafork.__file__).parent.parent),
            "RDMAFORK_TRUST_COPYING": None,
        },
    )  # fmt: skip
    environ = under["environ"]
    assert {name: value for name, value in environ.items() if name.startswith("RDMAFORK_")} == {
        "RDMAFORK_EXEC": "1",
        "RDMAFORK_MODE": "eager",
        "RDMAFORK_TRACE_FORKS": "1",
        "RDMAFORK_KEEP_DEVICES": "1",
        "RDMAFORK_REPORT": str(tmp_path / "r.json"),
        "RDMAFORK_PID": str(under["pid"]),
    }


def test_no_variable_of_libibverbs_is_set_where_copying_is_trusted():
    found = [name for name in seen()["environ"] if name.startswith(("RDMAV_", "IBV_"))]
    assert found == ([] if TRUSTED else ["RDMAV_FORK_SAFE", "RDMAV_HUGEPAGES_SAFE"])
    kept = seen(env={"RDMAV_FORK_SAFE": "0"})["environ"]
    assert kept["RDMAV_FORK_SAFE"] == "0"


def test_the_guide_names_the_limits_of_a_preloaded_library_alone():
    """Where the kernel's copying is not trusted: every variable more that exec sets."""
    untrusted = {"RDMAFORK_TRUST_COPYING": "0"}
    alone = {"LD_PRELOAD": PRELOADED, "RDMAFORK_EXEC": "1"} | untrusted
    done = subprocess.run(
        [sys.executable, "-c", SEEN], env=environment(alone), input="words", text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    added = (
        seen("--", env=untrusted)["environ"].items() - json.loads(done.stdout)["environ"].items()
    )
    assert {name for name, _ in added} == {"RDMAV_FORK_SAFE", "RDMAV_HUGEPAGES_SAFE"}
    guide = Path(__file__).parents[2] / "docs" / "guide" / "unmodified.md"
    _, _, instead = guide.read_text().partition("Where no command can be put before the program")
    for name, value in added:
        assert f"`{name}={value}`" in instead


def options(**changed):
    names = ("mode", "report", "trace_forks", "keep_devices")
    return type("Options", (), dict.fromkeys(names) | changed)


def test_elsewhere_libibverbs_is_asked_to_protect_by_itself(monkeypatch):
    info = rdmafork.kernel_info()._replace(copy_on_fork_trusted=False, copy_on_fork=False)
    monkeypatch.setattr(rdmafork, "kernel_info", lambda: info)
    monkeypatch.setattr(os, "environ", {"RDMAV_HUGEPAGES_SAFE": "0"})
    environ = command._environment(options(), None)
    assert (environ["RDMAV_FORK_SAFE"], environ["RDMAV_HUGEPAGES_SAFE"]) == ("1", "0")
    with pytest.raises(Refused, match="mode lazy needs a kernel that loses no pinned pages"):
        command._environment(options(mode="lazy"), None)


def test_libraries_preloaded_already_come_after(tmp_path):
    other = tmp_path / "libother.so"
    shutil.copy(LIBRARY, other)  # any library; nothing of it is used
    preload = command._preload
    assert preload("") == PRELOADED
    assert preload(f"{other} /x/liby.so") == f"{PRELOADED}:{other}:/x/liby.so"
    for there in (LIBRARY, PRELOADED):
        assert preload(f"{there}:{other}") == f"{PRELOADED}:{other}"
    assert preload(f"{other}:libasan.so.8") == f"libasan.so.8:{PRELOADED}:{other}"
    with pytest.raises(Refused, match="a process can load only one"):
        preload("/opt/other/librdmafork.so")


@pytest.mark.parametrize("path", ["/opt/a b/librdmafork.so", "/opt/a:b/librdmafork.so"])
def test_a_path_that_ld_preload_cannot_hold_is_refused(monkeypatch, path):
    monkeypatch.setattr(rdmafork, "get_library", lambda: path)
    with pytest.raises(Refused, match="LD_PRELOAD does not allow"):
        command._preload("")


def test_under_itself_it_is_preloaded_once():
    under = seen("--", *EXEC, "--")
    assert under["environ"]["LD_PRELOAD"] == PRELOADED


# ---- under launchers --------------------------------------------------------------------


def test_each_rank_has_a_report_of_its_own(tmp_path):
    env = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"}
    under = seen("--report", f"{tmp_path}/r.json", env=env)["environ"]
    assert under["RDMAFORK_RANK"] == "3"
    assert under["RDMAFORK_REPORT"] == f"{tmp_path}/r.rank3.{launchers.host()}.json"
    for path in ("-", "/dev/stderr"):
        assert command._report(path, launchers.launched(env)) == path


def test_a_refusal_says_which_rank_it_is():
    done = execute("nonsense-it-is", env={"PMI_RANK": "2", "PMI_SIZE": "4"})
    assert done.stderr.startswith(f"2@{launchers.host()}: rdmafork exec: there is no")


def test_a_report_that_cannot_be_written_is_told_at_once(tmp_path):
    for path, why in (
        (tmp_path / "none/r.json", f"there is no directory {tmp_path}/none"),
        (tmp_path, "it is a directory"),
    ):
        done = execute("--report", str(path), "true")
        said = " ".join(done.stderr.split())
        assert done.returncode == 125 and "no report can be written" in said and why in said
    gone = f"mkdir {tmp_path}/gone && cd {tmp_path}/gone && rmdir {tmp_path}/gone"
    line = f"{gone} && {shlex.join([*EXEC, '--report', 'r.json', 'true'])}"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, env=environment({}))
    assert done.returncode == 125 and "working directory no longer" in " ".join(done.stderr.split())
    if os.geteuid() == 0:
        with pytest.raises(AssertionError, match="permission denied"):
            as_nobody(lambda: command._report(str(tmp_path / "r.json"), None))


# ---- refusals ---------------------------------------------------------------------------


def refused(program, *arguments, env=None):
    """The exit status and the words of a refusal."""
    with pytest.raises(Refused) as caught:
        check([str(program), *arguments], environment({}) | (env or {}))
    return caught.value.status, str(caught.value)


def test_wrong_usage_is_125():
    for arguments in ((), ("--",), ("--mode", "fast", "true"), ("--nonsense", "true")):
        done = execute(*arguments)
        assert done.returncode == 125 and "rdmafork" in done.stderr and not done.stdout, arguments


def test_no_such_program_is_127(tmp_path):
    done = execute("no-such-program-anywhere")
    assert done.returncode == 127 and "no program no-such-program-anywhere" in done.stderr
    assert refused(tmp_path / "missing") == (127, f"there is no program {tmp_path}/missing")
    why = f"cannot find {tmp_path}/none/app: there is no directory {tmp_path}/none"
    assert refused(tmp_path / "none/app") == (127, why)
    assert refused("true", env={"PATH": str(tmp_path)})[0] == 127


def test_a_file_that_may_not_be_executed_is_126(tmp_path):
    path = tmp_path / "plain"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o644)
    assert refused(path) == (126, f"{path} is not executable: chmod +x")
    assert refused(tmp_path) == (126, f"{tmp_path} is a directory")
    done = execute("--", str(path))
    assert done.returncode == 126 and done.stdout == ""


@pytest.fixture
def script(tmp_path):
    """script(text): an executable file."""
    count = 0

    def write(text):
        nonlocal count
        count += 1
        path = tmp_path / f"script{count}"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        path.chmod(0o755)
        return path

    return write


LOADED = 'print("/librdmafork.so" in open("/proc/self/maps").read())'


@pytest.fixture
def compiled(tmp_path):
    """compiled(name, *flags): a program that says it ran; skipped where it cannot be built."""

    def build(name, *flags, cc="cc"):
        source = tmp_path / "main.c"
        source.write_text('#include <stdio.h>\nint main(void) { puts("ran"); return 0; }\n')
        built = [cc, *flags, "-o", str(tmp_path / name), str(source)]
        if not shutil.which(cc) or subprocess.run(built, capture_output=True).returncode:
            pytest.skip(f"cannot build with {cc} {' '.join(flags)}")
        return tmp_path / name

    return build


def test_a_static_program_is_refused(compiled):
    for flag in ("-static", "-static-pie"):
        status, text = refused(compiled("static", flag))
        assert status == 126 and "is static" in text and "link it dynamically" in text


def test_a_32_bit_program_is_refused(compiled):
    status, text = refused(compiled("small", "-m32"))
    assert status == 126 and "is for 32-bit" in text


def test_a_program_of_another_machine_is_refused(compiled, tmp_path):
    data = bytearray(compiled("own").read_bytes())
    data[18:20] = (243 if platform.machine() != "riscv64" else 62).to_bytes(2, sys.byteorder)
    (tmp_path / "own").write_bytes(data)
    status, text = refused(tmp_path / "own")
    assert status == 126 and f"librdmafork.so is for {programs._own()[0]}" in text


def test_a_program_of_another_c_library_is_refused(compiled):
    path = compiled("musl", "-Wl,--dynamic-linker=/lib/ld-musl-x86_64.so.1")
    status, text = refused(path)
    assert status == 126 and "needs the loader /lib/ld-musl-x86_64.so.1" in text


def test_a_musl_program_that_a_script_starts_runs_without_the_engine(compiled, script):
    path = script(
        f"#!/bin/sh\n{compiled('musl', cc='musl-gcc')} && {sys.executable} -c '{LOADED}'\n"
    )
    done = execute(str(path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\nTrue\n", "")


def test_a_32_bit_program_that_a_script_starts_runs_and_its_loader_says_so(compiled, script):
    small = compiled("small", "-m32")
    if subprocess.run([small], capture_output=True).returncode:
        pytest.skip("32-bit programs do not run here")
    done = execute(str(script(f"#!/bin/sh\n{small} && {sys.executable} -c '{LOADED}'\n")))
    assert (done.returncode, done.stdout) == (0, "ran\nTrue\n")
    (line,) = done.stderr.splitlines()
    assert f"'{PRELOADED}'" in line and line.endswith("(wrong ELF class: ELFCLASS64): ignored.")


def test_a_shell_that_expands_ld_preload_does_no_harm(script):
    text = f"""#!/bin/sh\neval "export LD_PRELOAD=$LD_PRELOAD"\n{sys.executable} -c '{LOADED}'\n"""
    done = execute(str(script(text)))
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_the_loader_itself_may_be_given_a_program(compiled):
    loader = programs._own()[1]
    done = execute(loader, str(compiled("own")))
    assert (done.returncode, done.stdout) == (0, "ran\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else beside it")
@pytest.mark.parametrize(
    ("mode", "owner", "words"),
    [(0o4755, 0, "set-uid"), (0o2755, 0, "set-gid"), (0o6755, 65534, None), (0o755, 0, None)],
)
def test_a_program_with_more_rights_is_refused(compiled, mode, owner, words):
    path = shutil.copy(compiled("own"), "/var/tmp/rdmafork-test-rights")
    try:
        os.chown(path, owner, owner)
        os.chmod(path, mode)
        if os.statvfs(path).f_flag & os.ST_NOSUID:
            pytest.skip("/var/tmp is mounted nosuid")

        def look():
            try:
                check([path], os.environ)
            except Refused as error:
                return error.status, str(error)

        # The loader itself is asked: it drops LD_PRELOAD from a secure program.
        gets = as_nobody(lambda: preloaded_into(path))
        said = as_nobody(look)
        assert gets == (words is None)
        if words:
            assert said[0] == 126 and words in said[1] and "sudo rdmafork exec" in said[1]
        else:
            assert said is None
        check([path], os.environ) if owner == 0 else None  # it becomes root
    finally:
        os.unlink(path)


def preloaded_into(path):
    """Does the loader try the file that LD_PRELOAD names? It says so where there is none."""
    done = subprocess.run([path], env={"LD_PRELOAD": "/no/such.so"}, capture_output=True, text=True)
    assert done.stdout == "ran\n"
    return "cannot be preloaded" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setcap"), reason="needs root and setcap")
def test_a_program_with_file_capabilities_is_refused(compiled):
    path = shutil.copy(compiled("own"), "/var/tmp/rdmafork-test-rights")
    try:
        os.chmod(path, 0o755)
        command = ["setcap", "cap_net_raw+ep", path]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("file capabilities cannot be set here")

        def look():
            try:
                check([path], os.environ)
            except Refused as error:
                return str(error)

        assert "file capabilities" in as_nobody(look)
        check([path], os.environ)  # root has them anyway
    finally:
        os.unlink(path)


def test_without_new_privileges_set_uid_means_nothing(compiled):
    path = compiled("own")
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("needs root and setpriv")
    os.chown(path, 65534, 65534)
    path.chmod(0o4755)
    assert refused(path)[0] == 126
    done = subprocess.run(
        ["setpriv", "--no-new-privs", *EXEC, str(path)], env=environment({}),
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "ran\n")


# ---- AddressSanitizer -------------------------------------------------------------------


def test_asan_with_its_runtime_as_a_library_is_refused_with_a_way_that_works(compiled):
    path = compiled("asan", "-fsanitize=address", cc="gcc")
    status, text = refused(path)
    with Elf(str(path)) as elf:
        (runtime,) = [name for name in elf.needed if "asan" in name]
    assert status == 126 and f"LD_PRELOAD=$(cc -print-file-name={runtime})" in text
    file = subprocess.run(
        ["gcc", f"-print-file-name={runtime}"], capture_output=True, text=True
    ).stdout.strip()
    for env in ({"LD_PRELOAD": file}, {"ASAN_OPTIONS": "verify_asan_link_order=0"}):
        done = execute(str(path), env=env | {"ASAN_OPTIONS": env.get("ASAN_OPTIONS", "")})
        assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


@pytest.mark.parametrize(
    ("cc", "flags"),
    [("gcc", ("-fsanitize=address", "-static-libasan")), ("clang", ("-fsanitize=address",))],
)
def test_asan_with_its_runtime_inside_runs(compiled, cc, flags):
    done = execute(str(compiled("asan", *flags, cc=cc)))
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


# ---- scripts and env --------------------------------------------------------------------


def test_scripts_are_looked_through(script, compiled):
    static = compiled("static", "-static")
    for text in (
        f"#!{static}\n",
        f"#! {static} -x\n",
        f"#!/usr/bin/env {static}\n",
        f"#!/usr/bin/env -S VAR=1 {static} -u\n",
        f"#!{script(f'#!{static}{chr(10)}')}\n",
    ):
        status, words = refused(script(text))
        assert status == 126 and "is static" in words, text


def test_scripts_run(script):
    path = script(f"#!{sys.executable}\nimport sys; print(sys.argv[1:])\n")
    done = execute("--", str(path), "--mode", "x")
    assert (done.returncode, done.stdout) == (0, "['--mode', 'x']\n")
    assert execute(str(script("#!/usr/bin/env sh\necho $0\n"))).stdout.startswith("/")


def test_a_script_without_its_interpreter(script):
    status, text = refused(script("#!/no/such/interpreter\n"))
    assert status == 127 and "its interpreter /no/such/interpreter does not exist" in text
    assert refused(script("#!\n"))[0] == 126


def test_the_first_line_is_read_as_the_kernel_reads_it(script):
    for text, name in (
        (b"#!/bin/sh\r\n", "/bin/sh\\x0d"),
        (b"#!/usr/bin/env sh\r\n", "sh\\x0d"),
        (b"#!/bin/sh\xa0-e\n", "/bin/sh\\xa0-e"),
    ):
        path = str(script(text))
        done = execute(path)
        assert done.returncode == 127 and f" {name} " in " ".join(done.stderr.split()), done.stderr
        assert subprocess.run(["sh", "-c", "exec $0", path], capture_output=True).returncode == 127
    assert execute(str(script(b"#!/bin/sh\0x\necho ran\n"))).stdout == "ran\n"


def test_a_file_without_a_first_line_that_says_how(script):
    status, text = refused(path := script("echo hello\n"))
    assert status == 126 and f"sh {path}" in text
    assert execute(str(path)).returncode == 126


def test_env_is_looked_through(compiled):
    static = str(compiled("static", "-static"))
    for arguments in (
        (static,),
        ("A=1", "B=2", static),
        ("-u", "A", static),
        ("--unset=A", "-C", "/", static),
        ("-S", f"A=1 {static} x"),
        ("--", static),
        ("env", static),
    ):
        assert "is static" in refused("env", *arguments)[1], arguments
    check(["env"], os.environ)
    check(["env", "A=1", "true"], os.environ)


def test_env_that_takes_the_library_away_is_refused():
    for arguments in (
        ("-i",), ("-",), ("-vi",), ("-iS",), ("LD_PRELOAD=x",), ("-u", "LD_PRELOAD"),
        ("-uLD_PRELOAD",), ("--unset=LD_PRELOAD",), ("-vuLD_PRELOAD",), ("-S", "-i"),
    ):  # fmt: skip
        status, words = refused("env", *arguments, "true", env={"LD_PRELOAD": "/l.so"})
        assert status == 125 and "LD_PRELOAD" in words, arguments
    status, words = refused("env", "-S", "sh 'x")
    assert status == 125 and "No closing quotation" in words


def test_env_finds_its_program_as_it_is_told_to(script, tmp_path):
    path = script("#!/bin/sh\necho ran\n")
    for arguments in (
        (f"PATH={tmp_path}", path.name),
        ("-C", str(tmp_path), f"./{path.name}"),
        (f"--chdir={tmp_path.parent}", f"{tmp_path.name}/{path.name}"),
        ("-C", str(tmp_path.parent), "env", "-C", tmp_path.name, f"./{path.name}"),
    ):
        done = execute("env", *arguments)
        assert (done.returncode, done.stdout) == (0, "ran\n"), (arguments, done.stderr)
    assert refused("env", "-u", "PATH", path.name, env={"PATH": f"{tmp_path}:/usr/bin"})[0] == 127


def test_scripts_that_are_each_others_interpreters_end(script):
    path = script("")
    path.write_text(f"#!{path}\n")
    check([str(path)], os.environ)  # the kernel says ELOOP, or another error
    assert execute(str(path)).returncode == 126


def test_a_program_that_may_only_be_executed_is_let_through(compiled):
    path = compiled("own")
    path.chmod(stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    if os.geteuid() != 0:
        check([str(path)], os.environ)
        return
    as_nobody(lambda: check([str(path)], os.environ))


# ---- how it behaves ---------------------------------------------------------------------


def test_starting_takes_no_command_but_its_own():
    code = (
        "import sys; from rdmafork.cli import main\n"
        "import os; os.execve = lambda *_: print(*sys.modules)\n"
        "main(['exec', 'true'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment({}), capture_output=True, text=True
    )
    loaded = set(done.stdout.split())
    assert "rdmafork.cli.exec" in loaded
    assert not loaded & {"rdmafork.cli.demo", "rdmafork.cli.doctor", "ctypes", "subprocess"}


def test_it_costs_little_beside_python():
    def seconds():
        """Of the processor, by children that have ended: not of waiting for it."""
        used = os.times()
        return used.children_user + used.children_system

    start = seconds()
    assert execute("true").returncode == 0
    once = seconds() - start
    start = seconds()
    subprocess.run([sys.executable, "-c", "import rdmafork, argparse"], check=True)
    assert once < 5 * (seconds() - start) + 1
