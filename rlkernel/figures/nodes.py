"""Two nodes: where the ranks stood and what their groups talked over; what a sum costs inside a
node and between nodes."""

from __future__ import annotations

from matplotlib.patches import FancyBboxPatch

from . import Plot, Rows, Table, style

INSIDE, BETWEEN = style.RANKS[0], style.SUM
AXES = {"tp": "TP, over features", "cp": "CP, over tokens"}


def starts(rows: Rows) -> list[dict]:
    """Results of the cases that looked at the ground: where everybody stands."""
    return [r["result"] for r in rows if r["case"]["parameters"]["part"] == "start"]


def _first(rows: Rows) -> dict:
    found = starts(rows)
    return found[0] if found else {"topology": {"kind": "?", "ranks": [], "groups": [], "gpus": 0}}


def how(result: dict, group: dict) -> str:
    """What moved a group's bytes: NCCL's own words where it left a log."""
    for told in result.get("nccl") or ():
        if told["ranks"] == group["ranks"]:
            return ", ".join(told["transports"])
    return "gloo over TCP" if not result["topology"]["gpus"] else "not told"


# ---- topology ------------------------------------------------------------------------------------


@style.styled
def topology(rows: Rows):
    """A box a node, a disc a rank; lines are groups: blue inside a node, red between nodes."""
    result = _first(rows)
    at = result["topology"]
    figure = style.canvas(style.WIDTH * 0.86, 3.7)
    axes = figure.subplots()
    style.bare(axes)
    axes.set_xlim(0, 100)
    axes.set_ylim(-4, 64)
    nodes = sorted({rank["node"] for rank in at["ranks"]})
    place = {}
    for node in nodes:
        x, width = 4 + node * 52, 40
        axes.add_patch(FancyBboxPatch(
            (x, 4), width, 50, facecolor=style.WHOLE, edgecolor="none",
            boxstyle="round,pad=0,rounding_size=1.5", gid="node",
        ))  # fmt: skip
        mine = [rank for rank in at["ranks"] if rank["node"] == node]
        axes.text(x + 1.5, 51.5, f"node {node}", va="top", weight="bold", fontsize=10)
        axes.text(x + width - 1.5, 51.5, f"host {mine[0]['host']}", va="top", ha="right",
                  fontsize=8.5, color=style.MUTED)  # fmt: skip
        for line, rank in enumerate(mine):
            place[rank["rank"]] = (x + width / 2, 38 - 26 * line / max(1, len(mine) - 1))
    for group in at["groups"]:
        _group(axes, result, group, place)
    for rank in at["ranks"]:
        x, y = place[rank["rank"]]
        axes.plot(x, y, "o", markersize=25, color=style.RANKS[rank["tp"]], gid="rank", zorder=4)
        axes.text(x, y, str(rank["rank"]), color=style.PAPER, weight="bold", ha="center",
                  va="center", zorder=5)  # fmt: skip
        gpu = "" if rank["gpu"] is None else f", GPU {rank['gpu']}"
        side = -1 if rank["node"] == 0 else 1
        axes.text(x + side * 4, y, f"CP{rank['cp']} TP{rank['tp']}{gpu}", va="center",
                  ha="right" if side < 0 else "left", fontsize=8.5)  # fmt: skip
    axes.text(50, 62, at["kind"], ha="center", va="top", weight="bold", fontsize=9.5)
    return figure


def _group(axes, result, group, place) -> None:
    """One line a pair of neighbours, the transport written on it."""
    colour = BETWEEN if group["crosses_nodes"] else INSIDE
    points = [place[r] for r in group["ranks"] if r in place]
    for (x, y), (u, v) in zip(points, points[1:]):
        axes.plot([x, u], [y, v], color=colour, lw=2.4, zorder=3, gid=f"group {group['axis']}")
        middle, up = (x + u) / 2, (y + v) / 2
        said = f"{group['axis'].upper()}  {how(result, group)}"
        if group["crosses_nodes"]:
            axes.text(middle, up + 1.6, said, ha="center", va="bottom", color=colour, fontsize=8)
        else:
            axes.text(middle + (2 if x > 50 else -2), up, said, va="center", color=colour,
                      fontsize=8, ha="left" if x > 50 else "right")  # fmt: skip


def topology_alt(rows: Rows) -> str:
    result = _first(rows)
    told = [
        f"{g['axis'].upper()} {g['ranks']} {'between' if g['crosses_nodes'] else 'inside'} "
        f"nodes by {how(result, g)}"
        for g in result["topology"]["groups"]
    ]
    at = result["topology"]
    return f"Ranks on {at['kind']}: {len(at['ranks'])} ranks. {'; '.join(told)}."


def topology_table(rows: Rows) -> Table:
    """One line a group: members, where it lies, transport, algorithm and protocol."""
    body = []
    for row in (r for r in rows if r["case"]["parameters"]["part"] == "start"):
        result, setting = row["result"], row["case"]["parameters"].get("nccl", "default")
        for group in result["topology"]["groups"]:
            told = [t for t in result.get("nccl") or () if t["ranks"] == group["ranks"]]
            choices = ", ".join(c for t in told for c in t["choices"]) or "-"
            body.append([
                setting, group["axis"].upper(), str(group["ranks"]),
                "between nodes" if group["crosses_nodes"] else "inside a node",
                how(result, group), choices,
            ])  # fmt: skip
    header = ["NCCL asked for", "group of", "ranks", "lies", "bytes by", "algorithm/protocol"]
    return header, body


TOPOLOGY = Plot(
    "Where the ranks stood",
    topology,
    topology_alt,
    topology_table,
    "A disc is a rank, its colour the weight shard that it owns. Blue: a sum inside a node. Red: "
    "a sum between nodes.",
)


# ---- latency -------------------------------------------------------------------------------------


def latencies(rows: Rows) -> list[dict]:
    return [r["result"] for r in rows if r["case"]["parameters"]["part"] == "latency"]


def crosses(result: dict, axis: str) -> bool:
    return any(g["crosses_nodes"] for g in result["topology"]["groups"] if g["axis"] == axis)


def _curves(result: dict) -> dict[tuple[str, str], list[dict]]:
    found: dict[tuple[str, str], list[dict]] = {}
    for line in result["lines"]:
        found.setdefault((line["axis"], line["way"]), []).append(line)
    return found


@style.styled
def latency(rows: Rows):
    """Wall time (us) of one sum of two ranks against its size (bytes), both logarithmic."""
    figure = style.canvas(style.WIDTH * 0.72, 3.4)
    axes = figure.subplots()
    for result in latencies(rows)[:1]:
        for (axis, way), lines in _curves(result).items():
            xs, ys = [line["bytes"] for line in lines], [line["median_us"] for line in lines]
            colour = BETWEEN if crosses(result, axis) else INSIDE
            dashed = {"ls": (0, (4, 2))} if way == "tree" else {}
            axes.plot(xs, ys, color=colour, marker="o", markersize=4.5, label=_name(result, axis,
                      way), **dashed)  # fmt: skip
            low, high = ([line[f"{end}_us"] for line in lines] for end in ("fastest", "slowest"))
            axes.vlines(xs, low, high, color=colour, lw=1, alpha=0.5)
        axes.set_xticks(xs, [_bytes(x) for x in xs])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    if latencies(rows):
        axes.set_xticks(xs, [_bytes(x) for x in xs])
        axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda v, _: f"{v / 1000:g} ms" if v >= 1000 else f"{v:g} µs")
    axes.set_xlabel("message")
    axes.set_ylabel("wall time of one sum")
    axes.legend(frameon=False, fontsize=8.5, handlelength=3.6, markerscale=0.6)
    return figure


def _name(result: dict, axis: str, way: str) -> str:
    where = "between nodes" if crosses(result, axis) else "inside a node"
    return f"{axis.upper()}, {where}, by the {way}"


def _bytes(count: int) -> str:
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:g} {unit}"
    return f"{count} B"


def _remark(result: dict) -> str:
    if result["topology"]["kind"] == "real nodes":
        return "two machines"
    shared = ", ranks share GPUs: good for bits, not for timing" if result["shared_gpus"] else ""
    return f"one machine, {result['topology']['kind']}{shared}"


def latency_alt(rows: Rows) -> str:
    parts = []
    for result in latencies(rows)[:1]:
        for (axis, way), lines in _curves(result).items():
            told = f"{lines[0]['median_us']:.0f} to {lines[-1]['median_us']:.0f} µs"
            parts.append(f"{_name(result, axis, way)}: {told}")
        parts.append(f"measured on {_remark(result)}")
    return f"Median wall time of a sum of two ranks against message size. {'; '.join(parts)}."


def latency_table(rows: Rows) -> Table:
    body = [
        [
            _name(result, line["axis"], line["way"]), _bytes(line["bytes"]),
            *(f"{line[f'{n}_us']:.0f}" for n in ("median", "fastest", "slowest")), _remark(result),
        ]
        for result in latencies(rows) for line in result["lines"]
    ]  # fmt: skip
    header = ["sum", "message", "median µs", "fastest µs", "slowest µs", "measured on"]
    return header, body


LATENCY = Plot(
    "A sum inside a node and between nodes",
    latency,
    latency_alt,
    latency_table,
    "Median of the slowest rank; the thin line reaches from the fastest to the slowest sum. "
    "Between emulated nodes the bytes take the network path of one host; where ranks share a GPU "
    "the times are none of a deployment.",
)
