"""get_device_list() and a real device: soft-RoCE in a virtual machine, or this host's own."""

import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
import threading
import time

import pytest
from conftest import TIMEOUT

import rdmafork
from rdmafork import get_device_list

SYSFS = "/sys/class/infiniband"


def names():
    return sorted(os.listdir(SYSFS)) if os.path.isdir(SYSFS) else []


if not names():
    if os.environ.get("RDMAFORK_TEST_DEVICE") == "required":
        raise RuntimeError("RDMAFORK_TEST_DEVICE=required, and this kernel has no RDMA device")
    pytest.skip("this kernel has no RDMA device", allow_module_level=True)


def output(*command):
    if shutil.which(command[0]) is None:
        if os.environ.get("RDMAFORK_TEST_DEVICE") == "required":
            pytest.fail(f"{command[0]} is not installed")
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT)
    return done.stdout


def rdma(*command):
    return json.loads(output("rdma", "-j", *command) or "[]")


def soft():
    """A soft-RoCE device of our own to rename and remove, or a skip with the reason."""
    if os.geteuid():
        pytest.skip("renaming a device takes root")
    found = [d for d in get_device_list() if d.driver == "rdma_rxe"]
    if not found or len(names()) != len(found):
        pytest.skip("devices are renamed and removed only where all are soft-RoCE")
    return found[0]


@contextlib.contextmanager
def interface(name):
    subprocess.run(["ip", "link", "add", name, "type", "dummy"], check=True, timeout=TIMEOUT)
    try:
        subprocess.run(["ip", "link", "set", name, "up"], check=True, timeout=TIMEOUT)
        yield
    finally:
        subprocess.run(["ip", "link", "del", name], check=True, timeout=TIMEOUT)


def link_add(name, netdev):
    done = subprocess.run(
        ["rdma", "link", "add", name, "type", "rxe", "netdev", netdev],
        capture_output=True, text=True, check=False, timeout=TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def link_del(name):
    subprocess.run(["rdma", "link", "del", name], check=True, timeout=TIMEOUT)


def test_ibv_devices_lists_the_same():
    theirs = dict(re.findall(r"^\s+(\S+)\s+([0-9a-f]{16})$", output("ibv_devices"), re.MULTILINE))
    assert theirs == {d.name: f"{d.node_guid:016x}" for d in get_device_list()}


def test_rdma_dev_says_the_same():
    theirs = {d["ifname"]: d for d in rdma("dev")}
    every = get_device_list(all=True)
    assert [d.name for d in every] == [d["ifname"] for d in rdma("dev")]
    for device in every:
        said = theirs[device.name]
        assert device.index == said["ifindex"]
        assert device.node_guid_text == said["node_guid"]
        assert device.sys_image_guid_text == said["sys_image_guid"]
        assert device.node_type.name.lower() == said["node_type"]
        assert device.firmware_version == said.get("fw")


def test_rdma_link_says_the_same():
    ports = {(d.name, p.number): (d, p) for d in get_device_list(all=True) for p in d.ports}
    links = rdma("link")
    assert {(link["ifname"], link["port"]) for link in links} == set(ports)
    for link in links:
        device, port = ports[link["ifname"], link["port"]]
        assert port.state.name == link["state"]
        assert port.physical_state.name == link["physical_state"]
        if len(device.ports) == 1 and "netdev" in link:
            assert device.netdev == link["netdev"]


def test_ibv_devinfo_says_the_same():
    for device in get_device_list():
        text = output("ibv_devinfo", "-v", "-d", device.name)
        said = dict(re.findall(r"^\t([a-z_]+):\s+(.*)$", text, re.MULTILINE))
        assert said["node_guid"] == device.node_guid_text
        assert said["sys_image_guid"] == device.sys_image_guid_text
        transport = {"IB": "InfiniBand", "IWARP": "iWARP"}.get(device.transport.name)
        assert transport is None or said["transport"].startswith(transport)
        parts = re.split(r"^\t\tport:\t(\d+)$", text, flags=re.MULTILINE)
        assert len(device.ports) == int(said["phys_port_cnt"]) == len(parts) // 2
        for number, part in zip(parts[1::2], parts[2::2], strict=True):
            (port,) = (p for p in device.ports if p.number == int(number))
            said = dict(re.findall(r"^\t\t\t([a-z_]+):\s+(.*)$", part, re.MULTILINE))
            assert said["state"] == f"PORT_{port.state.name} ({port.state})"
            assert said["active_mtu"].startswith(f"{port.active_mtu} ")
            assert said["max_mtu"].startswith(f"{port.max_mtu} ")
            assert int(said["port_lid"]) == port.lid and int(said["sm_lid"]) == port.sm_lid
            layers = {"ETHERNET": "Ethernet", "INFINIBAND": "InfiniBand"}
            assert said["link_layer"] == layers.get(port.link_layer.name, said["link_layer"])
            if device.transport.name != "IB":
                continue  # of others it prints neither the physical state nor the GIDs
            assert f"({port.physical_state})" in said["phys_state"]
            # "fe80::1, RoCE v2", or the eight groups of an InfiniBand GID.
            theirs = re.findall(r"GID\[\s*(\d+)\]:\s+(\S+?)(?:, (RoCE v\d))?$", part, re.MULTILINE)
            ours = {gid.index: gid for gid in port.gids}
            assert {int(index) for index, _, _ in theirs} == set(ours)
            for index, gid, kind in theirs:
                mine = ours[int(index)]
                groups = ":".join(mine.raw[i : i + 2].hex() for i in range(0, 16, 2))
                assert gid in (mine.gid, groups)
                assert not kind or mine.type.name == kind.upper().replace(" ", "_")


def test_a_device_fills_in_values_that_sysfs_lacks():
    """A virtual device has no driver, and old kernels no netdev, in sysfs."""
    for device in get_device_list():
        assert device.driver and device.index is not None
        assert device.uverbs_path == f"/dev/infiniband/{device.uverbs_name}"
        assert os.path.exists(device.uverbs_path)
        assert json.loads(json.dumps(device.as_dict()))["ports"][0]["gids"]
        assert device.name in repr(device) and device.problem is None


def test_listing_opens_no_device():
    for device in get_device_list():
        assert device.ports[0].state is not None
    links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert not [link for link in links if link.startswith("/dev/infiniband")]


def test_a_port_that_goes_down_is_seen():
    device = soft()
    subprocess.run(["ip", "link", "set", device.netdev, "down"], check=True, timeout=TIMEOUT)
    try:
        until = time.monotonic() + 60
        while device.ports[0].state.name != "DOWN" and time.monotonic() < until:
            time.sleep(0.1)
        assert device.ports[0].state.name == "DOWN"
    finally:
        subprocess.run(["ip", "link", "set", device.netdev, "up"], check=True, timeout=TIMEOUT)
    until = time.monotonic() + 60
    while device.ports[0].state.name != "ACTIVE" and time.monotonic() < until:
        time.sleep(0.1)
    assert device.ports[0].state.name == "ACTIVE"


def test_the_order_is_the_kernels_and_a_gone_device_is_enodev():
    soft()
    with interface("rfdummy1"), interface("rfdummy2"):
        link_add("zz1", "rfdummy1")
        link_add("aa1", "rfdummy2")
        try:
            listed = get_device_list()
            assert [d.name for d in listed][-2:] == ["zz1", "aa1"]
            assert [d.index for d in listed] == sorted(d.index for d in listed)
            gone = listed[-2]
            ports = gone.ports
        finally:
            link_del("aa1")
            link_del("zz1")
    for use in (lambda: gone.ports, lambda: ports[0].gids, lambda: gone.open()):
        with pytest.raises(OSError, match="zz1") as caught:
            use()
        assert caught.value.errno == errno.ENODEV
    assert ports[0].active_mtu is None
    assert gone not in get_device_list(all=True)


def test_devices_renamed_and_removed_while_they_are_listed():
    soft()
    before = {d.name: d for d in get_device_list()}
    stop, turns, failures = threading.Event(), [], []

    def turmoil():
        try:
            while not stop.is_set():
                link_add("rf0", "rfdummy1")
                subprocess.run(["rdma", "dev", "set", "rf0", "name", "rf1"], check=True)
                link_del("rf1")
                turns.append(None)
        except BaseException as error:
            failures.append(error)

    with interface("rfdummy1"):
        thread = threading.Thread(target=turmoil)
        thread.start()
        seen = set()
        try:
            until = time.monotonic() + 300
            while len(turns) < 20 and time.monotonic() < until and not failures:
                listed = get_device_list(all=True)
                assert {d.name: d for d in listed if d.name in before} == before
                for device in listed:
                    seen.add(device.name)
                    assert device.name in before or device.name in ("rf0", "rf1")
                    try:
                        assert all(port.number == 1 for port in device.ports)
                    except OSError as error:
                        assert error.errno == errno.ENODEV and device.name not in before
        finally:
            stop.set()
            thread.join()
    assert not failures and len(turns) >= 20
    assert seen & {"rf0", "rf1"}


def test_a_missing_or_forbidden_node_is_a_problem_with_its_cure():
    """In a child with a /dev of its own."""
    if os.geteuid():
        pytest.skip("a mount namespace of one's own takes root")
    path = get_device_list()[0].uverbs_path
    name = get_device_list()[0].name
    code = f"""
import os, rdmafork, sys
def problem():
    return next(d for d in rdmafork.get_device_list(all=True) if d.name == {name!r})
print(problem().problem)
os.chmod({path!r}, 0o600)
import grp, pwd, socket, json
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
print(problem()._problem_errno, problem().problem)
try:
    print(len(rdmafork.get_device_list()))
except OSError as error:
    print(type(error).__name__, error.errno)
"""
    numbers = os.stat(path).st_rdev
    count = len(names())
    private = (
        f"mount -t tmpfs none /dev/infiniband && {{ {{ python -c 'import rdmafork; "
        f"print([d.problem for d in rdmafork.get_device_list(all=True)]); "
        f"print(rdmafork.get_device_list())'; }} && "
        f'mknod -m 660 {path} c {os.major(numbers)} {os.minor(numbers)} && python -c "$CODE"; }}'
    )
    environment = {**os.environ, "CODE": code}
    environment["PATH"] = f"{os.path.dirname(os.sys.executable)}:{environment['PATH']}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", private],
        env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    missing, none, fine, refused, listed = done.stdout.splitlines()
    assert f"--device={path}" in missing and none == "[]"
    assert fine == "None"
    assert refused.startswith(f"{errno.EACCES} no permission") and "crw------- root:root" in refused
    assert listed == (f"PermissionError {errno.EPERM}" if count == 1 else "0")


def test_the_class_is_rdmaforks():
    assert all(type(device) is rdmafork.Device for device in get_device_list())
