"""Figures of a2a-gemm: what each choice in the fused GEMMs costs; the layer with nothing sent."""

from __future__ import annotations

from matplotlib.lines import Line2D

from . import Plot, Rows, Table, style
from .schedules import gap, micro, spread

NEEDS, COMMAND = "needs 1 GPU (SM90)", "python -m rlkernel a2a-gemm"
NOT_MEASURED = f"NOT MEASURED here: {NEEDS}: {COMMAND}"
LOOKS = {
    "gemm1": ("GEMM1, arriving", style.RANKS[0], "o"),
    "gemm2": ("GEMM2, leaving", style.RANKS[1], "s"),
    "dh": ("dH, arriving", style.RANKS[2], "^"),
    "dx": ("dX, leaving", style.RANKS[3], "D"),
}
PANELS = {
    "lead": "tokens that come apart (L: all)",
    "chunks": "flags a rank",
    "programs": "SM budget, programs",
    "raster": "tile rows of a band",
    "bn": "columns of a tile",
}
BIAS = "GEMM2 beside bmm + bias"
WAYS = {"none": style.MUTED, "fused, flags set": style.RANKS[0], "fused, local": "#8fb8dd"}
SHARES = ("forward", "backward")


def _part(row: dict) -> str:
    return row["case"]["parameters"]["part"]


def _gemms(rows: Rows) -> dict[str, dict]:
    """gemm -> its row, of those that were timed without a fault, in the order of a step."""
    found = {_part(row): row for row in rows
             if row["case"]["fault"] == "none" and "floor_us" in row["result"]}  # fmt: skip
    return {name: found[name] for name in LOOKS if name in found}


def points(row: dict, sweep: str, ratio: str = "speed") -> list[tuple[int, dict | None, dict]]:
    """(value, paired ratio of the library's time to its own, line), ascending; the chosen schedule
    stands at its own value. None where a variant has no time: its bits were others."""
    lines = {line["variant"]: line for line in row["result"]["lines"]}
    found = [(li["value"], li) for li in lines.values() if li.get("sweep") == sweep]
    if found:
        found.append((row["result"]["chosen"][sweep], lines["chosen"]))
    return [(value, li.get(ratio), li) for value, li in sorted(found, key=lambda p: p[0])]


# ---- sweeps --------------------------------------------------------------------------------------


@style.styled
def sweeps(rows: Rows):
    """A panel a parameter, a curve a GEMM: torch.bmm / it, paired by round, with its p10 to p90.
    The chosen value has a ring; what is slower than the library is hollow; a cross has other bits
    and no time."""
    gemms = _gemms(rows)
    if not gemms:
        return _gap()
    figure = style.canvas(style.WIDTH, 5.9)
    panels = figure.subplots(2, 3, sharey=True).flat
    for axes, (sweep, title) in zip(panels, PANELS.items()):
        values = sorted({v for row in gemms.values() for v, *_ in points(row, sweep)})
        place = {value: x for x, value in enumerate(values)}
        for name, row in gemms.items():
            _curve(axes, points(row, sweep), row["result"]["chosen"][sweep], place, name)
            if name == "gemm2":
                known = [(place[v], r) for v, r, _ in points(row, sweep, "speed_bias") if r]
                axes.plot([x for x, _ in known], [r["median"] for _, r in known], gid="bias",
                          color=LOOKS[name][1], lw=1, ls=(0, (4, 2)))  # fmt: skip
        axes.axhline(1, color=style.LIMIT, lw=1.1, zorder=0)
        axes.set_xticks(range(len(values)), [str(v) for v in values])
        axes.set_title(title)
    panels = list(figure.axes)
    for axes in panels[::3]:
        axes.set_ylabel("torch.bmm / it")
    _legend(panels[-1], gemms)
    return figure


def _curve(axes, found: list[tuple], chosen: int, place: dict, name: str) -> None:
    _, colour, mark = LOOKS[name]
    known = [(place[value], ratio) for value, ratio, _ in found if ratio]
    xs = [x for x, _ in known]
    low, middle, high = ([ratio[f] for _, ratio in known] for f in ("p10", "median", "p90"))
    axes.fill_between(xs, low, high, color=colour, alpha=0.14, lw=0, gid="band")
    axes.plot(xs, middle, color=colour, lw=1.5, gid=name)
    for x, ratio in known:
        face = style.PAPER if ratio["median"] < 1 else colour
        axes.plot([x], [ratio["median"]], marker=mark, ms=5, color=colour, mfc=face, ls="",
                  gid="slower" if ratio["median"] < 1 else "point")  # fmt: skip
    for value, ratio, _ in found:
        if ratio is None:
            axes.plot([place[value]], [1], marker="x", ms=9, mew=2, color=style.FAIL, gid="wrong")
        elif value == chosen:
            axes.plot([place[value]], [ratio["median"]], marker="o", ms=11, mfc="none", mew=1.1,
                      color=style.INK, ls="", gid="chosen")  # fmt: skip


def _legend(axes, gemms: dict) -> None:
    axes.set_axis_off()
    marks = [Line2D([], [], color=c, marker=m, ms=5, lw=1.5, label=label)
             for label, c, m in (LOOKS[name] for name in gemms)]  # fmt: skip
    if "gemm2" in gemms:
        marks.append(Line2D([], [], color=LOOKS["gemm2"][1], lw=1, ls=(0, (4, 2)), label=BIAS))
    plain = {"color": style.INK, "ls": "", "ms": 6}
    marks += [
        Line2D([], [], **plain | {"ms": 11}, marker="o", mfc="none", label="chosen"),
        Line2D([], [], **plain, marker="o", mfc=style.PAPER, label="slower than torch.bmm"),
        Line2D([], [], color=style.FAIL, marker="x", ls="", mew=2, label="other bits: not timed"),
    ]
    axes.legend(handles=marks, loc="center left", frameon=False, fontsize=9)


def sweeps_alt(rows: Rows) -> str:
    gemms = _gemms(rows)
    if not gemms:
        return f"Choices in the fused GEMMs. {NOT_MEASURED}."
    parts = []
    for sweep, title in PANELS.items():
        told = []
        for name, row in gemms.items():
            each = [f"{v}{'*' if v == row['result']['chosen'][sweep] else ''}: "
                    f"{ratio['median']:.3f}" if ratio else f"{v}: other bits"
                    for v, ratio, _ in points(row, sweep)]  # fmt: skip
            told += [f"{name} {', '.join(each)}"] * bool(each)
        parts += [f"{title}: {'; '.join(told)}"] * bool(told)
    return f"torch.bmm / it by parameter, chosen values starred. {'. '.join(parts)}."


def sweeps_table(rows: Rows) -> Table:
    """Every variant of every GEMM, the library's own lines as well."""
    header = ["GEMM", "parameter", "value", "µs (p10, p90)", "bmm / it (p10, p90)",
              "bmm + bias / it (p10, p90)", "floor µs", "registers", "spills",
              "elements that differ"]  # fmt: skip
    body = []
    for name, row in _gemms(rows).items():
        result = row["result"]
        for line in result["lines"]:
            same = line["variant"] == "chosen"
            value = ", ".join(f"{k} {v}" for k, v in result["chosen"].items()) if same else "-"
            body.append([
                name, line.get("sweep") or line["variant"],
                str(line["value"]) if line.get("sweep") else value, _time(line),
                *(spread(line.get(n), "{:.3f}".format) for n in ("speed", "speed_bias")),
                f"{result['floor_us']:,.1f}",
                *("-" if line.get(n) is None else str(line[n])
                  for n in ("registers", "spills", "differ")),
            ])  # fmt: skip
    return (header, body) if body else (["not measured"], [[NOT_MEASURED]])


def _time(line: dict) -> str:
    if "median_us" not in line:
        return "-"
    return f"{line['median_us']:,.1f} ({line['p10_us']:,.1f}, {line['p90_us']:,.1f})"


SWEEPS = Plot(
    "What each choice costs where nothing is sent",
    sweeps,
    sweeps_alt,
    sweeps_table,
    "One rank alone: flags set ahead, results stored into its own memory. Above the red line it is "
    "faster than torch.bmm of the same numbers, which adds no bias (dashed: with that). Band: p10 "
    "to p90, paired by round. floor: the products at the rate of a large torch.mm of this machine.",
)


# ---- the layer and the pass ----------------------------------------------------------------------


def _lines(rows: Rows, part: str) -> list[dict]:
    return [line for row in rows if _part(row) == part and row["case"]["fault"] == "none"
            for line in row["result"]["lines"] if "median_us" in line]  # fmt: skip


def _shares(rows: Rows) -> list[tuple[str, dict, float]]:
    """(direction, share of a copy's bandwidth, the bar) of the element-wise pass."""
    bars = [row["result"]["bar"] for row in rows if _part(row) == "pass"]
    return [(line["variant"], line["of_copy"], bars[0]) for line in _lines(rows, "pass")
            if line["variant"] in SHARES]  # fmt: skip


@style.styled
def layer(rows: Rows):
    """Left, one call of the layer with nothing sent, its products' floor as a tick (µs, median, p10
    to p90). Right, the bandwidth of the element-wise pass over that of a device copy."""
    whole, shares = _lines(rows, "layer"), _shares(rows)
    if not whole and not shares:
        return _gap()
    figure = style.canvas(style.WIDTH, 2.9)
    ratios = [1.7] * bool(whole) + [1] * bool(shares)
    panels = list(figure.subplots(1, len(ratios), width_ratios=ratios, squeeze=False)[0])
    if whole:
        _whole(panels[0], whole)
    if shares:
        _pass(panels[-1], shares)
    return figure


def _whole(left, whole: list[dict]) -> None:
    for y, line in enumerate(whole):
        us = line["median_us"]
        left.barh(y, us, height=0.72, color=WAYS[line["variant"]], lw=0, gid="time")
        left.hlines(y, line["p10_us"], line["p90_us"], color=style.INK, lw=1.2)
        left.plot([line["floor_us"]], [y], marker="|", ms=15, mew=2, color=style.INK, gid="floor")
        ratio = "" if line["variant"] == "none" else f", none / it {line['speed']['median']:.3f}"
        left.annotate(f"{us:,.0f} µs{ratio}", (line["p90_us"], y), (6, 0), va="center",
                      textcoords="offset points", fontsize=8.5)  # fmt: skip
    left.set_yticks(range(len(whole)), [f"{li['pass']}: {li['variant']}" for li in whole],
                    color=style.INK)  # fmt: skip
    left.invert_yaxis()
    left.margins(x=0.32)
    left.set_xlim(left=0)
    left.xaxis.set_major_formatter(micro)
    left.set_title("the layer, nothing sent; tick: floor of its products")


def _pass(right, shares: list[tuple[str, dict, float]]) -> None:
    for x, (_, share, bar) in enumerate(shares):
        colour = style.PASS if share["median"] >= bar else style.FAIL
        right.bar(x, share["median"], width=0.55, color=colour, lw=0, gid="share")
        right.vlines(x, share["p10"], share["p90"], color=style.INK, lw=1.2)
        right.annotate(f"{share['median']:.2f}", (x, 0), (0, 8), ha="center", color=style.PAPER,
                       textcoords="offset points", fontsize=10)  # fmt: skip
        right.axhline(bar, color=style.LIMIT, lw=1.2)
    right.set_xticks(range(len(shares)), [name for name, *_ in shares], color=style.INK)
    right.set_ylim(0, 1.2)
    right.set_title("element-wise pass: bandwidth / a copy's")


def layer_alt(rows: Rows) -> str:
    told = [f"{li['pass']}, {li['variant']}: {li['median_us']:,.0f} µs, none / it "
            f"{li['speed']['median']:.3f}" for li in _lines(rows, "layer")]  # fmt: skip
    told += [f"element-wise pass {name}: {share['median']:.2f} of a copy's bandwidth, bar {bar:g}"
             for name, share, bar in _shares(rows)]  # fmt: skip
    return f"One call with nothing sent. {'; '.join(told) or NOT_MEASURED}."


def layer_table(rows: Rows) -> Table:
    header = ["what", "µs (p10, p90)", "none / it (p10, p90)", "floor µs", "floor / it",
              "of a copy's bandwidth (p10, p90)", "bar", ""]  # fmt: skip
    body = []
    for line in _lines(rows, "layer"):
        name, ratio = f"{line['pass']}: {line['variant']}", spread(line["speed"], "{:.3f}".format)
        body.append([f"layer {name}", _time(line), ratio, *_floor(line), "-", "-", "-"])
    bars = {name: bar for name, _, bar in _shares(rows)}
    for line in _lines(rows, "pass"):
        name, share = line["variant"], line["of_copy"]
        bar = bars.get(name)
        met = "-" if bar is None else "met" if share["median"] >= bar else "missed"
        body.append([f"pass: {name}", _time(line), "-", *_floor(line),
                     spread(share, "{:.3f}".format), f"{bar:g}" if bar else "-", met])  # fmt: skip
    return (header, body) if body else (["not measured"], [[NOT_MEASURED]])


def _floor(line: dict) -> tuple[str, str]:
    return f"{line['floor_us']:,.1f}", f"{line['floor_us'] / line['median_us']:.2f}"


LAYER = Plot(
    "The layer and its element-wise pass, nothing sent",
    layer,
    layer_alt,
    layer_table,
    "none packs and unpacks as it would around an exchange. Fused, flags set: what a live call of "
    "one rank computes and stores. Red line: the bar of 0.75 of a copy that moves its bytes.",
)


def _gap():
    return gap(NEEDS, COMMAND)
