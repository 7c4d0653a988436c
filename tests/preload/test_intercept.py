"""Registrations of other libraries are protected too: fork_init(intercept=True).

The libraries are built here, with the shape of libibverbs and in all the ways it is linked;
tests/vm has real ones at a device.
"""

import _ctypes
import ctypes
import errno
import os
import threading
import time
from pathlib import Path

import pytest
import self_calling_libibverbs
from conftest import SLOWNESS, child, fork_once, fresh, run, scaled
from memory import PAGE, map_at, private_map, vm_flags
from seccomp import refuse
from standin import (
    COUNTS,
    DIRECT,
    DIRECT_CET,
    GOT,
    NO_PLT,
    OTHER_CODE,
    READ_ONLY_GOT,
    Builder,
    libraries,
    load,
    works,
    x86_64,
)

import rdmafork

REWRITTEN = [
    pytest.param(GOT, "rewritten", id="got"),
    pytest.param(READ_ONLY_GOT, "rewritten", id="read-only-got"),
    pytest.param(NO_PLT, "rewritten", id="no-plt"),
]
PATCHED = [
    pytest.param(DIRECT, "patched", id="direct", marks=x86_64),
    pytest.param(DIRECT_CET, "patched", id="direct-cet", marks=x86_64),
]
LINKED = [*REWRITTEN, *PATCHED]


@pytest.fixture
def build(tmp_path):
    return Builder(tmp_path)


@pytest.mark.parametrize(("options", "how"), LINKED)
@pytest.mark.parametrize("mode", [os.RTLD_LOCAL, os.RTLD_GLOBAL, os.RTLD_DEEPBIND])
def test_libibverbs_calls_reach_the_engine(build, options, how, mode):
    run(_its_calls_come_here, build("libibverbs.so.1", options), how, mode)


def _its_calls_come_here(path, how, mode):
    library = load(path, mode)
    rdmafork.fork_init(intercept=True)
    (found,) = rdmafork.stats().ibv_libraries
    assert (found.path, found.how, found.why) == (path, how, None)
    works(library)
    assert child(works, library) is None


@pytest.mark.parametrize(("options", "how"), LINKED)
def test_asked_by_its_own_name_it_comes_here_too(build, options, how):
    """As NCCL does: dlvsym() at the library's handle."""
    run(_asked_by_its_own_name, build("libibverbs.so.1", options))


def _asked_by_its_own_name(path):
    library = load(path)
    rdmafork.fork_init(intercept=True)
    libc = ctypes.CDLL(None)
    libc.dlvsym.restype = ctypes.c_void_p
    libc.dlvsym.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
    address = libc.dlvsym(library._handle, b"ibv_fork_init", b"IBVERBS_1.1")
    assert ctypes.CFUNCTYPE(ctypes.c_int)(address)() == 0
    works(library)


@x86_64
def test_several_renamed_libibverbs_are_intercepted(build):
    names = {"libibverbs-4f0a1b2c.so.1": GOT, "libfabric_bundled.so": DIRECT, "x.so": NO_PLT}
    run(_several, [build(*item) for item in names.items()])


def _several(paths):
    copies = [load(path, os.RTLD_DEEPBIND) for path in paths]
    rdmafork.fork_init(intercept=True)
    assert sorted(libraries().values()) == ["patched", "rewritten", "rewritten"]
    for library in copies:
        works(library)


@pytest.mark.parametrize(("options", "how"), LINKED)
@pytest.mark.parametrize("noticed", ["fork", "stats", "fork_init"])
def test_one_that_is_loaded_later(build, options, how, noticed):
    run(_loaded_later, build("libibverbs.so.1", options), how, noticed)


def _loaded_later(path, how, noticed):
    rdmafork.fork_init(intercept=True)
    assert libraries() == {}
    library = load(path, os.RTLD_DEEPBIND)
    if noticed == "fork":
        fork_once()
    elif noticed == "stats":
        rdmafork.stats()
    else:
        rdmafork.fork_init(intercept=True)
    _memory, address = private_map(PAGE)
    assert library.standin_register(address, PAGE) == 0
    assert "dc" in vm_flags(address)
    assert library.standin_release(address, PAGE) == 0
    assert libraries() == {"libibverbs.so.1": how}
    works(library)


@pytest.mark.parametrize(("options", "how"), LINKED)
def test_one_that_is_loaded_again(build, options, how):
    """At its old address, perhaps: none of the changes made to it is there any more."""
    run(_loaded_again, build("libibverbs.so.1", options), how)


def _loaded_again(path, how):
    rdmafork.fork_init(intercept=True)
    for _ in range(4):
        library = load(path)
        assert libraries() == {"libibverbs.so.1": how}
        works(library)
        _ctypes.dlclose(library._handle)
        fork_once()
    assert libraries() == {}


@pytest.mark.parametrize(("options", "how"), REWRITTEN)
def test_a_long_path_is_known_again(build, tmp_path, options, how):
    folder = tmp_path / ("a" * 150) / ("b" * 150)
    folder.mkdir(parents=True)
    verbs = folder / "libibverbs.so.1"
    Path(build("libibverbs.so.1", options)).rename(verbs)
    run(_long_path, str(verbs), build("libanother.so.1", GOT), how)


def _long_path(path, another, how):
    library = load(path)
    rdmafork.fork_init(intercept=True)
    (found,) = before = rdmafork.stats().ibv_libraries
    assert found.how == how and path.startswith(found.path) and len(found.path) > 200
    other = load(another)  # then all are looked at again
    assert rdmafork.stats().ibv_libraries[:1] == before
    works(library)
    works(other)


DRIVER = """
#include <stddef.h>
int ibv_dontfork_range(void *, size_t);
int ibv_dofork_range(void *, size_t);
int standin_own_calls(void);
int ibv_fork_init(void), ibv_is_fork_initialized(void);
int (*const by_address)(void *, size_t) = ibv_dofork_range;
int driver_fork_init(void) { return ibv_fork_init(); }
int driver_status(void) { return ibv_is_fork_initialized(); }
int standin_register(void *base, size_t size) { return ibv_dontfork_range(base, size); }
int standin_release(void *base, size_t size) { return by_address(base, size); }
"""


@pytest.mark.parametrize(("options", "how"), LINKED)
def test_a_driver_s_calls_come_here(build, tmp_path, options, how):
    source = tmp_path / "driver.c"
    source.write_text(DRIVER)
    verbs = build("libibverbs.so.1", options)
    driver = build("libdriver.so", [verbs, f"-Wl,-rpath,{tmp_path}"], source)
    run(_a_driver, driver, how)


def _a_driver(path, how):
    driver = load(path, os.RTLD_DEEPBIND)
    rdmafork.fork_init(intercept=True)
    (found,) = rdmafork.stats().ibv_libraries
    assert (found.how, found.needed_by) == (how, path)
    works(driver)
    unneeded, enabled = 2, 1
    trusted = rdmafork.kernel_info().copy_on_fork_trusted
    assert driver.driver_status() == (unneeded if trusted else enabled)
    assert driver.driver_fork_init() == 0 and driver.standin_inits() == 0


# ---- where it cannot be ----------------------------------------------------------------------


def is_left_alone(library):
    """Its own fork support works, and nothing of it is said to be protected here."""
    _memory, address = private_map(PAGE)
    before, calls = library.standin_own_calls(), rdmafork.stats().ibv_calls
    assert library.standin_register(address, PAGE) == 0
    assert "dc" in vm_flags(address)
    assert library.standin_own_calls() == before + 1
    assert rdmafork.protected_ranges() == [] and rdmafork.stats().ibv_calls == calls
    assert library.standin_release(address, PAGE) == 0


@pytest.mark.parametrize(("options", "how"), LINKED)
def test_a_libibverbs_already_protecting_is_left_alone(build, options, how):
    run(_protects_already, build("libibverbs.so.1", options))


def _protects_already(path):
    library = load(path)
    assert library.ibv_fork_init() == 0
    _memory, address = private_map(PAGE)
    assert library.standin_register(address, PAGE) == 0
    with pytest.raises(OSError, match="its own fork support already protects memory") as caught:
        rdmafork.fork_init(intercept=True)
    assert caught.value.errno == errno.ENOTSUP
    ways = ("rdmafork exec", "RDMAV_FORK_SAFE", "register the same memory with rdmafork too")
    for word in (path, *ways):
        assert word[:90] in str(caught.value)
    (found,) = rdmafork.stats().ibv_libraries
    assert found.how == "refused" and found.why in str(caught.value)
    is_left_alone(library)
    assert library.standin_release(address, PAGE) == 0
    assert "dc" not in vm_flags(address)
    works_here()


@pytest.mark.parametrize(("options", "how"), LINKED)
def test_one_that_was_asked_to_protect_and_has_nothing_yet(build, options, how):
    """None of its calls is taken over: NCCL leaves it so, before a look is possible."""
    run(_has_nothing_yet, build("libibverbs.so.1", options), how)


def _has_nothing_yet(path, how):
    library = load(path)
    assert library.ibv_fork_init() == 0
    _memory, address = private_map(PAGE)
    assert library.standin_register(address, PAGE) == 0
    assert library.standin_release(address, PAGE) == 0
    rdmafork.fork_init(intercept=True)
    assert libraries() == {"libibverbs.so.1": how}
    works(library)


def works_here():
    """The engine runs all the same."""
    memory, address = private_map(PAGE)
    with rdmafork.register(memory):
        fork_once()
        assert "dc" in vm_flags(address)


@x86_64
def test_code_that_is_not_known_is_not_changed(build):
    run(_other_code, build("libibverbs.so.1", OTHER_CODE))


def _other_code(path):
    library = load(path)
    with pytest.raises(OSError, match="rdmafork does not recognize their code") as caught:
        rdmafork.fork_init(intercept=True)
    assert caught.value.errno == errno.ENOTSUP
    assert library.ibv_fork_init() == 0
    is_left_alone(library)


@x86_64
def test_range_functions_may_look_at_a_count(build):
    """Not the address of a tracker's root: read as one, it would crash."""
    run(_counts, build("libibverbs.so.1", COUNTS))


def _counts(path):
    library = load(path)
    assert library.ibv_fork_init() == 0
    with pytest.raises(OSError, match="already protects memory"):
        rdmafork.fork_init(intercept=True)
    is_left_alone(library)


@x86_64
def test_the_others_are_served_all_the_same(build):
    run(_the_others, build("a.so", OTHER_CODE), build("b.so", DIRECT), build("c.so", GOT))


def _the_others(*paths):
    refused, *served = (load(path) for path in paths)
    with pytest.raises(OSError, match=r"a\.so"):
        rdmafork.fork_init(intercept=True)
    assert libraries() == {"a.so": "refused", "b.so": "patched", "c.so": "rewritten"}
    assert refused.ibv_fork_init() == 0
    is_left_alone(refused)
    for library in served:
        works(library)


@pytest.mark.parametrize("options", [pytest.param(DIRECT, marks=x86_64), GOT])
def test_where_code_may_not_be_written(build, options):
    run(_not_written, build("libibverbs.so.1", [*options, "-Wl,-z,relro,-z,now"]))


def _not_written(path):
    library = load(path)
    refuse("mprotect", errno.EACCES)
    with pytest.raises(OSError, match="not allowed to change its code") as caught:
        rdmafork.fork_init(intercept=True)
    assert caught.value.errno == errno.ENOTSUP
    assert library.ibv_fork_init() == 0
    is_left_alone(library)


# ---- preloaded -------------------------------------------------------------------------------


USER = """
int ibv_fork_init(void);
int user_fork_init(void) { return ibv_fork_init(); }
"""


@pytest.mark.parametrize(
    ("options", "how"),
    [
        pytest.param(GOT, "ours", id="got"),
        *PATCHED,
        pytest.param(OTHER_CODE, "refused", id="other-code", marks=x86_64),
    ],
)
def test_its_users_ask_for_protection_and_get_it(build, tmp_path, options, how):
    """Interposing alone would swallow ibv_fork_init(), and no library would protect then."""
    source = tmp_path / "user.c"
    source.write_text(USER)
    verbs = build("libibverbs.so.1", options)
    user = build("libuser.so", ["-Wl,--no-as-needed", verbs, f"-Wl,-rpath,{tmp_path}"], source)
    run(_users, user, how, preload=rdmafork.get_library())


def _users(path, how):
    user = load_user(path)
    assert user.user_fork_init() == 0
    (found,) = rdmafork.stats().ibv_libraries
    assert (found.how, found.needed_by) == (how, path)
    library = load(found.path)
    if how == "refused":
        assert library.standin_inits() == 1
        is_left_alone(library)
    else:
        assert library.standin_inits() == 0
        works(library)


def load_user(path):
    return ctypes.CDLL(path, mode=os.RTLD_NOW)


@pytest.mark.parametrize(
    ("options", "how"),
    [
        pytest.param(READ_ONLY_GOT, "ours", id="got"),
        pytest.param([*READ_ONLY_GOT, "-DOTHER_CODE"], "ours", id="got-other-code"),
        *PATCHED,
    ],
)
def test_a_library_s_fork_init_may_be_called_before_it_is_intercepted(build, options, how):
    """By the library's handle, right after it was loaded."""
    run(_before_a_look, build("libibverbs.so.1", options), how, preload=rdmafork.get_library())


def _before_a_look(path, how):
    library = load(path)
    assert library.ibv_fork_init() == 0
    rdmafork.fork_init(intercept=True)
    assert libraries() == {"libibverbs.so.1": how}
    assert library.standin_inits() == 1
    works(library)


# ---- threads ---------------------------------------------------------------------------------


@x86_64
@pytest.mark.parametrize("options", [GOT, DIRECT, DIRECT_CET], ids=["got", "direct", "cet"])
def test_while_other_threads_register(build, options):
    path = build("libibverbs.so.1", options)
    for _ in range(scaled(10)):
        run(_while_registering, path)


def _while_registering(path):
    library = load(path)
    _memory, address = private_map(PAGE)
    library.standin_hammer.argtypes = [ctypes.c_void_p]
    assert library.standin_hammer(address) == 0
    rdmafork.fork_init(intercept=True)
    patience, forks = time.monotonic() + 60 * SLOWNESS, 0
    while forks < 20 or (not rdmafork.stats().ibv_calls and time.monotonic() < patience):
        fork_once()
        forks += 1
    assert library.standin_hammer(address) == 0
    assert rdmafork.stats().ibv_calls > 0
    assert rdmafork.stats().ibv_ranges == 0
    works(library)


def test_a_child_finds_the_loader_free(build):
    """A thread that looks for libraries holds its lock, and does not exist in a child."""
    run(_finds_the_loader_free, build())


def _finds_the_loader_free(path):
    library = load(path)
    rdmafork.fork_init(intercept=True)
    done = threading.Event()

    def look():
        while not done.is_set():
            rdmafork.stats()

    def in_child():
        works(library)
        return libraries()

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(scaled(200)):
            assert child(in_child) == {"libibverbs.so.1": "rewritten"}
    finally:
        done.set()
        for thread in threads:
            thread.join()


# ---- real ones -------------------------------------------------------------------------------


@fresh
def test_debian_s_libibverbs():
    try:
        library = ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        pytest.skip(f"libibverbs is not installed: {error}")
    rdmafork.fork_init(intercept=True)
    (found,) = rdmafork.stats().ibv_libraries
    assert os.path.basename(found.path).startswith("libibverbs.so.1")
    assert found.how in ("rewritten", "patched")
    assert library.ibv_fork_init() == 0
    map_at(0x20_0000_0000, PAGE)
    assert library.ibv_dontfork_range(ctypes.c_void_p(0x20_0000_0000), ctypes.c_size_t(PAGE)) == 0


@x86_64
def test_a_libibverbs_that_calls_itself_directly(tmp_path):
    run(_calls_itself_directly, self_calling_libibverbs.make(tmp_path))


@x86_64
@pytest.mark.parametrize("how", ["ours", "patched"])
def test_libibverbs_fork_init_may_be_called_before_it_is_intercepted(tmp_path, how):
    path = self_calling_libibverbs.make(tmp_path) if how == "patched" else "libibverbs.so.1"
    run(_real_before_a_look, path, how, preload=rdmafork.get_library())


def _real_before_a_look(path, how):
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        pytest.skip(f"libibverbs is not installed: {error}")
    assert library.ibv_fork_init() == 0
    rdmafork.fork_init(intercept=True)
    (found,) = rdmafork.stats().ibv_libraries
    assert (found.how, found.why) == (how, None)


def _calls_itself_directly(path):
    library = ctypes.CDLL(path, mode=os.RTLD_DEEPBIND | os.RTLD_NOW)
    rdmafork.fork_init(intercept=True)
    (found,) = rdmafork.stats().ibv_libraries
    assert found.how == "patched"
    address = ctypes.c_void_p(map_at(0x20_0000_0000, PAGE))
    assert library.ibv_dontfork_range(address, ctypes.c_size_t(PAGE)) == 0
    assert "dc" in vm_flags(address.value)
    assert rdmafork.stats().ibv_ranges == 1
    assert library.ibv_dofork_range(address, ctypes.c_size_t(PAGE)) == 0
    assert "dc" not in vm_flags(address.value)
