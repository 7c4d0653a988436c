"""A program that is linked statically with libibverbs: exec cannot protect it, and says so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TIMEOUT, compile_c, environment

import rdmafork
from rdmafork.cli import main

RDMAFORK = [sys.executable, "-m", "rdmafork"]
# The driver is the one of soft-RoCE; libibverbs has no list of drivers inside a program.
STATIC = [
    "-DRDMA_STATIC_PROVIDERS=rxe", "-Wl,-Bstatic", "-libverbs", "-lrxe-rdmav34", "-libverbs",
    "-lnl-route-3", "-lnl-3", "-Wl,-Bdynamic", "-lpthread",
]  # fmt: skip


@pytest.fixture
def program(device, tmp_path):
    if not device.startswith("rxe"):
        pytest.skip(f"the driver of {device} is not linked in")
    source = Path(__file__).with_name("static.c")
    try:
        return compile_c(tmp_path / "static", source, *STATIC)
    except subprocess.CalledProcessError:
        pytest.skip("no static libibverbs (Debian: libibverbs-dev, libnl-route-3-dev)")


def test_a_static_libibverbs_is_told_by_the_report_and_by_doctor(device, program, tmp_path, capsys):
    path = tmp_path / "r.json"
    process = subprocess.Popen(
        [*RDMAFORK, "exec", "--report", str(path), "--", program, device],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment({}),
    )  # fmt: skip
    assert process.stdout.readline() == "registered\n"
    main(["doctor", "--pid", str(process.pid)])
    looked = " ".join(capsys.readouterr().out.split())
    process.communicate("\n", timeout=TIMEOUT)
    assert process.returncode == 0
    (line,) = map(json.loads, path.read_text().splitlines())
    assert line["device_without_libibverbs"] == 1 and not line["libraries"]
    assert line["pinned_elsewhere"]["max"] >= 8 << 20
    assert main(["report", str(path)]) == 1
    told = " ".join(capsys.readouterr().out.split())
    does = "copies" if rdmafork.kernel_info().copy_on_fork_trusted else "may lose"
    assert "at least 8 MiB pinned by something that does not call libibverbs" in told, told
    assert f"fork() {does} the private part of it" in told
    assert "a device was open and no libibverbs was found" in told
    # Elsewhere exec has told the static libibverbs to mark its memory: not all of it may be lost.
    some = "8 MiB " if rdmafork.kernel_info().copy_on_fork_trusted else "MiB "
    assert f"{some}pinned by something that does not call libibverbs" in looked, looked
