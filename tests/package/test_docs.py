"""README and the documentation: every snippet runs, links lead somewhere, named tests exist."""

import argparse
import importlib
import json
import pydoc
import re
import runpy
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
import snippets
from conftest import TIMEOUT, environment
from snippets import PAGES, ROOT

import rdmafork
from rdmafork import cli
from rdmafork._results import fields
from rdmafork.benchmarks import _plots

SNIPPETS = snippets.all_snippets()
file_of = runpy.run_path(str(ROOT / "docs/_ext/named_tests.py"))["file_of"]
# Directives that only show; MyST's others do not occur.
SHOWN = re.compile(
    r"(text)?$|\{(eval-rst|toctree|figure|drawing|(literal)?include|(list-)?table)\}"
)
NAMED = re.compile(r"\{test\}`([^`]+)`")
IN_TREE = re.compile(r"\{tree\}`([^`]+)`")
LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
DOC = re.compile(r"\{doc\}`(?:[^`<]*<)?([^`>]+)>?`")
DIRECTIVE = re.compile(r"^```+\{(?:figure|literalinclude|include)\} (\S+)", re.MULTILINE)
DRAWING = re.compile(r"^```+\{drawing\} (\S+)", re.MULTILINE)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.mark.parametrize(
    "snippet", [s for s in SNIPPETS if s.language in snippets.RUN or s.why_not], ids=str
)
def test_a_snippet_does_what_it_says(snippet, tmp_path):
    snippets.check(snippet, tmp_path)


def test_no_block_is_passed_over():
    """A block that is not run is of a language that is only shown, or has a reason."""
    for snippet in SNIPPETS:
        runs = snippet.language in snippets.RUN
        assert runs or snippet.why_not or SHOWN.match(snippet.language), f"{snippet}: what is it?"
        assert snippet.needs is None or snippet.needs in snippets.NEEDS, snippet
    for page in PAGES:
        hidden = re.findall(r"^[ >]+```.*|^ *~~~.*", page.read_text(), re.MULTILINE)
        assert not hidden, f"{page}: only a fence of ``` that begins a line is seen: {hidden}"
    pages = {snippet.page for snippet in SNIPPETS if snippet.language == "python"}
    assert {"README.md", "docs/index.md", "docs/quickstart.md"} <= pages


def test_printed_lines_are_compared():
    assert snippets.lines_that_match("a 17 b\n", "a ... b\n")
    assert not snippets.lines_that_match("a 17 c\n", "a ... b\n")


@each_page
def test_the_tests_that_it_names_exist(page):
    for name in NAMED.findall(page.read_text()):
        file, _, function = name.partition("::")
        in_c = file.startswith("engine/")
        path = file_of(file)
        begins = "static void " if in_c else "def "
        assert not function or f"\n{begins}{function}(" in path.read_text(), f"no {name}"
        if in_c and function:
            ran = re.search(rf"SCENARIO\w*\({function}\)", path.read_text())
            assert ran, f"{name} is not run"


def promises():
    """docs/guarantees.md: {promise: {column, or "": its cell}}, and the titles of its limits."""
    text = (ROOT / "docs/guarantees.md").read_text()
    rows = [re.split(r" *\| *", row)[1:-1] for row in re.findall(r"^\|.*", text, re.MULTILINE)]
    columns = [column.partition(" [^")[0] for column in rows[0][1:]]
    found = {row[0]: dict(zip(columns, row[1:], strict=True)) for row in rows[2:]}
    whatever, limits = text.partition("## Whatever")[2].split("## Limits")
    for item in re.split(r"^- ", whatever, flags=re.MULTILINE)[1:]:
        found[" ".join(item.split()).removesuffix(".")] = {"": item}
    return found, re.findall(r"^- \*\*(.*?)\.\*\*", limits, re.MULTILINE)


def evidence():
    """docs/evidence.md: {promise, or a limit's title: {column, or "": [tests]}}."""
    found = {}
    text = (ROOT / "docs/evidence.md").read_text().partition("## The other pages")[0]
    for section in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        entries = found.setdefault(section.partition("\n")[0], {})
        for column, line in re.findall(r"^- (?:([^{]*): )?(\{test\}.*)", section, re.MULTILINE):
            entries.setdefault(column, []).extend(NAMED.findall(line))
    return found


def test_each_promise_leads_to_its_tests():
    promised, limits = promises()
    shown = evidence()
    assert len(promised) > 20 and len(limits) > 10
    for promise, cells in promised.items():
        tested = {column for column, cell in cells.items() if "(not tested)" not in cell}
        assert set(shown.get(promise, {})) == tested, f"docs/evidence.md: {promise}"
    assert shown.keys() - promised.keys() <= set(limits)
    assert all(shown.values())


NAMES = "why quickstart index guarantees coming-from api capi cli benchmarks".split()
FOR_USERS = [ROOT / f"docs/{name}.md" for name in NAMES] + sorted(ROOT.glob("docs/guide/*.md"))
# Words for work on the engine; docs/why.md has the user's.
INTERNAL = re.compile(
    r"\b(absent|folded|floors?|peers?|serve[sd]?|unprepared|given back|left to the|holes?)\b",
    re.IGNORECASE,
)


def test_prose_has_no_links_to_tests():
    # That page is not among the others because programs of its table serve.
    pages = [*FOR_USERS, ROOT / "docs/tried-with.md"]
    assert not [page for page in pages if NAMED.search(page.read_text())]


def test_pages_for_users_have_the_words_of_users():
    others = [ROOT / "README.md", ROOT / "examples/README.md", ROOT / "csrc/rdmafork.h"]
    for page in others + FOR_USERS:
        prose = re.sub(r"`[^`]*`|\w*_\w*", "", page.read_text())
        assert not INTERNAL.findall(prose), page


def test_help_and_errors_have_the_words_of_users():
    said = {"help(rdmafork)": pydoc.plain(pydoc.render_doc(rdmafork).partition("\nFILE\n")[0])}
    for command in cli.COMMANDS:
        made = importlib.import_module(f"rdmafork.cli.{command}")
        parser = argparse.ArgumentParser(description=made.DESCRIPTION, epilog=made.EPILOG)
        made.add_arguments(parser)
        said[command] = parser.format_help()
    for path in [*ROOT.glob("rdmafork/*.pyi"), ROOT / "docs/trust.md", ROOT / "docs/evidence.md"]:
        prose = re.sub(r"\{test\}`[^`]*`|`[^`]*`", "", path.read_text())
        said[path.name] = re.sub(r"^ *from .*", "", prose, flags=re.MULTILINE)
    for name in ("error_text", "child_fault", "fork_uses", "preload/intercept"):
        strings = re.findall(r'"((?:[^"\\\n]|\\.)*)"', (ROOT / f"csrc/{name}.c").read_text())
        said[name] = " ".join(strings)
    for name, text in said.items():
        assert not INTERNAL.findall(text), name


def keys_of(value):
    """The keys of a JSON document, and of all in it, as words."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key.replace("_", " ")
            yield from keys_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys_of(inner)


def test_json_has_the_words_of_users():
    documents = [ROOT / "docs/demo.json", *ROOT.glob("benchmarks/results/*.json")]
    for path in documents:
        assert not INTERNAL.findall(" ".join(keys_of(json.loads(path.read_text())))), path
    doctor = subprocess.run(
        [sys.executable, "-m", "rdmafork", "doctor", "--json"],
        capture_output=True, text=True, timeout=TIMEOUT, env=environment({}),
    )  # fmt: skip
    assert not INTERNAL.findall(" ".join(keys_of(json.loads(doctor.stdout))))


def test_promises_about_old_kernels_are_tested_on_one():
    """On 5.10 run tests/vm, what engine.txt names, and the programs of tests/engine."""
    chosen = (ROOT / "tests/vm/engine.txt").read_text().split()
    entries = evidence().values()
    names = {name for columns in entries for name in columns.get("`fork()`, before 5.12", [])}
    assert len(names) >= 10
    for name in names:
        file, _, function = name.partition("::")
        path = str(file_of(file).relative_to(ROOT))
        begins = (path, f"{path}::{function}")
        there = any(c.partition("[")[0] in begins for c in chosen)
        assert there or name.startswith(("vm/", "engine/")), f"{name} is not run on 5.10"


@each_page
def test_linked_pages_and_files_exist(page):
    text = re.sub(r"^```(?!\{).*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in DOC.findall(text):
        assert (page.parent / f"{target}.md").is_file(), f"no page {target}"
    for target in DIRECTIVE.findall(text):
        # Figures are drawn as the docs are built, where a missing one is an error.
        if not target.startswith("../build/"):
            assert (page.parent / target).is_file(), f"no file {target}"
    for target in DRAWING.findall(text):
        assert (ROOT / "docs/drawings" / target).is_file(), f"no drawing {target}"
    for target in IN_TREE.findall(text):
        assert (ROOT / target).is_file(), f"no file {target}"
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        there = page.parent / path if path else page
        assert there.exists(), f"no file {target}"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), f"no heading {target}"


def anchors(page):
    """As GitHub and MyST make them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize(("script", "mark"), [("costs", "costs"), ("tried_with", "tried")])
def test_tables_are_those_of_the_results(script, mark):
    """The script writes them: python docs/costs.py, for one."""
    made = runpy.run_path(str(ROOT / f"docs/{script}.py"))
    found = []
    for page in PAGES:
        text = page.read_text()
        found += re.findall(rf"<!-- {mark}: (\w+) -->", text)
        assert made["written"](text) == text, page
    assert set(found) == set(made["TABLES"])


def test_every_page_can_be_reached():
    index = (ROOT / "docs/index.md").read_text()
    in_trees = set(re.findall(r"^[\w/-]+$", index, re.MULTILINE))
    pages = {str(p.relative_to(ROOT / "docs").with_suffix("")) for p in PAGES[1:]} - {"index"}
    assert pages <= in_trees


def listed(page, directive):
    """The arguments of a page's directives."""
    text = (ROOT / "docs" / page).read_text()
    return set(" ".join(re.findall(rf"^\.\. {directive}:: (.*)$", text, re.MULTILINE)).split())


def test_every_name_of_the_package_is_in_the_reference():
    assert listed("api.md", "api") == {name for name in dir(rdmafork) if name[0] != "_"}


def test_every_function_of_the_header_is_in_the_reference():
    header = (ROOT / "csrc/rdmafork.h").read_text()
    declared = set(re.findall(r"^RF_API [^;(]*?(\w+)\(", header, re.MULTILINE))
    declared |= set(re.findall(r"^(?:struct|enum) (rf_\w+) \{", header, re.MULTILINE))
    assert declared and declared <= listed("capi.md", "rdmafork-h")


def test_drawings_take_the_colours_of_the_page():
    drawings = sorted(Path(ROOT / "docs/drawings").glob("*.svg"))
    assert drawings
    for drawing in drawings:
        text = drawing.read_text()
        assert "currentColor" in text and "black" not in text and "white" not in text, drawing


def luminance(colour):
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_figures_can_be_read_on_dark_pages():
    ground = luminance(_plots.DARK["#ffffff"])
    for colour in {_plots.BLACK, "#777777", *_plots.OTHERS, *_plots.COLOURS.values()}:
        shown = luminance(_plots.DARK.get(colour.lower(), colour))
        assert (shown + 0.05) / (ground + 0.05) >= 4.5, f"{colour}: WCAG asks for 4.5"
    shown = set(re.findall(r"!\[[^]]*\]\(([^)\s]+\.svg)\)", (ROOT / "README.md").read_text()))
    assert shown
    for figure in shown:
        text = (ROOT / figure).read_text()
        dark = text.partition("@media (prefers-color-scheme: dark)")[2].partition("</style>")[0]
        body = text.partition("</defs>")[2]
        for what, colour in set(re.findall(r"(fill|stroke): (#[0-9a-f]{6})", body)):
            rule = f'[style*="{what}: {colour}"] {{ {what}: {_plots.DARK.get(colour)} '
            assert (rule in dark) == (colour in _plots.DARK), f"{figure}: {what}: {colour}"


def test_help_is_a_page_and_leads_to_all_there_is():
    text = pydoc.plain(pydoc.render_doc(rdmafork))
    assert len(text.splitlines()) < 200
    opening = text.partition("PACKAGE CONTENTS")[0]
    public = {name for name in dir(rdmafork) if name[0] != "_"}
    assert not {name for name in public if not re.search(rf"\b{name}\b", opening)}


def test_help_has_a_sentence_for_each_field_of_each_result():
    for cls in rdmafork.Gid, rdmafork.KernelInfo, rdmafork.ProtectedRange, rdmafork.Stats:
        assert not [f for f in cls._fields if "Alias for" in getattr(cls, f).__doc__], cls
    for cls in rdmafork.Device, rdmafork.Port:
        said = fields(cls)
        assert not [name for name in cls.__annotations__ if not said.get(name)], cls
