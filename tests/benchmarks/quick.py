"""Quick runs of the benchmarks, and what each of their documents has to have."""

import json
import os
import subprocess
import sys

from conftest import TIMEOUT, environment
from memory import pool_lock

import rdmafork
from rdmafork.benchmarks import _harness

DOCUMENT = {
    "benchmark", "question", "command", "commit", "machine", "rounds", "rows", "skipped",
}  # fmt: skip


@pool_lock()  # a benchmark takes free huge pages, which others may count on
def document(name, folder, *arguments, prefix=(), **variables):
    """The document of `--quick --json`, checked for the keys that every document has."""
    file = folder / f"{name}.json"
    command = [sys.executable, "-m", f"rdmafork.benchmarks.{name}", "--quick", "--json", file]
    done = subprocess.run(
        [*prefix, *map(str, command), *arguments],
        env=environment(variables), capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert set(found) == DOCUMENT and found["benchmark"] == name
    assert found["question"].endswith("?") and found["question"] in done.stdout
    assert found["command"].startswith(f"python -m rdmafork.benchmarks.{name} --quick")
    assert found["commit"] == rdmafork.__version__
    assert found["machine"]["kernel"]["release"] == os.uname().release
    for skip in found["skipped"]:
        assert skip["reason"] and skip["reason"] in done.stdout
        assert skip.keys() - {"reason"}
    return found


def complete(found):
    """The rows. Each has its peer and its parameters, and each peer has a row, or is skipped."""
    module = _harness.load(found["benchmark"])
    skipped = {skip.get("line") for skip in found["skipped"]}
    assert {row["line"] for row in found["rows"]} | skipped >= set(module.PEERS)
    for row in found["rows"]:
        assert set(row) >= {"line", *module.PARAMETERS}, row
        measured = [row[name] for name in module.MEASURES if name in row]
        assert measured, row
        for value in measured:
            if isinstance(value, dict):
                low, high = value["quartiles"]
                assert low <= value["median"] <= high
    return found["rows"]


def of(rows, peer, **parameters):
    """The rows of a peer in these situations."""
    wanted = {"line": peer, **parameters}.items()
    return [row for row in rows if wanted <= row.items()]
