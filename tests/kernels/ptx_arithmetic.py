"""What PTX's arithmetic does, a number a thread, in numpy: the operations that our kernels use.

The bits are not a GPU's: ex2 and rcp are approximate there, fma is rounded to FP64 before FP32
here, and ptxas may make one fma of mul.f32 and add.f32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

KINDS = {
    "pred": np.bool_,
    **{"b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32},
    **{"b64": np.uint64, "u64": np.uint64, "s64": np.int64},
}
COMPARISONS = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "ge": np.greater_equal}


class Operation(NamedTuple):
    """result = compute(*operands), and their kinds."""

    result: str
    operands: tuple[str, ...]
    compute: Callable


def short(x):
    """FP32 -> BF16 in the low half of a word, to nearest even."""
    bits = x.view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), np.uint32(0x7FFF), nearest)


def pair(high, low):
    return short(high) << 16 | short(low)


def add_pairs(x, y):
    """FP32 holds the sum of two BF16, or is far from where rounding turns."""
    ends = [(z & np.uint32(0xFFFF0000)).view(np.float32) for z in (x, y)]
    starts = [(z << 16).view(np.float32) for z in (x, y)]
    return pair(np.add(*ends), np.add(*starts))


def fma(x, y, z):
    return x.astype(np.float64) * y + z


def flushed(x):
    """FP32 without subnormals, to zero of their sign."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def permuted(x, y, selector):
    """Four of the eight bytes of x and y, one for each of the selector's last four digits."""
    eight = y.astype(np.uint64) << 32 | x
    result = np.zeros_like(eight)
    for i in range(4):
        digit = selector >> 4 * i & 15
        if (digit > 7).any():
            raise NotImplementedError("prmt that spreads a sign")
        result |= (eight >> 8 * digit & 255) << 8 * i
    return result


def quotient(x, y):
    """Rounded towards zero, as numpy's is not."""
    return np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))


def product(kind: str) -> Callable:
    """x * y + z, x and y extended to that kind first."""
    return lambda x, y, z=0: x.astype(KINDS[kind]) * y.astype(KINDS[kind]) + z


def selected(x, y, which):
    return np.where(which, x, y)


def _same(kind: str, count: int, compute: Callable) -> Operation:
    return Operation(kind, (kind,) * count, compute)


TABLE = {
    "fma.rn.f32": _same("f32", 3, fma),
    "ex2.approx.ftz.f32": _same("f32", 1, lambda x: flushed(np.exp2(flushed(x)))),
    "rcp.approx.ftz.f32": _same("f32", 1, lambda x: flushed(1 / flushed(x))),
    "add.rn.bf16x2": _same("b32", 2, add_pairs),
    "cvt.rn.bf16x2.f32": Operation("b32", ("f32", "f32"), pair),
    "prmt.b32": _same("b32", 3, permuted),
    "and.b32": _same("b32", 2, np.bitwise_and),
    "or.b32": _same("b32", 2, np.bitwise_or),
    "shr.u32": _same("u32", 2, np.right_shift),
    "shl.b32": _same("b32", 2, np.left_shift),
    "shl.b64": Operation("b64", ("b64", "u32"), np.left_shift),
    "min.s32": _same("s32", 2, np.minimum),
    "div.s32": _same("s32", 2, quotient),
}
for kind in ("f32", "s32", "s64"):
    TABLE[f"add.{kind}"] = _same(kind, 2, np.add)
    TABLE[f"sub.{kind}"] = _same(kind, 2, np.subtract)
TABLE["mul.f32"] = TABLE["mul.rn.f32"] = _same("f32", 2, np.multiply)
TABLE["add.rn.f32"] = TABLE["add.f32"]
for kind in ("s32", "u32", "s64", "u64"):
    TABLE[f"mul.lo.{kind}"] = _same(kind, 2, product(kind))
    TABLE[f"mad.lo.{kind}"] = _same(kind, 3, product(kind))
for kind, wide in (("s32", "s64"), ("u32", "u64")):
    TABLE[f"mul.wide.{kind}"] = Operation(wide, (kind,) * 2, product(wide))
    TABLE[f"mad.wide.{kind}"] = Operation(wide, (kind, kind, wide), product(wide))
for kind in ("b32", "u32", "s32"):
    TABLE[f"mov.{kind}"] = _same(kind, 1, np.positive)
    for name, compare in COMPARISONS.items():
        TABLE[f"setp.{name}.{kind}"] = Operation("pred", (kind, kind), compare)
for kind in ("b32", "f32"):
    TABLE[f"selp.{kind}"] = Operation(kind, (kind, kind, "pred"), selected)
for wide, kind in (("s64", "s32"), ("u64", "u32"), ("u32", "u64")):
    TABLE[f"cvt.{wide}.{kind}"] = Operation(wide, (kind,), np.positive)
