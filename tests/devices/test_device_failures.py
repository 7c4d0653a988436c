"""Every call of libibverbs, and every allocation of Python's, fails once: nothing is left of it.

The library is a stand-in with one device; tests/vm has real ones.
"""

import ctypes
import errno
import gc
import os
import types

import pytest
from conftest import HERE, both_modes, child, compile_c, fork_once, fresh
from memory import PAGE, Cyclic, private_map
from seccomp import check_claims, marks

import rdmafork

ERRORS = (errno.ENOMEM, errno.EAGAIN, errno.EINVAL, errno.EPERM, errno.EBUSY, errno.EFAULT,
          errno.ENODEV, errno.EOPNOTSUPP)  # fmt: skip
SOURCE = HERE / "standin_verbs.c"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("verbs") / "libibverbs.so.1"
    return compile_c(path, "-O1", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", SOURCE)


class Bench:
    """A device that can be opened, and all that may not change when something fails."""

    def __init__(self, path, mode):
        # By this name libibverbs is looked for, and there already.
        self.lib = ctypes.CDLL(path)
        from rdmafork import devices

        devices.find_device = lambda device: device
        rdmafork.fork_init(mode)
        self.device = type("Device", (), {"name": "mlx5_7", "node_guid": None})()
        self.memory, self.address = private_map(16 * PAGE)
        self.ordinary = set(marks())
        self.context = self.domain = self.region = None

    def open(self):
        self.context = rdmafork.Context(self.device)

    def alloc(self):
        self.domain = self.context.alloc_pd()

    def register(self):
        self.register_only()
        self.lib.standin_fail(0, 0)
        fork_once()

    def register_only(self):
        self.region = self.domain.register(memoryview(self.memory)[PAGE : 9 * PAGE + 5])

    def register_wiped_beside(self):
        with self.domain.register(memoryview(self.memory)[12 * PAGE :], on_fork="wipe"):
            fork_once()

    def close_region(self):
        self.region.close()

    def close_domain(self):
        self.domain.close()

    def close_context(self):
        self.context.close()

    def state(self):
        gc.collect()
        numbers = rdmafork.stats()
        return (
            self.lib.standin_open(),
            len(os.listdir("/proc/self/fd")),
            [bool(x) and not x.closed for x in (self.context, self.domain, self.region)],
            numbers.registrations, numbers.still_marked_bytes,
            [(r.start, r.end, r.on_fork) for r in rdmafork.protected_ranges()],
            {page: flags for page, flags in marks().items() if page not in self.ordinary},
        )  # fmt: skip


LIFE = ("open", "alloc", "register", "register_wiped_beside", "close_region", "close_domain",
        "close_context")  # fmt: skip


def opened(path, mode):
    """A bench whose device is open and has a domain."""
    bench = Bench(path, mode)
    bench.open()
    bench.alloc()
    return bench


@fresh
def test_a_child_is_told_who_opened_its_parent_s_device(library):
    bench = opened(library, "auto")
    theirs = rdmafork.ProtectionDomain.from_address(bench.domain.address)
    expected = f"was opened before fork() in pid {os.getpid()}; open the device afresh"
    for use in (bench.alloc, bench.register_only, lambda: theirs.address):
        for text in (child(_refusal, use), child(child, _refusal, use)):
            assert expected in text, text


def _refusal(use):
    try:
        return use()
    except rdmafork.InheritedError as error:
        return str(error)


@both_modes
@fresh
def test_every_call_of_the_library_fails_once_with_every_errno(library, mode):
    bench = Bench(library, mode)
    nothing = bench.state()
    for name in LIFE:
        step = getattr(bench, name)
        for number in ERRORS:
            for nth in range(1, 10):
                before, faults = bench.state(), bench.lib.standin_faults()
                bench.lib.standin_fail(nth, number)
                error = None
                try:
                    step()
                except OSError as raised:
                    error = raised
                bench.lib.standin_fail(0, 0)
                if bench.lib.standin_faults() == faults:
                    assert error is None
                    break
                # The library's error is passed on, with its subject.
                assert error is not None and error.errno == number, (name, nth, error)
                assert os.strerror(number) in str(error) or number == errno.EBUSY, error
                assert any(w in str(error) for w in ("mlx5_7", "list devices", "MemoryRegion")), (
                    error
                )
                del error
                assert bench.state() == before, (name, nth, number)
                check_claims(bench.ordinary)
            else:
                raise AssertionError(name)
            undo(bench, name)
        step()
    assert bench.state() == nothing
    faults = bench.lib.standin_faults()
    print(f"{faults} faults")
    # At least the list, the device, the domain, the region twice, and three releases.
    assert faults >= 8 * len(ERRORS)


@fresh
def test_read_only_memory_is_registered_for_reading_alone(library):
    bench = opened(library, "eager")
    for access in (None, 0, rdmafork.Access.REMOTE_READ):
        bench.domain.register(bytes(PAGE), access).close()
    with pytest.raises(BufferError, match="read-only"):
        bench.domain.register(bytes(PAGE), rdmafork.Access.LOCAL_WRITE)


@fresh
def test_lack_of_memory_in_the_library_is_no_property_of_a_device(library):
    bench = Bench(library, "eager")
    from rdmafork import _problems
    from rdmafork.devices import Port

    values = {"name": "mlx5_7", "node_guid": None, "problem": None}
    port = Port({"device": types.SimpleNamespace(**values), "number": 1})
    questions = {"driven": _problems.driven, "active_mtu": lambda: port.active_mtu}
    for name, question in questions.items():
        bench.lib.standin_fail(1, errno.ENOMEM)
        with pytest.raises(OSError) as caught:
            question()
        assert caught.value.errno == errno.ENOMEM, name
        bench.lib.standin_fail(1, errno.EPERM)
        answer = question()
        assert answer is None or answer.errno == errno.EPERM, name
    assert bench.lib.standin_open() == 0


def undo(bench, name):
    """So that the step can be taken again."""
    if name == "open":
        bench.context.close()
        bench.context = None
    elif name == "alloc":
        bench.domain.close()
        bench.domain = None
    elif name == "register":
        bench.region.close()
        bench.region = None
    elif name == "close_region":
        bench.register()
    elif name == "close_domain":
        bench.alloc()
    elif name == "close_context":
        bench.open()


@both_modes
@fresh
def test_every_allocation_of_python_s_fails_once(library, mode):
    pytest.importorskip("_testcapi", reason="this Python lacks _testcapi, which fails allocations")
    import _testcapi

    bench = Bench(library, mode)
    nothing, faults = bench.state(), 0

    def pure():
        with rdmafork.register(bytearray(3 * PAGE)):
            rdmafork.register_address(bench.address, PAGE, owner=bench).close()
            rdmafork.stats()
            rdmafork.protected_ranges()

    # Not over a fork, which ends Python itself where it has no memory.
    steps = [("pure", pure), ("open", bench.open), ("alloc", bench.alloc),
             ("register", bench.register_only)]  # fmt: skip
    for name, step in steps:
        step()  # imports and caches of the first time
        undo(bench, name)
        for nth in range(500):
            before = bench.state()
            failed = False
            _testcapi.set_nomemory(nth, nth + 1)
            try:
                step()
            except MemoryError:
                failed = True
            finally:
                _testcapi.remove_mem_hooks()
            if not failed:
                undo(bench, name)
                break
            faults += 1
            assert bench.state() == before, (name, nth)
        step()
    for close in (bench.close_region, bench.close_domain, bench.close_context):
        close()
    assert bench.state() == nothing
    print(f"{faults} faults")
    assert faults > 20


@both_modes
@fresh
def test_a_buffer_that_holds_its_region_is_collected(library, mode):
    bench = opened(library, mode)
    nothing = bench.state()
    for _ in range(100):
        memory = Cyclic(10)
        memory.region = bench.domain.register(memory)
    del memory
    assert bench.state() == nothing
    assert bench.lib.standin_wrong() == 0


@fresh
def test_an_on_demand_region_is_not_protected(library):
    bench = opened(library, "eager")
    for on_fork in ("omit", "wipe", "keep"):
        memory = bytearray(PAGE)
        with bench.domain.register(memory, rdmafork.Access.ON_DEMAND, on_fork) as region:
            assert (region.on_fork, region.protected) == (on_fork, False)


@fresh(timeout=60)
def test_closing_a_context_within_the_closing_of_its_domain_is_refused(library):
    bench = opened(library, "eager")
    refused = []

    class Pool(bytearray):
        def __del__(self):
            try:
                bench.context.close()
            except OSError as error:
                refused.append(error)

    region = bench.domain.register(Pool(4 * PAGE))
    bench.domain.close()
    assert region.closed and bench.domain.closed and not bench.context.closed
    assert [error.errno for error in refused] == [errno.EDEADLK]
    assert "this thread is closing <rdmafork.ProtectionDomain" in refused[0].strerror
    bench.context.close()
    assert bench.lib.standin_wrong() == 0 and bench.lib.standin_open() == 0
