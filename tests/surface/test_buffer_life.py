"""Buffer beyond one thread and one process: in children, in threads, and when calls fail."""

import ctypes
import errno
import gc
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from conftest import both_modes, child, fork_once, fresh, in_threads
from memory import HUGE, PAGE, huge_page_pool, is_mapped, libc, map_at, read, smaps, write
from strace import NOISE, names, traced

import rdmafork
from rdmafork import Buffer, InheritedError, UnprotectedWarning

np = pytest.importorskip("numpy")


# ---- children -----------------------------------------------------------------------------


@both_modes
@fresh
def test_in_a_child_views_fault_and_the_rest_raises(mode):
    rdmafork.fork_init(mode)
    buffer = Buffer(5000)
    address, view, array = buffer.address, memoryview(buffer), np.frombuffer(buffer, np.uint8)
    view[:] = b"p" * 5000

    def uses():
        assert buffer.inherited and not buffer.closed and "inherited" in repr(buffer)
        for use in (memoryview, np.frombuffer, rdmafork.register, len, Buffer.__enter__, bytes):
            with pytest.raises(InheritedError):
                use(buffer)
        for name in ("address", "nbytes", "page_size", "on_fork", "protected", "obj"):
            with pytest.raises(InheritedError):
                getattr(buffer, name)

    def closes():
        # Views that are exported do not matter: there is nothing behind them.
        buffer.close()
        buffer.close()
        view.release()

    child(uses)
    child(closes)
    for touches in (
        lambda: view[0],
        lambda: int(array.sum()),
        lambda: view.__setitem__(0, 1),
        lambda: write(address + 2 * PAGE - 1, b"x"),
    ):
        assert child(touches) == signal.SIGSEGV
    assert bytes(view) == b"p" * 5000 and buffer.protected and not buffer.inherited


@both_modes
def test_in_a_child_closing_and_collecting_make_no_system_call(mode):
    sections = traced(
        f"""
        import gc
        rdmafork.fork_init({mode!r})
        closed, deleted, viewed = (rdmafork.Buffer(1 << 21) for _ in range(3))
        view = memoryview(viewed)
        pid = os.fork()
        if not pid:
            mark("/mark/child")
            closed.close()
            del closed, deleted
            view.release()
            del view, viewed
            gc.collect()
            mark("/mark/none")
            os._exit(0)
        os.waitpid(pid, 0)
        mark("/mark/parent")
        closed.close()
        """
    )
    assert sections["child"] == []
    assert "munmap" in names(sections["parent"])


@fresh
def test_views_and_their_buffer_may_be_one_garbage():
    """A warning is an error: a finalizer that raised would be one."""
    rdmafork.fork_init()
    for shared in (False, True):
        buffer = Buffer(5000, shared=shared)
        garbage = [buffer, memoryview(buffer)]
        garbage.append(garbage)
        address = buffer.address
        del buffer, garbage
        gc.collect()
        assert rdmafork.stats().registrations == 0
        assert not is_mapped(address)


@both_modes
@fresh
def test_a_child_s_mapping_in_its_place_stays(mode):
    """When the child collects its parent's Buffer, the addresses may be another's."""
    rdmafork.fork_init(mode)
    buffers = [Buffer(5000)]
    address = buffers[0].address

    def collects():
        map_at(address - PAGE, 4 * PAGE)
        write(address - PAGE, b"c" * 4 * PAGE)
        buffers.clear()
        gc.collect()
        return read(address - PAGE, 4 * PAGE) == b"c" * 4 * PAGE

    assert child(collects) is True
    assert read(address, 5000) == bytes(5000)


@both_modes
@fresh
def test_a_child_makes_its_own(mode):
    rdmafork.fork_init(mode)
    buffer = Buffer(5000)
    memoryview(buffer)[:] = b"p" * 5000

    def makes():
        with pytest.raises(InheritedError):
            memoryview(buffer)
        own = Buffer(7000)
        memoryview(own)[:] = b"c" * 7000
        assert own.protected and not own.inherited
        assert child(read, own.address) == signal.SIGSEGV
        assert bytes(own) == b"c" * 7000
        own.close()
        return rdmafork.stats().registrations

    assert child(makes) == 0
    assert bytes(buffer) == b"p" * 5000


@fresh
def test_an_unprotected_one_is_the_parents_all_the_same():
    """The child has a copy of the pages, under an object that is not its own."""
    with pytest.warns(UnprotectedWarning):
        buffer = Buffer(100)
    view = memoryview(buffer)
    view[0] = 1

    def uses():
        with pytest.raises(InheritedError):
            memoryview(buffer)
        view[0] += 1
        buffer.close()
        return view[0]

    assert child(uses) == 2
    assert view[0] == 1


def work(seed):
    """A worker's: its own heap, its own Buffer."""
    chance = random.Random(seed)
    heap = [bytes([chance.randrange(256)]) * chance.randrange(1, 100_000) for _ in range(200)]
    with Buffer(100_000) as own:
        array = np.frombuffer(own, np.uint8)
        array[:] = seed % 256
        total = int(array.sum()) + sum(map(len, heap))
        del array
    expected = 100_000 * (seed % 256) + sum(map(len, heap))
    return total == expected


@both_modes
@fresh
def test_workers_of_multiprocessing(mode):
    """Forked while arrays over Buffers are in use, they exit normally and take nothing along."""
    rdmafork.fork_init(mode)
    arrays = [np.frombuffer(Buffer(size), np.uint8) for size in (1, 5000, HUGE, 8 << 20)]
    for number, array in enumerate(arrays):
        array[:] = number + 1
    with multiprocessing.get_context("fork").Pool(4, maxtasksperchild=5) as pool:
        assert all(pool.map(work, range(60), chunksize=1))
        pool.close()
        pool.join()
    for number, array in enumerate(arrays):
        assert (array == number + 1).all()
    assert rdmafork.stats().registrations == len(arrays)


# ---- threads ------------------------------------------------------------------------------


@both_modes
@fresh
def test_threads_that_close_the_same_one(mode):
    sys.setswitchinterval(1e-6)
    rdmafork.fork_init(mode)
    places = set()
    for _ in range(200):
        buffer = Buffer(PAGE)
        places.add(buffer.address)
        in_threads([buffer.close] * 4)
        assert buffer.closed
    assert rdmafork.stats().registrations == 0
    # A page between guards; mappings of threads are larger.
    assert not [m for m in smaps() if m.start in places and m.end == m.start + PAGE]


@both_modes
@fresh
def test_views_are_exported_while_others_close(mode):
    """A thread that has a view can use it; a thread that comes too late gets an error."""
    sys.setswitchinterval(1e-6)
    rdmafork.fork_init(mode)
    refused = 0

    def views(buffer):
        for _ in range(20):
            try:
                view = memoryview(buffer)
            except ValueError:
                return
            view[:] = b"v" * len(view)
            time.sleep(1e-5)
            assert view[0] == view[-1] == ord("v")
            view.release()

    def closes(buffer):
        nonlocal refused
        time.sleep(random.random() / 1000)
        while not buffer.closed:
            try:
                buffer.close()
            except BufferError:
                refused += 1

    for _ in range(100):
        buffer = Buffer(3 * PAGE)
        in_threads([lambda: views(buffer), lambda: views(buffer), lambda: closes(buffer)])  # noqa: B023
    assert refused and rdmafork.stats().registrations == 0


@both_modes
@fresh
def test_forks_while_others_make_use_and_close(mode):
    """Children that collect inherited buffers at any moment exit normally."""
    sys.setswitchinterval(1e-5)
    rdmafork.fork_init(mode)
    stop = threading.Event()
    made = 0

    def makes():
        nonlocal made
        chance = random.Random(made)
        while not stop.is_set():
            with Buffer(chance.choice((1, 5000, HUGE + 1))) as buffer:
                view = memoryview(buffer)
                byte = chance.randrange(256)
                view[:] = bytes([byte]) * len(view)
                assert view[0] == view[-1] == byte
                view.release()
            made += 1

    def forks():
        try:
            for _ in range(40):
                pid = os.fork()
                if not pid:
                    code = 1
                    try:
                        gc.collect()
                        for thing in gc.get_objects():
                            if isinstance(thing, Buffer):
                                thing.close()
                        with Buffer(5000) as own:
                            memoryview(own)[:] = b"c" * 5000
                            code = 0 if bytes(own) == b"c" * 5000 else 2
                    finally:
                        os._exit(code)
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        finally:
            stop.set()

    in_threads([makes, makes, forks])
    assert made > 10 and rdmafork.stats().registrations == 0
    assert rdmafork.protected_ranges() == []


# ---- faults -------------------------------------------------------------------------------


def traced_here(function, inject=None):
    """Run function under strace from here on, in this thread: (its result, its calls).

    inject: what strace's -e inject= takes.
    """
    libc.prctl(0x59616D61, ctypes.c_ulong(-1 & (1 << 64) - 1), 0, 0, 0)  # any process may trace us
    status = Path(f"/proc/self/task/{threading.get_native_id()}/status")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = ["strace", "-qq", "-o", str(log), "-p", str(threading.get_native_id())]
        command += ["-e", f"inject={inject}"] if inject else []
        tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        until = time.monotonic() + 60
        while f"TracerPid:\t{tracer.pid}\n" not in status.read_text():
            if tracer.poll() is not None or time.monotonic() > until:
                pytest.skip(f"strace cannot attach: {tracer.communicate()[1]}")
            time.sleep(0.01)
        os.access("/mark/begin", 0)
        result = function()
        os.access("/mark/end", 0)
        tracer.terminate()
        tracer.communicate()
        text = log.read_text()
    body = text.partition('"/mark/begin"')[2].partition("\n")[2].partition('access("/mark/end"')[0]
    return result, [line for line in body.splitlines() if not NOISE.match(line)]


def left_mapped(calls):
    """The pages these calls have mapped and not unmapped."""
    pages = set()
    for call in calls:
        found = re.match(r"(mmap|munmap)\((\w+), (\d+).* = (\w+)", call)
        if not found or found[4] == "-":
            continue
        if found[1] == "mmap":
            first = int(found[4], 16)
        elif found[4] == "0":
            first = int(found[2], 16)
        else:
            continue
        span = set(range(first, first + int(found[3]), PAGE))
        pages = pages | span if found[1] == "mmap" else pages - span
    return pages


def make_and_close(nbytes, page_size):
    try:
        with Buffer(nbytes, page_size=page_size):
            return "made"
    except OSError as error:
        return error.errno


@pytest.mark.parametrize("nbytes, page_size", [(1, None), (HUGE, None), (1, HUGE)])
@both_modes
@fresh
def test_no_failed_call_leaves_anything(mode, nbytes, page_size, hugepages_for_faults):
    """Each call of making and closing one, failed in turn."""
    if not shutil.which("strace"):
        pytest.skip("no strace")
    rdmafork.fork_init(mode)
    keeps_tables = Buffer(1)
    make_and_close(nbytes, page_size)
    result, calls = traced_here(lambda: make_and_close(nbytes, page_size))
    assert result == "made" and left_mapped(calls) == set()
    counts, injected = {}, 0
    for number, call in enumerate(calls):
        name = call.partition("(")[0]
        counts[name] = counts.get(name, 0) + 1
        if number == len(calls) - 1:
            break  # close()'s munmap: the next test
        for error in ("ENOMEM", "EAGAIN", "EINVAL", "EPERM"):
            result, faulty = traced_here(
                lambda: make_and_close(nbytes, page_size),
                f"{name}:error={error}:when={counts[name]}",
            )
            assert sum("(INJECTED)" in line for line in faulty) == 1, (call, error, faulty)
            injected += 1
            # Without transparent huge pages it works too; what fork() leaves is undone later.
            if "MADV_HUGEPAGE" in call or "MADV_DOFORK" in call:
                expected = "made"
            # The engine looks at what is mapped, then tries again; the VMA limit is ENOMEM.
            elif "MADV_DONTFORK" in call and error in ("EINVAL", "EAGAIN"):
                expected = "made" if error == "EINVAL" else errno.ENOMEM
            else:
                expected = getattr(errno, error)
            assert result == expected, (call, error, faulty)
            assert left_mapped(faulty) == set(), (call, error, faulty)
            assert rdmafork.stats().registrations == 1
            (found,) = rdmafork.protected_ranges()
            assert (found.start, found.end) == (keeps_tables.address, keeps_tables.address + PAGE)
            fork_once()
            assert rdmafork.stats().still_marked_bytes == 0
    assert injected >= 8
    make_and_close(nbytes, page_size)


@pytest.fixture
def hugepages_for_faults(request):
    """Huge pages where the parameters ask for some; the value is their number."""
    if request.node.callspec.params["page_size"] is None:
        yield 0
        return
    with huge_page_pool(2) as npages:
        yield npages


@fresh
def test_memory_that_cannot_be_unmapped_is_told_of():
    """Sealed memory, for example. The registration is given back."""
    if not shutil.which("strace"):
        pytest.skip("no strace")
    rdmafork.fork_init()
    buffer = Buffer(1)
    address = buffer.address

    def close():
        with pytest.raises(OSError, match="stays mapped") as caught:
            buffer.close()
        return caught.value.errno

    assert traced_here(close, "munmap:error=EPERM:when=1")[0] == errno.EPERM
    assert buffer.closed and rdmafork.stats().registrations == 0 and is_mapped(address)


@fresh
def test_another_thread_may_take_the_hole_that_huge_pages_are_made_for(huge):
    """The huge pages are mapped elsewhere then, and the other mapping stays."""
    rdmafork.fork_init()
    if not shutil.which("strace"):
        pytest.skip("no strace")
    result, calls = traced_here(lambda: make_and_close(1, HUGE), "mmap:error=EEXIST:when=2")
    assert result == "made" and left_mapped(calls) == set()
    assert names(calls)[:6] == ["mmap", "munmap", "mmap", "munmap", "munmap", "mmap"]
    # Only the guards are unmapped: the middle is another's.
    middle = int(re.search(r"mmap\((0x\w+)", calls[2])[1], 16)
    for call in calls[3:5]:
        start, nbytes = re.match(r"munmap\((0x\w+), (\d+)", call).groups()
        assert not int(start, 16) <= middle < int(start, 16) + int(nbytes)
    result, calls = traced_here(lambda: make_and_close(1, HUGE), "mmap:error=EEXIST:when=2+2")
    assert result == errno.EAGAIN and left_mapped(calls) == set()
    assert rdmafork.stats().registrations == 0
