"""Libraries with the shape of libibverbs, and in all the ways it is linked: see standin.c."""

import ctypes
import os
from pathlib import Path

import pytest
from conftest import compile_c, fork_once
from memory import PAGE, marked, private_map

import rdmafork

SOURCE = Path(__file__).with_name("standin.c")
VERSIONS = """
IBVERBS_1.1 { global: ibv_fork_init; ibv_dontfork_range; ibv_dofork_range; };
IBVERBS_1.13 { global: ibv_is_fork_initialized; } IBVERBS_1.1;
"""
GOT = ["-Wl,-z,lazy"]
READ_ONLY_GOT = ["-Wl,-z,relro,-z,now"]
NO_PLT = ["-fno-plt"]
DIRECT = ["-Wl,-Bsymbolic-functions"]
DIRECT_CET = [*DIRECT, "-fcf-protection"]
OTHER_CODE = [*DIRECT, "-DOTHER_CODE"]
COUNTS = [*DIRECT, "-DCOUNTS"]

x86_64 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="jumps are for x86-64")


class Builder:
    """Builder(directory)(name, options, source) is the path of a shared library there."""

    def __init__(self, directory):
        self.directory = directory
        self.versions = directory / "versions.map"
        self.versions.write_text(VERSIONS)

    def __call__(self, name="libibverbs.so.1", options=(), source=SOURCE):
        version = [f"-Wl,--version-script={self.versions}"] if source is SOURCE else []
        how = ["-O2", "-fPIC", "-shared", "-pthread", *version, f"-Wl,-soname,{name}"]
        return compile_c(self.directory / name, *how, source, *options)


def load(path, mode=os.RTLD_LOCAL):
    library = ctypes.CDLL(path, mode=mode | os.RTLD_NOW)
    for name in ("standin_register", "standin_release"):
        getattr(library, name).argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


def libraries():
    """{file name: how} of all of them."""
    found = rdmafork.stats().ibv_libraries
    return {os.path.basename(library.path): library.how for library in found}


def works(library):
    """Its registrations are protected here, and by no other library."""
    before, own = rdmafork.stats(), library.standin_own_calls()
    memory, address = private_map(4 * PAGE)
    assert library.standin_register(address, 2 * PAGE) == 0
    assert marked(address, 4 * PAGE) == [address, address + PAGE]
    assert rdmafork.stats().ibv_ranges == before.ibv_ranges + 1
    with rdmafork.register(memory):  # beside it, on the same pages
        fork_once()
        assert len(marked(address, 4 * PAGE)) == 4
    assert marked(address, 4 * PAGE) == [address, address + PAGE]
    assert library.standin_release(address, 2 * PAGE) == 0
    assert marked(address, 4 * PAGE) == []
    assert rdmafork.stats().ibv_calls == before.ibv_calls + 2
    assert rdmafork.stats().ibv_unbalanced == before.ibv_unbalanced
    assert library.standin_own_calls() == own
