"""Figures of the tensor-parallel GQA block: who owns which heads, where it adds, what shows
where."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.colors import to_rgb
from matplotlib.patches import FancyBboxPatch

from . import Plot, Rows, Table, drift, heat, lanes, seeds, style
from . import rows as of


@dataclass(frozen=True)
class Sizes:
    """S positions, B sequences, H hidden, query heads over KV heads of D features, P ranks."""

    seq: int = 5
    batch: int = 2
    hidden: int = 16
    query: int = 4
    kv: int = 2
    dim: int = 4
    ranks: int = 2

    def held(self, rank: int, ranks: int) -> tuple[range, range]:
        """(query heads, KV heads) of one of `ranks` ranks; whole groups, or replicas of one."""
        each, group = self.query // ranks, self.query // self.kv
        mine = range(rank * each, (rank + 1) * each)
        return mine, range(mine[0] // group, mine[-1] // group + 1)


def sizes(rows: Rows) -> Sizes:
    """Those of the smallest sharded row; the article's fixture when nothing tells."""
    sharded = [r for r in rows if of.ranks(r) > 1] or list(rows)
    if not sharded:
        return Sizes()
    row = min(sharded, key=of.ranks)
    dense = row["result"].get("shapes", {}).get("dense_shapes", {})
    seq, batch, hidden = dense.get("x", [5, 2, 16])
    *_, query, dim = dense.get("q", [5, 2, 4, 4])
    return Sizes(seq, batch, hidden, query, dense.get("k_v", [5, 2, 2, 4])[2], dim, of.ranks(row))


# ---- who owns which heads ------------------------------------------------------------------------

QUERY_Y, KV_Y, SUM_Y, OUT_Y, ADD_Y = 84, 61, 45, 28, 8
TILE = 15


def _tile(axes, x, y, width, face, text, small="") -> None:
    axes.add_patch(
        FancyBboxPatch(
            (x, y - TILE / 2), width, TILE, facecolor=face, edgecolor="none",
            boxstyle="round,pad=0,rounding_size=1.1", mutation_aspect=1.4, zorder=3,
        )
    )  # fmt: skip
    ink = style.ink_on(to_rgb(face))
    lift = 1.2 if small else 0
    axes.text(
        x + width / 2, y + lift, text, ha="center", va="bottom" if small else "center", color=ink,
        fontsize=9.5, weight="bold", zorder=4,
    )  # fmt: skip
    if small:
        axes.text(
            x + width / 2, y - 1.2, small, ha="center", va="top", color=ink, fontsize=8, zorder=4
        )


def _add(axes, start, end, y, text) -> None:
    """A red bar with a sigma between two places: here ranks add."""
    axes.add_patch(
        FancyBboxPatch(
            (start, y - 4.5), end - start, 9, facecolor=style.SUM, edgecolor="none",
            boxstyle="round,pad=0,rounding_size=1.1", mutation_aspect=1.4, zorder=5,
            gid="sum",
        )
    )  # fmt: skip
    axes.text(
        (start + end) / 2, y, text, color="white", ha="center", va="center", fontsize=8.5,
        weight="bold", zorder=6,
    )  # fmt: skip


def _panel(axes, size: Sizes, ranks: int) -> None:
    """One rank a column: its query heads over the KV heads that they read, and its part of Wo."""
    axes.set_xlim(-0.5, 100.5)
    axes.set_ylim(0, 104)
    style.bare(axes)
    gap = 3.0
    wide = (100 - gap * (ranks - 1)) / ranks
    lefts = [r * (wide + gap) for r in range(ranks)]
    replicas = max(1, ranks // size.kv)
    for rank, left in enumerate(lefts):
        colour, (query, kv) = style.RANKS[rank], size.held(rank, ranks)
        axes.text(left + wide / 2, 96, f"rank {rank}", ha="center", color=colour, weight="bold")
        for heads, y, name in ((query, QUERY_Y, "q{0}"), (kv, KV_Y, "k{0} v{0}")):
            each = (wide - 1.2 * (len(heads) - 1)) / len(heads)
            for place, head in enumerate(heads):
                x = left + place * (each + 1.2)
                copy = "copy" if y == KV_Y and replicas > 1 and rank % replicas else ""
                _tile(axes, x, y, each, colour, name.format(head), copy)
        for place in range(len(query)):
            x = left + (place + 0.5) * wide / len(query)
            top, foot = QUERY_Y - TILE / 2, KV_Y + TILE / 2
            axes.plot([x, x], [top, foot], color=style.MUTED, lw=1.2, zorder=1)
        x = left + wide / 2
        top, foot = KV_Y - TILE / 2, ADD_Y + 5
        axes.plot([x, x], [top, foot], color=style.MUTED, lw=1.2, zorder=1)
        columns = size.query * size.dim // ranks
        _tile(axes, left, OUT_Y, wide, colour, f"Wo[:, {rank * columns}:{(rank + 1) * columns}]",
              f"[{size.hidden},{columns}]")  # fmt: skip
    for first in range(0, ranks, replicas) if replicas > 1 else ():
        last = first + replicas - 1
        end = lefts[last] + wide
        _add(axes, lefts[first], end, SUM_Y, "Σ  backward, kv.dw: dWk, dWv")
    _add(axes, 0, 100, ADD_Y, "Σ  forward, out.forward: partial outputs")


def _drawn(rows: Rows) -> list[int]:
    """The group sizes that are drawn: at most two, those with whole groups and with replicas."""
    size = sizes(rows)
    whole, copied = min(2, size.kv), min(2 * size.kv, size.query)
    return sorted({whole, copied})


@style.styled
def heads(rows: Rows):
    """Query heads over the KV heads that they read, coloured by rank; left with whole groups on
    each rank, right with replicas of a KV head and the gradient sum between them."""
    size = sizes(rows)
    figure = style.canvas(style.WIDTH, 4.2)
    for axes, ranks in zip(figure.subplots(1, 2), _drawn(rows), strict=False):
        _panel(axes, size, ranks)
        kind = "each KV head has one owner"
        if ranks > size.kv:
            kind = f"a KV head lives on {ranks // size.kv} ranks"
        axes.set_title(f"P = {ranks}: {kind}", fontsize=10.5)
    return figure


def heads_alt(rows: Rows) -> str:
    size, parts = sizes(rows), []
    for ranks in _drawn(rows):
        told = []
        for rank in range(ranks):
            query, kv = size.held(rank, ranks)
            told.append(
                f"rank {rank} holds query head{'s' * (len(query) > 1)} "
                f"{', '.join(map(str, query))} and KV head {', '.join(map(str, kv))}"
            )
        tail = "; replicas sum dWk and dWv at kv.dw" if ranks > size.kv else ""
        parts.append(f"P = {ranks}: {'; '.join(told)}{tail}")
    return (
        "Ownership of heads. " + ". ".join(parts) + ". All ranks' partial outputs are added at "
        "out.forward."
    )


def heads_table(rows: Rows) -> Table:
    """One line a P and rank: its query heads, its KV heads, its columns of Wo, with whom it adds
    KV gradients."""
    size, body = sizes(rows), []
    for ranks in _drawn(rows):
        replicas, columns = max(1, ranks // size.kv), size.query * size.dim // ranks
        for rank in range(ranks):
            query, kv = size.held(rank, ranks)
            first = rank // replicas * replicas
            peers = ", ".join(map(str, range(first, first + replicas)))
            body.append([
                str(ranks), str(rank), ", ".join(f"q{h}" for h in query),
                ", ".join(f"k{h} v{h}" for h in kv), f"{rank * columns}:{(rank + 1) * columns}",
                f"ranks {peers}" if replicas > 1 else "nobody",
            ])  # fmt: skip
    return ["P", "rank", "query heads", "KV heads", "columns of Wo", "sums dWk, dWv with"], body


# ---- where it adds -------------------------------------------------------------------------------


def _panels(size: Sizes) -> tuple[lanes.Panel, lanes.Panel]:
    lead, part = f"{size.seq},{size.batch}", size.query // size.ranks
    own = len(size.held(0, size.ranks)[1])
    whole, context = f"[{lead},{size.hidden}]", f"[{lead},{part},{size.dim}]"
    sites = {"copy_site": "qkv.dx", "reduce_site": "out.forward", "whole_shape": whole}
    return lanes.Panel(
        forward=True,
        remark="left to right: attention stays inside a rank, the partial outputs meet",
        whole=("X", "N = norm(X)", "Y"),
        lanes=(("q, k, v", f"{part} q, {own} kv"), ("context", context), ("partial Y", whole)),
        notes=(
            (42.0, f"Wq [{part * size.dim},{size.hidden}]"
                   f"  Wk, Wv [{own * size.dim},{size.hidden}]"),
            (70.0, f"Wo [{size.hidden},{part * size.dim}]"),
        ),
        **sites,
    ), lanes.Panel(
        forward=False,
        remark="right to left: what Q, K and V each send back to N is added over the ranks",
        whole=("dX", "dN", "dY"),
        lanes=(("partial dN", whole), ("dq, dk, dv", f"{part} q, {own} kv"), ("dcontext", context)),
        notes=((48.5, "dWk, dWv: summed over replicas"), (70.0, "dWo stays local")),
        **sites,
    )  # fmt: skip


@style.styled
def data_path(rows: Rows):
    """The block forward and backward, one lane a rank, with the two places where all ranks add.

    Shapes are read from the rows' smallest sharded case.
    """
    size = sizes(rows)
    figure = style.canvas(style.WIDTH, 6.4)
    for axes, panel in zip(figure.subplots(2, 1), _panels(size), strict=True):
        lanes.draw(axes, panel, min(size.ranks, 4))
    return figure


def data_path_alt(rows: Rows) -> str:
    size = sizes(rows)
    return (
        f"Data path of the block on {size.ranks} ranks. Forward: X and its norm are whole on every "
        f"rank; queries, keys, values and the attention over them stay with the rank that owns the "
        f"heads; the partial outputs are added at out.forward and joined by the residual. "
        f"Backward: the partial gradients of the norm's output are added at qkv.dx; the gradients "
        f"of the weights stay local, except those of replicated KV heads, added at kv.dw."
    )


def ownership(rows: Rows) -> Table:
    """Which rank holds which shape: (header, body) for the smallest sharded case."""
    s = sizes(rows)
    lead, part, own = [s.seq, s.batch], s.query // s.ranks, len(s.held(0, s.ranks)[1])
    whole = [*lead, s.hidden]
    entries = (
        ("input X, N = norm(X)", whole, whole, "every rank"),
        ("norm weight", [s.hidden], [s.hidden], "every rank"),
        ("Wq", [s.query * s.dim, s.hidden], [part * s.dim, s.hidden], "rows of its query heads"),
        ("Wk, Wv", [s.kv * s.dim, s.hidden], [own * s.dim, s.hidden], "rows of its KV heads"),
        ("q", [*lead, s.query, s.dim], [*lead, part, s.dim], "its query heads"),
        ("k, v", [*lead, s.kv, s.dim], [*lead, own, s.dim], "the heads they read"),
        ("context", [*lead, s.query, s.dim], [*lead, part, s.dim], "its query heads"),
        ("Wo", [s.hidden, s.query * s.dim], [s.hidden, part * s.dim], "columns of its context"),
        ("partial output", None, whole, "one term of the sum"),
        ("output Y", whole, whole, "every rank, after out.forward"),
        ("partial gradient of N", None, whole, "one term of the sum"),
        ("gradient of X", whole, whole, "every rank, after qkv.dx"),
    )  # fmt: skip
    body = [[name, str(dense or "-"), str(local), holder] for name, dense, local, holder in entries]
    return ["tensor", "dense block", f"a rank of {s.ranks}", "who holds it"], body


HEADS = Plot(
    "Whose head is it",
    heads,
    heads_alt,
    heads_table,
    "A colour: held by one rank. A line joins a query head to the KV head that it reads; none "
    "crosses a rank. Red: a sum over ranks.",
)
DATA_PATH = Plot(
    "Where the block adds",
    data_path,
    data_path_alt,
    ownership,
    "Grey: held by every rank. A colour: held by one rank. Red: a sum over ranks.",
)
HEAT, DRIFT, SEEDS = heat.HEAT, drift.DRIFT, seeds.SEEDS
