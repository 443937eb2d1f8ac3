"""What one element of the bias + LayerNorm + SiLU gate goes through, in BF16, FP16 or FP32.

Each step rounds to the tensors' dtype where the eager torch operator ends, and computes in FP32
inside. FP32's silu has CUDA's expf and an exact quotient, as torch. A 16-bit silu is a function of
65536 values, and the short formula gives all of them (the GPU tests ask for every one).
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel.kernels import swiglu
from rlkernel.kernels.bf16 import INTERPRETED, to_bf16, to_fp32

LOG2E = tl.constexpr(1.4426950408889634)

if INTERPRETED:

    def wide(x, ARCH):
        """BF16, FP16 or FP32 -> FP32, exact."""
        return x.to(tl.float32) if x.dtype == tl.float16 else to_fp32(x)

    def plus(x, y):
        """x + y in their dtype, rounded once."""
        return narrow(wide(x, "cpu") + wide(y, "cpu"), x.dtype)

    def times(x, y):
        """x * y in their dtype, rounded once."""
        return narrow(wide(x, "cpu") * wide(y, "cpu"), x.dtype)

else:

    @triton.jit
    def wide(x, ARCH: tl.constexpr):
        """BF16, FP16 or FP32 -> FP32, exact."""
        if ARCH == "cuda" and x.dtype == tl.bfloat16:
            # One instruction an element, where the compiler takes two for every other.
            return tl.inline_asm_elementwise(
                "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
                "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return x.to(tl.float32)

    # A 16-bit sum or product rounded once is the FP32 one rounded again (24 >= 2 * 11 + 2 bits),
    # and one packed instruction for two elements.

    @triton.jit
    def plus(x, y):
        """x + y in their dtype, rounded once."""
        return x + y

    @triton.jit
    def times(x, y):
        """x * y in their dtype, rounded once."""
        return x * y


@triton.jit
def narrow(x, KIND: tl.constexpr):
    """FP32 -> KIND, to nearest even."""
    if KIND == tl.bfloat16:
        return to_bf16(x)
    else:
        return x.to(KIND)


@triton.jit
def rounded(x, KIND: tl.constexpr, ARCH: tl.constexpr):
    """FP32 -> KIND, to nearest even, as FP32."""
    if ARCH == "cuda" and KIND == tl.bfloat16:
        # Two at a time: a single conversion runs at a quarter of the packed one's rate.
        return tl.inline_asm_elementwise(
            """{.reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2;
            shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000;}""",
            "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return wide(narrow(x, KIND), ARCH)


@triton.jit
def centred(x, mean, rstd, ARCH: tl.constexpr):
    """The normalised x before gamma and beta, FP32."""
    return rstd * (wide(x, ARCH) - mean)


@triton.jit
def affine(normal, gamma, beta, ARCH: tl.constexpr):
    """gamma * normal + beta, FP32, one rounding: nvcc contracts torch's two."""
    return tl.fma(wide(gamma, ARCH), normal, wide(beta, ARCH))


@triton.jit
def reciprocal(x, ARCH: tl.constexpr):
    """1 / x for an x >= 1/4, to a unit in the last place; +0 for infinity."""
    if ARCH == "cuda":
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def silu(g, SHORT: tl.constexpr, ARCH: tl.constexpr):
    """g / (1 + exp(-g)) of an FP32 tile, FP32; SHORT: exact once it is rounded to BF16."""
    if SHORT:
        # A quarter of the denominator keeps its reciprocal out of the subnormals.
        part = tl.fma(tl.exp2(g * -LOG2E), 0.25, 0.25)
        return (g * 0.25) * reciprocal(part, ARCH)
    else:
        return swiglu.silu(g)


@triton.jit
def silu_gradient(ds, g, SHORT: tl.constexpr, ARCH: tl.constexpr):
    """ds times the derivative of silu at g, FP32."""
    if SHORT:
        sig = reciprocal(1.0 + tl.exp2(g * -LOG2E), ARCH)
        return ds * sig * tl.fma(g, 1.0 - sig, 1.0)
    else:
        return swiglu.silu_gradient(ds, g)
