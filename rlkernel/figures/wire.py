"""Figure of wire: what a sum over ranks costs against its size, beside the library and the link."""

from __future__ import annotations

from . import Plot, Rows, Table, style
from . import rows as of

COMMAND = "python -m rlkernel wire --device cuda"
EVEN = 1.0  # the library's time
WORD = "one word"
# variant -> (name for a reader, how it is drawn)
LOOKS = {
    "library": ("library all-reduce", {"color": style.INK, "ls": (0, (4, 2)), "marker": ""}),
    "process group": ("tree over the process group", {"color": style.RANKS[1], "marker": "s"}),
    "this transport": ("tree over {}", {"color": style.RANKS[0], "marker": "o"}),
}


def _lines(rows: Rows, graph: bool = True) -> dict[str, list[dict]]:
    """variant -> its timed lines, ascending in the message."""
    every = [line for row in rows for line in row["result"]["lines"] if line["graph"] is graph]
    found = of.grouped(sorted(every, key=lambda line: line["message"]), lambda li: li["variant"])
    return {name: found[name] for name in (*LOOKS, WORD) if name in found}


def _groups(rows: Rows) -> dict[int, list[dict]]:
    """Ranks -> their rows that were timed."""
    return of.grouped([row for row in rows if row["result"]["lines"]], of.ranks)


def _name(variant: str, rows: Rows) -> str:
    return LOOKS[variant][0].format(rows[0]["result"]["transport"])


def _bytes(count: int) -> str:
    return f"{count / 2**20:g} MiB" if count >= 1 << 20 else f"{count / 1024:g} KiB"


@style.styled
def cost(rows: Rows):
    """Wall time (µs) of one all-reduce against message size, both logarithmic, over what the link
    allows at most; below, the paired ratio to the library with its p10 to p90. One column a group
    size."""
    groups = _groups(rows)
    if not groups:
        return _not_measured()
    figure = style.canvas(style.WIDTH, 5.6)
    panels = figure.subplots(2, len(groups), squeeze=False, height_ratios=(3.2, 1.8), sharex="col")
    for (size, found), (above, below) in zip(groups.items(), panels.T, strict=True):
        lines = _lines(found)
        _latency(above, lines, found)
        _ratios(below, lines)
        above.set_title(f"{size} ranks, BF16, CUDA graphs")
        messages = sorted({line["message"] for line in lines["library"]})
        below.set_xscale("log", base=2)
        below.set_xticks(messages, [_bytes(m) for m in messages])
        below.minorticks_off()
        below.set_xlabel("message")
    panels[0, 0].set_ylabel("wall time of one all-reduce")
    panels[1, 0].set_ylabel("/ library")
    return figure


def _latency(axes, lines: dict[str, list[dict]], rows: Rows) -> None:
    floor = [(line["message"], line["floor_us"]) for line in lines["library"] if "floor_us" in line]
    bottom = min(line["median_us"] for found in lines.values() for line in found) / 2
    if floor:
        xs, ys = zip(*floor, strict=True)
        axes.fill_between(xs, [max(y, bottom) for y in ys], bottom, color=style.WHOLE, lw=0)
        axes.text(
            xs[-1],
            bottom * 1.15,
            "faster than the link ",
            ha="right",
            color=style.MUTED,
            fontsize=8,
        )
    if WORD in lines:
        least = min(line["median_us"] for line in lines[WORD])
        axes.axhline(least, color=style.MUTED, lw=1, ls=(0, (1, 2)))
        axes.text(
            lines["library"][0]["message"], least, "one word", va="bottom", color=style.MUTED,
            fontsize=8,
        )  # fmt: skip
    for name in (n for n in LOOKS if n in lines):
        xs, ys = zip(*((li["message"], li["median_us"]) for li in lines[name]), strict=True)
        axes.plot(xs, ys, label=_name(name, rows), markersize=5, **LOOKS[name][1])
    axes.set_yscale("log")
    axes.set_ylim(bottom=bottom)
    axes.yaxis.set_major_formatter(
        lambda us, _: f"{us / 1000:g} ms" if us >= 1000 else f"{us:g} µs"
    )
    axes.legend(frameon=False, fontsize=8.5, loc="upper left")


def _ratios(axes, lines: dict[str, list[dict]]) -> None:
    axes.axhline(EVEN, color=style.LIMIT, lw=1)
    axes.text(lines["library"][0]["message"], EVEN, "as fast as the library", va="bottom",
              color=style.LIMIT, fontsize=8)  # fmt: skip
    for line in lines.get("this transport", ()):
        x, ratio = line["message"], line["ratio"]
        axes.vlines(x, ratio["p10"], ratio["p90"], color=style.RANKS[0], lw=1.4)
        axes.plot([x], [ratio["median"]], color=style.RANKS[0], marker="o", markersize=5)
    axes.set_ylim(0, 1.25)


def _not_measured():
    figure = style.canvas(style.WIDTH, 1.3)
    axes = figure.subplots()
    style.bare(axes)
    box = {"boxstyle": "round,pad=1.1", "facecolor": "#fdf5dc", "edgecolor": "#7a5a00", "ls": "--"}
    axes.text(
        0.5, 0.5, f"NOT MEASURED here: needs 2 GPUs\n{COMMAND}", ha="center", va="center",
        color="#7a5a00", fontsize=10, linespacing=1.7, bbox=box,
    )  # fmt: skip
    return figure


def cost_alt(rows: Rows) -> str:
    groups = _groups(rows)
    if not groups:
        return f"NOT MEASURED here: nothing was timed. On a machine with two GPUs: {COMMAND}."
    parts = []
    for size, found in groups.items():
        lines = _lines(found)
        for line in lines.get("this transport", ()):
            floor = f", the link needs {line['floor_us']:.1f}" if "floor_us" in line else ""
            parts.append(
                f"{size} ranks, {_bytes(line['message'])}: {line['median_us']:.1f} µs, "
                f"{line['ratio']['median']:.2f} of the library{floor}"
            )
    return "Wall time of one tree all-reduce against message size. " + "; ".join(parts) + "."


def cost_table(rows: Rows) -> Table:
    header = ["ranks", "message", "variant", "called as", "median µs", "p10", "p90", "/ library",
              "floor µs"]  # fmt: skip
    body = []
    for size, found in _groups(rows).items():
        for graph in (True, False):
            for name, lines in _lines(found, graph).items():
                for line in lines:
                    ratio, floor = line.get("ratio"), line.get("floor_us")
                    body.append([
                        str(size),
                        "2 elements" if name == WORD else _bytes(line["message"]),
                        name if name == WORD else _name(name, found),
                        "graph" if graph else "plain",
                        *(f"{line[key]:.1f}" for key in ("median_us", "p10_us", "p90_us")),
                        f"{ratio['median']:.3f}" if ratio and name != WORD else "-",
                        f"{floor:.1f}" if floor and name != WORD else "-",
                    ])  # fmt: skip
    return (header, body) if body else (["not measured"], [["nothing was timed"]])


COST = Plot(
    "What a sum over ranks costs",
    cost,
    cost_alt,
    cost_table,
    "Of each sample the slowest rank counts. Grey: less than the bytes take at the rate of a copy "
    "engine. Below: time over the library's, sample by sample, median and p10 to p90.",
)
