"""An all-to-all of which a rank takes part with some peers only, into memory that is there already.

    group of 4, peers (2, 3):   rank 0 gives  [.  .  a2 a3]   rank 0 has  [.  .  c0 d0]

A group that spans nodes exchanges so in two parts: with the peers of its node, and with the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel.collectives.transport import Arriving, ProcessGroupTransport, StagedTransport


class Between(ProcessGroupTransport):
    """This rank and `peers` (places in the group, its own among them or not), over the group of
    `whole`. landings: tag -> [P, ...], where what comes lies behind; the places of others stay as
    they are. Peers must name each other; on NCCL all ranks give their calls in one order.
    """

    def __init__(
        self, whole: ProcessGroupTransport, peers: Sequence[int], landings: Mapping[int, Tensor]
    ) -> None:
        super().__init__(whole.group, whole.timeout.total_seconds())
        self.name, self.peers, self.landings = whole.name, tuple(peers), landings
        self.staged = isinstance(whole, StagedTransport)

    def start_all_to_all(self, x: Tensor, tag: int = 0) -> Arriving:
        """x [P, ...], of which the peers' parts are sent -> an arrival of landings[tag]."""
        landing = self.landings[tag]
        others = [p for p in self.peers if p != self.index]
        if self.index in self.peers:
            landing[self.index].copy_(x[self.index])
        x = x.detach().cpu() if self.staged else x.detach()
        there = torch.empty_like(landing, device="cpu") if self.staged else landing
        give = {p: x[p].contiguous().reshape(-1).view(torch.uint8) for p in others}
        take = {p: there[p].view(-1).view(torch.uint8) for p in others}
        works = self._start(give, take, tag)
        waits: list[Callable[[], object]] = [partial(self._wait, work) for work in works]
        if self.staged:
            waits += [partial(landing[p].copy_, there[p]) for p in others]
        return Arriving(landing, waits, give)

    def _start(self, give: dict[int, Tensor], take: dict[int, Tensor], tag: int) -> list[dist.Work]:
        # Each rank begins with another peer.
        order = sorted(give, key=lambda p: (p - self.index) % len(self.ranks))
        if self.backend != "gloo":
            ways = ((dist.isend, give), (dist.irecv, take))
            ops = [dist.P2POp(op, parts[p], self.ranks[p], self.group)
                   for p in order for op, parts in ways]  # fmt: skip
            return dist.batch_isend_irecv(ops) if ops else []
        works = []
        for p in order:
            works.append(dist.irecv(take[p], self.ranks[p], self.group, tag))
            works.append(dist.isend(give[p], self.ranks[p], self.group, tag))
        return works
