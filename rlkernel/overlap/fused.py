"""`kernel`: the exchange inside the GEMMs where that is proven; else the chunks of token slices.

The record's path says which: `fused`, or `chunks` with the reason. On a CPU and across nodes there
is no such kernel: chunks are computed in the order in which they arrive, so a late rank delays
exactly the chunks that it is late with. On NCCL, whose collectives keep one order, so do the chunks.
"""

from __future__ import annotations

from torch import Tensor

from rlkernel.overlap import nccl_chunks, path

NAME = "kernel"


def forward_ffn(ffn, inputs: Tensor, *, comp_only: bool = False) -> Tensor:
    """inputs [B, T, D] -> [B, T, D]; the bits of the ffn's own `none`, or ValueError."""
    if inputs.is_cuda:
        from rlkernel.overlap import fused_kernel, fused_rung  # Hopper's language, only where used

        fused, why = fused_rung.fused_of(ffn, inputs, comp_only)
        if fused is not None:
            path.note(path.FUSED, NAME, fused.says)
            return fused_kernel.run(ffn, inputs, fused)
        ffn.not_fused = why  # for the record
    return nccl_chunks.forward_chunks(ffn, inputs, comp_only, NAME, by_arrival=True)
