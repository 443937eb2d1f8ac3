"""The A2A-FFN on one node and on several: what is exposed where; and a model of other fabrics.

The model's rows are no rows of a record: pages/fabric.py computes them from records
(records/alpha_beta.py, records/overlap_model.py), and every title here says that they are a model.
"""

from __future__ import annotations

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from . import Plot, Rows, Table, schedules, style
from . import rows as of
from .exchange import where
from .schedules import LOOK, Line, signed

EXPOSED = schedules.EXPOSED
FALLBACK = {"color": style.RANKS[4], "marker": "P"}  # a schedule that has no look of its own yet
PLACES = style.RANKS


# ---- exposed communication -----------------------------------------------------------------------


def timed(rows: Rows) -> list[tuple[str, Line]]:
    """(where its ranks stood, line) of every timed row: each schedule at its best chunk count."""
    found = []
    for row in rows:
        lines = schedules.best(schedules.lines([row]))
        found += [(where(row), line) for line in lines if line.times]
    return found


def _title(place: str, line: Line, found: list[tuple[str, Line]]) -> str:
    return f"{schedules.title(line, [one for _, one in found])}, {place}"


def parts(line: Line) -> list[tuple[str, float]]:
    """A call's time in two: its kernels with nothing sent, and what the exchange adds to that."""
    if line.schedule == "none":
        comp, whole = line.us("comp"), line.us("serial")
    else:
        whole = line.us("overlap")
        gap = line.timed.get("exposed_us")
        comp = whole - gap["median"] if gap else None
    return [("whole", whole)] if comp is None else [("comp", comp), ("exposed", whole - comp)]


@style.styled
def exposed(rows: Rows):
    """Left, a call's time (µs, slowest rank) in two: with nothing sent, and what the exchange adds.
    Right, the hidden fraction: estimated, with p10 to p90, and from the trace (open)."""
    found = timed(rows)
    if not found:
        return schedules.gap("nothing was timed")
    figure = style.canvas(style.WIDTH, 1.1 + 0.42 * len(found))
    left, right = figure.subplots(1, 2, width_ratios=[1.5, 1], sharey=True)
    for y, (_, line) in enumerate(found):
        at, look = 0.0, LOOK.get(line.schedule, FALLBACK)
        for kind, us in parts(line):
            tint = EXPOSED if kind == "exposed" else look["color"]
            left.barh(y, us, left=at, height=0.6, color=tint, lw=0, gid=kind)
            at += us
        left.annotate(_exposed(line), (max(at, 0), y), (5, 0), va="center", fontsize=8.5,
                      textcoords="offset points", color=style.MUTED)  # fmt: skip
        if line.estimate:
            told = line.estimate
            right.hlines(y, told["p10"], told["p90"], color=look["color"], lw=1.6)
            right.plot(told["median"], y, look["marker"], color=look["color"], markersize=7)
        if line.least is not None:
            right.plot(line.least, y, look["marker"], color=look["color"], mfc=style.PAPER,
                       markersize=7, gid="trace")  # fmt: skip
    left.set_yticks(range(len(found)), [_title(*one, found) for one in found], color=style.INK)
    left.set_ylim(len(found) - 0.4, -0.6)
    left.margins(x=0.2)
    left.xaxis.set_major_formatter(schedules.micro)
    left.set_title("time of one call")
    right.axvline(0, color=style.LIMIT, lw=1.2)
    right.set_title("hidden: estimate filled, trace open")
    for axes in (left, right):
        axes.tick_params(axis="y", length=0)
    figure.legend(handles=[Patch(color=EXPOSED, label="exposed communication")], frameon=False,
                  loc="outside upper right", fontsize=8.5)  # fmt: skip
    return figure


def _exposed(line: Line) -> str:
    found = dict(parts(line))
    return f"{found['exposed']:+,.0f} µs exposed" if "exposed" in found else ""


def exposed_alt(rows: Rows) -> str:
    found, told = timed(rows), []
    for place, line in found:
        estimate = f", hidden {signed(line.estimate['median'])}" if line.estimate else ""
        trace = f", trace {line.least:.2f}" if line.least is not None else ""
        told.append(f"{_title(place, line, found)}: {_exposed(line)}{estimate}{trace}")
    return f"Exposed communication by placement. {'; '.join(told)}." if told else (
        schedules.NOT_MEASURED
    )  # fmt: skip


def exposed_table(rows: Rows) -> Table:
    found = timed(rows)
    header = ["schedule", "call µs", "with nothing sent µs", "exposed µs", "T comm µs",
              "exposed / T comm", "hidden (p10, p90)", "trace, least", "path"]  # fmt: skip
    body = []
    for place, line in found:
        each, comm = dict(parts(line)), line.us("comm")
        gap = each.get("exposed")
        body.append([
            _title(place, line, found), f"{sum(each.values()):,.1f}",
            f"{each['comp']:,.1f}" if "comp" in each else "-",
            f"{gap:+,.1f}" if gap is not None else "-", f"{comm:,.1f}" if comm else "-",
            f"{gap / comm:+.2f}" if gap is not None and comm else "-",
            schedules.spread(line.estimate), "-" if line.least is None else f"{line.least:.2f}",
            line.path or "-",
        ])  # fmt: skip
    return (header, body) if body else (["not measured"], [[schedules.NOT_MEASURED]])


EXPOSED_BY_PLACE = Plot(
    "Exposed communication by placement",
    exposed,
    exposed_alt,
    exposed_table,
    "Each schedule at its best chunk count, slowest rank. Pale: what the exchange adds to the same "
    "kernels with nothing sent. Agents and emulated nodes are one machine, never two nodes.",
)


# ---- the model beside what was measured ----------------------------------------------------------


@style.styled
def check(rows: Rows):
    """Modelled against measured time (µs), both logarithmic; the line is equality, the band 20 %.
    Filled: fitted with this point among the others; open: without it."""
    figure = style.canvas(style.WIDTH * 0.62, 4.2)
    axes = figure.subplots()
    ends = [one[name] for one in rows for name in ("measured_us", "model_us")]
    low, high = 0.7 * min(ends), 1.4 * max(ends)
    axes.plot([low, high], [low, high], color=style.LIMIT, lw=1)
    axes.fill_between([low, high], [0.8 * low, 0.8 * high], [1.2 * low, 1.2 * high], lw=0,
                      color=style.WHOLE, zorder=0)  # fmt: skip
    kinds = list(dict.fromkeys(one["kind"] for one in rows))
    for one in rows:
        tint = PLACES[kinds.index(one["kind"]) % len(PLACES)]
        if one["left_out"] is not None:
            axes.plot(one["measured_us"], one["measured_us"] * (1 + one["left_out"]), "o", ms=6,
                      mfc=style.PAPER, color=tint, mew=0.9, gid="left out")  # fmt: skip
        axes.plot(one["measured_us"], one["model_us"], "o", ms=4.5, color=tint, gid="model")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(schedules.micro)
    axes.set_xlabel("measured")
    axes.set_ylabel("model")
    marks = [Line2D([], [], ls="", marker="o", color=PLACES[n % len(PLACES)], label=kind)
             for n, kind in enumerate(kinds)]  # fmt: skip
    axes.legend(handles=marks, frameon=False, fontsize=8.5)
    return figure


def check_alt(rows: Rows) -> str:
    told = []
    for kind, same in of.grouped(rows, lambda one: one["kind"]).items():
        off = sorted(abs(one["relative"]) for one in same)
        told.append(f"{kind}: {len(same)} points, median error {off[len(off) // 2]:.0%}, worst "
                    f"{off[-1]:.0%}")  # fmt: skip
    return f"A model beside what was measured. {'; '.join(told)}."


def check_table(rows: Rows) -> Table:
    body = [
        [one["kind"], one["label"], f"{one['measured_us']:,.1f}", f"{one['model_us']:,.1f}",
         f"{one['relative']:+.1%}", "-" if one["left_out"] is None else f"{one['left_out']:+.1%}"]
        for one in rows
    ]  # fmt: skip
    return ["what", "point", "measured µs", "model µs", "error", "error, point left out"], body


CHECK = Plot(
    "Model: alpha-beta beside every measured point",
    check,
    check_alt,
    check_table,
    "A model. Filled: fitted to all points; open: fitted to all but this one. Band: 20 % off.",
)


# ---- the model on other fabrics ------------------------------------------------------------------


def _best(rows: Rows) -> list[dict]:
    """Of each placement and order of the exchange the fastest chunk count."""
    groups = of.grouped(rows, lambda one: (one["placement"], one["order"])).values()
    return [min(same, key=lambda one: one["overlap_us"]) for same in groups]


@style.styled
def predicted(rows: Rows):
    """Model. Left: T serial and T overlap (µs) of each placement at its best chunk count, what is
    exposed is pale. Right: the hidden fraction against the number of chunks."""
    best = _best(rows)
    places = list(dict.fromkeys(one["placement"] for one in best))
    figure = style.canvas(style.WIDTH, 1.6 + 0.55 * len(best))
    left, right = figure.subplots(1, 2, width_ratios=[1.5, 1])
    for y, one in enumerate(best):
        tint = PLACES[places.index(one["placement"]) % len(PLACES)]
        left.barh(y - 0.2, one["serial_us"], height=0.32, color=style.MUTED, lw=0, gid="serial")
        left.barh(y + 0.2, one["comp_us"], height=0.32, color=tint, lw=0, gid="comp")
        left.barh(y + 0.2, one["exposed_us"], left=one["comp_us"], height=0.32, color=EXPOSED,
                  lw=0, gid="exposed")  # fmt: skip
        left.annotate(f"{one['exposed_us']:,.0f} µs exposed", (one["overlap_us"], y + 0.2), (5, 0),
                      textcoords="offset points", va="center", fontsize=8.5, color=style.MUTED)
        same = [r for r in rows if (r["placement"], r["order"]) == (one["placement"], one["order"])]
        dashed = {} if one["order"] == "flat" else {"ls": (0, (4, 2))}
        right.plot([r["chunks"] for r in same], [r["hidden"] for r in same], color=tint, marker="o",
                   markersize=4.5, **dashed)  # fmt: skip
    left.set_yticks(range(len(best)), [_name(one) for one in best], color=style.INK)
    left.set_ylim(len(best) - 0.4, -0.6)
    left.tick_params(axis="y", length=0)
    left.margins(x=0.2)
    left.xaxis.set_major_formatter(schedules.micro)
    left.set_title("model: T serial (grey), T overlap")
    counts = sorted({one["chunks"] for one in rows})
    right.set_xscale("log", base=2)
    right.set_xticks(counts, [str(count) for count in counts])
    right.minorticks_off()
    right.axhline(0, color=style.LIMIT, lw=1.2)
    right.set_xlabel("chunks")
    right.set_title("model: hidden fraction")
    return figure


def _name(one: dict) -> str:
    return f"P = {one['ranks']}, {one['placement']}, {one['order']}"


def predicted_alt(rows: Rows) -> str:
    told = [
        f"{_name(one)}, {one['chunks']} chunks: T serial {one['serial_us']:,.0f} µs, T overlap "
        f"{one['overlap_us']:,.0f} µs, exposed {one['exposed_us']:,.0f} µs, hidden "
        f"{signed(one['hidden'])}"
        for one in _best(rows)
    ]
    return f"A model, not a measurement, of other fabrics. {'; '.join(told)}."


def predicted_table(rows: Rows) -> Table:
    header = ["model of", "exchange", "chunks", "T wire µs", "T comm µs", "T serial µs",
              "T overlap µs", "exposed µs", "hidden", "of what can be hidden",
              "workload", "links"]  # fmt: skip
    body = [
        [f"P = {one['ranks']}, {one['placement']}", one["order"], str(one["chunks"]),
         *(f"{one[n]:,.0f}" for n in ("wire_us", "comm_us", "serial_us", "overlap_us",
                                      "exposed_us")),
         signed(one["hidden"]), f"{one['of_what_can_be']:.2f}", one["workload"], one["links"]]
        for one in rows
    ]  # fmt: skip
    return header, body


PREDICTED = Plot(
    "Model: 8 and 16 ranks on fabrics that were not measured",
    predicted,
    predicted_alt,
    predicted_table,
    "A model. What runs beside something else is taken to run as fast as alone, so overlap is an "
    "upper bound. Pale: exposed. Dashed: the exchange in two steps, across nodes and then inside.",
)
