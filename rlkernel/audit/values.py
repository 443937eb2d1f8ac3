"""Arithmetic on the ranks' values, in FP64: distances, factors, sums, and how ranks are listed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def distance(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||, infinite for other shapes or values that are no numbers."""
    if a.shape != b.shape:
        return float("inf")
    a, b = a.double(), b.double()
    gap = (a - b).norm().item()
    if gap != gap:
        return float("inf")
    return gap / max(b.norm().item(), 1e-12)


def root_mean_square(x: Tensor) -> float:
    return x.double().norm().item() / max(x.numel(), 1) ** 0.5


def factor_between(held: Sequence[Tensor], due: Sequence[Tensor]) -> float:
    """The one number c that brings c * due closest to what all ranks hold."""
    pairs = [(h.double(), d.double()) for h, d in zip(held, due) if h.shape == d.shape]
    square = sum((d * d).sum().item() for _, d in pairs)
    return sum((h * d).sum().item() for h, d in pairs) / max(square, 1e-30)


def sum_of(held: Sequence[Tensor], ranks: Sequence[int]) -> Tensor:
    if len({held[r].shape for r in ranks}) > 1:
        return torch.zeros(0)
    return torch.stack([held[r].double() for r in ranks]).sum(0)


def listed(ranks: Sequence[int]) -> str:
    return "{" + ", ".join(map(str, ranks)) + "}"
