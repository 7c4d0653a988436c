"""Every call that Python can make of rdmafork, with any argument: exceptions, and nothing else.

    python tests/fuzz/fuzz_surface.py SECONDS [SEED]

`make asan-python` runs it on modules and an engine built with AddressSanitizer. Each round is a
forked child with a seed of its own, so that what one finds is found again by that seed alone. What
it inherits is among the arguments; at its end all that it made is collected, and the engine must
have no registration left.

Left out is what takes an address and believes it: ProtectionDomain.from_address() of any number.
"""

import array
import contextlib
import copy
import ctypes
import faulthandler
import gc
import inspect
import mmap
import os
import pickle
import random
import signal
import sys
import threading
import time
import warnings

import rdmafork
from rdmafork import _buffer, _core, _dlpack, _verbs

CALLS = 300
HANGS = 120  # seconds of one round
MODES = ("lazy", "eager", None)  # None: before fork_init()
FINE = (Exception, RecursionError)

try:
    import numpy
except ImportError:
    numpy = None


class Boom(Exception):
    pass


# ---- arguments --------------------------------------------------------------------------


class Raising:
    """It has everything that could be asked of an argument, and all of it raises."""

    def _raise(self, *_, **__):
        raise Boom

    __index__ = __int__ = __float__ = __len__ = __iter__ = __getitem__ = __eq__ = __hash__ = _raise
    __bool__ = __call__ = __contains__ = __enter__ = __fspath__ = __str__ = __repr__ = _raise
    __dlpack__ = __dlpack_device__ = __buffer__ = __release_buffer__ = _raise


class Meddling:
    """It does something else with rdmafork while it is asked."""

    def __init__(self, surface, answer):
        self.surface, self.answer = surface, answer

    def _meddle(self):
        if self.surface.depth < 3:
            self.surface.step()
        return self.answer

    def __index__(self):
        return self._meddle()

    def __eq__(self, other):
        return bool(self._meddle())

    def __hash__(self):
        return hash(self._meddle())

    def __fspath__(self):
        return str(self._meddle())

    def __dlpack_device__(self):
        self._meddle()
        return (1, 0)

    def __dlpack__(self, **_):
        return self._meddle()

    @property
    def base(self):
        return self._meddle()

    def __del__(self):
        with contextlib.suppress(*FINE):
            self._meddle()


class Sub(rdmafork.Registration):
    def close(self):
        raise Boom

    def __eq__(self, other):
        raise Boom

    __hash__ = None


class Text(str):
    def __eq__(self, other):
        raise Boom

    __hash__ = str.__hash__


class Tensor:
    def __init__(self, capsule, device=(1, 0)):
        self.capsule, self.device = capsule, device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **_):
        return self.capsule


class Structure(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int), ("bytes", ctypes.c_char * 100))


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
KEPT = []  # names of capsules, and their pointers


def capsule(name, ndim=0, extents=None):
    """A DLManagedTensor, or a pretender."""
    memory = (ctypes.c_char * 4096)()
    shape = None if extents is None else (ctypes.c_int64 * len(extents))(*extents)
    header = ctypes.create_string_buffer(128)
    pointer = ctypes.addressof(shape) if shape is not None else 0
    for at, kind, value in (
        (0, ctypes.c_void_p, ctypes.addressof(memory)),
        (8, ctypes.c_int32, 1),
        (16, ctypes.c_int32, ndim),
        (20, ctypes.c_uint32, 8 << 8 | 1 << 16),
        (24, ctypes.c_void_p, pointer),
    ):
        kind.from_buffer(header, at).value = value
    KEPT.append((name, memory, shape, header))
    return new_capsule(ctypes.addressof(header), name, None)


def closed_map():
    memory = mmap.mmap(-1, 4096)
    memory.close()
    return memory


def released(view):
    view.release()
    return view


def nested(depth=2000):
    found = []
    for _ in range(depth):
        found = [found]
    return found


def numbers():
    edges = [1 << bits for bits in (0, 3, 12, 16, 21, 31, 32, 47, 62, 63, 64, 100)]
    return [0, *edges, *[edge - 1 for edge in edges], *[-edge for edge in edges], True]


def memories():
    plain = bytearray(3 * 4096)
    view = memoryview(plain)
    yield from (plain, view, b"", b"x" * 5000, bytearray(), view[::2], view[::-1], view[10:10])
    yield from (view.cast("d"), view.cast("B", (3, 64, 64)), view[:1].cast("B", ()))
    yield from (view.toreadonly(), memoryview(b"x" * 999), released(memoryview(plain)))
    yield from (array.array("d", range(500)), array.array("u", "text"), closed_map())
    yield from (mmap.mmap(-1, 8192), mmap.mmap(-1, 8192, flags=mmap.MAP_PRIVATE))
    yield from (Structure(), (ctypes.c_int * 0)(), (Structure * 40)(), ctypes.c_char(b"x"))
    yield from (pickle.PickleBuffer(plain), released(pickle.PickleBuffer(bytearray(9))))
    if numpy is not None:
        grid = numpy.zeros((16, 16, 16))
        yield from (
            grid,
            grid[::2, 1:],
            grid.T,
            grid[0, 0, 0],
            numpy.zeros(()),
            numpy.zeros((3, 0)),
        )
        yield from (
            numpy.array([object()]),
            numpy.zeros(4, "M8[s]"),
            numpy.broadcast_to(grid, (9,) * 1 + (16,) * 3),
        )
        yield numpy.zeros(3, [("a", "i4"), ("b", "S7")])


def tensors():
    for name in (b"dltensor", b"used_dltensor", b"other", None):
        yield Tensor(capsule(name))
    for ndim, extents in (
        (1, [100]),
        (2, [-1, 5]),
        (1, [1 << 62]),
        (3, [1 << 40] * 3),
        (-1, [1]),
        (5, None),
    ):
        yield Tensor(capsule(b"dltensor", ndim, extents))
    for device in ((2, 0), (1 << 80, 0), ("1", 0), (), 7, (None, None)):
        yield Tensor(capsule(b"dltensor"), device)
    yield from (Tensor(None), Tensor("text"))


def words():
    yield from (
        "omit",
        "wipe",
        "keep",
        "auto",
        "lazy",
        "eager",
        "mlx5_0",
        "",
        "\0",
        "\ud800",
        "x" * 9999,
    )
    yield from (b"mlx5_0", Text("omit"), "../../etc/passwd", "mlx5_0\0", b"\xff")


def others(surface):
    yield from (
        None,
        ...,
        0.5,
        float("nan"),
        float("inf"),
        1j,
        [],
        {},
        (),
        {1: 2},
        nested(),
        object(),
    )
    yield from (Raising(), type, int, len, gc, lambda *_, **__: None, Boom(), range(9), iter([]))
    for answer in (0, 7, 1 << 70, -1, "x", None, capsule(b"dltensor", 1, [64])):
        yield Meddling(surface, answer)


# ---- calls ------------------------------------------------------------------------------


def classes():
    found = [getattr(rdmafork, name) for name in dir(rdmafork)]
    found = [kind for kind in found if inspect.isclass(kind)]
    # Private objects that any code can reach.
    hidden = [
        type(held)
        for held in gc.get_referents(_registered())
        if type(held).__module__ == "rdmafork._core"
    ]
    return [*found, *hidden]


def _registered():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return rdmafork.register(Tensor(capsule(b"dltensor", 1, [100])))


def functions():
    found = [getattr(rdmafork, name) for name in dir(rdmafork)]
    for module in (_core, _buffer, _verbs, _dlpack):
        found += [f for f in vars(module).values() if inspect.isbuiltin(f) or inspect.isroutine(f)]
    here = [
        f for f in found if callable(f) and "rdmafork" in (getattr(f, "__module__", None) or "")
    ]
    return [f for f in here if not inspect.isclass(f)]


SKIPPED = {"from_address", "__class_getitem__", "__init_subclass__", "__subclasshook__"}


class Surface:
    def __init__(self, seed, inherited):
        self.random = random.Random(seed)
        self.depth = self.calls = self.errors = 0
        self.kinds, self.functions = classes(), functions()
        self.objects = [*inherited, *self.kinds]
        self.simple = [*numbers(), *memories(), *tensors(), *words(), *others(self)]

    def argument(self):
        draw = self.random.random()
        if draw < 0.3 and self.objects:
            return self.random.choice(self.objects)
        if draw < 0.4:
            return bytearray(self.random.choice((1, 100, 4096, 70000)))
        if draw < 0.45:
            return memoryview(bytearray(9000))[self.random.randrange(5000) :]
        return self.random.choice(self.simple)

    def arguments(self):
        few = self.random.choice((0, 1, 1, 1, 2, 2, 3, 5))
        names = (
            "on_fork",
            "owner",
            "nbytes",
            "page_size",
            "mode",
            "intercept",
            "access",
            "nonsense",
        )
        named = self.random.choice((0, 0, 0, 1, 1, 2))
        return (
            [self.argument() for _ in range(few)],
            {name: self.argument() for name in self.random.sample(names, named)},
        )

    def keep(self, value):
        if type(value) in self.kinds or isinstance(value, memoryview):
            self.objects.append(value)
            if len(self.objects) > 60:  # collected in any order
                del self.objects[self.random.randrange(len(self.kinds), len(self.objects))]

    def step(self):
        """One call; it raises an Exception, and none that says that C went wrong."""
        self.depth += 1
        self.calls += 1
        try:
            self.keep(self.random.choice(STEPS)(self))
        except SystemError:
            raise SystemExit(f"SystemError: {sys.exc_info()[1]}") from None
        except FINE:
            self.errors += 1
        finally:
            self.depth -= 1

    def call(self):
        positional, named = self.arguments()
        return self.random.choice(self.functions)(*positional, **named)

    def make(self):
        kind = self.random.choice(self.kinds)
        positional, named = self.arguments()
        if self.random.random() < 0.3:
            return kind.__new__(kind, *positional, **named)
        return kind(*positional, **named)

    def register(self):
        return self.random.choice((rdmafork.register, rdmafork.Buffer))(self.argument())

    def method(self):
        """A method of an object, or of its class with anything for self."""
        thing = self.random.choice(self.objects)
        owner = thing if self.random.random() < 0.8 or inspect.isclass(thing) else type(thing)
        name = self.random.choice([name for name in dir(owner) if name not in SKIPPED])
        value = getattr(owner, name)
        if callable(value):
            positional, named = self.arguments()
            return value(*positional, **named)
        if inspect.isdatadescriptor(value) and hasattr(value, "__get__"):
            return value.__get__(self.argument(), self.argument())
        return value

    def attribute(self):
        thing = self.random.choice([t for t in self.objects if not inspect.isclass(t)] or [Sub])
        if thing is Sub:
            return None
        name = self.random.choice([*dir(thing), "new", "\ud800", ""])
        if self.random.random() < 0.5:
            return delattr(thing, name)
        return setattr(thing, name, self.argument())

    def close(self):
        self.random.choice(self.objects).close()

    def use(self):
        thing = self.random.choice(self.objects)
        how = self.random.choice(
            (repr, len, memoryview, bytes, hash, copy.copy, copy.deepcopy, iter, pickle.dumps)
        )
        return how(thing)

    def enter(self):
        with self.random.choice(self.objects):
            self.step()

    def subclass(self):
        empty = Sub.__new__(Sub)
        self.objects.append(empty)
        return rdmafork.Registration.__exit__(empty, None, None, None)

    def thread(self):
        thread = threading.Thread(target=self.step)
        thread.start()
        thread.join()

    def collect(self):
        gc.collect()

    def fork(self):
        # A tensor may say that it is all there is, and then a child has nothing.
        if sum(found.end - found.start for found in rdmafork.protected_ranges()) > 1 << 20:
            return
        pid = os.fork()
        if not pid:
            with contextlib.suppress(BaseException):
                self.objects.clear()
                gc.collect()
            os._exit(0)
        os.waitpid(pid, 0)


STEPS = (
    [Surface.call] * 12 + [Surface.make] * 8 + [Surface.register] * 8 + [Surface.method] * 12
    + [Surface.attribute] * 4 + [Surface.close] * 3 + [Surface.use] * 6 + [Surface.enter] * 2
    + [Surface.subclass, Surface.thread, Surface.collect, Surface.fork]
)  # fmt: skip


# ---- rounds -----------------------------------------------------------------------------


def play(seed, inherited):
    """One round, in a process of its own."""
    faulthandler.enable()
    signal.alarm(HANGS)
    mode = MODES[seed % len(MODES)]
    warnings.simplefilter("ignore")
    sys.unraisablehook = lambda _: None
    if mode:
        with contextlib.suppress(OSError):
            rdmafork.fork_init(mode)
    surface = Surface(seed, inherited)
    before = rdmafork.stats().registrations
    for _ in range(CALLS):
        surface.step()
    calls, errors = surface.calls, surface.errors
    surface.depth = 9  # objects deleted from here on meddle no more
    surface.objects.clear()
    surface.simple.clear()
    inherited.clear()
    surface = None
    gc.collect()
    # A class holds the values that its attributes were given.
    live = [o for o in gc.get_objects() if isinstance(o, rdmafork.Registration) and not o.closed]
    held = [
        o for o in live if not o.inherited and [r for r in gc.get_referrers(o) if r is not live]
    ]
    left = rdmafork.stats().registrations - before - len(held)
    if left:
        print(f"{left} registrations are left", file=sys.stderr)
        return 1, calls, errors
    return 0, calls, errors


def some_objects():
    """Objects that a parent has, and a child inherits."""
    closed = rdmafork.register(bytearray(5000))
    closed.close()
    return [
        rdmafork.register(bytearray(5000)), closed, rdmafork.Buffer(10000),
        rdmafork.Buffer(10000, shared=True),
        rdmafork.register_address(KEPT_MEMORY, 4096, owner=object()), Sub.__new__(Sub),
    ]  # fmt: skip


MEMORY = (ctypes.c_char * 16384)()
KEPT_MEMORY = ctypes.addressof(MEMORY)


def main(seconds, seed=None):
    warnings.simplefilter("ignore")
    inherited = some_objects()
    end = time.monotonic() + seconds
    first = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    rounds = calls = errors = 0
    while (seed is not None and not rounds) or (seed is None and time.monotonic() < end):
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                status, made, raised = play(first + rounds, inherited)
                os.write(writing, f"{made} {raised}".encode())
            except SystemExit as error:
                print(error, file=sys.stderr)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stderr.flush()
                os._exit(status)
        os.close(writing)
        _, status = os.waitpid(pid, 0)
        with open(reading, "rb") as told:
            made, raised = map(int, told.read().split() or (0, 0))
        if status:
            code = os.waitstatus_to_exitcode(status)
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            print(f"FAILED  {how}; again: {sys.argv[0]} 0 {first + rounds}", file=sys.stderr)
            return 1
        rounds, calls, errors = rounds + 1, calls + made, errors + raised
    print(f"{rounds} rounds from seed {first}, {calls} calls, {errors} of which raised")
    return 0 if calls > rounds * CALLS // 2 else 1


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), *map(int, sys.argv[2:3])))
