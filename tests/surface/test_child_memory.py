"""For every byte near a registration: does a child have it, read zeros, or lack it?

Hypothesis lays out memory of all kinds and registers parts of it. The model knows the rules, and
nothing of how they are kept, and says of every byte what a child must find. The child looks without
touching: it has write(2) read each page.

RDMAFORK_TEST_EXAMPLES sets how many layouts each variant tries.
"""

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import tempfile
import warnings
from collections import Counter
from typing import NamedTuple

import pytest
from conftest import SLOWNESS, child, modes_and_trust, run, scaled
from memory import HUGE, MAP_FIXED, PAGE, libc, madvise, map_at, unmap, unmarks_huge_pages, write

import rdmafork

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

libc.malloc.restype = ctypes.c_void_p

EXAMPLES = int(os.environ.get("RDMAFORK_TEST_EXAMPLES") or max(30, scaled(100) / SLOWNESS))

# ---- the model ------------------------------------------------------------------------------

ABSENT, PRESENT, ZERO = "absent", "present", "zero"
# On a page that registrations of different policies fill a child finds the first of these.
FATES = {"omit": ABSENT, "wipe": ZERO}


class Piece(NamedTuple):
    """Memory of one kind; beside memory of the heap lies others'."""

    start: int
    end: int
    kind: str

    def pages(self):
        nbytes = HUGE if self.kind == "hugetlb" else PAGE
        return [Span(at, at + nbytes) for at in range(self.start & -nbytes, self.end, nbytes)]


class Span(NamedTuple):
    start: int
    end: int

    def touches(self, other):
        return self.within(other).start < self.within(other).end

    def fills(self, other):
        return self.start <= other.start and other.end <= self.end

    def within(self, other):
        return Span(max(self.start, other.start), min(self.end, other.end))


class Registered(NamedTuple):
    span: Span
    on_fork: str


class Model:
    """A child finds a copy of each page, unless one registration fills the page."""

    def __init__(self, pieces, trusted):
        self.pieces = pieces
        self.trusted = trusted
        self.registered = []

    def refusal(self, span, on_fork):
        """The errno with which a registration is refused, or None."""
        private = any(span.touches(p) and p.kind != "shared" for p in self.pieces)
        return errno.ENOTSUP if on_fork == "keep" and private and not self.trusted else None

    def fates(self):
        """[(start, end, what a child finds there)], all bytes of all pieces."""
        for piece in self.pieces:
            for page in piece.pages():
                fate = self.of_page(page, piece)
                yield max(page.start, piece.start), min(page.end, piece.end), fate

    def of_page(self, page, piece):
        if piece.kind == "shared":
            return PRESENT
        wishes = {r.on_fork for r in self.registered if r.span.fills(page)}
        return next((fate for wish, fate in FATES.items() if wish in wishes), PRESENT)


def merged(fates):
    """The same in fewer parts."""
    result = []
    for start, end, fate in sorted(fates, key=lambda part: part[0]):
        if start >= end:
            continue
        if result and result[-1][1] == start and result[-1][2] == fate:
            start = result.pop()[0]
        result.append((start, end, fate))
    return result


# ---- the memory -----------------------------------------------------------------------------

PERIOD = 251
PATTERN = bytes(1 + i for i in range(PERIOD)) * (HUGE // PERIOD + 2)
MADV_HUGEPAGE = 14


def pattern(start, end):
    """The byte written there: never zero, and different at places near each other."""
    phase = start % PERIOD
    return PATTERN[phase : phase + end - start]


def fill(piece):
    for start in range(piece.start, piece.end, HUGE):
        end = min(piece.end, start + HUGE)
        write(start, pattern(start, end))


def make_file(piece):
    """A private mapping of a file; every other page is the file's still."""
    flags = mmap.MAP_PRIVATE | MAP_FIXED
    with tempfile.TemporaryFile() as file:
        file.write(pattern(piece.start, piece.end))
        file.flush()
        nbytes = piece.end - piece.start
        assert libc.mmap(piece.start, nbytes, 3, flags, file.fileno(), 0) == piece.start
    for page in piece.pages()[::2]:
        write(page.start, pattern(*page))


def make(piece):
    if piece.kind == "file":
        return make_file(piece)
    if piece.kind != "heap":
        kinds = {"shared": piece.kind == "shared", "huge": piece.kind == "hugetlb"}
        map_at(piece.start, piece.end - piece.start, **kinds)
    if piece.kind == "transparent":
        madvise(piece.start, piece.end - piece.start, MADV_HUGEPAGE)
    return fill(piece)


def unmake(piece):
    if piece.kind != "heap":
        unmap(piece.start, piece.end - piece.start)


def look(parts):
    """This process's findings in each part."""
    copy = os.memfd_create("copy")

    def content(start, end):
        """None where there is nothing to be read."""
        try:
            os.pwrite(copy, (ctypes.c_char * (end - start)).from_address(start), 0)
        except OSError as error:
            assert error.errno == errno.EFAULT
            return None
        return os.pread(copy, end - start, 0)

    def state(start, end):
        found = content(start, end)
        if found is None:
            return ABSENT
        if found == pattern(start, end):
            return PRESENT
        return ZERO if found == bytes(end - start) else f"spoiled at 0x{start:x}"

    def states(start, end):
        bounds = [start, *range(start - start % PAGE + PAGE, end, PAGE), end]
        return {state(*bounds) for bounds in itertools.pairwise(bounds)}

    try:
        return [states(start, end) for start, end, _ in parts]
    finally:
        os.close(copy)


def look_twice(parts):
    """The findings in a child, and its own child's are the same."""
    found = look(parts)
    assert child(look, parts) == found
    return found


# ---- layouts --------------------------------------------------------------------------------

# Low, where the kernel puts nothing of its own. Small pieces end here, huge ones begin here.
MIDDLE = 0x20_0000_0000 + HUGE

small = st.tuples(
    st.sampled_from(["anonymous", "anonymous", "file", "shared", "gap"]), st.integers(1, 5)
)


@st.composite
def layouts(draw, huge, heap):
    """Pieces side by side, with gaps: small ones, huge ones, small ones; and one of the heap."""
    before, after = draw(st.lists(small, max_size=3)), draw(st.lists(small, max_size=3))
    kinds = ["transparent", "gap", *(["hugetlb"] if huge else [])]
    large = [(kind, HUGE // PAGE) for kind in draw(st.lists(st.sampled_from(kinds), max_size=2))]
    at = MIDDLE - PAGE * sum(npages for _, npages in before)
    pieces = [Piece(*heap, "heap")] if heap and draw(st.booleans()) else []
    for kind, npages in [*before, *large, *after]:
        if kind != "gap":
            pieces.append(Piece(at, at + npages * PAGE, kind))
        at += npages * PAGE
    hypothesis.assume(pieces)
    return pieces


@st.composite
def spans(draw, pieces):
    """Some bytes of one piece, or of several that lie side by side."""
    piece = draw(st.sampled_from(pieces))
    start = draw(points(piece))
    reach = piece.end
    following = {p.start: p for p in pieces}
    while reach in following and draw(st.booleans()):
        piece = following[reach]
        reach = piece.end
    first, last = sorted((start, draw(points(piece))))
    return Span(first, last + 1)


def points(piece):
    """Bytes of a piece, many of them at the ends of its pages."""
    pages = piece.pages()
    ends = st.sampled_from([*pages[:3], *pages[-3:]]).flatmap(
        lambda page: st.sampled_from([page.start, page.start + 1, page.end - 2, page.end - 1])
    )
    anywhere = st.integers(piece.start, piece.end - 1)
    return (ends | anywhere).map(lambda at: min(max(at, piece.start), piece.end - 1))


# ---- the test -------------------------------------------------------------------------------


def live(data, model, checked):
    """One layout's life."""
    with contextlib.ExitStack() as held:
        for _ in range(data.draw(st.integers(1, 8))):
            register(data, model, held)
        parts = merged(model.fates())
        compare(child(look_twice, parts), parts, "a child")
        checked.update(fate for _, _, fate in parts)
        kept = [(start, end, PRESENT) for start, end, _ in parts]
        compare(look(kept), kept, "the parent")
    compare(child(look, kept), kept, "a child after all is released")


def register(data, model, held):
    span = data.draw(spans(model.pieces))
    on_fork = data.draw(st.sampled_from(["omit", "omit", "wipe", "wipe", "keep"]))
    owner = data.draw(st.sampled_from([None, model]))
    nbytes = span.end - span.start
    refusal = model.refusal(span, on_fork)
    heap = any(span.touches(piece) and piece.kind == "heap" for piece in model.pieces)
    try:
        with warnings.catch_warnings():
            # No other thread calls malloc() here.
            if heap and not model.trusted:
                warnings.simplefilter("ignore", rdmafork.SharedPageWarning)
            held.enter_context(
                rdmafork.register_address(span.start, nbytes, on_fork=on_fork, owner=owner)
            )
    except OSError as error:
        assert error.errno == refusal, error
    else:
        assert not refusal, f"{on_fork} was not refused"
        model.registered.append(Registered(span, on_fork))


def compare(found, parts, whose):
    assert isinstance(found, list), f"{whose}: {found!r}"
    for states, (start, end, fate) in zip(found, parts, strict=True):
        assert states == {fate}, f"{whose}: 0x{start:x}-0x{end:x} is {states}, to be {fate}"


def explore(mode, huge):
    rdmafork.fork_init(mode)
    trusted = rdmafork.kernel_info().copy_on_fork_trusted
    # Its neighbours' bytes are the child's life.
    heap = (libc.malloc(50_000), 50_000)
    checked = Counter()
    # Each byte of them is compared.
    examples = EXAMPLES // 2 if huge else EXAMPLES

    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    @hypothesis.given(st.data())
    def explored(data):
        pieces = data.draw(layouts(huge, heap and (heap[0], sum(heap))))
        for piece in pieces:
            make(piece)
        try:
            live(data, Model(pieces, trusted), checked)
            checked["layouts"] += 1
        finally:
            for piece in pieces:
                unmake(piece)

    explored()
    print(dict(checked))
    assert checked["layouts"] >= examples
    assert checked[ABSENT] and checked[ZERO] and checked[PRESENT]


@modes_and_trust
def test_a_child_agrees_with_the_model(mode, trust):
    env = {"RDMAFORK_TRUST_COPYING": trust}
    run(explore, mode, False, env=env)


@unmarks_huge_pages
@modes_and_trust
def test_a_child_agrees_with_the_model_of_huge_pages(mode, trust, hugepages):
    hugepages(8)
    env = {"RDMAFORK_TRUST_COPYING": trust}
    run(explore, mode, True, env=env)
