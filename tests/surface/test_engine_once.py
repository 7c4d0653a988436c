"""One process, one engine: two would undo each other's advice."""

import _ctypes
import contextlib
import ctypes
import errno
import os
import re
import shutil
import subprocess
from pathlib import Path

import c_api
import pytest
from conftest import child, compile_c, fork_once, fresh
from memory import PAGE, is_mapped, private_map, vm_flags

import rdmafork

AUTO, LAZY, EAGER = 1, 2, 3


def engines():
    """The files mapped here that are engines, going by their names."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(None, 5)[5] for line in maps if line.count("/")}
    return {path for path in paths if re.search(r"(librdmafork|engine(-\d)?)\.so$", path)}


def works():
    """It starts, protects and releases."""
    rdmafork.fork_init()
    memory, address = private_map(4 * PAGE)
    with rdmafork.register(memory):
        assert child(lambda: is_mapped(address)) is False
        assert "dc" in vm_flags(address)
    assert "dc" not in vm_flags(address)


def start_c(library, mode=AUTO):
    """(result, path named) of the C API's rf_fork_init()."""
    error = c_api.Error()
    rc = library.rf_fork_init(mode, ctypes.byref(error))
    return rc, error.text.decode()


@pytest.fixture
def copied(tmp_path):
    copy = tmp_path / "an-engine.so"
    shutil.copy(rdmafork.get_library(), copy)
    return str(copy)


# ---- the same file ------------------------------------------------------------------------


@fresh
def test_one_engine_serves_all_modules():
    works()
    assert engines() == {os.path.realpath(rdmafork.get_library())}


def _preloaded(path):
    assert engines() == {os.path.realpath(path)}
    works()
    assert rdmafork.stats().forks > 0
    assert engines() == {os.path.realpath(path)}


def test_preloaded_it_is_the_package_s(run):
    library = rdmafork.get_library()
    run(_preloaded, library, preload=library)


def test_a_preloaded_copy_serves_the_package(run, copied):
    """The loader goes by the name within (SONAME), not by the path."""
    run(_preloaded, copied, preload=copied)


def test_an_engine_preloaded_twice_runs_once(run, copied):
    run(_preloaded_twice, preload=[rdmafork.get_library(), rdmafork.get_library()])


def _preloaded_twice():
    works()
    assert len(engines()) == 1


CONSTRUCTOR = """
#include <stddef.h>
int ibv_fork_init(void), ibv_is_fork_initialized(void);
int ibv_dontfork_range(void *, size_t), ibv_dofork_range(void *, size_t);
_Alignas(65536) static char memory[65536];
int results[4] = { -2, -2, -2, -2 };
__attribute__((constructor)) static void begin(void)
{
    results[0] = ibv_dontfork_range(memory, sizeof(memory));
    results[1] = ibv_is_fork_initialized();
    results[2] = ibv_fork_init();
    results[3] = ibv_dofork_range(memory, sizeof(memory));
}
"""


def test_another_s_constructor_may_call_before_its_own(run, tmp_path):
    """Of two libraries that do not need each other the loader starts the last one first."""
    source = tmp_path / "early.c"
    source.write_text(CONSTRUCTOR)
    early = compile_c(tmp_path / "early.so", "-shared", "-fPIC", source)
    preload = [rdmafork.get_library(), early]
    for env in ({}, {"RDMAFORK_EXEC": "1"}):
        run(_called_before, early, preload=preload, env=env)


def _called_before(early):
    results = (ctypes.c_int * 4).in_dll(ctypes.CDLL(early), "results")
    status = 2 if rdmafork.kernel_info().copy_on_fork_trusted else 1
    assert list(results) == [0, status, 0, 0]
    stats = rdmafork.stats()
    assert (stats.ibv_calls, stats.ibv_ranges, stats.registrations) == (2, 0, 0)
    works()


@fresh
def test_loaded_again_it_is_the_same():
    """By its path, by a link to it, globally: a registration made in one is listed in the other."""
    works()
    for path in (rdmafork.get_library(), os.path.relpath(rdmafork.get_library())):
        for flags in (os.RTLD_LOCAL, os.RTLD_GLOBAL):
            library = ctypes.CDLL(path, mode=os.RTLD_NOW | flags)
            assert start_c(library) == (0, "")
            assert library.rf_mode() == LAZY if rdmafork.stats().mode == "lazy" else EAGER
    assert len(engines()) == 1


def test_a_link_to_it_is_the_same(run, tmp_path):
    link = tmp_path / "another-engine.so"
    link.symlink_to(rdmafork.get_library())
    run(_linked, str(link))


def _linked(link):
    library = ctypes.CDLL(link)
    assert start_c(library, EAGER) == (0, "")
    assert rdmafork.stats().mode == "eager"
    works()
    assert len(engines()) == 1


# ---- another copy -------------------------------------------------------------------------


def _copy_started_first(path, flags):
    copy = ctypes.CDLL(path, mode=flags)
    assert start_c(copy) == (0, "")
    assert len(engines()) == 2
    before = rdmafork.stats()
    for mode in ("auto", "lazy", "eager"):
        with pytest.raises(OSError, match="another copy") as caught:
            rdmafork.fork_init(mode)
        assert caught.value.errno == errno.EEXIST
        assert path in str(caught.value)
    assert rdmafork.stats() == before
    assert rdmafork.stats().mode is None
    with pytest.warns(rdmafork.UnprotectedWarning):
        assert not rdmafork.register(bytearray(PAGE)).protected
    fork_once()


@pytest.mark.parametrize("flags", [os.RTLD_LOCAL, os.RTLD_GLOBAL, os.RTLD_NOW | os.RTLD_DEEPBIND])
def test_a_copy_that_runs_is_named(run, copied, flags):
    run(_copy_started_first, copied, flags)


def _copy_started_second(path):
    copy = ctypes.CDLL(path)
    works()  # a copy that does not run disturbs none
    rc, text = start_c(copy)
    assert (rc, text) == (-errno.EEXIST, os.path.realpath(rdmafork.get_library()))
    assert copy.rf_mode() == 0
    works()


def test_a_copy_may_not_start_beside_the_package(run, copied):
    run(_copy_started_second, copied)


def _asked_by_the_environment(path):
    copy = ctypes.CDLL(path)
    assert start_c(copy)[0] == 0
    for _ in range(2):
        with pytest.raises(OSError, match="another copy") as caught:
            rdmafork.register(bytearray(100))
        assert caught.value.errno == errno.EEXIST and path in str(caught.value)


def test_a_copy_that_runs_is_named_by_the_first_registration(run, copied):
    run(_asked_by_the_environment, copied, env={"RDMAV_FORK_SAFE": "1"})


GLOBAL_FIRST = """
    import ctypes, os
    copy = ctypes.CDLL(args[0], mode=os.RTLD_GLOBAL | os.RTLD_NOW)
    error = ctypes.create_string_buffer(512)
    assert copy.rf_fork_init(1, error) == 0
    import rdmafork
    try:
        rdmafork.fork_init()
    except OSError as refused:
        result = (refused.errno, str(refused))
    else:
        registration = rdmafork.register(bytearray(1 << 16))
        pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)
        result = (0, rdmafork.stats().marked_bytes > 0)
        registration.close()
    result
"""


def test_a_global_copy_started_before_the_import(run, copied):
    """Python's calls go to the one that came first: that one serves, or is named."""
    number, what = run(GLOBAL_FIRST, copied)
    assert (number, what) == (0, True) or (number == errno.EEXIST and copied in what)


def _copies_of_many(paths):
    copies = [ctypes.CDLL(path) for path in paths]
    results = [start_c(copy) for copy in copies]
    assert results[0] == (0, "")
    for rc, text in results[1:]:
        assert (rc, text) == (-errno.EEXIST, paths[0])
    with pytest.raises(OSError, match="another copy"):
        rdmafork.fork_init()


def test_one_of_many_engine_copies_runs(run, tmp_path):
    paths = [str(tmp_path / f"engine-{i}.so") for i in range(4)]
    for path in paths:
        shutil.copy(rdmafork.get_library(), path)
    run(_copies_of_many, paths)


NAMESPACE = """
#define _GNU_SOURCE
#include <dlfcn.h>
void *load_apart(const char *path)
{
    return dlmopen(LM_ID_NEWLM, path, RTLD_NOW | RTLD_LOCAL);
}
"""


@pytest.fixture
def apart(tmp_path):
    """A library that loads others where the loader finds them by no name."""
    source = tmp_path / "apart.c"
    source.write_text(NAMESPACE)
    return compile_c(tmp_path / "apart.so", "-shared", "-fPIC", source)


def _load_apart(apart, path):
    load = ctypes.CDLL(apart).load_apart
    load.restype, load.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    handle = load(os.fsencode(path))
    assert handle
    return ctypes.CDLL(path, handle=handle)


def _namespace_second(apart, path):
    copy = _load_apart(apart, path)
    works()
    for mode in (AUTO, LAZY, EAGER):
        rc, text = start_c(copy, mode)
        assert (rc, text) == (-errno.EEXIST, os.path.realpath(rdmafork.get_library()))
    assert copy.rf_mode() == 0
    # A child's is what its parent's was.
    assert child(start_c, copy) == (-errno.EEXIST, os.path.realpath(rdmafork.get_library()))
    assert child(lambda: works() or True)
    works()


def test_a_copy_in_another_namespace_may_not_start(run, copied, apart):
    run(_namespace_second, str(apart), copied)


def _namespace_first(apart, path):
    copy = _load_apart(apart, path)
    assert start_c(copy) == (0, "")
    assert start_c(copy) == (0, "")
    with pytest.raises(OSError, match="another copy") as caught:
        rdmafork.fork_init()
    assert caught.value.errno == errno.EEXIST
    assert path in str(caught.value)
    assert rdmafork.stats().mode is None
    assert child(start_c, copy) == (0, "")


def test_a_copy_that_runs_in_another_namespace_is_named(run, copied, apart):
    run(_namespace_first, str(apart), copied)


PROGRAM = """
#include "rdmafork.h"
#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>
int main(int argc, char **argv)
{
    struct rf_error error = { 0 };
    int (*start)(enum rf_mode, struct rf_error *);
    void *other = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    int first;

    if (argc > 2)
        execl(argv[0], argv[0], argv[1], (char *)NULL);
    *(void **)&start = dlsym(other, "rf_fork_init");
    printf("%d ", rf_fork_init(RF_MODE_AUTO, &error));
    first = start(RF_MODE_AUTO, &error);
    printf("%d %s\\n", first, error.text);
    return 0;
}
"""


@pytest.mark.parametrize("exported", [True, False], ids=["exported", "hidden"])
def test_an_engine_within_the_program_is_found(tmp_path, exported):
    source = tmp_path / "program.c"
    source.write_text(PROGRAM)
    csrc = Path(rdmafork.get_include())
    tree = Path(__file__).parents[2] / "csrc"
    flags = ["-pthread", f"-I{csrc}", f"-I{tree}", *(["-rdynamic"] if exported else [])]
    program = compile_c(tmp_path / "program", *flags, source, *sorted(tree.rglob("*.c")), "-ldl")
    library = rdmafork.get_library()
    # The dynamic loader as a program, too: it changes what the kernel says of the stack.
    (loader,) = set(re.findall(r"/\S*/ld-\S+", Path("/proc/self/maps").read_text()))
    for command in ([program, library], [loader, program, library]):
        said = subprocess.check_output(command, text=True, timeout=60)
        assert said == f"0 {-errno.EEXIST} {program}\n"


# ---- unloading ----------------------------------------------------------------------------


def _unloaded(path):
    """A handle that is closed as often as one likes: the fork handlers stay."""
    library = ctypes.CDLL(path)
    assert start_c(library, LAZY)[0] == 0
    library.rf_generation.restype = ctypes.c_uint32
    generation = library.rf_generation
    assert path in engines()
    with contextlib.suppress(OSError):
        for _ in range(5):
            _ctypes.dlclose(library._handle)
    assert path in engines()
    before = generation()
    assert child(generation) == before + 1
    assert generation() == before


def test_dlclose_does_not_take_the_handlers_away(run, copied):
    run(_unloaded, copied)


@fresh
def test_dlclose_of_the_package_s_own_changes_nothing():
    works()
    library = ctypes.CDLL(rdmafork.get_library())
    _ctypes.dlclose(library._handle)
    works()
    assert Path(rdmafork.get_library()).name in {Path(path).name for path in engines()}
