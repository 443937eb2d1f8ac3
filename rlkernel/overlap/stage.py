"""What stands between the two GEMMs: bias, two LayerNorms, SiLU gate; [l, N, 2H] -> [l, N, H].

    u, g = split(z + b1)        h = LN_x(u) * silu(LN_gate(g))        rows are independent

`Fused` is the one pass of kernels/norm_gate.py, whose backward goes by chunks of tokens too: each
fills its part of the sums, which are added once. `Torch` runs the plain operators, compiled or not:
what another ffn's own sequential path does. Their gradients of the norms sum over all rows at once,
so that backward takes them together, however the forward was cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkernel.kernels import norm_gate
from rlkernel.kernels.norm_gate_backward import SUMS
from rlkernel.overlap.compiled import compiled

NORM_GATE = "norm-gate"
VECTORS = 64  # elements of a step of torch's loops on any CPU: two vectors of 512 bit, BF16


@dataclass(frozen=True)
class Fused:
    """One pass over z. norms, here and below: gamma and beta of norm_x, then of norm_gate, [H]."""

    eps: float
    by_chunk = True
    name = "norm-gate"

    def forward(
        self, z: Tensor, bias: Tensor, norms: Sequence[Tensor], training: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(h, what backward needs of the chunk)."""
        tokens, rows, width = z.shape
        stats = z.new_empty(4, rows, tokens, dtype=torch.float32) if training else None
        h = z.new_empty(tokens, rows, width // 2)
        z, out = z.transpose(0, 1), h.transpose(0, 1)
        norm_gate.norm_gate_forward(z, bias, tuple(norms), self.eps, out, stats)
        return h, stats

    def backward(
        self, dh: Tensor, z: Tensor, bias: Tensor, norms: Sequence[Tensor], stats: Tensor,
        dz: Tensor, sums: Tensor,
    ) -> None:  # fmt: skip
        """One chunk: fills its dz and its tokens' part of `sums`."""
        dh, z, dz = (x.transpose(0, 1) for x in (dh, z, dz))
        norm_gate.norm_gate_backward(dh, z, bias, tuple(norms), stats, dz, sums)

    def unit(self, row: int, device: torch.device) -> int:
        """Tokens that a cut must keep together, of `row` elements of h each: any."""
        return 1

    def sums(self, tokens: int, width: int, device: torch.device) -> Tensor:
        return torch.empty(tokens, SUMS, width, device=device)

    def finish(self, sums: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """(db1, and the four gradients of the norms)."""
        return norm_gate.parameter_gradients(sums, dtype)


@dataclass(frozen=True)
class Torch:
    """The operators one after the other, by torch.compile where `compiled`. by_token: rows lie in
    memory as [L, N], else on a CPU as [N, L], as the one pass has them there (order.py).
    """

    eps: tuple[float, float]
    compiled: bool = False
    by_token: bool = False
    by_chunk = False

    @property
    def name(self) -> str:
        return "torch, compiled" if self.compiled else "torch, eager"

    def forward(
        self, z: Tensor, bias: Tensor, norms: Sequence[Tensor], training: bool
    ) -> tuple[Tensor, None]:
        return self._run(z, bias, *norms), None

    def unit(self, row: int, device: torch.device) -> int:
        """On a CPU torch takes the last elements of a tensor, short of some vectors, one by one,
        and its exp has other bits there. So chunks end where vectors do, as the whole would.
        """
        return VECTORS // math.gcd(VECTORS, row) if device.type == "cpu" else 1

    def backward_whole(
        self, dh: Tensor, z: Tensor, bias: Tensor, norms: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """All rows: (dz, db1, and the four gradients of the norms)."""
        leaves = [x.detach().requires_grad_() for x in (z, bias, *norms)]
        with torch.enable_grad():
            h = self._run(*leaves)
        return torch.autograd.grad(h, leaves, dh)

    def _run(self, z: Tensor, bias: Tensor, *norms: Tensor) -> Tensor:
        if self.compiled:
            return compiled(_eager, z)(z, bias.unsqueeze(1), *norms, *self.eps)
        if z.device.type == "cpu" and not self.by_token:
            return _eager(z.transpose(0, 1), bias, *norms, *self.eps).transpose(0, 1)
        return _eager(z, bias.unsqueeze(1), *norms, *self.eps)


Stage = Fused | Torch


def stage_of(ffn) -> Stage:
    """Our own layer says which (`elementwise`, `compiled`). An ffn that does not gets the plain
    operators, or the one pass where that is proven to have their bits on its shape.
    """
    eps, w1 = (ffn.norm_x.eps, ffn.norm_gate.eps), ffn.w1
    asked, compiles = getattr(ffn, "elementwise", None), bool(getattr(ffn, "compiled", False))
    plain = Torch(eps, compiles and asked != NORM_GATE)
    if w1.device.type == "cpu" or eps[0] != eps[1] or asked not in (NORM_GATE, None):
        return plain
    local, _, wide = w1.shape
    if asked == NORM_GATE or (
        not compiles and norm_gate.proven_equal(local, wide // 2, w1.dtype, w1.device, eps[0])
    ):
        return Fused(eps[0])
    return plain


def _eager(z, bias, gamma_x, beta_x, gamma_gate, beta_gate, eps_x, eps_gate) -> Tensor:
    u, g = (z + bias).chunk(2, dim=-1)
    width = gamma_x.shape
    left = F.layer_norm(u, width, gamma_x, beta_x, eps_x)
    return left * F.silu(F.layer_norm(g, width, gamma_gate, beta_gate, eps_gate))
