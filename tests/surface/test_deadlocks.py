"""fork() at any moment, in any thread, with anybody's fork handlers: no deadlock, no wreck.

Locks held across fork() are how such libraries hang: the engine holds none. The programs
are compiled from tests/surface/deadlocks. timeout(1) kills a program that hangs, and its family.
"""

import contextlib
import ctypes
import os
import sys
import threading
from pathlib import Path

import pytest
from conftest import SLOWNESS, both_modes, compile_c, fork_once, scaled
from memory import address_of, vm_flags

import rdmafork

# tests/surface/deadlocks/handlers.c
REGISTER, TAKE_GIL, FORK = 1, 2, 4
CACHED = 8

# faulthandler says where it hangs, then everybody is killed, hung children too.
WATCHED = ("timeout", "--signal=ABRT", "--kill-after=2", str(60 * SLOWNESS))


def build(source, output, *options):
    library = Path(rdmafork.get_library())
    return compile_c(
        output, "-O1", "-g", "-Wall", "-Wextra", "-pthread", *options,
        f"-I{rdmafork.get_include()}", Path(__file__).with_name("deadlocks") / source,
        f"-L{library.parent}", f"-l:{library.name}", f"-Wl,-rpath,{library.parent}", "-ldl",
    )  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The libraries of tests/surface/deadlocks, by name."""
    folder = tmp_path_factory.mktemp("deadlocks")
    shared = ("-shared", "-fPIC", "-Wl,--as-needed")
    return {
        "handlers": build("handlers.c", folder / "handlers.so", *shared),
        "forks": build("forks.c", folder / "forks.so", *shared),
    }


def keep_busy(stop, failures, nbytes=3 * 4096):
    """Register and close until told to stop, as other threads do while one forks."""
    memory = bytearray(1 << 20)
    try:
        while not stop.is_set():
            with rdmafork.register(memory), rdmafork.register(memoryview(memory)[100:nbytes]):
                pass
            rdmafork.register_address(0, 0).close()
            rdmafork.stats()
    except BaseException as error:
        failures.append(repr(error))


class Busy:
    """Threads that keep the engine busy meanwhile."""

    def __init__(self, threads=2):
        self.stop, self.failures = threading.Event(), []
        self.threads = [
            threading.Thread(target=keep_busy, args=(self.stop, self.failures))
            for _ in range(threads)
        ]

    def __enter__(self):
        for thread in self.threads:
            thread.start()

    def __exit__(self, *exception):
        self.stop.set()
        for thread in self.threads:
            thread.join()
        assert not self.failures


def fork_and_use(handlers=None):
    """os.fork(); the child registers and closes."""
    pid = os.fork()
    if not pid:
        try:
            memory = bytearray(1 << 16)
            rdmafork.register(memory).close()
            with rdmafork.register(memory):
                fine = rdmafork.stats().registrations in (1, 1 + CACHED)
            os._exit(not fine or bool(handlers and handlers.handlers_failures()))
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def is_still_right(mode):
    """The window is shut, and a fork marks all that it is to mark."""
    memory = bytearray(1 << 20)
    before = rdmafork.stats()
    with rdmafork.register(memory) as registration:
        after = rdmafork.stats()
        assert after.registrations == before.registrations + 1
        if mode == "lazy":
            assert after.pending == before.pending + 1
            assert after.madvise_calls == before.madvise_calls
        fork_once()
        assert "dc" in vm_flags(registration.address + 8192)
    assert "dc" not in vm_flags(address_of(memory) + 8192)


# ---- other libraries' fork handlers -----------------------------------------------------


def _handlers(library, mode, kind, forks):
    handlers = ctypes.CDLL(library)  # loaded now, unless it was preloaded
    rdmafork.fork_init(mode)
    handlers.handlers_use(rdmafork.get_library().encode(), kind)
    with Busy():
        for _ in range(forks):
            fork_and_use(handlers)
    assert handlers.handlers_failures() == 0
    assert handlers.handlers_runs() >= forks
    handlers.handlers_use(rdmafork.get_library().encode(), 0)
    is_still_right(mode)


@both_modes
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("kind", [REGISTER, TAKE_GIL, REGISTER | TAKE_GIL])
def test_another_library_s_handlers_may_register_and_release(run, built, mode, order, kind):
    """Installed before the engine's, so run in its window, or after, so outside of it."""
    preload = built["handlers"] if order == "before" else None
    run(_handlers, built["handlers"], mode, kind, scaled(200), preload=preload, prefix=WATCHED)


def _handler_forks(library, mode):
    handlers = ctypes.CDLL(library)
    rdmafork.fork_init(mode)
    handlers.handlers_use(rdmafork.get_library().encode(), FORK)
    for _ in range(50):
        fork_and_use()
    handlers.handlers_use(rdmafork.get_library().encode(), 0)
    is_still_right(mode)
    assert handlers.handlers_failures() == 0


@both_modes
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_handler_may_fork(run, built, mode, order):
    preload = built["handlers"] if order == "before" else None
    run(_handler_forks, built["handlers"], mode, preload=preload, prefix=WATCHED)


# ---- forks that do not hold the GIL -----------------------------------------------------


def _c_threads_fork(library, handlers, mode, threads, count):
    rdmafork.fork_init(mode)
    forks = ctypes.CDLL(library)
    if handlers:
        handlers = ctypes.CDLL(handlers)
        handlers.handlers_use(rdmafork.get_library().encode(), TAKE_GIL)
    before = rdmafork.stats().forks
    with Busy():
        assert forks.fork_in_threads(threads, count) == 0
    assert rdmafork.stats().forks == before + threads * count
    is_still_right(mode)


@both_modes
def test_c_threads_may_fork_while_python_registers(run, built, mode):
    run(_c_threads_fork, built["forks"], None, mode, 3, scaled(400), prefix=WATCHED)


@both_modes
def test_a_handler_may_wait_for_the_gil_of_a_thread_that_registers(run, built, mode):
    """gRPC's take the GIL in prepare and in parent, while another thread has it and registers."""
    run(_c_threads_fork, built["forks"], built["handlers"], mode, 2, scaled(200), prefix=WATCHED)


def _threads_fork(mode, count):
    rdmafork.fork_init(mode)
    failures = []

    def forks():
        try:
            for _ in range(count):
                fork_and_use()
        except BaseException as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=forks) for _ in range(3)]
    with Busy():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    is_still_right(mode)


@both_modes
def test_python_threads_may_fork_while_others_register(run, mode):
    run(_threads_fork, mode, scaled(120), prefix=WATCHED)


@pytest.mark.parametrize("env", [{}, {"RDMAV_FORK_SAFE": "1"}])
def test_no_function_imports_a_module_that_another_thread_may_be_importing(run, env):
    """Its child would wait for that import for ever."""
    run(_use_all, not env, env=env)


def _use_all(by_hand):
    if by_hand:
        rdmafork.fork_init()
    before = {name for name in sys.modules if name.startswith("rdmafork")}
    with rdmafork.Buffer(4096), rdmafork.register(bytearray(1 << 16)):
        rdmafork.stats(), rdmafork.protected_ranges(), rdmafork.kernel_info()
        rdmafork.is_fork_initialized()
    with contextlib.suppress(OSError):  # there is no RDMA
        rdmafork.get_device_list(all=True)
    for name in dir(rdmafork):
        getattr(rdmafork, name)
    after = {name for name in sys.modules if name.startswith("rdmafork")}
    assert after - before <= {"rdmafork._version"}


# ---- forks by signal handlers -----------------------------------------------------------


def _signals_fork(library, mode):
    rdmafork.fork_init(mode)
    forks = ctypes.CDLL(library)
    memory = bytearray(1 << 16)
    forks.storm_begin(1000)
    while forks.storm_forked() < 500:
        assert forks.use_many(20) == 0
        rdmafork.register(memory).close()
        rdmafork.protected_ranges()
    forks.storm_end()
    assert forks.storm_failed() == 0
    numbers = rdmafork.stats()
    # Some interrupted the engine itself, or nothing has been tested.
    assert numbers.forks_unmarked > 0
    assert numbers.forks + numbers.forks_unmarked >= 500
    assert numbers.registrations == 0
    is_still_right(mode)


@both_modes
def test_a_signal_handler_may_fork_at_any_moment(run, built, mode):
    run(_signals_fork, built["forks"], mode, prefix=WATCHED)


def _signals_fork_in_threads(library, mode):
    rdmafork.fork_init(mode)
    forks = ctypes.CDLL(library)
    assert forks.storm_in_threads(3, 1000, 500) == 0
    numbers = rdmafork.stats()
    assert numbers.forks_unmarked > 0
    assert numbers.registrations == 0
    is_still_right(mode)


@both_modes
def test_signal_handlers_may_fork_in_several_threads(run, built, mode):
    run(_signals_fork_in_threads, built["forks"], mode, prefix=WATCHED)
