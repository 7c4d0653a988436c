"""Where Python itself forks, ends or begins anew: hooks, finalizers, threads, interpreters."""

import json
import os
import subprocess
import sys
import textwrap
import threading

import pytest
from conftest import TIMEOUT, both_modes, child, environment, fork_once, fresh, in_threads
from memory import PAGE, is_mapped, private_map, vm_flags

import rdmafork

# All of these begin so. live() is the engine's count, however little is left of Python.
PROLOGUE = """\
import atexit, ctypes, faulthandler, gc, mmap, os, sys, threading
faulthandler.dump_traceback_later(float(os.environ["LIMIT"]), exit=True)

class Numbers(ctypes.Structure):
    _fields_ = [("numbers", ctypes.c_uint64 * 64)]  # more than rf_stats() fills

def live():
    numbers = Numbers()
    assert engine.rf_stats(ctypes.byref(numbers)) == 0
    return numbers.numbers[0]

def forked(function=lambda: None):
    pid = os.fork()
    if not pid:
        try:
            function()
        except BaseException as error:
            os.write(2, repr(error).encode())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return True

def forked_by_c(function):
    # Python's own handlers hang in the child of a process with two interpreters (CPython 3.11).
    pid = ctypes.PyDLL(None).fork()
    if not pid:
        os._exit(not function())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

engine = ctypes.CDLL(os.environ["ENGINE"])
mode = os.environ["MODE"]
"""


def python(source, mode="auto", **env):
    """Run source to the end of its interpreter; the lines it prints. It has nothing to complain."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROLOGUE + textwrap.dedent(source)],
        env=environment(
            {
                "ENGINE": rdmafork.get_library(),
                "MODE": mode,
                "LIMIT": str(TIMEOUT / 2),
                **env,
            }
        ),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    if "No module named '_xxsubinterpreters'" in done.stderr:
        pytest.skip("this Python has no module for subinterpreters")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


# ---- os.register_at_fork ------------------------------------------------------------------


@both_modes
@fresh
def test_hooks_that_register_close_and_fail(mode):
    """An exception of a hook goes to sys.unraisablehook, and neither fork nor engine minds."""
    rdmafork.fork_init(mode)
    memory, address = private_map(4 * PAGE)
    memory[:] = b"h" * len(memory)
    kept, raised = [], []
    sys.unraisablehook = lambda what: raised.append(what.exc_value.args[0])

    def hook(where):
        # The newest lives on, the older is closed: it unmarks pages that a fork has marked.
        kept.append(rdmafork.register(memory))
        while len(kept) > 1:
            kept.pop(0).close()
        raise RuntimeError(where)

    def in_child():
        kept.clear()
        kept.append(rdmafork.register(bytearray(3 * PAGE)))
        raise RuntimeError("child")

    os.register_at_fork(
        before=lambda: hook("before"),
        after_in_parent=lambda: hook("parent"),
        after_in_child=in_child,
    )
    for _ in range(20):
        raised.clear()
        seen = child(lambda: (raised, is_mapped(address), rdmafork.stats().registrations))
        assert seen == (["before", "child"], False, 1)
        assert raised == ["before", "parent"]
        assert rdmafork.stats().registrations == 1
    kept.pop().close()
    assert "dc" not in vm_flags(address)
    assert rdmafork.stats().registrations == rdmafork.stats().still_marked_bytes == 0


@both_modes
@fresh
def test_hooks_of_threads_that_fork_at_once(mode):
    rdmafork.fork_init(mode)
    sys.setswitchinterval(1e-5)
    kept = []

    def before():
        kept.append(rdmafork.register(bytearray(3 * PAGE)))

    def in_parent():
        kept.pop().close()

    def in_child():
        for registration in kept:
            assert registration.inherited
            registration.close()
        rdmafork.register(bytearray(3 * PAGE)).close()
        assert rdmafork.stats().registrations == 0

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)
    in_threads([lambda: [fork_once() for _ in range(30)]] * 3)
    assert rdmafork.stats().registrations == 0 and not kept


# ---- threads ------------------------------------------------------------------------------


@both_modes
@fresh
def test_a_finalizer_may_fork_as_its_thread_ends(mode):
    """A thread-local object's finalizer runs when the thread is all but gone."""
    rdmafork.fork_init(mode)
    memory, address = private_map(4 * PAGE)
    memory[:] = b"t" * len(memory)
    seen = []

    class Leaving:
        def __init__(self):
            self.registration = rdmafork.register(memory)

        def __del__(self):
            pid = os.fork()
            if not pid:
                os._exit(2 * self.registration.inherited + is_mapped(address))
            seen.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            self.registration.close()

    local = threading.local()

    def work():
        local.leaving = Leaving()

    for _ in range(5):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [2] * 5
    assert "dc" not in vm_flags(address) and rdmafork.stats().registrations == 0


# ---- the interpreter's end ----------------------------------------------------------------


@both_modes
def test_forks_and_registrations_to_the_very_end(mode):
    """In atexit handlers and in finalizers of module globals, beside threads that never end."""
    lines = python(
        """
        import rdmafork
        rdmafork.fork_init(mode)
        # No bytearray: without the GIL Python 3.13 loses count of its exports.
        memory = (ctypes.c_char * (1 << 16))()
        kept = rdmafork.register(memory)

        def say(line, write=os.write):
            write(1, (line + "\\n").encode())

        class Last:
            # It holds all that it needs, as the globals may be gone.
            def __init__(self, name):
                self.name, self.say, self.register = name, say, rdmafork.register
                self.memory, self.mine = memory, rdmafork.register(bytearray(1 << 14))

            def __del__(self):
                with self.register(self.memory):
                    self.mine.close()
                self.say(self.name)

        last = Last("a global")
        cycle = [Last("a cycle")]
        cycle.append(cycle)

        def use_it():
            try:
                kept.address
            except rdmafork.InheritedError:
                rdmafork.register(bytearray(1 << 14)).close()
                say("a child")

        def at_exit():
            with rdmafork.register(memory):
                forked(use_it)
            say("at exit")

        atexit.register(at_exit)
        # In a namespace of their own: frames that never end keep theirs.
        space = {"started": threading.Barrier(4), "rdmafork": rdmafork, "memory": memory}
        exec(
            "def daemon():\\n"
            "    mine = rdmafork.register(bytearray(1 << 14))\\n"
            "    started.wait()\\n"
            "    while True:\\n"
            "        rdmafork.register(memory).close()\\n",
            space,
        )
        for _ in range(3):
            threading.Thread(target=space["daemon"], daemon=True).start()
        space["started"].wait()
        """,
        mode,
    )
    assert lines[:2] == ["a child", "at exit"]
    assert sorted(lines[2:]) == ["a cycle", "a global"]


@both_modes
def test_the_interpreter_s_end_closes_open_registrations(mode, tmp_path):
    """Said by the engine as the process ends, when Python is gone."""
    report = tmp_path / "report"
    python(
        """
        import rdmafork
        rdmafork.fork_init(mode)
        registration = rdmafork.register(bytearray(1 << 16))
        buffer = rdmafork.Buffer(1 << 16)

        class Holder:
            pass

        holder = Holder()
        holder.me, holder.registration = holder, rdmafork.register(bytearray(1 << 16))
        forked()
        assert live() == 3
        """,
        mode,
        RDMAFORK_EXEC="1",
        RDMAFORK_REPORT=str(report),
        RDMAFORK_MODE=mode,
    )
    *children, line = report.read_text().splitlines()
    assert not children  # left by os._exit()
    numbers = json.loads(line)
    assert numbers["registrations"] == {"total": 3, "live": 0}
    assert numbers["forks"] == 1


# ---- subinterpreters ----------------------------------------------------------------------

INTERPRETERS = """
import os
try:
    import _interpreters as interpreters
    def create(isolated):
        return interpreters.create("isolated" if isolated else "legacy")
except ImportError:
    import _xxsubinterpreters as interpreters
    def create(isolated):
        return interpreters.create(isolated=isolated)

def run(it, source):
    try:
        failed = interpreters.run_string(it, source)
    except Exception as error:
        return str(error)
    return str(failed.formatted) if failed is not None else None
"""


@pytest.mark.parametrize("isolated", [False, True])
def test_the_first_interpreter_that_imports_it_has_it(isolated):
    """Others are told, and change nothing: one process, one engine, one owner of its objects."""
    lines = python(
        INTERPRETERS
        + f"""
import rdmafork
rdmafork.fork_init()
memory = bytearray(1 << 16)
registration = rdmafork.register(memory)
for _ in range(3):
    it = create({isolated})
    print(run(it, "import rdmafork"))
    forked_by_c(lambda: registration.inherited)
    interpreters.destroy(it)
    assert live() == 1 and registration.protected
registration.close()
assert live() == 0
"""
    )
    assert len(lines) == 3
    assert all("ImportError" in line and "interpreter" in line.lower() for line in lines), lines


@pytest.mark.parametrize("isolated", [False, True])
def test_an_interpreter_that_ends_releases_its_registrations(isolated):
    """It keeps the module for ever: a later import is refused, and the engine goes on."""
    lines = python(
        INTERPRETERS
        + f"""
it = create({isolated})
print(run(it, '''
import builtins, rdmafork
rdmafork.fork_init()
builtins.kept = [rdmafork.register(bytearray(1 << 16)) for _ in range(5)]
builtins.buffer = rdmafork.Buffer(1 << 16)
'''))
print(live())
forked_by_c(lambda: live() == 0)
interpreters.destroy(it)
assert live() == 0
forked()
try:
    import rdmafork
    print("imported")
except ImportError as error:
    print(error)
"""
    )
    if lines[0] != "None":  # an isolated one, with a lock of its own, may not have it at all
        assert isolated and "ImportError" in lines[0] and "interpreter" in lines[0]
        return
    assert lines[1] == "6"
    assert "interpreter" in lines[2].lower()
