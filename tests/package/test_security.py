"""Attacks on rdmafork that fail: by the environment, by arguments, by the place it is run.

Elsewhere: that no symbol but the documented is exported (test_cost), that a child holds no handle
of the parent's device (tests/engine/test_descriptors.c, tests/vm/test_children.py), and every call
with any argument (tests/fuzz/fuzz_surface.py, which `make asan-python` runs).
"""

import contextlib
import copy
import ctypes
import gc
import os
import pickle
import platform
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest
from conftest import compile_c, environment, fresh
from memory import Tensor, pool_lock
from self_calling_libibverbs import Elf

import rdmafork
from rdmafork.cli import elf as reader

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = rdmafork.get_library()
# Modules of another Python may lie beside them.
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
MODULES = sorted(Path(rdmafork.__file__).parent.glob(f"_*{SUFFIX}"))
NOBODY = {"user": 65534, "group": 65534, "extra_groups": []}
COMMAND = str(Path(sys.executable).with_name("rdmafork"))

root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
compiler = os.environ.get("CC", "cc")


# ---- flags that objects are built with --------------------------------------------------

GNU_STACK, GNU_RELRO = 0x6474E551, 0x6474E552
DT_TEXTREL, DT_FLAGS, DT_FLAGS_1 = 22, 30, 0x6FFFFFFB
BIND_NOW, NOW, NODELETE = 8, 1, 8
# Where an indirect jump may land: endbr64; bti c, or paciasp, which is one too.
LANDING = {"x86_64": [b"\xf3\x0f\x1e\xfa"], "aarch64": [b"\x5f\x24\x03\xd5", b"\x3f\x23\x03\xd5"]}


def hardening(path):
    """How the file is hardened, in words."""
    elf = Elf(bytearray(Path(path).read_bytes()))
    segments = {header[0]: header for header in elf.headers}
    with reader.Elf(str(path)) as file:
        imports = file.imports()
    found = set()
    if GNU_RELRO in segments:
        found.add("relro")
    if elf.dynamic.get(DT_FLAGS, 0) & BIND_NOW or elf.dynamic.get(DT_FLAGS_1, 0) & NOW:
        found.add("now")
    if GNU_STACK in segments and not segments[GNU_STACK][1] & 1:
        found.add("noexecstack")
    if not any(header[0] == 1 and header[1] & 3 == 3 for header in elf.headers):
        found.add("w^x")
    if DT_TEXTREL not in elf.dynamic:
        found.add("no text relocations")
    if "__stack_chk_fail" in imports:
        found.add("stack protector")
    if any(name.endswith("_chk") for name in imports):
        found.add("fortify")
    if elf.dynamic.get(DT_FLAGS_1, 0) & NODELETE:
        found.add("nodelete")
    return found


def lands(function):
    """Does it begin as a function does that may be jumped to?"""
    return (
        ctypes.string_at(ctypes.cast(function, ctypes.c_void_p), 4) in LANDING[platform.machine()]
    )


ALWAYS = {"relro", "now", "noexecstack", "w^x", "no text relocations", "stack protector"}
needs_landing = pytest.mark.skipif(
    platform.machine() not in LANDING, reason="landing pads are for x86-64 and AArch64"
)


def test_the_library_is_hardened():
    assert hardening(LIBRARY) == {*ALWAYS, "fortify", "nodelete"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name.split(".")[0])
def test_a_module_is_hardened(path):
    # None calls a function of libc that has a checked variant.
    assert hardening(path) - {"fortify"} == ALWAYS


@needs_landing
def test_exported_functions_are_landing_pads():
    library = ctypes.CDLL(LIBRARY)
    for name in ("rf_register", "rf_release", "rf_fork_init", "ibv_dontfork_range"):
        assert lands(library[name]), name
    for path in MODULES:
        name = path.name.split(".")[0]
        assert lands(ctypes.PyDLL(str(path))[f"PyInit_{name}"]), name


TINY = """
#include <string.h>
__attribute__((visibility("default"))) int rf_tiny(const char *from, unsigned long nbytes)
{
	char to[64];

	memcpy(to, from, nbytes);
	return to[nbytes / 2];
}
"""
SETUP = """
import runpy, setuptools, sys
kept = {}
setuptools.setup = lambda **said: kept.update(said)
runpy.run_path("setup.py")
source, output = sys.argv[1:]
flags = kept["ext_modules"][1].extra_compile_args
extensions = [
    setuptools.Extension("rdmafork.librdmafork", [source]),
    setuptools.Extension("rdmafork._tiny", [source], extra_compile_args=flags),
]
named = {"name": "tiny", "version": "0"}  # else setuptools-scm writes rdmafork/_version.py
distribution = setuptools.Distribution({**kept, "ext_modules": extensions, **named})
command = distribution.get_command_obj("build_ext")
command.build_lib = command.build_temp = output
distribution.run_command("build_ext")
"""


@pytest.fixture
def built(tmp_path):
    """built(cc, **flags): a tiny library and a tiny module, as setup.py builds its own."""
    pytest.importorskip("setuptools", reason="setuptools builds the package")

    source = tmp_path / "tiny.c"
    source.write_text(TINY)

    def build(cc, **flags):
        if not shutil.which(cc):
            pytest.skip(f"no {cc}")
        output = tempfile.mkdtemp(dir=tmp_path)
        env = environment({"CC": cc, "CPPFLAGS": None, "CFLAGS": None, "LDFLAGS": None, **flags})
        command = [sys.executable, "-W", "ignore", "-c", SETUP]
        done = subprocess.run(
            [*command, str(source), output], cwd=ROOT, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return sorted(Path(output, "rdmafork").glob("*.so"))

    return build


@pytest.mark.parametrize("cc", ["gcc", "clang"])
def test_a_packager_s_flags_have_the_last_word(built, cc):
    strict = "-O2 -Werror -Wno-unused-command-line-argument"
    hard = f"{strict} -fstack-protector-strong -D_FORTIFY_SOURCE=2"
    for path in built(cc, CFLAGS=hard, LDFLAGS="-Wl,-z,relro -Wl,-z,now"):
        assert hardening(path) >= {*ALWAYS, "fortify"}
    off = f"{strict} -fno-stack-protector -U_FORTIFY_SOURCE"
    for path in built(cc, CFLAGS=off, LDFLAGS="-Wl,-z,lazy -Wl,-z,norelro"):
        assert hardening(path) & {*ALWAYS, "fortify"} == {
            "noexecstack", "w^x", "no text relocations"
        }  # fmt: skip


def test_flags_of_one_s_own_leave_it_optimized(built):
    for path in built(compiler, CFLAGS="-g -D_FORTIFY_SOURCE=2"):
        # gcc and clang have checked functions only where they optimize.
        assert "fortify" in hardening(path), path


def test_the_loader_looks_nothing_up_in_fork_handlers(built):
    """With any flags, and without: the library is bound when it is loaded."""
    for flags in ({}, {"CFLAGS": "-O2", "LDFLAGS": "-Wl,-z,relro"}):
        (library,) = [path for path in built(compiler, **flags) if path.name == "librdmafork.so"]
        assert "now" in hardening(library)


# ---- programs with more rights than their user (AT_SECURE) ------------------------------

# Every variable that means something to rdmafork, with the sign that it was read.
VARIABLES = {
    "RDMAFORK_MODE": "nonsense",
    "RDMAFORK_TRUST_COPYING": "nonsense",
    "RDMAFORK_EXPLAIN_FAULTS": "nonsense",
    "RDMAFORK_TRACE_REGISTRATIONS": "nonsense",
    "RDMAFORK_EXEC": "1",
    "RDMAFORK_KEEP_DEVICES": "1",
    "RDMAFORK_RANK": "7",
    "RDMAFORK_PID": "7",
    "RDMAFORK_TRACE_FORKS": "1",
    "RDMAV_FORK_SAFE": "1",
    "IBV_FORK_SAFE": "1",
    "RDMAV_HUGEPAGES_SAFE": "1",
    "IBV_SHOW_WARNINGS": "1",
}

SEES = """
#include <rdmafork.h>
#include <stdio.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

static char memory[1 << 16];

int main(void)
{
	struct rf_error error;
	struct rf_handle handle;
	int before = rf_mode(), rc;

	rc = rf_register(memory, sizeof(memory), RF_HELD, RF_OMIT, &handle, &error);
	if (rc >= 0)
		rf_release(handle, 0);
	printf("%lu %d %d\\n", getauxval(AT_SECURE), before != RF_MODE_NONE, rc);
	return fflush(stdout);
}
"""


def test_all_variables_are_known_here():
    sources = [*ROOT.glob("csrc/**/*.c"), *Path(rdmafork.__file__).parent.glob("*.py")]
    names = re.compile(
        r'(?:getenv|variable|is_set|copy_variable|environ\.get)\([^;]*?"([A-Z_]+)"', re.S
    )
    found = {name for path in sources for name in names.findall(path.read_text())}
    found |= {"RDMAV_HUGEPAGES_SAFE"}  # accepted, and never read
    assert found == {*VARIABLES, "RDMAFORK_REPORT", "SYSFS_PATH"}


@pytest.fixture
def open_directory():
    """Where an ordinary user gets to, and files may be set-uid."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        if os.statvfs(directory).f_flag & os.ST_NOSUID:
            pytest.skip("/var/tmp is mounted nosuid")
        os.chmod(directory, 0o755)
        yield Path(directory)


def told_to(directory, name):
    """The environment that says everything, and where a report would go."""
    report = directory / name
    return {**VARIABLES, "RDMAFORK_REPORT": str(report), "SYSFS_PATH": str(directory)}, report


@root
def test_a_set_uid_program_reads_no_variable(open_directory):
    library = shutil.copy(LIBRARY, open_directory)
    source = open_directory / "sees.c"
    source.write_text(SEES)
    flags = [f"-I{rdmafork.get_include()}", f"-Wl,-rpath,{open_directory}"]
    program = compile_c(open_directory / "sees", *flags, source, library)

    def run(name):
        env, report = told_to(open_directory, name)
        done = subprocess.run([program], env=env, capture_output=True, text=True, **NOBODY)
        return done.stdout.split(), done.stderr, report.exists()

    # Unchanged, all of them are read: the engine is not started, because of the first one.
    secure, error, _ = run("ordinary")
    assert secure[0] == "0" and int(secure[2]) < 0 and "RDMAFORK_MODE=nonsense" in error
    os.chmod(program, 0o4755)
    assert run("secure") == (["1", "0", "0"], "", False)


@root
def test_neither_does_a_set_uid_python(open_directory):
    """$ORIGIN in a module's RUNPATH counts here too: only a program's own does not."""
    python = shutil.copy(os.path.realpath(sys.executable), open_directory / "python")
    source = f"""
        import sys
        sys.path[:] = {sys.path!r}
        import os, warnings
        warnings.simplefilter("error")
        import rdmafork.devices
        variables = [rdmafork._sysfs.variable(n) for n in ("SYSFS_PATH", "IBV_SHOW_WARNINGS")]
        unset = rdmafork.stats().mode
        rdmafork.fork_init()
        if not os.fork():
            os._exit(0)
        os.wait()
        print(unset, rdmafork.stats().mode, os.geteuid(), variables)
        """
    code = "\n".join(line[8:] for line in source.splitlines())
    os.chmod(python, 0o4755)
    env, report = told_to(open_directory, "report")
    env["PYTHONHOME"] = f"{sys.base_prefix}:{sys.base_exec_prefix}"
    done = subprocess.run(
        [python, "-c", code], env=env, capture_output=True, text=True, cwd="/", **NOBODY
    )
    mode = "lazy" if rdmafork.kernel_info().copy_on_fork_trusted else "eager"
    assert (done.stdout, done.stderr) == (f"None {mode} 0 [None, None]\n", "")
    assert not report.exists()


# ---- where it is run ----------------------------------------------------------------------

# Code that looks in the working directory, or in one named relatively, runs these.
TRAPS = ("rdmafork.py", "json.py", "argparse.py", "sitecustomize.py", "usercustomize.py", "rich.py")
LIBRARIES = ("libibverbs.so.1", "librdmafork.so", "librdmacm.so.1", "libc.so.6")

QUIET = [
    ["doctor"],
    ["devices", "--all"],
    ["demo", "--quick", "--size", "2MiB", "--json"],
    ["exec", "--trace-forks", "--report", "report", "--", "true"],
    ["report", "report"],
]
USED = """
import sys, os, mmap, warnings
import rdmafork
from rdmafork._pins import Pins, unavailable
rdmafork.fork_init(intercept=False)
memory = mmap.mmap(-1, 1 << 16, flags=mmap.MAP_PRIVATE)
buffer = rdmafork.Buffer(1 << 16)
pins = None if unavailable() else Pins(memory)
registration = rdmafork.register(memory)
wiped = rdmafork.register(buffer, on_fork="wipe")
rdmafork.stats(), rdmafork.protected_ranges(), rdmafork.kernel_info()
rdmafork.get_device_list(all=True)
try:
    rdmafork.Context("mlx5_0")
except OSError:
    pass
if not os.fork():
    rdmafork.register(bytearray(1 << 16))
    os._exit(0)
os.wait()
"""


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """The working directory, where every program or module that is run or loaded leaves a file."""
    trap = f"open({str(tmp_path / 'caught')!r}, 'a').write(__file__)\n"
    for name in TRAPS:
        (tmp_path / name).write_text(trap)
    source = tmp_path / "trap.c"
    path = tmp_path / "caught"
    source.write_text(
        "#include <fcntl.h>\n#include <unistd.h>\n"
        "__attribute__((constructor)) static void trap(void)\n"
        f'{{ close(open("{path}", O_CREAT | O_WRONLY, 0600)); }}\n'
    )
    for name in LIBRARIES if shutil.which(compiler) else ():
        command = [compiler, "-shared", "-fPIC", "-o", tmp_path / name, source]
        subprocess.run(command, check=True)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not (tmp_path / "caught").exists(), (tmp_path / "caught").read_text()


# Calls that give a descriptor and can say O_CLOEXEC, and calls that cannot.
GIVES = (
    "open openat openat2 creat socket socketpair accept accept4 pipe pipe2 dup dup2 dup3 eventfd "
    "eventfd2 epoll_create epoll_create1 memfd_create timerfd_create signalfd signalfd4 "
    "inotify_init inotify_init1 userfaultfd perf_event_open open_by_handle_at fanotify_init"
).split()
# Before any code of ours runs, and closed by then; so is what counts the threads at os.fork().
INTERPRETER = re.compile(
    r'pyvenv\.cfg"|gconv-modules\.cache"|locale-archive"|/bin/rdmafork"|/proc/self/stat"|'
    r'/proc/sys/vm/overcommit_memory"'
)
CALLED = re.compile(r"^(?:\d+ +)?(\w+)\((.*)$")
CUT = re.compile(r"^(\d+) +(?:(.*) <unfinished \.\.\.>|<\.\.\. \w+ resumed>(.*))$")


def whole(trace):
    """Its lines; calls that were interrupted by others are put together."""
    begun = {}
    for line in trace.splitlines():
        cut = CUT.match(line)
        if not cut:
            yield line
        elif cut[2] is not None:
            begun[cut[1]] = f"{cut[1]} {cut[2]}"
        else:
            yield begun.pop(cut[1], cut[1]) + cut[3]
    yield from begun.values()


def inheritable(trace):
    """The calls whose descriptors a program would inherit that is run from here."""
    found = []
    for line in whole(trace):
        match = CALLED.match(line)
        if not match or match[1] not in GIVES or "CLOEXEC" in match[2]:
            continue
        if re.search(r"\) += -1 E", match[2]) or INTERPRETER.search(match[2]):
            continue
        if match[1] in ("dup2", "dup3") and re.match(r"\d+(<[^>]*>)?, [012]\b", match[2]):
            continue  # of who is about to become another program
        found.append(line)
    return found


STRACE = ["strace", "-f", "--seccomp-bpf", "-qq", "-s", "300"]


def traced(command, tmp_path, status):
    """strace's output about a command, its interpreter's own start included."""
    if not shutil.which("strace"):
        pytest.skip("needs strace")
    output = tmp_path / "trace"
    calls = ",".join(["?" + name for name in (*GIVES, "execve", "execveat")])
    done = subprocess.run(
        [*STRACE, "-o", output, "-e", f"trace={calls}", *command],
        env=environment({}),
        capture_output=True,
        text=True,
    )
    assert done.returncode in status, (done.returncode, done.stderr[-2000:])
    return output.read_text()


@pytest.mark.parametrize("command", [*QUIET, None], ids=lambda words: words[0] if words else "use")
def test_no_descriptor_outlives_exec_and_nothing_relative_is_run(hostile, command):
    if command is None:
        (hostile / "report").touch()
        words = [sys.executable, "-P" if sys.version_info >= (3, 11) else "-I", "-c", USED]
    else:
        words = [COMMAND, *command]
        if command[0] == "report":
            (hostile / "report").touch()
    with pool_lock():
        trace = traced(words, hostile, (0, 1, 2))
    assert "openat(" in trace
    assert inheritable(trace) == []
    loaded = re.findall(r'open(?:at)?\([^"]*"([^"]*\.(?:so[.\d]*|py[cd]?|pth))"', trace)
    started = re.findall(r'execve\("([^"]*)"', trace)
    assert loaded and started
    assert [path for path in (*loaded, *started) if not path.startswith("/")] == []
    assert [path for path in (*loaded, *started) if is_anybodys(path)] == []


def is_anybodys(path):
    """May any user put it there, or replace it?"""
    with contextlib.suppress(FileNotFoundError):
        for place in (os.stat(path), os.stat(os.path.dirname(path))):
            if stat.S_ISREG(place.st_mode) or stat.S_ISDIR(place.st_mode):
                if place.st_mode & stat.S_IWOTH and not place.st_mode & stat.S_ISVTX:
                    return True
    return False


def test_the_trace_is_read_right():
    """A descriptor that would be inherited is seen, whichever way it is made."""
    for line in (
        'openat(AT_FDCWD, "/x", O_RDONLY|O_CLOEXEC) = 3', "12 pipe2([3, 4], O_CLOEXEC) = 0",
        "12 dup2(7, 1) = 1", 'open("/x", O_RDONLY) = -1 ENOENT (No such file)',
    ):  # fmt: skip
        assert inheritable(line) == []
    cut = '9 openat(AT_FDCWD, "/x", O_RDONLY <unfinished ...>\n8 pidfd_open(9) = 3\n'
    assert inheritable(cut + "9 <... openat resumed>) = -1 ENOENT (No such file)") == []
    assert len(inheritable(cut + "9 <... openat resumed>) = 3")) == 1
    for line in (
        'openat(AT_FDCWD, "/x", O_RDONLY) = 3', "17 dup(1) = 4", "pipe([3, 4]) = 0",
        "9 socket(AF_INET, SOCK_STREAM, 0)", "dup2(3, 9) = 9",
    ):  # fmt: skip
        assert inheritable(line) == [line]


@pytest.mark.parametrize("kind", ["link", "dangling"])
def test_a_report_is_not_written_through_a_link(tmp_path, kind):
    """Which another user can have put into /tmp, where fs.protected_symlinks is off."""
    victim, report = tmp_path / "victim", tmp_path / "report"
    if kind == "link":
        victim.write_text("precious\n")
    report.symlink_to(victim)
    env = {"LD_PRELOAD": LIBRARY, "RDMAFORK_EXEC": "1", "RDMAFORK_REPORT": str(report)}

    def run():
        done = subprocess.run(
            [sys.executable, "-c", "0"], env=environment(env), capture_output=True, text=True
        )
        return done.returncode, done.stdout, done.stderr

    status, out, said = run()
    assert (status, out) == (0, "") and f"report {report} cannot be written: Too many" in said
    assert (victim.read_text() if victim.exists() else None) == (
        "precious\n" if kind == "link" else None
    )
    refused = subprocess.run(
        [COMMAND, "exec", "--report", report, "--", "true"], capture_output=True, text=True
    )
    assert refused.returncode == 125 and "it is a symbolic link" in " ".join(refused.stderr.split())
    report.unlink()
    assert run() == (0, "", "") and '"pid"' in report.read_text()
    # Files of /dev are named so: here.
    env["RDMAFORK_REPORT"] = "/dev/stderr"
    assert '"pid"' in run()[2]


# ---- objects, and how they cannot be made ---------------------------------------------------


@fresh
def test_objects_of_this_process_are_not_copied():
    numpy = pytest.importorskip("numpy")
    rdmafork.fork_init()
    registration = rdmafork.register(Tensor(numpy.zeros(100)))
    # An object of a private class, which holds the tensor's memory.
    hidden = [
        held for held in gc.get_referents(registration) if "rdmafork" in type(held).__module__
    ]
    assert hidden
    from rdmafork._pins import Pins

    kinds = (rdmafork.Context, rdmafork.ProtectionDomain, rdmafork.MemoryRegion, Pins)
    things = [kind.__new__(kind) for kind in kinds]
    things += [registration, rdmafork.Buffer(100), *hidden]
    for thing in things:
        for duplicate in (copy.copy, copy.deepcopy, *[
            lambda thing, version=version: pickle.dumps(thing, version) for version in range(6)
        ]):  # fmt: skip
            with pytest.raises(TypeError, match=r"pickle|__reduce__"):
                duplicate(thing)


@fresh
def test_the_methods_of_a_class_take_its_objects_only():
    """Cython's own functions do not look, which is why no module has them."""
    from rdmafork import _clocks, _core, _pins, _verbs

    kinds = [_verbs.Context, _verbs.ProtectionDomain, _verbs.MemoryRegion, rdmafork.Buffer]
    kinds += [rdmafork.Registration, _pins.Pins, _clocks.Libibverbs]
    for kind in kinds:
        names = [name for base in kind.__mro__[:-1] for name in vars(base)]
        for name in {*names} - {"__new__", "__doc__", "from_address", "attach"}:
            method = getattr(kind, name)
            if callable(method):
                for other in (None, 7, object(), bytearray(9)):
                    with pytest.raises(TypeError):
                        method(other)
    assert type(_core.register) is type(len)


@fresh
def test_a_tensor_that_is_none_is_refused():
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )

    class Tensor:
        def __init__(self, ndim):
            self.header = (ctypes.c_int32 * 32)(*[0] * 4, ndim, 1 | 8 << 8 | 1 << 16)

        def __dlpack_device__(self):
            return 1, 0

        def __dlpack__(self, **_):
            return new(ctypes.addressof(self.header), b"dltensor", None)

    for ndim in (1, 2**31 - 1, -1):
        with pytest.raises(BufferError, match="without a shape"):
            rdmafork.register(Tensor(ndim))
    assert rdmafork.stats().registrations == 0


@fresh
def test_a_context_is_opened_once_whatever_becomes_of_it():
    empty = rdmafork.Context.__new__(rdmafork.Context)
    for _ in range(2):
        with pytest.raises((OSError, TypeError)):
            empty.__init__("no_such_device")
    with pytest.raises(ValueError, match="closed"):
        empty.alloc_pd()
    with pytest.raises((AttributeError, TypeError)):
        empty.device = "mlx5_0"
