"""All that a user can be told, to be read in one go: make sentences.

The help of each command, help(rdmafork), and each text in the sources that has more than one
word: of errors, warnings, doctor, report and demo. {} stands for a value.
"""

import ast
import io
import pydoc
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import rdmafork
from rdmafork import cli

ROOT = Path(__file__).resolve().parents[2]


def of_help() -> Iterator[str]:
    yield pydoc.plain(pydoc.render_doc(rdmafork))
    for command in ["", *cli.COMMANDS]:
        with redirect_stdout(io.StringIO()) as said:
            try:
                cli.main([*command.split(), "--help"])
            except SystemExit:
                pass
        yield said.getvalue()


def text_of(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def of_python(path: Path) -> Iterator[tuple[int, str]]:
    tree = ast.parse(path.read_text())
    docstrings = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    parts = {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in docstrings | parts:
            yield node.lineno, text_of(node)


STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"(?:\s*(?:PRI[a-zX0-9]+\s*)?"((?:[^"\\\n]|\\.)*)")*')


def of_c(path: Path) -> Iterator[tuple[int, str]]:
    source = re.sub(r"/\*.*?\*/|#include[^\n]*", lambda m: re.sub(r"[^\n]", " ", m[0]),
                    path.read_text(), flags=re.DOTALL)  # fmt: skip
    for match in STRING.finditer(source):
        parts = re.findall(r'"((?:[^"\\\n]|\\.)*)"', match[0])
        yield source.count("\n", 0, match.start()) + 1, "".join(parts)


def main() -> None:
    for said in of_help():
        print(said, "-" * 80, sep="\n")
    package = ROOT / "rdmafork"
    python = [*package.glob("*.py"), *package.glob("cli/*.py")]
    c = [*package.glob("*.pyx"), *(ROOT / "csrc").rglob("*.c")]
    for path in sorted(python) + sorted(c):
        found = of_python(path) if path.suffix == ".py" else of_c(path)
        for line, text in sorted(found):
            if re.search(r"[a-z]{2,},? [a-z]{2,}", text):
                print(f"{path.relative_to(ROOT)}:{line}: {text.strip()}")


if __name__ == "__main__":
    sys.exit(main())
