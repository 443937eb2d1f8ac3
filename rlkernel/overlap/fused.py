"""`kernel`: where there is no kernel that exchanges and multiplies, the chunks of token slices.

That is so on a CPU, and across nodes. Chunks are computed in the order in which they arrive, so a
late rank delays exactly the chunks that it is late with; the record's path says `chunks`, never
`fused`. On NCCL, whose collectives keep one order, so do the chunks.
"""

from __future__ import annotations

from torch import Tensor

from rlkernel.overlap import nccl_chunks

NAME = "kernel"


def forward_ffn(ffn, inputs: Tensor, *, comp_only: bool = False) -> Tensor:
    """inputs [B, T, D] -> [B, T, D]; the bits of the ffn's own `none`, or ValueError."""
    return nccl_chunks.forward_chunks(ffn, inputs, comp_only, NAME, by_arrival=True)
