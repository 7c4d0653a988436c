"""rdmafork devices: the RDMA devices of this machine, and why one cannot be used."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

import rdmafork
from rdmafork.cli import terminal

DESCRIPTION = """\
Lists the RDMA devices of this machine, one line for each port. For a device
that this process cannot use it says why, and what to do. It asks the kernel and
opens no device, except with -v and --json to read the MTUs.
"""

EPILOG = """\
examples:
  rdmafork devices                 which devices are there, and do they work?
  rdmafork devices -v              with GUIDs, LIDs, MTUs and the GID tables
  rdmafork devices --json | jq -r '.devices[] | select(.problem == null) .name'

Exit status: 0 at least one device can be used, 1 none can, 2 the kernel has no
RDMA, or the devices cannot be read.
"""

Facts = dict[str, Any]

COLUMNS = (("device", 11), ("port", 5), ("state", 8), ("link", 11), ("rate", 11), ("netdev", 10))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print everything, with GID tables"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    terminal.add_color(parser)


def run(args: argparse.Namespace) -> int:
    problem, devices = None, []
    try:
        devices = rdmafork.get_device_list(all=True)
    except OSError as error:
        problem = error.strerror
    if args.json:
        document = {"devices": [device.as_dict() for device in devices], "problem": problem}
        print(json.dumps(document, indent=2))
    elif problem:
        cure = "modprobe ib_core, or load the driver of the device; `rdmafork doctor` says more"
        print("\n".join(terminal.wrap(f"rdmafork devices: {problem}; {cure}")), file=sys.stderr)
    else:
        paint = terminal.Paint(sys.stdout, args.color)
        show = _details if args.verbose else _table
        print("\n".join(show([_facts(device, args.verbose) for device in devices], paint)))
    if problem:
        return 2
    return 0 if any(device.problem is None for device in devices) else 1


def _facts(device: rdmafork.Device, everything: bool) -> Facts:
    """as_dict(), or the part of it that needs no device opened and no GID table read."""
    if everything:
        return device.as_dict()
    names = ("name", "driver", "pci_address", "netdev", "problem")
    values = {name: (value := device._get(name)) and terminal.printable(value) for name in names}
    ports = device._get("ports") or ()
    return values | {"ports": [_port_facts(port) for port in ports]}


def _port_facts(port: rdmafork.Port) -> Facts:
    state, link_layer = port._get("state"), port._get("link_layer")
    return {
        "number": port.number,
        "state": None if state is None else state.name,
        "link_layer": None if link_layer is None else link_layer.name,
        "rate": port._get("rate"),
    }


# ---- a line a port ----------------------------------------------------------------------

_LINKS = {"INFINIBAND": "InfiniBand", "ETHERNET": "Ethernet", "UNSPECIFIED": "other"}
_STATES = {"ACTIVE": "green", "DOWN": "yellow"}


def _table(devices: list[Facts], paint: terminal.Paint) -> Iterator[str]:
    if devices:
        widths = [
            max([width, *(len(row[i]) + 2 for d in devices for row in _rows(d))])
            for i, (_, width) in enumerate(COLUMNS)
        ]
        titles = "".join(f"{name:{w}}" for (name, _), w in zip(COLUMNS, widths, strict=True))
        yield paint(f"{titles}driver", "bold")
    for device in devices:
        for row in _rows(device):
            cells = [f"{cell:{width}}" for cell, width in zip(row, widths, strict=False)]
            cells[2] = paint(cells[2], _STATES.get(row[2]))
            yield "".join([*cells, row[-1]]).rstrip()
        if device["problem"]:
            yield from _problem(device, paint)
    yield _summary(devices, paint)


def _rows(device: Facts) -> Iterator[tuple[str, ...]]:
    for i, port in enumerate(device["ports"] or [{}]):
        rate = port.get("rate")
        cells = (
            str(port.get("number", "-")),
            port.get("state") or "?",
            _LINKS.get(port.get("link_layer", ""), port.get("link_layer") or "?"),
            "?" if rate is None else f"{rate:g} Gb/s",
        )
        of_all = (device["name"], device["netdev"] or "-", device["driver"] or "-")
        name, netdev, driver = of_all if i == 0 else ("", "", "")
        yield (name, *cells, netdev, driver)


def _problem(device: Facts, paint: terminal.Paint) -> Iterator[str]:
    for line in terminal.wrap(f"cannot be used: {device['problem']}", "  "):
        yield paint(line, "red")


def _summary(devices: list[Facts], paint: terminal.Paint) -> str:
    if not devices:
        text = "The kernel supports RDMA, but has no device: its driver is not loaded, or a"
        return f"{text}\ncontainer was not given one."
    usable = sum(device["problem"] is None for device in devices)
    count = terminal.counted(len(devices), "device")
    if usable == len(devices):
        return f"{count}, {'all usable' if usable > 1 else 'usable'} by this process"
    return paint(f"{count}, {usable or 'none'} usable by this process", "yellow")


# ---- everything -------------------------------------------------------------------------

_FORMS = {"rate": "{:g} Gb/s", "capability_mask": "{:#x}"}


def _details(devices: list[Facts], paint: terminal.Paint) -> Iterator[str]:
    for device in devices:
        yield paint(device["name"], "bold")
        for name, value in device.items():
            if name not in ("name", "ports", "problem") and value is not None:
                yield f"  {name.replace('_', ' '):20}{value}"
        if device["problem"]:
            yield from _problem(device, paint)
        for port in device["ports"] or ():
            yield f"  port {port['number']}"
            for name, value in port.items():
                if name not in ("number", "gids") and value is not None:
                    shown = _FORMS.get(name, "{}").format(value)
                    yield f"    {name.replace('_', ' '):18}{shown}"
            for gid in port["gids"] or ():
                line = f"GID {gid['index']:<3} {gid['gid']:26} {gid['type']:8}"
                yield f"    {line} {gid['netdev'] or ''}".rstrip()
        yield ""
    yield _summary(devices, paint)
