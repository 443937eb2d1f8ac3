"""`kernel`: the exchange inside the GEMMs where that is proven; else the chunks of token slices.

    fused       fused_rung.py: on GPUs of one host, BF16 on SM90, where its bits are those of `none`
    chunks      ladder.py: the library's GEMM by chunks
    one-gemm    the same in one piece, of exactly the shape that `none` has

The record's path names the rung and says what was against a higher one. On a CPU and across nodes
there is no fused kernel: chunks are computed in the order in which they arrive, so a late rank
delays exactly the chunks that it is late with. On NCCL, whose collectives keep one order, so do the
chunks.
"""

from __future__ import annotations

from torch import Tensor

from rlkernel.overlap import nccl_chunks, path

NAME = "kernel"


def forward_ffn(ffn, inputs: Tensor, *, comp_only: bool = False) -> Tensor:
    """inputs [B, T, D] -> [B, T, D]; the bits of the ffn's own `none`, or ValueError."""
    why = ""
    if on_gpu(inputs):
        from rlkernel.overlap import fused_kernel, fused_rung  # Hopper's language, only where used

        fused, why = fused_rung.fused_of(ffn, inputs, comp_only)
        if fused is not None:
            path.note(path.FUSED, NAME, fused.says)
            return fused_kernel.run(ffn, inputs, fused)
        why = f"; not fused: {why}"
    return nccl_chunks.forward_chunks(ffn, inputs, comp_only, NAME, by_arrival=True, why=why)


def on_gpu(inputs: Tensor) -> bool:
    return inputs.is_cuda
