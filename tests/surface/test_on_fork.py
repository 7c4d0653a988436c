"""on_fork: a child gets nothing of registered memory, zeros, or a copy."""

import pytest
from conftest import both_modes, child, fresh, run
from memory import HUGE, PAGE, huge_map, private_map, read, vm_flags, write

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
        assert policies() == [(address, address + 4 * PAGE, "wipe", "mark")]
        assert read(address, 4 * PAGE) == b"\7" * 4 * PAGE
    assert child(read, address) == b"\7" and not {"wf", "dc"} & vm_flags(address)


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
        (address, address + PAGE, "omit", "mark"),
        (address + PAGE, address + 2 * PAGE, "wipe", "mark"),
        (address + 2 * PAGE, address + 3 * PAGE, "keep", "kernel"),
    ]
    omit.close()
    assert child(read, address) == b"\0"
    wipe.close()
    assert child(read, address) == b"\7"
    keep.close()


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

        # The pool has no more: a child gets base pages in their place.
        assert child(look) == (HUGE, bytes(HUGE), b"mine\0")
        assert policies()[0][2:] == ("wipe", "mark")
    with register(memory, on_fork="wipe"):
        assert child(read, address, 3 * HUGE) == bytes(3 * HUGE)
    with register(memory, on_fork="keep"):
        pass
    assert memory[:] == b"h" * len(memory)


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
