"""Ranks of one node among those of a group: their part of an exchange through each other's memory.

    x [B, T, D]   rows of l*D, T*D apart  ──2D copy──>  the peer's chunk i [P, B, l, D], rows l*D
    y [N, l, D]   rows of l*D             ──2D copy──>  the peer's out [B, T, D], rows T*D apart

As in copy_engine.py: a stream and flags a peer, two sets of buffers that alternate from call to
call. Here a chunk lies by itself, so that messages from other nodes land between what is copied.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel.collectives import peer_memory
from rlkernel.collectives.comm import Comm
from rlkernel.collectives.groups import comm_of
from rlkernel.collectives.peer_memory import SETS, PeerMemory
from rlkernel.overlap.layout import Layout
from rlkernel.overlap.nodes import Nodes
from rlkernel.overlap.timeline import span
from rlkernel.overlap.watch import Wait, Watch

NAME = "symmetric memory, 2D copies by copy engine"
MOST_CHUNKS = 64
THERE, BACK, DONE = 0, MOST_CHUNKS, 2 * MOST_CHUNKS  # first flag of each kind


def usable(comm: Comm, where: Nodes, chunks: int) -> bool:
    """GPUs that NCCL joins, more than one on this node. Each rank of a node says the same."""
    if comm.device.type != "cuda" or len(where.near) == 1 or chunks > MOST_CHUNKS:
        return False
    if getattr(comm.links["ep"].transport, "backend", "") != "nccl":
        return False
    try:
        peer_memory.driver()
    except ValueError:
        return False
    return True


class NearMemory:
    """One call. sites: of the way there and back. scale: each copy is made so many times."""

    def __init__(
        self, memory: PeerMemory, watch: Watch, members: Sequence[int], me: int, layout: Layout,
        slices: tuple[slice, ...], sites: tuple[str, str], scale: int,
    ) -> None:  # fmt: skip
        """members: places in the group of the node's ranks, in the order of `memory`."""
        watch.check()
        self.memory, self.watch, self.members, self.me = memory, watch, tuple(members), me
        self.layout, self.slices, self.sites, self.scale = layout, slices, sites, scale
        self.index, device = self.members.index(me), memory.device
        self.main = torch.cuda.current_stream(device)
        self.streams = _streams(device, len(self.members))
        self.epoch = memory.next_epoch()
        self.set = self.epoch % SETS
        if memory.last is not None:
            self.main.wait_event(memory.last)
        self.own: dict[int, torch.cuda.Event] = {}

    @property
    def out(self) -> Tensor:
        """[B, P, L, D] of this rank."""
        at = self.layout
        flat = self.memory.buffer("out", self.set, self.index)
        return flat.view(at.batch, at.ranks, at.local, at.dim)

    def payload(self, i: int, member: int | None = None) -> Tensor:
        """Chunk i [P, B, l, D] of a member, of this rank if none is said."""
        at, tokens = self.layout, self.slices[i]
        flat = self.memory.buffer("x", self.set, self.index if member is None else member)
        flat = flat[at.rows * at.dim * tokens.start : at.rows * at.dim * tokens.stop]
        return flat.view(at.ranks, at.batch, -1, at.dim)

    # -- there -------------------------------------------------------------------------------------

    def push(self, x: Tensor, i: int) -> None:
        """x [B, T, D]: tokens of chunk i to each rank of the node. Chunk 0 comes first."""
        at, tokens = self.layout, self.slices[i]
        if i == 0:
            self.source = x  # until this call has joined the streams that read it
            ready = self.main.record_event()
            for stream in self.streams:
                stream.wait_event(ready)
        width = (tokens.stop - tokens.start) * at.dim
        with span(f"comm/{self.sites[0]} {i}"):
            for member in self._peers():
                source = x.view(-1)[(self.members[member] * at.local + tokens.start) * at.dim :]
                target = self.payload(i, member)[self.me]
                self._copy(target, width, source, at.tokens * at.dim, width, member)
                self.memory.signal(member, THERE + i, self.epoch, self.streams[member])
        own = self.streams[self.index]
        with torch.cuda.stream(own), span(f"copy/own {i}"):
            source = x.view(at.batch, at.ranks, at.local, at.dim)
            self.payload(i)[self.me].copy_(source[:, self.me, tokens])
            self.own[i] = own.record_event()

    def arrived(self, i: int) -> Tensor:
        """Chunk i, once the caller's stream has the node's rows of it. First to last."""
        self.main.wait_event(self.own[i])
        if i == 0:
            self.coming = self._before(self.sites[0], THERE, len(self.slices))
        self._await(THERE + i)
        if i + 1 == len(self.slices):
            self.coming.end(self.main)
        return self.payload(i)

    # -- back --------------------------------------------------------------------------------------

    def send(self, parts: Tensor, i: int) -> None:
        """parts [P, B, l, D], results of chunk i: to each rank of the node, in place."""
        at, tokens, ready = self.layout, self.slices[i], self.main.record_event()
        width = (tokens.stop - tokens.start) * at.dim
        with span(f"comm/{self.sites[1]} {i}"):
            for member in self._peers():
                self.streams[member].wait_event(ready)
                target = self.memory.buffer("out", self.set, member)
                target = target[(self.me * at.local + tokens.start) * at.dim :]
                source = parts[self.members[member]]
                self._copy(target, at.tokens * at.dim, source, width, width, member)
                self.memory.signal(member, BACK + i, self.epoch, self.streams[member])
        own = self.streams[self.index]
        own.wait_event(ready)
        with torch.cuda.stream(own), span(f"copy/own result {i}"):
            self.out[:, self.me, tokens].copy_(parts[self.me])

    def collect(self) -> Tensor:
        """A copy of `out`: the mapped one is written again two calls later."""
        wait = self._before(self.sites[1], BACK, len(self.slices))
        for i in range(len(self.slices)):
            self._await(BACK + i)
        self._join()
        out = self.out.clone()
        self._end(wait)
        return out

    def leave(self) -> None:
        """Nothing goes back, but that this call has read its buffers must be known: see SETS."""
        ready = self.main.record_event()
        for member in self._peers():
            self.streams[member].wait_event(ready)
            self.memory.signal(member, DONE, self.epoch, self.streams[member])
        wait = self._before(self.sites[1], DONE, 1)
        self._await(DONE)
        self._join()
        self._end(wait)

    # -- small things ------------------------------------------------------------------------------

    def _peers(self) -> list[int]:
        count = len(self.members)
        return [(self.index + step) % count for step in range(1, count)]

    def _copy(self, to: Tensor, to_pitch: int, of: Tensor, pitch: int, width: int, member: int):
        for _ in range(self.scale):  # a payload that is padded costs as much again
            self.memory.copy_2d(
                to, to_pitch, of, pitch, width, self.layout.batch, self.streams[member]
            )

    def _await(self, flag: int) -> None:
        for member in self._peers():
            self.memory.wait(member, flag, self.epoch, self.main)

    def _join(self) -> None:
        for stream in self.streams:
            self.main.wait_stream(stream)

    def _before(self, stage: str, flag: int, count: int) -> Wait:
        return self.watch.before(self.epoch, stage, range(flag, flag + count))

    def _end(self, wait: Wait) -> None:
        self.memory.last = self.main.record_event()
        wait.end(self.main)


@functools.cache
def _streams(device: torch.device, size: int) -> list[torch.cuda.Stream]:
    """One a member, this rank's own place included; above the caller's in priority."""
    return [torch.cuda.Stream(device, priority=-1) for _ in range(size)]


_MEMORIES: dict[tuple, tuple[PeerMemory, Watch, tuple[int, ...]]] = {}


def check() -> None:
    """Raise PeerLost if a wait of any call so far had to be released."""
    for _, watch, _ in _MEMORIES.values():
        watch.check()


def memory_of(
    comm: Comm, where: Nodes, at: Layout, dtype: torch.dtype
) -> tuple[PeerMemory, Watch, tuple[int, ...]]:
    """(memory, its watch, places of its ranks in the group), made at the first call of a shape by
    the ranks of a node together; stays mapped. A process group of the node is made with it.
    """
    ranks = comm.links["ep"].ranks
    key = (ranks, where.near, at.rows, at.tokens, at.dim, dtype)
    if key not in _MEMORIES:
        members = tuple(sorted(where.near, key=lambda place: ranks[place]))
        seam = _node_seam(tuple(ranks[place] for place in members), _patience(comm))
        sizes = {"x": at.rows * at.local * at.dim, "out": at.batch * at.tokens * at.dim}
        memory = PeerMemory(seam, sizes, dtype, DONE + 1)
        _MEMORIES[key] = memory, Watch(memory, _patience(comm)), members
    return _MEMORIES[key]


@functools.cache
def _node_seam(ranks: tuple[int, ...], timeout_s: float) -> Comm:
    """Made by the ranks of one node, whatever others do meanwhile."""
    group = dist.new_group(
        list(ranks), timeout=datetime.timedelta(seconds=timeout_s), backend="nccl",
        use_local_synchronization=True,
    )  # fmt: skip
    return comm_of(group, "ep", timeout_s)


def _patience(comm: Comm) -> float:
    return comm.roll_call.timeout_s if comm.roll_call else 25.0
