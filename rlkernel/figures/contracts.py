"""Reading rows of det-ffn: what its figures share; pure, of plain dicts.

`row["case"]["parameters"]` holds what (census, gemm, ffn, fp16), m and contracts (joined by +).
`row["result"]["lines"]` has one line a contract, or a product and contract: operator, m, mismatches
of elements, drift to FP64 and, where there was a GPU, its time and the ratio to each baseline.
"""

from __future__ import annotations

from . import Rows, style
from . import rows as of

ALL = ("tree8.bf16", "tree8.fp32", "tree2.bf16", "chain")
COMMAND = "python -m rlkernel det-ffn --device cuda --size qwen3"


def contracts(rows: Rows) -> list[str]:
    """The orders of additions that the rows have, in their order; all where nothing tells."""
    named = [n for row in rows for n in of.option(row, "contracts").split("+") if n]
    return list(dict.fromkeys(named)) or list(ALL)


def look(contract: str) -> dict:
    """Colour and mark of a contract, the same in every figure."""
    weight, _, tokens = contract.partition("/tokens:")
    known = ALL.index(weight) if weight in ALL else len(ALL)
    # Fewer leaves of tokens: the colour of the features' tree, another mark.
    return {"color": style.CONTRACTS[known], "marker": "v" if tokens else "osD^v"[known]}


def about(rows: Rows, what: str) -> list[dict]:
    """The rows of one kind: census, gemm, ffn or fp16."""
    return [row for row in rows if of.option(row, "what") == what]


def lines(rows: Rows, *what: str, timed: bool = False) -> list[dict]:
    """Lines of those kinds of rows; timed: only lines that have a time."""
    found = [line for name in what for r in about(rows, name) for line in r["result"]["lines"]]
    return [line for line in found if not timed or line.get("median_us")]


def products(rows: Rows) -> list[dict]:
    """The rows that have lines: products, or whole forwards."""
    return [row for row in rows if row["result"].get("lines")]


def rows_of_batch(rows: Rows) -> list[int]:
    """The numbers of rows M, ascending."""
    return sorted({int(of.option(row, "m")) for row in rows})


def not_measured(command: str = COMMAND, needs: str = "1 GPU"):
    """The visible gap, where a drawing would stand: what it needs and the command that fills it."""
    figure = style.canvas(style.WIDTH, 1.3)
    axes = figure.subplots()
    style.bare(axes)
    box = {"boxstyle": "round,pad=1.1", "facecolor": "#fdf5dc", "edgecolor": "#7a5a00", "ls": "--"}
    axes.text(
        0.5, 0.5, f"NOT MEASURED here: needs {needs}\n{command}", ha="center", va="center",
        color="#7a5a00", fontsize=10, linespacing=1.7, bbox=box,
    )  # fmt: skip
    return figure


def gap(command: str = COMMAND, needs: str = "a GPU") -> str:
    """The same in a sentence."""
    return f"NOT MEASURED here: nothing was timed. On a machine with {needs}: {command}."


NOT_MEASURED = gap()
