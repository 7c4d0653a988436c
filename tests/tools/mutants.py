"""Change the engine at random and see whether the programs of tests/engine and tests/fuzz notice.

    make mutants SAMPLE=100 SEED=1

A mutant is one file of csrc/ or csrc/preload/ with one change: an operator, a constant, a
condition, a statement, two arguments. It counts if it compiles without a warning and its object
code differs from the original's, so most changes that change nothing are left out. Each is
linked with the objects of build/ctest/debug, and the programs run until one fails or takes too
long: first the one named as the file, then the quick ones, those that kill most in the least
time. build/mutants.tsv has a line a mutant; one that took too long was "stopped by" its program.
"""

import argparse
import collections
import os
import random
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

# At the depth of the debug programs: they look for what they load beside their folder.
PLACE = Path("build/ctest/mutants")
TESTS = Path("build/ctest/debug/tests")
ASKED = [f"-Wl,--export-dynamic-symbol={name}" for name in ("standin_wait", "standin_asks")]
LINK = ["-Wl,-S", "-Wl,-z,now", *ASKED, "-ldl"]
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
CONSTANT = re.compile(r"(?<![\w.])(?:0|[1-9]\d*)(?=[uUlL]*\b)")
CONDITION = re.compile(r"\b(?:if|while) \(")
STATEMENT = re.compile(r"(?<=[;{})])\s*\n\t+((?:[a-z_*(]|\+\+|--)[^;{}]*;)")
ARGUMENTS = re.compile(r"(?<=[(,])\s*([^(),;]+), ([^(),;]+)(?=[,)])")
# The tests' own: faults that are injected, and walkers that check a structure.
TESTING = re.compile(r"^#ifdef RF_TESTING$.*?(?=^#(?:else|endif))", re.M | re.S)
CHECKS = re.compile(
    r"^(?:static )?void (?:check_\w+|rf_\w+_check)\([^;]*?\)\n\{.*?^\}", re.M | re.S
)


def masked(text):
    """The same length, without comments, strings, directives, asserts and the tests' own."""

    def blank(match):
        return re.sub(r"[^\n]", " ", match[0])

    text = re.sub(r'/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', blank, text, flags=re.S)
    text = CHECKS.sub(blank, TESTING.sub(blank, text))
    text = re.sub(r"^#(?:.*\\\n)*.*", blank, text, flags=re.M)
    return re.sub(r"\bRF_ASSERT\w*\([^;]*;", blank, text)


def closing(text, opening):
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if not depth:
            return place
    raise ValueError("a parenthesis is open")


def changes(text):
    """(start, end, replacement) of every change that may be a mutant."""
    code = masked(text)
    for match in OPERATOR.finditer(code):
        for other in SWAPS[match[1]]:
            yield match.start(1), match.end(1), other
    for match in CONSTANT.finditer(code):
        # What returns -errno returns -EPERM alone between -1 and 0.
        errno = match[0] == "0" and code[: match.start()].endswith(("< ", ">= "))
        for step in (1,) if errno else (1, -1):
            yield match.start(), match.end(), f"({int(match[0]) + step})"
    for match in CONDITION.finditer(code):
        start = match.end()
        end = closing(code, start - 1)
        yield start, end, f"!({text[start:end]})"
    for match in STATEMENT.finditer(code):
        yield match.start(1), match.end(1), ";" + "\n" * match[1].count("\n")
    for match in ARGUMENTS.finditer(code):
        one, other = (text[slice(*match.span(group))] for group in (1, 2))
        yield match.start(1), match.end(2), f"{other}, {one}"


def compile_text(compiler, path, text, output):
    """The object code, None if it does not compile without a warning."""
    command = [*compiler, "-iquote", path.parent, "-g0", "-Werror", "-x", "c", "-c", "-"]
    command += ["-o", output]
    command = [word for word in command if word not in ("-MMD", "-MP")]
    text = f'# 1 "{path}"\n{text}'
    done = subprocess.run(command, input=text, text=True, stderr=subprocess.DEVNULL, check=False)
    return output.read_bytes() if done.returncode == 0 else None


def mutants(compiler, paths, chance):
    """(path, line, change, object), at random, for as long as there are any."""
    texts = {path: path.read_text() for path in paths}
    originals = {}
    places = [(path, change) for path in paths for change in changes(texts[path])]
    chance.shuffle(places)
    for path, (start, end, new) in places:
        text = texts[path]
        output = PLACE / f"{path.stem}.o"
        if path not in originals:
            originals[path] = compile_text(compiler, path, text, output)
            assert originals[path], f"{path} does not compile without a warning"
        code = compile_text(compiler, path, text[:start] + new + text[end:], output)
        if code is None or code == originals[path]:
            continue
        line = text.count("\n", 0, start)
        before = text.splitlines()[line].strip()
        first = text.rindex("\n", 0, start) + 1
        after = (text[first:start] + new + text[end:].split("\n", 1)[0]).strip()
        yield path, line + 1, f"{before} => {' '.join(after.split())}", output


def end_session(leader):
    """Scenarios have process groups of their own; one that went on would hold locks."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            session = int(stat.read_bytes().rpartition(b")")[2].split()[3])
            if session == leader:
                os.kill(int(stat.parent.name), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            pass


def run(program, seconds):
    """How it ended the mutant, or None if it noticed nothing. What it has made ends with it."""
    with subprocess.Popen(
        [program],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            return "killed" if process.wait(seconds) else None
        except subprocess.TimeoutExpired:
            return "stopped"
        finally:
            end_session(process.pid)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compiler", type=shlex.split, required=True)
    parser.add_argument("--objects", type=str.split, required=True)
    parser.add_argument("--quick", type=str.split, required=True)
    parser.add_argument("--slow", type=str.split, default=[])
    parser.add_argument("--fuzz-proc", type=str.split, default=[], help="its flags for the linker")
    parser.add_argument("--sample", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--list", type=Path, default=Path("build/mutants.tsv"))
    options = parser.parse_args()

    PLACE.mkdir(parents=True, exist_ok=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds, killed_by = {}, collections.Counter()
    for program in options.quick + options.slow:
        began = time.monotonic()
        if run(Path("build/ctest/debug", program), 600):
            sys.exit(f"{program} fails without a change")
        seconds[program] = time.monotonic() - began

    def killer(path, changed):
        objects = [
            changed if Path(o).match(str(path.with_suffix(".o"))) else o for o in options.objects
        ]

        def order(name):
            namesake = name in (f"test_{path.stem}", f"fuzz_{path.stem}")
            rate = (1 + killed_by[name]) / (0.3 + seconds[name])
            return not namesake, name in options.slow, -rate

        for name in sorted(seconds, key=order):
            program = PLACE / name
            flags = LINK + (options.fuzz_proc if name == "fuzz_proc" else [])
            own = [TESTS / "engine" / f"{name}.o"]
            if name.startswith("fuzz_"):
                own = [TESTS / "fuzz" / f"{name}.o", TESTS / "fuzz/replay.o"]
            subprocess.check_call([*options.compiler, *own, *objects, *flags, "-o", program])
            # Twice: by chance, or waiting for huge pages, one may fail without a change.
            end = run(program, 10 + 4 * seconds[name]) and run(program, 10 + 4 * seconds[name])
            if end:
                return name, f"{end} by {name}"
        return None, "survived"

    survived = done = 0
    paths = sorted(Path("csrc").rglob("*.c"))
    with options.list.open("w") as out:
        for mutant in mutants(options.compiler, paths, random.Random(options.seed)):
            path, line, change, changed = mutant
            name, end = killer(path, changed)
            done += 1
            killed_by[name] += 1
            survived += name is None
            row = f"{path}:{line}\t{change}\t{end}"
            print(row, file=out, flush=True)
            print(f"{done}/{options.sample}\t{row}", flush=True)
            if done == options.sample:
                break
        score = f"{done - survived} of {done} killed: {100 * (done - survived) / done:.0f} %"
        print(score, file=out)
        print(score)


if __name__ == "__main__":
    main()
