"""Programs in C, compiled where they are needed: no Python can stand for them."""

import os
import shlex
import subprocess
from pathlib import Path

from ._workers import Skipped


def library(directory: str, source: str, *options: str) -> str:
    """The path of a shared library made of it. Raises Skipped where that cannot be."""
    return _made(directory, "library.so", source, "-shared", "-fPIC", *options)


def program(directory: str, source: str, *options: str) -> str:
    """The path of a program made of it. Raises Skipped where that cannot be."""
    return _made(directory, "program", source, *options)


def _made(directory: str, name: str, source: str, *options: str) -> str:
    path, made = (os.path.join(directory, file) for file in (f"{name}.c", name))
    Path(path).write_text(source)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, "-O2", "-pthread", path, *options, "-o", made]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        raise Skipped(f"there is no C compiler ({compiler[0]})") from None
    if done.returncode:
        raise Skipped(f"{shlex.join(command)}: {done.stderr.strip()[-200:]}")
    return made
