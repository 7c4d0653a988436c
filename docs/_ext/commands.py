"""The command line's own help, asked for while the pages are built.

.. shown:: rdmafork exec --help
"""

import os
import shlex
import subprocess
import sys

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx


def said(command: str) -> str:
    program, *arguments = shlex.split(command)
    assert program == "rdmafork"
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("RDMA", "IBV_", "LD_"))}
    done = subprocess.run(
        [sys.executable, "-m", "rdmafork", *arguments],
        env=environ | {"COLUMNS": "80", "NO_COLOR": "1"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


class Shown(Directive):
    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        text = f"$ {self.arguments[0]}\n{said(self.arguments[0])}".rstrip()
        return [nodes.literal_block(text, text, language="text")]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("shown", Shown)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
