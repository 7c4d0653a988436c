"""Programs that nobody here wrote, alone and under "rdmafork exec": make tried-with.

A row for each is left beside the report on the tests, as tried/NAME.json; docs/tried_with.py makes
a page of them. FIELD is a virtual environment of its own, which vm.mk fills from PyPI.
"""

import contextlib
import json
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import SLOWNESS, environment
from mpi import mpirun

import rdmafork

ROOT = Path(__file__).resolve().parents[2]
FIELD = ROOT / "build/field"
SCRIPTS = ROOT / "tests/vm/field"
LIMIT = 15 * SLOWNESS
NBYTES, PAGE = 64 << 20, mmap.PAGESIZE
# perftest says so and gives up where a busy machine's clock is not steady.
NOISE, TRIES = "Correlation coefficient", 8
EXEC = [sys.executable, "-m", "rdmafork", "exec", "--report"]
DEBIAN_PYTHON = "/usr/bin/python3"
AFTER_FORKS = ("during", "after", "after_destructors")
SYSFS = Path("/sys/class/infiniband")


def run_library(program, device, before, env, folder):
    """The findings of forks.py, a dictionary for each process."""
    python = FIELD / "bin/python" if program.source == "PyPI" else DEBIAN_PYTHON
    command = [*before, python, SCRIPTS / "forks.py", program.name, device]
    if program.ranks:
        output = mpirun(program.ranks, *command, env=env, program="/usr/bin/mpirun")
        return [json.loads(line) | {"status": 0} for line in output.splitlines()]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert found, done.stderr[-2000:]
    return [json.loads(found[0]) | {"status": done.returncode}]


def run_pair(program, device, before, env, folder):
    """A server, and a client until it is let in, and until the machine's clock is steady."""
    for _ in range(TRIES):
        status, output = one_pair(program, device, before, env)
        if NOISE not in output:
            break
    assert status == 0 and program.shows in output, output[-2000:]


def one_pair(program, device, before, env):
    places = {"device": device, "port": 20000 + os.getpid() % 10000, "field": SCRIPTS}
    command = program.command.format(**places)

    def start(words):
        return subprocess.Popen(
            [*before, *words.split()], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip

    server, deadline = start(command), time.monotonic() + LIMIT
    try:
        while True:
            client = start(program.client.format(command=command, **places))
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


def run_suite(program, device, before, env, folder, only=()):
    """How each of rdma-core's tests ends, which Debian has among pyverbs' documents."""
    tests = folder / "tests"
    if not tests.exists():
        shutil.copytree("/usr/share/doc/rdma-core/tests", tests)
        subprocess.run(["gunzip", *tests.glob("*.gz")], check=True)
        # They look up a device's network interface where soft-RoCE's is not.
        parent, base = SYSFS / device / "parent", tests / "base.py"
        if parent.exists():
            (folder / "net" / parent.read_text().strip()).mkdir(parents=True)
            source = base.read_text()
            base.write_text(source.replace(f"{SYSFS}/{{}}/device/net/", f"{folder}/net"))
    command = [DEBIAN_PYTHON, "run_tests.py", "-v", *f"--dev {device} --port 1 --gid 1".split()]
    for name in only:
        command += ["-k", name]
    # A test that hangs in the kernel outlives SIGKILL and keeps a pipe open: no pipe, no waiting.
    output = folder / "output.txt"
    with output.open("w") as file:
        suite = subprocess.Popen(
            [*before, *command], cwd=tests, env=env, stdout=subprocess.DEVNULL, stderr=file
        )
        try:
            suite.wait(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            suite.kill()
            pytest.fail(f"hung for {LIMIT:.0f} s\n{output.read_text()[-2000:]}")
    said = output.read_text()
    # A test's own output stands between its name and its result.
    each = re.split(r"^test_\w+ \(", said.partition("\n======")[0], flags=re.M)[1:]
    ends = [
        (test.partition(")")[0], ended[1])
        for test in each
        if (ended := re.search(r" \.\.\. (?:.|\n)*?\b(ok|skipped|FAIL|ERROR)\b", test))
    ]
    (count,) = re.findall(r"^Ran (\d+) tests?", said, re.M)
    assert len(dict(ends)) == int(count), said[-2000:]
    return dict(ends)


def preloaded_rsockets(device, folder):
    (library,) = Path("/usr/lib").glob("*/rsocket/librspreload.so")
    return {"LD_PRELOAD": str(library)}


def gloo_for_python(device, folder):
    """gloo is C++, and has no Python of its own."""
    shim, source = folder / "gloo.so", SCRIPTS / "gloo.cc"
    command = ["c++", "-O1", "-shared", "-fPIC", source, "-lgloo", "-libverbs", "-o", shim]
    subprocess.run(command, check=True)
    return {"GLOO": str(shim)}


def driver_for_nixl(device, folder):
    """nixl has a libibverbs of another name and no drivers: Debian's, made to need that one."""
    (library,) = FIELD.glob("lib/python3*/site-packages/nixl_cu12.libs/libibverbs-*.so*")
    for driver in Path("/usr/lib").glob("*/libibverbs/librxe-rdmav*.so"):
        there = ["--output", folder / driver.name, driver]
        subprocess.run(
            ["patchelf", "--replace-needed", "libibverbs.so.1", library.name, *there], check=True
        )
    return {"LD_LIBRARY_PATH": str(folder)}


class Program(NamedTuple):
    name: str
    package: str
    source: str
    registers: str
    run: Callable = run_library
    command: str = ""  # of a pair's server
    client: str = "{command} 10.77.0.1"
    shows: str = ""  # what the client prints when it has worked
    ranks: int = 0
    env: dict[str, str] | None = None
    prepare: Callable | None = None  # gives more of the environment


# See test_exec_ucx.py.
UCX = {
    "UCX_UD_VERBS_ETH_DGID_CHECK": "n", "UCX_TLS": "rc_verbs,ud_verbs",
    "UCX_NET_DEVICES": "{device}:1",
}  # fmt: skip
# UCX would take its own memory from the pool of huge pages: shared, and so never copied by a fork.
PRIVATE = {f"UCX_{transport}_VERBS_ALLOC": "thp,mmap,heap" for transport in ("RC", "UD")}
PROGRAMS = [
    Program("dlslime", "dlslime", "PyPI", "`ibv_reg_mr()`, from C++"),
    Program("ibverbs", "ibverbs", "PyPI", "`dlsym()` of libibverbs, from Cython"),
    Program(
        "mooncake", "mooncake-transfer-engine-non-cuda", "PyPI",
        "`ibv_fork_init()`, `ibv_reg_mr()`, from C++", env={"MC_GID_INDEX": "1"},
    ),
    Program(
        "nixl", "nixl-cu12", "PyPI", "UCX, with a libibverbs of its own", env=UCX,
        prepare=driver_for_nixl,
    ),
    Program(
        "gloo", "libgloo0", "Debian", "`ibv_reg_mr()`, from C++", prepare=gloo_for_python
    ),
    Program(
        "Open MPI", "openmpi-bin", "Debian", "UCX, a window of one-sided communication", ranks=2,
        env=UCX | PRIVATE | {"OMPI_MCA_pml": "ucx", "OMPI_MCA_osc": "ucx"},
    ),
    Program(
        "rdma-core's tests", "python3-pyverbs", "Debian", "pyverbs", run=run_suite,
    ),
    Program(
        "librspreload", "librdmacm1", "Debian", "rsockets, in the child that serves a connection",
        run=run_pair, command="/usr/bin/python3 {field}/echo.py server {port}",
        client="/usr/bin/python3 {field}/echo.py client {port}",
        shows="echoed over /dev/infiniband",
        env={"RDMAV_FORK_SAFE": "1"}, prepare=preloaded_rsockets,
    ),
    Program(
        "ib_write_bw", "perftest", "Debian", "`ibv_reg_mr()`", run=run_pair, shows="65536",
        command="ib_write_bw -d {device} -x 1 -n 100 -s 65536",
    ),
    Program(
        "UCX, tag_bw", "ucx-utils", "Debian", "ucp, its cache of registrations", run=run_pair,
        command="ucx_perftest -p {port}", shows="Final:", env=UCX,
        client="ucx_perftest -p {port} 127.0.0.1 -t tag_bw -s 65536 -n 50 -w 5",
    ),
    Program(
        "fi_pingpong", "libfabric-bin", "Debian", "libfabric's verbs provider", run=run_pair,
        command="fi_pingpong -p verbs -e msg -d {device} -I 10 -S 65536", shows="64k",
    ),
]  # fmt: skip


def version(program):
    """The version of an installed package, or None."""
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


def worst(processes):
    """One program's processes as one: the slowest, and all bytes that any of them missed."""
    found = max(processes, key=lambda one: one["fork_ms"])
    for what in ("before", *AFTER_FORKS):
        missed = [one[what] for one in processes if one[what] != "arrived"]
        found[what] = (missed or ["arrived"])[0]
    found["destructors"] = next(filter(None, (one["destructors"] for one in processes)), 0)
    return found


def checked(program, found, lines):
    """The report is true of what the program did; its lines on those that registered memory."""
    assert lines, found
    trusted = rdmafork.kernel_info().copy_on_fork_trusted
    for line in lines:
        # Where whole pages are marked, blocks of malloc() are a danger that it tells of.
        errors = [error for error in line["errors"] if trusted or "malloc()'s" not in error]
        assert not errors and not line["unbalanced"], line
    used = [line for line in lines if line["registrations"]["total"]]
    assert {library["how"] for line in used for library in line["libraries"]} == {"ours"}
    if program.run is not run_library:
        assert len(used) >= (2 if program.run is run_pair else 1)
        for line in used:
            assert line["registrations"]["live"] == 0, line
        return used
    by_pid = {line["pid"]: line for line in used}
    assert len(found) == (program.ranks or 1)
    parents = [by_pid[one.pop("pid")] for one in found]
    for one, line in zip(found, parents, strict=True):
        assert line["forks"] >= 4
        marked, unmarked = line["marked_bytes"]["last"], line["unmarked_bytes"]
        assert marked >= NBYTES and one["kept"] == NBYTES >> 10
        # What is pinned is known, but for the first and the last page of each registration: VmPin
        # counts them again where two registrations share one.
        edges = 2 * line["registrations"]["total"] * PAGE
        assert marked + unmarked >= (one["pinned"] << 10) - edges, (marked, unmarked, edges, one)
    return parents


def death(status):
    """In words; forks.py has an alarm for a call that hangs."""
    if status > 0:
        return f"ends with {status}"
    return "hangs" if status == -signal.SIGALRM else f"dies of signal {-status}"


def remarks(alone, inside):
    """The program's output, as its user would have seen it."""
    for what in AFTER_FORKS:
        assert inside[what] == "arrived", (what, inside)
    said = []
    if alone["after_destructors"] != "arrived":
        said.append("alone, a child's `exit()` destroys the parent's objects")
    if alone["kept"] >= NBYTES >> 10:
        said.append("protects its memory itself")
    if inside["destructors"]:
        dies = f"a child's `exit()` {death(inside['destructors'])}"
        same = inside["destructors"] == alone["destructors"]
        said.append(f"{dies}, alone too" if same else f"under exec {dies}")
    elif alone["destructors"]:
        said.append(f"alone, a child's `exit()` {death(alone['destructors'])}")
    if inside["status"]:
        dies = f"{death(inside['status'])} at its end"
        if inside["status"] == alone["status"]:
            said.append(f"{dies}, alone too")
        else:
            said += [f"alone, {death(alone['status'])} at its end", f"under exec {dies}"]
    return said


def gave_up(found, writes):
    """Has the library itself failed at one? On 6.1 gloo does, 12 times of 40 without rdmafork."""
    return any(one[what] not in ("arrived", "lost") for one in found for what in writes)


def alone_at_last(program, device, env, tmp_path):
    """Without rdmafork; again, as on a busy machine a library may give up, or wait."""
    for _ in range(4):
        with contextlib.suppress(subprocess.TimeoutExpired):
            found = program.run(program, device, [], env, tmp_path)
            if program.run is not run_library or not gave_up(found, ("before", "during", "after")):
                return found
    pytest.skip(f"{program.name} does not connect here, without rdmafork either")


def under_exec(program, device, command, env, tmp_path):
    """What it found, and its report; again where the library gave up, but not for lost bytes."""
    for _ in range(6):
        found = program.run(program, device, command, env, tmp_path)
        reports = list(tmp_path.glob("report*.json"))  # one for each rank
        lines = [json.loads(line) for file in reports for line in file.read_text().splitlines()]
        if program.run is not run_library or not gave_up(found, ("before", *AFTER_FORKS)):
            break
        for file in reports:
            file.unlink()
    return found, lines


def compared(alone, inside):
    """Under exec a library does as well as alone, or better."""
    assert alone["before"] == inside["before"] == "arrived", (alone, inside)
    same = ["ended"]
    if rdmafork.kernel_info().copy_on_fork:  # else a program alone may lose data
        same += ["during", "after"]
    for what in same:
        assert inside[what] == alone[what], (what, alone, inside)
    # A crash as it ends, after all that was asked of it, may come by one signal or another.
    crashed = inside["status"] < 0 and alone["status"] < 0
    assert inside["status"] in (0, alone["status"]) or crashed, (alone, inside)
    if alone["after_destructors"] == "arrived":
        assert inside["destructors"] in (0, alone["destructors"]), (alone, inside)


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
    file.write_text(json.dumps(row | {"result": "not tested"}))
    if not row["version"]:
        pytest.skip(f"{program.package} is not installed ({program.source})")
    more = program.prepare(device, tmp_path) if program.prepare else {}
    env = environment({k: v.format(device=device) for k, v in (program.env or {}).items()} | more)
    command = [*EXEC, str(tmp_path / "report.json"), "--"]
    alone = alone_at_last(program, device, env, tmp_path)
    file.write_text(json.dumps(row | {"result": "failed"}))
    inside, lines = under_exec(program, device, command, env, tmp_path)
    used = checked(program, inside, lines)
    row |= {
        "result": "works", "registrations": sum(line["registrations"]["total"] for line in used),
        "forks": sum(line["forks"] for line in lines),
    }  # fmt: skip
    if program.run is run_library:
        alone, inside = worst(alone), worst(inside)
        alone.pop("pid", None)
        compared(alone, inside)
        row |= {"remarks": remarks(alone, inside), "alone": alone, "exec": inside}
    else:
        for _ in range(3):
            # Some of rdma-core's depend on time: tests that end otherwise run again, both ways.
            if program.run is run_suite and (
                only := [n for n in alone if alone[n] != inside.get(n)]
            ):
                alone |= run_suite(program, device, [], env, tmp_path, only)
                inside |= run_suite(program, device, command, env, tmp_path, only)
        assert alone == inside
        row["remarks"] = [f"forks {row['forks']} times" if row["forks"] else "does not fork"]
        if inside:
            row["remarks"].append(
                ", ".join(f"{n} {end}" for end, n in Counter(inside.values()).most_common())
            )
    file.write_text(json.dumps(row))
    copied = rdmafork.kernel_info().copy_on_fork
    if program.run is run_library and copied and alone["kept"] < NBYTES >> 10:
        assert inside["fork_ms"] < alone["fork_ms"] / 3
