"""A program in the environment of "rdmafork exec": the engine, children, the report."""

import contextlib
import errno
import fcntl
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from conftest import TIMEOUT, child, compile_c, environment, fork_once, needs_pins, run
from memory import PAGE, private_map, vm_flags
from standin import DIRECT, OTHER_CODE, SOURCE, Builder, load, works, x86_64

import rdmafork
from rdmafork.cli import main

SETTINGS = {"RDMAFORK_EXEC": "1"}


def execute(command, env=None, **options):
    """Run a program as "rdmafork exec" would."""
    settings = {**SETTINGS, "LD_PRELOAD": rdmafork.get_library(), **(env or {})}
    options = {"capture_output": True, **options}
    return subprocess.run(command, env=environment(settings), **options)


def python(source, *args, env=None, **options):
    return execute([sys.executable, "-c", source, *map(str, args)], env, **options)


@pytest.fixture
def build(tmp_path):
    return Builder(tmp_path)


@pytest.fixture
def report(tmp_path):
    """(path, function that reads the lines)"""
    path = tmp_path / "report.json"
    return path, lambda: [json.loads(line) for line in path.read_text().splitlines()]


def preloaded(function, *args, **env):
    return run(function, *args, env={**SETTINGS, **env}, preload=rdmafork.get_library())


# ---- the engine ------------------------------------------------------------------------------


@x86_64
def test_it_runs_unasked_and_serves_libraries_loaded_later(build):
    preloaded(_unasked, build("a.so"), build("b.so", DIRECT))


def _unasked(*paths):
    expected = "lazy" if rdmafork.kernel_info().copy_on_fork_trusted else "eager"
    assert rdmafork.stats().mode == expected
    memory, address = private_map(PAGE)
    with rdmafork.register(memory) as registration:
        assert registration.protected
        fork_once()
        assert "dc" in vm_flags(address)
    libraries = [load(path, os.RTLD_DEEPBIND) for path in paths]
    fork_once()
    for library in libraries:
        works(library)


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_registrations_that_come_and_go_leave_no_mappings(mode):
    """Thousands of them, overlapping, with forks in between, as a transfer engine makes them."""
    source = """
        import ctypes, mmap, os, random
        libc = ctypes.CDLL(None, use_errno=True)
        for name in ("ibv_dontfork_range", "ibv_dofork_range"):
            getattr(libc, name).argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        nbytes = 16 << 20
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        chance = random.Random(1)

        def mappings():
            inside = 0
            with open("/proc/self/maps") as file:
                for line in file:
                    low, high = (int(bound, 16) for bound in line.split()[0].split("-"))
                    inside += low < start + nbytes and start < high
            return inside

        def fork():
            pid = os.fork()
            if not pid:
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0

        before, most, live = mappings(), 0, []
        for count in range(6000):
            first = chance.randrange(nbytes - 50_000)
            live.append((start + first, chance.randrange(1, 50_000)))
            assert libc.ibv_dontfork_range(*live[-1]) == 0
            if len(live) > 100:
                assert libc.ibv_dofork_range(*live.pop(chance.randrange(len(live)))) == 0
            if count % 200 == 0:
                fork()
                most = max(most, mappings())
        for span in live:
            assert libc.ibv_dofork_range(*span) == 0
        fork()
        print(before, most, mappings())
    """
    env = {"RDMAFORK_MODE": mode} if rdmafork.kernel_info().copy_on_fork_trusted else {}
    done = python(textwrap.dedent(source), env=env)
    assert done.returncode == 0, done.stderr
    before, most, after = map(int, done.stdout.split())
    assert before == after == 1 and most > 50


def test_the_mode_is_the_environment_s():
    assert preloaded(_mode, RDMAFORK_MODE="eager") == "eager"
    assert run(_mode, env={"RDMAFORK_EXEC": None}, preload=rdmafork.get_library()) is None


def _mode():
    return rdmafork.stats().mode


def test_a_failure_is_told_once_and_the_program_runs(report):
    path, lines = report
    env = {"RDMAFORK_MODE": "bogus", "RDMAFORK_REPORT": str(path)}
    done = python("import os; os.fork() or os._exit(0); print('here')", env=env, text=True)
    assert (done.returncode, done.stdout) == (0, "here\n")
    message = done.stderr.removesuffix("\n")
    with pytest.raises(OSError) as caught:
        run("import rdmafork; rdmafork.fork_init()", env={"RDMAFORK_MODE": "bogus"})
    assert message == f"rdmafork: not started: {caught.value.strerror}"
    assert "RDMAFORK_MODE=bogus" in message
    (line,) = lines()
    assert (line["mode"], line["errors"]) == (None, [message])


# ---- the report ------------------------------------------------------------------------------


WORK = """
import os, sys, rdmafork
memory = [bytearray(1 << 20) for _ in range(3)]
first = rdmafork.register(memory[0])
for i in range(4):
    if not os.fork():
        os._exit(0)
    os.wait()
rdmafork.register(memory[1]).close()
print(rdmafork.stats().marked_bytes)
"""


def test_one_line_reports_a_process(report):
    path, lines = report
    done = python(WORK, env={"RDMAFORK_REPORT": str(path), "RDMAFORK_RANK": "7"}, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    marked = int(done.stdout)
    (line,) = lines()
    kernel = rdmafork.kernel_info()
    assert {name: line[name] for name in ("host", "rank", "program", "forks", "unbalanced")} == {
        "host": os.uname().nodename,
        "rank": "7",
        "program": sys.executable,
        "forks": 4,
        "unbalanced": 0,
    }
    assert line["rdmafork"] >= 2
    assert line["ppid"] == os.getpid() != line["pid"]
    assert line["mode"] == ("lazy" if kernel.copy_on_fork_trusted else "eager")
    assert line["kernel"]["release"] == kernel.release
    assert line["kernel"]["copy_trusted"] == kernel.copy_on_fork_trusted
    assert line["registrations"]["total"] == 2
    assert line["marked_bytes"] == {"total": 4 * marked, "last": marked} and marked
    assert line["handler_ns"]["total"] >= line["handler_ns"]["max"] > 0
    assert (line["libraries"], line["errors"], line["fork_callers"]) == ([], [], [])
    assert line["ranges"] == {"calls": 0, "live": 0}
    assert line["unmarked_bytes"] == 0


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        (b"\x01" * 60_000, b"\x01" * 4096),
        (b"x" * 60_000, b"x" * 4096),
        (b"a" + "é".encode() * 3000, b"a" + "é".encode() * 2047),
        (b"\xff" * 5000, b"\xff" * 4096),
    ],
    ids=["control", "plain", "UTF-8", "not UTF-8"],
)
def test_a_long_name_is_cut_and_the_line_is_whole(report, name, cut):
    path, lines = report
    for _ in range(2):
        execute([name], {"RDMAFORK_REPORT": str(path)}, executable=shutil.which("true"), check=True)
    assert [os.fsencode(line["program"]) for line in lines()] == [cut, cut]


def test_lines_are_added_and_a_child_that_exits_has_one_too(report):
    path, lines = report
    path.write_text('{"before": 1}\n')
    source = "import os, sys; child = os.fork(); child and os.wait(); sys.exit(3)"
    done = python(source, env={"RDMAFORK_REPORT": str(path)})
    assert done.returncode == 3
    before, of_child, of_parent = lines()
    assert before == {"before": 1}
    assert of_child["ppid"] == of_parent["pid"]
    assert (of_child["forks"], of_parent["forks"]) == (0, 1)
    assert stat.S_IMODE(path.stat().st_mode) & 0o444


# A child goes on when its parent has ended.
ORPHANS = """
#include <pthread.h>
#include <unistd.h>
static pid_t parent;
static void prepare(void) { parent = getpid(); }
static void child(void) { while (getppid() == parent) usleep(1000); }
__attribute__((constructor)) static void begin(void) { pthread_atfork(prepare, NULL, child); }
"""


def test_the_process_that_forked_is_named_though_it_has_ended(report, tmp_path):
    """As after daemon(): its handler runs before ours."""
    path, lines = report
    (tmp_path / "orphans.c").write_text(ORPHANS)
    orphans = compile_c(tmp_path / "orphans.so", "-shared", "-fPIC", tmp_path / "orphans.c")
    env = {
        "LD_PRELOAD": f"{rdmafork.get_library()}:{orphans}",
        "RDMAFORK_REPORT": str(path),
    }
    source = "import os; print(os.getpid(), flush=True); os.fork() and os._exit(0)"
    done = python(source, env=env, text=True)
    (line,) = lines()
    assert line["ppid"] == int(done.stdout) != line["pid"]


NAMESPACES = """
import ctypes, os
for _ in range(2):
    if ctypes.CDLL(None).unshare(0x20000000):  # CLONE_NEWPID
        os._exit(3)
    if os.fork():
        os.wait()
        break
"""


def test_a_parent_with_the_same_pid_is_named(report):
    """In a namespace of its own either is process 1."""
    path, lines = report
    status = python(NAMESPACES, env={"RDMAFORK_REPORT": str(path)}).returncode
    if status == 3:
        pytest.skip("may make no namespaces")
    assert status == 0
    inner, outer, first = lines()
    assert [each["pid"] for each in (inner, outer)] == [1, 1]
    assert (inner["ppid"], outer["ppid"]) == (1, first["pid"])


def test_a_dash_is_stderr_and_stdout_is_the_program_s():
    done = python("print('out')", env={"RDMAFORK_REPORT": "-"}, text=True)
    assert done.stdout == "out\n"
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["rank"] is None


def test_a_report_that_cannot_be_written_does_no_harm(tmp_path):
    for path in (tmp_path / "none" / "report", "/proc/version", tmp_path):
        done = python("import sys; sys.exit(5)", env={"RDMAFORK_REPORT": str(path)})
        assert (done.returncode, done.stdout) == (5, b"")
        assert f"report {path} cannot be written: ".encode() in done.stderr


def ends_as_ever(*arguments, **options):
    done = execute([shutil.which("false")], *arguments, **options)
    assert done.returncode == 1, done


def test_a_report_that_cannot_be_finished_ends_no_process(tmp_path):
    """By a signal, that is: those of a broken pipe and of a file's greatest size do."""
    reading, writing = os.pipe()
    os.close(reading)
    ends_as_ever({"RDMAFORK_REPORT": "-"}, capture_output=False, stderr=writing)
    os.close(writing)
    ends_as_ever({"RDMAFORK_REPORT": "/dev/full"})
    path = tmp_path / "report"
    path.touch()

    def no_bytes():
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # which Python ignores, and it is inherited
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    ends_as_ever({"RDMAFORK_REPORT": str(path)}, preexec_fn=no_bytes)
    assert path.read_bytes() == b""


def test_a_named_pipe_without_a_reader_is_not_waited_for(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    ends_as_ever({"RDMAFORK_REPORT": str(path)}, timeout=TIMEOUT)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    ends_as_ever({"RDMAFORK_REPORT": str(path)})
    assert json.loads(os.read(reading, 1 << 16))["rank"] is None
    os.close(reading)


def test_without_exec_nothing_is_reported(report):
    path, _lines = report
    python("pass", env={"RDMAFORK_EXEC": None, "RDMAFORK_REPORT": str(path)})
    python("pass", env={"RDMAFORK_EXEC": "0", "RDMAFORK_REPORT": str(path)})
    assert not path.exists()


@pytest.mark.parametrize(
    "rank", ['a"b\\c\n\t', "grüße €😀", "\udcff\udce2\udc82x", "\udced\udca0\udc80"]
)
def test_any_text_is_valid_json(report, rank):
    path, lines = report
    python("pass", env={"RDMAFORK_REPORT": str(path), "RDMAFORK_RANK": rank})
    (line,) = lines()
    assert os.fsencode(line["rank"]) == os.fsencode(rank)


REGISTERS = """
import ctypes, mmap, sys, rdmafork
first, second = map(ctypes.CDLL, sys.argv[1:])
rdmafork.stats()
memory = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
at = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
for call in ("register", "register", "release", "release", "release", "register"):
    assert getattr(first, f"standin_{call}")(at, ctypes.c_size_t(4096)) == 0
"""


@x86_64
def test_the_libraries_and_their_calls(report, build):
    path, lines = report
    paths = [build("a.so", DIRECT), build("b.so", OTHER_CODE)]
    done = python(REGISTERS, *paths, env={"RDMAFORK_REPORT": str(path)}, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = lines()
    first, second = line["libraries"]
    assert first == {"path": paths[0], "how": "patched", "why": None, "protects": 0}
    assert (second["path"], second["how"]) == (paths[1], "refused")
    assert "rdmafork does not recognize their code" in second["why"] and not second["protects"]
    assert line["ranges"] == {"calls": 6, "live": 1}
    assert line["registrations"] == {"total": 3, "live": 1}
    assert line["unbalanced"] == 1


PINS = """
import ctypes, mmap, sys
from rdmafork import _pins
library = ctypes.CDLL(sys.argv[1])
if sys.argv[2:]:
    library.ibv_fork_init()
memory = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
at = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
assert library.standin_register(at, ctypes.c_size_t(len(memory))) == 0
pins = _pins.Pins(memory)
ctypes.CDLL(None).exit(0)
"""


@x86_64
@needs_pins
@pytest.mark.parametrize("protects", [False, True])
def test_memory_pinned_by_a_library_that_is_refused_is_told(report, build, capsys, protects):
    path, lines = report
    library = build(options=DIRECT if protects else OTHER_CODE)
    command = [PINS, library, *(["first"] if protects else [])]
    done = python(*command, env={"RDMAFORK_REPORT": str(path)}, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = lines()
    (found,) = line["libraries"]
    assert (found["how"], found["protects"]) == ("refused", protects)
    assert line["pinned_elsewhere"]["max"] >= 8 << 20
    assert main(["report", str(path)]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert ("8 MiB pinned by a libibverbs that is not intercepted" in told) == (not protects)
    assert ("0 bytes unmarked" in told) == protects


USES = """
#include <stddef.h>
int standin_register(void *base, size_t size);
int main(void) { return standin_register((void *)4096, 4096); }
"""


def test_a_libibverbs_without_dynamic_symbols_is_not_found(report, tmp_path):
    path, lines = report
    (tmp_path / "main.c").write_text(USES)
    program = compile_c(tmp_path / "program", "-O2", tmp_path / "main.c", SOURCE)
    assert execute([program], {"RDMAFORK_REPORT": str(path)}).returncode == 0
    (line,) = lines()
    assert (line["libraries"], line["ranges"]["calls"]) == ([], 0)


@x86_64
@pytest.mark.parametrize(("options", "mode"), [(DIRECT, 0), ([], os.RTLD_DEEPBIND)])
def test_memory_registered_before_a_library_is_served_is_not_protected(build, options, mode):
    preloaded(_registers_early, build("late.so", options), mode)


def _registers_early(path, mode):
    library = load(path, mode)
    memory, address = private_map(2 * PAGE)
    assert library.standin_register(address, PAGE) == 0
    fork_once()
    assert library.standin_register(address + PAGE, PAGE) == 0
    fork_once()
    assert memory and ["dc" in vm_flags(address + at) for at in (0, PAGE)] == [False, True]


@x86_64
def test_the_path_of_a_library_in_the_program_is_the_program_s(report, tmp_path):
    """Linked statically, with symbols that the loader finds."""
    path, lines = report
    (tmp_path / "main.c").write_text("int main(void) { return 0; }\n")
    program = compile_c(tmp_path / "program", "-O2", "-rdynamic", tmp_path / "main.c", SOURCE)
    done = execute(["./program"], {"RDMAFORK_REPORT": str(path)}, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    (library,) = lines()[0]["libraries"]
    assert library["path"] == program


# ---- callers of fork() ------------------------------------------------------------------------


FORKS = """
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
__attribute__((noinline)) void first_caller(void) { if (!fork()) _exit(0); wait(NULL); }
__attribute__((noinline)) void second_caller(void) { if (!fork()) _exit(0); wait(NULL); }
int main(void)
{
	for (int i = 0; i < 5; i++)
		first_caller();
	second_caller();
	return 0;
}
"""


@pytest.fixture
def forks(tmp_path):
    (tmp_path / "forks.c").write_text(FORKS)
    return compile_c(tmp_path / "forks", "-O1", "-rdynamic", tmp_path / "forks.c")


def test_callers_of_fork_are_not_named_by_another_file_in_its_place(report, tmp_path, capsys):
    """The program was built anew before the report was read."""
    path, _ = report
    source = FORKS.replace(
        "__attribute__((noinline)) void", "__attribute__((noinline)) static void"
    )
    (tmp_path / "forks.c").write_text(source)
    options = ("-O1", "-Wl,--build-id", tmp_path / "forks.c")
    program = compile_c(tmp_path / "forks", *options)
    execute([program], {"RDMAFORK_REPORT": str(path), "RDMAFORK_TRACE_FORKS": "1"})
    (tmp_path / "forks.c").write_text(source.replace("_caller(", "_other(") + "int more;\n")
    compile_c(tmp_path / "forks", *options)
    assert main(["report", str(path)]) == 0
    told = capsys.readouterr().out
    assert "5  forks+0x" in told and "_other" not in told


LINKED = {"pie": ["-pie", "-fPIE"], "no-pie": ["-no-pie"], "stripped": ["-s"]}


@pytest.mark.parametrize("linked", LINKED)
def test_static_callers_of_fork_are_named(report, tmp_path, capsys, linked):
    """The program is found by PATH, and its functions are static."""
    path, lines = report
    source = FORKS.replace(
        "__attribute__((noinline)) void", "__attribute__((noinline)) static void"
    )
    (tmp_path / "forks.c").write_text(source)
    program = compile_c(tmp_path / "forks", "-O1", *LINKED[linked], tmp_path / "forks.c")
    env = {"RDMAFORK_REPORT": str(path), "RDMAFORK_TRACE_FORKS": "1"}
    settings = {**env, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert execute(["sh", "-c", "forks; exit 0"], env=settings).returncode == 0
    (line,) = [each for each in lines() if each["program"] == "forks"]
    callers = line["fork_callers"]
    assert [(c["symbol"], c["object"], c["count"]) for c in callers] == [
        (None, program, 5),
        (None, program, 1),
    ]
    assert main(["report", str(path)]) == 0
    told = capsys.readouterr().out.splitlines()
    named = ["first_caller in forks", "second_caller in forks"]
    if linked == "stripped":
        named = [f"forks+{c['offset']:#x}" for c in callers]
    assert [f"{count:>9}  {name}" for count, name in zip((5, 1), named, strict=True)] == told[-2:]


def test_callers_of_fork_are_named(report, forks):
    path, lines = report
    env = {"RDMAFORK_REPORT": str(path), "RDMAFORK_TRACE_FORKS": "1"}
    assert execute([forks], env=env).returncode == 0
    (line,) = lines()
    assert line["program"] == forks
    assert [(c["symbol"], c["object"], c["count"]) for c in line["fork_callers"]] == [
        ("first_caller", forks, 5),
        ("second_caller", forks, 1),
    ]


def test_callers_of_fork_beyond_the_first_64_are_counted_together(report, tmp_path, capsys):
    path, _ = report
    names = [f"caller_{i}" for i in range(70)]
    one = "__attribute__((noinline)) static void {}(void) {{ if (!fork()) _exit(0); wait(NULL); }}"
    lines = ["#include <sys/wait.h>", "#include <unistd.h>", *map(one.format, names)]
    lines.append("int main(void) { " + "".join(f"{name}(); " for name in names) + "return 0; }")
    (tmp_path / "forks.c").write_text("\n".join(lines))
    program = compile_c(tmp_path / "forks", "-O1", tmp_path / "forks.c")
    execute([program], {"RDMAFORK_REPORT": str(path), "RDMAFORK_TRACE_FORKS": "1"}, check=True)
    assert main(["report", str(path)]) == 0
    told = [row.split(maxsplit=1) for row in capsys.readouterr().out.splitlines()[-65:]]
    assert told[0] == ["6", "other places: a process tells its first 64"]
    assert sorted(told[1:]) == sorted(["1", f"{name} in forks"] for name in names[:64])


def test_callers_of_fork_are_not_looked_up_without_need(report, forks):
    path, lines = report
    execute([forks], env={"RDMAFORK_REPORT": str(path)})
    assert lines()[0]["fork_callers"] == [] and lines()[0]["forks"] == 6


# ---- devices ---------------------------------------------------------------------------------


NAMESPACE = ["unshare", "-m"]
DIRECTORY = Path("/dev/infiniband")


@pytest.fixture
def device_directory():
    """A place for device files, mounted over in the namespace of the test."""
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("needs root and unshare (util-linux)")
    made = not DIRECTORY.exists()
    if made:
        DIRECTORY.mkdir()
    yield
    if made:
        DIRECTORY.rmdir()


@pytest.mark.parametrize("keep", [False, True])
def test_a_child_has_no_device_by_whichever_way_it_was_opened(build, device_directory, keep):
    env = {**SETTINGS, "RDMAFORK_KEEP_DEVICES": "1" if keep else None}
    library = rdmafork.get_library()
    try:
        run(_devices, build(), keep, env=env, preload=library, prefix=NAMESPACE)
    except PermissionError as error:
        pytest.skip(f"no device files can be made here: {error}")


def _devices(path, keep):
    subprocess.run(["mount", "-t", "tmpfs", "none", DIRECTORY], check=True)
    names = DIRECTORY / "uverbs7", DIRECTORY / "umad0", DIRECTORY / "rdma_cm"
    for name in names:
        os.mknod(name, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero
    before = os.open(names[0], os.O_RDWR)
    targets = lambda *fds: [os.readlink(f"/proc/self/fd/{fd}") for fd in fds]  # noqa: E731
    # Without a libibverbs there is none, whatever its name.
    assert child(targets, before) == [str(names[0])]
    load(path)
    device, other, manager = (os.open(name, os.O_RDWR) for name in names)
    copy = os.dup(device)
    plain = os.open("/dev/zero", os.O_RDWR)
    devices = [before, device, copy, manager]
    opened = [*[str(names[0])] * 3, str(names[2])]
    expected = opened if keep else ["/dev/null"] * 4
    for _ in range(2):
        assert child(targets, *devices, other, plain) == [*expected, str(names[1]), "/dev/zero"]
    assert targets(*devices) == opened
    assert child(child, targets, device) == expected[:1]
    with pytest.raises(OSError) as caught:
        os.readlink(f"/proc/self/fd/{plain + 1}")
    assert caught.value.errno == errno.ENOENT


# Answers for /dev/zero as the kernel does for an uverbs device.
ANSWERS = """
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

int ioctl(int fd, unsigned long command, ...)
{
	struct stat status;
	va_list values;
	void *argument;

	va_start(values, command);
	argument = va_arg(values, void *);
	va_end(values);
	if (command == 0xc0181b01 && !fstat(fd, &status) && status.st_rdev == makedev(1, 5)) {
		errno = EPROTONOSUPPORT;
		return -1;
	}
	return (int)syscall(SYS_ioctl, fd, command, argument);
}
"""


@pytest.fixture
def answers(tmp_path):
    (tmp_path / "answers.c").write_text(ANSWERS)
    return compile_c(tmp_path / "answers.so", "-shared", "-fPIC", tmp_path / "answers.c")


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("null", [False, True])
def test_a_child_has_no_device_where_there_is_no_proc(build, answers, tmp_path, keep, null):
    if os.geteuid():
        pytest.skip("needs root, to go where there is no /proc")
    env = {**SETTINGS, "RDMAFORK_KEEP_DEVICES": "1" if keep else None}
    root = tmp_path / "root"
    (root / "dev").mkdir(parents=True)
    try:
        if null:
            os.mknod(root / "dev/null", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        preload = [answers, rdmafork.get_library()]
        found = run(_devices_without_proc, build(), root, keep, null, env=env, preload=preload)
        before, after, expected, *children = found
        assert before == after and children == [expected] * 2
    except PermissionError as error:
        pytest.skip(f"no device files can be made here: {error}")


def _devices_without_proc(path, root, keep, null):
    load(path)
    device, _ = (os.open(name, os.O_RDWR) for name in ("/dev/zero", "/dev/full"))
    # Beyond the limit, where nothing can be put in its place.
    far = fcntl.fcntl(device, fcntl.F_DUPFD, 900)
    resource.setrlimit(resource.RLIMIT_NOFILE, (800, 800))
    before = _open_files()
    os.chroot(root)
    expected = dict(before)
    if not keep:
        expected[device] = os.makedev(1, 3) if null else "a pipe that reads b''"
        del expected[far]
    # No test fails here, where nothing can be imported.
    children = child(_open_files), child(child, _open_files)
    return before, _open_files(), expected, *children


def _open_files():
    """The device that each is, or its inode. The pipes of child() are not among them."""
    found = {}
    for fd in range(1024):
        with contextlib.suppress(OSError):
            status = os.fstat(fd)
            found[fd] = status.st_rdev or status.st_ino
            if stat.S_ISFIFO(status.st_mode) and os.get_blocking(fd):
                del found[fd]
            elif stat.S_ISFIFO(status.st_mode):
                found[fd] = f"a pipe that reads {os.read(fd, 1)!r}"
                os.write(fd, b"x")
                found[fd] = "a pipe that is written to"
    return found


# A daemon: it opens and registers, forks twice, and registers again in its grandchild.
DAEMON = """
import ctypes, mmap, os, subprocess, sys
DEVICE = "/dev/infiniband/uverbs0"
subprocess.run(["mount", "-t", "tmpfs", "none", "/dev/infiniband"], check=True)
os.mknod(DEVICE, 0o600 | 0o020000, os.makedev(1, 5))
library, does = ctypes.CDLL(sys.argv[1]), sys.argv[2]
if sys.argv[3:]:
    os.chroot("/dev/infiniband")
    DEVICE = "/uverbs0"
memory = mmap.mmap(-1, 8192, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
def use(call="register", offset=0):
    call = getattr(library, f"standin_{call}")
    assert call(ctypes.c_void_p(at + offset), ctypes.c_size_t(4096)) == 0
if does != "never opens":
    os.open(DEVICE, os.O_RDWR)
use()
print(os.getpid(), flush=True)
for _ in range(2):
    if os.fork():
        os.wait()
        sys.exit()
if does == "opens again":
    os.open(DEVICE, os.O_RDWR)
use("release") if does == "cleans up" else [use(offset=4096) for _ in range(2)]
"""


@pytest.mark.parametrize("chroot", [False, True])
@pytest.mark.parametrize(
    ("does", "keep", "told"),
    [
        ("goes on", False, True),
        ("goes on", True, False),
        ("opens again", False, False),
        ("cleans up", False, False),
        ("never opens", False, False),
    ],
)
def test_a_daemon_that_goes_on_with_its_parent_s_device_is_told_once(
    build, device_directory, answers, report, does, keep, told, chroot
):
    path, lines = report
    env = {"RDMAFORK_REPORT": path.name, "RDMAFORK_KEEP_DEVICES": "1" if keep else None}
    command = [*NAMESPACE, sys.executable, "-c", DAEMON, build(), does]
    if chroot:  # where there is no /proc; the report lies in the directory all the same
        env["LD_PRELOAD"] = f"{answers}:{rdmafork.get_library()}"
        command.append("chroot")
    done = execute(command, env, text=True, cwd=path.parent)
    if "PermissionError" in done.stderr:
        pytest.skip("no device files can be made here")
    assert done.returncode == 0, done.stderr
    parent = int(done.stdout)
    found = [line for line in lines() if line["program"] == sys.executable]
    daemon, middle, opener = found
    assert (daemon["ppid"], middle["ppid"], opener["pid"]) == (middle["pid"], parent, parent)
    message = (
        f"rdmafork: pid {daemon['pid']} uses a device opened before fork() in pid {parent}; "
        "open it in the child, or use --keep-devices"
    )
    assert done.stderr == (f"{message}\n" if told else "")
    assert [line["errors"] for line in found] == [[message] if told else [], [], []]


OPENS = """
import os, subprocess, sys
subprocess.run(["mount", "-t", "tmpfs", "none", "/dev/infiniband"], check=True)
os.mknod("/dev/infiniband/uverbs0", 0o600 | 0o020000, os.makedev(1, 5))
os.open("/dev/infiniband/uverbs0", os.O_RDWR)
if sys.argv[1:]:
    import ctypes
    ctypes.CDLL(sys.argv[1])
"""


@pytest.mark.parametrize("served", [False, True])
def test_a_device_that_no_libibverbs_was_found_for_is_told(build, device_directory, report, served):
    path, lines = report
    command = [*NAMESPACE, sys.executable, "-c", OPENS, *([build()] if served else [])]
    done = execute(command, {"RDMAFORK_REPORT": str(path)})
    if b"PermissionError" in done.stderr:
        pytest.skip("no device files can be made here")
    assert done.returncode == 0, done.stderr
    (line,) = [each for each in lines() if each["program"] == sys.executable]
    assert line["device_without_libibverbs"] == (not served)


def test_a_child_short_of_descriptors_has_no_device_either(build, device_directory):
    library = rdmafork.get_library()
    try:
        run(_short, build(), env=SETTINGS, preload=library, prefix=NAMESPACE)
    except PermissionError as error:
        pytest.skip(f"no device files can be made here: {error}")


def _short(path):
    subprocess.run(["mount", "-t", "tmpfs", "none", DIRECTORY], check=True)
    name = DIRECTORY / "uverbs0"
    os.mknod(name, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    load(path)
    devices = [os.open(name, os.O_RDWR) for _ in range(20)]
    # One descriptor is left to the child, and looking for devices takes that.
    resource.setrlimit(resource.RLIMIT_NOFILE, (devices[-1] + 2,) * 2)
    pid = os.fork()
    if not pid:
        os._exit(sum(_is(fd, name) for fd in devices))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert all(_is(fd, name) for fd in devices)


def _is(fd, path):
    try:
        return os.fstat(fd).st_ino == os.stat(path).st_ino
    except OSError:
        return False
