"""The contract, drawn: which slice of K is a leaf, who adds what, and where it is rounded."""

from __future__ import annotations

from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from . import Plot, Rows, Table, style
from . import rows as of
from .contracts import contracts

FLOOR, LEAF_Y, ROOT_Y = 12, 30, 82  # the strip of K, the leaves above it, the root
SHADES = LinearSegmentedColormap.from_list("k", style.STEPS[:3])


def leaves(contract: str) -> int:
    """tree8.bf16 -> 8; a chain has one."""
    return 1 if contract == "chain" else int(contract.removeprefix("tree").partition(".")[0])


def rounds_to(contract: str) -> str:
    """What a leaf and a joint are rounded to; a chain has no joint, only its result."""
    return "FP32" if contract.endswith("fp32") else "BF16"


def length(rows: Rows) -> int:
    """K of the down projection: the intermediate size."""
    found = [of.option(row, "intermediate") for row in rows]
    return int(next((k for k in found if k), 12288))


def levels(count: int) -> list[list[float]]:
    """x (0 to 100) of the nodes of each level, leaves first."""
    found = [[100 * (i + 0.5) / count for i in range(count)]]
    while len(found[-1]) > 1:
        found.append([sum(pair) / 2 for pair in zip(found[-1][::2], found[-1][1::2])])
    return found


def _height(level: int, count: int) -> float:
    most = max(1, count.bit_length() - 1)
    return LEAF_Y + (ROOT_Y - LEAF_Y) * level / most


def _edges(axes, count: int) -> None:
    nodes = levels(count)
    for level, (below, above) in enumerate(zip(nodes, nodes[1:])):
        for i, x in enumerate(below):
            ys = [_height(level, count), _height(level + 1, count)]
            axes.plot([x, above[i // 2]], ys, color=style.MUTED, lw=1.1, zorder=1)
    for x in nodes[0]:
        axes.plot([x, x], [FLOOR + 8, LEAF_Y], color=style.MUTED, lw=1.1, zorder=1)


def _strip(axes, count: int, colours) -> None:
    """K as a strip, one slice a leaf, with the leaf's number where there is room."""
    wide = 100 / count
    for i, colour in enumerate(colours):
        axes.add_patch(
            Rectangle((i * wide + 0.5, FLOOR), wide - 1, 11, facecolor=colour, edgecolor="none",
                      gid="slice")
        )  # fmt: skip
        axes.text(
            (i + 0.5) * wide, FLOOR + 5.2, str(i), ha="center", va="center", fontsize=8.5,
            color=style.ink_on(to_rgb(colour)),
        )  # fmt: skip


def _board(axes) -> None:
    style.bare(axes)
    axes.set_xlim(-2, 102)
    axes.set_ylim(-6, 100)


def _shape(axes, contract: str, k: int) -> None:
    """One contract: strip, leaves, joints; a filled square is rounded to BF16, a ring is FP32."""
    count, bf16 = leaves(contract), rounds_to(contract) == "BF16"
    _board(axes)
    _edges(axes, count)
    _strip(axes, count, [SHADES(i / max(1, count - 1)) for i in range(count)])
    top = len(levels(count)) - 1
    for level, xs in enumerate(levels(count)):
        for x in xs:
            _node(axes, x, _height(level, count), bf16 and (count > 1 or level == top))
    if not bf16:
        axes.plot([50, 50], [ROOT_Y, ROOT_Y + 13], color=style.MUTED, lw=1.1, zorder=1)
        _node(axes, 50, ROOT_Y + 13, True)
    axes.set_title(contract, fontsize=10.5)
    each = f"K = {k:,}: {count} leaves of {k // count:,}" if count > 1 else f"K = {k:,}: one leaf"
    axes.text(50, FLOOR - 3, each, ha="center", va="top", fontsize=8.5, color=style.MUTED)


def _node(axes, x: float, y: float, bf16: bool) -> None:
    fill = {"marker": "s", "color": style.INK} if bf16 else {
        "marker": "o", "markerfacecolor": style.PAPER, "markeredgecolor": style.INK,
    }  # fmt: skip
    axes.plot([x], [y], markersize=7, markeredgewidth=1.5, linestyle="", zorder=3, **fill)


def _owners(axes, count: int, ranks: int) -> None:
    """The same tree on so many ranks: colour, who folds it; red, what the collective adds."""
    _board(axes)
    _edges(axes, count)
    each = count // ranks
    _strip(axes, count, [style.RANKS[i // each] for i in range(count)])
    own = each.bit_length() - 1  # levels above the leaves that stay in a rank
    for level, xs in enumerate(levels(count)):
        for i, x in enumerate(xs):
            inside = level <= own
            rank = i * ranks // len(xs) if inside else 0
            axes.plot(
                [x], [_height(level, count)], marker="o" if inside else "s", linestyle="",
                markersize=7 if inside else 9, zorder=3, gid="own" if inside else "sum",
                color=style.RANKS[rank] if inside else style.SUM,
            )  # fmt: skip
    for rank in range(ranks):
        axes.text(
            100 * (rank + 0.5) / ranks, FLOOR - 3, f"rank {rank}", ha="center", va="top",
            fontsize=8.5, weight="bold", color=style.RANKS[rank],
        )  # fmt: skip
    joints = ranks - 1
    said = f"the collective adds {joints} joint{'s' * (joints > 1)}" if joints else "no collective"
    axes.set_title(f"P = {ranks}: {said}", fontsize=10)


def sizes(rows: Rows) -> list[int]:
    """The group sizes that are drawn: those of 1, 2 and 4 that divide the largest tree."""
    most = max(map(leaves, contracts(rows)))
    return [p for p in (1, 2, 4) if p <= most]


@style.styled
def contract(rows: Rows = ()):
    """Above, each contract over the K of the down projection: slices, leaves, joints, roundings.
    Below, the largest of these trees on 1, 2 and 4 ranks."""
    named, groups, k = contracts(rows), sizes(rows), length(rows)
    most = max(map(leaves, named))
    figure = style.canvas(style.WIDTH, 5.8)
    upper, lower = figure.subfigures(2, 1, height_ratios=[1.12, 1])
    for axes, name in zip(upper.subplots(1, len(named), squeeze=False)[0], named, strict=True):
        _shape(axes, name, k)
    for axes, ranks in zip(lower.subplots(1, len(groups), squeeze=False)[0], groups, strict=True):
        _owners(axes, most, ranks)
    mark = lambda **how: Line2D([], [], linestyle="", markersize=7, **how)  # noqa: E731
    hollow = {"markerfacecolor": style.PAPER, "markeredgecolor": style.INK}
    upper.legend(
        handles=[
            mark(marker="s", color=style.INK, label="rounded to BF16"),
            mark(marker="o", **hollow, label="kept in FP32"),
        ],
        loc="outside lower center", ncols=2, frameon=False, fontsize=8.5,
    )  # fmt: skip
    lower.legend(
        handles=[
            mark(marker="o", color=style.RANKS[0], label="folded inside the rank of that colour"),
            mark(marker="s", color=style.SUM, label="added by the collective, in rank order"),
        ],
        loc="outside lower center", ncols=2, frameon=False, fontsize=8.5,
    )  # fmt: skip
    return figure


def contract_alt(rows: Rows = ()) -> str:
    parts = []
    for name in contracts(rows):
        count = leaves(name)
        parts.append(
            f"{name}: {count} leaves of {length(rows) // count:,}, each leaf and each sum of two "
            f"neighbours {'rounded to BF16' if rounds_to(name) == 'BF16' else 'kept in FP32'}"
            if count > 1
            else f"{name}: one accumulator over all of K, rounded once"
        )
    most, groups = max(map(leaves, contracts(rows))), ", ".join(map(str, sizes(rows)))
    return (
        f"The contracts as trees over K = {length(rows):,}. {'; '.join(parts)}. On P = {groups} "
        f"ranks each rank folds an exact subtree of the {most} leaves and the collective adds the "
        "joints above in rank order, so the root has the same bits."
    )


def contract_table(rows: Rows = ()) -> Table:
    """One line a contract: leaves, what is rounded to what, how many ranks can own a subtree."""
    k, body = length(rows), []
    for name in contracts(rows):
        count, to = leaves(name), rounds_to(name)
        groups = [str(2**n) for n in range(count.bit_length())]
        body.append([
            name, str(count), f"{k // count:,}", "FP32, ascending k",
            to if count > 1 else "-", to if count > 1 else "-", "BF16", ", ".join(groups),
        ])  # fmt: skip
    header = ["contract", "leaves", "k a leaf", "inside a leaf", "leaf rounds to",
              "joint rounds to", "result", "P"]  # fmt: skip
    return header, body


CONTRACT = Plot(
    "The contract",
    contract,
    contract_alt,
    contract_table,
    "Shade: a contiguous slice of K, the leaf's columns of the weight; its number is the leaf's. "
    "Inside a leaf one FP32 accumulator runs over ascending k. Bits depend on nothing else.",
)
