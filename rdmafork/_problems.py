"""Why this process cannot use a device that the kernel knows, and the cure."""

from __future__ import annotations

import errno
import os
import stat
from typing import NamedTuple

from rdmafork._sysfs import EXHAUSTED, Directory, colons, device_name, matched, number

NODES = "/dev/infiniband"
ABI = range(3, 7)  # class-wide ABI versions that libibverbs accepts


class Problem(NamedTuple):
    errno: int
    text: str


class Uverbs:
    """/sys/class/infiniband_verbs: the devices that programs can open, and their nodes."""

    def __init__(self, root: str):
        self.loaded = True
        self.entries: dict[str, tuple[str, str]] = {}  # device: its uverbs name and dev
        self.problem: Problem | None = None  # of all devices
        self.broken: OSError | None = None  # an entry that names no device
        try:
            with Directory(f"{root}/class/infiniband_verbs") as directory:
                self._abi(directory)
                names = [name for name in directory.names() if name.startswith("uverbs")]
                for name in names:
                    self._entry(directory, name)
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise
            self.loaded = error.errno != errno.ENOENT
            if self.loaded:
                self.broken = error

    def _entry(self, directory: Directory, name: str) -> None:
        try:
            with directory.child(name) as entry:
                device = entry.read("ibdev", device_name)
                dev = entry.read("dev", lambda text: matched("[0-9]+:[0-9]+", text)[0])
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise
            self.broken = error
        else:
            self.entries[device] = name, dev

    def _abi(self, directory: Directory) -> None:
        try:
            abi = directory.read("abi_version", number)
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise
            self.problem = unreadable(error)
        else:
            if abi not in ABI:
                self.problem = Problem(
                    errno.ENOSYS,
                    f"ABI mismatch: the kernel's uverbs has version {abi}, libibverbs accepts "
                    f"{ABI[0]} to {ABI[-1]}; install a libibverbs that fits the kernel",
                )

    def missing(self, name: str) -> Problem | None:
        """Why a device has no entry here."""
        if name in self.entries:
            return self.problem
        if not self.loaded:
            return Problem(errno.ENODEV, "the module ib_uverbs is not loaded: modprobe ib_uverbs")
        if self.broken is not None:
            return unreadable(self.broken)
        return Problem(
            errno.ENODEV,
            "the kernel offers no uverbs device for it: its kernel driver has no support for "
            "userspace verbs, or is older or newer than ib_uverbs; reload both",
        )


def unreadable(error: OSError) -> Problem:
    return Problem(
        error.errno if error.errno in (errno.EACCES, errno.EPERM) else errno.EIO,
        f"cannot be read from sysfs: {error.filename}: {error.strerror}; see dmesg, or reload "
        f"its kernel driver",
    )


def node_problem(path: str, dev: str) -> Problem | None:
    """The obstacle to opening a device's node, found without opening it."""
    try:
        node = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return Problem(
            errno.ENOENT,
            f"{path} does not exist: start a container with --device={path}; elsewhere "
            f"udevadm trigger --action=add --subsystem-match=infiniband_verbs",
        )
    except OSError as error:
        return Problem(
            error.errno or errno.EIO,
            f"{path} cannot be reached ({error.strerror}): chmod 755 {os.path.dirname(path)}",
        )
    here = f"{os.major(node.st_rdev)}:{os.minor(node.st_rdev)}"
    if not stat.S_ISCHR(node.st_mode) or here != dev:
        what = here if stat.S_ISCHR(node.st_mode) else "no character device"
        return Problem(
            errno.ENODEV,
            f"{path} is {what}, not {dev}, which is the device: remove it and restart the "
            f"container with --device={path}, or let udev make it",
        )
    if os.access(path, os.R_OK | os.W_OK, effective_ids=True):
        return None
    return _refused(path, node, dev)


def _refused(path: str, node: os.stat_result, dev: str) -> Problem:
    user, group = _owners(node)
    who = f"{path} is {stat.filemode(node.st_mode)} {user}:{group}"
    if os.geteuid() == node.st_uid:
        mine = stat.S_IRUSR | stat.S_IWUSR
    elif node.st_gid in (os.getegid(), *os.getgroups()):
        mine = stat.S_IRGRP | stat.S_IWGRP
    else:
        mine = stat.S_IROTH | stat.S_IWOTH
    if node.st_mode & mine == mine:
        return Problem(
            errno.EPERM,
            f"{who}, but the device cgroup or a security module refuses it: start the "
            f"container with --device={path}, or allow the device c {dev} rw",
        )
    rule = 'KERNEL=="uverbs*", GROUP="rdma", MODE="0660"'
    cure = f"add the udev rule {rule} and join that group"
    if node.st_gid and node.st_mode & 0o060 == 0o060:
        cure = f"join the group {group}, or {cure}"
    return Problem(errno.EACCES, f"no permission: {who}; {cure}")


def _owners(node: os.stat_result) -> tuple[str, str]:
    import grp
    import pwd

    try:
        user = pwd.getpwuid(node.st_uid).pw_name
    except KeyError:
        user = str(node.st_uid)
    try:
        group = grp.getgrgid(node.st_gid).gr_name
    except KeyError:
        group = str(node.st_gid)
    return user, group


def driven() -> dict[str, int] | OSError:
    """The devices that libibverbs has drivers for, or why it cannot say."""
    from rdmafork._ibverbs import driven_devices

    try:
        return driven_devices()
    except OSError as error:
        if error.errno in EXHAUSTED:
            raise
        return error


def library_problem(error: OSError) -> Problem:
    """libibverbs cannot be opened (ELIBACC: it says which package), or lists nothing."""
    hint = "; it says why on stderr" if error.errno == errno.ENOSYS else ""
    return Problem(error.errno or errno.EIO, f"{error.strerror}{hint}")


def driver_problem(
    name: str, guid: int, driver: object, found: dict[str, int] | OSError
) -> Problem | None:
    if isinstance(found, OSError):
        return library_problem(found)
    if name not in found:
        kernel = f" (kernel driver {driver})" if isinstance(driver, str) else ""
        return Problem(
            errno.ENXIO,
            f"no userspace driver for it{kernel}: install or update ibverbs-providers (Debian, "
            f"Ubuntu) or libibverbs (Fedora, RHEL)",
        )
    if found[name] not in (0, guid):
        return Problem(
            errno.ENODEV,
            f"libibverbs uses this name for another device, {colons(found[name])}: "
            f"set SYSFS_PATH before it is first used, or not at all",
        )
    return None
