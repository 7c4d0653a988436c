"""Where partial pages are marked too: the bytes that a child gets of them, and its limits."""

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
import warnings

import pytest
from conftest import UNTRUSTED, both_modes, child, fresh
from memory import PAGE, libc, private_map, read, smaps, write

import rdmafork
from rdmafork import Buffer, SharedPageWarning, register, register_address


def control_block():
    libc = ctypes.CDLL(None)
    libc.pthread_self.restype = ctypes.c_void_p
    return libc.pthread_self()


def in_a_thread(function):
    """The result or the exception of function, in a thread of its own."""
    results = []

    def target():
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


@fresh(env=UNTRUSTED)
def test_the_child_keeps_every_byte_that_was_not_registered():
    """And the registered ones on the same pages, as where the kernel copies them."""
    rdmafork.fork_init("eager")
    _memory, address = private_map(8 * PAGE)
    write(address, b"x" * 8 * PAGE)
    for on_fork, inside in (("omit", signal.SIGSEGV), ("wipe", bytes(2 * PAGE))):
        with register_address(address + PAGE + 100, 3 * PAGE, on_fork=on_fork):
            assert child(read, address, 2 * PAGE) == b"x" * 2 * PAGE
            assert child(read, address + 2 * PAGE, 2 * PAGE) == inside
            assert child(read, address + 4 * PAGE, 4 * PAGE) == b"x" * 4 * PAGE
            assert read(address, 8 * PAGE) == b"x" * 8 * PAGE


@fresh(env=UNTRUSTED)
def test_a_page_that_two_registrations_fill_together_is_copied():
    rdmafork.fork_init("eager")
    # A page more: the control block may come next, and the page below that is named as well.
    _memory, address = private_map(2 * PAGE)
    write(address, b"x" * PAGE)
    with register_address(address, 100), register_address(address + 100, PAGE - 100):
        assert child(read, address, PAGE) == b"x" * PAGE
        with register_address(address, PAGE, on_fork="wipe"):
            assert child(read, address, PAGE) == bytes(PAGE)
            with register_address(address, PAGE):
                assert child(read, address) == signal.SIGSEGV
        assert child(read, address, PAGE) == b"x" * PAGE


@fresh(env=UNTRUSTED)
def test_a_copied_page_has_the_protection_that_the_parent_s_has():
    rdmafork.fork_init("eager")
    # A page more: the control block may come next, and the page below that is named as well.
    _memory, address = private_map(4 * PAGE)
    write(address, b"x" * 3 * PAGE)
    assert not libc.mprotect(address + PAGE, PAGE, mmap.PROT_READ)
    with register_address(address + 100, 3 * PAGE - 200):

        def look():
            found = [m.permissions for m in smaps() if address <= m.start < address + 3 * PAGE]
            return found, read(address, PAGE)

        assert child(look) == (["rw-p", "---p", "rw-p"], b"x" * PAGE)
    with register_address(address + PAGE + 100, 64):
        assert child(read, address + PAGE, PAGE) == b"x" * PAGE
        assert child(write, address + PAGE, b"y") == signal.SIGSEGV


@fresh(env=UNTRUSTED)
def test_a_child_may_write_there_and_give_it_to_its_own_children():
    rdmafork.fork_init("eager")
    _memory, address = private_map(2 * PAGE)
    write(address, b"x" * 2 * PAGE)

    def write_and_fork():
        write(address, b"mine")
        return child(read, address, 5)

    with register_address(address + 100, 100):
        assert child(write_and_fork) == b"minex"
        assert read(address, 5) == b"xxxxx"


@fresh(env=UNTRUSTED)
def test_nothing_is_said_where_all_is_given_back():
    rdmafork.fork_init("eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _memory, address = private_map(100 * PAGE)
        registrations = [register_address(address + PAGE * n, 60 + 30 * n) for n in range(99)]
        registrations.append(register(mmap.mmap(-1, 3 * PAGE)))
        registrations.append(in_a_thread(lambda: register(bytearray(1 << 20))))
        with Buffer(100) as buffer:
            register(memoryview(buffer)[10:20]).close()
    for registration in registrations:
        registration.close()


@pytest.mark.parametrize("where", ["main", "thread"])
@fresh(env=UNTRUSTED)
def test_memory_that_fork_uses_is_named_once_a_call_site(where):
    rdmafork.fork_init()

    def twice():
        address = control_block() + 16
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(2):
                register_address(address, 8, owner=twice).close()
            line = twice.__code__.co_firstlineno + 5
        return address, [(w.category, w.filename, w.lineno, str(w.message)) for w in caught], line

    address, caught, line = twice() if where == "main" else in_a_thread(twice)
    ((category, filename, lineno, message),) = caught
    assert category is SharedPageWarning and lineno == line
    assert os.path.samefile(filename, __file__)
    assert (
        f"0x{address // PAGE * PAGE:x}" in message
        and f"8 bytes registered at 0x{address:x}" in message
    )
    assert "rdmafork.Buffer" in message


@fresh(env=UNTRUSTED)
def test_a_warning_made_an_error_leaves_nothing_registered():
    rdmafork.fork_init("eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(SharedPageWarning, match="control block"):
            register_address(control_block() + 16, 8)
    assert rdmafork.stats().registrations == 0 and not rdmafork.protected_ranges()


@fresh(env=UNTRUSTED)
def test_the_head_of_an_arena_is_named():
    """In another thread malloc() takes from an arena, which begins at a multiple of 64 MiB."""
    rdmafork.fork_init("eager")
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]

    def first_block():
        return libc.malloc(64) & -(64 << 20)

    arena = in_a_thread(first_block)
    if read(arena, 8) == bytes(8):
        pytest.skip("malloc() took the thread's memory from the main heap")
    with pytest.warns(SharedPageWarning, match="arena"):
        register_address(arena + PAGE - 64, 64)


@fresh(env=UNTRUSTED)
def test_memory_of_malloc_is_named():
    rdmafork.fork_init("eager")
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    for block in (libc.malloc(10_000), in_a_thread(lambda: libc.malloc(10_000))):
        text = r"a child may die in fork\(\) or malloc\(\).*Buffer"
        with pytest.warns(SharedPageWarning, match=text):
            register_address(block + PAGE, 100).close()


@pytest.mark.skipif(
    not rdmafork.kernel_info().copy_on_fork_trusted,
    reason="the kernel's copying at fork cannot be trusted: partial pages are marked",
)
@fresh
def test_nothing_is_said_where_the_kernel_copies_partial_pages():
    rdmafork.fork_init("eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register_address(control_block() + 16, 8).close()


@both_modes
@fresh
def test_objects_beside_small_arrays_stay(mode):
    np = pytest.importorskip("numpy")
    if not rdmafork.kernel_info().copy_on_fork_trusted:
        pytest.skip("this kernel's copying at fork cannot be trusted: whole pages must go")
    rdmafork.fork_init(mode)
    arrays = [np.arange(n, dtype="u1") for n in [*range(1, 200), 800_000]]
    registrations = [register(array) for array in arrays]

    def in_child():
        while arrays:
            del arrays[-1]
        registrations.clear()
        import fractions  # noqa: F401

        return [bytearray(n) for n in range(500)][-1]

    assert child(in_child) == bytearray(499)
    code = "import sys; sys.exit(3)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 3
