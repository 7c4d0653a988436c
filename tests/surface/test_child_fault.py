"""A child that dies of memory it does not have says why, and then dies as it would have.

The engine's part is tested in tests/engine/test_child_fault.c.
"""

import re
import subprocess
import sys

import pytest
from conftest import HERE, SLOWNESS, compile_c, environment

import rdmafork

START = """
import faulthandler, mmap, os, rdmafork
rdmafork.fork_init()
"""
BEGIN = f"""{START[:-1]}
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


def stderr_of(code, tmp_path, *options, **env):
    """The program's stderr; its child dies by SIGSEGV."""
    path = tmp_path / "train.py"
    path.write_text(code)
    done = subprocess.run(
        [sys.executable, *options, path],
        env=environment({"PYTHONFAULTHANDLER": None, **env}),
        stderr=subprocess.PIPE,
        text=True,
        timeout=60 * SLOWNESS,
    )
    assert done.returncode == SIGSEGV, done.stderr
    return done.stderr


def lines(text):
    return re.findall(r"^rdmafork: process \d+ touched 0x\w+: .*\(65536 bytes\).*$", text, re.M)


BY_ADDRESS = """
mapped = mmap.mmap(-1, 1 << 16, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory = (ctypes.c_char * (1 << 16)).from_buffer(mapped)
registration = rdmafork.register_address(ctypes.addressof(memory), 1 << 16)
"""
BUFFER = """
buffer = rdmafork.Buffer(1 << 16)
memory = memoryview(buffer)
"""
DEVICE = """
from rdmafork import devices
verbs = ctypes.CDLL({library!r})  # by this name libibverbs is looked for, and there already
devices.find_device = lambda device: device
device = type("Device", (), {{"name": "mlx5_7", "node_guid": None}})()
domain = rdmafork.Context(device).alloc_pd()
memory = mmap.mmap(-1, 1 << 16, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
region = domain.register(memory)
"""
LIBIBVERBS = """
memory = mmap.mmap(-1, 1 << 16, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
verbs = ctypes.CDLL(rdmafork.get_library())  # which answers for it under rdmafork exec
assert verbs.ibv_dontfork_range(ctypes.c_void_p(start), ctypes.c_size_t(1 << 16)) == 0
"""
ON_FORK = 'use shared memory, register with on_fork="wipe" or "keep", or copy it before fork().'


def check_it_names(call, remedy, said):
    assert [said] == [line + "\n" for line in lines(said)]
    assert f"(65536 bytes) with {call}, so this child does not have that memory. " in said
    assert said.endswith(f"If a child needs it: {remedy}\n")


def test_a_child_says_why_it_dies(tmp_path):
    said = stderr_of(BEGIN + FORK.format("pass"), tmp_path)
    check_it_names("rdmafork.register()", ON_FORK, said)
    assert "train.py" not in said


@pytest.mark.parametrize(
    "call, code",
    [("rdmafork.register_address()", BY_ADDRESS), ("rdmafork.Buffer()", BUFFER)],
    ids=["address", "buffer"],
)
def test_the_line_names_the_call_that_registered(tmp_path, call, code):
    said = stderr_of(START + "import ctypes\n" + code + FORK.format("pass"), tmp_path)
    check_it_names(call, ON_FORK, said)


def test_it_names_a_device_s_memory_region(tmp_path):
    library = tmp_path / "libibverbs.so.1"
    compile_c(library, "-O1", "-shared", "-fPIC", f"-Wl,-soname,{library.name}",
              HERE / "standin_verbs.c")  # fmt: skip
    code = "import ctypes\n" + DEVICE.format(library=str(library))
    said = stderr_of(START + code + FORK.format("pass"), tmp_path)
    check_it_names("ProtectionDomain.register()", ON_FORK, said)


def test_it_names_libibverbs_under_rdmafork_exec(tmp_path):
    """Whose calls have no on_fork, so the remedy is another."""
    code = "import ctypes, mmap, os, rdmafork\n" + LIBIBVERBS + FORK.format("pass")
    said = stderr_of(code, tmp_path, "-m", "rdmafork", "exec", sys.executable)
    check_it_names("libibverbs", "use shared memory, or copy it before fork().", said)


def test_the_line_that_registers_is_named_if_it_is_traced(tmp_path):
    said = stderr_of(BEGIN + FORK.format("pass"), tmp_path, RDMAFORK_TRACE_REGISTRATIONS="1")
    assert f" with rdmafork.register() at {tmp_path}/train.py:5, so this child " in said
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
