"""Behind the last call: did every rank come to every call? A kernel that gave a peer up says so at
the next call; behind the last one somebody has to ask.
"""

from __future__ import annotations

import torch


def settled(device: torch.device) -> None:
    """Wait for the device, then raise PeerLost if a call of `sm-free` or of the fused kernels
    missed a rank: what it computed is void. A CPU's calls raise by themselves.
    """
    if device.type != "cuda":
        return
    from rlkernel.overlap import copy_engine, fused_rung  # Hopper's language, only where used

    torch.cuda.synchronize(device)
    copy_engine.check()
    fused_rung.check()
