"""The bits of the distributed FFN layer: does a layout give those of one rank, do two fresh
processes, and how often are they the official layer's?"""

from __future__ import annotations

import copy

from matplotlib.patches import Rectangle

from . import Plot, Rows, Table, contracts, style
from . import rows as of
from .ffn_cost import transport

LINE = 0.36  # inches a layout
CLEAN, SOME = "#e3f1ed", "#fbeecb"
DIFFER = f"{contracts.COMMAND} --what ffn,train --contract chain"


def short(count: int) -> str:
    """1234 -> 1,234; from ten millions on in millions: 603,979,776 -> 604M."""
    return f"{count / 1e6:,.0f}M" if count >= 10_000_000 else f"{count:,}"


def _cell(axes, column: int, line: int, said: str, colour: str, gid: str) -> None:
    bad = colour == style.FAIL
    axes.add_patch(
        Rectangle(
            (column - 0.48, line - 0.44), 0.96, 0.88, lw=2.2 if bad else 0,
            facecolor=colour, edgecolor=style.INK, gid=gid,
        )
    )  # fmt: skip
    axes.text(
        column, line, said, ha="center", va="center", fontsize=8,
        color=style.PAPER if bad else style.INK, weight="bold" if bad else "normal",
    )  # fmt: skip


def _board(axes, columns: list[str], lines: list[str]) -> None:
    """Empty cells with their heads."""
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), columns, color=style.INK)
    axes.set_yticks(range(len(lines)), lines, color=style.INK)
    axes.xaxis.tick_top()
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


# ---- exactness -----------------------------------------------------------------------------------


def by_contract(rows: Rows) -> list[dict]:
    """The layers' rows, one a layout, M and contract: what a menu offers."""
    found = []
    for row in contracts.about(rows, "layer"):
        for contract in of.option(row, "contracts").split("+"):
            one = copy.deepcopy(row)
            one["case"]["parameters"]["contracts"] = contract
            own = [line for line in one["result"]["lines"] if line["contract"] == contract]
            held = not any(line["mismatches"] for line in own)
            digests = one["result"]["digest"].items()
            one["passed"] = one["result"]["passed"] = held
            one["result"] |= {
                "lines": own,
                "digest": {name: d for name, d in digests if name.startswith(f"{contract} ")},
            }
            found.append(one)
    return found


def title(row: dict) -> str:
    fault = row["case"]["fault"]
    tokens = f"{int(of.option(row, 'm')):,}"
    return f"{of.option(row, 'layout')}, M = {tokens}" + (f", {fault}" if fault != "none" else "")


def counted(row: dict) -> dict[str, tuple[int, int]]:
    """Result -> (mismatches, elements) over all variants of the row."""
    found: dict[str, tuple[int, int]] = {}
    for line in row["result"]["lines"]:
        wrong, elements = found.get(line["operator"], (0, 0))
        found[line["operator"]] = wrong + line["mismatches"], elements + line["elements"]
    return found


@style.styled
def exact(rows: Rows):
    """Elements that differ from one rank's, of those compared: a line a layout, a column a result,
    all variants and ranks together."""
    found = contracts.about(rows, "layer")
    columns = list(dict.fromkeys(name for row in found for name in counted(row)))
    figure = style.canvas(style.WIDTH, 0.75 + LINE * max(1, len(found)))
    axes = figure.subplots()
    _board(axes, columns, [title(row) for row in found])
    for line, row in enumerate(found):
        for name, (wrong, elements) in counted(row).items():
            said = f"{short(wrong)} / {short(elements)}"
            at = (columns.index(name), line)
            if wrong:
                _cell(axes, *at, said, style.FAIL, "differs")
            else:
                _cell(axes, *at, said, CLEAN, "agrees")
    return figure


def exact_alt(rows: Rows) -> str:
    parts = []
    for row in contracts.about(rows, "layer"):
        wrong, elements = (sum(column) for column in zip(*counted(row).values()))
        bad = [name for name, (n, _) in counted(row).items() if n]
        where = f" ({', '.join(bad)})" if bad else ""
        parts.append(f"{title(row)}: {wrong:,} / {elements:,}{where}")
    return (
        "Every rank's part of every result of the layer against one rank, elements that differ of "
        f"those compared. {'; '.join(parts) or 'No layout was compared'}."
    )


def exact_table(rows: Rows) -> Table:
    """One line a layout and variant: what differs, over how many steps, who moved the bytes, and
    the hash of the gathered results."""
    body = []
    for row in contracts.about(rows, "layer"):
        lines, digests = row["result"]["lines"], row["result"]["digest"]
        each = len(lines) // max(1, len(digests))
        for number, digest in enumerate(digests.values()):
            own = lines[number * each : (number + 1) * each]
            wrong, elements = (sum(li[name] for li in own) for name in ("mismatches", "elements"))
            body.append([
                title(row), own[0]["contract"], own[0]["dx"], own[0]["dw"], own[0]["schedule"],
                of.option(row, "repeats"), transport(row), f"{wrong:,} / {elements:,}", digest,
            ])  # fmt: skip
    header = ["layout", "contract", "dX", "dW", "schedules", "steps", "transport",
              "elements that differ", "hash of all results"]  # fmt: skip
    return header, body


EXACT = Plot(
    "Every layout against one rank",
    exact,
    exact_alt,
    exact_table,
    "In each cell: elements that differ, of those compared, over contracts, ways to sum dX and dW "
    "and ranks. no-grad: forward without gradients against the training forward; repeat: later "
    "training steps against the first. Red with a frame: not one rank's bits.",
)


# ---- two processes -------------------------------------------------------------------------------


def hashes(rows: Rows) -> Table:
    """One seed, two fresh processes: the hash of one rank's results, and how many differ."""
    body = [
        [str(row["case"]["seed"]), line["contract"], line["dx"], line["digest"],
         f"{line['mismatches']} / {line['elements']}"]
        for row in contracts.about(rows, "hash") for line in row["result"]["lines"]
    ]  # fmt: skip
    return ["seed", "contract", "dX", "hash", "fresh processes that differ"], body


# ---- the official layer's bits -------------------------------------------------------------------


def official(rows: Rows) -> dict[tuple[str, str], dict[int, tuple[int, int]]]:
    """(contract, result) -> M -> (elements that differ from the official layer's, elements)."""
    found: dict[tuple[str, str], dict[int, tuple[int, int]]] = {}
    for what in ("ffn", "train"):
        for row in contracts.about(rows, what):
            for line in row["result"].get("lines", ()):
                if "differ_from_official" in line:
                    at = found.setdefault((line["contract"], line["operator"]), {})
                    told = line["differ_from_official"], line["elements"]
                    at[int(of.option(row, "m"))] = told
    return found


@style.styled
def same_bits(rows: Rows):
    """Elements of the chain's results that differ from the official layer's: a line a result, a
    column an M."""
    found = {name: told for (c, name), told in official(rows).items() if c == "chain"}
    if not found:
        return contracts.not_measured(DIFFER)
    ms = sorted({m for told in found.values() for m in told})
    figure = style.canvas(style.WIDTH, 0.75 + LINE * len(found))
    axes = figure.subplots()
    _board(axes, [f"M = {m:,}" for m in ms], list(found))
    for line, told in enumerate(found.values()):
        for m, (wrong, elements) in told.items():
            said, colour = (f"{wrong / elements:.2%}", SOME) if wrong else ("0", CLEAN)
            _cell(axes, ms.index(m), line, said, colour, "differs" if wrong else "agrees")
    return figure


def same_bits_alt(rows: Rows) -> str:
    parts = []
    for (contract, name), told in official(rows).items():
        if contract == "chain":
            same = [f"{m:,}" for m, (wrong, _) in sorted(told.items()) if not wrong]
            most = max(wrong / elements for wrong, elements in told.values())
            parts.append(f"{name}: all bits at M = {', '.join(same) or 'none'} of "
                         f"{len(told)}, elsewhere up to {most:.2%} differ")  # fmt: skip
    said = "; ".join(parts)
    return f"Results under chain with the official layer's bits. {said}." if said else (
        contracts.gap(DIFFER)
    )  # fmt: skip


def same_bits_table(rows: Rows) -> Table:
    """Every contract, result and M."""
    body = [
        [contract, name, f"{m:,}", f"{wrong:,} / {elements:,}", f"{wrong / elements:.3%}"]
        for (contract, name), told in official(rows).items()
        for m, (wrong, elements) in sorted(told.items())
    ]
    header = ["contract", "result", "M", "elements that differ", "share"]
    return (header, body) if body else (["not measured"], [[contracts.gap(DIFFER)]])


SAME_BITS = Plot(
    "How often the chain has the official layer's bits",
    same_bits,
    same_bits_alt,
    same_bits_table,
    "0: every element. A share: where the library splits the sum at that shape, or cuts it "
    "otherwise. The other contracts, in the table, are other sums.",
)
