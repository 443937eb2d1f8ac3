"""Who owns which slice of the FFN's GEMMs under TP x CP, and what every rank must then hold.

               tp=0              tp=1
    cp=0   tokens [0, M/2)   tokens [0, M/2)       features [0, I/2) | [I/2, I)
    cp=1   tokens [M/2, M)   tokens [M/2, M)

Nine products, each on operands of its own (no activation function joins them): a failure has one
arithmetic and one process group to explain it. Everything here is computed from whole tensors in
plain torch, rank by rank; no process group exists.

`first` and `second` say which axes a rank owns a slice of: t tokens, f features, - all of it.

    forward  C = A[M, K] @ B[K, N]    da  dA = dC[M, N] @ B[K, N].T    db  dB = A[M, K].T @ dC[M, N]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.contract import ReductionTree
from rlkernel.grid import Grid
from rlkernel.kernels import reference

BF16 = torch.bfloat16
Tensors = Mapping[str, Tensor]


class Boundary(NamedTuple):
    """One product. over: the axis whose ranks hold partial sums of the same coordinates."""

    name: str
    track: str
    kind: str
    first: tuple[str, str]
    second: tuple[str, str]
    over: str | None


BOUNDARIES = (
    Boundary("gate.forward", "forward", "forward", ("x", "t-"), ("w_gate", "-f"), None),
    Boundary("up.forward", "forward", "forward", ("x", "t-"), ("w_up", "-f"), None),
    Boundary("down.forward", "forward", "forward", ("down_input", "tf"), ("w_down", "f-"), "tp"),
    Boundary("gate.dx", "backward", "da", ("d_gate", "tf"), ("w_gate", "-f"), "tp"),
    Boundary("up.dx", "backward", "da", ("d_up", "tf"), ("w_up", "-f"), "tp"),
    Boundary("down.dh", "backward", "da", ("d_output", "t-"), ("w_down", "f-"), None),
    Boundary("gate.dw", "backward", "db", ("x", "t-"), ("d_gate.dw", "tf"), "cp"),
    Boundary("up.dw", "backward", "db", ("x", "t-"), ("d_up.dw", "tf"), "cp"),
    Boundary("down.dw", "backward", "db", ("down_input", "tf"), ("d_output.dw", "t-"), "cp"),
)
TRACKS = ("forward", "backward")
PACKED = Boundary("gate_up.dx", "packed", "da", ("d_gate_up", "tf"), ("w_gate_up", "-f"), "tp")


class Owned(NamedTuple):
    """The global offsets of one rank. tokens of [0, M), features of [0, I)."""

    rank: int
    tp: int
    lane: int
    tokens: slice
    features: slice

    def to_dict(self) -> dict[str, object]:
        spans = {n: [s.start, s.stop] for n, s in (("tokens", self.tokens), ("features", self.features))}  # noqa: E501 # fmt: skip
        return {"rank": self.rank, "tp": self.tp, "lane": self.lane, **spans}


def token_axis(grid: Grid) -> str:
    """The axis over which tokens are split: DP and CP ranks hold replicas of a weight shard."""
    return "grad" if grid.dp > 1 else "cp"


def owned(grid: Grid, rank: int, m: int, intermediate: int) -> Owned:
    """What `rank` owns of M = `m` tokens and I features. Uneven shards raise ValueError."""
    at, axis = grid.coords(rank), token_axis(grid)
    return Owned(
        rank,
        at.tp,
        at.dp * grid.cp + at.cp,
        grid.shard(m, axis, rank, "tokens M"),
        grid.shard(intermediate, "tp", rank, "features I"),
    )


def layout(grid: Grid, m: int, intermediate: int) -> list[Owned]:
    return [owned(grid, rank, m, intermediate) for rank in range(grid.size)]


# -- fixtures --------------------------------------------------------------------------------------


def fixtures(
    m: int, hidden: int, intermediate: int, seed: int, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Whole BF16 operands of all boundaries: x, d_output [M, H]; down_input, d_gate, d_up [M, I];
    w_gate, w_up [H, I]; w_down [I, H]. Each from a generator of its own, the same on every rank.

    Scaled so that every product has an RMS near 1. A weight gradient sums M terms where dX sums I,
    so its gradient operand (`.dw`) is the same tensor times an exact power of two.
    """
    shapes = {
        "x": (m, hidden, 1.0),
        "down_input": (m, intermediate, 1.0),
        "d_gate": (m, intermediate, math.sqrt(hidden / intermediate)),
        "d_up": (m, intermediate, math.sqrt(hidden / intermediate)),
        "d_output": (m, hidden, math.sqrt(intermediate / hidden)),
        "w_gate": (hidden, intermediate, hidden**-0.5),
        "w_up": (hidden, intermediate, hidden**-0.5),
        "w_down": (intermediate, hidden, intermediate**-0.5),
    }
    found = {}
    for number, (name, (rows, columns, std)) in enumerate(shapes.items()):
        random = torch.Generator(device).manual_seed(seed * 1009 + number)
        x = torch.randn(rows, columns, generator=random, device=device)
        found[name] = (x * std).to(BF16)
        if name.startswith("d_"):
            found[f"{name}.dw"] = found[name] * 2.0 ** -round(math.log2(std * math.sqrt(m)))
    return found


def packed(tensors: Tensors, tp: int) -> dict[str, Tensor]:
    """`tensors` with d_gate_up [M, 2I] and w_gate_up [H, 2I]: rank i's slice is [gate_i | up_i].

    One contraction of both projections: another contract than two sums, with one reduction.
    """
    pairs = {"d_gate_up": ("d_gate", "d_up"), "w_gate_up": ("w_gate", "w_up")}
    joined = {
        name: torch.stack([tensors[n].unflatten(1, (tp, -1)) for n in pair], 2).flatten(1)
        for name, pair in pairs.items()
    }
    return {**tensors, **joined}


# -- operands and references -----------------------------------------------------------------------


def operands(
    boundary: Boundary, tensors: Tensors, own: Owned, *, whole: bool = False
) -> tuple[Tensor, Tensor]:
    """The two operands as the operators take them; whole: with the summed axis unsplit."""
    tokens, features = own.tokens, own.features
    if boundary is PACKED or boundary.name == PACKED.name:
        features = slice(2 * features.start, 2 * features.stop)
    if whole and boundary.over == "cp":
        tokens = slice(None)
    if whole and boundary.over == "tp":
        features = slice(None)
    at = {"t": tokens, "f": features, "-": slice(None)}
    first, second = (
        tensors[name][tuple(at[axis] for axis in axes)]
        for name, axes in (boundary.first, boundary.second)
    )
    return first, second


def oriented(boundary: Boundary, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """a[M, K], b[K, N] whose plain product is the boundary's."""
    return {
        "forward": (first, second),
        "da": (first, second.t()),
        "db": (first.t(), second),
    }[boundary.kind]


def group(boundary: Boundary, grid: Grid, rank: int) -> tuple[int, ...]:
    """The ranks whose partials are added, in that order; the rank alone where nothing is."""
    if boundary.over is None:
        return (rank,)
    return grid.group_of(rank, token_axis(grid) if boundary.over == "cp" else "tp")


def partial(
    boundary: Boundary, tensors: Tensors, own: Owned, tree: ReductionTree, parts: int
) -> Tensor:
    """A rank's local product: the root of its subtree, in the dtype of the wire. A product that no
    rank shares is a chain, rounded to BF16."""
    a, b = oriented(boundary, *operands(boundary, tensors, own))
    if boundary.over is None:
        return reference.gemm(a, b, reference.CHAIN, BF16)
    return reference.gemm(a, b, tree.subtree(parts), tree.dtype)


def reduced(
    boundary: Boundary, tensors: Tensors, grid: Grid, rank: int, m: int, tree: ReductionTree
) -> Tensor:
    """Fixed-order sum of the partials of this rank's group -> BF16: the distributed reference."""
    members = group(boundary, grid, rank)
    intermediate = tensors["w_down"].shape[0]
    parts = [
        partial(boundary, tensors, owned(grid, r, m, intermediate), tree, len(members))
        for r in members
    ]
    return (tree.fold(parts) if boundary.over else parts[0]).to(BF16)


def undivided(boundary: Boundary, tensors: Tensors, own: Owned, tree: ReductionTree) -> Tensor:
    """The same coordinates from one rank that holds the whole summed axis -> BF16."""
    a, b = oriented(boundary, *operands(boundary, tensors, own, whole=True))
    return reference.gemm(a, b, tree if boundary.over else reference.CHAIN, BF16)


def oracle(boundary: Boundary, tensors: Tensors, own: Owned, *, whole: bool = True) -> Tensor:
    """The same coordinates as one FP32 product of the library; whole=False: of this rank's part."""
    a, b = oriented(boundary, *operands(boundary, tensors, own, whole=whole))
    return a.float() @ b.float()
