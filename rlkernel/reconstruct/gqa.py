"""A pre-RMSNorm causal grouped-query attention block with RoPE: dense, and as its twin.

    n = RMSNorm(x)   q, k, v = n Wq', n Wk', n Wv'   c = attention(RoPE(q), RoPE(k), v)
    y = x + c Wo' (+ b)

A key/value head and the query heads that read it stay on one rank: rank r of P owns query heads
[r Hq/P, (r+1) Hq/P), the key/value heads that they read, and the matching columns of Wo.

    P <= KV heads     4 query / 2 KV heads, P = 2    rank 0: q0 q1 k0 v0     rank 1: q2 q3 k1 v1
    P >  KV heads     4 query / 2 KV heads, P = 4    rank 0: q0 k0  rank 1: q1 k0  rank 2: q2 k1 ...

In the second layout P / KV neighbours hold replicas of one KV head, each sees the gradient of its
own query heads only, and the replicas' dWk, dWv are summed over those neighbours ("kv.dw").

    forward   n -> copy -> q_r, k_r, v_r -> attention -> partial_r -> reduce "out.forward" -> + x
    backward  dn <- all-reduce "qkv.dx" <- dn_r <- dq_r, dk_r, dv_r <- dcontext_r <- dy

An output bias b, where there is one, is added once, behind the reduction. With sequence parallel
the gradients of norm weight and bias are summed over the ranks' positions ("norm.dw", "out.db").
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

ROPE_BASE = 10_000.0


@dataclass(frozen=True)
class GQA(Block):
    """S positions, B sequences, H hidden, Hq query heads over Hkv key/value heads of D features.
    bias_std: of the initial output bias; 0 for a block that has none.
    """

    seq: int
    batch: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    bias_std: float = 0.0

    GRADIENTS: ClassVar = {"parameter_grad": ("norm", "wq", "wk", "wv", "wo", "out_bias")}

    def tokens(self) -> tuple[int, int, int]:
        return self.seq, self.batch, self.hidden

    def contraction(self) -> int:
        return self.query_heads * self.head_dim

    def initial(self) -> Weights:
        """norm [H], wq [Hq D, H], wk and wv [Hkv D, H], wo [H, Hq D], with a bias out_bias [H]."""
        g, h, wide = self.generator(), self.hidden, self.query_heads * self.head_dim
        narrow, scale = self.kv_heads * self.head_dim, self.std or h**-0.5
        weights = {
            "norm": torch.ones(h),
            "wq": torch.randn(wide, h, generator=g) * scale,
            "wk": torch.randn(narrow, h, generator=g) * scale,
            "wv": torch.randn(narrow, h, generator=g) * scale,
            "wo": torch.randn(h, wide, generator=g) * (self.std or wide**-0.5),
        }
        if self.bias_std:
            weights["out_bias"] = torch.randn(h, generator=g) * self.bias_std
        return weights

    def dense(self, weights: Weights, x: Tensor) -> Tensor:
        n = rms_norm(x, weights["norm"])
        heads = (self._heads(F.linear(n, weights[name])) for name in ("wq", "wk", "wv"))
        return x + F.linear(attend(*heads), weights["wo"], weights.get("out_bias"))

    def shard(self, weights: Weights, comm: Comm) -> Weights:
        query, kv = self.owned(comm.grid.tp, comm.grid.coords(comm.rank).tp)
        rows, kv_rows = self._features(query), self._features(kv)
        local = {
            "wq": weights["wq"][rows],
            "wk": weights["wk"][kv_rows],
            "wv": weights["wv"][kv_rows],
            "wo": weights["wo"][:, rows],
        }
        return {name: local.get(name, w).clone() for name, w in weights.items()}

    def parallel(self, local: Weights, x: Tensor, comm: Comm) -> Tensor:
        dtype, split, replicas = x.dtype, self.sequence_parallel, self.replicas(comm.grid.tp)
        norm, wk, wv, bias = local["norm"], local["wk"], local["wv"], local.get("out_bias")
        if split:
            norm = regions.copy(norm, comm, "norm.dw")
        if split and bias is not None:
            bias = regions.copy(bias, comm, "out.db")
        if replicas > 1:
            wk, wv = (regions.copy(w.float(), comm, "kv.dw", span=replicas) for w in (wk, wv))
        n = enter(rms_norm(x, norm), comm, "qkv", split)
        heads = (self._heads(F.linear(n, w.float()).to(dtype)) for w in (local["wq"], wk, wv))
        context = attend(*heads)  # [S, B, Hq/P D]
        partial = F.linear(context.float(), local["wo"].float())  # [S, B, H], one of P summands
        y = leave(partial, comm, "out", split)
        return x + (y if bias is None else y + bias).to(dtype)

    def replicas(self, tp: int) -> int:
        """How many neighbouring ranks hold the same key/value head."""
        return max(1, tp // self.kv_heads)

    def owned(self, tp: int, rank: int) -> tuple[range, range]:
        """(query heads, KV heads) of one of `tp` ranks. Raises ValueError beyond the heads."""
        wide, narrow = max(tp, self.kv_heads), min(tp, self.kv_heads)
        if tp > self.query_heads or self.query_heads % tp or wide % narrow:
            raise ValueError(
                f"tp={tp} cannot split {self.query_heads} query over {self.kv_heads} KV heads: "
                f"whole query/KV groups stay on a rank, so tp must divide the query heads, and "
                f"tp and KV heads must divide one another"
            )
        each, group = self.query_heads // tp, self.query_heads // self.kv_heads
        query = range(rank * each, (rank + 1) * each)
        return query, range(query[0] // group, query[-1] // group + 1)

    def shapes(self, comm: Comm) -> dict[str, dict[str, list[int]]]:
        s, b, h, d = self.seq, self.batch, self.hidden, self.head_dim
        query, kv = self.owned(comm.grid.tp, comm.grid.coords(comm.rank).tp)
        rows = s // comm.grid.tp if self.sequence_parallel else s
        return {
            "dense_shapes": {
                "x": [s, b, h],
                "q": [s, b, self.query_heads, d],
                "k_v": [s, b, self.kv_heads, d],
                "context": [s, b, self.query_heads, d],
                "output": [s, b, h],
            },
            "rank_local_shapes": {
                "x": [rows, b, h],
                "q": [s, b, len(query), d],
                "k_v": [s, b, len(kv), d],
                "context": [s, b, len(query), d],
                "wo": [h, len(query) * d],
                "partial_output": [s, b, h],
                "output": [rows, b, h],
            },
        }

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))  # [S, B, heads, D]

    def _features(self, heads: range) -> slice:
        return slice(heads[0] * self.head_dim, (heads[-1] + 1) * self.head_dim)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of q [S, B, Hq, D] over k, v [S, B, Hkv, D] -> [S, B, Hq D].

    Query head i reads KV head i // (Hq / Hkv). RoPE on q and k; scores and softmax in FP32.
    """
    dtype, group = q.dtype, q.shape[2] // k.shape[2]
    q, k, v = rope(q).float(), rope(k).float(), v.float()
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) * q.shape[-1] ** -0.5
    later = torch.ones(q.shape[0], q.shape[0], dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    return torch.einsum("bhst,tbhd->sbhd", weights, v).flatten(2).to(dtype)


def rope(x: Tensor) -> Tensor:
    """Rotate the halves of each head of x [S, B, heads, D] by position; angles in FP32."""
    positions, half = x.shape[0], x.shape[-1] // 2
    frequency = ROPE_BASE ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(positions, device=x.device)[:, None] * frequency  # [S, D/2]
    cos, sin = (f(angle)[:, None, None] for f in (torch.cos, torch.sin))
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1).to(x.dtype)
