"""Every way a process can be made, with registered memory: the parent's is as it was, after each.

Which of them run fork handlers is asserted here; where none run there is nothing to protect
from, as parent and child share their memory until the child runs another program.
"""

import ctypes
import os
import platform
import pty
import pwd
import resource
import signal
import subprocess
import threading
import warnings

import pytest
from conftest import both_modes, compile_c, fork_once, fresh
from memory import PAGE, libc, map_at, marks_stay, private_map, read, vm_flags, write

import rdmafork

# Does it run fork handlers, so that stats().forks counts it? glibc 2.29 and later.
RUNS_HANDLERS = {
    "os.fork": True,
    "os.forkpty": True,
    "pty.fork": True,
    "fork": True,
    "subprocess preexec_fn": True,
    "subprocess user": True,
    "subprocess": False,
    "subprocess close_fds=False": False,
    "subprocess cwd": False,
    "subprocess start_new_session": False,
    "os.posix_spawn": False,
    "os.system": False,
    "os.popen": False,
    "system": False,
    "popen": False,
    "vfork": False,
    "_Fork": False,
}

libc.popen.restype = ctypes.c_void_p
libc.pclose.argtypes = [ctypes.c_void_p]


def wait(pid):
    assert pid > 0
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def by_fork(fork):
    pid = fork()
    pid, terminal = pid if isinstance(pid, tuple) else (pid, None)
    if not pid:
        os._exit(0)
    wait(pid)
    if terminal is not None:
        os.close(terminal)


def by_subprocess(**options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subprocess.run(["/bin/true"], check=True, **options)


def by_popen():
    with os.popen("true") as pipe:
        pipe.read()


def by_c_popen():
    pipe = libc.popen(b"true", b"r")
    assert pipe
    assert libc.pclose(pipe) == 0


# pop %r8; mov $58,%eax (vfork); syscall; test %eax,%eax; jnz parent;
# xor %edi,%edi; mov $60,%eax (exit); syscall; parent: jmp *%r8
# The two share their stack: what the child would spoil is kept in a register.
VFORK = {"x86_64": "4158 b83a000000 0f05 85c0 7509 31ff b83c000000 0f05 41ffe0"}


def by_vfork():
    code = VFORK.get(platform.machine())
    if not code:
        pytest.skip("machine code of another processor")
    at = map_at(0, PAGE, prot=7)
    write(at, bytes.fromhex(code))
    wait(ctypes.CFUNCTYPE(ctypes.c_int)(at)())


WAYS = {
    "os.fork": lambda: by_fork(os.fork),
    "os.forkpty": lambda: by_fork(os.forkpty),
    "pty.fork": lambda: by_fork(pty.fork),
    "fork": lambda: by_fork(libc.fork),
    "_Fork": lambda: by_fork(libc._Fork),
    "subprocess": by_subprocess,
    "subprocess preexec_fn": lambda: by_subprocess(preexec_fn=int),
    "subprocess user": lambda: by_subprocess(user=os.getuid()),
    "subprocess close_fds=False": lambda: by_subprocess(close_fds=False),
    "subprocess cwd": lambda: by_subprocess(cwd="/", close_fds=True, restore_signals=False),
    "subprocess start_new_session": lambda: by_subprocess(start_new_session=True),
    "os.posix_spawn": lambda: wait(os.posix_spawn("/bin/true", ["true"], {})),
    "os.system": lambda: os.system("true"),
    "os.popen": by_popen,
    "system": lambda: libc.system(b"true"),
    "popen": by_c_popen,
    "vfork": by_vfork,
}


def missing(way):
    if way == "_Fork" and not hasattr(libc, "_Fork"):
        pytest.skip("glibc has no _Fork()")


class Scene:
    """Registered memory of every kind, and facts that must be true of it after any fork."""

    def __init__(self, mode):
        self.mode = mode
        rdmafork.fork_init(mode)
        self.memory, self.address = private_map(64 * PAGE)
        self.memory[:] = bytes(range(256)) * (64 * PAGE // 256)
        # Not malloc()'s: where whole pages are marked a warning says what may happen to that.
        self.unaligned = memoryview(private_map(25 * PAGE)[0])[100:100_100]
        self.unaligned[:] = b"u" * 100_000
        self.loose = map_at(0, 4 * PAGE)
        write(self.loose, b"l" * 4 * PAGE)
        self.registrations = [
            rdmafork.register(self.memory),
            rdmafork.register(memoryview(self.memory)[PAGE:9000]),
            rdmafork.register(self.unaligned),
            rdmafork.register_address(self.loose, 4 * PAGE),
        ]
        self.before = rdmafork.stats()

    def check(self, forks):
        assert self.memory[:] == bytes(range(256)) * (64 * PAGE // 256)
        assert self.unaligned == b"u" * 100_000
        assert read(self.loose, 4 * PAGE) == b"l" * 4 * PAGE
        assert all(r.protected and not r.inherited for r in self.registrations)
        now = rdmafork.stats()
        assert now.registrations == len(self.registrations)
        assert now.forks_unmarked == 0
        assert now.forks - self.before.forks == forks
        assert now.pending == (0 if forks else self.before.pending)
        marked = bool(forks) or self.mode == "eager"
        assert ("dc" in vm_flags(self.address)) == marked
        assert "dc" in vm_flags(self.loose)
        self.check_window()

    def check_window(self):
        """It is shut: lazy registrations wait again, and cost no call."""
        before = rdmafork.stats()
        with rdmafork.register(private_map(16 * PAGE)[0]):
            after = rdmafork.stats()
            if self.mode == "lazy":
                assert after.pending == before.pending + 1
                assert after.madvise_calls == before.madvise_calls
            else:
                calls = 2 if marks_stay() else 1
                assert after.madvise_calls == before.madvise_calls + calls

    def end(self):
        for registration in self.registrations:
            registration.close()
        assert "dc" not in vm_flags(self.address) | vm_flags(self.loose)
        numbers = rdmafork.stats()
        assert numbers.registrations == numbers.marked_bytes == numbers.still_marked_bytes == 0


def test_the_table_is_complete():
    assert set(WAYS) == set(RUNS_HANDLERS)


@both_modes
@pytest.mark.parametrize("way", WAYS)
@fresh
def test_the_parent_is_as_it_was(way, mode):
    missing(way)
    scene = Scene(mode)
    for times in range(1, 4):
        WAYS[way]()
        scene.check(times * RUNS_HANDLERS[way])
    scene.end()


@both_modes
@fresh
def test_each_way_to_fork_works_in_turn(mode):
    """All ways in one process, twice: nothing adds up."""
    scene = Scene(mode)
    forks = 0
    for way in [*WAYS, *WAYS]:
        if way == "_Fork" and not hasattr(libc, "_Fork"):
            continue
        if way == "vfork" and platform.machine() not in VFORK:
            continue
        WAYS[way]()
        forks += RUNS_HANDLERS[way]
        scene.check(forks)
    scene.end()


@both_modes
@fresh
def test_preexec_fn_may_register(mode):
    """It runs between fork() and exec()."""
    scene = Scene(mode)

    def register():
        assert scene.registrations[0].inherited
        with rdmafork.register(bytearray(1 << 16)) as registration:
            assert registration.protected
            fork_once()

    by_subprocess(preexec_fn=register)
    scene.check(1)
    scene.end()


@both_modes
@fresh
def test_a_child_that_dies_takes_nothing_along(mode):
    scene = Scene(mode)
    for kill in (signal.SIGKILL, signal.SIGSEGV):
        pid = os.fork()
        if not pid:
            os.kill(os.getpid(), kill)
            os._exit(1)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == kill
    scene.check(2)
    scene.end()


# ---- a fork that fails --------------------------------------------------------------------


def forbid_processes():
    """From here on fork() fails in this process, as another user with too many of them."""
    if os.getuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.setgroups([])
        os.setresgid(*[nobody.pw_gid] * 3)
        os.setresuid(*[nobody.pw_uid] * 3)
    # The limit counts the user's processes, and this is one.
    resource.setrlimit(resource.RLIMIT_NPROC, (0, resource.getrlimit(resource.RLIMIT_NPROC)[1]))


def allow_processes():
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))


@both_modes
@fresh
def test_a_fork_that_fails_leaves_all_as_it_was(mode):
    scene = Scene(mode)
    forbid_processes()
    for times in range(1, 4):
        with pytest.raises(BlockingIOError):
            os.fork()
        scene.check(times)  # its handlers have run
        assert libc.fork() == -1
        assert libc._Fork() == -1 if hasattr(libc, "_Fork") else True
        scene.before = scene.before._replace(forks=scene.before.forks + 1)
    allow_processes()
    fork_once()
    scene.check(4)
    scene.end()


@both_modes
@fresh
def test_a_fork_that_fails_within_a_thread_storm(mode):
    """Windows opened by failing forks of several threads are all shut."""
    scene = Scene(mode)
    ready = threading.Barrier(4)
    # Threads count as processes: they come first.
    failed = []

    def fail():
        ready.wait()
        ready.wait()
        for _ in range(100):
            failed.append(libc.fork())

    threads = [threading.Thread(target=fail) for _ in range(3)]
    for thread in threads:
        thread.start()
    ready.wait()
    forbid_processes()
    ready.wait()
    for thread in threads:
        thread.join()
    assert failed == [-1] * 300
    scene.check(300)
    allow_processes()
    scene.end()


# ---- the end of a program -------------------------------------------------------------------

PROGRAM = """
#include <rdmafork.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

extern const char *beside, *registered;

int main(void)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    char *memory = mmap(NULL, 4 * page, PROT_READ | PROT_WRITE, flags, -1, 0);
    struct rf_handle handle;
    struct rf_error error;

    memset(memory, 'x', 4 * page);
    if (rf_fork_init(RF_MODE_AUTO, &error) < 0 ||
        rf_register(memory + 100, 2 * page, RF_HELD, RF_OMIT, &handle, &error) != 1)
        return 1;
    beside = memory;
    registered = memory + page;
    return 0;
}
"""

LAST = """
#include <sys/wait.h>
#include <unistd.h>

const char *beside, *registered;

static int child_that_reads(const char *byte)
{
    int status = 0;
    pid_t child = fork();

    if (!child)
        _exit(*byte);
    waitpid(child, &status, 0);
    return WIFSIGNALED(status) ? -1 : WEXITSTATUS(status);
}

__attribute__((destructor)) static void at_the_end(void)
{
    if (beside)
        _exit(child_that_reads(beside) == 'x' && child_that_reads(registered) == -1 ? 7 : 8);
}
"""


@pytest.mark.parametrize("trust", ["0", "1"])
def test_another_library_s_destructor_may_fork(tmp_path, trust):
    """It runs after rdmafork's own, as that library was loaded later."""
    (tmp_path / "program.c").write_text(PROGRAM)
    (tmp_path / "last.c").write_text(LAST)
    last = compile_c(tmp_path / "last.so", "-shared", "-fPIC", tmp_path / "last.c")
    engine = rdmafork.get_library()
    flags = [f"-I{rdmafork.get_include()}", f"-Wl,-rpath,{os.path.dirname(engine)}:{tmp_path}"]
    source = [tmp_path / "program.c", engine, last]
    program = compile_c(tmp_path / "program", *flags, *source)
    env = {**os.environ, "RDMAFORK_TRUST_COPYING": trust}
    done = subprocess.run([program], env=env, capture_output=True, text=True)
    assert done.returncode == 7
    assert "its parent registered" in done.stderr
