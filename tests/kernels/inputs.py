"""Matrices that tell a right kernel from a wrong one, and the ways they may lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor

NAN = float("nan")


def matrix(rows: int, cols: int, seed: int = 0, kind: str = "normal") -> Tensor:
    """BF16 [rows, cols] on the CPU.

    normal: N(0, 1). integers: -4 .. 4, so that every FP32 sum is exact. cancelling: magnitudes of
    2^0 to 2^16 with random signs. subnormal: about 2^-66, so that products are FP32 subnormals.
    zeros: half of them, of either sign. large: up to 1e38, so that products overflow.
    """
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=g)
    if kind == "integers":
        x = torch.randint(-4, 5, (rows, cols), generator=g).float()
    elif kind == "cancelling":
        x = x.sign() * 2.0 ** torch.randint(0, 17, (rows, cols), generator=g)
    elif kind == "subnormal":
        x = x * 2.0**-66
    elif kind == "zeros":
        x = x * torch.randint(0, 2, (rows, cols), generator=g)
    elif kind == "large":
        x = x * 1e19
    return x.bfloat16()


LAYOUTS = ("rows", "columns", "padded rows", "padded columns", "shifted", "every other")


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values; NaN lies wherever the layout leaves memory between or around them."""
    rows, cols = x.shape
    if layout.endswith("columns"):
        return laid_out(x.t(), layout.replace("columns", "rows")).t()
    if layout == "rows":
        return x.clone(memory_format=torch.contiguous_format)
    if layout == "padded rows":
        view = x.new_full((rows + 1, cols + 3), NAN)[:rows, :cols]
    elif layout == "shifted":  # contiguous, but off every alignment of a vector load
        view = x.new_full((rows * cols + 2,), NAN)[1 : 1 + rows * cols].view(rows, cols)
    else:
        view = x.new_full((2 * rows, 2 * cols), NAN)[::2, ::2]
    return view.copy_(x)


def poisoned(rows: int, cols: int, dtype: torch.dtype, layout: str = "rows") -> Tensor:
    """An output in which whatever is not written stays NaN."""
    return laid_out(torch.full((rows, cols), NAN, dtype=dtype), layout)
