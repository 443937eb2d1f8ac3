"""What a fixed order of additions costs: time of the whole forward and of each product, memory.

Every ratio is paired: both sides were timed in the same round, interleaved call by call. Where
nothing was timed (a CPU), the drawings are a box that says what would.
"""

from __future__ import annotations

from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from . import Plot, Rows, Table, contracts, style
from . import rows as of

# An opponent: name -> how it is drawn. Neither is a contract, so neither has a contract's colour.
OPPONENTS = {
    "official": {"color": style.INK, "ls": (0, (4, 2)), "lw": 1.6},
    "official compiled": {"color": style.MUTED, "ls": (0, (1, 1.5)), "lw": 2.0},
}


def timed(rows: Rows, what: str) -> dict[str, list[dict]]:
    """Contract -> its timed lines, ascending in M."""
    found = sorted(contracts.lines(rows, what, timed=True), key=lambda line: line["m"])
    return of.grouped(found, lambda line: line["contract"])


def opponents(found: dict[str, list[dict]]) -> list[str]:
    """The layers that the forward was timed against."""
    every = [name for lines in found.values() for line in lines for name in line.get("ratios", {})]
    return list(dict.fromkeys(every))


def _batches(axes, found: list[dict]) -> None:
    """M on a logarithmic axis, every measured one that has room named."""
    sizes = sorted({line["m"] for line in found})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{m:,}" for m in sizes])
    axes.set_xlim(sizes[0] / 1.6, sizes[-1] * 1.6)
    axes.minorticks_off()


def _micro(us: float, _=None) -> str:
    return f"{us / 1000:g} ms" if us >= 1000 else f"{us:g} µs"


# ---- the whole forward ---------------------------------------------------------------------------


@style.styled
def cost(rows: Rows):
    """Time of one forward (µs) against M, both logarithmic, over what the device allows at most;
    below, for each official layer, the paired ratio ours / theirs with its p10 to p90."""
    found = timed(rows, "ffn")
    return curves(found, "time of one forward") if found else contracts.not_measured()


def curves(found: dict[str, list[dict]], title: str):
    """contract -> timed lines, as a panel of times under `title` and one of ratios an opponent."""
    names, every = opponents(found), [line for lines in found.values() for line in lines]
    figure = style.canvas(style.WIDTH, 3.6 + 1.9 * len(names))
    panels = figure.subplots(
        1 + len(names), 1, squeeze=False, height_ratios=[3.2] + [1.9] * len(names)
    )[:, 0]
    _latency(panels[0], found, names)
    panels[0].set_title(title)
    for axes, name in zip(panels[1:], names):
        _ratio(axes, found, name)
    for axes in panels:
        _batches(axes, every)
    panels[-1].set_xlabel("rows of the batch M")
    marks = [Line2D([], [], label=c, markersize=5, **contracts.look(c)) for c in found]
    marks += [Line2D([], [], label=name, **OPPONENTS.get(name, {})) for name in names]
    figure.legend(handles=marks, loc="outside upper right", ncols=min(4, len(marks)), frameon=False,
                  fontsize=8.5)  # fmt: skip
    return figure


def _latency(axes, found, names) -> None:
    first = next(iter(found.values()))
    ms, floor = ([line[f] for line in first] for f in ("m", "floor_us"))
    bottom = min(floor) / 1.6
    axes.fill_between(ms, floor, bottom, color=style.WHOLE, lw=0, zorder=0)
    axes.text(
        0.98, 0.08, "below this device's own copy\nand best library product", ha="right",
        va="bottom", fontsize=8.5, color=style.MUTED, transform=axes.transAxes,
    )  # fmt: skip
    for name in names:
        at = [(line["m"], line[f"{name}_us"]) for line in first if f"{name}_us" in line]
        axes.plot(*zip(*at), **OPPONENTS.get(name, {}))
    for contract, lines in found.items():
        times = [line["median_us"] for line in lines]
        axes.plot([line["m"] for line in lines], times, markersize=4.5, lw=1.4,
                  **contracts.look(contract))  # fmt: skip
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(_micro)
    axes.minorticks_off()
    axes.set_ylim(bottom=bottom)


def _ratio(axes, found, name) -> None:
    for contract, lines in found.items():
        known = [(line["m"], line["ratios"][name]) for line in lines if name in line["ratios"]]
        ms = [m for m, _ in known]
        low, middle, high = ([r[f] for _, r in known] for f in ("p10", "median", "p90"))
        look = contracts.look(contract)
        axes.fill_between(ms, low, high, color=look["color"], alpha=0.18, lw=0, gid="band")
        axes.plot(ms, middle, markersize=4.5, lw=1.4, **look)
    axes.axhline(1.0, color=style.LIMIT, lw=1.3, gid="even")
    axes.set_title(f"ours / {name}: below 1 ours is faster")


def cost_alt(rows: Rows) -> str:
    return ratios_alt(timed(rows, "ffn"), "one forward") or contracts.NOT_MEASURED


def ratios_alt(found: dict[str, list[dict]], of_what: str) -> str:
    """The text alternative of `curves`; "" where nothing was timed."""
    parts = []
    for name in opponents(found):
        for contract, lines in found.items():
            ratios = [(line["ratios"][name]["median"], line["m"]) for line in lines]
            (best, at), (worst, there) = min(ratios), max(ratios)
            parts.append(
                f"{contract} {best:.3f} (M = {at:,}) to {worst:.3f} (M = {there:,}) of {name}"
            )
    if not found:
        return ""
    ms = [line["m"] for line in next(iter(found.values()))]
    return (
        f"Time of {of_what} against M = {ms[0]:,} to {ms[-1]:,}, beside the official layer. "
        f"Paired ratio of times, below 1 ours is faster: {'; '.join(parts)}."
    )


def cost_table(rows: Rows) -> Table:
    return curves_table(timed(rows, "ffn")) or (["not measured"], [[contracts.NOT_MEASURED]])


def curves_table(found: dict[str, list[dict]]) -> Table | None:
    """One line an M and contract: time, floor, ratios; None where nothing was timed."""
    names = opponents(found)
    header = ["M", "contract", "schedule", "median µs", "p10", "p90", "floor µs", "TFLOP/s"]
    header += [f"/ {name} (p10, p90)" for name in names]
    body = [
        [
            f"{line['m']:,}", contract, line["schedule"],
            *(f"{line[f]:.1f}" for f in ("median_us", "p10_us", "p90_us", "floor_us", "tflops")),
            *(told(line["ratios"].get(name)) for name in names),
        ]
        for contract, lines in found.items() for line in lines
    ]  # fmt: skip
    return (header, body) if body else None


def told(ratio: dict | None) -> str:
    return f"{ratio['median']:.3f} ({ratio['p10']:.3f}, {ratio['p90']:.3f})" if ratio else "-"


COST = Plot(
    "What it costs, forward",
    cost,
    cost_alt,
    cost_table,
    "Median of interleaved rounds, hot. Grey: below the time in which this device's own copy and "
    "its best product could do it. Band: p10 to p90 of the paired ratios. Red: as fast as theirs.",
)


# ---- the products --------------------------------------------------------------------------------


@style.styled
def gemm_cost(rows: Rows):
    """Throughput of each contract over the library's torch.mm (1.0: the same), a panel a product,
    against M; a mark a contract with its p10 to p90."""
    found = contracts.lines(rows, "gemm", timed=True)
    if not found:
        return contracts.not_measured()
    operators = of.grouped(found, lambda line: line["operator"])
    named, across = list(dict.fromkeys(line["contract"] for line in found)), 3
    down = -(-len(operators) // across)
    figure = style.canvas(style.WIDTH, 0.6 + 2.1 * down)
    grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, (operator, lines) in zip(grid, operators.items()):
        for line in lines:
            over = throughput(line)
            x = tokens(line) * 1.13 ** (named.index(line["contract"]) - (len(named) - 1) / 2)
            look = contracts.look(line["contract"])
            axes.plot([x], [over["median"]], markersize=4.5, **look)
            axes.vlines([x], over["low"], over["high"], color=look["color"], lw=1.1)
        axes.axhline(1.0, color=style.LIMIT, lw=1.2, zorder=0)
        _batches(axes, [{"m": tokens(line)} for line in found])
        axes.set_yscale("log")
        axes.set_yticks([0.5, 0.7, 1, 1.4, 2, 2.8], minor=False)
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axes.yaxis.set_minor_formatter(lambda y, _: "")
        axes.set_title(operator)
        axes.tick_params(axis="x", rotation=60)
    for axes in grid[len(operators) :]:
        axes.set_axis_off()
    figure.supxlabel("rows of the batch M", fontsize=9, color=style.MUTED)
    figure.supylabel("throughput / torch.mm", fontsize=9, color=style.MUTED)
    marks = [
        Line2D([], [], linestyle="", markersize=6, label=c, **contracts.look(c)) for c in named
    ]
    figure.legend(handles=marks, loc="outside upper right", ncols=min(4, len(marks)), frameon=False,
                  fontsize=8.5)  # fmt: skip
    return figure


def tokens(line: dict) -> int:
    """Rows of the batch: those of the output, or what a weight's gradient is summed over."""
    return line["k"] if line["operator"].endswith("dW") else line["m"]


def throughput(line: dict) -> dict[str, float]:
    """Ours over the library's: the inverse of the ratio of times, so its p90 is the low end."""
    ratio = line["ratios"]["library"]
    return {"median": 1 / ratio["median"], "low": 1 / ratio["p90"], "high": 1 / ratio["p10"]}


def gemm_cost_alt(rows: Rows) -> str:
    parts = []
    for contract, lines in timed(rows, "gemm").items():
        over = [(throughput(line)["median"], line["operator"], tokens(line)) for line in lines]
        low, high = min(over), max(over)
        parts.append(
            f"{contract} {low[0]:.2f} ({low[1]}, M = {low[2]:,}) to {high[0]:.2f} "
            f"({high[1]}, M = {high[2]:,})"
        )
    if not parts:
        return contracts.NOT_MEASURED
    return f"Throughput of each product over the library's torch.mm: {'; '.join(parts)}."


def gemm_cost_table(rows: Rows) -> Table:
    body = [
        [
            line["operator"], f"{line['m']:,} x {line['n']:,} x {line['k']:,}", contract,
            line["schedule"], f"{line['median_us']:.1f}", f"{line['library_us']:.1f}",
            f"{line['floor_us']:.1f}", told(line["ratios"]["library"]),
        ]
        for contract, lines in timed(rows, "gemm").items() for line in lines
    ]  # fmt: skip
    header = ["product", "M x N x K", "contract", "schedule", "median µs", "torch.mm µs",
              "floor µs", "/ torch.mm (p10, p90)"]  # fmt: skip
    return (header, body) if body else (["not measured"], [[contracts.NOT_MEASURED]])


GEMM_COST = Plot(
    "What it costs, product by product",
    gemm_cost,
    gemm_cost_alt,
    gemm_cost_table,
    "Above 1.0 ours does more a second than the library, which promises no order. Line through a "
    "mark: p10 to p90. dW: the reduction runs over the M rows.",
)


# ---- memory --------------------------------------------------------------------------------------


def memory(rows: Rows, what: str = "ffn") -> Table:
    """Peak bytes of one forward or step, weights and input included, one line an M; no line where
    it was not measured."""
    found = [r for r in contracts.about(rows, what) if any(_peak(r).values())]
    names = list(dict.fromkeys(name for row in found for name in _peak(row)))
    body = [
        [f"{row['case']['parameters']['m']:,}", *(_mib(_peak(row).get(n)) for n in names)]
        for row in found
    ]
    return ["M", *(f"{name}, MiB" for name in names)], body


def _peak(row: dict) -> dict:
    return row["result"].get("peak_bytes", {})


def _mib(count: int | None) -> str:
    return f"{count / 2**20:,.1f}" if count else "-"
