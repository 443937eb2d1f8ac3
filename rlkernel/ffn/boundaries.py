"""Every boundary of the FFN's GEMMs, held before and behind its sum against what must be there.

Each rank runs the operators on its shards and compares, element by element,

    pre_reduce     with its own partial of shards.py, computed in plain torch
    post_reduce    with the fixed-order sum of its group's partials: the distributed reference,
                   and with the GEMM of one rank that holds the whole summed axis, the same tree
    both           with an FP32 product of the library, within the contract's tolerance

then repeats the call and looks at every bit again. Zeros, a missing and a doubled partial must each
fall out of the tolerance, or it would accept anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel import compare
from rlkernel.collectives.comm import Comm
from rlkernel.contract import ReductionTree
from rlkernel.ffn import deployment, parallel_ops, shards
from rlkernel.ffn.shards import BF16, Boundary, Owned
from rlkernel.kernels import compiled, select

TOLERANCE = {"forward": (5e-2, 2e-2), "gradient": (1e-1, 2e-2)}  # atol, rtol
RMS = (0.5, 2.0)  # of every product: a tolerance means nothing where values are small
SWAPPED = (0, 1)  # the ranks that hold each other's shard of down under swap-shards


@dataclass
class Scene:
    """One rank's view of a case."""

    comm: Comm
    tensors: Mapping[str, Tensor]
    own: Owned
    m: int  # tokens of all ranks
    tree: ReductionTree
    reduction: str
    repeats: int
    fault: str
    gather: bool  # put unsummed shards together: moves bytes that only a test wants

    def held(self, boundary: Boundary) -> tuple[Tensor, Tensor]:
        """This rank's operands in memory of their own, as the fault leaves them."""
        first, second = shards.operands(boundary, self.tensors, self.own)
        if self.fault == "swap-shards" and self.own.rank in SWAPPED:
            names = (boundary.first[0], boundary.second[0])
            other = shards.owned(self.comm.grid, self.own.rank ^ 1, self.m, self.intermediate)
            wrong = shards.operands(boundary, self.tensors, other)
            first, second = (
                theirs if name == "w_down" else ours
                for name, ours, theirs in zip(names, (first, second), wrong)
            )
        return first.contiguous(), second.contiguous()

    @property
    def intermediate(self) -> int:
        return self.tensors["w_down"].shape[0]


class Side(NamedTuple):
    """What stands on one side of a reduction, what must, and the FP32 product of the same part."""

    value: Tensor
    reference: Tensor
    oracle: Tensor


def scene(case, comm: Comm) -> Scene:
    at, grid = case.parameters, comm.grid
    m = at["m"] * grid.axis_size(shards.token_axis(grid))
    tensors = shards.fixtures(m, at["hidden"], at["intermediate"], case.seed, comm.device)
    return Scene(
        comm=comm,
        tensors=shards.packed(tensors, grid.tp) if at["part"] == "packed" else tensors,
        own=shards.owned(grid, comm.rank, m, at["intermediate"]),
        m=m,
        tree=ReductionTree.parse(at["contract"]),
        reduction=at["reduction"],
        repeats=at["repeats"],
        fault=case.fault,
        gather=at.get("nccl", "default") == "default",
    )


def of_part(part: str, comm: Comm, tree: ReductionTree) -> list[Boundary]:
    """The boundaries that a case looks at; on a line of ranks those whose sum it splits. What no
    rank splits is a chain under any contract, and looked at once."""
    if part == "packed":
        return [shards.PACKED]
    if part in shards.TRACKS:
        mine = [b for b in shards.BOUNDARIES if b.track == part]
        return [b for b in mine if b.over or tree.name == parallel_ops.VERSION_1]
    axis = "tp" if comm.grid.tp > 1 and part == "tp4" else "cp"
    return [b for b in shards.BOUNDARIES if b.over == axis]


def track_row(case, comm: Comm) -> dict:
    """All boundaries of one case. The same on every rank."""
    here = scene(case, comm)
    found = []
    for boundary in of_part(case.parameters["part"], comm, here.tree):
        ranks = comm.collect(_look(boundary, here))
        found.append(_merged(boundary, here, ranks))
    checks = [check for line in found for check in _checks(line)]
    wrong = [name for name, held, _, _ in checks if not held]
    return {
        "passed": not wrong,
        "checks": checks,
        "lines": found,
        "first_wrong": wrong[0] if wrong else None,
        "layout": [own.to_dict() for own in shards.layout(comm.grid, here.m, here.intermediate)],
        "backend": parallel_ops.require_backend(comm.device),
        "operator_paths": parallel_ops.paths(),
        # Both of all that this process has done so far, this case's groups and kernels included.
        "nccl": deployment.told_by_nccl(comm),
        "compiled": comm.collect(compiled.resources())[0],
        "ranks": comm.grid.size,
    }


# -- one rank --------------------------------------------------------------------------------------


def operator(boundary: Boundary, here: Scene) -> Callable[[], parallel_ops.Reduced]:
    """The call that this rank makes: the operator with its group, or the GEMM where none is."""
    first, second = here.held(boundary)
    if boundary.over is None:
        return lambda: parallel_ops.Reduced(_local(boundary, first, second), None)
    axis = shards.token_axis(here.comm.grid) if boundary.over == "cp" else "tp"
    call = {
        "forward": parallel_ops.row_parallel_forward,
        "da": parallel_ops.column_parallel_dx,
        "db": parallel_ops.replicated_weight_dw,
    }[boundary.kind]
    group = here.comm.links[axis].transport.group
    return lambda: call(
        first, second, group, grid=here.comm.grid, contract=here.tree, reduction=here.reduction,
        capture=True, site=boundary.name, observers=here.comm.observers,
        timeout_s=here.comm.roll_call.timeout_s,
    )  # fmt: skip


def _local(boundary: Boundary, first: Tensor, second: Tensor) -> Tensor:
    a, b = shards.oriented(boundary, first, second)
    out = torch.empty(a.shape[0], b.shape[1], dtype=BF16, device=a.device)
    select.gemm(a, b, out, select.CHAIN)
    return out


def _look(boundary: Boundary, here: Scene) -> dict:
    """What this rank finds at a boundary."""
    call = operator(boundary, here)
    result = call()
    post = result.output.clone()
    whole = shards.oracle(boundary, here.tensors, here.own)
    sides = {}
    if boundary.over:
        parts = len(shards.group(boundary, here.comm.grid, here.own.rank))
        partial = shards.partial(boundary, here.tensors, here.own, here.tree, parts)
        part = shards.oracle(boundary, here.tensors, here.own, whole=False)
        sides["pre_reduce"] = _side(boundary, Side(result.pre_reduce, partial, part))
        right = shards.reduced(
            boundary, here.tensors, here.comm.grid, here.own.rank, here.m, here.tree
        )
        sides["post_reduce"] = _side(boundary, Side(post, right, whole))
    else:
        right = shards.undivided(boundary, here.tensors, here.own, here.tree)
        sides["local"] = _side(boundary, Side(post, right, whole))
    differ = sum(not compare.bit_report(call().output, post) for _ in range(here.repeats - 1))
    one = compare.bit_report(post, _one_rank(boundary, here))
    return {
        "sides": sides,
        "one_rank": [one.mismatches, one.elements],
        "concatenated": _concatenated(boundary, here, post),
        "repeats_that_differ": differ,
        "rms": post.float().square().mean().sqrt().item(),
        "controls": _controls(boundary, post, result.pre_reduce, whole),
        "digest": compare.digest(post)[:16],
        "schedule": _schedule(boundary, here),
        "operands": str(here.held(boundary)[0].dtype).removeprefix("torch."),
        "bytes": 0 if result.pre_reduce is None else result.pre_reduce.nbytes,
    }


def _one_rank(boundary: Boundary, here: Scene) -> Tensor:
    """TP=1, CP=1: one GEMM over the whole summed axis under the same tree, of this rank's part."""
    whole = shards.operands(boundary, here.tensors, here.own, whole=True)
    a, b = shards.oriented(boundary, *whole)
    out = torch.empty(a.shape[0], b.shape[1], dtype=BF16, device=a.device)
    select.gemm(a, b, out, here.tree if boundary.over else select.CHAIN)
    return out


def _side(boundary: Boundary, side: Side) -> dict:
    report = compare.bit_report(side.value, side.reference)
    return {
        "mismatches": report.mismatches,
        "elements": report.elements,
        "first": str(report) if report.mismatches else "",
        "outside": outside(boundary, side.value, side.oracle),
        "drift": drift(side.value, side.oracle),
    }


def outside(boundary: Boundary, value: Tensor, oracle: Tensor) -> int:
    """Elements outside of the contract's tolerance around the FP32 product."""
    atol, rtol = TOLERANCE["forward" if boundary.track == "forward" else "gradient"]
    within = (value.float() - oracle).abs() <= atol + rtol * oracle.abs()
    return int((~within).sum())


def _controls(boundary: Boundary, post: Tensor, pre: Tensor | None, oracle: Tensor) -> dict:
    """How many elements of a wrong result the tolerance refuses; each must be more than none."""
    wrong = {"zeros": torch.zeros_like(post)}
    if pre is not None:
        wrong |= {"one partial missing": post.float() - pre.float(),
                  "one partial doubled": post.float() + pre.float()}  # fmt: skip
    return {name: outside(boundary, value, oracle) for name, value in wrong.items()}


def _concatenated(boundary: Boundary, here: Scene, post: Tensor) -> list[int] | None:
    """[mismatches, elements] of all feature shards side by side against one rank's product."""
    if boundary.over or not here.gather:
        return None
    gathered = here.comm.all_gather(post, f"{boundary.name}.gather", dim=1)
    everything = here.own._replace(features=slice(None))
    right = shards.undivided(boundary, here.tensors, everything, here.tree)
    report = compare.bit_report(gathered, right)
    return [report.mismatches, report.elements]


def _schedule(boundary: Boundary, here: Scene) -> str:
    """Which kernel computes this rank's product."""
    a, b = shards.oriented(boundary, *here.held(boundary))
    tree, dtype = select.CHAIN, BF16
    if boundary.over:
        parts = len(shards.group(boundary, here.comm.grid, here.own.rank))
        tree, dtype = here.tree.subtree(parts), here.tree.dtype
    out = torch.empty(a.shape[0], b.shape[1], dtype=dtype, device=a.device)
    return select.choose(a, b, out, tree).schedule


def drift(value: Tensor, oracle: Tensor) -> dict:
    """`compare.drift`, ranked where the tensors are: a weight's gradient has 25 M elements."""
    if value.is_cuda:
        return sorted_drift(value, oracle)
    return compare.drift(value, oracle).to_dict()


def sorted_drift(value: Tensor, oracle: Tensor) -> dict:
    """The same statistics by one sort in FP64 on the tensors' device."""
    gap = (value.double() - oracle.double()).abs().flatten()
    ranked, n = gap.sort().values, gap.numel()
    steps = [i / (compare.ECDF_POINTS - 1) for i in range(compare.ECDF_POINTS)]
    at = [max(0, math.ceil(q * n) - 1) for q in (0.95, 0.99, *steps)]
    p95, p99, *ecdf = ranked[torch.tensor(at, device=ranked.device)].tolist()
    norm = oracle.double().norm().clamp_min(1e-30)
    return compare.Drift(
        max_abs=ecdf[-1], p95=p95, p99=p99, mean_abs=gap.mean().item(),
        rel_l2=(gap.norm() / norm).item(), ecdf=tuple(ecdf),
    ).to_dict()  # fmt: skip


# -- all ranks -------------------------------------------------------------------------------------


def _merged(boundary: Boundary, here: Scene, ranks: Sequence[Mapping]) -> dict:
    """One line a boundary: counts of all ranks, the drift of the worst one, who is wrong."""
    grid = here.comm.grid
    groups = list(dict.fromkeys(shards.group(boundary, grid, r) for r in range(grid.size)))
    sides = {
        name: {
            "mismatches": sum(rank["sides"][name]["mismatches"] for rank in ranks),
            "elements": sum(rank["sides"][name]["elements"] for rank in ranks),
            "outside": sum(rank["sides"][name]["outside"] for rank in ranks),
            "wrong_ranks": [n for n, r in enumerate(ranks) if r["sides"][name]["mismatches"]],
            "first": next((r["sides"][name]["first"] for r in ranks
                           if r["sides"][name]["first"]), ""),
            "drift": max((rank["sides"][name]["drift"] for rank in ranks),
                         key=lambda found: found["max_abs"]),
        }
        for name in ranks[0]["sides"]
    }  # fmt: skip
    both = lambda name: [sum(rank[name][i] for rank in ranks) for i in (0, 1)]  # noqa: E731
    return {
        "boundary": boundary.name,
        "track": boundary.track,
        "over": boundary.over,
        "groups": [list(members) for members in groups] if boundary.over else [],
        "contract": here.tree.name if boundary.over else "chain",
        "wire": here.tree.round_to if boundary.over else None,
        "reduction": here.reduction if boundary.over else None,
        "bytes": ranks[0]["bytes"],
        "schedule": "+".join(dict.fromkeys(rank["schedule"] for rank in ranks)),
        "operands": "+".join(dict.fromkeys(rank["operands"] for rank in ranks)),
        "sides": sides,
        "one_rank": both("one_rank"),
        "concatenated": both("concatenated") if ranks[0]["concatenated"] else None,
        "repeats": here.repeats,
        "repeats_that_differ": sum(rank["repeats_that_differ"] for rank in ranks),
        "rms": [min(rank["rms"] for rank in ranks), max(rank["rms"] for rank in ranks)],
        "controls": {
            name: min(rank["controls"][name] for rank in ranks) for name in ranks[0]["controls"]
        },
        "members_that_differ": sum(
            len({ranks[r]["digest"] for r in members}) > 1 for members in groups
        ),
        "digests": [rank["digest"] for rank in ranks],
    }


def _checks(line: Mapping) -> list[list]:
    """[name, held, value, limit], the order in which a failure should be told."""
    name, found = line["boundary"], []
    for side, at in line["sides"].items():
        wrong = f", on ranks {at['wrong_ranks']}" if at["wrong_ranks"] else ""
        told = f"{at['mismatches']} / {at['elements']} elements differ{wrong}"
        found.append([f"{name} {side}: the reference's bits", not at["mismatches"], told, "0"])
        told = f"{at['outside']} outside, max {at['drift']['max_abs']:.3g}"
        found.append([f"{name} {side}: FP32 within tolerance", not at["outside"], told, "0"])
    whole = [("one rank's bits under the same tree", line["one_rank"])]
    if line["concatenated"]:
        whole.append(("side by side, one rank's bits", line["concatenated"]))
    for what, (wrong, elements) in whole:
        found.append([f"{name}: {what}", not wrong, f"{wrong} / {elements} elements differ", "0"])
    if line["over"]:
        count = line["members_that_differ"]
        found.append([f"{name}: the same on all members", not count, f"{count} groups differ", "0"])
    hashes = 1 + line["repeats_that_differ"]
    found.append([f"{name}: repeats have one hash", hashes == 1,
                  f"{hashes} in {line['repeats']}", "1"])  # fmt: skip
    low, high = line["rms"]
    fits = RMS[0] <= low and high <= RMS[1]
    told = f"{low:.2f} to {high:.2f}"
    found.append([f"{name}: scaled", fits, told, f"RMS {RMS[0]} to {RMS[1]}"])
    weak = [control for control, count in line["controls"].items() if not count]
    told = ", ".join(f"{control}: {count}" for control, count in line["controls"].items())
    found.append([f"{name}: wrong results are refused", not weak, told, "each more than 0"])
    return found
