"""Change rdmafork/*.py, rdmafork/cli/*.py and rdmafork/*.pyx at random: do the tests notice?

    make mutants-python SAMPLE=60 SEED=1

As mutants.py does with the engine, in a copy of the tree with a build and a .venv of its own. A
mutant of a module counts if it compiles, and to another code than the original. Test files run
until a test fails twice, and passes without the change: first the module's namesakes, then those
that name what the module defines and few others name, those that kill most in the least time;
then the rest of tests/surface, tests/devices and tests/cli, for 150 seconds in all.

The list is build/mutants-python.tsv, and a run goes on from it, as there.
"""

import ast
import collections
import marshal
import os
import re
import shutil
import subprocess
import time
import xml.etree.ElementTree
from pathlib import Path

import mutants
from mutants import blank, run

COPY = Path("build/mutants-python")
LOG = COPY / "build/mutant.log"
TIMES = LOG.with_suffix(".xml")
FOLDERS = ("surface", "devices", "cli", "preload", "benchmarks")
REST = ("surface", "devices", "cli")
# Fewer optimizations build faster.
BUILD = ["make", "-s", "build", "CFLAGS=-O1"]
PYTEST = """.venv/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder
    --timeout 60 -p no:cacheprovider --junitxml build/mutant.xml""".split()

SWAPS = {
    **{name: others for name, others in mutants.SWAPS.items() if name not in ("&&", "||")},
    "and": ["or"],
    "or": ["and"],
    "//": ["*"],
    "in": ["not in"],
    "not in": ["in"],
    "is": ["is not"],
    "is not": ["is"],
}
STRINGS = re.compile(
    r'#[^\n]*|"""(?:\\.|[^\\])*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S
)
OPERATOR = re.compile(
    r"(?<=\s)(is not|not in|<<|>>|//|[<>=!]=|[-+|&]=|[-<>+*/&|]|and|or|in|is)(?=\s)"
)
CONSTANT = re.compile(r"(?<![\w.])(?:0|[1-9]\d*)(?![\w.])")
NAMED = re.compile(r"\b(?:True|False|break|continue)\b")
OTHER = {"True": "False", "False": "True", "break": "continue", "continue": "break"}
CONDITION = re.compile(r"^ *(?:if|elif|while) (.*?):[ ]*$|\bif (\S[^\n]*?) else\b", re.M | re.S)
STATEMENT = re.compile(r"^ +((?:raise\b|[\w.\[\]]+ [-+|&*]?= |[\w.]+\()[^\n]*?)[ ]*$", re.M)
ARGUMENTS = re.compile(r"(?<=[\w\])]\()([^(),=\n]+), ([^(),=\n]+)(?=[,)])")
DEFINITION = re.compile(r"^ *(?:async )?(?:def|cdef|cpdef) [^=\n]*\(.*", re.M)
DEFINED = re.compile(
    r"^(?: {4})?(?:cdef class|class|(?:async )?def|cpdef \w+) (\w+)|^([A-Z]\w+) =", re.M
)


def masked(path, text):
    """The same length, without comments, strings and annotations."""
    # A string is still something, as an operand is.
    code = list(STRINGS.sub(lambda m: blank(m) if m[0][0] == "#" else re.sub(".", "~", m[0]), text))
    if path.suffix == ".py":
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        for node in ast.walk(ast.parse(text)):
            for note in (getattr(node, "annotation", None), getattr(node, "returns", None)):
                if note:
                    start = starts[note.lineno - 1] + note.col_offset
                    end = starts[note.end_lineno - 1] + note.end_col_offset
                    code[start:end] = " " * (end - start)
    return "".join(code)


def changes(path, text):
    """(start, end, replacement) of every change that may be a mutant."""
    code = masked(path, text)
    for match in OPERATOR.finditer(code):
        before = code[code.rindex("\n", 0, match.start()) : match.start()]
        if match[1] != "in" or not re.search(r"\bfor [^:]*$", before):
            for other in SWAPS[match[1]]:
                yield *match.span(1), other
    for match in CONSTANT.finditer(code):
        for step in (1, -1):
            yield *match.span(), f"({int(match[0]) + step})"
    for match in NAMED.finditer(code):
        yield *match.span(), OTHER[match[0]]
    for match in CONDITION.finditer(code):
        start, end = match.span(1 if match[1] else 2)
        yield start, end, f"not ({text[start:end]})"
    for match in STATEMENT.finditer(code):
        if all(match[1].count(one) == match[1].count(other) for one, other in ("()", "[]", "{}")):
            yield *match.span(1), "pass"
    for match in ARGUMENTS.finditer(DEFINITION.sub(blank, code)):
        one, other = (text[slice(*match.span(group))] for group in (1, 2))
        yield match.start(1), match.end(2), f"{other}, {one}"


def copy_tree():
    """The working tree as it is; files that are the same keep their times."""
    if not COPY.exists():
        subprocess.check_call(["git", "clone", "-q", "--shared", ".", COPY])
    ours, theirs = (
        subprocess.check_output(
            ["git", "ls-files", "-co", "--exclude-standard"], text=True, cwd=tree
        ).splitlines()
        for tree in (".", COPY)
    )
    ours = list(filter(os.path.exists, ours))
    for name in set(theirs) - set(ours):
        (COPY / name).unlink(missing_ok=True)
    for name in ours:
        source, target = Path(name), COPY / name
        if not target.exists() or source.read_bytes() != target.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    subprocess.check_call(BUILD, cwd=COPY)
    LOG.parent.mkdir(exist_ok=True)


def pytest(files, seconds, *arguments):
    """How the files ended the mutant, or None; the name of the test that failed first."""
    with LOG.open("w") as log:
        end = run([*PYTEST, *arguments, *files], seconds, cwd=COPY, stdout=log)
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", LOG.read_text(), re.M)
    return end, found and found[1]


def times():
    """Seconds by test file of the last run."""
    seconds = collections.Counter()
    for case in xml.etree.ElementTree.parse(TIMES).iter("testcase"):
        seconds[case.get("classname").replace(".", "/") + ".py"] += float(case.get("time"))
    return seconds


def names_of(path, text):
    """The names by which a test may use the module: its file, its command, its public names."""
    defined = {one or other for one, other in DEFINED.findall(text)}
    public = {name for name in defined if not name.startswith("_")}
    return public | {path.stem, *path.stem.strip("_").split("_")}


def main():
    parser = mutants.arguments(__doc__)
    parser.add_argument("--seconds", type=int, default=150, help="of tests, for one mutant")
    options = parser.parse_args()
    copy_tree()
    texts = {
        str(file): file.read_text()
        for folder in FOLDERS
        for file in sorted(Path("tests", folder).glob("test_*.py"))
    }
    # A guess, for files that have not been run.
    seconds = {file: text.count("def test_") for file, text in texts.items()}
    words = {f: {*re.findall(r"\w+", text), *Path(f).stem.split("_")} for f, text in texts.items()}
    naming = collections.Counter(word for those in words.values() for word in those)
    killed_by, failing = collections.Counter(), []

    def batches(path):
        """Test files, in some runs of pytest, quick ones first."""
        names = names_of(path, path.read_text())
        interest = {f: sum(1 / naming[n] for n in names & words[f]) for f in seconds}

        def order(file):
            namesake = set(path.stem.strip("_").split("_")) <= set(Path(file).stem.split("_"))
            rate = interest[file] ** 2 * (1 + killed_by[file]) / (2 + seconds[file])
            return not namesake, -rate

        chosen = [f for f in seconds if interest[f] or Path(f).parts[1] in REST]
        batch, limit, cost = [], 10, 0
        for file in sorted(chosen, key=order):
            if batch and cost + seconds[file] > limit:
                yield batch
                batch, cost, limit = [], 0, 3 * limit
            batch.append(file)
            cost += seconds[file]
        yield batch

    def noticed(path, passes_unchanged):
        left, leave = options.seconds, list(failing)
        for batch in batches(path):
            while left > 0:
                began = time.monotonic()
                end, test = pytest(batch, left, "-x", *(f"--deselect={name}" for name in leave))
                left -= time.monotonic() - began
                if end is None:
                    seconds.update(times())
                    break
                if end == "stopped":
                    return None, "survived"
                if not test:
                    return None, "killed by being imported"
                # By chance, or on this machine, one may fail without a change.
                if pytest([test], 120, "-n0")[0]:
                    if passes_unchanged(test):
                        return test.split("::")[0], f"killed by {test.removeprefix('tests/')}"
                    failing.append(test)
                leave.append(test)
        return None, "survived"

    def judge(path, text):
        source, original = COPY / path, path.read_text()
        library = next(COPY.glob(f"rdmafork/{path.stem}.*.so")) if path.suffix == ".pyx" else None
        built = library and library.read_bytes()

        def put(text, code):
            source.write_text(text)
            if library:
                library.write_bytes(code)  # now newer than the source

        def passes_unchanged(test):
            put(original, built)
            try:
                return not pytest([test], 120, "-n0")[0]
            finally:
                put(text, changed)

        try:
            source.write_text(text)
            if library:
                done = subprocess.run(BUILD, cwd=COPY, capture_output=True, check=False)
                changed = done.returncode == 0 and library.read_bytes()
                if changed in (False, built):
                    return "no mutant"
            else:
                changed = code_of(text)
                if changed in (None, code_of(original)):
                    return "no mutant"
            file, end = noticed(path, passes_unchanged)
            killed_by[file] += 1
            return end
        finally:
            put(original, built)

    mutants.sample(options, options.files, changes, judge)


def code_of(text):
    try:
        return marshal.dumps(compile(text, "module", "exec"))
    except SyntaxError:
        return None


if __name__ == "__main__":
    main()
