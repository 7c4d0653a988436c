"""The snippets of README and the documentation that need a device."""

import pytest
import snippets

NEEDED = ("device", "pyverbs", "mpirun", "mpi4py")


@pytest.mark.parametrize(
    "snippet", [s for s in snippets.all_snippets() if s.needs in NEEDED], ids=str
)
def test_a_snippet_does_what_it_says(snippet, device, tmp_path):
    snippets.check(snippet, tmp_path)
