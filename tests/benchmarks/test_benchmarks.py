"""Benchmarks measure as they say, each peer apart, and name the peers they leave out."""

import functools
import json
import os
import re
import signal
from pathlib import Path

import pytest
from quick import complete, document, of

import rdmafork
from rdmafork.benchmarks import _claims, _harness, _workers

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("registration", "address_space", "scale", "threads")
try:
    import matplotlib

    del matplotlib
    WITHOUT_FIGURES = None
except ImportError as error:
    WITHOUT_FIGURES = f"figures cannot be drawn: {error}"


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """documents(name): the JSON of a quick run."""
    folder = tmp_path_factory.mktemp("benchmarks")
    return functools.cache(lambda name: document(name, folder))


# ---- every benchmark --------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_result_is_complete_and_shown(documents, name):
    found = documents(name)
    assert found["rounds"] >= 3
    shown = _harness.show(found)
    assert all(row["line"] in shown for row in complete(found))


@pytest.mark.parametrize("name", NAMES)
def test_ratios_are_of_medians(documents, name):
    rows, module = documents(name)["rows"], _harness.load(name)
    compared = 0
    for row in rows:
        for measure in module.MEASURES:
            if not isinstance(row.get(measure), dict):
                continue
            floor = [
                other[measure]["median"]
                for other in rows
                if other["line"] == module.FLOOR
                and all(other[key] == row[key] for key in module.PARAMETERS)
                and measure in other
            ]
            assert ("to_baseline" in row[measure]) == bool(floor)
            if floor:
                compared += 1
                ratio = row[measure]["median"] / floor[0]
                assert row[measure]["to_baseline"] == pytest.approx(ratio, rel=1e-3)
    assert compared > len(module.PARAMETERS)


@pytest.mark.skipif(WITHOUT_FIGURES is not None, reason=str(WITHOUT_FIGURES))
@pytest.mark.parametrize("name", NAMES)
def test_a_result_can_be_drawn_again(documents, name, tmp_path):
    files = _harness.draw(documents(name), tmp_path)
    assert files and all(file.read_text().rstrip().endswith("</svg>") for file in files)
    text = files[0].read_text()
    assert "rdmafork lazy" in text and os.uname().release in text


# ---- their results ----------------------------------------------------------------------


def test_system_calls_are_counted(documents):
    found = documents("registration")
    if any(skip.get("counting") == "system_calls" for skip in found["skipped"]):
        pytest.skip(str(found["skipped"]))
    of_a_page = (row for row in found["rows"] if (row["situation"], row["nbytes"]) == ("new", 4096))
    page = {row["line"]: row for row in of_a_page}
    counted = {peer: round(row["system_calls"]) for peer, row in page.items()}
    assert counted["null system call"] == 1 and counted["madvise"] == 2
    assert counted["rdmafork lazy"] == counted["memoryview, Python"] == 0
    assert counted["rdmafork eager"] == 2


def test_peers_that_mark_pages_at_once_end_at_the_limit_of_mappings(documents):
    found = documents("scale")
    limit = rdmafork.kernel_info().max_map_count
    for row in of(found["rows"], "libibverbs", layout="isolated", live=40_000):
        assert row["reached"] < limit and "fork_ns" not in row
        assert any(skip.get("live") == 40_000 for skip in found["skipped"])
    for row in of(found["rows"], "rdmafork lazy"):
        assert row["reached"] == row["live"]


# ---- the frame --------------------------------------------------------------------------


class Obliging:
    def __init__(self, peer):
        self.peer = peer
        if peer == "absent":
            raise _workers.Skipped("it is not installed")

    def sample(self):
        return os.getpid()

    def variables(self):
        return sorted(name for name in os.environ if name.startswith("RDMA"))

    def fail(self, wanted):
        raise ValueError(f"no {wanted}")

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)


def test_each_peer_has_a_process_and_an_environment_of_its_own(monkeypatch):
    monkeypatch.setenv("RDMAFORK_MODE", "eager")
    with _workers.started(Obliging, {"a": {"RDMAV_X": "1"}, "b": {}}, []) as workers:
        pids = _workers.interleave(workers, workers, 3, "sample")
        assert workers["a"].ask("variables") == ["RDMAV_X"]
        assert workers["b"].ask("variables") == []
    assert len(set(pids["a"])) == len(set(pids["b"])) == 1
    assert len({os.getpid(), *pids["a"], *pids["b"]}) == 3


def test_a_peer_that_is_absent_is_skipped_and_the_others_go_on():
    skipped = []
    with _workers.started(Obliging, {"absent": {}, "there": {}}, skipped) as workers:
        assert list(workers) == ["there"]
    assert skipped == [{"line": "absent", "reason": "it is not installed"}]


def test_a_failure_names_the_worker_the_call_and_the_error():
    with _workers.started(Obliging, {"a": {}}, []) as workers:
        with pytest.raises(_workers.WorkerError, match=r"a, at fail\(wanted=9\): ValueError: no 9"):
            workers["a"].ask("fail", wanted=9)
        with pytest.raises(_workers.WorkerError, match=r"a, at die\(\): .* SIGKILL"):
            workers["a"].ask("die")


def test_one_sample_is_its_own_quartiles():
    assert _harness.summary([3.0]) == {"median": 3.0, "quartiles": [3.0, 3.0]}
    assert _harness.summary([1, 2, 3, 4, 5]) == {"median": 3, "quartiles": [2, 4]}


# ---- claims -----------------------------------------------------------------------------


def run_with(*medians, spread=0.0):
    """A run of registration in which a lazy pair took so long, and a null call 100 ns."""
    found = [("rdmafork lazy", ns) for ns in medians] + [("null system call", 100.0)]
    return {
        "rows": [
            {
                "line": peer,
                "situation": "new",
                "nbytes": 4096,
                "pair_ns": {"median": ns, "quartiles": [ns * (1 - spread), ns * (1 + spread)]},
            }
            for peer, ns in found
        ],
        "skipped": [{"line": "libibverbs", "reason": "it is not installed"}],
    }


LAZY_TO_NULL = _claims.Claim(
    "a tenth of a null call",
    "registration",
    "pair_ns",
    {"line": "rdmafork lazy"},
    {"line": "null system call"},
    most=0.1,
)


def test_a_claim_breaks_beyond_its_bound_and_never_by_noise():
    runs = {
        "kept": [run_with(9), run_with(9)],
        "within the least margin": [run_with(10.4, spread=0.001)] * 2,
        "apart, the better is near": [run_with(12), run_with(30)],
        "spread": [run_with(15, spread=0.2)],
    }
    for name, documents in runs.items():
        assert not _claims.judged(LAZY_TO_NULL, documents).broken, name
    assert _claims.judged(LAZY_TO_NULL, [run_with(12, spread=0.02)] * 2).broken
    assert _claims.judged(LAZY_TO_NULL, [run_with(10.1)]).broken  # as counts: no noise at all
    worst = _claims.judged(LAZY_TO_NULL, [run_with(5, 12)])
    assert worst.broken and worst.value == pytest.approx(0.12)


def test_a_claim_of_the_least_samples_is_not_excused_by_a_run_that_was_disturbed():
    runs = [run_with(12), run_with(30)]
    assert not _claims.judged(LAZY_TO_NULL, runs).broken
    assert _claims.judged(LAZY_TO_NULL._replace(least=True), runs).broken
    assert not _claims.judged(LAZY_TO_NULL._replace(least=True), [run_with(9), run_with(30)]).broken


def test_a_claim_that_cannot_be_checked_says_why_and_does_not_hold():
    claim = LAZY_TO_NULL._replace(theirs={"line": "libibverbs"})
    verdict = _claims.judged(claim, [run_with(9)])
    assert not verdict.broken and verdict.why_not == "libibverbs: it is not installed"
    assert _claims.shown(verdict)[0] == "not checked: a tenth of a null call"


@pytest.mark.parametrize("claim", _claims.CLAIMS, ids=lambda claim: claim.text)
def test_each_claim_is_about_rows_that_are_measured(claim):
    module = _harness.load(claim.benchmark)
    assert claim.measure in module.MEASURES and claim.benchmark in _claims.RUNS
    for side in (claim.ours, claim.theirs):
        assert side.keys() <= {"line", *module.PARAMETERS}
    assert claim.aim is None or claim.aim < claim.most


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/results").glob("*.json")), ids=str)
def test_each_block_of_a_table_has_one_unit_and_names_the_base_of_its_ratios(path):
    document = json.loads(path.read_text())
    text = _harness.show(document)
    ratios = re.findall(r" ([\d.,]+)x\b", text)
    assert ("1.20x is 1.2 times" in text) == bool(ratios), text
    assert not re.search(r" 1/\d", text)
    if hasattr(_harness.load(document["benchmark"]), "table"):
        return  # of lines of several measures
    for block in text.split("\n\n"):
        assert len(set(re.findall(r"\d (ns|us|ms|s)\b", block))) <= 1, block
