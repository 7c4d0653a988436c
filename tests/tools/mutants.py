"""Change the engine at random and see whether the programs of tests/engine and tests/fuzz notice.

    make mutants SAMPLE=100 SEED=1
    make mutants FILES='csrc/*.h csrc/preload/*.h'

A mutant is one file of csrc/ or csrc/preload/ with one change: an operator, a constant, a
condition, a statement, two arguments. In a header, inline functions and macros are changed. It
counts if all that include it compile without a warning and the engine's object code differs from
the original's, so most changes that change nothing are left out. Each is linked with the objects
of build/ctest/debug, and the programs run until one fails or takes too long: first the one named
as the file, then the quick ones, those that kill most in the least time.

build/mutants.tsv has a line a change; "no mutant" did not compile, or made no difference, and one
that took too long was "stopped by" its program. A run that was interrupted goes on from the list,
if the seed and the files are the same.
"""

import argparse
import collections
import concurrent.futures
import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

# At the depth of the debug programs: they look for what they load beside their folder.
PLACE = Path("build/ctest/mutants")
DEBUG = Path("build/ctest/debug")
# Its includes find a changed header in a copy of the sources alone.
COPY = PLACE / "sources"
COPIED = ("csrc", "tests/engine", "tests/fuzz")
LINK = ["-Wl,-S", "-ldl"]
SWAPS = {
    "<": ["<="],
    ">": [">="],
    "<=": ["<"],
    ">=": [">"],
    "==": ["!="],
    "!=": ["=="],
    "+": ["-"],
    "-": ["+"],
    "*": ["/"],
    "/": ["*"],
    "&": ["|"],
    "|": ["&"],
    "&&": ["||"],
    "||": ["&&"],
    "<<": [">>"],
    ">>": ["<<"],
    "+=": ["-="],
    "-=": ["+="],
    "|=": ["&="],
    "&=": ["|="],
}
OPERATOR = re.compile(r"(?<=\s)(<<|>>|[<>=!]=|[-+|&]=|&&|\|\||[-<>+*/&|])(?=\s)")
CONSTANT = re.compile(r"(?<![\w.])(0|[1-9]\d*)([uUlL]*)\b")
CONDITION = re.compile(r"\b(?:if|while) \(")
STATEMENT = re.compile(r"(?<=[;{})])\s*\n\t+((?:[a-z_*(]|\+\+|--)[^;{}]*;)")
ARGUMENTS = re.compile(r"(?<=[(,])\s*([^(),;]+), ([^(),;]+)(?=[,)])")
DIRECTIVE = re.compile(r"^#(?:.*\\\n)*.*", re.M)
MACRO = re.compile(r"^#define \w+(?:\([^)]*\))?")
INLINE = re.compile(r"^static inline [^;{]*\n\{.*?^\}", re.M | re.S)
# The tests' own: faults that are injected, and walkers that check a structure.
TESTING = re.compile(r"^#ifdef RF_TESTING$.*?(?=^#(?:else|endif))", re.M | re.S)
CHECKS = re.compile(
    r"^(?:static )?void (?:check_\w+|rf_\w+_check)\([^;]*?\)\n\{.*?^\}", re.M | re.S
)


def blank(match):
    return re.sub(r"[^\n]", " ", match[0])


def masked(text):
    """The same length, without comments, strings, asserts, the tests' own, and all but macros
    of directives."""

    def of_directive(match):
        name = MACRO.match(match[0])
        return blank(name) + match[0][name.end() :] if name else blank(match)

    text = re.sub(r'/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', blank, text, flags=re.S)
    text = CHECKS.sub(blank, TESTING.sub(blank, text))
    text = DIRECTIVE.sub(of_directive, text)
    return re.sub(r"\bRF_ASSERT\w*\([^;]*;", blank, text)


def masked_header(text):
    """The same, without declarations and types."""
    code = masked(text)
    kept = list(re.sub(r"[^\n]", " ", code))
    for pattern in (DIRECTIVE, INLINE):
        for match in pattern.finditer(text):
            kept[slice(*match.span())] = code[slice(*match.span())]
    return "".join(kept)


def closing(text, opening):
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if not depth:
            return place
    raise ValueError("a parenthesis is open")


def changes(path, text):
    """(start, end, replacement) of every change that may be a mutant."""
    code = masked_header(text) if path.suffix == ".h" else masked(text)
    for match in OPERATOR.finditer(code):
        for other in SWAPS[match[1]]:
            yield match.start(1), match.end(1), other
    for match in CONSTANT.finditer(code):
        # A function that returns -errno returns only -EPERM between -1 and 0.
        errno = match[1] == "0" and code[: match.start()].endswith(("< ", ">= "))
        for step in (1,) if errno else (1, -1):
            yield match.start(), match.end(), f"({int(match[1]) + step}{match[2]})"
    for match in CONDITION.finditer(code):
        start = match.end()
        end = closing(code, start - 1)
        yield start, end, f"!({text[start:end]})"
    for match in STATEMENT.finditer(code):
        yield match.start(1), match.end(1), ";" + "\n" * match[1].count("\n")
    for match in ARGUMENTS.finditer(code):
        one, other = (text[slice(*match.span(group))] for group in (1, 2))
        yield match.start(1), match.end(2), f"{other}, {one}"


def sample(options, paths, changes, judge):
    """Judge changes in the order that the seed gives them, until there are enough mutants.

    judge(path, text) says how a mutant ended, or "no mutant".
    """
    texts = {path: path.read_text() for path in paths}
    places = [(path, change) for path in paths for change in changes(path, texts[path])]
    random.Random(options.seed).shuffle(places)
    head = f"# seed {options.seed}: {' '.join(map(str, paths))}"
    known = {}
    if options.list.exists() and options.list.read_text().startswith(head + "\n"):
        rows = options.list.read_text().splitlines()
        known = dict(row.rsplit("\t", 1) for row in rows if row.count("\t") == 2)
    else:
        options.list.write_text(head + "\n")
    done = survived = 0
    for path, (start, end, new) in places:
        text = texts[path]
        line = text.count("\n", 0, start)
        before = text.splitlines()[line].strip()
        first = text.rindex("\n", 0, start) + 1
        after = (text[first:start] + new + text[end:].split("\n", 1)[0]).strip()
        row = f"{path}:{line + 1}\t{before} => {' '.join(after.split())}"
        ended = known.get(row)
        if ended is None:
            ended = judge(path, text[:start] + new + text[end:])
            with options.list.open("a") as out:
                print(f"{row}\t{ended}", file=out)
        if ended == "no mutant":
            continue
        done += 1
        survived += ended == "survived"
        print(f"{done}/{options.sample}\t{row}\t{ended}", flush=True)
        if done == options.sample:
            break
    print(f"{done - survived} of {done} killed: {100 * (done - survived) / done:.0f} %")


def users():
    """Of each header, the sources that include it, as the compiler has written them."""
    found = collections.defaultdict(set)
    for file in DEBUG.rglob("*.d"):
        _, source, *headers = file.read_text().split("\n\n")[0].replace("\\\n", " ").split()
        for header in headers:
            if header.endswith(":"):
                break
            found[Path(header)].add(Path(source))
    return found


def compile_source(compiler, source, flags=()):
    """The object that the copy's source makes, None if it does not compile."""
    output = PLACE / "objects" / source.with_suffix(".o")
    output.parent.mkdir(parents=True, exist_ok=True)
    command = [word for word in compiler if word not in ("-MMD", "-MP")]
    command += ["-g0", *flags, "-c", source, "-o", output.absolute()]
    done = subprocess.run(command, cwd=COPY, stderr=subprocess.DEVNULL, check=False)
    return output if done.returncode == 0 else None


def end_session(leader):
    """Scenarios have process groups of their own; one that went on would hold locks."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            session = int(stat.read_bytes().rpartition(b")")[2].split()[3])
            if session == leader:
                os.kill(int(stat.parent.name), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            pass


def run(command, seconds, stdout=subprocess.DEVNULL, cwd=None):
    """How it ended the mutant, or None if it noticed nothing. Its children end with it."""
    with subprocess.Popen(
        command,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        cwd=cwd,
        start_new_session=True,
    ) as process:
        try:
            return "killed" if process.wait(seconds) else None
        except subprocess.TimeoutExpired:
            return "stopped"
        finally:
            end_session(process.pid)


def arguments(description):
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--sample", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--list", type=Path, required=True)
    parser.add_argument("files", type=Path, nargs="+")
    return parser


def main():
    parser = arguments(__doc__)
    parser.add_argument("--compiler", type=shlex.split, required=True)
    parser.add_argument("--objects", type=str.split, required=True)
    parser.add_argument("--quick", type=str.split, required=True)
    parser.add_argument("--slow", type=str.split, default=[])
    parser.add_argument("--link", type=str.split, default=[], help="program=a flag of its own")
    options = parser.parse_args()
    PLACE.mkdir(parents=True, exist_ok=True)
    for folder in COPIED:
        shutil.rmtree(COPY / folder, ignore_errors=True)
        shutil.copytree(folder, COPY / folder)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds, killed_by = {}, collections.Counter()
    for program in options.quick + options.slow:
        began = time.monotonic()
        if run([DEBUG / program], 600) and run([DEBUG / program], 600):
            sys.exit(f"{program} fails without a change")
        seconds[program] = time.monotonic() - began

    engine = {Path(o).relative_to(DEBUG).with_suffix(".c"): o for o in options.objects}
    including, originals = users(), {}

    def compile_all(sources):
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            made = pool.map(lambda s: compile_source(options.compiler, s, ["-Werror"]), sources)
            return {s: o and o.read_bytes() for s, o in zip(sources, made, strict=True)}

    def killer(path, objects):
        def order(name):
            namesake = name in (f"test_{path.stem}", f"fuzz_{path.stem}")
            rate = (1 + killed_by[name]) / (0.3 + seconds[name])
            return not namesake, name in options.slow, -rate

        def own(folder, name):
            source = Path("tests", folder, f"{name}.c")
            if source in including[path]:
                return compile_source(options.compiler, source)
            return DEBUG / source.with_suffix(".o")

        for name in sorted(seconds, key=order):
            program = PLACE / name
            flags = [w.removeprefix(f"{name}=") for w in options.link if w.startswith(f"{name}=")]
            fuzzes = name.startswith("fuzz_")
            owned = [own("fuzz", name), own("fuzz", "replay")] if fuzzes else [own("engine", name)]
            if None in owned:
                return name, f"killed by compiling {name}"
            command = [*options.compiler, *owned, *objects, *flags, *LINK, "-o", program]
            subprocess.check_call(command)
            # Twice: by chance, or waiting for huge pages, one may fail without a change.
            limit = 10 + 4 * seconds[name]
            end = run([program], limit) and run([program], limit)
            if end:
                return name, f"{end} by {name}"
        return None, "survived"

    def judge(path, text):
        sources = [path] if path.suffix == ".c" else sorted(including[path] & set(engine))
        originals.update(compile_all([s for s in sources if s not in originals]))
        for source in sources:
            assert originals[source], f"{source} does not compile without a warning"
        try:
            (COPY / path).write_text(text)
            codes = compile_all(sources)
            differ = {s for s in sources if codes[s] != originals[s]}
            if None in codes.values() or not any(s.parts[0] == "csrc" for s in differ):
                return "no mutant"
            changed = {engine[s]: PLACE / "objects" / s.with_suffix(".o") for s in differ}
            name, end = killer(path, [changed.get(o, o) for o in options.objects])
            killed_by[name] += 1
            return end
        finally:
            shutil.copy(path, COPY / path)

    sample(options, options.files, changes, judge)


if __name__ == "__main__":
    main()
