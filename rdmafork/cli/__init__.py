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

# Each is a module here with DESCRIPTION, EPILOG, add_arguments(parser) and run(args) -> exit
# status, imported when it is the one that is wanted. USAGE_STATUS: after wrong arguments.
COMMANDS = {
    "bench": "measure what registrations and forks cost here, beside libibverbs",
    "config": "print the flags that compile and link with the engine, for C",
    "demo": "see what fork() does to pinned memory, without and with rdmafork",
    "devices": "list the RDMA devices, and say why one cannot be used",
    "doctor": "find out what stands in the way of RDMA and fork() here",
    "exec": "run any program with fork() safe and cheap",
    "report": "merge what programs under exec reported into one table",
}

DESCRIPTION = """\
rdmafork keeps fork() safe and cheap in programs that have registered memory
with RDMA hardware: the pages a device reads and writes stay the parent's, and
the kernel does not copy them for the child. You can try it without RDMA
hardware.

In a program:

    import rdmafork
    rdmafork.fork_init()                  # once, before anything is registered
    with rdmafork.register(buffer):       # costs no system call
        multiprocessing.Pool(8)           # any fork(): the buffer does not move
"""

EPILOG = """\
`rdmafork COMMAND --help` explains one command, with examples and exit statuses.
"""


class _Parser(argparse.ArgumentParser):
    """usage_status: the exit status when the arguments are wrong."""

    usage_status = 2

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(self.usage_status, f"{self.prog}: {message}\n")


def _parser(wanted: str | None) -> argparse.ArgumentParser:
    """The parser, of which only the wanted command knows its arguments."""
    parser = _Parser(
        prog="rdmafork",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rdmafork {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        if name != wanted:
            subparsers.add_parser(name, help=summary, add_help=False)
            continue
        command = importlib.import_module(f"rdmafork.cli.{name}")
        subparser = subparsers.add_parser(
            name,
            help=summary,
            description=command.DESCRIPTION,
            epilog=command.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        status = getattr(command, "USAGE_STATUS", _Parser.usage_status)
        parser.usage_status = subparser.usage_status = status
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def _run(arguments: Sequence[str]) -> int:
    parser = _parser(next((a for a in arguments if not a.startswith("-")), None))
    if not arguments:
        parser.print_help()
        return 2
    try:
        args = parser.parse_args(arguments)
    except SystemExit as leaving:  # with 0 after --help and --version
        return leaving.code if isinstance(leaving.code, int) else 2
    status: int = args.run(args)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit status."""
    _streams()
    try:
        status = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # Nobody reads on, as with `| head`.
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
