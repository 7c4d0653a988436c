"""The soak on a device, for `make soak-vm`: not among the tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(0)  # run.py ends a guest that hangs
def test_for_hours(device, request):
    """Its JSON is left beside the report on the tests."""
    results = Path(os.path.relpath(request.config.option.xmlpath)).parent
    program, hours = ROOT / "build/ctest/debug/soak", request.config.option.hours
    command = [sys.executable, ROOT / "tests/soak/run.py", program]
    command += [results / f"soak-{os.uname().release}.jsonl", f"--hours={hours}"]
    subprocess.run([*command, "--device", device], check=True)
