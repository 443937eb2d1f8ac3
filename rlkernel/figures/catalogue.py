"""The catalogue of faults at one glance: which signals each makes wrong, and what it looks like.

missing forward reduce   [first] wrong  wrong  wrong ...   each rank goes on with its own share
missing backward reduce   right  right [first] wrong ...
"""

from __future__ import annotations

from matplotlib.patches import Rectangle

from . import Plot, Rows, Table, style
from . import rows as of

LINE = 0.27  # inches a fault
RIGHT, WRONG, FIRST = "#e4eff8", "#f3b27a", style.SUM
TITLE = {"tp-swiglu": "SwiGLU block", "tp-gqa": "GQA block"}
# The first word of a fault -> what its values look like.
LOOKS = {
    "missing": "each rank goes on with its own share",
    "doubled": "too large by the group's size",
    "averaged": "too small by the group's size",
    "wrong": "shares of other ranks are added",
    "swapped": "right numbers, on the wrong ranks",
    "bias": "the bias is in it P times",
    "stale": "right for the step before",
    "arrival": "right, but not the same bits twice",
}


def _blocks(rows: Rows) -> list[tuple[str, list[tuple[str, list[dict]]], list[str]]]:
    """[(experiment, [(fault, its rows)], signals)]; the correct twin is left out."""
    found = []
    for name, mine in of.grouped(rows, lambda r: r["case"]["experiment"]).items():
        faults = of.grouped(mine, lambda r: r["case"]["fault"])
        faults.pop("none", None)
        found.append((name, _in_order(faults), of.signals(mine)))
    return found


def _in_order(faults: dict) -> list[tuple[str, list[dict]]]:
    """Those that go wrong earliest in a step first; the record's order among equals."""
    names = of.signals([r for found in faults.values() for r in found])
    place = lambda item: min(map(names.index, of.first_wrong(item[1])), default=len(names))  # noqa: E731
    return sorted(faults.items(), key=place)


def looks(fault: str) -> str:
    """What a fault's values look like, in a few words."""
    return LOOKS.get(fault.partition("_")[0], "")


def shown_on(rows: Rows) -> str:
    """Where a fault was shown: `P 2, 4`, `P 2 dp 2`, `P 2 SP`."""
    sizes = ", ".join(str(p) for p in sorted({of.ranks(r) for r in rows}))
    dp = max(map(of.lanes, rows))
    only = all(of.option(r, "sequence_parallel", "off") == "on" for r in rows)
    return f"P {sizes}" + (f" dp {dp}" if dp > 1 else "") + (" SP" if only else "")


def state(rows: Rows, name: str) -> str:
    """`first`, `bits vary`, `wrong`, `some` (not under every seed and P), or "" for right."""
    counts = of.first_wrong(rows)
    if of.bits_vary(rows, name):
        return "bits vary"
    if counts.get(name):
        return "first"
    wrong = sum(of.excess(r["result"]["signals"][name]) > 0 for r in rows)
    return "" if not wrong else "wrong" if wrong == len(rows) else "some"


@style.styled
def matrix(rows: Rows):
    """Fault (line) by signal (column), one panel a block: red where it shows first, orange where
    it is wrong as well. To the right: where it was shown and what it looks like."""
    blocks = _blocks(rows)
    inches = [LINE * len(faults) + 0.6 for _, faults, _ in blocks]
    figure = style.canvas(style.WIDTH, sum(inches) + 0.1)
    grid = figure.subplots(len(blocks), 1, squeeze=False, height_ratios=inches)[:, 0]
    for axes, (name, faults, names) in zip(grid, blocks, strict=True):
        _block(axes, faults, names)
        axes.text(
            -0.012, 1.02, TITLE.get(name, name), transform=axes.transAxes, ha="right", va="bottom",
            weight="bold", fontsize=10.5,
        )  # fmt: skip
    return figure


def _block(axes, faults, names) -> None:
    scale = 8 / len(names)  # both panels are equally wide
    for line, (fault, of_fault) in enumerate(faults):
        for column, name in enumerate(names):
            _cell(axes, column * scale, line, scale, state(of_fault, name))
        axes.text(8.15, line, shown_on(of_fault), va="center", fontsize=8, color=style.MUTED)
        axes.text(9.65, line, looks(fault), va="center", fontsize=8.5)
    axes.set_xlim(0, 13.6)
    axes.set_ylim(len(faults) - 0.5, -0.5)
    axes.set_yticks(
        range(len(faults)), [of.fault_title(fault) for fault, _ in faults], color=style.INK
    )
    axes.xaxis.tick_top()
    axes.set_xticks(
        [(c + 0.5) * scale for c in range(len(names))],
        [of.label(name).replace(" ", "\n") for name in names], color=style.INK,
    )  # fmt: skip
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def _cell(axes, x, line, width, what: str) -> None:
    colour = {"first": FIRST, "wrong": WRONG, "some": WRONG}.get(what, RIGHT)
    axes.add_patch(
        Rectangle(
            (x + 0.03, line - 0.45), width - 0.06, 0.9, facecolor=colour,
            edgecolor=FIRST if what == "bits vary" else "none", lw=1.6,
            gid=what or "right",
        )
    )  # fmt: skip
    if what and what != "wrong":
        ink = style.PAPER if what == "first" else style.INK
        axes.text(x + width / 2, line, what, ha="center", va="center", fontsize=8, color=ink)


def matrix_alt(rows: Rows) -> str:
    parts = []
    for name, faults, _ in _blocks(rows):
        by_signal = of.grouped(faults, lambda item: " or ".join(of.first_wrong(item[1])))
        told = [
            f"first at {' or '.join(map(of.label, signal.split(' or ')))}: "
            + ", ".join(of.fault_title(f) for f, _ in found)
            for signal, found in by_signal.items()
            if signal
        ]
        parts.append(f"{TITLE.get(name, name)}, {len(faults)} faults; {'; '.join(told)}")
    return "Fault by signal. " + ". ".join(parts) + "."


def matrix_table(rows: Rows) -> Table:
    """One line a block and fault: where shown, first wrong, expected, what it looks like."""
    body = []
    for name, faults, names in _blocks(rows):
        for fault, of_fault in faults:
            first = " or ".join(map(of.label, of.first_wrong(of_fault))) or "-"
            predicted = {r["result"].get("expected_first_wrong") for r in of_fault} - {None}
            right = [of.label(n) for n in names if not state(of_fault, n)]
            body.append([
                TITLE.get(name, name), of.fault_title(fault), shown_on(of_fault), first,
                ", ".join(sorted(map(of.label, predicted))) or "-", ", ".join(right) or "nothing",
                looks(fault),
            ])  # fmt: skip
    return ["block", "fault", "shown on", "first wrong", "expected", "still right", "looks"], body


CATALOGUE = Plot(
    "What each fault looks like",
    matrix,
    matrix_alt,
    matrix_table,
    "Signals stand in the order in which a step produces them. Red: wrong first. Orange: wrong as "
    "a consequence (some: not under every seed). Blue: right. dp: data-parallel lanes; SP: "
    "sequence parallel.",
)
