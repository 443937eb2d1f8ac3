"""Settings of an allocator or a library that change what is measured, and name nobody's machine."""

from __future__ import annotations

import os

NAMES = (
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_ALGO", "NCCL_PROTO", "NCCL_MAX_CTAS", "NCCL_MIN_CTAS",
    "NCCL_P2P_DISABLE", "OMP_NUM_THREADS",
)  # fmt: skip


def told() -> dict[str, str]:
    """Those that are set, for the record's environment."""
    return {name: os.environ[name] for name in NAMES if name in os.environ}
