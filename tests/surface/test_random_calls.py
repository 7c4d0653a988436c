"""The Python surface as a state machine: any order of calls, and each child's memory.

Hypothesis chooses registrations of all wishes, held in several ways or not, of memory that is
mapped, unmapped and moved meanwhile; Buffers and views of them; how each ends; threads, forks,
and forks of several threads at once. model.py says what a child finds, which it tells itself.
RDMAFORK_TEST_EXAMPLES=n sets how many runs each of the three variants makes.
"""

import ctypes
import gc
import os
import threading

import pytest
from conftest import child, fork_once, in_threads, modes_and_trust, run, scaled
from memory import MAP_FIXED_NOREPLACE, PAGE, Owner, map_at, read, remap, smaps, unmap
from model import ABSENT, PRESENT, Model

import rdmafork

hypothesis = pytest.importorskip("hypothesis")
stateful = pytest.importorskip("hypothesis.stateful")
st = hypothesis.strategies

EXAMPLES = int(os.environ.get("RDMAFORK_TEST_EXAMPLES") or scaled(12))
ARENA = 0x18_0000_0000  # low, where the kernel puts nothing of its own
PAGES = 16
END = ARENA + PAGES * PAGE

places = st.integers(0, PAGES - 1)
counts = st.integers(1, 6)
wishes = st.sampled_from(["omit", "omit", "wipe", "keep"])
picks = st.integers(0, 999)


SETTINGS = hypothesis.settings(
    max_examples=EXAMPLES,
    stateful_step_count=30,
    deadline=None,
    database=None,
    derandomize="RDMAFORK_TEST_EXAMPLES" not in os.environ,
    suppress_health_check=list(hypothesis.HealthCheck),
)


def arena():
    """address: VmFlags, of accessible mappings there."""
    found = {}
    for mapping in smaps():
        if ARENA <= mapping.start < END and mapping.permissions != "---p":
            found.update(dict.fromkeys(range(mapping.start, mapping.end, PAGE), mapping.flags))
    return found


def refused(call, *errors):
    try:
        call()
    except errors:
        return
    raise AssertionError(f"{call} was not refused")


class Machine(stateful.RuleBasedStateMachine):
    lazy = whole = False

    def __init__(self):
        super().__init__()
        unmap(ARENA, END - ARENA)
        self.model = Model(self.lazy, self.whole)
        self.tags = {}  # address: the byte its page is full of
        self.tag = 0
        self.keys = 0
        self.live = {}  # key: registration
        self.buffers = []  # (Buffer, its byte, views, address)
        self.closed = []
        self.map(0, PAGES, False)

    # ---- memory ----

    def span(self, place, count):
        return ARENA + place * PAGE, min(ARENA + (place + count) * PAGE, END)

    def is_held(self, start, end):
        return any(r.held and r.start < end and start < r.end for r in self.model.all())

    @stateful.rule(place=places, count=counts, shared=st.booleans())
    def map(self, place, count, shared):
        start, end = self.span(place, count)
        if self.is_held(start, end):
            return
        map_at(start, end - start, shared=shared)
        self.model.map(start, end - start, shared)
        self.tag = self.tag % 255 + 1
        ctypes.memset(start, self.tag, end - start)
        self.tags.update(dict.fromkeys(range(start, end, PAGE), self.tag))

    @stateful.rule(place=places, count=counts)
    def unmap(self, place, count):
        start, end = self.span(place, count)
        if not self.is_held(start, end):
            unmap(start, end - start)
            self.model.unmap(start, end - start)

    @stateful.rule(place=places, to=places)
    def move(self, place, to):
        start, to = ARENA + place * PAGE, ARENA + to * PAGE
        held = self.is_held(start, start + PAGE) or self.is_held(to, to + PAGE)
        if start == to or held or start not in self.model.pages:
            return
        remap(start, PAGE, to)
        self.model.move(start, to)
        self.tags[to] = self.tags.pop(start)

    # ---- registrations ----

    def holding(self, how, start, nbytes, on_fork):
        if how == "nobody":
            return rdmafork.register_address(start, nbytes, on_fork=on_fork)
        if how == "owner":
            return rdmafork.register_address(start, nbytes, on_fork=on_fork, owner=Owner())
        memory = (ctypes.c_char * nbytes).from_address(start)
        if how == "view":
            return rdmafork.register(memoryview(memory), on_fork=on_fork)
        return rdmafork.register(memory, on_fork=on_fork)

    @stateful.rule(
        place=places,
        count=counts,
        cuts=st.tuples(*[st.sampled_from([0, 0, 0, 1, 100, PAGE - 1])] * 2),
        how=st.sampled_from(["nobody", "owner", "ctypes", "view"]),
        on_fork=wishes,
    )
    def register(self, place, count, cuts, how, on_fork):
        start, end = self.span(place, count)
        start, end = start + cuts[0], end - cuts[1]
        if start >= end:
            return
        held = how != "nobody"
        if held and not self.model.is_mapped(start & -PAGE, end + -end % PAGE):
            return
        self.keys += 1
        expected = self.model.register(self.keys, start, end, held, on_fork)
        if not expected:
            refused(lambda: self.holding(how, start, end - start, on_fork), OSError)
            return
        registration = self.holding(how, start, end - start, on_fork)
        assert (registration.address, registration.nbytes) == (start, end - start)
        assert registration.protected and registration.on_fork == on_fork
        assert not registration.closed and not registration.inherited
        self.live[self.keys] = registration

    @stateful.precondition(lambda self: self.live)
    @stateful.rule(pick=picks, how=st.sampled_from(["close", "with", "raise", "drop", "cycle"]))
    def close(self, pick, how):
        key = sorted(self.live)[pick % len(self.live)]
        registration = self.live.pop(key)
        self.model.release(key)
        if how == "close":
            registration.close()
        elif how == "with":
            with registration:
                assert registration.protected
        elif how == "raise":
            with pytest.raises(ZeroDivisionError), registration:
                _ = 1 / 0
        elif how == "cycle":
            cycle = [registration]
            cycle.append(cycle)
            del cycle
        if how in ("close", "with", "raise"):
            self.closed.append(registration)
        del registration
        gc.collect()

    @stateful.precondition(lambda self: self.closed)
    @stateful.rule(pick=picks)
    def close_again(self, pick):
        registration = self.closed[pick % len(self.closed)]
        assert registration.closed
        refused(lambda: registration.protected, ValueError)
        registration.close()
        assert "closed" in repr(registration)

    # ---- Buffers ----

    @stateful.precondition(lambda self: len(self.buffers) < 4)
    @stateful.rule(nbytes=st.sampled_from([1, PAGE - 1, PAGE, 3 * PAGE + 7]), on_fork=wishes)
    def make_buffer(self, nbytes, on_fork):
        if on_fork == "keep" and self.whole:
            refused(lambda: rdmafork.Buffer(nbytes, on_fork=on_fork), OSError)
            return
        buffer = rdmafork.Buffer(nbytes, on_fork=on_fork)
        assert bytes(buffer) == bytes(nbytes)
        self.tag = self.tag % 255 + 1
        with memoryview(buffer) as view:
            view[:] = bytes([self.tag]) * nbytes
        self.buffers.append((buffer, self.tag, [], buffer.address))

    @stateful.precondition(lambda self: self.buffers)
    @stateful.rule(pick=picks)
    def export(self, pick):
        buffer, _, views, _ = self.buffers[pick % len(self.buffers)]
        views.append(memoryview(buffer))

    @stateful.precondition(lambda self: self.buffers)
    @stateful.rule(pick=picks)
    def close_buffer(self, pick):
        buffer, tag, views, _ = self.buffers[pick % len(self.buffers)]
        if views:
            refused(buffer.close, BufferError)
            assert not buffer.closed and views[-1][-1] == tag
            views.pop().release()
            return
        buffer.close()
        self.closed.append(buffer)
        del self.buffers[pick % len(self.buffers)]
        refused(lambda: memoryview(buffer), ValueError, BufferError)

    # ---- threads and forks ----

    @stateful.rule(forks=st.integers(1, 3))
    def fork_from_threads(self, forks):
        """While others register and close."""
        stop = threading.Event()

        def work():
            while not stop.is_set():
                with rdmafork.Buffer(PAGE), rdmafork.Buffer(2 * PAGE, on_fork="wipe"):
                    pass

        workers = [threading.Thread(target=work) for _ in range(2)]
        for worker in workers:
            worker.start()
        try:
            in_threads([fork_once] * forks)
        finally:
            stop.set()
            for worker in workers:
                worker.join()
        self.model.fork()

    @stateful.rule(generations=st.integers(1, 2))
    def fork(self, generations):
        self.model.fork()
        spans = [(address, buffer.nbytes) for buffer, _, _, address in self.buffers]
        found, buffers, grandchild = child(self.be_a_child, generations, spans)
        self.check_marks(forked=True)
        for address in self.model.pages:
            sure, expected = self.model.inherited(address, self.tags[address])
            assert not sure or found.get(address) == expected, (
                f"{address:x}: a child finds {(found.get(address) or b'none')[:8]}, "
                f"not {(expected or b'none')[:8]}"
            )
        for (buffer, tag, *_), content in zip(self.buffers, buffers, strict=True):
            kept = {"omit": None, "wipe": bytes(len(buffer)), "keep": bytes([tag]) * len(buffer)}
            assert content == kept[buffer.on_fork], buffer
            assert bytes(buffer) == bytes([tag]) * len(buffer)
        assert grandchild in (None, found)

    def be_a_child(self, generations, spans):
        for registration in [*self.live.values(), *[buffer for buffer, *_ in self.buffers]]:
            assert registration.inherited
            refused(lambda one=registration: one.protected, rdmafork.InheritedError)
            refused(lambda one=registration: memoryview(one), TypeError, rdmafork.InheritedError)
        assert rdmafork.protected_ranges() == [] and rdmafork.stats().registrations == 0
        mapped = arena()
        found = {address: read(address, PAGE) for address in mapped}
        ours = {m.start: m.end for m in smaps() if m.permissions != "---p"}
        buffers = [
            read(address, nbytes)
            if any(start <= address < end for start, end in ours.items())
            else None
            for address, nbytes in spans
        ]
        grandchild = None
        if generations > 1:
            with rdmafork.Buffer(PAGE) as fresh:
                assert len(fresh) == PAGE and child(lambda: fresh.inherited)
            grandchild = child(lambda: {address: read(address, PAGE) for address in arena()})
        for registration in self.live.values():
            registration.close()
        gc.collect()
        return found, buffers, grandchild

    # ---- checking ----

    def check_marks(self, forked):
        flags = arena()
        assert flags.keys() == self.model.pages.keys()
        for address in self.model.pages:
            marks = {"dc", "wf"} & flags[address]
            verdict = self.model.verdict(address, forked)
            allowed = self.model.allowed_marks(address, forked)
            if verdict == PRESENT:
                assert not marks, f"{address:x} is to bear no mark, and has {marks}"
            elif verdict == ABSENT:
                assert "".join(sorted(marks)) in allowed, (
                    f"{address:x} is to bear one of {allowed}, and has {marks}"
                )

    @stateful.invariant()
    def marks_are_right(self):
        self.check_marks(forked=False)
        assert rdmafork.stats().registrations == len(self.live) + len(self.buffers)

    def teardown(self):
        for _, _, views, _ in self.buffers:
            for view in views:
                view.release()
        for registration in [*self.live.values(), *[buffer for buffer, *_ in self.buffers]]:
            registration.close()
        fork_once()
        assert rdmafork.protected_ranges() == []
        stats = rdmafork.stats()
        assert stats[1:6] == (0, 0, 0, 0, 0) and stats.still_marked_bytes == 0, stats


def play(mode):
    rdmafork.fork_init()
    assert rdmafork.stats().mode == mode
    Machine.lazy = mode == "lazy"
    Machine.whole = not rdmafork.kernel_info().copy_on_fork_trusted
    # Not another's, or the kernel is too old to say.
    assert map_at(ARENA, END - ARENA, flags=MAP_FIXED_NOREPLACE, fixed=False) == ARENA
    stateful.run_state_machine_as_test(Machine, settings=SETTINGS)


@modes_and_trust
def test_any_order_of_calls(mode, trust):
    run(play, mode, env={"RDMAFORK_MODE": mode, "RDMAFORK_TRUST_COPYING": trust})
