"""Deterministic GEMM and SwiGLU as operators: the same bits for any batch, chunk, padding or tile.

    det_gemm_fwd   C[M, N]  = A[M, K] @ B[K, N]       reduces over K, a weight axis
    det_gemm_da    dA[M, K] = dC[M, N] @ B[K, N].T    reduces over N, a weight axis
    det_gemm_db    dB[K, N] = A[M, K].T @ dC[M, N]    reduces over M, the tokens
    gate_up        H[M, I]  = silu(X @ Wg.T) * (X @ Wu.T), rounded where eager PyTorch rounds

    row_parallel_forward, column_parallel_dx, replicated_weight_dw: one of these and the sum over
    the ranks of a group (parallel_ops.py)

BF16 in, any strides, so a Hugging Face weight [out, in] goes in as `weight.t()` without a copy.
The contract fixes the bits (contract.py), the shape only the schedule (kernels/select.py). Weight
axes need a length that is a multiple of the contract's leaves; a token axis may have any.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.contract import ReductionTree
from rlkernel.ffn.parallel_ops import (
    Reduced,
    column_parallel_dx,
    replicated_weight_dw,
    row_parallel_forward,
)
from rlkernel.kernels import select

__all__ = [
    "Reduced",
    "column_parallel_dx",
    "det_gemm_da",
    "det_gemm_db",
    "det_gemm_fwd",
    "gate_up",
    "mlp_forward",
    "replicated_weight_dw",
    "row_parallel_forward",
    "swiglu_backward",
]

Contract = ReductionTree | str
DEFAULT = ReductionTree(8, "bf16")


def det_gemm_fwd(
    a: Tensor, b: Tensor, contract: Contract = DEFAULT, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """a[M, K] @ b[K, N] -> [M, N] in `out_dtype` (BF16 or FP32). Raises ValueError, TypeError."""
    tree = _tree(contract)
    _check_two(a, b)
    tree.check_axis("K", a.shape[1], 1, kind="weight")
    return _gemm(a, b, tree, out_dtype)


def det_gemm_da(
    dc: Tensor, b: Tensor, contract: Contract = DEFAULT, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Gradient of a: dc[M, N] @ b[K, N].T -> [M, K]. Raises ValueError, TypeError."""
    tree = _tree(contract)
    _check_two(dc, b)
    tree.check_axis("N", dc.shape[1], 1, kind="weight")
    return _gemm(dc, b.t(), tree, out_dtype)


def det_gemm_db(
    a: Tensor, dc: Tensor, contract: Contract = DEFAULT, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Gradient of b: a[M, K].T @ dc[M, N] -> [K, N]; leaves over M may be uneven or absent.

    Raises ValueError, TypeError.
    """
    _check_two(a, dc)
    return _gemm(a.t(), dc, _tree(contract), out_dtype)


def gate_up(
    x: Tensor, w_gate: Tensor, w_up: Tensor, *, save: bool = False
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """x[M, H] through both projections [I, H] and SwiGLU -> hidden [M, I], BF16.

    Both products are chains: H is never split. save: -> (hidden, gate, up), for the backward.
    """
    hidden, gate, up = select.gate_up(x, w_gate, w_up, save=save)
    return (hidden, gate, up) if save else hidden


def swiglu_backward(dh: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(dgate, dup, hidden) of hidden = silu(gate) * up, each [M, I], rounded as eager rounds."""
    both, hidden = select.swiglu_backward(dh, gate, up)
    return *both.chunk(2, 1), hidden


def mlp_forward(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, contract: Contract = DEFAULT
) -> Tensor:
    """The bias-free Qwen3 FFN on one device: x[M, H] -> [M, H], BF16.

    Weights as in Hugging Face: w_gate, w_up [I, H], w_down [H, I]. `contract` is that of the down
    projection, whose reduction over I is what tensor parallelism splits.
    """
    return det_gemm_fwd(gate_up(x, w_gate, w_up), w_down.t(), contract)


def _gemm(a: Tensor, b: Tensor, tree: ReductionTree, out_dtype: torch.dtype) -> Tensor:
    out = torch.empty(a.shape[0], b.shape[1], dtype=out_dtype, device=a.device)
    select.gemm(a, b, out, tree)
    return out


def _tree(contract: Contract) -> ReductionTree:
    return ReductionTree.parse(contract) if isinstance(contract, str) else contract


def _check_two(a: Tensor, b: Tensor) -> None:
    for name, x in (("first", a), ("second", b)):
        if x.ndim != 2:
            raise ValueError(
                f"the {name} operand has shape {tuple(x.shape)}: expected two axes; "
                "flatten batch and sequence into one token axis"
            )
