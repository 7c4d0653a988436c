"""Any number of threads, with or without the GIL, down to the interpreter's end."""

import gc
import itertools
import random
import subprocess
import sys

from conftest import TIMEOUT, both_modes, child, fork_once, fresh, in_threads
from memory import PAGE, private_map, smaps, vm_flags

import rdmafork


@both_modes
@fresh
def test_threads_that_register_close_list_and_fork(mode):
    """On memory all of them share; afterwards every page is as it was."""
    sys.setswitchinterval(1e-5)
    rdmafork.fork_init(mode)
    npages = 64
    memory, address = private_map(npages * PAGE)
    memory[:] = bytes(range(256)) * (len(memory) // 256)

    def registers(seed):
        chance = random.Random(seed)
        live = []
        for _ in range(400):
            if len(live) < 6 and chance.random() < 0.6:
                start = chance.randrange(len(memory))
                view = memoryview(memory)[start : start + chance.randrange(10 * PAGE)]
                live.append((rdmafork.register(view), start, len(view)))
            elif live:
                registration, start, nbytes = live.pop(chance.randrange(len(live)))
                assert (registration.address, registration.nbytes) == (address + start, nbytes)
                registration.close()
        for registration, _, _ in live:
            registration.close()

    def lists():
        for _ in range(40):
            ranges = rdmafork.protected_ranges()
            assert all(a.start < a.end for a in ranges)
            assert all(a.end <= b.start for a, b in itertools.pairwise(ranges))
            numbers = rdmafork.stats()
            assert numbers.marked_bytes <= len(memory) and numbers.still_marked_bytes == 0

    def forks():
        for _ in range(30):
            fork_once()

    in_threads([*[lambda s=s: registers(s) for s in range(6)], lists, forks, forks])
    numbers = rdmafork.stats()
    assert numbers.registrations == numbers.pending == numbers.ranges == numbers.marked_bytes == 0
    assert numbers.forks == 60
    assert "dc" not in vm_flags(address)
    assert child(lambda: bytes(memory)) == bytes(range(256)) * (len(memory) // 256)


@both_modes
@fresh
def test_one_registration_closed_by_all_threads_at_once(mode):
    sys.setswitchinterval(1e-6)
    rdmafork.fork_init(mode)
    for _ in range(60):
        memory = bytearray(1 << 16)
        references = sys.getrefcount(memory)
        registration = rdmafork.register(memory)
        if _ % 3 == 0:
            fork_once()
        in_threads([registration.close] * 8)
        assert registration.closed
        assert rdmafork.stats().registrations == 0
        assert sys.getrefcount(memory) == references
        memory.extend(b"x")  # given back once, and only once


def _first_registration_of_many():
    sys.setswitchinterval(1e-6)
    done = []
    in_threads([lambda: done.append(rdmafork.register(bytearray(PAGE)))] * 16)
    assert len(done) == 16 and all(registration.protected for registration in done)


def test_the_first_registrations_of_many_threads_read_the_environment(run):
    run(_first_registration_of_many, env={"RDMAV_FORK_SAFE": "1"})


@both_modes
@fresh
def test_collected_in_another_thread(mode):
    rdmafork.fork_init(mode)

    def make():
        for _ in range(200):
            cycle = [rdmafork.register(bytearray(1 << 14))]
            cycle.append(cycle)

    def collect():
        for _ in range(50):
            gc.collect()

    in_threads([make, make, make, collect, collect])
    gc.collect()
    assert rdmafork.stats().registrations == 0
    assert not [
        m for m in smaps() if "dc" in m.flags and "dd" not in m.flags and "io" not in m.flags
    ]


# ---- the interpreter's end --------------------------------------------------------------------

DAEMONS = """
import ctypes, faulthandler, os, sys, threading, time
import rdmafork
faulthandler.dump_traceback_later(20, exit=True)
sys.setswitchinterval(1e-5)
rdmafork.fork_init(sys.argv[1])
# No bytearray: without the GIL Python 3.13 loses count of its exports.
memory = (ctypes.c_char * (1 << 18))()
kept = [rdmafork.register(memory) for _ in range(10)]
started = threading.Barrier(7)

def busy():
    started.wait()
    while True:
        with rdmafork.register(memory), rdmafork.register(memoryview(memory)[5000:50000]):
            rdmafork.stats()

def listing():
    started.wait()
    while True:
        rdmafork.protected_ranges()

def forking():
    started.wait()
    while True:
        pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)

for function in (busy, busy, busy, busy, listing, forking):
    threading.Thread(target=function, daemon=True).start()
started.wait()
time.sleep(0.05)
sys.exit(7)
"""


@both_modes
def test_daemon_threads_at_the_interpreter_s_end(mode):
    for _ in range(8):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", DAEMONS, mode],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert (done.returncode, done.stderr) == (7, "")


@both_modes
@fresh
def test_a_thread_that_ends_leaves_its_registrations_alive(mode):
    rdmafork.fork_init(mode)
    kept = []
    in_threads([lambda: kept.append(rdmafork.register(bytes(3 * PAGE)))] * 3)
    fork_once()
    assert all(it.protected and it.nbytes == 3 * PAGE for it in kept)
    in_threads([it.close for it in kept])
    assert rdmafork.stats().registrations == 0
