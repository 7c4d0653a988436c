"""After a refusal of the kernel all is as before or protected, and nothing else is claimed.

tests/engine fails calls one by one. Here the kernel itself refuses them: to a sandbox, at a limit,
for memory of every kind there is.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import both_modes, child, fork_once, fresh, needs_pins, run
from memory import HUGE, PAGE, libc, map_at, pool_lock, private_map, shared_map, smaps
from seccomp import (
    DOFORK,
    DONTFORK,
    KEEPONFORK,
    PROCMAP_QUERY,
    REFUSALS,
    WIPEONFORK,
    WITHOUT_PROC,
    check_claims,
    marks,
    refuse,
)

import rdmafork

# ---- refused by a sandbox -------------------------------------------------------------------

# Calls, and uses of them, that a sandbox may refuse once the engine runs.
SANDBOXES = {
    "madvise": ("madvise", {}),
    "dontfork": ("madvise", {"argument": 2, "value": DONTFORK}),
    "dofork": ("madvise", {"argument": 2, "value": DOFORK}),
    "wipeonfork": ("madvise", {"argument": 2, "value": WIPEONFORK}),
    "keeponfork": ("madvise", {"argument": 2, "value": KEEPONFORK}),
    "procmap_query": ("ioctl", {"argument": 1, "value": PROCMAP_QUERY}),
    "process_vm_readv": ("process_vm_readv", {}),
    "mremap": ("mremap", {}),
    "io_uring_setup": ("io_uring_setup", {}),
    "socket": ("socket", {}),
    "dup3": ("dup3", {}),
}


class Scene:
    """Of each kind and policy one that is registered before, and one to be."""

    def __init__(self, mode, edges=None):
        rdmafork.fork_init(mode)
        self.memory, self.address = private_map(64 * PAGE)
        self.memory[:] = b"m" * len(self.memory)
        self.shared, self.shared_address = shared_map(4 * PAGE)
        self.before = set(marks())
        self.held = [
            rdmafork.register(self.part(0, 8)),
            rdmafork.register(self.part(4, 8)),
            rdmafork.register(self.part(16, 2, 100)),
            rdmafork.register(self.shared),
            rdmafork.register(self.part(24, 2), on_fork="wipe"),
            rdmafork.register_address(self.address + 28 * PAGE, 2 * PAGE),
        ]
        fork_once()

    def part(self, first, count, more=0):
        return memoryview(self.memory)[first * PAGE : (first + count) * PAGE + more]

    def register(self, first, **options):
        """A registration, or None, and then nothing has changed."""
        numbers = rdmafork.stats().registrations, rdmafork.protected_ranges()
        try:
            return rdmafork.register(self.part(first, 3, 7), **options)
        except OSError as error:
            assert error.errno and f"0x{self.address + first * PAGE:x}" in str(error), error
            assert (rdmafork.stats().registrations, rdmafork.protected_ranges()) == numbers
            return None

    def try_all(self):
        """Each call does as much as can be done, and every claim holds, in children too."""
        new = [self.register(32), self.register(40, on_fork="wipe")]
        new.append(rdmafork.register(self.part(48, 4), on_fork="omit") if all(new) else None)
        for registration in (*new, *self.held[::2]):
            check_claims(self.before)
            self.check_fork()
            if registration:
                registration.close()
        check_claims(self.before)
        self.check_fork()

    def check_fork(self):
        wiped = [r for r in rdmafork.protected_ranges() if (r.on_fork, r.protected_by) == (
            "wipe", "mark")]  # fmt: skip

        def look():
            assert rdmafork.stats().registrations == 0
            assert bytes(self.shared[:PAGE]) == bytes(PAGE)
            for item in wiped:
                assert ctypes.string_at(item.start, PAGE) == bytes(PAGE)
            # Memory that is not registered, beside registered memory.
            assert ctypes.string_at(self.address + 60 * PAGE, PAGE) == b"m" * PAGE
            return True

        assert child(look) is True
        check_claims(self.before)
        assert self.memory[:] == b"m" * len(self.memory)

    def end(self, released):
        for registration in self.held:
            registration.close()
        fork_once()
        numbers = rdmafork.stats()
        assert numbers.registrations == 0 and rdmafork.protected_ranges() == []
        check_claims(self.before)
        if released:
            assert numbers.marked_bytes == numbers.still_marked_bytes == 0
            assert set(marks()) <= self.before


@both_modes
@pytest.mark.parametrize("number", REFUSALS)
def test_in_a_sandbox_nothing_is_claimed_that_does_not_hold(mode, number):
    refused = run(_in_sandboxes, mode, number)
    assert refused == len(SANDBOXES)


def _in_sandboxes(mode, number):
    return sum(child(_in_a_sandbox, name, mode, number) for name in SANDBOXES)


def _in_a_sandbox(name, mode, number):
    scene = Scene(mode)
    call, options = SANDBOXES[name]
    refuse(call, number, **options)
    scene.try_all()
    # Memory that could not be unmarked stays marked, and is counted.
    scene.end(released=name not in ("madvise", "dofork", "keeponfork"))
    return 1


@pytest.mark.parametrize("number", REFUSALS)
def test_begun_in_a_sandbox_it_works_or_says_so(number):
    run(_begun_in_sandboxes, number)


def _begun_in_sandboxes(number):
    for name in SANDBOXES:
        assert child(_begun_in_a_sandbox, name, number) is True, name


def _begun_in_a_sandbox(name, number):
    call, options = SANDBOXES[name]
    refuse(call, number, **options)
    memory, _address = private_map(8 * PAGE)
    before = set(marks())
    try:
        rdmafork.fork_init("eager")
        registration = rdmafork.register(memory)
    except OSError as error:
        assert "madvise" in str(error) or "max_map_count" in str(error), error
        assert error.errno in (number, errno.ENOSYS, errno.ENOMEM), error
        assert rdmafork.stats().registrations == 0
    else:
        check_claims(before)
        fork_once()
        registration.close()
    check_claims(before)
    return True


# ---- without /proc --------------------------------------------------------------------------


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="hiding /proc takes root and unshare"
)
@both_modes
def test_without_proc_calls_that_need_no_question_work(mode, hugepages):
    hugepages(4)
    if subprocess.run([*WITHOUT_PROC, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made")
    run(_without_proc, mode, prefix=WITHOUT_PROC)


def _without_proc(mode):
    assert not os.path.exists("/proc/self/maps")
    rdmafork.fork_init(mode)
    memory, address = private_map(16 * PAGE)
    memory[:] = b"m" * len(memory)
    shared, _ = shared_map(4 * PAGE)
    with rdmafork.register(memory), rdmafork.register(shared):
        assert child(lambda: shared[0]) == 0
        (private,) = [r for r in rdmafork.protected_ranges() if r.start <= address < r.end]
        # Nothing tells private from shared memory: the kernel copies it, where it does. A
        # lazy registration waits for a fork that can ask.
        trusted = rdmafork.kernel_info().copy_on_fork_trusted
        left = "pending" if mode == "lazy" else "kernel"
        assert private.protected_by == (left if trusted else "mark")
        pid = os.fork()
        if not pid:
            there = (ctypes.c_char * 1)()
            own = ctypes.cast(there, ctypes.c_void_p).value
            one = (ctypes.c_size_t * 2)(own, 1)
            other = (ctypes.c_size_t * 2)(address, 1)
            got = libc.process_vm_readv(os.getpid(), one, 1, other, 1, 0)
            os._exit(got != (1 if trusted else -1))
        assert os.waitpid(pid, 0)[1] == 0
    numbers = rdmafork.stats()
    assert numbers.registrations == numbers.marked_bytes == numbers.still_marked_bytes == 0
    huge, at = mmap.mmap(-1, 2 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000), 0
    at = ctypes.addressof(ctypes.c_char.from_buffer(huge))
    with rdmafork.register(huge):  # aligned to its pages: no question
        fork_once()
    if mode == "eager":
        with pytest.raises(OSError, match=r"/proc/self/maps cannot be read.*mount /proc") as raised:
            rdmafork.register_address(at + PAGE, HUGE, owner=huge)
        assert raised.value.errno == errno.ENOENT and f"0x{at + PAGE:x}" in str(raised.value)
    assert rdmafork.stats().registrations == 0 and rdmafork.protected_ranges() == []


# ---- limits of resources --------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_NOFILE", "RLIMIT_MEMLOCK"])
def test_at_a_limit_of_resources(limit, mode):
    run(_at_a_limit, limit, mode)


def _at_a_limit(name, mode):
    scene = Scene(mode)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    limit = {"RLIMIT_AS": mapped, "RLIMIT_DATA": 0, "RLIMIT_NOFILE": 0, "RLIMIT_MEMLOCK": 0}[name]
    kind = getattr(resource, name)
    before = resource.getrlimit(kind)
    new = []
    resource.setrlimit(kind, (limit, before[1]))
    for i in range(32, 60, 4):
        with contextlib.suppress(OSError):
            new.append(rdmafork.register(scene.part(i, 3, 7)))
    forked = libc.fork()
    if not forked:
        os._exit(0)
    closed = scene.held.pop(0)
    closed.close()
    resource.setrlimit(kind, before)
    if forked > 0:
        assert os.waitpid(forked, 0)[1] == 0
    check_claims(scene.before)
    scene.check_fork()
    assert all(registration.protected for registration in new)
    for registration in new:
        registration.close()
    scene.end(released=True)


# ---- memory of every kind -------------------------------------------------------------------

GUARD_INSTALL, MSEAL, MEMFD_SECRET, USERFAULTFD = 102, 462, 447, 323


def checked(result, what):
    if result in (-1, ctypes.c_void_p(-1).value):
        pytest.skip(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def call(what, *arguments):
    return checked(libc.syscall(*(ctypes.c_long(each) for each in arguments)), what)


def guarded():
    at = map_at(0, 8 * PAGE)
    checked(libc.madvise(at + 3 * PAGE, PAGE, GUARD_INSTALL), "MADV_GUARD_INSTALL")
    return at


def sealed():
    at = map_at(0, 8 * PAGE)
    call("mseal()", MSEAL, at, 8 * PAGE, 0)
    return at


def of_file(fd, flags=mmap.MAP_SHARED, prot=3, nbytes=8 * PAGE):
    return checked(libc.mmap(None, nbytes, prot, flags, fd, 0), "mmap()")


def secret():
    fd = call("memfd_secret()", MEMFD_SECRET, 0)
    os.ftruncate(fd, 8 * PAGE)
    return of_file(fd)


def beyond_its_end():
    fd = os.memfd_create("short")
    os.ftruncate(fd, PAGE)
    return of_file(fd, mmap.MAP_PRIVATE)


def growing_down():
    """Its lowest page, with room below."""
    at = map_at(0, 64 * PAGE, prot=0)
    libc.munmap(at, 64 * PAGE)
    return map_at(at + 48 * PAGE, 8 * PAGE, flags=0x100)


def faulted_by_user():
    fd = call("userfaultfd()", USERFAULTFD, 1)
    at = map_at(0, 8 * PAGE)
    api = (ctypes.c_uint64 * 3)(0xAA, 0, 0)
    checked(libc.ioctl(fd, ctypes.c_ulong(0xC018AA3F), api), "UFFDIO_API")
    register = (ctypes.c_uint64 * 4)(at, 8 * PAGE, 1, 0)
    checked(libc.ioctl(fd, ctypes.c_ulong(0xC020AA00), register), "UFFDIO_REGISTER")
    return at


def named(name):
    """Pages the kernel put there itself."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(name):
            return int(line.split("-")[0], 16)
    pytest.skip(f"no {name} here")


def code():
    """Nobody's who is to run in the child: it is left out there."""
    with open(rdmafork.get_library(), "rb") as file:
        return of_file(file.fileno(), mmap.MAP_PRIVATE, prot=5)


def locked():
    return checked(libc.mmap(None, 8 * PAGE, 3, 0x22 | 0x2000, -1, 0), "MAP_LOCKED")


def droppable():
    return checked(libc.mmap(None, 8 * PAGE, 3, 0x28, -1, 0), "MAP_DROPPABLE")


def huge_without_a_pool():
    return checked(libc.mmap(None, 2 * HUGE, 3, 0x22 | 0x40000 | 0x4000, -1, 0), "MAP_HUGETLB")


# The kernel refuses to unmark them, marked or not, and that is counted as still marked.
UNMARKED_BY_NOBODY = {"vvar", "droppable"}

KINDS = {
    "guard regions": (guarded, 8),
    "sealed": (sealed, 8),
    "secret": (secret, 8),
    "a file's beyond its end": (beyond_its_end, 8),
    "a stack that grows": (growing_down, 8),
    "userfaultfd": (faulted_by_user, 8),
    "vdso": (lambda: named("[vdso]"), 1),
    "vvar": (lambda: named("[vvar]"), 1),
    "code": (code, 8),
    "no access": (lambda: map_at(0, 8 * PAGE, prot=0), 8),
    "read-only": (lambda: map_at(0, 8 * PAGE, prot=1), 8),
    "locked": (locked, 8),
    "droppable": (droppable, 8),
    "huge without a pool": (huge_without_a_pool, 2 * HUGE // PAGE),
}


@both_modes
@pool_lock()  # one of the kinds takes a free huge page, if there is one
def test_memory_of_every_kind_is_protected_or_refused(mode):
    done = run(_of_every_kind, mode)
    print({kind: reason for kind, reason in done.items() if reason})
    assert sum(not reason for reason in done.values()) >= len(KINDS) // 2


def _of_every_kind(mode):
    return {kind: child(_of_a_kind, kind, mode) for kind in KINDS}


def _of_a_kind(kind, mode):
    """Why there is none of it here, or None."""
    make, npages = KINDS[kind]
    rdmafork.fork_init(mode)
    try:
        at = make()
    except pytest.skip.Exception as skip:
        return skip.msg
    before = marks()
    owner = object()
    for options in ({"owner": owner}, {}, {"owner": owner, "on_fork": "wipe"}):
        for first, count in ((0, npages), (1, npages - 2)) if npages > 2 else ((0, npages),):
            start, nbytes = at + first * PAGE, count * PAGE
            try:
                registration = rdmafork.register_address(start, nbytes, **options)
            except OSError as error:
                words = str(error)
                assert f"0x{start:x}-0x{start + nbytes:x}" in words and error.errno, words
                assert any(w in words for w in ("refuses", "mapped")), words
            else:
                check_claims(before)
                fork_once()
                check_claims(before)
                by = {r.protected_by for r in rdmafork.protected_ranges()}
                assert by <= {"mark", "kernel", "shared"}, by
                # A child lacks the marked part of it, or finds zeros there.
                marked = [page for page in marks() if start <= page < start + nbytes][:64]
                found = child(look_at, marked)
                expected = [found_of_marked(options.get("on_fork"), marked)]
                if kind == "huge without a pool" and first:
                    # No registration fills the page: a copy, of as much as can be read.
                    expected = [{}, found_of_marked("wipe", marked)]
                assert found in expected, (kind, found, expected)
                registration.close()
            fork_once()
            assert marks() == before
            assert rdmafork.stats().registrations == 0
            assert kind in UNMARKED_BY_NOBODY or rdmafork.stats().still_marked_bytes == 0
    return None


def look_at(pages):
    """{page: its permissions, and whether it is full of zeros}, of the pages that are mapped."""
    found = {}
    for mapping in smaps():
        for page in pages:
            if mapping.start <= page < mapping.end and mapping.permissions != "---p":
                readable = mapping.permissions[0] == "r"
                zeros = readable and ctypes.string_at(page, PAGE) == bytes(PAGE)
                found[page] = mapping.permissions, zeros
    return found


def found_of_marked(on_fork, pages):
    """The values that look_at() is to find in a child."""
    if on_fork != "wipe":
        return {}
    return {
        page: (m.permissions, m.permissions[0] == "r")
        for m in smaps()
        for page in pages
        if m.start <= page < m.end and m.permissions != "---p"
    }


@both_modes
@fresh
def test_a_stack_grows_after_it_was_registered(mode):
    """Down from registered pages: new pages are not registered, and stay a stack."""
    rdmafork.fork_init(mode)
    before = marks()
    # First the engine takes its memory, which may come to lie below, as near as a stack may grow.
    _memory, other = private_map(PAGE)
    rdmafork.register_address(other, PAGE).close()
    fork_once()
    at = growing_down()
    with rdmafork.register_address(at, 4 * PAGE):
        assert set(marks()) - set(before) == set(range(at, at + 4 * PAGE, PAGE))
        ctypes.memset(at - PAGE, 1, PAGE)
        fork_once()
        check_claims({*before, at - PAGE})
        assert ctypes.string_at(at - PAGE, 1) == b"\1"
    check_claims({*before, at - PAGE})
    assert not any(at <= page < at + 8 * PAGE for page in marks())


# ---- a fork that cannot be made -------------------------------------------------------------


@both_modes
@needs_pins
def test_a_fork_that_the_pool_of_huge_pages_fails(mode, hugepages):
    """ENOMEM: a huge page is pinned, nobody registered it, and none is left for its copy."""
    hugepages(2)
    run(_the_pool_fails, mode)


def _the_pool_fails(mode):
    from rdmafork import _pins

    if not rdmafork.kernel_info().copy_on_fork:
        pytest.skip("this kernel does not copy pinned pages")
    scene = Scene(mode)
    huge = mmap.mmap(-1, 2 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)
    huge[::HUGE] = b"hh"
    before, ordinary = rdmafork.stats().forks, set(marks())
    with _pins.Pins(huge):
        scene.before |= set(marks()) - ordinary  # the rings, which are no memory of ours
        for _ in range(3):
            with pytest.raises(OSError) as raised:
                os.fork()
            assert raised.value.errno == errno.ENOMEM
            check_claims(scene.before)
        assert rdmafork.stats().forks == before + 3
        # With it registered it is not to be copied.
        with rdmafork.register(huge):
            scene.check_fork()
    scene.try_all()
    scene.end(released=True)
