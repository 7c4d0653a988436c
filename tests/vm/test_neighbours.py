"""Beside other users of libibverbs in the same process: C code, pyverbs, its own fork support."""

import ctypes
import errno
import functools
import sys

import pytest
from conftest import fresh
from memory import HUGE, PAGE, is_mapped, vm_flags

import rdmafork
from vm.rc import ALL, Forked, Ours, State, idle_first, memory, pinned, span, start

SIZE = 100_001


def survives(pair, near, far):
    """far is right across a fork whose child writes over its part of it."""
    assert pair.exchange(near, far, 1) == (0, 0)
    child = Forked(idle_first, [(far.address, far.nbytes)])
    assert pair.exchange(near, far, 3) == (0, 0)
    child.step()
    assert pair.exchange(near, far, 5) == (0, 0)
    child.finish()


# ---- raw pointers -----------------------------------------------------------------------


@fresh
def test_other_code_uses_our_context_and_domain(rc, huge_pages):
    rdmafork.fork_init()
    before = State.now(rc)
    ours = Ours(rc)
    pair = rc.pair(ours.context, ours.pd)
    theirs = rc.register(ours.pd, memory("shared", SIZE))
    survives(pair, theirs, ours.register(memory("hugetlb", SIZE, 777)))
    pair.close()
    theirs.close()
    ours.close()
    assert State.now(rc) == before


@fresh
def test_a_borrowed_domain_protects_and_stays_with_its_owner(rc, huge_pages):
    rdmafork.fork_init()
    before = State.now(rc)
    context, pd = rc.open()
    idle = State.now(rc)
    domain = rdmafork.ProtectionDomain.from_address(pd)
    assert domain.address == pd
    pair, near = rc.pair(context, pd), rc.register(pd, memory("shared", SIZE))
    objects = rc.objects()
    region = domain.register(memory("hugetlb", SIZE, 777), ALL)
    survives(pair, near, region)
    domain.close()
    assert domain.closed and region.closed
    assert rc.objects() == objects  # the region is gone, the domain is not
    assert rdmafork.protected_ranges() == []
    # Its owner goes on with it, and so may another borrower.
    again = rdmafork.ProtectionDomain.from_address(pd)
    survives(pair, near, again.register(memory("hugetlb", SIZE, 777), ALL))
    del again
    pair.close()
    near.close()
    assert State.now(rc) == idle
    rc.close(context, pd)
    assert State.now(rc) == before


@fresh
def test_a_borrowed_domain_keeps_its_owner(rc):
    import gc
    import weakref

    class Owner:
        pass

    rdmafork.fork_init()
    context, pd = rc.open()
    owner = Owner()
    gone = weakref.ref(owner)
    domain = rdmafork.ProtectionDomain.from_address(pd, owner=owner)
    region = domain.register(memory("base", SIZE), ALL)
    del owner, domain
    gc.collect()
    assert gone()  # the region holds the domain, the domain its owner
    del region
    gc.collect()
    assert not gone()
    rc.close(context, pd)


@fresh
def test_a_domain_in_use_by_others_is_busy_and_works_on(rc):
    rdmafork.fork_init()
    before = State.now(rc)
    ours = Ours(rc)
    pair = rc.pair(ours.context, ours.pd)
    near, far = ours.register(memory("shared", SIZE)), ours.register(memory("base", SIZE, 777))
    objects = rc.objects()
    for closing in (ours.domain, ours.device):
        with pytest.raises(OSError) as raised:
            closing.close()
        assert raised.value.errno == errno.EBUSY, raised.value
        assert not ours.domain.closed and not ours.device.closed
        assert near.closed and far.closed  # they come first
        assert (ours.context, ours.pd) == (ours.device.address, ours.domain.address)
        near = ours.register(memory("shared", SIZE))
        far = ours.register(memory("base", SIZE, 777))
        assert rc.objects() == objects
        survives(pair, near, far)
    pair.close()
    ours.domain.close()
    ours.device.close()
    assert State.now(rc) == before


# ---- pyverbs ----------------------------------------------------------------------------


def pyverbs():
    """(Context, PD, MR) of Debian's pyverbs.

    Its PD.pd and Context.context take the pointer for an object, and crash.
    """
    if sys.version_info[:2] == (3, 11):
        sys.path.append("/usr/lib/python3/dist-packages")
    try:
        from pyverbs.device import Context
        from pyverbs.mr import MR
        from pyverbs.pd import PD
    except ImportError as error:
        pytest.skip(f"pyverbs cannot be imported (Debian: python3-pyverbs, CPython 3.11): {error}")
    return Context, PD, MR


@pytest.mark.parametrize("mode", ["lazy", "eager"])
@fresh
def test_register_protects_a_region_of_pyverbs(rc, huge_pages, mode):
    start(mode)
    Context, PD, MR = pyverbs()
    buffer = memory("hugetlb", SIZE, 777)
    address, nbytes = span(buffer)
    context = Context(name=rc.device)
    pd = PD(context)
    pointers = addresses_of(rc, context, pd)
    ours = rdmafork.ProtectionDomain.from_address(pointers[1], owner=pd)
    near = ours.register(memory("shared", SIZE), ALL)
    with rdmafork.register(buffer):
        far = MR(pd, nbytes, ALL, address=address)
        pair = rc.pair(*pointers)
        assert (far.length, far.buf) == (nbytes, address)
        survives(pair, near, PyverbsRegion(address, nbytes, far))
        far.close()
    pair.close()
    near.close()
    pd.close()
    context.close()


def addresses_of(rc, context, pd):
    """(ibv_context *, ibv_pd *) of pyverbs' objects, which keep them to themselves."""
    words = ctypes.cast(id(pd), ctypes.POINTER(ctypes.c_uint64))
    for candidate in filter(is_mapped, words[2 : type(pd).__basicsize__ // 8]):
        # struct ibv_pd { struct ibv_context *context; uint32_t handle; };
        owner, handle = ctypes.cast(candidate, ctypes.POINTER(ctypes.c_uint64))[:2]
        if handle & 0xFFFFFFFF == pd.handle and is_mapped(owner):
            if rc.fds(owner)[0] == context.cmd_fd:
                return owner, candidate
    raise AssertionError("pyverbs' PD is laid out differently")


class PyverbsRegion:
    def __init__(self, address, nbytes, mr):
        self.address, self.nbytes, self.lkey, self.rkey = address, nbytes, mr.lkey, mr.rkey


@fresh
def test_a_domain_of_pyverbs_registers_through_us(rc, huge_pages):
    rdmafork.fork_init()
    before = State.now(rc)
    Context, PD, _ = pyverbs()
    context = Context(name=rc.device)
    pd = PD(context)
    pointers = addresses_of(rc, context, pd)
    domain = rdmafork.ProtectionDomain.from_address(pointers[1], owner=pd)
    pair = rc.pair(*pointers)
    near = domain.register(memory("shared", SIZE), ALL)
    survives(pair, near, domain.register(memory("hugetlb", SIZE, 777), ALL))
    pair.close()
    domain.close()
    pd.close()
    context.close()
    assert State.now(rc) == before


# ---- libibverbs' own fork support, switched on ------------------------------------------

TRACKING = {"RDMAV_FORK_SAFE": "1", "RDMAV_HUGEPAGES_SAFE": "1"}


def tracker():
    """libibverbs' ibv_dontfork_range and ibv_dofork_range, where it tracks."""
    library = ctypes.CDLL("libibverbs.so.1")
    if library.ibv_is_fork_initialized() != 1:
        pytest.skip("libibverbs leaves this kernel's fork() alone, its variables notwithstanding")
    try:
        dofork = library.ibv_dofork_range
    except AttributeError:
        pytest.skip("this libibverbs does not export ibv_dofork_range")
    dofork.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return dofork


@fresh(env=TRACKING)
def test_closing_anothers_region_unprotects_nothing_of_ours(rc, huge_pages):
    # rdmafork follows the same variables, without fork_init().
    ours = Ours(rc)
    tracker()
    for kind, page in ("base", PAGE), ("hugetlb", HUGE):
        buffer = memory(kind, max(SIZE, 2 * page), 777)
        region = ours.register(buffer)
        with rdmafork.register(buffer):
            other = rc.register(ours.pd, buffer)
            other.close()
            region.close()  # libibverbs' count is 0 now, and its MADV_DOFORK done
            # The first page is copied, as the buffer does not fill it.
            child = Forked(memory_at, span(buffer)[0] // page * page + page)
            assert child.said is False, kind
            child.finish()


def memory_at(address):
    yield is_mapped(address)


@fresh(env=TRACKING)
def test_libibverbs_letting_go_of_our_pages_loses_no_data(rc, huge_pages):
    ours = Ours(rc)
    pair = rc.pair(ours.context, ours.pd)
    near = ours.register(memory("shared", SIZE))
    let_go = functools.partial(tracker())
    for kind in ("base", "hugetlb"):
        buffer = memory(kind, SIZE, 777)
        far = ours.register(buffer)
        # As by others' unbalanced releases: its count of our pages falls to 0.
        assert let_go(far.address, far.nbytes) == 0
        assert "dc" not in vm_flags(far.address)
        survives(pair, near, far)
    assert pinned()
