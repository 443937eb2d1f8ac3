"""Why each product of the FFN is summed over the ranks that it is summed over, shown from data.

A tag is the global number of a row or of a column, carried through the very reduction that a result
takes. A sum over n owners of one coordinate returns n times the tag; a sum over ranks that own
different coordinates does not. The same tags over the other axis must therefore come back wrong.

And who is turned away: the operators called with groups, shapes and types that must be refused.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel import compare
from rlkernel.collectives.comm import Comm
from rlkernel.contract import ReductionTree
from rlkernel.ffn import boundaries, parallel_ops, shards
from rlkernel.ffn.boundaries import Scene
from rlkernel.ffn.shards import BOUNDARIES, Boundary
from rlkernel.grid import Grid


def proofs_row(case, comm: Comm) -> dict:
    """All proofs, over all ranks. The same on every rank."""
    here = boundaries.scene(case, comm)
    ranks = comm.collect([*_tags(here), *_dh(here), *_identity(here)])
    checks = []
    for number, (name, _, limit) in enumerate(ranks[0]):
        held = [rank[number][1] for rank in ranks]
        checks.append([name, all(held), f"{sum(held)} of {len(held)} ranks", limit])
    return {"passed": all(held for _, held, _, _ in checks), "checks": checks, "ranks": len(ranks)}


Finding = tuple[str, bool, str]  # name, whether it holds on this rank, what is expected


def coordinates(boundary: Boundary, here: Scene) -> tuple[Tensor, Tensor]:
    """Global row and column numbers of this rank's output, FP32."""
    hidden, device = here.tensors["x"].shape[1], here.comm.device
    spans = {"t": here.own.tokens, "f": here.own.features, "-": slice(0, hidden)}
    (a, b), (c, d) = boundary.first[1], boundary.second[1]
    rows, columns = {"forward": (a, d), "da": (a, c), "db": (b, d)}[boundary.kind]
    return tuple(
        torch.arange(spans[axis].start, spans[axis].stop, dtype=torch.float32, device=device)
        for axis in (rows, columns)
    )


def _tags(here: Scene) -> list[Finding]:
    """Every sum adds same-coordinate shards only; over the other axis it would not."""
    found = []
    for boundary in (b for b in BOUNDARIES if b.over):
        right = boundary.over
        wrong = "tp" if right == "cp" else "cp"
        name = f"{boundary.name}: only owners of the same coordinates are added"
        found.append((name, _returns(boundary, here, right), f"over {right}: n times the tag"))
        name = f"{boundary.name}: over {wrong} other coordinates would be added"
        found.append((name, not _returns(boundary, here, wrong), "the tag must come back wrong"))
    return found


def _returns(boundary: Boundary, here: Scene, axis: str) -> bool:
    """Whether both tags, summed over `axis`, are this rank's own times the group's size."""
    size = here.comm.grid.axis_size(axis)
    comm = here.comm.using(contract=ReductionTree(size, "fp32"))
    sums = [
        (comm.all_reduce(tag, f"{boundary.name}.{side}.{axis}", axis), tag)
        for side, tag in zip(("rows", "columns"), coordinates(boundary, here))
    ]
    return all(torch.equal(total, size * tag) for total, tag in sums)


def _dh(here: Scene) -> list[Finding]:
    """Down's dH is complete without a sum: its shards side by side are one rank's dH."""
    dh = next(b for b in BOUNDARIES if b.name == "down.dh")
    local = boundaries.operator(dh, here)().output
    features = coordinates(dh, here)[1]
    gathered = here.comm.all_gather(features, "down.dh.features")
    every = torch.arange(here.intermediate, dtype=torch.float32, device=features.device)
    whole = here.comm.all_gather(local, "down.dh.shards", dim=1)
    everything = here.own._replace(features=slice(None))
    right = shards.undivided(dh, here.tensors, everything, here.tree)
    summed = here.comm.using(contract=ReductionTree(here.comm.grid.tp, "fp32")).all_reduce(
        local.float(), "down.dh.sum"
    )
    oracle = shards.oracle(dh, here.tensors, here.own)
    return [
        ("down.dh: every feature has one owner", torch.equal(gathered, every), "0 to I-1, once"),
        ("down.dh: side by side it is one rank's dH", bool(compare.bit_report(whole, right)),
         "0 elements differ"),
        ("down.dh: a sum over tp would be wrong", boundaries.outside(dh, summed, oracle) > 0,
         "outside of the tolerance"),
    ]  # fmt: skip


def _identity(here: Scene) -> list[Finding]:
    """Weight shards are replicas over CP and differ over TP; tokens the other way round."""
    found = []
    for name, axes in (("w_gate", "-f"), ("w_up", "-f"), ("w_down", "f-"), ("x", "t-")):
        spans = {"t": here.own.tokens, "f": here.own.features, "-": slice(None)}
        mine = here.tensors[name][tuple(spans[axis] for axis in axes)]
        said = here.comm.collect(compare.digest(mine))
        grid, rank = here.comm.grid, here.own.rank
        alike = {axis: {said[r] for r in grid.group_of(rank, axis)} for axis in ("tp", "cp")}
        same, other = ("tp", "cp") if name == "x" else ("cp", "tp")
        held = len(alike[same]) == 1 and len(alike[other]) == grid.axis_size(other)
        found.append((f"{name}: replicated over {same}, split over {other}", held, "by digest"))
    return found


def replicas_row(case, comm: Comm) -> dict:
    """Gradient groups over DP x CP, and that a tree of two leaves is no contract for four ranks."""
    row, here = boundaries.track_row(case, comm), boundaries.scene(case, comm)
    here.tree = ReductionTree(2, here.tree.round_to)
    boundary = next(b for b in BOUNDARIES if b.name == "gate.dw")
    said = comm.collect(_said(ValueError, boundaries.operator(boundary, here)))
    held = all(f"subtrees of {here.tree.name}" in one for one in said)
    check = [f"refused: {here.tree.name} over {len(here.comm.links['grad'].ranks)} replicas", held,
             said[0], "named"]  # fmt: skip
    return row | {"passed": row["passed"] and held, "checks": [*row["checks"], check]}


# -- refusals --------------------------------------------------------------------------------------


def refusals_row(case, comm: Comm) -> dict:
    """Each wrong call on every rank: refused by name, before anything is launched."""
    here = boundaries.scene(case, comm)
    mine = []
    for name, error, words, call in _wrong_calls(here):
        said = _said(error, call)
        mine.append((name, all(word in said for word in words), said))
    ranks = comm.collect(mine)
    checks = [
        [f"refused: {name}", all(rank[n][1] for rank in ranks), ranks[0][n][2], "named"]
        for n, (name, _, _) in enumerate(mine)
    ]
    return {"passed": all(held for _, held, _, _ in checks), "checks": checks, "ranks": len(ranks)}


def _said(error: type[Exception], call: Callable[[], object]) -> str:
    try:
        call()
    except error as raised:
        return str(raised)
    return "it was not refused"


Call = Callable[[], object]


def _wrong_calls(here: Scene) -> list[tuple[str, type[Exception], tuple[str, ...], Call]]:
    """(name, error, words that its message must hold, call) of everything to be refused."""
    grid, rank = here.comm.grid, here.comm.rank
    tp, cp = (here.comm.links[axis].transport.group for axis in ("tp", "cp"))
    crossed, members = _crossed(here.comm), grid.group_of(rank, "tp")
    by_name = {b.name: shards.operands(b, here.tensors, here.own) for b in BOUNDARIES}
    hidden, weight = by_name["down.forward"]
    meta, tall = torch.device("meta"), Grid(cp=grid.cp, tp=2 * grid.tp)
    usual = {"grid": grid, "contract": here.tree}

    def forward(a: Tensor = hidden, b: Tensor = weight, group=tp, **more) -> Call:
        return lambda: parallel_ops.row_parallel_forward(a, b, group, **usual | more)

    def dx(group) -> Call:
        return lambda: parallel_ops.column_parallel_dx(*by_name["gate.dx"], group, **usual)

    def dw(group) -> Call:
        return lambda: parallel_ops.replicated_weight_dw(*by_name["gate.dw"], group, **usual)

    def order() -> None:
        parallel_ops.check_owners("down.forward", members[::-1], "tp", rank, grid)

    value = ValueError
    return [
        ("the CP group in the TP slot", value, ("'s cp group", "tokens"), forward(group=cp)),
        ("the TP group in the gradient slot", value, ("'s tp group", "weight shards"), dw(tp)),
        ("members with different TP coordinates", value, ("different weight shards",), dw(crossed)),
        ("members with different tokens", value, ("different tokens",), dx(crossed)),
        ("the ranks in another order", value, ("another order",), order),
        ("a group that is none", value, ("is not a process group",), forward(group=None)),
        ("a grid of another world size", value, ("rank(s), the world has",), forward(grid=tall)),
        ("a contract of fewer leaves than ranks", value, ("chain",), forward(contract="chain")),
        ("operands of FP32", TypeError, ("torch.float32", "cast it"), forward(hidden.float())),
        ("shapes that do not fit", value, ("down.forward", "got ["), forward(hidden[:, 1:])),
        ("a shard that the leaves do not divide", value, ("must be a multiple of",),
         forward(hidden[:, 1:], weight[1:], contract="tree8.bf16")),
        ("a device without a proven kernel", value, ("deterministic GEMM",),
         forward(hidden.to(meta), weight.to(meta))),
        ("an unknown reduction", value, ("reduction='ring'",), forward(reduction="ring")),
    ]  # fmt: skip


def _crossed(comm: Comm) -> dist.ProcessGroup:
    """A group of the diagonal, [0, 3] or [1, 2]: the right size, and nobody's row or column."""
    last, timeout = comm.grid.size - 1, timedelta(seconds=comm.roll_call.timeout_s)
    groups = [dist.new_group([r, last - r], timeout=timeout) for r in range(comm.grid.size // 2)]
    return groups[min(comm.rank, last - comm.rank)]
