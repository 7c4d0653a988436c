"""Will a library preloaded into a program get there?

    rdmafork exec -- app.sh x          what is started
        app.sh: #!/usr/bin/env python3
        /usr/bin/env python3 app.sh x  is looked through: the loader starts it, too
        /usr/bin/python3               is what counts

The dynamic loader preloads nothing into a program that has no loader (static), has another
(32-bit, another C library), or runs with more rights than its user's: there it would be a way to
take them. AddressSanitizer's runtime aborts unless it is the first of all libraries.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence

import rdmafork
from rdmafork.cli import machine
from rdmafork.cli.elf import Elf, Machine, NotElf

FAILED, CANNOT_RUN, NOT_FOUND = 125, 126, 127  # as env(1) and timeout(1) have them

_DEPTH = 6  # interpreters of interpreters; the kernel follows four
_HEAD = 256  # bytes that the kernel reads of a file to tell its kind
_SANITIZERS = ("libasan.so", "libclang_rt.asan")


class Refused(Exception):
    """Why a program is not started, and the exit status that says so."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(text)


def check(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """The file that command runs. Refused, unless what environ preloads gets into its program."""
    for path in _programs(command, environ):
        _check_rights(path)
        try:
            with Elf(path) as elf:
                _check_loader(path, elf)
                _check_sanitizer(path, elf, environ)
        except PermissionError:
            pass  # it may be executed and not be read: nothing can be said
        except (OSError, NotElf) as error:
            raise Refused(CANNOT_RUN, f"{path}: {error}") from None
    return _find(command[0], environ)


def must_be_first(path: str) -> bool:
    """Is it a sanitizer's runtime, which must come before all others?"""
    return os.path.basename(path).startswith(_SANITIZERS)


# ---- which programs ---------------------------------------------------------------------


def _programs(command: Sequence[str], environ: Mapping[str, str]) -> Iterator[str]:
    """The program, its interpreter where it is a script, and the program that env is to start."""
    path, arguments, directory = _find(command[0], environ), list(command[1:]), ""
    for _ in range(_DEPTH):
        head = _head(path)
        if head.startswith(b"#!"):
            interpreter, *option = _interpreter(path, head)
            path, arguments = interpreter, [*option, path, *arguments]
            continue
        if head and not head.startswith(b"\x7fELF"):
            text = f"{path} is neither a program nor a script: it has no #! line"
            raise Refused(CANNOT_RUN, f"{text}; did you mean sh {path}?")
        yield path
        if os.path.basename(path) != "env":
            return
        started, environ, directory = _started_by_env(arguments, environ, directory)
        if not started:
            return
        program, *arguments = started
        path = _find(os.path.join(directory, program) if os.sep in program else program, environ)


def _find(program: str, environ: Mapping[str, str]) -> str:
    found = shutil.which(program, path=environ.get("PATH", os.defpath))
    if found:
        return found
    if os.path.isdir(program):
        raise Refused(CANNOT_RUN, f"{program} is a directory")
    if shutil.which(program, mode=os.F_OK, path=environ.get("PATH", os.defpath)):
        raise Refused(CANNOT_RUN, f"{program} is not executable: chmod +x")
    directory = os.path.dirname(program)
    if directory and not os.path.exists(directory):
        raise Refused(NOT_FOUND, f"cannot find {program}: there is no directory {directory}")
    where = "" if directory else " in PATH"
    raise Refused(NOT_FOUND, f"there is no program {program}{where}")


def _head(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_HEAD)
    except PermissionError:
        return b""
    except OSError as error:
        raise Refused(CANNOT_RUN, f"{path}: {error.strerror}") from None


def _interpreter(path: str, head: bytes) -> list[str]:
    """Of "#!/usr/bin/env -S python3 -u": the program, and all the rest as one argument."""
    # Blanks and tabs part them, nothing else: of a file with CR LF the name has the CR.
    line = head[2:].partition(b"\n")[0].partition(b"\0")[0].strip(b" \t")
    words = [os.fsdecode(word) for word in re.split(b"[ \t]+", line, maxsplit=1)]
    if not words[0]:
        raise Refused(CANNOT_RUN, f"{path} names no interpreter in its first line")
    if not os.path.exists(words[0]):
        raise Refused(NOT_FOUND, f"{path}: its interpreter {words[0]} does not exist")
    return words


_ENV_OPTIONS = {"ignore-environment": "i", "unset": "u", "chdir": "C", "split-string": "S"}


def _started_by_env(
    arguments: Sequence[str], environ: Mapping[str, str], directory: str
) -> tuple[list[str], dict[str, str], str]:
    """The command in the arguments of env(1), if there is one, its variables and its directory."""
    rest, changed = list(arguments), dict(environ)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        letters = word[1:] or "i"
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            letters = _ENV_OPTIONS[name] + value if name in _ENV_OPTIONS else ""
        while letters:
            letter, letters = letters[0], letters[1:]
            if letter == "i":
                text = f"env {word} removes LD_PRELOAD: set the environment before rdmafork exec"
                raise Refused(FAILED, text)
            if letter not in "uCSa":
                continue
            value, letters = letters or (rest.pop(0) if rest else ""), ""
            if letter == "u":
                changed.pop(value, None)
            elif letter == "C":
                directory = os.path.join(directory, value)
            elif letter == "S":
                rest = _split(value) + rest
    while rest and "=" in rest[0]:
        name, _, value = rest.pop(0).partition("=")
        changed[name] = value
    if changed.get("LD_PRELOAD") != environ.get("LD_PRELOAD"):
        raise Refused(FAILED, "env changes or removes LD_PRELOAD: set it before rdmafork exec")
    return rest, changed, directory


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise Refused(FAILED, f"env -S {text}: {error}") from None


# ---- reasons that keep a library out -------------------------------------------------------


def _check_rights(path: str) -> None:
    status = os.stat(path)
    if os.statvfs(path).f_flag & os.ST_NOSUID:
        return
    cure = "nothing can be preloaded into it; use sudo rdmafork exec, as the user it becomes"
    if machine.field("/proc/self/status", "NoNewPrivs") != "1":
        if status.st_mode & stat.S_ISUID and status.st_uid != os.getuid():
            raise Refused(CANNOT_RUN, f"{path} is set-uid: {cure}")
        group_runs = status.st_mode & stat.S_ISGID and status.st_mode & stat.S_IXGRP
        if group_runs and status.st_gid != os.getgid():
            raise Refused(CANNOT_RUN, f"{path} is set-gid: {cure}")
    if os.getuid() != 0 and _has_capabilities(path):
        raise Refused(CANNOT_RUN, f"{path} has file capabilities (getcap): {cure}")


def _has_capabilities(path: str) -> bool:
    try:
        return bool(os.getxattr(path, "security.capability"))
    except OSError:
        return False


def _own() -> tuple[Machine, str]:
    """The machine that librdmafork.so is made for, and the loader of this process."""
    with Elf(rdmafork.get_library()) as library, Elf(os.path.realpath(sys.executable)) as python:
        return library.machine, python.interpreter or ""


def _check_loader(path: str, elf: Elf) -> None:
    ours, loader = _own()
    if elf.machine != ours:
        text = f"{path} is for {elf.machine}, but librdmafork.so is for {ours}"
        raise Refused(CANNOT_RUN, f"{text}: install rdmafork for that too")
    found = elf.interpreter
    if found is None:
        if os.path.basename(os.path.realpath(path)) == os.path.basename(os.path.realpath(loader)):
            return  # the loader itself, given a program
        raise Refused(
            CANNOT_RUN,
            f"{path} is static, so nothing can be preloaded into it: link it dynamically, or "
            f"call the functions of rdmafork.h in it",
        )
    if os.path.basename(found) != os.path.basename(loader):
        text = f"{path} needs the loader {found}, but librdmafork.so was built for {loader}"
        raise Refused(CANNOT_RUN, f"{text}: install rdmafork for that C library")


def _check_sanitizer(path: str, elf: Elf, environ: Mapping[str, str]) -> None:
    runtime = next((name for name in elf.needed if must_be_first(name)), None)
    if runtime is None or any(map(must_be_first, split(environ.get("LD_PRELOAD", ""))[:1])):
        return
    if "verify_asan_link_order=0" in environ.get("ASAN_OPTIONS", ""):
        return
    raise Refused(
        CANNOT_RUN,
        f"{path} is built with AddressSanitizer, whose runtime must be the first library: "
        f"LD_PRELOAD=$(cc -print-file-name={runtime}) rdmafork exec ..., which keeps it first",
    )


def split(preload: str) -> list[str]:
    """The libraries that LD_PRELOAD names."""
    return preload.replace(":", " ").split()
