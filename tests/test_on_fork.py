"""on_fork: a child gets nothing of registered memory, zeros, or a copy."""

import errno
import mmap
import os

import pytest
from conftest import (
    PAGE,
    both_modes,
    child,
    fresh,
    huge_map,
    huge_page_pool,
    private_map,
    read,
    shared_map,
    vm_flags,
    write,
)

import rdmafork
from rdmafork import register, register_address

pytestmark = pytest.mark.skipif(
    not rdmafork.kernel_info().copy_on_fork_trusted,
    reason="the kernel's copying at fork cannot be trusted: nothing private is kept, edges go",
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
        assert "wf" in vm_flags(address) and "dc" not in vm_flags(address)
        assert child(read, address, 4 * PAGE) == bytes(4 * PAGE)
        assert policies() == [(address, address + 4 * PAGE, "wipe", "advice")]
        assert read(address, 4 * PAGE) == b"\7" * 4 * PAGE
    assert child(read, address) == b"\7" and "wf" not in vm_flags(address)


@both_modes
@fresh
def test_a_child_may_write_what_was_wiped_and_give_it_to_its_own(mode):
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
def test_a_child_reads_what_is_kept(mode):
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


@both_modes
@fresh
def test_only_private_anonymous_memory_is_wiped(mode, tmp_path):
    rdmafork.fork_init(mode)
    path = os.path.join(tmp_path, "file")
    with open(path, "wb+") as file:
        file.write(bytes(4 * PAGE))
        file.flush()
        of_file = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
    shared, address = shared_map(2 * PAGE)
    for memory in (of_file, shared):
        with pytest.raises(OSError, match="private anonymous memory") as caught:
            register(memory, on_fork="wipe")
        assert caught.value.errno == errno.EINVAL
    assert f"0x{address:x}-0x{address + 2 * PAGE:x} is not" in str(caught.value)
    assert rdmafork.protected_ranges() == [] and rdmafork.stats().registrations == 0


@fresh
def test_huge_pages_are_not_wiped():
    rdmafork.fork_init()
    with huge_page_pool(2):
        memory, _address = huge_map(2)
        with pytest.raises(OSError, match="base pages") as caught:
            register(memory, on_fork="wipe")
        assert caught.value.errno == errno.EINVAL
        # Too little of one for a page to be marked, and yet.
        with memoryview(memory)[100:164] as part, pytest.raises(OSError, match="base pages"):
            register(part, on_fork="wipe")
        assert rdmafork.stats().registrations == 0
        with register(memory, on_fork="keep"):
            pass
        memory.close()


@both_modes
@fresh
def test_shared_memory_is_kept_whatever_is_wished(mode):
    rdmafork.fork_init(mode)
    memory, address = shared_map(2 * PAGE)
    with register(memory, on_fork="keep"), register(memory):
        child(write, address, b"child")
        assert read(address, 5) == b"child"
        assert {r.protected_by for r in rdmafork.protected_ranges()} == {"shared"}


@fresh
def test_an_inherited_registration_says_what_became_of_its_memory():
    rdmafork.fork_init()
    words = {"omit": "is absent", "wipe": "was wiped", "keep": "is a copy"}
    for on_fork, word in words.items():
        registration = register(mapped(PAGE)[0], on_fork=on_fork)

        def use(registration=registration):
            with pytest.raises(rdmafork.InheritedError) as caught:
                registration.on_fork  # noqa: B018
            return str(caught.value)

        assert word in child(use)
        registration.close()
