"""Killers of the children of a process with registered memory: here no child dies.

Each killer acts in a process that holds a few hundred registrations. The control marks the same
memory as libibverbs does, whole pages and nothing given back: there it kills.
"""

import concurrent.futures
import contextlib
import ctypes
import importlib
import multiprocessing
import os
import pty
import random
import re
import signal
import subprocess
import sys
import warnings
from multiprocessing.shared_memory import SharedMemory
from typing import NamedTuple

import pytest
from conftest import LAZY, SLOWNESS, run, scaled
from memory import MADV_DONTFORK, PAGE, libc, madvise

import rdmafork

np = pytest.importorskip("numpy")

FORK = multiprocessing.get_context("fork")

libc.malloc.restype = libc.popen.restype = ctypes.c_void_p
libc.pclose.argtypes = [ctypes.c_void_p]


# ---- the parent ---------------------------------------------------------------------------


def of_the_heap(nbytes, number):
    """Whose pages are others' too: an array, a bytearray or a block of malloc()."""
    if number % 3 == 0:
        return np.empty(nbytes, "u1")
    if number % 3 == 1:
        return bytearray(nbytes)
    return (ctypes.c_char * nbytes).from_address(libc.malloc(nbytes))


def of_its_own(nbytes, _number):
    return np.frombuffer(rdmafork.Buffer(nbytes), "u1")


MEMORY = {"heap": of_the_heap, "Buffer": of_its_own}


def span(buffer):
    array = np.frombuffer(buffer, "u1")
    return array.ctypes.data, array.nbytes


def as_libibverbs_does(buffer):
    address, nbytes = span(buffer)
    start = address & -PAGE
    madvise(start, address + nbytes + -(address + nbytes) % PAGE - start, MADV_DONTFORK)


def register(buffer):
    """Of malloc()'s memory no other thread takes any here, so no child dies of that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*malloc\\(\\)'s memory", rdmafork.SharedPageWarning)
        try:
            return rdmafork.register(buffer)
        except Warning:
            return None  # said beforehand: this one may take a child's life


class Parent:
    """Holds registered buffers of odd sizes, and knows their bytes."""

    def __init__(self, memory, register, count=300, patience=60 * SLOWNESS):
        self.make = MEMORY[memory]
        self.register = register
        self.patience = patience
        self.buffers = [self.make(1 + i * 1237 % 9001, i) for i in range(count)]
        for i, buffer in enumerate(self.buffers):
            np.frombuffer(buffer, "u1")[:] = i % 256
        self.registrations = [register(buffer) for buffer in self.buffers]

    def replace_one(self, number):
        """As registrations come and go between forks."""
        if self.registrations[number]:
            self.registrations[number].close()
        self.registrations[number] = self.register(self.buffers[number])

    def check(self):
        assert len(self.buffers) == len(self.registrations) == 300
        for i, buffer in enumerate(self.buffers):
            assert (np.frombuffer(buffer, "u1") == i % 256).all(), i
        registered = [r for r in self.registrations if r]
        assert len(registered) > 150
        assert all(r.protected for r in registered)


# ---- work of children ---------------------------------------------------------------------


def use_heap(rounds=20):
    """Blocks of all sizes, taken and given back in no order."""
    order = random.Random(rounds)
    hoard = []
    for _ in range(rounds):
        hoard += [bytearray(order.randrange(1, 20_000)) for _ in range(50)]
        hoard += [np.arange(order.randrange(1, 5000)) for _ in range(50)]
        hoard += [{str(i): [i] for i in range(20)} for _ in range(50)]
        order.shuffle(hoard)
        del hoard[75:]
    return len(hoard)


def work(_number):
    assert use_heap() == 75
    return os.getpid()


def forget(parent):
    while parent.buffers:
        del parent.buffers[-1]
    parent.registrations.clear()
    use_heap(1)


def import_large(_parent):
    names = "asyncio", "email.mime.text", "http.server", "unittest.mock", "xmlrpc.client"
    assert not sys.modules.keys() & set(names)
    for name in names:
        importlib.import_module(name)


def leave(_parent):
    sys.exit()


def use_heap_a_little(_parent):
    use_heap(1)


def fork_again(parent):
    wait(fork(forget, parent))


def register_afresh(parent):
    registration = register(parent.make(50_001, 0))
    wait(fork(use_heap_a_little, parent))
    assert registration is None or registration.protected


def run_true(_parent):
    wait(os.posix_spawn("/bin/true", ["true"], {}))


LIVES = {  # and of a hundred how many lead them, as some take long
    use_heap_a_little: 40,
    forget: 20,
    run_true: 20,
    register_afresh: 10,
    fork_again: 6,
    import_large: 2,
    leave: 2,
}


def fork(life, parent):
    """A child that leads this life and ends well, or by an exception, or is killed."""
    pid = os.fork()
    if not pid:
        life(parent)
        os._exit(0)
    return pid


def check_end(status, life=""):
    code = os.waitstatus_to_exitcode(status)
    assert code >= 0, f"{life} killed by {signal.Signals(-code).name}"
    assert code == 0, life


def wait(pid):
    check_end(os.waitpid(pid, 0)[1])


# ---- the killers --------------------------------------------------------------------------


class Killer(NamedTuple):
    act: object
    symptom: str | None  # where libibverbs' way kills; None: the child has all until it execs
    among: int  # how many registrations that takes, beside its own


KILLERS = {}


def killer(symptom, among=300):
    def add(act):
        KILLERS[act.__name__] = Killer(act, symptom, among)
        return act

    return add


@killer("killed by SIGSEGV")
def forgetting(parent):
    wait(fork(forget, parent))


@killer("killed by SIGSEGV")
def exiting(parent):
    wait(fork(leave, parent))


@killer("killed by SIGSEGV")
def importing(parent):
    wait(fork(import_large, parent))


@killer("TimeoutError")
def pool(parent):
    """multiprocessing.Pool, which replaces workers that die for as long as it is waited for."""
    with FORK.Pool(2) as workers:
        pids = workers.map_async(work, range(20), chunksize=1).get(parent.patience)
    assert len(set(pids)) <= 2, "workers have been replaced"


@killer("BrokenProcessPool")
def executor(parent):
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=FORK) as workers:
        pids = list(workers.map(work, range(20), timeout=parent.patience))
    assert len(set(pids)) <= 2


@killer("killed by signal|exited unexpectedly")
def data_loader(_parent):
    data = pytest.importorskip("torch.utils.data", reason="torch is not installed")
    samples = [np.full(1000, i, "f4") for i in range(64)]
    loader = data.DataLoader(samples, batch_size=8, num_workers=2, multiprocessing_context="fork")
    for _epoch in range(2):
        firsts = [float(batch[0, 0]) for batch in loader]
        assert firsts == [8.0 * i for i in range(8)]


@killer("exitcode=-SIGSEGV", among=0)
def shared_memory(parent):
    def fill(worker):
        np.frombuffer(shared.buf, "u1")[worker::2] = worker + 1

    shared = SharedMemory(create=True, size=100_001)
    try:
        registration = parent.register(shared.buf)
        workers = [FORK.Process(target=fill, args=(worker,)) for worker in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(parent.patience)
            assert worker.exitcode == 0
        assert set(shared.buf[::2]) == {1} and set(shared.buf[1::2]) == {2}
        if registration:
            registration.close()
    finally:
        shared.unlink()


@killer(None)
def subprocess_run(_parent):
    code = "import sys; sys.exit(3)"
    assert subprocess.run([sys.executable, "-Ic", code]).returncode == 3


@killer("SIGSEGV")
def subprocess_with_preexec_fn(_parent):
    subprocess.run(["/bin/true"], check=True, preexec_fn=use_heap)


@killer(None)
def posix_spawn(parent):
    run_true(parent)


@killer("killed by SIGSEGV")
def pty_fork(_parent):
    pid, terminal = pty.fork()
    if not pid:
        print("at work" if use_heap() else "", flush=True)
        os._exit(0)
    said = b""
    with contextlib.suppress(OSError):  # once the child has left its terminal
        while heard := os.read(terminal, 100):
            said += heard
    wait(pid)
    os.close(terminal)
    assert said == b"at work\r\n"


@killer(None)
def system(_parent):
    assert libc.system(b"exit 3") == 3 << 8


@killer(None)
def popen(_parent):
    pipe = libc.popen(b"read word && test $word = here", b"w")
    assert pipe and libc.fputs(b"here\n", ctypes.c_void_p(pipe)) > 0
    assert libc.pclose(pipe) == 0


# ---- the tests ----------------------------------------------------------------------------

SITUATIONS = [
    pytest.param("heap", "lazy", "", marks=LAZY.marks),
    ("heap", "eager", ""),
    ("heap", "auto", "0"),
    ("Buffer", "auto", "0"),
]
situations = pytest.mark.parametrize(("memory", "mode", "trust"), SITUATIONS)


def meet(name, memory, mode):
    rdmafork.fork_init(mode)
    parent = Parent(memory, register)
    KILLERS[name].act(parent)
    parent.check()


@situations
@pytest.mark.parametrize("name", KILLERS)
def test_no_child_is_killed(name, memory, mode, trust):
    run(meet, name, memory, mode, env={"RDMAFORK_TRUST_COPYING": trust})


def meet_unarmed(name):
    killer = KILLERS[name]
    killer.act(Parent("heap", as_libibverbs_does, killer.among, patience=3 * SLOWNESS))


@pytest.mark.parametrize("name", KILLERS)
def test_children_are_killed_where_pages_are_marked_as_by_libibverbs(name):
    symptom = KILLERS[name].symptom
    if symptom is None:
        run(meet_unarmed, name)
        return
    with pytest.raises(Exception) as caught:
        run(meet_unarmed, name)
    assert re.search(symptom, f"{caught.type.__name__}: {caught.value}")


CHILDREN = scaled(10_000 / len(SITUATIONS) / SLOWNESS)


def have_children(memory, mode, seed):
    rdmafork.fork_init(mode)
    parent = Parent(memory, register)
    order = random.Random(seed)
    lives = [life for life, share in LIVES.items() for _ in range(CHILDREN * share // 100)]
    order.shuffle(lives)
    running = {}
    for life in [*lives, None, None, None]:  # so many at a time
        if life:
            running[fork(life, parent)] = life.__name__
            parent.replace_one(order.randrange(len(parent.buffers)))
        if not life or len(running) > 3:
            pid, status = os.wait()
            check_end(status, running.pop(pid))
    parent.check()
    assert not running
    return len(lives)


@situations
def test_ten_thousand_children_live(memory, mode, trust):
    seed = int(os.environ.get("RDMAFORK_TEST_SEED") or int.from_bytes(os.urandom(4), "big"))
    print(f"RDMAFORK_TEST_SEED={seed}")
    lived = run(have_children, memory, mode, seed, env={"RDMAFORK_TRUST_COPYING": trust})
    assert lived > 0.9 * CHILDREN
