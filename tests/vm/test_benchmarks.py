"""The device benchmark, at a device."""

import json
import shutil
import subprocess
import sys

import pytest
from conftest import SLOWNESS
from memory import marks_stay

import rdmafork
from rdmafork.benchmarks import device as benchmark


@pytest.fixture(scope="module")
def found(device, tmp_path_factory):
    """The document of `--quick --json`."""
    file = tmp_path_factory.mktemp("device") / "device.json"
    command = [sys.executable, "-m", "rdmafork.benchmarks.device", "--quick"]
    done = subprocess.run(
        [*command, "--device", device, "--json", file],
        capture_output=True, text=True, timeout=30 * SLOWNESS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


def test_every_peer_is_measured_or_skipped_with_a_reason(found):
    skipped = {skip["line"]: skip["reason"] for skip in found["skipped"]}
    assert all(skipped.values())
    assert {row["line"] for row in found["rows"]} | set(skipped) >= set(benchmark.PEERS)
    # A peer without a package or library of its own cannot be missing.
    lazy = ["rdmafork lazy"] if rdmafork.kernel_info().copy_on_fork_trusted else []
    assert not {benchmark.FLOOR, "rdmafork eager", *lazy} & set(skipped), skipped
    for row in found["rows"]:
        assert row["nbytes"] in benchmark.SIZES
        assert row["pair_ns"]["median"] > 0 and row["pair_ns"]["to_baseline"] > 0


def test_the_benchmark_counts_the_system_calls_of_each_peer(found):
    if not shutil.which("strace"):
        pytest.skip("strace is missing")
    calls = {row["line"]: row["system_calls"] for row in found["rows"] if "system_calls" in row}
    bare = calls[benchmark.FLOOR]
    assert bare >= 2
    ours = bare + (3 if marks_stay() else 2)
    assert calls["rdmafork eager"] == pytest.approx(ours, abs=0.1)
    assert calls.get("rdmafork lazy", bare) == pytest.approx(bare, abs=0.1)
