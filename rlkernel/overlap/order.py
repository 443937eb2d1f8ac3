"""In which order does somebody else's ffn keep its rows between the GEMMs: [N, L] or [L, N]?

No element of its output depends on that. But a CPU adds the norms' gradients up over the rows as
they lie in memory, in BF16 rounded at every step: over some hundred rows the two orders are 2 %
apart, and each as far from FP64. So the ffn's own `none` is asked, once a shape and by all ranks
together, which of the two has its bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rlkernel.collectives.comm import Comm
from rlkernel.overlap import pipeline
from rlkernel.overlap.chunks import Messages
from rlkernel.overlap.layout import Layout
from rlkernel.overlap.stage import Stage, Torch

# A norm's weight stands for its ffn: that may be any object.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def as_its_own(
    ffn, at: Layout, stage: Stage, inputs: Tensor, comm: Comm, silent: bool = False
) -> Stage:
    """The stage with its rows in the ffn's own order. Every rank of the group must call it; the
    first call that learns costs three passes of the layer. silent: ask nobody.
    """
    plain = isinstance(stage, Torch) and not stage.compiled and inputs.device.type == "cpu"
    if not plain or hasattr(ffn, "elementwise") or 1 in (at.local, at.rows):
        return stage
    norms = [p for norm in (ffn.norm_x, ffn.norm_gate) for p in (norm.weight, norm.bias)]
    norms = [p for p in norms if p.requires_grad]
    known = _known.setdefault(ffn.norm_x.weight, {})
    key = (at, inputs.dtype, torch.get_num_threads())
    if key not in known and norms and torch.is_grad_enabled() and not silent:
        by_row, by_token = _ask(ffn, at, stage, inputs, comm, norms)
        if by_row and by_token:  # weights of zeros tell nothing
            return stage
        known[key] = by_token
    return replace(stage, by_token=known.get(key, False))


def _ask(
    ffn, at: Layout, stage: Torch, like: Tensor, comm: Comm, norms: Sequence[Tensor]
) -> list[bool]:
    """Whether rows by source, and rows by token, give the norms the ffn's own gradients."""
    random, whole = torch.Generator().manual_seed(2023), at.slices(1)
    x, dy = (torch.randn(like.shape, generator=random).to(like.dtype) for _ in range(2))

    def route(direction: str, slices: tuple[slice, ...]) -> Messages:
        return Messages(comm, at, slices, like, direction, name="order of rows", beside=False)

    wanted = torch.autograd.grad(ffn.forward(x, overlap="none"), norms, dy)
    same = []
    for by_token in (False, True):
        plan = pipeline.Plan(at, whole, whole, replace(stage, by_token=by_token), route)
        got = torch.autograd.grad(pipeline.run(ffn, x, plan), norms, dy)
        same.append(all(map(torch.equal, got, wanted)))
    said = comm.all_gather(torch.tensor([same], dtype=torch.uint8), "order of rows", "ep")
    return said.bool().all(0).tolist()
