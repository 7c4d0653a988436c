"""vm.max_map_count at 1000: more registrations than that leave room for the application.

The limit is the whole machine's, so only a guest's is changed: RDMAFORK_TEST_GUEST.
"""

import contextlib
import mmap
import os
import threading
from pathlib import Path

import pytest
from conftest import both_modes, fork_once, fresh
from memory import PAGE, FullTable, private_map, smaps
from surface import test_errors as errors

import rdmafork

LIMIT = Path("/proc/sys/vm/max_map_count")
FEW = 1000

pytestmark = pytest.mark.skipif(
    not os.environ.get("RDMAFORK_TEST_GUEST"), reason="it is set in virtual machines only"
)


@pytest.fixture(autouse=True)
def few():
    before = LIMIT.read_text()
    LIMIT.write_text(str(FEW))
    yield
    LIMIT.write_text(before)


def budget():
    return FEW // (2 if rdmafork.kernel_info().copy_on_fork_trusted else 3)


def truth(address, npages):
    """All pages listed as marked are marked, and the other way round."""
    marked = set()
    for mapping in smaps():
        if "dc" in mapping.flags:
            marked.update(range(mapping.start, mapping.end, PAGE))
    listed = set()
    for item in rdmafork.protected_ranges():
        if item.protected_by == "mark":
            listed.update(range(item.start, item.end, PAGE))
    assert listed == marked <= set(range(address, address + npages * PAGE, PAGE))
    numbers = rdmafork.stats()
    assert numbers.marked_bytes == len(marked) * PAGE and numbers.vmas <= budget()
    return numbers


def application():
    """It maps memory, and starts threads."""
    maps = [mmap.mmap(-1, PAGE) for _ in range(40)]
    done = []
    threads = [threading.Thread(target=done.append, args=(0,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 8
    for each in maps:
        each.close()


@both_modes
@fresh
def test_beyond_the_budget_the_application_has_its_share(mode):
    rdmafork.fork_init(mode)
    trusted = rdmafork.kernel_info().copy_on_fork_trusted
    assert rdmafork.kernel_info().max_map_count == FEW
    memory, address = private_map(2 * FEW * PAGE)
    memory[::PAGE] = b"m" * (2 * FEW)
    held = []
    refused = 0
    for i in range(FEW):
        try:
            held.append(rdmafork.register(memoryview(memory)[2 * i * PAGE : (2 * i + 1) * PAGE]))
        except OSError as error:
            assert not trusted and "max_map_count (1000)" in str(error)
            refused += 1
    # Where the kernel does not copy, memory that cannot be marked cannot be registered.
    assert bool(refused) != trusted
    application()
    fork_once()
    numbers = truth(address, 2 * FEW)
    assert numbers.marked_bytes == budget() // 2 * PAGE
    assert numbers.unmarked_bytes == (len(held) * PAGE - numbers.marked_bytes if trusted else 0)
    application()
    # Every second one goes, and others take its place.
    for registration in held[::2]:
        registration.close()
    fork_once()
    truth(address, 2 * FEW)
    application()
    for registration in held:
        registration.close()
    numbers = truth(address, 2 * FEW)
    assert numbers.marked_bytes == numbers.still_marked_bytes == 0


@fresh
def test_the_longest_are_marked():
    """In the midst of as many single pages as there may be mappings."""
    if not rdmafork.kernel_info().copy_on_fork_trusted:
        pytest.skip("lazy mode is not for this kernel")
    rdmafork.fork_init("lazy")
    memory, address = private_map((2 * FEW + 64) * PAGE)
    view = memoryview(memory)
    held = [rdmafork.register(view[2 * i * PAGE : (2 * i + 1) * PAGE]) for i in range(FEW)]
    held.append(rdmafork.register(view[2 * FEW * PAGE :]))
    fork_once()
    assert truth(address, 2 * FEW + 64).marked_bytes == (budget() // 2 - 1 + 64) * PAGE
    (long,) = [r for r in rdmafork.protected_ranges() if r.start == address + 2 * FEW * PAGE]
    assert long.protected_by == "mark"
    for registration in held:
        registration.close()
    assert truth(address, 1).marked_bytes == 0


@both_modes
@fresh
def test_with_no_mapping_left_nothing_is_claimed(mode):
    """Registered, forked and released when the kernel grants none, then when it does."""
    rdmafork.fork_init(mode)
    memory, address = private_map(64 * PAGE)
    memory[:] = b"m" * len(memory)
    view = memoryview(memory)
    with contextlib.ExitStack() as stack:
        kept = [rdmafork.register(view[8 * i * PAGE : (8 * i + 4) * PAGE]) for i in range(4)]
        fork_once()
        table = stack.enter_context(FullTable())
        new = []
        for i in range(4, 8):
            with contextlib.suppress(OSError):
                new.append(rdmafork.register(view[8 * i * PAGE : (8 * i + 4) * PAGE]))
        # Nothing can be split, so a fork may fail too.
        with contextlib.suppress(OSError):
            fork_once()
        # A middle part of marked memory cannot become ordinary yet.
        whole = rdmafork.register(view[: 4 * PAGE])
        kept.pop(0).close()
        whole.close()
        table.free(8)
    fork_once()
    numbers = truth(address, 64)
    assert numbers.still_marked_bytes == numbers.unmarked_bytes == 0
    assert numbers.marked_bytes == 4 * PAGE * (len(kept) + len(new))
    for registration in kept + new:
        registration.close()
    assert truth(address, 64).marked_bytes == 0


def test_refusals_name_the_limit_and_releases_are_retried():
    """As with the usual limit."""
    errors.test_eager_without_mappings_left()
    errors.test_a_release_without_mappings_left_is_retried()
    if rdmafork.kernel_info().copy_on_fork_trusted:
        errors.test_lazy_without_mappings_left_is_the_kernel_s_to_copy()
