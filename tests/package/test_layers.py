"""The script that draws includes and calls of csrc/ finds circles and calls upwards."""

import os
import re
import shlex
import subprocess

import pytest
from tools import layers


def found(graph):
    return list(layers.problems("calls", graph))


def test_a_circle_is_named_however_long():
    graph = {"fork": {"engine"}, "engine": {"lock"}, "lock": {"sys", "fork"}, "start": {"fork"}}
    assert found(graph) == [
        "calls: a circle: engine -> lock, fork -> engine, lock -> fork",
    ]
    graph["lock"].remove("fork")
    assert not found(graph)


def test_the_engine_may_not_name_the_layer_above(capsys):
    assert found({"fork": {"preload/ibv"}}) == [
        "calls: fork -> preload/ibv: the engine knows nothing of preload/"
    ]
    assert not found({"preload/ibv": {"fork"}, "fork": {"engine"}})
    # Whatever calls is drawn above all that it calls.
    drawn = capsys.readouterr().out
    assert drawn.rindex("preload/ibv  ") < drawn.rindex("fork  ") < drawn.rindex("engine")


def test_a_header_counts_as_its_c_file(tmp_path, monkeypatch):
    monkeypatch.setattr(layers, "ROOT", tmp_path)
    (tmp_path / "low.h").write_text("void low(void);\n")
    (tmp_path / "low.c").write_text(
        '#include "low.h"\n#include "high.h"\nvoid low(void) { high(); }\n'
    )
    (tmp_path / "high.h").write_text(
        '#include "low.h"\nvoid high(void);\nstatic inline void both(void) { low(); }\n'
    )
    (tmp_path / "high.c").write_text('#include "high.h"\nvoid high(void) { both(); }\n')
    sources = sorted(tmp_path.iterdir())
    for graph in layers.included(sources), layers.called(sources, tmp_path):
        assert {"low", "high"} in map(set, layers.groups(graph))


DESIGN = layers.ROOT.parent / "docs" / "design.md"


def mapped(storey):
    """The files of one table of docs/design.md, from the top."""
    section = DESIGN.read_text().split(f"\nIn `csrc/{storey}`:\n")[1].split("\n\n")[0]
    return [storey + name for name in re.findall(r"^\| `(\w+)` \|", section, re.M)]


@pytest.mark.skipif(not DESIGN.is_file(), reason="docs are not here: make test-pythons")
def test_the_map_is_the_tree(tmp_path):
    order = mapped("preload/") + mapped("")
    sources = sorted(layers.ROOT.rglob("*.[ch]"))
    files = {layers.name_of(path) for path in sources} - {"rdmafork"}
    assert sorted(order) == sorted(files)
    upward = [
        (caller, callee)
        for caller, callees in layers.called(sources, tmp_path).items()
        for callee in callees
        if order.index(callee) < order.index(caller)
    ]
    assert not upward


@pytest.mark.skipif(not DESIGN.is_file(), reason="docs are not here: make test-pythons")
def test_the_map_shows_the_opening_of_each_header():
    shown = re.findall(r"^\.\. opening:: (\S+)$", DESIGN.read_text(), re.M)
    headers = {layers.name_of(path) for path in layers.ROOT.rglob("*.h")}
    assert sorted(shown) == sorted(headers - {"rdmafork"})


ALONE = """
#include "rdmafork.h"
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

int main(void)
{
	struct rf_error error;
	struct rf_handle handle;
	struct rf_stats stats;
	size_t nbytes = 16 << 20;
	int status;

	if (rf_fork_init(RF_MODE_EAGER, &error) < 0)
		return 1;
	if (rf_register(malloc(nbytes), nbytes, 0, RF_OMIT, &handle, &error) != 1)
		return 1;
	if (!fork())
		_exit(rf_generation() == 2 && rf_release(handle, 0) < 0 ? 0 : 2);
	wait(&status);
	return status || rf_stats(&stats) < 0 || stats.forks != 1 || rf_release(handle, 0);
}
"""


@pytest.mark.skipif(not layers.ROOT.is_dir(), reason="csrc is not here: make test-pythons")
def test_the_engine_alone_is_a_whole_engine(tmp_path):
    program = tmp_path / "alone.c"
    program.write_text(ALONE)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    flags = [*layers.CFLAGS, f"-I{layers.ROOT}", "-ldl", "-o", tmp_path / "alone"]
    subprocess.run([*compiler, program, *layers.ROOT.glob("*.c"), *flags], check=True)
    subprocess.run([tmp_path / "alone"], check=True, timeout=60)
