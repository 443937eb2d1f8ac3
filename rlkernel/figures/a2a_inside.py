"""Figure of what SMs do inside the fused kernels of one live call (records/tiles.py)."""

from __future__ import annotations

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from rlkernel.records import tiles

from . import Plot, Rows, Table, schedules, style
from . import rows as of

COMMAND = f"{schedules.COMMAND} --overlap kernel --trace true"
NOT_MEASURED = f"NOT MEASURED here. On a machine with two GPUs: {COMMAND}"
LOOK = {
    tiles.OWN: ("tile of own rows", "#1f5a99"), tiles.FAR: ("tile of a peer's rows", "#8fb8dd"),
    tiles.WAIT: ("waits for a flag", "#c3401f"), tiles.IDLE: ("no tile", "#f1f3f5"),
}  # fmt: skip
CAME, WENT, WAY = "#e3941c", "#2a9079", "#e3941c"
COLOURS = ListedColormap([colour for _, colour in LOOK.values()])


def recorded(rows: Rows) -> list[tuple[str, dict, dict]]:
    """(title, what the row keeps of its timeline, one rank of it), rank by rank."""
    shown = [row for row in rows if row["result"].get("inside") and row["case"]["fault"] == "none"]
    found = []
    for row in shown:
        inside = row["result"]["inside"]
        way = "forward and backward" if of.option(row, "backward").lower() == "true" else "forward"
        sizes = ", ".join(of.option(row, name) for name in ("batch", "tokens", "dim", "k"))
        where = f", {way}, ({sizes})" if len(shown) > 1 else ""
        found += [(f"rank {one['rank']}{where}", inside, one) for one in inside["ranks"]]
    return found


@style.styled
def inside(rows: Rows):
    """SMs against time since the rank's first tile, a panel a rank, ranks above each other on one
    axis: whose rows each SM multiplies, where it waits; flags that were seen and that were raised;
    a bar above while data of peers is on its way."""
    found = recorded(rows)
    if not found:
        return schedules.gap("no call of the fused kernels was recorded", COMMAND)
    figure = style.canvas(style.WIDTH, 0.8 + 1.75 * len(found))
    panels = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, _, rank) in zip(panels, found, strict=True):
        top = max(one["sms"] for one in rank["gemms"])
        for one in rank["gemms"]:
            _gemm(axes, one, top)
        axes.set_ylim(1.16 * top, -1)
        axes.invert_yaxis()
        axes.set_yticks([0, top], ["SM 0", str(top)])
        axes.set_title(title, pad=12)
        axes.set_title(_said(rank), loc="right", fontsize=8.5, weight="normal", color=style.MUTED,
                       pad=12)  # fmt: skip
    panels[-1].set_xlim(0, max(_end(one) for *_, rank in found for one in rank["gemms"]))
    panels[-1].xaxis.set_major_formatter(schedules.micro)
    panels[-1].set_xlabel("since the first tile of that rank; clocks of two GPUs are not compared")
    handles = [Patch(color=colour, label=name) for name, colour in LOOK.values()]
    handles += [
        Line2D([], [], color=CAME, lw=1.4, label="flag of a peer seen"),
        Line2D([], [], color=WENT, lw=1.4, ls="--", label="flag raised for a peer"),
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=6, frameon=False, fontsize=8)
    return figure


def _gemm(axes, one: dict, top: int) -> None:
    start, end = one["start_us"], _end(one)
    kinds = {kind: number for number, kind in enumerate(LOOK)}
    image = np.array([[kinds[kind] for kind in lane] for lane in one["lanes"]])
    axes.imshow(
        image, cmap=COLOURS, vmin=0, vmax=len(LOOK) - 1, aspect="auto", interpolation="none",
        origin="lower", extent=(start, end, 0, one["sms"]), gid=one["gemm"],
    )  # fmt: skip
    for kind, colour, dash in (("arrivals", CAME, "-"), ("releases", WENT, "--")):
        for _, _, us in one[kind]:
            axes.vlines(start + us, 0, 1.12 * top, color=colour, lw=1.4, ls=dash, gid=kind)
    if one["on_way_us"]:
        low, high = one["on_way_us"]
        axes.hlines(1.07 * top, start + low, start + high, color=WAY, lw=3, alpha=0.6, gid="way")
    axes.annotate(one["gemm"], (start, 1.13 * top), fontsize=8, color=style.MUTED,
                  annotation_clip=False)  # fmt: skip


def _end(one: dict) -> float:
    return one["start_us"] + one["span_us"]


def _said(rank: dict) -> str:
    if rank["hidden"] is None:
        return "nothing on its way"
    return f"hidden {rank['hidden']:.3f}, exposed {rank['exposed_us']:,.1f} µs"


def inside_alt(rows: Rows) -> str:
    found = recorded(rows)
    if not found:
        return NOT_MEASURED
    parts = [f"{title}: {_said(rank)}" for title, _, rank in found]
    cost = found[0][1]["cost"]["ratio"]["median"]
    return (
        f"What SMs do inside the fused kernels of one call. {'; '.join(parts)}. The kernels that "
        f"record take {cost:.3f} times as long as those that do not."
    )


def inside_table(rows: Rows) -> Table:
    """One line a GEMM and rank, times in microseconds."""
    header = ["rank", "GEMM", "SMs", "tiles", "length µs", "data on its way µs", "waits µs an SM",
              "tail µs", "exposed µs", "hidden", "last flag seen at µs", "last flag raised at µs",
              "recording / plain"]  # fmt: skip
    body = []
    for title, kept, rank in recorded(rows):
        for one in rank["gemms"]:
            way = one["on_way_us"]
            moved = [
                f"{way[1] - way[0]:,.1f}", f"{one['waited_us']:,.2f}", f"{one['tail_us']:,.1f}",
                f"{one['exposed_us']:,.2f}", f"{one['hidden']:.3f}",
            ] if way else ["-"] * 5  # fmt: skip
            body.append([
                title, one["gemm"], str(one["sms"]), str(one["tiles"]), f"{one['span_us']:,.1f}",
                *moved, _last(one["arrivals"]), _last(one["releases"]),
                f"{kept['cost']['ratio']['median']:.3f}",
            ])  # fmt: skip
    return (header, body) if body else (["not measured"], [[NOT_MEASURED]])


def _last(flags: list) -> str:
    return f"{max(us for *_, us in flags):,.1f}" if flags else "-"


INSIDE = Plot(
    "Inside the fused kernels",
    inside,
    inside_alt,
    inside_table,
    "One live call, recorded by kernels that are timed with no other. Hidden: of the SM time in "
    "which data of peers is on its way, the part in which a tile is multiplied; an unequal last "
    "wave of tiles counts against it. Exposed: waits at flags, a mean over SMs, and the tail in "
    "which no SM has a tile left.",
)
