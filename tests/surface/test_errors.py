"""Refusals say which value is wrong, why, and what to do; and nothing has changed."""

import contextlib
import copy
import ctypes
import errno
import mmap
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import both_modes, child, compile_c, fork_once, fresh, needs_lazy
from memory import (
    PAGE,
    PLACE,
    FullTable,
    Tensor,
    is_mapped,
    libc,
    map_at,
    private_map,
    smaps,
    unmap,
    vm_flags,
)
from seccomp import DONTFORK, refuse

import rdmafork
from rdmafork import _access

np = pytest.importorskip("numpy")


def state():
    """State that may not change when a call fails."""
    numbers = rdmafork.stats()._replace(madvise_calls=0, query_calls=0, engine_bytes=0)
    return numbers, [m[:2] for m in smaps() if "dc" in m.flags], rdmafork.protected_ranges()


@contextlib.contextmanager
def fails(exception, *words, number=None):
    """The block raises this, with a message that holds all words, and nothing changes."""
    before = state()
    with pytest.raises(exception) as caught:
        yield
    # Of OSError there is a class for every errno.
    assert number is not None or type(caught.value) is exception, repr(caught.value)
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))
    if number is not None:
        assert caught.value.errno == number, repr(caught.value)
    del caught
    assert state() == before


@pytest.fixture(autouse=True)
def no_leftovers():
    """Most tests here need no process of their own: they leave nothing behind."""
    yield
    assert rdmafork.stats().registrations == 0


@pytest.fixture(scope="module", autouse=True)
def started():
    with contextlib.suppress(OSError):
        rdmafork.fork_init()


# ---- not a buffer -------------------------------------------------------------------------


@pytest.mark.parametrize("thing", [None, 7, 1.5, [1], {}, object(), "text", bytearray, range(3)])
def test_objects_that_are_no_buffers(thing):
    with fails(TypeError, repr(type(thing).__name__), "buffer protocol", "CPU tensor"):
        rdmafork.register(thing)


def test_no_argument_or_too_many():
    with fails(TypeError):
        rdmafork.register()
    with fails(TypeError):
        rdmafork.register(bytearray(1), "omit")
    with fails(TypeError, "policy"):
        rdmafork.register(bytearray(1), policy="omit")
    with fails(TypeError):
        rdmafork.register_address(1)


@pytest.mark.parametrize(
    "device, name", [((2, 0), "cuda:0"), ((10, 3), "rocm:3"), ((99, 1), "device type 99:1")]
)
def test_a_tensor_that_is_not_in_the_process_s_memory(device, name):
    with fails(TypeError, name, "on the CPU"):
        rdmafork.register(Tensor(np.zeros(10), device))


def test_a_tensor_that_is_not_contiguous():
    array = np.zeros((8, 8))
    repeated = np.lib.stride_tricks.as_strided(array, (4, 8), (0, 8))
    for view in (array[:, ::2], array[::2], array[:, :3], array[::-1], repeated):
        shape, strides = list(view.shape), [nbytes // 8 for nbytes in view.strides]
        with fails(BufferError, "not contiguous", str(shape), str(strides), "view of"):
            rdmafork.register(Tensor(view))


@fresh
def test_names_that_are_no_utf8_hide_no_cause(tmp_path):
    libc.prctl(15, b"a\xff", 0, 0, 0)
    with open(os.fsencode(tmp_path) + b"/\xff", "w+b") as file:
        file.truncate(PAGE)
        memory = mmap.mmap(file.fileno(), PAGE, access=mmap.ACCESS_READ)
    rdmafork.fork_init()
    region = rdmafork.register(memory)
    assert "out of memory for it" in _access.memory_cause(0)
    assert "not for writing" in _access.mapping_cause(region.address, region.address + 1, 1)
    region.close()


def test_pinned_memory_counts_against_the_limit(monkeypatch):
    monkeypatch.setattr(_access, "_proc_self", lambda name: "VmPin:\t     100 kB\n")
    monkeypatch.setattr(_access.resource, "getrlimit", lambda which: (200 << 10, 300 << 10))
    assert "out of memory for it" in _access.memory_cause(100 << 10)
    told = "allows this process 204800 pinned bytes, 102400 are pinned"
    assert told in _access.memory_cause((100 << 10) + 1)


def test_source_that_is_not_built_says_so(tmp_path):
    (tmp_path / "rdmafork").mkdir()
    for path in Path(rdmafork.__file__).parent.glob("*.py"):
        shutil.copy(path, tmp_path / "rdmafork")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import rdmafork"
    done = subprocess.run([sys.executable, "-ISc", code], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ImportError: "), done.stderr
    for words in (f"{tmp_path}/rdmafork", "not built", "another directory", "make build"):
        assert words in last


@pytest.mark.skipif(sys.version_info < (3, 12), reason="classes have __buffer__ from 3.12 on")
@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_a_buffer_that_is_interrupted_is_not_asked_again(kind):
    asked = []

    class Interrupted:
        def __buffer__(self, flags):
            asked.append(flags)
            if len(asked) == 1:
                raise kind("once")
            return memoryview(bytearray(5))

    with fails(kind, "once"):
        rdmafork.register(Interrupted())
    assert len(asked) == 1


def test_a_tensor_that_was_taken_already_or_is_none():
    class Spent(Tensor):
        def __dlpack__(self, **_):
            return self.array

    taken = np.zeros(3).__dlpack__()
    np.from_dlpack(Spent(taken))
    for capsule in (taken, None, ctypes.pythonapi):
        with fails(BufferError, "Spent", "no tensor", "already used", "a new one"):
            rdmafork.register(Spent(capsule))


def test_a_tensor_that_raises():
    class Broken(Tensor):
        def __dlpack__(self, **_):
            raise RuntimeError("it requires grad")

    with fails(RuntimeError, "requires grad"):
        rdmafork.register(Broken(np.zeros(3)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: memoryview(bytearray(100))[::2],
        lambda: np.zeros((8, 8))[:, :4],
        lambda: np.zeros(9)[::-1],
    ],
    ids=["memoryview", "columns", "reversed"],
)
def test_buffers_that_are_not_contiguous(make):
    view = make()
    with fails(BufferError, type(view).__name__, "contiguous", "view of", "copy"):
        rdmafork.register(view)


def test_a_released_memoryview():
    view = memoryview(bytearray(100))
    view.release()
    with fails(ValueError, "released"):
        rdmafork.register(view)


def test_a_closed_mmap():
    memory = mmap.mmap(-1, PAGE)
    memory.close()
    with fails(ValueError, "closed"):
        rdmafork.register(memory)


# ---- not an address -------------------------------------------------------------------------


@pytest.mark.parametrize("address, nbytes", [(-1, 1), (PAGE, -PAGE), (-(1 << 70), 5)])
def test_negative_numbers(address, nbytes):
    with fails(ValueError, str(address), str(nbytes), "negative"):
        rdmafork.register_address(address, nbytes)


@pytest.mark.parametrize(
    "address, nbytes",
    [
        ((1 << 64) - PAGE, PAGE + 1),
        ((1 << 64) - PAGE, PAGE),
        ((1 << 64) - 1, 1),
        (1 << 63, 1 << 63),
        (PAGE, (1 << 64) - 1),
        (1 << 64, 0),
        (0, 1 << 80),
    ],
)
@pytest.mark.parametrize("owner", [None, "owner"])
def test_ranges_beyond_the_address_space(address, nbytes, owner):
    with fails(OverflowError, f"0x{address:x}", str(nbytes), "address space"):
        rdmafork.register_address(address, nbytes, owner=owner)


@pytest.mark.parametrize("address, nbytes", [(1.0, 1), (1, 1.0), ("1", 1), (None, 1), (1, b"1")])
def test_arguments_that_are_no_integers(address, nbytes):
    with fails(TypeError, "integer"):
        rdmafork.register_address(address, nbytes)


def test_numpy_integers_are_integers():
    memory, address = private_map(PAGE)
    with rdmafork.register_address(np.uint64(address), np.int32(PAGE), owner=memory) as it:
        assert (it.address, it.nbytes) == (address, PAGE)


# ---- not a policy ---------------------------------------------------------------------------


@pytest.mark.parametrize("on_fork", ["share", "", "OMIT", None, 0, True, b"omit", ["omit"]])
def test_no_such_on_fork(on_fork):
    with fails(ValueError, repr(on_fork), "omit"):
        rdmafork.register(bytearray(10), on_fork=on_fork)
    with fails(ValueError, repr(on_fork), "omit"):
        rdmafork.register_address(0, 0, on_fork=on_fork)


def test_omit_by_another_string_object():
    with rdmafork.register(bytearray(10), on_fork="".join(["om", "it"])) as registration:
        assert registration.on_fork == "omit"


# ---- not mapped -----------------------------------------------------------------------------


@both_modes
@fresh
def test_unmapped_memory_names_the_hole(mode):
    """Memory without an owner is marked at once in lazy mode too."""
    rdmafork.fork_init(mode)
    at = map_at(PLACE, 8 * PAGE)
    unmap(at + 2 * PAGE, 3 * PAGE)
    with fails(
        OSError,
        f"0x{at:x}-0x{at + 8 * PAGE:x}",
        f"nothing is mapped at 0x{at + 2 * PAGE:x}-0x{at + 5 * PAGE:x}",
        number=errno.ENOMEM,
    ):
        rdmafork.register_address(at, 8 * PAGE)
    assert "dc" not in vm_flags(at) | vm_flags(at + 6 * PAGE)
    # And no trace is left: mapped memory can be registered.
    with rdmafork.register_address(at, 2 * PAGE):
        assert "dc" in vm_flags(at)
        with fails(OSError, f"0x{at + 2 * PAGE:x}-0x{at + 3 * PAGE:x}", number=errno.ENOMEM):
            rdmafork.register_address(at, 3 * PAGE)
        assert "dc" in vm_flags(at)
    assert "dc" not in vm_flags(at)


@pytest.mark.parametrize("address", [0, PAGE, 1 << 62, 1 << 63])
@fresh
def test_an_address_where_nothing_ever_is(address):
    rdmafork.fork_init("eager")
    with fails(OSError, "nothing is mapped", f"0x{address:x}", number=errno.ENOMEM):
        rdmafork.register_address(address, 2 * PAGE)


@both_modes
@fresh
def test_unmapped_memory_said_to_be_held(mode):
    """Eager refuses it; lazily it is found out by a fork, which leaves it alone."""
    rdmafork.fork_init(mode)
    at = map_at(PLACE, 4 * PAGE)
    unmap(at, 4 * PAGE)
    if mode == "eager":
        with fails(OSError, "nothing is mapped", number=errno.ENOMEM):
            rdmafork.register_address(at, 4 * PAGE, owner=object())
        return
    with rdmafork.register_address(at, 4 * PAGE, owner=object()):
        fork_once()
        assert all(r.protected_by != "mark" for r in rdmafork.protected_ranges())
    assert rdmafork.stats().registrations == 0


# ---- fork_init ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["Lazy", "", None, 1, b"lazy", ("lazy",)])
def test_an_unknown_mode_is_refused(mode):
    with fails(ValueError, repr(mode), "auto, lazy, eager"):
        rdmafork.fork_init(mode)


def test_a_long_value_ends_where_its_room_does():
    for value in ("x" * 1000, "\u20ac" * 1000, "\ud800"):
        with pytest.raises(ValueError, match=r"^mode must be one of auto, lazy, eager, not '"):
            rdmafork.fork_init(value)


def test_a_mode_that_cannot_even_be_looked_up():
    with fails(TypeError):
        rdmafork.fork_init(["lazy"])
    with fails(TypeError):
        rdmafork.fork_init("lazy", "eager")


# ---- the environment ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, value",
    [
        ("RDMAFORK_MODE", "nonsense"),
        ("RDMAFORK_TRUST_COPYING", "some"),
        ("RDMAFORK_EXPLAIN_FAULTS", "no"),
        ("RDMAFORK_TRACE_REGISTRATIONS", "yes"),
    ],
)
def test_a_variable_that_means_nothing(run, name, value):
    run(_wrong_variable, f"{name}={value}", env={name: value})


def _wrong_variable(setting):
    for _ in range(2):
        with fails(OSError, setting, "auto, lazy or eager", number=errno.EINVAL):
            rdmafork.fork_init()
    assert rdmafork.is_fork_initialized() != rdmafork.ForkStatus.ENABLED


def test_a_mode_by_name_does_not_ask_the_environment(run):
    run("import rdmafork; rdmafork.fork_init('eager')", env={"RDMAFORK_MODE": "nonsense"})


def test_without_linux(run):
    source = """
        import sys
        sys.platform = "darwin"
        try:
            import rdmafork
        except ImportError as error:
            message = str(error)
        [message, [name for name in sys.modules if name.startswith("rdmafork._")]]
    """
    message, loaded = run(source)
    assert "Linux" in message and "darwin" in message and "MADV_DONTFORK" in message
    assert loaded == []


ANOTHER = {
    "another": "RDMAFORK_99 { global: rf_*; };",
    "older": "IBVERBS_1.1 { global: ibv_*; };",
    # Where the loader does not look at versions (musl), the library is asked.
    "unseen": "RDMAFORK_6 { global: rf_*; };",
}


@pytest.mark.parametrize("which", ANOTHER)
def test_another_abi(run, tmp_path, which):
    """A preloaded library of another version serves the package: refused at import."""
    names = [line.split()[-1].split("@")[0] for line in exported() if " T " in line]
    source, nodes = tmp_path / "other.c", tmp_path / "other.map"
    source.write_text("\n".join(f"int {n}(void) {{ return 99; }}" for n in names))
    nodes.write_text(ANOTHER[which])
    options = ["-shared", "-fPIC", "-Wl,-soname,librdmafork.so", f"-Wl,--version-script={nodes}"]
    other = compile_c(tmp_path / "librdmafork.so", *options, source)
    with pytest.raises(ImportError) as caught:
        run("import rdmafork", preload=other)
    words = ["another version", "LD_PRELOAD"]
    words += ["ABI 99"] if which == "unseen" else ["not found", other, rdmafork.get_library()]
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_the_symbols_have_the_abi_for_their_version():
    header = Path(rdmafork.get_include(), "rdmafork.h").read_text()
    (abi,) = re.findall(r"^#define RF_ABI (\d+)$", header, re.M)
    versions = {line.partition("@@")[2] for line in exported() if " T rf_" in line}
    assert versions == {f"RDMAFORK_{abi}"} and f"(RDMAFORK_{abi})" in header
    assert abi in ANOTHER["unseen"]


def exported():
    nm = shutil.which("nm")
    if not nm:
        pytest.skip("no nm")
    command = [nm, "-D", "--defined-only", rdmafork.get_library()]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


# ---- after close() --------------------------------------------------------------------------


def test_use_after_close_is_refused():
    registration = rdmafork.register(bytearray(100))
    address = registration.address
    registration.close()
    for name in ("obj", "address", "nbytes", "on_fork", "protected"):
        with fails(ValueError, "closed"):
            getattr(registration, name)
    with fails(ValueError, "closed"), registration:
        pass
    assert registration.closed and not registration.inherited
    assert repr(registration) == f"<rdmafork.Registration 0x{address:x}, 100 bytes, closed>"


def test_a_second_close_does_nothing():
    memory = bytearray(100)
    registration = rdmafork.register(memory)
    other = rdmafork.register(memory)
    registration.close()
    registration.close()
    registration.__exit__(None, None, None)
    assert rdmafork.stats().registrations == 1
    other.close()


def test_an_exception_closes_and_passes():
    memory = bytearray(100)
    with fails(KeyError, "mine"), rdmafork.register(memory):
        raise KeyError("mine")
    memory.extend(b"x")


@pytest.mark.parametrize(
    "duplicate", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"]
)
def test_a_registration_cannot_be_copied(duplicate):
    with rdmafork.register(bytearray(100)) as registration:
        with fails(TypeError, "pickle", "Registration"):
            duplicate(registration)
    with fails(TypeError, "Registration"):
        duplicate(registration)


def test_a_registration_is_not_made_by_its_class():
    with fails(TypeError, "register()", "register_address()"):
        rdmafork.Registration()


def test_a_registration_made_behind_the_door_is_closed():
    empty = rdmafork.Registration.__new__(rdmafork.Registration)
    assert empty.closed and "closed" in repr(empty)
    empty.close()
    with fails(ValueError, "closed"):
        empty.obj  # noqa: B018


def test_attributes_cannot_be_set():
    with rdmafork.register(bytearray(10)) as registration:
        for name in ("address", "nbytes", "obj", "protected", "closed", "new"):
            with fails(AttributeError):
                setattr(registration, name, 1)


# ---- refusals of the kernel -----------------------------------------------------------------


@fresh
def test_eager_without_mappings_left():
    rdmafork.fork_init("eager")
    memory, address = private_map(16 * PAGE)
    memory[:] = b"m" * len(memory)
    at = address + 4 * PAGE
    middle = memoryview(memory)[4 * PAGE : 8 * PAGE]
    before = state()
    with FullTable() as table:
        with pytest.raises(OSError, match="max_map_count") as caught:
            rdmafork.register(middle)
        table.free(3)
        rdmafork.register(middle).close()
    assert caught.value.errno == errno.ENOMEM
    for word in (f"0x{at:x}-0x{at + 4 * PAGE:x}", "sysctl", "fewer and larger"):
        assert word in str(caught.value)
    assert state() == before
    assert "dc" not in vm_flags(at)
    with rdmafork.register(middle):
        assert "dc" in vm_flags(at)


@needs_lazy
@fresh
def test_lazy_without_mappings_left_is_the_kernel_s_to_copy():
    rdmafork.fork_init("lazy")
    memory, address = private_map(16 * PAGE)
    memory[:] = b"m" * len(memory)
    with rdmafork.register(memoryview(memory)[4 * PAGE : 8 * PAGE]):
        with FullTable():
            pid = os.fork()
            if not pid:
                os._exit(memory[4 * PAGE] != ord("m"))
            assert os.waitpid(pid, 0)[1] == 0
            numbers = rdmafork.stats()
        assert numbers.unmarked_bytes == 4 * PAGE and numbers.marked_bytes == 0
        assert {r.protected_by for r in rdmafork.protected_ranges()} == {"kernel"}
        fork_once()  # now there is room
        assert "dc" in vm_flags(address + 4 * PAGE)
        assert rdmafork.stats().unmarked_bytes == 0


@fresh
def test_a_release_without_mappings_left_is_retried():
    rdmafork.fork_init("eager")
    memory, address = private_map(16 * PAGE)
    memory[:] = b"m" * len(memory)
    at = address + 8 * PAGE
    outer = rdmafork.register(memory)
    parts = [rdmafork.register(memoryview(memory)[: 8 * PAGE])]
    parts += [rdmafork.register(memoryview(memory)[9 * PAGE :])]
    with FullTable():
        outer.close()  # page 8 would become ordinary in the midst of marked ones
        numbers = rdmafork.stats()
    assert numbers.still_marked_bytes == PAGE
    assert "dc" in vm_flags(at)
    fork_once()
    assert rdmafork.stats().still_marked_bytes == 0
    assert "dc" not in vm_flags(at)
    assert "dc" in vm_flags(address) & vm_flags(at + PAGE)
    for part in parts:
        part.close()


MSEAL = 462


def sealed(nbytes):
    """Sealed memory that is read-only, so that its content may not be discarded."""
    at = map_at(0, nbytes)
    ctypes.memset(at, 1, nbytes)
    libc.mprotect(at, nbytes, 1)
    if libc.syscall(MSEAL, ctypes.c_void_p(at), ctypes.c_size_t(nbytes), 0):
        pytest.skip(f"mseal(): {os.strerror(ctypes.get_errno())}")
    return at


@fresh
def test_sealed_memory_eager():
    rdmafork.fork_init("eager")
    at = sealed(4 * PAGE)
    where = f"0x{at:x}-0x{at + 4 * PAGE:x}"
    with fails(OSError, "cannot register", where, "sealed", number=errno.EPERM):
        rdmafork.register_address(at, 4 * PAGE, owner=object())
    assert "dc" not in vm_flags(at)


@needs_lazy
@fresh
def test_sealed_memory_lazy():
    rdmafork.fork_init("lazy")
    at = sealed(4 * PAGE)
    with fails(OSError, "sealed", number=errno.EPERM):
        rdmafork.register_address(at, 4 * PAGE)
    memory, address = private_map(6 * PAGE)
    address += PAGE  # so that it is no neighbour of the other
    inner = memoryview(memory)[PAGE:-PAGE]
    with rdmafork.register(inner), rdmafork.register_address(at, 4 * PAGE, owner=object()):
        assert child(lambda: (is_mapped(at), is_mapped(address))) == (True, False)
        by = {r.start: r.protected_by for r in rdmafork.protected_ranges()}
        assert (by[at], by[address]) == ("kernel", "mark")
        assert rdmafork.stats().unmarked_bytes == 4 * PAGE


@both_modes
@fresh
def test_madvise_refused_by_a_sandbox(mode):
    """After it has started, as before that fork_init() says that it cannot."""
    rdmafork.fork_init(mode)
    refuse("madvise", errno.EACCES, argument=2, value=DONTFORK)
    at = map_at(0, 4 * PAGE)
    with fails(OSError, f"0x{at:x}", "refuses", "Permission denied", number=errno.EACCES):
        rdmafork.register_address(at, 4 * PAGE)
    memory, address = private_map(4 * PAGE)
    if mode == "eager":
        with fails(OSError, "refuses", number=errno.EACCES):
            rdmafork.register(memory)
        return
    with rdmafork.register(memory):
        assert child(lambda: is_mapped(address)) is True
        assert rdmafork.stats().unmarked_bytes == 4 * PAGE
