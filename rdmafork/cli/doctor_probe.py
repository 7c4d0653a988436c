"""Doctor's experiments, each in a fresh process: an engine once started stays.

answer = ask("engine")      runs engine() below there: what it returns, or raises OSError
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import signal
import subprocess
import sys
from typing import Any

# The caller's sys.path, as multiprocessing does: modules of the directory do not come first.
_CODE = "import sys; sys.path[:] = sys.argv[2:]; from rdmafork.cli.doctor_probe import main; main()"


class NotAsked(OSError):
    """The process could not be started: nothing is known, and the interpreter is the reason."""


def ask(question: str) -> dict[str, Any]:
    """OSError: what the process met, or how it died; its strerror is fit to be shown."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RDMAFORK_EXEC", "RDMAFORK_REPORT")
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CODE, question, *sys.path],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            check=False,
        )
    except OSError as error:
        text = f"{sys.executable} cannot be started to test it: {error.strerror}"
        raise NotAsked(error.errno, text) from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        how = f"exit status {done.returncode}"
        if done.returncode < 0:
            how = f"killed by {signal.Signals(-done.returncode).name}"
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise OSError(errno.ECHILD, f"the process that tested it died, {how}: {last}") from None
    if "error" in answer:
        raise OSError(*answer["error"])
    result: dict[str, Any] = answer["result"]
    return result


def main() -> None:
    try:
        result = {"engine": engine, "libibverbs": libibverbs}[sys.argv[1]]()
        answer: dict[str, Any] = {"result": result}
    except OSError as error:
        answer = {"error": [error.errno, error.strerror or str(error)]}
    print(json.dumps(answer))


def engine() -> dict[str, Any]:
    """Does registering keep a page from a child here?"""
    import warnings

    import rdmafork

    warnings.simplefilter("ignore")  # lazy where copying is not trusted: another row says so
    rdmafork.fork_init()
    memory = _private_page()
    with rdmafork.register(memory):
        absent = _absent_from_a_child(memory)
        (found,) = rdmafork.protected_ranges()
    return {"mode": rdmafork.stats().mode, "absent": absent, "protected_by": found.protected_by}


def libibverbs() -> dict[str, Any]:
    """What does its ibv_fork_init() do here?"""
    from rdmafork import _clocks

    # First: this says why where it cannot be loaded.
    library = ctypes.CDLL("libibverbs.so.1", use_errno=True)
    peer = _clocks.Libibverbs()
    before = peer.status
    code = library.ibv_fork_init()
    memory = _private_page()
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    library.ibv_dontfork_range(address, ctypes.c_size_t(len(memory)))
    return {
        "path": peer.path,
        "version": peer.version,
        "before": before,
        "error": code or None,
        "after": peer.status,
        "absent": _absent_from_a_child(memory),
    }


def _private_page() -> mmap.mmap:
    memory = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[0] = 1
    return memory


def _absent_from_a_child(memory: mmap.mmap) -> bool:
    """The kernel is asked to read it there: it answers EFAULT where a load would be SIGSEGV."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, memory)
        except OSError as error:
            os._exit(1 if error.errno == errno.EFAULT else 2)
        os._exit(0)
    os.close(writing)
    os.close(reading)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
