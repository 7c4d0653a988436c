"""rdmafork report merges the lines that processes left, broken ones too."""

import json
import os
import subprocess
import sys

import pytest
from conftest import environment

from rdmafork.cli import main, terminal

LIBRARY = "/usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0"


def line(rank=0, /, **changed):
    """The line that the engine writes at the exit of a process."""
    return {
        "rdmafork": "0.1.0",
        "pid": 1000 + (rank or 0),
        "ppid": 1,
        "exec_pid": None,
        "forked": 0,
        "host": f"node{(rank or 0) // 4}",
        "rank": rank,
        "program": "/usr/bin/python3",
        "mode": "lazy",
        "kernel": {"release": "6.12.1", "copy_trusted": 0},
        "registrations": {"total": 100, "live": 3},
        "ranges": 3,
        "forks": 4,
        "handler_ns": {"total": 1_000_000, "max": 500_000},
        "marked_bytes": {"total": 4 << 30, "last": 1 << 30},
        "unmarked_bytes": 0,
        "unbalanced": 0,
        "pinned_elsewhere": {"max": 0, "unread": 0},
        "device_without_libibverbs": 0,
        "libraries": [{"path": LIBRARY, "how": "ours", "why": None, "protects": 0}],
        "errors": [],
        "fork_callers": [
            {"symbol": "os_fork", "object": "/usr/bin/python3.11", "offset": 0x1234, "count": 4}
        ],
    } | changed


@pytest.fixture
def report(tmp_path, capsys):
    """report(lines, *options): exit status, lines on stdout, on stderr."""

    def run(lines, *options):
        path = tmp_path / "r.json"
        text = [entry if isinstance(entry, str) else json.dumps(entry) for entry in lines]
        path.write_text("".join(f"{entry}\n" for entry in text))
        status = main(["report", str(path), *options])
        seen = capsys.readouterr()
        return status, seen.out.splitlines(), seen.err.splitlines()

    return run


def test_a_process_has_a_row_and_rows_are_by_rank(report):
    status, lines, errors = report([line(rank) for rank in (2, 0, 1)])
    assert (status, errors) == (0, [])
    assert lines[0].split() == [
        "rank", "host", "pid", "program", "regs", "forks", "handlers", "marked", "unmarked",
    ]  # fmt: skip
    assert [row.split()[0] for row in lines[1:4]] == ["0", "1", "2"]
    assert lines[1].split() == [
        "0", "node0", "1000", "python3", "100", "4", "0.50", "ms", "4", "GiB", "0", "bytes",
    ]  # fmt: skip
    text = " ".join(lines)
    assert "3 processes on 1 host: 300 registrations, 12 forks with 0.25 ms in handlers" in text
    assert "12 GiB marked: not inherited, not copied; 0 bytes unmarked" in text
    assert "12  os_fork in python3.11" in text


def test_short_times_in_handlers_are_no_zeros(report):
    _, lines, _ = report([line(0, handler_ns={"total": 12_000, "max": 4_200})])
    assert " 4.20 us " in lines[1]
    assert "4 forks with 3.00 us in handlers each" in " ".join(lines)


def test_without_forks_there_is_no_time_in_handlers(report):
    _, lines, _ = report([line(0, forks=0)])
    assert "1 process on 1 host: 100 registrations, no forks; 4 GiB marked" in " ".join(lines)


def test_outliers_come_first_and_troubles_before_them(report):
    refused = [{"path": LIBRARY, "how": "refused", "why": "its calls are bound inside"}]
    lines = [line(rank) for rank in range(8)]
    lines[3] = line(3, unmarked_bytes=2 << 30)
    lines[5] = line(5, handler_ns={"total": 9_000_000, "max": 9_000_000}, unmarked_bytes=1 << 30)
    lines[6] = line(6, libraries=refused, errors=["no engine: out of memory"])
    lines[7] = line(7, libraries=refused)
    status, shown, _ = report(lines)
    assert status == 1
    assert [row.split()[0] for row in shown[1:9]] == ["6", "7", "5", "3", "0", "1", "2", "4"]
    text = " ".join(" ".join(shown).split())
    assert f"{LIBRARY} is not intercepted: its calls are bound inside (rank 6, 7)" in text
    assert "no engine: out of memory (rank 6)" in text


def test_a_release_too_many_is_a_trouble(report):
    status, lines, _ = report([line(0, unbalanced=2)])
    assert status == 1 and "released more often than it was registered" in " ".join(lines)


def test_a_process_that_no_launcher_started(report):
    status, lines, _ = report([line(None, rank=None, pid=77)])
    assert (status, lines[1].split()[:3]) == (0, ["-", "node0", "77"])


def test_ranks_may_be_strings_and_numbers_may_have_no_parts(report):
    plain = {"registrations": 5, "handler_ns": 10, "marked_bytes": 0}
    status, lines, _ = report([line(0, rank="12", **plain)])
    assert (status, lines[1].split()[0], lines[1].split()[4]) == (0, "12", "5")


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ("garbage", "not valid JSON"),
        ('{"rdmafork": "0.1.0", "ho', "not valid JSON"),
        ("[1]", "not a report of rdmafork exec"),
        ("7", "not a report of rdmafork exec"),
        ('{"pid": 3}', "'rdmafork' is missing"),
        ('{"rdmafork": "0.1.0", "pid": 3}', "'host' is missing"),
        ('{"rdmafork": "0.1.0", "host": "a", "pid": "x"}', "not a report of rdmafork exec"),
        ('{"rdmafork": "1", "host": "a", "pid": 1, "libraries": 3}', "not a report"),
        ('{"rdmafork": "1", "host": "a", "pid": 1, "fork_callers": [{}]}', "'symbol' is missing"),
        (
            '{"rdmafork": 3, "pid": 1, "host": "a",'
            ' "fork_callers": [{"symbol": "f", "object": "/o", "count": null}]}',
            "not a report of rdmafork exec",
        ),
        ("[" * 200_000, "not valid JSON"),
    ],
)
def test_a_broken_line_is_told_and_the_others_are_read(report, broken, why):
    status, lines, errors = report([line(0), broken, "", line(1)])
    assert status == 1 and [row.split()[0] for row in lines[1:3]] == ["0", "1"]
    (error,) = errors
    assert error.startswith("rdmafork report: ") and f"r.json:2: {why}" in error


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"kernel": {"copy_trusted": 1}}, "at least 64 MiB pinned by something that does not call"),
        ({"kernel": {"copy_trusted": 1}}, "fork() copies the private part of it"),
        ({"kernel": {"copy_trusted": 0}}, "fork() may lose the private part of it"),
        (
            {"pinned_elsewhere": {"max": 0, "unread": 1}},
            "/proc could not be read, 1 time, at forks or at the exit, so the report cannot say",
        ),
        (
            {"device_without_libibverbs": 1, "pinned_elsewhere": {}},
            "a device was open and no libibverbs",
        ),
    ],
)
def test_memory_pinned_elsewhere_is_a_problem(report, changed, told):
    pins = {"pinned_elsewhere": {"max": 64 << 20}}
    status, lines, _ = report([line(0, **pins | changed)])
    assert status == 1 and told in " ".join(" ".join(lines).split())


def test_memory_pinned_by_a_refused_library_is_told_unless_it_protects_that_itself(report):
    for protects in (0, 1):
        refused = {"path": LIBRARY, "how": "refused", "why": "for a reason", "protects": protects}
        found = line(0, libraries=[refused], pinned_elsewhere={"max": 8 << 20})
        status, lines, _ = report([found])
        told = " ".join(" ".join(lines).split())
        assert status == 1 and f"{LIBRARY} is not intercepted: for a reason" in told
        pinned = "at least 8 MiB pinned by a libibverbs that is not intercepted, or by something"
        assert (pinned in told) == ("8 MiB unmarked: copied" in told) == (not protects)


def test_callers_of_fork_are_added_up_over_all(report):
    callers = [
        {"symbol": "os_fork", "object": "/usr/bin/python3.11", "count": 1},
        {"symbol": None, "object": "/usr/lib/libx.so.1", "count": 5},
        {"symbol": None, "object": "/usr/lib/none/libx.so.1", "offset": 255, "count": 3},
        {"symbol": None, "object": "/proc/self/status", "offset": 255, "count": 1},
        {"symbol": None, "object": None, "count": 2},
    ]
    _, lines, _ = report([line(0), line(1, fork_callers=callers)])
    assert lines[lines.index("who forked") + 1 :] == [
        "        5  os_fork in python3.11", "        5  libx.so.1", "        3  libx.so.1+0xff",
        "        2  unknown code", "        1  status+0xff",
    ]  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("path", ["{}/pipe", "{}/none", "{}", "{}/empty", "{}/bad\0name"])
def test_a_caller_in_a_file_that_is_no_program_has_no_name(report, tmp_path, path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    path = path.format(tmp_path)
    caller = {"symbol": None, "object": path, "offset": 16, "count": 1}
    _, lines, _ = report([line(0, fork_callers=[caller])])
    assert lines[-1] == f"        1  {terminal.printable(os.path.basename(path))}+0x10"


def test_a_log_with_reports_in_it_is_not_repeated(report):
    status, lines, errors = report([line(0), *["epoch 1 loss 0.3"] * 50])
    assert status == 1 and len(errors) == 4 and "47 more such lines" in errors[-1]
    assert lines[1].split()[0] == "0"


def test_bytes_that_are_no_text_are_a_broken_line(tmp_path, capsys):
    (tmp_path / "r.json").write_bytes(b"\xff\xfe\n" + json.dumps(line(0)).encode() + b"\n")
    assert main(["report", str(tmp_path / "r.json")]) == 1
    assert "r.json:1: not valid JSON" in capsys.readouterr().err


@pytest.mark.parametrize("locale", ["utf-8", "ascii"])
def test_any_text_and_number_of_a_line_is_shown_or_told(locale):
    caller = {"symbol": "\ud800", "object": "o", "count": 1}
    strange = [
        line(0, host="\ud800\x1b[31m", program="/x/\u65e5\udcff\n"),
        line(1, errors=["\ud800\x1b"], fork_callers=[caller]),
        line(2, marked_bytes=10**400),
        line(3, handler_ns=10**400),
        line(4, registrations=-1),
        line(5, unmarked_bytes=2**64 - 1),
    ]
    for options in ([], ["--json"]):
        done = subprocess.run(
            [sys.executable, "-m", "rdmafork", "report", "-", *options], capture_output=True,
            input="".join(f"{json.dumps(entry)}\n" for entry in strange).encode(),
            env=environment({"PYTHONIOENCODING": locale}),
        )  # fmt: skip
        assert done.returncode == 1 and b"Traceback" not in done.stderr, done.stderr
        if options:
            found = json.loads(done.stdout)
            assert [broken["line"] for broken in found["broken"]] == [3, 4, 5]
        else:
            assert b"\\ud800\\x1b[31" in done.stdout and b"\\xff\\x0a" in done.stdout
            assert b"\x1b" not in done.stdout and b"16777216 TiB" in done.stdout
            assert b"stdin:5: not a report of rdmafork exec" in done.stderr


def test_nothing_to_be_read_is_2(tmp_path, report, capsys):
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["report", f"{tmp_path}/none/r.json"]) == 2
    assert f"none/r.json: there is no directory {tmp_path}/none\n" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err
    status, lines, errors = report([])
    assert (status, lines) == (2, []) and "no reports: exec(), _exit() or a signal" in errors[0]
    assert main(["report"]) == 2


def notes(report, *lines):
    status, shown, _ = report(lines)
    assert status == 0
    text = " ".join(shown)
    return [note.split(". ")[0] for note in text.split("Note: ")[1:]]


def child(pid, ppid, /, **changed):
    return line(0, pid=pid, ppid=ppid, exec_pid="10", forks=0, forked=1) | changed


def test_missing_reports_of_children_are_noted(report):
    parent = line(0, pid=10, exec_pid="10", forks=3)
    assert notes(report, parent | {"forks": 0}) == []
    (note,) = notes(report, parent, child(11, 10))
    assert note.startswith("process 10 forked 3 times; 2 children wrote no report: exec(), ")
    # It may be a fork's child or not.
    (note,) = notes(report, parent, child(11, 10, forked=0))
    assert "at least 2 children wrote no report" in note
    assert notes(report, parent, *(child(pid, 10, forked=0) for pid in range(11, 20))) == []


def test_missing_reports_of_parents_are_noted(report):
    root = line(0, pid=10, exec_pid="10", forks=0)
    (note,) = notes(report, root, child(12, 11), child(13, 11))
    assert note.startswith("process 11 wrote no report, and 2 children did; exec(), _exit()")
    (note,) = notes(report, child(11, 10))
    assert note.startswith("process 10 wrote no report, and 1 child did")
    # The parent of the first process is not under rdmafork exec, nor is init.
    assert notes(report, root, child(11, 1)) == []
    assert notes(report, line(0, pid=10, ppid=9, forks=0)) == []


def test_a_program_that_was_replaced_by_exec_is_noted(report):
    root = line(0, pid=10, exec_pid="10", forks=1)
    (note,) = notes(report, root, child(11, 10), child(12, 10))
    assert note.startswith("process 10 forked less often than forked children wrote reports")
    # Processes of other hosts have numbers of their own.
    assert len(notes(report, root, child(11, 10), child(12, 10, host="other"))) == 1
    assert notes(report, root, child(11, 10), child(12, 10, forked=0)) == []


def test_many_processes_are_one_note(report):
    (note,) = notes(report, *(line(0, pid=pid, ppid=1) for pid in range(20, 30)))
    assert note.startswith("processes 20, 21, 22, 23, 24 and 5 more forked 40 times; 40 children")


def test_several_files_are_one_table(tmp_path, capsys):
    paths = []
    for rank in range(3):
        paths.append(tmp_path / f"r.rank{rank}.node0.json")
        paths[-1].write_text(json.dumps(line(rank)) + "\n")
    assert main(["report", *map(str, paths), str(tmp_path / "none")]) == 1
    assert len(capsys.readouterr().out.split("\n\n")[0].splitlines()) == 4


def test_stdin_is_read_too():
    done = subprocess.run(
        [sys.executable, "-m", "rdmafork", "report", "-"], input=json.dumps(line(5)), text=True,
        capture_output=True, env=environment({}),
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.splitlines()[1].split()[0] == "5"


def test_a_thousand_ranks_are_twenty_rows_or_all(report):
    lines = [line(rank, forks=0) for rank in range(1000)]
    _, shown, _ = report(lines)
    assert "... and 980 more; --all shows them" in shown
    assert len(shown) < 30
    assert len(report(lines, "--all")[1]) > 1000


def test_json_has_all_that_the_table_has(report):
    status, lines, errors = report([line(0), "garbage", line(1, errors=["x"])], "--json")
    document = json.loads("\n".join(lines))
    assert (status, errors) == (1, [])
    assert [process["rank"] for process in document["processes"]] == [1, 0]
    assert document["processes"][1] == line(0) | {"troubles": []}
    assert document["totals"]["forks"] == 8 and document["totals"]["processes"] == 2
    assert document["fork_callers"] == {"os_fork in python3.11": 8}
    assert [found["line"] for found in document["broken"]] == [2]


def test_large_numbers_fit_in_eighty_columns(report):
    large = line(123456, host="compute-node-0123", pid=4194303, program="/x/" + "train" * 9,
                 registrations={"total": 1234567}, forks=1234,
                 marked_bytes={"total": 123 << 30})  # fmt: skip
    _, lines, _ = report([large])
    assert max(map(len, lines)) <= 80
