"""What "rdmafork exec" does for the forks of programs that were not changed."""

import ctypes
import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import SLOWNESS, environment

import rdmafork
from rdmafork import _pins
from rdmafork.benchmarks.unmodified import first_device


@pytest.fixture(scope="module")
def programs():
    """{program: what it found, {"alone": ..., "exec": ...}}"""
    if not first_device():
        if _pins.available():
            pytest.skip(f"no RDMA device, and no pins of io_uring: {_pins.available()}")
        if not shutil.which(os.environ.get("CC", "cc")):
            pytest.skip("no RDMA device, and no C compiler")
        try:
            ctypes.CDLL("libibverbs.so.1")
        except OSError as error:
            pytest.skip(f"libibverbs is not installed: {error}")
    command = [sys.executable, "-m", "rdmafork.benchmarks.unmodified"]
    done = subprocess.run(
        [*command, "--forks", "3"], env=environment({}), capture_output=True, text=True,
        timeout=120 * SLOWNESS,
    )  # fmt: skip
    if "No module named 'pyverbs'" in done.stderr:
        pytest.skip("pyverbs for this Python is not installed (Debian: python3-pyverbs)")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["programs"]


def test_the_device_s_pages_stay_the_parent_s(programs):
    in_place = [found["exec"].get("in_place") for found in programs.values()]
    assert True in in_place and False not in in_place


def test_no_child_has_a_copy_of_what_is_registered(programs):
    for found in programs.values():
        assert found["exec"]["child_nbytes"] < found["exec"]["mebibytes"] << 19


@pytest.mark.skipif(
    not rdmafork.kernel_info().copy_on_fork, reason="this kernel copies no pinned pages at fork"
)
def test_without_it_the_kernel_copies_it_and_fork_takes_longer(programs):
    """But for the program that asks libibverbs for protection, which version 44 then gives."""
    for name in programs.keys() - {"dlvsym"}:
        alone, executed = programs[name]["alone"], programs[name]["exec"]
        saved = alone["child_nbytes"] - executed["child_nbytes"]
        assert saved > (alone["mebibytes"] << 20) * 0.9
        # Those that do not fork themselves share the guest's one processor with their client.
        if "in_place" in alone:
            assert executed["fork_ns"] < alone["fork_ns"]
