"""What the documentation says of a line of the source is said of a line that is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
# `csrc/fork.c: text of the line`
REFERENCE = re.compile(r"`((?:csrc|rdmafork|tests)/[\w./]+|setup\.py): ([^`\n]+)`")


def problems(text):
    """The references in text that name no line, or more than one."""
    for name, wanted in REFERENCE.findall(text):
        path = ROOT / name
        lines = path.read_text().splitlines() if path.is_file() else []
        count = sum(wanted in line for line in lines)
        if count != 1:
            yield f"{name}: {wanted}: {count} lines"


@pytest.mark.skipif(
    not (ROOT / "rdmafork").is_dir(), reason="the package's sources are not here: make test-wheel"
)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_line_that_a_page_names_is_there_once(page):
    assert not list(problems(page.read_text()))


def test_the_protocol_names_its_lines():
    text = (ROOT / "docs/concurrency.md").read_text()
    assert len(REFERENCE.findall(text)) > 50
    # Any other look of one would not be looked up.
    assert len(REFERENCE.findall(text)) == len(re.findall(r"`[\w./]+\.\w+: ", text))


def test_a_line_that_is_gone_or_is_not_the_only_one_is_told():
    gone = "`csrc/fork.c: static void prepare(int)`, `csrc/none.c: x`"
    assert len(list(problems(gone))) == 2
    assert len(list(problems("`csrc/fork.c: void`"))) == 1
    assert not list(problems("`csrc/fork.c: static void prepare(void)`"))
