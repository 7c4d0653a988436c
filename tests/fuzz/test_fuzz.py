"""Any bytes for the readers of outside data: each takes them for something, or says no.

sysfs, RDMA netlink, ELF files, and the lines of a report. The engine's own readers have
fuzzers in C beside this file. RDMAFORK_TEST_EXAMPLES=n sets how many inputs each test makes up.
"""

import argparse
import contextlib
import io
import json
import os
import pickle
import struct
import sys

import pytest
from conftest import scaled
from sysfs import Tree, port

from rdmafork import _netlink, _sysfs, get_device_list
from rdmafork.cli import report
from rdmafork.cli.elf import Elf, NotElf

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

EXAMPLES = int(os.environ.get("RDMAFORK_TEST_EXAMPLES") or scaled(150))
some = hypothesis.settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize="RDMAFORK_TEST_EXAMPLES" not in os.environ,
    suppress_health_check=list(hypothesis.HealthCheck),
)


# ---- sysfs ------------------------------------------------------------------------------

# A file's text: a right one, a nearly right one, or anything.
WORDS = [b"4: ACTIVE", b"-1", b"0x1f", b"1: CA", b"InfiniBand", b"100 Gb/sec (4X EDR)", b"\n", b""]
contents = st.one_of(
    st.sampled_from(WORDS),
    st.binary(max_size=60),
    st.text(max_size=20).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.integers().map(lambda number: str(number).encode()),
    st.tuples(st.sampled_from(WORDS), st.binary(max_size=4)).map(b"".join),
    st.just(b"9" * 5000),
)
# Other things in its place.
OTHERS = ["gone", "directory", "loop", "dangling", "fifo", "unchanged"]
fates = st.one_of(contents, st.sampled_from(OTHERS))


def everything(tree):
    found = [path for path in tree.root.rglob("*") if not path.is_symlink()]
    return sorted(path for path in found if path.is_file())


def befall(path, fate):
    if fate == "unchanged":
        return
    path.unlink()
    if isinstance(fate, bytes):
        path.write_bytes(fate)
    elif fate == "directory":
        path.mkdir()
    elif fate == "loop":
        path.symlink_to(path.name)
    elif fate == "dangling":
        path.symlink_to("nowhere")
    elif fate == "fifo":
        os.mkfifo(path)


def look(device):
    """All that can be asked of it."""
    assert isinstance(repr(device), str) and isinstance(str(device), str)
    assert device in {device}
    try:
        found = device.ports
    except OSError as error:
        assert error.filename or error.strerror
        return
    for one in found:
        assert isinstance(repr(one), str)
        try:
            gids = one.gids
        except OSError as error:
            assert error.strerror
        else:
            assert all(len(gid.raw) == 16 for gid in gids)
        assert one.number >= 0
    try:
        json.dumps(device.as_dict())
    except OSError as error:
        assert error.strerror
    assert pickle.loads(pickle.dumps(device)) == device


@some
@hypothesis.given(st.data())
def test_any_sysfs_is_listed_or_refused(tmp_path_factory, data):
    tree = Tree(tmp_path_factory.mktemp("sysfs"))
    gids = [("fe80:0000:0000:0000:9803:9bff:fe67:ac2a", "RoCE v2", "ens1")]
    tree.add("mlx5_0", "9803:9b03:0067:ac2a", pci="0000:3b:00.0", driver="mlx5_core",
             ports={1: port(gids=gids, slots=2)})  # fmt: skip
    tree.add("rxe0", "8c0b:2fff:feba:430c", ports={1: port(slots=1), 2: port(slots=1)})
    files = everything(tree)
    for path in data.draw(st.lists(st.sampled_from(files), max_size=6, unique=True)):
        befall(path, data.draw(fates, label=str(path.relative_to(tree.root))))
    with pytest.MonkeyPatch.context() as patch:
        tree.take_place(patch)
        for device in get_device_list(all=True):
            look(device)


@some
@hypothesis.given(st.text(), st.sampled_from(["number", "enumerated", "hexadecimal", "guid_number",
                                              "gid_bytes", "rate", "numa_node"]))  # fmt: skip
def test_a_text_is_a_value_or_a_value_error(text, name):
    try:
        value = getattr(_sysfs, name)(text)
    except ValueError:
        return
    assert text.isascii() or name in ("enumerated", "rate"), (name, text, value)
    assert value is None or isinstance(value, int | float | bytes)


@some
@hypothesis.given(st.integers(0, 2**64 - 1))
def test_a_guid_is_read_as_it_is_written(guid):
    assert _sysfs.guid_number(_sysfs.colons(guid)) == guid


# ---- netlink ----------------------------------------------------------------------------


class Link:
    """A socket that answers as it was told."""

    def __init__(self, answers):
        self.answers = list(answers)

    def __call__(self, *_):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def settimeout(self, _):
        pass

    def sendto(self, data, _):
        assert int.from_bytes(data[:4], sys.byteorder) == len(data)

    def recv(self, _):
        return self.answers.pop(0) if self.answers else b""


def message(kind, *attributes):
    body = b"".join(_netlink._attribute(*attribute) for attribute in attributes)
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


DONE = message(_netlink.NLMSG_DONE)

attributes = st.tuples(st.sampled_from([1, 2, 3, 6, 51, 69, 73, 93]), st.binary(max_size=20))
messages = st.builds(
    lambda kind, found: message(kind, *found),
    st.sampled_from([2, 3, (5 << 10) | 1]),
    st.lists(attributes, max_size=6),
)


@some
@hypothesis.given(st.lists(st.one_of(st.binary(max_size=200), messages), max_size=5))
def test_any_netlink_answer_is_understood_or_none(answers):
    with pytest.MonkeyPatch.context() as patch:
        for ask in (
            _netlink.devices,
            lambda: _netlink.port_netdev(0, 1),
            lambda: _netlink.virtual_driver(0),
        ):
            patch.setattr("socket.socket", Link(answers))
            found = ask()
            assert found is None or isinstance(found, str | list)


identities = st.tuples(
    st.integers(0, 2**32 - 1),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20),
    st.integers(0, 2**64 - 1),
)


@some
@hypothesis.given(st.lists(identities, max_size=8), st.lists(attributes, max_size=3), st.booleans())
def test_devices_are_those_that_netlink_says(devices_said, others, apart):
    others = [(kind, value) for kind, value in others if kind not in (1, 2, 6)]
    answers = [
        message(
            (5 << 10) | 1,
            *others,
            (_netlink.DEV_INDEX, index.to_bytes(4, sys.byteorder)),
            (_netlink.DEV_NAME, os.fsencode(name) + b"\0"),
            (_netlink.NODE_GUID, guid.to_bytes(8, sys.byteorder)),
        )
        for index, name, guid in devices_said
    ] + [DONE]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.socket", Link(answers if apart else [b"".join(answers)]))
        assert _netlink.devices() == devices_said


# ---- ELF --------------------------------------------------------------------------------


def small_elf():
    """A library of 64 bits that needs one and has a relocation for one symbol."""
    strings = b"\0libneeded.so\0symbol\0"
    dynamic_at, strings_at, symbols_at, relocations_at = 0x100, 0x200, 0x240, 0x280
    dynamic = [(1, 1), (5, strings_at), (6, symbols_at), (7, relocations_at), (8, 24), (0, 0)]
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, 0x300, 0x300, 0x1000)
    table = struct.pack("<IIQQQQQQ", 2, 6, *[dynamic_at] * 3, *[16 * len(dynamic)] * 2, 8)
    image = bytearray(0x300)
    for at, part in (
        (0, header + load + table),
        (dynamic_at, b"".join(struct.pack("<qQ", *entry) for entry in dynamic)),
        (strings_at, strings),
        (symbols_at, bytes(24) + struct.pack("<IBBHQQ", 14, 0x12, 0, 0, 0, 0)),
        (relocations_at, struct.pack("<QQq", 0x2F8, (1 << 32) | 6, 0)),
    ):
        image[at : at + len(part)] = part
    return bytes(image)


SMALL = small_elf()


def ask_elf(path):
    with Elf(path) as elf:
        return elf.needed, elf.imports(), elf.interpreter, str(elf.machine)


def test_the_small_elf_is_one(tmp_path):
    path = tmp_path / "library"
    path.write_bytes(SMALL)
    assert ask_elf(path) == (["libneeded.so"], {"symbol"}, None, "64-bit x86-64")


@some
@hypothesis.given(
    st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.binary(min_size=1, max_size=8)),
             max_size=8),
    st.one_of(st.just(len(SMALL)), st.integers(0, len(SMALL))),
)  # fmt: skip
def test_any_elf_is_read_or_is_none(tmp_path_factory, changes, cut):
    image = bytearray(SMALL)
    for at, new in changes:
        image[at : at + len(new)] = new
    path = tmp_path_factory.mktemp("elf") / "library"
    path.write_bytes(image[:cut])
    try:
        needed, imports, _, machine = ask_elf(path)
    except NotElf as error:
        assert str(error)
    else:
        assert all(isinstance(name, str) for name in [*needed, *imports, machine])


# ---- the lines of a report ---------------------------------------------------------------

LINE = {
    "rdmafork": 3, "pid": 1, "ppid": 1, "host": "a", "rank": "0", "program": "p", "mode": "lazy",
    "kernel": {"release": "6.1", "copy_trusted": 1},
    "registrations": {"total": 1, "live": 1}, "ranges": {"calls": 0, "live": 0}, "forks": 1,
    "handler_ns": {"total": 1, "max": 1}, "marked_bytes": {"total": 1, "last": 1},
    "unmarked_bytes": 0, "unbalanced": 0,
    "libraries": [{"path": "/l", "how": "ours", "why": None}], "errors": [],
    "fork_callers": [{"symbol": "f", "object": "/o", "count": 1}],
}  # fmt: skip

anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def lines(draw):
    """A line with some values changed, or any bytes."""
    if draw(st.integers(0, 5)) == 0:
        return draw(st.binary(max_size=80)).replace(b"\n", b"")
    line = json.loads(json.dumps(LINE))
    for _ in range(draw(st.integers(0, 2))):
        inside = line
        while True:
            keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(inside[key], dict | list) and draw(st.booleans()):
                inside = inside[key]
                continue
            if draw(st.integers(0, 3)) == 0:
                del inside[key]
            else:
                inside[key] = draw(anything)
            break
    return json.dumps(line).encode()


@some
@hypothesis.given(st.lists(lines(), min_size=1, max_size=4), st.booleans())
def test_any_line_of_a_report_is_shown_or_broken(tmp_path_factory, found, as_json):
    path = tmp_path_factory.mktemp("report") / "lines"
    path.write_bytes(b"\n".join(found))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = report.run(
            argparse.Namespace(files=[str(path)], all=True, json=as_json, color="never")
        )
    assert status in (0, 1, 2)
    assert out.getvalue() or err.getvalue()
    if as_json:
        json.loads(out.getvalue())
