"""What a call of a layer holds on a GPU at most, and what lies there that no allocator knows of."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak(work: Callable[[], object], weights: int, device: torch.device) -> int | None:
    """Bytes at most: `weights` and whatever a call adds, workspaces and results. None on a CPU."""
    if device.type != "cuda":
        return None
    work()  # compiles, and allocates what stays
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return weights + torch.cuda.max_memory_allocated(device) - before


def beside(device: torch.device) -> int | None:
    """Bytes of the device outside torch's allocator: driver, NCCL, symmetric memory, others' too.

    None on a CPU.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
