"""Devices through libibverbs, as far as it goes without one; the rest is in tests/vm."""

import ctypes.util
import errno
import os
import shutil
import subprocess
import sys

import pytest
from conftest import fresh

import rdmafork

devices = os.path.isdir("/sys/class/infiniband")
library = ctypes.util.find_library("ibverbs")


@pytest.mark.skipif(devices, reason="this kernel has RDMA")
@fresh
def test_no_rdma_in_the_kernel_is_said():
    with pytest.raises(OSError, match="no RDMA") as caught:
        rdmafork.Context("mlx5_0")
    assert caught.value.errno == errno.ENOSYS
    assert rdmafork.stats().registrations == 0


@fresh
def test_no_such_device_is_said_with_those_there_are(tmp_path):
    os.makedirs(os.path.join(tmp_path, "class/infiniband/mlx5_7"))
    os.environ["SYSFS_PATH"] = str(tmp_path)
    with pytest.raises(OSError, match="no RDMA device mlx5_0; there are mlx5_7") as caught:
        rdmafork.Context("mlx5_0")
    assert caught.value.errno == errno.ENODEV


@fresh
def test_a_device_that_cannot_be_used_says_why(tmp_path):
    device = os.path.join(tmp_path, "class/infiniband/mlx5_7")
    os.makedirs(device)
    for name, text in (("node_guid", "9803:9b03:0067:ac2a"), ("node_type", "1: CA")):
        with open(os.path.join(device, name), "w") as file:
            file.write(text + "\n")
    os.environ["SYSFS_PATH"] = str(tmp_path)
    with pytest.raises(OSError, match=r"cannot open RDMA device mlx5_7: .*modprobe ib_uverbs"):
        rdmafork.Context("mlx5_7")
    (listed,) = rdmafork.get_device_list(all=True)
    with pytest.raises(OSError, match="modprobe ib_uverbs") as caught:
        listed.open()
    assert caught.value.errno == errno.ENODEV


@pytest.mark.parametrize("device", [None, 7, b"mlx5_0", object()])
@fresh
def test_an_argument_that_is_no_device_is_refused(device):
    with pytest.raises(TypeError, match="a Device or its name"):
        rdmafork.Context(device)


@fresh
def test_domains_and_regions_are_made_by_methods_alone():
    with pytest.raises(TypeError, match="alloc_pd"):
        rdmafork.ProtectionDomain()
    with pytest.raises(TypeError, match="register"):
        rdmafork.MemoryRegion()


@fresh
def test_an_object_made_by_new_alone_is_closed():
    for kind in (rdmafork.Context, rdmafork.ProtectionDomain, rdmafork.MemoryRegion):
        empty = kind.__new__(kind)
        assert empty.closed and "closed" in repr(empty)
        empty.close()
        with pytest.raises(ValueError, match="closed"):
            empty.__enter__()


def test_importing_opens_no_library():
    script = "import rdmafork; print(*sorted(open('/proc/self/maps')))"
    maps = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "librdmafork.so" in maps.stdout and "ibverbs" not in maps.stdout


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="hiding a library takes root, unshare"
)
@pytest.mark.skipif(library is None, reason="there is no libibverbs to hide")
def test_without_libibverbs_its_package_is_named():
    script = (
        "import errno\nfrom rdmafork._ibverbs import driven_devices\n"
        "try:\n driven_devices()\n"
        "except OSError as error:\n print(errno.errorcode[error.errno], error)\n"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", f"import ctypes; ctypes.CDLL({library!r});"
         "print(*{l.split()[-1] for l in open('/proc/self/maps') if 'libibverbs.so' in l})"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    hide = f"mount --bind /dev/null {loaded.stdout.strip()} && exec {sys.executable} -c '{script}'"
    hidden = subprocess.run(["unshare", "-m", "sh", "-c", hide], capture_output=True, text=True)
    assert hidden.stdout.startswith("ELIBACC"), hidden
    for word in ("libibverbs1", "ibverbs-providers", "Fedora"):
        assert word in hidden.stdout
