"""kernel_info() says the same as /proc and /sys."""

import os
import re
import resource
import socket
import struct
from pathlib import Path

import pytest
from conftest import LAZY, fresh
from memory import PAGE

import rdmafork

INFO = rdmafork.kernel_info()
VERSION = tuple(map(int, re.match(r"(\d+)\.(\d+)", os.uname().release).groups()))


def test_the_fields_have_their_types():
    types = {
        "release": str,
        "copy_on_fork": bool,
        "copy_on_fork_from": str,
        "copy_on_fork_trusted": bool,
        "copy_on_fork_trusted_from": str,
        "page_size": int,
        "huge_page_sizes": tuple,
        "procmap_query": bool,
        "max_map_count": int,
        "memlock": tuple,
    }
    assert isinstance(INFO, tuple)
    assert INFO._fields == tuple(types)
    assert {name: type(getattr(INFO, name)) for name in types} == types
    assert all(type(size) is int for size in INFO.huge_page_sizes)
    assert len(INFO.memlock) == 2
    assert all(type(limit) is int for limit in INFO.memlock)
    for name in types:
        assert f"{name}=" in repr(INFO)


def test_the_release_is_uname_s():
    assert INFO.release == os.uname().release
    assert Path("/proc/sys/kernel/osrelease").read_text().strip() == INFO.release


def test_the_page_sizes_are_those_of_sys():
    assert INFO.page_size == resource.getpagesize() == PAGE
    names = os.listdir("/sys/kernel/mm/hugepages")
    sizes = sorted(int(re.fullmatch(r"hugepages-(\d+)kB", name).group(1)) << 10 for name in names)
    assert INFO.huge_page_sizes == tuple(sizes)


def test_max_map_count_is_proc_s():
    assert INFO.max_map_count == int(Path("/proc/sys/vm/max_map_count").read_text())


def test_copying_and_trust_follow_the_version():
    assert INFO.copy_on_fork_from in ("netlink", "version")
    if INFO.copy_on_fork_from == "version":
        assert INFO.copy_on_fork == (VERSION >= (5, 12))
    if INFO.copy_on_fork_trusted_from == "environment":
        assert os.environ["RDMAFORK_TRUST_COPYING"] == "0" and not INFO.copy_on_fork_trusted
    elif INFO.copy_on_fork_trusted_from == "probe":
        assert INFO.copy_on_fork_from == "netlink" and (5, 12) <= VERSION < (5, 19)
    else:
        assert INFO.copy_on_fork_trusted_from == ("version" if INFO.copy_on_fork else INFO[2])
        assert INFO.copy_on_fork_trusted == (INFO.copy_on_fork and VERSION >= (5, 19))


@fresh
def test_until_the_engine_starts_trust_follows_the_environment():
    os.environ["RDMAFORK_TRUST_COPYING"] = "1"
    found = rdmafork.kernel_info()
    os.environ["RDMAFORK_TRUST_COPYING"] = "0"
    how = "environment" if found.copy_on_fork_trusted else found.copy_on_fork_trusted_from
    expected = found._replace(copy_on_fork_trusted=False, copy_on_fork_trusted_from=how)
    assert rdmafork.kernel_info() == expected
    os.environ["RDMAFORK_TRUST_COPYING"] = "nonsense"
    assert rdmafork.kernel_info() == found
    os.environ["RDMAFORK_TRUST_COPYING"] = "0"
    rdmafork.fork_init()
    del os.environ["RDMAFORK_TRUST_COPYING"]
    assert rdmafork.kernel_info() == expected


def netlink_answer():
    """RDMA_NLDEV_SYS_ATTR_COPY_ON_FORK as the kernel has it, or None without RDMA."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 20) as link:
            link.settimeout(2)
            link.send(struct.pack("=LHHLL", 16, 5 << 10 | 6, 1, 0, 0))
            answer = link.recv(4096)
    except OSError:
        return None
    length, kind = struct.unpack_from("=LH", answer)
    if kind == 2:  # NLMSG_ERROR
        return None
    at, value = 16, False
    while at < length:
        nbytes, attribute = struct.unpack_from("=HH", answer, at)
        if attribute & 0x3FFF == 93:
            value = bool(answer[at + 4])
        at += nbytes + -nbytes % 4
    return value


def test_netlink_is_believed():
    answer = netlink_answer()
    assert (INFO.copy_on_fork_from == "netlink") == (answer is not None)
    if answer is not None:
        assert INFO.copy_on_fork == answer


def test_abilities_follow_the_version():
    if VERSION >= (6, 11):
        assert INFO.procmap_query
    if VERSION < (6, 11):
        assert not INFO.procmap_query


@fresh
def test_memlock_is_asked_each_time():
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert rdmafork.kernel_info().memlock == (soft, hard)
    lower = 64 * 1024 if hard == resource.RLIM_INFINITY else min(hard, 64 * 1024)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (lower, hard))
    assert rdmafork.kernel_info().memlock == (lower, hard)
    proc = re.search(r"Max locked memory +(\S+) +(\S+)", Path("/proc/self/limits").read_text())
    shown = ["unlimited" if value < 0 else str(value) for value in rdmafork.kernel_info().memlock]
    assert shown == list(proc.groups())


@fresh
def test_asking_starts_and_registers_nothing():
    before = rdmafork.kernel_info()
    assert rdmafork.stats().mode is None
    assert rdmafork.stats().madvise_calls == 0
    rdmafork.fork_init("eager")
    assert rdmafork.kernel_info() == before


@fresh
def test_no_descriptor_is_left_open():
    before = os.listdir("/proc/self/fd")
    rdmafork.kernel_info()
    rdmafork.fork_init()
    rdmafork.register_address(0, 0).close()
    assert len(os.listdir("/proc/self/fd")) == len(before)


@fresh
def test_any_order_of_first_calls():
    assert rdmafork.is_fork_initialized() in tuple(rdmafork.ForkStatus)
    assert rdmafork.kernel_info() == INFO._replace(memlock=rdmafork.kernel_info().memlock)


@pytest.mark.parametrize("mode", [None, LAZY, "eager"])
@fresh
def test_is_fork_initialized_reports_the_kernel(mode):
    if mode:
        rdmafork.fork_init(mode)
    expected = (
        rdmafork.ForkStatus.ENABLED
        if mode
        else rdmafork.ForkStatus.UNNEEDED
        if INFO.copy_on_fork
        else rdmafork.ForkStatus.DISABLED
    )
    assert rdmafork.is_fork_initialized() is expected
