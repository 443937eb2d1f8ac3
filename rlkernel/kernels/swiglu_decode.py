"""hidden[M, I] = silu(x @ gate.T) * (x @ up.T) for at most 128 rows, one pass over both weights.

A program owns BLOCK_N rows of gate and the same rows of up: two chains over H that share the tile
of x, then the activation on what is still in registers. Gate, up, silu(gate) and hidden are rounded
to BF16, where eager PyTorch rounds between its kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.kernels import stream
from rlkernel.kernels.bf16 import INTERPRETED, dot, rounded, to_bf16
from rlkernel.kernels.launch import Described, Launch
from rlkernel.kernels.stream import (
    PORTABLE,
    DecodeConfig,
    rows_tile,
    weight_tile,
)

if INTERPRETED:

    @triton.jit
    def exp(x):
        return tl.exp(x)

else:  # the function that a C++ kernel calls; tl.exp is an approximation of it
    from triton.language.extra.libdevice import exp


@triton.jit
def silu(x):
    """x / (1 + exp(-x)) in FP32, correctly rounded division: what torch.nn.functional.silu does."""
    return tl.div_rn(x, 1.0 + exp(-x))


@triton.jit(do_not_specialize=["M"])
def gate_up_decode_kernel(
    x, w_gate, w_up, hidden, gate, up,
    M, N, H, stride_x, stride_w, stride_hidden, stride_gate, stride_up,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STORE: tl.constexpr,
    TMA: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N columns of `hidden` (and of gate and up: STORE), for all rows."""
    n0 = tl.program_id(0) * BLOCK_N
    g = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    u = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, H, BLOCK_K):
        rows = rows_tile(x, k, M, H, stride_x, BLOCK_M, BLOCK_K, TMA, EVEN_K)
        wg = weight_tile(w_gate, n0, k, N, H, stride_w, 1, BLOCK_N, BLOCK_K, TMA, True, EVEN_K)
        wu = weight_tile(w_up, n0, k, N, H, stride_w, 1, BLOCK_N, BLOCK_K, TMA, True, EVEN_K)
        g = dot(wg, rows, g)
        u = dot(wu, rows, u)

    n = n0 + tl.arange(0, BLOCK_N)[:, None]
    m = tl.arange(0, BLOCK_M)[None, :]
    mask = (n < N) & (m < M)
    m = m.to(tl.int64)
    if STORE:
        tl.store(gate + m * stride_gate + n, to_bf16(g), mask=mask)
        tl.store(up + m * stride_up + n, to_bf16(u), mask=mask)
    activated = rounded(silu(rounded(g, True)), True)
    product = to_bf16(activated * rounded(u, True))
    tl.store(hidden + m * stride_hidden + n, product, mask=mask)


def gate_up_decode(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    hidden: Tensor,
    gate: Tensor | None = None,
    up: Tensor | None = None,
    config: DecodeConfig | None = None,
) -> Tensor:
    """silu(x[M, H] @ w_gate[I, H].T) * (x @ w_up[I, H].T) -> `hidden`[M, I], all BF16, M <= 128.

    The weights are taken as they are: two tensors, or the halves of one packed [2I, H]. `gate` and
    `up`, given both or neither, receive the BF16 factors for a backward. Rows must be contiguous,
    and both weights have one row stride. Raises ValueError with what `refuses` says of these
    operands.
    """
    run = prepared(x, w_gate, w_up, hidden, gate, up, config)
    run(x, w_gate, w_up, hidden, gate, up)
    return hidden


def prepared(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    hidden: Tensor,
    gate: Tensor | None = None,
    up: Tensor | None = None,
    config: DecodeConfig | None = None,
) -> Callable[..., object]:
    """gate_up_decode, checked and decided: a call for tensors that look like these (launch.py)."""
    reason = refuses(x, w_gate, w_up, hidden, gate, up)
    if reason:
        raise ValueError(reason)
    (m, h), i = x.shape, w_gate.shape[0]
    if i == 0:
        return lambda *tensors: None
    config = fitting(config or default_config(m, i), x, w_gate, w_up)
    block_m = stream.padded_rows(m)
    if config.tma:
        of_rows = Described(stream.descriptor(x, (block_m, config.block_k)))
        of_weight = Described(stream.descriptor(w_gate, (config.block_n, config.block_k)))
    store = gate is not None
    kept = [t.stride(0) for t in ((gate, up) if store else (hidden, hidden))]
    numbers = (m, i, h, x.stride(0), w_gate.stride(0), hidden.stride(0), *kept)
    constants = {
        "BLOCK_M": block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "STORE": store,
        "TMA": config.tma, "EVEN_K": h % config.block_k == 0,
    }  # fmt: skip
    warps = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    programs = triton.cdiv(i, config.block_n)
    launch = Launch(x.device, gate_up_decode_kernel, (programs,), constants, **warps)

    def run(x, w_gate, w_up, hidden, gate=None, up=None) -> None:
        rows, g, u = x, w_gate, w_up
        if config.tma:
            rows, g, u = of_rows(x), of_weight(w_gate), of_weight(w_up)
        if not store:
            gate = up = hidden
        launch(rows, g, u, hidden, gate, up, *numbers)

    return run


# The fastest of the sweep on an H200 at (H, I) = (4096, 12288), by padded M: all programs resident.
DEFAULTS = {
    16: DecodeConfig(128, 128, num_warps=8),
    32: DecodeConfig(128, 128, num_warps=8),
    64: DecodeConfig(64, 64, num_stages=4),
    128: DecodeConfig(128, 64, num_warps=8, num_stages=4),
}
POINTERS = DecodeConfig(32, 128, tma=False)  # tensors that TMA cannot read


def default_config(m: int, i: int) -> DecodeConfig:
    """What was fastest for these rows, cut finer where I is small."""
    return PORTABLE if stream.portable() else stream.spread(DEFAULTS[stream.padded_rows(m)], i, 1)


def gate_up_candidates(m: int, i: int = 12288) -> tuple[DecodeConfig, ...]:
    """Configs of different shape, the default first, whose bits a census compares."""
    found = [default_config(m, i), PORTABLE, POINTERS]
    if not stream.portable():
        found += [DecodeConfig(128, 64, num_warps=8), DecodeConfig(32, 64, num_stages=4)]
    return tuple(dict.fromkeys(found))


def fitting(config: DecodeConfig, x: Tensor, w_gate: Tensor, w_up: Tensor) -> DecodeConfig:
    """`config`, or the nearest one that these tensors allow."""
    if config.tma and not all(stream.fits_tma(t) for t in (x, w_gate, w_up)):
        config = POINTERS
    return replace(config, num_stages=stream.stages_that_fit(config, x.shape[0], weights=2))


def refuses(
    x: Tensor, w_gate: Tensor, w_up: Tensor, hidden: Tensor, gate: Tensor | None, up: Tensor | None
) -> str | None:
    """Why these operands cannot run on this schedule, or None: they can."""
    if (gate is None) != (up is None):
        return "gate and up are stored both or not at all"
    if x.ndim != 2 or w_gate.ndim != 2:
        return f"gate_up_decode needs matrices: x is {list(x.shape)}, w_gate {list(w_gate.shape)}"
    (m, h), i = x.shape, w_gate.shape[0]
    wanted = {"x": (x, (m, h)), "w_gate": (w_gate, (i, h)), "w_up": (w_up, (i, h))}
    wanted |= {"hidden": (hidden, (m, i)), "gate": (gate, (m, i)), "up": (up, (m, i))}
    for name, (tensor, shape) in wanted.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape or tensor.dtype != torch.bfloat16:
            got = f"{tensor.dtype} {list(tensor.shape)}"
            return f"{name} must be bf16 {list(shape)}: got {got}"
        if tensor.shape[1] > 1 and tensor.stride(1) != 1:
            return f"the rows of {name} must be contiguous"
        if tensor.device != x.device or not INTERPRETED and tensor.device.type != "cuda":
            return f"all tensors must be on one GPU: x is on {x.device}, {name} on {tensor.device}"
    if w_gate.stride(0) != w_up.stride(0):
        return "w_gate and w_up must have one row stride"
    try:
        stream.padded_rows(m)
    except ValueError as error:
        return str(error)
    return None
