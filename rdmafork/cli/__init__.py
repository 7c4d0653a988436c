"""The rdmafork command: one file a subcommand."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from rdmafork import __version__
from rdmafork.cli import terminal

# Each is a module here with DESCRIPTION, EPILOG, add_arguments(parser) and run(args) -> exit
# status, imported when it is the one that is wanted. USAGE_STATUS: after wrong arguments.
COMMANDS = {
    "demo": "show what fork() does to pinned memory, without and with rdmafork",
    "doctor": "check what RDMA and fork() need, on this machine or on a cluster",
    "devices": "list the RDMA devices, and why one cannot be used",
    "exec": "run a program, unchanged, with fork() made safe and cheap",
    "report": "merge the reports of `rdmafork exec --report` into one table",
    "bench": "measure what registering and fork() cost, compared with libibverbs",
    "config": "print the flags that compile and link a C program with rdmafork",
}

DESCRIPTION = """\
rdmafork keeps fork() safe and cheap in programs that have registered memory
with RDMA hardware: the pages that a device reads and writes stay the parent's,
and the kernel does not copy them for the child. `rdmafork demo` shows it and
needs no RDMA hardware.

In a program:

    import rdmafork
    rdmafork.fork_init()              # once, before anything is registered
    with rdmafork.register(buffer):   # makes no system call
        multiprocessing.Pool(8)       # children do not inherit the buffer
"""

EPILOG = """\
`rdmafork help COMMAND` explains one command, with examples and exit statuses.
"""


class _Parser(argparse.ArgumentParser):
    """usage_status: the exit status when the arguments are wrong."""

    usage_status = 2

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(self.usage_status, f"{self.prog}: {message}\n")

    def parse_all(self, arguments: Sequence[str]) -> argparse.Namespace:
        """parse_args(), which says of a wrong option which one may be meant."""
        args, unknown = self.parse_known_args(arguments)
        for word in unknown:
            if word.startswith("-"):
                option = word.partition("=")[0]
                near = terminal.did_you_mean(option, self._option_string_actions)
                self.error(f"there is no option {option}.{near}")
            self.error(f"unexpected argument: {word}")
        return args


def _top() -> _Parser:
    """What `rdmafork --help` shows; the commands have parsers of their own."""
    parser = _Parser(
        prog="rdmafork",
        usage="rdmafork COMMAND [ARGUMENT ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"rdmafork {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    return parser


def _run(arguments: Sequence[str]) -> int:
    if not arguments:
        _top().print_help()
        return 2
    name, *rest = arguments
    if name == "help":
        wanted = rest[:1] != ["help"] and rest
        name, rest = (rest[0], ["--help"]) if wanted else ("--help", [])
    try:
        if name in COMMANDS:
            return _run_command(name, rest)
        if not name.startswith("-"):
            near = terminal.did_you_mean(name, COMMANDS)
            _top().error(f"there is no command {name}.{near or _CHOICE}")
        _top().parse_all([name])
        _top().error(f"name a command.{_CHOICE}")
    except SystemExit as leaving:  # with 0 after --help and --version
        return leaving.code if isinstance(leaving.code, int) else 2


_CHOICE = f" The commands are {', '.join(COMMANDS)}."


def _run_command(name: str, arguments: Sequence[str]) -> int:
    command = importlib.import_module(f"rdmafork.cli.{name}")
    parser = _Parser(
        prog=f"rdmafork {name}",
        description=command.DESCRIPTION,
        epilog=command.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.usage_status = getattr(command, "USAGE_STATUS", _Parser.usage_status)
    command.add_arguments(parser)
    status: int = command.run(parser.parse_all(arguments))
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit status."""
    _streams()
    try:
        status = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # The reader has gone, as with `| head`.
        _write_no_more()
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 128 + signal.SIGINT
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
        if error.filename is not None or not full:
            raise
        with contextlib.suppress(OSError):
            print(f"rdmafork: the output cannot be written: {error.strerror}", file=sys.stderr)
        _write_no_more()
        return 2


def _streams() -> None:
    """All three are there, closed ones too (>&-), and stdout takes any character."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _write_no_more() -> None:
    """The interpreter flushes once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
