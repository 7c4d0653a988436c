"""The wheel that `make wheel` makes, installed: `make test-wheel` runs this."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import rdmafork
from rdmafork.cli.elf import Elf

NAMED = "TESTED_DIST"
MODULES = {
    "_buffer", "_clocks", "_core", "_dlpack", "_ibverbs", "_pins", "_verbs", "benchmarks/_in_c",
}  # fmt: skip
# auditwheel lets more in: these are what every glibc has.
SYSTEM = {"libc.so.6", "libdl.so.2", "libpthread.so.0"}

pytestmark = pytest.mark.skipif(
    NAMED not in os.environ, reason="make test-wheel runs it, on a wheel"
)


@pytest.fixture(scope="module")
def wheel():
    (path,) = Path(os.environ[NAMED]).glob("*.whl")
    return path


@pytest.fixture(scope="module")
def sdist():
    (path,) = Path(os.environ[NAMED]).glob("*.tar.gz")
    with tarfile.open(path) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@pytest.fixture(scope="module")
def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_it_is_the_wheel_that_is_tested(wheel):
    installed = Path(rdmafork.__file__).parent
    assert installed.parent == Path(sysconfig.get_path("platlib"))
    assert f"rdmafork-{rdmafork.__version__}-" in wheel.name
    assert rdmafork.__version__ == importlib.metadata.version("rdmafork") != "0.1.0.dev0"


def test_auditwheel_finds_no_symbol_newer_than_its_tag(wheel):
    assert wheel.name.endswith(f"-manylinux_2_28_{platform.machine()}.whl")
    done = subprocess.run(["auditwheel", "show", wheel], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    oldest = re.search(r'platform tag: "manylinux_(\d+)_(\d+)_', said)
    assert oldest and tuple(map(int, oldest.groups())) <= (2, 28), said


def test_it_has_the_engine_and_nothing_of_the_system(contents):
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    expected = {f"rdmafork/{name}{suffix}" for name in MODULES} | {"rdmafork/librdmafork.so"}
    assert {name for name in contents if ".so" in name or ".libs/" in name} == expected


def test_its_libraries_are_found_beside_them_or_are_the_system_s():
    if not shutil.which("readelf"):
        pytest.skip("needs readelf")
    for path in Path(rdmafork.__file__).parent.rglob("*.so"):
        with Elf(str(path)) as elf:
            assert set(elf.needed) - {"librdmafork.so"} <= SYSTEM, path
        dynamic = subprocess.run(["readelf", "-dW", path], capture_output=True, text=True).stdout
        paths = re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", dynamic)
        beside = "$ORIGIN/.." if path.parent.name == "benchmarks" else "$ORIGIN"
        assert paths == ([] if path.name == "librdmafork.so" else [beside]), path


def test_it_has_the_files_that_others_build_on(contents):
    assert contents >= {
        "rdmafork/include/rdmafork.h",
        "rdmafork/pkgconfig/rdmafork.pc",
        "rdmafork/__init__.pxd",
        "rdmafork/py.typed",
        "rdmafork/_core.pyi",
        "rdmafork/startup/sitecustomize.py",
    }
    assert {name.partition("/")[0].partition("-")[0] for name in contents} == {"rdmafork"}
    assert not [name for name in contents if name.endswith((".c", ".pyx"))]


def test_the_sdist_has_the_tests_and_nothing_built(sdist):
    for name in (
        "Makefile tests/conftest.py tests/engine/test_ranges.c tests/fuzz/replay.c tests/vm/run.py "
        "benchmarks/registration.py benchmarks/results/registration.json docs/costs.py "
        "examples/c_program/survives.c rdmafork/pkgconfig/rdmafork.pc csrc/librdmafork.map "
        "rdmafork/_core.pyx rdmafork/_version.py CHANGELOG.md LICENSE"
    ).split():
        assert name in sdist
    built = r"(^|/)(\.venv|\.git|build|dist|__pycache__)(/|$)|\.(so|o|pyc)$|^rdmafork/.*\.c$"
    assert not [name for name in sdist if re.search(built, name)]
