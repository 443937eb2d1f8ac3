"""`none`: the whole exchange, both GEMMs, the whole exchange back; nothing beside anything.

The best code of this order: one pass packs, one collective moves, the library multiplies, one pass
is the stage, and the output bias is added by the pass that lays the result out for the way back.
"""

from __future__ import annotations

from torch import Tensor

from rlkernel.overlap import path, pipeline
from rlkernel.overlap.chunks import Messages
from rlkernel.overlap.layout import layout_of, seam_of
from rlkernel.overlap.stage import stage_of


def forward_ffn(ffn, inputs: Tensor, *, comp_only: bool = False) -> Tensor:
    """inputs [B, T, D] -> [B, T, D]. comp_only: the rank's own slices instead of what others send,
    no collective. Raises ValueError for what cannot run.
    """
    at, comm = layout_of(ffn, inputs), seam_of(ffn)
    whole = at.slices(1)

    def open_route(direction: str, slices: tuple[slice, ...]) -> Messages:
        return Messages(comm, at, slices, inputs, direction, name="none", silent=comp_only,
                        scale=getattr(ffn, "comm_scale", 1), beside=False)  # fmt: skip

    mover = comm.links["ep"].transport.name if at.ranks > 1 else "one rank"
    path.note(path.NONE, "none", mover)
    return pipeline.run(ffn, inputs, pipeline.Plan(at, whole, whole, stage_of(ffn), open_route))
