"""The benchmarks that need a device, in full, for `make bench-vm`: not among the tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["device", "unmodified"])
def test_in_full(device, name, request):
    """Its JSON is left beside the report on the tests."""
    results = Path(os.path.relpath(request.config.option.xmlpath)).parent
    command = [sys.executable, "-m", f"rdmafork.benchmarks.{name}", "--device", device]
    subprocess.run([*command, "--json", results / f"{name}.json"], check=True)
