"""Comments and docstrings of the tree as reStructuredText: text, pictures, names of functions."""

import re
from collections.abc import Callable, Iterator

BULLET = re.compile(r"^ {0,3}- ")


def escaped(text: str) -> str:
    parts = re.split(r"(``.+?``)", text)
    parts[::2] = [re.sub(r"([\\*`|])|(?<=\w)(_)(?!\w)", r"\\\1\2", part) for part in parts[::2]]
    return "".join(parts)


def blocks(text: str) -> Iterator[list[str]]:
    """Paragraphs and lists, as their lines."""
    for paragraph in re.split(r"\n[ \t]*\n", text.expandtabs(8).strip("\n")):
        lines = paragraph.split("\n")
        first = next((i for i, line in enumerate(lines) if BULLET.match(line)), 0)
        if first:
            yield lines[:first]
        yield lines[first:]


def rst(text: str, linked: Callable[[str], str]) -> list[str]:
    """linked() makes links of what it knows, in text that is escaped already."""
    result: list[str] = []
    for lines in blocks(text):
        if all(re.match(r"    ", line) for line in lines) or is_picture(lines):
            result += [".. code-block:: text", "", *(f"    {line}" for line in lines), ""]
        elif BULLET.match(lines[0]):
            items = re.split(r"^ *- ", "\n".join(lines), flags=re.MULTILINE)[1:]
            result += [f"- {linked(escaped(' '.join(item.split())))}" for item in items]
            result.append("")
        else:
            words = " ".join(line.strip() for line in lines)
            result += [linked(escaped(words)), ""]
    return result


def is_picture(lines: list[str]) -> bool:
    """Columns, or lines that mean something where they begin."""
    return len(lines) > 1 and sum(bool(re.search(r"\S {3,}\S", line)) for line in lines) > 1
