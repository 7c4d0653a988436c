"""Lines that no test reaches, held against docs/coverage.md, which says why: `make coverage`.

    uncovered.py ENGINE MODULES    the JSON of gcovr and of coverage.py
    uncovered.py DIRECTORY         before that: remove what killed processes have half-written

The page names functions by a line in each, and says how many lines of it are not reached. What is
not listed there, beyond the few lines that hang on how threads met, is an error.
"""

import contextlib
import json
import re
import sqlite3
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/coverage.md"
LISTED = re.compile(r"^\| `([\w./]+): ([^`]+)` \| (\d+) \|", re.MULTILINE)
WHOLE = re.compile(r"^\| `([\w./]+)` \|", re.MULTILINE)
TOTAL = re.compile(r"^\| (.+?) \| (\d+\.\d)% of ([\d ]+) \|", re.MULTILINE)
# Where a function begins: C as Linux has it, Cython.
BEGINS = {
    ".c": re.compile(r"\w.*\w\("),
    ".h": re.compile(r"\w.*\w\("),
    ".pyx": re.compile(r"\s*(?:(?:cdef|cpdef|def) [^=:\[]*\(|(?:cdef )?class )"),
}
# Lines that are reached in one run and not in the next, all together.
TOLERATED = 12
# Percentage points by which fewer may be reached than the page says.
FEWER = 1.0


def engine(path):
    """{file: (lines reached by number, branches reached)} by gcovr's counts."""
    result = {}
    for file in json.loads(path.read_text())["files"]:
        lines, branches = {}, {}
        for line in file["lines"]:
            number = line["line_number"]
            lines[number] = lines.get(number, 0) or line["count"]
            for at, branch in enumerate(line["branches"]):
                branches[number, at] = branches.get((number, at), 0) or branch["count"]
        result[file["file"]] = lines, list(branches.values())
    return result


def modules(path):
    """The same of the lines that coverage.py has seen."""
    result = {}
    for name, file in json.loads(path.read_text())["files"].items():
        lines = dict.fromkeys(file["executed_lines"], 1) | dict.fromkeys(file["missing_lines"], 0)
        result[name] = lines, []
    return result


def share(counts):
    """'97.1% of 4046'; counts: how often each was reached."""
    counts = list(counts)
    if not counts:
        return ""
    return f"{100 * sum(map(bool, counts)) / len(counts):.1f}% of {len(counts)}"


def totals(found):
    for what, folder in ("lines of `csrc/`", "csrc/"), ("lines of the modules", "rdmafork/"):
        inside = [lines for name, (lines, _) in found.items() if name.startswith(folder)]
        yield what, [count for lines in inside for count in lines.values()]
    yield "branches of `csrc/`", [n for _, branches in found.values() for n in branches]


def beginning(name, text, at):
    """Of the function around the line text[at]."""
    begins = BEGINS[Path(name).suffix]
    return next((i for i in range(at, -1, -1) if begins.match(text[i]) and text[i][-1] != ";"), 0)


def by_function(found):
    """{(file, line where a function begins): the numbers of its lines that are not reached}"""
    result = {}
    for name, (lines, _) in found.items():
        text = (ROOT / name).read_text().splitlines()
        for number in sorted(number for number, count in lines.items() if not count):
            first = beginning(name, text, number - 1)
            result.setdefault((name, first), []).append(number)
    return result


def listed(page):
    """{(file, line where a function begins): how many lines are said not to be reached}"""
    result = {}
    for name, wanted, count in LISTED.findall(page):
        text = (ROOT / name).read_text().splitlines()
        places = [i for i, line in enumerate(text) if wanted in line]
        if len(places) != 1:
            sys.exit(f"docs/coverage.md: {name}: {wanted}: {len(places)} lines")
        result[name, beginning(name, text, places[0])] = int(count)
    return result


def is_whole(path):
    """Has coverage.py named the plugin for the lines of each module? It does so last."""
    missing = """SELECT count(*) FROM file
        WHERE path LIKE '%.pyx' AND id NOT IN (SELECT file_id FROM tracer)"""
    try:
        with contextlib.closing(sqlite3.connect(path)) as counts:
            return counts.execute(missing).fetchone() == (0,)
    except sqlite3.Error:
        return False


def remove_halves(directory):
    halves = [path for path in Path(directory).iterdir() if not is_whole(path)]
    for path in halves:
        path.unlink()
    print(f"{len(halves)} processes were killed as they wrote their counts")


def main(engine_json, modules_json):
    found = engine(Path(engine_json)) | modules(Path(modules_json))
    page = PAGE.read_text()
    print(f"{'':30} {'lines':16} branches")
    for name, (lines, branches) in sorted(found.items()):
        print(f"{name:30} {share(lines.values()):16} {share(branches)}".rstrip())
    wrong = []
    said = {what: float(percent) for what, percent, _ in TOTAL.findall(page)}
    for what, counts in totals(found):
        print(f"{what}: {share(counts)}")
        percent = 100 * sum(map(bool, counts)) / (len(counts) or 1)
        if said.get(what, 100) - percent > FEWER:
            wrong.append(f"{what}: {share(counts)}, fewer than docs/coverage.md says")
    excused, whole = listed(page), WHOLE.findall(page)
    unlisted = 0
    for (name, first), numbers in sorted(by_function(found).items()):
        beyond = len(numbers) - excused.pop((name, first), 0)
        if beyond > 0 and name not in whole:
            unlisted += beyond
            text = (ROOT / name).read_text().splitlines()
            print(f"{name}:{first + 1}: {text[first].strip()}: {beyond} more than are listed, of")
            print(*(f"{n:6}  {text[n - 1]}" for n in numbers), sep="\n")
    for name, first in sorted(excused):
        print(f"{name}:{first + 1}: is listed in docs/coverage.md, and all of it is reached")
    if unlisted > TOLERATED:
        wrong.append(f"{unlisted} lines are not reached and not listed in docs/coverage.md")
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    (main if len(sys.argv) == 3 else remove_halves)(*sys.argv[1:])
