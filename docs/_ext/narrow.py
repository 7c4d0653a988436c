"""Each cell of a wide table says its column, which a narrow screen shows as its heading."""

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx


def name_of(heading: nodes.entry) -> str:
    notes = (nodes.footnote_reference, nodes.reference)
    texts = (t for t in heading.findall(nodes.Text) if not isinstance(t.parent, notes))
    return "".join(map(str, texts)).strip()


def name_columns(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    for table in doctree.findall(nodes.table):
        if "wide" not in table["classes"]:
            continue
        head, body = (next(table.findall(part)) for part in (nodes.thead, nodes.tbody))
        names = [name_of(entry) for entry in head.findall(nodes.entry)]
        for row in body.findall(nodes.row):
            for name, entry in list(zip(names, row.children, strict=True))[1:]:
                if name and entry.astext():
                    entry.children[0].insert(0, nodes.inline(text=name, classes=["column"]))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-resolved", name_columns)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
