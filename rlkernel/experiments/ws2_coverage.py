"""What a record of ws2 may be quoted for: each line is decided by its rows, never by what was
meant. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rlkernel.grid import Grid

Rows = Sequence[Mapping]
VERSION_1 = "tree2.bf16"  # BF16 partials and wire: what all sums of the deployment must hold under
REAL, EMULATED = "real nodes", "emulated nodes"  # as topology.described has them


class Line(NamedTuple):
    """One statement; held decides it from the rows, otherwise `instead` says why not."""

    text: str
    held: Callable[[Rows], bool]
    instead: str
    part: str = ""  # of `what`: asked for means it must be covered


def lines(rows: Rows) -> Iterator[tuple[Mapping, Mapping]]:
    """(row, line) of every boundary that was looked at."""
    for row in rows:
        if row["case"]["parameters"]["part"] == "layer":
            continue
        for line in row["result"].get("lines", ()):
            if "boundary" in line:
                yield row, line


def _of(rows: Rows, part: str, **wanted) -> list[Mapping]:
    """Rows of a part whose parameters are these and whose checks hold."""
    return [
        row for row in rows
        if row["case"]["parameters"]["part"] == part and row["passed"]
        and wanted.items() <= row["case"]["parameters"].items()
    ]  # fmt: skip


def _part(part: str, **wanted) -> Callable[[Rows], bool]:
    return lambda rows: bool(_of(rows, part, **wanted))


def _topology(rows: Rows) -> Mapping:
    found = _of(rows, "start")
    return found[0]["result"]["topology"] if found else {"kind": "", "groups": [], "ranks": []}


def _sums(rows: Rows, axis: str, parts: Sequence[str], crosses: bool) -> bool:
    """Every group of the axis lies as said, and its sums hold, in all these parts."""
    groups = [g for g in _topology(rows)["groups"] if g["axis"] == axis]
    placed = len(groups) == 2 and all(g["crosses_nodes"] is crosses for g in groups)
    return placed and all(_of(rows, part, contract=VERSION_1) for part in parts)


def _real(rows: Rows) -> bool:
    at = _topology(rows)
    return at["kind"] == REAL and at["hosts"] == 2 and at["gpus"] == 4


def _choices(rows: Rows) -> set[str]:
    """ALGORITHM/PROTOCOL of all all-reduces that the log of NCCL tells of, in sound rows."""
    told = [group for row in _of(rows, "start") for group in row["result"].get("nccl") or ()]
    return {c.rpartition(" ")[2] for g in told for c in g["choices"] if c.startswith("ALLREDUCE")}


def _settings(rows: Rows) -> bool:
    held = {row["case"]["parameters"]["nccl"] for row in _of(rows, "backward")}
    return len(held) > 1 and len(_choices(rows)) > 1


def _crossing_tp(rows: Rows) -> bool:
    nodes = {rank["node"] for rank in _topology(rows)["ranks"]}
    return len(nodes) > 1 and bool(_of(rows, "tp4"))  # its one TP group is all four ranks


def _exact_shapes(rows: Rows) -> bool:
    rows = [*_of(rows, "forward"), *_of(rows, "backward")]
    at = [row["case"]["parameters"] for row in rows]
    shapes = {(a["hidden"], a["intermediate"] // 2) for a in at}
    return shapes == {(4096, 6144)} and {r["result"]["backend"] for r in rows} == {"cuda_sm90"}


def _kernels(rows: Rows) -> bool:
    """Both tracks were computed by Triton kernels, compiled or in the interpreter."""
    ours = {"cuda_sm90", "interpreter"}
    return all(
        ours & {row["result"]["backend"] for row in _of(rows, part)}
        for part in ("forward", "backward")
    )


def _layer(split: bool) -> Callable[[Rows], bool]:
    return _part("layer", sequence_parallel=split)


def _eight(rows: Rows) -> bool:
    return any(Grid(**row["case"]["grid"]).size == 8 for row in _of(rows, "dp"))


def _never(rows: Rows) -> bool:
    return False


TOPOLOGY = (
    Line("2 real nodes x 2 GPUs each, 4 ranks", _real, "needs two machines with two GPUs each"),
    Line("TP=2, CP=2, DP=1, even shards: forward and backward track",
         lambda rows: bool(_of(rows, "forward") and _of(rows, "backward")), "not asked for",
         "backward"),
    Line("exact Qwen3-8B shards (4096, 6144) and (6144, 4096) on SM90", _exact_shapes,
         "needs device=cuda and size=qwen3 on an SM90 GPU"),
    Line("the deterministic Triton kernels compute every product", _kernels,
         "needs device=cuda, or device=cpu and what=interpreted"),
    Line("two intra-node TP all-reduce groups [0,1] [2,3]",
         lambda rows: _sums(rows, "tp", ("forward", "backward"), False), "not asked for",
         "backward"),
    Line("two inter-node CP weight-gradient all-reduce groups [0,2] [1,3]",
         lambda rows: _sums(rows, "cp", ("backward",), True), "not asked for", "backward"),
    Line("only same-coordinate shards are added; dH needs no sum", _part("proofs"),
         "not asked for", "proofs"),
    Line("wrong groups, shapes, types and devices are refused by name", _part("refusals"),
         "not asked for", "refusals"),
    Line("FP32 partials and FP32 on the wire (tree2.fp32)",
         _part("backward", contract="tree2.fp32"), "not asked for"),
    Line("gate and up packed: combined dX, one TP reduction", _part("packed"), "not asked for",
         "packed"),
    Line("complete MLP, forward and backward, through the layer and autograd", _layer(False),
         "not asked for", "layer"),
    Line("reduce-scatter ownership (sequence parallel)", _layer(True), "not asked for", "layer"),
    Line("TP groups that cross nodes", _crossing_tp, "not asked for", "tp4"),
    Line("TP=4", _part("tp4"), "not asked for", "tp4"),
    Line("CP=4", _part("cp4"), "not asked for", "cp4"),
    Line("DP=2 x CP=2 gradient groups of four ranks (tree4, tree8)", _part("dp"),
         "not asked for", "dp"),
    Line("DP=2 x CP=2 x TP=2 on eight ranks (tree8)", _eight, "run with device=cpu"),
    Line("other NCCL algorithms and protocols: the same bits", _settings,
         "needs device=cuda and nccl=default,Ring/LL,..."),
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
    covered = [line.text for line in TOPOLOGY if line.held(rows)]
    missing = [f"{line.text}: {_why(line, rows)}" for line in TOPOLOGY if line.text not in covered]
    qualified = [_qualified(text, kind) for text in covered]
    return ground + qualified, missing + [f"{text}: {why}" for text, why in NEVER]


def complete(params, rows: Rows) -> dict:
    """A check: everything that was asked for is COVERED."""
    without = () if VERSION_1 in params.contract else ("forward", "backward")
    asked = set(params.what) - set(without)
    wanted = [line for line in TOPOLOGY if line.part in asked]
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
    asked = any(row["case"]["parameters"]["part"] == line.part for row in rows)
    return "a check failed" if line.part and asked else line.instead
