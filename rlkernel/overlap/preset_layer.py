"""The whole layer on one rank with nothing sent, and the pass between its GEMMs beside a copy.

Every sample is of one of these:

    none                the library's products, what is packed and unpacked, no exchange
    fused, flags set    the kernels of a live call; results of other ranks are stored here
    fused, local        the same GEMMs without flags, on the own slices

    forward, backward   of the pass; 3 H elements a row: z read, h written; 5 H: z, dh read, dz
                        written
    copy                of z, 4 H elements a row, in the same rounds
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from rlkernel.collectives.comm import Comm
from rlkernel.compare import bit_report
from rlkernel.kernels import reference
from rlkernel.kernels.norm_gate import norm_gate_forward, parameter_gradients
from rlkernel.overlap import fused_kernel, pipeline
from rlkernel.overlap.chunks import Messages
from rlkernel.overlap.fused_kernel import Fused
from rlkernel.overlap.layout import Layout
from rlkernel.overlap.preset import OWN, Preset, lone, rows_of
from rlkernel.overlap.stage import Fused as Stage
from rlkernel.overlap.stage import stage_of

Work = Callable[[], object]
NONE, SET, LOCAL = "none", "fused, flags set", "fused, local"
MOVED = {"copy": 4, "forward": 3, "backward": 5}  # elements of a row, in units of H
EPS = 1e-5


class Parameters(nn.Module):
    """Those of one rank's tokens, all of them random: ones and zeros would hide a mistake."""

    elementwise = "norm-gate"

    def __init__(self, at: Layout, random: torch.Generator) -> None:
        super().__init__()
        made = {"device": random.device, "dtype": torch.bfloat16}

        def drawn(scale: float, *shape: int) -> nn.Parameter:
            normal = torch.randn(shape, generator=random, device=random.device)
            return nn.Parameter((scale * normal).to(torch.bfloat16))

        self.w1 = drawn(at.dim**-0.5, at.local, at.dim, 2 * at.hidden)
        self.b1 = drawn(0.1, at.local, 2 * at.hidden)
        self.wout = drawn(at.hidden**-0.5, at.local, at.hidden, at.dim)
        self.bout = drawn(0.1, at.local, at.dim)
        self.norm_x, self.norm_gate = (nn.LayerNorm(at.hidden, **made) for _ in range(2))
        for norm in (self.norm_x, self.norm_gate):
            norm.weight, norm.bias = drawn(1, at.hidden), drawn(1, at.hidden)


class Layers:
    """The layer by the three, BF16, on rank 0 of P."""

    def __init__(self, at: Layout, comm: Comm, seed: int) -> None:
        self.at, seam, dtype = at, lone(comm, at.ranks), torch.bfloat16
        random = torch.Generator(comm.device).manual_seed(seed)
        self.ffn = Parameters(at, random)
        self.stage = stage_of(self.ffn)
        self.x, self.dy = (
            torch.randn(at.batch, at.tokens, at.dim, generator=random, device=comm.device).to(dtype)
            for _ in range(2)
        )
        self.memory = Preset(at, dtype, comm.device)
        made = partial(Fused, seam, at, self.stage, dtype)
        self.ways = {
            NONE: partial(self._in_order, seam),
            SET: partial(self._through, made(memory=self.memory)),
            LOCAL: partial(self._through, made(local=True)),
        }

    def _in_order(self, seam: Comm, x: Tensor) -> Tensor:
        """`none`, as overlap/sequential.py, on the own slices."""
        at, whole = self.at, self.at.slices(1)

        def route(direction: str, slices: tuple[slice, ...]) -> Messages:
            return Messages(seam, at, slices, x, direction, name=NONE, silent=True, beside=False)

        return pipeline.run(self.ffn, x, pipeline.Plan(at, whole, whole, self.stage, route))

    def _through(self, fused: Fused, x: Tensor) -> Tensor:
        return fused_kernel.run(self.ffn, x, fused)

    def forward(self, way: str) -> Tensor:
        with torch.no_grad():
            return self.ways[way](self.x)

    def training(self, way: str) -> dict[str, Tensor]:
        """Output and every gradient by name."""
        named = {"input": self.x.detach().requires_grad_(), **dict(self.ffn.named_parameters())}
        y = self.ways[way](named["input"])
        grads = torch.autograd.grad(y, list(named.values()), self.dy)
        return {"output": y.detach(), **dict(zip(named, grads))}

    def variants(self, part: str) -> dict[str, Work]:
        return {way: partial(getattr(self, part), way) for way in self.ways}

    def differ(self, way: str, wanted: dict[str, Tensor]) -> dict[str, int]:
        """Name -> elements whose bits are not those of `none`, of output and gradients."""
        memory, at = self.memory, self.at
        memory.calls = 0
        for which, rows in ((1, self.x), (0, self.dy)):  # as two calls take them
            memory.fill(which, rows_of(rows, at))
        got = self.training(way)
        if way == SET:  # what others get lies in their outputs, and backward writes last
            got["input"] = self._gathered(got["input"])
            memory.calls = 0
            got["output"] = self._gathered(self.forward(way))
        return {name: bit_report(got[name], right).mismatches for name, right in wanted.items()}

    def _gathered(self, own: Tensor) -> Tensor:
        """[B, T, D] of `none` out of what was stored for each rank."""
        at, outs = self.at, self.memory.outs.clone()
        outs[OWN] = own
        mine = outs[:, :, OWN * at.local : (OWN + 1) * at.local]
        return mine.transpose(0, 1).reshape(own.shape)


class Pass:
    """norm_gate forward and backward at the layer's size, and a copy of as large a z."""

    def __init__(self, at: Layout, device: torch.device, seed: int) -> None:
        random = torch.Generator(device).manual_seed(seed)
        draw = partial(torch.randn, generator=random, device=device, dtype=torch.bfloat16)
        self.at, self.stage = at, Stage(EPS)
        self.z, self.b1 = draw(at.local, at.rows, 2 * at.hidden), draw(at.local, 2 * at.hidden)
        self.dh, self.norms = draw(at.local, at.rows, at.hidden), [draw(at.hidden)] * 4
        self.h, self.dz = torch.empty_like(self.dh), torch.empty_like(self.z)
        self.sums = self.stage.sums(at.local, at.hidden, device)
        _, self.stats = self.stage.forward(self.z, self.b1, self.norms, True)

    def variants(self) -> dict[str, Work]:
        return {
            "copy": lambda: self.dz.copy_(self.z),
            "forward": self._forward,
            "backward": self._backward,
        }

    def _forward(self) -> Tensor:
        z, h = self.z.transpose(0, 1), self.h.transpose(0, 1)
        norm_gate_forward(z, self.b1, tuple(self.norms), EPS, h)
        return self.h

    def _backward(self) -> Tensor:
        args = (self.dh, self.z, self.b1, self.norms, self.stats, self.dz, self.sums)
        self.stage.backward(*args)
        return self.dz

    def differ(self) -> dict[str, int]:
        """Name -> elements that two calls leave different, or unwritten in a poisoned buffer."""
        found = {}
        for name, work in self.variants().items():
            first = work().clone()
            for out in (self.h, self.dz):
                out.fill_(torch.nan)
            again = work()
            found[name] = bit_report(again, first).mismatches + int(again.isnan().sum())
        return found

    def error(self) -> float:
        """The backward of two tokens against FP64: the largest relative Frobenius error of d_z and
        of the gradients of bias, gammas and betas.
        """
        two = slice(0, 2)
        self._backward()
        given = (self.dh[two].transpose(0, 1), self.z[two].transpose(0, 1), self.b1[two])
        exact = reference.norm_gate_backward(*(x.double() for x in (*given, *self.norms)), eps=EPS)
        got = (self.dz[two].transpose(0, 1), *parameter_gradients(self.sums[two], self.dz.dtype))
        return max(float((x.double() - y).norm() / y.norm()) for x, y in zip(got, exact))

    def bytes_of(self, name: str) -> int:
        return MOVED[name] * self.at.hidden * self.at.local * self.at.rows * self.z.element_size()
