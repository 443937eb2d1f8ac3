"""Figures of the A2A-FFN: what ran when, how much communication was hidden, what the length of a
call hangs on.

Times and chunk counts: a2a_cost.py. The price of sharing a chip: a2a_sharing.py. What SMs do inside
the fused kernels: a2a_inside.py. Peak memory: a2a_memory.py. `none` under other settings:
a2a_settings.py.
"""

from __future__ import annotations

import math

from matplotlib.lines import Line2D

from rlkernel.records import intervals

from . import (
    Plot,
    Rows,
    Table,
    a2a_cost,
    a2a_inside,
    a2a_memory,
    a2a_settings,
    a2a_sharing,
    schedules,
    style,
)
from .schedules import EXPOSED, KINDS, LOOK, Line, signed

LANE = 0.22  # inches a stream
THIN = 0.002  # of the time; a stream that is busy for less is left out


def _shown(rows: Rows) -> list[Line]:
    """Every traced schedule, at its best chunk count."""
    return schedules.best([line for line in schedules.lines(rows) if line.seen])


# ---- timelines -----------------------------------------------------------------------------------


def exposed(bars: list[list]) -> list[tuple[float, float]]:
    """(start, end) in us of what communicates while nothing computes; [] under a fused kernel,
    whose inside is not known."""
    if any(kind == "fused" for _, kind, *_ in bars):
        return []
    of = lambda kinds: intervals.union((a, b) for _, k, a, b in bars if k in kinds)  # noqa: E731
    return intervals.difference(of(("comm",)), of(schedules.COMPUTE))


def _streams(bars: list[list]) -> list[str]:
    """Streams from top to bottom: those that compute first, communication last; without those that
    are busy for too little of the time to be seen."""
    busy: dict[str, float] = {}
    comm: dict[str, float] = {}
    for stream, kind, start, end in bars:
        busy[stream] = busy.get(stream, 0.0) + end - start
        comm[stream] = comm.get(stream, 0.0) + (end - start) * (kind == "comm")
    seen = [name for name, us in busy.items() if us > THIN * max(end for *_, end in bars)]
    return sorted(seen, key=lambda name: (comm[name] / busy[name], name))


@style.styled
def timelines(rows: Rows):
    """Each schedule's streams against time since the call began, one above the other on one axis;
    the slowest rank of each. Shaded: communication beside which nothing computes."""
    found = _shown(rows)
    if not found:
        return schedules.gap("no trace was taken")
    tracks = [line.slowest["timeline"] for line in found]
    lanes = [_streams(bars) for bars in tracks]
    inches = [LANE * len(names) + 0.34 for names in lanes]
    figure = style.canvas(style.WIDTH, 0.75 + sum(inches))
    panels = figure.subplots(len(found), 1, sharex=True, squeeze=False, height_ratios=inches)[:, 0]
    for axes, line, bars, names in zip(panels, found, tracks, lanes, strict=True):
        for start, end in exposed(bars):
            axes.axvspan(start, end, color=EXPOSED, lw=0, zorder=0, gid="exposed")
        for stream, kind, start, end in (bar for bar in bars if bar[0] in names):
            axes.barh(
                names.index(stream), end - start, left=start, height=0.72, lw=0,
                color=KINDS[kind][1], gid=kind,
            )  # fmt: skip
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.set_title(schedules.title(line, found), fontsize=9.5)
        axes.set_title(_said(line.slowest), loc="right", fontsize=8.5, weight="normal",
                       color=style.MUTED)  # fmt: skip
    panels[-1].set_xlim(0, max(end for bars in tracks for *_, end in bars))
    panels[-1].xaxis.set_major_formatter(schedules.micro)
    shaded = any(exposed(bars) for bars in tracks)
    schedules.kinds_legend(figure, {kind for bars in tracks for _, kind, *_ in bars}, shaded)
    return figure


def _said(rank: dict) -> str:
    if rank["hidden"] is None:
        return rank["why"].split(":")[0]
    return f"hidden {rank['hidden']:.0%}, exposed {rank['exposed_us']:,.0f} µs"


def timelines_alt(rows: Rows) -> str:
    found = _shown(rows)
    if not found:
        return schedules.NOT_MEASURED
    parts = [
        f"{schedules.title(line, found)}: {line.slowest['span_us']:,.0f} µs, {_said(line.slowest)}"
        for line in found
    ]
    return f"Timelines of the schedules, slowest rank of each: {'; '.join(parts)}."


def timelines_table(rows: Rows) -> Table:
    """One line a schedule and rank: length, time by kind, what is hidden and what is exposed."""
    found = _shown(rows)
    kinds = [k for k in KINDS if any(k in t["kinds"] for line in found for t in line.seen)]
    header = ["schedule", "rank", "length µs", *(f"{KINDS[k][0]} µs" for k in kinds),
              "exposed µs", "hidden"]  # fmt: skip
    body = [
        [
            schedules.title(line, found), str(t["rank"]), f"{t['span_us']:,.1f}",
            *(f"{t['kinds'].get(k, 0):,.1f}" for k in kinds),
            "-" if t["exposed_us"] is None else f"{t['exposed_us']:,.1f}",
            f"{t['hidden']:.2f}" if t["hidden"] is not None else t["why"],
        ]
        for line in found for t in line.seen
    ]  # fmt: skip
    return (header, body) if body else (["not measured"], [[schedules.NOT_MEASURED]])


TIMELINES = Plot(
    "What ran when",
    timelines,
    timelines_alt,
    timelines_table,
    "From the profiler's trace of the slowest rank, each schedule at its best chunk count. Shaded: "
    "communication beside which nothing computes. Packing and waiting are neither.",
)


# ---- the hidden fraction, both ways --------------------------------------------------------------


def _judged(rows: Rows) -> list[Line]:
    """Whatever overlaps, timed or traced, at its best chunk count; a lone rank hides nothing."""
    found = [line for line in schedules.lines(rows) if line.schedule != "none" and line.ranks > 1]
    return schedules.best([line for line in found if line.estimate or line.seen])


@style.styled
def hidden(rows: Rows):
    """The hidden fraction of each schedule, twice: the signed estimate from times with its p10 to
    p90, and what a trace shows, a mark a rank. 0 is nothing hidden, left of it overlap costs. An
    estimate that is noise is pale, with its 95 % interval."""
    found = _judged(rows)
    if not found:
        return schedules.gap("neither timed nor traced")
    figure = style.canvas(style.WIDTH, 1.0 + 0.5 * len(found))
    axes = figure.subplots()
    low, high = -0.1, 1.05
    for place, line in enumerate(found):
        colour = LOOK[line.schedule]["color"]
        estimate = line.estimate
        if estimate:
            first, last = _interval(line)
            low, high = min(low, first - 0.05), max(high, last + 0.05)
            pale = schedules.FADED if line.noisy else 1.0
            axes.hlines(place - 0.16, first, last, color=colour, lw=2, alpha=pale, gid="interval")
            axes.plot([estimate["median"]], [place - 0.16], marker="o", color=colour, markersize=7,
                      alpha=pale, gid="estimate")  # fmt: skip
            said = signed(estimate["median"])
            said += f", {schedules.noise(line)}" if line.noisy else ""
            axes.annotate(said, (last, place - 0.16), (7, 0), textcoords="offset points",
                          va="center", fontsize=9, alpha=max(pale, 0.6))  # fmt: skip
        _ranks(axes, place + 0.18, line, colour)
    axes.axvspan(low, 0, color=EXPOSED, alpha=0.45, lw=0, zorder=0)
    axes.axvline(0, color=style.LIMIT, lw=1.2)
    axes.axvline(1, color=style.FAINT, lw=1.2, zorder=0)
    axes.set_xlim(low, high + 0.06 * (high - low))
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_yticks(range(len(found)), [schedules.title(line, found) for line in found],
                    color=style.INK)  # fmt: skip
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("share of the communication that is hidden; left of 0 overlap costs time")
    how = {"linestyle": "", "color": style.INK, "markersize": 7}
    said = {"o": "estimate (T serial - T overlap) / T comm", "|": "in the trace, a mark a rank"}
    marks = [Line2D([], [], marker=mark, label=name, **how) for mark, name in said.items()]
    figure.legend(handles=marks, loc="outside upper right", ncols=2, frameon=False, fontsize=8.5)
    return figure


def _interval(line: Line) -> tuple[float, float]:
    """p10 to p90, or the 95 % interval where that is wide; around a lone round there is none."""
    estimate = line.estimate
    if not line.noisy or not math.isfinite(estimate["ci95"]):
        return estimate["p10"], estimate["p90"]
    ends = (estimate["mean"] - estimate["ci95"], estimate["mean"] + estimate["ci95"])
    return min(ends[0], estimate["median"]), max(ends[1], estimate["median"])


def _ranks(axes, y: float, line: Line, colour: str) -> None:
    """A mark for each traced rank, or the reason why there is none."""
    told = [rank["hidden"] for rank in line.seen if rank["hidden"] is not None]
    if told:
        axes.plot(told, [y] * len(told), linestyle="", marker="|", markersize=11, mew=2,
                  color=colour, gid="trace")  # fmt: skip
        axes.annotate(f"{min(told):.2f}", (max(told), y), (7, 0), textcoords="offset points",
                      va="center", fontsize=9)  # fmt: skip
        return
    why = _trace(line).split(":")[0]
    axes.annotate(why, (0, y), (5, 0), textcoords="offset points", va="center", fontsize=8.5,
                  color=style.MUTED)  # fmt: skip


def hidden_alt(rows: Rows) -> str:
    found = _judged(rows)
    if not found:
        return schedules.NOT_MEASURED
    parts = []
    for line in found:
        estimate = line.estimate
        told = f"estimate {signed(estimate['median'])}" if estimate else "not timed"
        told += f" ({schedules.noise(line)})" if line.noisy else ""
        parts.append(f"{schedules.title(line, found)}: {told}, trace {_trace(line)}")
    return f"Share of the communication that is hidden, with its sign. {'; '.join(parts)}."


def _trace(line: Line) -> str:
    """The least that any rank's trace shows, or why there is no number."""
    if line.least is not None:
        return f"{line.least:.2f}"
    return line.seen[0]["why"] if line.seen else "no trace"


def hidden_table(rows: Rows) -> Table:
    found = _judged(rows)
    header = ["schedule", "estimate (p10, p90)", "trace, least of the ranks", "exposed µs, trace",
              "exposed µs, flags pre-set (p10, p90)", "path"]  # fmt: skip
    body = []
    for line in found:
        seen = [t["exposed_us"] for t in line.seen if t["exposed_us"] is not None]
        preset = line.timed.get("exposed_us")
        body.append([
            schedules.title(line, found), schedules.estimated(line),
            _trace(line), f"{max(seen):,.1f}" if seen else "-",
            schedules.spread(preset, "{:,.1f}".format), line.path or "-",
        ])  # fmt: skip
    return (header, body) if body else (["not measured"], [[schedules.NOT_MEASURED]])


HIDDEN = Plot(
    "How much is hidden, twice",
    hidden,
    hidden_alt,
    hidden_table,
    "The estimate counts whatever made the call faster or slower, and keeps its sign; the trace "
    "counts what ran at the same time. They agree only where nothing else changed. Pale: noise, "
    f"a 95 % interval of more than ± {schedules.NOISE:g}, drawn instead of p10 to p90.",
)


# ---- what the length hangs on --------------------------------------------------------------------


@style.styled
def critical(rows: Rows):
    """The chain of spans that each schedule's length hangs on, by kind; the slowest rank."""
    found = _shown(rows)
    if not found:
        return schedules.gap("no trace was taken")
    figure = style.canvas(style.WIDTH, 0.85 + 0.34 * len(found))
    axes = figure.subplots()
    for place, line in enumerate(found):
        left = 0.0
        for kind, us in _path(line):
            axes.barh(place, us, left=left, height=0.66, lw=0, color=KINDS[kind][1], gid=kind)
            left += us
        axes.annotate(schedules.micro(round(left)), (left, place), (6, 0), va="center", fontsize=9,
                      textcoords="offset points")  # fmt: skip
    axes.set_yticks(range(len(found)), [schedules.title(line, found) for line in found],
                    color=style.INK)  # fmt: skip
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.margins(x=0.1)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(schedules.micro)
    schedules.kinds_legend(figure, {kind for line in found for kind, _ in _path(line)})
    return figure


def _path(line: Line) -> list[tuple[str, float]]:
    spent = line.slowest["critical"]
    return [(kind, spent[kind]) for kind in KINDS if spent.get(kind)]


def critical_alt(rows: Rows) -> str:
    found = _shown(rows)
    if not found:
        return schedules.NOT_MEASURED
    parts = []
    for line in found:
        told = ", ".join(f"{KINDS[kind][0]} {us:,.0f} µs" for kind, us in _path(line))
        parts.append(f"{schedules.title(line, found)}: {told}")
    return f"Critical path of each schedule by kind. {'; '.join(parts)}."


def critical_table(rows: Rows) -> Table:
    found = _shown(rows)
    kinds = [k for k in KINDS if any(k == kind for line in found for kind, _ in _path(line))]
    body = [
        [schedules.title(line, found), *(f"{dict(_path(line)).get(k, 0):,.1f}" for k in kinds)]
        for line in found
    ]
    header = ["schedule", *(f"{KINDS[k][0]} µs" for k in kinds)]
    return (header, body) if body else (["not measured"], [[schedules.NOT_MEASURED]])


CRITICAL = Plot(
    "What the length hangs on",
    critical,
    critical_alt,
    critical_table,
    "Backwards from the end: a span waited for its stream's last one where it starts right behind "
    "it, else for whatever ended last before it started. A trace does not hold more.",
)

apart = schedules.apart
TIMES, SWEEP, SHARING = a2a_cost.TIMES, a2a_cost.SWEEP, a2a_sharing.SHARING
INSIDE, MEMORY, SETTINGS = a2a_inside.INSIDE, a2a_memory.MEMORY, a2a_settings.SETTINGS
