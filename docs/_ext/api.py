"""The Python API: signatures as the stubs and the sources declare them, words from the docstrings.

    .. api:: register Registration

Compiled modules have docstrings but no types, their .pyi types but no words: each gives what it
has. A class comes with all that is public of what it declares itself.
"""

import ast
import inspect
import re
from pathlib import Path

import header
import prose
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

import rdmafork
from rdmafork import _results

PACKAGE = Path(rdmafork.__file__).parent
DECLARING = ("_core.pyi", "_buffer.pyi", "_verbs.pyi", "_access.py", "_errors.py", "_results.py",
             "devices.py", "__init__.py")  # fmt: skip
# What a reader is to see of names that only the stubs have.
READABLE = {
    "Buffer | _Tensor": "collections.abc.Buffer | SupportsDLPack",
    "type[BaseException] | None": "type | None",
}
Declared = ast.FunctionDef | ast.ClassDef


def declarations() -> dict[str, tuple[Path, Declared]]:
    found: dict[str, tuple[Path, Declared]] = {}
    for name in DECLARING:
        for node in ast.parse((PACKAGE / name).read_text()).body:
            if isinstance(node, Declared):
                found.setdefault(node.name, (PACKAGE / name, node))
    return found


def type_text(node: ast.expr | None) -> str:
    text = "None" if node is None else ast.unparse(node)
    for seen, shown in READABLE.items():
        text = text.replace(seen, shown)
    return text


def signature(node: ast.FunctionDef, method: bool) -> str:
    node = ast.parse(ast.unparse(node)).body[0]  # type: ignore[assignment] # a copy
    assert isinstance(node, ast.FunctionDef)
    static = any(ast.unparse(d) == "staticmethod" for d in node.decorator_list)
    if method and not static:
        (node.args.posonlyargs or node.args.args).pop(0)
    returns = "" if node.name == "__init__" else f" -> {type_text(node.returns)}"
    text = type_text(node.args)  # type: ignore[arg-type]
    return f"({text}){returns}"


def linked(text: str) -> str:
    """`register()` and `Registration` in prose as links."""

    def link(match: re.Match[str]) -> str:
        name, call = match[1], match[2]
        if name not in dir(rdmafork):
            return match[0]
        role = "func" if call else "class"
        return f":py:{role}:`{name}{'()' if call else ''} <rdmafork.{name}>`"

    text = re.sub(r"(?<![\w.`\"/])([a-z]\w+)(\(\))(?!\w)", link, text)
    return re.sub(r"(?<![\w.`\"/])([A-Z][A-Za-z]+)()(?![\w`(]|\.\w)", link, text)


def words(obj: object, indent: str, of: ast.FunctionDef | None = None) -> list[str]:
    """The docstring, or text; where it begins with arguments of that function, they stand out."""
    text = obj if isinstance(obj, str) else inspect.getdoc(obj) or ""
    text = re.sub(r"^\w+\(.*\)( -> .*)?\n--\n+", "", text)
    names = "|".join(a.arg for a in [*of.args.args, *of.args.kwonlyargs]) if of else "(?!)"

    def shown(text: str) -> str:
        return linked(re.sub(rf"^((?:{names})(?:, (?:{names}))*): ", r"**\1**: ", text))

    return [f"{indent}{line}".rstrip() for line in prose.rst(text, shown)]


def comments(path: Path) -> dict[tuple[str, str], str]:
    """The texts after #: of the members of enums."""
    if path.suffix == ".pyi":
        return {}
    analyzer = ModuleAnalyzer.for_file(str(path), f"rdmafork.{path.stem}")
    analyzer.analyze()
    return {key: " ".join(lines).strip() for key, lines in analyzer.attr_docs.items()}


def without_fields(obj: type) -> str:
    """The docstring as far as it is not about fields, which have places of their own."""
    text, said = inspect.getdoc(obj) or "", _results.fields(obj)
    return text.partition(f"\n{next(iter(said))}: ")[0] if said else text


def attribute(name: str, kind: str, said: object) -> list[str]:
    return [f"   .. py:attribute:: {name}", f"      :type: {kind}", "", *words(said, "      ")]


def of_class(path: Path, node: ast.ClassDef, cls: type) -> list[str]:
    result: list[str] = []
    notes, said = comments(path), _results.fields(cls)
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            name = item.target.id
            result += attribute(name, type_text(item.annotation), said[name])
        elif isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
            name = item.targets[0].id
            if not name.startswith("_"):
                value = int(getattr(cls, name))
                note = notes.get((node.name, name), "")
                result += [f"   .. py:attribute:: {name}", f"      :value: {value}", ""]
                result += words(note, "      ")
        elif isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
            member = inspect.getattr_static(cls, item.name)
            decorators = [ast.unparse(d) for d in item.decorator_list]
            if "property" in decorators:
                said = inspect.getdoc(member) or ""
                result += attribute(item.name, type_text(item.returns), said)
                continue
            result.append(f"   .. py:method:: {item.name}{signature(item, True)}")
            result += ["      :staticmethod:"] if "staticmethod" in decorators else []
            result += ["", *words(getattr(cls, item.name), "      ", item)]
    return result


def lines_of(name: str) -> list[str]:
    path, node = declarations()[name]
    obj = getattr(rdmafork, name)
    if isinstance(node, ast.FunctionDef):
        return [f".. py:function:: {name}{signature(node, False)}", "", *words(obj, "   ", node)]
    makes = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    init = next((item for item in makes if item.name == "__init__"), None)
    shown = signature(init, True) if init and path.suffix == ".pyi" else ""
    bases = [ast.unparse(base) for base in node.bases]
    kind = "exception" if issubclass(obj, Exception) else "class"
    result = [f".. py:{kind}:: {name}{shown}", ""]
    result += words(without_fields(obj) if obj.__doc__ else "", "   ", init)
    public = [base for base in bases if not base.startswith("_")]
    if public:
        bases_text = ", ".join(
            f":py:class:`{base} <rdmafork.{base}>`" if base in dir(rdmafork) else f"``{base}``"
            for base in public
        )
        result += [f"   Base: {bases_text}.", ""]
    return [*result, *of_class(path, node, obj)]


class Api(header.FromText):
    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        env = self.state.document.settings.env
        for name in DECLARING:
            env.note_dependency(str(PACKAGE / name))
        lines = [".. py:currentmodule:: rdmafork", ""]
        for name in self.arguments[0].split():
            lines += [*lines_of(name), ""]
        return self.parsed(lines, "docstrings")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("api", Api)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
