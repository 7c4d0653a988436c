"""C that is compiled where it is needed: what no Python can stand for."""

import os
import shlex
import subprocess
from pathlib import Path

from ._workers import Skipped


def library(directory: str, source: str, *options: str) -> str:
    """The path of a shared library made of it. Raises Skipped where that cannot be."""
    path, made = (os.path.join(directory, name) for name in ("library.c", "library.so"))
    Path(path).write_text(source)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, "-shared", "-fPIC", "-O2", "-pthread", path, *options, "-o", made]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        raise Skipped(f"there is no C compiler ({compiler[0]})") from None
    if done.returncode:
        raise Skipped(f"{shlex.join(command)}: {done.stderr.strip()[-200:]}")
    return made
