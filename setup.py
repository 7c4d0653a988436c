"""Builds librdmafork.so from csrc/, then the Cython modules that link to it."""

import os
import platform
import re
import shlex
import sys
import sysconfig
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

LIBRARY = "rdmafork.librdmafork"
MODULES = ("_buffer", "_clocks", "_core", "_dlpack", "_ibverbs", "_pins", "_verbs")
STOREYS = ("csrc", "csrc/preload")
SOURCES = sorted(path for storey in STOREYS for path in glob(f"{storey}/*.c"))
HEADERS = [path for storey in STOREYS for path in glob(f"{storey}/*.h")]
HEADERS = sorted([*HEADERS, *glob("csrc/*.map"), *glob("rdmafork/*.pxd")])
FLAGS = (
    "-std=gnu11 -O2 -DNDEBUG -Icsrc -fPIC -pthread -fvisibility=hidden "
    "-Wall -Wextra -Wshadow -Werror=implicit-function-declaration"
).split()
LINK = (
    "-shared -pthread -Wl,-soname,librdmafork.so -Wl,--version-script=csrc/librdmafork.map "
    "-Wl,-Bsymbolic -Wl,-z,defs -Wl,-z,nodelete"
).split()
# What Python was built with, but for what is only its own: $CFLAGS take the place of all of it.
OPTIMIZED = "-O3 -DNDEBUG -fwrapv".split()
# Before $CPPFLAGS, $CFLAGS and $LDFLAGS, so that who builds packages has the last word.
HARDENED = ["-fstack-protector-strong", "-fno-plt"]
HARDENED += {
    "x86_64": ["-fcf-protection"],
    "aarch64": ["-mbranch-protection=standard"],
}.get(platform.machine(), [])
HARDENED_LINK = "-Wl,-z,relro -Wl,-z,now -Wl,-z,noexecstack".split()
FORTIFIED = "-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2".split()
# No instructions of that processor: gcc's default zeroes a new object by "rep stos", which
# takes as long as the registration itself.
TUNING = ["-mtune=znver1"] if platform.machine() == "x86_64" else []
# For `make coverage`: the modules tell coverage.py of each line, in code without the GIL too.
TRACED = "RDMAFORK_LINETRACE" in os.environ


def words(variable):
    return shlex.split(os.environ.get(variable, ""))


def readme():
    """For PyPI, where a link into the tree leads nowhere: to $RDMAFORK_TREE, if that says where."""
    with open("README.md", encoding="utf-8") as file:
        text = file.read()
    tree = os.environ.get("RDMAFORK_TREE")
    if not tree:
        return text
    # Of a picture it is not the page about it that is shown.
    return re.sub(r"\]\((?!\w+:|#)", f"]({tree}/", text).replace(".svg)", ".svg?raw=true)")


def hardened(*others):
    """The flags, less what others say: defined twice, a macro is a warning."""
    said = any(
        "_FORTIFY_SOURCE" in flag for flag in (*words("CPPFLAGS"), *words("CFLAGS"), *others)
    )
    return HARDENED if said else [*HARDENED, *FORTIFIED]


def put_first(command, flags):
    """After the compiler, which may be several words, some of them with a dash: $CC."""
    at = len(words("CC"))
    if not at or command[:at] != words("CC"):
        at = next((i for i, word in enumerate(command) if word.startswith("-")), len(command))
    command[at:at] = flags


class build(build_ext):
    """Beside Python's modules, one ordinary shared library without an init function."""

    def initialize_options(self):
        super().initialize_options()
        # coverage.py finds lines in the C beside a module's source.
        self.cython_c_in_temp = not TRACED
        # What threads share has a lock of its own; where there is a GIL this adds nothing.
        self.cython_directives = {"freethreading_compatible": True, "linetrace": TRACED}

    def finalize_options(self):
        super().finalize_options()
        self.parallel = None  # the library comes first

    def get_ext_filename(self, fullname):
        if fullname in (LIBRARY, LIBRARY.rpartition(".")[2]):
            return os.path.join(*fullname.split(".")) + ".so"
        return super().get_ext_filename(fullname)

    def build_extensions(self):
        # An Extension's own flags come last, and would be the last word.
        if "CFLAGS" in os.environ:
            flags = [*OPTIMIZED, *hardened()]
        else:
            flags = hardened(*shlex.split(sysconfig.get_config_var("CFLAGS") or ""))
        put_first(self.compiler.compiler_so, flags)
        put_first(self.compiler.linker_so, HARDENED_LINK)
        super().build_extensions()

    def build_extension(self, ext):
        library = self.get_ext_fullpath(LIBRARY)
        if ext.name == LIBRARY:
            return self.build_library(ext, library)
        ext.library_dirs.append(os.path.dirname(library))
        return super().build_extension(ext)

    def build_library(self, ext, output):
        if not (self.force or newer_group(ext.sources + ext.depends, output)):
            return
        # Not the flags Python was built with: the library knows nothing of Python.
        compiler = words("CC") or shlex.split(sysconfig.get_config_var("CC") or "cc")
        flags = [*FLAGS, *hardened(), *words("CPPFLAGS"), *words("CFLAGS")]
        flags += [*LINK, *HARDENED_LINK, *words("LDFLAGS")]
        self.mkpath(os.path.dirname(output))
        self.spawn([*compiler, *flags, *ext.sources, "-ldl", "-o", output])


def module(name):
    return Extension(
        f"rdmafork.{name}",
        [f"rdmafork/{name}.pyx"],
        depends=HEADERS,
        include_dirs=["csrc"],
        libraries=["rdmafork"],
        runtime_library_dirs=["$ORIGIN"],
        extra_compile_args=["-fvisibility=hidden", *TUNING],
        define_macros=[("CYTHON_TRACE_NOGIL", "1")] if TRACED else [],
    )


library = Extension(LIBRARY, SOURCES, depends=[*HEADERS, "setup.py"])
# Elsewhere the package installs, and says at import what it needs.
linux = sys.platform == "linux"
setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    cmdclass={"build_ext": build},
    ext_modules=[library, *map(module, MODULES)] if linux else [],
)
