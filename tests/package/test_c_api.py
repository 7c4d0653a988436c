"""The C API, used from this installation: examples/c_program, examples/cython_extension."""

import ctypes
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TIMEOUT, child, environment
from memory import PAGE, is_mapped

import rdmafork
from rdmafork.cli import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CC = os.environ.get("CC", "cc")


def command(*arguments, **options):
    options = {"env": environment({"CC": CC})} | options
    return subprocess.run(
        list(map(str, arguments)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=TIMEOUT, **options,
    )  # fmt: skip


def output(*arguments, **options):
    """Of a command that ends well."""
    done = command(*arguments, **options)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """examples/c_program, built as its Makefile says."""
    for tool in (CC.split()[0], "make"):
        if not shutil.which(tool):
            pytest.skip(f"needs {tool}")
    folder = tmp_path_factory.mktemp("c_program")
    shutil.copytree(EXAMPLES / "c_program", folder, dirs_exist_ok=True)
    output("make", "-C", folder, f"PYTHON={sys.executable}", "CFLAGS=-Wall -Wextra -Werror")
    return folder / "survives"


@pytest.mark.usefixtures("program")  # it has the tools
def test_a_c_program_is_built_and_run_as_it_says_itself(tmp_path):
    """The command in its first comment, word for word, with this Python before others."""
    shutil.copytree(EXAMPLES / "c_program", tmp_path, dirs_exist_ok=True)
    (said,) = re.findall(r"^ \*\t(make .*)$", (tmp_path / "survives.c").read_text(), re.M)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = environment({"PATH": path, "LD_LIBRARY_PATH": None})
    ran = output("sh", "-c", said, cwd=tmp_path, env=env)
    assert ran.endswith("the kernel copied none of 16 MiB\n")


def test_a_c_program_runs_as_it_was_linked(program, tmp_path):
    """From anywhere, without LD_LIBRARY_PATH."""
    said = "the child had nothing of the buffer; the kernel copied none of 16 MiB\n"
    assert output(program, cwd=tmp_path) == said


@pytest.mark.usefixtures("program")  # it has the tools
def test_a_c_program_is_built_where_paths_have_spaces(tmp_path):
    source, place = tmp_path / "source", tmp_path / "site packages"
    shutil.copytree(EXAMPLES / "c_program", source)
    place.mkdir()
    (place / "rdmafork").symlink_to(Path(rdmafork.__file__).parent)
    built = output(
        "make", "-C", source, f"PYTHON={sys.executable}", f"CC={CC}",
        env=environment({"PYTHONPATH": str(place)}),
    )  # fmt: skip
    assert "site packages/rdmafork" in built
    output(source / "survives")


def test_a_c_program_meets_another_abi(program, tmp_path):
    """It does not start, and the loader names the program, the symbol's version and the library."""
    (tmp_path / "other.map").write_text("RDMAFORK_99 { global: rf_*; };")
    (tmp_path / "other.c").write_text("int rf_abi(void) { return 99; }")
    other = tmp_path / "librdmafork.so"
    output(
        *CC.split(), "-shared", "-fPIC", "-Wl,-soname,librdmafork.so",
        f"-Wl,--version-script={tmp_path}/other.map", tmp_path / "other.c", "-o", other,
    )  # fmt: skip
    done = command(program, env=environment({"LD_LIBRARY_PATH": str(tmp_path)}))
    assert done.returncode
    for words in (f"{other}: version `RDMAFORK_", "not found", f"required by {program}"):
        assert words in done.stdout


def test_header_library_and_package_are_of_one_version():
    header = Path(rdmafork.get_include(), "rdmafork.h").read_text()
    numbers = re.findall(r"^#define RDMAFORK_VERSION_(MAJOR|MINOR|PATCH) (\d+)$", header, re.M)
    assert [name for name, _ in numbers] == ["MAJOR", "MINOR", "PATCH"]
    major, minor, patch = version = tuple(int(number) for _, number in numbers)
    assert ctypes.CDLL(rdmafork.get_library()).rf_version() == (major * 100 + minor) * 100 + patch
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(\.dev)?", rdmafork.__version__)
    released = tuple(int(number or 0) for number in found.groups()[:3])
    # setuptools-scm guesses the least that can come after the last tag.
    assert version >= released if found[4] else version == released
    pkgconfig = Path(rdmafork.get_library()).with_name("pkgconfig") / "rdmafork.pc"
    assert f"\nVersion: {major}.{minor}.{patch}\n" in pkgconfig.read_text()


def test_a_preprocessor_can_compare_versions(tmp_path):
    if not shutil.which(CC.split()[0]):
        pytest.skip(f"needs {CC}")
    (tmp_path / "main.c").write_text(
        "#include <rdmafork.h>\n"
        "#if RDMAFORK_VERSION < 100 || RDMAFORK_VERSION >= 1000000\n#error no version\n#endif\n"
        "int main(void) { return rf_version() != RDMAFORK_VERSION; }\n"
    )
    flags = shlex.split(config())
    output(*CC.split(), "-Werror", tmp_path / "main.c", *flags, "-o", tmp_path / "main")
    output(tmp_path / "main")


def test_a_c_plus_plus_program_can_include_the_header(tmp_path):
    cxx = shutil.which(os.environ.get("CXX", "c++"))
    if not cxx:
        pytest.skip("needs a C++ compiler")
    (tmp_path / "main.cc").write_text(
        "#include <rdmafork.h>\nint main() { return rf_abi() != RF_ABI; }\n"
    )
    flags = config("--cflags"), config("--libs")
    output(
        cxx, "-Wall", "-Wextra", "-Wpedantic", "-Werror", flags[0], tmp_path / "main.cc",
        *flags[1].split(), "-o", tmp_path / "main",
    )  # fmt: skip
    output(tmp_path / "main")


def test_a_cython_extension_registers_with_the_same_engine(run, tmp_path):
    """Installed as pip installs it, and linked without the place of the library."""
    pytest.importorskip("Cython", reason="needs Cython")
    pytest.importorskip("setuptools", reason="needs setuptools")
    if not shutil.which(CC.split()[0]):
        pytest.skip(f"needs {CC}")
    shutil.copytree(EXAMPLES / "cython_extension", tmp_path / "source")
    # An editable install is found by a hook, of which Cython knows nothing.
    place = {"PYTHONPATH": str(Path(rdmafork.__file__).parent.parent)}
    output(
        sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps",
        "--no-index", "--disable-pip-version-check", "--target", tmp_path / "target",
        tmp_path / "source", env=environment(place),
    )  # fmt: skip
    run(_pool, str(tmp_path / "target"))


def _pool(target):
    sys.path.insert(0, target)
    from registered_pool import Pool

    rdmafork.fork_init()
    pool = Pool(4, 16 * PAGE)
    addresses = [pool.take() for _ in range(2)]
    assert rdmafork.stats().registrations == 2
    assert [child(is_mapped, address) for address in addresses] == [False, False]
    pool.give_back()
    assert rdmafork.stats().registrations == 1
    assert [child(is_mapped, address) for address in addresses] == [False, True]
    del pool
    assert rdmafork.stats().registrations == 0


# ---- rdmafork config ------------------------------------------------------------------------


def config(*arguments):
    return output(sys.executable, "-m", "rdmafork", "config", *arguments).strip()


def test_config_has_the_flags_of_this_installation(capsys):
    folder = os.path.dirname(rdmafork.get_library())
    cflags, libs = f"-I{rdmafork.get_include()}", f"-L{folder} -Wl,-rpath,{folder} -lrdmafork"
    for arguments, flags in (
        (["--cflags"], cflags),
        (["--libs"], libs),
        ([], f"{cflags} {libs}"),
        (["--libs", "--cflags"], f"{cflags} {libs}"),
    ):
        assert main(["config", *arguments]) == 0
        assert capsys.readouterr() == (f"{flags}\n", "")
    assert Path(cflags[2:], "rdmafork.h").is_file()


# ---- rdmafork.pc ----------------------------------------------------------------------------


def pkg_config(folder, *arguments):
    if not shutil.which("pkg-config"):
        pytest.skip("needs pkg-config")
    env = environment({"PKG_CONFIG_PATH": str(folder)})
    return output("pkg-config", *arguments, "rdmafork", env=env).strip()


def resolved(flags):
    """The flags, with each path as short as it can be."""
    flags = (re.match("(-[ILl]|-Wl,-rpath,)(.*)", flag).groups() for flag in shlex.split(flags))
    return [f"{kind}{os.path.normpath(what)}" for kind, what in flags]


def test_pkg_config_agrees_with_rdmafork_config():
    folder = config("--pkgconfigdir")
    assert Path(folder, "rdmafork.pc").is_file()
    for arguments in (["--cflags"], ["--libs"], ["--cflags", "--libs"]):
        assert resolved(pkg_config(folder, *arguments)) == shlex.split(config(*arguments))
    assert pkg_config(folder, "--exists", "--print-errors") == ""


def starts_with(flags, tmp_path, library):
    """A program built with the flags starts with nothing added, and loads that library."""
    (tmp_path / "main.c").write_text(
        "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <rdmafork.h>\n#include <stdio.h>\n"
        "int main(void) { Dl_info at; return !dladdr((void *)rf_abi, &at) ||"
        " puts(at.dli_fname) < 0 || rf_abi() != RF_ABI; }\n"
    )
    flags = [*shlex.split(flags), "-ldl", "-o", tmp_path / "main"]
    output(*CC.split(), tmp_path / "main.c", *flags)
    loaded = output(tmp_path / "main", cwd="/", env=environment({"LD_LIBRARY_PATH": None}))
    assert Path(loaded.strip()).resolve() == library.resolve()


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize("name", ["moved", "a place with spaces"])
def test_the_package_may_be_moved(tmp_path, name):
    package = tmp_path / name / "rdmafork"
    for part in ("include", "pkgconfig"):
        shutil.copytree(Path(rdmafork.__file__).parent / part, package / part)
    shutil.copy(rdmafork.get_library(), package)
    flags = pkg_config(package / "pkgconfig", "--cflags", "--libs")
    starts_with(flags, tmp_path, package / "librdmafork.so")


def make_install(*variables):
    root = EXAMPLES.parent
    if not (root / "rdmafork/librdmafork.so").is_file():
        pytest.skip("needs a checkout that is built")
    # The library is tested as it is built, even if a source is newer.
    output("make", "-C", root, "-o", ".venv/built", "install", *variables)


@pytest.mark.usefixtures("program")
def test_make_install_is_enough_for_c(tmp_path):
    make_install(f"PREFIX={tmp_path}/usr")
    files = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert files == {
        "usr/include/rdmafork.h", "usr/lib/librdmafork.so", "usr/lib/pkgconfig/rdmafork.pc"
    }  # fmt: skip
    flags = pkg_config(tmp_path / "usr/lib/pkgconfig", "--cflags", "--libs")
    starts_with(flags, tmp_path, tmp_path / "usr/lib/librdmafork.so")


@pytest.mark.usefixtures("program")
def test_make_install_puts_it_where_a_packager_wants_it(tmp_path):
    where = f"DESTDIR={tmp_path}/tree", "PREFIX=/opt/r", "LIBDIR=/opt/r/lib64", "RPATH="
    make_install(*where)
    tree = tmp_path / "tree/opt/r"
    assert (tree / "lib64/librdmafork.so").is_file() and (tree / "include/rdmafork.h").is_file()
    assert not (tree / "lib").exists()
    flags = pkg_config(tree / "lib64/pkgconfig", "--cflags", "--libs")
    assert flags.split() == ["-I/opt/r/include", "-L/opt/r/lib64", "-lrdmafork"]
