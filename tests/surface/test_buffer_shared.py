"""Buffer(nbytes, shared=True): forked workers, and others by its descriptor, have the memory."""

import errno
import fcntl
import gc
import mmap
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import warnings
from multiprocessing.reduction import DupFd

import pytest
from conftest import both_modes, child, fork_once, fresh, modes_and_trust, needs_pins
from memory import HUGE, PAGE, free_huge_pages, mappings, mappings_now, vm_flags, write
from seccomp import refuse

import rdmafork
from rdmafork import Buffer, UnprotectedWarning
from rdmafork._pins import Pins


def open_files():
    return sorted(map(int, os.listdir("/proc/self/fd")))[:-1]  # the folder's own is the last


def put(view, at, data):
    view[at : at + len(data)] = data


# ---- forked workers ---------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 5000, HUGE + 1])
@modes_and_trust
def test_children_read_and_write_the_same_pages(nbytes, mode, trust, run):
    run(share_with_children, nbytes, mode, env={"RDMAFORK_TRUST_COPYING": trust or None})


def share_with_children(nbytes, mode):
    rdmafork.fork_init(mode)
    buffer = Buffer(nbytes, shared=True)
    view = memoryview(buffer)
    assert len(view) == nbytes and view[-1] == 0
    (mapping,) = mappings(buffer.address, 1)
    assert mapping.permissions == "rw-s"
    for guard in (buffer.address - 1, buffer.address + (nbytes + PAGE - 1) // PAGE * PAGE):
        assert mappings(guard, 1)[0].permissions == "---p"
    for i in range(3):
        view[-1] = 10 + i
        assert child(lambda: view[-1]) == 10 + i  # a view that is inherited
        assert child(lambda i=i: put(memoryview(buffer), nbytes - 1, bytes([20 + i]))) is None
        assert view[-1] == 20 + i
        # A child's child, and a registration of the child's own.
        assert child(lambda i=i: child(put, view, nbytes - 1, bytes([30 + i]))) is None
        assert view[-1] == 30 + i

        def register_there(i=i):
            with rdmafork.register(buffer) as own:
                assert own.address == buffer.address
                child(put, view, nbytes - 1, bytes([40 + i]))

        assert child(register_there) is None
        assert view[-1] == 40 + i
        assert "dc" not in vm_flags(buffer.address)
    (found,) = rdmafork.protected_ranges()
    assert (found.registrations, found.protected_by) == (1, "shared")


pool_view = None


def add_one(at):
    pool_view[at] += 1
    return pool_view[at]


@fresh
def test_a_pool_of_workers_works_in_place():
    global pool_view
    rdmafork.fork_init()
    with Buffer(64, shared=True) as buffer:
        pool_view = memoryview(buffer)
        with multiprocessing.get_context("fork").Pool(3) as pool:
            assert pool.map(add_one, range(64)) == [1] * 64
            assert pool.map(add_one, range(64)) == [2] * 64
        assert bytes(pool_view) == b"\2" * 64
        pool_view.release()


@both_modes
@fresh
def test_a_child_can_ask_about_it(mode):
    rdmafork.fork_init(mode)
    buffer = Buffer(5000, shared=True)
    assert not buffer.inherited and repr(buffer).endswith("shared, protected>")

    def asked():
        with buffer as entered:
            assert entered is buffer and buffer.inherited and not buffer.closed
            assert repr(buffer).endswith("shared, inherited>")
            assert buffer.obj is buffer
            return len(buffer), buffer.nbytes, buffer.address, buffer.page_size, buffer.fileno()

    def closed():
        view = memoryview(buffer)
        buffer.close()
        buffer.close()
        assert buffer.closed and "closed" in repr(buffer)
        with pytest.raises(ValueError, match="closed"):
            memoryview(buffer)
        with pytest.raises(ValueError, match="closed"):
            buffer.fileno()
        put(view, 0, b"later")  # mappings stay

    assert child(asked) == (5000, 5000, buffer.address, PAGE, buffer.fileno())
    assert child(closed) is None
    assert memoryview(buffer)[:5] == b"later" and os.fstat(buffer.fileno()).st_size == 5000


@both_modes
@fresh
def test_huge_pages_are_shared_too(mode, huge):
    rdmafork.fork_init(mode)
    before = free_huge_pages()
    buffer = Buffer(HUGE + 1, page_size=HUGE, shared=True)
    assert (len(buffer), buffer.page_size) == (HUGE + 1, HUGE)
    assert "in pages of 2 MiB, shared" in repr(buffer)
    (mapping,) = mappings(buffer.address, 1)
    assert (mapping.permissions, mapping.page_size) == ("rw-s", HUGE)
    assert (mapping.start, mapping.end) == (buffer.address, buffer.address + 2 * HUGE)
    view = memoryview(buffer)
    for i in range(3):
        assert child(put, view, HUGE, bytes([1 + i])) is None
        assert view[HUGE] == 1 + i
    attached = Buffer.attach(buffer.fileno())
    assert (len(attached), attached.page_size) == (2 * HUGE, HUGE)  # whole pages
    put(memoryview(attached), 0, b"both")
    assert view[:4] == b"both" and free_huge_pages() == before - 2
    view.release()
    buffer.close()
    attached.close()
    assert free_huge_pages() == before == huge
    with pytest.raises(OSError, match=f"{huge + 1} needed, {huge} free") as caught:
        Buffer((huge + 1) * HUGE, page_size=HUGE, shared=True)
    assert caught.value.errno == errno.ENOMEM


# ---- others, by its descriptor ----------------------------------------------------------


def answer_in(handle):
    rdmafork.fork_init()
    fd = handle.detach()
    with Buffer.attach(fd) as buffer:
        os.close(fd)
        with memoryview(buffer) as view:
            view[:8] = bytes(reversed(view[:8]))


@fresh
def test_a_worker_that_was_spawned():
    rdmafork.fork_init()
    with Buffer(5000, shared=True) as buffer, memoryview(buffer) as view:
        view[:8] = b"12345678"
        for method in ("spawn", "forkserver"):
            context = multiprocessing.get_context(method)
            expected = bytes(reversed(view[:8]))
            process = context.Process(target=answer_in, args=(DupFd(buffer.fileno()),))
            process.start()
            process.join()
            assert process.exitcode == 0 and bytes(view[:8]) == expected


PROGRAM = """
import sys, rdmafork
rdmafork.fork_init()
buffer = rdmafork.Buffer.attach(int(sys.argv[1]))
memoryview(buffer)[:5] = b"other"
print(len(buffer), buffer.page_size, buffer.protected)
"""


@fresh
def test_a_spawned_program_attaches_the_buffer():
    rdmafork.fork_init()
    buffer = Buffer(5000, shared=True)
    fd = buffer.fileno()
    command = [sys.executable, "-c", PROGRAM, str(fd)]
    done = subprocess.run(command, pass_fds=[fd], text=True, stdout=subprocess.PIPE)
    assert done.returncode == 0 and done.stdout == f"5000 {PAGE} True\n"
    assert memoryview(buffer)[:5] == b"other"
    # Unasked, no program gets it.
    done = subprocess.run(command, close_fds=False, text=True, stderr=subprocess.PIPE)
    assert done.returncode == 1 and "Bad file descriptor" in done.stderr


@needs_pins
@fresh
def test_a_worker_needs_no_fork_init_to_attach_it():
    """Nothing can happen to shared memory at a fork, so nothing is warned of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Buffer(5000, shared=True) as buffer, Buffer.attach(buffer.fileno()) as other:
            with Pins(other) as pins:
                device = os.memfd_create("device")
                assert child(put, memoryview(buffer), 0, b"worker") is None
                assert pins.write_fixed(device, other.address, 6) == 6
                assert os.pread(device, 6, 0) == b"worker"
                os.close(device)
        with pytest.raises(UnprotectedWarning):
            Buffer(5000)


@fresh
def test_it_lives_until_all_have_closed_it():
    rdmafork.fork_init()
    here, there = socket.socketpair()
    buffer = Buffer(5000, shared=True)
    put(memoryview(buffer), 4999, b"x")
    socket.send_fds(here, [b"fd"], [buffer.fileno()])
    files = open_files()
    buffer.close()
    _, (fd,), _, _ = socket.recv_fds(there, 10, 1)
    attached = Buffer.attach(fd)
    assert memoryview(attached)[4999] == ord("x")
    with Buffer.attach(attached.fileno()) as again, memoryview(again) as view:
        put(view, 0, b"again")
    assert memoryview(attached)[:5] == b"again"
    os.close(fd)  # the caller's own
    assert child(lambda: bytes(memoryview(attached)[:5])) == b"again"
    attached.close()
    assert len(open_files()) == len(files) - 1


@fresh
def test_its_size_lasts():
    """Else a process that has the descriptor could make every touch a SIGBUS."""
    rdmafork.fork_init()
    with Buffer(5000, shared=True) as buffer:
        for size in (0, PAGE, 3 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(buffer.fileno(), size)
        assert os.fstat(buffer.fileno()).st_size == 5000


@fresh
def test_descriptors_that_cannot_be_attached(tmp_path):
    rdmafork.fork_init()
    path = tmp_path / "file"
    path.write_bytes(b"x" * 5000)
    unsealed, empty = os.memfd_create("unsealed"), os.memfd_create("empty", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 5000)
    fcntl.fcntl(empty, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with path.open("r+b") as file, Buffer(100) as private:
        files = open_files()
        lines = mappings_now()
        for fd in (file.fileno(), unsealed, empty, os.pipe()[0]):
            with pytest.raises(ValueError, match=f"descriptor {fd} does not belong to a shared"):
                Buffer.attach(fd)
        for fd in (-1, 12345):
            with pytest.raises(OSError, match="Bad file descriptor"):
                Buffer.attach(fd)
        for wrong in (None, "1", file, 1.0):
            with pytest.raises(TypeError):
                Buffer.attach(wrong)
        with pytest.raises(ValueError, match="not shared"):
            private.fileno()
        assert mappings_now() == lines and len(open_files()) == len(files) + 2
    # To be mapped writable it has to be open for writing.
    with Buffer(100, shared=True) as buffer:
        fd = os.open(f"/proc/self/fd/{buffer.fileno()}", os.O_RDONLY)
        with pytest.raises(PermissionError, match="cannot make a Buffer of 100 bytes"):
            Buffer.attach(fd)


# ---- failures ----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["wipe", "keep"])
def test_shared_buffers_refuse_on_fork(policy):
    with pytest.raises(ValueError, match=f"on_fork='{policy}' is for private memory"):
        Buffer(1, on_fork=policy, shared=True)


@fresh
def test_a_buffer_that_could_not_be_made_closes_no_descriptor():
    files = open_files()
    assert 0 in files
    for arguments, options in (
        ((), {}),
        ((1,), {"pages": 1}),
        ((0,), {"shared": True}),
        ((1,), {"on_fork": "wipe", "shared": True}),
        ((1,), {"on_fork": "none"}),
        ((1,), {"page_size": 12345, "shared": True}),
    ):
        with pytest.raises((TypeError, ValueError)):
            Buffer(*arguments, **options)
    with pytest.raises(TypeError):
        Buffer.__new__(Buffer)
    gc.collect()
    assert open_files() == files


@fresh
def test_it_cannot_be_pickled():
    rdmafork.fork_init()
    with pytest.raises(TypeError, match=r"fileno\(\).*attach\(\)"):
        Buffer(1, shared=True).__reduce__()


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
@pytest.mark.parametrize("call", ["memfd_create", "ftruncate", "fcntl", "mmap"])
@fresh
def test_a_call_that_is_refused_leaves_nothing(call, number):
    rdmafork.fork_init()
    Buffer(1, shared=True).close()
    lines, files = mappings_now(), open_files()
    if call == "fcntl":
        refuse(call, number, argument=1, value=fcntl.F_ADD_SEALS)
    else:
        # MAP_SHARED | MAP_FIXED_NOREPLACE
        refuse(call, number, **{"argument": 3, "value": 0x100001} if call == "mmap" else {})
    for _ in range(3):
        with pytest.raises(OSError, match="cannot make a Buffer of 5000 bytes") as caught:
            Buffer(5000, shared=True)
        assert caught.value.errno == number
    assert (mappings_now(), open_files()) == (lines, files)
    assert rdmafork.stats().registrations == 0


@fresh
def test_too_many_open_files():
    rdmafork.fork_init()
    with Buffer(5000, shared=True) as buffer:
        lines = mappings_now()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (buffer.fileno() + 1, limits[1]))
        for make in (lambda: Buffer(5000, shared=True), lambda: Buffer.attach(buffer.fileno())):
            with pytest.raises(OSError, match="cannot make a Buffer of 5000 bytes") as caught:
                make()
            assert caught.value.errno == errno.EMFILE
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert mappings_now() == lines


@fresh
def test_the_last_view_closes_the_descriptor():
    rdmafork.fork_init()
    lines, files = mappings_now(), open_files()
    view = memoryview(Buffer(5000, shared=True))
    fork_once()
    assert len(open_files()) == len(files) + 1
    with pytest.raises(BufferError, match="exported"):
        view.obj.close()
    del view
    gc.collect()
    assert (mappings_now(), open_files()) == (lines, files)


# ---- a device and its bytes ---------------------------------------------------------------


@needs_pins
@modes_and_trust
def test_a_device_and_all_children_see_the_same_bytes(mode, trust, run):
    run(look_from_a_device, mode, None, env={"RDMAFORK_TRUST_COPYING": trust or None})


@needs_pins
@both_modes
def test_a_device_and_all_children_see_the_same_huge_pages(mode, huge, run):
    run(look_from_a_device, mode, HUGE)


def look_from_a_device(mode, page_size):
    rdmafork.fork_init(mode)
    device = os.memfd_create("device")
    buffer = Buffer(2 * HUGE, page_size=page_size, shared=True)
    view = memoryview(buffer)
    far = HUGE + 5 * PAGE + 3
    with Pins(view) as pins:
        for i in range(4):
            # The device reads what a child wrote,
            wrote = b"child %d" % i
            assert child(put, view, far, wrote) is None
            assert pins.write_fixed(device, buffer.address + far, len(wrote)) == len(wrote)
            assert os.pread(device, 100, 0) == wrote == view[far : far + len(wrote)]
            # and children, new and old, what the device wrote.
            start, go = os.pipe()
            answer, say = os.pipe()
            old = os.fork()
            if not old:
                os.read(start, 1)
                os.write(say, view[far : far + 6])
                os._exit(0)
            os.pwrite(device, b"device", 0)
            assert pins.read_fixed(device, buffer.address + far, 6) == 6
            os.write(go, b"!")
            assert os.read(answer, 6) == b"device" == view[far : far + 6]
            assert child(lambda: bytes(view[far : far + 6])) == b"device"
            assert os.waitpid(old, 0)[1] == 0
            write(buffer.address + far, b"parent")
            assert pins.write_fixed(device, buffer.address + far, 6) == 6
            assert os.pread(device, 6, 0) == b"parent"
            for fd in (start, go, answer, say):
                os.close(fd)
            os.ftruncate(device, 0)


@fresh
def test_other_languages_map_its_file():
    rdmafork.fork_init()
    with Buffer(5000, shared=True) as buffer, memoryview(buffer) as view:
        with mmap.mmap(buffer.fileno(), 0) as mapped:
            mapped[:4] = b"mmap"
            assert len(mapped) == 5000 and view[:4] == b"mmap"
