"""Reading rows of cases.jsonl: what the figures of a reconstruction share; pure, of plain dicts.

`row["case"]` holds grid, dtype, seed, fault and parameters. `row["result"]["signals"]` maps each
compared signal to max_abs, bound, excess (the largest ratio of a difference to its limit),
mismatches, elements and `ecdf`, 21 quantiles (0 % to 100 %) of |difference| to the dense block.
"""

from __future__ import annotations

import math

from . import Rows

LABEL = {
    "output": "output",
    "loss": "loss",
    "input_grad": "dX",
    "norm_grad": "dnorm",
    "gate_up_grad": "dW gate/up",
    "down_grad": "dW down",
    "down_bias_grad": "db down",
    "parameter_grad": "dW",
    "post_step": "after step",
}


def ranks(row: dict) -> int:
    """The tensor-parallel size P of a row."""
    return int(row["case"]["grid"]["tp"])


def lanes(row: dict) -> int:
    """The data-parallel lanes of a row: above 1 where a fault needs a second one to show."""
    return int(row["case"]["grid"].get("dp", 1))


def option(row: dict, name: str, default: str = "") -> str:
    """A parameter of the row's case, as text."""
    return str(row["case"].get("parameters", {}).get(name, default))


def excess(signal: dict) -> float:
    """log10 of the record's largest ratio of a difference to its limit: above 0 the signal is
    wrong; -inf where nothing differs, inf where something is no number."""
    ratio = float(signal["excess"])
    if math.isnan(ratio):
        return math.inf
    return math.log10(ratio) if ratio > 0 else -math.inf


def grouped(rows: Rows, key) -> dict:
    """Rows by key(row), in the order in which the keys first appear."""
    groups: dict = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def worst(rows: Rows, name: str) -> float | None:
    """The largest excess of one signal over rows (seeds); None when no row has the signal."""
    found = [
        excess(r["result"]["signals"][name]) for r in rows if name in r["result"].get("signals", {})
    ]
    return max(found) if found else None


def first_wrong(rows: Rows) -> dict[str, int]:
    """How many rows go wrong first at which signal."""
    counts: dict[str, int] = {}
    for row in rows:
        name = row["result"].get("first_wrong")
        if name:
            counts[name] = counts.get(name, 0) + 1
    return counts


def label(signal: str) -> str:
    """The short name of a signal on an axis."""
    return LABEL.get(signal, signal.replace("_", " "))


def fault_title(fault: str) -> str:
    return "no fault" if fault == "none" else fault.replace("_", " ")


def line_title(fault: str, rows: Rows) -> str:
    """A fault as the head of a line; a second data-parallel lane is told."""
    dp = max(map(lanes, rows))
    return fault_title(fault) + (f"  (dp {dp})" if dp > 1 else "")


def bits_vary(rows: Rows, name: str) -> bool:
    """Whether a signal is wrong only because its bits change between equal steps."""
    return any(
        r["result"].get("seen_by") == "repeat" and r["result"].get("first_wrong") == name
        for r in rows
    )


def signals(rows: Rows) -> list[str]:
    """The signals of the rows, in the order in which a step produces them."""
    return list(dict.fromkeys(name for row in rows for name in row["result"].get("signals", {})))
