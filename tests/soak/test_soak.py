"""Some seconds of `make soak`: no byte is lost amid traffic and forks.

The program is tests/soak. It counts its work, so that a run in which nothing has happened is
not taken for a good one, and it can be told to do wrong, to see it found.
"""

import json
import subprocess
from pathlib import Path

import pytest
from conftest import TIMEOUT, both_modes, environment, scaled

PROGRAM = Path(__file__).resolve().parents[2] / "build/ctest/debug/soak"


def soak(*arguments):
    """(exit status, what it did or None, what it said)"""
    if not PROGRAM.exists():
        pytest.skip("build/ctest/debug/soak is not there: make test builds it")
    done = subprocess.run(
        [PROGRAM, *arguments], env=environment(None), capture_output=True, text=True,
        timeout=TIMEOUT,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout or "null"), done.stderr


def has_done_all(did, forks):
    """Everything that is to be checked has come up."""
    assert did["errors"] == 0
    assert did["forks"] + did["clones"] >= forks and did["clones"]
    assert did["registrations"] > 4 * forks and did["releases"] == did["registrations"]
    assert did["pins"] and did["device_reads"] and did["device_writes"] and did["remaps"]
    assert did["bytes_by_device"] > 1 << 16 and did["bytes_compared"] > 1 << 21
    assert did["pages_absent"] and did["pages_wiped"] and did["pages_written_over"]
    assert all(did[end] for end in ("by_exit_now", "by_exit", "by_signal", "killed"))
    assert did["moves"]["asked"]
    assert did["engine"]["unmarked_bytes"] == 0
    return True


@both_modes
def test_traffic_forks_and_migration_lose_no_byte(pins, mode):
    status, did, said = soak("--mode", mode, "--seconds", str(scaled(4)), "--forks", "400")
    assert status == 0, said
    assert did["mode"] == mode and has_done_all(did, 400)


@pytest.mark.parametrize(
    "wrong, found",
    [
        ("unseen", "registered, and there|omitted, and there|wiped, and not zero"),
        ("moved", "the device reads|after the device wrote"),
    ],
)
def test_the_soak_finds_lost_bytes(pins, wrong, found):
    status, did, said = soak("--break", wrong, "--seconds", "200")
    assert status == 99 and did is None
    assert any(text in said for text in found.split("|")), said
    assert "seed" in said and "expected" in said
