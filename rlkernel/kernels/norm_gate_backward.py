"""The gradients of the bias + LayerNorm + SiLU gate, in one pass over z and the gradient of h.

    s = silu(a)    a = LN_gate(G + b_g)    v = LN_x(U + b_u)    each rounded, as in the forward
    dv = dh * s    da = silu'(a) * (dh * v)                     each rounded
    dU = rstd_u (gamma_x dv - mean(gamma_x dv) - normal_u mean(gamma_x dv normal_u)), dG likewise

One program holds whole rows, and six sums over them for each column (the bias twice, gamma and
beta of two norms). For wide rows these would fill most of an SM's registers. There two programs
share a segment of rows, one for dU and what belongs to it, one for dG. Both read z and dh, the
second from L2.

Nothing depends on the order in which programs end: a segment is summed row by row, its sums go to a
scratch, and a second kernel adds up the segments in ascending order. Segments are SEGMENT rows of
one token whatever the number of tokens, so a slice of the tokens has the bits of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.kernels.bf16 import INTERPRETED
from rlkernel.kernels.norm_gate_forward import architecture
from rlkernel.kernels.norm_gate_steps import (
    affine,
    centred,
    narrow,
    plus,
    rounded,
    silu,
    silu_gradient,
    times,
    wide,
)
from rlkernel.kernels.ordered_sum import ordered_sum

SEGMENT = 128  # rows; part of the contract of the bits of the sums
SUMS = 6  # a column: d_bias of U and of G, d_gamma_x, d_beta_x, d_gamma_gate, d_beta_gate
SHARED = 160 * 1024  # bytes that rows on their way may take, of Hopper's 227 KB


if INTERPRETED:

    def _row_sums(terms):
        """The sum of each of these."""
        return tuple(tl.sum(term, 0) for term in terms)

else:

    @triton.jit
    def _row_sums(terms):
        """The sum of each of these; one reduction, so that the warps meet once a row."""
        if len(terms) == 4:
            return tl.reduce(terms, 0, _four)
        else:
            return tl.reduce(terms, 0, _two)


@triton.jit
def _two(a, b, more_a, more_b):
    return a + more_a, b + more_b


@triton.jit
def _four(a, b, c, d, more_a, more_b, more_c, more_d):
    return a + more_a, b + more_b, c + more_c, d + more_d


@dataclass(frozen=True)
class Config:
    """stages: the row at work and those that asynchronous copies fetch meanwhile; halves: two
    programs share the rows, one for U and one for G.
    """

    num_warps: int = 16
    stages: int = 2
    halves: bool = True


def default_config(width: int, dtype: torch.dtype, hip: bool = False) -> Config:
    """Up to 4096 columns one program has all six sums, eight columns a thread; on CDNA always."""
    block = triton.next_power_of_2(width)
    if hip:
        return Config(min(max(block // 1024, 1), 16), 1, False)
    if block <= 4096:
        return Config(max(block // 256, 1), 2, False)
    copied = 3 * block * dtype.itemsize  # bytes in shared memory
    return Config(16, 1 if copied > SHARED else 2, True)


def launch(
    d_h: Tensor,
    z: Tensor,
    bias: Tensor,
    scales: tuple[Tensor, Tensor, Tensor, Tensor],
    stats: Tensor,
    d_z: Tensor,
    sums: Tensor,
    config: Config | None = None,
    segment: int = SEGMENT,
) -> None:
    """Write d_z[N, L, 2H], and to sums FP32 [L, 6, H] what is summed over N (see SUMS).

    stats: FP32 [4, N, L] of the forward. The caller has checked all shapes.

    Floor: 5 H elements a row, 3 H of them read; SUMS * 8 H bytes a segment beside them.
    """
    n, length, width = d_h.shape
    if not d_h.numel():
        sums.zero_()
        return
    config = config or default_config(width, d_h.dtype, torch.version.hip is not None)
    segments = -(-n // segment)
    parts = sums if segments == 1 else sums.new_empty(segments, *sums.shape)
    _backward[((1 + config.halves) * length * segments,)](
        d_h,
        z,
        bias,
        *scales,
        stats,
        d_z,
        parts,
        n,
        length,
        *d_h.stride()[:2],
        *z.stride()[:2],
        bias.stride(0),
        *d_z.stride()[:2],
        SEGMENT=segment,
        ARCH=architecture(z.device),
        **constants(width, config, d_h.dtype),
        num_warps=config.num_warps,
    )
    if segments > 1:
        ordered_sum(parts.flatten(1), sums.view(-1))


def constants(width: int, config: Config, dtype: torch.dtype) -> dict[str, object]:
    """What the kernel is specialised on."""
    return {
        "H": width,
        "BLOCK": triton.next_power_of_2(width),
        "STAGES": config.stages,
        "HALVES": config.halves,
        "SHORT": dtype == torch.bfloat16,
    }


# Rows and tokens give no alignment, and a kernel of this size takes long to compile anew.
@triton.jit(do_not_specialize=["n_size", "l_size"])
def _backward(
    d_h, z, bias, gamma_x, beta_x, gamma_gate, beta_gate, stats, d_z, parts,
    n_size, l_size, d_h_n, d_h_l, z_n, z_l, bias_l, d_z_n, d_z_l,
    SEGMENT: tl.constexpr, ARCH: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, HALVES: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    # In halves, two neighbours share their rows.
    each: tl.constexpr = 2 if HALVES else 1
    token = (tl.program_id(0) // each % l_size).to(tl.int64)
    segment = (tl.program_id(0) // each // l_size).to(tl.int64)
    d_h += token * d_h_l
    z += token * z_l
    bias += token * bias_l
    d_z += token * d_z_l
    stats += token
    parts += (segment * l_size + token) * (6 * H)
    first = segment * SEGMENT
    last = tl.minimum(first + SEGMENT, n_size)
    if not HALVES:
        _whole(
            d_h, z, bias, gamma_x, beta_x, gamma_gate, beta_gate, stats, d_z, parts,
            first, last, n_size, l_size, d_h_n, z_n, d_z_n,
            ARCH, H, BLOCK, STAGES, SHORT,
        )  # fmt: skip
    elif tl.program_id(0) % 2 == 0:
        _half(
            d_h, z, bias, gamma_x, gamma_x, gamma_gate, beta_gate, stats, d_z, parts,
            first, last, n_size, l_size, d_h_n, z_n, d_z_n,
            False, ARCH, H, BLOCK, STAGES, SHORT,
        )  # fmt: skip
    else:
        _half(
            d_h, z, bias, gamma_gate, beta_gate, gamma_x, beta_x, stats, d_z, parts,
            first, last, n_size, l_size, d_h_n, z_n, d_z_n,
            True, ARCH, H, BLOCK, STAGES, SHORT,
        )  # fmt: skip


@triton.jit
def _whole(
    d_h, z, bias, gamma_x, beta_x, gamma_gate, beta_gate, stats, d_z, parts,
    first, last, n_size, l_size, d_h_n, z_n, d_z_n,
    ARCH: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """d_z for rows first .. last - 1 of a token, and all six sums."""
    KIND: tl.constexpr = d_z.dtype.element_ty
    cols = tl.arange(0, BLOCK)
    keep = cols < H
    rows = tl.cast(n_size, tl.int64) * l_size
    bias_u, gamma_u, beta_u = (tl.zeros([BLOCK], tl.float32),) * 3
    bias_g, gamma_g, beta_g = (tl.zeros([BLOCK], tl.float32),) * 3
    for n in tl.range(first, last, num_stages=STAGES):
        u = tl.load(z + n * z_n + cols, mask=keep, other=0.0)
        g = tl.load(z + n * z_n + H + cols, mask=keep, other=0.0)
        dh = tl.load(d_h + n * d_h_n + cols, mask=keep, other=0.0)
        # Always so, but unknown to the compiler: what is loaded behind the branch stays in L1 and
        # out of the copies that run ahead.
        if n_size > 0:
            b_u, b_g, scale_u, shift_u, scale_g, shift_g = _parameters(
                bias, bias + H, gamma_x, beta_x, gamma_gate, beta_gate, H, BLOCK
            )
            mean, rstd_u = _statistics(stats, n * l_size, rows)
            normal_u = centred(plus(u, b_u), mean, rstd_u, ARCH)
            value = narrow(affine(normal_u, scale_u, shift_u, ARCH), KIND)
            mean, rstd_g = _statistics(stats + 2 * rows, n * l_size, rows)
            normal_g = centred(plus(g, b_g), mean, rstd_g, ARCH)
            at = rounded(affine(normal_g, scale_g, shift_g, ARCH), KIND, ARCH)
            d_value = wide(times(dh, narrow(silu(at, SHORT, ARCH), KIND)), ARCH)
            d_gate = wide(times(dh, value), ARCH)
            d_gate = rounded(silu_gradient(d_gate, at, SHORT, ARCH), KIND, ARCH)
            # Columns beyond H: dh is zero there, and with it both of these.
            beta_u += d_value
            beta_g += d_gate
            gamma_u = tl.fma(d_value, normal_u, gamma_u)
            gamma_g = tl.fma(d_gate, normal_g, gamma_g)
            d_value *= wide(scale_u, ARCH)
            d_gate *= wide(scale_g, ARCH)
            level_u, slope_u, level_g, slope_g = _row_sums(
                (d_value, d_value * normal_u, d_gate, d_gate * normal_g)
            )
            du = narrow(_input(d_value, normal_u, rstd_u, level_u, slope_u, H), KIND)
            dg = narrow(_input(d_gate, normal_g, rstd_g, level_g, slope_g, H), KIND)
            tl.store(d_z + n * d_z_n + cols, du, mask=keep)
            tl.store(d_z + n * d_z_n + H + cols, dg, mask=keep)
            bias_u += wide(du, ARCH)
            bias_g += wide(dg, ARCH)
    _store(parts, 0, bias_u, gamma_u, beta_u, H, BLOCK)
    _store(parts, 1, bias_g, gamma_g, beta_g, H, BLOCK)


@triton.jit
def _half(
    d_h, z, bias, gamma, beta, other_gamma, other_beta, stats, d_z, parts,
    first, last, n_size, l_size, d_h_n, z_n, d_z_n,
    GATE: tl.constexpr, ARCH: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """One half of d_z for rows first .. last - 1 of a token, and its sums; GATE: the half of G."""
    KIND: tl.constexpr = d_z.dtype.element_ty
    OWN: tl.constexpr = H if GATE else 0  # where the half begins
    OTHER: tl.constexpr = 0 if GATE else H
    cols = tl.arange(0, BLOCK)
    keep = cols < H
    rows = tl.cast(n_size, tl.int64) * l_size
    own_stats, other_stats = stats, stats + 2 * rows
    if GATE:
        own_stats, other_stats = stats + 2 * rows, stats
    sum_bias = tl.zeros([BLOCK], tl.float32)
    sum_gamma = tl.zeros([BLOCK], tl.float32)
    sum_beta = tl.zeros([BLOCK], tl.float32)
    for n in tl.range(first, last, num_stages=STAGES):
        own = tl.load(z + n * z_n + OWN + cols, mask=keep, other=0.0)
        other = tl.load(z + n * z_n + OTHER + cols, mask=keep, other=0.0)
        dh = tl.load(d_h + n * d_h_n + cols, mask=keep, other=0.0)
        if n_size > 0:
            own_bias, other_bias, scale, shift, other_scale, other_shift = _parameters(
                bias + OWN, bias + OTHER, gamma, beta, other_gamma, other_beta, H, BLOCK
            )
            mean, rstd = _statistics(own_stats, n * l_size, rows)
            own = plus(own, own_bias)
            if GATE:
                normal = centred(own, mean, rstd, ARCH)
            else:  # in sums only: no need of the forward's bits
                normal = tl.fma(wide(own, ARCH), rstd, -mean * rstd)
            other_mean, other_rstd = _statistics(other_stats, n * l_size, rows)
            other_normal = centred(plus(other, other_bias), other_mean, other_rstd, ARCH)
            across = affine(other_normal, other_scale, other_shift, ARCH)
            if GATE:
                d_gate = wide(times(dh, narrow(across, KIND)), ARCH)
                at = rounded(affine(normal, scale, shift, ARCH), KIND, ARCH)
                dy = rounded(silu_gradient(d_gate, at, SHORT, ARCH), KIND, ARCH)
            else:
                gate = narrow(silu(rounded(across, KIND, ARCH), SHORT, ARCH), KIND)
                dy = wide(times(dh, gate), ARCH)
            # Columns beyond H: d_h is zero there, and with it dy.
            sum_beta += dy
            sum_gamma = tl.fma(dy, normal, sum_gamma)
            scaled = dy * wide(scale, ARCH)
            level, slope = _row_sums((scaled, scaled * normal))
            dx = narrow(_input(scaled, normal, rstd, level, slope, H), KIND)
            tl.store(d_z + n * d_z_n + OWN + cols, dx, mask=keep)
            sum_bias += wide(dx, ARCH)
    _store(parts, 1 if GATE else 0, sum_bias, sum_gamma, sum_beta, H, BLOCK)


@triton.jit
def _statistics(stats, at, rows):
    """(mean, rstd) of a row."""
    return tl.load(stats + at), tl.load(stats + rows + at)


@triton.jit
def _input(scaled, normal, rstd, level, slope, H: tl.constexpr):
    """rstd * (scaled - level / H - normal * slope / H): a LayerNorm's gradient of its input."""
    level, slope = rstd * level * (-1.0 / H), rstd * slope * (-1.0 / H)
    return tl.fma(scaled, rstd, tl.fma(normal, slope, level))


@triton.jit
def _store(parts, HALF: tl.constexpr, bias, gamma, beta, H: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    keep = cols < H
    tl.store(parts + HALF * H + cols, bias, mask=keep)
    tl.store(parts + (2 + 2 * HALF) * H + cols, gamma, mask=keep)
    tl.store(parts + (3 + 2 * HALF) * H + cols, beta, mask=keep)


@triton.jit
def _parameters(
    bias, other_bias, gamma, beta, other_gamma, other_beta, H: tl.constexpr, BLOCK: tl.constexpr
):
    cols = tl.arange(0, BLOCK)
    keep = cols < H
    return (
        tl.load(bias + cols, mask=keep, other=0.0),
        tl.load(other_bias + cols, mask=keep, other=0.0),
        tl.load(gamma + cols, mask=keep, other=0.0),
        tl.load(beta + cols, mask=keep, other=0.0),
        tl.load(other_gamma + cols, mask=keep, other=0.0),
        tl.load(other_beta + cols, mask=keep, other=0.0),
    )
