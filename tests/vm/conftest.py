"""Real devices: rdma_rxe in a VM, or the host's own. Without one these tests are skipped.

RDMAFORK_TEST_DEVICE=required makes the lack of a device an error; any other value names it.
"""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from memory import free_huge_pages, huge_page_pool

from vm.rc import Rc

HERE = Path(__file__).resolve().parent
DEVICES = Path("/sys/class/infiniband")


def pytest_addoption(parser):
    parser.addoption("--hours", type=float, default=0.01, help="of tests/vm/soak.py")


def lacking(reason):
    if os.environ.get("RDMAFORK_TEST_DEVICE", ""):
        pytest.fail(f"RDMAFORK_TEST_DEVICE is set, but {reason}")
    pytest.skip(reason)


def usable(device):
    """Can its reliable connections be had without a connection manager?"""
    uverbs = Path("/sys/class/infiniband_verbs")
    nodes = {p.joinpath("ibdev").read_text().strip(): p.name for p in uverbs.glob("uverbs*")}
    state = DEVICES / device / "ports/1/state"
    return (
        device in nodes
        and os.access(f"/dev/infiniband/{nodes[device]}", os.R_OK | os.W_OK)
        and "RNIC" not in (DEVICES / device / "node_type").read_text()
        and "ACTIVE" in state.read_text()
    )


@pytest.fixture(scope="session")
def device():
    """The name of a device with an active port."""
    named = os.environ.get("RDMAFORK_TEST_DEVICE", "")
    names = sorted(os.listdir(DEVICES)) if DEVICES.is_dir() else []
    if named not in ("", "required"):
        names = [named] if named in names else []
    found = [name for name in names if usable(name)]
    if not found:
        lacking(f"no RDMA device with an active port can be used here (there are {names})")
    if not shutil.which("rdma"):
        lacking("counting the device's objects needs rdma (Debian: iproute2)")
    return found[0]


@pytest.fixture(scope="session")
def rc(device, tmp_path_factory):
    """The functions of rc.c, on this device."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if not shutil.which(compiler[0]):
        lacking(f"there is no C compiler ({compiler[0]})")
    library = tmp_path_factory.mktemp("rc") / "rc.so"
    command = [*compiler, *"-std=gnu11 -O1 -g -Wall -Wextra -shared -fPIC".split()]
    built = subprocess.run(
        [*command, str(HERE / "rc.c"), "-libverbs", "-o", str(library)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if built.returncode:
        headers = subprocess.run(
            [*compiler, "-E", "-x", "c", "-"], input="#include <infiniband/verbs.h>\n",
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        if headers.returncode:
            lacking("libibverbs' headers are missing (Debian: libibverbs-dev)")
        pytest.fail(built.stdout)
    return Rc(device, str(library))


@pytest.fixture(scope="module")
def huge_pages():
    """Enough huge pages of 2 MiB are free, for 64 MiB and for what fork() copies."""
    wanted = 72
    if free_huge_pages() >= wanted:
        yield wanted
    else:
        with huge_page_pool(wanted):
            yield wanted
