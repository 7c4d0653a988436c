"""Ranks under mpirun, each with a device and a pool of processes, and one table of them."""

import json
import subprocess
import sys

import pytest
from conftest import environment
from mpi import mpirun

RDMAFORK = [sys.executable, "-m", "rdmafork"]
RANKS, FORKS, NBYTES = 2, 2, 16 << 20

PROGRAM = f"""
import ctypes, mmap, multiprocessing, sys
sys.path.append("/usr/lib/python3/dist-packages")
from mpi4py import MPI
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD

def square(number):
    return number * number

world = MPI.COMM_WORLD
context = Context(name=sys.argv[1])
pd = PD(context)
memory = mmap.mmap(-1, {NBYTES}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory[::mmap.PAGESIZE] = b"x" * ({NBYTES} // mmap.PAGESIZE)
mr = MR(pd, {NBYTES}, 7, address=ctypes.addressof(ctypes.c_char.from_buffer(memory)))
world.Barrier()
with multiprocessing.get_context("fork").Pool({FORKS}) as pool:
    squares = pool.map(square, range(world.rank, 10, world.size))
mr.write("parent", 6)
assert memory[:6] == b"parent"
mr.close()  # which fails where a child's end has destroyed it
pd.close()
context.close()
total = world.allreduce(sum(squares))
if not world.rank:
    print(total)
"""


def merged(files):
    done = subprocess.run(
        [*RDMAFORK, "report", *files], env=environment({}), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_two_ranks_that_fork_a_pool_each(device, tmp_path):
    pytest.importorskip("mpi4py")
    command = [*RDMAFORK, "exec", "--report", tmp_path / "r.json", "--"]
    said = mpirun(RANKS, *command, sys.executable, "-c", PROGRAM, device)
    assert said == f"{sum(n * n for n in range(10))}\n"
    files = sorted(tmp_path.glob("r.rank*.json"))
    assert [path.name.split(".")[1] for path in files] == [f"rank{rank}" for rank in range(RANKS)]
    for path in files:
        (line,) = map(json.loads, path.read_text().splitlines())
        assert line["forks"] == FORKS and line["registrations"]["total"] >= 1
        assert line["marked_bytes"]["total"] >= FORKS * NBYTES
        assert not line["errors"] and not line["unbalanced"]
    title, *ranks = merged(files)[: 1 + RANKS]
    assert title.split()[:2] == ["rank", "host"]
    assert sorted(row.split()[0] for row in ranks) == [str(rank) for rank in range(RANKS)]
