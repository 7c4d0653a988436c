"""The costs of rdmafork, counted and never timed: system calls, memory, references, symbols."""

import array
import contextlib
import ctypes
import gc
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from conftest import both_modes, child, environment, fork_once, fresh, needs_lazy
from memory import PAGE, Cyclic, libc, private_map
from strace import traced

import rdmafork

# ---- system calls -------------------------------------------------------------------------


def engine_calls(section):
    return [call for call in section if re.match(r"madvise|ioctl|open", call)]


@needs_lazy
def test_lazy_registrations_make_no_system_call_at_all():
    sections = traced(
        """
        rdmafork.fork_init("lazy")
        memory, address = private(64)
        other = bytearray(10_000)
        view = memoryview(memory)[100:5000]
        register(memory).close()
        mark("/mark/close")
        for _ in range(1000):
            register(memory).close()
        mark("/mark/context")
        for _ in range(1000):
            with register(other):
                pass
        mark("/mark/collected")
        for _ in range(1000):
            register(view)
        mark("/mark/address")
        for _ in range(1000):
            register_address(address, 5000, owner=memory).close()
        mark("/mark/nested")
        for _ in range(1000):
            with register(memory), register(view) as it, register(other):
                it.protected, it.address, it.closed, it.inherited
        """
    )
    assert sections == {name: [] for name in ("close", "context", "collected", "address", "nested")}


def test_eager_registrations_make_the_two_calls_that_do_it():
    sections = traced(
        """
        rdmafork.fork_init("eager")
        memory, address = private(64)
        middle, at = memoryview(memory)[8 * PAGE : 16 * PAGE], address + 8 * PAGE
        register(middle).close()
        mark("/mark/raw")
        for _ in range(100):
            libc.madvise(at, 8 * PAGE, 10)
            libc.madvise(at, 8 * PAGE, 11)
        mark("/mark/buffer")
        for _ in range(100):
            register(middle).close()
        mark("/mark/collected")
        for _ in range(100):
            register(middle)
        mark("/mark/address")
        for _ in range(100):
            register_address(at, 8 * PAGE).close()
        mark("/mark/owned")
        for _ in range(100):
            register_address(at, 8 * PAGE, owner=memory).close()
        """
    )
    raw = sections.pop("raw")
    assert len(raw) == 200 and "MADV_DONTFORK" in raw[0] and "MADV_DOFORK" in raw[1]
    for name, section in sections.items():
        assert section == raw, name


def test_eager_registrations_of_unaligned_memory_make_two_calls_too():
    """Where copying is trusted: the edges are the kernel's to copy, and need no question."""
    if not rdmafork.kernel_info().copy_on_fork_trusted:
        pytest.skip("this kernel's copying is not trusted")
    sections = traced(
        """
        rdmafork.fork_init("eager")
        memory = bytearray(1 << 20)
        small = bytearray(100)
        register(memory).close()
        mark("/mark/large")
        for _ in range(100):
            register(memory).close()
        mark("/mark/small")
        for _ in range(100):
            register(small).close()
        """
    )
    large = sections["large"]
    assert len(large) == 200
    assert all(re.match("madvise.*MADV_(DONTFORK|DOFORK)", call) for call in large)
    assert sections["small"] == []


@both_modes
def test_registrations_inside_a_registered_arena_make_none(mode):
    sections = traced(
        f"""
        rdmafork.fork_init({mode!r})
        memory, address = private(64)
        arena = register(memory)
        pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)
        parts = [memoryview(memory)[i * 5000 : i * 5000 + 9000] for i in range(40)]
        register(parts[0]).close()
        mark("/mark/one")
        for part in parts:
            register(part).close()
        mark("/mark/many")
        held = [None] * 40
        for i, part in enumerate(parts):
            held[i] = register(part)
        for i in range(40):
            held[i].close()
        mark("/mark/whole")
        register(memory).close()
        """
    )
    assert engine_calls(sections["one"]) == []
    assert engine_calls(sections["many"]) == []
    assert engine_calls(sections["whole"]) == []


@both_modes
def test_a_fork_with_nothing_new_makes_none(mode):
    sections = traced(
        f"""
        rdmafork.fork_init({mode!r})
        def fork():
            pid = os.fork()
            if not pid:
                os._exit(0)
            os.waitpid(pid, 0)
        mark("/mark/empty")
        fork()
        memory, address = private(64)
        kept = [register(memory), register(bytearray(100_000)), register(b"x" * 50_000)]
        fork()
        mark("/mark/again")
        fork()
        fork()
        mark("/mark/cancelled")
        for _ in range(100):
            register_address(address, 8 * PAGE, owner=memory).close()
        fork()
        """
    )
    for name in ("empty", "again", "cancelled"):
        calls = sections[name]
        if name == "empty":  # up to the fork only
            calls = calls[: next(i for i, c in enumerate(calls) if c.startswith("wait4"))]
        calls = engine_calls(calls)
        if mode == "eager" and name == "cancelled":  # it may look whether there is work
            calls = [call for call in calls if not call.startswith("openat")]
        assert calls == [], name


@needs_lazy
def test_adjacent_registrations_are_one_call_at_fork():
    sections = traced(
        """
        rdmafork.fork_init("lazy")
        memory, address = private(256)
        held = [register(memoryview(memory)[i * PAGE : (i + 1) * PAGE]) for i in range(256)]
        held += [register(memoryview(memory)[i * 777 : i * 777 + 20_000]) for i in range(256)]
        mark("/mark/fork")
        pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)
        mark("/mark/release")
        for registration in held:
            registration.close()
        """
    )
    marks = [call for call in sections["fork"] if "MADV_DONTFORK" in call]
    assert len(marks) == 1, marks
    assert f"{256 * PAGE}" in marks[0]


def test_a_fork_before_fork_init_makes_none():
    sections = traced(
        """
        mark("/mark/fork")
        pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)
        """
    )
    assert engine_calls(sections["fork"]) == []


# ---- memory and references ----------------------------------------------------------------


def resident():
    """Counted page by page: statm is told some pages late, by each processor."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"^Rss: +(\d+) kB", text, re.M)[1]) << 10


def refuse_huge_pages():
    """The kernel gives memory huge pages by itself, also long after it was mapped."""
    pr_set_thp_disable = 41
    assert libc.prctl(pr_set_thp_disable, 1, 0, 0, 0) == 0


def pairs(memory, view, count):
    for _ in range(count):
        rdmafork.register(memory).close()
        with rdmafork.register(view):
            pass
        rdmafork.register(memory)


@both_modes
@fresh
def test_two_hundred_thousand_pairs_leave_nothing(mode):
    refuse_huge_pages()
    rdmafork.fork_init(mode)
    memory, address = private_map(8 * PAGE)
    memory[:] = b"m" * len(memory)
    view = memoryview(memory)[100:-100]
    owner = object()
    references = [sys.getrefcount(it) for it in (memory, view, owner, None)]
    pairs(memory, view, 100)
    gc.collect()
    before, engine = resident(), rdmafork.stats().engine_bytes
    tracemalloc.start()
    pairs(memory, view, 100)
    python = tracemalloc.get_traced_memory()[0]
    pairs(memory, view, 1000)
    assert tracemalloc.get_traced_memory()[0] <= python + 1000
    tracemalloc.stop()
    pairs(memory, view, 200_000 // 3 if mode == "lazy" else 20_000)
    for _ in range(1000):
        rdmafork.register_address(address, 100, owner=owner)
    assert rdmafork.stats().engine_bytes == engine
    assert resident() - before < 512 * 1024
    now = [sys.getrefcount(it) for it in (memory, view, owner)]
    assert now == references[:3]
    assert rdmafork.stats().registrations == 0


@both_modes
@fresh
def test_failures_leave_nothing(mode):
    refuse_huge_pages()
    rdmafork.fork_init(mode)
    memory = bytearray(100)
    strided = memoryview(memory)[::2]
    references = [sys.getrefcount(it) for it in (memory, strided)]

    def fail(count):
        for _ in range(count):
            for use in (
                lambda: rdmafork.register(strided),
                lambda: rdmafork.register(7),
                lambda: rdmafork.register_address(1 << 62, 100_000),
                lambda: rdmafork.register_address((1 << 64) - 1, 1, owner=memory),
            ):
                with pytest.raises((BufferError, OSError, TypeError, OverflowError)):
                    use()

    fail(100)
    gc.collect()
    before, engine = resident(), rdmafork.stats().engine_bytes
    fail(2000)
    gc.collect()
    assert resident() - before < 512 * 1024
    assert rdmafork.stats().engine_bytes == engine
    assert [sys.getrefcount(it) for it in (memory, strided)] == references


@both_modes
@fresh
def test_forks_leave_nothing(mode):
    rdmafork.fork_init(mode)
    memory, _address = private_map(64 * PAGE)
    memory[:] = b"m" * len(memory)

    def forks(count):
        for i in range(count):
            with rdmafork.register(memoryview(memory)[i % 7 * PAGE : -i % 5 * PAGE or None]):
                fork_once()

    forks(20)
    before, descriptors = rdmafork.stats(), os.listdir("/proc/self/fd")
    maps = Path("/proc/self/maps").read_text().count("\n")
    forks(200)
    after = rdmafork.stats()
    assert after.engine_bytes == before.engine_bytes
    assert (after.ranges, after.marked_bytes, after.still_marked_bytes) == (0, 0, 0)
    assert os.listdir("/proc/self/fd") == descriptors
    assert Path("/proc/self/maps").read_text().count("\n") <= maps + 4


@both_modes
@fresh
def test_a_buffer_that_holds_its_registration_is_collected(mode):
    rdmafork.fork_init(mode)
    for _ in range(100):
        memory = Cyclic(1 << 16)
        memory.registration = rdmafork.register(memory)
        owner = Cyclic(10)
        owner.registration = rdmafork.register_address(0, 0, owner=owner)
    del memory, owner
    gc.collect()
    assert rdmafork.stats().registrations == 0
    assert not [it for it in gc.get_objects() if type(it) is Cyclic]


class Finalized(bytearray):
    """The collector finalizes it before the registration's closer, which is garbage too."""

    def __del__(self):
        self.registration.close()
        del self.registration
        self.made.append(rdmafork.register(Cyclic(10)))


@both_modes
@fresh
def test_a_finalizer_may_drop_a_registration_and_make_another(mode):
    rdmafork.fork_init(mode)
    made = []
    for _ in range(100):
        memory = Finalized(1 << 16)
        memory.made, memory.registration = made, rdmafork.register(memory)
        del memory
        gc.collect()
    assert [it.closed for it in made] == [False] * 100
    assert rdmafork.stats().registrations == 100
    for registration in made:  # these, too, the collector closes
        registration.obj.registration = registration
    del made, registration
    gc.collect()
    assert rdmafork.stats().registrations == 0
    assert not [it for it in gc.get_objects() if type(it) is Cyclic]


class Holder:
    pass


def views():
    """Buffers that the collector may clear before their registrations."""
    private = bytearray(100_000)
    yield memoryview(private)
    yield memoryview(memoryview(private)[10:])[10:]
    yield memoryview(mmap.mmap(-1, 1 << 16))[10:]
    yield memoryview(array.array("d", bytes(1 << 16)))[2:]
    yield memoryview(rdmafork.Buffer(1 << 16))[10:]
    yield (ctypes.c_char * 50_000).from_buffer(private)
    if numpy := sys.modules.get("numpy"):
        yield memoryview(numpy.zeros(1 << 16))[10:]


@both_modes
@pytest.mark.parametrize("first", [False, True])
@fresh
def test_a_view_is_collected_after_its_registration(mode, first):
    with contextlib.suppress(ImportError):
        import numpy  # noqa: F401
    rdmafork.fork_init(mode)
    gc.disable()
    for _ in range(3):  # objects made in place of collected ones are collected, too
        for view in views():
            count = rdmafork.stats().registrations  # of the Buffer
            holder = Holder()
            holder.itself, holder.parts = holder, [1]
            if not first:
                gc.collect(0)  # it is older, so the collector comes to it later
            holder.parts.append(rdmafork.register(view))
            assert holder.parts[1].obj is view
            if isinstance(view, memoryview):
                with pytest.raises(BufferError):
                    view.release()
            assert rdmafork.stats().registrations == count + 1
            del holder, view
            gc.collect()
            assert rdmafork.stats().registrations <= count


@fresh
def test_a_child_collects_inherited_registrations():
    rdmafork.fork_init()
    gc.disable()
    holder = Holder()
    holder.itself, holder.parts = holder, [1]
    gc.collect(0)
    view = memoryview(bytearray(100_000))[10:]
    holder.parts.append(rdmafork.register(view))
    del view

    def collect():
        nonlocal holder
        del holder
        gc.collect()
        return rdmafork.stats().registrations

    assert child(collect) == 0
    assert rdmafork.stats().registrations == 1


# ---- importing it ---------------------------------------------------------------------------

IMPORT = """
import os, sys
before = set(sys.modules)
os.access("/mark/begin", 0)
import rdmafork
os.access("/mark/end", 0)
modules = set(sys.modules) - before
files = [m.__file__ for m in list(sys.modules.values()) if getattr(m, "__file__", None)]
rdmafork.NodeType
later = set(sys.modules) - before
import json
print(json.dumps([sorted(modules), sorted(later), os.listdir("/proc/self/task"), files]))
"""


def imported(*prefix):
    """(modules it imports, and with the list of devices; threads; files of all modules).

    Without site, which imports much of what rdmafork could.
    """
    place = {"PYTHONPATH": str(Path(rdmafork.__file__).parent.parent)}
    command = [*prefix, sys.executable, "-S", "-c", IMPORT]
    done = subprocess.run(
        command, env=environment(place), check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


HEAVY = {
    "asyncio", "ctypes", "dataclasses", "inspect", "json", "logging", "numpy", "socket",
    "subprocess", "tempfile", "threading",
}  # fmt: skip
# What the enums of the list of devices take.
ENUMS = {"typing", "enum", "re", "collections", "contextlib", "functools", "rdmafork.devices"}


def test_importing_it_is_modest():
    modules, with_devices, tasks, _files = imported()
    assert "rdmafork._core" in modules
    assert not (HEAVY | ENUMS) & set(modules)
    assert "rdmafork.devices" in with_devices
    assert not HEAVY & set(with_devices)
    assert len(tasks) == 1, "a thread was started"


def test_importing_it_opens_its_modules_and_nothing_else(tmp_path):
    strace = shutil.which("strace")
    if not strace:
        pytest.skip("no strace")
    log = tmp_path / "log"
    *_, files = imported(strace, "-f", "-qq", "-s", "300", "-o", str(log))
    text = log.read_text()
    text = text[text.index('access("/mark/begin') : text.index('access("/mark/end')]
    assert not re.search(r"^\d+ +(clone3?|v?fork|socket)\(", text, re.M)
    opened = re.findall(r'open(?:at)?\((?:AT_FDCWD, )?"([^"]+)", (.*)\) = \d', text)
    modules = {os.path.realpath(file) for file in files}
    modules |= {re.sub(r"__pycache__/(\w+)\..*", r"\1.py", file) for file in modules}
    strange = [
        path
        for path, flags in opened
        if "O_DIRECTORY" not in flags
        and os.path.realpath(re.sub(r"__pycache__/([^./]+)\.[^/]*", r"\1.py", path)) not in modules
        and not re.search(r"\.so(\.\d+)*$|/ld\.so\.cache$", path)
    ]
    assert not strange
    libraries = {os.path.basename(path) for path, _ in opened if ".so" in path} - {"ld.so.cache"}
    assert "librdmafork.so" in libraries
    assert not {name for name in libraries if re.match("libibverbs|librdmacm|libmlx", name)}


# ---- symbols and imports --------------------------------------------------------------------


def defined(path):
    nm = shutil.which("nm")
    if not nm:
        pytest.skip("no nm")
    command = [nm, "-D", "--defined-only", path]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[-1].split("@")[0] for line in lines if " T " in line}


def test_the_library_exports_the_functions_of_its_header():
    header = Path(rdmafork.get_include(), "rdmafork.h").read_text()
    header = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    declared = set(re.findall(r"^RF_API\s[^;(]*?\b(\w+)\(", header, re.M))
    assert "rf_register" in declared and len(declared) >= 10
    assert {name for name in declared if not name.startswith("rf_")} == set()
    ibv = {"ibv_fork_init", "ibv_is_fork_initialized", "ibv_dontfork_range", "ibv_dofork_range"}
    assert defined(rdmafork.get_library()) == declared | ibv


def test_a_module_exports_its_init_function():
    paths = list(Path(rdmafork.__file__).parent.glob("_*.so"))
    assert len(paths) >= 6
    for path in paths:
        assert defined(path) == {f"PyInit_{path.name.split('.')[0]}"}


def test_the_library_needs_no_python():
    nm = shutil.which("nm")
    if not nm:
        pytest.skip("no nm")
    command = [nm, "-D", "--undefined-only", rdmafork.get_library()]
    wanted = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "madvise" in wanted
    assert not re.search(r" _?Py", wanted)
    assert not re.search(r" (malloc|calloc|realloc|free)@", wanted)
