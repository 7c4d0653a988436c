"""Results as figures: a line a peer, named where it ends, with its quartiles.

matplotlib is imported where something is drawn.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rdmafork.cli import terminal

from ._facts import in_words
from ._measures import middle, quartiles

Row = dict[str, Any]

# After Okabe and Ito, to be told apart by everybody: blues are rdmafork, reds libibverbs, and a
# peer looks the same in every figure.
COLOURS = {
    "rdmafork lazy": "#0072B2",
    "rdmafork lazy, Python": "#56B4E9",
    "rdmafork eager": "#1B3A5C",
    "rdmafork eager, Python": "#7A9CC6",
    "rdmafork whole pages": "#44AA99",
    "libibverbs": "#D55E00",
    "libibverbs, huge pages safe": "#E69F00",
    "null system call": "#777777",
    "memoryview, Python": "#CC79A7",
    "not registered": "#882255",
}
OTHERS = ("#009E73", "#8C6D31", "#999933")
BLACK = "#000000"
# Colours for a reader with a dark theme; other colours can be read on either.
DARK = {
    "#ffffff": "#131416",
    "#000000": "#e4e4e4",
    "#333333": "#cccccc",
    "#777777": "#a0a0a0",
    "#e4e4e4": "#3a3d41",
    "#0072b2": "#3b9fe0",
    "#1b3a5c": "#a9c4ea",
    "#882255": "#d977a8",
    "#8c6d31": "#c09a50",
}
NAME_SIZE, FOOT_SIZE = 6.5, 6
CHARACTERS = 24  # of the foot, to an inch
STYLE: dict[str, Any] = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.4,
    "lines.markersize": 3,
    "svg.fonttype": "none",
    "svg.hashsalt": "rdmafork",  # the same figure, the same file
}


class NoPlots(Exception):
    """matplotlib is not there."""


class Panel(NamedTuple):
    title: str  #: or the label of the x axis, where that has none
    rows: list[Row]
    notes: Mapping[str, str] = MappingProxyType({})  #: what to say behind a peer's name


class Axis(NamedTuple):
    key: str  #: of the rows: a parameter, or a measure
    label: str
    log: bool = True
    nbytes: bool = False  #: ticks are sizes
    unit: float = 1  #: of the label, in that of the rows: 1e6 makes nanoseconds milliseconds


def require() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise NoPlots(
            "figures need matplotlib, which is not installed: pip install 'rdmafork[bench]'"
        ) from None


def lines(
    path: Path, document: dict[str, Any], panels: Sequence[Panel], x: Axis, y: Axis, floor: str
) -> list[Path]:
    """One figure, its panels side by side with one y axis; [path], or none without any rows."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = [p._replace(rows=[row for row in p.rows if y.key in row]) for p in panels]
    panels = [panel for panel in panels if panel.rows]
    if not panels:
        return []
    peers = list(dict.fromkeys(row["line"] for panel in panels for row in panel.rows))
    colours = coloured(peers, floor)
    with matplotlib.rc_context(STYLE):
        size = (0.8 + 3.6 * len(panels), 3.8)
        figure, axes = pyplot.subplots(1, len(panels), sharey=True, figsize=size, squeeze=False)
        ends = []
        for panel, axis in zip(panels, axes[0], strict=True):
            prepare(axis, panel, x, y)
            for peer in dict.fromkeys(row["line"] for row in panel.rows):
                rows = [row for row in panel.rows if row["line"] == peer]
                dash = "--" if peer == floor else "-"
                name = peer + panel.notes.get(peer, "")
                ends.append((axis, name, *one_line(axis, rows, x, y, colours[peer], dash)))
            name_ticks(axis, panel, x)
        axes[0][0].set_ylabel(y.label)
        figure.tight_layout(w_pad=max(map(len, peers)) * 0.45)
        for axis in axes[0]:
            label(axis, [end[1:] for end in ends if end[0] is axis])
        finish(figure, document, path, f"; dashed: {floor}")
    return [path]


@contextmanager
def bars(path: Path, document: dict[str, Any], count: int) -> Iterator[Any]:
    """The axes for so many horizontal bars; the figure is written to path when they are drawn."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(STYLE):
        figure, axis = pyplot.subplots(figsize=(7, 1 + 0.4 * count))
        axis.grid(axis="y", visible=False)
        yield axis
        figure.tight_layout()
        finish(figure, document, path)


def coloured(peers: list[str], floor: str) -> dict[str, str]:
    others = cycle(OTHERS)
    return {peer: BLACK if peer == floor else COLOURS.get(peer) or next(others) for peer in peers}


def prepare(axis: Any, panel: Panel, x: Axis, y: Axis) -> None:
    axis.set_title(panel.title if x.label else "", fontsize=8, loc="left")
    axis.set_xlabel(x.label or panel.title)
    axis.set_xscale("log", base=2 if x.nbytes else 10) if x.log else None
    axis.set_yscale("log") if y.log else axis.set_ylim(bottom=0)


def name_ticks(axis: Any, panel: Panel, x: Axis) -> None:
    """Each x there is, from the last one on, but without names that would lie upon others."""
    values = sorted({row[x.key] for row in panel.rows})
    names = [tick(x, value) for value in values]
    character = 0.65 * STYLE["font.size"] * axis.figure.dpi / 72
    free = float("inf")  # to the left of this
    for at in range(len(values) - 1, -1, -1):
        place, half = axis.transData.transform((values[at], 1))[0], len(names[at]) * character / 2
        if place + half > free:
            names[at] = ""
        else:
            free = place - half
    axis.set_xticks(values, names)
    axis.minorticks_off()


def tick(axis: Axis, value: float) -> str:
    return terminal.size(value).replace(" ", "\u2009") if axis.nbytes else f"{value:,}"


def one_line(
    axis: Any, rows: list[Row], x: Axis, y: Axis, colour: str, dash: str
) -> tuple[float, float, str]:
    """Draws a peer; where its line ends, and its colour."""
    rows = sorted(rows, key=lambda row: row[x.key])
    xs, ys = [row[x.key] for row in rows], [middle(row[y.key]) / y.unit for row in rows]
    spread = [quartiles(row[y.key]) for row in rows]
    axis.plot(xs, ys, marker="o", color=colour, linestyle=dash)
    low, high = ([quartile / y.unit for quartile in ends] for ends in zip(*spread, strict=True))
    axis.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
    return xs[-1], ys[-1], colour


def label(axis: Any, ends: list[tuple[str, float, float, str]]) -> None:
    """Each line's name behind its end, pushed up where names would lie upon each other."""
    height = axis.figure.dpi * NAME_SIZE * 1.15 / 72
    lowest = float("-inf")
    for peer, x, y, colour in sorted(ends, key=lambda end: end[2]):
        at = axis.transData.transform((x, y))[1]
        lowest = max(at, lowest + height)
        axis.annotate(
            peer,
            (x, y),
            xytext=(6, (lowest - at) * 72 / axis.figure.dpi),
            textcoords="offset points",
            fontsize=NAME_SIZE,
            color=colour,
            va="center",
            annotation_clip=False,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )


def finish(figure: Any, document: dict[str, Any], path: Path, line: str = "") -> None:
    """Adds the facts of the measurement below the figure, no wider than it, and writes it."""
    from matplotlib import pyplot

    what = f"medians and quartiles of {document['rounds']} rounds{line}"
    foot = f"{what}. {in_words(document['machine'])}, rdmafork {document['commit']}"
    width = int(figure.get_figwidth() * CHARACTERS)
    text = "\n".join(textwrap.wrap(foot, width, break_on_hyphens=False))
    figure.text(0.01, -0.01, text, fontsize=FOOT_SIZE, color="#777777", va="top")
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)
    if path.suffix == ".svg":
        path.write_text(in_both_themes(path.read_text()))


def in_both_themes(svg: str) -> str:
    """With a style of its own, as a page's does not reach into an image."""
    rules = [
        f'[style*="{what}: {light}"] {{ {what}: {dark} !important }}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
        if f"{what}: {light}" in svg
    ]
    # Text without a colour is black, and its style names none.
    rules.insert(0, f"svg {{ fill: {DARK[BLACK]} }}")
    style = "\n".join(["@media (prefers-color-scheme: dark) {", *rules, "}"])
    return svg.replace("</style>", f"\n{style}</style>", 1)
