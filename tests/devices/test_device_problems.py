"""Devices that cannot be used, and files that are broken: each says why, and spoils no other."""

import errno
import grp
import json
import os
import shutil
import warnings

import pytest
from conftest import run
from sysfs import ROCE, a_tree, an_open_tmp_path, as_nobody, forbid, one, port, put, vendors

from rdmafork import (
    Device,
    DeviceWarning,
    LinkLayer,
    NodeType,
    PortState,
    _problems,
    devices,
    get_device_list,
)

# ---- why not ----------------------------------------------------------------------------


def problem(code, *words):
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
    device = problem(errno.ENODEV, "modprobe ib_uverbs")
    assert (device.uverbs_name, device.uverbs_path) == (None, None)


def test_a_device_without_uverbs(tree):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a", uverbs=False)
    problem(errno.ENODEV, "no uverbs device")


def test_no_node_as_in_a_container(tree):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    (tree.nodes / "uverbs0").unlink()
    path = f"{tree.nodes}/uverbs0"
    assert problem(errno.ENOENT, f"--device={path}", "udevadm").uverbs_path == path
    tree.nodes.rmdir()
    problem(errno.ENOENT, f"--device={path}")


def test_a_node_of_something_else(tree):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    (tree.nodes / "uverbs0").unlink()
    (tree.nodes / "uverbs0").symlink_to("/dev/zero")
    problem(errno.ENODEV, "is 1:5, not 1:3")
    (tree.nodes / "uverbs0").unlink()
    (tree.nodes / "uverbs0").touch()
    problem(errno.ENODEV, "no character device")


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
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # its mode would let any user in
    with pytest.raises(PermissionError):
        get_device_list()
    device = one(all=True)
    assert device._problem_errno == errno.EPERM
    assert "device cgroup" in device.problem and "--device=" in device.problem


def test_refusals_of_both_kinds_are_one_error(tree, monkeypatch):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    tree.add("mlx5_1", "9803:9b03:0067:ac2b")
    forbid(tree, 0o666)
    (tree.nodes / "uverbs1").chmod(0)
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    every = get_device_list(all=True)
    assert [d._problem_errno for d in every] == [errno.EPERM, errno.EACCES]
    with pytest.raises(PermissionError, match="2 RDMA devices, none open to this process"):
        get_device_list()


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
    problem(errno.ENODEV, "another device", "0000:0000:0000:0001")


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
    problem(errno.ENOSYS, "cannot list devices", "stderr")


@pytest.mark.parametrize(("abi", "fits"), [(2, 0), (3, 1), (6, 1), (7, 0)])
def test_abi_mismatch(tree, abi, fits):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    put(tree.uverbs, {"abi_version": str(abi)})
    if fits:
        assert len(get_device_list()) == 1
    else:
        problem(errno.ENOSYS, "ABI mismatch", f"version {abi}", "3 to 6")


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


def test_a_value_that_an_older_kernel_lacks_is_none(tree):
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
    problem(errno.EIO, "infiniband_verbs/abi_version")


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
    problem(errno.EIO, "node_guid")


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
    problem(errno.ENOENT)


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
