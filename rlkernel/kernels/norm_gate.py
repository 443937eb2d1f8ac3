"""The element-wise middle of the A2A-FFN in one pass: bias, two LayerNorms and a SiLU gate.

    z [N, L, 2H] = [U ; G]      h = LN_x(U + b_u) * silu(LN_gate(G + b_g))      h [N, L, H]

N is the batch of all source ranks, L the rank's token slice; bias is a token's, gamma and beta are
shared. FP32, BF16 or FP16, rounded where the eager torch operators round: behind the bias, each
norm, silu and the product. On the CPU these operators run themselves (reference.norm_gate).

Slicing N or L changes no bit of h. Nor of d_z, and slicing L none of the sums either, as long as
strides that are multiples of 16 elements stay so: alignment chooses the layout of a row's sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.compare import bits
from rlkernel.kernels import hopper_norm_gate as hopper
from rlkernel.kernels import norm_gate_backward as backward
from rlkernel.kernels import norm_gate_forward as forward
from rlkernel.kernels import reference
from rlkernel.kernels.bf16 import INTERPRETED
from rlkernel.kernels.fold import check_devices
from rlkernel.kernels.ordered_sum import ordered_sum

EPS = 1e-5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Scales = tuple[Tensor, Tensor, Tensor, Tensor]

_proven: dict[tuple, bool] = {}


def norm_gate(
    z: Tensor,
    bias: Tensor,
    gamma_x: Tensor,
    beta_x: Tensor,
    gamma_gate: Tensor,
    beta_gate: Tensor,
    eps: float = EPS,
    out: Tensor | None = None,
) -> Tensor:
    """LN_x(U + b_u) * silu(LN_gate(G + b_g)) -> h [N, L, H], with gradients for all six tensors.

    z [N, L, 2H] and bias [L, 2H]: any strides, but contiguous in the last axis. gamma, beta [H].
    out: where to write h; only without gradients. One dtype for all: FP32, BF16 or FP16.

    Floor: 3 H elements a row moved, 5 H in the backward. Raises TypeError for a dtype, ValueError
    for shapes, strides, devices or an `out` under autograd, before any launch.
    """
    scales = (gamma_x, beta_x, gamma_gate, beta_gate)
    check(z, bias, scales, out=out)
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (z, bias, *scales))
    if learns and out is not None:
        raise ValueError("out cannot take part in autograd: leave it out, or use torch.no_grad()")
    if on_cpu(z):
        h = reference.norm_gate(z, bias, *scales, eps)
        return h if out is None else out.copy_(h)
    if learns:
        return _NormGate.apply(z, bias, *scales, eps)
    return norm_gate_forward(z, bias, scales, eps, out)


def norm_gate_forward(
    z: Tensor,
    bias: Tensor,
    scales: Scales,
    eps: float = EPS,
    out: Tensor | None = None,
    stats: Tensor | None = None,
) -> Tensor:
    """The kernel itself, without autograd -> out [N, L, H].

    scales: gamma_x, beta_x, gamma_gate, beta_gate. stats: FP32 [4, N, L], contiguous, receives mean
    and rstd of U, mean and rstd of G; without it nothing is saved.
    """
    if out is None:
        out = z.new_empty(*z.shape[:2], z.shape[-1] // 2)
    check(z, bias, scales, out=out, stats=stats, kernel=True)
    forward.launch(z, bias, scales, eps, out, stats)
    return out


def norm_gate_backward(
    d_h: Tensor,
    z: Tensor,
    bias: Tensor,
    scales: Scales,
    stats: Tensor,
    d_z: Tensor | None = None,
    sums: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient of the kernel -> (d_z [N, L, 2H], sums FP32 [L, 6, H]), in tensors if given.

    sums: a token's gradients over N (bias of U, of G, gamma_x, beta_x, gamma_gate, beta_gate),
    contiguous. A chunked schedule lets each chunk of tokens fill its slice of one such tensor, and
    calls `parameter_gradients` once: the same bits as in one piece. Wide BF16 rows on Hopper go
    through hopper_norm_gate, all others through norm_gate_backward, which has other bits.
    """
    n, length, width = d_h.shape
    if d_z is None:
        d_z = z.new_empty(z.shape)
    if sums is None:
        sums = stats.new_empty(length, backward.SUMS, width)
    check(z, bias, scales, d_h=d_h, d_z=d_z, stats=stats, sums=sums, kernel=True)
    way = hopper if hopper.takes(d_h, z, bias, scales, d_z) else backward
    way.launch(d_h, z, bias, scales, stats, d_z, sums)
    return d_z, sums


def parameter_gradients(sums: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """sums FP32 [L, 6, H] -> gradients of bias [L, 2H], gamma_x, beta_x, gamma_gate, beta_gate [H].

    Tokens are added in ascending order in FP32; each result is rounded once to dtype.
    """
    length, _, width = sums.shape
    whole = sums.new_zeros(4, width)
    if sums.numel():
        ordered_sum(sums[:, 2:].flatten(1), whole.view(-1))
    d_bias = sums[:, :2].reshape(length, 2 * width).to(dtype)
    return d_bias, *whole.to(dtype)


def proven_equal(
    length: int, width: int, dtype: torch.dtype, device: torch.device | str, eps: float = EPS
) -> bool:
    """Has the fused pass the bits of the eager torch operators for [N, length, 2 width] here?

    Tried once a process on data whose sums depend on their order; rows do not depend on N.
    """
    device = torch.device(device)
    key = (length, width, dtype, device, eps)
    if key not in _proven:
        with torch.no_grad():
            given = [x.to(device) for x in order_sensitive(16, length, width, dtype)]
            fused = norm_gate(*given, eps)
            _proven[key] = torch.equal(bits(fused), bits(reference.norm_gate(*given, eps)))
    return _proven[key]


def order_sensitive(
    n: int, length: int, width: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, ...]:
    """(z, bias, gamma_x, beta_x, gamma_gate, beta_gate) on the CPU: rows of different scale and
    offset, magnitudes over nine binades, so that another order of a row's sum shows.
    """
    random = torch.Generator().manual_seed(seed)
    z = torch.randn(n, length, 2 * width, generator=random)
    z *= 2.0 ** torch.randint(-6, 3, z.shape, generator=random)
    z += 3 * torch.randn(n, length, 1, generator=random)
    z *= 4.0 ** torch.randint(-2, 3, (n, length, 1), generator=random)
    bias = torch.randn(length, 2 * width, generator=random)
    scales = [torch.randn(width, generator=random) + (i % 2 == 0) for i in range(4)]
    return tuple(x.to(dtype) for x in (z, bias, *scales))


def on_cpu(z: Tensor) -> bool:
    """Plain torch runs there; the interpreter's kernels only in a process that has chosen them."""
    return z.device.type == "cpu" and not INTERPRETED


def check(
    z: Tensor,
    bias: Tensor,
    scales: Scales,
    *,
    out: Tensor | None = None,
    d_h: Tensor | None = None,
    d_z: Tensor | None = None,
    stats: Tensor | None = None,
    sums: Tensor | None = None,
    kernel: bool = False,
) -> None:
    """Raises as norm_gate does; kernel: also where no kernel can run on these tensors."""
    if z.ndim != 3 or z.shape[-1] % 2 or not z.shape[-1]:
        raise ValueError(f"z {tuple(z.shape)}: expected [N, L, 2H] with H > 0, U and then G")
    n, length, width = z.shape[0], z.shape[1], z.shape[2] // 2
    names = ("gamma_x", "beta_x", "gamma_gate", "beta_gate")
    given = {"z": (z, z.shape), "bias": (bias, (length, 2 * width))}
    given |= {name: (scale, (width,)) for name, scale in zip(names, scales)}
    given |= {"out": (out, (n, length, width)), "d_h": (d_h, (n, length, width))}
    given |= {"d_z": (d_z, z.shape), "stats": (stats, (4, n, length))}
    given |= {"sums": (sums, (length, backward.SUMS, width))}
    given = {name: pair for name, pair in given.items() if pair[0] is not None}
    for name, (tensor, shape) in given.items():
        single = name in ("stats", "sums")
        wanted = torch.float32 if single else z.dtype
        if tensor.dtype != wanted or z.dtype not in DTYPES:
            raise TypeError(
                f"{name} is {tensor.dtype}: expected one of float32, bfloat16, float16 for all "
                "(stats and sums float32); cast it first"
            )
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(
                f"{name} {tuple(tensor.shape)} against z {tuple(z.shape)}: expected {tuple(shape)}"
            )
        if tensor.numel() and not (tensor.is_contiguous() if single else tensor.stride(-1) == 1):
            raise ValueError(
                f"{name} has strides {tensor.stride()}: expected the last axis to be contiguous"
                f"{', and the others too' if single else ''}; call .contiguous()"
            )
    tensors = {name: tensor for name, (tensor, _) in given.items()}
    if kernel or len({tensor.device for tensor in tensors.values()}) > 1:
        check_devices(**tensors)


class _NormGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, bias, gamma_x, beta_x, gamma_gate, beta_gate, eps):
        scales = (gamma_x, beta_x, gamma_gate, beta_gate)
        stats = torch.empty(4, *z.shape[:2], dtype=torch.float32, device=z.device)
        h = norm_gate_forward(z, bias, scales, eps, stats=stats)
        ctx.save_for_backward(z, bias, *scales, stats)
        return h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_h):
        z, bias, *scales, stats = ctx.saved_tensors
        if d_h.stride(-1) != 1:  # the gradient of a sum is one number, expanded
            d_h = d_h.contiguous()
        d_z, sums = norm_gate_backward(d_h, z, bias, tuple(scales), stats)
        return d_z, *parameter_gradients(sums, z.dtype), None
