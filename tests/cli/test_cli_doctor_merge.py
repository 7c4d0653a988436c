"""rdmafork doctor --merge: the findings of many ranks or hosts, each told once."""

import json
import subprocess
import sys
from collections import Counter

import pytest
from conftest import TIMEOUT, environment
from test_cli import command

from rdmafork.cli import doctor_merge, launchers
from rdmafork.cli.doctor_rows import STATUSES, ok, problem, skipped, warning
from rdmafork.cli.launchers import Rank

LOCKED = "locked memory"
GOOD = ok(LOCKED, "unlimited")
BAD = problem(LOCKED, "64 KiB", "raise it")


def printed(rank, *rows, host="node1", size=4):
    """The lines that a rank with these rows prints."""
    counts = dict.fromkeys(STATUSES, 0) | Counter(row.status for row in rows)
    return "\n".join(doctor_merge.lines([("Limits", rows)], host, Rank("x", rank, size), counts))


def merged(tmp_path, *texts):
    file = tmp_path / "all"
    file.write_text("\n".join(texts))
    return doctor_merge.read([str(file)])


def merge(*arguments, **options):
    done = command("doctor", "--merge", *arguments, **options)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_ranks_that_agree_are_one_answer(tmp_path):
    found = merged(tmp_path, *(printed(rank, GOOD) for rank in range(4)))
    assert found == ("4 ranks on 1 host: all agree", [GOOD], [])


def test_hosts_that_differ_are_named_and_problems_come_first(tmp_path):
    shm = ok("/dev/shm", "1 GiB")
    texts = [printed(rank, shm, GOOD, host=f"node{rank // 2}") for rank in range(6)]
    texts += [printed(rank, shm, BAD, host="node7") for rank in (6, 7)]
    found = merged(tmp_path, *texts)
    assert found.head == "8 ranks on 4 hosts: 6 agree, node7 differ"
    assert [(row.status, row.evidence) for row in found.rows] == [
        ("problem", "64 KiB (node7)"),
        ("ok", "1 GiB"),
        ("ok", "unlimited (node0, node1, node2)"),
    ]


def test_ranks_of_one_host_are_named_by_their_numbers(tmp_path):
    texts = [printed(rank, BAD if rank in (1, 2) else GOOD) for rank in range(4)]
    found = merged(tmp_path, *texts)
    assert found.head == "4 ranks on 1 host: 2 agree, ranks 1-2 differ"
    assert found.rows[0].evidence == "64 KiB (ranks 1-2)"


def test_numbers_that_differ_do_not_make_a_row_for_each_rank(tmp_path):
    troubles = [warning("/dev/shm", f"{n} MiB are free", "enlarge it") for n in range(4)]
    found = merged(tmp_path, *(printed(rank, row) for rank, row in enumerate(troubles)))
    assert [row.evidence for row in found.rows] == ["0 MiB are free (and 3 answers like it)"]
    well = [ok("/dev/shm", f"{n} GiB are free") for n in range(9)]
    found = merged(tmp_path, *(printed(rank, row, size=9) for rank, row in enumerate(well)))
    assert [row.evidence for row in found.rows][3:] == ["6 more checks are OK"]


def test_two_rows_of_one_name_are_two(tmp_path):
    pools = [ok("huge pages", "1 of 2 MiB"), ok("huge pages", "none of 1 GiB")]
    found = merged(tmp_path, *(printed(rank, *pools) for rank in range(4)))
    assert (found.rows, found.missing) == (pools, [])


def test_missing_answers_are_told(tmp_path):
    cut = printed(2, GOOD, skipped("/proc", "not there")).splitlines()
    found = merged(tmp_path, printed(0, GOOD), "srun: error", cut[0], cut[-1], cut[1][:30])
    assert found.missing == [
        "the answer of rank 2 on node1 is incomplete",
        "no answer from ranks 1, 3 of 4",
        "2 lines could not be read (not printed by rdmafork doctor --json, or cut)",
    ]


def test_labels_of_the_launcher_do_not_matter(tmp_path):
    text = printed(0, GOOD, size=1)
    labelled = "\n".join(f"[1,0]<stdout>: {line}" for line in text.splitlines())
    assert merged(tmp_path, labelled) == merged(tmp_path, text)


def test_a_rank_s_later_answer_replaces_its_earlier_one(tmp_path):
    assert merged(tmp_path, printed(0, BAD, size=1), printed(0, GOOD, size=1)).rows == [GOOD]


def test_real_answers_are_merged_with_the_exit_status_of_the_worst():
    answers = []
    for rank in range(2):
        env = {"PMI_RANK": str(rank), "PMI_SIZE": "2"}
        env |= {"RDMAFORK_MODE": "fast"} if rank else {}
        done = subprocess.run(
            [sys.executable, "-m", "rdmafork", "doctor", "--json"],
            env=environment(env), capture_output=True, text=True, timeout=TIMEOUT, check=False,
        )  # fmt: skip
        assert max(map(len, done.stdout.splitlines())) < 1024  # srun passes it on as a whole
        answers.append(done.stdout)
    done = merge("-q", input="".join(answers))
    head = done.stdout.partition("\n")[0]
    assert done.returncode == 1 and "  PROBLEM RDMAFORK_MODE=fast: " in done.stdout
    assert head == "2 ranks on 1 host: 1 agree, rank 1 differs" and "(rank 1)" in done.stdout
    assert merge(input=answers[0]).returncode == 2  # rank 1 has not answered


def test_documents_of_hosts_without_ranks_are_merged(tmp_path):
    document = json.loads(command("doctor", "--json").stdout)
    for host in ("node1", "node2"):
        (tmp_path / f"{host}.json").write_text(json.dumps(document | {"host": host}, indent=2))
    done = merge(str(tmp_path / "node1.json"), str(tmp_path / "node2.json"))
    assert done.stdout.startswith("2 hosts: all agree\n")
    assert max(map(len, done.stdout.splitlines())) <= 80
    both = "".join((tmp_path / f"{host}.json").read_text() for host in ("node1", "node2"))
    assert merge(input=both).stdout == done.stdout  # cat *.json | rdmafork doctor --merge
    files = [str(tmp_path / "node1.json"), str(tmp_path / "node2.json")]
    quiet = merge(*files, "-q").stdout
    assert command("doctor", "--merge", "-q", *files).stdout == quiet
    assert command("doctor", *files, "--merge", "-q").stdout == quiet
    as_json = json.loads(merge(str(tmp_path / "node1.json"), "--json").stdout)
    assert as_json["summary"] == "1 host" and as_json["counts"] == document["counts"]


def test_quiet_is_silent_where_all_is_well():
    done = merge("-q", input=printed(0, GOOD, size=1))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "text",
    ["", "\n", "null", "[]", "{", '{"rank": 0}', '{"rank": "x", "size": 1, "host": "a"}',
     '{"rank": {}, "host": 1, "rows": [1]}', "[" * 100_000, '{"rank": 1, "size": 2, "host": "a",'
     '"what": "w", "status": "fine", "evidence": "", "cure": null, "section": ""}', "\udcff"],
)  # fmt: skip
def test_a_file_without_answers_ends_in_a_sentence(text, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(text.encode(errors="surrogateescape"))
    done = merge(str(file))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("rdmafork doctor: no output of rdmafork doctor --json was found")


def test_a_missing_file_is_told(tmp_path):
    done = merge(str(tmp_path / "file"))
    assert (done.returncode, done.stderr) == (
        2,
        f"rdmafork doctor: {tmp_path}/file: No such file or directory\n",
    )
    done = merge("/no/such/file")
    assert (done.returncode, done.stderr) == (
        2,
        "rdmafork doctor: /no/such/file: there is no directory /no/such\n",
    )
    assert "--merge and --pid cannot be combined" in merge("--pid", "1").stderr
    assert command("doctor", "r.json").stderr == "rdmafork doctor: to read r.json, add --merge\n"


def test_a_name_cannot_paint_the_terminal(tmp_path):
    found = merged(tmp_path, printed(0, ok("\033[31m", "x\n"), host="\033c", size=1))
    assert found.rows == [ok("\\x1b[31m", "x\\x0a")]
    assert launchers.host().isprintable()
