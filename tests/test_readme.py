"""The README's examples do what they say."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import environment

import rdmafork

README = Path(__file__).resolve().parent.parent / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)

DEVICE = "mlx5_0"


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_example_runs(example, tmp_path):
    if DEVICE in example:
        try:
            devices = rdmafork.get_device_list()
        except OSError:
            devices = []
        if not devices:
            pytest.skip("no RDMA device here")
        example = example.replace(DEVICE, devices[0].name)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        env=environment({}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    if "print(" in example:
        assert "protected_by='advice'" in done.stdout


def test_its_tables_of_costs_are_those_of_the_results():
    """python docs/costs.py writes them."""
    text = README.read_text()
    assert text.count("<!-- costs: ") == 5
    assert runpy.run_path(str(README.parent / "docs/costs.py"))["written"](text) == text


def test_there_is_an_example():
    assert EXAMPLES
