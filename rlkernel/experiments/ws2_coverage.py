"""What a record of ws2 may be quoted for: each line is decided by its rows, never by what was
meant. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rlkernel.experiments import ws2_products as products
from rlkernel.experiments.ws2_products import Rows, lines
from rlkernel.grid import Grid

VERSION_1 = "tree2.bf16"  # BF16 partials and wire: what all sums of the deployment must hold under
FP32 = "tree2.fp32"
REAL = "real nodes"  # as topology.described has them


class Line(NamedTuple):
    """One statement; held decides it from the rows, otherwise `instead` says why not."""

    text: str
    held: Callable[[Rows], bool]
    instead: str | Callable[[Rows], str]
    part: str = ""  # of `what`: asked for means it must be covered
    where: Mapping = {}  # parameters of the rows that it speaks of
    told: Callable[[Rows], str] = lambda rows: ""  # put behind the text where it holds


def _looked(rows: Rows, part: str, **wanted) -> list[Mapping]:
    """Rows of a part whose parameters are these."""
    return [
        row for row in rows
        if row["case"]["parameters"]["part"] == part
        and wanted.items() <= row["case"]["parameters"].items()
    ]  # fmt: skip


def _of(rows: Rows, part: str, **wanted) -> list[Mapping]:
    """The same, where the checks of all of them hold; none where one does not."""
    found = _looked(rows, part, **wanted)
    return found if all(row["passed"] for row in found) else []


def _part(part: str, **wanted) -> Callable[[Rows], bool]:
    return lambda rows: bool(_of(rows, part, **wanted))


def _tracks(rows: Rows) -> list[Mapping]:
    """Rows of both tracks; none where one was not looked at or does not hold."""
    both = [_of(rows, part) for part in ("forward", "backward")]
    return [row for found in both for row in found] if all(both) else []


def _topology(rows: Rows) -> Mapping:
    found = next((row for row in _looked(rows, "start") if row["passed"]), None)
    return found["result"]["topology"] if found else {"kind": "", "groups": [], "ranks": []}


def _sums(rows: Rows, axis: str, parts: Sequence[str], crosses: bool) -> bool:
    """Every group of the axis lies as said, and its sums hold, in all these parts."""
    groups = [g for g in _topology(rows)["groups"] if g["axis"] == axis]
    placed = len(groups) == 2 and all(g["crosses_nodes"] is crosses for g in groups)
    return placed and all(_of(rows, part, contract=VERSION_1) for part in parts)


def _real(rows: Rows) -> bool:
    at = _topology(rows)
    return at["kind"] == REAL and at["hosts"] == 2 and at["gpus"] == 4


def _choices(rows: Rows) -> dict[str, str]:
    """Setting -> ALGORITHM/PROTOCOL of the all-reduces at the start, from the log of NCCL."""
    found = {}
    for row in _of(rows, "start"):
        told = [c for group in row["result"].get("nccl") or () for c in group["choices"]]
        used = sorted({c.rpartition(" ")[2] for c in told if c.startswith("ALLREDUCE")})
        found[row["case"]["parameters"]["nccl"]] = " ".join(used)
    return found


def _settings(rows: Rows) -> bool:
    """A boundary's digests do not depend on the setting, and NCCL did choose otherwise."""
    seen: dict[tuple, dict] = {}
    for row, line in lines(_tracks(rows)):
        at = row["case"]["parameters"]
        look = (line["boundary"], line["contract"], at["m"], row["case"]["seed"])
        seen.setdefault(look, {})[at["nccl"]] = line["digests"]
    compared = [list(found.values()) for found in seen.values() if len(found) > 1]
    alike = all(digests == first for first, *rest in compared for digests in rest)
    return bool(compared) and alike and len(set(_choices(rows).values())) > 1


def _told_settings(rows: Rows) -> str:
    return " (" + "; ".join(f"{name}: {used}" for name, used in _choices(rows).items()) + ")"


def _crossing_tp(rows: Rows) -> bool:
    nodes = {rank["node"] for rank in _topology(rows)["ranks"]}
    return len(nodes) > 1 and bool(_of(rows, "tp4"))  # its one TP group is all four ranks


def _exact_shapes(rows: Rows) -> bool:
    rows = _tracks(rows)
    at = [row["case"]["parameters"] for row in rows]
    shapes = {(a["hidden"], a["intermediate"] // 2) for a in at}
    return shapes == {(4096, 6144)} and {r["result"]["backend"] for r in rows} == {"cuda_sm90"}


def _one_rank(rows: Rows) -> bool:
    found = [line for _, line in lines(_tracks(rows))]
    return bool(found) and not any(line["one_rank"][0] for line in found)


def _fp32(rows: Rows) -> bool:
    """All sums of FP32 partials hold, those of dW at least."""
    parts = ("forward", "backward", "packed")
    found = [row for part in parts for row in _looked(rows, part, contract=FP32)]
    return all(row["passed"] for row in found) and bool(_looked(rows, "backward", contract=FP32))


def _layer(split: bool) -> Callable[[Rows], bool]:
    return _part("layer", sequence_parallel=split)


def _eight(rows: Rows) -> bool:
    return any(Grid(**row["case"]["grid"]).size == 8 for row in _of(rows, "dp"))


TOPOLOGY = (
    Line("2 real nodes x 2 GPUs each, 4 ranks", _real, "needs two machines with two GPUs each"),
    Line("TP=2, CP=2, DP=1, even shards: forward and backward track",
         lambda rows: bool(_tracks(rows)), "not asked for", "backward"),
    Line("exact Qwen3-8B shards (4096, 6144) and (6144, 4096) on SM90", _exact_shapes,
         "needs device=cuda and size=qwen3 on an SM90 GPU, both tracks, and that all checks hold"),
    Line(products.SOME, products.some, products.NEEDS, told=products.told),
    Line(products.EVERY, products.every, products.why_not),
    Line("TP=2/CP=2 has the bits of TP=1/CP=1 under the same tree", _one_rank, "not asked for",
         "backward"),
    Line("two intra-node TP all-reduce groups [0,1] [2,3]",
         lambda rows: _sums(rows, "tp", ("forward", "backward"), False), "not asked for",
         "backward", {"contract": VERSION_1}),
    Line("two inter-node CP weight-gradient all-reduce groups [0,2] [1,3]",
         lambda rows: _sums(rows, "cp", ("backward",), True), "not asked for", "backward",
         {"contract": VERSION_1}),
    Line("only same-coordinate shards are added; dH needs no sum", _part("proofs"),
         "not asked for", "proofs"),
    Line("wrong groups, shapes, types and devices are refused by name", _part("refusals"),
         "not asked for", "refusals"),
    Line("FP32 partials and FP32 on the wire (tree2.fp32)", _fp32, "not asked for",
         "backward", {"contract": FP32}),
    Line("gate and up packed: combined dX, one TP reduction", _part("packed"), "not asked for",
         "packed"),
    Line("complete MLP, forward and backward, through the layer and autograd", _layer(False),
         "not asked for", "layer", {"sequence_parallel": False}),
    Line("reduce-scatter ownership (sequence parallel)", _layer(True), "not asked for", "layer",
         {"sequence_parallel": True}),
    Line("TP groups that cross nodes", _crossing_tp, "not asked for", "tp4"),
    Line("TP=4", _part("tp4"), "not asked for", "tp4"),
    Line("CP=4", _part("cp4"), "not asked for", "cp4"),
    Line("DP=2 x CP=2 gradient groups of four ranks (tree4, tree8)", _part("dp"),
         "not asked for", "dp"),
    Line("DP=2 x CP=2 x TP=2 on eight ranks (tree8)", _eight, "run with device=cpu"),
    Line("other NCCL algorithms and protocols: the same bits", _settings,
         "needs device=cuda and nccl=default,Ring/LL,...: equal bits, and another choice by NCCL",
         told=_told_settings),
)  # fmt: skip

NEVER = (
    ("RMSNorm + GEMM", "the norm is not part of the layer"),
    ("attention under context parallelism", "attention is not part of the layer"),
    ("uneven shards of K, N or the sequence", "refused by name"),
    ("TP, CP or world sizes beyond these", "not tried"),
    ("other rank mappings", "the grid fixes rank = (dp*CP + cp)*TP + tp"),
    ("gradient buckets and accumulation, overlap with them", "one reduction a weight gradient"),
    ("sharded optimizers", "no optimizer state is split"),
    ("framework adapters (vLLM, Megatron, FSDP, DeepSpeed)", "operators and layer stand alone"),
    ("FP16, FP8 and quantised paths", "BF16 only"),
)


def lists(rows: Rows) -> tuple[list[str], list[str]]:
    """(COVERED, NOT COVERED): each statement is in exactly one of them."""
    kind = _topology(rows)["kind"]
    ground = [] if not kind else [f"{kind}: {_told(rows)}"]
    covered, missing = [], []
    for line in TOPOLOGY:
        if line.held(rows):
            covered.append(_qualified(line.text, kind) + line.told(rows))
        else:
            missing.append(f"{line.text}: {_why(line, rows)}")
    return ground + covered, missing + [f"{text}: {why}" for text, why in NEVER]


def complete(params, rows: Rows) -> dict:
    """A check: everything that was asked for is COVERED."""
    # A setting of NCCL that is asked for alone is looked at under one contract.
    contracts = params.contract if "default" in params.nccl else params.contract[:1]
    wanted = [line for line in TOPOLOGY if line.part in params.what
              and line.where.get("contract", contracts[0]) in contracts]  # fmt: skip
    missing = [line.text for line in wanted if not line.held(rows)]
    value = f"{len(wanted) - len(missing)} of {len(wanted)}"
    value += f", not {missing[0]}" if missing else ""
    return {"name": "coverage: what was asked for is covered", "passed": not missing,
            "value": value, "limit": "all"}  # fmt: skip


def _told(rows: Rows) -> str:
    at = _topology(rows)
    where = f"on {at['gpus']} GPU(s)" if at["gpus"] else "on CPUs"
    shared = at["gpus"] and at["gpus"] < len(at["ranks"])
    return f"{len(at['ranks'])} ranks {where}{', which ranks share' if shared else ''}"


def _qualified(text: str, kind: str) -> str:
    """A crossing of nodes that are none is named for what it is."""
    crossing = "cross nodes" in text or "inter-node" in text
    return f"{text}, as {kind}" if crossing and kind != REAL else text


def _why(line: Line, rows: Rows) -> str:
    if line.part and _looked(rows, line.part, **line.where):
        return "a check failed"
    return line.instead if isinstance(line.instead, str) else line.instead(rows)
