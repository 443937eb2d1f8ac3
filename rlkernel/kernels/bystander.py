"""Kernels that stand beside a product on SMs of their own, and neither give nor take a result.

    hold    each program keeps an SM and moves nothing: acc = acc / 2 + 1, `steps` times
    copy    each program keeps an SM and moves bytes: source -> target, `rounds` times over

What runs beside a product takes SMs, memory traffic, or both; these two take one without the other,
which no exchange does. Floor of copy: 2 * rounds * bytes / bandwidth, and what so few SMs can keep
in flight lies far below it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # elements of a program's turn
MOST = 1 << 30
WARPS = 8  # more than a product's block leaves room for on its SM: see _hold_kernel


@triton.jit
def _hold_kernel(out, steps, BLOCK: tl.constexpr):
    """A product's blocks take nearly all registers of an SM: one more warp keeps them away."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = at.to(tl.float32)
    for _ in range(steps):
        acc = acc * 0.5 + 1.0
    tl.store(out + at, acc)


@triton.jit
def _copy_kernel(source, target, size, rounds, BLOCK: tl.constexpr):
    programs = tl.num_programs(0)
    for _ in range(rounds):
        for start in range(tl.program_id(0) * BLOCK, size, programs * BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < size
            tl.store(target + at, tl.load(source + at, inside), inside)


def hold(programs: int, steps: int, out: Tensor) -> Tensor:
    """`programs` SMs for as long as `steps` take. out: [programs * BLOCK] FP32, written: element i
    is 2 + (i - 2) / 2**steps in FP32, rounded at each step.
    """
    _checked(programs, steps, "steps")
    if out.dtype != torch.float32 or out.shape != (programs * BLOCK,):
        raise ValueError(f"out: FP32 of {programs * BLOCK} elements, not {out.dtype} of "
                         f"{tuple(out.shape)}")  # fmt: skip
    _hold_kernel[(programs,)](out, steps, BLOCK=BLOCK, num_warps=WARPS)
    return out


def copy(programs: int, rounds: int, source: Tensor, target: Tensor) -> Tensor:
    """target = source, `rounds` times, by `programs` SMs. Both contiguous, of one look, below
    2**30 elements (the kernel counts them in 32 bits); they may not overlap.
    """
    _checked(programs, rounds, "rounds")
    if (source.shape, source.dtype, source.device) != (target.shape, target.dtype, target.device):
        raise ValueError("source and target: one shape, dtype and device, not "
                         f"{tuple(source.shape)} {source.dtype} {source.device} and "
                         f"{tuple(target.shape)} {target.dtype} {target.device}")  # fmt: skip
    if not (source.is_contiguous() and target.is_contiguous()) or source.numel() >= MOST:
        raise ValueError("source and target: contiguous, below 2**30 elements")
    _copy_kernel[(programs,)](source, target, source.numel(), rounds, BLOCK=BLOCK, num_warps=WARPS)
    return target


def _checked(programs: int, times: int, name: str) -> None:
    if programs < 1 or times < 0:
        raise ValueError(f"programs={programs}, {name}={times}: at least 1 program, 0 {name}")
