"""An All-to-All inside a node and between nodes: where ranks stand, and what a message costs."""

from __future__ import annotations

import math

from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch

from . import Plot, Rows, Table, style
from . import rows as of

COMMAND = "python -m rlkernel exchange --device cuda --nproc 2"
INSIDE, BETWEEN, BOTH = style.RANKS[0], style.SUM, style.RANKS[3]
MARKS = {"group": "o", "inside": "s", "across": "D"}
KINDS = {"real nodes": "real nodes", "emulated nodes": "emulated nodes of one host"}


def where(row: dict) -> str:
    """`1 node`, `2 agents of one host`, `2 emulated nodes of one host`, `2 real nodes`."""
    at = row["result"].get("topology") or {"nodes": 1, "kind": ""}
    if at["nodes"] == 1:
        return "1 node"
    known = [name for start, name in KINDS.items() if at["kind"].startswith(start)]
    return f"{at['nodes']} {known[0] if known else 'agents of one host'}"


def colour(line: dict) -> str:
    """By the links that the bytes take: inside nodes, between nodes, or both."""
    used = [name for name, count in line["peers"].items() if count]
    return BOTH if len(used) > 1 else {"intra": INSIDE, "inter": BETWEEN}[used[0]]


def curves(rows: Rows) -> dict[tuple, list[dict]]:
    """(where, scope, ranks that exchange, way, graph) -> its lines, ascending in the message."""
    found = [(row, line) for row in rows for line in row["result"]["lines"]]
    key = lambda x: (where(x[0]), *(x[1][n] for n in ("scope", "ranks", "way", "graph")))  # noqa: E731
    return {
        name: sorted((line for _, line in same), key=lambda line: line["message"])
        for name, same in of.grouped(found, key).items()
    }


def name(key: tuple) -> str:
    place, scope, ranks, way, graph = key
    who = {"group": f"all {ranks} ranks", "inside": f"{ranks} ranks inside each node",
           "across": f"{ranks} ranks across nodes"}[scope]  # fmt: skip
    return f"{who}, {place}, {way}{', CUDA graph' if graph else ''}"


def size(count: float) -> str:
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:g} {unit}"
    return f"{count:g} B"


def sent(line: dict) -> int:
    """Bytes that leave a rank."""
    return sum(line["sent"].values())


# ---- topology ------------------------------------------------------------------------------------


def _grounds(rows: Rows) -> list[list[dict]]:
    """Rows of one placement each: nodes x ranks of a node, and what the nodes are."""
    key = lambda row: (row["case"]["grid"]["cp"], row["case"]["grid"]["tp"], where(row))  # noqa: E731
    return list(of.grouped(rows, key).values())


def pure(rows: Rows, link: str) -> list[dict]:
    """Lines whose bytes take links of one class only."""
    other = {"intra": "inter", "inter": "intra"}[link]
    lines = [line for row in rows for line in row["result"]["lines"]]
    return [line for line in lines if line["peers"][link] and not line["peers"][other]]


def told(rows: Rows, link: str) -> str:
    """What one class of link gave at least and at most: `from 20 µs, up to 380 GB/s`."""
    found = pure(rows, link)
    if not found:
        return "not timed"
    least = min(line["median_us"] for line in found)
    most = max(line["gb_s"] for line in found)
    return f"from {least:,.0f} µs, up to {most:.3g} GB/s"


@style.styled
def topology(rows: Rows):
    """A panel a placement: a box a node, a disc a rank; lines are links, blue inside a node, red
    between nodes, with what they gave."""
    grounds = _grounds(rows)
    if not grounds:
        return gap()
    figure = style.canvas(style.WIDTH, 0.3 + 2.5 * math.ceil(len(grounds) / 2))
    panels = figure.subplots(math.ceil(len(grounds) / 2), min(2, len(grounds)), squeeze=False)
    for axes in panels.flat:
        style.bare(axes)
    for axes, same in zip(panels.flat, grounds):
        _ground(axes, same)
    return figure


def _ground(axes, rows: Rows) -> None:
    at = rows[0]["result"]["topology"]
    nodes = sorted({rank["node"] for rank in at["ranks"]})
    width = 100 / len(nodes)
    axes.set_xlim(-2, 102)
    axes.set_ylim(-16, 62)
    place = {}
    for node in nodes:
        left = node * width + (6 if len(nodes) > 1 else 20)
        inner = width - (12 if len(nodes) > 1 else 40)
        axes.add_patch(FancyBboxPatch(
            (left, 2), inner, 44, facecolor=style.WHOLE, edgecolor="none",
            boxstyle="round,pad=0,rounding_size=1.5", gid="node",
        ))  # fmt: skip
        mine = [rank for rank in at["ranks"] if rank["node"] == node]
        axes.text(left + 1.5, 44, f"node {node}, host {mine[0]['host']}", va="top", fontsize=8.5)
        for number, rank in enumerate(mine):
            angle = math.pi * (0.5 - 2 * number / len(mine))  # clockwise from the top
            radius = 0.0 if len(mine) == 1 else 1.0
            place[rank["rank"]] = (left + inner / 2 + radius * 0.3 * inner * math.cos(angle),
                                   21 + radius * 13 * math.sin(angle))  # fmt: skip
    for a in at["ranks"]:
        for b in at["ranks"]:
            if a["rank"] < b["rank"]:
                near = a["node"] == b["node"]
                xs, ys = zip(place[a["rank"]], place[b["rank"]])
                axes.plot(xs, ys, color=INSIDE if near else BETWEEN, lw=1.6 if near else 0.9,
                          gid="intra" if near else "inter", zorder=2)  # fmt: skip
    for rank in at["ranks"]:
        axes.plot(*place[rank["rank"]], "o", markersize=17, color=style.INK, zorder=4, gid="rank")
        axes.text(*place[rank["rank"]], str(rank["rank"]), color=style.PAPER, weight="bold",
                  ha="center", va="center", zorder=5, fontsize=8.5)  # fmt: skip
    axes.text(50, 60, f"{where(rows[0])}: {len(at['ranks'])} ranks", ha="center", va="top",
              weight="bold", fontsize=9.5)  # fmt: skip
    for y, (link, tint, word) in zip((-3, -11), LINKS):
        if any(line["peers"][link] for row in rows for line in row["result"]["lines"]):
            axes.text(50, y, f"{word}: {told(rows, link)}", ha="center", va="top", fontsize=8.5,
                      color=tint)  # fmt: skip


LINKS = (("intra", INSIDE, "inside a node"), ("inter", BETWEEN, "between nodes"))


def topology_alt(rows: Rows) -> str:
    parts = []
    for same in _grounds(rows):
        at = same[0]["result"]["topology"]
        links = [f"{word} {told(same, link)}" for link, _, word in LINKS if pure(same, link)]
        parts.append(f"{len(at['ranks'])} ranks on {where(same[0])}: {'; '.join(links)}")
    return f"Where the ranks stood. {'. '.join(parts)}." if parts else not_measured()


def topology_table(rows: Rows) -> Table:
    header = ["placement", "rank", "node", "host", "GPU", "bytes by"]
    body = []
    for same in _grounds(rows):
        at = same[0]["result"]["topology"]
        by = ", ".join(dict.fromkeys(path for row in same for path in row["paths"].values()))
        for told_ in same[0]["result"].get("nccl") or ():
            by += f"; NCCL {told_['ranks']}: {', '.join(told_['transports'])}"
        for rank in at["ranks"]:
            gpu = "-" if rank["gpu"] is None else str(rank["gpu"])
            body.append([f"{where(same[0])}, {at['kind']}", str(rank["rank"]), str(rank["node"]),
                         str(rank["host"]), gpu, by])  # fmt: skip
    return header, body or [["-"] * len(header)]


TOPOLOGY = Plot(
    "Where the ranks stood, and what the links between them gave",
    topology,
    topology_alt,
    topology_table,
    "Blue: links inside a node. Red: links between nodes. The shortest time of a small message and "
    "the highest rate of a large one. Agents and emulated nodes are one machine.",
)


# ---- latency and bandwidth -----------------------------------------------------------------------


@style.styled
def cost(rows: Rows):
    """Left, wall time (µs) of one exchange against the bytes that leave a rank; right, GB/s. Bars:
    p10 to p90. Dotted: the bytes over the rate of one large transfer. All logarithmic."""
    found = curves(rows)
    if not found:
        return gap()
    figure = style.canvas(style.WIDTH, 4.3)
    left, right = figure.subplots(1, 2)
    for key, lines in found.items():
        look = {"color": colour(lines[0]), "marker": MARKS[key[1]], "markersize": 4.5, "lw": 1.5}
        look["ls"] = "-" if key[3] == "process group" else (0, (4, 2))
        look["mfc"] = look["color"] if key[0] == "1 node" else style.PAPER
        look["alpha"] = 0.55 if key[4] else 1.0
        xs = [sent(line) for line in lines]
        left.plot(xs, [line["median_us"] for line in lines], **look)
        left.vlines(xs, [line["p10_us"] for line in lines], [line["p90_us"] for line in lines],
                    color=look["color"], lw=1, alpha=0.5)  # fmt: skip
        left.plot(xs, [line["floor_us"] for line in lines], color=look["color"], lw=0.9,
                  ls=(0, (1, 2)), gid="floor")  # fmt: skip
        right.plot(xs, [line["gb_s"] for line in lines], **look)
    ends = [sent(line) for lines in found.values() for line in lines]
    low, high = (round(math.log2(end(ends))) for end in (min, max))
    ticks = [1 << n for n in range(low, high + 1, max(1, (high - low) // 4))]
    for axes, title in ((left, "wall time of one exchange"), (right, "GB/s that leave a rank")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ticks, [size(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("bytes that leave a rank")
        axes.set_title(title)
    left.yaxis.set_major_formatter(lambda us, _: f"{us / 1000:g} ms" if us >= 1e3 else f"{us:g} µs")
    right.yaxis.set_major_formatter(lambda rate, _: f"{rate:g}")
    _legend(figure, found)
    return figure


def _legend(figure, found: dict[tuple, list[dict]]) -> None:
    marks = [
        Line2D([], [], color=colour(lines[0]), marker=MARKS[key[1]], markersize=5, lw=1.5,
               ls="-" if key[3] == "process group" else (0, (4, 2)), label=name(key),
               mfc=colour(lines[0]) if key[0] == "1 node" else style.PAPER,
               alpha=0.55 if key[4] else 1.0)
        for key, lines in found.items()
    ]  # fmt: skip
    figure.legend(handles=marks, loc="outside lower center", ncols=2, frameon=False, fontsize=8.5)


def cost_alt(rows: Rows) -> str:
    parts = []
    for key, lines in curves(rows).items():
        first, last = lines[0], lines[-1]
        parts.append(
            f"{name(key)}: {first['median_us']:,.0f} µs at {size(sent(first))}, "
            f"{last['median_us']:,.0f} µs and {last['gb_s']:.3g} GB/s at {size(sent(last))}"
        )
    told_ = "; ".join(parts)
    return f"Time and rate of one exchange by message size. {told_}." if parts else not_measured()


def cost_table(rows: Rows) -> Table:
    header = ["exchange", "a rank holds", "leaves over nodes", "leaves inside", "median µs", "p10",
              "p90", "floor µs", "GB/s"]  # fmt: skip
    body = [
        [
            name(key), size(line["message"]), size(line["sent"]["inter"]),
            size(line["sent"]["intra"]),
            *(f"{line[n]:,.1f}" for n in ("median_us", "p10_us", "p90_us", "floor_us")),
            f"{line['gb_s']:.3g}",
        ]
        for key, lines in curves(rows).items()
        for line in lines
    ]  # fmt: skip
    return header, body or [["-"] * len(header)]


COST = Plot(
    "What an exchange costs by message size",
    cost,
    cost_alt,
    cost_table,
    "Median of the slowest rank, p10 to p90. Blue: bytes stay inside nodes; red: they go between "
    "nodes; purple: both. Dotted: the bytes at the rate of one large transfer over these links.",
)


def not_measured() -> str:
    return f"NOT MEASURED here: nothing was timed. On a machine with two GPUs: {COMMAND}"


def gap():
    figure = style.canvas(style.WIDTH, 1.3)
    axes = figure.subplots()
    style.bare(axes)
    box = {"boxstyle": "round,pad=1.1", "facecolor": "#fdf5dc", "edgecolor": "#7a5a00", "ls": "--"}
    axes.text(0.5, 0.5, not_measured().replace(". On", "\nOn"), ha="center", va="center",
              color="#7a5a00", fontsize=10, linespacing=1.7, bbox=box)  # fmt: skip
    return figure
