"""Reading sysfs, of which every file may be missing, refused, half-written or gone by now."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from types import TracebackType

EXHAUSTED = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)  # about this process, not about a device
GONE = (errno.ENOENT, errno.ENODEV, errno.ENOTDIR)

_T = TypeVar("_T")


class Garbled(OSError):
    """A file's text is not one the kernel writes."""


class Directory:
    """A directory by its descriptor: it stays the same under a new name."""

    def __init__(self, path: str, name: str | None = None, parent: Directory | None = None):
        self.path = path if name is None else f"{path}/{name}"
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            self.fd: int = os.open(name or path, flags, dir_fd=parent.fd if parent else None)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.path) from None

    def __enter__(self) -> Directory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self.fd)

    def child(self, name: str) -> Directory:
        return Directory(self.path, name, self)

    def names(self) -> list[str]:
        return os.listdir(self.fd)

    def key(self) -> tuple[int, int]:
        """Its identity, the same under all its names."""
        status = os.fstat(self.fd)
        return status.st_dev, status.st_ino

    def in_place(self) -> bool:
        """Whether its path still leads to it."""
        try:
            return os.path.samestat(os.fstat(self.fd), os.stat(self.path))
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise
            return False

    def read(self, name: str, parse: Callable[[str], _T]) -> _T:
        """parse() of a file's text; OSError names the file and the wrong text."""
        path = f"{self.path}/{name}"
        try:
            # A fifo in a made-up tree must not block.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            fd = os.open(name, flags, dir_fd=self.fd)
            try:
                data = os.read(fd, 4096)
            finally:
                os.close(fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None
        try:
            return parse(os.fsdecode(data.removesuffix(b"\n")))
        except ValueError:
            raise Garbled(errno.EIO, f"it holds {data[:80]!r}", path) from None

    def maybe(self, name: str, parse: Callable[[str], _T]) -> _T | OSError | None:
        """The same; None where there is no such file or no access to it, or the error."""
        try:
            return self.read(name, parse)
        except Garbled as error:
            return error
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise
            return None


def matched(pattern: str, text: str) -> re.Match[str]:
    match = re.fullmatch(pattern, text)
    if match is None:
        raise ValueError(text)
    return match


def number(text: str) -> int:
    return int(matched("-?[0-9]{1,10}", text)[0])


def enumerated(text: str) -> int:
    """4 of "4: ACTIVE"."""
    return int(matched("([0-9]{1,10}):( .*)?", text)[1])


def hexadecimal(text: str) -> int:
    return int(matched("0x[0-9a-fA-F]{1,16}", text)[0], 16)


def guid_number(text: str) -> int:
    return int(matched("[0-9a-fA-F]{4}(:[0-9a-fA-F]{4}){3}", text)[0].replace(":", ""), 16)


def gid_bytes(text: str) -> bytes:
    return bytes.fromhex(matched("[0-9a-fA-F]{4}(:[0-9a-fA-F]{4}){7}", text)[0].replace(":", ""))


def rate(text: str) -> float:
    """100.0 of "100 Gb/sec (4X EDR)"."""
    return float(matched(r"([0-9]{1,9}(\.[0-9]{1,9})?) Gb/sec( .*)?", text)[1])


def numa_node(text: str) -> int | None:
    node = number(text)
    return node if node >= 0 else None


def word(text: str) -> str | None:
    return text.strip() or None


def device_name(text: str) -> str:
    if not text or "/" in text or "\0" in text:
        raise ValueError(text)
    return text


def colons(guid: int) -> str:
    digits = f"{guid:016x}"
    return ":".join(digits[i : i + 4] for i in range(0, 16, 4))


def variable(name: str) -> str | None:
    """An environment variable; not in a program that runs with more than its user's rights."""
    value = os.environ.get(name)
    return None if value is None or secure() else value


def secure() -> bool:
    """Is it set-uid, set-gid or with file capabilities? The kernel told the loader (AT_SECURE)."""
    import ctypes  # here, for it is large; /proc/self/auxv is closed after giving up root

    getauxval = ctypes.CDLL(None).getauxval
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return bool(getauxval(23))
