"""RDMA netlink: facts about devices that the kernel tells there and not in sysfs.

Nothing is kept between calls, and a kernel or a sandbox without RDMA netlink answers None.
Source: include/uapi/rdma/rdma_netlink.h; readable without privilege.
"""

import os
import sys
from typing import NamedTuple

NETLINK_RDMA = 20
NLDEV = 5 << 10  # RDMA_NL_NLDEV; the message's type is this and a command
GET, PORT_GET, GET_CHARDEV = 1, 5, 15
DEV_INDEX, DEV_NAME, PORT_INDEX = 1, 2, 3
NODE_GUID, NDEV_NAME, CHARDEV_TYPE, UVERBS_DRIVER_ID = 6, 51, 69, 73
NLMSG_ERROR, NLMSG_DONE = 2, 3
NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP = 0x1, 0x4, 0x300

# Devices without a parent in sysfs, by enum rdma_driver_id: the names of their modules.
VIRTUAL = {14: "rdma_rxe", 18: "siw"}

_Attributes = dict[int, bytes]


class Identity(NamedTuple):
    number: int  # the device's index
    name: str
    node_guid: int


def devices() -> list[Identity] | None:
    """Every RDMA device of this network namespace. Loads ib_core where it is a module."""
    answers = _ask(GET, NLM_F_DUMP)
    if answers is None:
        return None
    wanted = {DEV_INDEX, DEV_NAME, NODE_GUID}
    return [
        Identity(_number(a[DEV_INDEX]), _text(a[DEV_NAME]), _number(a[NODE_GUID]))
        for a in answers
        if wanted <= a.keys()
    ]


def virtual_driver(index: int) -> str | None:
    """The kernel module of a device that has no parent in sysfs."""
    # "uverbs" is loaded by this request where it is not: ask only for devices that have it.
    answers = _ask(GET_CHARDEV, 0, {DEV_INDEX: _u32(index), CHARDEV_TYPE: b"uverbs\0"})
    for answer in answers or ():
        if UVERBS_DRIVER_ID in answer:
            return VIRTUAL.get(_number(answer[UVERBS_DRIVER_ID]))
    return None


def port_netdev(index: int, port: int) -> str | None:
    """The network interface of a port."""
    answers = _ask(PORT_GET, 0, {DEV_INDEX: _u32(index), PORT_INDEX: _u32(port)})
    for answer in answers or ():
        if NDEV_NAME in answer:
            return _text(answer[NDEV_NAME])
    return None


def _ask(
    command: int, flags: int, attributes: dict[int, bytes] | None = None
) -> list[_Attributes] | None:
    """The attributes of each answering message; None where nothing answers."""
    import socket

    body = b"".join(_attribute(*item) for item in (attributes or {}).items())
    head = (16 + len(body)).to_bytes(4, sys.byteorder)
    head += (NLDEV | command).to_bytes(2, sys.byteorder)
    head += (flags | NLM_F_REQUEST | NLM_F_ACK).to_bytes(2, sys.byteorder)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_RDMA) as link:
            link.settimeout(5)  # the kernel answers at once, or something is very wrong
            link.sendto(head + bytes(8) + body, (0, 0))
            answers: list[_Attributes] = []
            while data := link.recv(1 << 16):
                for kind, payload in _messages(data):
                    if kind == NLMSG_DONE:
                        return answers
                    if kind == NLMSG_ERROR:
                        return answers if _number(payload[:4]) == 0 else None
                    answers.append(_parse(payload))
    except OSError:
        pass
    return None


def _messages(data: bytes) -> list[tuple[int, bytes]]:
    found = []
    while len(data) >= 16:
        length = max(_number(data[:4]), 16)
        found.append((_number(data[4:6]), data[16:length]))
        data = data[(length + 3) & ~3 :]
    return found


def _parse(data: bytes) -> _Attributes:
    found = {}
    while len(data) >= 4:
        length = max(_number(data[:2]), 4)
        found[_number(data[2:4]) & 0x3FFF] = data[4:length]
        data = data[(length + 3) & ~3 :]
    return found


def _attribute(kind: int, value: bytes) -> bytes:
    head = (4 + len(value)).to_bytes(2, sys.byteorder) + kind.to_bytes(2, sys.byteorder)
    return head + value + bytes(-len(value) % 4)


def _u32(value: int) -> bytes:
    return value.to_bytes(4, sys.byteorder)


def _number(data: bytes) -> int:
    return int.from_bytes(data, sys.byteorder)


def _text(data: bytes) -> str:
    return os.fsdecode(data.split(b"\0", 1)[0])
