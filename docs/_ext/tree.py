"""Links into the tree: each file that is named has a page of its own, with its lines.

{test}`test_child::test_workers_of_multiprocessing_inherit_and_register`        in tests/
{test}`engine/test_fork::children_of_clone_are_noticed`
{tree}`csrc/lock.h`
"""

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import named_tests
from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from pygments.lexers.special import TextLexer
from pygments.util import ClassNotFound
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxRole

ROOT = Path(__file__).resolve().parents[2]


class NotThere(Exception):
    pass


def place(name: str) -> tuple[str, int]:
    """(path, line) of a test."""
    file, _, function = name.partition("::")
    try:
        path = str(named_tests.file_of(file).relative_to(ROOT))
    except LookupError as error:
        raise NotThere(str(error)) from None
    if not function:
        return path, 1
    function = function.partition("[")[0]
    for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
        if re.match(rf"(def |static void ){re.escape(function)}\(", line):
            return path, number
    raise NotThere(f"{path} has no {function}")


class Link(SphinxRole):
    def found(self) -> tuple[str, int]:
        raise NotImplementedError

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        try:
            path, line = self.found()
        except NotThere as error:
            message = self.inliner.reporter.error(str(error), line=self.lineno)
            return [self.inliner.problematic(self.rawtext, self.rawtext, message)], [message]
        self.env.note_dependency(str(ROOT / path))
        files = getattr(self.env, "tree_files", None)
        if files is None:
            files = self.env.tree_files = {}
        files.setdefault(path, set()).add(self.env.docname)
        depth = self.env.docname.count("/")
        link = f"{'../' * depth}tree/{path}.html#L-{line}"
        # May be broken where a name has its joints, and copied without.
        shown = html.escape(self.text.partition("::")[2] or self.text)
        shown = re.sub(r"([_/])", r"\1<wbr>", shown)
        where = f'href="{link}" title="{path}:{line}"'
        text = f'<a class="reference {self.name}" {where}><code>{shown}</code></a>'
        return [nodes.raw(text, text, format="html")], []


class Test(Link):
    def found(self) -> tuple[str, int]:
        return place(self.text)


class File(Link):
    def found(self) -> tuple[str, int]:
        if not (ROOT / self.text).is_file():
            raise NotThere(f"there is no {self.text}")
        return self.text, 1


def pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    formatter = HtmlFormatter(linenos="inline", lineanchors="L", anchorlinenos=True)
    for path in sorted(getattr(app.env, "tree_files", {})):
        text = (ROOT / path).read_text()
        try:
            lexer = get_lexer_for_filename(path)
        except ClassNotFound:
            lexer = TextLexer()
        body = f"<h1>{path}</h1>{highlight(text, lexer, formatter)}"
        yield f"tree/{path}", {"title": path, "body": body}, "page.html"


def forget(app: Sphinx, env: Any, docname: str) -> None:
    for users in getattr(env, "tree_files", {}).values():
        users.discard(docname)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_role("test", Test())
    app.add_role("tree", File())
    app.connect("html-collect-pages", pages)
    app.connect("env-purge-doc", forget)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
