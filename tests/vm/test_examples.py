"""The programs in examples/ that need a device, at one."""

import os
import re
import shutil
import socket
import sys
from pathlib import Path

import pytest
from mpi import mpirun
from package.test_examples import EXAMPLES, example


def test_pyverbs_pingpong(device):
    debian = {"PYTHONPATH": "/usr/lib/python3/dist-packages"}
    said = example("pyverbs_pingpong.py", device, 20, 1, env=debian)
    for end in ("ping", "pong"):
        (forks,) = re.findall(f"^{end}: 20 rounds of 1024 KiB, ([0-9]+) forks, every", said, re.M)
        assert int(forks) > 0


def test_mpi_fork_at_a_device(device):
    pytest.importorskip("mpi4py")
    said = mpirun(2, sys.executable, EXAMPLES / "mpi_fork.py", device, 8)
    assert said.count(f" at {device}") == 2 and "sum of squares" in said


def test_ucx_exec(device):
    if not shutil.which("ucx_perftest"):
        pytest.skip("ucx_perftest is not installed (Debian: ucx-utils)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    said = example("ucx_exec.sh", device, port, before=(), env={"PATH": path})
    assert "Final:" in said
    assert said.count('"program": "ucx_perftest"') == 2
