"""A child that dies of memory it does not have says why, and then dies as it would have.

The engine's part is tested in tests/engine/test_child_fault.c.
"""

import re
import subprocess
import sys

import pytest
from conftest import SLOWNESS, environment

import rdmafork

BEGIN = """
import faulthandler, mmap, os, rdmafork
rdmafork.fork_init()
memory = mmap.mmap(-1, 1 << 16, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
registration = rdmafork.register(memory)  # line 5
"""
FORK = """
pid = os.fork()
if not pid:
    {}
    memory[9] = 1
    os._exit(0)
raise SystemExit(-os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
SIGSEGV = 11


def stderr_of(code, tmp_path, **env):
    """What the program says; its child dies by SIGSEGV."""
    path = tmp_path / "train.py"
    path.write_text(code)
    done = subprocess.run(
        [sys.executable, path],
        env=environment({"PYTHONFAULTHANDLER": None, **env}),
        stderr=subprocess.PIPE,
        text=True,
        timeout=60 * SLOWNESS,
    )
    assert done.returncode == SIGSEGV, done.stderr
    return done.stderr


def lines(text):
    return re.findall(r"^rdmafork: process \d+ touched 0x\w+: .*\(65536 bytes\).*$", text, re.M)


def test_a_child_says_why_it_dies(tmp_path):
    said = stderr_of(BEGIN + FORK.format("pass"), tmp_path)
    assert [said] == [line + "\n" for line in lines(said)]
    assert "train.py" not in said


def test_the_line_that_registers_is_named_if_it_is_traced(tmp_path):
    said = stderr_of(BEGIN + FORK.format("pass"), tmp_path, RDMAFORK_TRACE_REGISTRATIONS="1")
    assert f"which its parent registered at {tmp_path}/train.py:5." in said
    said = stderr_of(BEGIN + FORK.format("pass"), tmp_path, RDMAFORK_TRACE_REGISTRATIONS="0")
    assert lines(said) and "train.py" not in said


def test_it_can_be_turned_off(tmp_path):
    assert not stderr_of(BEGIN + FORK.format("pass"), tmp_path, RDMAFORK_EXPLAIN_FAULTS="0")


def test_faulthandler_tells_its_part_too(tmp_path):
    code = BEGIN + "faulthandler.enable()\n" + FORK.format("pass")
    said = stderr_of(code, tmp_path)
    assert len(lines(said)) == 1 and "Fatal Python error: Segmentation fault" in said


def test_it_is_put_in_front_of_a_later_handler(tmp_path):
    # faulthandler goes on with what it found, so not a word of ours without the call.
    said = stderr_of(BEGIN + FORK.format("faulthandler.enable()"), tmp_path)
    assert not lines(said) and "Fatal Python error: Segmentation fault" in said
    both = "faulthandler.enable(); rdmafork.explain_faults()"
    said = stderr_of(BEGIN + FORK.format(both), tmp_path)
    assert len(lines(said)) == 1 and said.count("Fatal Python error: Segmentation fault") == 1


def test_explain_faults_may_be_called_with_nothing_missing():
    assert rdmafork.explain_faults() is None
    assert rdmafork.explain_faults(3) is None


TORCH = "Unexpected segmentation fault encountered in worker"  # its own handler's
LOADER = """
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return memory[9]

def main(worker_init_fn=None):
    loader = DataLoader(Samples(), num_workers=1, multiprocessing_context="fork",
                        worker_init_fn=worker_init_fn)
    try:
        list(loader)
    except RuntimeError as error:
        print(error, file=__import__("sys").stderr)
        os._exit(11)
"""


def test_a_dataloader_s_worker_says_why(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    said = stderr_of(BEGIN + LOADER + "main()\n", tmp_path)
    assert TORCH in said and not lines(said)
    said = stderr_of(BEGIN + LOADER + "main(rdmafork.explain_faults)\n", tmp_path)
    assert len(lines(said)) == 1, said
    assert TORCH in said
