"""rdmafork devices, on made-up trees of /sys: see tests/sysfs.py."""

import json
import os

import pytest
from sysfs import ROCE, a_tree, an_open_tmp_path, as_nobody, forbid, port, vendors

from rdmafork import devices
from rdmafork.cli import main


@pytest.fixture
def show(capsys, monkeypatch):
    """show(*arguments): the exit status and the lines on stdout and stderr."""

    def show(*arguments):
        status = main(["devices", *arguments])
        seen = capsys.readouterr()
        return status, seen.out.splitlines(), seen.err.splitlines()

    monkeypatch.setattr(devices.Port, "_mtus", lambda self: (1024, 4096))
    return show


def test_a_line_a_port_and_eighty_columns(tree, show):
    vendors(tree)
    status, lines, errors = show()
    assert (status, errors) == (0, [])
    assert max(map(len, lines)) <= 80
    rows = {line.split()[0]: line.split() for line in lines if not line.startswith(" ")}
    assert rows["device"] == ["device", "port", "state", "link", "rate", "netdev", "driver"]
    assert rows["mlx5_0"] == [
        "mlx5_0", "1", "ACTIVE", "InfiniBand", "200", "Gb/s", "-", "mlx5_core",
    ]  # fmt: skip
    assert rows["efa_0"][3] == "other"
    assert rows["mlx5_2"][-2:] == ["ens1f0np0", "mlx5_core"]
    second = lines[1 + [line.split()[0] for line in lines].index("mlx4_0")]
    assert second.split() == ["2", "DOWN", "Ethernet", "10", "Gb/s"]
    assert lines[-1] == "11 devices, all usable by this process"


def test_a_device_that_cannot_be_used_says_why(tree, show):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a", driver="mlx5_core", pci="0000:3b:00.0")
    tree.add("rxe0", "8c0b:2fff:feba:430c", parent="rxenet")
    (tree.nodes / "uverbs1").unlink()
    status, lines, _ = show()
    text = " ".join(" ".join(lines).split())
    assert status == 0
    assert f"cannot be used: {tree.nodes}/uverbs1 does not exist: start a container with" in text
    assert lines[-1] == "2 devices, 1 usable by this process"
    (tree.nodes / "uverbs0").unlink()
    status, lines, _ = show()
    assert (status, lines[-1]) == (1, "2 devices, none usable by this process")


def test_all_of_it_with_v(tree, show):
    vendors(tree)
    status, lines, _ = show("-v")
    text = "\n".join(lines)
    assert status == 0 and max(map(len, lines)) <= 80
    for words in (
        "mlx5_2\n",
        "  node guid           9803:9b03:0067:ac2a",
        "  port 1\n    state             ACTIVE",
        "    rate              200 Gb/s",
        "    active mtu        1024",
        "    GID 3   ::ffff:10.77.0.1           ROCE_V1  ens1f0np0",
    ):
        assert words in text


def test_json_is_as_dict(tree, show):
    vendors(tree)
    status, lines, _ = show("--json")
    document = json.loads("\n".join(lines))
    assert (status, document["problem"]) == (0, None)
    expected = [device.as_dict() for device in devices.get_device_list(all=True)]
    assert document["devices"] == json.loads(json.dumps(expected))


def test_a_plain_list_opens_no_device_and_reads_no_gid_table(tree, show, monkeypatch):
    path = tree.add("mlx5_0", "9803:9b03:0067:ac2a", ports={1: port(gids=ROCE)})
    (path / "ports/1/gids").rename(path / "gone")
    monkeypatch.setattr(devices.Port, "_mtus", lambda self: pytest.fail("it was opened"))
    status, lines, _ = show()
    assert status == 0 and "mlx5_0" in lines[1]


def test_without_rdma_the_kernel_is_named(tree, show):
    status, lines, errors = show()
    assert (status, lines) == (2, [])
    text = " ".join(errors)
    assert text.startswith("rdmafork devices: this kernel has no RDMA, or its module ib_core is")
    assert "modprobe ib_core" in text and max(map(len, errors)) <= 80
    status, lines, errors = show("--json")
    document = json.loads("\n".join(lines))
    assert (status, document["devices"], errors) == (2, [], [])
    assert "no RDMA" in document["problem"]


def test_without_devices_it_says_so(tree, show):
    tree.classes()
    status, lines, _ = show()
    assert status == 1 and lines[0].startswith("The kernel supports RDMA, but has no device")


def test_without_permission_the_list_is_there_all_the_same(tree, show):
    tree.add("mlx5_0", "9803:9b03:0067:ac2a")
    forbid(tree)
    status, lines, _ = as_nobody(show)
    assert status == 1 and "no permission" in " ".join(lines)
    assert lines[-1] == "1 device, none usable by this process"


def test_a_value_that_cannot_be_read_is_a_question_mark(tree, show):
    nonsense = port(state="garbage", rate="fast")
    tree.add("mlx5_0", "9803:9b03:0067:ac2a", ports={1: nonsense})
    status, lines, _ = show()
    assert status == 0
    assert lines[1].split()[:5] == ["mlx5_0", "1", "?", "Ethernet", "?"]


def test_names_that_are_no_utf8_are_shown(tree, show):
    name = os.fsdecode(b"mlx5_\xff")
    tree.add(name, "9803:9b03:0067:ac2a", uverbs=False)
    _, lines, _ = show()
    assert lines[1].startswith("mlx5_\\xff")
