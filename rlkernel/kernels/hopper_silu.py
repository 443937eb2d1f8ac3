"""PTX of SwiGLU over one word: packed gate ($1) and up ($2) -> packed hidden ($0).

Eager computes silu in FP32 as x / (1 + exp(-x)), rounds it to BF16, multiplies by up and rounds
again. silu's argument is a BF16 number and its result is rounded to BF16, so it is a function of
65536 values: any formula that gives all of them is exact, and the device can be asked for all.
"""

from __future__ import annotations

import struct
from math import e, log, log2


def number(x: float) -> str:
    """A float as PTX writes FP32 constants."""
    return "0f" + struct.pack(">f", x).hex().upper()


def swiglu_text(silu: str) -> str:
    """`silu` in terms of {x} (its FP32 argument), {s} (its result) and registers named by {i}."""
    declare = ".reg .b32 w; .reg .f32 x0, x1, s0, s1;"
    unpack = "shl.b32 w, $1, 16; mov.b32 x0, w; and.b32 w, $1, 0xffff0000; mov.b32 x1, w;"
    both = silu.replace("#", "0") + silu.replace("#", "1")
    # The product of two BF16 numbers has 16 bits: FP32's product is exact and mul.rn.bf16x2 rounds
    # the same number. (Below 2^-126 FP32 may round as well; what is lost there is under half of
    # BF16's smallest number and never makes or breaks a tie.)
    pack = "cvt.rn.bf16x2.f32 w, s1, s0; mul.rn.bf16x2 $0, w, $2;"
    return "{" + declare + unpack + both + pack + "}"


# CUDA's expf (2 ulp) with the sum fused in, and a correctly rounded quotient: as nvcc compiles
# torch's eager silu.
EXACT = swiglu_text(
    """.reg .f32 a#, b#, n#, r#, p#, c#; .reg .b32 i#;
    neg.f32 a#, x#;
    fma.rn.sat.f32 b#, a#, 0f3BBB989D, 0f3F000000;
    fma.rm.f32 b#, b#, 0f437C0000, 0f4B400001;
    add.f32 n#, b#, 0fCB40007F;
    neg.f32 n#, n#;
    fma.rn.f32 r#, a#, 0f3FB8AA3B, n#;
    fma.rn.f32 r#, a#, 0f32A57060, r#;
    mov.b32 i#, b#;
    shl.b32 i#, i#, 23;
    mov.b32 c#, i#;
    ex2.approx.ftz.f32 p#, r#;
    fma.rn.f32 p#, p#, c#, 0f3F800000;
    div.rn.f32 s#, x#, p#;
    """
)

LOG2E = log2(e)
LOG2E_HIGH = 1.44268798828125  # its first 16 bits: times a BF16 number exact in FP32


def short(scale: float = LOG2E, one: float = 1.0) -> str:
    """x / 4 * rcp((1 + 2^(-x log2 e)) / 4): the quarter keeps the reciprocal out of the subnormals
    that rcp.approx.ftz would flush (x = -87.5, -88, -88.5).
    """
    return swiglu_text(
        f""".reg .f32 q#, t#, d#;
        mul.f32 q#, x#, {number(0.25)};
        mul.f32 t#, x#, {number(-scale)};
        ex2.approx.ftz.f32 t#, t#;
        fma.rn.f32 d#, t#, {number(0.25)}, {number(0.25 * one)};
        rcp.approx.ftz.f32 d#, d#;
        mul.f32 s#, q#, d#;
        """
    )


def corrected(rest: float = LOG2E - LOG2E_HIGH, one: float = 1.0) -> str:
    """The same with an exact exponent: 2^(-x log2 e) = 2^(-x high) * (1 - x rest ln 2). Saturation
    keeps the correction finite where x is not.
    """
    return swiglu_text(
        f""".reg .f32 q#, t#, k#, d#;
        mul.f32 q#, x#, {number(0.25)};
        mul.f32 t#, x#, {number(-LOG2E_HIGH)};
        fma.rn.sat.f32 k#, x#, {number(-0.25 * rest * log(2))}, {number(0.25)};
        ex2.approx.ftz.f32 t#, t#;
        fma.rn.f32 d#, t#, k#, {number(0.25 * one)};
        rcp.approx.ftz.f32 d#, d#;
        mul.f32 s#, q#, d#;
        """
    )


SWIGLU = short()
