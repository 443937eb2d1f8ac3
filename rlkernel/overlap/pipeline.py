"""The computation itself, once: which chunks there are and who moves them is a parameter.

    forward     for each chunk of tokens as it arrives:  GEMM1, stage, GEMM2 + bias, send
    backward    for each chunk of dY as it arrives:      dH = dY @ wout^T, stage backward,
                                                         dX = dZ @ w1^T, send
                while those travel:                      dwout, dbout, dw1

Tokens are independent of each other in everything but the norms' gradients, so a chunk is a run of
tokens with all N rows, and no chunking changes an order of additions. (A stage that cannot add the
norms' gradients up by chunks goes backward over all rows together, before the first dX.) Rows are
independent too in GEMM1 and dH, which are taken for those that have come; all else waits for the
chunk. What either may change is the kernel that a library picks; ladder.py looks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rlkernel.overlap import spared
from rlkernel.overlap import stage as stages
from rlkernel.overlap.layout import Layout
from rlkernel.overlap.timeline import span


class Route(Protocol):
    """One use of the exchange and of its inverse, in chunks of tokens."""

    def dispatch(self, x: Tensor) -> Iterator[tuple[int, slice, Tensor]]:
        """x [B, T, D] of this rank -> (i, which of the N rows have come, chunk i [N, l, D]), in the
        order of computing: once for a chunk, or several times until all of its rows are there.
        """
        ...

    def keep(self, parts: dict[int, Tensor]) -> dict[int, Tensor]:
        """The chunks, safe from later calls."""
        ...

    def outgoing(self, i: int) -> Tensor:
        """Where the results [N, l, D] of chunk i go before they are sent."""
        ...

    def send(self, i: int) -> None: ...

    def collect(self) -> Tensor:
        """[B, T, D] once all chunks of all ranks are there."""
        ...

    def leave(self) -> None:
        """Instead of `collect` where nothing is sent back."""
        ...


@dataclass(frozen=True)
class Plan:
    """slices, backward_slices: the chunks either way. open: makes the route of a pass. spared: SMs
    that the library's products leave to messages.
    """

    layout: Layout
    slices: tuple[slice, ...]
    backward_slices: tuple[slice, ...]
    stage: stages.Stage
    open: Callable[[str, tuple[slice, ...]], Route]
    spared: int = 0


def run(ffn, inputs: Tensor, plan: Plan) -> Tensor:
    """inputs [B, T, D] -> [B, T, D]; autograd reaches the inputs and all parameters."""
    norms = (ffn.norm_x.weight, ffn.norm_x.bias, ffn.norm_gate.weight, ffn.norm_gate.bias)
    tensors = (inputs, ffn.w1, ffn.b1, ffn.wout, ffn.bout, *norms)
    training = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    with spared.sms(plan.spared):
        return _Layer.apply(*tensors, plan, training)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w1, b1, wout, bout, *rest):
        *norms, plan, training = rest
        at, stage, slices = plan.layout, plan.stage, plan.slices
        route, parts, hs, stats = plan.open("forward", slices), {}, {}, {}
        z = x.new_empty(at.local, at.rows, 2 * at.hidden)
        complete = _Counted(at.rows)
        for i, rows, part in route.dispatch(x.contiguous()):
            tokens = slices[i]
            with span(f"comp/gemm1 {i}"):
                torch.bmm(part[rows].transpose(0, 1), w1[tokens], out=z[tokens, rows])
            if not complete(i, rows):
                continue
            with span(f"comp/stage {i}"):
                h, stats[i] = stage.forward(z[tokens], b1[tokens], norms, training)
            with span(f"comp/gemm2 {i}"):
                y = torch.bmm(h, wout[tokens])
            with span(f"comp/bias {i}"):
                torch.add(y.transpose(0, 1), bout[tokens], out=route.outgoing(i))
            route.send(i)
            parts[i], hs[i] = part, h
        if training:
            ctx.plan, ctx.parts, ctx.hs, ctx.stats = plan, route.keep(parts), hs, stats
            ctx.save_for_backward(z, w1, b1, wout, *norms)
        return route.collect()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        z, w1, b1, wout, *norms = ctx.saved_tensors
        with spared.sms(ctx.plan.spared):  # autograd's thread, with a library handle of its own
            return *_Backward(ctx, dy, z, w1, b1, wout, norms).run(), None, None


class _Backward:
    """One backward. z, dz [L, N, 2H]; dh [L, N, H]; parts, dys, hs: a chunk each."""

    def __init__(self, ctx, dy, z, w1, b1, wout, norms) -> None:
        self.plan, self.dy, self.learns_x = ctx.plan, dy, ctx.needs_input_grad[0]
        self.z, self.w1, self.b1, self.wout, self.norms = z, w1, b1, wout, norms
        had, self.slices = ctx.plan.slices, ctx.plan.backward_slices
        self.parts = _cut(ctx.parts, 1, had, self.slices)
        self.hs = _cut(ctx.hs, 0, had, self.slices)
        self.stats = ctx.stats
        if self.plan.stage.by_chunk and had != self.slices:
            cut = _cut(ctx.stats, 2, had, self.slices)
            self.stats = {i: stats.contiguous() for i, stats in cut.items()}
        self.route = self.plan.open("backward", self.slices)
        self.dz, self.dys = torch.empty_like(z), {}

    def run(self) -> tuple[Tensor | None, ...]:
        """(dx, dw1, db1, dwout, dbout, and the four gradients of the norms)."""
        at, stage = self.plan.layout, self.plan.stage
        by_chunk = stage.by_chunk
        dh = self.z.new_empty(at.local, at.rows, at.hidden)
        sums = stage.sums(at.local, at.hidden, self.z.device) if by_chunk else None
        complete = _Counted(at.rows)
        for i, rows, part in self.route.dispatch(self.dy.contiguous()):
            tokens, self.dys[i] = self.slices[i], part.transpose(0, 1)
            with span(f"comp/gemm dH {i}"):
                came, weights = self.dys[i][:, rows], self.wout[tokens].transpose(1, 2)
                torch.bmm(came, weights, out=dh[tokens, rows])
            if not complete(i, rows):
                continue
            if by_chunk:
                with span(f"comp/stage backward {i}"):
                    stage.backward(dh[tokens], self.z[tokens], self.b1[tokens], self.norms,
                                   self.stats[i], self.dz[tokens], sums[tokens])  # fmt: skip
                self._send_dx(i)
        if not by_chunk:
            with span("comp/stage backward"):
                whole = stage.backward_whole(dh, self.z, self.b1, self.norms)
            self.dz = whole[0]
            for i in range(len(self.slices)):
                self._send_dx(i)
        dw1, dwout, dbout = self._weights()
        db1, *dnorms = stage.finish(sums, self.z.dtype) if by_chunk else whole[1:]
        dx = self.route.collect() if self.learns_x else self.route.leave()
        return dx, dw1, db1, dwout, dbout, *dnorms

    def _send_dx(self, i: int) -> None:
        if not self.learns_x:
            return
        tokens = self.slices[i]
        with span(f"comp/gemm dX {i}"):
            dx = self.route.outgoing(i).transpose(0, 1)
            torch.bmm(self.dz[tokens], self.w1[tokens].transpose(1, 2), out=dx)
        self.route.send(i)

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """What needs nobody, while dX travels."""
        dw1, dwout = torch.empty_like(self.w1), torch.empty_like(self.wout)
        dbout = self.z.new_empty(self.plan.layout.local, self.plan.layout.dim)
        for i, tokens in enumerate(self.slices):
            with span(f"comp/gemm dW {i}"):
                torch.bmm(self.hs[i].transpose(1, 2), self.dys[i], out=dwout[tokens])
                torch.bmm(self.parts[i].permute(1, 2, 0), self.dz[tokens], out=dw1[tokens])
            with span(f"comp/sum dbout {i}"):
                torch.sum(self.dys[i], 1, out=dbout[tokens])
        return dw1, dwout, dbout


class _Counted:
    """Rows that have come, by chunk: called with some, it says whether that makes all of them."""

    def __init__(self, rows: int) -> None:
        self.rows, self.came = rows, Counter()

    def __call__(self, i: int, rows: slice) -> bool:
        self.came[i] += rows.stop - rows.start
        return self.came[i] == self.rows


def _cut(
    pieces: dict[int, Tensor], dim: int, had: Sequence[slice], wanted: Sequence[slice]
) -> dict[int, Tensor]:
    """Chunks along `dim` cut anew, where backward does not cut as forward did."""
    if had == wanted:
        return pieces
    whole = torch.cat([pieces[i] for i in range(len(had))], dim)
    return {i: whole.narrow(dim, s.start, s.stop - s.start) for i, s in enumerate(wanted)}
