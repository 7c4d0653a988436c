"""The kernel's copying at fork costs memory too: under a limit it kills the parent."""

import contextlib
import mmap
import os
import signal
from pathlib import Path

import pytest
from conftest import Died, both_modes, needs_pins, run
from memory import private_map

import rdmafork
from rdmafork import _pins

PINNED = 200 << 20
LIMIT = 300 << 20
# cgroup v1 and v2: where groups are made, and the file that holds the limit.
HIERARCHIES = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)

pytestmark = [
    needs_pins,
    pytest.mark.skipif(
        not rdmafork.kernel_info().copy_on_fork, reason="this kernel does not copy pinned pages"
    ),
]


@pytest.fixture
def limited():
    """A memory cgroup of LIMIT bytes that this process may put its children in."""
    reasons = []
    for folder, limit in HIERARCHIES:
        group = folder / f"rdmafork-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError as error:
            reasons.append(str(error))
            continue
        try:
            try:
                (group / limit).write_text(str(LIMIT))
            except OSError as error:
                reasons.append(str(error))
                continue
            yield group
            return
        finally:
            with contextlib.suppress(OSError):
                group.rmdir()
    pytest.skip(f"no memory cgroup can be made: {'; '.join(reasons)}")


def fork_under_limit(group, mode):
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    memory, _ = private_map(PINNED)
    with _pins.Pins(memory):
        if mode:
            rdmafork.fork_init(mode)
            registration = rdmafork.register(memory)
        pid = os.fork()
        if not pid:
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert memory[: mmap.PAGESIZE] == bytes(mmap.PAGESIZE)
        if mode:
            registration.close()
    return True


def test_without_rdmafork_the_copies_do_not_fit(limited):
    """So that the tests below can fail: fork() is refused, or a process is killed for it."""
    try:
        run(fork_under_limit, str(limited), None)
    except Died as error:
        assert error.returncode == -signal.SIGKILL
    except (OSError, AssertionError):
        pass
    else:
        pytest.fail("200 MiB pinned were copied within 300 MiB")


@both_modes
def test_fork_fits_where_the_copies_would_not(limited, mode):
    assert run(fork_under_limit, str(limited), mode)
