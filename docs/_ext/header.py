"""The C API from csrc/rdmafork.h itself, and what the headers of csrc/ open with.

    .. rdmafork-h:: rf_register rf_release      entries of that header, in its order
    .. opening:: engine                         the comment that csrc/engine.h begins with
    .. opening:: preload/elf                    that of csrc/preload/elf.h

An entry is a declaration and the comment before it; a field's is what stands beside it.
"""

import re
from pathlib import Path
from typing import NamedTuple

import prose
from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.nodes import nested_parse_with_titles

CSRC = Path(__file__).resolve().parents[2] / "csrc"
HEADER = CSRC / "rdmafork.h"
COMMENT = re.compile(r"/\*(.*?)\*/", re.DOTALL)


class Entry(NamedTuple):
    name: str
    kind: str  #: function, struct, enum, macro
    declaration: str
    comment: str
    members: list[tuple[str, str]]  #: declaration and comment


def said(comment: str) -> str:
    """A comment's text without its marks."""
    inner = COMMENT.search(comment)
    text = inner[1] if inner else comment
    lines = [re.sub(r"^ ?\* ?", "", line.strip(" ")) for line in text.split("\n")]
    return "\n".join(line.rstrip() for line in lines).strip("\n ")


def opening(name: str) -> str:
    comments = COMMENT.finditer((CSRC / f"{name}.h").read_text())
    return next(said(c[0]) for c in comments if "SPDX" not in c[0])


def members(body: str, ends: str) -> list[tuple[str, str]]:
    """Each with the comment beside it, or before it on lines of its own."""
    found: list[tuple[str, str]] = []
    before = ""
    for line in body.strip("\n").split("\n"):
        code = COMMENT.sub("", line).strip().rstrip(ends).strip()
        comment = said(line) if "/*" in line else ""
        if code:
            found.append((code, comment or before))
            before = ""
        else:
            before = comment
    return found


def entries() -> dict[str, Entry]:
    text = HEADER.read_text()
    text = text[text.index("#define RF_API") :].partition("\n")[2]
    text = text[: text.index("#ifdef __cplusplus")]
    pattern = re.compile(
        r"(?P<comment>/\*(?:[^*]|\*(?!/))*\*/\n)?"
        r"(?:#define (?P<macro>(?:RF|RDMAFORK)_\w+)[ \t]+(?P<value>[^\n]*)\n"
        r"|(?P<kind>enum|struct) (?P<tag>\w+) \{\n(?P<body>.*?)\n\};\n"
        r"|RF_API (?P<function>[^;]*);\n)",
        re.DOTALL,
    )
    found: dict[str, Entry] = {}
    comment = ""
    for match in pattern.finditer(text):
        # Lines that follow without an empty one are of the same comment.
        directly = text[: match.start()].endswith(";\n") or match["macro"] is not None
        comment = said(match["comment"]) if match["comment"] else (comment if directly else "")
        if match["macro"]:
            beside = said(match["value"]) if "/*" in match["value"] else comment
            entry = Entry(match["macro"], "macro", match["macro"], beside, [])
        elif match["function"]:
            declaration = " ".join(match["function"].split())
            name = re.search(r"(\w+)(\(|$)", declaration)
            assert name, declaration
            kind = "function" if name[2] else "var"
            entry = Entry(name[1], kind, declaration.removeprefix("extern "), comment, [])
        else:
            entry = Entry(
                match["tag"], match["kind"], match["tag"], comment,
                members(match["body"], "," if match["kind"] == "enum" else ";"),
            )  # fmt: skip
        found[entry.name] = entry
    return found


def linked(text: str) -> str:
    text = re.sub(r"(?:\\\*)?@(\w+)", r"*\1*", text)
    return re.sub(r"(?<![\w:`])(rf_[a-z_]+)\(\)", r":c:func:`\1`", text)


def lines_of(entry: Entry) -> list[str]:
    result = [f".. c:{entry.kind}:: {entry.declaration}", ""]
    result += [f"   {line}" for line in prose.rst(entry.comment, linked)]
    for declaration, comment in entry.members:
        if entry.kind == "enum":
            result += [f"   .. c:enumerator:: {declaration.partition('=')[0].strip()}", ""]
            result += [f"      {line}" for line in prose.rst(comment, linked)]
            continue
        first, *others = declaration.split(", ")
        kind = first.rpartition(" ")[0]
        for name in [first.rpartition(" ")[2], *others]:
            result += [f"   .. c:member:: {kind} {name}", ""]
            result += [f"      {line}" for line in prose.rst(comment, linked)]
    return [*result, ""]


class FromText(Directive):
    """A directive that stands for some lines of reStructuredText."""

    has_content = False

    def parsed(self, lines: list[str], source: str) -> list[nodes.Node]:
        node = nodes.section()
        node.document = self.state.document
        nested_parse_with_titles(self.state, StringList(lines, source=source), node)
        return node.children


class RdmaforkH(FromText):
    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        env = self.state.document.settings.env
        env.note_dependency(str(HEADER))
        known = entries()
        lines: list[str] = []
        for name in self.arguments[0].split():
            if name not in known:
                raise self.error(f"rdmafork.h has no {name}")
            env.rdmafork_h_shown = getattr(env, "rdmafork_h_shown", set()) | {name}
            lines += lines_of(known[name])
        return self.parsed(lines, str(HEADER))


class Opening(FromText):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        path = CSRC / f"{self.arguments[0]}.h"
        self.state.document.settings.env.note_dependency(str(path))
        lines = prose.rst(opening(self.arguments[0]), lambda text: text)
        return self.parsed(lines, str(path))


class RdmaforkHOpening(FromText):
    def run(self) -> list[nodes.Node]:
        self.state.document.settings.env.note_dependency(str(HEADER))
        return self.parsed(prose.rst(opening("rdmafork"), linked), str(HEADER))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("rdmafork-h", RdmaforkH)
    app.add_directive("rdmafork-h-opening", RdmaforkHOpening)
    app.add_directive("opening", Opening)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
