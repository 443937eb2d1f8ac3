"""The plain-torch twin of every kernel, with nothing of Triton in it.

On the CPU a twin is the contract itself. On a GPU it is an independent opinion: leaf by leaf a
library GEMM, folded by torch; the same bits wherever the device's matrix instructions add up one
chain whatever the tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkernel.contract import ReductionTree, balanced

CHAIN = ReductionTree.parse("chain")
# cuBLAS splits a long K where C is small: C is padded until it does not.
LARGE, LONG_K, LARGE_FOR_LONG_K = 1024, 2048, 4096


class GateUp(NamedTuple):
    """BF16 [M, I] each: the two projections and their SwiGLU."""

    gate: Tensor
    up: Tensor
    hidden: Tensor


def gemm(a: Tensor, b: Tensor, tree: ReductionTree, out_dtype: torch.dtype | None = None) -> Tensor:
    """a[M, K] @ b[K, N], BF16, under `tree` -> [M, N] in out_dtype (the tree's by default).

    Leaves may differ in length or be absent; K = 0 gives +0.0.
    """
    if a.device.type == "cpu":
        return tree.matmul(a, b, out_dtype)
    leaves = [
        tree.round(_library_chain(a[:, lo:hi], b[lo:hi])) if hi > lo else None
        for lo, hi in tree.bounds(a.shape[1])
    ]
    root = tree.fold(leaves)
    if root is None:
        root = a.new_zeros(a.shape[0], b.shape[1], dtype=tree.dtype)
    return root.to(out_dtype or tree.dtype)


def fold(parts: Tensor, tree: ReductionTree, out_dtype: torch.dtype | None = None) -> Tensor:
    """parts[P, ...], the roots of equal shards in rank order -> the root of `tree`, [...]."""
    tree.subtree(parts.shape[0])
    return balanced(list(parts), tree.joint).to(out_dtype or tree.dtype)


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up as eager torch rounds it -> [M, I] in their dtype."""
    return F.silu(gate) * up


def swiglu_backward(d_hidden: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Autograd's (d_gate, d_up) of swiglu_forward for the gradient d_hidden, all [M, I]."""
    gate, up = (x.detach().clone().requires_grad_() for x in (gate, up))
    with torch.enable_grad():
        swiglu_forward(gate, up).backward(d_hidden)
    return gate.grad, up.grad


def norm_gate(
    z: Tensor,
    bias: Tensor,
    gamma_x: Tensor,
    beta_x: Tensor,
    gamma_gate: Tensor,
    beta_gate: Tensor,
    eps: float = 1e-5,
) -> Tensor:
    """z [N, L, 2H], bias [L, 2H], gamma and beta [H] -> [N, L, H], rounded by each torch operator.

    In FP64 it is its own oracle.
    """
    u, g = (z + bias).chunk(2, dim=-1)
    value = F.layer_norm(u, gamma_x.shape, gamma_x, beta_x, eps)
    return value * F.silu(F.layer_norm(g, gamma_gate.shape, gamma_gate, beta_gate, eps))


def norm_gate_backward(d_h: Tensor, *given: Tensor, eps: float = 1e-5) -> tuple[Tensor, ...]:
    """Autograd's gradients of norm_gate for all six tensors given, for the gradient d_h."""
    given = tuple(x.detach().clone().requires_grad_() for x in given)
    with torch.enable_grad():
        norm_gate(*given, eps).backward(d_h)
    return tuple(x.grad for x in given)


def gate_up(x: Tensor, wg: Tensor, wu: Tensor) -> GateUp:
    """x[M, H] against the weights wg, wu [I, H]: two chains, each rounded to BF16, and SwiGLU."""
    gate, up = (gemm(x, w.t(), CHAIN, torch.bfloat16) for w in (wg, wu))
    return GateUp(gate, up, swiglu_forward(gate, up))


def mlp(x: Tensor, wg: Tensor, wu: Tensor, wd: Tensor, tree: ReductionTree) -> Tensor:
    """The bias-free Qwen3 FFN, x[M, H] -> BF16 [M, H]; `tree` is that of the down projection."""
    return gemm(gate_up(x, wg, wu).hidden, wd.t(), tree, torch.bfloat16)


def exact(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in FP64, for drift: [M, K] @ [K, N] -> FP64 [M, N]."""
    return a.double() @ b.double()


def exact_mlp(x: Tensor, wg: Tensor, wu: Tensor, wd: Tensor) -> Tensor:
    """The FFN of the same BF16 numbers in FP64, nothing rounded on the way."""
    hidden = F.silu(exact(x, wg.t())) * exact(x, wu.t())
    return hidden @ wd.double().t()


def _library_chain(a: Tensor, b: Tensor) -> Tensor:
    """The library's FP32 product of a leaf, [M, N], as one chain: padded until it splits nothing.

    Zeros behind the last k, and rows and columns that are cut off again, change no bit.
    """
    (m, k), n = a.shape, b.shape[1]
    least = LARGE if k <= LONG_K else LARGE_FOR_LONG_K
    rows, cols, depth = max(m, least), max(-(-n // 8) * 8, least), -(-k // 16) * 16
    left, right = a.new_zeros(rows, depth), b.new_zeros(depth, cols)
    left[:m, :k], right[:k, :n] = a, b
    return torch.mm(left, right, out_dtype=torch.float32)[:m, :n]
