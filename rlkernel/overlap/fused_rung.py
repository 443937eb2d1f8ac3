"""The top of the ladder: may this call run the fused kernels, and are their bits those of `none`?

Asked by all ranks of the group together, once for each shape, dtype, device and stage. The try runs
both passes of the layer on order-sensitive data without communication, by the kernels and by the
library's GEMMs in the shape that `none` gives them; a rank that differs takes all others with it.
Forward may be proven where backward is not: then a call without gradients runs fused. A call
without communication asks nobody: what is not known yet it proves for its own rank.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass, field
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
from rlkernel.overlap.fused_kernel import Choice, Fused, Layer, most_flags
from rlkernel.overlap.fused_memory import FusedMemory
from rlkernel.overlap.layout import Layout, layout_of, seam_of

SHARED = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # torch's own switch for ranks of one GPU
DIFFER = "the output's bits are not those of the library here"
_known: dict[tuple, Verdict] = {}
_proofs: dict[tuple, tuple[Fused, tuple[bool, bool]]] = {}  # of this rank alone


@dataclass(frozen=True)
class Verdict:
    """local: the layer without communication, None where `why` says what is against it. memory: of
    calls that communicate. backward: are the gradients proven, too?
    """

    local: Fused | None
    memory: FusedMemory | None
    backward: bool
    why: str
    made: dict[tuple, Fused] = field(default_factory=dict)

    def live(self, flags: int, scale: int, fault: str) -> Fused:
        """The layer that communicates, with so many flags a rank; all on the same memory."""
        key, local = (flags, scale, fault), self.local
        if key not in self.made:
            self.made[key] = Fused(
                local.comm, local.at, local.stage, local.dtype, memory=self.memory,
                choice=Choice.of(local.at, flags), scale=scale, fault=fault,
            )  # fmt: skip
        return self.made[key]


def fused_of(ffn, inputs: Tensor, comp_only: bool = False) -> tuple[Fused | None, str]:
    """(what runs this call fused, "") or (None, why not). Every rank must call it, unless with
    comp_only. ffn.chunks: flags a rank, one where the ffn does not say.
    """
    at, comm = layout_of(ffn, inputs), seam_of(ffn)
    stage = stages.stage_of(ffn)
    key = (at, inputs.dtype, inputs.device, stage, comm.links["ep"].ranks)
    if key in _known:
        verdict = _known[key]
    elif comp_only and at.ranks > 1:
        verdict = _alone(key, comm, at, stage, inputs)
    else:
        verdict = _known[key] = _asked(key, comm, at, stage, inputs)
    if verdict.local is None:
        return None, verdict.why
    if torch.is_grad_enabled() and not verdict.backward:
        return None, "the gradients' bits are not those of the library here"
    if comp_only:
        return verdict.local, ""
    flags = min(getattr(ffn, "chunks", 1), most_flags(at))
    return verdict.live(flags, getattr(ffn, "comm_scale", 1), getattr(ffn, "fault", "none")), ""


def refuses(at: Layout, like: Tensor, chunks: int) -> str | None:
    """What no rank can run fused; from what all ranks have in common."""
    if like.dtype != torch.bfloat16 or not is_hopper(like.device):
        return f"{like.dtype} on {like.device}: BF16 on SM90 is needed"
    return a2a_gemm.refuses(at.batch, at.local, at.dim, 2 * at.hidden, at.ranks, chunks) or (
        a2a_gemm.refuses(at.batch, at.local, at.dim, at.hidden, at.ranks, chunks)
    )


def check() -> None:
    """Raise PeerLost if a call that is over missed a rank."""
    for verdict in _known.values():
        if verdict.memory is not None:
            verdict.memory.check()


def apart(comm: Comm) -> str | None:
    """What keeps the ranks of the group from writing into each other's memory, if anything does.
    Every rank must call it; all get the same answer.
    """
    try:
        driver()
        able = 1
    except ValueError:
        able = 0
    mine = [able, chip(comm.device), int(os.environ.get(SHARED) == "1")]
    ranks, device = comm.links["ep"].ranks, comm.device
    told = comm.all_gather(
        torch.tensor([mine], device=device), "fused ladder: chips", "ep"
    ).tolist()
    without = [rank for rank, (able, _, _) in zip(ranks, told) if not able]
    if without:
        return f"ranks {without} have no package cuda-bindings, which copies between peers need"
    chips = [number for _, number, _ in told]
    sharing = [rank for rank, number in zip(ranks, chips) if chips.count(number) > 1]
    if sharing and not all(allowed for _, _, allowed in told):
        return f"ranks {sharing} share a GPU, which torch maps for them under {SHARED}=1 only"
    try:
        check_one_host(comm)
    except ValueError as error:
        return str(error)
    return None


def chip(device: torch.device) -> int:
    """A number that two ranks of one host have in common where their GPU is the same."""
    return zlib.crc32(str(torch.cuda.get_device_properties(device).uuid).encode())


def _proof(key: tuple, comm: Comm, at: Layout, stage: stages.Stage, like: Tensor) -> tuple:
    """(the layer without communication, (forward, backward)), as this rank sees it; once."""
    if key not in _proofs:
        local = Fused(comm, at, stage, like.dtype, local=True)
        _proofs[key] = local, proven(at, stage, like, local)
    return _proofs[key]


def _alone(key: tuple, comm: Comm, at: Layout, stage: stages.Stage, like: Tensor) -> Verdict:
    why = refuses(at, like, 1)
    if why is not None:
        return Verdict(None, None, False, why)
    local, (forward, backward) = _proof(key, comm, at, stage, like)
    return Verdict(local, None, backward, "") if forward else Verdict(None, None, False, DIFFER)


def _asked(key: tuple, comm: Comm, at: Layout, stage: stages.Stage, like: Tensor) -> Verdict:
    why = refuses(at, like, 1) or (apart(comm) if at.ranks > 1 else None)
    if why is not None:
        return Verdict(None, None, False, why)
    with patience.meeting(comm, "fused ladder"):  # a try compiles
        local, same = _proof(key, comm, at, stage, like)
    mine = torch.tensor([same], device=like.device)
    if at.ranks > 1:
        mine = comm.all_gather(mine.to(torch.uint8), "fused ladder", "ep").bool().all(0)[None]
    forward, backward = mine.flatten().tolist()
    if not forward:
        return Verdict(None, None, False, DIFFER)
    memory = None if at.ranks == 1 else FusedMemory(comm, at, like.dtype)
    return Verdict(local, memory, backward, "")


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
    # Without gradients other kernels run, whose compiling no peer may have to wait for.
    with torch.no_grad():
        silent = Layer.apply(*leaves, local, False)
    return same[0] and bool(bit_report(silent, wanted[0])), all(same[1:])
