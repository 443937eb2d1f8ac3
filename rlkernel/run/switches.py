"""Settings of an allocator or a library that change what is measured, and name nobody's machine."""

from __future__ import annotations

import os

HIGH_PRIORITY = "TORCH_NCCL_HIGH_PRIORITY"
NAMES = (
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS", HIGH_PRIORITY, "NCCL_ALGO", "NCCL_PROTO", "NCCL_MAX_CTAS",
    "NCCL_MIN_CTAS", "NCCL_CGA_CLUSTER_SIZE", "NCCL_MAX_P2P_NCHANNELS", "NCCL_MIN_P2P_NCHANNELS",
    "NCCL_NCHANNELS_PER_NET_PEER", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD",
    "NCCL_BUFFSIZE", "NCCL_P2P_NET_CHUNKSIZE", "NCCL_P2P_DISABLE", "OMP_NUM_THREADS",
)  # fmt: skip


def between_nodes(count: int, device: str) -> dict[str, str]:
    """What ranks on `count` nodes are given, where the shell does not say otherwise.

    Over a slow link a message's kernel finds the SMs taken by a product or by the pass behind it.
    No block leaves for it, but from a stream of high priority it is the next to get an SM.
    """
    if count == 1 or device != "cuda":
        return {}
    return {HIGH_PRIORITY: os.environ.get(HIGH_PRIORITY, "1")}


def told(count: int = 1, device: str = "cpu") -> dict[str, str]:
    """Those that ranks on `count` nodes have, for the record's environment."""
    found = os.environ | between_nodes(count, device)
    return {name: found[name] for name in NAMES if name in found}
