"""The top of the ladder: may this call run the fused kernels, and are their bits those of `none`?

Asked by all ranks of the group together, once for each shape, dtype, device and stage. The try runs
both passes of the layer on order-sensitive data without communication, by the kernels and by the
library's GEMMs in the shape that `none` gives them; a rank that differs takes all others with it.
Forward may be proven where backward is not: then a call without gradients runs fused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rlkernel.collectives.comm import Comm
from rlkernel.collectives.peer_memory import check_one_host, driver
from rlkernel.compare import bit_report
from rlkernel.kernels import a2a_gemm
from rlkernel.kernels.stream import is_hopper
from rlkernel.overlap import ladder, patience, pipeline
from rlkernel.overlap import stage as stages
from rlkernel.overlap.fused_kernel import Choice, Fused, Layer
from rlkernel.overlap.fused_memory import FusedMemory
from rlkernel.overlap.layout import Layout, layout_of, seam_of

_known: dict[tuple, Verdict] = {}


@dataclass(frozen=True)
class Verdict:
    """fused: the layer with and without communication, None where `why` says what is against it.
    backward: are the gradients proven, too?
    """

    live: Fused | None
    local: Fused | None
    backward: bool
    why: str


def fused_of(ffn, inputs: Tensor, comp_only: bool = False) -> tuple[Fused | None, str]:
    """(what runs this call fused, "") or (None, why not). Every rank must call it; a call with
    comp_only asks nobody, and what is not known yet is not fused.
    """
    at, comm = layout_of(ffn, inputs), seam_of(ffn)
    stage = stages.stage_of(ffn)
    more = {"scale": getattr(ffn, "comm_scale", 1), "fault": getattr(ffn, "fault", "none")}
    key = (at, inputs.dtype, inputs.device, stage, comm.links["ep"].ranks, *more.values())
    if key not in _known:
        if comp_only and at.ranks > 1:
            return None, "this shape was not tried yet"
        _known[key] = _asked(comm, at, stage, inputs, more)
    verdict = _known[key]
    if verdict.live is None:
        return None, verdict.why
    if torch.is_grad_enabled() and not verdict.backward:
        return None, "the gradients' bits are not those of the library here"
    return verdict.local if comp_only else verdict.live, ""


def refuses(at: Layout, like: Tensor, chunks: int) -> str | None:
    """What no rank can run fused; from what all ranks have in common."""
    if like.dtype != torch.bfloat16 or not is_hopper(like.device):
        return f"{like.dtype} on {like.device}: BF16 on SM90 is needed"
    return a2a_gemm.refuses(at.batch, at.local, at.dim, 2 * at.hidden, at.ranks, chunks) or (
        a2a_gemm.refuses(at.batch, at.local, at.dim, at.hidden, at.ranks, chunks)
    )


def _asked(comm: Comm, at: Layout, stage: stages.Stage, like: Tensor, more: dict) -> Verdict:
    choice = Choice.of(at)
    why = refuses(at, like, max(s.chunks for s in (choice.gemm1, choice.gemm2)))
    if why is None and at.ranks > 1:
        try:
            driver()
            check_one_host(comm)
        except ValueError as error:
            why = str(error)
    if why is not None:
        return Verdict(None, None, False, why)
    local = Fused(comm, at, stage, like.dtype, local=True, choice=choice)
    with patience.meeting(comm, "fused ladder"):  # a try compiles
        mine = torch.tensor([proven(at, stage, like, local)], device=like.device)
    if at.ranks > 1:
        mine = comm.all_gather(mine.to(torch.uint8), "fused ladder", "ep").bool().all(0)[None]
    forward, backward = mine.flatten().tolist()
    if not forward:
        return Verdict(None, None, False, "the output's bits are not those of the library here")
    memory = None if at.ranks == 1 else FusedMemory(comm, at, like.dtype)
    live = Fused(comm, at, stage, like.dtype, memory=memory, choice=choice, **more)
    return Verdict(live, local, backward, "")


def proven(at: Layout, stage: stages.Stage, like: Tensor, local: Fused) -> tuple[bool, bool]:
    """(forward, backward): whether every element of output and gradients has the library's bits."""
    layer, whole = ladder.Try(at, like), at.slices(1)
    route = partial(ladder.by_messages, at, like)
    wanted = layer.through(pipeline.Plan(at, whole, whole, stage, route))
    norms = [layer.norm_x.weight, layer.norm_x.bias, layer.norm_gate.weight, layer.norm_gate.bias]
    leaves = [layer.x, layer.w1, layer.b1, layer.wout, layer.bout, *norms]
    with torch.enable_grad():
        y = Layer.apply(*leaves, local, True)
    got = [y.detach(), *torch.autograd.grad(y, leaves, layer.dy)]
    same = [bool(bit_report(a, b)) for a, b in zip(got, wanted)]
    return same[0], all(same[1:])
