"""The file that holds a test, by the name the documentation gives it: see tree.py."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[2] / "tests"


def file_of(name: str) -> Path:
    """Its folder may be left out where only one has such a file. LookupError: none, or several."""
    name += ".c" if name.startswith(("engine/", "fuzz/")) else ".py"
    found = [p for p in TESTS.rglob(name) if "/" in name or p.parent.name != "vm"]
    if len(found) != 1:
        raise LookupError(f"tests/ has {len(found)} files {name}")
    return found[0]
