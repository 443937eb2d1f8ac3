"""An A2A-FFN as somebody else would write it: eager torch, nothing of this package."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


class Exchange(torch.autograd.Function):
    """Slices of one dimension go out, in rank order; what comes is joined along another."""

    @staticmethod
    def forward(ctx, x, split, join, group, size):
        ctx.way = (split, join, group, size)
        if size == 1:
            return x.clone()
        parts = torch.stack(x.chunk(size, split)).contiguous()
        came = torch.empty_like(parts)
        dist.all_to_all_single(came, parts, group=group)
        return torch.cat(came.unbind(), join)

    @staticmethod
    def backward(ctx, grad):
        split, join, group, size = ctx.way
        return Exchange.apply(grad, join, split, group, size), None, None, None, None


class ForeignFFN(nn.Module):
    fwd_mode = bwd_mode = "dense_v2"
    gemm_backend = "bmm"

    def __init__(self, tokens, dim, k, group=None, dtype=torch.float32, seed=0, by_token=False):
        super().__init__()
        self.by_token = by_token  # what lies between the GEMMs is [L, N, ...], else [N, L, ...]
        size = dist.get_world_size(group) if dist.is_initialized() and group else 1
        rank = dist.get_rank(group) if size > 1 else 0
        self.ep_group, self.ep_index, self.ep_group_size = group, rank, size
        random = torch.Generator().manual_seed(seed + rank)
        local, wide = tokens // size, dim * k

        def drawn(*shape, scale=1.0):
            return nn.Parameter((torch.randn(shape, generator=random) * scale).to(dtype))

        self.w1, self.b1 = drawn(local, dim, 2 * wide, scale=dim**-0.5), drawn(local, 2 * wide)
        self.wout, self.bout = drawn(local, wide, dim, scale=wide**-0.5), drawn(local, dim)
        self.norm_x, self.norm_gate = (nn.LayerNorm(wide, dtype=dtype) for _ in range(2))
        for norm in (self.norm_x, self.norm_gate):
            norm.weight, norm.bias = drawn(wide), drawn(wide)

    def forward(self, inputs, overlap="none", comp_only=False):
        assert overlap == "none", "this one has no other"
        if comp_only:
            batch, size = inputs.shape[0], self.ep_group_size
            y = self.compute(torch.cat(inputs.chunk(size, 1), 0))
            return torch.cat(y.split(batch, 0), 1)
        x = Exchange.apply(inputs, 1, 0, self.ep_group, self.ep_group_size)
        return Exchange.apply(self.compute(x), 0, 1, self.ep_group, self.ep_group_size)

    def compute(self, x):
        if self.by_token:
            u, g = (torch.bmm(x.transpose(0, 1), self.w1) + self.b1.unsqueeze(1)).chunk(2, -1)
            h = self.norm_x(u) * nn.functional.silu(self.norm_gate(g))
            return (torch.bmm(h, self.wout) + self.bout.unsqueeze(1)).transpose(0, 1)
        z = torch.bmm(x.transpose(0, 1), self.w1).transpose(0, 1) + self.b1
        u, g = z.chunk(2, -1)
        h = self.norm_x(u) * nn.functional.silu(self.norm_gate(g))
        return torch.bmm(h.transpose(0, 1), self.wout).transpose(0, 1) + self.bout
