"""One half of the gradient of z, that of U or of G, and the three sums a column that go with it.

The other half of z has its part in the gradient and is read as well, so that two programs read
each row, the second from L2; but half the sums leave registers for rows on their way.

A program is alone on its SM: what it does not overlap itself, nobody does. So L2 is asked for rows
well ahead, the next row's loads are under way while a row's sums meet, and a row goes through
registers in pieces, only dy gamma and the biased half staying until its sums are known.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel.kernels.bf16 import INTERPRETED
from rlkernel.kernels.norm_gate_steps import (
    affine,
    again,
    narrow,
    plus,
    sigmoid,
    silu_gradient,
    wide,
)

if INTERPRETED:

    def row_sums(terms):
        """The sum of each of these."""
        return tuple(tl.sum(term, 0) for term in terms)

else:

    @triton.jit
    def row_sums(terms):
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


@triton.jit
def half(
    d_h, z, bias, gamma, beta, other_gamma, other_beta, stats, d_z, parts,
    first, last, n_size, l_size, d_h_n, z_n, d_z_n,
    GATE: tl.constexpr, ARCH: tl.constexpr, H: tl.constexpr, THREADS: tl.constexpr,
    CARRIED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One half of d_z for rows first .. last - 1 of a token, and its sums; GATE: the half of G.

    CARRIED: of how many pieces registers hold z of the row to come. AHEAD: how many rows early L2
    is asked for one, 0 for never.
    """
    KIND: tl.constexpr = d_z.dtype.element_ty
    OWN: tl.constexpr = H if GATE else 0  # where the half begins
    OTHER: tl.constexpr = 0 if GATE else H
    rows = tl.cast(n_size, tl.int64) * l_size
    own_stats, other_stats = stats, stats + 2 * rows
    if GATE:
        own_stats, other_stats = stats + 2 * rows, stats
    sum_bias, sum_gamma, sum_beta, owns, others = (), (), (), (), ()
    for i in tl.static_range(_pieces(H, THREADS)):
        zero = tl.zeros([THREADS, _each(i, H, THREADS)], tl.float32)
        sum_bias, sum_gamma, sum_beta = sum_bias + (zero,), sum_gamma + (zero,), sum_beta + (zero,)
        at = _columns(i, H, THREADS)
        if i < CARRIED:
            owns += (_piece(z + first * z_n + OWN, at, H, ""),)
            others += (_piece(z + first * z_n + OTHER, at, H, ""),)
    mean, rstd = statistics(own_stats, first * l_size, rows)
    other_mean, other_rstd = statistics(other_stats, first * l_size, rows)
    for n in tl.range(first, last, num_stages=1):
        later = tl.minimum(n + 1, last - 1)
        if ARCH == "cuda" and AHEAD:
            far = tl.minimum(n + AHEAD, last - 1)
            _fetch(z + far * z_n + OWN, H)
            if not GATE:
                _fetch(d_h + far * d_h_n, H)
        next_mean, next_rstd = statistics(own_stats, later * l_size, rows)
        next_other_mean, next_other_rstd = statistics(other_stats, later * l_size, rows)
        shift, other_shift = -mean * rstd, -other_mean * other_rstd
        level, slope = tl.zeros([THREADS], tl.float32), tl.zeros([THREADS], tl.float32)
        xs, scaleds, betas, gammas = (), (), (), ()
        next_owns, next_others = (), ()
        for i in tl.static_range(_pieces(H, THREADS)):
            at = _columns(i, H, THREADS)
            if i < CARRIED:
                x, other = owns[i], others[i]
            else:
                x = _piece(z + n * z_n + OWN, at, H, "")
                other = _piece(z + n * z_n + OTHER, at, H, "")
            x = plus(x, _piece(bias + OWN, at, H, "evict_last"))
            other = plus(other, _piece(bias + OTHER, at, H, "evict_last"))
            dh = wide(_piece(d_h + n * d_h_n, at, H, ""), ARCH)
            if i < CARRIED:
                next_owns += (_piece(z + later * z_n + OWN, at, H, ""),)
                next_others += (_piece(z + later * z_n + OTHER, at, H, ""),)
            scale = _piece(gamma, at, H, "evict_last")
            normal = tl.fma(wide(x, ARCH), rstd, shift)
            across = affine(
                tl.fma(wide(other, ARCH), other_rstd, other_shift),
                _piece(other_gamma, at, H, "evict_last"),
                _piece(other_beta, at, H, "evict_last"),
                ARCH,
            )
            if GATE:
                gate = affine(normal, scale, _piece(beta, at, H, "evict_last"), ARCH)
                dy = silu_gradient(dh * across, gate, ARCH)
            else:
                dy = dh * across * sigmoid(across, ARCH)
            # Columns beyond H: d_h is zero there, and with it dy.
            betas += (sum_beta[i] + dy,)
            gammas += (tl.fma(dy, normal, sum_gamma[i]),)
            scaled = dy * wide(scale, ARCH)
            level += tl.sum(scaled, 1)
            slope += tl.sum(scaled * normal, 1)
            xs, scaleds = xs + (x,), scaleds + (scaled,)
        sum_beta, sum_gamma = betas, gammas
        owns, others = next_owns, next_others
        level, slope = row_sums((level, slope))
        level, slope = rstd * level * (-1.0 / H), rstd * slope * (-1.0 / H)
        level, slope = tl.fma(slope, shift, level), slope * rstd
        biases = ()
        for i in tl.static_range(_pieces(H, THREADS)):
            at = _columns(i, H, THREADS)
            dx = tl.fma(scaleds[i], rstd, tl.fma(again(xs[i], ARCH), slope, level))
            biases += (sum_bias[i] + dx,)
            tl.store(d_z + n * d_z_n + OWN + at, narrow(dx, KIND), mask=at < H)
        sum_bias = biases
        mean, rstd = next_mean, next_rstd
        other_mean, other_rstd = next_other_mean, next_other_rstd
    HALF: tl.constexpr = 1 if GATE else 0
    for i in tl.static_range(_pieces(H, THREADS)):
        at = _columns(i, H, THREADS)
        tl.store(parts + HALF * H + at, sum_bias[i], mask=at < H)
        tl.store(parts + (2 + 2 * HALF) * H + at, sum_gamma[i], mask=at < H)
        tl.store(parts + (3 + 2 * HALF) * H + at, sum_beta[i], mask=at < H)


@triton.jit
def _columns(i: tl.constexpr, H: tl.constexpr, THREADS: tl.constexpr):
    """The columns of a piece as [thread, its neighbours]."""
    EACH: tl.constexpr = _each(i, H, THREADS)
    START: tl.constexpr = _start(i, H, THREADS)
    return START + tl.arange(0, THREADS)[:, None] * EACH + tl.arange(0, EACH)[None, :]


@triton.jit
def _piece(row, at, H: tl.constexpr, KEEP: tl.constexpr):
    return tl.load(row + at, mask=at < H, other=0.0, eviction_policy=KEEP)


@triton.jit
def _fetch(row, COUNT: tl.constexpr):
    """Ask L2 for these elements; one thread does, by whole 16 bytes."""
    BYTES: tl.constexpr = (COUNT * row.dtype.element_ty.primitive_bitwidth // 8 + 15) // 16 * 16
    size = tl.full([], BYTES, tl.int32)
    tl.inline_asm_elementwise(
        """{.reg .pred one; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 one, thread, 0;
        @one cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, thread;}""",
        "=r,l,r", [row.to(tl.int64) & -16, size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.constexpr_function
def _layout(width, threads):
    """Where each piece of a row begins, and how many neighbours a thread has in it: eight, 16 bytes
    of a 16-bit dtype, while the width lasts, then fewer, so that few threads idle at the end.
    """
    found, at = [], 0
    while at < width:
        left = max((width - at) // threads, 1)
        found.append((at, min(1 << (left.bit_length() - 1), 8)))
        at += threads * found[-1][1]
    return found


@triton.constexpr_function
def _pieces(width, threads):
    return len(_layout(width, threads))


@triton.constexpr_function
def _start(i, width, threads):
    return _layout(width, threads)[i][0]


@triton.constexpr_function
def _each(i, width, threads):
    return _layout(width, threads)[i][1]


@triton.jit
def statistics(stats, at, rows):
    """(mean, rstd) of a row."""
    return tl.load(stats + at), tl.load(stats + rows + at)
