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
MODULES = sorted(glob("rdmafork/*.pyx") + glob("benchmarks/*.pyx"))
# The engine comes first, so that its data, which a fork writes to, is on few pages.
SOURCES = sorted(glob("csrc/*.c")) + sorted(glob("csrc/preload/*.c"))
HEADERS = sorted(glob("csrc/**/*.h", recursive=True) + glob("csrc/*.map") + glob("rdmafork/*.pxd"))
# Flags of the environment come after these. The flags that Python was built with do not come at
# all: the library knows nothing of Python.
COMMAND = (
    "{CC} -std=gnu11 -O2 -DNDEBUG -Icsrc -fPIC -pthread -fvisibility=hidden "
    "-Wall -Wextra -Wshadow -Werror=implicit-function-declaration {CPPFLAGS} {CFLAGS} "
    "-shared -Wl,-soname,librdmafork.so -Wl,--version-script=csrc/librdmafork.map "
    "-Wl,-Bsymbolic -Wl,-z,defs -Wl,-z,nodelete -Wl,-z,now {LDFLAGS}"
)
UNSET = {"CC": sysconfig.get_config_var("CC"), "CPPFLAGS": "", "CFLAGS": "", "LDFLAGS": ""}
# For the modules, $CFLAGS replace the flags that Python was built with, which optimize.
OPTIMIZE = [] if "-O" in os.environ.get("CFLAGS", "-O") else ["-O3"]
# For `make coverage`: the modules tell coverage.py of each line, in code without the GIL too.
TRACED = "RDMAFORK_LINETRACE" in os.environ


class build(build_ext):
    """Beside Python's modules, one ordinary shared library without an init function."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = None  # the library comes first
        # coverage.py finds lines in the C beside a module's source.
        self.cython_c_in_temp = not TRACED
        # State that threads share has a lock of its own; where there is a GIL this adds nothing.
        self.cython_directives = {"freethreading_compatible": True, "linetrace": TRACED}

    def get_ext_filename(self, fullname):
        if fullname.endswith("librdmafork"):
            return fullname.replace(".", os.sep) + ".so"
        return super().get_ext_filename(fullname)

    def build_extension(self, ext):
        library = self.get_ext_fullpath(LIBRARY)
        if ext.name != LIBRARY:
            ext.library_dirs.append(os.path.dirname(library))
            super().build_extension(ext)
        elif self.force or newer_group(ext.sources + ext.depends, library):
            self.mkpath(os.path.dirname(library))
            command = shlex.split(COMMAND.format_map(UNSET | os.environ))
            self.spawn([*command, *ext.sources, "-ldl", "-o", library])


def module(source):
    return Extension(
        "rdmafork." + source.removeprefix("rdmafork/").removesuffix(".pyx").replace("/", "."),
        [source],
        depends=HEADERS,
        include_dirs=["csrc"],
        libraries=["rdmafork"],
        runtime_library_dirs=["$ORIGIN/.." if source.startswith("benchmarks/") else "$ORIGIN"],
        extra_compile_args=["-fvisibility=hidden", *OPTIMIZE],
        define_macros=[("CYTHON_TRACE_NOGIL", "1")] if TRACED else [],
    )


extensions = [Extension(LIBRARY, SOURCES, depends=[*HEADERS, "setup.py"]), *map(module, MODULES)]
# On other systems the package installs, and says at import that it needs Linux.
setup(cmdclass={"build_ext": build}, ext_modules=extensions if sys.platform == "linux" else [])
