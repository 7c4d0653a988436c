"""The reader of ELF files, against binutils and against files that are broken."""

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import compile_c

import rdmafork
from rdmafork.cli.elf import Elf, Machine, NotElf

FILES = [
    rdmafork.get_library(),
    rdmafork._core.__file__,
    os.path.realpath(sys.executable),
    shutil.which("sh"),
]


def readelf(*arguments):
    if not shutil.which("readelf"):
        pytest.skip("needs readelf")
    return subprocess.run(["readelf", *arguments], capture_output=True, text=True).stdout


@pytest.mark.parametrize("path", FILES)
def test_it_agrees_with_readelf(path):
    dynamic = readelf("-W", "-d", path)
    relocations = readelf("-W", "-r", "--use-dynamic", path)
    programs = readelf("-W", "-l", path)
    with Elf(path) as elf:
        assert elf.needed == re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
        names = re.findall(r" R_\w+ +[0-9a-f]+ +([^\s@+]+)", relocations)
        assert elf.imports() == set(names)
        interpreter = re.findall(r"interpreter: (.*)\]", programs)
        assert elf.interpreter == (interpreter[0] if interpreter else None)
        assert elf.machine.bits == (64 if sys.maxsize > 1 << 32 else 32)
        assert str(elf.machine).startswith(f"{elf.machine.bits}-bit ")


@pytest.mark.parametrize("path", FILES)
def test_its_functions_are_those_of_readelf(path):
    rows = re.findall(
        r"^ *\d+: ([0-9a-f]+) +(\d+) FUNC +\S+ +\S+ +\d+ (\S+)", readelf("-W", "-s", path), re.M
    )
    defined = {(int(at, 16), int(n), name.partition("@")[0]) for at, n, name in rows if int(n)}
    assert defined or not rows
    with Elf(path) as elf:
        for at, nbytes, name in sorted(defined)[:: max(1, len(defined) // 50)]:
            starts = {other for place, _, other in defined if place == at}
            assert elf.function_at(at) in starts, name
            assert elf.function_at(at + nbytes - 1) in {
                other for place, n, other in defined if place <= at + nbytes - 1 < place + n
            }
        assert elf.function_at(0) is None and elf.function_at(1 << 62) is None


@pytest.mark.parametrize("path", FILES)
def test_its_build_id_is_that_of_readelf(path):
    found = re.search(r"Build ID: ([0-9a-f]+)", readelf("-W", "-n", path))
    with Elf(path) as elf:
        assert elf.build_id == (found[1] if found else None)


def test_where_a_symbol_is():
    with Elf(rdmafork.get_library()) as elf:
        assert elf.function_at(elf.address_of("rf_register")) == "rf_register"
        assert elf.address_of("rf_registe") is None
        # Called, and defined elsewhere.
        assert elf.address_of("madvise") is None


def test_a_program_s_own_functions_are_no_others_symbols(tmp_path):
    source = tmp_path / "main.c"
    source.write_text("int ours(void) { return 0; }\nint main(void) { return ours(); }\n")
    with Elf(compile_c(tmp_path / "kept", source)) as elf:
        assert elf.address_of("ours") is None
    with Elf(compile_c(tmp_path / "exported", "-rdynamic", source)) as elf:
        assert elf.function_at(elf.address_of("ours")) == "ours"


def test_machines_have_names():
    assert str(Machine(64, "<", 62)) == "64-bit x86-64"
    assert str(Machine(32, "<", 3)) == "32-bit i386"
    assert str(Machine(64, ">", 9999)) == "64-bit machine 9999"


@pytest.fixture
def compiled(tmp_path):
    """compiled(*flags): a program; skipped where that cannot be built."""

    def compile(*flags):
        (tmp_path / "main.c").write_text("#include <stdlib.h>\nint main(void) { exit(0); }\n")
        command = ["cc", *flags, "-o", str(tmp_path / "main"), str(tmp_path / "main.c")]
        if not shutil.which("cc") or subprocess.run(command, capture_output=True).returncode:
            pytest.skip(f"cannot build with {' '.join(flags)}")
        return str(tmp_path / "main")

    return compile


@pytest.mark.parametrize("flags", [("-static",), ("-static-pie",)])
def test_a_static_program_has_no_interpreter(compiled, flags):
    with Elf(compiled(*flags)) as elf:
        assert elf.interpreter is None and elf.needed == []


def test_a_32_bit_program_is_read_too(compiled):
    with Elf(compiled("-m32")) as elf:
        assert elf.machine.bits == 32 and "libc.so.6" in elf.needed
        assert "exit" in elf.imports()


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"#!/bin/sh\n" * 20, b"\0" * 100])
def test_a_file_that_is_not_elf_is_refused(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(NotElf):
        Elf(str(tmp_path / "file"))


def test_broken_files_are_no_worse_than_not_elf(tmp_path):
    whole = Path(rdmafork.get_library()).read_bytes()
    path = tmp_path / "broken"
    generator = random.Random(seed := random.randrange(1 << 32))
    print(f"seed {seed}")
    failed = 0
    for turn in range(1000):
        data = bytearray(whole[: generator.randrange(64, len(whole))] if turn % 2 else whole)
        for _ in range(generator.randrange(8)):
            # Most often where the headers are.
            at = generator.randrange(generator.choice((64, 0x200, min(len(data), 0x1000))) & -8)
            data[at % len(data)] = generator.choice((0, 0x7F, 0xFF, generator.randrange(256)))
        path.write_bytes(data)
        try:
            with Elf(str(path)) as elf:
                _ = elf.machine, elf.interpreter, elf.needed, elf.imports()
                _ = elf.function_at(0x8000), elf.address_of("rf_abi"), elf.build_id
        except NotElf:
            failed += 1
    assert failed
