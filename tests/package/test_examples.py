"""The programs in examples/ do what they say."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TIMEOUT, environment
from memory import free_huge_pages, huge_page_pool, pool_lock
from mpi import mpirun

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name, *arguments, before=(sys.executable,), env=None):
    """The output of examples/name, once it has ended well; stderr is in it."""
    done = subprocess.run(
        [*before, str(EXAMPLES / name), *map(str, arguments)],
        env=environment(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    if "No module named 'pyverbs'" in done.stdout:
        pytest.skip("pyverbs for this Python is not installed (Debian: python3-pyverbs)")
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_numpy_workers():
    said = example("numpy_workers.py", 8)
    assert "16 MiB registered; 4 workers" in said
    assert f"they read the shared array: {sum(range(1 << 20))}" in said
    assert "ended by SIGSEGV" in said
    assert "protected_by='mark'" in said and "protected_by='shared'" in said


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
def test_torch_dataloader():
    said = example("torch_dataloader.py")
    assert "128 MiB registered" in said
    assert f", {sum(n * n for n in range(256))}" in said


@pytest.mark.parametrize(
    "name, module",
    [("torch_dataloader.py", "torch"), ("mpi_fork.py", "mpi4py"), ("pyverbs_pool.py", "pyverbs"),
     ("pyverbs_pingpong.py", "pyverbs")],
)  # fmt: skip
def test_a_module_that_is_missing_is_told_in_a_sentence(name, module, tmp_path):
    (tmp_path / f"{module}.py").write_text(f"raise ImportError('no {module} here')")
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        env=environment({"PYTHONPATH": str(tmp_path)}), capture_output=True, text=True,
        timeout=TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith(f"{name} needs {module}")
    assert done.stderr.endswith(f": no {module} here\n") and done.stderr.count("\n") == 1


def test_large_buffers():
    took = r" +\d+ ms +\d+\.\d\d ms"
    with huge_page_pool(free_huge_pages() + 4):
        said = example("large_buffers.py", 8)
    for kind in ("base pages", "transparent huge pages", "2 MiB huge pages"):
        assert re.search(f"^{kind}{took}$", said, re.M), said


@pool_lock()
def test_large_buffers_without_huge_pages():
    """Most users will see this first: the others go on, and a remedy is named."""
    said = example("large_buffers.py", free_huge_pages() * 2 + 8)
    assert re.search(r"^2 MiB huge pages .*needed, .*raise /proc/sys/vm/nr_hugepages$", said, re.M)


def test_find_the_fork():
    python = sys.executable
    trace = [python, "-m", "rdmafork", "exec", "--trace-forks", "--report", "-", "--", python]
    said = example("find_the_fork.py", before=trace)
    assert said.count("rdmafork: fork() in process") == 3
    for place in ("start_a_worker", "run_with_lower_priority", "open_a_terminal"):
        assert f"in {place}\n" in said
    assert '"forks": 3' in said and '"object": ' in said


def test_mpi_fork():
    pytest.importorskip("mpi4py")
    said = mpirun(2, sys.executable, EXAMPLES / "mpi_fork.py", "", 8)
    assert [line.split(":")[0] for line in said.splitlines()[:-1]] == ["rank 0", "rank 1"]
    assert said.endswith(f"sum of squares {sum(n * n for n in range(1000))}\n")
