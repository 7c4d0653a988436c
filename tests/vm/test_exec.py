"""Programs that know nothing of rdmafork, in the environment of "rdmafork exec"."""

import contextlib
import ctypes
import functools
import json
import os
import shutil
import subprocess
import sys

import pytest
import self_calling_libibverbs
from conftest import SLOWNESS, TIMEOUT, child, environment, run
from memory import marks_stay, vm_flags

import rdmafork
from vm.rc import ALL, Ours, State, memory
from vm.test_neighbours import SIZE, survives

EXEC = {"RDMAFORK_EXEC": "1"}
if not rdmafork.kernel_info().copy_on_fork_trusted:
    # A libibverbs that calls itself directly and is loaded later protects itself.
    EXEC |= {"RDMAV_FORK_SAFE": "1", "RDMAV_HUGEPAGES_SAFE": "1"}
KINDS = ["base", "hugetlb"]


def executed(function, *args, env=None):
    return run(function, *args, env={**EXEC, **(env or {})}, preload=rdmafork.get_library())


@contextlib.contextmanager
def by_libibverbs_alone(rc):
    """(pair, function that registers) of a program that has never heard of rdmafork."""
    before = State.now(rc)
    context, pd = rc.open()
    pair, regions = rc.pair(context, pd), []

    def register(buffer):
        regions.append(rc.register(pd, buffer))
        return regions[-1]

    yield pair, register
    pair.close()
    for region in regions:
        region.close()
    rc.close(context, pd)
    assert State.now(rc) == before


# ---- data ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_under_exec_no_data_is_lost(rc, huge_pages, kind):
    executed(_loses_nothing, rc, kind, "ours")


def _loses_nothing(rc, kind, how):
    with by_libibverbs_alone(rc) as (pair, register):
        near, far = register(memory("shared", SIZE)), register(memory(kind, SIZE, 777))
        stats = rdmafork.stats()
        assert [library.how for library in stats.ibv_libraries] == [how]
        assert stats.ibv_ranges >= 2  # and the drivers' own
        survives(pair, near, far)
    stats = rdmafork.stats()
    assert (stats.ibv_ranges, stats.ibv_unbalanced) == (0, 0)
    assert stats.marked_bytes == (stats.still_marked_bytes if marks_stay() else 0)


@pytest.mark.skipif(
    rdmafork.kernel_info().copy_on_fork, reason="this kernel copies pinned pages at fork"
)
def test_without_exec_data_is_lost(rc, huge_pages):
    with pytest.raises(AssertionError):
        run(_is_lost, rc)


def _is_lost(rc):
    with by_libibverbs_alone(rc) as (pair, register):
        survives(pair, register(memory("shared", SIZE)), register(memory("hugetlb", SIZE, 777)))


@pytest.fixture
def direct(tmp_path):
    """The environment for a libibverbs that calls itself directly, with the system's drivers."""
    path = self_calling_libibverbs.make(tmp_path)
    # The drivers of the system's, which are told of by name alone.
    places = (f"/usr/{lib}/libibverbs" for lib in ("lib/x86_64-linux-gnu", "lib64", "lib"))
    return {"LD_LIBRARY_PATH": ":".join([os.path.dirname(path), *places])}


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_linked_to_a_libibverbs_that_calls_itself_directly(rc, huge_pages, direct, kind):
    """To swallow its ibv_fork_init() and no more would lose its own protection."""
    preload = [rdmafork.get_library(), rc.library]
    run(_loses_nothing, rc, kind, "patched", env={**EXEC, **direct}, preload=preload)


def test_such_a_libibverbs_that_is_loaded_later(rc, huge_pages, direct):
    """Not seen before the first fork: it protects itself, or the kernel copies."""
    executed(_loaded_later, rc, env=direct)


def _loaded_later(rc):
    with by_libibverbs_alone(rc) as (pair, register):
        survives(pair, register(memory("shared", SIZE)), register(memory("hugetlb", SIZE, 777)))
    (library,) = rdmafork.stats().ibv_libraries
    assert library.how == ("patched" if rdmafork.kernel_info().copy_on_fork_trusted else "refused")


def test_interception_in_a_running_python(rc, huge_pages):
    run(_running, rc)


def _running(rc):
    assert rc.lib
    rdmafork.fork_init(intercept=True)
    _loses_nothing(rc, "hugetlb", "rewritten")


def test_a_program_that_asks_by_version_is_protected_too(rc, huge_pages):
    """As NCCL does, which turns libibverbs' own support on before a look is possible."""
    executed(_by_version, rc)


def test_asking_by_version_a_libibverbs_that_calls_itself_directly(rc, huge_pages, direct):
    executed(_by_version_directly, rc, env=direct)


def ask_by_version():
    library, libc = ctypes.CDLL("libibverbs.so.1"), ctypes.CDLL(None)
    libc.dlvsym.restype = ctypes.c_void_p
    libc.dlvsym.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
    fork_init = libc.dlvsym(library._handle, b"ibv_fork_init", b"IBVERBS_1.1")
    assert ctypes.CFUNCTYPE(ctypes.c_int)(fork_init)() == 0


def _by_version(rc):
    ask_by_version()
    _loses_nothing(rc, "hugetlb", "ours")


def _by_version_directly(rc):
    """Regions registered before the first look, at a fork, are libibverbs' to protect."""
    # Huge pages it takes only with the variable that is set for it where copying is not trusted.
    kind = "hugetlb" if "RDMAV_HUGEPAGES_SAFE" in os.environ else "base"
    ask_by_version()
    with by_libibverbs_alone(rc) as (pair, register):
        near, far = register(memory("shared", SIZE)), register(memory(kind, SIZE))
        (library,) = rdmafork.stats().ibv_libraries
        assert library.how == "refused"
        assert library.why == "its own fork support already protects memory"
        assert "dc" in vm_flags(far.address)
        survives(pair, near, far)
    assert "dc" not in vm_flags(far.address)


# ---- registrations counted here ----------------------------------------------------------


def test_a_region_of_ours_counts_once(rc):
    executed(_counts_once, rc)


def _counts_once(rc):
    ours = Ours(rc)
    before = rdmafork.stats()
    region = ours.domain.register(memory("base", SIZE), ALL)
    stats = rdmafork.stats()
    assert stats.registrations == before.registrations + 1
    assert (stats.ibv_ranges, stats.ibv_calls) == (before.ibv_ranges, before.ibv_calls)
    other = rc.register(ours.pd, memory("base", SIZE))
    assert rdmafork.stats().ibv_ranges == before.ibv_ranges + 1
    region.close()
    stats = rdmafork.stats()
    assert (stats.ibv_calls, stats.ibv_unbalanced) == (before.ibv_calls + 1, 0)
    other.close()
    ours.close()


# ---- children ----------------------------------------------------------------------------


PYVERBS = """
import mmap, os, sys, time
sys.path.append("/usr/lib/python3/dist-packages")
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
context = Context(name=sys.argv[1])
pd = PD(context)
mr = MR(pd, 128 << 10, 7)
sys.stdout.flush()
if not os.fork():
    sys.exit(0)  # and its destructors with it
os.wait()
mr.write("parent", 6)
assert mr.read(6, 0) == b"parent"
mr.close()
pd.close()
context.close()
print("all closed")
"""


def pyverbs(device, env):
    if sys.version_info[:2] != (3, 11):
        pytest.skip("Debian's pyverbs is for CPython 3.11")
    command = [sys.executable, "-c", PYVERBS, device]
    limit = 120 * SLOWNESS
    done = subprocess.run(
        command, env=environment(env), capture_output=True, text=True, timeout=limit
    )
    if "No module named 'pyverbs'" in done.stderr:
        pytest.skip("pyverbs is not installed (Debian: python3-pyverbs)")
    return done


def test_a_child_of_pyverbs_exits_and_the_parent_s_objects_live(device, tmp_path):
    report = tmp_path / "report"
    preload = {"LD_PRELOAD": rdmafork.get_library(), "RDMAFORK_REPORT": str(report)}
    done = pyverbs(device, {**EXEC, **preload})
    assert done.stdout == "all closed\n", done.stderr
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    parent = [line for line in lines if line["forks"]]
    assert len(parent) == 1 and parent[0]["registrations"]["total"] >= 1
    assert [library["how"] for library in parent[0]["libraries"]] == ["ours"]


@pytest.mark.parametrize("settings", [{}, {**EXEC, "RDMAFORK_KEEP_DEVICES": "1"}])
def test_without_exec_the_parent_loses_its_objects(device, settings):
    if settings:
        settings = {**settings, "LD_PRELOAD": rdmafork.get_library()}
    done = pyverbs(device, settings)
    assert "all closed" not in done.stdout
    assert "Failed to dereg MR" in done.stderr or "Error" in done.stderr


def test_after_chroot_a_child_destroys_nothing(rc, tmp_path):
    refused, exchanged = executed(_after_chroot, rc, tmp_path)
    assert all(refused) and exchanged == (0, 0), (refused, exchanged)


def _after_chroot(rc, root):
    """Where no /proc says which descriptors are devices', and nothing can be imported."""
    context, pd = rc.open()
    pair = rc.pair(context, pd)
    near, far = (rc.register(pd, memory(kind, SIZE)) for kind in ("shared", "base"))
    os.chroot(root)
    refused = child(lambda: [_refused(region.close) for region in (near, far)])
    if not all(refused):
        return refused, None
    exchanged = pair.exchange(near, far, 1)
    for each in (pair, near, far):
        each.close()
    rc.close(context, pd)
    return refused, exchanged


def _refused(call):
    try:
        call()
    except OSError as error:
        return error.errno
    return 0


def test_a_child_may_open_the_device_itself(rc):
    executed(_opens_itself, rc)


def _opens_itself(rc):
    with by_libibverbs_alone(rc) as (pair, register):
        near, far = register(memory("shared", SIZE)), register(memory("base", SIZE))

        def of_its_own():
            with by_libibverbs_alone(rc) as (other, registering):
                one, two = registering(memory("shared", SIZE)), registering(memory("base", SIZE))
                survives(other, one, two)

        assert child(of_its_own, timeout=TIMEOUT) is None
        survives(pair, near, far)


# ---- perftest ----------------------------------------------------------------------------


def test_ib_write_bw_runs_as_ever(device, tmp_path):
    program = shutil.which("ib_write_bw")
    if not program:
        pytest.skip("ib_write_bw is not installed (Debian: perftest)")
    report = tmp_path / "report"
    settings = {"LD_PRELOAD": rdmafork.get_library(), "RDMAFORK_REPORT": str(report)}
    start = functools.partial(
        subprocess.Popen, env=environment({**EXEC, **settings}), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    command = [program, "-d", device, "-x", "1", "-n", "100", "-s", "65536"]
    server = start(command)
    try:
        for _ in range(60):  # until the server listens
            client = start([*command, "127.0.0.1"])
            output = client.communicate(timeout=TIMEOUT)[0]
            if client.returncode == 0 or "Couldn't connect" not in output:
                break
        assert client.returncode == 0, output
        assert "65536" in output
        assert server.wait(timeout=TIMEOUT) == 0, server.stdout.read()
    finally:
        server.kill()
        server.communicate()
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    assert {line["program"] for line in lines} == {program}
    done = [line for line in lines if line["ranges"]["calls"]]
    assert len(done) == 2
    for line in done:
        assert line["ranges"]["live"] == 0 and not line["unbalanced"] and not line["errors"]
