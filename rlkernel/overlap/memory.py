"""What a schedule takes of the whole GPU at its peak: weights, inputs, workspaces and memory that
is mapped for peers included, as the driver counts it.

All schedules live in one process, so what another one keeps is taken off: each is charged for what
the device has less of once it has run for the first time. Caches are emptied ahead of each look.
`none` runs ahead of them all, and what it keeps (buffers of the library between GPUs) is not taken
off.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from functools import partial

import torch

CALLS = 2  # with two sets of buffers, the second call touches the second set


class Memory:
    """Of one rank, which has its GPU for itself. Bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.kept = device, {}

    @contextlib.contextmanager
    def building(self, schedule: str) -> Iterator[None]:
        """Around a schedule's first call with some number of chunks: what it keeps of that."""
        before = self._outside() + torch.cuda.memory_allocated(self.device)
        yield
        now = self._outside() + torch.cuda.memory_allocated(self.device)
        self.kept[schedule] = self.kept.get(schedule, 0) + now - before

    def peaks(self, bench) -> dict[str, list[int]]:
        """Schedule -> peak of each rank's GPU, at the first chunk count. bench: measure.Bench;
        every rank calls it.
        """
        chunks = bench.chunk_counts()[0]
        mine = {
            overlap: self.peak(overlap, partial(bench.through, overlap, chunks))
            for overlap in ("none", *bench.overlapped())
        }
        ranks = bench.comm.collect(mine)
        return {overlap: [rank[overlap] for rank in ranks] for overlap in mine}

    def peak(self, schedule: str, work: Callable[[], object]) -> int:
        """While `work` runs, without what the others keep."""
        outside = self._outside()
        torch.cuda.reset_peak_memory_stats(self.device)
        for _ in range(CALLS):
            work()
        torch.cuda.synchronize(self.device)
        others = sum(kept for name, kept in self.kept.items() if name != schedule)
        return outside + torch.cuda.max_memory_reserved(self.device) - others

    def _outside(self) -> int:
        """What the device has given away that is not torch's allocator's; empties its cache."""
        torch.cuda.synchronize(self.device)
        gc.collect()
        torch.cuda.empty_cache()
        free, whole = torch.cuda.mem_get_info(self.device)
        return whole - free - torch.cuda.memory_reserved(self.device)
