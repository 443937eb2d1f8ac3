"""Heat map of signal x fault: which signal is wrong first when a sum is missing.

P = 2             output   loss    dX    dnorm ...
no fault           -0.7    -0.9   -1.1   -0.6      log10(difference / limit), worst seed
missing reduce   [ +5.1 ]  +4.0   +4.2   +4.4      the frame: the first wrong signal
"""

from __future__ import annotations

import math

from matplotlib.cm import ScalarMappable
from matplotlib.patches import Rectangle

from . import Plot, Rows, Table, style
from . import rows as of

LINE = 0.31  # inches a fault


def _cells(rows: Rows):
    """Yields (P, [(fault, its rows)]) in ascending P; the correct block stands first."""
    for size, of_size in sorted(of.grouped(rows, of.ranks).items()):
        faults = of.grouped(of_size, lambda row: row["case"]["fault"])
        yield size, sorted(faults.items(), key=lambda item: item[0] != "none")


def _mark(value: float | None) -> str:
    if value is None:
        return ""
    return "0" if value == -math.inf else "no number" if value == math.inf else f"{value:+.1f}"


def boxes(rows: Rows) -> list[tuple[int, str, str, bool]]:
    """The cells with a frame: (P, fault, first wrong signal, whether every seed agrees)."""
    found = []
    for size, faults in _cells(rows):
        for fault, of_fault in faults:
            counts = of.first_wrong(of_fault)
            found += [(size, fault, name, n == len(of_fault)) for name, n in counts.items()]
    return found


def _paint(axes, faults, names, norm) -> None:
    for line, (_, of_fault) in enumerate(faults):
        for column, name in enumerate(names):
            value = of.worst(of_fault, name)
            if value is None:
                axes.text(column, line, "·", ha="center", va="center", color=style.MUTED)
                continue
            colour = style.DRIFT(norm(min(max(value, norm.vmin), norm.vmax)))
            axes.add_patch(
                Rectangle(
                    (column - 0.48, line - 0.46), 0.96, 0.92, facecolor=colour, edgecolor="none"
                )
            )
            axes.text(
                column,
                line,
                "bits vary" if of.bits_vary(of_fault, name) else _mark(value),
                ha="center",
                va="center",
                fontsize=8.5,
                color=style.ink_on(colour),
            )


def _frame(axes, faults, names) -> None:
    for line, (_, of_fault) in enumerate(faults):
        for name, count in of.first_wrong(of_fault).items():
            axes.add_patch(
                Rectangle(
                    (names.index(name) - 0.48, line - 0.46),
                    0.96,
                    0.92,
                    fill=False,
                    edgecolor=style.INK,
                    linewidth=2.2,
                    linestyle="-" if count == len(of_fault) else (0, (3, 2)),
                    zorder=4,
                    gid="first-wrong",
                )
            )


@style.styled
def heat_map(rows: Rows):
    """log10(difference / limit) of each signal (column) under each fault (line), worst seed; one
    panel a P.

    A frame marks the first signal that is wrong, in the order of the columns; it is dashed where
    the seeds disagree.
    """
    panels, names = list(_cells(rows)), of.signals(rows)
    norm, inches = style.drift_norm(), [LINE * len(faults) for _, faults in panels]
    figure = style.canvas(style.WIDTH, 1.1 + sum(inches) + 0.3 * len(panels))
    grid = figure.add_gridspec(len(panels) + 1, 1, height_ratios=[*inches, 0.1])
    for place, (size, faults) in enumerate(panels):
        axes = figure.add_subplot(grid[place])
        _paint(axes, faults, names, norm)
        _frame(axes, faults, names)
        axes.set_xlim(-0.5, len(names) - 0.5)
        axes.set_ylim(len(faults) - 0.5, -0.5)
        titles = [of.line_title(fault, of_fault) for fault, of_fault in faults]
        axes.set_yticks(range(len(faults)), titles, color=style.INK)
        axes.xaxis.tick_top()
        heads = [of.label(s) for s in names] if place == 0 else []
        axes.set_xticks(range(len(heads)), heads, color=style.INK)
        axes.text(-0.012, 1.02, f"P = {size}", transform=axes.transAxes, ha="right", weight="bold")
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    _scale(figure, grid[len(panels)], norm)
    return figure


def _scale(figure, place, norm) -> None:
    """The colours' meaning, in a line of its own under the panels."""
    mappable = ScalarMappable(norm=norm, cmap=style.DRIFT)
    bar = figure.colorbar(mappable, cax=figure.add_subplot(place), orientation="horizontal")
    bar.set_label("log10 (difference / limit): above 0 the limit is broken")
    bar.set_ticks(range(-3, 7), labels=[str(n) if n <= 0 else f"+{n}" for n in range(-3, 7)])
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)


def _either(rows: Rows) -> str:
    return " or ".join(of.label(name) for name in of.first_wrong(rows))


def heat_map_alt(rows: Rows) -> str:
    parts = []
    for size, faults in _cells(rows):
        wrong = [
            f"{of.fault_title(fault)} first wrong at {_either(of_fault)}"
            for fault, of_fault in faults
            if of.first_wrong(of_fault)
        ]
        right = [
            of.fault_title(fault) for fault, of_fault in faults if not of.first_wrong(of_fault)
        ]
        parts.append(
            f"P = {size}: "
            + "; ".join(wrong + ([f"{', '.join(right)}: within its limits"] if right else []))
        )
    return "Heat map of signal by fault. " + ". ".join(parts) + "."


def heat_map_table(rows: Rows) -> Table:
    """One line a P and fault: first wrong signal, expected one, largest difference of each."""
    body, names = [], of.signals(rows)
    for size, faults in _cells(rows):
        for fault, of_fault in faults:
            first = _either(of_fault) or "-"
            predicted = {r["result"].get("expected_first_wrong") for r in of_fault} - {None}
            expected = ", ".join(sorted(map(of.label, predicted))) or "-"
            worst = []
            for name in names:
                found = [
                    r["result"]["signals"][name]["max_abs"]
                    for r in of_fault
                    if name in r["result"]["signals"]
                ]
                worst.append(style.number(max(found)) if found else "-")
            title = of.line_title(fault, of_fault)
            body.append([str(size), title, first, expected, str(len(of_fault)), *worst])
    header = ["P", "fault", "first wrong", "expected", "seeds", *map(of.label, names)]
    return header, body


HEAT = Plot(
    "Which sum is missing",
    heat_map,
    heat_map_alt,
    heat_map_table,
    "A frame marks the first wrong signal, in the order of the columns; it is dashed where seeds "
    "disagree. Worst seed in each cell; in the table, the largest |difference|. bits vary: within "
    "its limits, yet other bits when the step is repeated. dp 2: on two data-parallel lanes.",
)
