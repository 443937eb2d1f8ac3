"""A pre-RMSNorm SwiGLU feed-forward block: dense, and as its tensor-parallel twin.

    n = RMSNorm(x)      gate = n Wg'      up = n Wu'      y = x + (SiLU(gate) * up) Wd' + b

        Wg = [Wg_0]   Wu = [Wu_0]   Wd = [Wd_0 | Wd_1]     tokens: x [S, B, H]
             [Wg_1]        [Wu_1]                          rank: Wg_r, Wu_r [F/P, H], Wd_r [H, F/P]

    forward   n -> copy -> gate_r, up_r -> hidden_r -> partial_r -> reduce "down.forward" -> + b + x
    backward  dn <- all-reduce "gate_up.dx" <- dn_r <- dgate_r, dup_r <- dhidden_r <- dy

With sequence parallel a rank holds S/P positions outside the two linear layers: copy becomes gather
("gate_up.gather", backward "gate_up.dx"), reduce becomes scatter ("down.forward", backward
"down.gather"), and the gradients of the replicated norm weight and bias are partial sums over the
rank's own positions ("norm.dw", "down.db").

Partial sums travel in FP32 whatever the block's dtype, as the leaves of a tree that rounds to FP32;
what comes out of a linear layer is rounded to the block's dtype once, where the dense block rounds
it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkernel.collectives import regions
from rlkernel.collectives.comm import Comm
from rlkernel.reconstruct.step import Pair, flat, train_step

EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """S positions, B sequences, H hidden, F intermediate features."""

    seq: int
    batch: int
    hidden: int
    ffn: int


def initial(
    shape: Shape, seed: int, dtype: torch.dtype, std: float | None
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Weights, input and target from one seed, the same on every rank and for every P.

    std: of the weights; None scales each to 1/sqrt(fan-in), so that outputs keep an RMS near 1.
    Returns ({norm [H], gate_up [2, F, H], down [H, F], down_bias [H]}, x [S, B, H], target [S, B,
    H]).
    """
    g = torch.Generator().manual_seed(seed)
    h, f = shape.hidden, shape.ffn
    weights = {
        "norm": torch.ones(h),
        "gate_up": torch.randn(2, f, h, generator=g) * (std or h**-0.5),
        "down": torch.randn(h, f, generator=g) * (std or f**-0.5),
        "down_bias": torch.zeros(h),
    }
    x = torch.randn(shape.seq, shape.batch, h, generator=g)
    target = torch.randn(shape.seq, shape.batch, h, generator=g)
    return {name: w.to(dtype) for name, w in weights.items()}, x.to(dtype), target.to(dtype)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x / rms(x) * weight over the last dimension; statistics in FP32, as the official Qwen3 norm
    takes them.
    """
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def dense(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """The whole block on one process: x [S, B, H] -> [S, B, H]."""
    n = rms_norm(x, weights["norm"])
    gate, up = F.linear(n, weights["gate_up"][0]), F.linear(n, weights["gate_up"][1])
    return x + F.linear(F.silu(gate) * up, weights["down"], weights["down_bias"])


def shard(weights: dict[str, Tensor], comm: Comm) -> dict[str, Tensor]:
    """This rank's own copies: gate/up rows and down columns of its features, the rest
    replicated.
    """
    own = comm.grid.shard(weights["down"].shape[1], "tp", comm.rank, "ffn features F")
    local = {"gate_up": weights["gate_up"][:, own], "down": weights["down"][:, own]}
    return {name: local.get(name, w).clone() for name, w in weights.items()}


def parallel(
    local: dict[str, Tensor], x: Tensor, comm: Comm, *, sequence_parallel: bool = False
) -> Tensor:
    """The twin on one rank: x [S, B, H], or its own positions [S/P, B, H] under sequence parallel
    -> the same shape.
    """
    dtype = x.dtype
    norm, bias = local["norm"], local["down_bias"]
    if sequence_parallel:
        norm, bias = regions.copy(norm, comm, "norm.dw"), regions.copy(bias, comm, "down.db")
    n = rms_norm(x, norm).float()
    if sequence_parallel:
        n = regions.gather(n, comm, "gate_up.gather", "gate_up.dx")
    else:
        n = regions.copy(n, comm, "gate_up.dx")

    gate = F.linear(n, local["gate_up"][0].float()).to(dtype)  # [S, B, F/P]
    up = F.linear(n, local["gate_up"][1].float()).to(dtype)
    hidden = F.silu(gate) * up
    partial = F.linear(hidden.float(), local["down"].float())  # [S, B, H], one of P summands

    if sequence_parallel:
        total = regions.scatter(partial, comm, "down.forward", "down.gather")
    else:
        total = regions.reduce(partial, comm, "down.forward")
    return x + (total + bias).to(dtype)


@dataclass(frozen=True)
class Block:
    """A seeded block that both sides build for themselves: `std` as in `initial`."""

    shape: Shape
    seed: int
    dtype: torch.dtype
    std: float | None
    sequence_parallel: bool = False

    def train_both(self, comm: Comm, lr: float) -> dict[str, Pair]:
        """One step of the dense block and of this rank's twin -> each signal of the twin beside its
        dense slice.
        """
        weights, x, target = initial(self.shape, self.seed, self.dtype, self.std)
        weights = {name: w.to(comm.device) for name, w in weights.items()}
        x, target = x.to(comm.device), target.to(comm.device)
        whole = train_step(dense, weights, x, target, lr=lr, elements=x.numel())

        at = (
            comm.grid.shard(x.shape[0], "tp", comm.rank, "sequence S")
            if self.sequence_parallel
            else slice(None)
        )
        local = train_step(
            lambda w, x: parallel(w, x, comm, sequence_parallel=self.sequence_parallel),
            shard(weights, comm),
            x[at],
            target[at],
            lr=lr,
            elements=x.numel(),
        )
        loss = (
            local.loss
            if not self.sequence_parallel
            else comm.all_reduce(local.loss.reshape(1), "loss")[0]
        )

        tokens, ffn = x.shape[0] * x.shape[1], self.shape.ffn
        grads, updated = shard(whole.grads, comm), shard(whole.updated, comm)
        return {
            "output": Pair(local.output, whole.output[at], ffn),
            "loss": Pair(loss, whole.loss, x.numel()),
            "input_grad": Pair(local.input_grad, whole.input_grad[at], ffn),
            "norm_grad": Pair(local.grads["norm"], grads["norm"], tokens),
            "gate_up_grad": Pair(local.grads["gate_up"], grads["gate_up"], tokens),
            "down_grad": Pair(local.grads["down"], grads["down"], tokens),
            "down_bias_grad": Pair(local.grads["down_bias"], grads["down_bias"], tokens),
            "post_step": Pair(flat(local.updated), flat(updated), tokens),
        }

    def shapes(self, comm: Comm) -> dict[str, dict[str, list[int]]]:
        """What the dense block holds and what one rank of the twin holds, by name."""
        s, b, h, f = self.shape.seq, self.shape.batch, self.shape.hidden, self.shape.ffn
        own, rows = f // comm.grid.tp, s // comm.grid.tp if self.sequence_parallel else s
        return {
            "dense_shapes": {
                "x": [s, b, h],
                "norm_weight": [h],
                "w_gate_up": [2, f, h],
                "w_down": [h, f],
                "output": [s, b, h],
            },
            "rank_local_shapes": {
                "x": [rows, b, h],
                "gate_up_weight": [2, own, h],
                "gate": [s, b, own],
                "up": [s, b, own],
                "swiglu": [s, b, own],
                "down_weight": [h, own],
                "partial_output": [s, b, h],
                "output": [rows, b, h],
            },
        }
