r"""The order of additions: what fixes the bits of a sum that ranks, programs or tiles share.

    tree8.bf16 over K                             the same tree on four ranks

                    root                          rank    0       1       2       3
               /            \                    leaf   0 1     2 3     4 5     6 7
           joint            joint                         \ /     \ /     \ /     \ /   in the rank
          /     \          /     \                         o       o       o       o
      joint    joint   joint    joint                       \     /         \     /    collective
      /  \     /  \    /  \     /  \                         joint           joint
    l0   l1  l2   l3  l4   l5  l6   l7                             \       /
                                                                     root

A reduction axis is halved at floor(K/2) until there are `leaves` slices. A *leaf* is one FP32
accumulator over ascending k, rounded once (nearest even) to `round_to`. A *joint* adds its two
children in FP32 and rounds the same way. Ranks hold contiguous shards, so a rank's leaves form an
exact subtree: the rank folds them, the collective adds the last log2(P) levels in rank order, and
the bits of the root do not depend on P.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from rlkernel.grid import is_power_of_two

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
T = TypeVar("T")


@dataclass(frozen=True)
class ReductionTree:
    """A balanced binary tree of `leaves` (a power of two) whose leaves and joints round to
    `round_to`.

    Named `tree8.bf16`, `tree8.fp32`, `tree2.bf16`; `chain` is the tree with a single leaf, which
    rounds nothing on the way. Raises ValueError for any other leaf count or rounding.
    """

    leaves: int = 8
    round_to: str = "bf16"

    def __post_init__(self) -> None:
        if not is_power_of_two(self.leaves):
            raise ValueError(
                f"leaves={self.leaves} is not supported: a balanced tree needs a power of two"
            )
        if self.round_to not in DTYPES:
            raise ValueError(
                f"round_to={self.round_to!r} is not supported: expected one of {', '.join(DTYPES)}"
            )

    @classmethod
    def parse(cls, name: str) -> ReductionTree:
        """`tree8.bf16` -> ReductionTree(8, "bf16"); `chain` -> one leaf."""
        if name == "chain":
            return cls(1, "fp32")
        match = re.fullmatch(r"tree(\d+)\.(\w+)", name)
        if not match:
            raise ValueError(
                f"unknown contract {name!r}: expected chain, tree8.bf16, tree8.fp32, ..."
            )
        return cls(int(match[1]), match[2])

    @property
    def name(self) -> str:
        return "chain" if self.leaves == 1 else f"tree{self.leaves}.{self.round_to}"

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.round_to]

    # -- shape of the tree -------------------------------------------------------------------------

    def bounds(self, length: int) -> tuple[tuple[int, int], ...]:
        """[lo, hi) of every leaf over an axis of `length`, left to right. Short axes have empty
        leaves.
        """
        spans = [(0, length)]
        while len(spans) < self.leaves:
            spans = [half for lo, hi in spans for half in _halves(lo, hi)]
        return tuple(spans)

    def subtree(self, parts: int) -> ReductionTree:
        """The tree that one of `parts` equal shards folds by itself."""
        if not is_power_of_two(parts) or parts > self.leaves:
            raise ValueError(
                f"{parts} shards cannot hold subtrees of {self.name}: "
                f"the number of shards must be a power of two and at most {self.leaves}"
            )
        return ReductionTree(self.leaves // parts, self.round_to)

    def check_axis(self, name: str, length: int, parts: int, *, kind: str) -> None:
        """Raise ValueError unless an axis of `length` can be split over `parts` shards under this
        tree.

        kind "weight": every leaf has the same length, length % leaves == 0. kind "token": shards
        are even, length % parts == 0; leaves inside a shard may differ by one or be absent.
        """
        self.subtree(parts)
        if kind not in ("weight", "token"):
            raise ValueError(f"axis kind {kind!r} is unknown: expected weight or token")
        divisor, rule = (self.leaves, "leaves") if kind == "weight" else (parts, "shards")
        if length % divisor:
            raise ValueError(
                f"{kind} axis {name}={length} is not supported under {self.name} "
                f"over {parts} shard(s): {name} must be a multiple of {divisor} ({rule})"
            )

    # -- arithmetic --------------------------------------------------------------------------------

    def round(self, x: Tensor) -> Tensor:
        """FP32 -> the value that a leaf or joint keeps, in `dtype`."""
        return x.to(self.dtype)

    def joint(self, left: Tensor, right: Tensor) -> Tensor:
        """The rounded sum of two neighbours: FP32 addition, one rounding to `dtype`."""
        return self.round(left.float() + right.float())

    def leaf(self, a: Tensor, b: Tensor) -> Tensor:
        """Chain over ascending k of a[M, k] @ b[k, N], rounded once -> [M, N] in `dtype`."""
        return self.round(chain(a, b))

    def fold(self, nodes: Sequence[Tensor | None]) -> Tensor | None:
        """Root of neighbouring subtree roots (a power of two of them); None stands for an absent
        one.
        """
        return balanced(nodes, self.joint)

    def matmul(self, a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """a[M, K] @ b[K, N] under this contract on the CPU -> [M, N]; the root is rounded to
        `out_dtype`.

        K = 0 is an empty sum: +0.0.
        """
        nodes = [
            self.leaf(a[:, lo:hi], b[lo:hi]) if hi > lo else None
            for lo, hi in self.bounds(a.shape[1])
        ]
        root = self.fold(nodes)
        if root is None:
            root = torch.zeros(a.shape[0], b.shape[1], dtype=self.dtype, device=a.device)
        return root.to(out_dtype or self.dtype)


@dataclass(frozen=True)
class LayerContract:
    """The two trees of a layer: over weight axes (hidden, intermediate) and over tokens (dW across
    CP). Named `tree8.bf16` where they are one, `tree8.bf16/tokens:tree2.bf16` where not.

    Leaves bound how many ranks may share an axis, and each one costs a rounding and the work of a
    fold. More context ranks than two are rare where TP is eight wide, hence the default.
    """

    weight: ReductionTree = ReductionTree()
    token: ReductionTree = ReductionTree(2)

    @classmethod
    def parse(cls, name: str) -> LayerContract:
        """`tree8.bf16/tokens:tree2.bf16`, or one name for both axes."""
        weight, _, token = name.partition("/tokens:")
        return cls(ReductionTree.parse(weight), ReductionTree.parse(token or weight))

    @property
    def name(self) -> str:
        return (
            self.weight.name
            if self.weight == self.token
            else f"{self.weight.name}/tokens:{self.token.name}"
        )


def chain(a: Tensor, b: Tensor) -> Tensor:
    """a[M, K] @ b[K, N] as one FP32 accumulator over ascending k -> FP32 [M, N].

    Multiply and add are two separate correctly rounded element-wise operations, so no BLAS, thread
    count, vector width or fused multiply-add can change a bit. The accumulator starts at +0.0.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            f"chain needs a[M, K] and b[K, N]: got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    a, b = a.float(), b.float()
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    for k in range(a.shape[1]):
        total += a[:, k, None] * b[k]
    return total


def balanced(nodes: Sequence[T | None], joint: Callable[[T, T], T]) -> T | None:
    """Fold neighbours pairwise, level by level. An absent node (None) leaves its neighbour as it
    is.
    """
    if not is_power_of_two(len(nodes)):
        raise ValueError(f"a balanced fold needs a power of two of nodes: got {len(nodes)}")
    while len(nodes) > 1:
        pairs = zip(nodes[::2], nodes[1::2], strict=True)
        nodes = [
            right if left is None else left if right is None else joint(left, right)
            for left, right in pairs
        ]
    return nodes[0]


def _halves(lo: int, hi: int) -> tuple[tuple[int, int], tuple[int, int]]:
    middle = lo + (hi - lo) // 2
    return (lo, middle), (middle, hi)
