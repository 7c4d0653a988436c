"""System calls of pd.register() and close(), against ibv_reg_mr and ibv_dereg_mr alone."""

import collections
import contextlib
import os
import re
import shutil

import pytest
from conftest import run
from memory import marks_stay

import rdmafork
from vm.rc import ALL, Ours, memory, span, start

TIMES = 20
SIZE = 100_001


def mark(what):
    """A line in strace's output."""
    with contextlib.suppress(OSError):
        os.write(-1, what.encode())


def registers(rc, mode):
    start(mode)
    ours = Ours(rc)
    buffer = memory("base", SIZE, 777)
    address, nbytes = span(buffer)
    register = ours.domain.register
    for _ in range(2):  # the first time, which takes more calls, is not counted
        mark("bare")
        rc.register_many(ours.pd, address, nbytes, TIMES)
        mark("ours")
        for _ in range(TIMES):
            register(buffer, ALL).close()
        mark("end")


def traced(lines):
    """The system calls between each two marks, of the last time: {mark: Counter}."""
    found, current = {}, None
    for line in lines:
        line = re.sub(r"^\d+ +", "", line)
        if marked := re.match(r'write\(-1, "(\w+)"', line):
            current = found[marked.group(1)] = collections.Counter()
        elif current is not None and (name := re.match(r"(\w+)\(", line)):
            current[name.group(1)] += 1
    return found


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_a_region_costs_no_system_call_lazily_and_two_eagerly(rc, tmp_path, mode):
    if not shutil.which("strace"):
        pytest.skip("strace is missing")
    if mode == "lazy" and not rdmafork.kernel_info().copy_on_fork_trusted:
        pytest.skip("lazy is for kernels whose copying at fork() can be trusted")
    output = tmp_path / "strace"
    run(registers, rc, mode, prefix=["strace", "-o", str(output)])
    calls = traced(output.read_text().splitlines())
    bare, ours = calls["bare"], calls["ours"]
    assert bare.total() >= 2 * TIMES, bare  # at least one for each of the two
    more = ours - bare
    assert not bare - ours
    calls_of_a_pair = 3 if marks_stay() else 2
    assert more == ({} if mode == "lazy" else {"madvise": calls_of_a_pair * TIMES}), more


def ends_in_a_child(rc):
    rdmafork.fork_init()
    ours = Ours(rc)
    regions = [ours.register(memory("base", SIZE, 777)) for _ in range(4)]
    fds = rc.fds(ours.context)
    pid = os.fork()
    if not pid:
        mark("child")
        del regions[0]
        regions.pop().close()
        ours.domain.close()
        regions.clear()
        ours.close()
        del ours
        mark("end")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    return fds


def test_a_child_asks_nothing_of_the_device(rc, tmp_path):
    if not shutil.which("strace"):
        pytest.skip("strace is missing")
    output = tmp_path / "strace"
    run(ends_in_a_child, rc, prefix=["strace", "-f", "-o", str(output)])
    calls = traced(output.read_text().splitlines())
    asked = calls["child"].keys() & {"ioctl", "write", "close", "madvise", "munmap", "mmap"}
    assert not asked & {"ioctl", "write", "madvise"}, calls["child"]
