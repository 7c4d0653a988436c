"""Drawings that belong to the page, so that they take its colours, dark or light.

```{drawing} fork-moves.svg
What it shows, for those who do not see it and below it for those who do.
```
"""

import html
import re
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

DRAWINGS = Path(__file__).resolve().parent.parent / "drawings"


class Drawing(Directive):
    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        path = DRAWINGS / self.arguments[0]
        self.state.document.settings.env.note_dependency(str(path))
        caption = html.escape(" ".join(self.content))
        svg = re.sub(r"<\?xml.*?\?>\s*|<!--.*?-->\s*", "", path.read_text(), flags=re.DOTALL)
        svg = svg.replace("<svg ", f'<svg role="img" aria-label="{caption}" ', 1)
        text = f'<figure class="drawing">{svg}<figcaption>{caption}</figcaption></figure>'
        return [nodes.raw(text, text, format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("drawing", Drawing)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
