"""What a product pays for sharing the chip with an exchange.

Two sources, drawn alike. A row's `sharing`: one product timed alone and beside each kind of
exchange, interleaved. And every trace: the time of all products of a schedule over the time of the
same products in the sequential call, where nothing runs beside them.
"""

from __future__ import annotations

import statistics

from matplotlib.lines import Line2D

from . import Plot, Rows, Table, schedules, style
from . import rows as of
from .schedules import LOOK, Line

TRACED = {"gemm": "all products, in the trace", "elementwise": "element-wise, in the trace"}


def shared(rows: Rows) -> list[dict]:
    """{"what", "beside", "schedule", "median_us", "ratio" to alone} of every comparison."""
    return timed(rows) + traced(rows)


def timed(rows: Rows) -> list[dict]:
    """A row's own, once a workload: backward has the same products in its forward."""
    first: dict[str, dict] = {}
    for row in rows:
        if row["result"].get("sharing"):
            first.setdefault(Line(row, "none").where, row)
    return [
        {**one, "what": f"{one['gemm']}, {where}" if len(first) > 1 else one["gemm"],
         "schedule": _schedule(one["beside"])}
        for where, row in first.items() for one in row["result"]["sharing"]
    ]  # fmt: skip


def traced(rows: Rows) -> list[dict]:
    """The same from traces: median, least and most of the ranks. Nothing for fused kernels."""
    found, every = [], [line for line in schedules.lines(rows) if line.seen]
    alone = {(line.where, line.backward): line for line in every if line.schedule == "none"}
    for line in every:
        base = alone.get((line.where, line.backward))
        if line.schedule == "none" or base is None:
            continue
        for kind, name in TRACED.items():
            us = [(one["kinds"].get(kind), two["kinds"].get(kind))
                  for one, two in zip(line.seen, base.seen, strict=True)]  # fmt: skip
            if not all(own and other for own, other in us) or _fused(line):
                continue
            ratios = [own / other for own, other in us]
            found.append({
                "what": name, "beside": schedules.title(line, every), "schedule": line.schedule,
                "chunks": line.chunks, "backward": line.backward, "where": line.where,
                "median_us": statistics.median(own for own, _ in us),
                "ratio": {"median": statistics.median(ratios), "p10": min(ratios),
                          "p90": max(ratios)},
            })  # fmt: skip
    return found


def _fused(line: Line) -> bool:
    return any("fused" in rank["kinds"] for rank in line.seen)


def _schedule(beside: str) -> str:
    """Whose exchange it is: the copy engine's is sm-free's, NCCL's is with-sm's."""
    return {"alone": "none", "copy engine": "sm-free"}.get(beside, "with-sm")


@style.styled
def sharing(rows: Rows):
    """Time beside an exchange over time alone, a panel a kind of work: bars with their spread and
    the SM clock where it was timed, a curve a schedule over its chunks where traces say it."""
    found = of.grouped(shared(rows), lambda one: one["what"])
    if not found:
        return schedules.gap("no product was seen beside an exchange")
    figure = style.canvas(style.WIDTH, 3.4)
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for axes, (what, same) in zip(panels, found.items(), strict=True):
        axes.set_title(what)
        (_curves if "chunks" in same[0] else _bars)(axes, same)
    seen = {one["schedule"] for same in found.values() for one in same if "chunks" in one}
    more = [Line2D([], [], color=style.INK, alpha=0.4, label="pale: with backward")]
    both = len({one.get("backward", False) for same in found.values() for one in same}) > 1
    if seen:
        schedules.schedules_legend(figure, seen, more * both)
    return figure


def _bars(axes, same: list[dict]) -> None:
    for y, one in enumerate(same):
        ratio = one["ratio"]
        axes.barh(y, ratio["median"] - 1, left=1, height=0.5, lw=0, gid="cost",
                  color=LOOK[one["schedule"]]["color"])  # fmt: skip
        axes.hlines(y, ratio["p10"], ratio["p90"], color=style.INK, lw=1.2)
        clock = f"   {one['sm_mhz']:,.0f} MHz" if one.get("sm_mhz") else ""
        axes.annotate(f"{ratio['median']:.3f}{clock}", (1, y), (0, 18), va="center", fontsize=8.5,
                      textcoords="offset points")  # fmt: skip
    axes.axvline(1, color=style.INK, lw=1)
    axes.tick_params(axis="y", length=0)
    axes.set_yticks(range(len(same)), [one["beside"] for one in same], color=style.INK)
    axes.set_ylim(len(same) - 0.4, -0.7)
    axes.set_xlabel("time / alone")


def _curves(axes, same: list[dict]) -> None:
    key = lambda one: (one["where"], one["schedule"], one["backward"])  # noqa: E731
    for points in of.grouped(same, key).values():
        line = sorted(points, key=lambda point: point["chunks"])
        xs = [point["chunks"] for point in line]
        low, middle, high = ([p["ratio"][f] for p in line] for f in ("p10", "median", "p90"))
        look = LOOK[line[0]["schedule"]]
        axes.fill_between(xs, low, high, color=look["color"], alpha=0.16, lw=0, gid="band")
        axes.plot(xs, middle, **look, markersize=5, lw=1.6,
                  alpha=0.5 if line[0]["backward"] else 1.0)  # fmt: skip
    axes.axhline(1, color=style.INK, lw=1, zorder=0)
    counts = sorted({point["chunks"] for point in same})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.minorticks_off()
    axes.set_xlabel("chunks")
    axes.set_ylabel("time / alone")


def sharing_alt(rows: Rows) -> str:
    told = [
        f"{one['what']} beside {one['beside']} {one['ratio']['median']:.3f}"
        for one in shared(rows) if one["schedule"] != "none"
    ]  # fmt: skip
    if not told:
        return schedules.NOT_MEASURED
    return f"Time beside an exchange over time alone: {'; '.join(told)}."


def sharing_table(rows: Rows) -> Table:
    more = {"sm_mhz": "SM MHz", "power_w": "W", "sms": "SMs taken", "gb_per_s": "GB/s sent",
            "sent_bytes": "bytes sent meanwhile", "lasted": "exchange lasted, of the product",
            "l2_bytes": "L2 bytes", "dram_bytes": "memory bytes"}  # fmt: skip
    found = shared(rows)
    shown = [name for name in more if any(one.get(name) is not None for one in found)]
    body = [
        [
            one["what"], one["beside"], f"{one['median_us']:,.1f}",
            schedules.spread(one["ratio"], "{:.3f}".format),
            *("-" if one.get(n) is None else _number(n, one[n]) for n in shown),
        ]
        for one in found
    ]  # fmt: skip
    header = ["work", "beside", "median µs", "/ alone (p10, p90; trace: least, most of the ranks)",
              *(more[n] for n in shown)]  # fmt: skip
    return (header, body) if body else (["not measured"], [[schedules.NOT_MEASURED]])


def _number(name: str, value: float) -> str:
    return f"{value:.0%}" if name == "lasted" else f"{value:,.0f}"


SHARING = Plot(
    "What sharing the chip costs a product",
    sharing,
    sharing_alt,
    sharing_table,
    "In a trace, smaller chunks count as well: compare schedules of equal chunks, which differ in "
    "who moves the bytes. Under a power cap the clock moves, too: it is read where the same call "
    "is held without a pause. GB/s and bytes: what one rank sends while the product runs.",
)
