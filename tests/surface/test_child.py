"""A forked child: the parent's registrations are dead there, and the child can make its own."""

import concurrent.futures
import ctypes
import gc
import mmap
import multiprocessing
import os
import re
import shutil
import signal
import sys
import weakref

import pytest
from conftest import both_modes, child, fork_once, fresh, needs_lazy
from memory import (
    MAP_FIXED_NOREPLACE,
    PAGE,
    is_mapped,
    libc,
    map_at,
    private_map,
    shared_map,
    vm_flags,
)

import rdmafork


def start(mode, npages=8):
    """A registration of private pages, marked by a fork: (registration, memory, address)."""
    rdmafork.fork_init(mode)
    memory, address = private_map(npages * PAGE)
    memory[:] = b"p" * len(memory)
    registration = rdmafork.register(memory)
    fork_once()
    assert "dc" in vm_flags(address)
    return registration, memory, address


def generation():
    library = ctypes.CDLL(rdmafork.get_library())
    library.rf_generation.restype = ctypes.c_uint32
    return library.rf_generation()


def refusal(use):
    """The message of the InheritedError that use() raises."""
    try:
        value = use()
    except rdmafork.InheritedError as error:
        return str(error)
    return f"no InheritedError but {value!r}"


# ---- inherited objects ------------------------------------------------------------------


@both_modes
@fresh
def test_an_inherited_registration_refuses_every_use(mode):
    registration, _memory, address = start(mode)
    uses = {
        "obj": lambda: registration.obj,
        "address": lambda: registration.address,
        "nbytes": lambda: registration.nbytes,
        "on_fork": lambda: registration.on_fork,
        "protected": lambda: registration.protected,
        "with": lambda: registration.__enter__(),
    }
    messages = child(lambda: {name: refusal(use) for name, use in uses.items()})
    for name, message in messages.items():
        assert f"0x{address:x}" in message and f"{8 * PAGE} bytes" in message, (name, message)
        assert "parent" in message and "register afresh" in message, (name, message)
    assert registration.address == address  # and the parent's is as it was


@both_modes
@fresh
def test_inherited_and_closed_registrations_say_so(mode):
    registration, _memory, _address = start(mode)
    assert (registration.inherited, registration.closed) == (False, False)
    assert child(lambda: (registration.inherited, registration.closed)) == (True, False)

    def closed():
        registration.close()
        return registration.inherited, registration.closed

    assert child(closed) == (True, True)
    assert (registration.inherited, registration.closed) == (False, False)


@both_modes
@fresh
def test_repr_says_inherited(mode):
    registration, _memory, address = start(mode)
    assert child(lambda: repr(registration)) == (
        f"<rdmafork.Registration 0x{address:x}, {8 * PAGE} bytes, inherited>"
    )
    assert "inherited" not in repr(registration)


@both_modes
@fresh
def test_a_closed_registration_is_closed_in_a_child_too(mode):
    rdmafork.fork_init(mode)
    registration = rdmafork.register(bytearray(100))
    registration.close()

    def use():
        with pytest.raises(ValueError, match="closed"):
            registration.address  # noqa: B018
        return repr(registration)

    assert "closed" in child(use)


@both_modes
@fresh
def test_every_way_to_lose_an_inherited_registration_is_silent(mode):
    kept, memory, address = start(mode)
    calls = rdmafork.stats().madvise_calls

    def lose():
        registrations = [kept] + [None] * 3
        before = rdmafork.stats()
        assert before.madvise_calls == 0 and before.registrations == 0
        kept.close()
        kept.close()
        kept.__exit__(None, None, None)
        registrations.clear()
        cycle = [others.pop()]
        cycle.append(cycle)
        del cycle
        gc.collect()
        others.clear()
        return rdmafork.stats() == before

    others = [rdmafork.register(memory) for _ in range(3)]
    fork_once()
    assert child(lose)
    # Nothing of it has reached the parent.
    assert "dc" in vm_flags(address)
    assert rdmafork.stats().registrations == 4
    assert not kept.closed and kept.protected
    assert rdmafork.stats().madvise_calls == calls


ENDS = """
    import gc, os, sys, rdmafork
    rdmafork.fork_init({mode!r})
    memories = [bytearray(1 << 16) for _ in range(4)]
    kept = [rdmafork.register(memory) for memory in memories]
    pid = os.fork()
    if not pid:
        os.access("/begin", 0)
        kept.pop().close()
        kept.pop()
        cycle = [kept.pop()]
        cycle.append(cycle)
        del cycle
        gc.collect()
        sys.exit()  # with the last one: interpreter exit
    os.waitpid(pid, 0)
    os.access("/parent", 0)
"""


@both_modes
def test_losing_one_makes_no_system_call_of_the_engine(run, tmp_path, mode):
    if not shutil.which("strace"):
        pytest.skip("no strace")
    log = tmp_path / "log"
    prefix = ["strace", "-f", "-o", log, "-e", "trace=madvise,ioctl,openat,access"]
    run(ENDS.format(mode=mode), prefix=list(map(str, prefix)))
    text = log.read_text()
    forked = re.search(r'^(\d+) +access\("/begin"', text, re.M).group(1)
    parents = re.search(r'^(\d+) +access\("/parent"', text, re.M).group(1)
    assert forked != parents
    lines = [line for line in text.splitlines() if line.startswith(f"{forked} ")]
    lines = lines[next(i for i, line in enumerate(lines) if "/begin" in line) :]
    engine = [line for line in lines if re.search("FORK|/proc/self|0x66, 0x11|PROCMAP", line)]
    assert not engine
    assert re.search(rf"^{parents} +\w*madvise.*MADV_DO", text, re.M), "strace sees none at all"


@both_modes
@fresh
def test_a_child_does_not_undo_the_parent_s_protection(mode):
    """Nor does a child of it that closes, collects and registers the very same pages."""
    registration, memory, address = start(mode)

    def meddle():
        registration.close()
        at = map_at(address, 8 * PAGE)
        with rdmafork.register_address(at, 8 * PAGE):
            fork_once()
        return rdmafork.stats().registrations

    assert child(meddle) == 0
    assert "dc" in vm_flags(address)
    assert child(lambda: is_mapped(address)) is False
    registration.close()
    assert "dc" not in vm_flags(address)
    assert child(lambda: memory[0]) == ord("p")


@pytest.mark.parametrize("delete", [True, False])
@both_modes
@fresh
def test_memory_let_go_by_the_child_is_not_handed_out_again(mode, delete):
    """The allocator would give its absent pages to the next caller."""
    rdmafork.fork_init(mode)
    if not rdmafork.kernel_info().copy_on_fork_trusted:
        pytest.skip("whole pages leave, and the heap's own with them")
    buffers = [bytearray(60_000) for _ in range(50)]
    registrations = [rdmafork.register(buffer) for buffer in buffers]
    pid = os.fork()
    if not pid:
        if delete:
            while registrations:
                registrations.pop().close()
                buffers.pop()
            gc.collect()
        hoard = [bytearray(b"x" * 59_000) for _ in range(200)]
        sys.exit(len(hoard) != 200)
    assert os.waitpid(pid, 0)[1] == 0
    registrations.pop().close()
    buffers[-1].extend(b"x")


@both_modes
@fresh
def test_a_map_let_go_by_the_child_can_be_closed_there(mode):
    """As SharedMemory.close() does in a worker."""
    rdmafork.fork_init(mode)
    for memory in (mmap.mmap(-1, 8 * PAGE), private_map(8 * PAGE)[0]):
        view = memoryview(memory)
        registration = rdmafork.register(view)

        def let_go(registration=registration, view=view, memory=memory):
            registration.close()
            view.release()
            memory.close()
            return memory.closed

        assert child(let_go) is True


class Endless:
    """Its bases never end, as those of a unittest.mock.Mock."""

    @property
    def base(self):
        return Endless()


class Failing:
    @property
    def base(self):
        raise RuntimeError("it has none")


class Gone(dict):
    """The object that a weakref.proxy() of it refers to has gone by then."""


@both_modes
@pytest.mark.parametrize("kind", ["endless", "failing", "gone"])
@fresh
def test_a_child_closes_any_kind_of_owner(mode, kind):
    rdmafork.fork_init(mode)
    memory, address = private_map(8 * PAGE)
    target = Gone()
    owner = {"endless": Endless(), "failing": Failing(), "gone": weakref.proxy(target)}[kind]
    registration = rdmafork.register_address(address, len(memory), owner=owner)
    del target

    def close():
        signal.alarm(10)
        registration.close()
        return registration.closed

    assert child(close) is True
    registration.close()


# ---- calls of a child -------------------------------------------------------------------


def protect_afresh():
    """Register in this child: is it kept from a grandchild, and undone by close()?"""
    before = rdmafork.stats().registrations
    memory, address = private_map(4 * PAGE)
    memory[:] = b"c" * len(memory)
    with rdmafork.register(memory) as registration:
        assert registration.protected and not registration.inherited
        assert rdmafork.stats().registrations == before + 1
        absent = child(lambda: is_mapped(address))
        assert absent is False, absent
        assert "dc" in vm_flags(address)
        refused = child(lambda: refusal(lambda: registration.address))
        assert "parent" in refused
    assert "dc" not in vm_flags(address)
    assert child(lambda: memory[0]) == ord("c")
    return os.getpid()


@both_modes
@fresh
def test_a_child_s_own_registration_is_kept_from_a_grandchild(mode):
    start(mode)
    assert child(protect_afresh) != os.getpid()


@needs_lazy
@pytest.mark.parametrize("modes", [("lazy", "eager"), ("eager", "lazy"), ("lazy", None)])
@fresh
def test_a_child_may_choose_another_mode_before_it_registers(modes):
    theirs, wish = modes
    ours = wish or theirs
    start(theirs)

    def choose():
        assert rdmafork.stats().mode == theirs
        if wish:
            rdmafork.fork_init(wish)
        assert rdmafork.stats().mode == ours
        rdmafork.register(b"x").close()
        other = {"lazy": "eager", "eager": "lazy"}[ours]
        with pytest.raises(OSError, match="mode"):
            rdmafork.fork_init(other)
        return protect_afresh()

    assert child(choose) != os.getpid()
    assert rdmafork.stats().mode == theirs


@fresh
def test_a_child_may_be_the_first_to_start():
    """The parent never called fork_init(): registrations made there do not come in its way."""
    with pytest.warns(rdmafork.UnprotectedWarning):
        registration = rdmafork.register(bytearray(PAGE))

    def first():
        rdmafork.fork_init("eager")
        assert "its memory is a copy" in refusal(lambda: registration.address)
        return protect_afresh()

    assert child(first) != os.getpid()
    with pytest.raises(OSError, match="too late"):
        rdmafork.fork_init()


@both_modes
@fresh
def test_a_child_of_a_child_of_a_child(mode):
    registration, _memory, _address = start(mode)
    generations = [generation()]

    def descend(depth):
        generations.append(generation())
        assert "parent" in refusal(lambda: registration.address)
        own = rdmafork.register(bytearray(1 << 16))
        assert own.protected
        protect_afresh()
        assert len(set(generations)) == len(generations)
        if depth:
            assert child(descend, depth - 1) == "bottom"
            assert own.protected and not own.inherited
        return "bottom"

    assert child(descend, 4) == "bottom"
    assert registration.protected


@both_modes
@fresh
def test_a_child_counts_from_zero(mode):
    start(mode)

    def fresh_counts():
        numbers = rdmafork.stats()
        assert not numbers.ibv_libraries
        counts = numbers._replace(mode=0, vma_budget=0, engine_bytes=0, ibv_libraries=0)
        return numbers.mode, sum(counts)

    assert child(fresh_counts) == (mode, 0)
    assert child(rdmafork.protected_ranges) == []


# ---- Python's ways to have children -----------------------------------------------------


def work(_):
    """In a worker process: it can register, and its parent's registrations do not matter."""
    rdmafork.fork_init()
    with rdmafork.register(bytearray(1 << 16)) as registration:
        return registration.protected, rdmafork.stats().registrations


def work_on(registration):
    return refusal(lambda: registration.address)


def use_shared(shared):
    shared[0] = 7


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@fresh
def test_workers_of_multiprocessing_inherit_and_register(method):
    registration, _memory, _address = start("auto")
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        assert pool.map(work, range(4)) == [(True, 1)] * 4
    assert registration.protected
    with pytest.raises(TypeError, match="pickle"):
        context.Pool(1).apply(work_on, (registration,))


@both_modes
@fresh
def test_multiprocessing_shared_memory_stays_shared(mode):
    """Registered shared memory is not taken from a worker; fork() never moves it."""
    rdmafork.fork_init(mode)
    context = multiprocessing.get_context("fork")
    shared = context.RawArray("B", 1 << 16)
    with rdmafork.register(shared):
        process = context.Process(target=use_shared, args=(shared,))
        process.start()
        process.join()
        assert process.exitcode == 0
    assert shared[0] == 7


@both_modes
@fresh
def test_workers_of_concurrent_futures_inherit_and_register(mode):
    registration, _memory, _address = start(mode)
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        assert list(pool.map(work, range(4))) == [(True, 1)] * 4
    assert registration.protected and rdmafork.stats().registrations == 1


@both_modes
@fresh
def test_python_s_own_fork_handlers_may_register_and_close(mode):
    rdmafork.fork_init(mode)
    memory, address = private_map(4 * PAGE)
    memory[:] = b"h" * len(memory)
    held, seen = [], []

    def before():
        while held:
            held.pop().close()
        held.append(rdmafork.register(memory))

    def in_parent():
        held.pop().close()
        held.append(rdmafork.register(memory))
        seen.append("parent")

    def in_child():
        inherited = held.pop()
        assert "parent" in refusal(lambda: inherited.address)
        inherited.close()
        with rdmafork.register(bytearray(1 << 16)) as registration:
            assert registration.protected
        held.append(rdmafork.register(bytearray(1 << 16)))
        seen.append("child")

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)
    for _ in range(20):
        seen.clear()
        # The previous registration's memory is kept from the child already.
        assert child(lambda: (seen, is_mapped(address))) == (["child"], False)
        assert seen == ["parent"]
        assert rdmafork.stats().registrations == 1
    held.pop().close()
    assert "dc" not in vm_flags(address)
    assert rdmafork.stats().registrations == 0


# ---- children that no fork handler sees --------------------------------------------------


SYS_clone = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine)


def clone():
    return libc.syscall(SYS_clone, signal.SIGCHLD, None, None, None, None)


def libc_fork():
    return libc._Fork()


def child_of(make, function):
    """Run function in a child that make() makes; it tells by its exit status."""
    if make is clone and SYS_clone is None:
        pytest.skip("the number of clone() here is not known")
    if make is libc_fork and not hasattr(libc, "_Fork"):
        pytest.skip("glibc has no _Fork()")
    pid = make()
    if not pid:
        try:
            function()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    assert pid > 0
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


both_ways = pytest.mark.parametrize("make", [clone, libc_fork])


@both_ways
@both_modes
@fresh
def test_a_raw_child_knows_it_is_one(make, mode):
    registration, _memory, _address = start(mode)
    first = generation()

    def check():
        assert registration.inherited
        assert "parent" in refusal(lambda: registration.address)
        assert generation() != first
        registration.close()
        assert rdmafork.stats().registrations == 0
        assert rdmafork.protected_ranges() == []
        protect_afresh()

    child_of(make, check)
    assert generation() == first and registration.protected


@both_ways
@fresh
def test_a_raw_child_whose_first_call_is_close(make):
    registration, _memory, address = start("auto")

    def check():
        calls = rdmafork.stats  # not called: close() comes first
        registration.close()
        assert calls().madvise_calls == 0
        assert registration.closed and registration.inherited

    child_of(make, check)
    assert "dc" in vm_flags(address)


@both_ways
@fresh
def test_a_raw_child_whose_first_call_is_register(make):
    start("auto")
    child_of(make, protect_afresh)


@needs_lazy
@both_ways
@fresh
def test_a_raw_child_s_lazy_memory_is_left_to_the_kernel(make):
    """No handler has run, so pending memory is still there: a copy, and no harm."""
    rdmafork.fork_init("lazy")
    memory, address = private_map(4 * PAGE)
    memory[:] = b"w" * len(memory)
    registration = rdmafork.register(memory)

    def check():
        assert is_mapped(address) and memory[0] == ord("w")
        assert registration.inherited

    child_of(make, check)
    assert rdmafork.stats().pending == 1


@needs_lazy
@both_ways
@both_modes
@fresh
def test_a_raw_child_has_the_bytes_that_were_not_registered(make, mode):
    """The kernel copies partial pages for every child."""
    rdmafork.fork_init(mode)
    memory, address = private_map(4 * PAGE)
    memory[:] = b"w" * len(memory)
    _registration = rdmafork.register(memoryview(memory)[100:-100])
    fork_once()

    def check():
        assert memory[:PAGE] == memory[-PAGE:] == b"w" * PAGE
        assert not is_mapped(address + PAGE) and not is_mapped(address + 2 * PAGE)

    child_of(make, check)


@both_ways
@both_modes
@fresh
def test_a_raw_child_finds_holes_that_are_not_reserved(make, mode):
    _registration, _memory, address = start(mode, npages=4)
    hole = {"flags": MAP_FIXED_NOREPLACE, "fixed": False}

    def check_guarded():
        with pytest.raises(FileExistsError):
            map_at(address, 4 * PAGE, **hole)

    def check_free():
        assert map_at(address, 4 * PAGE, **hole) == address

    child_of(os.fork, check_guarded)
    child_of(make, check_free)


@both_ways
@fresh
def test_a_raw_child_lacks_shared_memory_until_a_fork_has_asked_about_it(make):
    """Eager marks first and asks later; a fork through libc asks before it makes its child."""
    rdmafork.fork_init("eager")
    memory, address = shared_map(4 * PAGE)
    _registration = rdmafork.register(memory)

    def check(there):
        assert is_mapped(address) == there

    child_of(make, lambda: check(False))
    fork_once()
    child_of(make, lambda: check(True))
