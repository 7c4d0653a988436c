"""UCX, unmodified, under "rdmafork exec"."""

import json
import shutil
import socket
import subprocess
import sys

import pytest
from conftest import SLOWNESS, environment

from vm.rc import eventually

PROGRAM = "ucx_perftest"
NBYTES = 65536
SIZES = ["-s", str(NBYTES), "-n", "50", "-w", "5"]
# The transport itself, and ucp, whose wire-up takes unreliable datagrams: UCX's check of the GID
# that these were sent to refuses soft-RoCE's, with rdmafork and without.
WORK = {
    "uct": ["-x", "rc_verbs", "-t", "put_bw", "-D", "zcopy", *SIZES],
    "ucp": ["-t", "tag_bw", *SIZES],
}
ENV = {"UCX_UD_VERBS_ETH_DGID_CHECK": "n", "UCX_TLS": "rc_verbs,ud_verbs"}


def start(report, *arguments):
    command = [sys.executable, "-m", "rdmafork", "exec", "--report", str(report), "--"]
    return subprocess.Popen(
        [*command, PROGRAM, *arguments], env=environment(ENV), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def listens(port):
    """Is it there to connect to? Known without a connection, of which it takes one."""
    with open("/proc/net/tcp") as file:
        return any(f":{port:04X} " in line and line.split()[3] == "0A" for line in file)


@pytest.mark.parametrize("level", WORK)
def test_ucx_registers_here(device, tmp_path, level):
    """It asks for no protection where it is told that none is needed, and has it all the same."""
    if not shutil.which(PROGRAM):
        pytest.skip(f"{PROGRAM} is not installed (Debian: ucx-utils)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    report, limit = tmp_path / "report", 60 * SLOWNESS
    chosen = ["-d", f"{device}:1"] if level == "uct" else []
    server = start(report, "-p", str(port))
    try:
        assert eventually(lambda: listens(port), True, limit)
        client = start(report, "127.0.0.1", "-p", str(port), *chosen, *WORK[level])
        output = client.communicate(timeout=limit)[0]
        assert client.returncode == 0, output
        assert "Final:" in output
        assert server.wait(timeout=limit) == 0, server.stdout.read()
    finally:
        server.kill()
        server.communicate()
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    assert [line["program"] for line in lines] == [PROGRAM] * 2
    for line in lines:
        assert line["registrations"]["total"] > 0
        assert line["ranges"] == {"calls": 2 * line["registrations"]["total"], "live": 0}
        assert [library["how"] for library in line["libraries"]] == ["ours"]
        assert not line["unbalanced"] and not line["errors"]
