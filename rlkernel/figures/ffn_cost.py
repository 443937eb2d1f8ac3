"""What the deterministic FFN costs: a training step on one GPU, each layout of it, and how near it
comes to what the device can do.

Every ratio is paired: both sides were timed in the same round, interleaved call by call. Where
nothing was timed, the drawings are a box that says what would.
"""

from __future__ import annotations

from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from . import Plot, Rows, Table, contracts, cost, style
from . import rows as of

STEP = f"{contracts.COMMAND} --what train"
LAYOUT = f"{contracts.COMMAND} --what time --layout tp2,tp2_sp"
KINDS = {"forward": "forward", "step": "forward + backward"}
MODES = {"eager": "plain calls", "graph": "CUDA graphs"}


def _gap_table(command: str, needs: str) -> Table:
    return ["not measured"], [[contracts.gap(command, needs)]]


# ---- a training step -----------------------------------------------------------------------------


def _mode(rows: Rows) -> str:
    """How the rows were timed: graphs on all sides, or on none."""
    modes = dict.fromkeys(of.option(row, "graph") for row in contracts.about(rows, "train"))
    return " and ".join(MODES["graph" if mode == "True" else "eager"] for mode in modes)


@style.styled
def train(rows: Rows):
    """Time of forward + backward (µs) against M, both logarithmic, over what the device allows at
    most; below, for each official layer, the paired ratio ours / theirs with its p10 to p90."""
    found = cost.timed(rows, "train")
    if not found:
        return contracts.not_measured(STEP)
    return cost.curves(found, f"time of forward + backward, {_mode(rows)}")


def train_alt(rows: Rows) -> str:
    said = cost.ratios_alt(cost.timed(rows, "train"), f"forward + backward, {_mode(rows)},")
    return said or contracts.gap(STEP)


def train_table(rows: Rows) -> Table:
    return cost.curves_table(cost.timed(rows, "train")) or _gap_table(STEP, "a GPU")


TRAIN = Plot(
    "What it costs, forward and backward",
    train,
    train_alt,
    train_table,
    "dX and all three dW. Median of interleaved rounds, hot. Grey: below the time in which this "
    "device's own copy and its best product could do it. Red: as fast as theirs.",
)


# ---- layouts -------------------------------------------------------------------------------------


def layouts(rows: Rows) -> list[tuple[dict, dict]]:
    """(row, line) of everything that was timed over several ranks."""
    found = contracts.about(rows, "time")
    return [(row, line) for row in found for line in row["result"]["lines"] if "mode" in line]


def drawn(found: list[tuple[dict, dict]]) -> list[tuple[dict, dict]]:
    """One line a contract, where it was timed in several ways: the first of them."""
    first: dict[tuple, tuple[dict, dict]] = {}
    for row, line in found:
        at = (row["key"], *(line[name] for name in ("operator", "mode", "contract")))
        first.setdefault(at, (row, line))
    return list(first.values())


def transport(row: dict) -> str:
    """Who moved the bytes of a row, as its paths say it."""
    named = {path.rpartition(" by ")[2] for path in row.get("paths", {}).values() if " by " in path}
    return ", ".join(sorted(named)) or "nothing moved"


def _place(row: dict, line: dict) -> str:
    return f"{of.option(row, 'layout')}\n{MODES[line['mode']]}"


@style.styled
def per_layout(rows: Rows):
    """Time of the slowest rank over the official layer's on one rank, a column an M, a panel for
    forward and one for forward + backward; a mark a contract with its p10 to p90."""
    found = [(row, line) for row, line in drawn(layouts(rows)) if "ratio" in line]
    if not found:
        return contracts.not_measured(LAYOUT, "2 GPUs")
    ms = sorted({int(of.option(row, "m")) for row, _ in found})
    places = list(dict.fromkeys(_place(*one) for one in found))
    named = list(dict.fromkeys(line["contract"] for _, line in found))
    figure = style.canvas(style.WIDTH, 5.6)
    grid = figure.subplots(len(KINDS), len(ms), sharex=True, squeeze=False)
    for kind, panels in zip(KINDS, grid):
        for m, axes in zip(ms, panels):
            here = [(row, line) for row, line in found
                    if line["operator"] == kind and int(of.option(row, "m")) == m]  # fmt: skip
            _marks(axes, here, places, named)
            axes.set_title(f"{KINDS[kind]}, M = {m:,}")
    figure.supylabel("ours, slowest rank / official on one", fontsize=9, color=style.MUTED)
    marks = [Line2D([], [], ls="", markersize=6, label=c, **contracts.look(c)) for c in named]
    figure.legend(handles=marks, loc="outside upper right", ncols=min(4, len(marks)), frameon=False,
                  fontsize=8.5)  # fmt: skip
    return figure


def _marks(axes, found: list[tuple[dict, dict]], places: list[str], named: list[str]) -> None:
    for row, line in found:
        aside = 0.14 * (named.index(line["contract"]) - (len(named) - 1) / 2)
        x, ratio = places.index(_place(row, line)) + aside, line["ratio"]
        look = contracts.look(line["contract"])
        axes.vlines([x], ratio["p10"], ratio["p90"], color=look["color"], lw=1.3, gid="spread")
        filled = look["color"] if line["mode"] == "graph" else style.PAPER
        axes.plot([x], [ratio["median"]], markersize=6, ls="", markerfacecolor=filled, **look)
    axes.axhline(1.0, color=style.LIMIT, lw=1.2, zorder=0, gid="even")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.minorticks_off()
    axes.set_xticks(range(len(places)), places, color=style.INK)
    axes.set_xlim(-0.5, len(places) - 0.5)


def per_layout_alt(rows: Rows) -> str:
    parts = [
        f"{of.option(row, 'layout')} M = {int(of.option(row, 'm')):,} {KINDS[line['operator']]}, "
        f"{MODES[line['mode']]}, {line['contract']}: {line['ratio']['median']:.2f}"
        for row, line in drawn(layouts(rows)) if "ratio" in line
    ]  # fmt: skip
    if not parts:
        return contracts.gap(LAYOUT, "2 GPUs")
    return (
        "Wall time of the slowest rank of each layout over the faster official layer's on one "
        f"rank, below 1 ours is faster: {'; '.join(parts)}."
    )


def per_layout_table(rows: Rows) -> Table:
    """One line a layout, M, kind, mode and variant: time, ratios, peak memory, who moved bytes."""
    found = layouts(rows)
    names = list(dict.fromkeys(name for _, line in found for name in line["ratios"]))
    header = ["layout", "M", "what", "mode", "contract", "dX", "dW", "slowest rank, median µs",
              "p10", "p90", "floor µs", *(f"/ {name} (p10, p90)" for name in names),
              "peak MiB a rank", "transport"]  # fmt: skip
    body = [
        [
            of.option(row, "layout"), f"{int(of.option(row, 'm')):,}", KINDS[line["operator"]],
            MODES[line["mode"]], line["contract"], line["dx"], line["dw"],
            *(f"{line[f]:.1f}" for f in ("median_us", "p10_us", "p90_us")),
            f"{line['floor_us']:.1f}" if line["floor_us"] else "-",
            *(cost.told(line["ratios"].get(name)) for name in names),
            _peak(row, line), transport(row),
        ]
        for row, line in found
    ]  # fmt: skip
    return (header, body) if body else _gap_table(LAYOUT, "2 GPUs")


def _peak(row: dict, line: dict) -> str:
    found = row["result"].get("peak_bytes", {}).get(line["operator"], {}).get(line["variant"])
    return f"{found / 2**20:,.1f}" if found else "-"


def rivals(rows: Rows) -> Table:
    """What each layout was timed against, and what kept a time from being taken."""
    body = []
    for row in contracts.about(rows, "time"):
        result = row["result"]
        said = {**result.get("opponents", {}), "CUDA graph": result.get("not_captured"),
                "times": result.get("not_measured")}  # fmt: skip
        told = "; ".join(f"{name}: {text}" for name, text in said.items() if text)
        beside = result.get("beside_bytes")
        body.append([of.option(row, "layout"), f"{int(of.option(row, 'm')):,}", told,
                     f"{beside / 2**20:,.0f}" if beside else "-"])  # fmt: skip
    return ["layout", "M", "opponents and gaps", "outside torch's allocator, MiB"], body


PER_LAYOUT = Plot(
    "What each layout costs",
    per_layout,
    per_layout_alt,
    per_layout_table,
    "All ranks start at one instant; a sample is the wall time of the slowest. Theirs: the faster "
    "of the plain and the compiled official layer, whole on every rank, in the same rounds. "
    "Filled: CUDA graphs on both sides, open: plain calls on both. The table's floor is without "
    "communication.",
)


# ---- roofline ------------------------------------------------------------------------------------


def work(row: dict) -> tuple[int, int]:
    """(floating-point operations, bytes at least) of one call of a forward or a step.

    Bytes: weights, x and y once; a step reads the weights twice, writes dW, and moves x twice.
    """
    m, h, i = (int(of.option(row, name)) for name in ("m", "hidden", "intermediate"))
    if of.option(row, "what") == "ffn":
        return 6 * m * h * i, 2 * (3 * h * i + 2 * m * h)
    return 18 * m * h * i, 2 * (9 * h * i + 5 * m * h)


def single(rows: Rows) -> list[tuple[dict, dict]]:
    """(row, line) of every timed forward and step of one rank."""
    found = contracts.about(rows, "ffn") + contracts.about(rows, "train")
    return [(r, line) for r in found for line in r["result"]["lines"] if line.get("median_us")]


def ceilings(rows: Rows) -> dict[str, float] | None:
    """{"bytes_per_us", "flops_per_us"} of the device, as the rows' floors were made with them.

    A floor is the larger of two quotients, so each ceiling is the largest quotient that any floor
    gives: exact where the rows reach from few tokens to many. None where nothing was timed.
    """
    told = next((r["result"]["ceilings"] for r in rows if r["result"].get("ceilings")), None)
    found = single(rows)
    if told or not found:
        return told
    return {
        "flops_per_us": max(work(row)[0] / line["floor_us"] for row, line in found),
        "bytes_per_us": max(work(row)[1] / line["floor_us"] for row, line in found),
    }


@style.styled
def roofline(rows: Rows):
    """Throughput (TFLOP/s) against operations a byte, both logarithmic, under the roof that this
    device's copy and its best product make; a mark a contract, filled for a forward."""
    found, most = single(rows), ceilings(rows)
    if not found:
        return contracts.not_measured()
    figure = style.canvas(style.WIDTH, 4.4)
    axes = figure.subplots()
    xs = sorted({work(row)[0] / work(row)[1] for row, _ in found})
    ends = [xs[0] / 1.7, most["flops_per_us"] / most["bytes_per_us"], xs[-1] * 1.7]
    roof = [min(most["flops_per_us"], x * most["bytes_per_us"]) / 1e6 for x in sorted(ends)]
    bar = {"marker": "_", "color": style.INK}
    axes.plot(sorted(ends), roof, color=style.LIMIT, lw=1.5, gid="roof")
    for row, line in found:
        look = contracts.look(line["contract"])
        filled = look["color"] if line["operator"] == "forward" else style.PAPER
        flops, moved = work(row)
        axes.plot([flops / moved], [flops / line["median_us"] / 1e6], markersize=6, ls="",
                  markerfacecolor=filled, **look)  # fmt: skip
        if "official_us" in line:
            theirs = flops / line["official_us"] / 1e6
            axes.plot([flops / moved], [theirs], ls="", markersize=12, **bar)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.set_xlabel("operations a byte that must be moved")
    axes.set_ylabel("TFLOP/s")
    named = list(dict.fromkeys(line["contract"] for _, line in found))
    marks = [Line2D([], [], ls="", markersize=6, label=c, **contracts.look(c)) for c in named]
    marks.append(Line2D([], [], ls="", markersize=10, label="official", **bar))
    figure.legend(handles=marks, loc="outside upper right", ncols=min(4, len(marks)), frameon=False,
                  fontsize=8.5)  # fmt: skip
    return figure


def of_roof(row: dict, line: dict, most: dict) -> float:
    """Share of what the device allows at that many operations a byte."""
    flops, moved = work(row)
    return max(flops / most["flops_per_us"], moved / most["bytes_per_us"]) / line["median_us"]


def roofline_alt(rows: Rows) -> str:
    found, most = single(rows), ceilings(rows)
    if not found:
        return contracts.NOT_MEASURED
    parts = []
    for contract, own in of.grouped(found, lambda one: one[1]["contract"]).items():
        low, high = (f(of_roof(*one, most) for one in own) for f in (min, max))
        parts.append(f"{contract} {low:.0%} to {high:.0%} of the roof")
    return (
        f"Roofline: at most {most['flops_per_us'] / 1e6:.0f} TFLOP/s and "
        f"{most['bytes_per_us'] / 1e6:.2f} TB/s. {'; '.join(parts)}."
    )


def roofline_table(rows: Rows) -> Table:
    found, most = single(rows), ceilings(rows)
    header = ["what", "M", "contract", "operations a byte", "TFLOP/s", "of the roof", "official"]
    body = []
    for row, line in found:
        flops, moved = work(row)
        theirs = {"median_us": line["official_us"]} if "official_us" in line else None
        body.append([
            KINDS[line["operator"]], f"{int(of.option(row, 'm')):,}", line["contract"],
            f"{flops / moved:.1f}", f"{flops / line['median_us'] / 1e6:.1f}",
            f"{of_roof(row, line, most):.1%}",
            f"{of_roof(row, theirs, most):.1%}" if theirs else "-",
        ])  # fmt: skip
    return (header, body) if body else _gap_table(contracts.COMMAND, "a GPU")


ROOFLINE = Plot(
    "How near it is to what the device can do",
    roofline,
    roofline_alt,
    roofline_table,
    "Red: the roof, measured: a device copy left of the bend, the best product right of it. "
    "Filled: forward, open: forward + backward, bar: the official layer on the same work.",
)
