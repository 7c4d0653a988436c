"""Objects that many threads use at once: nothing is given back twice, early or never.

With the GIL as without it; without, on CPython built --disable-gil: make test-freethreaded.
"""

import ctypes
import functools
import gc
import importlib
import os
import random
import sys
import sysconfig
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import FREE_THREADED, HERE, both_modes, child, fork_once, fresh, in_threads
from memory import PAGE, private_map
from standin import Builder

import rdmafork


def swallow(function, *expected):
    """function, which may also raise an expected error."""

    def tolerant():
        try:
            function()
        except expected:
            pass

    return tolerant


# ---- the interpreter ---------------------------------------------------------------------


def _gil_after_importing(names):
    for name in names:
        importlib.import_module(f"rdmafork.{name}")
    return sys._is_gil_enabled()


def test_the_tests_named_for_four_threads_exist():
    """safe_in_four_threads.txt names tests, which may be deleted or get another name."""
    for line in (HERE / "tools/safe_in_four_threads.txt").read_text().splitlines():
        file, _, name = line.partition("::")
        text = (HERE.parent / file).read_text()
        assert f"\ndef {name or 'test_'}" in text, line


@pytest.mark.skipif(not FREE_THREADED, reason="this Python does not do without a GIL")
def test_importing_all_of_it_leaves_the_gil_off(run):
    """One module that does not declare that it needs none turns the GIL on for all."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    files = Path(rdmafork.__file__).parent.glob(f"*{suffix}")
    names = sorted(path.name.removesuffix(suffix) for path in files)
    assert {"_buffer", "_core", "_verbs"} < {*names}
    assert run(_gil_after_importing, names, env={"PYTHON_GIL": None}) is False


# ---- registrations and Buffers -----------------------------------------------------------


@both_modes
@fresh
def test_all_threads_register_read_and_close_in_the_same_memory(mode):
    sys.setswitchinterval(1e-6)
    rdmafork.fork_init(mode)
    memory = rdmafork.Buffer(16 * PAGE)
    shared = [rdmafork.register(memory) for _ in range(64)]

    def works(seed):
        chance = random.Random(seed)
        for _ in range(500):
            at = chance.randrange(len(shared))
            registration = shared[at]
            try:
                assert registration.obj is memory
                assert registration.address == memory.address
                assert registration.nbytes == 16 * PAGE
            except ValueError as error:
                assert "closed" in str(error)
            repr(registration)
            registration.close()
            assert registration.closed
            shared[at] = rdmafork.register(memory)

    in_threads([lambda s=s: works(s) for s in range(6)])
    assert rdmafork.stats().registrations == 65
    for registration in shared:
        registration.close()
    memory.close()  # each view was given back, and once
    assert rdmafork.stats().registrations == 0


@both_modes
@fresh
def test_a_buffer_goes_once_and_never_under_a_view(mode):
    sys.setswitchinterval(1e-6)
    rdmafork.fork_init(mode)

    def uses(buffer):
        for _ in range(20):
            try:
                with memoryview(buffer) as view:
                    view[0], view[-1] = 1, 1
            except ValueError as error:
                assert "closed" in str(error)

    for _ in range(150):
        buffer = rdmafork.Buffer(2 * PAGE)
        close = swallow(buffer.close, BufferError)
        in_threads([*[lambda b=buffer: uses(b)] * 3, close, close])
        buffer.close()
        assert buffer.closed and rdmafork.stats().registrations == 0


@both_modes
@fresh
def test_a_child_uses_objects_that_other_threads_held_at_the_fork(mode):
    """No lock of an object is left taken by a thread that is not there."""
    sys.setswitchinterval(1e-6)
    rdmafork.fork_init(mode)
    buffer = rdmafork.Buffer(PAGE)
    held = tuple(rdmafork.register(buffer) for _ in range(4))
    done = []

    # CPython's own objects can be left locked in a child too, variables of closures and lists
    # among them: what threads share they have as arguments, in tuples.
    def uses(at, done=done, buffer=buffer, held=held):
        while not done:
            memoryview(buffer).release()
            assert held[at].obj is buffer
            rdmafork.register(buffer).close()

    def look(buffer=buffer, held=held):
        for registration in held:
            assert registration.closed or registration.inherited
            repr(registration)
            registration.close()
            assert registration.closed
        buffer.close()

    def forks(look=look, done=done):
        try:
            for _ in range(60):
                pid = os.fork()
                if not pid:
                    try:
                        look()
                    except BaseException as error:
                        os.write(2, f"{error!r}\n".encode())
                        os._exit(1)
                    os._exit(0)
                assert os.waitpid(pid, 0)[1] == 0
        finally:
            done.append(True)

    in_threads([forks, *[functools.partial(uses, at) for at in (0, 0, 1, 1)]])


@fresh
def test_an_owner_goes_once_whichever_thread_closes():
    """Closers wait for the engine together, and for the owner's own code one after the other."""
    sys.setswitchinterval(1e-6)
    rdmafork.fork_init("eager")
    memory, address = private_map(PAGE)
    gone = []

    class Owner:
        def __del__(self):
            gone.append(1)
            time.sleep(0.001)

    for _ in range(200):
        registration = rdmafork.register_address(address, PAGE, owner=Owner())
        in_threads([registration.close] * 8)
    assert len(gone) == 200
    memory.close()


# ---- contexts, domains and regions -------------------------------------------------------


@pytest.fixture
def device(tmp_path):
    """The environment in which libibverbs is standin_verbs.c."""
    Builder(tmp_path)(source=HERE / "standin_verbs.c")
    return {"LD_LIBRARY_PATH": str(tmp_path)}


def opened():
    """(Context of the stand-in's device, the stand-in)"""
    import rdmafork.devices

    rdmafork.devices.find_device = lambda name: SimpleNamespace(name=name, node_guid=None)
    context = rdmafork.Context("mlx5_7")
    return context, ctypes.CDLL("libibverbs.so.1")


def nothing_is_left(library):
    gc.collect()
    assert library.standin_wrong() == 0
    assert library.standin_open() == 0
    assert rdmafork.stats().registrations == 0


def _opened_by_all():
    rdmafork.fork_init()
    first, library = opened()
    first.close()
    for _ in range(40):
        context = rdmafork.Context.__new__(rdmafork.Context)
        in_threads([swallow(functools.partial(context.__init__, "mlx5_7"), TypeError)] * 6)
        assert library.standin_open() == 1
        context.close()
    nothing_is_left(library)


def test_a_context_is_opened_once_by_any_thread(run, device):
    run(_opened_by_all, env=device)


def _seen_before_it_is_made():
    """As other threads may see it, by code that runs in between: a warning's."""
    context, library = opened()
    domain = context.alloc_pd()
    seen = []

    def looks(*_args, **_options):
        for region in gc.get_referrers(domain):
            if type(region) is not rdmafork.MemoryRegion:
                continue
            seen.append(repr(region))
            for name in ("lkey", "rkey", "handle"):
                with pytest.raises(ValueError, match="not been registered yet"):
                    getattr(region, name)

    warnings.simplefilter("always")
    warnings.showwarning = looks
    region = domain.register(bytearray(PAGE))
    assert len(seen) == 1 and "MemoryRegion" in seen[0] and region.lkey == 2
    context.close()
    nothing_is_left(library)


def test_a_region_that_a_debugger_finds_has_no_keys_before_it_is_made(run, device):
    run(_seen_before_it_is_made, env=device)


def _closed_in_any_order():
    sys.setswitchinterval(1e-6)
    rdmafork.fork_init()
    chance = random.Random(7)
    for round in range(120):
        context, library = opened()
        domains = [context.alloc_pd() for _ in range(2)]
        # Threads read them one after the other; the last one drops them.
        regions = [chance.choice(domains).register(bytearray(PAGE)) for _ in range(6)]
        dropped = [domain.register(bytes(PAGE), access=0) for domain in domains for _ in range(3)]

        def reads(regions=regions):
            for region in regions:
                try:
                    assert (region.lkey, region.rkey, region.handle) == (2, 3, 1)
                except ValueError as error:
                    assert "closed" in str(error)
                repr(region)

        def makes(domains=domains, context=context):
            for domain in domains:
                domain.register(bytearray(PAGE))
                assert domain.address and context.address
            context.alloc_pd().register(bytearray(PAGE))

        jobs = [
            *[region.close for region in regions[:3]],
            *[domain.close for domain in domains],
            *[context.close] * (1 + round % 2),
            *[reads] * 2,
            dropped.clear,
            swallow(makes, ValueError),
        ]
        chance.shuffle(jobs)
        in_threads(jobs)
        context.close()
        assert all(one.closed for one in (*regions, *domains))
        del jobs, regions, domains, dropped, context, reads, makes
    nothing_is_left(library)


def test_device_objects_are_closed_in_any_order_by_all_threads_at_once(run, device):
    run(_closed_in_any_order, env=device)


def _parents_closed_as_children_are_dropped():
    sys.setswitchinterval(1e-6)
    rdmafork.fork_init()
    for _ in range(300):
        context, library = opened()
        domain = context.alloc_pd()
        regions = [[domain.register(bytearray(PAGE))] for _ in range(4)]
        close = domain.close
        del domain
        in_threads([*[region.clear for region in regions], close, context.close])
        del close
    context.close()
    nothing_is_left(library)


def test_a_parent_closes_children_as_their_last_reference_goes(run, device):
    run(_parents_closed_as_children_are_dropped, env=device)


def _collected():
    sys.setswitchinterval(1e-6)
    rdmafork.fork_init()
    context, library = opened()

    def makes():
        for _ in range(50):
            domain = context.alloc_pd()
            cycle = [domain, domain.register(bytearray(PAGE)), domain.register(memoryview(b"x"))]
            cycle.append(cycle)

    def collects():
        for _ in range(30):
            gc.collect()

    in_threads([makes, makes, collects, collects, fork_once])
    gc.collect()
    assert library.standin_open() == 1
    context.close()
    nothing_is_left(library)


def test_device_objects_in_garbage_are_closed_before_it_is_cleared(run, device):
    run(_collected, env=device)


def _inherited():
    rdmafork.fork_init()
    context, library = opened()
    domain = context.alloc_pd()
    region = domain.register(bytearray(PAGE))

    def drop():
        nonlocal context, domain, region
        assert region.inherited
        region.close()
        del region, domain, context
        gc.collect()
        return library.standin_open(), library.standin_wrong()

    assert child(drop) == (3, 0)
    del drop, region, domain
    context.close()
    nothing_is_left(library)


def test_a_child_makes_no_device_call_for_objects_it_drops(run, device):
    run(_inherited, env=device)
