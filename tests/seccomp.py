"""Calls that the kernel refuses to a process: by seccomp(2), or there is no /proc."""

import ctypes
import errno
import os
import platform
import struct

import pytest
from memory import PAGE, smaps

import rdmafork

# numbers of system calls
CALLS = {
    "x86_64": {
        "madvise": 28, "ioctl": 16, "process_vm_readv": 310, "mmap": 9,
        "mprotect": 10, "mremap": 25, "io_uring_setup": 425, "dup3": 292, "openat": 257,
        "socket": 41, "uname": 63, "readlink": 89, "clone": 56,
        "memfd_create": 319, "ftruncate": 77, "fcntl": 72,
    },
    "aarch64": {
        "madvise": 233, "ioctl": 29, "process_vm_readv": 270, "mmap": 222,
        "mprotect": 226, "mremap": 216, "io_uring_setup": 425, "dup3": 24, "openat": 56,
        "socket": 198, "uname": 160, "readlink": 78, "clone": 220,
        "memfd_create": 279, "ftruncate": 46, "fcntl": 25,
    },
}  # fmt: skip
DONTFORK, DOFORK, WIPEONFORK, KEEPONFORK = 10, 11, 18, 19
PROCMAP_QUERY = 0xC0686611
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06


def refuse(call, number, *, argument=None, value=None):
    """From here on call() fails with this errno in this process and its children.

    argument, value: only where that argument's lower half has this value.
    """
    program = [(LOAD, 0, 0, 0), (EQUAL, 0, 1 if argument is None else 3, numbers()[call])]
    if argument is not None:
        program += [(LOAD, 0, 0, 16 + 8 * argument), (EQUAL, 0, 1, value)]
    program += [(RETURN, 0, 0, 0x50000 | number), (RETURN, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    assert not libc.prctl(38, 1, 0, 0, 0)
    if libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(header)), 0, 0):
        pytest.skip(f"no seccomp filter: {os.strerror(ctypes.get_errno())}")


def numbers():
    found = CALLS.get(platform.machine())
    if not found:
        pytest.skip("the numbers of system calls of another processor")
    return found


WITHOUT_PROC = ["unshare", "-m", "sh", "-ec", 'mount -t tmpfs none /proc && exec "$@"', "sh"]

REFUSALS = (errno.EPERM, errno.ENOSYS, errno.ENOMEM)


# ---- promises after a refusal ---------------------------------------------------------------


def marks():
    """{address of a page: its flag} of all that a child will not have as it is."""
    found = {}
    for mapping in smaps():
        flag = mapping.flags & {"dc", "wf"}
        for page in range(mapping.start, mapping.end, PAGE) if flag else ():
            found[page] = flag
    return found


def check_claims(before=()):
    """The list is true, by the kernel's word, and no mark is there that is not listed."""
    # First the list: it looks up mappings that are not known yet.
    ranges, marked, listed = rdmafork.protected_ranges(), marks(), set(before)
    shared = [m for m in smaps() if m.permissions[3] == "s"]
    for item in ranges:
        for page in range(item.start, item.end, PAGE):
            if item.protected_by == "mark":
                # Zeros are the kernel's, or mapped in the child: check_fork() reads them.
                assert {"omit": {"dc"}, "wipe": {"dc", "wf"}}[item.on_fork] & marked[page], item
                listed.add(page)
            elif item.protected_by == "shared":
                assert any(m.start <= page < m.end for m in shared), item
    extra = len(set(marked) - listed)
    assert extra * PAGE <= rdmafork.stats().still_marked_bytes, sorted(set(marked) - listed)
