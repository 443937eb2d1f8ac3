"""A tensor-parallel block as lanes: grey is held by every rank, a colour by one, red adds.

Both panels share their columns, so that the mirror image is seen: the region that adds (#) in one
direction is the identity (:) in the other.

                  copy-to                                             reduce-from
    forward    X -> N -:-> [gate, up]   ->  [hidden]    -> [partial Y] -#-> Y
    backward  dX <- dN <-#- [partial dN] <- [dgate, dup] <- [dhidden] <-:- dY
"""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.colors import to_rgb
from matplotlib.patches import FancyBboxPatch

from . import style

WHOLE_X, LANE_X = (5.5, 20.5, 92.5), (41.0, 57.0, 73.0)
COPY_X, REDUCE_X = 30.8, 82.6
TOP, BOTTOM = 70, 8
MIDDLE = (TOP + BOTTOM) / 2


@dataclass(frozen=True)
class Panel:
    """One direction: names of the three whole columns, (name, shape) of the three lane columns,
    notes above the lanes."""

    forward: bool
    remark: str
    whole: tuple[str, str, str]
    whole_shape: str
    lanes: tuple[tuple[str, str], tuple[str, str], tuple[str, str]]
    copy_site: str
    reduce_site: str
    notes: tuple[tuple[float, str], ...] = ()


def _box(axes, x, y, width, height, face, name, shape) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2),
            width,
            height,
            facecolor=face,
            edgecolor="none",
            boxstyle="round,pad=0,rounding_size=1.2",
            mutation_aspect=0.55,
            zorder=3,
        )
    )
    ink = style.ink_on(to_rgb(face))
    axes.text(
        x, y + 0.9, name, ha="center", va="bottom", color=ink, fontsize=9, weight="bold", zorder=4
    )
    axes.text(x, y - 0.9, shape, ha="center", va="top", color=ink, fontsize=8, zorder=4)


def _wire(axes, xs, ys) -> None:
    """A line through the points with an arrow head at its end."""
    if len(xs) > 2:
        axes.plot(xs[:-1], ys[:-1], color=style.MUTED, lw=1.2, zorder=2, solid_joinstyle="miter")
    axes.annotate(
        "",
        (xs[-1], ys[-1]),
        (xs[-2], ys[-2]),
        zorder=2,
        arrowprops={
            "arrowstyle": "-|>",
            "color": style.MUTED,
            "lw": 1.2,
            "shrinkA": 0,
            "shrinkB": 0,
        },
    )


def _region(axes, x, adds, name, site) -> None:
    """A bar through all lanes: solid with a sigma where ranks add, dashed where nothing is done."""
    if adds:
        axes.add_patch(
            FancyBboxPatch(
                (x - 1.5, BOTTOM),
                3,
                TOP - BOTTOM,
                facecolor=style.SUM,
                edgecolor="none",
                boxstyle="round,pad=0,rounding_size=1.5",
                mutation_aspect=0.6,
                zorder=5,
            )
        )
        axes.text(
            x,
            MIDDLE,
            "Σ",
            color="white",
            ha="center",
            va="center",
            fontsize=15,
            weight="bold",
            zorder=6,
        )
    else:
        axes.plot([x, x], [BOTTOM, TOP], color=style.SUM, lw=1.2, ls=(0, (4, 3)), zorder=5)
    axes.text(
        x, TOP + 1.5, name, color=style.SUM, ha="center", va="bottom", fontsize=8.5, weight="bold"
    )
    axes.text(
        x,
        BOTTOM - 2.8,
        site if adds else "identity",
        color=style.SUM,
        ha="center",
        va="top",
        fontsize=8,
    )


def _boxes(axes, panel, middles, height) -> None:
    for x, name in zip(WHOLE_X, panel.whole, strict=True):
        _box(axes, x, MIDDLE, 13, TOP - BOTTOM, style.WHOLE, name, panel.whole_shape)
        axes.text(
            x, BOTTOM - 2.8, "every rank", ha="center", va="top", fontsize=8, color=style.MUTED
        )
    for x, (name, shape) in zip(LANE_X, panel.lanes, strict=True):
        for lane, y in enumerate(middles):
            _box(axes, x, y, 13.2, height, style.RANKS[lane], name, f"{shape}  rank {lane}")


def _wires(axes, forward, middles) -> None:
    """Arrows between the columns; in both directions the residual path runs above the lanes."""
    flip = (lambda pair: pair) if forward else (lambda pair: pair[::-1])
    copy_left, copy_right = (COPY_X, COPY_X) if forward else (COPY_X - 1.6, COPY_X + 1.6)
    add_left, add_right = (REDUCE_X - 1.6, REDUCE_X + 1.6) if forward else (REDUCE_X, REDUCE_X)
    for pair in ((12.1, 13.9), (27.1, copy_left), (add_right, 85.9)):
        _wire(axes, flip(pair), (MIDDLE, MIDDLE))
    for y in middles:
        for pair in ((copy_right, 34.3), (47.7, 50.3), (63.7, 66.3), (79.7, add_left)):
            _wire(axes, flip(pair), (y, y))
    start, end = flip((WHOLE_X[0], WHOLE_X[2]))
    _wire(axes, (start, start, end, end), (TOP, 81, 81, TOP + 0.3))
    axes.text(
        LANE_X[1],
        81,
        "residual",
        fontsize=8,
        color=style.MUTED,
        ha="center",
        va="center",
        bbox={"facecolor": style.PAPER, "edgecolor": "none", "pad": 3},
    )


def draw(axes, panel: Panel, lanes: int) -> None:
    """Draw one direction onto axes, with that many lanes (ranks)."""
    axes.set_xlim(-1.2, 100)
    axes.set_ylim(-1, 95)
    style.bare(axes)
    axes.text(
        -1, 94.5, "Forward" if panel.forward else "Backward", fontsize=12, weight="bold", va="top"
    )
    axes.text(11, 94, panel.remark, fontsize=9, color=style.MUTED, va="top")
    pitch = (TOP - BOTTOM) / lanes
    middles = [TOP - pitch * (lane + 0.5) for lane in range(lanes)]
    _boxes(axes, panel, middles, min(pitch * 0.74, 23))
    _wires(axes, panel.forward, middles)
    _region(axes, COPY_X, not panel.forward, "copy-to", panel.copy_site)
    _region(axes, REDUCE_X, panel.forward, "reduce-from", panel.reduce_site)
    for x, note in panel.notes:
        axes.text(x, TOP + 1.5, note, fontsize=8, color=style.MUTED, ha="center", va="bottom")
