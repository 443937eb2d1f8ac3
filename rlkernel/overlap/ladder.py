"""Does cutting the GEMMs into chunks keep the bits of the whole? Asked on the shape, by all ranks.

    chunks      the library's GEMM of each chunk gives the bits of the whole one
    (fewer)     it does not: half as many chunks are tried, down to two
    one-gemm    one GEMM of exactly the shape that `none` has; nothing is cut, so little is hidden

A library chooses a kernel by shape, and with it an order of additions; nothing but a try tells. The
try runs on data whose sums depend on their order, with weights of its own (the layer's may be
zeros), once for each shape, dtype, device and stage; a rank that differs takes all others with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rlkernel.collectives.comm import Comm
from rlkernel.compare import bit_report
from rlkernel.overlap import order, path, patience, pipeline
from rlkernel.overlap import stage as stages
from rlkernel.overlap.chunks import Messages
from rlkernel.overlap.layout import Layout, seam_of

CHUNKS = 4  # where the ffn does not say how many
Trial = Callable[[Layout, Tensor, str, tuple[slice, ...]], pipeline.Route]
_known: dict[tuple, tuple[int, int]] = {}


@dataclass(frozen=True)
class Rung:
    """name: of path.py. slices, backward_slices: into which the tokens may be cut."""

    name: str
    slices: tuple[slice, ...]
    backward_slices: tuple[slice, ...]
    stage: stages.Stage

    @property
    def says(self) -> str:
        return f"{len(self.slices)} token slices ({len(self.backward_slices)} backward)"


def by_messages(
    at: Layout, like: Tensor, direction: str, slices: tuple[slice, ...]
) -> pipeline.Route:
    """A trial's route: chunks as messages leave them in memory, of this rank alone."""
    return Messages(None, at, slices, like, direction, name="", silent=True)


def climb(
    ffn, at: Layout, inputs: Tensor, silent: bool = False, trial: Trial = by_messages,
    spared: int = 0,
) -> Rung:  # fmt: skip
    """The highest rung whose bits are proven. Every rank of the group must call it; the first call
    for a shape costs two passes of the layer and one small exchange. silent: ask nobody; what is
    not known yet is not cut. trial: lays chunks out in memory as the schedule will. spared: SMs
    that the chunks' products leave free.
    """
    comm = seam_of(ffn)
    stage = order.as_its_own(ffn, at, stages.stage_of(ffn), inputs, comm, silent)
    unit = stage.unit(at.rows * at.hidden, inputs.device)
    most = len(at.slices(getattr(ffn, "chunks", CHUNKS), unit))
    key = (at, most, inputs.dtype, inputs.device, stage, trial, torch.get_num_threads(),
           comm.links["ep"].ranks, spared)  # fmt: skip
    if key not in _known and not silent:
        _known[key] = _try(at, most, unit, stage, inputs, comm, trial, spared)
    forward, backward = _known.get(key, (1, 1))
    name = path.CHUNKS if forward > 1 else path.ONE_GEMM
    return Rung(name, at.slices(forward, unit), at.slices(backward, unit), stage)


def _try(
    at: Layout, most: int, unit: int, stage: stages.Stage, like: Tensor, comm: Comm, trial: Trial,
    spared: int,
) -> tuple[int, int]:  # fmt: skip
    """Into how many chunks forward and backward may be cut."""
    held = [1, 1]
    while most > 1 and 1 in held:
        with patience.meeting(comm, "ladder"):  # a try compiles
            same = proven(at, at.slices(most, unit), stage, like, trial, spared)
        mine = torch.tensor([same], dtype=torch.uint8, device=like.device)
        together = comm.all_gather(mine, "ladder", "ep").bool().all(0).tolist()
        held = [most if ok and n == 1 else n for ok, n in zip(together, held)]
        most //= 2
    return held[0], held[1]


def proven(
    at: Layout, cut: tuple[slice, ...], stage: stages.Stage, like: Tensor, trial: Trial,
    spared: int = 0,
) -> tuple[bool, bool]:  # fmt: skip
    """(forward, backward): whether every element of output and gradients keeps its bits here."""
    layer, whole = Try(at, like), at.slices(1)
    plans = [
        pipeline.Plan(at, slices, slices, stage, partial(route, at, like), few)
        for slices, route, few in ((whole, by_messages, 0), (cut, trial, spared))
    ]
    same = [bool(bit_report(a, b)) for a, b in zip(*map(layer.through, plans))]
    return same[0], all(same[1:])


class _Norm:
    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self.weight, self.bias = weight, bias


class Try:
    """An ffn of random parameters over many binades, all of one rank."""

    def __init__(self, at: Layout, like: Tensor) -> None:
        self.at, self.like = at, like
        random = torch.Generator(like.device).manual_seed(2023)

        def noise(*shape: int, scale: float = 1.0) -> Tensor:
            made = [torch.randn(shape, generator=random, device=like.device) for _ in range(2)]
            return (made[0] * torch.exp2(made[1]) * scale).to(like.dtype).requires_grad_()

        wide, width, tokens = at.hidden, at.dim, at.local
        self.x = noise(at.batch, at.tokens, width)
        self.dy = noise(at.batch, at.tokens, width).detach()
        self.w1 = noise(tokens, width, 2 * wide, scale=width**-0.5)
        self.b1 = noise(tokens, 2 * wide, scale=0.1)
        self.wout = noise(tokens, wide, width, scale=wide**-0.5)
        self.bout = noise(tokens, width, scale=0.1)
        self.norm_x = _Norm(noise(wide), noise(wide))
        self.norm_gate = _Norm(noise(wide), noise(wide))

    def through(self, plan: pipeline.Plan) -> list[Tensor]:
        norms = [self.norm_x.weight, self.norm_x.bias, self.norm_gate.weight, self.norm_gate.bias]
        leaves = [self.x, self.w1, self.b1, self.wout, self.bout, *norms]
        with torch.enable_grad():
            y = pipeline.run(self, self.x, plan)
        return [y.detach(), *torch.autograd.grad(y, leaves, self.dy)]
