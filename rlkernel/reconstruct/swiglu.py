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
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkernel.collectives import regions
from rlkernel.collectives.comm import Comm
from rlkernel.reconstruct.twin import Block, Weights, enter, leave, rms_norm


@dataclass(frozen=True)
class SwiGLU(Block):
    """S positions, B sequences, H hidden, F intermediate features. bias_std: of the initial
    bias.
    """

    seq: int
    batch: int
    hidden: int
    ffn: int
    bias_std: float = 0.0

    GRADIENTS: ClassVar = {
        "norm_grad": ("norm",),
        "gate_up_grad": ("gate_up",),
        "down_grad": ("down",),
        "down_bias_grad": ("down_bias",),
    }

    def tokens(self) -> tuple[int, int, int]:
        return self.seq, self.batch, self.hidden

    def contraction(self) -> int:
        return self.ffn

    def initial(self) -> Weights:
        """norm [H], gate_up [2, F, H], down [H, F], down_bias [H]."""
        g, h, f = self.generator(), self.hidden, self.ffn
        return {
            "norm": torch.ones(h),
            "gate_up": torch.randn(2, f, h, generator=g) * (self.std or h**-0.5),
            "down": torch.randn(h, f, generator=g) * (self.std or f**-0.5),
            "down_bias": torch.randn(h, generator=g) * self.bias_std,
        }

    def dense(self, weights: Weights, x: Tensor) -> Tensor:
        n = rms_norm(x, weights["norm"])
        gate, up = F.linear(n, weights["gate_up"][0]), F.linear(n, weights["gate_up"][1])
        return x + F.linear(F.silu(gate) * up, weights["down"], weights["down_bias"])

    def shard(self, weights: Weights, comm: Comm) -> Weights:
        own = comm.grid.shard(self.ffn, "tp", comm.rank, "ffn features F")
        local = {"gate_up": weights["gate_up"][:, own], "down": weights["down"][:, own]}
        return {name: local.get(name, w).clone() for name, w in weights.items()}

    def parallel(self, local: Weights, x: Tensor, comm: Comm) -> Tensor:
        dtype, split = x.dtype, self.sequence_parallel
        norm, bias = local["norm"], local["down_bias"]
        if split:
            norm, bias = regions.copy(norm, comm, "norm.dw"), regions.copy(bias, comm, "down.db")
        n = enter(rms_norm(x, norm), comm, "gate_up", split)
        gate = F.linear(n, local["gate_up"][0].float()).to(dtype)  # [S, B, F/P]
        up = F.linear(n, local["gate_up"][1].float()).to(dtype)
        hidden = F.silu(gate) * up
        partial = F.linear(hidden.float(), local["down"].float())  # [S, B, H], one of P summands
        return x + (leave(partial, comm, "down", split) + bias).to(dtype)

    def shapes(self, comm: Comm) -> dict[str, dict[str, list[int]]]:
        s, b, h, f = self.seq, self.batch, self.hidden, self.ffn
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
