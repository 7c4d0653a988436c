"""Forks of programs that were not changed, with and without "rdmafork exec"."""

import json
import subprocess
import sys

import pytest
from conftest import TIMEOUT, environment

import rdmafork


@pytest.fixture(scope="module")
def programs():
    """{program: {peer: its row}}"""
    command = [sys.executable, "-m", "rdmafork.benchmarks.unmodified", "--quick", "--json", "-"]
    done = subprocess.run(
        command, env=environment({}), capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    if not document["rows"]:
        pytest.skip("; ".join(skip["reason"] for skip in document["skipped"]))
    found = {}
    for row in document["rows"]:
        found.setdefault(row["program"], {})[row["line"]] = row
    return found


def test_the_device_s_pages_stay_the_parent_s(programs):
    in_place = [found["under exec"].get("in_place") for found in programs.values()]
    assert True in in_place and False not in in_place


def test_no_child_has_a_copy_of_registered_memory(programs):
    for found in programs.values():
        row = found["under exec"]
        assert row["child_own_bytes"] < row["registered_bytes"] / 2


@pytest.mark.skipif(
    not rdmafork.kernel_info().copy_on_fork, reason="this kernel copies no pinned pages at fork"
)
def test_without_it_the_kernel_copies_it_and_fork_takes_longer(programs):
    """But for the program that asks libibverbs for protection, which version 44 then gives."""
    for name in programs.keys() - {"dlvsym"}:
        alone, executed = programs[name]["alone"], programs[name]["under exec"]
        saved = alone["child_own_bytes"] - executed["child_own_bytes"]
        assert saved > alone["registered_bytes"] * 0.9
        # Programs that do not fork themselves share the guest's one processor with their client.
        if "in_place" in alone:
            assert executed["fork_ns"]["median"] < alone["fork_ns"]["median"]
