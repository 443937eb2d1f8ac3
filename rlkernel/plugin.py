"""The entry that A2A_FFN_KERNEL_PLUGIN names by default: one forward with its communication hidden.

Works on any ffn that has w1, b1, wout, bout, norm_x, norm_gate, ep_group, ep_group_size, fwd_mode,
bwd_mode and gemm_backend; on one that is not A2AFFN the stage between the GEMMs runs the plain
operators. Autograd reaches the inputs and all parameters.

On GPUs a rank that is gone shows at the next call, as PeerLost. Behind the last call, before its
result is used for good, `settled(device)` waits for the device and raises what is still unsaid.
"""

from __future__ import annotations

from torch import Tensor

from rlkernel.overlap import fused
from rlkernel.overlap.settled import settled

__all__ = ["forward_ffn", "settled"]


def forward_ffn(ffn, inputs: Tensor, *, comp_only: bool = False) -> Tensor:
    """inputs [B, T, D], left as they are -> [B, T, D]; bit for bit ffn.forward(overlap="none").

    comp_only: without communication, on the rank's own slices. Raises ValueError before anything is
    launched for shapes, dtypes, devices and modes that are not supported, PeerLost for a rank that
    did not come to an earlier call.
    """
    return fused.forward_ffn(ffn, inputs, comp_only=comp_only)
