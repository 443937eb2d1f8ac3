"""Who moves bytes between the ranks of one group. A transport moves, it never adds: sums belong to
comm.py.

Tensors travel as raw bytes, so a dtype that the backend does not know and the payload of a NaN
arrive unchanged.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Transport(Protocol):
    """The movements that every collective here is made of. Peers are positions in the group, not
    global ranks.
    """

    name: str

    def swap(self, x: Tensor, peer: int) -> Tensor:
        """Give x to `peer` and return its tensor of the same shape and dtype. Both must call it."""
        ...

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's tensor of x's shape and dtype, in group order."""
        ...

    def start_all_to_all(self, x: Tensor, tag: int = 0) -> Arriving:
        """Give x[p] to each peer p and take its part for us, in group order, without waiting.

        gloo matches messages by `tag`, so those of several calls may be late in any order; NCCL
        keeps the order of the calls, which must be the same on all ranks.
        """
        ...


@dataclass
class Arriving:
    """[P, ...] that fills while others work; what goes out is kept until `wait` has returned."""

    landing: Tensor
    waits: Sequence[Callable[[], None]] = ()
    keep: object = None

    def wait(self) -> Tensor:
        """On the CPU it returns when all is there; on a GPU the current stream waits instead."""
        while self.waits:  # what has come is not waited for again after a failure
            self.waits[0]()
            self.waits = self.waits[1:]
        self.keep = None
        return self.landing


class ProcessGroupTransport:
    """Bytes over a torch.distributed process group (gloo, NCCL or RCCL), synchronous, each wait
    bounded.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self.group = group
        self.backend = dist.get_backend(group)
        self.name = f"process-group/{self.backend}"
        self.timeout = datetime.timedelta(seconds=timeout_s)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.index = dist.get_rank(group)

    def swap(self, x: Tensor, peer: int) -> Tensor:
        outgoing = _bytes(x)
        incoming = torch.empty_like(outgoing)
        to = self.ranks[peer]
        # Issued as one batch: with NCCL a lone send and a lone receive of two ranks could wait for
        # each other.
        ops = [
            dist.P2POp(dist.isend, outgoing, to, self.group),
            dist.P2POp(dist.irecv, incoming, to, self.group),
        ]
        for work in dist.batch_isend_irecv(ops):
            self._wait(work)
        return incoming.view(x.dtype).view(x.shape)

    def gather(self, x: Tensor) -> list[Tensor]:
        outgoing = _bytes(x)
        # One flat landing buffer: gloo copies through a temporary when the outputs are scattered.
        landing = outgoing.new_empty(len(self.ranks), outgoing.numel())
        self._wait(
            dist.all_gather(list(landing.unbind()), outgoing, group=self.group, async_op=True)
        )
        return [part.view(x.dtype).view(x.shape) for part in landing.unbind()]

    def start_all_to_all(self, x: Tensor, tag: int = 0) -> Arriving:
        outgoing = _bytes(x).view(len(self.ranks), -1)
        incoming = torch.empty_like(outgoing)
        landing = incoming.view(-1).view(x.dtype).view(x.shape)
        if self.backend != "gloo":
            work = dist.all_to_all_single(incoming, outgoing, group=self.group, async_op=True)
            return Arriving(landing, [work.wait], outgoing)
        incoming[self.index] = outgoing[self.index]
        works = []
        for step in range(1, len(self.ranks)):  # each rank begins with another peer
            to = (self.index + step) % len(self.ranks)
            came = (self.index - step) % len(self.ranks)
            works.append(dist.irecv(incoming[came], self.ranks[came], self.group, tag))
            works.append(dist.isend(outgoing[to], self.ranks[to], self.group, tag))
        return Arriving(landing, [partial(self._wait, work) for work in works], outgoing)

    def _wait(self, work: dist.Work) -> None:
        # gloo blocks here and honours the bound; NCCL only orders streams and leaves the bound to
        # its watchdog.
        if self.backend == "gloo":
            work.wait(self.timeout)
        else:
            work.wait()


class StagedTransport(ProcessGroupTransport):
    """gloo for tensors on a GPU: each message goes through host memory, on both ends.

    Ranks may share a GPU, which NCCL refuses; good for bits, never for timing. Every message waits
    for the GPU, so nothing of it can be captured into a CUDA graph: ValueError there.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        super().__init__(group, timeout_s)
        self.name += ", staged through the host"

    def swap(self, x: Tensor, peer: int) -> Tensor:
        return super().swap(_on_host(x), peer).to(x.device)

    def gather(self, x: Tensor) -> list[Tensor]:
        return [part.to(x.device) for part in super().gather(_on_host(x))]

    def start_all_to_all(self, x: Tensor, tag: int = 0) -> Arriving:
        came = super().start_all_to_all(_on_host(x), tag)
        landing = torch.empty_like(x)
        return Arriving(landing, [lambda: landing.copy_(came.wait())])


def _on_host(x: Tensor) -> Tensor:
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "a message that is staged through the host cannot be captured into a CUDA graph: "
            "use the nccl backend, or call without a graph"
        )
    return x.cpu()


def _bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)
