"""rdmafork config: the compiler's options for using the engine from C."""

from __future__ import annotations

import argparse
import os
import shlex

import rdmafork

DESCRIPTION = """\
Prints the flags that compile and link a C program with rdmafork.h and
librdmafork.so of this installation, as pkg-config does.
"""

EPILOG = """\
examples:
  cc $(rdmafork config --cflags) -c pool.c
  cc pool.o $(rdmafork config --libs) -o pool
  cc pool.c $(python3 -m rdmafork config) -o pool
  export PKG_CONFIG_PATH=$(rdmafork config --pkgconfigdir)
  pkg-config --cflags --libs rdmafork

A program linked with these flags finds librdmafork.so where it is now. An
extension module needs only -L and -l if rdmafork is imported before it, because
the library is then loaded already.

Exit status: 0.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cflags", action="store_true", help="only the flags for compiling")
    parser.add_argument("--libs", action="store_true", help="only the flags for linking")
    parser.add_argument(
        "--pkgconfigdir", action="store_true", help="the folder of rdmafork.pc, for pkg-config"
    )


def run(args: argparse.Namespace) -> int:
    folder, name = os.path.split(rdmafork.get_library())
    if args.pkgconfigdir:
        print(os.path.join(folder, "pkgconfig"))
        return 0
    cflags = [f"-I{rdmafork.get_include()}"]
    libs = [f"-L{folder}", f"-Wl,-rpath,{folder}", f"-l{name.removeprefix('lib')[:-3]}"]
    both = args.cflags == args.libs
    print(shlex.join((cflags if both or args.cflags else []) + (libs if both or args.libs else [])))
    return 0
