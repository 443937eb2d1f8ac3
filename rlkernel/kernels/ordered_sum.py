"""The sum over rows in ascending order: what programs have left behind, whichever ended first."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512  # columns a program


def ordered_sum(parts: Tensor, out: Tensor) -> None:
    """out[C] = parts[0] + parts[1] + ..., in this order in FP32; parts FP32 [rows, C], rows > 0.

    Rows may lie any distance apart, columns are contiguous. Floor: 4 (rows + 1) C bytes.
    """
    rows, count = parts.shape
    grid = (triton.cdiv(count, BLOCK),)
    _ordered_sum[grid](parts, out, rows, count, parts.stride(0), BLOCK=BLOCK, num_warps=4)


@triton.jit
def _ordered_sum(parts, out, rows, count, stride, BLOCK: tl.constexpr):
    cols = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = cols < count
    whole = tl.load(parts + cols, mask=keep)
    for row in range(1, rows):
        whole += tl.load(parts + row * tl.cast(stride, tl.int64) + cols, mask=keep)
    tl.store(out + cols, whole, mask=keep)
