"""Helpers of all tests. One process has one engine, so most tests run in a process of their own.

``@fresh`` makes a test run in a fresh interpreter::

    @fresh(env={"RDMAFORK_MODE": "eager"})
    def test_it():
        rdmafork.fork_init()
        ...

``run(function, *args)`` does the same from inside a test, and returns what the function
returns; ``child(function, *args)`` forks, which is what everything here is about.
"""

import contextlib
import ctypes
import faulthandler
import functools
import marshal
import os
import pickle
import resource
import signal
import subprocess
import sys
import sysconfig
import threading
import traceback
import types
import warnings
from pathlib import Path

import pytest
from memory import huge_page_pool

HERE = Path(__file__).resolve().parent
# How much slower than usual this machine is: twenty times in a virtual machine without KVM.
SLOWNESS = float(os.environ.get("RDMAFORK_TEST_SLOWNESS") or 1)
# The share of the random and the volume tests that is run: 1 is all, `make test` runs less.
SCALE = float(os.environ.get("SCALE") or 1)
TIMEOUT = 240 * SLOWNESS  # seconds, after which a program is taken to hang; below pytest's own
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
# How many run the body of each test at once: see test-freethreaded in the Makefile.
THREADS = int(os.environ.get("RDMAFORK_TEST_THREADS") or 1)


def scaled(amount):
    return max(1, round(amount * SCALE))


# Variables that would decide for the tests how the engine behaves.
FOREIGN = ("RDMAV_FORK_SAFE", "IBV_FORK_SAFE", "RDMAV_HUGEPAGES_SAFE", "LD_PRELOAD")


# Lazy mode is refused where the kernel's copying is not to be relied on.
# A string is looked at by pytest itself, not in the fresh interpreters.
needs_lazy = pytest.mark.skipif(
    "not __import__('rdmafork').kernel_info().copy_on_fork_trusted",
    reason="lazy mode is not for a kernel whose copying at fork cannot be trusted",
)
LAZY = pytest.param("lazy", marks=needs_lazy)
both_modes = pytest.mark.parametrize("mode", [LAZY, "eager"])

# For env=: as on a kernel whose copying at fork cannot be trusted, where modes are eager.
UNTRUSTED = {"RDMAFORK_TRUST_COPYING": "0"}
# And for tests that take the variable's value: each mode there is, on each kind of kernel.
modes_and_trust = pytest.mark.parametrize(
    ("mode", "trust"),
    [pytest.param("lazy", "", marks=needs_lazy), ("eager", ""), ("eager", "0")],
)


# ---- order ------------------------------------------------------------------------------

# Each file is one process's, so those that take longest begin first: the files with the largest
# sums of `make test PYTEST_ARGS=--durations=0`, to be looked at again when a file grows or parts.
LONGEST = """killers deadlocks benchmarks_fork model libibverbs_defects benchmarks demo buffer soak
    intercept buffer_life failures devices cli_bench protection security child
    random_calls""".split()


def pytest_collection_modifyitems(items):
    rank = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


# ---- a fresh interpreter ----------------------------------------------------------------


class Died(AssertionError):
    """The fresh interpreter was killed, or left by os._exit(): .returncode as subprocess has it."""

    def __init__(self, message, returncode):
        super().__init__(message)
        self.returncode = returncode


class RemoteTraceback(Exception):
    def __str__(self):
        return f"in the fresh interpreter\n\n{self.args[0]}"


def environment(env):
    """This process's environment without what steers the engine, and with env; None removes.

    RDMAFORK_TRUST_COPYING stays: with 0 all tests run as on a kernel that is not trusted.
    """
    result = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RDMAFORK_")
        or name.startswith("RDMAFORK_TEST_")
        or name in UNTRUSTED
    }
    for name in FOREIGN:
        result.pop(name, None)
    for name, value in (env or {}).items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = value
    # A sanitizer's runtime, where the modules are built with it, comes before all others.
    runtime = os.environ.get("RDMAFORK_TEST_PRELOAD")
    if runtime:
        result["LD_PRELOAD"] = f"{runtime} {result.get('LD_PRELOAD', '')}"
    return result


def run(what, *args, env=None, preload=None, prefix=(), timeout=TIMEOUT):
    """Run what in a fresh interpreter and return its result, or raise what it raised.

    what: a function at the top of a test module, called with args (pickled); or source
    code, for which args is ``args`` and the value of the last expression the result.
    env: variables to set, or with None to remove. preload: a path or paths for LD_PRELOAD.
    prefix: a command that runs the interpreter, ["unshare", "-pf"] for example.
    """
    import tempfile  # not in each fresh interpreter

    __tracebackhide__ = True
    env = dict(env or {})
    if preload is not None:
        paths = [preload] if isinstance(preload, str | os.PathLike) else preload
        env["LD_PRELOAD"] = ":".join(map(str, paths))
    if callable(what):
        what = body_of(what)
        path = str(Path(what.__code__.co_filename).resolve())
        job, beside = (path, compiled(path), what.__qualname__), [os.path.dirname(path)]
    else:
        job, beside = (None, None, what), []
    with tempfile.TemporaryFile() as jobs, tempfile.TemporaryFile() as answers:
        pickle.dump((job, args), jobs)
        jobs.seek(0)
        fds = (jobs.fileno(), answers.fileno())
        process = subprocess.Popen(
            [*prefix, sys.executable, "-c", BOOT, str(HERE), *map(str, fds), *beside],
            env=environment(env),
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # faulthandler shows where it hangs
            output, _ = process.communicate()
            raise Died(f"no answer after {timeout} s; output:\n{output}", None) from None
        if output:
            print(output, end="")
        answers.seek(0)
        answer = answers.read()
    if not answer:
        code = process.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        raise Died(f"the fresh interpreter ended by {how}; output:\n{output}", code)
    kind, value, text = pickle.loads(answer)
    if kind == "returned":
        return value
    if kind == "skipped":
        pytest.skip(value)
    raise value from RemoteTraceback(text)


BOOT = """
import sys
sys.path[0] = sys.argv[1]  # not the working directory
sys.path[1:1] = sys.argv[4:]
import without_pytest
sys.modules["pytest"] = without_pytest
import conftest
conftest.serve(int(sys.argv[2]), int(sys.argv[3]))
"""


@functools.cache
def compiled(path):
    """The test module at path, with pytest's messages in its assertions."""
    import ast

    from _pytest.assertion.rewrite import rewrite_asserts

    source = Path(path).read_bytes()
    tree = ast.parse(source, path)
    rewrite_asserts(tree, source, path)
    for number, node in enumerate(tree.body):
        if isinstance(node, ast.Import) and node.names[0].asname == "@pytest_ar":
            node.names[0].name = "explanations"
            place = {"lineno": node.lineno, "col_offset": 0}
            tree.body[number] = ast.ImportFrom("without_pytest", node.names, 0, **place)
    return marshal.dumps(compile(tree, path, "exec"))


def load(path, code):
    name = Path(path).stem
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = path
    exec(marshal.loads(code), module.__dict__)
    return module


def leave_room():
    """Some objects far apart, which keep free room between them.

    Python's allocator maps an arena when it needs one, and malloc extends its heap, at any time:
    between two looks at what is mapped, or while system calls are traced.
    """
    return [[bytes(nbytes) for _ in range(8000)][::100] for nbytes in (400, 1000)]


def serve(jobs, answers):
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    with open(jobs, "rb") as file:
        (path, code, name), args = pickle.load(file)
    serving = os.getpid()
    _room = leave_room()
    try:
        if path is None:
            value = execute(name, args)
        else:
            function = functools.reduce(getattr, name.split("."), load(path, code))
            body = body_of(function)
            # A function that a test runs beside itself has one thread all the same.
            value = body(*args) if body is function else by_all_threads(body, *args)
        answer = ("returned", value, None)
        packed = pickle.dumps(answer)
    except pytest.skip.Exception as skip:
        packed = pickle.dumps(("skipped", skip.msg, None))
    except BaseException as error:
        if os.getpid() != serving:
            raise
        packed = pickle.dumps(("raised", portable(error), traceback.format_exc()))
    if os.getpid() == serving:
        with open(answers, "wb") as file:
            file.write(packed)


def execute(source, args):
    import ast
    import inspect

    tree = ast.parse(inspect.cleandoc(source))
    space = {"args": args, "__name__": "fresh"}
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, "fresh", "exec"), space)
        return None
    exec(compile(ast.Module(tree.body[:-1], []), "fresh", "exec"), space)
    return eval(compile(ast.Expression(last.value), "fresh", "eval"), space)


def portable(error):
    """error, or its text where it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return AssertionError(f"{type(error).__name__}: {error}")


def fresh(function=None, **options):
    """Run the decorated test in a fresh interpreter; options are those of run()."""
    if function is None:
        return functools.partial(fresh, **options)

    @functools.wraps(function)
    def test(**kwargs):
        __tracebackhide__ = True
        run(function, *[kwargs[name] for name in names], **options)

    # Parameters come from parametrize or from fixtures whose values can be pickled.
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    return test


def body_of(function):
    """The function itself, without what decorators have put around it."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


@pytest.fixture(name="run")
def run_fixture():
    return run


# Where compile_c() keeps its objects, for all processes of a run of pytest.
_compiled = None


@pytest.fixture(scope="session", autouse=True)
def keep_compiled(request, tmp_path_factory):
    global _compiled
    base = tmp_path_factory.getbasetemp()
    _compiled = base.parent if hasattr(request.config, "workerinput") else base


def digest_of(words):
    """A digest of a command and of the files it names; their place does not matter."""
    import hashlib  # not in each fresh interpreter

    digest = hashlib.sha256()
    for word in map(str, words):
        file = Path(word.rpartition("=")[2])
        content = file.read_bytes() if file.is_file() else word.encode()
        digest.update(b"%d " % len(content) + content)
    return digest.hexdigest()


def compile_c(output, *arguments):
    """The path of what the C compiler makes of them; a test without one is skipped.

    The same is made once in a run. output is a file of its own all the same: to the loader, one
    inode is one library. Files that sources include stay as they are while tests run.
    """
    import shlex
    import shutil

    command = [*shlex.split(os.environ.get("CC", "cc")), *arguments]
    if not shutil.which(command[0]):
        pytest.skip("no C compiler")
    if not _compiled:
        subprocess.run([*command, "-o", output], check=True)
        return str(output)
    kept = _compiled / f"compiled-{digest_of(command)}"
    if not kept.exists():
        mine = kept.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        subprocess.run([*command, "-o", mine], check=True)
        mine.rename(kept)
    Path(output).unlink(missing_ok=True)
    shutil.copy(kept, output)
    return str(output)


# ---- fork -------------------------------------------------------------------------------


def child(function, *args, timeout=60 * SLOWNESS):
    """Fork, run function in the child, and return what it returns.

    What it raises is raised here as an AssertionError; if a signal kills the child, the
    signal is returned (signal.SIGSEGV, say), if it leaves by os._exit(n), SystemExit(n).
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        faulthandler.disable()
        try:
            packed = pickle.dumps((True, function(*args)))
        except BaseException:
            packed = pickle.dumps((False, traceback.format_exc()))
        with open(writing, "wb") as pipe:
            pipe.write(packed)
        os._exit(0)
    os.close(writing)
    # Where the child hangs, so would the read.
    watch = signal.signal(signal.SIGALRM, lambda *_: os.kill(pid, signal.SIGKILL))
    signal.alarm(int(timeout))
    try:
        with open(reading, "rb") as pipe:
            packed = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, watch)
    if status < 0:
        return signal.Signals(-status)
    if not packed:
        return SystemExit(status)
    returned, value = pickle.loads(packed)
    if not returned:
        raise AssertionError(f"in the child:\n{value}")
    return value


def fork_once():
    """A fork that is good for nothing but its handlers."""
    pid = os.fork()
    if not pid:
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def write_coverage(status, leave=os._exit):
    """os._exit() that writes the counts of coverage first: see tests/engine/coverage.h."""
    with open("/proc/self/maps") as file:
        found = {line.split(maxsplit=5)[-1].strip() for line in file if "/coverage/lib/" in line}
    for path in found:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(path, mode=os.RTLD_NOLOAD).coverage_write()
    leave(status)


if "RDMAFORK_TEST_COVERAGE" in os.environ:
    os._exit = write_coverage


# ---- threads ----------------------------------------------------------------------------


def in_threads(functions):
    """Run all at once and raise the first failure of any."""
    failures = []
    ready = threading.Barrier(len(functions))

    def guarded(function):
        try:
            ready.wait()
            function()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def by_all_threads(function, *args, **named):
    if THREADS == 1:
        return function(*args, **named)
    return in_threads([functools.partial(function, *args, **named)] * THREADS)


def pytest_pyfunc_call(pyfuncitem):
    """A test that is not to run in a fresh interpreter, in each of the threads."""
    if THREADS == 1 or hasattr(pyfuncitem.obj, "__wrapped__"):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    by_all_threads(pyfuncitem.obj, **{name: pyfuncitem.funcargs[name] for name in names})
    return True


# ---- pinned pages, and huge ones --------------------------------------------------------

needs_pins = pytest.mark.usefixtures("pins")


@pytest.fixture(scope="session")
def pins():
    from rdmafork import _pins

    why = _pins.unavailable()
    if why:
        pytest.skip(f"pins cannot be taken: {why}")


@pytest.fixture
def hugepages():
    """hugepages(n) reserves n huge pages of 2 MiB for the test, or skips it."""
    with contextlib.ExitStack() as stack:
        yield lambda npages: stack.enter_context(huge_page_pool(npages))


@pytest.fixture
def huge(hugepages):
    """Eight huge pages of 2 MiB are free, and no more; the value is their number."""
    return hugepages(8)
