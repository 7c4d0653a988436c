"""Lines and files of the tree that documentation, comments and docstrings name are there.

And the table of places in CONTRIBUTING.md names each folder and each module.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
# `csrc/fork.c: text of the line`
REFERENCE = re.compile(r"`((?:csrc|rdmafork|tests)/[\w./]+|setup\.py): ([^`\n]+)`")

# A file of the tree as a comment or a docstring names it; an asterisk stands for several.
NAMED = re.compile(
    r"(?<![\w./-])(?:csrc|rdmafork|tests|benchmarks|docs|examples|packaging)"
    r"(?:/[\w.*-]+)*/[\w*-]+\.(?:pyx|pxd|py|md|mk|sh|c|h|txt)\b"
)
PYTHON = ("rdmafork", "tests", "benchmarks", "docs", "examples")
SOURCES = [
    *(path for name in PYTHON for path in (ROOT / name).rglob("*.py")),
    *(path for name in ("csrc", "tests") for path in (ROOT / name).rglob("*.[ch]")),
    *(ROOT / "rdmafork").glob("*.pyx"),
]
COMMENTS = re.compile(
    r"""//[^\n]*|/\*.*?\*/|(?<!["'\w])\#[^\n]*|\"{3}.*?\"{3}""", re.DOTALL | re.VERBOSE
)

needs_sources = pytest.mark.skipif(
    not (ROOT / "rdmafork").is_dir(), reason="the package's sources are not here: make test-wheel"
)


def comments(text):
    return "\n".join(COMMENTS.findall(text))


def problems(text):
    """The references in text that name no line, or more than one."""
    for name, wanted in REFERENCE.findall(text):
        path = ROOT / name
        lines = path.read_text().splitlines() if path.is_file() else []
        count = sum(wanted in line for line in lines)
        if count != 1:
            yield f"{name}: {wanted}: {count} lines"


@needs_sources
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


@needs_sources
def test_files_that_comments_name_exist():
    named = [
        (source.relative_to(ROOT), name)
        for source in {*SOURCES} - {Path(__file__)}
        for name in NAMED.findall(comments(source.read_text()))
        if not name.endswith("/test_x.py")  # for any
    ]
    assert len(named) > 20
    assert not [(source, name) for source, name in named if not list(ROOT.glob(name))]


def test_a_file_is_found_in_comments_alone():
    text = 'x = "tests/none.py"\n# tests/some.py\n"""of tests/others/*.c"""\n/* csrc/fork.c */'
    assert NAMED.findall(comments(text)) == ["tests/some.py", "tests/others/*.c", "csrc/fork.c"]


def places():
    """The files and folders that the first column of "Where things are" names."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split("\n## Where things are\n")[1]
    for row in re.findall(r"^\| (`.*)", section.split("\n## ")[0], re.M):
        cell, explanation = row.split(" | ", 1)
        folder = Path()
        for name in re.findall(r"`([^`]+)`", cell):
            # A name alone is of the folder of the one before it.
            folder = Path(name).parent if "/" in name else folder
            yield (folder / Path(name).name).as_posix(), re.findall(r"`(\w+)`", explanation)


@needs_sources
def test_the_table_of_places_is_the_tree():
    named = dict(places())
    assert not [place for place in named if not list(ROOT.glob(place))]
    folders = {
        path.relative_to(ROOT).as_posix()
        for parent in (ROOT, ROOT / "csrc", ROOT / "rdmafork", ROOT / "tests")
        for path in parent.iterdir()
        if path.is_dir() and re.fullmatch(r"[a-z]+", path.name)
    } - {"build", "dist", "rdmafork", "tests"}
    assert folders <= named.keys()
    # A module may be named beside another one, by its stem.
    modules = {Path(place).stem for place in named} | {
        name for names in named.values() for name in names
    }
    files = [*(ROOT / "rdmafork").glob("*.py"), *(ROOT / "rdmafork").glob("*.pyx")]
    assert {path.stem for path in files} - {"__init__", "__main__", "_version"} <= modules
