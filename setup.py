"""Builds librdmafork.so from csrc/, then the Cython modules that link to it."""

import os
import shlex
import sys
import sysconfig
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

LIBRARY = "rdmafork.librdmafork"
MODULES = ("_buffer", "_clocks", "_core", "_dlpack", "_ibverbs", "_pins", "_verbs")
# The engine first, so that what it writes to at a fork is on few pages.
SOURCES = sorted(glob("csrc/*.c")) + sorted(glob("csrc/preload/*.c"))
HEADERS = sorted(glob("csrc/**/*.h", recursive=True) + glob("csrc/*.map") + glob("rdmafork/*.pxd"))
# $CPPFLAGS, $CFLAGS and $LDFLAGS come after these.
COMPILE = (
    "-std=gnu11 -O2 -DNDEBUG -Icsrc -fPIC -pthread -fvisibility=hidden "
    "-Wall -Wextra -Wshadow -Werror=implicit-function-declaration"
)
LINK = (
    "-shared -pthread -Wl,-soname,librdmafork.so -Wl,--version-script=csrc/librdmafork.map "
    "-Wl,-Bsymbolic -Wl,-z,defs -Wl,-z,nodelete"
)
# $CFLAGS take the place of what Python was built with, which optimizes.
OPTIMIZE = [] if "-O" in os.environ.get("CFLAGS", "-O") else ["-O3"]
# For `make coverage`: the modules tell coverage.py of each line, in code without the GIL too.
TRACED = "RDMAFORK_LINETRACE" in os.environ


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

    def build_extension(self, ext):
        if ext.name == LIBRARY:
            return self.build_library(ext, self.get_ext_fullpath(LIBRARY))
        ext.library_dirs.append(os.path.dirname(self.get_ext_fullpath(LIBRARY)))
        return super().build_extension(ext)

    def build_library(self, ext, output):
        if not (self.force or newer_group(ext.sources + ext.depends, output)):
            return
        # Not the flags Python was built with: the library knows nothing of Python.
        compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
        wished = {name: os.environ.get(name, "") for name in ("CPPFLAGS", "CFLAGS", "LDFLAGS")}
        flags = "{} {CPPFLAGS} {CFLAGS} {} {LDFLAGS}".format(COMPILE, LINK, **wished)
        self.mkpath(os.path.dirname(output))
        command = shlex.split(f"{compiler} {flags}")
        self.spawn([*command, *ext.sources, "-ldl", "-o", output])


def module(name):
    return Extension(
        f"rdmafork.{name}",
        [f"rdmafork/{name}.pyx"],
        depends=HEADERS,
        include_dirs=["csrc"],
        libraries=["rdmafork"],
        runtime_library_dirs=["$ORIGIN"],
        extra_compile_args=["-fvisibility=hidden", *OPTIMIZE],
        define_macros=[("CYTHON_TRACE_NOGIL", "1")] if TRACED else [],
    )


library = Extension(LIBRARY, SOURCES, depends=[*HEADERS, "setup.py"])
# Elsewhere the package installs, and says at import what it needs.
extensions = [library, *map(module, MODULES)] if sys.platform == "linux" else []
setup(cmdclass={"build_ext": build}, ext_modules=extensions)
