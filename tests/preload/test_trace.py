"""Callers of fork(), told with the Python stack where RDMAFORK_TRACE_FORKS asks for it."""

import os
import re
import subprocess
import sys

import pytest
from conftest import TIMEOUT, environment

import rdmafork

PROGRAM = """
import os, sys
import rdmafork

def fork():
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)

def here():
    fork()

def there():
    fork()

here(); there()
for _ in range(50):
    here()
"""


def errors_of(program, tmp_path, **env):
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")], env=environment(env), text=True,
        capture_output=True, timeout=TIMEOUT, check=True,
    )  # fmt: skip
    assert done.stdout == ""
    return done.stderr


def test_each_place_is_told_once_with_its_stack(tmp_path):
    told = errors_of(PROGRAM, tmp_path, RDMAFORK_TRACE_FORKS="1", RDMAFORK_RANK="3")
    stacks = re.split(r"^rdmafork: fork\(\) in process \d+, rank 3:\n", told, flags=re.M)
    assert stacks[0] == "" and len(stacks) == 4
    functions = [re.findall(r"line (\d+), in (\S+)", stack) for stack in stacks[1:]]
    assert [[name for _, name in stack] for stack in functions] == [
        ["<module>", "here", "fork"],
        ["<module>", "there", "fork"],
        ["<module>", "here", "fork"],  # in the loop: another place
    ]
    assert all(stack.count("child = os.fork()") == 1 for stack in stacks[1:])


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_is_told_unasked(tmp_path, value):
    assert errors_of(PROGRAM, tmp_path, RDMAFORK_TRACE_FORKS=value) == ""


def test_pools_are_told_by_their_makers(tmp_path):
    program = """
import multiprocessing, rdmafork

def pool():
    with multiprocessing.get_context("fork").Pool(2) as workers:
        workers.map(abs, range(4))

pool()
"""
    told = errors_of(program, tmp_path, RDMAFORK_TRACE_FORKS="1")
    assert ", in pool" in told and "popen_fork.py" in told
    # From one place: both workers, and who replaces them is not asked for.
    assert told.count("rdmafork: fork() in process") == 1


def test_a_program_without_stderr_forks_all_the_same(tmp_path):
    program = "import os; os.close(2)\n" + PROGRAM + "\nos._exit(0)\n"
    assert errors_of(program, tmp_path, RDMAFORK_TRACE_FORKS="1") == ""


def test_a_program_that_forks_from_everywhere_is_told_of_a_hundred_places(tmp_path):
    forks = "\n".join(f"def f{i}(): fork()\nf{i}()" for i in range(120))
    told = errors_of(PROGRAM + forks, tmp_path, RDMAFORK_TRACE_FORKS="1")
    assert told.count("rdmafork: fork() in process") == 100


def test_places_that_two_threads_count_at_once_are_no_way_past_the_hundred(tmp_path):
    counted = "from rdmafork import _trace; _trace._told.update(range(101))\n"
    assert errors_of(counted + PROGRAM, tmp_path, RDMAFORK_TRACE_FORKS="1") == ""


UNCHANGED = """
import multiprocessing, sys

def pool():
    with multiprocessing.get_context("fork").Pool(2) as workers:
        workers.map(abs, range(4))

pool()
print("rdmafork" in sys.modules, sys.modules["sitecustomize"].__file__)
"""


def executed(tmp_path, *options, **env):
    (tmp_path / "program.py").write_text(UNCHANGED)
    return subprocess.run(
        [sys.executable, "-m", "rdmafork", "exec", "--trace-forks", "--", sys.executable, *options,
         tmp_path / "program.py"],
        env=environment(env), text=True, capture_output=True, timeout=TIMEOUT, check=True,
    )  # fmt: skip


def test_a_program_that_knows_nothing_of_rdmafork_is_told_of_under_exec(tmp_path):
    done = executed(tmp_path)
    assert done.stderr.count("rdmafork: fork() in process") == 1
    assert ", in pool" in done.stderr
    assert done.stdout.startswith("False ")


def test_its_own_sitecustomize_is_imported_all_the_same(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('mine')")
    done = executed(tmp_path, PYTHONPATH=str(own))
    # And by the Python of the command itself, before.
    assert done.stdout.splitlines() == ["mine", "mine", f"False {own}/sitecustomize.py"]
    assert ", in pool" in done.stderr


def test_before_python_3_7_its_own_sitecustomize_is_imported_too(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    startup = os.path.join(os.path.dirname(rdmafork.__file__), "startup")
    code = f"""
import os, sys
del os.register_at_fork
sys.path[:0] = [{startup!r}, {str(tmp_path)!r}]
import sitecustomize
"""
    done = subprocess.run([sys.executable, "-ISc", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("mine\n", "")


def test_a_program_that_imports_rdmafork_too_is_told_of_once(tmp_path):
    done = executed(tmp_path, "-c", f"import rdmafork\n{UNCHANGED}")
    assert done.stderr.count("rdmafork: fork() in process") == 1
