"""Figures of the deterministic kernels: do the bits depend on anything but the contract, and what
does the official layer lose in FP16?

The contract itself: tree.py. How far each is from FP64: fp64.py. What it costs: cost.py."""

from __future__ import annotations

from matplotlib.patches import Rectangle

from . import Plot, Rows, Table, bits, contracts, cost, fp64, style, tree

LINE = 0.29  # inches a schedule
CLEAN = "#e3f1ed"
FAMILIES, LAYOUTS = "family", "layout"


# ---- census --------------------------------------------------------------------------------------


def compared(rows: Rows) -> list[dict]:
    """Every comparison of a census: one schedule and configuration on one set of operands."""
    return [found for row in contracts.about(rows, "census") for found in row["result"]["census"]]


GATE_UP = "gate/up"


def fused(rows: Rows) -> list[dict]:
    """The same of gate and up with SwiGLU behind them, which have no contract but the chain."""
    found = [row["result"].get("gate_up", ()) for row in contracts.about(rows, "census")]
    return [{**one, "contract": GATE_UP} for some in found for one in some]


def _values(found: list[dict], axis: str) -> list[str]:
    return list(dict.fromkeys(one[axis] for one in found))


def tally(found: list[dict]) -> tuple[int, int]:
    """(comparisons in which any element differs, all comparisons)."""
    return sum(one["mismatches"] > 0 for one in found), len(found)


def _cells(axes, found: list[dict], schedules: list[str], axis: str, values: list[str]) -> None:
    for line, schedule in enumerate(schedules):
        for column, value in enumerate(values):
            here = [o for o in found if o["schedule"] == schedule and o[axis] == value]
            wrong, count = tally(here)
            if not count:
                axes.text(column, line, "·", ha="center", va="center", color=style.MUTED)
                continue
            _bar(axes, column - 0.48, line, 0.96, f"{wrong} / {count}", differs=wrong > 0)
    axes.set_xlim(-0.5, len(values) - 0.5)
    axes.set_ylim(len(schedules) - 0.5, -0.5)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.xaxis.tick_top()


def _bar(axes, left: float, line: int, width: float, said: str, differs: bool) -> None:
    axes.add_patch(
        Rectangle(
            (left, line - 0.44), width, 0.88, lw=2.2 if differs else 0,
            facecolor=style.FAIL if differs else CLEAN, edgecolor=style.INK,
            gid="differs" if differs else "agrees",
        )
    )  # fmt: skip
    axes.text(
        left + width / 2, line, said, ha="center", va="center", fontsize=8.5,
        color=style.PAPER if differs else style.INK, weight="bold" if differs else "normal",
    )  # fmt: skip


@style.styled
def census(rows: Rows):
    """Configurations that differ from the oracle, of all that were compared; one panel a contract,
    one line a schedule. Left by what the data are, right by how they lie in memory."""
    found, named = compared(rows), contracts.contracts(rows)
    schedules = {c: _values([o for o in found if o["contract"] == c], "schedule") for c in named}
    inches = [LINE * max(1, len(schedules[c])) for c in named]
    figure = style.canvas(style.WIDTH, 0.75 + sum(inches) + 0.16 * len(named))
    axis_values = [_values(found, axis) for axis in (FAMILIES, LAYOUTS)]
    grid = figure.subplots(
        len(named), 2, squeeze=False,
        height_ratios=inches, width_ratios=[max(1, len(values)) for values in axis_values],
    )  # fmt: skip
    for place, name in enumerate(named):
        mine = [one for one in found if one["contract"] == name]
        for axes, axis, values in zip(grid[place], (FAMILIES, LAYOUTS), axis_values, strict=True):
            _cells(axes, mine, schedules[name], axis, values)
            heads = [v.replace(" ", "\n", 1) if axis == LAYOUTS else v for v in values]
            first = place == 0
            axes.set_xticks(
                range(len(values)) if first else [], heads if first else [], color=style.INK
            )
            axes.set_yticks([])
        left = grid[place][0]
        left.set_yticks(range(len(schedules[name])), schedules[name], color=style.INK)
        left.set_ylabel(
            name, rotation=0, ha="right", va="center", weight="bold", color=style.INK, labelpad=9
        )
    return figure


def census_alt(rows: Rows) -> str:
    parts, found = [], compared(rows) + fused(rows)
    for name in dict.fromkeys((*contracts.contracts(rows), *_values(found, "contract"))):
        mine = [one for one in found if one["contract"] == name]
        wrong, count = tally(mine)
        seen = [one for one in mine if one["mismatches"]]
        where = dict.fromkeys(f"{one['schedule']} on {one['family']} data" for one in seen)
        parts.append(f"{name}: {wrong} / {count} differ" + (f" ({', '.join(where)})" * bool(seen)))
    batches = ", ".join(map(str, contracts.rows_of_batch(contracts.about(rows, "census"))))
    return (
        f"Census of schedules against the oracle, bit for bit, at M = {batches}: configurations "
        f"that differ, of those compared. {'; '.join(parts)}."
    )


def census_table(rows: Rows) -> Table:
    """One line a contract and schedule: configurations, comparisons, what differs and where."""
    body, found = [], compared(rows) + fused(rows)
    refused = {}
    for row in contracts.about(rows, "census"):
        refused |= row["result"].get("refused", {})
    for name in dict.fromkeys((*contracts.contracts(rows), *_values(found, "contract"))):
        mine = [one for one in found if one["contract"] == name]
        for schedule in _values(mine, "schedule"):
            here = [one for one in mine if one["schedule"] == schedule]
            wrong, count = tally(here)
            differ, elements = (sum(o[f] for o in here) for f in ("mismatches", "elements"))
            body.append([
                name, schedule, str(len({one["config"] for one in here})),
                f"{wrong} / {count}", f"{differ:,} / {elements:,}",
                refused.get(f"{schedule} under {name.replace('/', '_')}", "-"),
            ])  # fmt: skip
    header = ["contract", "schedule", "configurations", "comparisons that differ",
              "elements that differ", "refused from there on"]  # fmt: skip
    return header, body


CENSUS = Plot(
    "Every schedule against one oracle",
    census,
    census_alt,
    census_table,
    "In each cell: configurations (tile, stages, split) that differ in any bit, of those compared. "
    "Red with a frame: not the contract's bits. ·: not tried there.",
)


# ---- batches -------------------------------------------------------------------------------------


def anchors(rows: Rows) -> dict[str, dict]:
    """Contract -> its anchor line: every batch size, and the most that any row of the record saw
    differ."""
    found: dict[str, dict] = {}
    for row in contracts.about(rows, "census"):
        for line in row["result"]["anchors"]:
            before = found.get(line["contract"])
            if before is None or line["mismatches"] > before["mismatches"]:
                found[line["contract"]] = line
    return found


def places(m: int) -> int:
    """In how many places of a batch the row was put: first, middle and last."""
    return len({0, m // 2, m - 1})


def _each(line: dict) -> list[tuple[int, int]]:
    """(batch size, elements compared in it)."""
    columns = line["elements"] // sum(map(places, line["batches"]))
    return [(m, columns * places(m)) for m in line["batches"]]


@style.styled
def batches(rows: Rows):
    """Elements of one row that differ from the row alone, by the size of the batch it is put into;
    one line a contract. The record counts a contract as a whole, so a line that differs is one
    bar."""
    found = anchors(rows)
    sizes = next((line["batches"] for line in found.values()), [])
    figure = style.canvas(style.WIDTH, 0.85 + 0.34 * max(1, len(found)))
    axes = figure.subplots()
    for line, anchor in enumerate(found.values()):
        if anchor["mismatches"]:
            said = f"{anchor['mismatches']:,} / {anchor['elements']:,} elements differ"
            _bar(axes, -0.48, line, len(sizes) - 0.04, said, differs=True)
            continue
        for column, (_, elements) in enumerate(_each(anchor)):
            _bar(axes, column - 0.48, line, 0.96, f"0 / {elements:,}", differs=False)
    axes.set_xlim(-0.5, len(sizes) - 0.5)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_yticks(range(len(found)), found, color=style.INK, weight="bold")
    axes.set_xticks(range(len(sizes)), [f"M = {m:,}" for m in sizes], color=style.INK)
    axes.xaxis.tick_top()
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure


def batches_alt(rows: Rows) -> str:
    found = anchors(rows)
    said = "; ".join(
        f"{name}: {a['mismatches']:,} / {a['elements']:,} elements differ"
        for name, a in found.items()
    )
    sizes = ", ".join(str(m) for m in next(iter(found.values()), {"batches": []})["batches"])
    return f"One row inside batches of M = {sizes}, against the row alone. {said}."


def batches_table(rows: Rows) -> Table:
    body = [
        [name, ", ".join(map(str, a["batches"])), f"{a['mismatches']:,} / {a['elements']:,}"]
        for name, a in anchors(rows).items()
    ]
    return ["contract", "batches M", "elements that differ"], body


BATCHES = Plot(
    "One row in any batch",
    batches,
    batches_alt,
    batches_table,
    "A row is put first, in the middle and last into a batch of M rows, and compared with the same "
    "row computed alone.",
)


# ---- FP16 ----------------------------------------------------------------------------------------


def fp16(rows: Rows) -> Table:
    """The official layer in FP16 against itself in FP32; the reason where it was not measured."""
    body = []
    for row in contracts.about(rows, "fp16"):
        at, found = row["case"]["parameters"], row["result"].get("drift")
        shape = f"({at['m']}, {at['hidden']:,}, {at['intermediate']:,})"
        names = ("rel_l2", "max_abs", "mean_abs")
        told = [style.number(found[n]) for n in names] if found else ["-", "-", "-"]
        body.append([shape, *told, row["result"].get("not_measured") or "-"])
    return ["(M, H, I)", "relative L2", "max |e|", "mean |e|", "not measured because"], body


CONTRACT, BITS, DRIFT = tree.CONTRACT, bits.BITS, fp64.DRIFT
COST, GEMM_COST, memory = cost.COST, cost.GEMM_COST, cost.memory
products = contracts.products
