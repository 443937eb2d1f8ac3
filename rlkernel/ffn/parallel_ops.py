"""The GEMMs of a tensor- and context-parallel FFN with their reductions, one operator a boundary.

    row_parallel_forward    y  = sum over TP   hidden_i[M, I/P] @ W_i[I/P, H]
    column_parallel_dx      dx = sum over TP   dy_i[M, I/P] @ W_i[H, I/P].T
    replicated_weight_dw    dW = sum over CP   x_c[M/C, K].T @ dy_c[M/C, N]

Each computes its local partial with the deterministic GEMM of ops.py, rounded as the contract's
joints are, and sums it synchronously and in place over the group that it is given. The group is
explicit; that it is the right one follows from `grid`, and is checked: a sum over ranks that own
other coordinates would have the right shape. No operator makes groups or knows another one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel.collectives.backend_sum import all_reduce_in_place
from rlkernel.collectives.comm import Comm, Observer
from rlkernel.collectives.groups import comm_over
from rlkernel.contract import ReductionTree
from rlkernel.grid import Grid
from rlkernel.kernels import select

BF16 = torch.bfloat16
VERSION_1 = "tree2.bf16"  # BF16 local partial, one BF16 addition
REDUCTIONS = ("backend", "tree")
SM90 = (9, 0)


class Reduced(NamedTuple):
    """Both sides of a reduction; pre_reduce is a copy, in the dtype of the wire."""

    output: Tensor
    pre_reduce: Tensor


def row_parallel_forward(
    hidden_local: Tensor,
    weight_local: Tensor,
    tp_group: dist.ProcessGroup,
    *,
    grid: Grid,
    contract: ReductionTree | str = VERSION_1,
    reduction: str = "backend",
    capture: bool = False,
    site: str = "down.forward",
    observers: Sequence[Observer] = (),
    timeout_s: float = 25.0,
) -> Tensor | Reduced:
    """hidden_local [M, I/P] @ weight_local [I/P, H], summed over TP -> [M, H] BF16 on every rank.

    BF16 in, any strides. contract: its joints round the partial, the wire and the sum. reduction:
    `backend` is the backend's own all-reduce, for two ranks; `tree` adds any number in the
    contract's order. capture: -> Reduced. Raises ValueError and TypeError before anything is
    launched, Disagreement and PeerLost from the reduction.
    """
    job = _Job(site, "tp", tp_group, grid, contract, reduction, observers, timeout_s)
    _check_operands(site, hidden_local, weight_local, "hidden_local [M, K]", "weight_local [K, N]",
                    hidden_local.ndim == weight_local.ndim == 2
                    and hidden_local.shape[1] == weight_local.shape[0])  # fmt: skip
    return job.run(hidden_local, weight_local, "weight", capture)


def column_parallel_dx(
    d_output_local: Tensor,
    weight_local: Tensor,
    tp_group: dist.ProcessGroup,
    *,
    grid: Grid,
    contract: ReductionTree | str = VERSION_1,
    reduction: str = "backend",
    capture: bool = False,
    site: str = "gate.dx",
    observers: Sequence[Observer] = (),
    timeout_s: float = 25.0,
) -> Tensor | Reduced:
    """d_output_local [M, N/P] @ weight_local [K, N/P].T, summed over TP -> [M, K] BF16.

    The gradient of a column-parallel projection's input. Gate and up packed side by side are one
    such product: [dgate_i | dup_i] and [Wgate_i | Wup_i]. Options as of row_parallel_forward.
    """
    job = _Job(site, "tp", tp_group, grid, contract, reduction, observers, timeout_s)
    _check_operands(site, d_output_local, weight_local, "d_output_local [M, N]",
                    "weight_local [K, N]", d_output_local.ndim == weight_local.ndim == 2
                    and d_output_local.shape[1] == weight_local.shape[1])  # fmt: skip
    return job.run(d_output_local, weight_local.t(), "weight", capture)


def replicated_weight_dw(
    input_local: Tensor,
    d_output_local: Tensor,
    grad_group: dist.ProcessGroup,
    *,
    grid: Grid,
    contract: ReductionTree | str = VERSION_1,
    reduction: str = "backend",
    capture: bool = False,
    site: str = "gate.dw",
    observers: Sequence[Observer] = (),
    timeout_s: float = 25.0,
) -> Tensor | Reduced:
    """input_local [M_local, K].T @ d_output_local [M_local, N], summed over the replicas of the
    weight shard -> [K, N] BF16: over CP, and over DP x CP where the grid has data parallelism.

    All ranks hold the same number of tokens. Options as of row_parallel_forward.
    """
    axis = "grad" if grid.dp > 1 else "cp"
    job = _Job(site, axis, grad_group, grid, contract, reduction, observers, timeout_s)
    _check_operands(site, input_local, d_output_local, "input_local [M, K]",
                    "d_output_local [M, N]", input_local.ndim == d_output_local.ndim == 2
                    and input_local.shape[0] == d_output_local.shape[0])  # fmt: skip
    return job.run(input_local.t(), d_output_local, "token", capture)


class _Job(NamedTuple):
    """What the three operators share: who adds, under which contract, by which way."""

    site: str
    axis: str
    group: dist.ProcessGroup
    grid: Grid
    contract: ReductionTree | str
    reduction: str
    observers: Sequence[Observer]
    timeout_s: float

    def run(self, a: Tensor, b: Tensor, kind: str, capture: bool) -> Tensor | Reduced:
        """a[M, k] @ b[k, N], one of the group's shards of the contraction, and the sum."""
        if self.reduction not in REDUCTIONS:
            raise ValueError(
                f"{self.site}: reduction={self.reduction!r} is not possible: "
                f"expected one of {', '.join(REDUCTIONS)}"
            )
        comm, tree = self._seam(), _tree(self.contract)
        parts, length = comm.links[self.axis].size, a.shape[1]
        tree.check_axis("K" if kind == "weight" else "M", parts * length, parts, kind=kind)
        require_backend(a.device)
        comm._check_site(a, self.site, self.axis)
        comm = comm.using(contract=tree, observers=self.observers)
        # Equal shards are exact subtrees; the shape of a partial does not show their length.
        comm.agree(f"contracts {length} {kind}s", f"{self.site}.shard", self.axis)
        partial = torch.empty(a.shape[0], b.shape[1], dtype=tree.dtype, device=a.device)
        select.gemm(a, b, partial, tree.subtree(parts))
        before = partial.clone() if capture else None
        if self.reduction == "backend":
            all_reduce_in_place(comm, partial, self.site, self.axis)
        else:
            comm.all_reduce(partial, self.site, self.axis, out=partial)
        output = partial.to(BF16)
        return Reduced(output, before) if capture else output

    def _seam(self) -> Comm:
        """The Comm over this group, made once: a peer's word is compared at first use only."""
        check_group(self.site, self.group, self.axis, self.grid)
        key = (self.group.group_name, self.axis, self.grid, self.timeout_s)
        known, seam = _seams.get(key, (None, None))
        if known is not self.group:
            seam = comm_over(
                self.grid,
                {self.axis: self.group},
                store=dist.distributed_c10d._get_default_store(),
                contract=_tree(self.contract),
                timeout_s=self.timeout_s,
            )
            _seams[key] = self.group, seam
        return seam


_seams: dict[tuple, tuple[dist.ProcessGroup, Comm]] = {}


def paths() -> dict[str, str]:
    """Which way the bytes of each operator's site went last in this process, for the record."""
    found: dict[str, str] = {}
    for _, seam in _seams.values():
        found |= seam.paths()
    return dict(sorted(found.items()))


def check_group(site: str, group: object, axis: str, grid: Grid) -> None:
    """Raise ValueError, naming what is wrong, unless `group` is this rank's group of `axis`."""
    if not dist.is_initialized():
        raise ValueError(f"{site}: torch.distributed is not initialised: "
                         "call init_process_group and make the groups first")  # fmt: skip
    if dist.get_world_size() != grid.size:
        raise ValueError(
            f"{site}: grid {grid} has {grid.size} rank(s), the world has {dist.get_world_size()}"
        )
    rank = dist.get_rank()
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(
            f"{site}: {group!r} is not a process group that rank {rank} belongs to: "
            f"expected the {axis} group {list(grid.group_of(rank, axis))}"
        )
    check_owners(site, dist.get_process_group_ranks(group), axis, rank, grid)


def check_owners(site: str, ranks: Sequence[int], axis: str, rank: int, grid: Grid) -> None:
    """Raise ValueError unless `ranks`, in that order, may be summed over `axis`; says why not."""
    try:
        grid.check_group(ranks, axis, rank)
    except ValueError as error:
        why = _why_not(ranks, axis, rank, grid)
        raise ValueError(f"{site}: {error}{f'; {why}' if why else ''}") from None


def _why_not(ranks: Sequence[int], axis: str, rank: int, grid: Grid) -> str:
    expected = grid.group_of(rank, axis)
    if sorted(ranks) == sorted(expected):
        return "the same ranks in another order: the sum runs in rank order"
    if not all(0 <= r < grid.size for r in ranks):
        return f"the grid has {grid.size} ranks"
    found = {r: grid.coords(r) for r in ranks}
    if axis != "tp" and len({at.tp for at in found.values()}) > 1:
        told = ", ".join(f"rank {r} holds tp {at.tp}" for r, at in found.items())
        return f"the members own different weight shards ({told})"
    if axis == "tp" and len({(at.dp, at.cp) for at in found.values()}) > 1:
        told = ", ".join(f"rank {r} holds dp {at.dp} cp {at.cp}" for r, at in found.items())
        return f"the members own different tokens ({told})"
    return ""


def require_backend(device: torch.device) -> str:
    """Which deterministic GEMM computes on this device: `cuda_sm90`, or the CPU's `twin`.

    Raises ValueError where there is none that has been proven: nothing else may stand in for it.
    """
    if device.type == "cpu":
        return "interpreter" if select.bf16.INTERPRETED else "twin"
    if device.type == "cuda" and torch.version.hip is None:
        found = torch.cuda.get_device_capability(device)
        if found == SM90:
            return "cuda_sm90"
        have = f"compute capability {found[0]}.{found[1]}"
    else:
        have = "ROCm" if device.type == "cuda" else f"device type {device.type}"
    raise ValueError(
        f"no deterministic GEMM is proven on {device} ({have}): "
        "expected an SM90 GPU (compute capability 9.0), or the CPU"
    )


def _tree(contract: ReductionTree | str) -> ReductionTree:
    return ReductionTree.parse(contract) if isinstance(contract, str) else contract


def _check_operands(
    site: str, first: Tensor, second: Tensor, one: str, other: str, fits: bool
) -> None:
    for name, x in ((one, first), (other, second)):
        if x.dtype != BF16:
            raise TypeError(f"{site}: {name} is {x.dtype}: expected torch.bfloat16; cast it first")
    if first.device != second.device:
        raise ValueError(f"{site}: {one} is on {first.device}, {other} on {second.device}")
    if not fits:
        raise ValueError(
            f"{site}: expected {one} and {other}, the shared letter equal: "
            f"got {list(first.shape)} and {list(second.shape)}"
        )
