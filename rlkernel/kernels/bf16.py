"""BF16 inside a kernel: conversions and the dot of a chain, right in the interpreter as well.

Triton's interpreter truncates where FP32 becomes BF16, loses the low bits of a subnormal where BF16
becomes FP32, and multiplies raw 16-bit patterns in a BF16 dot; its FP32 dot is numpy's matmul,
whose order of additions changes with the block. Kernels therefore take all of these from here.
Compiled, they are the plain Triton operations and cost nothing. Interpreted, they follow the CPU's
contract: one FP32 accumulator over ascending k, a multiply and an add that round by themselves
(contract.chain).

TRITON_INTERPRET must be set before this module is imported.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)

if INTERPRETED:
    from triton.runtime.interpreter import TensorHandle

    def dot(a, b, acc):
        """acc[M, N] + a[M, K] @ b[K, N], added k by k in ascending order -> FP32."""
        left, right, total = _float32(a), _float32(b), _float32(acc).copy()
        with np.errstate(over="ignore", invalid="ignore"):
            for k in range(left.shape[1]):
                total += left[:, k, None] * right[k]
        return tl.tensor(TensorHandle(total, tl.float32), acc.type)

    def to_bf16(x):
        """FP32 -> BF16, to nearest even."""
        pattern = _float32(x).view(np.uint32)
        kept = (pattern + (0x7FFF + ((pattern >> 16) & 1)) >> 16).astype(np.uint16)
        kept = np.where(np.isnan(_float32(x)), np.uint16(0x7FC0), kept)
        kind = tl.block_type(tl.bfloat16, x.type.shape) if x.type.is_block() else tl.bfloat16
        return tl.tensor(TensorHandle(kept, tl.bfloat16), kind)

    def to_fp32(x):
        """BF16 or FP32 -> FP32, exact."""
        kind = tl.block_type(tl.float32, x.type.shape) if x.type.is_block() else tl.float32
        return tl.tensor(TensorHandle(_float32(x), tl.float32), kind)

    def _float32(x) -> np.ndarray:
        """The values of a BF16 or FP32 tensor of the interpreter."""
        data = np.atleast_1d(x.handle.data)
        if x.dtype == tl.bfloat16:
            return (data.astype(np.uint32) << 16).view(np.float32)
        if x.dtype != tl.float32:
            raise TypeError(f"{x.dtype} is not supported here: expected bf16 or fp32")
        return data

else:

    @triton.jit
    def dot(a, b, acc):
        """acc[M, N] + a[M, K] @ b[K, N], BF16 in, one chain over ascending k -> FP32."""
        return tl.dot(a, b, acc)

    @triton.jit
    def to_bf16(x):
        """FP32 -> BF16, to nearest even."""
        return x.to(tl.bfloat16)

    @triton.jit
    def to_fp32(x):
        """BF16 or FP32 -> FP32, exact."""
        return x.to(tl.float32)


@triton.jit
def rounded(x, BF16: tl.constexpr):
    """What a leaf or joint keeps, as FP32: rounded to BF16, or FP32 as it is."""
    if BF16:
        return to_fp32(to_bf16(x))
    else:
        return x
