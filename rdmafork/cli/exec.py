"""rdmafork exec: any program under the engine.

It sets variables and limits and becomes the program: the process, its signals, its standard
streams and its exit status are the program's own.

    LD_PRELOAD        librdmafork.so, before what is there, by a path that only glibc follows
    RDMAFORK_EXEC     1: the engine starts by itself, and answers for libibverbs
    RDMAFORK_MODE, RDMAFORK_REPORT, RDMAFORK_TRACE_FORKS, RDMAFORK_KEEP_DEVICES   the options
    RDMAFORK_RANK     the launcher's rank
    RDMAFORK_PID      the process that it becomes, whose parent writes no report
"""

from __future__ import annotations

import _ctypes
import argparse
import contextlib
import os
import resource
import signal
import sys

import rdmafork
from rdmafork.cli import launchers, terminal
from rdmafork.cli.programs import (
    CANNOT_RUN,
    FAILED,
    NOT_FOUND,
    Refused,
    check,
    must_be_first,
    split,
)

DESCRIPTION = """\
Runs a program, in Python or not, with fork() made safe and cheap, if it or a
library that it uses (pyverbs, UCX, NCCL, ...) registers memory with RDMA
hardware. The program is not changed: librdmafork.so is preloaded and replaces
libibverbs' own fork support. The programs that it starts inherit that.

Forked children cannot use the parent's devices: in a child their descriptors
are /dev/null. The soft limit of locked memory is raised to the hard one.
"""

EPILOG = """\
examples:
  rdmafork exec -- python train.py --workers 8
  rdmafork exec --report - -- ib_write_bw     report on stderr at the end
  rdmafork exec --report r.json --trace-forks -- app     report who forked too
  mpirun -n 64 rdmafork exec --report r.json -- app
                                    a file for each rank: r.rank3.node7.json;
                                    `rdmafork report r.*.json` merges them
  torchrun --no-python --nproc-per-node 8 rdmafork exec -- python train.py
  sudo rdmafork exec -- app         not: rdmafork exec sudo app

Every process that ends by exit(), or by returning from main(), writes a report,
forked children too. A process that ends by a signal or by _exit(), as dash and
the workers of Python's multiprocessing do, writes none.
Under a launcher, put rdmafork exec between the launcher and the program, as
above. Before the launcher it does not know the ranks, and all processes write
into one file.

Memory that is pinned without libibverbs.so is not protected, for example by a
libibverbs that is linked statically, or by io_uring. The report says at least
how much that is.

It refuses programs into which no library can be preloaded: static, set-uid and
set-gid programs, those with file capabilities, and those for another processor
or C library. It looks through #! lines and env. If another program starts one
of them, that runs without rdmafork. A program built with AddressSanitizer needs
its runtime in LD_PRELOAD, where it stays first.

Exit status: the program's own; 125 wrong usage, or an option that cannot be
followed; 126 the program cannot be run like this; 127 there is no such program.
"""

USAGE_STATUS = FAILED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "rdmafork exec [OPTION ...] [--] PROGRAM [ARGUMENT ...]"
    parser.add_argument(
        "--mode",
        choices=("auto", "lazy", "eager"),
        help="when pages are marked: lazy, as a fork() begins; eager, when they are registered",
    )
    parser.add_argument(
        "--report",
        metavar="FILE",
        help="each process appends a line of JSON to FILE when it exits; - is stderr",
    )
    parser.add_argument(
        "--trace-forks",
        action="store_true",
        help="report who forked; Python prints its stack on stderr, once for each call site",
    )
    parser.add_argument(
        "--keep-devices", action="store_true", help="children keep the RDMA devices open"
    )
    parser.add_argument(
        "command",
        metavar="PROGRAM",
        nargs=argparse.REMAINDER,
        help="the program to run, and its arguments",
    )


def run(args: argparse.Namespace) -> int:
    rank = launchers.launched()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    try:
        if not command:
            raise Refused(FAILED, "no program to run; rdmafork exec --help has examples")
        environ = _environment(args, rank)
        path = check(command, environ)
    except Refused as refused:
        return _fail(rank, str(refused), refused.status)
    if rank is None and (name := launchers.launcher(command)):
        text = f"{name} launches other processes; put rdmafork exec after it, before the program."
        text += " Before the launcher it does not know the ranks"
        _say(rank, text + (", and all processes write into one report" if args.report else ""))
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec keeps that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(path, command, environ)
    except OSError as error:
        status = NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_RUN
        return _fail(rank, f"{path}: {error.strerror}", status)


def _say(rank: launchers.Rank | None, text: str) -> None:
    for line in terminal.wrap(f"rdmafork exec: {terminal.printable(text)}"):
        print(f"{launchers.prefix(rank)}{line}", file=sys.stderr)


def _fail(rank: launchers.Rank | None, text: str, status: int) -> int:
    _say(rank, text)
    return status


def _environment(args: argparse.Namespace, rank: launchers.Rank | None) -> dict[str, str]:
    environ = _inherited()
    environ["LD_PRELOAD"] = _preload(environ.get("LD_PRELOAD", ""))
    environ["RDMAFORK_EXEC"] = "1"
    if args.mode:
        environ["RDMAFORK_MODE"] = _mode(args.mode)
    if args.report:
        environ["RDMAFORK_REPORT"] = _report(args.report, rank)
        environ["RDMAFORK_PID"] = str(os.getpid())
    if args.trace_forks:
        environ["RDMAFORK_TRACE_FORKS"] = "1"
        startup = os.path.join(os.path.dirname(rdmafork.__file__), "startup")
        others = environ.get("PYTHONPATH")
        environ["PYTHONPATH"] = f"{startup}{os.pathsep}{others}" if others else startup
    if args.keep_devices:
        environ["RDMAFORK_KEEP_DEVICES"] = "1"
    if rank:
        environ["RDMAFORK_RANK"] = str(rank.rank)
        # Open MPI would warn of forks that are safe here. It may be inside Slurm, PMIx or torchrun.
        environ.setdefault("OMPI_MCA_mpi_warn_on_fork", "0")
    if not rdmafork.kernel_info().copy_on_fork_trusted:
        # A libibverbs that cannot be intercepted then protects by itself. Not where copying is
        # trusted: there libfabric's EFA would abort for nothing.
        environ.setdefault("RDMAV_FORK_SAFE", "1")
        environ.setdefault("RDMAV_HUGEPAGES_SAFE", "1")
    return environ


def _inherited() -> dict[str, str]:
    """This process's environment, without what Python added to it for itself."""
    environ = dict(os.environ)
    with contextlib.suppress(OSError), open("/proc/self/environ", "rb") as file:
        given = dict(v.partition(b"=")[::2] for v in file.read().split(b"\0"))
        environ.pop("LC_CTYPE", None)  # which it sets in the C locale (PEP 538)
        if b"LC_CTYPE" in given:
            environ["LC_CTYPE"] = os.fsdecode(given[b"LC_CTYPE"])
    return environ


def _preload(there: str) -> str:
    library = rdmafork.get_library()
    if set(library) & set(": "):
        text = f"{library} has a space or a colon in its path, which LD_PRELOAD does not allow"
        raise Refused(FAILED, f"{text}: install rdmafork elsewhere")
    others = []
    for path in split(there):
        if os.path.basename(path) != os.path.basename(library):
            others.append(path)
        elif os.path.realpath(path) != os.path.realpath(library):
            text = f"LD_PRELOAD already has {path}, and a process can load only one"
            raise Refused(
                FAILED, f"{text}: unset it, or use the rdmafork exec of that installation"
            )
    first = [path for path in others if must_be_first(path)]
    rest = [path for path in others if path not in first]
    return ":".join([*first, _for_this_c_library(library), *rest])


def _for_this_c_library(path: str) -> str:
    """A path of the same file for glibc alone: its loader has a directory for $LIB.

    musl's, and so a program of musl that one of glibc starts, would die of the library. It finds
    no such file, and goes on. A shell that expands $LIB leaves a path that leads there too.
    """
    found = f"/$LIB/../../../..{path}"
    try:
        _ctypes.dlopen(found, os.RTLD_LAZY | os.RTLD_NOLOAD)
    except OSError:
        return path
    return found


def _mode(mode: str) -> str:
    info = rdmafork.kernel_info()
    if mode == "lazy" and not info.copy_on_fork_trusted:
        text = "mode lazy needs a kernel that loses no pinned pages at fork, as Linux 5.19 and "
        text += "later"
        why = f"{info.release} may lose them"
        if info.copy_on_fork_trusted_from == "environment":
            why = "RDMAFORK_TRUST_COPYING=0 is set"
        raise Refused(FAILED, f"{text}; {why}: use --mode eager")
    return mode


def _report(path: str, rank: launchers.Rank | None) -> str:
    """Where the reports go, wherever the program goes; told now if they cannot."""
    if path == "-":
        return path
    try:
        path = os.path.abspath(path)
    except OSError:
        text = "the working directory no longer exists; give the full path"
        raise Refused(FAILED, f"no report can be written to {path}: {text}") from None
    if not path.startswith("/dev/"):
        path = launchers.file_name(path, rank)
    if os.path.islink(path) and not path.startswith(("/dev/std", "/dev/fd/", "/proc/")):
        text = "it is a symbolic link, which another user may have made"
        raise Refused(FAILED, f"no report can be written to {path}: {text}; name the file itself")
    directory = os.path.dirname(path)
    if os.path.isdir(path):
        raise Refused(FAILED, f"no report can be written to {path}: it is a directory")
    if not os.path.isdir(directory):
        text = f"there is no directory {directory}"
        raise Refused(FAILED, f"no report can be written to {path}: {text}")
    if not os.access(path if os.path.exists(path) else directory, os.W_OK):
        raise Refused(FAILED, f"no report can be written to {path}: permission denied")
    return path
