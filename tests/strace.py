"""The system calls of a piece of Python, as strace sees them."""

import re
import shutil
import tempfile
import textwrap
from pathlib import Path

import pytest
from conftest import run

# mark(name) begins a section of the trace; what is made ready before it is not counted.
PROLOGUE = """
    import ctypes, gc, mmap, os, sys
    import rdmafork
    PAGE = mmap.PAGESIZE
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    def private(npages):
        memory = mmap.mmap(-1, npages * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory[:] = b"m" * len(memory)
        return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))
    def mark(name, access=os.access):
        access(name, 0)
    mark("/mark/none"), mark("/mark/end")
    register, register_address = rdmafork.register, rdmafork.register_address
"""

# Calls that the kernel or the C library makes of itself, at any time; Python's after a fork, since
# 3.12: it counts threads; and the second line of a call, where another process's came between.
NOISE = re.compile(
    r"^(rt_sigreturn|---|\+\+\+|restart_syscall|clock_nanosleep|sched_yield|<\.\.\. |"
    r'openat\(AT_FDCWD, "/proc/self/stat",)'
)


def traced(source, **options):
    """Run source in a fresh interpreter: the system calls of each of its sections."""
    strace = shutil.which("strace")
    if not strace:
        pytest.skip("no strace")
    source = textwrap.dedent(PROLOGUE) + textwrap.dedent(source) + "\nmark('/mark/end')\n"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        run(source, prefix=[strace, "-f", "-qq", "-s", "200", "-o", str(log)], **options)
        lines = log.read_text().splitlines()
    sections, process = {}, None
    for line in lines:
        pid, call = line.split(None, 1)
        found = re.match(r'access\("/mark/(\w+)"', call)
        if found:
            process = pid
            section = sections.setdefault(found[1], [])
        elif pid == process and not NOISE.match(call):
            section.append(call)
    sections.pop("none"), sections.pop("end")
    return sections


def names(section):
    return [call.partition("(")[0] for call in section]
