"""Defects of libibverbs' fork support, a test each; the numbers are historic.

Each scenario runs with rdmafork, in both modes, and must pass; so it must through libibverbs' own
symbols where librdmafork.so is preloaded. Where an affected libibverbs is installed the same
scenario runs with it and must fail, which proves that it can (test_it_goes_wrong_with_libibverbs).
"""

import contextlib
import ctypes
import errno
import importlib
import os
import resource
import signal
import subprocess
import sys
import threading

import c_api
import pytest
from conftest import SLOWNESS, both_modes, child, fork_once, fresh, modes_and_trust, run, scaled
from memory import (
    HUGE,
    MADV_DOFORK,
    PAGE,
    PLACE,
    huge_page_pool,
    madvise,
    map_at,
    marked,
    pages,
    private_map,
    read,
    remap,
    shared_map,
    unmap,
    vm_flags,
)


class Rdmafork:
    """Memory that is not held, as with libibverbs: it is marked at once in both modes."""

    def __init__(self, mode=None):
        import rdmafork

        self.api = rdmafork
        if mode:
            rdmafork.fork_init(mode)

    def register(self, address, nbytes):
        return self.api.register_address(address, nbytes)

    def status(self):
        return int(self.api.is_fork_initialized())


class Libibverbs:
    class Registration:
        def __init__(self, library, address, nbytes):
            self.range = ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
            self.library = library
            if library.ibv_dontfork_range(*self.range):
                raise OSError(ctypes.get_errno() or errno.EIO, "ibv_dontfork_range")

        def close(self):
            self.library.ibv_dofork_range(*self.range)

    def __init__(self, mode="one"):
        self.library = ctypes.CDLL("libibverbs.so.1", use_errno=True)
        if mode:
            assert self.library.ibv_fork_init() == 0

    def register(self, address, nbytes):
        return self.Registration(self.library, address, nbytes)

    def status(self):
        return self.library.ibv_is_fork_initialized()


class Preloaded(Libibverbs):
    """As a program reaches the four symbols: by the process's own scope, libibverbs in it too."""

    def __init__(self, mode=None):
        sys.path.append("/usr/lib/python3/dist-packages")  # Debian's pyverbs
        for load in (lambda: ctypes.CDLL("libibverbs.so.1", os.RTLD_GLOBAL), self.pyverbs):
            with contextlib.suppress(ImportError, OSError):
                load()
        self.library = ctypes.CDLL(None, use_errno=True)
        if mode:
            assert self.library.ibv_fork_init() == 0

    @staticmethod
    def pyverbs():
        importlib.import_module("pyverbs.device")


ENGINES = {"rdmafork": Rdmafork, "libibverbs": Libibverbs, "preloaded": Preloaded}


# ---- 1: after a failure, pages are counted below zero and never marked again --------------


def refcount_poisoning(name, mode):
    engine = ENGINES[name](mode)
    map_at(PLACE, 4 * PAGE)
    for nbytes in (5 * PAGE, 6 * PAGE + 1, 9 * PAGE):
        for start in (PLACE, PLACE + 2 * PAGE):
            with pytest.raises(OSError):  # a hole lies beyond
                engine.register(start, nbytes)
    madvise(PLACE, 4 * PAGE, MADV_DOFORK)  # marks that defect 2 has left there
    registrations = [engine.register(PLACE + i * PAGE, 2 * PAGE) for i in range(3)]
    assert marked(PLACE, 4 * PAGE) == pages(PLACE, 4)
    for registration in registrations:
        registration.close()
    assert marked(PLACE, 4 * PAGE) == []


@both_modes
def test_01_refcount_poisoning(mode):
    run(refcount_poisoning, "rdmafork", mode)


# ---- 2: a failure leaves its first part marked --------------------------------------------


def half_applied_failure(name, mode):
    engine = ENGINES[name](mode)
    map_at(PLACE, 8 * PAGE)
    unmap(PLACE + 4 * PAGE, PAGE)
    other = engine.register(PLACE + PAGE, PAGE)
    for start, nbytes in ((0, 5), (0, 8), (2, 6), (3, 2), (0, 64)):
        with pytest.raises(OSError) as caught:
            engine.register(PLACE + start * PAGE, nbytes * PAGE)
        assert caught.value.errno == errno.ENOMEM
        assert marked(PLACE, 8 * PAGE) == [PLACE + PAGE]
    fork_once()
    assert marked(PLACE, 8 * PAGE) == [PLACE + PAGE]
    other.close()
    assert marked(PLACE, 8 * PAGE) == []


@both_modes
def test_02_half_applied_failure(mode):
    run(half_applied_failure, "rdmafork", mode)


# ---- 3: one release too many, and the next registration is not marked ---------------------


def unbalanced_release(name, mode):
    engine = ENGINES[name](mode)
    _memory, address = private_map(4 * PAGE)
    neighbour = engine.register(address + 2 * PAGE, 2 * PAGE)
    for count in (2, 4):
        registration = engine.register(address, count * PAGE)
        registration.close()
        registration.close()
    assert marked(address, 4 * PAGE) == pages(address + 2 * PAGE, 2)
    again = engine.register(address, 2 * PAGE)
    assert marked(address, 4 * PAGE) == pages(address, 4)
    again.close()
    neighbour.close()


@both_modes
def test_03_unbalanced_release(mode):
    run(unbalanced_release, "rdmafork", mode)


# ---- 4: munmap, mmap at the same address, register: success, not marked -------------------


def mapped_anew(name, mode):
    engine = ENGINES[name](mode)
    map_at(PLACE, 4 * PAGE)
    old = engine.register(PLACE, 4 * PAGE)
    unmap(PLACE, 4 * PAGE)
    map_at(PLACE, 8 * PAGE)
    assert marked(PLACE, 8 * PAGE) == []
    new = engine.register(PLACE + PAGE, 4 * PAGE)
    assert marked(PLACE, 8 * PAGE)[-4:] == pages(PLACE + PAGE, 4)
    new.close()
    old.close()
    assert marked(PLACE, 8 * PAGE) == []


def moved_and_registered_again(name, mode):
    engine = ENGINES[name](mode)
    to = PLACE + (1 << 30)
    map_at(PLACE, 4 * PAGE)
    old = engine.register(PLACE, 4 * PAGE)
    remap(PLACE, 4 * PAGE, to)
    new = engine.register(to, 4 * PAGE)
    map_at(PLACE, 4 * PAGE)
    again = engine.register(PLACE, 4 * PAGE)
    assert marked(PLACE, 4 * PAGE) == pages(PLACE, 4)
    assert marked(to, 4 * PAGE) == pages(to, 4)
    for registration in (old, new, again):
        registration.close()
    assert marked(PLACE, 4 * PAGE) == marked(to, 4 * PAGE) == []


@both_modes
@pytest.mark.parametrize("scenario", [mapped_anew, moved_and_registered_again])
def test_04_mapped_anew(mode, scenario):
    run(scenario, "rdmafork", mode)


# ---- 5: a child goes on with its parent's counts ------------------------------------------


def inherited_counts(name, mode):
    engine = ENGINES[name](mode)
    map_at(PLACE, 4 * PAGE)
    registration = engine.register(PLACE, 4 * PAGE)

    def in_child():
        map_at(PLACE, 4 * PAGE)  # where the parent's was, which the child has not got
        own = engine.register(PLACE, 4 * PAGE)
        found = marked(PLACE, 4 * PAGE), child(read, PLACE)
        own.close()
        return *found, marked(PLACE, 4 * PAGE)

    assert child(in_child) == (pages(PLACE, 4), signal.SIGSEGV, [])
    registration.close()


@both_modes
def test_05_inherited_counts(mode):
    run(inherited_counts, "rdmafork", mode)


# ---- 6: forked while another thread holds the lock ----------------------------------------


def lock_held_at_fork(name, mode):
    engine = ENGINES[name](mode)
    # Its child waits for ever, and soon.
    limit, forks = (3, 300) if name == "libibverbs" else (60, scaled(300))
    _memory, address = private_map(64 * PAGE)
    done = threading.Event()

    def others():
        while not done.is_set():
            engine.register(address + PAGE, 9 * PAGE).close()

    def in_child():
        map_at(PLACE, PAGE)
        engine.register(PLACE, PAGE).close()
        return "alive"

    threads = [threading.Thread(target=others) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(forks):
            assert child(in_child, timeout=limit * SLOWNESS) == "alive"
    finally:
        done.set()
        for thread in threads:
            thread.join()


@both_modes
def test_06_lock_held_at_fork(mode):
    run(lock_held_at_fork, "rdmafork", mode)


# ---- 7: the child loses bytes beside a registration ---------------------------------------


def page_sharing(name, mode):
    engine = ENGINES[name](mode)
    memory, address = private_map(4 * PAGE)
    memory[:] = b"n" * len(memory)
    registrations = [
        engine.register(address + 128, 64),
        engine.register(address + PAGE + 1, PAGE - 1),
        engine.register(address + 2 * PAGE, PAGE - 1),
    ]

    def in_child():
        memory[:128] = b"m" * 128
        return memory[:PAGE], memory[PAGE], memory[3 * PAGE - 1], memory[-1]

    kept = b"m" * 128 + b"n" * (PAGE - 128)
    assert child(in_child) == (kept, ord("n"), ord("n"), ord("n"))
    for registration in registrations:
        registration.close()


def needs_trust():
    import rdmafork

    if not rdmafork.kernel_info().copy_on_fork_trusted:
        pytest.skip("this kernel's copying at fork cannot be trusted: whole pages must go")


@both_modes
def test_07_page_sharing(mode):
    needs_trust()
    run(page_sharing, "rdmafork", mode)


# ---- 8: the page size of the first mapping alone ------------------------------------------


def mixed_page_sizes(name, mode):
    engine = ENGINES[name](mode)
    huge = PLACE + HUGE
    with huge_page_pool(2):
        try:
            map_at(huge - 4 * PAGE, 4 * PAGE)
            map_at(huge, 2 * HUGE, huge=True)
            map_at(huge + 2 * HUGE, 4 * PAGE)
            cases = [
                # the registered range, and the pages that must be marked
                (huge - 2 * PAGE, huge + 64, huge - 2 * PAGE, huge + HUGE),
                (huge - 2 * PAGE, huge + HUGE + PAGE, huge - 2 * PAGE, huge + 2 * HUGE),
                (huge + HUGE, huge + 2 * HUGE + PAGE, huge + HUGE, huge + 2 * HUGE + PAGE),
                (huge + 2 * HUGE - 1, huge + 2 * HUGE + PAGE, huge + HUGE, huge + 2 * HUGE + PAGE),
                (huge - PAGE, huge + 2 * HUGE + PAGE, huge - PAGE, huge + 2 * HUGE + PAGE),
                (huge + HUGE - 64, huge + HUGE + 64, huge, huge + 2 * HUGE),
                (huge + 64, huge + 128, huge, huge + HUGE),
                (huge + 5 * PAGE, huge + 6 * PAGE, huge, huge + HUGE),
            ]
            span = huge - 4 * PAGE, 2 * HUGE + 8 * PAGE
            for start, end, first, last in cases:
                registration = engine.register(start, end - start)
                fork_once()
                assert marked(*span) == pages(first, (last - first) // PAGE), (start, end)
                registration.close()
                assert marked(*span) == [], (start, end)
        finally:
            unmap(PLACE, 5 * HUGE)


@modes_and_trust
@pytest.mark.parametrize("variable", [None, "1"])
def test_08_mixed_page_sizes(mode, trust, variable):
    env = {"RDMAV_HUGEPAGES_SAFE": variable, "RDMAFORK_TRUST_COPYING": trust}
    run(mixed_page_sizes, "rdmafork", mode, env=env)


@contextlib.contextmanager
def huge_page():
    """The address of one, which is unmapped afterwards."""
    with huge_page_pool(1):
        address = map_at(PLACE + HUGE, HUGE, huge=True)
        try:
            yield address
        finally:
            unmap(address, HUGE)


# ---- 9: /proc/<pid>/smaps of another process ----------------------------------------------


def pid_namespace(name, mode):
    """The first process of a PID namespace under the old /proc: its pid there is init's."""
    assert os.getpid() == 1
    engine = ENGINES[name](mode)
    with huge_page() as address:
        registration = engine.register(address + 64, 64)
        fork_once()
        assert marked(address, HUGE) == pages(address, 512)
        registration.close()
        assert marked(address, HUGE) == []


UNSHARE = ["unshare", "-pf"]


def needs_unshare():
    try:
        probe = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("unshare (util-linux) is not installed")
    if probe.returncode:
        pytest.skip(f"no PID namespace can be made: {probe.stderr.strip()}")


@both_modes
def test_09_pid_namespace(mode):
    needs_unshare()
    run(pid_namespace, "rdmafork", mode, prefix=UNSHARE)


# ---- 10: rounding changes between a registration and its release --------------------------


@both_modes
@fresh
def test_10_wishes_that_change_later(mode):
    engine = Rdmafork(mode)
    api, (_memory, address) = engine.api, private_map(4 * PAGE)
    registration = engine.register(address + 1, 2 * PAGE)
    assert marked(address, 4 * PAGE) == [address + PAGE]
    other = "eager" if mode == "lazy" else "lazy"
    for name, value in (
        ("RDMAV_HUGEPAGES_SAFE", "1"),
        ("RDMAFORK_TRUST_COPYING", "0"),
        ("RDMAFORK_MODE", other),
    ):
        os.environ[name] = value
        api.fork_init(mode)  # what it wishes it has
        api.fork_init()  # joins what runs
        with pytest.raises(OSError) as caught:
            api.fork_init(other)
        assert caught.value.errno == errno.EINVAL
        assert mode in str(caught.value)
        assert api.stats().mode == mode
        engine.register(address + 1, 2 * PAGE).close()
        assert marked(address, 4 * PAGE) == [address + PAGE]
    registration.close()
    assert marked(address, 4 * PAGE) == []
    assert api.stats().ranges == 0


# ---- 11: an end beyond the address space --------------------------------------------------


def address_wrap(name, mode):
    engine = ENGINES[name](mode)
    _memory, address = private_map(4 * PAGE)
    for nbytes in (2**64 - address + PAGE, 2**64 - PAGE, 2**64 - 1, 2**64 - address - 1, 2**63):
        with pytest.raises((OverflowError, OSError)):
            engine.register(address, nbytes)
    for start in (2**64 - PAGE, 2**64 - 1, 2**64 - HUGE):
        with pytest.raises((OverflowError, OSError)):
            engine.register(start, HUGE)
    assert marked(address, 4 * PAGE) == []
    registration = engine.register(address, 4 * PAGE)
    assert marked(address, 4 * PAGE) == pages(address, 4)
    registration.close()


@both_modes
def test_11_address_wrap(mode):
    run(address_wrap, "rdmafork", mode)


# ---- 12: no memory for the engine's own tables --------------------------------------------


@both_modes
@fresh
def test_12_failing_allocation(mode):
    engine, library, error = Rdmafork(mode), c_api.load(), c_api.Error()
    count = 20_000
    place = map_at(PLACE, 2 * count * PAGE)
    handles = (c_api.Handle * count)()
    # The engine takes its first memory.
    engine.register(place, PAGE).close()
    size = int(open("/proc/self/statm").read().split()[0]) * PAGE
    limit = resource.getrlimit(resource.RLIMIT_AS)
    made = []

    def register(i):
        at = place + 3 * i * PAGE  # every second one splits the one before it
        rc = library.rf_register(at, 2 * PAGE, 0, 0, handles[i], error)
        if rc == 1 and i % 2:
            rc = library.rf_register(at - PAGE, 3 * PAGE, 0, 0, handles[i + count // 2], error)
            if rc != 1:
                assert library.rf_release(handles[i], 0) == 0
        return rc

    resource.setrlimit(resource.RLIMIT_AS, (size, limit[1]))
    try:
        for i in range(count // 2):
            rc = register(i)
            if rc < 0:
                break
            made.append(i)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert rc == -errno.ENOMEM
    assert error.cause == 5  # RF_CAUSE_ENGINE_MEMORY
    assert 10 < len(made) < count // 2
    expected = set()
    for i in made:
        first = place + (3 * i - i % 2) * PAGE
        expected.update(range(first, place + (3 * i + 2) * PAGE, PAGE))
    assert set(marked(place, 4 * count)) <= expected
    sample = marked(place + 3 * (made[-1] - 8) * PAGE, 40 * PAGE)
    assert sample == sorted(a for a in expected if a >= place + 3 * (made[-1] - 8) * PAGE)
    assert engine.api.stats().registrations == len(made) + sum(i % 2 for i in made)
    # It goes on when there is memory again, and all of it can be released.
    assert register(made[-1] + 1) == 1
    for i in [*made, made[-1] + 1]:
        assert library.rf_release(handles[i], 0) == 0
        if i % 2:
            assert library.rf_release(handles[i + count // 2], 0) == 0
    stats = engine.api.stats()
    assert stats[1:6] == (0, 0, 0, 0, 0)
    assert stats.still_marked_bytes == 0


# ---- 14: errno by luck --------------------------------------------------------------------


@both_modes
@fresh
def test_14_errno_by_luck(mode):
    engine, library, error = Rdmafork(mode), c_api.load(), c_api.Error()
    map_at(PLACE, 2 * PAGE)
    with pytest.raises(OSError) as caught:
        engine.register(PLACE, 4 * PAGE)
    assert caught.value.errno == errno.ENOMEM
    assert f"nothing is mapped at 0x{PLACE + 2 * PAGE:x}-0x{PLACE + 4 * PAGE:x}" in str(
        caught.value
    )
    with pytest.raises(OverflowError):
        engine.register(PLACE, 2**64 - 1)

    # In C: a negated errno with a cause, and errno itself is left alone.
    handle = c_api.Handle()
    for arguments, rc, cause in (
        ((PLACE, 4 * PAGE, 0, 0), -errno.ENOMEM, 3),
        ((PLACE, 2**64 - 1, 0, 0), -errno.EOVERFLOW, 1),
        ((PLACE, PAGE, 0, 9), -errno.EINVAL, 2),
        ((PLACE, PAGE, 0, 0), 1, 0),
    ):
        ctypes.set_errno(77)
        assert library.rf_register(*arguments, handle, error) == rc
        assert (error.cause, ctypes.get_errno()) == (cause, 77)
    assert library.rf_release(handle, 0) == 0
    assert library.rf_release(handle, 0) == -errno.ESTALE
    assert ctypes.get_errno() == 77
    assert marked(PLACE, 2 * PAGE) == []


# ---- 15: "disabled" on kernels that copy --------------------------------------------------


def false_negative(name, mode):
    major, minor = map(int, os.uname().release.split(".")[:2])
    if (major, minor) < (5, 12):
        pytest.skip("before 5.12 no kernel copies")
    assert ENGINES[name](None).status() == 2


def test_15_false_negative():
    run(false_negative, "rdmafork", None)


# ---- 21: shared memory is marked ----------------------------------------------------------


def shared_memory_marked(name, mode):
    engine = ENGINES[name](mode)
    memory, address = shared_map(4 * PAGE)
    registration = engine.register(address, 4 * PAGE)

    def in_child():
        memory[PAGE : PAGE + 5] = b"child"
        return bytes(memory[:5])

    memory[:5] = b"early"
    assert child(in_child) == b"early"
    assert memory[PAGE : PAGE + 5] == b"child"
    assert "dc" not in vm_flags(address)
    registration.close()


@both_modes
def test_21_shared_memory_marked(mode):
    run(shared_memory_marked, "rdmafork", mode)


# ---- the same with libibverbs --------------------------------------------------------------


PROOFS = [
    pytest.param(refcount_poisoning, None, id="01"),
    pytest.param(half_applied_failure, None, id="02"),
    pytest.param(unbalanced_release, None, id="03"),
    pytest.param(mapped_anew, None, id="04"),
    pytest.param(moved_and_registered_again, None, id="04-moved"),
    pytest.param(inherited_counts, None, id="05"),
    pytest.param(lock_held_at_fork, None, id="06"),
    pytest.param(page_sharing, None, id="07"),
    pytest.param(mixed_page_sizes, None, id="08"),
    pytest.param(mixed_page_sizes, "1", id="08-hugepages-safe"),
    pytest.param(pid_namespace, "1", id="09"),
    pytest.param(address_wrap, None, id="11"),
    pytest.param(false_negative, None, id="15"),
    pytest.param(shared_memory_marked, None, id="21"),
]


@pytest.mark.parametrize("mode", ["auto", "eager"])
@pytest.mark.parametrize(("scenario", "variable"), PROOFS)
def test_it_goes_right_through_libibverbs_symbols(scenario, variable, mode):
    import rdmafork

    if scenario is pid_namespace:
        needs_unshare()
    if scenario is page_sharing:
        needs_trust()
    prefix = UNSHARE if scenario is pid_namespace else ()
    env = {"RDMAV_HUGEPAGES_SAFE": variable, "RDMAFORK_MODE": mode}
    wish = None if scenario is false_negative else mode
    run(scenario, "preloaded", wish, env=env, prefix=prefix, preload=rdmafork.get_library())


def tracks():
    """Why this machine's libibverbs cannot show its defects, or None."""
    try:
        engine = Libibverbs()
    except OSError as error:
        return f"libibverbs is not installed: {error}"
    _memory, address = private_map(PAGE)
    engine.register(address, PAGE)
    if marked(address, PAGE):
        return None
    return "this libibverbs does nothing on this kernel"


@pytest.mark.parametrize(("scenario", "variable"), PROOFS)
def test_it_goes_wrong_with_libibverbs(scenario, variable):
    if scenario is pid_namespace:
        needs_unshare()
    why = run(tracks)
    if why:
        pytest.skip(why)
    prefix = UNSHARE if scenario is pid_namespace else ()
    env = {"RDMAV_HUGEPAGES_SAFE": variable}
    with pytest.raises((AssertionError, OSError)) as caught:
        run(scenario, "libibverbs", "its own", env=env, prefix=prefix)
    print(caught.value)
