"""get_device_list() on made-up trees of /sys: the fields of a device, and the list's promises."""

import copy
import errno
import inspect
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import child, run
from sysfs import (
    IPV4,
    LINK_LOCAL,
    NOTHING,
    ROCE,
    a_tree,
    an_open_tmp_path,
    as_nobody,
    forbid,
    one,
    port,
    put,
    vendors,
)

import rdmafork
from rdmafork import (
    Device,
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

# ---- values -----------------------------------------------------------------------------


def of_vendors(tree):
    """{name: device} of devices of many makes."""
    vendors(tree)
    return {device.name: device for device in get_device_list()}


def test_a_device_has_the_values_of_its_files(tree):
    found = of_vendors(tree)
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
def test_a_device_has_a_node_type_and_a_transport(tree, name, node_type, transport):
    device = of_vendors(tree)[name]
    assert (device.node_type, device.transport) == (node_type, transport)


def test_devices_come_in_natural_order_where_the_index_is_unknown(tree):
    assert list(of_vendors(tree)) == [
        "bnxt_re0", "efa_0", "hfi1_0", "irdma0", "mlx4_0", "mlx5_0", "mlx5_2", "mlx5_10",
        "rxe0", "siw0", "usnic_0",
    ]  # fmt: skip


def test_names_with_digits_of_other_scripts_have_an_order_too(tree):
    for number, name in enumerate(["\u0663", "mlx5_0", "7", "\u0663_10", "\u0663_9"]):
        tree.add(name, f"9803:9b03:0067:{number:04x}")
    names = [device.name for device in get_device_list(all=True)]
    assert names == ["7", "mlx5_0", "\u0663", "\u0663_9", "\u0663_10"]


def test_ports_have_the_values_of_their_files(tree):
    found = of_vendors(tree)
    (port,) = found["mlx5_0"].ports
    assert (port.number, port.state) == (1, PortState.ACTIVE)
    assert (port.physical_state, port.link_layer) == (PhysicalState.LINK_UP, LinkLayer.INFINIBAND)
    assert (port.rate, port.lid, port.sm_lid) == (200.0, 0x1F, 2)
    assert port.capability_mask == 0xA651E848
    first, second = found["mlx4_0"].ports
    assert (first.number, first.link_layer, first.rate) == (1, LinkLayer.INFINIBAND, 56)
    assert (second.number, second.link_layer, second.rate) == (2, LinkLayer.ETHERNET, 10)
    assert (second.state, second.physical_state) == (PortState.DOWN, PhysicalState.DISABLED)
    assert found["rxe0"].ports[0].rate == 2.5
    assert found["efa_0"].ports[0].link_layer == LinkLayer.UNSPECIFIED


def test_of_a_port_above_255_libibverbs_is_not_asked(tree):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a", ports={256: port(gids=ROCE)})
    (switched,) = one().ports
    assert (switched.number, switched.rate, len(switched.gids)) == (256, 100.0, 4)
    assert (switched.active_mtu, switched.max_mtu) == (None, None)
    assert one().as_dict()["ports"][0]["active_mtu"] is None


def test_a_gid_table_has_its_used_slots_with_their_types(tree):
    found = of_vendors(tree)
    gids = found["mlx5_2"].ports[0].gids
    assert gids == (
        Gid(0, "fe80::9803:9bff:fe67:ac2a", GidType.ROCE_V1, "ens1f0np0"),
        Gid(1, "fe80::9803:9bff:fe67:ac2a", GidType.ROCE_V2, "ens1f0np0"),
        Gid(3, "::ffff:10.77.0.1", GidType.ROCE_V1, "ens1f0np0"),
        Gid(4, "::ffff:10.77.0.1", GidType.ROCE_V2, "ens1f0np0.7"),
    )
    assert gids[0].raw == bytes.fromhex(LINK_LOCAL.replace(":", ""))
    # The same words mean another thing where it is no Ethernet, or no RoCE.
    (gid,) = found["mlx5_0"].ports[0].gids
    assert (gid.type, gid.netdev) == (GidType.IB, None)
    assert [gid.type for gid in found["irdma0"].ports[0].gids] == [GidType.IB]
    assert [gid.type for gid in found["efa_0"].ports[0].gids] == [GidType.IB]
    assert found["mlx4_0"].ports[0].gids == ()


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
    for device in of_vendors(tree).values():
        assert pickle.loads(pickle.dumps(device)) == device == copy.copy(device)
        assert repr(pickle.loads(pickle.dumps(device.ports))) == repr(device.ports)
        with pytest.raises(AttributeError):
            device.name = "other"
        with pytest.raises(AttributeError):
            _ = device.nonsense
        assert {"name", "ports", "node_guid_text"} <= set(dir(device))


def test_repr_has_the_main_values(tree):
    found = of_vendors(tree)
    assert repr(found["mlx5_0"]) == (
        "<Device mlx5_0: CA, IB, 9803:9b03:0067:ac2a, mlx5_core at 0000:3b:00.0, "
        "firmware 20.35.2000, uverbs0>"
    )
    assert repr(found["rxe0"]) == "<Device rxe0: CA, IB, 8c0b:2fff:feba:430c, rxenet, uverbs8>"
    (port,) = found["mlx5_0"].ports
    assert repr(port) == (
        "<Port mlx5_0/1: ACTIVE, LINK_UP, INFINIBAND, 200 Gb/s, LID 31, SM LID 2>"
    )


def test_as_dict_is_ready_for_json_and_complete(tree, monkeypatch):
    monkeypatch.setattr(devices.Port, "_mtus", lambda self: (1024, 4096))
    mlx5 = json.loads(json.dumps(of_vendors(tree)["mlx5_2"].as_dict()))
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


def test_another_cause_beside_permission_is_an_empty_list(tree):
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
    """Each open fails in turn: the answer is EMFILE, and never a list with less in it."""
    tree.add("mlx5_0", "9803:9b03:0067:ac2a", pci="0000:3b:00.0", driver="mlx5_core",
             ports={1: port(gids=ROCE)})  # fmt: skip
    expected = [d.as_dict() for d in get_device_list()]
    assert child(refuse_each_open_in_turn, expected) > 20


def refuse_each_open_in_turn(expected):
    """How many opens a list takes; RLIMIT_NOFILE leaves each of them without a descriptor once."""
    import resource

    opens = refused = 0
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def count(event, args):
        nonlocal opens
        if event in ("open", "os.listdir", "os.scandir"):
            opens += 1
            soft = 1 if opens == refused else limits[0]
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))

    sys.addaudithook(count)
    while opens >= refused:
        opens, refused = 0, refused + 1
        try:
            found = [d.as_dict() for d in get_device_list(all=True)]
        except OSError as error:
            assert error.errno == errno.EMFILE and opens == refused, (error, opens, refused)
        else:
            assert found == expected, f"open {refused} was refused"
            assert opens < refused, f"open {refused} was refused and nobody said so"
    return opens


def test_every_call_reads_anew(tree):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    assert [d.name for d in get_device_list()] == ["mlx5_0"]
    path = tree.add("mlx5_1", "9803:9b03:0067:ac2b")
    assert [d.name for d in get_device_list()] == ["mlx5_0", "mlx5_1"]
    put(path, {"fw_ver": "1.2.3"})
    assert get_device_list()[1].firmware_version == "1.2.3"
    (tree.ibs / "mlx5_0").unlink()
    assert [d.name for d in get_device_list()] == ["mlx5_1"]


def test_every_name_of_the_package_is_there():
    assert {*rdmafork.__all__, "Buffer", "Device", "__version__"} <= set(dir(rdmafork))
    assert all(hasattr(rdmafork, name) for name in dir(rdmafork))
    given = {name for name in vars(rdmafork) if name[0] != "_"}
    assert {n for n in given if inspect.isclass(getattr(rdmafork, n))} <= set(dir(rdmafork))
    assert rdmafork.get_device_list is devices.get_device_list
    with pytest.raises(AttributeError):
        _ = rdmafork.nonsense


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
    """Devices that change places and names."""
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
    """(libibverbs' list, our list) with the tree as /sys and its nodes in /dev."""
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
