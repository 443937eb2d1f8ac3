"""What the schedules of the A2A-FFN cost: their times against the ceiling, and chunk counts.

Every ratio is paired: both sides were timed in the same round, interleaved call by call.
"""

from __future__ import annotations

from matplotlib.lines import Line2D

from . import Plot, Rows, Table, schedules, style
from . import rows as of
from .schedules import LOOK, Line, signed

NAMES = {
    "serial": "T serial", "overlap": "T overlap", "comm": "T comm", "wire": "T wire",
    "comp": "T comp",
}  # fmt: skip
BARS = {
    "serial": style.MUTED, "overlap": None, "comm": schedules.KINDS["comm"][1], "wire": "#f4cf95",
    "comp": schedules.KINDS["gemm"][1],
}  # fmt: skip


def _timed(rows: Rows, every: bool = False) -> list[Line]:
    return schedules.best([line for line in schedules.lines(rows, every) if line.times])


# ---- times ---------------------------------------------------------------------------------------


@style.styled
def times(rows: Rows):
    """Left, the times of each schedule (µs, slowest rank, median of the rounds). Right, T serial /
    T overlap with its p10 to p90, up to the ceiling 1 + T comm / T comp of the same run."""
    found = _timed(rows)
    if not found:
        return schedules.gap("nothing was timed")
    counts = [len(line.times) for line in found]
    figure = style.canvas(style.WIDTH, 0.9 + sum(0.2 * n + 0.22 for n in counts))
    left, right = figure.subplots(1, 2, width_ratios=[1.55, 1])
    at, middles = 0.0, []
    for line in found:
        first = at
        for name in line.times:
            us, colour = line.us(name), BARS[name] or LOOK[line.schedule]["color"]
            left.barh(at, us, height=0.82, color=colour, lw=0, gid=name)
            left.annotate(NAMES[name], (us, at), (5, 0), va="center", fontsize=8,
                          textcoords="offset points", color=style.MUTED)  # fmt: skip
            at += 1
        middles.append((first + at - 1) / 2)
        _speedup(right, middles[-1], line)
        at += 1
    for axes in (left, right):
        axes.set_ylim(at - 1.2, -0.8)
        axes.tick_params(axis="y", length=0)
    left.set_yticks(middles, [schedules.title(line, found) for line in found], color=style.INK)
    left.margins(x=0.12)
    left.xaxis.set_major_formatter(schedules.micro)
    left.set_title("time of one call")
    right.set_yticks([])
    right.axvline(1, color=style.LIMIT, lw=1.2)
    right.set_title("T serial / T overlap, and the ceiling")
    right.margins(x=0.12)
    return figure


def _speedup(axes, y: float, line: Line) -> None:
    ratio, top = line.speedup, line.ceiling
    if ratio:
        colour = LOOK[line.schedule]["color"]
        axes.plot([1, ratio["median"]], [y, y], color=colour, lw=9, solid_capstyle="butt",
                  gid="speedup")  # fmt: skip
        axes.hlines(y, ratio["p10"], ratio["p90"], color=style.INK, lw=1.2)
        axes.annotate(f"{ratio['median']:.3f}", (ratio["median"], y), (0, 9), ha="center",
                      textcoords="offset points", fontsize=9)  # fmt: skip
    if top and line.schedule != "none":
        axes.plot([top], [y], marker="|", markersize=18, mew=2, color=style.INK, gid="ceiling")
        axes.annotate(f"{top:.3f}", (top, y), (0, -17), ha="center", textcoords="offset points",
                      fontsize=8.5, color=style.MUTED)  # fmt: skip


def times_alt(rows: Rows) -> str:
    found = _timed(rows)
    if not found:
        return schedules.NOT_MEASURED
    parts = []
    for line in found:
        told = ", ".join(f"{NAMES[name]} {line.us(name):,.0f} µs" for name in line.times)
        ratio, top = line.speedup, line.ceiling
        told += f", T serial / T overlap {ratio['median']:.3f}" if ratio else ""
        told += f" of at most {top:.3f}" if ratio and top else ""
        parts.append(f"{schedules.title(line, found)}: {told}")
    return f"Times of one call, slowest rank. {'; '.join(parts)}."


def times_table(rows: Rows) -> Table:
    """One line a schedule and state for the slowest rank of each round, then one for every rank."""
    found = _timed(rows, every=True)
    header = ["schedule", "state", "rank", *(f"{NAMES[n]} µs" for n in schedules.TIMES),
              "serial / overlap (p10, p90)", "ceiling", "tokens/s", "TFLOP/s", "path"]  # fmt: skip
    body = []
    for line in found:
        rate = line.timed or line.row["result"]["times"][line.state].get("none", {})
        name = [schedules.title(line, found), line.state]
        body.append([
            *name, "slowest", *(_us(line.us(n)) for n in schedules.TIMES),
            schedules.spread(line.speedup, "{:.3f}".format), style.number(line.ceiling, 4),
            f"{rate.get('tokens_per_s', 0):,.0f}", f"{rate.get('tflops', 0):,.1f}",
            line.path or "-",
        ])  # fmt: skip
        for rank in range(len(next(iter(line.times.values()))["ranks"])):
            each = [_us(line.us(n, rank)) for n in schedules.TIMES]
            body.append([*name, str(rank), *each, *["-"] * 5])
    return (header, body) if body else (["not measured"], [[schedules.NOT_MEASURED]])


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


TIMES = Plot(
    "What each schedule takes",
    times,
    times_alt,
    times_table,
    "T comm: packing, exchange and unpacking of the sequential call; T wire: the exchange alone. "
    "Black tick: what hiding all of the communication would give. Red: as fast as none.",
)


# ---- chunk counts --------------------------------------------------------------------------------


def swept(rows: Rows) -> list[list[Line]]:
    """The lines of a workload and schedule, ascending in the chunk count; two counts or more."""
    found = [one for one in schedules.lines(rows) if one.schedule != "none"]
    found = [one for one in found if one.speedup or one.least is not None]
    key = lambda one: (one.where, one.backward, one.schedule)  # noqa: E731
    groups = of.grouped(found, key).values()
    return [sorted(g, key=lambda one: one.chunks) for g in groups if len(g) > 1]


@style.styled
def sweep(rows: Rows):
    """Against the number of chunks: T serial / T overlap with its p10 to p90, and the hidden
    fraction, estimated (solid; pale where that is noise) and from the trace (dashed, the least of
    the ranks)."""
    found = swept(rows)
    if not found:
        return schedules.gap("one chunk count only")
    figure = style.canvas(style.WIDTH, 3.3)
    left, right = figure.subplots(1, 2)
    for same in found:
        first = same[0]
        how = {**LOOK[first.schedule], "markersize": 5, "lw": 1.6}
        how["alpha"] = 0.5 if first.backward else 1.0
        _curve(left, [(one.chunks, one.speedup) for one in same], how)
        clear = [(one.chunks, one.estimate) for one in same if not one.noisy]
        if len(clear) < len(same):
            pale = {**how, "alpha": schedules.FADED * how["alpha"]}
            _curve(right, [(one.chunks, one.estimate) for one in same], pale, "pale")
            how["ls"] = ""
        _curve(right, clear, how)
        seen = [(one.chunks, one.least) for one in same if one.least is not None]
        if seen:
            right.plot(*zip(*seen), **{**how, "ls": (0, (4, 2)), "mfc": style.PAPER}, gid="trace")
    every = [one for same in found for one in same]
    counts = sorted({one.chunks for one in every})
    for axes, even, name in (
        (left, 1, "T serial / T overlap: above 1 overlap is faster"),
        (right, 0, "hidden: estimate solid, trace dashed"),
    ):
        axes.axhline(even, color=style.LIMIT, lw=1.2, zorder=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(n) for n in counts])
        axes.minorticks_off()
        axes.set_xlabel("chunks")
        axes.set_title(name)
    more = [Line2D([], [], color=style.INK, alpha=0.4, label="pale: with backward")]
    both = len({one.backward for one in every}) > 1
    schedules.schedules_legend(figure, {one.schedule for one in every}, more * both)
    return figure


def _curve(axes, points: list[tuple[int, dict | None]], how: dict, gid="curve") -> None:
    known = [(x, ratio) for x, ratio in points if ratio]
    if known:
        xs = [x for x, _ in known]
        low, middle, high = ([r[f] for _, r in known] for f in ("p10", "median", "p90"))
        axes.fill_between(xs, low, high, color=how["color"], alpha=0.16, lw=0, gid="band")
        axes.plot(xs, middle, **how, gid=gid)


def sweep_alt(rows: Rows) -> str:
    found = swept(rows)
    if not found:
        return f"One chunk count only. {schedules.NOT_MEASURED}."
    every = [one for same in found for one in same]
    parts = []
    for same in found:
        told = [f"{one.chunks}: {_short(one)}" for one in same]
        parts.append(f"{schedules.title(same[0], every, counted=False)} {', '.join(told)}")
    return f"T serial / T overlap and hidden fraction by chunks. {'; '.join(parts)}."


def _short(line: Line) -> str:
    told = [f"{line.speedup['median']:.3f}"] if line.speedup else []
    told += [f"hidden {signed(line.estimate['median'])}"] if line.estimate else []
    told += [f"({schedules.noise(line)})"] if line.noisy else []
    return " ".join(told) or f"trace {style.number(line.least, 2)}"


def sweep_table(rows: Rows) -> Table:
    every = [one for same in swept(rows) for one in same]
    body = [
        [
            schedules.title(one, every, counted=False), str(one.chunks),
            schedules.spread(one.speedup, "{:.3f}".format), schedules.estimated(one),
            "-" if one.least is None else f"{one.least:.2f}", one.path or "-",
        ]
        for one in every
    ]  # fmt: skip
    header = ["schedule", "chunks", "serial / overlap (p10, p90)", "estimate (p10, p90)",
              "trace, least of the ranks", "path"]  # fmt: skip
    return (header, body) if body else (["not measured"], [[schedules.NOT_MEASURED]])


SWEEP = Plot(
    "How many chunks",
    sweep,
    sweep_alt,
    sweep_table,
    "More chunks start earlier and cost more launches, smaller products and smaller messages. "
    "Band: p10 to p90 of the paired ratio. Red: no gain. Pale: the estimate is noise.",
)
