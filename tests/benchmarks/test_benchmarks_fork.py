"""The benchmarks of fork(), a device, MPI and the import: each runs, and its JSON is complete."""

import argparse
import contextlib
import importlib
import re
import shutil
import sys
from pathlib import Path

import pytest
from conftest import FREE_THREADED, SCALE, fresh, needs_lazy, needs_pins
from memory import pool_lock
from quick import complete, document, of

import rdmafork
from rdmafork import _pins
from rdmafork.benchmarks import _peers, _pool, _shapes, fork_latency, shapes, small_process
from rdmafork.benchmarks._progress import Progress
from rdmafork.benchmarks._workers import Skipped

MPIRUN = Path(sys.executable).with_name("mpirun")


# ---- fork_latency -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def latencies(tmp_path_factory):
    return document("fork_latency", tmp_path_factory.mktemp("fork"), "--pages", "base")


@needs_pins
def test_fork_latency_has_every_peer_and_measure(latencies):
    for row in complete(latencies):
        assert all(
            row[name]["to_baseline"] for name in fork_latency.MEASURES if row[name]["median"]
        )


@needs_pins
@needs_lazy
@pytest.mark.parametrize("peer", ["rdmafork lazy", "rdmafork eager", "rdmafork whole pages"])
def test_a_child_of_registered_memory_has_no_copy_of_it(latencies, peer):
    for nbytes in (64 << 20, 256 << 20):
        (copied,) = of(latencies["rows"], "not registered", buffer_bytes=nbytes)
        (absent,) = of(latencies["rows"], peer, buffer_bytes=nbytes)
        assert copied["child_own_bytes"]["median"] >= nbytes
        assert absent["child_own_bytes"]["median"] < nbytes / 4


def test_memory_that_cannot_be_pinned_is_skipped_with_the_reason(monkeypatch):
    monkeypatch.setattr(_pins, "unavailable", lambda: "io_uring is forbidden here")
    found = fork_latency.measure(argparse.Namespace(quick=True, pages=["base"]), Progress("x"))
    assert found.rows == []
    assert [skip["reason"] for skip in found.skipped] == [
        "nothing can be pinned: io_uring is forbidden here"
    ]


def test_a_pool_that_does_not_suffice_is_a_reason_and_stays_as_it_is(monkeypatch, tmp_path):
    pool, free = tmp_path / "pool", tmp_path / "free"
    pool.write_text("3\n")
    free.write_text("1\n")
    monkeypatch.setattr(_pool, "POOL", str(pool))
    monkeypatch.setattr(_pool, "FREE", str(free))
    with pytest.raises(Skipped, match="of 64 huge pages of 2 MiB only 1 are free"):
        with _pool.huge_pages(64):
            pytest.fail("there are not so many")
    assert pool.read_text() == "3\n"


def test_pinned_memory_and_its_copy_find_room():
    options = argparse.Namespace(quick=False, pages=list(fork_latency.PAGES))
    for room in (1 << 28, 1 << 31, 1 << 34):
        planned = list(fork_latency.situations(options, room))
        assert all(2 * s.nbytes <= room for s in planned if s.ranges == 1)
        assert max(s.nbytes for s in planned if s.ranges == 1) * 8 > room


@needs_pins
def test_the_figures_of_fork_latency_are_written(latencies, tmp_path):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    files = fork_latency.plot(latencies, tmp_path)
    assert [file.name for file in files] == [
        "fork_latency-size.svg", "fork_latency-memory.svg", "fork_latency-ranges.svg",
    ]  # fmt: skip
    assert all("rdmafork lazy" in file.read_text() for file in files)


# ---- shapes -------------------------------------------------------------------------------


# Each is measured in some dozen processes. SCALE=1 has all of them.
NAMES = list(_shapes.SHAPES)[:: round(1 / min(SCALE, 1))]


@pytest.fixture(scope="module")
def shaped(tmp_path_factory):
    return document("shapes", tmp_path_factory.mktemp("shapes"), "--shapes", *NAMES)


def test_each_shape_is_measured_or_skipped_with_a_reason(shaped):
    rows = complete(shaped)
    for name in NAMES:
        shape = _shapes.SHAPES[name]
        for peer in shape.peers():
            for count in (shape.quick // 2, shape.quick):
                there = of(rows, peer, shape=name, count=count)
                why = [
                    skip for skip in shaped["skipped"]
                    if skip["line"] in (peer, "all") and skip.get("shape", name) == name
                ]  # fmt: skip
                assert len(there) == 1 or why, (name, peer, count)


def test_a_shape_is_compared_with_its_floor_and_with_half_of_it(shaped):
    rows = shaped["rows"]
    compared = 0
    for row in rows:
        same = {"shape": row["shape"], "count": row["count"]}
        (floor,) = of(rows, _shapes.FLOOR, **same)
        halves = of(rows, row["line"], shape=row["shape"], count=row["count"] // 2)
        assert ("growth" in row) == bool(halves)
        for name in shapes.FORKS:
            assert row[name]["minimum"] <= row[name]["quartiles"][0]
        if row is floor:
            continue
        for key, name in (("fork_times", "fork_us"), ("child_times", "child_us")):
            times = row[name]["minimum"] / floor[name]["minimum"]
            assert row[key] == pytest.approx(times, rel=1e-3)
            compared += 1
    assert compared


def test_a_shape_is_registered_whole(shaped):
    for name, shape in _shapes.SHAPES.items():
        for row in shaped["rows"]:
            if row["shape"] == name:
                wanted = row["count"] if shape.held else _shapes.UNHELD
                assert row["reached"] == wanted, row
                assert ("register_ns" in row) == (row["line"] in _peers.ENGINES)


@fresh
def test_a_kernel_without_procmap_query_is_imitated():
    try:
        _shapes.refuse_query()
    except Skipped as reason:
        pytest.skip(str(reason))
    assert not rdmafork.kernel_info().procmap_query


@pool_lock()
@fresh
def test_blocks_lie_on_the_pages_that_are_pinned_and_marked():
    for name, shape in _shapes.SHAPES.items():
        if shape.huge_pages(1):
            continue
        blocks, pages = shape.make(shape.quick)
        last = pages.address + pages.nbytes + (pages.number - 1) * pages.stride
        assert sum(run.number for run in blocks) == (shape.quick if shape.held else _shapes.UNHELD)
        for run in blocks:
            end = run.address + (run.number - 1) * run.stride + run.nbytes
            assert pages.address <= run.address < end <= last, name


def test_a_fork_and_its_growth_are_compared_by_their_least():
    def row(peer, count, first, later):
        return {
            "line": peer, "shape": "nested inwards", "count": count, "reached": count,
            "first_fork_us": {"minimum": first}, "fork_us": {"minimum": later},
            "first_child_us": {"minimum": 1}, "child_us": {"minimum": 1},
            **({"register_ns": {"minimum": 50 * count}} if peer != _shapes.FLOOR else {}),
        }  # fmt: skip

    floor, half, full = (
        row(_shapes.FLOOR, 8, 12, 10), row("rdmafork lazy", 4, 10, 10),
        row("rdmafork lazy", 8, 49, 15),
    )  # fmt: skip
    shapes.compare([floor, half, full])
    assert (full["fork_times"], full["child_times"], full["growth"]) == (1.5, 1, 4.9)
    assert full["first_ns_each"] == 4000  # 34 us more than a later fork, the floor 2 us
    assert full["register_growth"] == 4  # twice as many, each twice as long
    assert "fork_times" not in floor and "growth" not in floor and "fork_times" not in half


class Full:
    """A worker whose engine has no room for more."""

    def ask(self, do):
        assert do == "register"
        return {"reached": 7, "register_ns": 50, "error": "ENOMEM"}


def test_shapes_that_cannot_be_registered_whole_are_skipped_and_not_compared(monkeypatch):
    peer, case = "rdmafork whole pages", {"shape": "isolated pages", "count": 8}
    shape = _shapes.SHAPES["isolated pages"]
    monkeypatch.setattr(shapes, "started", lambda *_, **__: contextlib.nullcontext({peer: Full()}))
    skipped = []
    assert shapes.case_rows(shape, case, [peer], 3, skipped) == []
    told = {"line": peer, **case, "reason": "no more than 7 registrations: ENOMEM"}
    assert shapes.unique(skipped) == [told] and len(skipped) == 3


def test_the_figure_of_shapes_is_written(shaped, tmp_path):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    (file,) = shapes.plot(shaped, tmp_path)
    assert file.name == "shapes.svg" and "rdmafork whole pages" in file.read_text()


# ---- small_process ------------------------------------------------------------------------


@needs_pins
@needs_lazy
def test_a_small_process_forks_with_each_peer(tmp_path):
    rows = complete(document("small_process", tmp_path))
    assert {(row["line"], row["pages"]) for row in rows} == {
        (peer, pages) for peer in small_process.PEERS for pages in small_process.PAGES
    }
    for row in rows:
        assert (
            row["fork_us"]["to_baseline"] and row["child_us"]["median"] > row["fork_us"]["median"]
        )
        if "calls" in row:
            # The addresses of registered memory are reserved, and the child says why it dies.
            registered = row["line"] not in (small_process.FLOOR, "madvise, rdmafork loaded")
            assert ("mmap" in row["calls"]) == ("rt_sigaction" in row["calls"]) == registered
        if "child_instructions" in row:
            assert row["child_instructions"] > row["parent_instructions"] > 0
    # Each way adds to the one before it, as the library is loaded, and then has work to do.
    counted = [row["child_instructions"] for row in rows if "child_instructions" in row]
    if len(counted) == len(rows):
        alone, loaded, *ours = counted[: len(small_process.PEERS)]
        assert alone < loaded < min(ours)


# ---- the others ---------------------------------------------------------------------------


@needs_pins
def test_break_even_says_which_marks_pay_and_which_the_engine_makes(tmp_path):
    found = document("break_even", tmp_path)
    rows = complete(found)
    assert all("saved_ns" in row for row in of(rows, "marked") + of(rows, "rdmafork lazy"))
    if rdmafork.kernel_info().copy_on_fork_trusted:
        assert {row["marked"] for row in of(rows, "rdmafork lazy")} == {1}
    break_even = importlib.import_module("rdmafork.benchmarks.break_even")
    lines = list(break_even.table(found))
    assert sum(line.startswith("A mark saves time for ") for line in lines) == 2
    for line in lines:
        units = set(re.findall(r"\d (ns|us|ms|s)\b|\d(%)", line))
        assert len(units) <= 1, line


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        ({1: -5, 2: 3, 4: 9}, "runs of 2 or more pages"),
        ({1: 4, 2: -1, 4: 9}, "runs of 4 or more pages"),
        ({1: 1, 2: 1}, "every run measured"),
        ({1: 1, 2: -1}, "no run measured"),
        ({}, "an unknown number of runs"),
    ],
)
def test_a_threshold_is_where_all_from_there_on_gain(gains, said):
    break_even = importlib.import_module("rdmafork.benchmarks.break_even")
    assert break_even.which(gains) == said


def test_importing_starts_no_thread_and_asks_the_kernel_for_nothing(tmp_path):
    rows = complete(document("import_time", tmp_path))
    (imported,) = of(rows, "import rdmafork")
    assert imported["threads"] == 1
    if not shutil.which("strace"):
        pytest.skip("no strace")
    # Of librdmafork.so: what its children find zeroed, so that they know they are children.
    # Of CPython without the GIL, whatever it imports: thousands that let other threads run.
    assert set(imported["other_calls"]) <= {"madvise", *["sched_yield"] * FREE_THREADED}


def test_without_a_device_the_device_benchmark_says_so(tmp_path):
    found = document("device", tmp_path)
    if found["rows"]:
        pytest.skip("there is an RDMA device: see tests/vm")
    assert [skip["line"] for skip in found["skipped"]] == ["all"]


def test_mpi_alone_says_how_to_start_it(tmp_path):
    (skip,) = document("mpi", tmp_path)["skipped"]
    assert "mpirun" in skip["reason"] or "rdmafork[mpi]" in skip["reason"]


def test_mpi_reduces_the_tables_of_its_ranks_to_one(tmp_path):
    pytest.importorskip("mpi4py", reason="mpi4py is missing: pip install 'rdmafork[mpi]'")
    if not MPIRUN.exists():
        pytest.skip(f"no {MPIRUN}: pip install 'rdmafork[mpi]'")
    found = document(
        "mpi", tmp_path, prefix=[str(MPIRUN), "-n", "2", "--oversubscribe"],
        OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
    )  # fmt: skip
    assert {row["measure"] for row in found["rows"]} >= {"pair_ns"}
    for row in found["rows"]:
        assert row["minimum"] <= row["median"] <= row["maximum"]
        assert set(row["by_rank"]) == {"0", "1"}
        assert row["outlier_rank"] in (0, 1) and row["outlier_host"]
