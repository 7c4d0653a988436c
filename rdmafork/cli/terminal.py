"""Words for a terminal: units, colours only where they are wanted, progress."""

from __future__ import annotations

import argparse
import difflib
import errno
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from typing import TextIO

_COLOURS = {"bold": "1", "red": "31", "green": "32", "yellow": "33"}


def add_color(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="auto, the default: on a terminal only, and not with NO_COLOR",
    )


def wants_colour(stream: TextIO, color: str = "auto") -> bool:
    """auto: only a terminal, and only if its user did not say otherwise (no-color.org)."""
    if color != "auto":
        return color == "always"
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Paint:
    """paint("text", "red"): the text, coloured if the stream wants it, or not with None."""

    def __init__(self, stream: TextIO, color: str = "auto") -> None:
        self._on = wants_colour(stream, color)

    def __call__(self, text: str, colour: str | None) -> str:
        return f"\033[{_COLOURS[colour]}m{text}\033[0m" if self._on and colour else text


class Progress:
    """One line on stderr that names the step under way; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        self._on = sys.stderr.isatty()

    def __call__(self, text: str = "") -> None:
        if self._on:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


WIDTH = 80


def wrap(text: str, indent: str = "", first: str | None = None) -> list[str]:
    """Lines of the width, the first behind first; paths and commands whole, to be copied."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """ " Did you mean doctor?", or nothing where no word is near."""
    near = difflib.get_close_matches(word, words, n=1)
    return f" Did you mean {near[0]}?" if near else ""


def printable(text: str) -> str:
    """Bytes of names that are no UTF-8 as \\xff, control characters as \\x1b."""
    return re.sub("[\0-\x1f\x7f-\x9f\udc80-\udcff]", lambda c: f"\\x{ord(c[0]) & 0xFF:02x}", text)


UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def size(nbytes: float) -> str:
    """1073741824 -> "1 GiB", 37000 -> "36.1 KiB"."""
    power = 0
    while nbytes >= 1000 and power < len(UNITS) - 1:
        nbytes /= 1024
        power += 1
    unit = "byte" if nbytes == 1 and not power else UNITS[power]
    return f"{nbytes:.1f}".removesuffix(".0") + f" {unit}"


def parse_size(text: str) -> int:
    """ "1GiB", "512 MiB", "64K", "1048576" -> bytes. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    nbytes = float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " ") if found else 0
    if not 1 <= nbytes < 1 << 63:
        raise ValueError(f"{text!r} is not a size such as 512MiB or 1GiB")
    return int(nbytes)


def why(error: OSError, name: str) -> str:
    """Why a file cannot be opened. A missing directory is told as one."""
    directory = os.path.dirname(name)
    if error.errno == errno.ENOENT and directory and not os.path.isdir(directory):
        return f"there is no directory {directory}"
    return error.strerror or str(error)


def counted(count: int, noun: str) -> str:
    """ "no mappings", "1 mapping", "1,234 mappings"."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{f'{count:,}' if count else 'no'} {noun}{'' if count == 1 else plural}"


def duration(ns: float) -> str:
    """One by itself: "2,651 ms", "0.25 ms", "4.20 us". For a column there is durations()."""
    return f"{digits(ns / 1e6)} ms" if ns >= 1e5 else f"{digits(ns / 1e3)} us"


def nanoseconds(ns: float) -> str:
    return f"{ns:,.0f} ns" if ns >= 10 else f"{ns:.1f} ns"


_TIMES = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}


def durations(column: Iterable[float]) -> Callable[[float], str]:
    """A function that prints the nanoseconds of a column, all in one unit that suits them."""
    values = [abs(ns) for ns in column if ns]
    unit, ns_each = "ns", 1.0
    for name, ns in _TIMES.items():
        if values and max(values) >= 10_000 * ns_each and min(values) >= 0.01 * ns:
            unit, ns_each = name, ns
    return lambda ns: f"{digits(ns / ns_each, whole=unit == 'ns')} {unit}"


def digits(value: float, whole: bool = False) -> str:
    """Two or three of them: "1,962", "24.7", "1.04", "0.0087"."""
    size = abs(value)
    if size >= 100 or value == 0 or (whole and size >= 10):
        return f"{value:,.0f}"
    if size >= 0.1:
        return f"{value:.{1 if size >= 10 else 2}f}"
    return f"{value:.{min(1 - math.floor(math.log10(size)), 9)}f}"


def ratio(value: float, base: float) -> str:
    """How many times the base: "1.04x", "1,962x", "0.0040x"."""
    times = value / base
    return f"{times:,.0f}x" if times >= 10 else f"{digits(times)}x"
