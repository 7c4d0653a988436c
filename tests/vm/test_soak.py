"""Half a minute of the soak on a device, of the hours in `make soak-vm`."""

import pytest
from conftest import both_modes
from memory import marks_stay
from soak.test_soak import has_done_all, soak

import rdmafork


@both_modes
def test_traffic_forks_and_migration_lose_no_byte(device, huge_pages, mode):
    # Else children lack a huge page that was registered once, and the soak takes that for a loss.
    arguments = ["--device", device, "--mode", mode, "--huge", "0" if marks_stay() else "1"]
    status, did, said = soak(*arguments, "--seconds", "10", "--forks", "150")
    assert status == 0, said
    assert did["device"] == device and has_done_all(did, 150)
    # libibverbs' own registrations come to the engine.
    assert did["engine"]["ibv_calls"]


def test_without_the_engine_it_finds_bytes_that_fork_loses(device, huge_pages):
    if rdmafork.kernel_info().copy_on_fork:
        pytest.skip("this kernel copies pinned pages at fork(): nothing is lost")
    status, _, said = soak("--device", device, "--break", "lost", "--huge", "4", "--seconds", "200")
    assert status == 99
    assert "the device reads" in said or "after the device wrote" in said, said
