"""How far every contract is from FP64, product by product: the price of an order in accuracy."""

from __future__ import annotations

import math

from matplotlib.lines import Line2D

from . import Plot, Rows, Table, contracts, style
from . import rows as of

# ---- drift ---------------------------------------------------------------------------------------

MEASURES = {"rel_l2": "relative L2", "mean_abs": "mean |error|", "p99": "p99 |error|"}
CURVES = ("down forward", "gate dW", "forward")
TITLE = {"forward": "whole FFN"}


def largest(rows: Rows) -> list[dict]:
    """The lines at the largest M that was measured: products, then the whole forward."""
    sizes = contracts.rows_of_batch(contracts.products(rows))
    wanted = [row for row in rows if of.option(row, "m") == str(sizes[-1])] if sizes else []
    return contracts.lines(wanted, "gemm", "ffn")


@style.styled
def drift(rows: Rows):
    """Error of each contract against FP64 at the largest M: above, three statistics a product;
    below, the share of elements (%) with an error of at most x."""
    found, named = largest(rows), contracts.contracts(rows)
    operators = list(dict.fromkeys(one["operator"] for one in found))
    shown = [name for name in CURVES if name in operators] or operators[:3]
    figure = style.canvas(style.WIDTH, 2.9 + 0.3 * len(operators))
    upper, lower = figure.subfigures(2, 1, height_ratios=[0.6 + 0.3 * len(operators), 2.0])
    for axes, (field, title) in zip(upper.subplots(1, 3, sharey=True), MEASURES.items()):
        _dots(axes, found, operators, named, field)
        axes.set_title(title)
    curves = lower.subplots(1, max(1, len(shown)), sharey=True, squeeze=False)[0]
    for axes, operator in zip(curves, shown):
        _curves(axes, [one for one in found if one["operator"] == operator])
        axes.set_title(TITLE.get(operator, operator))
    lower.supxlabel("|error|", fontsize=9, color=style.MUTED)
    lower.supylabel("elements at most that far", fontsize=9, color=style.MUTED)
    marks = [
        Line2D([], [], linestyle="", markersize=6, label=c, **contracts.look(c)) for c in named
    ]
    upper.legend(handles=marks, loc="outside upper right", ncols=len(marks), frameon=False,
                 fontsize=8.5)  # fmt: skip
    return figure


def _dots(axes, found, operators, named, field) -> None:
    for line in range(len(operators)):
        axes.axhline(line, color=style.WHOLE, lw=1, zorder=0)
    for one in found:
        shift = (named.index(one["contract"]) - (len(named) - 1) / 2) * 0.17
        y = operators.index(one["operator"]) + shift
        axes.plot([one["drift"][field]], [y], markersize=5.5, **contracts.look(one["contract"]))
    axes.set_xscale("log")
    axes.set_ylim(len(operators) - 0.5, -0.5)
    names = [TITLE.get(name, name) for name in operators]
    axes.set_yticks(range(len(operators)), names, color=style.INK)
    axes.tick_params(axis="y", length=0)
    _readable(axes, [one["drift"][field] for one in found])


def _readable(axes, values) -> None:
    """A logarithmic axis with a handful of ticks in plain numbers, also within one decade."""
    found = [v for v in values if 0 < v < math.inf]
    if not found:
        return
    low, high = min(found) / 1.3, max(found) * 1.3
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    span = high / low
    steps = (1, 1.5, 2, 3, 5) if span < 6 else (1, 3) if span < 100 else (1,)
    ticks = [s * 10.0**d for d in decades for s in steps if low <= s * 10.0**d <= high]
    axes.set_xlim(low, high)
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()


def _curves(axes, found) -> None:
    for one in found:
        points = [(q, 5.0 * i) for i, q in enumerate(one["drift"]["ecdf"]) if q > 0]
        if points:
            colour = contracts.look(one["contract"])["color"]
            axes.plot(*zip(*points), color=colour, lw=1.5)
            axes.plot(*points[-1], markersize=5.5, **contracts.look(one["contract"]))
    axes.set_xscale("log")
    axes.set_ylim(0, 108)
    axes.set_yticks([0, 50, 100], ["0 %", "50 %", "100 %"])
    axes.minorticks_off()


def drift_alt(rows: Rows) -> str:
    found = largest(rows)
    parts = []
    for name in contracts.contracts(rows):
        errors = [one["drift"]["rel_l2"] for one in found if one["contract"] == name]
        if errors:
            parts.append(f"{name} {style.number(min(errors), 2)} to {style.number(max(errors), 2)}")
    m = max((one["m"] for one in found), default=0)
    return f"Relative L2 error to FP64 over all products at M = {m:,}: {'; '.join(parts)}."


def drift_table(rows: Rows) -> Table:
    """One line a product and contract: bits against the oracle, errors against FP64."""
    body = []
    for one in largest(rows):
        numbers = [one["drift"][f] for f in ("rel_l2", "mean_abs", "p95", "p99", "max_abs")]
        other = one.get("differ_from_official")
        body.append([
            TITLE.get(one["operator"], one["operator"]), one["contract"], one["schedule"],
            f"{one['mismatches']:,} / {one['elements']:,}", *map(style.number, numbers),
            "-" if other is None else f"{other:,}",
        ])  # fmt: skip
    header = ["product", "contract", "schedule", "differ from the oracle", "relative L2",
              "mean |e|", "p95", "p99", "max", "differ from official"]  # fmt: skip
    return header, body


DRIFT = Plot(
    "How far each contract is from FP64",
    drift,
    drift_alt,
    drift_table,
    "BF16 alone, one rounding of an exact result, is a relative L2 error of about 0.0017. Curves: "
    "the mark is the largest error.",
)
