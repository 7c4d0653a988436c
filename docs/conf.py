"""Sphinx's configuration; make docs builds build/docs/html."""

import sys
from pathlib import Path

import rdmafork

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "_ext"))

project = "rdmafork"
author = "rdmafork contributors"
copyright = author
version = release = rdmafork.__version__

extensions = ["myst_parser", "api", "commands", "drawings", "header", "narrow", "tree"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_ext", "transcripts"]
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 3
smartquotes = False

# Nothing is fetched while it is built or read: names that are not ours have no entry to link to.
nitpicky = True
nitpick_ignore_regex = [
    (r"c:identifier", r"u?int\d+_t|uintptr_t|s?size_t"),
    (r"py:class", r"(collections\.abc|os|types)\..*|SupportsDLPack|SupportsIndex"),
]

html_theme = "furo"
html_title = "rdmafork"
html_static_path = ["_static"]
html_css_files = ["rdmafork.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "github-dark"

# Pages that other parts of the tree bring are listed once they are there.
BROUGHT = {"concurrency", "coverage", "trust"}


def list_what_is_there(app, docname, source):
    lines = source[0].split("\n")
    there = [n for n in lines if n not in BROUGHT or (HERE / f"{n}.md").is_file()]
    source[0] = "\n".join(there)


def setup(app):
    app.connect("source-read", list_what_is_there)
