"""Which sum is missing in a tensor-parallel block, told from its values alone?

Audits somebody else's twin (`--dense mod:fn --twin mod:fn`), or the reconstructed blocks with a
fault in the seam, of which the twin and the audit know nothing.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlkernel.collectives import catalogue
from rlkernel.experiments.case import TARGETS, Case, UsageError, check_seeds, param, unknown
from rlkernel.grid import Grid, is_power_of_two

NAME = "audit"
SUMMARY = "which sum is missing in anybody's tensor-parallel block, from values alone"
QUESTION = (
    "Which sum is missing, doubled, scaled or on the wrong group in this tensor-parallel block?"
)

# Biases that are not zero: one that is added too often shows.
SIZES = {
    "swiglu": {"seq": 8, "batch": 2, "hidden": 16, "ffn": 24, "bias_std": 1.0},
    "gqa": {
        "seq": 8, "batch": 2, "hidden": 16, "query_heads": 4, "kv_heads": 2, "head_dim": 4,
        "bias_std": 1.0,
    },
}  # fmt: skip
FAULTS = {"swiglu": catalogue.SWIGLU, "gqa": catalogue.GQA}
# torch's own twin: the layers whose style is left out -> (kind, boundary) that an audit should name
STYLES = {
    "torch-swiglu": {
        "row_style_left_out": (("down",), "missing", "down"),
        "column_styles_left_out": (("gate", "up"), "missing", "norm.grad"),
        "gate_style_left_out": (("gate",), "missing", "norm.grad"),
        "up_style_left_out": (("up",), "missing", "norm.grad"),
    },
    "torch-gqa": {
        "row_style_left_out": (("wo",), "missing", "wo"),
        "column_styles_left_out": (("wq", "wk", "wv"), "missing", "norm.grad"),
        "wq_style_left_out": (("wq",), "missing", "norm.grad"),
        "wk_style_left_out": (("wk",), "missing", "norm.grad"),
        "wv_style_left_out": (("wv",), "missing", "norm.grad"),
    },
}
BLOCKS = (*FAULTS, *STYLES)
LARGEST = {"swiglu": 4, "gqa": 4, "torch-swiglu": 4, "torch-gqa": 2}
# site of a fault -> the boundary at which an audit should name it
BOUNDARY = {
    "down.forward": "leave",
    "gate_up.dx": "norm.grad",
    "down.db": "bias.grad",
    "down.load": "down.weight",
    "out.forward": "leave",
    "qkv.dx": "norm.grad",
    "out.db": "bias.grad",
    "kv.dw": "wk.weight.grad",
    "wo.load": "wo.weight",
    "norm.dw": "norm.weight.grad",
    "dw": "bias.grad",  # the first parameter
}
ALL_FAULTS = tuple(
    dict.fromkeys(name for found in (*FAULTS.values(), *STYLES.values()) for name in found)
)

COVERED = (
    "missing, doubled, averaged, scaled sums, sums over the wrong group, swapped shards, a bias "
    "added again, values of the step before, sums in the order of arrival",
    "blocks that nobody told anything: the twin hands out tensors and where they should lie",
)
NOT_COVERED = (
    "one rank of several that goes wrong by itself: it is told apart, its cause is `unknown`",
    "differences below the dtype's tolerance: in BF16 2 percent of a boundary in relative L2",
    "two causes at once: the first wrong boundary in order of dependency is named, not the second",
    "which of several layers was left without its gradient sum, where these are no linear layers "
    "whose weights and output gradients the twin lists: the boundary is named, not the cause",
    "a boundary that the twin does not list; an order of additions that does not change a bit",
)


@dataclass(frozen=True)
class Params:
    dense: str = param("", "module:function that returns the dense Reference of a seed")
    twin: tuple[str, ...] = param(
        (),
        "module:function (rank, group, state_dict, x, target) -> {boundary: (tensor, layout)}; "
        "several are audited one after the other",
    )
    block: tuple[str, ...] = param(
        ("swiglu", "gqa"), "without --dense: reconstructed blocks to audit", choices=BLOCKS
    )
    fault: str = param(
        "none",
        "fault to put into them, or `all`: each one, and whether the audit names it rightly",
        choices=("none", "all", *ALL_FAULTS),
    )
    nproc: tuple[int, ...] = param((4,), "ranks; two leave more than one explanation", unit="ranks")
    seed: tuple[int, ...] = param((11,), "seeds of weights and data")
    target: str = param("cpu", "where the ranks compute", choices=TARGETS)


def cases(params: Params) -> list[Case]:
    """Raises UsageError for what cannot run, or cannot show."""
    for tp in params.nproc:
        if not is_power_of_two(tp) or tp == 1:
            raise UsageError(f"nproc={tp} is not possible: expected a power of two from 2 on")
    check_seeds(params.seed)
    if bool(params.dense) != bool(params.twin):
        raise UsageError("give both --dense and --twin, or neither")
    found = _theirs(params) if params.dense else _ours(params)
    if not found:
        raise UsageError(f"fault {params.fault} cannot show in {', '.join(params.block)} here")
    return found


def _theirs(params: Params) -> list[Case]:
    if params.fault != "none":
        raise UsageError("--fault goes into the reconstructed blocks, not into --dense and --twin")
    found = []
    for twin in params.twin:
        code = "-".join(_code(name) for name in (params.dense, twin))
        what = {"block": "theirs", "dense": params.dense, "twin": twin, "code": code}
        for p in params.nproc:
            found += [Case(NAME, Grid(tp=p), seed=s, parameters=what) for s in params.seed]
    return found


def _ours(params: Params) -> list[Case]:
    found = []
    for block in params.block:
        for tp in params.nproc:
            if tp > LARGEST[block]:
                raise UsageError(f"nproc={tp} is too many for {block}: at most {LARGEST[block]}")
            for fault, grid, split in _shown(block, params.fault, tp):
                what = {"block": block, "sequence_parallel": split}
                found += [Case(NAME, grid, "fp32", s, fault, what) for s in params.seed]
    return found


def _shown(block: str, asked: str, tp: int) -> list[tuple[str, Grid, str]]:
    """(fault, grid, sequence parallel) of what was asked for and can show with tp ranks."""
    healthy = [("none", Grid(tp=tp), "off")] if asked in ("none", "all") else []
    known = FAULTS.get(block, STYLES.get(block))
    names = [name for name in known if asked in ("all", name)]
    if block in STYLES:
        return healthy + [(name, Grid(tp=tp), "off") for name in names]
    shown = [(known[name], known[name].grid(tp)) for name in names]
    return healthy + [(f.name, g, "on" if f.only else "off") for f, g in shown if g]


def _code(name: str) -> str:
    """8 hex digits of the file behind `module:function`, so that an edit is measured anew."""
    module, _, function = name.partition(":")
    try:
        spec = importlib.util.find_spec(module) if function else None
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin:
        raise UsageError(
            f"{name!r} was not found: expected module:function, importable from this folder"
        )
    code = Path(spec.origin).read_bytes()
    known = _names(code)
    if function not in known:
        raise UsageError(unknown(f"function in {module}:", function, known))
    return hashlib.sha256(code).hexdigest()[:8]


def _names(code: bytes) -> list[str]:
    """What a module defines or imports at its top level, read without running it."""
    found = []
    for node in ast.parse(code).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.append(node.name)
        elif isinstance(node, ast.Assign):
            found += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.ImportFrom):
            found += [alias.asname or alias.name for alias in node.names]
    return found


def run(case: Case, comm) -> dict:
    """Audit one block; the same report on all ranks, with what an audit should have said.

    Raises UsageError where dense side and twin cannot be held against each other.
    """
    from rlkernel.audit.gathered import Unusable
    from rlkernel.audit.report import audit
    from rlkernel.contract import ReductionTree

    comm = comm.using(contract=ReductionTree(comm.grid.size, "fp32"))
    block = case.parameters["block"]
    dense, twin, expected = (_load_theirs if block == "theirs" else _build_ours)(case, comm)
    try:
        report = audit(dense, twin, comm, case.seed)
    except Unusable as error:
        raise UsageError(str(error)) from error
    told = (report["kind"], report["boundary"])
    if expected is None:
        return report
    verdict = "right" if told == expected else "unsure" if report["sure"] == "unsure" else "wrong"
    return {
        **report,
        "expected_kind": expected[0],
        "expected_boundary": expected[1],
        "told": verdict,
    }


def _load_theirs(case: Case, comm):
    import importlib

    def get(name: str):
        module, _, function = name.partition(":")
        return getattr(importlib.import_module(module), function)

    dense, theirs = get(case.parameters["dense"]), get(case.parameters["twin"])
    group = comm.links["tp"].transport.group

    def twin(due):
        return theirs(comm.rank, group, due.state_dict, due.x, due.target)

    return dense, twin, None


def _build_ours(case: Case, comm):
    """(dense, twin, (kind, boundary) that should be named)."""
    import torch

    from rlkernel.audit import blocks
    from rlkernel.reconstruct.gqa import GQA
    from rlkernel.reconstruct.swiglu import SwiGLU

    name, split = case.parameters["block"], case.parameters["sequence_parallel"] == "on"
    plain, torchs = name.removeprefix("torch-"), name.startswith("torch-")
    fault = FAULTS[plain].get(case.fault) if not torchs else None
    make = SwiGLU if plain == "swiglu" else GQA
    shape = {**SIZES[plain], **(fault.fixture if fault else {})}
    block = make(case.seed, torch.float32, None, split, **shape)
    if torchs:
        skip, *expected = STYLES[name].get(case.fault, ((), "clean", None))
        twin = blocks.torch_twin(block, comm, tuple(skip))
    else:
        local = block.shard(block.weights(comm.device), comm)
        seam, local = fault.put_into(comm, local) if fault else (comm, local)
        twin = blocks.our_twin(block, seam, local)
        expected = (fault.kind, BOUNDARY[fault.site]) if fault else ("clean", None)
    return lambda seed: blocks.reference(block, seed), twin, tuple(expected)


def verdict(params: Params, rows: Sequence[Mapping]) -> dict:
    """Clean means passed; under `--fault all` every diagnosis must be right instead."""
    checks = []
    for row in rows:
        result, label = row["result"], _label(row["case"])
        if params.fault == "all":
            value = f"{_told(result['kind'], result['boundary'])} ({result['told']})"
            limit = _told(result["expected_kind"], result["expected_boundary"])
            checks.append((f"{label}: named", result["told"] == "right", value, limit))
        else:
            checks.append((f"{label}: clean", row["passed"], result["says"], "clean"))
    keys = ("name", "passed", "value", "limit")
    found = [dict(zip(keys, check, strict=True)) for check in checks]
    return {"passed": all(check["passed"] for check in found), "checks": found}


def summary(params: Params, rows: Sequence[Mapping]) -> dict:
    keep = ("passed", "kind", "boundary", "step", "sure", "says", "told")
    return {
        "passed": verdict(params, rows)["passed"],
        "says": [row["result"]["says"] for row in rows],
        "cases": [
            {
                "case": _label(row["case"]),
                **{k: row["result"][k] for k in keep if k in row["result"]},
            }
            for row in rows
        ],
    }


def table(params: Params, rows: Sequence[Mapping]) -> tuple[list[str], list[list[str]]]:
    header = ["block", "diagnosis", "at", "step", "sure", "told"]
    body = [
        [
            _label(row["case"]),
            row["result"]["kind"],
            row["result"]["boundary"] or "-",
            str(row["result"]["step"]),
            row["result"]["sure"],
            row["result"].get("told", "-"),
        ]
        for row in rows
    ]
    return header, body


def protocol(params: Params) -> dict:
    """Nothing is timed."""
    return {"steps": 2, "sizes": SIZES}


def _told(kind: str, boundary: str | None) -> str:
    return f"{kind} at {boundary}" if boundary else kind


def _label(case: Mapping) -> str:
    grid = Grid(**case["grid"])
    fault = "" if case["fault"] == "none" else f" {case['fault']}"
    block = case["parameters"].get("twin") or case["parameters"]["block"]
    return f"{block} {grid} seed {case['seed']}{fault}"
