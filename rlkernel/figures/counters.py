"""Figures of hardware counters: what a product pays for what runs beside it, what each kernel of
the layer moves, and a call over time.
"""

from __future__ import annotations

from . import Plot, Rows, Table, style
from .schedules import gap, spread

NEEDS, COMMAND = "needs 1 GPU (SM90)", "make counters"
NOT_MEASURED = f"NOT MEASURED here: {NEEDS}: {COMMAND}"
CYCLES, TIME = style.RANKS[0], style.RANKS[1]
READ, WRITTEN, L2 = style.RANKS[0], style.RANKS[1], style.RANKS[2]
TENSOR, SMS = style.RANKS[3], style.MUTED
MB, GB = 1e6, 1e9


def _part(rows: Rows, name: str) -> dict | None:
    """The result of a part that was measured without a fault."""
    sound = [row for row in rows if row["case"]["fault"] == "none"]
    found = [row["result"] for row in sound if row["case"]["parameters"]["part"] == name]
    return found[0] if found else None


def _lines(rows: Rows, name: str) -> list[dict]:
    return (_part(rows, name) or {}).get("lines", [])


def _gap():
    return gap(NEEDS, COMMAND)


def _missing(rows: Rows) -> Table:
    return ["not measured"], [[NOT_MEASURED]]


# ---- beside others -------------------------------------------------------------------------------


@style.styled
def sharing(rows: Rows):
    """Cycles of a product over its cycles alone, a bar a bystander; a mark for its time, in which
    the clock counts as well. Beside each bar what the counters say of the chip."""
    lines = _lines(rows, "sharing")
    if not lines:
        return _gap()
    gemms = list(dict.fromkeys(line["gemm"] for line in lines))
    figure = style.canvas(style.WIDTH, 0.9 + 0.42 * len(lines))
    panels = figure.subplots(len(gemms), 1, sharex=True, squeeze=False)[:, 0]
    for axes, gemm in zip(panels, gemms, strict=True):
        own = [line for line in lines if line["gemm"] == gemm]
        for y, line in enumerate(own):
            ratio = line["ratio"]
            axes.barh(y, line["cycles_ratio"] - 1, left=1, height=0.55, color=CYCLES, lw=0,
                      gid="cycles")  # fmt: skip
            axes.hlines(y, ratio["p10"], ratio["p90"], color=style.INK, lw=1.2)
            axes.plot([ratio["median"]], [y], marker="D", ms=6, color=TIME, ls="", gid="time")
            most = max(line["cycles_ratio"], ratio["p90"])
            axes.annotate(_state(line), (most, y), (8, 0), textcoords="offset points",
                          va="center", fontsize=8.5)  # fmt: skip
        axes.axvline(1, color=style.INK, lw=1)
        axes.set_title(gemm)
        axes.tick_params(axis="y", length=0)
        axes.set_yticks(range(len(own)), [beside(line) for line in own], color=style.INK)
        axes.set_ylim(len(own) - 0.5, -0.6)
    most = max(max(line["cycles_ratio"], line["ratio"]["p90"]) for line in lines)
    panels[-1].set_xlim(0.97, 1 + 2.1 * (most - 1))
    panels[-1].set_xlabel("over the product alone: bar, cycles; mark, time (p10 to p90)")
    return figure


def beside(line: dict) -> str:
    """`32 SMs held`, or what takes none."""
    return f"{line['sms']} {line['beside']}" if line["sms"] else line["beside"]


def _state(line: dict) -> str:
    return (
        f"tensor cores {line['tensor_cycles']:.0%}   {line['mhz']:,.0f} MHz   memory "
        f"{line['dram_read'] / GB:.2f} + {line['dram_written'] / GB:.2f} GB   "
        f"L2 {line['l2'] / GB:.1f} GB"
    )


def sharing_alt(rows: Rows) -> str:
    told = [
        f"{line['gemm']} beside {beside(line)}: cycles {line['cycles_ratio']:.3f}, time "
        f"{line['ratio']['median']:.3f}, tensor cores at work {line['tensor_cycles']:.0%}"
        for line in _lines(rows, "sharing") if line["beside"] != "alone"
    ]  # fmt: skip
    if not told:
        return NOT_MEASURED
    return f"Cycles and time of a product over those alone. {'; '.join(told)}."


def sharing_table(rows: Rows) -> Table:
    lines = _lines(rows, "sharing")
    if not lines:
        return _missing(rows)
    header = ["product", "beside", "moves alone, GB/s", "µs (p10, p90)", "time / alone (p10, p90)",
              "cycles / alone", "memory read, MB", "memory written, MB", "L2, MB",
              "SMs with a warp", "tensor cores", "MHz"]  # fmt: skip
    body = [
        [line["gemm"], beside(line), f"{line['gb_per_s']:,.0f}" if "gb_per_s" in line else "-",
         f"{line['median_us']:,.1f} ({line['p10_us']:,.1f}, {line['p90_us']:,.1f})",
         spread(line["ratio"], "{:.3f}".format), f"{line['cycles_ratio']:.3f}",
         *(f"{line[name] / MB:,.0f}" for name in ("dram_read", "dram_written", "l2")),
         *(f"{line[name]:.0%}" for name in ("sm_cycles", "tensor_cycles")), f"{line['mhz']:,.0f}"]
        for line in lines
    ]  # fmt: skip
    return header, body


# ---- each kernel by itself -----------------------------------------------------------------------


def _kernels(rows: Rows) -> list[dict]:
    return [*_lines(rows, "calibration"), *_lines(rows, "kernels")]


@style.styled
def loads(rows: Rows):
    """Left: bytes of memory over those that a kernel cannot do without. Right: for which part of
    the cycles tensor cores were at work, and what share of a copy's rate the memory gave."""
    lines = _kernels(rows)
    if not lines:
        return _gap()
    names, ys = [line["kernel"] for line in lines], range(len(lines))
    figure = style.canvas(style.WIDTH, 1.0 + 0.3 * len(lines))
    left, right = figure.subplots(1, 2, sharey=True)
    for name, least, colour, mark in (("dram_read", "read", READ, "o"),
                                      ("dram_written", "written", WRITTEN, "s")):  # fmt: skip
        left.plot([line[name] / line[least] for line in lines], list(ys), marker=mark, ms=6, ls="",
                  color=colour, label=least, gid=least)  # fmt: skip
    left.axvline(1, color=style.LIMIT, lw=1.1, zorder=0)
    left.set_title("memory, over what is needed")
    left.set_xlabel("bytes counted / bytes of operands and results, each once")
    right.barh([y - 0.19 for y in ys], [line["tensor_cycles"] for line in lines], height=0.36,
               color=TENSOR, lw=0, label="tensor cores at work", gid="tensor")  # fmt: skip
    shares = [_rate(line) / _rate(lines[0]) for line in lines]
    right.barh([y + 0.19 for y in ys], shares, height=0.36, color=READ, lw=0,
               label="memory rate / a copy's", gid="rate")  # fmt: skip
    right.set_title("busy")
    right.set_xlabel("share")
    for axes in (left, right):  # above what they tell of, which may reach everywhere
        axes.legend(frameon=False, fontsize=8.5, loc="lower right", ncols=2, borderaxespad=0,
                    bbox_to_anchor=(1, 1))  # fmt: skip
    left.set_yticks(list(ys), names, color=style.INK)
    left.set_ylim(len(lines) - 0.4, -0.6)
    return figure


def _rate(line: dict) -> float:
    """GB/s, read and written."""
    return (line["dram_read"] + line["dram_written"]) / line["us"] / 1e3


def loads_alt(rows: Rows) -> str:
    told = [
        f"{line['kernel']}: read {line['dram_read'] / line['read']:.3f}, written "
        f"{line['dram_written'] / line['written']:.3f} of the bytes needed, tensor cores "
        f"{line['tensor_cycles']:.0%}"
        for line in _kernels(rows)
    ]
    return f"What each kernel moves. {'; '.join(told)}." if told else NOT_MEASURED


def loads_table(rows: Rows) -> Table:
    lines = _kernels(rows)
    if not lines:
        return _missing(rows)
    header = ["kernel", "µs", "memory read, MB", "/ needed", "memory written, MB", "/ needed",
              "memory, GB/s", "L2, MB", "SMs with a warp", "tensor cores", "MHz"]  # fmt: skip
    body = [
        [line["kernel"], f"{line['us']:,.1f}", f"{line['dram_read'] / MB:,.0f}",
         f"{line['dram_read'] / line['read']:.3f}", f"{line['dram_written'] / MB:,.0f}",
         f"{line['dram_written'] / line['written']:.3f}", f"{_rate(line):,.0f}",
         f"{line['l2'] / MB:,.0f}", f"{line['sm_cycles']:.0%}", f"{line['tensor_cycles']:.0%}",
         f"{line['mhz']:,.0f}"]
        for line in lines
    ]  # fmt: skip
    return header, body


# ---- over time -----------------------------------------------------------------------------------

BUSY = 0.01  # of all cycles with a warp on the mean SM
TRACKS = (
    ("busy, of all cycles", (("tensor_cycles", "tensor cores", TENSOR), ("sm_cycles", "SMs", SMS))),
    ("memory, GB/s", (("dram_read", "read", READ), ("dram_written", "written", WRITTEN))),
    ("L2, GB/s", (("l2", "asked for", L2),)),
    ("clock, MHz", (("mhz", "SMs", style.INK),)),
)


def _ways(rows: Rows) -> dict[str, dict[str, list[float]]]:
    """Way -> its counters from the first interval in which an SM had work to the last."""
    found = {}
    for way, seen in (_part(rows, "timeline") or {}).get("timeline", {}).items():
        busy = [n for n, share in enumerate(seen["sm_cycles"]) if share > BUSY]
        if busy:
            kept = slice(busy[0], busy[-1] + 1)
            start = seen["us"][max(busy[0] - 1, 0)]
            found[way] = {name: each[kept] for name, each in seen.items()}
            found[way]["us"] = [us - start for us in seen["us"][kept]]
    return found


@style.styled
def over_time(rows: Rows):
    """A column a way through the layer, a track a counter, on one axis of time."""
    ways = _ways(rows)
    if not ways:
        return _gap()
    figure = style.canvas(style.WIDTH, 6.0)
    grid = figure.subplots(len(TRACKS), len(ways), sharex=True, sharey="row", squeeze=False)
    for column, (way, seen) in enumerate(ways.items()):
        for axes, (title, curves) in zip(grid[:, column], TRACKS, strict=True):
            for name, label, colour in curves:
                axes.step(seen["us"], seen[name], where="pre", lw=1, color=colour, label=label,
                          gid=name)  # fmt: skip
            axes.set_ylim(0, 1.1 * max(max(w[name]) for w in ways.values() for name, *_ in curves))
            if not column:
                axes.set_ylabel(title)
        grid[0, column].set_title(way)
        grid[-1, column].set_xlabel("µs")
    for axes, (_, curves) in zip(grid[:, -1], TRACKS, strict=True):
        if len(curves) > 1:
            axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def over_time_alt(rows: Rows) -> str:
    ways = _ways(rows)
    if not ways:
        return NOT_MEASURED
    told = [f"{way}: {seen['us'][-1]:,.0f} µs, tensor cores {_mean(seen, 'tensor_cycles'):.0%}, "
            f"memory up to {max(map(sum, zip(seen['dram_read'], seen['dram_written']))):,.0f} GB/s"
            for way, seen in ways.items()]  # fmt: skip
    return f"Counters over one forward with nothing sent. {'; '.join(told)}."


def over_time_table(rows: Rows) -> Table:
    ways = _ways(rows)
    if not ways:
        return _missing(rows)
    header = ["forward", "µs", "tensor cores, mean", "SMs, mean", "memory read, GB/s, mean",
              "memory written, GB/s, mean", "L2, GB/s, mean", "MHz, least",
              "MHz, most"]  # fmt: skip
    body = [
        [way, f"{seen['us'][-1]:,.0f}", f"{_mean(seen, 'tensor_cycles'):.0%}",
         f"{_mean(seen, 'sm_cycles'):.0%}",
         *(f"{_mean(seen, name):,.0f}" for name in ("dram_read", "dram_written", "l2")),
         f"{min(seen['mhz']):,.0f}", f"{max(seen['mhz']):,.0f}"]
        for way, seen in ways.items()
    ]  # fmt: skip
    return header, body


def _mean(seen: dict, name: str) -> float:
    return sum(seen[name]) / len(seen[name])


HOW = "Hardware counters of one GPU, read while everything runs as it does; nothing is serialised. "
SHARING = Plot(
    "What a product pays for, by hardware counters",
    sharing,
    sharing_alt,
    sharing_table,
    HOW + "Bystanders take one thing at a time. Cycles leave the clock out, which is another one "
    "where fewer SMs multiply. Bytes of a call and SMs with a warp are those of both. Over all SMs "
    "of the chip, so tensor cores of those that a bystander has are idle ones.",
)
LOADS = Plot(
    "What each kernel moves and keeps busy",
    loads,
    loads_alt,
    loads_table,
    HOW + "The first line is a copy of known bytes, for which the counters are held to 2 %. What "
    "leaves a fused product is written twice where a peer's half is copied to the caller. Each "
    "kernel runs by itself until the clock has settled: times of two lines share no state. A few "
    "per cent of tensor cores are counted where nothing is multiplied, too: why was not looked "
    "into.",
)
OVER_TIME = Plot(
    "The layer's forward over time",
    over_time,
    over_time_alt,
    over_time_table,
    HOW + "First product, the pass between, second product; nothing is sent. `none` packs ahead of "
    "the first and behind the second, and is one call by itself: between two launches the chip may "
    "wait for the host. The counters start in a pause, so the clock is that of the first "
    "milliseconds, not a settled one.",
)
