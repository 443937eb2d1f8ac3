"""One pass of h = LN_x(U + b_u) * silu(LN_gate(G + b_g)) over rows of z = [U ; G].

A row's mean and variance are summed in the order of torch's own CUDA kernel, so that the bits can
be those of the eager operators: 128 threads take four neighbours each, 512 columns apart, and run
Welford's recurrence; their results are merged pairwise, lanes 16, 8, 4, 2, 1 apart, then warps 2
and 1 apart (method: torch's vectorized layer_norm, aten/src/ATen/native/cuda). The order depends on
H alone: a row's bits do not depend on where the row stands or on how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.kernels.norm_gate_steps import (
    affine,
    centred,
    narrow,
    plus,
    rounded,
    silu,
    times,
    wide,
)

THREADS = 128  # of torch's kernel: whatever their number here, they are the order of the sums
STEP = 4 * THREADS
# Contraction is spelled out (tl.fma) where torch's binary has it, and is off elsewhere.
EXACT = {"enable_fp_fusion": False}


@dataclass(frozen=True)
class Config:
    """hold: how many steps of a row stay in registers between its two passes, the last ones; the
    others are read again, from L1 or L2. None: none, and the steps are a loop, not unrolled.
    registers: the most a thread may take, so that more rows are under way; None: any.
    """

    hold: int | None = 0
    num_warps: int = 4
    registers: int | None = None


def default_config(width: int, hip: bool = False) -> Config:
    """Unrolled up to 8192 columns a half, six rows or more under way on an SM, held in registers as
    far as these allow; AMD's wavefronts are twice as wide.
    """
    if hip:
        return Config(None, 2)
    steps = -(-width // STEP)
    if width > 8192:
        return Config(None)
    return Config(steps, 4, 64) if steps <= 4 else Config(5, 4, 80)


def launch(
    z: Tensor,
    bias: Tensor,
    scales: tuple[Tensor, Tensor, Tensor, Tensor],
    eps: float,
    out: Tensor,
    stats: Tensor | None,
    config: Config | None = None,
) -> None:
    """Write h[N, L, H] to out, and to stats FP32 [4, N, L]: mean, rstd of U, mean, rstd of G.

    scales: gamma_x, beta_x, gamma_gate, beta_gate. The caller has checked all shapes.

    Floor: 3 H elements a row, 2 H of them read.
    """
    n, length, width = out.shape
    if not out.numel():
        return
    hip = torch.version.hip is not None
    config = config or default_config(width, hip)
    kept = out if stats is None else stats  # never written in the first case
    _forward[(n * length,)](
        z,
        bias,
        *scales,
        out,
        kept,
        n,
        length,
        z.stride(0),
        z.stride(1),
        bias.stride(0),
        out.stride(0),
        out.stride(1),
        eps,
        SAVE=stats is not None,
        ARCH=architecture(z.device),
        **constants(width, config, out.dtype),
        num_warps=config.num_warps,
        **limited(config.registers),
        **EXACT,
    )


def architecture(device: torch.device) -> str:
    """Whose instructions the kernels may name: cuda, hip, or cpu in the interpreter."""
    return "cpu" if device.type == "cpu" else "hip" if torch.version.hip else "cuda"


def limited(registers: int | None) -> dict[str, int]:
    """The launch option for that limit."""
    return {} if registers is None else {"maxnreg": registers}


def constants(width: int, config: Config, dtype: torch.dtype) -> dict[str, object]:
    """What the kernel is specialised on."""
    return {
        "H": width,
        "STEPS": -(-width // STEP),
        "HALVES": equal_parts(width),
        "HOLD": config.hold,
        "SHORT": dtype == torch.bfloat16,
    }


def equal_parts(width: int) -> bool:
    """Do all threads sum equally many, and is each merge's weight exactly one half in FP32?"""
    each = np.float32(width // THREADS)
    half = each * (np.float32(1) / (each + each)) if each else 0
    return width % STEP == 0 and bool(half == 0.5)


# Rows and tokens give no alignment, and a kernel of this size takes long to compile anew.
@triton.jit(do_not_specialize=["n_size", "l_size"])
def _forward(
    z, bias, gamma_x, beta_x, gamma_gate, beta_gate, out, stats,
    n_size, l_size, z_n, z_l, bias_l, out_n, out_l, eps,
    SAVE: tl.constexpr, ARCH: tl.constexpr, H: tl.constexpr, STEPS: tl.constexpr,
    HALVES: tl.constexpr, HOLD: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs share a token, and with it the bias.
    n = (tl.program_id(0) % n_size).to(tl.int64)
    token = (tl.program_id(0) // n_size).to(tl.int64)
    z += n * z_n + token * z_l
    bias += token * bias_l
    out += n * out_n + token * out_l
    us, gs = (), ()
    mean_u, mean_g = tl.zeros([128], tl.float32), tl.zeros([128], tl.float32)
    square_u, square_g = tl.zeros([128], tl.float32), tl.zeros([128], tl.float32)
    if HOLD is not None:
        for step in tl.static_range(STEPS):
            u, g = _biased(z, bias, step, H, "evict_first" if step >= STEPS - HOLD else "")
            mean_u, square_u = _welford(wide(u, ARCH), mean_u, square_u, step, step * 4, H)
            mean_g, square_g = _welford(wide(g, ARCH), mean_g, square_g, step, step * 4, H)
            if step >= STEPS - HOLD:
                us, gs = us + (u,), gs + (g,)
    else:
        before = tl.zeros([128], tl.float32)
        for step in range(STEPS):
            u, g = _biased(z, bias, step, H, "evict_last")
            mean_u, square_u = _welford(wide(u, ARCH), mean_u, square_u, step, before, H)
            mean_g, square_g = _welford(wide(g, ARCH), mean_g, square_g, step, before, H)
            before += 4
    # Both halves at once: the warps meet half as often.
    mean, square = tl.join(mean_u, mean_g), tl.join(square_u, square_g)
    mean, rstd = _merged(mean, square, eps, H, STEPS, HALVES)
    mean_u, mean_g = tl.split(mean)
    rstd_u, rstd_g = tl.split(rstd)
    of_u, of_g = (mean_u, rstd_u, gamma_x, beta_x), (mean_g, rstd_g, gamma_gate, beta_gate)
    if HOLD is not None:
        for i in tl.static_range(HOLD):
            _finish(us[i], gs[i], of_u, of_g, out, STEPS - HOLD + i, H, SHORT, ARCH)
        for step in tl.static_range(STEPS - HOLD):
            u, g = _biased(z, bias, step, H, "evict_first")
            _finish(u, g, of_u, of_g, out, step, H, SHORT, ARCH)
    else:
        for step in range(STEPS):
            u, g = _biased(z, bias, step, H, "evict_first")
            _finish(u, g, of_u, of_g, out, step, H, SHORT, ARCH)
    if SAVE:
        at, rows = n * l_size + token, tl.cast(n_size, tl.int64) * l_size
        tl.store(stats + at, mean_u)
        tl.store(stats + rows + at, rstd_u)
        tl.store(stats + 2 * rows + at, mean_g)
        tl.store(stats + 3 * rows + at, rstd_g)


@triton.jit
def _columns(step, H: tl.constexpr):
    """The columns of a step as [thread, its four], and which of them there are."""
    cols = step * 512 + tl.arange(0, 128)[:, None] * 4 + tl.arange(0, 4)[None, :]
    return cols, cols < H


@triton.jit
def _biased(z, bias, step, H: tl.constexpr, KEEP: tl.constexpr):
    """U + b_u and G + b_g of a step, rounded."""
    cols, keep = _columns(step, H)
    u = tl.load(z + cols, mask=keep, eviction_policy=KEEP)
    g = tl.load(z + H + cols, mask=keep, eviction_policy=KEEP)
    return (
        plus(u, tl.load(bias + cols, mask=keep)),
        plus(g, tl.load(bias + H + cols, mask=keep)),
    )


@triton.jit
def _finish(u, g, of_u, of_g, out, step, H: tl.constexpr, SHORT: tl.constexpr, ARCH: tl.constexpr):
    """h of a step from its biased halves, each with its (mean, rstd, gamma, beta)."""
    KIND: tl.constexpr = out.dtype.element_ty
    cols, keep = _columns(step, H)
    gate = rounded(_normed(g, of_g, cols, keep, ARCH), KIND, ARCH)
    value = narrow(_normed(u, of_u, cols, keep, ARCH), KIND)
    tl.store(out + cols, times(value, narrow(silu(gate, SHORT, ARCH), KIND)), mask=keep)


@triton.jit
def _normed(x, of_x, cols, keep, ARCH: tl.constexpr):
    mean, rstd, gamma, beta = of_x
    gamma = tl.load(gamma + cols, mask=keep, eviction_policy="evict_last")
    beta = tl.load(beta + cols, mask=keep, eviction_policy="evict_last")
    return affine(centred(x, mean, rstd, ARCH), gamma, beta, ARCH)


@triton.jit
def _welford(x, mean, square, step, before, H: tl.constexpr):
    """Each thread's four values of a step, one after the other, into its mean and sum of squares,
    behind the `before` that are in them.
    """
    even, odd = tl.split(tl.reshape(x, [128, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    mean, square = _include(first, mean, square, step, 0, before, H)
    mean, square = _include(second, mean, square, step, 1, before, H)
    mean, square = _include(third, mean, square, step, 2, before, H)
    return _include(fourth, mean, square, step, 3, before, H)


@triton.jit
def _include(x, mean, square, step, AT: tl.constexpr, before, H: tl.constexpr):
    delta = x - mean
    later = tl.fma(delta, _inverse(before + AT + 1), mean)
    total = tl.fma(delta, x - later, square)
    if H % 512 == 0:
        return later, total
    else:
        there = step * 512 + tl.arange(0, 128) * 4 + AT < H
        return tl.where(there, later, mean), tl.where(there, total, square)


@triton.jit
def _inverse(count):
    """1 / count in FP32, correctly rounded; a constant where the loop is unrolled."""
    if isinstance(count, tl.constexpr):
        return 1.0 / count
    else:
        return tl.div_rn(1.0, count)


@triton.jit
def _merged(mean, square, eps, H: tl.constexpr, STEPS: tl.constexpr, HALVES: tl.constexpr):
    """(mean, rstd) [2] of both halves from those of their threads, [128, 2]."""
    count = tl.full([128, 2], STEPS * 4, tl.float32)
    if STEPS * 512 > H:
        there = tl.zeros([128, 2], tl.int32)
        for step in tl.static_range(STEPS):
            left = H - step * 512 - tl.arange(0, 128)[:, None] * 4
            there += tl.minimum(tl.maximum(left, 0), 4)
        count = there.to(tl.float32)
    # One pair at a time: a reduction over all of them would have the order of the compiler.
    for level in tl.static_range(5):
        mean = tl.reshape(mean, [4, 2, 16 >> level, 2])
        square = tl.reshape(square, [4, 2, 16 >> level, 2])
        count = tl.reshape(count, [4, 2, 16 >> level, 2])
        mean, square, count = _pairs(mean, square, count, 1, HALVES)
    mean, square = tl.reshape(mean, [2, 2, 2]), tl.reshape(square, [2, 2, 2])
    mean, square, count = _pairs(mean, square, tl.reshape(count, [2, 2, 2]), 0, HALVES)
    mean, square, count = _pairs(mean, square, count, 0, HALVES)
    return mean, tl.rsqrt(tl.div_rn(square, H * 1.0) + eps)


@triton.jit
def _pairs(mean, square, count, AXIS: tl.constexpr, HALVES: tl.constexpr):
    if HALVES:
        return tl.reduce((mean, square, count), AXIS, _merge_equal)
    else:
        return tl.reduce((mean, square, count), AXIS, _merge)


@triton.jit
def _merge(mean, square, count, mean_b, square_b, count_b):
    """Two parts of a row as one; b stands behind."""
    delta = mean - mean_b
    both = count_b + count
    share = tl.where(both > 0, tl.div_rn(1.0, tl.maximum(both, 1.0)), 0.0)
    share_a, share_b = count * share, count_b * share
    merged = tl.fma(share_b, mean_b, share_a * mean)
    return merged, tl.fma(delta * delta * count_b, share_a, square_b + square), both


@triton.jit
def _merge_equal(mean, square, count, mean_b, square_b, count_b):
    """The same for two parts of one length, whose weights are exactly one half."""
    delta = mean - mean_b
    merged = tl.fma(0.5, mean_b, 0.5 * mean)
    return merged, tl.fma(delta * delta * count_b, 0.5, square_b + square), count + count_b
