"""rdmafork bench runs the benchmarks it is asked for, and writes their results."""

import json
import re
import subprocess
import sys

import pytest
from conftest import environment
from test_cli import command

from rdmafork.benchmarks import _harness, _workers
from rdmafork.cli import bench, main


def test_a_name_that_is_none_is_told_with_those_that_are():
    done = command("bench", "registrations")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("no benchmark registrations. Did you mean registration?\n")
    assert "The benchmarks are address_space, break_even" in command("bench", "xyzzy").stderr


def test_help_asks_every_question():
    for name in _harness.names():
        assert f"  {name} " in bench.DESCRIPTION


def test_several_are_shown_and_their_json_is_a_list(tmp_path):
    file = tmp_path / "all.json"
    done = command("bench", "import_time", "address_space", "--quick", "--json", str(file))
    assert done.returncode == 0, done.stderr
    names = [document["benchmark"] for document in json.loads(file.read_text())]
    assert names == ["import_time", "address_space"]
    for name in names:
        assert _harness.question(name) in done.stdout


def test_json_alone_is_all_that_is_printed():
    done = command("bench", "import_time", "--quick", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["benchmark"] == "import_time"
    assert "import_time: " in done.stderr  # how far it is


def test_an_abbreviated_option_is_none():
    program = [sys.executable, "-m", "rdmafork.benchmarks.threads", "--qui"]
    done = subprocess.run(program, env=environment({}), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("unrecognized arguments: --qui\n")


def test_a_missing_directory_is_told_before_it_measures():
    done = command("bench", "--json", "/no/dir/x.json", "registration")
    said = "rdmafork bench: /no/dir/x.json: there is no directory /no/dir\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_one_that_fails_does_not_stop_the_others(monkeypatch, capsys):
    ran = []

    def run(name, argv):
        ran.append(name)
        raise _workers.WorkerError("rdmafork lazy, at sample(): SIGSEGV")

    monkeypatch.setattr(_harness, "run", run)
    assert main(["bench", "threads", "scale"]) == 1
    assert ran == ["threads", "scale"]
    assert capsys.readouterr().err.splitlines() == [
        "rdmafork bench: threads failed: rdmafork lazy, at sample(): SIGSEGV",
        "rdmafork bench: scale failed: rdmafork lazy, at sample(): SIGSEGV",
    ]


@pytest.mark.parametrize(
    ("option", "where"), [("--json", "{}/here"), ("--json", ""), ("--plot", "{}/here")]
)
def test_a_file_that_cannot_be_written_is_refused_before_any_measurement(
    option, where, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(_harness, "run", lambda name, argv: pytest.fail("it is measured"))
    monkeypatch.setattr(_harness, "require", lambda: None)
    file = tmp_path / "file"
    file.write_text("kept")
    assert main(["bench", "threads", option, where.format(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    named = where.format(file) or "''"
    assert re.fullmatch(f"rdmafork bench: {named}: (Not a directory|No such .*|File exists)", line)
    assert file.read_text() == "kept"


def test_figures_without_matplotlib_are_refused_before_anything_is_measured(tmp_path, monkeypatch):
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = command("bench", "threads", "--plot", str(tmp_path / "figures"))
    assert done.returncode == 2
    assert done.stderr.strip().endswith("pip install 'rdmafork[bench]'")
