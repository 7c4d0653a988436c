"""Buffer: memory of its own, registered for life. Its users are in test_buffer_views."""

import errno
import re
import resource
import signal
import sys
import warnings
from pathlib import Path

import pytest
from conftest import Died, both_modes, child, fork_once, fresh, modes_and_trust, run
from memory import (
    HUGE,
    PAGE,
    FullTable,
    free_huge_pages,
    is_mapped,
    map_at,
    mappings,
    mappings_now,
    marked,
    read,
    smaps,
    vm_flags,
    write,
)
from strace import names, traced

import rdmafork
from rdmafork import Buffer, UnprotectedWarning

np = pytest.importorskip("numpy")


def mapping_at(address):
    return next(iter(mappings(address, 1)), None)


def huge_part(address):
    """How many bytes of the mapping at address are transparent huge pages."""
    text = Path("/proc/self/smaps").read_text().partition(f"{address:x}-")[2]
    return int(re.search(r"AnonHugePages: +(\d+) kB", text)[1]) << 10


# ---- the mappings --------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, 5000, HUGE - 1, HUGE, HUGE + 1])
@fresh
def test_whole_zeroed_pages_of_its_own_between_guards(nbytes):
    rdmafork.fork_init()
    with Buffer(nbytes) as buffer:
        end = buffer.address + (nbytes + PAGE - 1) // PAGE * PAGE
        body = mapping_at(buffer.address)
        assert (body.start, body.end, body.permissions) == (buffer.address, end, "rw-p")
        for guard in (buffer.address - 1, end):
            assert mapping_at(guard).permissions == "---p"
        assert len(memoryview(buffer)) == nbytes
        assert read(buffer.address, end - buffer.address) == bytes(end - buffer.address)
        # The tail of the last page is nobody else's.
        write(end - 1, b"t")
        address = buffer.address
    assert not any(map(is_mapped, (address, address - 1, end)))


def touch(offset):
    buffer = rdmafork.Buffer(5000)
    write(buffer.address + offset, b"x")


@pytest.mark.parametrize("offset, dies", [(-1, True), (2 * PAGE, True), (0, False), (8191, False)])
def test_a_touched_guard_faults(offset, dies):
    if not dies:
        run(touch, offset, env={"RDMAV_FORK_SAFE": "1"})
        return
    with pytest.raises(Died) as caught:
        run(touch, offset, env={"RDMAV_FORK_SAFE": "1"})
    assert caught.value.returncode == -signal.SIGSEGV


@both_modes
@pytest.mark.parametrize("nbytes", [PAGE, HUGE])
@fresh
def test_three_mappings_and_two_for_every_further_one(mode, nbytes):
    """Also when they are marked: registered and forked, not one more."""
    rdmafork.fork_init(mode)

    one = Buffer(nbytes)
    assert len(mappings(one.address - 1, nbytes + 2)) == 3
    buffers = [Buffer(nbytes) for _ in range(50)]
    count = mappings_now()
    fork_once()
    assert all("dc" in vm_flags(b.address) for b in buffers)
    assert mappings_now() == count
    more = mappings_now()
    buffers += [Buffer(nbytes) for _ in range(50)]
    # Now and then the kernel takes another place than the next one, and Python maps some, too.
    assert mappings_now() - more <= 2 * 50 + 15


@fresh
def test_large_ones_are_aligned_and_advised_for_transparent_huge_pages():
    rdmafork.fork_init()
    with Buffer(HUGE - PAGE) as small:
        assert not {"hg", "nh"} & vm_flags(small.address)
    with Buffer(3 * HUGE + 1) as large:
        flags = vm_flags(large.address)
        assert large.address % HUGE == 0 and large.page_size == PAGE
        control = Path("/sys/kernel/mm/transparent_hugepage/enabled")
        if not control.exists():
            pytest.skip("a kernel without transparent huge pages")
        assert "hg" in flags
        if "[never]" in control.read_text():
            pytest.skip("transparent huge pages are turned off")
        memoryview(large)[:] = b"h" * len(large)
        assert huge_part(large.address) >= HUGE


@fresh
def test_base_pages_by_name_are_base_pages():
    rdmafork.fork_init()
    with Buffer(4 * HUGE, page_size=PAGE) as buffer:
        assert buffer.page_size == PAGE
        memoryview(buffer)[:] = b"b" * len(buffer)
        assert huge_part(buffer.address) == 0
        assert "hg" not in vm_flags(buffer.address)


# ---- huge pages ---------------------------------------------------------------------------


@both_modes
@fresh
def test_pages_of_the_pool_are_whole_and_absent_from_children(mode, huge):
    """Of the pool, whole, between guards; absent from children, and back when it is closed."""
    rdmafork.fork_init(mode)
    before = free_huge_pages()
    buffer = Buffer(2 * HUGE + 1, page_size=HUGE)
    assert (len(buffer), buffer.page_size) == (2 * HUGE + 1, HUGE)
    assert "in pages of 2 MiB" in repr(buffer)
    address, end = buffer.address, buffer.address + 3 * HUGE
    mapping = mapping_at(address)
    assert address % HUGE == 0
    assert (mapping.start, mapping.end, mapping.page_size) == (address, end, HUGE)
    assert mapping_at(address - 1).permissions == mapping_at(end).permissions == "---p"
    array = np.frombuffer(buffer, dtype=np.uint8)
    array[:] = 7
    counts = []
    for _ in range(3):  # the first time the engine makes room for itself
        with rdmafork.register(memoryview(buffer)[100:5000]):
            assert child(read, address) == signal.SIGSEGV
            assert "dc" in vm_flags(address)
            counts.append(mappings_now())
    assert counts[1] == counts[2]
    assert array.min() == array.max() == 7
    assert free_huge_pages() == before - 3
    del array
    buffer.close()
    assert free_huge_pages() == before == huge
    assert not any(map(is_mapped, (address - 1, address, end - 1, end)))


@fresh
def test_too_few_huge_pages(huge):
    """How many are needed, how many are free, and where to get more; nothing is taken."""
    rdmafork.fork_init()
    with Buffer(2 * HUGE, page_size=HUGE):
        count = mappings_now()
        with pytest.raises(OSError) as caught:
            Buffer(huge * HUGE, page_size=HUGE)
        message = str(caught.value)
        assert caught.value.errno == errno.ENOMEM
        assert f"{huge} needed, {huge - 2} free of the " in message
        assert "/proc/sys/vm/nr_hugepages" in message and "in pages of 2 MiB" in message
        assert free_huge_pages() == huge - 2 and rdmafork.stats().registrations == 1
        assert mappings_now() == count


@fresh
def test_huge_pages_that_are_there_but_may_not_be_mapped(huge):
    """The pool is not to blame then."""
    rdmafork.fork_init()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * HUGE, resource.RLIM_INFINITY))
    with pytest.raises(OSError, match=f"RLIMIT_AS allows this process {used + 2 * HUGE} bytes"):
        Buffer(2 * HUGE, page_size=HUGE)


@pytest.fixture
def gigantic_page():
    """One page of 1 GiB in the pool."""
    pool = Path("/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages")
    if not pool.exists():
        pytest.skip("this kernel has no pages of 1 GiB")
    before = pool.read_text()
    try:
        pool.write_text(str(int(before) + 1))
    except OSError as error:
        pytest.skip(f"a page of 1 GiB cannot be reserved: {error}")
    try:
        if int(pool.read_text()) == int(before):
            pytest.skip("no contiguous GiB is free for a page of 1 GiB")
        yield 1 << 30
    finally:
        pool.write_text(before)


@both_modes
@fresh
def test_a_page_of_one_gigabyte(mode, gigantic_page):
    rdmafork.fork_init(mode)
    with Buffer(1 << 20, page_size=gigantic_page) as buffer:
        assert buffer.page_size == gigantic_page and buffer.address % gigantic_page == 0
        assert mapping_at(buffer.address).page_size == gigantic_page
        memoryview(buffer)[:] = b"g" * len(buffer)
        assert child(read, buffer.address) == signal.SIGSEGV
        assert bytes(buffer) == b"g" * len(buffer)
        with pytest.raises(OSError, match="hugepages-1048576kB/nr_hugepages") as caught:
            Buffer(100 << 30, page_size=gigantic_page)
        assert caught.value.errno == errno.ENOMEM and "100 needed" in str(caught.value)
    assert rdmafork.stats().registrations == 0


def test_a_page_size_the_kernel_does_not_have():
    with pytest.raises(ValueError) as caught:
        Buffer(1, page_size=12345)
    assert "12345" in str(caught.value)
    for size in (PAGE, *rdmafork.kernel_info().huge_page_sizes):
        assert str(size) in str(caught.value)
    for size in (0, -1, 1 << 80):
        with pytest.raises(ValueError, match="no pages of"):
            Buffer(1, page_size=size)
    with pytest.raises(TypeError):
        Buffer(1, page_size="2 MiB")


# ---- buffers that cannot be made -----------------------------------------------------------


@pytest.mark.parametrize(
    "nbytes, error, text",
    [
        *[(nbytes, ValueError, "at least one byte, not {}") for nbytes in (0, -1, -(1 << 80))],
        *[(n, OverflowError, "of {} bytes is larger than the add") for n in (sys.maxsize, 1 << 64)],
        *[(n, OSError, "of {} bytes: .*{cause}") for n in (1 << 62, 1 << 46)],
        *[(nbytes, TypeError, None) for nbytes in (1.0, "1", None, b"1")],
    ],
)
def test_impossible_sizes_are_refused(nbytes, error, text):
    with pytest.raises(error):  # the first refusal of a process may load the texts of errors
        Buffer(nbytes)
    registrations, mapped = rdmafork.stats().registrations, mappings_now()
    limits = [resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    cause = r"vm\.overcommit_memory" if set(limits) == {resource.RLIM_INFINITY} else "RLIMIT_"
    match = text and text.format(nbytes, cause=cause)
    for _ in range(20):
        with pytest.raises(error, match=match) as caught:
            Buffer(nbytes)
    if error is OSError:
        assert caught.value.errno == errno.ENOMEM
    assert rdmafork.stats().registrations == registrations
    assert mappings_now() - mapped < 20  # Python maps some itself now and then, not one each time


def test_any_index_may_be_a_size():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnprotectedWarning)
        with Buffer(np.int64(100), page_size=np.int32(PAGE)) as buffer:
            assert (buffer.nbytes, buffer.page_size) == (100, PAGE)


def test_wrong_arguments_are_refused():
    for arguments, options in (((), {}), ((1, PAGE), {}), ((1,), {"pages": 1})):
        with pytest.raises(TypeError):
            Buffer(*arguments, **options)
    with pytest.raises(TypeError):
        Buffer.__new__(Buffer)
    with pytest.raises(TypeError):
        type("Mine", (Buffer,), {})


@fresh
def test_a_limit_of_the_address_space_is_named():
    rdmafork.fork_init()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    limit = used + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    with pytest.raises(OSError, match=f"RLIMIT_AS allows this process {limit} bytes"):
        Buffer(1 << 30)
    Buffer(1 << 20).close()


@pytest.mark.parametrize("policy", ["wipe", "keep"])
@fresh
def test_on_fork_is_passed_on_and_refused_by_the_engine(policy):
    """It passes on_fork on, and the engine's refusal too."""
    rdmafork.fork_init()
    lines = mappings_now()
    try:
        registered = rdmafork.register(bytearray(100), on_fork=policy)
    except OSError as error:
        with pytest.raises(OSError, match=re.escape(str(error))) as caught:
            Buffer(100, on_fork=policy)
        assert caught.value.errno == error.errno
        assert rdmafork.stats().registrations == 0 and mappings_now() == lines
    else:
        registered.close()
        with Buffer(100, on_fork=policy) as buffer:
            assert buffer.on_fork == policy
            assert rdmafork.protected_ranges()[0].on_fork == policy


def test_an_unknown_policy_is_refused():
    for policy in ("copy", None, 0, b"omit"):
        with pytest.raises(ValueError, match="omit, wipe, keep"):
            Buffer(1, on_fork=policy)


@fresh(env={"RDMAV_FORK_SAFE": "1", "RDMAFORK_MODE": "nonsense"})
def test_a_refused_buffer_leaves_no_memory():
    lines = mappings_now()
    with pytest.raises(OSError, match="RDMAFORK_MODE=nonsense") as caught:
        Buffer(HUGE)
    assert caught.value.errno == errno.EINVAL and mappings_now() == lines


@fresh
def test_the_limit_of_mappings_is_named():
    """max_map_count is named, and earlier buffers stay."""
    rdmafork.fork_init()
    limit = rdmafork.kernel_info().max_map_count
    made = []
    with FullTable():
        with pytest.raises(OSError, match=rf"max_map_count \({limit}\)") as caught:
            # Its guards may find neighbours to merge with, and a few fit yet.
            for _ in range(100):
                made.append(Buffer(PAGE))
        failure = caught.value
        registrations = rdmafork.stats().registrations
    assert failure.errno == errno.ENOMEM and registrations == len(made)


# ---- registered for life ------------------------------------------------------------------


@both_modes
@fresh
def test_it_is_registered_whole_from_the_first_moment_to_the_last(mode):
    rdmafork.fork_init(mode)
    buffer = Buffer(3 * PAGE + 1)
    (found,) = rdmafork.protected_ranges()
    assert (found.start, found.end) == (buffer.address, buffer.address + 4 * PAGE)
    assert (found.registrations, found.on_fork) == (1, "omit")
    assert buffer.protected and rdmafork.stats().registrations == 1
    address = buffer.address
    # A small view that is registered and closed takes nothing away.
    with rdmafork.register(memoryview(buffer)[10:20]):
        pass
    fork_once()
    assert len(marked(address, 4 * PAGE)) == 4
    buffer.close()
    assert rdmafork.protected_ranges() == [] and rdmafork.stats().registrations == 0
    # Memory that is mapped there later is ordinary.
    map_at(address, 4 * PAGE)
    fork_once()
    assert marked(address, 4 * PAGE) == []


@modes_and_trust
def test_registering_any_part_costs_no_system_call_and_no_mapping(mode, trust):
    sections = traced(
        f"""
        rdmafork.fork_init({mode!r})
        buffer = rdmafork.Buffer(64 * PAGE - 100)
        view = memoryview(buffer)
        parts = [view[i * 5000 : i * 5000 + 9000] for i in range(40)] + [view, buffer]
        held = [None] * len(parts)
        def mappings():
            with open("/proc/self/maps", "rb") as file:
                return len(file.read().splitlines())
        def fork():
            pid = os.fork()
            if not pid:
                os._exit(0)
            os.waitpid(pid, 0)
        def hold():
            for i in range(len(parts)):
                held[i] = register(parts[i])
        def let_go():
            for i in range(len(parts)):
                held[i].close()
        hold(), fork(), let_go(), mappings()
        mark("/mark/before")
        hold(), let_go()
        mark("/mark/none")
        fork()
        count = mappings()
        mark("/mark/after")
        hold(), let_go()
        for part in parts:
            register(part)
        mark("/mark/none")
        hold(), fork()
        assert mappings() == count
        mark("/mark/across")
        let_go()
        mark("/mark/none")
        assert mappings() == count
        """,
        env={"RDMAFORK_TRUST_COPYING": trust},
    )
    assert sections == {"before": [], "after": [], "across": []}


@pytest.mark.parametrize("mode, advice", [("lazy", []), ("eager", ["madvise"])])
def test_the_system_calls_of_making_and_closing_one(mode, advice):
    """A page: two and one; from 2 MiB on one more, for huge pages; eager adds its two.

    The registration is given back before the memory.
    """
    sections = traced(
        f"""
        rdmafork.fork_init({mode!r})
        for nbytes, name in ((1, "page"), (1 << 30, "large")):
            rdmafork.Buffer(nbytes).close()
            mark("/mark/" + name)
            buffer = rdmafork.Buffer(nbytes)
            mark(f"/mark/{{name}}_closed")
            buffer.close()
            mark("/mark/again")
            buffer.close()
            mark("/mark/none")
        """
    )
    assert names(sections["page"]) == ["mmap", "mprotect", *advice]
    assert names(sections["large"]) == ["mmap", "mprotect", "madvise", *advice]
    assert "MADV_HUGEPAGE" in sections["large"][2]
    assert names(sections["page_closed"]) == names(sections["large_closed"]) == [*advice, "munmap"]
    assert sections["again"] == []


def test_the_system_calls_of_huge_pages(huge):
    sections = traced(
        """
        rdmafork.fork_init("lazy")
        make = lambda: rdmafork.Buffer(1, page_size=2 << 20)
        make().close()
        mark("/mark/make")
        buffer = make()
        mark("/mark/close")
        buffer.close()
        """
    )
    assert names(sections["make"]) == ["mmap", "munmap", "mmap"]
    assert names(sections["close"]) == ["munmap"]


@fresh
def test_before_fork_init_it_is_not_protected_and_warns_once():
    with pytest.warns(UnprotectedWarning, match="fork_init") as caught:
        first, second = Buffer(1), Buffer(1)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert not first.protected and not second.protected and "not protected" in repr(first)
    assert rdmafork.protected_ranges()[0].protected_by is None
    first.close(), second.close()
    with pytest.raises(OSError, match="too late") as late:
        rdmafork.fork_init()
    assert late.value.errno == errno.EINVAL


@fresh
def test_a_warning_that_is_an_error_leaves_nothing():
    def guards():
        return {m.start for m in smaps() if m.permissions == "---p"}

    before = guards()
    with pytest.raises(UnprotectedWarning):
        Buffer(1)
    assert rdmafork.stats().registrations == 0 and guards() == before
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnprotectedWarning)
        with Buffer(1):
            assert guards() > before


@fresh(env={"RDMAV_FORK_SAFE": "0"})
def test_the_environment_starts_the_engine_for_it():
    assert Buffer(1).protected
    assert rdmafork.is_fork_initialized() == rdmafork.ForkStatus.ENABLED
