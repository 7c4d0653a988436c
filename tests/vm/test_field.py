"""Programs that nobody here wrote, alone and under "rdmafork exec": make tried-with.

A row for each is left beside the report on the tests, as tried/NAME.json; docs/tried_with.py makes
a page of them. FIELD is a virtual environment of its own, which the Makefile fills from PyPI.
"""

import json
import mmap
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import SLOWNESS, environment

import rdmafork

ROOT = Path(__file__).resolve().parents[2]
FIELD = ROOT / "build/field"
FORKS = ROOT / "tests/vm/field/forks.py"
LIMIT = 15 * SLOWNESS
NBYTES, PAGE = 64 << 20, mmap.PAGESIZE
# What perftest says, and gives up, where a busy machine's clock is not steady.
NOISE, TRIES = "Correlation coefficient", 8
EXEC = [sys.executable, "-m", "rdmafork", "exec", "--report"]


class Program(NamedTuple):
    name: str
    package: str
    registers: str
    command: str = ""  # "": a library, which forks.py calls; else one that runs as two processes
    client: str = "10.77.0.1"  # what is added for the second
    shows: str = ""  # what the client prints when it has worked
    env: dict[str, str] | None = None

    @property
    def source(self):
        return "Debian" if self.command else "PyPI"


PROGRAMS = [
    Program("dlslime", "dlslime", "`ibv_reg_mr()`, from C++"),
    Program("ibverbs", "ibverbs", "`dlsym()` of libibverbs, from Cython"),
    Program(
        "mooncake", "mooncake-transfer-engine-non-cuda",
        "`ibv_fork_init()`, `ibv_reg_mr()`, from C++", env={"MC_GID_INDEX": "1"},
    ),
    Program(
        "ib_write_bw", "perftest", "`ibv_reg_mr()`", shows="65536",
        command="ib_write_bw -d {device} -x 1 -n 100 -s 65536",
    ),
    Program(
        "UCX, tag_bw", "ucx-utils", "ucp, its cache of registrations", shows="Final:",
        command="ucx_perftest -p {port}", client="127.0.0.1 -t tag_bw -s 65536 -n 50 -w 5",
        # See test_exec_ucx.py.
        env={
            "UCX_UD_VERBS_ETH_DGID_CHECK": "n", "UCX_TLS": "rc_verbs,ud_verbs",
            "UCX_NET_DEVICES": "{device}:1",
        },
    ),
    Program(
        "fi_pingpong", "libfabric-bin", "libfabric's verbs provider", shows="64k",
        command="fi_pingpong -p verbs -e msg -d {device} -I 10 -S 65536",
    ),
]  # fmt: skip


def version(program):
    """Of what is installed, or None."""
    if program.source == "PyPI":
        stem = program.package.replace("-", "_")
        found = [
            path.name.removeprefix(f"{stem}-").removesuffix(".dist-info")
            for path in FIELD.glob(f"lib/python3*/site-packages/{stem}-*.dist-info")
        ]
        return found[0] if found else None
    query = ["dpkg-query", "-W", "-f", "${db:Status-Status} ${Version}", program.package]
    status, _, number = subprocess.run(query, capture_output=True, text=True).stdout.partition(" ")
    return number if status == "installed" else None


def run_library(program, device, before, env):
    command = [*before, FIELD / "bin/python", FORKS, program.name, device]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def run_pair(program, device, before, env):
    """A server, and a client until it is let in, and until the machine's clock is steady."""
    for _ in range(TRIES):
        status, output = one_pair(program, device, before, env)
        if NOISE not in output:
            break
    assert status == 0 and program.shows in output, output[-2000:]
    return {"worked": True}


def one_pair(program, device, before, env):
    port = 20000 + os.getpid() % 10000
    words = program.command.format(device=device, port=port).split()
    last = program.client.split()
    if "{port}" in program.command:
        last += ["-p", str(port)]
        client_words = [words[0], *last]
    else:
        client_words = [*words, *last]

    def start(command):
        return subprocess.Popen(
            [*before, *command], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip

    server, deadline = start(words), time.monotonic() + LIMIT
    try:
        while True:
            client = start(client_words)
            output = client.communicate(timeout=LIMIT)[0]
            if not client.returncode or time.monotonic() > deadline or server.poll() is not None:
                break
            time.sleep(0.5)
        if client.returncode == 0:
            status = server.wait(timeout=LIMIT)
            return status, output if status == 0 else server.stdout.read()
        return client.returncode, output
    finally:
        server.kill()
        server.communicate()


def checked(program, found, lines):
    """The report is true of what the program did."""
    assert lines
    for line in lines:
        assert not line["errors"] and not line["unbalanced"], line
    used = [line for line in lines if line["registrations"]["total"]]
    assert {library["how"] for line in used for library in line["libraries"]} == {"ours"}
    if program.command:
        assert len(used) >= 2
        for line in used:
            assert line["registrations"]["live"] == 0, line
        return used
    (parent,) = [line for line in used if line["forks"] >= 4]
    absent, left = parent["absent_bytes"]["last"], parent["left_bytes"]
    assert absent >= NBYTES and found["kept"] == NBYTES >> 10
    # What is pinned is known, but for the first and the last page of each registration: VmPin
    # counts them again where two registrations share one.
    edges = 2 * parent["registrations"]["total"] * PAGE
    assert absent + left >= (found["pinned"] << 10) - edges, (absent, left, edges, found)
    return [parent]


def remarks(alone, inside):
    """What a program's user would have seen."""
    for what in ("during", "after", "after_destructors"):
        assert inside[what] == "arrived", (what, inside)
    said = []
    if alone["after_destructors"] != "arrived":
        said.append("alone, a child's `exit()` destroys the parent's objects")
    if alone["kept"] >= NBYTES >> 10:
        said.append("protects its memory itself")
    if alone["destructors"]:
        said.append(f"a child's `exit()` dies of signal {-alone['destructors']}, alone too")
    return said


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_alone_and_under_exec(program, device, tmp_path, request):
    row = {
        "program": program.name, "package": program.package, "source": program.source,
        "registers": program.registers, "version": version(program),
        "kernel": os.uname().release, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    place = Path(request.config.option.xmlpath or tmp_path / "x").parent / "tried"
    place.mkdir(exist_ok=True)
    file = place / f"{re.sub(r'[^a-z0-9]+', '-', program.name.lower())}.json"
    file.write_text(json.dumps(row | {"result": "failed"}))
    if not row["version"]:
        file.write_text(json.dumps(row | {"result": "not tested"}))
        pytest.skip(f"{program.package} is not installed ({program.source})")
    env = environment({k: v.format(device=device) for k, v in (program.env or {}).items()})
    run, report = (run_pair if program.command else run_library), tmp_path / "report"
    alone = run(program, device, [], env)
    inside = run(program, device, [*EXEC, str(report), "--"], env)
    used = checked(program, inside, [json.loads(line) for line in report.read_text().splitlines()])
    if program.command:
        forks = sum(line["forks"] for line in used)
        row |= {
            "result": "works",
            "remarks": [f"forks {forks} times" if forks else "does not fork"],
        }
    else:
        assert alone["before"] == inside["before"] == "arrived", (alone, inside)
        # Where the kernel copies nothing, a program alone may lose data.
        copied = rdmafork.kernel_info().copy_on_fork
        for what in ("ended", "destructors", *["during", "after"] * copied):
            assert inside[what] == alone[what], (what, alone, inside)
        row |= {
            "result": "works", "remarks": remarks(alone, inside), "alone": alone, "exec": inside,
        }  # fmt: skip
    row["registrations"] = sum(line["registrations"]["total"] for line in used)
    file.write_text(json.dumps(row))
    if not program.command and copied and alone["kept"] < NBYTES >> 10:
        assert inside["fork_ms"] < alone["fork_ms"] / 3
