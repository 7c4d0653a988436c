"""Which rank this is, by the variables that launchers set."""

import os
import sys

import pytest
from mpi import mpirun

from rdmafork.cli import launchers
from rdmafork.cli.launchers import Rank, file_name, launched, launcher, prefix


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "PMIX_RANK": "3"},
            Rank("Open MPI", 3, 8),
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, Rank("MPICH", 0, 4)),
        ({"PMIX_RANK": "7", "PMIX_NAMESPACE": "prterun-n1-123@1"}, Rank("PMIx", 7, None)),
        (
            {"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_STEP_ID": "0"},
            Rank("Slurm", 5, 16),
        ),
        (
            {
                "SLURM_PROCID": "5",
                "SLURM_NTASKS": "16",
                "SLURM_STEP_NUM_TASKS": "8",
                "SLURM_STEP_ID": "1",
            },
            Rank("Slurm", 5, 8),
        ),
        # A batch script has a SLURM_PROCID too, and is no rank.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}, None),
        (
            {"RANK": "2", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"},
            Rank("torchrun", 2, 4),
        ),
        # torchrun started by srun: many ranks in one task.
        (
            {
                "RANK": "9",
                "WORLD_SIZE": "16",
                "TORCHELASTIC_RUN_ID": "job",
                "SLURM_PROCID": "1",
                "SLURM_STEP_ID": "0",
            },
            Rank("torchrun", 9, 16),
        ),
        ({"RANK": "2"}, None),  # a variable of any program
        ({"OMPI_COMM_WORLD_RANK": "x", "PMI_RANK": "1"}, Rank("MPICH", 1, None)),
        ({"PMI_RANK": "-1"}, None),
        ({"PMI_RANK": ""}, None),
    ],
)
def test_the_rank_is_the_launchers(env, expected):
    assert launched(env) == expected


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("torchrun x.py", "torchrun"),
        ("python -m torch.distributed.run --nproc-per-node 2 x.py", "torch.distributed.run"),
        ("python3 -u -W ignore -mtorch.distributed.launch x.py", "torch.distributed.launch"),
        ("env A=1 /opt/bin/python3.11 -m torch.distributed.run", "torch.distributed.run"),
        ("python -m mpi4py.run x.py", None),
        ("python x.py -m torch.distributed.run", None),
        ("python -c pass -m torch.distributed.run", None),
        ("python - -m torch.distributed.run", None),
        ("python -m", None),
        ("python", None),
        ("", None),
    ],
)
def test_a_command_that_launches_ranks_is_known(monkeypatch, command, name):
    monkeypatch.setattr("shutil.which", lambda word: word if "python" in word else None)
    assert launcher(command.split()) == name


def test_names_have_rank_and_host(monkeypatch):
    monkeypatch.setattr(launchers, "host", lambda: "node7")
    rank = Rank("MPICH", 3, 8)
    assert prefix(rank) == "3@node7: " and prefix(None) == ""
    assert file_name("out.d/r.json", rank) == "out.d/r.rank3.node7.json"
    assert file_name("report", rank) == "report.rank3.node7"
    assert file_name("/a.b/report", rank) == "/a.b/report.rank3.node7"
    assert file_name("r.json", None) == "r.json"


def test_the_host_has_no_domain():
    assert launchers.host() == os.uname().nodename.partition(".")[0]


def test_a_launcher_that_is_installed_is_known():
    # One write, as print() makes several on a terminal, which come mixed with other ranks'.
    code = "import os; from rdmafork.cli.launchers import launched"
    code += "; os.write(1, (' '.join(map(str, launched())) + chr(10)).encode())"
    seen = sorted(mpirun(3, sys.executable, "-c", code).splitlines())
    (name,) = {line.rsplit(" ", 2)[0] for line in seen}
    assert name in ("Open MPI", "MPICH", "PMIx")
    assert seen == [f"{name} {rank} {3 if name != 'PMIx' else None}" for rank in range(3)]
