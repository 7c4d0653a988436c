"""A child reaches nothing of its parent's device, and can have its own."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback

import pytest
from conftest import child, fresh

import rdmafork
from vm.rc import ALL, Forked, Ours, eventually, memory, pinned_pages, start

SIZE = 100_001


class Scene:
    """A region that works, and what must stay true of it."""

    def __init__(self, rc, mode="auto"):
        start(mode)
        self.rc, self.ours = rc, Ours(rc)
        self.near = self.ours.register(memory("shared", SIZE))
        self.far = self.ours.register(memory("base", SIZE, 777))
        self.pair = rc.pair(self.ours.context, self.ours.pd)
        self.objects = rc.objects()
        self.check()

    def check(self):
        assert self.rc.objects() == self.objects
        assert self.pair.exchange(self.near, self.far, 1) == (0, 0)
        with self.ours.register(memory("base", SIZE)) as new:
            assert self.pair.exchange(self.near, new, 3) == (0, 0)
        self.ours.device.alloc_pd().close()


def moves_data(rc):
    """A device of this process's own, and what a region of it is good for."""
    ours = Ours(rc)
    near, far = ours.register(memory("base", SIZE)), ours.register(memory("base", SIZE, 777))
    pair = rc.pair(ours.context, ours.pd)
    wrong = pair.exchange(near, far, 5)
    pair.close()
    ours.close()
    return wrong


def device_files():
    """The open files of this process that belong to an RDMA device."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [link for link in links if "uverbs" in link or "infiniband" in link]


def link(fd):
    return os.readlink(f"/proc/self/fd/{fd}")


# ---- descriptors ------------------------------------------------------------------------


@fresh
def test_a_child_has_no_descriptor_of_the_device_when_fork_returns(rc):
    contexts = [rdmafork.Context(rc.device) for _ in range(3)]  # fork_init() is not needed
    fds = [fd for context in contexts for fd in rc.fds(context.address)]
    assert all("/dev/null" != link(fd) for fd in fds) and len(device_files()) >= len(fds)

    def seen():
        return [link(fd) for fd in fds], device_files()

    assert child(seen) == (["/dev/null"] * len(fds), [])
    # By C code too, and in a child's child.
    assert child(lambda: child(seen)) == (["/dev/null"] * len(fds), [])
    assert all("/dev/null" != link(fd) for fd in fds)


@fresh
def test_a_closed_contexts_descriptors_are_anybodys(rc):
    context = rdmafork.Context(rc.device)
    fds = rc.fds(context.address)
    context.close()
    name = os.path.realpath(__file__)
    opened = [os.open(name, os.O_RDONLY) for _ in range(8)]
    assert set(fds) <= set(opened)
    assert child(lambda: {link(fd) for fd in opened}) == {name}


# ---- inherited objects ------------------------------------------------------------------


@fresh
def test_an_inherited_object_refuses_every_use(rc):
    scene = Scene(rc)
    context, pd, region = scene.ours.device, scene.ours.domain, scene.far
    uses = {
        "context.alloc_pd": lambda: context.alloc_pd(),
        "context.address": lambda: context.address,
        "context.with": lambda: context.__enter__(),
        "pd.register": lambda: pd.register(bytearray(10)),
        "pd.address": lambda: pd.address,
        "pd.with": lambda: pd.__enter__(),
        "region.lkey": lambda: region.lkey,
        "region.rkey": lambda: region.rkey,
        "region.handle": lambda: region.handle,
        "region.address": lambda: region.address,
        "region.with": lambda: region.__enter__(),
    }

    def tried():
        answers = {}
        for name, use in uses.items():
            try:
                answers[name] = repr(use())
            except rdmafork.InheritedError:
                answers[name] = "refused"
        states = [(x.inherited, x.closed) for x in (context, pd, region)]
        return answers, states, [repr(x) for x in (context, pd, region)]

    answers, states, texts = child(tried)
    assert answers == dict.fromkeys(uses, "refused")
    assert states == [(True, False)] * 3
    assert all("inherited" in text for text in texts), texts
    assert not any(x.inherited for x in (context, pd, region))
    scene.check()


def ends_by_sys_exit(scene):
    return sys.exit


def ends_after_closing(scene):
    scene.far.close()
    scene.ours.domain.close()
    scene.near.close()
    scene.ours.device.close()
    for x in (scene.far, scene.near, scene.ours.domain, scene.ours.device):
        assert x.closed
        x.close()
    return sys.exit


def ends_after_closing_the_context(scene):
    scene.ours.device.close()
    return sys.exit


def ends_after_del(scene):
    del scene.ours, scene.far, scene.near
    gc.collect()
    return sys.exit


def ends_in_c(scene):
    return ctypes.CDLL(None).exit


def is_killed(scene):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("mode", ["lazy", "eager"])
@fresh
def test_a_childs_end_leaves_the_parents_objects_alone(rc, mode):
    scene = Scene(rc, mode)
    ends = [
        ends_by_sys_exit,
        ends_after_closing,
        ends_after_closing_the_context,
        ends_after_del,
        ends_in_c,
        is_killed,
    ]
    for end in ends:
        pid = os.fork()
        if not pid:
            sys.unraisablehook = lambda *_: os._exit(77)
            try:
                leave = end(scene)
            except BaseException:
                traceback.print_exc()
                os._exit(78)
            leave(0)
        expected = -signal.SIGKILL if end is is_killed else 0
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == expected, end.__name__
        scene.check()


# ---- a child's own ----------------------------------------------------------------------


@fresh
def test_children_and_theirs_open_the_device_afresh(rc):
    scene = Scene(rc)

    def forks_on():
        rdmafork.fork_init()
        ours = Ours(rc)
        near, far = ours.register(memory("base", SIZE)), ours.register(memory("base", SIZE, 777))
        pair = rc.pair(ours.context, ours.pd)
        wrong = [pair.exchange(near, far, 5), child(moves_data, rc), pair.exchange(near, far, 7)]
        refused = child(lambda: (ours.device.inherited, scene.ours.device.inherited))
        pair.close()
        ours.close()
        return wrong, refused

    assert child(forks_on) == ([(0, 0)] * 3, (True, True))
    scene.check()


def work(job):
    rc, number = job
    return number, os.getpid(), moves_data(rc)


@fresh
def test_workers_of_multiprocessing_use_the_device(rc):
    scene = Scene(rc)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        answers = pool.map_async(work, [(rc, i) for i in range(4)], chunksize=1).get(120)
        scene.check()
        pool.close()
        pool.join()
    assert [(number, wrong) for number, _, wrong in answers] == [(i, (0, 0)) for i in range(4)]
    assert os.getpid() not in {pid for _, pid, _ in answers}
    scene.check()


# ---- memory that they share --------------------------------------------------------------


@pytest.mark.parametrize("mode", ["lazy", "eager"])
@fresh
def test_workers_share_a_buffer_with_the_device(rc, mode):
    """Registered once: the device reads a worker's writes, and the other way round."""
    start(mode)
    ours = Ours(rc)
    shared = rdmafork.Buffer(SIZE, shared=True)
    view = memoryview(shared)
    region, near = ours.register(shared), ours.register(memory("base", SIZE))
    pair = rc.pair(ours.context, ours.pd)
    told, ask = os.pipe()
    answer, tell = os.pipe()
    old = os.fork()
    if not old:
        os.close(ask)
        while os.read(told, 1):
            os.write(tell, view[-9:])
        os._exit(0)
    for i in range(3):
        assert child(lambda i=i: view.__setitem__(slice(-9, None), b"worker %2d" % i)) is None
        pair.read(near, region)
        assert near.obj[-9:] == b"worker %2d" % i
        near.obj[-9:] = b"device %2d" % i
        pair.write(near, region)
        assert child(lambda: bytes(memoryview(shared)[-9:])) == b"device %2d" % i
        os.write(ask, b"?")  # one that was there before
        assert os.read(answer, 9) == b"device %2d" % i == view[-9:]
        assert pair.exchange(near, region, i) == (0, 0)

    def with_a_region_of_its_own():
        own = Ours(rc)
        far, mine = own.register(shared), own.register(memory("base", SIZE))
        return rc.pair(own.context, own.pd).exchange(mine, far, 9)

    assert child(with_a_region_of_its_own) == (0, 0)
    assert pair.exchange(near, region, 11) == (0, 0)
    os.close(ask)
    assert os.waitpid(old, 0)[1] == 0


# ---- a parent that is killed ------------------------------------------------------------


def fork_worker(hold):
    worker = os.fork()
    if not worker:
        os.close(hold[1])
        os.read(hold[0], 1)  # until the test closes its end
        os._exit(0)
    return worker


def owned(rc):
    """Objects that pin memory or others. A context alone, of which nothing was made, does not."""
    return {k: v for k, v in rc.objects().items() if k != "ctx"}, pinned_pages()


def parent(rc, queue_pairs, hold):
    """Opens, registers, and forks a worker that outlives it."""
    ours = Ours(rc)
    regions = [ours.register(memory(kind, SIZE, 777), ALL) for kind in ("base", "shared")]
    pair = rc.pair(ours.context, ours.pd) if queue_pairs else None
    worker = fork_worker(hold)
    os.close(hold[1])
    yield worker
    del regions, pair


def outlived(rc, queue_pairs):
    """Objects of a killed parent while its worker lives, and after: (before, then, finally)."""

    def now():
        return rc.objects(), pinned_pages()

    before = now()
    rdmafork.fork_init()
    hold = os.pipe()
    killed = Forked(parent, rc, queue_pairs, hold)
    worker = killed.said
    os.close(hold[0])
    assert rc.objects()["mr"] == before[0]["mr"] + 2
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    seconds = 5 if queue_pairs else 20
    then = eventually(now, before, seconds)
    os.kill(worker, 0)  # it lives
    os.close(hold[1])
    return before, then, eventually(now, before)


@fresh
def test_a_killed_parent_leaves_nothing_though_its_worker_lives(rc):
    before, then, finally_ = outlived(rc, queue_pairs=False)
    assert then == before
    assert finally_ == before


@fresh
def test_a_killed_parents_queues_leave_nothing_though_its_worker_lives(rc):
    """A queue is mapped, and the mapping would keep the device's file open in the worker."""
    before, then, finally_ = outlived(rc, queue_pairs=True)
    assert then == before
    assert finally_ == before


def restless_parent(rc, hold):
    """Forks workers that outlive it while its threads open the device and register."""
    kept, enough, failures = [], threading.Event(), []

    def open_and_register():
        try:
            while not enough.is_set() and len(kept) < 60:
                ours = Ours(rc)
                kept.append((ours, ours.register(memory("base", SIZE, 777))))
        except BaseException as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=open_and_register) for _ in range(2)]
    for thread in threads:
        thread.start()
    workers = []
    while len(workers) < 20 or (len(kept) < 6 and len(workers) < 200):
        workers.append(fork_worker(hold))
        time.sleep(0.001 * (len(workers) * 7 % 40))
    enough.set()
    for thread in threads:
        thread.join()
    os.close(hold[1])
    assert not failures
    yield workers, len(kept)


@fresh
def test_a_fork_at_any_moment_of_opening_gives_a_child_nothing(rc):
    rdmafork.fork_init()
    hold = os.pipe()
    before = owned(rc)
    killed = Forked(restless_parent, rc, hold)
    workers, opened = killed.said
    os.close(hold[0])
    assert opened >= 6 and rc.objects()["mr"] == before[0]["mr"] + opened
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert eventually(lambda: owned(rc), before) == before
    for worker in workers:
        os.kill(worker, 0)  # it lives
    os.close(hold[1])
