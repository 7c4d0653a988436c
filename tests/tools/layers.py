"""Includes and calls of csrc/: both graphs, top to bottom; a circle is an error.

    python tests/tools/layers.py

A .c file and its own .h are one file here. Calls are read from the objects that $CC makes
without optimisation: a call in a function of a header counts for each file that includes it.
The hooks, which the engine refers to weakly, are the door upwards and count for nobody.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "csrc"
UPPER = "preload/"
CFLAGS = shlex.split("-std=gnu11 -O0 -DNDEBUG -fPIC -pthread")
DOOR = "rf_hooks"


def name_of(path):
    return str(path.relative_to(ROOT).with_suffix(""))


def included(sources):
    graph = {}
    for path in sources:
        for line in re.findall(r'^#include "([^"]+)"', path.read_text(), re.M):
            target = next(p for p in (path.parent / line, ROOT / line) if p.is_file())
            graph.setdefault(name_of(path), set()).add(name_of(target))
    return graph


def symbols(object_file):
    """(defined, wanted), without its own."""
    defined, wanted = set(), set()
    for line in subprocess.check_output(["nm", object_file], text=True).splitlines():
        kind, symbol = line.split()[-2:]
        if kind in "Uwv":
            wanted.add(symbol)
        elif kind in "TDBRVWGSC":
            defined.add(symbol)
    return defined, wanted - {DOOR}


def called(sources, folder):
    home, wants = {}, {}
    for path in sources:
        if path.suffix != ".c":
            continue
        output = Path(folder, name_of(path).replace("/", "-") + ".o")
        compiler = shlex.split(os.environ.get("CC", "cc"))
        subprocess.check_call([*compiler, *CFLAGS, f"-I{ROOT}", "-c", path, "-o", output])
        defined, wanted = symbols(output)
        home |= dict.fromkeys(defined, name_of(path))
        wants.setdefault(name_of(path), set()).update(wanted)
    return {name: {home[s] for s in wanted if s in home} for name, wanted in wants.items()}


def groups(graph):
    """Tarjan's: the parts that can reach themselves, lowest first."""
    index, low, stack, found = {}, {}, [], []

    def visit(name):
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(graph.get(name, ())):
            if target not in index:
                visit(target)
            if target in stack:
                low[name] = min(low[name], low[target])
        if low[name] == index[name]:
            at = stack.index(name)
            found.append(sorted(stack[at:]))
            del stack[at:]

    for name in sorted(set(graph).union(*graph.values())):
        if name not in index:
            visit(name)
    return found


def layers(graph, parts):
    """Each part one above the highest that it reaches: highest layer first."""
    height = {}
    for part in parts:
        below = {t for name in part for t in graph.get(name, ())} - set(part)
        height |= dict.fromkeys(part, 1 + max((height[t] for t in below), default=0))
    return [sorted(n for n in height if height[n] == h) for h in range(max(height.values()), 0, -1)]


def draw(what, graph):
    parts = groups(graph)
    print(f"{what}, from the top:")
    for layer in layers(graph, parts):
        for name in layer:
            print(f"  {name:24}{' '.join(sorted(graph.get(name, ())))}".rstrip())
        print()
    return [part for part in parts if len(part) > 1]


def problems(what, graph):
    for circle in draw(what, graph):
        among = (f"{a} -> {b}" for a in circle for b in sorted(graph[a] & set(circle)))
        yield f"{what}: a circle: {', '.join(among)}"
    for name, targets in sorted(graph.items()):
        for target in sorted(targets):
            if target.startswith(UPPER) > name.startswith(UPPER):
                yield f"{what}: {name} -> {target}: the engine knows nothing of {UPPER}"


def main():
    sources = sorted(ROOT.rglob("*.[ch]"))
    graphs = {"includes": included(sources)}
    with tempfile.TemporaryDirectory() as folder:
        graphs["calls"] = called(sources, folder)
    for graph in graphs.values():
        for name, targets in graph.items():
            targets.discard(name)
    found = [line for what, graph in graphs.items() for line in problems(what, graph)]
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
