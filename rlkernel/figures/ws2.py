"""Figures of ws2: the matrix of boundaries with their verdicts, and the drift on both sides of each
sum. Where the ranks stood and what a sum costs: nodes.py."""

from __future__ import annotations

from matplotlib.patches import FancyBboxPatch

from . import Plot, Rows, Table, nodes, style

PATHS = (
    ("forward", "forward"),
    ("dx", "backward, activation"),
    ("dw", "backward, weight"),
)
PROJECTIONS = ("gate", "up", "down")
SIDES = {"local": "local", "pre_reduce": "before the sum", "post_reduce": "behind the sum"}
VERSION_1 = "tree2.bf16"
CLEAN, WRONG = "#e3f1ed", "#f9e3dc"
TOLERANCE = {"forward": 5e-2, "backward": 1e-1}  # atol; rtol comes on top
FLOOR = 1e-7  # where a difference of nothing is drawn on a logarithmic axis


def lines(rows: Rows) -> list[tuple[dict, dict]]:
    """(case's parameters, line) of every boundary of the home grid, tree2 contracts."""
    return [
        (row["case"]["parameters"], line)
        for row in rows
        if row["case"]["parameters"]["part"] in ("forward", "backward", "packed")
        for line in row["result"]["lines"]
    ]


# ---- matrix --------------------------------------------------------------------------------------


def _cell(rows: Rows, projection: str, path: str) -> list[dict]:
    """Every look at a boundary under the version-1 contract: all M, seeds and NCCL settings."""
    names = [f"{projection}.{path}"] + ([f"{projection}.dh"] if path == "dx" else [])
    return [
        line for _, line in lines(rows)
        if line["boundary"] in names and (line["contract"] in (VERSION_1, "chain"))
    ]  # fmt: skip


def tally(found: list[dict]) -> dict[str, tuple[int, int]]:
    """side -> (elements that differ from the reference, elements)."""
    sides: dict[str, tuple[int, int]] = {}
    for line in found:
        for name, side in line["sides"].items():
            wrong, count = sides.get(name, (0, 0))
            sides[name] = (wrong + side["mismatches"], count + side["elements"])
    return sides


def sound(found: list[dict]) -> bool:
    """Bits of the reference and of one rank, within tolerance, one hash."""
    return bool(found) and all(
        not line["repeats_that_differ"] and not line["one_rank"][0]
        and not any(side["mismatches"] or side["outside"] for side in line["sides"].values())
        for line in found
    )  # fmt: skip


@style.styled
def matrix(rows: Rows):
    """Paths down, projections across; each cell says who sums and what differed on each side."""
    figure = style.canvas(style.WIDTH, 3.75)
    axes = figure.subplots()
    style.bare(axes)
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 61)
    for column, projection in enumerate(PROJECTIONS):
        kind = "row parallel" if projection == "down" else "column parallel"
        axes.text(29.5 + 28 * column, 59.5, f"{projection}, {kind}", ha="center", va="top",
                  weight="bold")  # fmt: skip
    for line, (path, name) in enumerate(PATHS):
        y = 38 - 18.5 * line
        axes.text(14, y + 8.5, name, ha="right", va="center", weight="bold")
        for column, projection in enumerate(PROJECTIONS):
            _draw_cell(axes, 16 + 28 * column, y, _cell(rows, projection, path))
    return figure


def _draw_cell(axes, x: float, y: float, found: list[dict]) -> None:
    good = sound(found)
    axes.add_patch(FancyBboxPatch(
        (x, y), 27, 17, facecolor=CLEAN if good else WRONG, gid="holds" if good else "fails",
        edgecolor="none" if good else style.FAIL, boxstyle="round,pad=0,rounding_size=1",
    ))  # fmt: skip
    over = found[0]["over"] if found else None
    groups = " ".join(map(str, found[0]["groups"])).replace(", ", ",") if found else ""
    head = f"sum over {over.upper()} {groups}" if over else "no collective"
    axes.text(x + 1.2, y + 14.6, head if found else "not looked at", va="center", weight="bold",
              fontsize=8.5, color=style.SUM if over else style.INK)  # fmt: skip
    for number, (side, (wrong, count)) in enumerate(tally(found).items()):
        axes.text(x + 1.2, y + 10.2 - 4 * number, f"{SIDES[side]}: {wrong:,} / {count:,} differ",
                  va="center", fontsize=8.5)  # fmt: skip
    if found:
        repeats = max(line["repeats"] for line in found)
        hashes = 1 + max(line["repeats_that_differ"] for line in found)
        axes.text(x + 1.2, y + 2.2, f"{repeats} repeats, {hashes} hash{'es' * (hashes > 1)}",
                  va="center", fontsize=8.5, color=style.MUTED)  # fmt: skip


def matrix_alt(rows: Rows) -> str:
    parts = []
    for path, name in PATHS:
        for projection in PROJECTIONS:
            found = _cell(rows, projection, path)
            told = ", ".join(f"{SIDES[s]} {w} / {n} differ" for s, (w, n) in tally(found).items())
            parts.append(f"{projection} {name}: {'holds' if sound(found) else 'fails'}, {told}")
    return f"Boundaries of the FFN's GEMMs against the fixed reference. {'; '.join(parts)}."


def matrix_table(rows: Rows) -> Table:
    """Every look: one line a boundary, M, contract, setting and side."""
    body = []
    for at, line in lines(rows):
        for side, found in line["sides"].items():
            drift = found["drift"]
            body.append([
                line["boundary"], SIDES[side], f"{at['m']:,}", line["contract"], at["nccl"],
                str(line["groups"] or "-"), line["wire"] or "-", line["schedule"],
                f"{found['mismatches']:,} / {found['elements']:,}",
                *(style.number(drift[n]) for n in ("max_abs", "p95", "p99", "mean_abs")),
                f"{1 + line['repeats_that_differ']} in {line['repeats']}",
            ])  # fmt: skip
    header = ["boundary", "side", "M of a rank", "contract", "NCCL", "groups", "wire", "kernel",
              "differ", "max", "p95", "p99", "mean", "hashes"]  # fmt: skip
    return header, body


MATRIX = Plot(
    "Every boundary, before and behind its sum",
    matrix,
    matrix_alt,
    matrix_table,
    f"Under {VERSION_1}: elements that differ in any bit from the fixed distributed reference, "
    "over all M and all ranks. Green: these, the bits of one rank under the same tree, the "
    "tolerance around FP32 and the repeats all hold.",
)


# ---- drift ---------------------------------------------------------------------------------------


def _drifts(rows: Rows) -> dict[str, dict[str, list[dict]]]:
    """boundary -> "contract side" -> lines at the largest M."""
    most = max((at["m"] for at, _ in lines(rows)), default=0)
    found: dict[str, dict[str, list[dict]]] = {}
    for at, line in lines(rows):
        if at["m"] == most and at["nccl"] == "default":
            for side, told in line["sides"].items():
                key = f"{line['contract']} {side}"
                found.setdefault(line["boundary"], {}).setdefault(key, []).append(told)
    return found


@style.styled
def drift(rows: Rows):
    """|difference| to the FP32 product, from the median over p95 and p99 to the maximum."""
    found = _drifts(rows)
    figure = style.canvas(style.WIDTH, 0.9 + 0.42 * max(1, len(found)))
    axes = figure.subplots()
    seen: dict[str, str] = {}
    for number, (name, kinds) in enumerate(found.items()):
        for place, (kind, told) in enumerate(kinds.items()):
            colour, hollow = _look(kind)
            worst = max(told, key=lambda one: one["drift"]["max_abs"])["drift"]
            y = number + (place - (len(kinds) - 1) / 2) * 0.19
            xs = [max(worst[n], FLOOR) for n in ("p95", "p99", "max_abs")]
            axes.plot(xs, [y] * 3, color=colour, lw=1, zorder=2)
            face = style.PAPER if hollow else colour
            label = None if kind in seen else kind.replace("_reduce", "-reduce")
            seen[kind] = colour
            axes.plot(xs, [y] * 3, "o", color=colour, markerfacecolor=face, markersize=4.5,
                      zorder=3, label=label)  # fmt: skip
        axes.plot([_limit(name)] * 2, [number - 0.42, number + 0.42], color=style.LIMIT, lw=1.5)
    axes.set_xscale("log")
    axes.set_yticks(range(len(found)), found, color=style.INK)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xlabel("|difference| to the FP32 product of the same part")
    if seen:
        axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    return figure


def _look(kind: str) -> tuple[str, bool]:
    contract, side = kind.split()
    colours = {"chain": style.MUTED, VERSION_1: style.CONTRACTS[2]}
    return colours.get(contract, style.CONTRACTS[1]), side == "pre_reduce"


def _limit(boundary: str) -> float:
    return TOLERANCE["forward" if boundary.endswith("forward") else "backward"]


def drift_alt(rows: Rows) -> str:
    parts = []
    for name, kinds in _drifts(rows).items():
        told = ", ".join(
            f"{kind.replace('_', ' ')} {max(one['drift']['max_abs'] for one in found):.2g}"
            for kind, found in kinds.items()
        )
        parts.append(f"{name}: {told}")
    return f"Largest difference to the FP32 product on each side of a sum. {'; '.join(parts)}."


DRIFT = Plot(
    "Drift before and behind each sum",
    drift,
    drift_alt,
    matrix_table,
    "Three points a line: 95 and 99 percent of the elements, and the largest, at the largest M. "
    "Hollow: before the sum, against FP32 of the same partial. Filled: behind it, against the "
    "global FP32 product. Red: the absolute part of the tolerance. Less than 1e-7 stands there.",
)

TOPOLOGY, LATENCY = nodes.TOPOLOGY, nodes.LATENCY
