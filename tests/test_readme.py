"""The README's example does what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import environment

README = Path(__file__).resolve().parent.parent / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_example_runs(example, tmp_path):
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
    assert "protected_by='advice'" in done.stdout


def test_there_is_an_example():
    assert EXAMPLES
