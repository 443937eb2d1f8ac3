"""The A2A-FFN and the RankMixer block around it.

    ffn      Xlocal = A2A(x)             [B, T, D] of every rank -> [P*B, L, D]
             h = LN_x(U) * silu(LN_gate(G)),  [U G] = Xlocal[n, l] @ w1[l] + b1[l]
             y = A2A(h[n, l] @ wout[l] + bout[l])
    block    s = LN(mix(x) + x),  out = LN(ffn(s) + s)

mix cuts each token's D features into T heads and makes head t of all tokens the new token t, after
the RankMixer paper (2025); hence D % T == 0.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlkernel.collectives.comm import Comm
from rlkernel.collectives.groups import alone
from rlkernel.overlap import schedules
from rlkernel.overlap.compiled import compiled
from rlkernel.overlap.layout import BWD_MODES, FWD_MODES, GEMM_BACKENDS, check_available

ELEMENTWISE = ("norm-gate", "torch")


class A2AFFN(nn.Module):
    """Parameters of one rank's L = tokens / P tokens: w1 [L, D, 2H], b1 [L, 2H], wout [L, H, D],
    bout [L, D], norm_x and norm_gate over H.

    comm: a seam with axis "ep"; None: a lone rank. elementwise: "norm-gate" (one pass) or "torch"
    (the operators; `compiled` by torch.compile). chunks: how overlapping schedules cut the tokens.
    comm_scale: payloads padded to a multiple. The weights are drawn from `seed` plus the rank in
    the group.

    Raises ValueError for T % P != 0, dtypes other than FP32, BF16, FP16, and modes that are not
    here.
    """

    def __init__(
        self,
        dim: int,
        tokens: int,
        k: int,
        comm: Comm | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 42,
        elementwise: str = "norm-gate",
        compiled: bool = False,
        chunks: int = 4,
        comm_scale: int = 1,
        compute_scale: int = 1,
        fwd_mode: str = "dense_v2",
        bwd_mode: str = "dense_v2",
        gemm_backend: str = "bmm",
    ) -> None:
        super().__init__()
        check_available("fwd_mode", fwd_mode, FWD_MODES)
        check_available("bwd_mode", bwd_mode, BWD_MODES)
        check_available("gemm_backend", gemm_backend, GEMM_BACKENDS)
        check_available("elementwise", elementwise, ELEMENTWISE)
        self.fwd_mode, self.bwd_mode, self.gemm_backend = fwd_mode, bwd_mode, gemm_backend
        self.comm = comm or with_ep(alone())
        link = self.comm.links["ep"]
        self.ep_group = getattr(link.transport, "group", None)
        self.ep_index, self.ep_group_size = link.index, link.size
        self.elementwise, self.compiled = elementwise, compiled
        self.chunks, self.comm_scale = chunks, comm_scale
        if tokens % link.size:
            raise ValueError(f"T={tokens} does not divide over P={link.size}: T % P must be 0")
        local, hidden = tokens // link.size, dim * k * compute_scale
        device = self.comm.device
        random = torch.Generator(device).manual_seed(seed + link.index)

        def uniform(bound: float, *shape: int) -> nn.Parameter:
            drawn = torch.rand(shape, generator=random, device=device)
            return nn.Parameter(((2 * drawn - 1) * bound).to(dtype))

        self.w1 = uniform(he_bound(dim), local, dim, 2 * hidden)
        self.b1 = uniform(dim**-0.5, local, 2 * hidden)
        self.wout = uniform(he_bound(hidden), local, hidden, dim)
        self.bout = uniform(hidden**-0.5, local, dim)
        self.norm_x = nn.LayerNorm(hidden, device=device, dtype=dtype)
        self.norm_gate = nn.LayerNorm(hidden, device=device, dtype=dtype)

    def forward(self, inputs: Tensor, overlap: str = "none", comp_only: bool = False) -> Tensor:
        """inputs [B, T, D] -> [B, T, D] by one of the four schedules."""
        return schedules.forward(self, inputs, overlap, comp_only)

    def _forward_comp_only(self, inputs: Tensor) -> Tensor:
        """The rank's own P token slices through its own weights, and back; no communication."""
        return self.forward(inputs, "none", comp_only=True)


class RankMixer(nn.Module):
    """The block around an A2AFFN, [B, T, D] -> [B, T, D]. Raises ValueError unless D % T == 0."""

    def __init__(self, ffn: A2AFFN, tokens: int, dim: int) -> None:
        super().__init__()
        if dim % tokens:
            raise ValueError(f"D={dim} does not divide into T={tokens} heads: D % T must be 0")
        self.ffn = ffn
        made = {"device": ffn.w1.device, "dtype": ffn.w1.dtype}
        self.norm_mix, self.norm_out = (nn.LayerNorm(dim, **made) for _ in range(2))

    def forward(self, inputs: Tensor, overlap: str = "none", comp_only: bool = False) -> Tensor:
        mix, close = mixed, closed
        if self.ffn.compiled:
            mix, close = compiled(mixed, inputs), compiled(closed, inputs)
        s = mix(inputs, self.norm_mix.weight, self.norm_mix.bias)
        y = self.ffn(s, overlap, comp_only)
        return close(y, s, self.norm_out.weight, self.norm_out.bias)


def mixed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """LN(mix(x) + x): head t of every token becomes token t."""
    batch, tokens, dim = x.shape
    heads = x.reshape(batch, tokens, tokens, dim // tokens).transpose(1, 2)
    return F.layer_norm(heads.reshape(x.shape) + x, (dim,), weight, bias)


def closed(y: Tensor, s: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(y + s, (s.shape[-1],), weight, bias)


def he_bound(fan_in: int) -> float:
    """He et al. 2015: uniform in +-sqrt(6 / fan_in)."""
    return math.sqrt(6 / fan_in)


def with_ep(comm: Comm, axis: str = "world") -> Comm:
    """A grid's seam whose `axis` serves as the expert-parallel group as well."""
    other = comm.using()
    other.links = {**comm.links, "ep": comm.links[axis]}
    return other


def exact(ffn: A2AFFN, x: Tensor) -> Tensor:
    """What one rank computes for its tokens, in FP64: the oracle. x [N, L, D] -> [N, L, D]."""
    w1, b1, wout, bout, x = (v.double() for v in (ffn.w1, ffn.b1, ffn.wout, ffn.bout, x))
    u, g = (torch.einsum("nld,ldh->nlh", x, w1) + b1).chunk(2, -1)

    def norm(z: Tensor, ln: nn.LayerNorm) -> Tensor:
        centred = z - z.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + ln.eps).sqrt()
        return scaled * ln.weight.double() + ln.bias.double()

    gate = norm(g, ffn.norm_gate)
    h = norm(u, ffn.norm_x) * gate * torch.sigmoid(gate)
    return torch.einsum("nlh,lhd->nld", h, wout) + bout
