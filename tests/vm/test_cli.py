"""The command line where there is a device: it finds the device and its port."""

import json
import subprocess
import sys

import pytest
from conftest import TIMEOUT, environment

import rdmafork

RDMAFORK = [sys.executable, "-m", "rdmafork"]
NBYTES = 100 << 20

# Memory registered at a device by a program that does not know of rdmafork.
HOLDING = f"""
import ctypes, mmap, sys
sys.path.append("/usr/lib/python3/dist-packages")
try:
    from pyverbs.device import Context
    from pyverbs.mr import MR
    from pyverbs.pd import PD
except ImportError as error:
    sys.exit(f"no pyverbs: {{error}}")
memory = mmap.mmap(-1, {NBYTES}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory[::4096] = b"x" * (len(memory) // 4096)
context = Context(name=sys.argv[1])
domain = PD(context)
region = MR(domain, len(memory), 1, address=ctypes.addressof(ctypes.c_char.from_buffer(memory)))
print("holding", flush=True)
sys.stdin.read()
"""


def command(*arguments, **env):
    return subprocess.run(
        [*RDMAFORK, *arguments], env=environment(env), capture_output=True, text=True,
        check=False, timeout=TIMEOUT,
    )  # fmt: skip


def rows(*arguments, **env):
    document = json.loads(command("doctor", "--json", *arguments, **env).stdout)
    return {row["what"]: row for row in document["rows"]}


@pytest.fixture
def holder(device):
    """holder(**env): a process with 100 MiB registered at the device."""
    started = []

    def start(**env):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDING, device], env=environment(env), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        if process.stdout.readline() != "holding\n":
            error = process.communicate()[1]
            if "no pyverbs" in error:
                pytest.skip(error)
            pytest.fail(error)
        return process

    yield start
    for process in started:
        process.communicate("", timeout=TIMEOUT)


def test_the_device_is_listed_with_its_active_port(device):
    done = command("devices")
    assert (done.returncode, done.stderr) == (0, "")
    (row,) = [line.split() for line in done.stdout.splitlines() if line.startswith(device)]
    assert row[1:3] == ["1", "ACTIVE"]
    assert "usable by this process" in done.stdout
    (found,) = [d for d in json.loads(command("devices", "--json").stdout)["devices"]
                if d["name"] == device]  # fmt: skip
    assert found["problem"] is None and found["ports"][0]["active_mtu"] >= 256


def test_doctor_finds_the_device_and_the_kernel_s_answer(device):
    found = rows()
    assert found[device] == {
        "section": "Devices", "status": "ok", "what": device,
        "evidence": "usable, port 1 ACTIVE", "cure": None,
    }  # fmt: skip
    info = rdmafork.kernel_info()
    assert "RDMA netlink" in found["pinned pages at fork()"]["evidence"]
    assert (found["pinned pages at fork()"]["status"] == "ok") == info.copy_on_fork_trusted
    assert found["rdmafork"]["status"] == found["libibverbs"]["status"] == "ok"


def test_doctor_tells_a_program_s_cost_of_a_fork(holder):
    found = rows("--pid", str(holder().pid))
    assert "100 MiB (VmPin)" in found["pinned pages"]["evidence"]
    assert found["marked pages"]["evidence"] == "none"
    cost = found["cost of a fork()"]
    if rdmafork.kernel_info().copy_on_fork:
        assert cost["status"] == "warning" and "copies 100 MiB of pinned" in cost["evidence"]
    else:
        assert cost["status"] == "problem" and "device lose 100 MiB" in cost["evidence"]
    assert "rdmafork is not loaded" in found["libraries"]["evidence"]
    assert "uverbs" in found["devices"]["evidence"]


def test_doctor_sees_that_libibverbs_protects(holder):
    found = rows("--pid", str(holder(RDMAV_FORK_SAFE="1").pid))
    if found["marked pages"]["evidence"] == "none":
        pytest.skip("this libibverbs does nothing where the kernel copies")
    assert "100 MiB that children do not inherit (dc)" in found["marked pages"]["evidence"]
    assert found["cost of a fork()"]["status"] == "ok"
