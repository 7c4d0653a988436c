"""Many registrations, many threads, many forks: not a byte wrong, and nothing left over."""

import contextlib
import ctypes
import gc
import os
import random
import sys
import threading

import pytest
from conftest import fresh
from memory import PAGE

import rdmafork
from vm.rc import Ours, State, Window, job_of, memory, span, start, write_over

SIZE = 10_001  # of a window: three pages or four, none of them alone
COUNTS = {"base": 60, "thp": 60, "hugetlb": 40, "shared": 40}


class Storm:
    """200 registrations in four arenas. Each has a window of its own and reaches into others'."""

    def __init__(self, rc, mode, seed):
        start(mode)
        self.rc, self.ours, self.random = rc, Ours(rc), random.Random(seed)
        self.arenas = {k: memory(k, n * SIZE + 2 * PAGE, 777) for k, n in COUNTS.items()}
        self.windows, self.regions = [], []
        for kind, arena in self.arenas.items():
            for i in range(COUNTS[kind]):
                self.add(arena, PAGE + i * SIZE)
        self.random.shuffle(self.windows)
        self.versions = dict.fromkeys(self.windows, 0)
        self.heap = []
        if rdmafork.kernel_info().copy_on_fork_trusted:
            self.register_heap_blocks()
        for window in self.windows:
            self.fill(window)

    def add(self, arena, at):
        first = max(0, at - self.random.randrange(3 * PAGE))
        end = min(len(arena), at + SIZE + self.random.randrange(3 * PAGE))
        region = self.ours.register(arena[first:end])
        self.regions.append(region)
        self.windows.append(
            Window(span(arena)[0] + at, SIZE, region.lkey, region.rkey)
        )  # fmt: skip

    def register_heap_blocks(self):
        """Parts of blocks of malloc's, whose neighbours are everybody's.

        None fills a page: what a child frees it may get again.
        """
        for i in range(20):
            block = bytearray(b"%c" % i * (3000 + 100 * i))
            self.heap.append((block, self.ours.register(memoryview(block)[500:3500])))

    def fill(self, window):
        self.rc.lib.rc_fill(window.address, job_of(SIZE), self.versions[window])

    def wrong(self):
        """How many bytes differ from the last write there."""
        job = job_of(SIZE)
        return [
            (hex(window.address), wrong)
            for window, version in self.versions.items()
            if (wrong := self.rc.lib.rc_wrong(window.address, job, version))
        ]

    def traffic(self, mine, enough, failures):
        """One thread: the device reads and writes windows of its own until it is enough."""
        try:
            rng = random.Random(mine[0].address)
            pair = self.rc.pair(self.ours.context, self.ours.pd)
            near = self.ours.register(memory("shared", SIZE))
            rounds = 0
            while not enough.is_set() or rounds < 5:
                window = rng.choice(mine)
                wrong = pair.exchange(near, window, self.versions[window] + 1)
                self.versions[window] += 2
                rounds += 1
                if wrong != (0, 0):
                    failures.append((hex(window.address), wrong))
            pair.close()
            near.close()
        except BaseException as error:
            failures.append(repr(error))

    def spans(self):
        return [span(a) for kind, a in self.arenas.items() if kind != "shared"]


def begin(function, *args):
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def child_of_a_storm(storm):
    """Write over all that is this child's own, let go of everything, end as C programs do."""
    next(write_over(*storm.spans()))
    for block, _ in storm.heap:
        block[:] = b"\xee" * len(block)
    storm.heap.clear()
    storm.regions.clear()
    storm.ours = None
    gc.collect()
    block = [bytearray(n) for n in range(1, 100_000, 997)]  # malloc works
    del block


def forks(storm, times, failures):
    try:
        for _ in range(times):
            pid = os.fork()
            if not pid:
                try:
                    child_of_a_storm(storm)
                except BaseException as error:
                    os.write(2, f"in the child: {error!r}\n".encode())
                    os._exit(1)
                ctypes.CDLL(None).exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if status:
                failures.append(f"a child ended by {status}")
    except BaseException as error:
        failures.append(repr(error))


@pytest.mark.parametrize("mode", ["lazy", "eager"])
@fresh
def test_a_storm_of_forks_spoils_not_one_byte(rc, huge_pages, mode):
    storm = Storm(rc, mode, seed=1)
    assert len(storm.regions) == 200
    assert storm.wrong() == []
    enough, failures = threading.Event(), []
    moving = [
        threading.Thread(
            target=storm.traffic, args=(storm.windows[i::4], enough, failures), daemon=True
        )
        for i in range(2)  # half of the windows are left alone
    ]
    forking = [
        threading.Thread(target=forks, args=(storm, 10, failures), daemon=True) for _ in range(2)
    ]
    for thread in moving + forking:
        thread.start()
    for _ in range(4):  # and this thread, whose children end by sys.exit()
        pid = os.fork()
        if not pid:
            child_of_a_storm(storm)
            sys.exit()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for thread in forking:
        thread.join()
    enough.set()
    for thread in moving:
        thread.join()
    assert failures == []
    assert storm.wrong() == []
    assert all(block == b"%c" % i * len(block) for i, (block, _) in enumerate(storm.heap))

    # Everything still works: every region, the domain, the context.
    pair = rc.pair(storm.ours.context, storm.ours.pd)
    near = storm.ours.register(memory("shared", SIZE))
    for window in storm.windows:
        assert pair.exchange(near, window, 10**6) == (0, 0)
    pair.close()
    storm.ours.device.alloc_pd().close()
    storm.regions.clear()
    storm.heap.clear()
    del near
    assert rdmafork.protected_ranges() == []


@pytest.mark.parametrize("mode", ["lazy", "eager"])
@fresh
def test_threads_register_while_another_closes_their_domain_and_context(rc, mode):
    start(mode)
    buffers = [memory("base", 3 * PAGE, 777) for _ in range(8)]
    before, failures, made = State.now(rc), [], []

    def work(ours, buffer, ready):
        count = 0
        try:
            while True:
                region = ours.register(buffer)
                count += 1
                if count == 3:
                    ready.wait()
                if count % 2:
                    region.close()
        except ValueError:
            made.append(count)
        except BaseException as error:
            failures.append(repr(error))
            ready.abort()

    for _ in range(6):
        ours, ready = Ours(rc), threading.Barrier(9)
        threads = [
            threading.Thread(target=work, args=(ours, b, ready), daemon=True) for b in buffers
        ]
        for thread in threads:
            thread.start()
        with contextlib.suppress(threading.BrokenBarrierError):
            ready.wait(60)
        ours.domain.close()
        ours.device.close()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert failures == []
        assert State.now(rc) == before
    assert len(made) == 48 and min(made) >= 3
