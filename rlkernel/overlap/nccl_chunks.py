"""`with-sm`: chunks by NCCL (gloo on a CPU), which takes SMs from the GEMMs while it moves bytes.

All ranks give the collectives in one order: every dispatch, then every combine, first chunk to
last. That is what NCCL needs, and for equal chunks no other order is shorter. A chunk waits for the
one before, and for an SM: behind a product that has not given all of its blocks yet, unless its
stream goes first (run/switches.py) or the product leaves some SMs alone (spared.py).
"""

from __future__ import annotations

from torch import Tensor

from rlkernel.overlap import ladder, nodes, path, pipeline, spared, two_levels
from rlkernel.overlap.chunks import Messages
from rlkernel.overlap.layout import layout_of, seam_of

NAME = "with-sm"


def forward_ffn(ffn, inputs: Tensor, *, comp_only: bool = False) -> Tensor:
    """inputs [B, T, D] -> [B, T, D]; the bits of `none`. Raises ValueError for what cannot run."""
    return forward_chunks(ffn, inputs, comp_only, NAME, by_arrival=False)


def forward_chunks(
    ffn, inputs: Tensor, silent: bool, name: str, by_arrival: bool, why: str = ""
) -> Tensor:
    """The schedule `name`. by_arrival: in a rank's own order, and where nodes hold several ranks in
    two levels. why: for the record, why it is not another one.
    """
    at, comm = layout_of(ffn, inputs), seam_of(ffn, faulty=True)
    where = nodes.of(comm, silent) if by_arrival else None
    if where is not None and where.two_levels:
        return two_levels.forward_ffn(ffn, inputs, at, comm, where, name, why, silent=silent)
    few = spared.between(comm, silent)
    rung = ladder.climb(ffn, at, inputs, silent, spared=few)
    scale = getattr(ffn, "comm_scale", 1)

    def open_route(direction: str, slices: tuple[slice, ...]) -> Messages:
        return Messages(comm, at, slices, inputs, direction, name=name, by_arrival=by_arrival,
                        silent=silent, scale=scale)  # fmt: skip

    mover = comm.links["ep"].transport.name if at.ranks > 1 else "one rank"
    told = f", {few} SMs left to it" if few else ""
    path.note(rung.name, name, f"{rung.says} by {mover}{told}{why}")
    plan = pipeline.Plan(at, rung.slices, rung.backward_slices, rung.stage, open_route, few)
    return pipeline.run(ffn, inputs, plan)
