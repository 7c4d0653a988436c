"""Made-up trees of /sys, built after real ones: no RDMA is needed.

A node of /dev/infiniband is a link to /dev/null, with its numbers in sysfs: making real ones takes
privilege. Where libibverbs is installed it reads the same trees.
"""

import grp
import os
import pwd
import shutil
import socket
import stat
import tempfile
from pathlib import Path

import pytest
from conftest import child

from rdmafork import (
    _problems,
    get_device_list,
)

DEV = f"{os.major(os.stat('/dev/null').st_rdev)}:{os.minor(os.stat('/dev/null').st_rdev)}"
NOTHING = "0000:0000:0000:0000:0000:0000:0000:0000"


def put(directory, files):
    """Write files: name to text, bytes, a dict for a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if isinstance(content, dict):
            put(directory / name, content)
        elif isinstance(content, bytes):
            (directory / name).write_bytes(content)
        else:
            (directory / name).write_text(content + "\n")


def port(state="4: ACTIVE", phys="5: LinkUp", rate="100 Gb/sec (4X EDR)", layer="Ethernet",
         lid="0x0", sm_lid="0x0", mask="0x00010000", gids=(), slots=8):  # fmt: skip
    """A port's files; gids: (text, type, netdev), None for an empty slot."""
    gids = [*gids, *[None] * (slots - len(gids))]
    return {
        "state": state,
        "phys_state": phys,
        "rate": rate,
        "link_layer": layer,
        "lid": lid,
        "sm_lid": sm_lid,
        "cap_mask": mask,
        "gids": {str(i): g[0] if g else NOTHING for i, g in enumerate(gids)},
        "gid_attrs": {
            "types": {str(i): g[1] for i, g in enumerate(gids) if g and g[1]},
            "ndevs": {str(i): g[2] for i, g in enumerate(gids) if g and g[2]},
        },
    }


class Tree:
    """A directory like /sys, with devices/ and links to it as the kernel makes them."""

    def __init__(self, root):
        self.root, self.nodes, self.count = root / "sys", root / "infiniband", 0
        self.nodes.mkdir(parents=True)
        self.ibs, self.uverbs = self.root / "class/infiniband", self.root / "class/infiniband_verbs"

    def classes(self):
        if not self.ibs.exists():
            self.ibs.mkdir(parents=True)
            put(self.uverbs, {"abi_version": "6"})

    def link(self, at, to):
        at.symlink_to(os.path.relpath(to, at.parent))

    def add(self, name, guid, node_type="1: CA", pci=None, sub="", driver=None, modalias=None,
            numa="0", uverbs=True, ports=None, abi="1", **files):  # fmt: skip
        self.classes()
        parent = self.root / "devices/virtual"
        if pci:
            parent = self.root / "devices" / f"pci{pci[:7]}" / pci / sub
            put(parent, {"numa_node": numa, "modalias": modalias or "pci:v00000000d00000000sv"})
            (self.root / "bus/drivers" / driver).mkdir(parents=True, exist_ok=True)
            if not (parent / "driver").exists():
                self.link(parent / "driver", self.root / "bus/drivers" / driver)
        device = parent / "infiniband" / name
        put(device, {"node_type": node_type, "node_guid": guid, "sys_image_guid": guid})
        put(device, {"fw_ver": "", **files})
        put(device, {"ports": {str(n): p for n, p in (ports or {1: port()}).items()}})
        if pci:
            self.link(device / "device", parent)
        self.link(self.ibs / name, device)
        if uverbs:
            self.add_uverbs(name, parent, abi)
        return device

    def add_uverbs(self, name, parent=None, abi="1"):
        entry = (parent or self.root / "devices/virtual") / f"infiniband_verbs/uverbs{self.count}"
        put(entry, {"ibdev": name, "dev": DEV, "abi_version": abi})
        self.link(self.uverbs / entry.name, entry)
        (self.nodes / entry.name).symlink_to("/dev/null")
        self.count += 1
        return entry

    def take_place(self, patch):
        """It is /sys for this process."""
        patch.setenv("SYSFS_PATH", str(self.root))
        patch.setattr(_problems, "NODES", str(self.nodes))
        # The libibverbs of this process looks for nodes in /dev; here it has drivers for all.
        patch.setattr(_problems, "driven", lambda: dict.fromkeys(os.listdir(self.ibs), 0))


@pytest.fixture(name="tree")
def a_tree(tmp_path, monkeypatch):
    tree = Tree(tmp_path)
    tree.take_place(monkeypatch)
    monkeypatch.delenv("IBV_SHOW_WARNINGS", raising=False)
    return tree


def one(**options):
    (device,) = get_device_list(**options)
    return device


LINK_LOCAL = "fe80:0000:0000:0000:9803:9bff:fe67:ac2a"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a4d:0001"
ROCE = [
    (LINK_LOCAL, "IB/RoCE v1", "ens1f0np0"),
    (LINK_LOCAL, "RoCE v2", "ens1f0np0"),
    None,
    (IPV4, "IB/RoCE v1", "ens1f0np0"),
    (IPV4, "RoCE v2", "ens1f0np0.7"),
]
RXE = [(LINK_LOCAL, "RoCE v2", "rxenet"), (IPV4, "RoCE v2", "rxenet")]
MLX5 = "pci:v000015B3d0000101Bsv000015B3sd00000007bc02sc00i00"


def vendors(tree):
    """Devices of many makes."""
    tree.add(
        "mlx5_0", "9803:9b03:0067:ac2a", pci="0000:3b:00.0", driver="mlx5_core", modalias=MLX5,
        fw_ver="20.35.2000", board_id="MT_0000000222", hca_type="MT4123",
        ports={1: port(rate="200 Gb/sec (4X HDR)", layer="InfiniBand", lid="0x1f", sm_lid="0x2",
                       mask="0xa651e848", gids=[(LINK_LOCAL, "IB/RoCE v1", None)])},
    )  # fmt: skip
    tree.add(
        "mlx4_0", "0002:c903:0010:abcd", pci="0000:81:00.0", driver="mlx4_core", numa="1", abi="4",
        modalias="pci:v000015B3d00001003sv000015B3sd00000055bc02sc00i00",
        sys_image_guid="0002:c903:0010:abd0", fw_ver="2.42.5000", board_id="MT_1090110019",
        ports={1: port(rate="56 Gb/sec (4X FDR)", layer="InfiniBand", lid="0x7", sm_lid="0x7"),
               2: port("1: DOWN", "3: Disabled", "10 Gb/sec (1X QDR)", slots=16)},
    )  # fmt: skip
    tree.add(
        "mlx5_10", "0000:0000:0000:0000", pci="0000:3b:00.1", sub="mlx5_core.sf.4", numa="-1",
        driver="mlx5_core.sf", modalias="auxiliary:mlx5_core.sf", fw_ver="20.35.2000",
    )  # fmt: skip
    tree.add(
        "mlx5_2", "9803:9b03:0067:ac2b", pci="0000:3b:00.1", driver="mlx5_core", modalias=MLX5,
        fw_ver="20.35.2000", board_id="MT_0000000222", ports={1: port(gids=ROCE, slots=32)},
    )  # fmt: skip
    tree.add(
        "bnxt_re0", "be97:e1ff:fe5a:1c80", pci="0000:c4:00.0", driver="bnxt_en",
        modalias="pci:v000014E4d00001750sv000014E4sd00002100bc02sc00i00",
        ports={1: port("1: DOWN", "3: Disabled", "25 Gb/sec (1X EDR)", gids=ROCE)},
    )  # fmt: skip
    tree.add(
        "irdma0", "6805:caff:feab:cdef", node_type="4: RNIC", pci="0000:18:00.0", driver="ice",
        modalias="pci:v00008086d00001592sv00008086sd00000002bc02sc00i00",
        ports={1: port(gids=[("6805:caab:cdef:0000:0000:0000:0000:0000", "IB/RoCE v1", None)])},
    )  # fmt: skip
    tree.add(
        "efa_0", "0000:0000:0000:0000", node_type="7: unspecified", pci="0000:00:06.0",
        driver="efa", modalias="pci:v00001D0Fd0000EFA1sv00000000sd00000000bc02sc00i00", numa="-1",
        ports={1: port(rate="100 Gb/sec (4X EDR)", layer="Unknown",
                       gids=[("fe80:0000:0000:0000:0488:4bff:fe5d:07b1", None, None)], slots=1)},
    )  # fmt: skip
    tree.add(
        "hfi1_0", "0011:7501:0179:e5a0", pci="0000:05:00.0", driver="hfi1", fw_ver="1.27.0",
        modalias="pci:v00008086d000024F0sv00008086sd000024F0bc02sc08i00", board_id="HFI Adapter",
        ports={1: port(layer="InfiniBand", lid="0xffff", state="2: INIT", slots=1)},
    )  # fmt: skip
    tree.add("rxe0", "8c0b:2fff:feba:430c", parent="rxenet",
             ports={1: port(rate="2.5 Gb/sec (1X SDR)", gids=RXE, slots=64)})  # fmt: skip
    tree.add("siw0", "0200:0000:0000:0000", node_type="4: RNIC")
    tree.add("usnic_0", "0a25:b5ff:fe00:0001", node_type="6: usNIC UDP")
    return tree


def as_nobody(function):
    """The result of function for an ordinary user."""
    if os.geteuid():
        return function()
    assert grp and pwd and socket  # imported: an ordinary user may not reach the library

    def ordinary():
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        return function()

    return child(ordinary)


def forbid(tree, mode=0o600):
    """Nodes that are there, and refused. A link has no mode of its own: through a device's file
    that the ordinary user may not open."""
    for node in tree.nodes.iterdir():
        node.unlink()
        if os.geteuid() == 0:
            try:
                os.mknod(node, mode | stat.S_IFCHR, os.stat("/dev/null").st_rdev)
            except PermissionError:
                pytest.skip("this root may not make device nodes")
            os.chmod(node, mode)
        else:
            pytest.skip("making a device node that its owner may not open takes root")


@pytest.fixture(name="tmp_path")
def an_open_tmp_path():
    """pytest's own is closed to others, and some tests are an ordinary user's."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    for directory, names, _ in os.walk(path):
        for name in names:
            Path(directory, name).chmod(0o755) if not Path(directory, name).is_symlink() else None
    shutil.rmtree(path)
