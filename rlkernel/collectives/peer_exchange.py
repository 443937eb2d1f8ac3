"""All-to-All by copy engine: each part goes straight into its place on the peer, then a flag.

    own stream of a peer     copy part p into the peer's row of ours ── flag = epoch on the peer
    caller's stream          wait for every peer's flag ── whatever reads what came

Nothing is packed, no SM moves a byte between ranks. Which writes become visible when, and why two
sets of buffers are enough, is told in peer_memory.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.collectives.comm import Comm
from rlkernel.collectives.peer_memory import SETS, PeerMemory, Watch

ARRIVED = 0  # the one flag of each sender


class PeerExchange:
    """All-to-All of [P, n] tensors of one shape and dtype over a group of one host.

    Every rank of the group makes it at the same time, outside graph capture. Raises ValueError for
    ranks that are not on one host, CPU ranks, and a machine without cuda-bindings.
    """

    name = "copy engine"

    def __init__(self, comm: Comm, like: Tensor, axis: str, timeout_s: float = 25.0) -> None:
        self.elements = like[0].numel()
        self.memory = PeerMemory(comm, {"in": like.numel()}, like.dtype, 1, axis)
        self.watch = Watch(self.memory, timeout_s)
        size = self.memory.size
        self.streams = [torch.cuda.Stream(like.device, priority=-1) for _ in range(size)]

    def __call__(self, parts: Tensor) -> Tensor:
        """parts [P, n], part p for rank p -> [P, n], part p from rank p: a view of mapped memory,
        to be read before the call after the next. PeerLost if an earlier call's peer did not come.
        """
        self.watch.check()
        memory, main = self.memory, torch.cuda.current_stream(parts.device)
        epoch, me = memory.next_epoch(), memory.index
        ready, which = main.record_event(), epoch % SETS
        for step in range(memory.size):  # nobody is everybody's first
            peer = (me + step) % memory.size
            stream = self.streams[peer]
            stream.wait_event(ready)
            to = memory.buffer("in", which, peer)[me * self.elements :]
            width = self.elements
            memory.copy_2d(to, width, parts[peer], width, width, 1, stream)
            if peer != me:
                memory.signal(peer, ARRIVED, epoch, stream)
        for peer in range(memory.size):
            if peer != me:
                memory.wait(peer, ARRIVED, epoch, main)
        for stream in self.streams:
            main.wait_stream(stream)
        self.watch.after(main, epoch, "exchange by copy engine", range(1))
        return memory.buffer("in", which, me).view_as(parts)

    def poison(self, value: int) -> None:
        """Fill what the next call will bring, so that nothing that came earlier passes for it.

        No rank may be in a call meanwhile: align the ranks before and behind it.
        """
        which = (self.memory.epoch + 1) % SETS
        self.memory.buffer("in", which, self.memory.index).fill_(value)
        torch.cuda.synchronize(self.memory.device)
