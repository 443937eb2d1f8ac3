"""SwiGLU element by element, rounded to BF16 where the eager Qwen3MLP and its autograd round.

    forward   s = bf16(silu(g))   h = bf16(s * u)
    backward  du = bf16(dh * s)   ds = bf16(dh * u)   dg = bf16(silu'(g) * ds)

Everything between two roundings is FP32, in the order of torch's own kernels: silu is
g / (1 + exp(-g)), its gradient ds * sig * (1 + g * (1 - sig)) with sig = 1 / (1 + exp(-g)).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from rlkernel.kernels.bf16 import INTERPRETED, rounded, to_bf16, to_fp32
from rlkernel.kernels.fold import check_devices
from rlkernel.kernels.launch import Launch

BLOCK = 1024  # elements of a row a program: a 16-byte vector a thread

if INTERPRETED:

    def _exp(x):
        return tl.exp(x)

    def _one_plus_product(x, y):
        return x * y + 1.0  # torch's CPU kernel rounds the product as well

else:

    @triton.jit
    def _exp(x):
        return libdevice.exp(x)  # expf, as in torch; tl.exp is the approximate one

    @triton.jit
    def _one_plus_product(x, y):
        return tl.fma(x, y, 1.0)  # nvcc contracts torch's 1 + x * (1 - sig) to one rounding


# Contraction is off at each launch: the one place where torch's binary has it is spelled out, and
# nothing else may change with a compiler's version. Division is the correctly rounded one; `/` is
# an approximation in Triton.
EXACT = {"enable_fp_fusion": False}


def swiglu_forward(gate: Tensor, up: Tensor, hidden: Tensor) -> Tensor:
    """hidden = bf16(bf16(silu(gate)) * up), all BF16 [M, I] with any strides; hidden is returned.

    gate and up may be the two halves of one buffer. hidden may be gate or up themselves.

    Floor: 4 M I bytes read, 2 M I written. Raises TypeError for a dtype other than BF16, ValueError
    for shapes or devices that differ, before the launch.
    """
    _check(gate=gate, up=up, hidden=hidden)
    if gate.numel():
        _launch(_forward, (gate, up, hidden), {})(gate, up, hidden)
    return hidden


def swiglu_backward(
    d_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    d_gate: Tensor,
    d_up: Tensor,
    hidden: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of swiglu_forward's gate and up -> (d_gate, d_up), in the tensors given.

    All BF16 [M, I] with any strides. With `hidden` the forward's result is written there too, so
    it need not be kept for the gradient of the down projection. Each output may be one of the
    inputs themselves.

    Floor: 6 M I bytes read, 4 M I written (6 with hidden). Raises as swiglu_forward does.
    """
    run = prepared_backward(d_hidden, gate, up, d_gate, d_up, hidden)
    run(d_hidden, gate, up, d_gate, d_up, hidden)
    return d_gate, d_up


def prepared_backward(
    d_hidden: Tensor,
    gate: Tensor,
    up: Tensor,
    d_gate: Tensor,
    d_up: Tensor,
    hidden: Tensor | None = None,
) -> Callable[..., None]:
    """swiglu_backward, checked: a call for tensors that look like these (launch.py)."""
    given = {"d_hidden": d_hidden, "gate": gate, "up": up, "d_gate": d_gate, "d_up": d_up}
    _check(**given, **({} if hidden is None else {"hidden": hidden}))
    if not gate.numel():
        return lambda *tensors: None
    again = hidden is not None
    tensors = (d_hidden, gate, up, d_gate, d_up, hidden if again else d_up)
    launch = _launch(_backward, tensors, {"AGAIN": again})

    def run(d_hidden, gate, up, d_gate, d_up, hidden=None) -> None:
        # Not written where it is not wanted.
        launch(d_hidden, gate, up, d_gate, d_up, hidden if again else d_up)

    return run


def _launch(kernel, tensors: tuple[Tensor, ...], constants: dict) -> Callable[..., None]:
    """A call of an element-wise kernel for tensors that look like these."""
    rows, width = tensors[0].shape
    strides = [stride for tensor in tensors for stride in tensor.stride()]
    programs = rows * triton.cdiv(width, BLOCK)
    constants = {**constants, "BLOCK": BLOCK}
    launch = Launch(tensors[0].device, kernel, (programs,), constants, num_warps=4, **EXACT)
    return lambda *tensors: launch(*tensors, width, *strides)


@triton.jit
def silu(g):
    """silu of an FP32 tile, in FP32; the caller rounds."""
    return tl.div_rn(g, 1.0 + _exp(-g))


@triton.jit
def silu_gradient(ds, g):
    """ds times the derivative of silu at g, FP32."""
    sig = tl.div_rn(1.0, 1.0 + _exp(-g))
    return ds * sig * _one_plus_product(g, 1.0 - sig)


@triton.jit
def _forward(
    gate, up, hidden, width, gate_m, gate_i, up_m, up_i, hidden_m, hidden_i, BLOCK: tl.constexpr
):
    row, cols = _place(width, BLOCK)
    keep = cols < width
    g = to_fp32(tl.load(gate + row * gate_m + cols * gate_i, mask=keep))
    u = to_fp32(tl.load(up + row * up_m + cols * up_i, mask=keep))
    h = to_bf16(rounded(silu(g), True) * u)
    tl.store(hidden + row * hidden_m + cols * hidden_i, h, mask=keep)


@triton.jit
def _backward(
    d_hidden,
    gate,
    up,
    d_gate,
    d_up,
    hidden,
    width,
    d_hidden_m,
    d_hidden_i,
    gate_m,
    gate_i,
    up_m,
    up_i,
    d_gate_m,
    d_gate_i,
    d_up_m,
    d_up_i,
    hidden_m,
    hidden_i,
    AGAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, cols = _place(width, BLOCK)
    keep = cols < width
    dh = to_fp32(tl.load(d_hidden + row * d_hidden_m + cols * d_hidden_i, mask=keep))
    g = to_fp32(tl.load(gate + row * gate_m + cols * gate_i, mask=keep))
    u = to_fp32(tl.load(up + row * up_m + cols * up_i, mask=keep))
    s = rounded(silu(g), True)
    dg = to_bf16(silu_gradient(rounded(dh * u, True), g))
    tl.store(d_up + row * d_up_m + cols * d_up_i, to_bf16(dh * s), mask=keep)
    tl.store(d_gate + row * d_gate_m + cols * d_gate_i, dg, mask=keep)
    if AGAIN:
        tl.store(hidden + row * hidden_m + cols * hidden_i, to_bf16(s * u), mask=keep)


@triton.jit
def _place(width, BLOCK: tl.constexpr):
    """(row, columns) of this program, in 64 bits: M times a stride may pass 2^31."""
    blocks = tl.cdiv(width, BLOCK)
    row = tl.program_id(0) // blocks
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    return row.to(tl.int64), cols.to(tl.int64)


def _check(**tensors: Tensor) -> None:
    shape = tensors["gate"].shape
    for name, tensor in tensors.items():
        if tensor.dtype != torch.bfloat16:
            raise TypeError(f"{name} is {tensor.dtype}: expected torch.bfloat16; cast it first")
        if tensor.ndim != 2 or tensor.shape != shape:
            raise ValueError(
                f"{name} {tuple(tensor.shape)} against gate {tuple(shape)}: "
                "expected one shape [M, I] for all; flatten the leading axes"
            )
    check_devices(**tensors)
