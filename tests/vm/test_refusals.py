"""Refused registrations say so, name the cause, and leave everything as it was."""

import contextlib
import ctypes
import errno
import os
import re
import resource
import socket  # noqa: F401 - by rdmafork, when Python's files may be out of reach
from pathlib import Path

import pytest
from conftest import fresh
from memory import PAGE, libc, map_at, unmap

import rdmafork
from rdmafork import Access
from vm.rc import ALL, Ours, State, memory, pinned, start

LIMIT = 64 << 10
NOBODY = 65534


@contextlib.contextmanager
def as_it_was(rc):
    before = State.now(rc)
    yield before
    assert State.now(rc) == before


def block(address, nbytes):
    return (ctypes.c_char * nbytes).from_address(address)


def refused(rc, ours, buffer, access):
    """The OSError of a registration, which has changed nothing."""
    with as_it_was(rc), pytest.raises(OSError) as raised:
        ours.register(buffer, access)
    return raised.value


# ---- the limit of locked memory ---------------------------------------------------------


@pytest.fixture
def device_for_all(device):
    """Any user may open the device, as udev's rules usually have it."""
    nodes = Path("/sys/class/infiniband_verbs")
    node = next(p for p in nodes.glob("uverbs*") if (p / "ibdev").read_text().strip() == device)
    path = Path("/dev/infiniband") / node.name
    mode = path.stat().st_mode & 0o777
    if mode & 0o006 != 0o006:
        if os.getuid():
            pytest.skip(f"only root may open {path} to others")
        path.chmod(0o666)
    yield str(path)
    if mode & 0o006 != 0o006:
        path.chmod(mode)


def become_ordinary():
    """A user without CAP_IPC_LOCK who may lock 64 KiB."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (LIMIT, LIMIT))
    if not os.getuid():
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: /proc/self/smaps can be read


@pytest.mark.parametrize("mode", ["lazy", "eager"])
@fresh
def test_the_limit_of_locked_memory_is_named(rc, device_for_all, mode):
    start(mode)
    become_ordinary()
    ours = Ours(rc)
    small, large = memory("base", 4 * PAGE), memory("base", 64 * PAGE, 777)
    with ours.register(small), as_it_was(rc) as before:
        assert before.pinned == 4 * PAGE
        error = refused(rc, ours, large, ALL)
        assert error.errno == errno.ENOMEM and type(error) is OSError
        text = str(error)
        assert "RLIMIT_MEMLOCK" in text and re.search(r"65536|64 KiB", text), text
        assert str(large.nbytes) in text, text  # what was asked
        # What fits is registered as before.
        with ours.register(memory("base", 4 * PAGE)):
            assert pinned() == before.pinned + 4 * PAGE
    assert pinned() == 0 and rdmafork.protected_ranges() == []


# ---- memory of the wrong kind -----------------------------------------------------------


@pytest.mark.parametrize("mode", ["lazy", "eager"])
@fresh
def test_memory_that_cannot_be_registered(rc, mode):
    start(mode)
    ours = Ours(rc)
    held = ours.register(memory("base", 4 * PAGE))

    # A read-only object, before the kernel is asked.
    for access in (Access.LOCAL_WRITE, Access.LOCAL_WRITE | Access.REMOTE_WRITE):
        with as_it_was(rc), pytest.raises(BufferError, match="read-only"):
            ours.register(b"read-only" * 1000, access)

    # A mapping that cannot be written, in an object that says it can.
    readonly = map_at(0, 4 * PAGE, prot=1)
    error = refused(rc, ours, block(readonly, 4 * PAGE), ALL)
    assert error.errno in (errno.EFAULT, errno.EACCES) and "not for writing" in str(error), error
    assert f"0x{readonly:x}" in str(error) and "LOCAL_WRITE" in str(error), error

    # A hole: nothing mapped between two mapped parts.
    holed = map_at(0, 12 * PAGE)
    unmap(holed + 4 * PAGE, 4 * PAGE)
    error = refused(rc, ours, block(holed, 12 * PAGE), ALL)
    assert error.errno in (errno.EFAULT, errno.ENOMEM) and "mapped" in str(error), error
    assert f"0x{holed:x}" in str(error), error

    # Nothing there at all.
    unmap(holed, 12 * PAGE)
    error = refused(rc, ours, block(holed, 4 * PAGE), ALL)
    assert error.errno in (errno.EFAULT, errno.ENOMEM) and "mapped" in str(error), error

    held.close()
    ours.close()
    assert pinned() == 0 and rdmafork.protected_ranges() == []


@fresh
def test_read_only_memory_is_registered_for_reading(rc):
    rdmafork.fork_init()
    ours = Ours(rc)
    # Not in the heap, whose pages malloc() uses too.
    content = memory("base", 256 * 40)
    content[:] = bytes(range(256)) * 40
    content = content.toreadonly()
    source = ours.domain.register(content)
    assert source.access == 0
    copy = ours.domain.register(memory("base", len(content)))
    assert copy.access == Access.LOCAL_WRITE
    remote = ours.register(content, Access.REMOTE_READ)
    pair = rc.pair(ours.context, ours.pd)
    pair.send(source, copy)
    assert copy.obj == content
    copy.obj[:] = bytes(len(content))
    pair.read(copy, remote)
    assert copy.obj == content


@fresh
def test_access_that_makes_no_sense_is_refused(rc):
    rdmafork.fork_init()
    ours = Ours(rc)
    buffer = memory("base", 4 * PAGE)
    for access in (
        Access.REMOTE_WRITE,
        Access.REMOTE_ATOMIC,
        1 << 15,
        Access.REMOTE_WRITE | 1 << 15,
    ):
        error = refused(rc, ours, buffer, access)
        assert error.errno in (errno.EINVAL, errno.EOPNOTSUPP), (access, error)
    assert "LOCAL_WRITE" in str(refused(rc, ours, buffer, Access.REMOTE_WRITE))
    for access, kind in (("write", TypeError), (1.5, TypeError), (-1, (ValueError, OSError))):
        with as_it_was(rc), pytest.raises(kind):
            ours.register(buffer, access)
    with as_it_was(rc), pytest.raises(ValueError, match="on_fork"):
        ours.register(buffer, on_fork="forget")
    with as_it_was(rc), pytest.raises(TypeError):
        ours.register(42)


# ---- objects that are gone, devices that never were -------------------------------------


@fresh
def test_a_closed_object_refuses_every_use(rc):
    rdmafork.fork_init()
    ours = Ours(rc)
    region = ours.register(memory("base", PAGE))
    region.close()
    for use in (lambda: region.lkey, lambda: region.rkey, lambda: region.handle,
                lambda: region.address, region.__enter__):  # fmt: skip
        with pytest.raises(ValueError, match="closed"):
            use()
    ours.domain.close()
    for use in (lambda: ours.domain.register(bytearray(9)), lambda: ours.domain.address,
                ours.domain.__enter__):  # fmt: skip
        with as_it_was(rc), pytest.raises(ValueError, match="closed"):
            use()
    ours.device.close()
    for use in (ours.device.alloc_pd, lambda: ours.device.address, ours.device.__enter__):
        with as_it_was(rc), pytest.raises(ValueError, match="closed"):
            use()


@fresh
def test_a_device_that_is_not_there(rc):
    rdmafork.fork_init()
    with as_it_was(rc):
        for name in ("nonesuch0", "../" + rc.device, rc.device + " ", "x" * 1000):
            with pytest.raises(OSError, match=re.escape(name)) as raised:
                rdmafork.Context(name)
            assert raised.value.errno == errno.ENODEV, name
