"""get_device_list() on made-up trees of /sys, built after real ones; no RDMA is needed.

A node of /dev/infiniband is a link to /dev/null, with its numbers in sysfs: making real ones takes
privilege. Where libibverbs is installed it reads the same trees.
"""

import copy
import errno
import grp
import json
import os
import pickle
import pwd
import random
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import pytest
from conftest import child, environment, run

import rdmafork
from rdmafork import (
    Device,
    DeviceWarning,
    Gid,
    GidType,
    LinkLayer,
    NodeType,
    PhysicalState,
    PortState,
    Transport,
    _problems,
    _sysfs,
    devices,
    get_device_list,
)

DEV = f"{os.major(os.stat('/dev/null').st_rdev)}:{os.minor(os.stat('/dev/null').st_rdev)}"
NOTHING = "0000:0000:0000:0000:0000:0000:0000:0000"


# ---- a made-up /sys ---------------------------------------------------------------------


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


@pytest.fixture
def tree(tmp_path, monkeypatch):
    tree = Tree(tmp_path)
    monkeypatch.setenv("SYSFS_PATH", str(tree.root))
    monkeypatch.setattr(_problems, "NODES", str(tree.nodes))
    monkeypatch.delenv("IBV_SHOW_WARNINGS", raising=False)
    # The libibverbs of this process looks for nodes in /dev; here it has drivers for all.
    monkeypatch.setattr(_problems, "driven", lambda: dict.fromkeys(os.listdir(tree.ibs), 0))
    return tree


def one(tree=None, **options):
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


# ---- values -----------------------------------------------------------------------------


def test_a_device_is_what_its_files_say(tree):
    found = {device.name: device for device in get_device_list(all=vendors(tree) and True)}
    mlx5 = found["mlx5_0"]
    assert (mlx5.node_type, mlx5.transport) == (NodeType.CA, Transport.IB)
    assert (mlx5.node_guid, mlx5.node_guid_text) == (0x98039B030067AC2A, "9803:9b03:0067:ac2a")
    assert mlx5.sys_image_guid_text == "9803:9b03:0067:ac2a"
    assert (mlx5.firmware_version, mlx5.board_id) == ("20.35.2000", "MT_0000000222")
    assert (mlx5.uverbs_name, mlx5.uverbs_path) == ("uverbs0", f"{tree.nodes}/uverbs0")
    assert (mlx5.driver, mlx5.pci_address, mlx5.numa_node) == ("mlx5_core", "0000:3b:00.0", 0)
    assert (mlx5.netdev, mlx5.index, mlx5.problem) == (None, None, None)
    assert found["mlx4_0"].sys_image_guid == 0x0002C9030010ABD0
    assert found["mlx4_0"].numa_node == 1
    subfunction = found["mlx5_10"]
    assert (subfunction.pci_address, subfunction.driver) == ("0000:3b:00.1", "mlx5_core.sf")
    assert (subfunction.numa_node, subfunction.node_guid) == (None, 0)
    assert (found["mlx5_2"].netdev, found["rxe0"].netdev) == ("ens1f0np0", "rxenet")
    virtual = found["rxe0"]
    assert (virtual.pci_address, virtual.driver, virtual.numa_node) == (None, None, None)
    assert (virtual.firmware_version, virtual.board_id) == (None, None)


@pytest.mark.parametrize(
    ("name", "node_type", "transport"),
    [
        ("hfi1_0", NodeType.CA, Transport.IB),
        ("irdma0", NodeType.RNIC, Transport.IWARP),
        ("siw0", NodeType.RNIC, Transport.IWARP),
        ("efa_0", NodeType.UNSPECIFIED, Transport.UNSPECIFIED),
        ("usnic_0", NodeType.USNIC_UDP, Transport.USNIC_UDP),
    ],
)
def test_what_a_device_is_and_speaks(tree, name, node_type, transport):
    (device,) = (d for d in get_device_list(all=vendors(tree) and True) if d.name == name)
    assert (device.node_type, device.transport) == (node_type, transport)


def test_devices_come_in_natural_order_where_the_index_is_unknown(tree):
    names = [device.name for device in get_device_list(all=vendors(tree) and True)]
    assert names == [
        "bnxt_re0", "efa_0", "hfi1_0", "irdma0", "mlx4_0", "mlx5_0", "mlx5_2", "mlx5_10",
        "rxe0", "siw0", "usnic_0",
    ]  # fmt: skip


def test_ports_are_what_their_files_say(tree):
    found = {device.name: device.ports for device in get_device_list(all=vendors(tree) and True)}
    (port,) = found["mlx5_0"]
    assert (port.number, port.state) == (1, PortState.ACTIVE)
    assert (port.physical_state, port.link_layer) == (PhysicalState.LINK_UP, LinkLayer.INFINIBAND)
    assert (port.rate, port.lid, port.sm_lid) == (200.0, 0x1F, 2)
    assert port.capability_mask == 0xA651E848
    first, second = found["mlx4_0"]
    assert (first.number, first.link_layer, first.rate) == (1, LinkLayer.INFINIBAND, 56)
    assert (second.number, second.link_layer, second.rate) == (2, LinkLayer.ETHERNET, 10)
    assert (second.state, second.physical_state) == (PortState.DOWN, PhysicalState.DISABLED)
    assert found["rxe0"][0].rate == 2.5
    assert found["efa_0"][0].link_layer == LinkLayer.UNSPECIFIED


def test_a_gid_table_has_its_used_slots_with_their_types(tree):
    found = {device.name: device.ports for device in get_device_list(all=vendors(tree) and True)}
    gids = found["mlx5_2"][0].gids
    assert gids == (
        Gid(0, "fe80::9803:9bff:fe67:ac2a", GidType.ROCE_V1, "ens1f0np0"),
        Gid(1, "fe80::9803:9bff:fe67:ac2a", GidType.ROCE_V2, "ens1f0np0"),
        Gid(3, "::ffff:10.77.0.1", GidType.ROCE_V1, "ens1f0np0"),
        Gid(4, "::ffff:10.77.0.1", GidType.ROCE_V2, "ens1f0np0.7"),
    )
    assert gids[0].raw == bytes.fromhex(LINK_LOCAL.replace(":", ""))
    # The same words mean another thing where it is no Ethernet, or no RoCE.
    (gid,) = found["mlx5_0"][0].gids
    assert (gid.type, gid.netdev) == (GidType.IB, None)
    assert [gid.type for gid in found["irdma0"][0].gids] == [GidType.IB]
    assert [gid.type for gid in found["efa_0"][0].gids] == [GidType.IB]
    assert found["mlx4_0"][0].gids == ()


def test_ports_and_gids_are_read_anew(tree):
    device_path = tree.add("mlx5_0", "9803:9b03:0067:ac2a", ports={1: port(gids=ROCE)})
    device = one()
    before = device.ports[0]
    put(device_path / "ports/1", {"state": "1: DOWN", "gids": {"0": NOTHING}})
    assert (before.state, device.ports[0].state) == (PortState.ACTIVE, PortState.DOWN)
    assert [gid.index for gid in before.gids] == [1, 3, 4]


def test_listing_reads_no_gid_table(tree):
    device_path = tree.add("rxe0", "8c0b:2fff:feba:430c")
    shutil.rmtree(device_path / "ports/1/gids")
    (port,) = one().ports
    with pytest.raises(OSError, match="gone") as caught:
        _ = port.gids
    assert caught.value.errno == errno.ENODEV


def test_numbers_of_a_newer_kernel_are_members_too(tree):
    new = port("17: ENTANGLED", "0: <unknown>", gids=[(IPV4, "RoCE v3", "e0")])
    tree.add("new_0", "0000:0000:0000:0001", node_type="9: quantum", ports={1: new})
    device = one()
    assert (device.node_type, device.node_type.name) == (9, "UNKNOWN_9")
    assert device.transport is Transport.UNKNOWN
    (port_,) = device.ports
    assert (port_.state, port_.state.name) == (17, "UNKNOWN_17")
    assert port_.state == PortState(17) and hash(port_.state) == hash(PortState(17))
    assert pickle.loads(pickle.dumps(port_.state)) == 17
    assert port_.physical_state is PhysicalState.NOP
    assert port_.gids[0].type is GidType.UNKNOWN
    with pytest.raises(ValueError):
        PortState("ACTIVE")


def test_devices_are_equal_by_name_and_guid_and_have_no_order(tree):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    path = tree.add("mlx5_1", "9803:9b03:0067:ac2b")
    first, second = get_device_list()
    again = get_device_list()
    assert [first, second] == again and {first, second} == set(again)
    assert first != second and first != "mlx5_0"
    with pytest.raises(TypeError):
        _ = first < second
    put(path, {"node_guid": "9803:9b03:0067:ac2c"})
    assert get_device_list()[1] != second


def test_a_device_is_read_only_and_can_be_sent_elsewhere(tree):
    vendors(tree)
    for device in get_device_list():
        assert pickle.loads(pickle.dumps(device)) == device == copy.copy(device)
        assert repr(pickle.loads(pickle.dumps(device.ports))) == repr(device.ports)
        with pytest.raises(AttributeError):
            device.name = "other"
        with pytest.raises(AttributeError):
            _ = device.nonsense
        assert {"name", "ports", "node_guid_text"} <= set(dir(device))


def test_repr_says_what_one_asks_for_first(tree):
    vendors(tree)
    shown = {device.name: repr(device) for device in get_device_list()}
    assert shown["mlx5_0"] == (
        "<Device mlx5_0: CA, IB, 9803:9b03:0067:ac2a, mlx5_core at 0000:3b:00.0, "
        "firmware 20.35.2000, uverbs0>"
    )
    assert shown["rxe0"] == "<Device rxe0: CA, IB, 8c0b:2fff:feba:430c, rxenet, uverbs8>"
    (port,) = next(d for d in get_device_list() if d.name == "mlx5_0").ports
    assert repr(port) == (
        "<Port mlx5_0/1: ACTIVE, LINK_UP, INFINIBAND, 200 Gb/s, LID 31, SM LID 2>"
    )


def test_as_dict_is_ready_for_json_and_complete(tree, monkeypatch):
    vendors(tree)
    monkeypatch.setattr(devices.Port, "_mtus", lambda self: (1024, 4096))
    listed = {d.name: json.loads(json.dumps(d.as_dict())) for d in get_device_list()}
    mlx5 = listed["mlx5_2"]
    assert mlx5["node_guid"] == mlx5["sys_image_guid"] == "9803:9b03:0067:ac2b"
    assert (mlx5["node_type"], mlx5["transport"], mlx5["pci_address"]) == (
        "CA", "IB", "0000:3b:00.1",
    )  # fmt: skip
    (port,) = mlx5["ports"]
    assert (port["state"], port["rate"], port["active_mtu"]) == ("ACTIVE", 100.0, 1024)
    assert port["gids"][3] == {
        "index": 4, "gid": "::ffff:10.77.0.1", "type": "ROCE_V2", "netdev": "ens1f0np0.7",
    }  # fmt: skip
    assert set(mlx5) == {*Device.__annotations__, "ports"}


# ---- the meaning of the list ------------------------------------------------------------


def test_no_class_directory_is_enosys(tree):
    with pytest.raises(OSError, match="no RDMA") as caught:
        get_device_list(all=True)
    assert caught.value.errno == errno.ENOSYS


@pytest.mark.parametrize("name", ["infiniband", "infiniband_verbs"])
def test_support_without_devices_is_an_empty_list(tree, name):
    (tree.root / "class" / name).mkdir(parents=True)
    assert get_device_list() == get_device_list(all=True) == []


def test_no_permission_on_any_is_eperm_unless_all_are_asked_for(tree):
    vendors(tree)
    forbid(tree)

    def look():
        with pytest.raises(PermissionError) as caught:
            get_device_list()
        return caught.value.errno, str(caught.value), len(get_device_list(all=True))

    code, text, number = as_nobody(look)
    assert (code, number) == (errno.EPERM, 11)
    assert "11 RDMA devices" in text and "udev rule" in text


def test_another_cause_beside_permission_is_an_empty_list(tree, monkeypatch):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    forbid(tree)
    tree.add("mlx5_1", "9803:9b03:0067:ac2b", uverbs=False)
    assert as_nobody(lambda: get_device_list()) == []


def test_lack_of_memory_is_no_property_of_a_device(tree, monkeypatch):
    vendors(tree)

    def driven():
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(_problems, "driven", driven)
    with pytest.raises(OSError) as caught:
        get_device_list()
    assert caught.value.errno == errno.ENOMEM


def test_lack_of_descriptors_is_no_property_of_a_device(tree):
    """Whichever open fails, the answer is EMFILE, and never a list with less in it."""
    import resource

    tree.add("mlx5_0", "9803:9b03:0067:ac2a", pci="0000:3b:00.0", driver="mlx5_core")
    expected = [repr(d) for d in get_device_list()]

    def look():
        held, seen = [], set()
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        while True:
            try:
                held.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        while len(held) > 200:
            try:
                assert [repr(d) for d in get_device_list(all=True)] == expected
                seen.add("listed")
            except OSError as error:
                assert error.errno == errno.EMFILE
                seen.add("refused")
            os.close(held.pop())
        return seen

    assert child(look) == {"listed", "refused"}


def test_every_call_reads_anew(tree):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    assert [d.name for d in get_device_list()] == ["mlx5_0"]
    path = tree.add("mlx5_1", "9803:9b03:0067:ac2b")
    assert [d.name for d in get_device_list()] == ["mlx5_0", "mlx5_1"]
    put(path, {"fw_ver": "1.2.3"})
    assert get_device_list()[1].firmware_version == "1.2.3"
    (tree.ibs / "mlx5_0").unlink()
    assert [d.name for d in get_device_list()] == ["mlx5_1"]


@pytest.mark.parametrize(("use", "comes"), [("", False), ("rdmafork.NodeType", True)])
def test_importing_costs_no_heavy_module(use, comes):
    """Nor the list's own enums, before they are used."""
    code = f"import sys; had = set(sys.modules); import rdmafork\n{use}\n"
    code += "print(*set(sys.modules) - had)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env=environment({"PYTHONPATH": str(Path(rdmafork.__file__).parent.parent)}),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    loaded = set(done.stdout.split())
    assert "rdmafork._core" in loaded and ("rdmafork.devices" in loaded) == comes
    assert not loaded & {"ctypes", "json", "socket", "subprocess", "dataclasses", "inspect"}


def test_every_name_of_the_package_is_there():
    assert set(rdmafork.__all__) <= set(dir(rdmafork))
    assert all(getattr(rdmafork, name) for name in rdmafork.__all__)
    assert rdmafork.get_device_list is devices.get_device_list
    with pytest.raises(AttributeError):
        _ = rdmafork.nonsense


# ---- why not ----------------------------------------------------------------------------


def as_nobody(function):
    """What function returns for an ordinary user."""
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


@pytest.fixture
def tmp_path():
    """pytest's own is closed to others, and some tests are an ordinary user's."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    for directory, names, _ in os.walk(path):
        for name in names:
            Path(directory, name).chmod(0o755) if not Path(directory, name).is_symlink() else None
    shutil.rmtree(path)


def problem(tree, code, *words):
    """The one device is not usable, for this reason, in one sentence with these words."""
    assert get_device_list() == []
    device = one(all=True)
    assert device._problem_errno == code
    assert all(word in device.problem for word in words), device.problem
    assert "\n" not in device.problem and not device.problem.endswith(".")
    assert device.problem in repr(device) and device.as_dict()["problem"] == device.problem
    return device


def test_ib_uverbs_not_loaded(tree):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a", uverbs=False)
    shutil.rmtree(tree.uverbs)
    device = problem(tree, errno.ENODEV, "modprobe ib_uverbs")
    assert (device.uverbs_name, device.uverbs_path) == (None, None)


def test_a_device_without_uverbs(tree):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a", uverbs=False)
    problem(tree, errno.ENODEV, "no uverbs device")


def test_no_node_as_in_a_container(tree):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    (tree.nodes / "uverbs0").unlink()
    path = f"{tree.nodes}/uverbs0"
    assert problem(tree, errno.ENOENT, f"--device={path}", "udevadm").uverbs_path == path
    tree.nodes.rmdir()
    problem(tree, errno.ENOENT, f"--device={path}")


def test_a_node_of_something_else(tree):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    (tree.nodes / "uverbs0").unlink()
    (tree.nodes / "uverbs0").symlink_to("/dev/zero")
    problem(tree, errno.ENODEV, "is 1:5, not 1:3")
    (tree.nodes / "uverbs0").unlink()
    (tree.nodes / "uverbs0").touch()
    problem(tree, errno.ENODEV, "no character device")


def test_no_permission_on_the_node(tree):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    forbid(tree, 0o660)
    os.chown(tree.nodes / "uverbs0", 0, grp.getgrnam("daemon").gr_gid)

    def look():
        (device,) = get_device_list(all=True)
        return device._problem_errno, device.problem

    code, text = as_nobody(look)
    assert code == errno.EACCES
    assert all(w in text for w in ("crw-rw---- root:daemon", "join the group daemon", "udev rule"))
    os.chown(tree.nodes / "uverbs0", 54321, 0)
    code, text = as_nobody(look)
    assert "54321:root" in text and "join the group root" not in text
    assert [d.name for d in get_device_list()] == ["mlx5_0"]  # root may


def test_no_permission_on_the_directory_of_nodes(tree):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    tree.nodes.chmod(0)

    def look():
        (device,) = get_device_list(all=True)
        return device._problem_errno, device.problem

    code, text = as_nobody(look)
    assert code == errno.EACCES and "chmod 755" in text


def test_a_node_that_a_cgroup_refuses(tree, monkeypatch):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # its mode would let anybody in
    with pytest.raises(PermissionError):
        get_device_list()
    device = one(all=True)
    assert device._problem_errno == errno.EPERM
    assert "device cgroup" in device.problem and "--device=" in device.problem


def test_no_userspace_driver(tree, monkeypatch):
    vendors(tree)
    monkeypatch.setattr(_problems, "driven", lambda: {"rxe0": 0x8C0B2FFFFEBA430C, "siw0": 0})
    assert [d.name for d in get_device_list()] == ["rxe0", "siw0"]
    mlx5 = next(d for d in get_device_list(all=True) if d.name == "mlx5_0")
    assert mlx5._problem_errno == errno.ENXIO
    assert all(w in mlx5.problem for w in ("mlx5_core", "ibverbs-providers", "Fedora"))


def test_libibverbs_that_knows_another_device_by_the_name(tree, monkeypatch):
    tree.add("rxe0", "8c0b:2fff:feba:430c")
    monkeypatch.setattr(_problems, "driven", lambda: {"rxe0": 1})
    problem(tree, errno.ENODEV, "another device", "0000:0000:0000:0001")


def test_libibverbs_not_installed(tree, tmp_path):
    """Or not to be loaded, as an empty file is not."""
    tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    (tmp_path / "libibverbs.so.1").touch()
    usable, text, code, state = run(
        """
        import rdmafork
        (device,) = rdmafork.get_device_list(all=True)
        (rdmafork.get_device_list(), device.problem, device._problem_errno, device.ports[0].state)
        """,
        env={"SYSFS_PATH": str(tree.root), "LD_LIBRARY_PATH": str(tmp_path)},
    )
    assert (usable, code, state) == ([], errno.ELIBACC, PortState.ACTIVE)
    assert all(word in text for word in ("libibverbs1", "Debian", "Fedora"))


def test_libibverbs_that_fails(tree, monkeypatch):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    failed = OSError(errno.ENOSYS, "libibverbs cannot list devices: Function not implemented")
    monkeypatch.setattr(_problems, "driven", lambda: failed)
    problem(tree, errno.ENOSYS, "cannot list devices", "stderr")


@pytest.mark.parametrize(("abi", "fits"), [(2, 0), (3, 1), (6, 1), (7, 0)])
def test_abi_mismatch(tree, abi, fits):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    put(tree.uverbs, {"abi_version": str(abi)})
    if fits:
        assert len(get_device_list()) == 1
    else:
        problem(tree, errno.ENOSYS, "ABI mismatch", f"version {abi}", "3 to 6")


def test_problems_are_each_devices_own(tree):
    vendors(tree)
    (tree.nodes / "uverbs0").unlink()
    names = [d.name for d in get_device_list()]
    assert len(names) == 10 and "mlx5_0" not in names
    assert len(get_device_list(all=True)) == 11


# ---- IBV_SHOW_WARNINGS ------------------------------------------------------------------


@pytest.mark.parametrize("value", ["1", "0", ""])
def test_a_missing_driver_is_warned_of_at_every_call(tree, monkeypatch, value):
    vendors(tree)
    monkeypatch.setattr(_problems, "driven", lambda: {"rxe0": 0, "siw0": 0})
    (tree.nodes / "uverbs0").unlink()  # another problem, no warning
    monkeypatch.setenv("IBV_SHOW_WARNINGS", value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            get_device_list()
    assert len(caught) == 3 * 8
    assert {w.category for w in caught} == {DeviceWarning} and {w.filename for w in caught} == {
        __file__
    }
    assert any("hfi1_0: no userspace driver" in str(w.message) for w in caught)


def test_nothing_is_warned_of_unasked(tree, monkeypatch):
    vendors(tree)
    monkeypatch.setattr(_problems, "driven", dict)
    assert get_device_list() == []  # warnings are errors here


def test_a_device_warning_is_a_runtime_warning():
    assert issubclass(DeviceWarning, RuntimeWarning)
    assert DeviceWarning.__module__ == Device.__module__ == "rdmafork"


# ---- broken trees -----------------------------------------------------------------------

GARBAGE = [b"", b"\n", b"\x00", b"\xff\xfe\x00\x80", b"8c0b:2fff", b"1", b"-", b"x" * 5000]


@pytest.mark.parametrize("content", [*GARBAGE, None])
@pytest.mark.parametrize("file", ["node_guid", "node_type"])
def test_a_broken_identity_is_a_problem_and_hides_no_other(tree, file, content):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    path = tree.add("mlx5_1", "9803:9b03:0067:ac2b")
    if content is None:
        (path / file).unlink()
    else:
        put(path, {file: content})
    assert [d.name for d in get_device_list()] == ["mlx5_0"]
    broken = get_device_list(all=True)[1]
    assert broken._problem_errno == errno.EIO
    assert f"mlx5_1/{file}" in broken.problem
    with pytest.raises(OSError, match=file) as caught:
        getattr(broken, file)
    assert content is None or repr(content[:80].removesuffix(b"\n"))[2:-1] in str(caught.value)
    assert json.loads(json.dumps(broken.as_dict()))[file] is None
    assert broken == broken and broken in {broken} and "mlx5_1" in repr(broken)
    assert broken.ports[0].state == PortState.ACTIVE


@pytest.mark.parametrize("file", ["sys_image_guid", "numa_node"])
@pytest.mark.parametrize("content", GARBAGE[1:4])
def test_other_nonsense_is_an_error_where_it_is_asked_for(tree, file, content):
    path = tree.add("mlx5_0", "9803:9b03:0067:ac2a", pci="0000:3b:00.0", driver="mlx5_core")
    put(path / "device" if file == "numa_node" else path, {file: content})
    device = one()
    with pytest.raises(OSError, match=file) as caught:
        getattr(device, file)
    assert caught.value.errno == errno.EIO
    assert device.as_dict()[file] is None and device.firmware_version is None


def test_what_an_older_kernel_does_not_have_is_none(tree):
    path = tree.add("mlx5_0", "9803:9b03:0067:ac2a", pci="0000:3b:00.0", driver="mlx5_core")
    for file in ("sys_image_guid", "fw_ver", "device/numa_node", "device/driver"):
        (path / file).unlink()
    device = one()
    assert device.sys_image_guid is device.sys_image_guid_text is None
    assert device.firmware_version is device.numa_node is device.driver is None


PORT_FILES = {
    "state": "state", "phys_state": "physical_state", "link_layer": "link_layer", "rate": "rate",
    "lid": "lid", "sm_lid": "sm_lid", "cap_mask": "capability_mask",
}  # fmt: skip


@pytest.mark.parametrize("content", [*GARBAGE, b"4", b"100 Gb/s", b"0x", b"Ether", None])
@pytest.mark.parametrize("file", PORT_FILES)
def test_a_broken_file_of_a_port_spoils_its_own_value_alone(tree, file, content):
    path = tree.add("mlx5_0", "9803:9b03:0067:ac2a", ports={1: port(), 2: port()})
    if content is None:
        (path / "ports/2" / file).unlink()
    else:
        put(path / "ports/2", {file: content})
    first, second = one().ports
    for name in PORT_FILES.values():
        if name == PORT_FILES[file]:
            with pytest.raises(OSError, match=f"ports/2/{file}"):
                getattr(second, name)
        else:
            assert getattr(second, name) == getattr(first, name)
    assert ("?" in repr(second)) == (file != "cap_mask") and "?" not in repr(first)


@pytest.mark.parametrize("content", GARBAGE)
def test_a_broken_gid_is_an_error_that_names_it(tree, content, monkeypatch):
    path = tree.add("mlx5_0", "9803:9b03:0067:ac2a", ports={1: port(gids=ROCE)})
    put(path / "ports/1/gids", {"2": content})
    device = one()
    with pytest.raises(OSError, match="ports/1/gids/2"):
        _ = device.ports[0].gids
    monkeypatch.setattr(devices.Port, "_mtus", lambda self: (None, None))
    assert device.as_dict()["ports"][0]["gids"] is None


@pytest.mark.parametrize("file", ["ibdev", "dev"])
@pytest.mark.parametrize("content", [*GARBAGE, None])
def test_a_broken_uverbs_entry_is_a_problem_of_its_device(tree, file, content):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    tree.add("mlx5_1", "9803:9b03:0067:ac2b")
    if content is None:
        (tree.uverbs / "uverbs1" / file).unlink()
    else:
        put(tree.uverbs / "uverbs1", {file: content})
    assert [d.name for d in get_device_list()] == ["mlx5_0"]
    broken = get_device_list(all=True)[1]
    names_nobody = file == "ibdev" and content not in (b"", b"\n", b"\x00", None)
    # A name that no device has, half of one say, is as good as none.
    assert "no uverbs device" in broken.problem or f"uverbs1/{file}" in broken.problem
    assert names_nobody or "uverbs1" in broken.problem


def test_a_broken_abi_version_is_a_problem_of_all(tree):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    put(tree.uverbs, {"abi_version": b"\xff"})
    problem(tree, errno.EIO, "infiniband_verbs/abi_version")


def test_unreadable_files_as_an_ordinary_user(tree):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    guid = tree.add("mlx5_1", "9803:9b03:0067:ac2b")
    (guid / "node_guid").chmod(0)
    other = tree.add("mlx5_2", "9803:9b03:0067:ac2c")
    (other / "sys_image_guid").chmod(0)
    (other / "ports/1/state").chmod(0)
    closed = tree.add("mlx5_3", "9803:9b03:0067:ac2d")
    closed.chmod(0)

    def look():
        usable, every = get_device_list(), get_device_list(all=True)
        assert [d.name for d in usable] == ["mlx5_0", "mlx5_2"]
        assert usable[1].sys_image_guid is None
        (port,) = usable[1].ports
        assert port.lid == 0
        with pytest.raises(PermissionError, match="ports/1/state"):
            _ = port.state
        assert [d._problem_errno for d in every] == [None, errno.EACCES, None, errno.EACCES]
        assert "mlx5_1/node_guid: Permission denied" in every[1].problem
        assert every[3].uverbs_name == "uverbs3"
        with pytest.raises(PermissionError):
            _ = every[3].ports
        return True

    assert as_nobody(look)


def test_an_unreadable_class_is_an_error_and_not_an_empty_list(tree):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    tree.ibs.chmod(0)

    def look():
        with pytest.raises(PermissionError, match="class/infiniband"):
            get_device_list()
        return True

    assert as_nobody(look)


def test_links_that_lead_nowhere_and_strange_files(tree):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    (tree.ibs / "README").write_text("no device")
    os.mkfifo(tree.ibs / "fifo")
    (tree.ibs / "mlx5_9").symlink_to("nowhere")
    (tree.ibs / "mlx5_8").symlink_to("mlx5_8")
    (tree.uverbs / "uverbs9").symlink_to("nowhere")
    assert [d.name for d in get_device_list()] == ["mlx5_0"]
    assert [d.name for d in get_device_list(all=True)] == ["mlx5_0", "mlx5_8", "mlx5_9"]
    for broken in get_device_list(all=True)[1:]:
        assert broken.name in broken.problem and "mlx5" in repr(broken)


def test_a_fifo_in_the_place_of_a_file_does_not_block(tree):
    path = tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    (path / "node_guid").unlink()
    os.mkfifo(path / "node_guid")
    problem(tree, errno.EIO, "node_guid")


def test_names_that_are_no_utf8(tree):
    name = os.fsdecode(b"mlx5_\xff\xe9")
    tree.add(name, "9803:9b03:0067:ac2a", uverbs=False)
    put(tree.add_uverbs("x"), {"ibdev": os.fsencode(name) + b"\n"})
    device = one()
    assert os.fsencode(device.name) == b"mlx5_\xff\xe9"
    assert device.uverbs_name == "uverbs0" and device.ports[0].state == PortState.ACTIVE
    repr(device).encode()
    json.dumps(device.as_dict()["name"], ensure_ascii=False).encode()
    (tree.nodes / "uverbs0").unlink()
    problem(tree, errno.ENOENT)


def test_every_file_cut_at_every_length_is_right_or_a_clear_error(tree):
    """Half-written: a value is the whole one, what its digits so far say, or OSError."""
    path = tree.add("mlx5_0", "9803:9b03:0067:ac2a", ports={1: port(gids=ROCE[:1], slots=1)})
    whole = one()
    files = [f for f in path.rglob("*") if f.is_file()]
    assert len(files) > 10
    for file in files:
        content = file.read_bytes()
        for length in range(len(content)):
            file.write_bytes(content[:length])
            device = one(all=True)
            if device.problem is None:
                assert device == whole and device.node_type == NodeType.CA
            else:
                assert str(file.name) in device.problem
            try:
                (read,) = device.ports
                assert read.gids[0].gid == "fe80::9803:9bff:fe67:ac2a"
            except OSError as error:
                assert error.filename and error.errno == errno.EIO
            else:
                assert read._get("link_layer") in (LinkLayer.ETHERNET, None)
                assert read._get("state") in (PortState.ACTIVE, None)
                assert read._get("rate") in (100.0, None)
        file.write_bytes(content)


# ---- devices that come and go -----------------------------------------------------------


def test_a_device_that_is_gone_is_enodev(tree):
    path = tree.add("mlx5_0", "9803:9b03:0067:ac2a", ports={1: port(gids=ROCE), 2: port()})
    device = one()
    first, second = device.ports
    shutil.rmtree(path / "ports/2")
    assert [p.number for p in device.ports] == [1]
    with pytest.raises(OSError, match="port 2 of mlx5_0") as caught:
        _ = second.gids
    assert caught.value.errno == errno.ENODEV
    (tree.ibs / "mlx5_0").unlink()
    for use in (lambda: device.ports, lambda: first.gids):
        with pytest.raises(OSError, match="mlx5_0 is gone") as caught:
            use()
        assert caught.value.errno == errno.ENODEV
    assert (device.name, first.state) == ("mlx5_0", PortState.ACTIVE)
    assert device.as_dict()["ports"] is None
    # Another one by the same name is not it.
    tree.add("mlx5_0", "9803:9b03:0067:ffff", pci="0000:3b:00.0", driver="mlx5_core")
    with pytest.raises(OSError, match="mlx5_0 is gone"):
        _ = device.ports


def renaming(tree, stop, wild):
    """Devices that change places under two names each; and one that comes and goes."""
    rng = random.Random(0)
    while not stop.is_set():
        wild.append(None)
        a, b = rng.sample(["d0", "d1", "d2", "d3"], 2)
        try:
            os.rename(tree.ibs / a, tree.ibs / b)
        except OSError:
            continue


def guid_of(number):
    return f"0000:0000:0000:{number:04x}"


def test_devices_that_move_while_they_are_listed_are_right_or_not_there(tree, monkeypatch):
    """Directories with their attributes, renamed by another thread thousands of times."""
    tree.classes()
    tree.add("still", guid_of(9), fw_ver="9")
    for number in range(3):
        put(tree.ibs / f"d{number}", {
            "node_type": "1: CA", "node_guid": guid_of(number), "sys_image_guid": guid_of(number),
            "fw_ver": str(number), "ports": {"1": port(lid=hex(number))},
        })  # fmt: skip
    monkeypatch.setattr(_problems, "driven", lambda: {f"d{n}": 0 for n in range(4)} | {"still": 0})
    for name in ("d0", "d1", "d2", "d3"):
        tree.add_uverbs(name)
    stop, moves = threading.Event(), []
    mover = threading.Thread(target=renaming, args=(tree, stop, moves))
    mover.start()
    seen = set()
    try:
        rounds = 0
        while len(moves) < 5000 or len(seen) <= 4 or rounds < 1000:
            rounds += 1
            found = get_device_list()
            assert "still" in [d.name for d in found]
            for device in found:
                number = device.node_guid
                assert device.sys_image_guid == number
                assert device.firmware_version == str(number)
                seen.add((device.name, number))
                try:
                    (read,) = device.ports
                    assert read.number == 1
                    assert read.state is PortState.ACTIVE
                    assert device.name == "still" or read.lid == number
                except OSError as error:
                    assert error.errno == errno.ENODEV
                    assert device.name in str(error)
            guids = [d.node_guid for d in found]
            assert len(set(guids)) == len(guids)
    finally:
        stop.set()
        mover.join()


def test_devices_that_are_removed_and_made_while_they_are_listed(tree):
    tree.add("still", guid_of(9))
    stop, rounds = threading.Event(), []

    def come_and_go():
        while not stop.is_set():
            path = tree.add("moving", guid_of(7), uverbs=False)
            (tree.ibs / "moving").unlink()
            shutil.rmtree(path)
            rounds.append(None)

    mover = threading.Thread(target=come_and_go)
    mover.start()
    try:
        while len(rounds) < 300:
            found = get_device_list(all=True)
            assert found[-1].name == "still" and found[-1].problem is None
            for device in found[:-1]:
                assert device.name == "moving" and device.problem
    finally:
        stop.set()
        mover.join()


# ---- SYSFS_PATH -------------------------------------------------------------------------


@pytest.mark.parametrize("slashes", ["/", "///"])
def test_slashes_at_the_end_of_sysfs_path_do_not_matter(tree, monkeypatch, slashes):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    monkeypatch.setenv("SYSFS_PATH", f"{tree.root}{slashes}")
    assert one()._path == f"{tree.ibs}/mlx5_0"


def test_an_empty_sysfs_path_is_the_root_directory(tree, monkeypatch):
    monkeypatch.setenv("SYSFS_PATH", "")
    with pytest.raises(OSError) as caught:
        get_device_list()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSYS, "/class/infiniband")


def test_a_program_with_more_than_its_users_rights_ignores_the_environment(tmp_path):
    if os.geteuid():
        pytest.skip("making a set-gid program of another group takes root")
    if os.statvfs(tmp_path).f_flag & os.ST_NOSUID:
        pytest.skip(f"{tmp_path} is mounted nosuid")
    python = tmp_path / "python"
    shutil.copy(os.path.realpath(sys.executable), python)
    # Alone: the loader refuses such a program the package's libraries.
    shutil.copy(_sysfs.__file__, tmp_path / "reading.py")
    os.chown(python, 0, 65534)
    answers = []
    for mode in (0o755, 0o2755):
        python.chmod(mode)
        done = subprocess.run(
            [python, "-B", "-c", "import reading; print(reading.variable('SYSFS_PATH'))"],
            env={"SYSFS_PATH": "/x", "PYTHONPATH": str(tmp_path), "PYTHONHOME": sys.base_prefix},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        answers.append(done.stdout)
    assert answers == ["/x\n", "None\n"]


# ---- beside libibverbs ------------------------------------------------------------------

LIBIBVERBS = """
import ctypes, os
lib = ctypes.CDLL("libibverbs.so.1", use_errno=True)
lib.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
lib.ibv_get_device_name.restype = ctypes.c_char_p
lib.ibv_get_device_guid.restype = ctypes.c_uint64
for f in (lib.ibv_get_device_name, lib.ibv_get_device_guid):
    f.argtypes = [ctypes.c_void_p]
number = ctypes.c_int()
found = lib.ibv_get_device_list(ctypes.byref(number))
theirs = ctypes.get_errno()
if found:
    theirs = {
        os.fsdecode(lib.ibv_get_device_name(found[i])): int.from_bytes(
            lib.ibv_get_device_guid(found[i]).to_bytes(8, "little"), "big")
        for i in range(number.value)
    }
import rdmafork
try:
    ours = {d.name: d.node_guid for d in rdmafork.get_device_list()}
except OSError as error:
    ours = error.errno
(theirs, ours)
"""

# A private /dev, with the tree's nodes in it; then the interpreter.
PRIVATE = """
set -e
mkdir -p "$1/dev"
mount --rbind /dev "$1/dev"
mount -t tmpfs none /dev
for name in null zero urandom shm; do ln -s "$1/dev/$name" /dev/$name; done
cp -a "$2" /dev/infiniband
shift 2
exec "$@"
"""


def both(tree):
    """(what libibverbs lists, what we list) with the tree as /sys and its nodes in /dev."""
    try:
        import ctypes

        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        pytest.skip("libibverbs is not installed")
    if Path("/sys/class/infiniband").exists():
        pytest.skip("libibverbs asks the RDMA of this kernel, whatever SYSFS_PATH says")
    for node in tree.nodes.iterdir():
        node.unlink()
        node.symlink_to(tree.root.parent / "dev/null")
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace may be made here")
    script = tree.root.parent / "private"
    script.write_text(PRIVATE)
    prefix = [*unshare, "sh", str(script), str(tree.root.parent), str(tree.nodes)]
    return run(LIBIBVERBS, env={"SYSFS_PATH": str(tree.root)}, prefix=prefix)


def test_libibverbs_lists_the_same(tree):
    vendors(tree)
    theirs, ours = both(tree)
    assert theirs == ours
    assert {"mlx5_0", "mlx4_0", "mlx5_2", "rxe0", "efa_0", "hfi1_0"} <= set(theirs)
    assert theirs["mlx5_0"] == 0x98039B030067AC2A


def test_libibverbs_lists_the_same_without_some_nodes(tree):
    vendors(tree)
    (tree.nodes / "uverbs0").unlink()
    theirs, ours = both(tree)
    assert theirs == ours and "mlx5_0" not in theirs


@pytest.mark.parametrize("what", ["nothing", "no uverbs class", "no devices"])
def test_libibverbs_fails_alike(tree, what):
    if what == "no devices":
        tree.classes()
    theirs, ours = both(tree)
    if what == "no uverbs class":
        tree.add("mlx5_0", "9803:9b03:0067:ac2a")
        shutil.rmtree(tree.uverbs)
        theirs, ours = both(tree)
        assert (theirs, ours) == (errno.ENOSYS, {})  # RDMA is there, and this says why not
    else:
        assert theirs == ours == ({} if what == "no devices" else errno.ENOSYS)


@pytest.mark.parametrize("abi", [2, 7])
def test_libibverbs_takes_the_same_abi(tree, abi):
    vendors(tree)
    put(tree.uverbs, {"abi_version": str(abi)})
    assert both(tree) == (errno.ENOSYS, {})
