"""A peer is added in one place: the lines that CONTRIBUTING.md shows are enough."""

import re
from pathlib import Path

import pytest
from conftest import needs_pins
from quick import document

from rdmafork.benchmarks import _harness

PAGE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"
PEER = "madvise, Python"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """measured(benchmark): its rows, in processes where _peers.py ends with those lines."""
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert len([line for line in code.splitlines() if line]) <= 10
    folder = tmp_path_factory.mktemp("peer")
    (folder / "sitecustomize.py").write_text(
        f"from rdmafork.benchmarks import _peers\nexec({code!r}, vars(_peers))\n"
    )

    def rows(name, *arguments):
        found = document(name, folder, *arguments, PYTHONPATH=str(folder))
        assert re.search(f"^{PEER} ", _harness.show(found), re.M)
        return found["rows"]

    return rows


def by_situation(rows, name, peer):
    """{situation: the row of this peer}."""
    parameters = _harness.load(name).PARAMETERS
    return {tuple(row[key] for key in parameters): row for row in rows if row["line"] == peer}


def test_a_new_peer_is_timed_in_each_situation(measured):
    rows = measured("registration")
    new, floor = (by_situation(rows, "registration", peer) for peer in (PEER, "madvise"))
    assert new and new.keys() == floor.keys()
    for situation, row in new.items():
        assert row["pair_ns"]["to_baseline"] > 0
        # strace may be missing; then neither has it.
        assert row.get("system_calls") == floor[situation].get("system_calls")


@needs_pins
def test_a_process_forks_with_what_a_new_peer_has_registered(measured):
    rows = measured("fork_latency", "--pages", "base")
    new, copied = (by_situation(rows, "fork_latency", peer) for peer in (PEER, "not registered"))
    assert new and new.keys() == copied.keys()
    for situation, row in new.items():
        _, nbytes, ranges = situation
        if nbytes * ranges >= 32 << 20:
            alone, copy = (found["child_own_bytes"]["median"] for found in (row, copied[situation]))
            assert alone < copy / 2
