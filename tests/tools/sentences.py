"""All that a user can be told, to be read in one go: make sentences.

First as it is met: help() of the package and of each public name, the help of each command, what
doctor, devices, demo, exec and report print here, the engine's errors with values in them, and the
line of a child that dies. Then, a line a statement, the texts of the sources that were not among
these. {} stands for a value; each text comes once.
"""

import ast
import ctypes
import errno
import io
import pydoc
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import rdmafork
from rdmafork import cli

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from c_api import Error  # noqa: E402

PACKAGE = ROOT / "rdmafork"

# ---- as it is met --------------------------------------------------------------------------


def of_help() -> Iterator[tuple[str, str]]:
    page = pydoc.plain(pydoc.render_doc(rdmafork))
    yield "help(rdmafork)", page.partition("\nPACKAGE CONTENTS")[0]
    for name in sorted(name for name in dir(rdmafork) if name[0] != "_"):
        page = pydoc.plain(pydoc.render_doc(getattr(rdmafork, name)))
        # Python explains the methods of object and tuple.
        page = re.split(r"\n \|  -{20,}\n \|  (?:Methods|Static|Class|Data).*inherited", page)[0]
        # Nor do the methods that only Python calls.
        page = re.sub(r"\n \|  _\w+.*?(?=\n \|  \S|\Z)", "", page, flags=re.DOTALL)
        page = re.sub(r"\n \|  Method resolution order:(?:\n \|  +\S+)*", "", page)
        yield f"help(rdmafork.{name})", re.sub(r"(?:\n \|[ -]*)+(?=\n \|)", "\n |", page)
    for command in ["", *cli.COMMANDS]:
        with redirect_stdout(io.StringIO()) as said:
            cli.main([*command.split(), "--help"])
        yield f"rdmafork {command} --help", said.getvalue()


FORKS = "import os, rdmafork; os.fork() or os._exit(0)"


def of_commands() -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as directory:
        report = f"{directory}/r.json"
        for arguments in (
            ["doctor"],
            ["devices", "-v"],
            ["demo", "--quick", "--size", "32MiB"],
            ["exec", "--trace-forks", "--report", report, "--", sys.executable, "-c", FORKS],
            ["report", report],
        ):
            done = subprocess.run(
                [sys.executable, "-m", "rdmafork", *arguments],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            )  # fmt: skip
            yield f"rdmafork {' '.join(arguments)}", done.stdout


def of_errors() -> Iterator[str]:
    """Each cause of rdmafork.h, with the errno that goes with it."""
    library = ctypes.CDLL(rdmafork.get_library())
    header = (ROOT / "csrc/rdmafork.h").read_text()
    causes = re.findall(r"^\tRF_CAUSE_(\w+)(?: = 0)?,(.*)$", header, re.MULTILINE)
    text = ctypes.create_string_buffer(1024)
    for cause, (name, comment) in enumerate(causes):
        error = Error(cause, 0x7F0000001000, 0x7F0000002000, 0x7F0000001040, 4096, b"{}")
        known = re.findall(r"\b(E[A-Z]+)\b[:;]", comment) or ["EINVAL", "ESTALE", "ECHILD"]
        if name == "SHARED_PAGE":
            known = ["0"]
        for number in known:
            rc = -getattr(errno, number, 0)
            library.rf_strerror(rc, ctypes.byref(error), text, ctypes.c_size_t(1024))
            yield f"{number}: {text.value.decode()}"


DIES = """
import ctypes, mmap, os, rdmafork, resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
rdmafork.fork_init()
engine = ctypes.CDLL(rdmafork.get_library())
held = []
for kind in range(6):
    memory = mmap.mmap(-1, 1 << 16, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held.append(memory)
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    handle, error = ctypes.create_string_buffer(16), ctypes.create_string_buffer(512)
    nbytes = ctypes.c_size_t(1 << 16)
    engine.rf_register(ctypes.c_void_p(at), nbytes, 1 | kind << 4, 0, handle, error)
    if not os.fork():
        memory[9]
    os.wait()
"""


def of_a_child() -> str:
    done = subprocess.run([sys.executable, "-c", DIES], capture_output=True, text=True, check=False)
    return done.stderr


# ---- the rest, from the sources ---------------------------------------------------------


def text_of(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def of_statement(node: ast.AST, inner: set[int]) -> Iterator[str]:
    """The texts of a statement, without the texts of the statements in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Constant | ast.JoinedStr):
            yield text_of(child)
        elif id(child) not in inner:
            yield from of_statement(child, inner)


def of_python(path: Path) -> Iterator[tuple[int, list[str]]]:
    tree = ast.parse(path.read_text())
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    inner = {id(node) for node in statements}
    for node in sorted(statements, key=lambda node: node.lineno):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        argument = isinstance(node, ast.Expr) and "add_argument(" in ast.unparse(node)
        if not docstring and not argument:  # which --help shows
            yield node.lineno, list(of_statement(node, inner))


STRING = r'(?<![\'"\w])[fb]?"((?:[^"\\\n]|\\.)+)"'
JOINED = re.compile(rf"{STRING}(?:\s*(?:PRI[a-zX0-9]+\s*)?{STRING})*")
# No user meets these: comments, docstrings of functions in C, assembler, includes.
HIDDEN = re.compile(
    r'/\*.*?\*/|""".*?"""|^#include[^\n]*|__asm__[^;]*;|^ *#[^\n]*|\'"\'',
    re.DOTALL | re.MULTILINE,
)


def of_c(path: Path) -> Iterator[tuple[int, list[str]]]:
    source = HIDDEN.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), path.read_text())
    for match in JOINED.finditer(source):
        text = "".join(re.findall(STRING, match[0]))
        text = re.sub(r"%[-.\d]*[a-z]+", "{}", re.sub(r"\{[^{}]*\}", "{}", text))
        text = text.replace('\\"', '"').replace("\\n", "")
        yield source.count("\n", 0, match.start()) + 1, [text]


def is_sentence(text: str) -> bool:
    return bool(re.search(r"[a-z]{2,},? [a-z]{2,}", text)) and not text.startswith("import ")


def one_line(text: str) -> str:
    return " ".join(text.split())


# Rendered above, or no user's: the loops in C and the workers that benchmarks time.
RENDERED = {"child_fault.c", "error_text.c", "_clocks.pyx"}


def of_sources() -> Iterator[tuple[str, str]]:
    python = [*PACKAGE.glob("*.py"), *PACKAGE.glob("cli/*.py")]
    c = [*PACKAGE.glob("*.pyx"), *(ROOT / "csrc").rglob("*.c")]
    for path in sorted(python) + sorted(c):
        if path.name in RENDERED:
            continue
        for line, texts in of_python(path) if path.suffix == ".py" else of_c(path):
            found = [one_line(text) for text in texts if not re.fullmatch(r"\W*[a-z_]*\W*", text)]
            if any(map(is_sentence, found)):
                # A row of doctor is the check, the finding and the remedy.
                yield f"{path.relative_to(ROOT)}:{line}", " | ".join(found)


def main() -> None:
    met = ""
    for title, text in [*of_help(), *of_commands()]:
        print(f"==== {title}", text.strip(), sep="\n", end="\n\n")
        met += one_line(text) + "\n"
    print("==== errors", *of_errors(), "", sep="\n")
    print("==== children that die", of_a_child(), sep="\n")
    print("==== the rest")
    told = set()
    for where, text in of_sources():
        unseen = [part for part in text.split(" | ") if is_sentence(part) and part not in met]
        if unseen and text not in told:
            print(f"{where}: {text}")
        told.add(text)


if __name__ == "__main__":
    sys.exit(main())
