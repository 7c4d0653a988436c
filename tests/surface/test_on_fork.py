"""on_fork: a child gets nothing of registered memory, zeros, or a copy."""

import mmap
import os

import pytest
from conftest import (
    HUGE,
    PAGE,
    both_modes,
    child,
    fresh,
    huge_map,
    libc,
    private_map,
    read,
    run,
    shared_map,
    smaps,
    vm_flags,
    write,
)

import rdmafork
from rdmafork import register, register_address

pytestmark = pytest.mark.skipif(
    not rdmafork.kernel_info().copy_on_fork_trusted,
    reason="the kernel's copying at fork cannot be trusted: nothing private is kept",
)


def policies():
    return [(r.start, r.end, r.on_fork, r.protected_by) for r in rdmafork.protected_ranges()]


def mapped(nbytes, fill=7):
    memory, address = private_map(nbytes)
    write(address, bytes([fill]) * nbytes)
    return memory, address


@both_modes
@fresh
def test_a_child_reads_zeros_and_the_parent_its_data(mode):
    rdmafork.fork_init(mode)
    memory, address = mapped(4 * PAGE)
    with register(memory, on_fork="wipe") as registration:
        assert registration.on_fork == "wipe" and registration.protected
        # The fork chooses the mark that serves best.
        assert {"wf", "dc"} & vm_flags(address) == ({"dc"} if mode == "eager" else set())
        assert child(read, address, 4 * PAGE) == bytes(4 * PAGE)
        assert {"wf", "dc"} & vm_flags(address) == {"wf"}
        assert policies() == [(address, address + 4 * PAGE, "wipe", "advice")]
        assert read(address, 4 * PAGE) == b"\7" * 4 * PAGE
    assert child(read, address) == b"\7" and not {"wf", "dc"} & vm_flags(address)


@fresh
def test_a_lazy_registration_to_wipe_makes_no_system_call():
    rdmafork.fork_init("lazy")
    memory, _address = mapped(4 * PAGE)
    before = rdmafork.stats()
    with register(memory, on_fork="wipe"):
        stats = rdmafork.stats()
        assert stats.pending == 1
        assert stats.madvise_calls == before.madvise_calls
        assert stats.query_calls == before.query_calls
    assert rdmafork.stats().madvise_calls == before.madvise_calls


@both_modes
@fresh
def test_a_child_may_write_wiped_pages_and_give_them_to_its_own(mode):
    rdmafork.fork_init(mode)
    memory, address = mapped(4 * PAGE)
    registration = register(memory, on_fork="wipe")

    def generation():
        write(address, b"mine")
        return child(read, address, 4)

    assert child(generation) == b"mine"
    assert read(address, 4) == b"\7" * 4
    registration.close()


@both_modes
@fresh
def test_a_child_reads_kept_pages(mode):
    rdmafork.fork_init(mode)
    memory, address = mapped(4 * PAGE)
    with register(memory, on_fork="keep") as registration:
        assert registration.on_fork == "keep"
        assert child(read, address, 4 * PAGE) == b"\7" * 4 * PAGE
        assert not {"wf", "dc"} & vm_flags(address)
        assert policies() == [(address, address + 4 * PAGE, "keep", "kernel")]


@both_modes
@fresh
def test_omit_comes_before_wipe_before_keep(mode):
    rdmafork.fork_init(mode)
    _memory, address = mapped(3 * PAGE)
    held = object()
    keep = register_address(address, 3 * PAGE, on_fork="keep", owner=held)
    wipe = register_address(address, 2 * PAGE, on_fork="wipe", owner=held)
    omit = register_address(address, PAGE, owner=held)
    assert child(read, address + PAGE) == b"\0" and child(read, address + 2 * PAGE) == b"\7"
    assert "dc" in vm_flags(address)
    assert policies() == [
        (address, address + PAGE, "omit", "advice"),
        (address + PAGE, address + 2 * PAGE, "wipe", "advice"),
        (address + 2 * PAGE, address + 3 * PAGE, "keep", "kernel"),
    ]
    omit.close()
    assert child(read, address) == b"\0"
    wipe.close()
    assert child(read, address) == b"\7"
    keep.close()


def protection_of(address):
    return next(m.permissions for m in smaps() if m.start <= address < m.end)


@both_modes
@fresh
def test_a_private_file_is_wiped_and_shared_memory_stays_shared(mode, tmp_path):
    rdmafork.fork_init(mode)
    path = os.path.join(tmp_path, "file")
    with open(path, "wb+") as file:
        file.write(b"\7" * 4 * PAGE)
        file.flush()
        flags = mmap.MAP_PRIVATE
        address = libc.mmap(None, 4 * PAGE, mmap.PROT_READ, flags, file.fileno(), 0)
    shared, at = shared_map(2 * PAGE)
    write(at, b"\7" * 2 * PAGE)
    kept = [
        register(shared, on_fork="wipe"),
        register_address(address, 4 * PAGE, on_fork="wipe", owner=shared),
    ]

    def look():
        write(at, b"child")
        return read(address, 4 * PAGE), protection_of(address), read(at + PAGE)

    assert child(look) == (bytes(4 * PAGE), "r--p", b"\7")
    assert read(at, 6) == b"child\7" and read(address, 4 * PAGE) == b"\7" * 4 * PAGE
    assert {"wf", "dc"} & vm_flags(address) == {"dc"} and not {"wf", "dc"} & vm_flags(at)
    found = {start: (on_fork, by) for start, _, on_fork, by in policies()}
    assert found == {address: ("wipe", "advice"), at: ("wipe", "shared")}
    for registration in kept:
        registration.close()
    assert child(read, address) == b"\7"


@both_modes
def test_huge_pages_are_wiped_if_one_registration_fills_them(mode, hugepages):
    hugepages(3)
    run(wiped_huge_pages, mode)


def wiped_huge_pages(mode):
    rdmafork.fork_init(mode)
    memory, address = huge_map(3)
    memory[:] = b"h" * len(memory)
    with register(memoryview(memory)[100 : 2 * HUGE + 100], on_fork="wipe"):

        def look():
            found = read(address, 3 * HUGE)
            write(address + HUGE, b"mine")
            return found.count(0), found.rstrip(b"h").lstrip(b"h"), read(address + HUGE, 5)

        # The pool has no more: what a child gets of them are base pages.
        assert child(look) == (HUGE, bytes(HUGE), b"mine\0")
        assert policies()[0][2:] == ("wipe", "advice")
    with register(memory, on_fork="wipe"):
        assert child(read, address, 3 * HUGE) == bytes(3 * HUGE)
    with register(memory, on_fork="keep"):
        pass
    assert memory[:] == b"h" * len(memory)


@both_modes
@fresh
def test_a_child_gets_a_copy_of_pages_that_no_single_registration_fills(mode):
    rdmafork.fork_init(mode)
    memory, address = mapped(2 * PAGE)
    with (
        register(memoryview(memory)[100 : PAGE // 2], on_fork="wipe"),
        register(memoryview(memory)[PAGE // 2 : 2 * PAGE - 1]),
        register(memoryview(memory)[: PAGE - 1], on_fork="wipe"),
    ):
        assert child(read, address, 2 * PAGE) == b"\7" * 2 * PAGE


@both_modes
@fresh
def test_shared_memory_is_kept_under_every_policy(mode):
    rdmafork.fork_init(mode)
    memory, address = shared_map(2 * PAGE)
    with register(memory, on_fork="keep"), register(memory):
        child(write, address, b"child")
        assert read(address, 5) == b"child"
        assert {r.protected_by for r in rdmafork.protected_ranges()} == {"shared"}


@fresh
def test_an_inherited_registration_tells_its_memory_s_policy():
    rdmafork.fork_init()
    words = {"omit": "is not inherited", "wipe": "was wiped", "keep": "is a copy"}
    for on_fork, word in words.items():
        registration = register(mapped(PAGE)[0], on_fork=on_fork)

        def use(registration=registration):
            with pytest.raises(rdmafork.InheritedError) as caught:
                registration.on_fork  # noqa: B018
            return str(caught.value)

        assert word in child(use)
        registration.close()
