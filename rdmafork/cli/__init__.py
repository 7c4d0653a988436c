"""The rdmafork command: one file a subcommand."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys

from rdmafork import __version__

# Each is a module here with HELP, DESCRIPTION, add_arguments(parser) and run(args) -> exit status.
COMMANDS = ("demo",)

DESCRIPTION = """\
rdmafork keeps fork() safe and cheap in programs that registered memory with RDMA
hardware: the pages a device reads and writes stay the parent's, and the kernel
does not copy them for the child. Nothing here needs RDMA hardware to be tried.

In a program:

    import rdmafork
    rdmafork.fork_init()                        # once, before anything is registered
    with rdmafork.register(buffer):             # costs no system call
        subprocess.run(...)                     # any fork(): the buffer stays where it is
"""

EPILOG = """\
`rdmafork COMMAND --help` tells about one command. Exit status: 0 all is well, 1 a
promise was broken, 2 the command could not do its work.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rdmafork",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rdmafork {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        command = importlib.import_module(f"rdmafork.cli.{name}")
        subparser = subparsers.add_parser(
            name,
            help=command.HELP,
            description=command.DESCRIPTION,
            epilog=getattr(command, "EPILOG", None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns its exit status."""
    parser = _parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help()
        return 2
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Nobody reads on, as with `| head`. The interpreter flushes once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 128 + signal.SIGINT
