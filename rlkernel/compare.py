"""How two results differ: bit for bit, in units in the last place, and as drift.

Bits are compared as integers, so -0.0 and +0.0 differ and NaN payloads count. Values are compared
in FP64.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

INTEGER_VIEW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
EPS = {
    torch.float32: 2.0**-23,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float64: 2.0**-52,
}
ULP_EDGES = (0, 1, 2, 4, 16, 256, 65536)
ECDF_POINTS = 21


@dataclass(frozen=True)
class BitReport:
    """How many elements differ in their bits, and the first one that does (index, both values)."""

    mismatches: int
    elements: int
    first: tuple[int, ...] | None = None
    left: float | None = None
    right: float | None = None

    def __bool__(self) -> bool:
        """True when every bit agrees."""
        return self.mismatches == 0

    def __str__(self) -> str:
        """`0 / 4096 elements`, or the count with the first coordinate and both values."""
        text = f"{self.mismatches} / {self.elements} elements"
        return (
            text
            if self.first is None
            else f"{text}; first at {list(self.first)}: {self.left!r} against {self.right!r}"
        )


@dataclass(frozen=True)
class Drift:
    """Absolute differences of two tensors, and the relative L2 norm against the second. NaN counts
    as infinite.

    ecdf: 21 quantiles of |difference| from 0 to 100 percent.
    """

    max_abs: float
    p95: float
    p99: float
    mean_abs: float
    rel_l2: float
    ecdf: tuple[float, ...]

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "ecdf": list(self.ecdf)}


def bits(x: Tensor) -> Tensor:
    """The same storage read as signed integers of the same width."""
    return x.detach().contiguous().view(INTEGER_VIEW[x.element_size()])


def bit_report(left: Tensor, right: Tensor) -> BitReport:
    """Compare bit patterns. Raises ValueError when shapes or dtypes differ."""
    _check_alike(left, right)
    differs = bits(left) != bits(right)
    count = int(differs.sum())
    if not count:
        return BitReport(0, left.numel())
    first = tuple(int(i) for i in differs.nonzero()[0])
    return BitReport(count, left.numel(), first, left[first].item(), right[first].item())


def ulp_distance(left: Tensor, right: Tensor) -> Tensor:
    """Representable steps between two finite tensors of one dtype -> int64, elementwise. -0.0 and
    +0.0 are 0 apart.
    """
    _check_alike(left, right)
    return (_ordered(left) - _ordered(right)).abs()


def ulp_histogram(left: Tensor, right: Tensor) -> dict[str, int]:
    """Elements by ULP distance: `0`, `1`, `2`, `<=4`, `<=16`, `<=256`, `<=65536`, `more`."""
    distance = ulp_distance(left, right)
    counts, below = {}, -1
    for edge in ULP_EDGES:
        label = str(edge) if edge - below == 1 else f"<={edge}"
        counts[label] = int(((distance > below) & (distance <= edge)).sum())
        below = edge
    counts["more"] = int((distance > below).sum())
    return counts


def drift(value: Tensor, reference: Tensor) -> Drift:
    """Statistics of |value - reference| in FP64 over all elements. Raises ValueError on shapes that
    differ.
    """
    if value.shape != reference.shape:
        raise ValueError(f"cannot compare shapes {tuple(value.shape)} and {tuple(reference.shape)}")
    if not value.numel():
        raise ValueError("cannot compare empty tensors: no element says nothing about equality")
    value, reference = (
        value.detach().double().flatten().cpu(),
        reference.detach().double().flatten().cpu(),
    )
    # Equal infinities differ by nothing; a NaN on either side differs by everything.
    gap = torch.where(value == reference, 0.0, (value - reference).abs()).nan_to_num(
        math.inf, posinf=math.inf
    )
    wanted = [0.95, 0.99, *(i / (ECDF_POINTS - 1) for i in range(ECDF_POINTS))]
    p95, p99, *ecdf = _quantiles(gap, wanted)
    return Drift(
        max_abs=ecdf[-1],
        p95=p95,
        p99=p99,
        mean_abs=gap.mean().item(),
        rel_l2=gap.norm().item() / max(reference.norm().item(), 1e-30),
        ecdf=tuple(ecdf),
    )


def rounding_bound(dtype: torch.dtype, reduction_length: int, signal: Tensor) -> float:
    """4 * eps * sqrt(reduction length) * max|signal|: how far reordered sums of that length may lie
    apart.
    """
    return 4 * EPS[dtype] * math.sqrt(reduction_length) * signal.detach().abs().max().item()


def digest(*tensors: Tensor) -> str:
    """SHA-256 over dtype, shape and bytes of the tensors, as 64 hex digits."""
    h = hashlib.sha256()
    for x in tensors:
        h.update(f"{x.dtype}{tuple(x.shape)}".encode())
        h.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


def _quantiles(values: Tensor, fractions: list[float]) -> list[float]:
    """For each fraction q the smallest value that at least that share of the values do not exceed.

    Selection instead of sorting: a gradient of millions of elements is judged at every step.
    """
    at = [max(0, math.ceil(q * values.numel()) - 1) for q in fractions]
    ranked = np.partition(values.numpy(), sorted(set(at)))
    return [float(ranked[i]) for i in at]


def _ordered(x: Tensor) -> Tensor:
    """Bit patterns as int64 that grow with the value: negative floats are mirrored below zero."""
    pattern = bits(x).long()
    lowest = -(1 << (8 * x.element_size() - 1))
    return torch.where(pattern < 0, lowest - pattern, pattern)


def _check_alike(left: Tensor, right: Tensor) -> None:
    if left.shape != right.shape or left.dtype != right.dtype:
        raise ValueError(
            f"cannot compare bits of {left.dtype} {tuple(left.shape)} "
            f"with {right.dtype} {tuple(right.shape)}"
        )
