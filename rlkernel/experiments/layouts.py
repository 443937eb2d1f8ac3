"""The layouts of det-ffn's layer: which there are, what can run on them and what can show there.

Imports no torch.
"""

from __future__ import annotations

import re

from rlkernel.experiments.case import UsageError, param
from rlkernel.grid import Grid

# name -> (grid, sequence parallel)
LAYOUTS = {
    "tp2": (Grid(tp=2), False),
    "tp2_sp": (Grid(tp=2), True),
    "tp4": (Grid(tp=4), False),
    "tp2_cp2": (Grid(cp=2, tp=2), False),
    "tp2_cp2_sp": (Grid(cp=2, tp=2), True),
    "tp8": (Grid(tp=8), False),
    "tp4_cp2": (Grid(cp=2, tp=4), False),
    "tp4_cp2_sp": (Grid(cp=2, tp=4), True),
}
ALL = {"single": (Grid(), False), **LAYOUTS}
BETWEEN_RANKS = ("left-fold", "exchanged", "arrival-order")
FAULTS = (*BETWEEN_RANKS, "leaves16", "local-left-fold")
OF_TWO = ("tp2", "tp2_sp")
BY_DEFAULT = {"layer": tuple(LAYOUTS), "graph": ("single",), "time": OF_TWO}
TOKENS = 32
# Contracts of a layer that has fewer leaves of tokens than of features; its default comes first.
OF_TOKENS = ("tree8.bf16/tokens:tree2.bf16", "tree8.fp32/tokens:tree2.fp32")
TIMED_TOKENS = {"small": (TOKENS,), "qwen3": (TOKENS, 4096)}


def layout_param():
    text = "layouts of the layer; by default all, for time those of two ranks. Implies what=layer"
    return param((), text, choices=tuple(LAYOUTS))


def dx_param():
    text = "separate: gate's and up's dX summed apart, then added; packed: in one tree"
    return param(("separate", "packed"), text, choices=("separate", "packed"))


def dw_param():
    text = "over CP reduce subtree roots, gather the tokens, or what moves fewer bytes"
    return param(("reduce", "gather"), text, choices=("reduce", "gather", "auto"))


def transport_param():
    text = (
        "between GPUs: nccl; symmetric: memory that the GPUs of a host share; or gloo through the "
        "host, whose ranks may share a GPU"
    )
    return param("auto", text, choices=("auto", "nccl", "symmetric", "gloo"))


def layer_cases(
    params, what: str, hidden: int, intermediate: int, default_contracts: tuple[str, ...]
):
    """(grid, parameters) of every layout and number of tokens.

    Raises UsageError for what cannot run, and for a fault where it cannot show.
    """
    if params.repeats < 2:
        raise UsageError("repeats must be at least 2: their bits are compared with the first's")
    if params.transport in ("nccl", "symmetric") and params.device == "cpu":
        raise UsageError(
            f"transport={params.transport} moves GPU tensors: device=cpu has gloo only"
        )
    if what == "graph" and (params.device == "cpu" or params.transport == "gloo"):
        raise UsageError(
            "what=graph captures a CUDA graph: device=cpu has none, and what transport=gloo stages "
            "through the host cannot be captured"
        )
    tokens = TIMED_TOKENS[params.size] if what == "time" else (TOKENS,)
    how = {"repeats": params.repeats}
    if what == "time":
        how = {"graph": params.graph, "warmup": params.warmup, "samples": params.samples}
    for layout in params.layout or BY_DEFAULT[what]:
        grid, split = ALL[layout]
        for m in params.m or tokens:
            _check_tokens(layout, m)
            contracts = _contracts(params, layout, default_contracts)
            if params.fault != "none":
                contracts = _shown(params, layout, m, contracts, default_contracts)
            yield (
                grid,
                {
                    "what": what,
                    "m": m,
                    "hidden": hidden,
                    "intermediate": intermediate,
                    "contracts": "+".join(contracts),
                    "layout": layout,
                    "sequence_parallel": split,
                    "dx": "+".join(params.dx),
                    "dw": "+".join(params.dw),
                    **how,
                    "transport": params.transport,
                },
            )


def _check_tokens(layout: str, m: int) -> None:
    grid, split = ALL[layout]
    shards = grid.cp * (grid.tp if split else 1)
    if m % shards:
        raise UsageError(f"m={m} is not possible on {layout}: tokens divide over {shards} ranks")


def _contracts(params, layout: str, default: tuple[str, ...]) -> tuple[str, ...]:
    """Those whose trees this grid can hold. One that was asked for by name is refused."""
    grid = ALL[layout][0]
    asked = params.contract
    if asked == default and params.fault == "none":
        asked = (OF_TOKENS[0], *asked)
    held = tuple(c for c in asked if leaves(c) >= grid.tp and leaves(c, "token") >= grid.cp)
    if params.contract != default and held != params.contract:
        refused = next(name for name in params.contract if name not in held)
        raise UsageError(
            f"contract {refused} is not possible on {layout}: {grid.tp} ranks need {grid.tp} leaves"
            f" of features, {grid.cp} of tokens"
        )
    return held


def _shown(params, layout: str, m: int, contracts, default) -> tuple[str, ...]:
    """The contracts under which the fault must show on this layout."""
    found = tuple(name for name in contracts if shows(params.fault, layout, m, name))
    if not found or (params.contract != default and found != params.contract):
        raise UsageError(f"fault {params.fault} cannot show on {layout} with m={m} under "
                         f"{'+'.join(contracts)}: {_NEEDS[params.fault]}; and joints that are "
                         "rounded to bf16, for the output hides the others")  # fmt: skip
    return found


_NEEDS = dict.fromkeys(BETWEEN_RANKS, "it needs a sum over four ranks")
_NEEDS["leaves16"] = "it needs a contract of fewer than 16 leaves"
_NEEDS["local-left-fold"] = "it needs four leaves within a rank"


def shows(fault: str, layout: str, m: int, contract: str) -> bool:
    """Whether the fault changes an order of additions there, by more than the output's rounding."""
    grid, most, tokens = LAYOUTS[layout][0], leaves(contract), leaves(contract, "token")
    if not contract.endswith(".bf16"):
        return False
    if fault in BETWEEN_RANKS:
        return max(grid.tp, grid.cp) >= 4
    if fault == "leaves16":
        return most < 16
    return max(most // grid.tp, min(tokens, m) // grid.cp) >= 4


def timed(lines) -> list[dict]:
    """The lines of what=time, each named by all that tells it from the others."""
    found = []
    for line in lines:
        sums = f", dx {line['dx']}, dw {line['dw']}" if line["operator"] == "step" else ""
        mode = f" {line['mode']}" if "mode" in line else ""
        found.append({**line, "operator": f"{line['operator']}{mode}{sums}"})
    return found


def merged(lines) -> list[dict]:
    """One line a variant, all of its results together, for a table."""
    found: dict[tuple, dict] = {}
    for line in lines:
        operator = f"dx {line['dx']}, dw {line['dw']}"
        total = found.setdefault(
            (operator, line["contract"]),
            {**line, "operator": operator, "mismatches": 0, "elements": 0},
        )
        for name in ("mismatches", "elements"):
            total[name] += line[name]
    return list(found.values())


def leaves(contract: str, axis: str = "weight") -> int:
    """tree8.bf16 -> 8; chain -> 1; of tokens, tree8.bf16/tokens:tree2.bf16 -> 2."""
    weight, _, token = contract.partition("/tokens:")
    name = token if token and axis == "token" else weight
    return int((re.findall(r"\d+", name.partition(".")[0]) or ["1"])[0])
