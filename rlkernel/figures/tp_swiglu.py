"""Figures of the tensor-parallel SwiGLU block: where it adds, which missing sum shows where, how
far it drifts."""

from __future__ import annotations

from . import Plot, Rows, Table, drift, heat, lanes, seeds, style
from . import rows as of


def dimensions(rows: Rows) -> tuple[int, int, int, int, int]:
    """(S, B, H, F, P) of the smallest sharded row; the article's fixture when nothing tells."""
    sharded = [r for r in rows if of.ranks(r) > 1] or list(rows)
    if not sharded:
        return 3, 2, 8, 12, 2
    row = min(sharded, key=of.ranks)
    shapes = row["result"].get("shapes", {})
    dense = shapes.get("dense_shapes", {})
    length, batch, hidden = dense.get("x", [3, 2, 8])
    ffn = dense.get("w_gate_up", [2, 12, hidden])[-2]
    return int(length), int(batch), int(hidden), int(ffn), of.ranks(row)


def _panels(length, batch, hidden, ffn, size) -> tuple[lanes.Panel, lanes.Panel]:
    whole, cut = f"[{length},{batch},{hidden}]", f"[{length},{batch},{ffn // size}]"
    sites = {"copy_site": "gate_up.dx", "reduce_site": "down.forward", "whole_shape": whole}
    return lanes.Panel(
        forward=True,
        remark="left to right: the ranks meet once, behind the down projection",
        whole=("X", "N = norm(X)", "Y"),
        lanes=(("gate, up", cut), ("silu(gate)·up", cut), ("partial Y", whole)),
        notes=(
            (42.0, f"W gate, up  2×[{ffn // size},{hidden}]"),
            (68.0, f"W down  [{hidden},{ffn // size}]"),
        ),
        **sites,
    ), lanes.Panel(
        forward=False,
        remark="right to left: they meet once more, in front of the norm, out of a forward "
        "check's sight",
        whole=("dX", "dN", "dY"),
        lanes=(("partial dN", whole), ("dgate, dup", cut), ("dhidden", cut)),
        notes=((49.0, "dW gate, up stays local"), (68.0, "dW down stays local")),
        **sites,
    )


@style.styled
def data_path(rows: Rows):
    """The block forward and backward, one lane a rank (four at most), with the two places where
    ranks add.

    Shapes are read from the rows' smallest sharded case.
    """
    sizes = dimensions(rows)
    figure = style.canvas(style.WIDTH, 6.4)
    for axes, panel in zip(figure.subplots(2, 1), _panels(*sizes), strict=True):
        lanes.draw(axes, panel, min(sizes[-1], 4))
    return figure


def data_path_alt(rows: Rows) -> str:
    *_, size = dimensions(rows)
    return (
        f"Data path of the block on {size} ranks. Forward: X and its norm are whole on every rank; "
        f"gate, up and the hidden activation are cut into {size} slices; the partial outputs are "
        "added at down.forward and joined by the residual. Backward: the same columns from right "
        "to left; the partial gradients of the norm's output are added at gate_up.dx, while the "
        "weight gradients stay local."
    )


def ownership(rows: Rows) -> Table:
    """Which rank holds which shape: (header, body) for the smallest sharded case."""
    length, batch, hidden, ffn, size = dimensions(rows)
    whole, part = [length, batch, hidden], ffn // size
    entries = (
        ("input X", whole, whole, "every rank"),
        ("norm output N", whole, whole, "every rank"),
        ("norm weight", [hidden], [hidden], "every rank"),
        ("gate and up weight", [2, ffn, hidden], [2, part, hidden], "cut by output feature"),
        (
            "gate, up, hidden",
            [length, batch, ffn],
            [length, batch, part],
            "cut by feed-forward feature",
        ),
        ("down weight", [hidden, ffn], [hidden, part], "cut by input feature"),
        ("down bias", [hidden], [hidden], "every rank; added once, behind the sum"),
        ("partial output", None, whole, "one term of the sum"),
        ("output Y", whole, whole, "every rank, after down.forward"),
        ("partial gradient of N", None, whole, "one term of the sum"),
        ("gradient of X", whole, whole, "every rank, after gate_up.dx"),
    )
    body = [[name, str(dense or "-"), str(local), holder] for name, dense, local, holder in entries]
    return ["tensor", "dense block", f"a rank of {size}", "who holds it"], body


DATA_PATH = Plot(
    "Where the block adds",
    data_path,
    data_path_alt,
    ownership,
    "Grey: held by every rank. A colour: held by one rank. Red: a sum over ranks.",
)


HEAT, DRIFT, SEEDS = heat.HEAT, drift.DRIFT, seeds.SEEDS
