"""Figures of the audit: what each cause predicts, boundary by boundary, and the verdicts."""

from __future__ import annotations

import math
import textwrap

from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch, Rectangle

from . import Plot, Rows, Table, catalogue, style
from . import rows as of

TITLE = {
    "swiglu": "SwiGLU", "gqa": "GQA",
    "torch-swiglu": "torch's SwiGLU", "torch-gqa": "torch's GQA",
}  # fmt: skip
TOLERANCE = 1e-5  # relative L2, FP32
TOLD = {"right": style.PASS, "unsure": style.RANKS[1], "wrong": style.SUM}


def block(row: dict) -> str:
    """Which block a row audited."""
    return of.option(row, "block")


# ---- how it works --------------------------------------------------------------------------------

# (kind, what four ranks hold, whether that is one rank's own, what it must satisfy)
CAUSES = (
    ("as it should be", ("y", "y", "y", "y"), False, "each rank holds the dense value y"),
    ("missing", ("y₀", "y₁", "y₂", "y₃"), True, "y₀ + y₁ + y₂ + y₃ = y, and no two are equal"),
    ("missing", ("u+g₀", "u+g₁", "u+g₂", "u+g₃"), True,
     "g₀ + g₁ + g₂ + g₃ + u = y, and the g are the shares of one layer of several"),
    ("subset", ("a", "a", "b", "b"), True, "equal within parts of the group, and a + b = y"),
    ("doubled", ("4y", "4y", "4y", "4y"), False,
     "n times the dense value, n ranks being all of a group or a part of it"),
    ("averaged", ("y/4", "y/4", "y/4", "y/4"), False, "an n-th of it, likewise"),
    ("scaled", ("c·y", "c·y", "c·y", "c·y"), False, "c times it, for one c that is neither"),
    ("wrong group", ("a", "b", "a", "b"), True,
     "a + b = y + z: {0, 1} should hold y and {2, 3} z, summed were {0, 2} and {1, 3}"),
    ("wrong group", ("2a", "2a", "2b", "2b"), True,
     "a + b = y: summed were {0, 1} and {2, 3}, which held a and b already"),
    ("wrong group", ("y+z", "y+z", "y+z", "y+z"), False,
     "{0, 1} should hold y and {2, 3} z, summed were all of them"),
    ("swapped", ("s₁", "s₀", "s₃", "s₂"), True, "each rank holds a shard that another should"),
    ("sharded", ("s₀", "s₁", "s₂", "s₃"), True, "its own shard, where the whole was due"),
    ("added again", ("y+3b", "y+3b", "y+3b", "y+3b"), False,
     "y + k·b for a vector b of the state and a whole k"),
    ("stale", ("y′", "y′", "y′", "y′"), False, "the dense value of the step before"),
    ("unsteady", ("y", "y", "y", "y"), False, "y within rounding, but other bits in a repeat"),
)  # fmt: skip
OWNER = {"₀": 0, "₁": 1, "₂": 2, "₃": 3, "a": 0, "b": 1}


@style.styled
def causes(_rows: Rows = ()):
    """One line a cause: its name, the tensors of four ranks as tiles (grey: the same on all that
    should be equal, a colour: not), and what these values must satisfy."""
    figure = style.canvas(style.WIDTH, 0.5 + 0.37 * len(CAUSES))
    axes = figure.subplots()
    axes.set_xlim(0, 100)
    axes.set_ylim(len(CAUSES) - 0.4, -1.2)
    style.bare(axes)
    head = {"y": -0.75, "fontsize": 8, "color": style.MUTED}
    for rank in range(4):
        axes.text(20 + 7.2 * rank, s=f"rank {rank}", ha="center", **head)
    axes.text(48.5, s="what the values must satisfy", **head)
    axes.text(14.5, s="cause", ha="right", **head)
    for line, (name, held, own, must) in enumerate(CAUSES):
        axes.text(14.5, line, name, ha="right", va="center", weight="bold", fontsize=9.5)
        axes.text(48.5, line, must, va="center", fontsize=9)
        for rank, text in enumerate(held):
            face = style.RANKS[OWNER[text[-1]]] if own else style.WHOLE
            axes.add_patch(
                FancyBboxPatch(
                    (20 + 7.2 * rank - 3.2, line - 0.38), 6.4, 0.76, facecolor=face,
                    edgecolor="none", boxstyle="round,pad=0,rounding_size=0.3",
                )
            )  # fmt: skip
            ink = style.ink_on(to_rgb(face))
            axes.text(20 + 7.2 * rank, line, text, ha="center", va="center", color=ink, fontsize=9)
    return figure


def causes_alt(_rows: Rows = ()) -> str:
    told = "; ".join(f"{name}: {must}" for name, _, _, must in CAUSES)
    return f"What four ranks hold under each cause, and what it must satisfy. {told}."


def causes_table(_rows: Rows = ()) -> Table:
    body = [[name, ", ".join(held), must] for name, held, _, must in CAUSES]
    return ["cause", "ranks 0 to 3 hold", "what the values must satisfy"], body


CAUSE = Plot(
    "What each cause predicts",
    causes,
    causes_alt,
    causes_table,
    "y: the dense value (z: that of other data). Grey: the same on every rank. A colour: not.",
)


# ---- one audit, boundary by boundary -------------------------------------------------------------


def _first(findings: list[dict]) -> int | None:
    return next((i for i, f in enumerate(findings) if f["kind"] != "equal"), None)


def _off(finding: dict) -> float:
    """log10 of the relative L2 distance; a floor where nothing differs."""
    off = finding["off"]
    return -9.0 if off <= 0 else min(max(math.log10(off), -9.0), 2.0) if off < math.inf else 2.0


@style.styled
def findings(rows: Rows):
    """Distance (relative L2, log10) of each boundary to what it should hold, in the order of
    dependency, for the first of the rows. A frame: the first wrong one, where the cause lies."""
    result = rows[0]["result"]
    found = result["findings"]
    first = _first(found)
    said = textwrap.wrap(result["says"], 118)
    figure = style.canvas(style.WIDTH, 0.75 + 0.2 * len(found) + 0.19 * len(said))
    axes = figure.subplots()
    for line, finding in enumerate(found):
        colour = style.PASS
        if finding["kind"] != "equal":
            colour = style.SUM if line == first else "#e0a08c"
        x = _off(finding)
        axes.plot([-9.4, x], [line, line], color=colour, lw=1.4, alpha=0.55)
        axes.plot([x], [line], color=colour, marker="o", markersize=5.5 if line != first else 8)
        if finding["kind"] not in ("equal", "unknown") or line == first:
            axes.text(max(x, -5) + 0.25, line, finding["kind"].replace("_", " "), va="center",
                      fontsize=8.5, color=style.SUM if line == first else style.MUTED,
                      weight="bold" if line == first else "normal")  # fmt: skip
    if first is not None:
        axes.add_patch(
            Rectangle((-9.45, first - 0.5), 13.4, 1, fill=False, edgecolor=style.INK, lw=1.8,
                      gid="first-wrong", zorder=4)
        )  # fmt: skip
    axes.axvline(math.log10(TOLERANCE), color=style.LIMIT, lw=1.2)
    axes.set_xlim(-9.5, 4)
    axes.set_ylim(len(found) - 0.4, -0.8)
    axes.set_yticks(range(len(found)), [f["boundary"] for f in found], color=style.INK)
    axes.set_xticks([-9, *range(-8, 3, 2)], ["0", *(f"$10^{{{p}}}$" for p in range(-8, 3, 2))])
    axes.set_xlabel("distance to what the ranks should hold, relative L2")
    axes.set_title("\n".join(said), fontsize=9.5, x=-0.14)
    axes.tick_params(axis="y", length=0, labelsize=8)
    return figure


def findings_alt(rows: Rows) -> str:
    result = rows[0]["result"]
    found = result["findings"]
    first = _first(found)
    if first is None:
        return (
            f"{len(found)} boundaries in the order of dependency, all right. "
            f"The audit says: {result['says']}."
        )
    behind = sum(f["kind"] != "equal" for f in found) - 1
    return (
        f"{len(found)} boundaries in the order of dependency; {first} are right, then "
        f"{found[first]['boundary']} is wrong, and {behind} behind it as a consequence. "
        f"The audit says: {result['says']}."
    )


def findings_table(rows: Rows) -> Table:
    """One line a boundary: what was found there, its distance, the diagnosis' own residual."""
    found = rows[0]["result"]["findings"]
    first = _first(found)
    body = [
        [
            "first wrong" if i == first else "", f["boundary"], f["kind"].replace("_", " "),
            style.number(f["off"]), style.number(f["residual"]),
            f["sentence"].partition(": ")[2].partition("; this predicts")[0],
        ]
        for i, f in enumerate(found)
    ]  # fmt: skip
    return ["", "boundary", "found", "off", "residual", "in words"], body


FINDINGS = Plot(
    "The audit, boundary by boundary",
    findings,
    findings_alt,
    findings_table,
    "Top to bottom: weights as loaded, forward, backward, weight gradients, updated weights. The "
    "frame marks the first wrong boundary; what is pale behind it follows from it.",
)


def sentences(rows: Rows) -> Table:
    """One line a case: who was audited, and the sentence that came of it."""
    body = [
        [
            of.option(r, "twin").rpartition(":")[2] or block(r), str(of.ranks(r)),
            "clean" if r["passed"] else "not clean", r["result"]["sure"], r["result"]["says"],
        ]
        for r in rows
    ]  # fmt: skip
    return ["twin", "P", "", "sure", "what the audit says"], body


# ---- the verdicts --------------------------------------------------------------------------------

LINE = 0.26  # inches a fault


def _panels(rows: Rows) -> dict[str, tuple[list[str], list[int], dict]]:
    """block -> (faults, sizes, (fault, P) -> its rows), the blocks in the order of TITLE."""
    panels = {}
    for name, mine in of.grouped([r for r in rows if r["result"].get("told")], block).items():
        cells = of.grouped(mine, lambda r: (r["case"]["fault"], of.ranks(r)))
        faults = list(dict.fromkeys(fault for fault, _ in cells))
        panels[name] = (faults, sorted({p for _, p in cells}), cells)
    return {name: panels[name] for name in TITLE if name in panels}


def _worst_told(rows: Rows) -> str:
    return max((r["result"]["told"] for r in rows), key=list(TOLD).index)


def _named(rows: Rows) -> str:
    """`missing @ leave`: what the audit said, of every seed that disagrees."""
    said = dict.fromkeys(
        f"{r['result']['kind'].replace('_', ' ')}"
        + (f" @ {r['result']['boundary']}" if r["result"]["boundary"] else "")
        for r in rows
    )
    return " / ".join(said)


@style.styled
def verdicts(rows: Rows):
    """Fault (line) by P (column), one panel a block: green where cause and boundary are named
    rightly, amber where the audit is unsure, red where it is wrong; in the cell what it said."""
    panels = _panels(rows)
    names = list(panels)
    pairs = [names[i : i + 2] for i in range(0, len(names), 2)]
    inches = [LINE * max(len(panels[n][0]) for n in pair) for pair in pairs]
    figure = style.canvas(style.WIDTH, sum(inches) + 0.6 * len(pairs) + 0.3)
    grid = figure.add_gridspec(len(pairs), 2, height_ratios=inches)
    for line, pair in enumerate(pairs):
        for column, name in enumerate(pair):
            _verdict_panel(figure.add_subplot(grid[line, column]), name, *panels[name],
                           inches[line])  # fmt: skip
    dot = {"ls": "none", "marker": "s", "markersize": 8, "mec": "none"}
    figure.legend(
        handles=[Line2D([], [], color=c, label=f"{n}: {_count(rows)[n]}", **dot)
                 for n, c in TOLD.items()],
        loc="outside upper right", ncols=3, frameon=False, fontsize=8.5,
    )  # fmt: skip
    return figure


def _verdict_panel(axes, name, faults, sizes, cells, inches) -> None:
    for line, fault in enumerate(faults):
        for column, size in enumerate(sizes):
            mine = cells.get((fault, size))
            if not mine:
                axes.text(column, line, _why_not(fault, sizes, cells), ha="center", va="center",
                          color=style.MUTED, fontsize=7.2)  # fmt: skip
                continue
            told = _worst_told(mine)
            axes.add_patch(
                Rectangle((column - 0.49, line - 0.45), 0.98, 0.9, facecolor=TOLD[told],
                          edgecolor="none", gid=told)
            )  # fmt: skip
            ink = style.ink_on(to_rgb(TOLD[told]))
            said = _named(mine)
            size = 7.2 if len(said) < 29 else 6.3
            axes.text(column, line, said, ha="center", va="center", fontsize=size, color=ink)
    axes.set_yticks(range(len(faults)), map(of.fault_title, faults), color=style.INK, fontsize=8)
    axes.xaxis.tick_top()
    axes.set_xticks(range(len(sizes)), [f"P = {p}" for p in sizes], color=style.INK)
    axes.set_xlim(-0.5, len(sizes) - 0.5)
    axes.set_ylim(inches / LINE - 0.5, -0.5)  # lines are equally high in panels of a row
    axes.set_title(TITLE[name], pad=16, fontsize=10.5)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def _why_not(fault: str, sizes, cells) -> str:
    """What stands where a fault was not tried: it cannot show there, or it needs lanes instead."""
    dp = max(of.lanes(r) for p in sizes for r in cells.get((fault, p), ()))
    return f"on {dp} × {min(sizes)} ranks" if dp > 1 else "·"


def _count(rows: Rows) -> dict[str, int]:
    told = [r["result"]["told"] for r in rows if r["result"].get("told")]
    return {name: told.count(name) for name in TOLD}


def verdicts_alt(rows: Rows) -> str:
    parts = []
    for name, (faults, _, cells) in _panels(rows).items():
        mine = [r for found in cells.values() for r in found]
        told = ", ".join(f"{n} {kind}" for kind, n in _count(mine).items())
        missed = {r["case"]["fault"] for r in mine if r["result"]["told"] != "right"}
        odd = [of.fault_title(fault) for fault in faults if fault in missed]
        parts.append(f"{TITLE[name]}: {told}" + (f" ({', '.join(odd)})" if odd else ""))
    return "What the audit said of each fault, by block and P. " + "; ".join(parts) + "."


def verdicts_table(rows: Rows) -> Table:
    """One line a case: what was put in, what an audit should say, what it said, right or not."""
    body = [
        [
            TITLE.get(block(r), block(r)), str(of.ranks(r)),
            of.line_title(r["case"]["fault"], [r]), _pair(r["result"], "expected_"),
            _pair(r["result"], ""), str(r["result"]["step"]), r["result"]["sure"],
            r["result"]["told"],
        ]
        for r in rows if r["result"].get("told")
    ]  # fmt: skip
    return ["block", "P", "fault", "should say", "says", "step", "sure", "verdict"], body


def _pair(result: dict, prefix: str) -> str:
    kind, where = result[f"{prefix}kind"], result[f"{prefix}boundary"]
    return kind.replace("_", " ") + (f" at {where}" if where else "")


VERDICTS = Plot(
    "Right, unsure or wrong",
    verdicts,
    verdicts_alt,
    verdicts_table,
    "In each cell the cause that the audit named, and the boundary. A fault that cannot show at "
    "some P, or only on two data-parallel lanes, is not tried there.",
)
CATALOGUE = catalogue.CATALOGUE
