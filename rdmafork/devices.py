"""RDMA devices, as the kernel lists them.

    /sys/class/infiniband/mlx5_0          the device: node_guid, node_type, ports/1/state, ...
    /sys/class/infiniband_verbs/uverbs0   its way in for programs; ibdev in it names the device
    /dev/infiniband/uverbs0               what a program opens, with a driver of libibverbs

Devices come, go and change their names while they are read. All values of one come through one
descriptor of its directory, so that it is all of the same device, and a listing during which a
name changed is made again. Nothing is kept between calls and nothing is to be freed.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import warnings
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from rdmafork import _netlink, _problems
from rdmafork._results import describe
from rdmafork._sysfs import (
    EXHAUSTED,
    GONE,
    Directory,
    colons,
    enumerated,
    gid_bytes,
    guid_number,
    hexadecimal,
    numa_node,
    rate,
    variable,
    word,
)

if TYPE_CHECKING:
    from rdmafork._verbs import Context

__all__ = [
    "get_device_list",
    "Device",
    "Port",
    "Gid",
    "NodeType",
    "Transport",
    "PortState",
    "PhysicalState",
    "LinkLayer",
    "GidType",
    "DeviceWarning",
]

_ATTEMPTS = 10  # at a listing during which nothing changes its name
_PERMISSION = {errno.EACCES, errno.EPERM}


class DeviceWarning(RuntimeWarning):
    """An RDMA device has no userspace driver; given where IBV_SHOW_WARNINGS is set."""

    __module__ = "rdmafork"


# ---- the field's names ------------------------------------------------------------------


class _Enum(IntEnum):
    """Numbers of a newer kernel are members too, named UNKNOWN_number."""

    @classmethod
    def _missing_(cls, value: object) -> _Enum | None:
        if not isinstance(value, int):
            return None
        member = int.__new__(cls, value)
        member._name_ = f"UNKNOWN_{value}"
        member._value_ = value
        return member


class NodeType(_Enum):
    """enum ibv_node_type: the kind of a device."""

    __module__ = "rdmafork"

    CA = 1
    SWITCH = 2
    ROUTER = 3
    RNIC = 4
    USNIC = 5
    USNIC_UDP = 6
    UNSPECIFIED = 7


class Transport(_Enum):
    """enum ibv_transport_type: the protocol of a device; RoCE is IB over Ethernet."""

    __module__ = "rdmafork"

    UNKNOWN = -1
    IB = 0
    IWARP = 1
    USNIC = 2
    USNIC_UDP = 3
    UNSPECIFIED = 4


class PortState(_Enum):
    """enum ibv_port_state: the logical state of a port."""

    __module__ = "rdmafork"

    NOP = 0
    DOWN = 1
    INIT = 2
    ARMED = 3
    ACTIVE = 4
    ACTIVE_DEFER = 5


class PhysicalState(_Enum):
    """The state of a port's link."""

    __module__ = "rdmafork"

    NOP = 0
    SLEEP = 1
    POLLING = 2
    DISABLED = 3
    PORT_CONFIGURATION_TRAINING = 4
    LINK_UP = 5
    LINK_ERROR_RECOVERY = 6
    PHY_TEST = 7


class LinkLayer(_Enum):
    """The link that carries a port's packets."""

    __module__ = "rdmafork"

    UNSPECIFIED = 0
    INFINIBAND = 1
    ETHERNET = 2


class GidType(_Enum):
    """enum ibv_gid_type: what a GID's packets look like."""

    __module__ = "rdmafork"

    UNKNOWN = -1
    IB = 0
    ROCE_V1 = 1
    ROCE_V2 = 2


_TRANSPORTS = {
    NodeType.CA: Transport.IB,
    NodeType.SWITCH: Transport.IB,
    NodeType.ROUTER: Transport.IB,
    NodeType.RNIC: Transport.IWARP,
    NodeType.USNIC: Transport.USNIC,
    NodeType.USNIC_UDP: Transport.USNIC_UDP,
    NodeType.UNSPECIFIED: Transport.UNSPECIFIED,
}

# ---- the results of listing ------------------------------------------------------------


class Gid(NamedTuple):
    """An entry of a port's GID table.

    index: its place in the table
    gid: its text, "fe80::9803:9bff:fe67:ac2a" or "::ffff:10.77.0.1" for example
    type: the kind of packets that are sent from it
    netdev: the network interface it belongs to, if any
    """

    index: int  # type: ignore[assignment]
    gid: str
    type: GidType
    netdev: str | None

    @property
    def raw(self) -> bytes:
        """The GID as 16 bytes."""
        from socket import AF_INET6, inet_pton

        return inet_pton(AF_INET6, self.gid)


Gid.__module__ = "rdmafork"
describe(Gid)


class _Record:
    """Read-only attributes; one that could not be read raises its OSError when asked for."""

    __slots__ = ("_values",)

    def __init__(self, values: dict[str, object]):
        self._values = values

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._values})

    if not TYPE_CHECKING:  # mypy knows them by their annotations

        def __getattr__(self, name):
            if name.startswith("_") or name not in self._values:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            value = self._values[name]
            if isinstance(value, OSError):
                raise OSError(value.errno, value.strerror, value.filename)
            return value

    def _get(self, name: str) -> Any:
        """The attribute, or None where it cannot be read."""
        try:
            return getattr(self, name)
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise
            return None


class Port(_Record):
    """A port of an RDMA device as it was when Device.ports was read.

    If an attribute could not be read, asking for it raises an OSError that names its file.
    gids and the MTUs are read anew each time they are asked for, because a GID table has hundreds
    of slots, and the device must be opened to read the MTUs.

    device: the Device it belongs to
    number: the port's number, from 1; a switch has 0
    state: the state of the link, as the subnet manager sees it; ACTIVE: packets can be sent
    physical_state: the state of the wire; LINK_UP: it is connected
    link_layer: InfiniBand or Ethernet
    rate: the speed in Gb/s
    lid: the port's local identifier; 0 on Ethernet
    sm_lid: the local identifier of the subnet manager; 0 on Ethernet
    capability_mask: the bits of enum ibv_port_cap_flags
    """

    __slots__ = ()
    __module__ = "rdmafork"

    device: Device
    number: int
    state: PortState
    physical_state: PhysicalState
    link_layer: LinkLayer
    rate: float
    lid: int
    sm_lid: int
    capability_mask: int

    @property
    def gids(self) -> tuple[Gid, ...]:
        """The GID table without its empty slots.

        OSError names the file that could not be read; ENODEV: the device or the port is gone."""
        with self.device._reopen() as device, self._directory(device) as port:
            layer, transport = self._get("link_layer"), self.device._get("transport")
            roce = layer == LinkLayer.ETHERNET and transport == Transport.IB
            return tuple(_gids(port, GidType.ROCE_V1 if roce else GidType.IB))

    @property
    def active_mtu(self) -> int | None:
        """The MTU in use, in bytes. The device is opened to read it. None if this process cannot
        open the device, and for ports above 255."""
        return self._mtus()[0]

    @property
    def max_mtu(self) -> int | None:
        """The largest MTU, in bytes; None where active_mtu is."""
        return self._mtus()[1]

    def as_dict(self) -> dict[str, Any]:
        """Everything, GIDs and MTUs too, ready for JSON; None for what cannot be read."""
        gids = self._get("gids")
        active_mtu, max_mtu = self._mtus()
        return {
            "number": self.number,
            **{name: _jsonable(self._get(name)) for name in _PORT_FILES},
            "active_mtu": active_mtu,
            "max_mtu": max_mtu,
            "gids": None if gids is None else [_named(gid) for gid in gids],
        }

    def __repr__(self) -> str:
        def shown(name: str, form: str = "{}") -> str:
            value = self._get(name)
            return "?" if value is None else form.format(getattr(value, "name", value))

        return (
            f"<Port {self.device.name}/{self.number}: {shown('state')}, "
            f"{shown('physical_state')}, {shown('link_layer')}, {shown('rate', '{:g} Gb/s')}, "
            f"LID {shown('lid')}, SM LID {shown('sm_lid')}>"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Port, (self._values,)

    def _directory(self, device: Directory) -> Directory:
        try:
            with device.child("ports") as ports:
                return ports.child(str(self.number))
        except OSError as error:
            if error.errno not in GONE:
                raise
            message = f"port {self.number} of {self.device.name} is gone"
            raise OSError(errno.ENODEV, message, error.filename) from None

    def _mtus(self) -> tuple[int | None, int | None]:
        if self.device.problem is not None:
            return None, None
        from rdmafork._ibverbs import port_mtu

        try:
            active, largest = port_mtu(self.device, self.number)
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise
            return None, None
        return active, largest


class Device(_Record):
    """An RDMA device as the kernel knows it; see get_device_list().

    Its attributes are what they were when it was listed; ports is read anew each time. It holds
    nothing and need not be closed. Two devices are equal if they have the same name and node GUID.
    If the kernel's file of an attribute makes no sense, reading the attribute raises an OSError
    that names the file. Unless said otherwise, None means that the device has none.

    name: its name in /sys/class/infiniband, "mlx5_0" for example
    index: the kernel's number for it, never used again; None where it is not known
    node_type: what it is: a channel adapter (CA), an iWARP adapter (RNIC), a switch
    transport: the protocol it speaks
    node_guid: the identifier of the node, 64 bits
    sys_image_guid: the identifier of the adapter, which all its devices share
    firmware_version: the firmware's version, as the driver gives it
    board_id: the vendor's name for the board
    uverbs_name: its name in /sys/class/infiniband_verbs, "uverbs0" for example
    uverbs_path: its device file, "/dev/infiniband/uverbs0" for example, even if that is missing
    driver: the kernel driver, "mlx5_core" for example
    numa_node: the NUMA node that it is closest to
    pci_address: its PCI address, "0000:3b:00.0" for example
    netdev: the network interface it belongs to
    problem: why this process cannot use it, and what to do; None: it can
    """

    __slots__ = ("_path", "_problem_errno")
    __module__ = "rdmafork"

    name: str
    index: int | None
    node_type: NodeType
    transport: Transport
    node_guid: int
    sys_image_guid: int | None
    firmware_version: str | None
    board_id: str | None
    uverbs_name: str | None
    uverbs_path: str | None
    driver: str | None
    numa_node: int | None
    pci_address: str | None
    netdev: str | None
    problem: str | None

    def __init__(self, values: dict[str, object], path: str, problem_errno: int | None):
        super().__init__(values)
        self._path = path
        self._problem_errno = problem_errno

    @property
    def node_guid_text(self) -> str:
        """The usual form: "9803:9b03:0067:ac2a"."""
        return colons(self.node_guid)

    @property
    def sys_image_guid_text(self) -> str | None:
        """The usual form: "9803:9b03:0067:ac2a"."""
        return None if self.sys_image_guid is None else colons(self.sys_image_guid)

    @property
    def ports(self) -> tuple[Port, ...]:
        """The ports as they are now. OSError ENODEV: the device is gone."""
        found = []
        with self._reopen() as device:
            try:
                with device.child("ports") as ports:
                    for number in sorted(int(n) for n in ports.names() if n.isdecimal()):
                        try:
                            with ports.child(str(number)) as port:
                                values = {"device": self, "number": number, **_port(port)}
                                found.append(Port(values))
                        except OSError as error:
                            if error.errno not in GONE:
                                raise
            except OSError as error:
                if error.errno not in GONE:
                    raise
            if not device.in_place():
                raise self._gone()
        return tuple(found)

    def open(self) -> Context:
        """Open the device through libibverbs: Context(self)."""
        from rdmafork._verbs import Context

        return Context(self)

    def as_dict(self) -> dict[str, Any]:
        """Everything, ports and GIDs too, ready for JSON; None for what cannot be read.

        GUIDs are in the colon form, enums are their names. Opens the device for the MTUs."""
        values = {name: _jsonable(self._get(name)) for name in self._values}
        ports = self._get("ports")
        return {
            **values,
            "node_guid": self._get("node_guid_text"),
            "sys_image_guid": self._get("sys_image_guid_text"),
            "ports": None if ports is None else [port.as_dict() for port in ports],
        }

    def __repr__(self) -> str:
        def names(name: str) -> str:
            value = self._get(name)
            return "?" if value is None else value.name

        number = "" if self._get("index") is None else f" ({self.index})"
        parts = [names("node_type"), names("transport"), self._get("node_guid_text") or "GUID ?"]
        driver, where = self._get("driver"), self._get("pci_address") or self._get("netdev")
        parts.append(" at ".join(str(part) for part in (driver, where) if part))
        firmware = self._get("firmware_version")
        parts += [f"firmware {firmware}" if firmware else "", self.uverbs_name or ""]
        text = _printable(f"<Device {self.name}{number}: {', '.join(p for p in parts if p)}")
        return f"{text}; {self.problem}>" if self.problem else f"{text}>"

    def __eq__(self, other: object) -> bool:
        return self._identity == other._identity if isinstance(other, Device) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._identity)

    def __reduce__(self) -> tuple[Any, ...]:
        return Device, (self._values, self._path, self._problem_errno)

    @property
    def _identity(self) -> tuple[str, int | None]:
        return self.name, self._get("node_guid")

    def _reopen(self) -> Directory:
        """Its directory, if the name is still this device's."""
        try:
            directory = Directory(self._path)
        except OSError as error:
            raise self._gone() if error.errno in GONE else error from None
        known = self._get("node_guid")
        try:
            if known is None or directory.read("node_guid", guid_number) == known:
                return directory
        except OSError as error:
            if error.errno not in GONE:
                os.close(directory.fd)
                raise
        os.close(directory.fd)
        raise self._gone()

    def _gone(self) -> OSError:
        return OSError(errno.ENODEV, f"RDMA device {self.name} is gone", self._path)


def _jsonable(value: Any) -> Any:
    if isinstance(value, IntEnum):
        return value.name
    return _printable(value) if isinstance(value, str) else value


def _named(gid: Gid) -> dict[str, Any]:
    return {name: _jsonable(value) for name, value in gid._asdict().items()}


def _printable(text: str) -> str:
    """Names that are no UTF-8 with their bytes as \\xff."""
    return os.fsencode(text).decode("utf-8", "backslashreplace")


# ---- a port, a device -------------------------------------------------------------------


def _link_layer(text: str) -> LinkLayer:
    layers = {
        "InfiniBand": LinkLayer.INFINIBAND,
        "Ethernet": LinkLayer.ETHERNET,
        "Unknown": LinkLayer.UNSPECIFIED,
    }
    if text not in layers:
        raise ValueError(text)
    return layers[text]


_PORT_FILES: dict[str, tuple[str, Callable[[str], object]]] = {
    "state": ("state", lambda text: PortState(enumerated(text))),
    "physical_state": ("phys_state", lambda text: PhysicalState(enumerated(text))),
    "link_layer": ("link_layer", _link_layer),
    "rate": ("rate", rate),
    "lid": ("lid", hexadecimal),
    "sm_lid": ("sm_lid", hexadecimal),
    "capability_mask": ("cap_mask", hexadecimal),
}


def _port(directory: Directory) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, (file, parse) in _PORT_FILES.items():
        try:
            values[name] = directory.read(file, parse)
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise
            values[name] = error
    return values


def _gids(port: Directory, plain: GidType) -> list[Gid]:
    """The slots in use; plain: what "IB/RoCE v1" means on this port."""
    try:
        with port.child("gids") as gids:
            indexes = sorted(int(name) for name in gids.names() if name.isdecimal())
            found = [_gid(port, gids, index, plain) for index in indexes]
    except OSError as error:
        if error.errno in GONE:
            raise OSError(errno.ENODEV, "the port is gone", error.filename) from None
        raise OSError(error.errno, error.strerror, error.filename) from None
    return [gid for gid in found if gid is not None]


def _gid(port: Directory, gids: Directory, index: int, plain: GidType) -> Gid | None:
    from socket import AF_INET6, inet_ntop

    try:
        raw = gids.read(str(index), gid_bytes)
    except OSError as error:
        if error.errno == errno.EINVAL:  # empty, to some kernels
            return None
        raise
    if not any(raw):
        return None
    try:
        kind = port.read(f"gid_attrs/types/{index}", str)
        gid_type = {"IB/RoCE v1": plain, "RoCE v2": GidType.ROCE_V2}.get(kind, GidType.UNKNOWN)
    except OSError as error:
        if error.errno == errno.EINVAL and plain == GidType.ROCE_V1:
            return None  # emptied since
        if error.errno not in (errno.EINVAL, errno.ENOENT):
            raise
        gid_type = plain  # old kernels, InfiniBand
    netdev = port.maybe(f"gid_attrs/ndevs/{index}", word)
    name = netdev if isinstance(netdev, str) else None
    return Gid(index, inet_ntop(AF_INET6, raw), gid_type, name)


def _device(directory: Directory, values: dict[str, object]) -> OSError | None:
    """Put the files of a device's directory into values; the error where they are not enough."""
    failed = None
    for name, parse in (("node_type", enumerated), ("node_guid", guid_number)):
        try:
            values[name] = directory.read(name, parse)
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise
            values[name] = failed = error
    node_type = values["node_type"]
    values["transport"] = node_type
    if isinstance(node_type, int):
        values["node_type"] = NodeType(node_type)
        values["transport"] = _TRANSPORTS.get(NodeType(node_type), Transport.UNKNOWN)
    values["sys_image_guid"] = directory.maybe("sys_image_guid", guid_number)
    values["firmware_version"] = directory.maybe("fw_ver", word)
    values["board_id"] = directory.maybe("board_id", word)
    values["numa_node"] = directory.maybe("device/numa_node", numa_node)
    values["netdev"] = directory.maybe("parent", word) or _first_netdev(directory)
    try:
        link = os.readlink("device/driver", dir_fd=directory.fd)
        values["driver"] = os.path.basename(link)
    except OSError:
        values["driver"] = None
    # The device of a subfunction is below the PCI device.
    parent = os.path.realpath(f"/proc/thread-self/fd/{directory.fd}/device")
    addresses = re.findall(r"(?<=/)[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7](?=/|$)", parent)
    values["pci_address"] = addresses[-1] if addresses else None
    return failed


def _first_netdev(directory: Directory) -> str | None:
    """The network interface of the first GID, which is that of the port itself."""
    netdev = directory.maybe("ports/1/gid_attrs/ndevs/0", word)
    return netdev if isinstance(netdev, str) else None


# ---- the list ---------------------------------------------------------------------------


class _Listing:
    """One attempt at a list of all devices."""

    def __init__(self, root: str, identities: list[_netlink.Identity] | None):
        self.root = f"{root}/class/infiniband"
        self.names = _names(self.root)
        # First: it can load ib_uverbs, and a device that appears later is seen below.
        self.driven = _problems.driven() if self.names else {}
        self.uverbs = _problems.Uverbs(root)
        self.identities = {identity.name: identity for identity in identities or ()}
        # By directory: one renamed meanwhile may be there under both names.
        self.found: dict[tuple[int, ...], Device] = {}
        for name in self.names:
            self._device(name)
        self.changed = (
            len(self.found) < len(self.names)
            or sorted(_names(self.root)) != sorted(self.names)
            or _problems.Uverbs(root).entries != self.uverbs.entries
        )

    def _device(self, name: str) -> None:
        """Find a device, unless it is gone or has another name."""
        path = f"{self.root}/{name}"
        values: dict[str, object] = dict.fromkeys(Device.__annotations__)
        values["name"] = name
        if name in self.uverbs.entries:
            values["uverbs_name"] = self.uverbs.entries[name][0]
            values["uverbs_path"] = f"{_problems.NODES}/{values['uverbs_name']}"
        key: tuple[int, ...]
        try:
            with Directory(path) as directory:
                failed = _device(directory, values)
                if not directory.in_place():
                    return
                key = directory.key()
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise
            if error.errno in GONE and not os.path.islink(path):
                return
            failed, key = error, (len(self.found),)
            values.update(dict.fromkeys(("node_type", "transport", "node_guid"), error))
        self._complete(values)
        problem = _problems.unreadable(failed) if failed else self._problem(values)
        if problem is not None:
            values["problem"] = problem.text
        self.found[key] = Device(values, path, problem.errno if problem else None)

    def _complete(self, values: dict[str, object]) -> None:
        """The values that only netlink has."""
        identity = self.identities.get(str(values["name"]))
        if identity is None or identity.node_guid != values["node_guid"]:
            return
        values["index"] = identity.number
        if values["uverbs_name"] and not values["driver"]:
            values["driver"] = _netlink.virtual_driver(identity.number)
        if values["node_type"] == NodeType.RNIC and not values["netdev"]:
            values["netdev"] = _netlink.port_netdev(identity.number, 1)

    def _problem(self, values: dict[str, object]) -> _problems.Problem | None:
        name, guid = values["name"], values["node_guid"]
        assert isinstance(name, str) and isinstance(guid, int)
        problem = self.uverbs.missing(name)
        missing = isinstance(self.driven, OSError) and self.driven.errno == errno.ELIBACC
        if problem is None and not missing:
            node, dev = self.uverbs.entries[name]
            problem = _problems.node_problem(f"{_problems.NODES}/{node}", dev)
        return problem or _problems.driver_problem(name, guid, values["driver"], self.driven)


def _names(path: str) -> list[str]:
    """The devices' directories, or links to them; no other file."""
    try:
        with os.scandir(path) as entries:
            return [e.name for e in entries if e.is_symlink() or e.is_dir()]
    except FileNotFoundError:
        return []


def _in_order(device: Device) -> tuple[Any, ...]:
    """The kernel's: by index; without one mlx5_2 before mlx5_10."""
    # Every second part is a number; other digits that isdecimal() accepts belong to a name.
    parts = [int(p) if i % 2 else p for i, p in enumerate(re.split("([0-9]+)", device.name))]
    return device.index is None, device.index or 0, parts


def _list() -> list[Device]:
    path = variable("SYSFS_PATH")
    root = "/sys" if path is None else path.rstrip("/")
    # As for libibverbs: where RDMA is a module, the first question loads it.
    identities = _netlink.devices() if path is None else None
    if identities is None and not any(
        os.path.isdir(f"{root}/class/{name}") for name in ("infiniband", "infiniband_verbs")
    ):
        raise OSError(
            errno.ENOSYS,
            "this kernel has no RDMA, or its module ib_core is not loaded",
            f"{root}/class/infiniband",
        )
    for _ in range(_ATTEMPTS):
        listing = _Listing(root, identities)
        if not listing.changed:
            break
        identities = _netlink.devices() if path is None else None
    return sorted(listing.found.values(), key=_in_order)


def find_device(device: str | Device) -> Device:
    """The device of that name, or itself, if this process can use it; OSError says why not."""
    if isinstance(device, str):
        name = device
        devices = get_device_list(all=True)
        found = next((d for d in devices if d.name == name), None)
        if found is None:
            names = ", ".join(_printable(d.name) for d in devices)
            there = f"there are {names}" if names else "there is none"
            raise OSError(errno.ENODEV, f"no RDMA device {_printable(name)}; {there}")
        device = found
    elif not isinstance(device, Device):
        raise TypeError(f"a device is a Device or its name, not {type(device).__name__}")
    if device.problem is not None:
        text = f"cannot open RDMA device {_printable(device.name)}: {device.problem}"
        raise OSError(device._problem_errno or errno.EIO, text)
    return device


def get_device_list(*, all: bool = False) -> list[Device]:
    """The RDMA devices that this process can use, in the kernel's order; every call reads anew.

    all: include devices that this process cannot use; Device.problem says why, and what to do.
    The list is empty if there are none. There is nothing to free: a Device can be opened for as
    long as the device exists, and an open one outlives the list.

    OSError: ENOSYS, no RDMA in this kernel; EPERM, not with all: there are devices, and only
    permission keeps this process from each of them; ENOMEM. DeviceWarning, if IBV_SHOW_WARNINGS
    has any value, for each device without a userspace driver. SYSFS_PATH names a directory to
    read in place of /sys. Both variables are ignored in a set-uid program (AT_SECURE).

    Works without libibverbs, in any thread and in a forked child. See ibv_get_device_list(3).
    """
    devices = _list()
    usable = [device for device in devices if device.problem is None]
    if variable("IBV_SHOW_WARNINGS") is not None:
        caller = sys._getframe(1)
        for device in devices:
            if device._problem_errno == errno.ENXIO:
                # Explicitly, without a registry: once a call, not once a place.
                warnings.warn_explicit(
                    f"{_printable(device.name)}: {device.problem}",
                    DeviceWarning,
                    caller.f_code.co_filename,
                    caller.f_lineno,
                    caller.f_globals.get("__name__"),
                )
    if all:
        return devices
    if devices and not usable and {d._problem_errno for d in devices} <= _PERMISSION:
        count = f"{len(devices)} RDMA device{'s' if len(devices) > 1 else ''}"
        first = f"{_printable(devices[0].name)}: {devices[0].problem}"
        raise OSError(errno.EPERM, f"{count}, none open to this process; {first}")
    return usable
