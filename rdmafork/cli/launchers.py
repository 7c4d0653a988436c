"""Which of many processes this one is, as the program that launched it says.

Each launcher has variables of its own. The first whose rank is there is believed: those that run
inside another (torchrun inside srun) come before those around them, and a launcher's own before
PMI's and PMIx's, which many of them set too.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple


class Rank(NamedTuple):
    launcher: str
    rank: int
    size: int | None  #: how many there are


# name, the variable of the rank, the variables of the size, one that must be there too.
_LAUNCHERS = (
    ("torchrun", "RANK", ("WORLD_SIZE",), "TORCHELASTIC_RUN_ID"),
    ("torch.distributed", "RANK", ("WORLD_SIZE",), "MASTER_ADDR"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), None),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",), None),
    ("MPICH", "PMI_RANK", ("PMI_SIZE",), None),
    ("PALS", "PALS_RANKID", ("PALS_SIZE",), None),
    # Inside a batch script SLURM_PROCID is 0 and there is no step yet.
    ("Slurm", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_STEP_ID"),
    ("PMIx", "PMIX_RANK", (), "PMIX_NAMESPACE"),
)


# Commands that launch ranks. Debian's have the name of their MPI, too.
_PROGRAMS = frozenset(
    (
        *("mpirun", "mpiexec", "orterun", "prterun", "prun"),
        *("srun", "aprun", "jsrun", "ibrun"),
        *("torchrun", "accelerate", "deepspeed", "horovodrun"),
        *(f"mpirun.{mpi}" for mpi in ("openmpi", "mpich", "hydra")),
        *(f"mpiexec.{mpi}" for mpi in ("openmpi", "mpich", "hydra")),
    )
)
# Modules that do, run by python -m.
_MODULES = frozenset(
    ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
)
# Commands that start the program that their arguments name.
_WRAPPERS = frozenset(
    (
        *("env", "timeout", "time", "nohup", "setsid", "stdbuf"),
        *("nice", "ionice", "chrt", "taskset", "numactl"),
    )
)


def launcher(command: Sequence[str]) -> str | None:
    """The launcher that a command starts, itself or through wrappers; None: it starts none."""
    words = iter(command)
    name = os.path.basename(next(words, ""))
    while name in _WRAPPERS:
        # A wrapper's options, and what belongs to them, are no programs.
        name = next((os.path.basename(word) for word in words if shutil.which(word)), "")
    if re.fullmatch("python[0-9.]*", name):
        name = _module(words)
    return name if name in _PROGRAMS | _MODULES else None


def _module(arguments: Iterator[str]) -> str:
    """The module that these arguments of Python's name with -m; "": they name none."""
    for word in arguments:
        if word.startswith("-m"):
            return word[2:] or next(arguments, "")
        if word in ("-W", "-X"):
            next(arguments, None)  # their value
        elif word in ("-c", "-") or not word.startswith("-"):
            break
    return ""


def launched(environ: Mapping[str, str] = os.environ) -> Rank | None:
    """The rank of this process, None where nothing launched it as one of many."""
    for launcher, rank_name, size_names, witness in _LAUNCHERS:
        rank = _number(environ.get(rank_name))
        if rank is None or (witness and witness not in environ):
            continue
        sizes = (_number(environ.get(name)) for name in size_names)
        return Rank(launcher, rank, next((size for size in sizes if size is not None), None))
    return None


def host() -> str:
    """The name of this machine without its domain."""
    return os.uname().nodename.partition(".")[0] or "localhost"


def prefix(rank: Rank | None) -> str:
    """The beginning of each line this process prints: "3@node7: ", nothing where it is alone."""
    return f"{rank.rank}@{host()}: " if rank else ""


def file_name(path: str, rank: Rank | None) -> str:
    """The path for this rank's own file: "r.json" is "r.rank3.node7.json"."""
    if rank is None:
        return path
    root, extension = os.path.splitext(path)
    return f"{root}.rank{rank.rank}.{host()}{extension}"


def _number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch("[0-9]{1,9}", text) else None
