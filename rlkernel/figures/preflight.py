"""Figures of the preflight: the way through the house, and what a message costs on this machine."""

from __future__ import annotations

from matplotlib.patches import FancyBboxPatch

from . import Plot, Rows, Table, style
from . import rows as of

# ---- the way through the house -------------------------------------------------------------------

STATIONS = (
    ("parameters", "typed, checked\nbefore a launch", "notebook, command\nline or sweep"),
    ("cases", "grid, dtype, seed,\nfault: one key each", "experiments/"),
    ("worker", "one torchrun,\nreal processes", "run/"),
    ("record", "a row a case, on disk\nas it ends", "records/"),
    ("page", "figure, table, verdict;\nonly reads the record", "figures/, pages/"),
)


@style.styled
def way(_rows: Rows = ()):
    """The five stations between a question and its page; a case that is known skips the worker."""
    figure = style.canvas(style.WIDTH, 2.35)
    axes = figure.subplots()
    style.bare(axes)
    axes.set_xlim(-0.5, 98.9)
    axes.set_ylim(-3, 33)
    pitch, width = 20.4, 16.2
    for i, (name, what, where) in enumerate(STATIONS):
        x, worker = i * pitch + width / 2 + 0.3, name == "worker"
        face = style.RANKS[0] if worker else style.WHOLE
        ink = style.PAPER if worker else style.INK
        box = FancyBboxPatch(
            (x - width / 2, 5), width, 18, facecolor=face, edgecolor="none",
            boxstyle="round,pad=0,rounding_size=1.2", mutation_aspect=0.9,
        )  # fmt: skip
        axes.add_patch(box)
        axes.text(x, 19.5, name, ha="center", va="center", weight="bold", fontsize=10.5, color=ink)
        axes.text(x, 11.5, what, ha="center", va="center", fontsize=8.5, color=ink, linespacing=1.4)
        axes.text(x, 3.4, where, ha="center", va="top", fontsize=8, color=style.MUTED)
        if i:
            _hop(axes, x - pitch + width / 2, x - width / 2, 14)
    start, end = pitch + width / 2 + 0.3, 3 * pitch + width / 2 + 0.3
    axes.plot([start, start, end], [23, 28, 28], color=style.MUTED, lw=1.2, ls=(0, (3, 2)))
    arrow = {"arrowstyle": "-|>", "color": style.MUTED, "lw": 1.2, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (end, 23), (end, 28), arrowprops=arrow)
    axes.text(
        (start + end) / 2, 29.2,
        "measured before by the same code on the same machine: read, not run",
        ha="center", va="bottom", fontsize=8.5, color=style.MUTED,
    )  # fmt: skip
    return figure


def _hop(axes, start, end, y) -> None:
    arrow = {"arrowstyle": "-|>", "color": style.INK, "lw": 1.6, "shrinkA": 1, "shrinkB": 1}
    axes.annotate("", (end, y), (start, y), arrowprops=arrow)


def way_alt(_rows: Rows = ()) -> str:
    stops = ", then ".join(f"{name} ({what})".replace("\n", " ") for name, what, _ in STATIONS)
    return (
        f"The way from a question to its page: {stops}. A known case goes straight to its record."
    )


def way_table(_rows: Rows = ()) -> Table:
    body = [[part.replace("\n", " ") for part in station] for station in STATIONS]
    return ["station", "what it is", "where it lives"], body


WAY = Plot("The way through the house", way, way_alt, way_table)


# ---- what a message costs ------------------------------------------------------------------------


def _message(row: dict) -> str:
    return _bytes(row["case"]["parameters"]["message"])


def _by_size(rows: Rows) -> dict[int, list[dict]]:
    """Rows of each group size, ascending in the message. Public checks have no message."""
    sent = [row for row in rows if "message" in row["case"]["parameters"]]
    return {p: sorted(found, key=_size) for p, found in sorted(of.grouped(sent, of.ranks).items())}


def _size(row: dict) -> int:
    return row["case"]["parameters"]["message"]


def _micro(row: dict, name: str) -> float:
    return row["result"][f"{name}_seconds"] * 1e6


@style.styled
def cost(rows: Rows):
    """Wall time (us) of one tree all-reduce against message size (bytes), both logarithmic.

    A dot is the median of the iterations, the line through it reaches from the fastest to the
    slowest; each iteration counts its slowest rank.
    """
    figure = style.canvas(style.WIDTH * 0.72, 3.3)
    axes = figure.subplots()
    for step, (size, found) in enumerate(_by_size(rows).items()):
        xs = [row["case"]["parameters"]["message"] * 1.05**step for row in found]
        middle = [_micro(row, "median") for row in found]
        low, high = ([_micro(row, n) for row in found] for n in ("fastest", "slowest"))
        colour = style.STEPS[min(step + 1, 3)]
        axes.plot(xs, middle, color=colour, marker="o", markersize=5)
        axes.vlines(xs, low, high, color=colour, lw=1.2)
        name = "1 rank (a copy)" if size == 1 else f"{size} ranks"
        axes.annotate(
            name,
            (xs[-1], middle[-1]),
            (9, 0),
            textcoords="offset points",
            va="center",
            color=colour,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    messages = sorted({x for found in _by_size(rows).values() for x in map(_size, found)})
    axes.set_xticks(messages, [_bytes(m) for m in messages])
    axes.minorticks_off()
    axes.set_xlim(min(messages) / 1.6, max(messages) * 6)
    axes.yaxis.set_major_formatter(lambda value, _: _time(value))
    axes.set_xlabel("message")
    axes.set_ylabel("wall time of one all-reduce")
    return figure


def _time(micro: float) -> str:
    return f"{micro / 1000:g} ms" if micro >= 1000 else f"{micro:g} µs"


def _bytes(count: int) -> str:
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:g} {unit}"
    return f"{count} B"


def cost_alt(rows: Rows) -> str:
    parts = []
    for size, found in _by_size(rows).items():
        ends = (found[0], found[-1])
        told = " to ".join(f"{_micro(r, 'median'):.0f} µs at {_message(r)}" for r in ends)
        parts.append(f"{size} rank{'s' * (size > 1)}: {told}")
    return "Median wall time of one tree all-reduce against message size. " + "; ".join(parts) + "."


def cost_table(rows: Rows) -> Table:
    body = []
    for size, found in _by_size(rows).items():
        for row in found:
            times = [f"{_micro(row, n):.0f}" for n in ("median", "fastest", "slowest")]
            body.append([str(size), _message(row), row.get("backend") or "-", *times])
    return ["ranks", "message", "backend", "median µs", "fastest µs", "slowest µs"], body


COST = Plot(
    "What a message costs",
    cost,
    cost_alt,
    cost_table,
    "Dot: median. Line through it: fastest to slowest. Each iteration counts its slowest rank.",
)
