"""How far a correct sharded block is from the dense one: the distribution, not only its end.

Every curve is the share of elements whose |difference| is at most x, with x in units of the
signal's own bound: a curve that reaches 100 % left of 1 stays inside.
"""

from __future__ import annotations

import math

from matplotlib.lines import Line2D

from . import Plot, Rows, Table, style
from . import rows as of

# One signal for each way in which a block can drift, as far as its rows have it.
SIGNALS = ("output", "input_grad", "gate_up_grad", "parameter_grad", "post_step")


def shown(rows: Rows) -> list[str]:
    """The signals that are drawn: those of SIGNALS that the rows have."""
    return [name for name in SIGNALS if name in of.signals(rows)]


def _series(rows: Rows) -> dict[tuple[str, int, str], list[dict]]:
    """Correct rows of our twin by (dtype, P, sequence parallel on or off)."""
    right = [
        r for r in rows if r["case"]["fault"] == "none" and of.option(r, "twin", "ours") == "ours"
    ]
    key = lambda r: (r["case"]["dtype"], of.ranks(r), of.option(r, "sequence_parallel", "off"))  # noqa: E731
    return dict(
        sorted(of.grouped(right, key).items(), key=lambda item: (item[0][0] != "fp32", item[0]))
    )


def quantiles(rows: Rows, name: str) -> list[float]:
    """The worst of the rows' 21 quantiles of |difference| / bound, quantile by quantile."""
    curves = [
        [q / s["bound"] if s["bound"] else math.inf for q in s["ecdf"]]
        for s in (r["result"]["signals"][name] for r in rows)
        if s.get("ecdf")
    ]
    return [max(column) for column in zip(*curves, strict=True)]


def mismatches(rows: Rows, name: str) -> tuple[int, int]:
    """(elements that differ, all elements) of one signal, summed over rows."""
    found = [r["result"]["signals"][name] for r in rows]
    return sum(s["mismatches"] for s in found), sum(s["elements"] for s in found)


def points(rows: Rows, name: str) -> list[tuple[float, float]]:
    """(difference / bound, % of elements at most that far), from the first element that differs.

    The first point carries the share that is equal bit for bit, on the rank that is furthest out;
    [] when nothing differs at all.
    """
    known = {(q, 5.0 * i) for i, q in enumerate(quantiles(rows, name)) if q > 0}
    for field, share in (("p99", 99.0), ("max_abs", 100.0)):
        worst = max(_in_bounds(r["result"]["signals"][name], field) for r in rows)
        known |= {(worst, share)} if worst > 0 else set()
    if not known:
        return []
    equal = 100.0 * min(1 - d / n for d, n in (mismatches([r], name) for r in rows))
    curve = sorted(known)
    return [(curve[0][0], min(equal, curve[0][1])), *curve]


def _in_bounds(signal: dict, field: str) -> float:
    return signal[field] / signal["bound"] if signal["bound"] else math.inf


@style.styled
def drift(rows: Rows):
    """Share of elements (%) whose difference to the dense block is at most x bounds.

    Columns: signals. Lines: dtype, without and with sequence parallel. Shade: P. A curve comes in
    from the left at the share that is equal bit for bit.
    """
    series, names = _series(rows), shown(rows)
    kinds = list(dict.fromkeys((dtype, sequence) for dtype, _, sequence in series))
    sizes = sorted({size for _, size, _ in series})
    figure = style.canvas(style.WIDTH, 0.9 + 1.45 * len(kinds))
    grid = figure.subplots(len(kinds), len(names), sharex=True, sharey=True, squeeze=False)
    low = _left_edge(series, names)
    for line, kind in enumerate(kinds):
        of_kind = [(p, found) for (t, p, s), found in series.items() if (t, s) == kind]
        for axes, name in zip(grid[line], names, strict=True):
            equal = [p for p, found in of_kind if not _curve(axes, found, name, p, sizes, low)]
            _finish(axes, low, of.label(name) if line == 0 else "")
            if equal:
                elements = mismatches(of_kind[0][1], name)[1]
                said = f"P = {', '.join(map(str, equal))}\n0 / {elements:,} differ"
                axes.text(0.05, 0.5, said, transform=axes.transAxes, va="center", fontsize=8.5)
        dtype, sequence = kind
        grid[line][0].set_ylabel(dtype + ("\nsequence\nparallel" if sequence == "on" else "\n"))
    _key(figure, sizes)
    figure.supxlabel("|difference| / bound", fontsize=9, color=style.MUTED)
    figure.supylabel("elements at most that far", fontsize=9, color=style.MUTED)
    return figure


def _left_edge(series, names) -> float:
    """A power of ten left of every curve."""
    starts = [points(rows, name)[:1] for rows in series.values() for name in names]
    lowest = min((p[0][0] for p in starts if p), default=1e-3)
    return 10.0 ** (math.floor(math.log10(lowest)) - 0.3)


def _curve(axes, rows, name, size, sizes, low) -> bool:
    """Draw one ECDF; False when there is nothing to draw because nothing differs."""
    found = points(rows, name)
    if found:
        xs, ys = zip((low, found[0][1]), *found, strict=True)
        colour = style.STEPS[min(sizes.index(size), len(style.STEPS) - 1)]
        axes.plot(xs, ys, color=colour, lw=1.6)
        axes.plot(xs[-1:], ys[-1:], color=colour, marker="o", markersize=4)
    return bool(found)


def _finish(axes, low, title) -> None:
    axes.set_xscale("log")
    axes.set_xlim(low, 4)
    axes.set_ylim(0, 108)
    axes.axvline(1.0, color=style.LIMIT, lw=1.2)
    axes.set_title(title)
    axes.set_yticks([0, 50, 100], ["0 %", "50 %", "100 %"])
    axes.minorticks_off()


def _key(figure, sizes) -> None:
    lines = [
        Line2D([], [], color=style.STEPS[min(i, 3)], marker="o", markersize=4, label=f"P = {p}")
        for i, p in enumerate(sizes)
    ]
    lines.append(Line2D([], [], color=style.LIMIT, lw=1.2, label="bound"))
    figure.legend(
        handles=lines, loc="outside upper right", ncols=len(lines), frameon=False, fontsize=8.5
    )


def drift_alt(rows: Rows) -> str:
    parts = []
    for (dtype, size, sequence), of_series in _series(rows).items():
        worst = max((quantiles(of_series, n)[-1:] or [0.0])[0] for n in shown(rows))
        tail = " with sequence parallel" if sequence == "on" else ""
        parts.append(f"{dtype} at P = {size}{tail}: largest {style.number(worst, 2)} of the bound")
    return (
        "Cumulative share of elements over difference divided by bound. " + "; ".join(parts) + "."
    )


def drift_table(rows: Rows) -> Table:
    """One line a dtype, P, sequence parallel and signal: what differs, quantiles, the bound."""
    body = []
    for (dtype, size, sequence), of_series in _series(rows).items():
        for name in shown(rows):
            found = [r["result"]["signals"][name] for r in of_series]
            differ, elements = mismatches(of_series, name)
            numbers = [
                max(s[field] for s in found)
                for field in ("mean_abs", "p95", "p99", "max_abs", "bound")
            ]
            body.append(
                [
                    dtype,
                    str(size),
                    sequence,
                    of.label(name),
                    f"{differ:,} / {elements:,}",
                    *(style.number(n) for n in numbers),
                ]
            )
    return ["dtype", "P", "SP", "signal", "differ", "mean |Δ|", "p95", "p99", "max", "bound"], body


DRIFT = Plot(
    "How far it drifts",
    drift,
    drift_alt,
    drift_table,
    "A curve comes in from the left at the share of elements that are equal bit for bit; its dot "
    "is the largest difference.",
)
