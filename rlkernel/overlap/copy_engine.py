"""`sm-free`: chunks by copy engine, straight from the strided slice into its place on the peer.

    x [B, T, D]   rows of l*D, T*D apart  ──2D copy──>  peer's Xlocal [N, L, D], rows L*D apart
    y [N, l, D]   rows of l*D             ──2D copy──>  peer's out [B, T, D], rows T*D apart

Nothing is packed and nothing unpacked, and no SM moves a byte between ranks. A stream a peer, so
that peers do not wait for each other; a flag a chunk, direction and sender. What is handed to the
caller is a copy: the mapped buffers are written again two calls later.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from rlkernel.collectives.comm import Comm
from rlkernel.collectives.peer_memory import SETS, PeerMemory
from rlkernel.overlap import ladder, path, pipeline
from rlkernel.overlap.chunks import SITES
from rlkernel.overlap.layout import Layout, layout_of, seam_of
from rlkernel.overlap.timeline import span
from rlkernel.overlap.watch import Wait, Watch

NAME = "sm-free"
MOST_CHUNKS = 64
THERE, BACK, DONE = 0, MOST_CHUNKS, 2 * MOST_CHUNKS  # first flag of each kind
AHEAD = 2  # chunks
LIVE, LOCAL, PRESET = "live", "local", "preset"


def forward_ffn(ffn, inputs: Tensor, *, comp_only: bool = False, preset: bool = False) -> Tensor:
    """inputs [B, T, D] -> [B, T, D]; the bits of `none`. preset: the same kernels with all flags
    taken as set and no copy to a peer, whose result is void. Raises ValueError for what cannot run,
    PeerLost where an earlier call's peer did not come.
    """
    if not inputs.is_cuda:
        raise ValueError("overlap=sm-free needs GPUs of one host: on a CPU use with-sm or kernel")
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("overlap=sm-free cannot be captured: its epochs are the host's, and a "
                         "replay would find the flags of the call before")  # fmt: skip
    at, comm = layout_of(ffn, inputs), seam_of(ffn)
    rung = ladder.climb(ffn, at, inputs, comp_only, by_copies)
    if max(len(rung.slices), len(rung.backward_slices)) > MOST_CHUNKS:
        raise ValueError(f"overlap=sm-free takes at most {MOST_CHUNKS} chunks")
    mode = LOCAL if comp_only or at.ranks == 1 else PRESET if preset else LIVE
    memory, watch = (None, None) if mode == LOCAL else memory_of(comm, at, inputs.dtype)
    if watch is not None:
        watch.check()
    scale, fault = getattr(ffn, "comm_scale", 1), getattr(ffn, "fault", "none")

    def open_route(direction: str, slices: tuple[slice, ...]) -> Pushes:
        return Pushes(comm, memory, watch, at, slices, inputs, direction, mode, scale, fault)

    path.note(rung.name, NAME, f"{rung.says} by copy engine, cudaMemcpy2DAsync and stream flags")
    plan = pipeline.Plan(at, rung.slices, rung.backward_slices, rung.stage, open_route)
    return pipeline.run(ffn, inputs, plan)


def by_copies(
    at: Layout, like: Tensor, direction: str, slices: tuple[slice, ...]
) -> pipeline.Route:
    """A trial's route (ladder.py): chunks as they lie in Xlocal, of this rank alone."""
    return Pushes(None, None, None, at, slices, like, direction, LOCAL, 1, "none")


class Pushes:
    """One dispatch and one combine (pipeline.Route)."""

    def __init__(
        self, comm: Comm | None, memory: PeerMemory | None, watch: Watch | None, layout: Layout,
        slices: tuple[slice, ...], like: Tensor, direction: str, mode: str, scale: int, fault: str,
    ) -> None:  # fmt: skip
        self.memory, self.watch, self.layout, self.slices = memory, watch, layout, slices
        self.like, self.mode, self.scale, self.fault = like, mode, scale, fault
        self.there, self.back = SITES[direction]
        self.index, self.size = comm.links["ep"].index if comm else 0, layout.ranks
        self.main = torch.cuda.current_stream(like.device)
        self.streams = _streams(like.device, self.size)
        self.results: dict[int, Tensor] = {}
        if mode == LOCAL:
            self.xlocal, self.out = (like.new_empty(self._count(n)) for n in ("x", "out"))
        else:
            # Flags that nobody writes make no epoch: the next live call would count on them.
            self.epoch = memory.next_epoch() if mode == LIVE else memory.epoch + 1
            if memory.last is not None:
                self.main.wait_event(memory.last)
            self.set = self.epoch % SETS
            self.xlocal = memory.buffer("x", self.set, self.index)
            self.out = memory.buffer("out", self.set, self.index)
            for site in SITES[direction]:
                comm.note(site, "2D copies by copy engine")

    def _count(self, name: str) -> int:
        at = self.layout
        return (at.rows * at.local if name == "x" else at.batch * at.tokens) * at.dim

    # -- there -------------------------------------------------------------------------------------

    def dispatch(self, x: Tensor) -> Iterator[tuple[int, slice, Tensor]]:
        """Copies are given two chunks ahead of the GEMMs: all at once would hold up the first GEMM
        by what the host needs for them.
        """
        at, ready, own = self.layout, self.main.record_event(), []
        self.source = x  # perhaps a copy that nobody else holds: pushes read it until `collect`
        for stream in self.streams:
            stream.wait_event(ready)
        self._push(x, own, AHEAD)
        wait = self._before(self.there, THERE, len(self.slices))
        whole = self.xlocal.view(at.rows, at.local, at.dim)
        for i, tokens in enumerate(self.slices):
            self.main.wait_event(own[i])
            if self.fault == "early-chunk" and i == 0:
                yield i, slice(0, at.rows), self._poisoned(whole[:, tokens])
            else:
                self._await(THERE + i)
                yield i, slice(0, at.rows), whole[:, tokens]
            self._push(x, own, 1)
        if wait is not None:
            wait.end(self.main)

    def _push(self, x: Tensor, own: list[torch.cuda.Event], count: int) -> None:
        """The next `count` chunks to every peer; an event of this rank's own share into `own`."""
        for i in range(len(own), min(len(own) + count, len(self.slices))):
            with span(f"comm/{self.there} {i}"):
                for peer in self._peers():
                    self._push_slice(x, peer, i, self.slices[i])
            with span(f"copy/own {i}"):
                own.append(self._own_slices(x, self.slices[i]))

    def _push_slice(self, x: Tensor, peer: int, i: int, tokens: slice) -> None:
        """Rows of this rank, tokens of that peer: into the peer's Xlocal."""
        at, width = self.layout, (tokens.stop - tokens.start) * self.layout.dim
        slice_of = self._swapped(peer)
        source = x.view(-1)[(slice_of * at.local + tokens.start) * at.dim :]
        target = self.memory.buffer("x", self.set, peer)
        target = target[(self.index * at.batch * at.local + tokens.start) * at.dim :]
        self._copy(target, at.local, source, at.tokens, width, peer)
        self.memory.signal(peer, THERE + i, self.epoch, self.streams[peer])

    def _own_slices(self, x: Tensor, tokens: slice) -> torch.cuda.Event:
        """This rank's own share; all P of its slices where nothing comes from others."""
        at, stream = self.layout, self.streams[self.index]
        with torch.cuda.stream(stream):
            source = x.view(at.batch, at.ranks, at.local, at.dim).transpose(0, 1)[:, :, tokens]
            target = self.xlocal.view(at.ranks, at.batch, at.local, at.dim)[:, :, tokens]
            if self.mode == LOCAL:
                target.copy_(source)
            else:
                target[self.index].copy_(source[self.index])
            return stream.record_event()

    def keep(self, parts: dict[int, Tensor]) -> dict[int, Tensor]:
        """A copy: the mapped buffer belongs to later calls."""
        if self.mode == LOCAL:
            return parts
        at = self.layout
        whole = self.xlocal.view(at.rows, at.local, at.dim).clone()
        return {i: whole[:, tokens] for i, tokens in enumerate(self.slices)}

    # -- back --------------------------------------------------------------------------------------

    def outgoing(self, i: int) -> Tensor:
        tokens, at = self.slices[i], self.layout
        shape = (at.rows, tokens.stop - tokens.start, at.dim)
        self.results[i] = self.like.new_empty(shape)
        return self.results[i]

    def send(self, i: int) -> None:
        at, tokens, ready = self.layout, self.slices[i], self.main.record_event()
        width = (tokens.stop - tokens.start) * at.dim
        rows = self.results[i].view(at.ranks, at.batch, width)  # [P, B, l*D]
        for peer in self._peers():
            self.streams[peer].wait_event(ready)
            with span(f"comm/{self.back} {i}"):
                target = self.memory.buffer("out", self.set, peer)
                target = target[(self.index * at.local + tokens.start) * at.dim :]
                self._copy(target, at.tokens, rows[peer], tokens.stop - tokens.start, width, peer)
                self.memory.signal(peer, BACK + i, self.epoch, self.streams[peer])
        own = self.streams[self.index]
        own.wait_event(ready)
        with torch.cuda.stream(own), span(f"copy/own result {i}"):
            out = self.out.view(at.batch, at.ranks, at.local * at.dim)
            start = tokens.start * at.dim
            for p in range(at.ranks) if self.mode == LOCAL else (self.index,):
                out[:, p, start : start + width].copy_(rows[p])

    def collect(self) -> Tensor:
        at, wait = self.layout, self._before(self.back, BACK, len(self.slices))
        for i in range(len(self.slices)):
            self._await(BACK + i)
        self._join()
        out = self.out.view(at.batch, at.tokens, at.dim)
        out = out if self.mode == LOCAL else out.clone()
        self._end(wait)
        return out

    def leave(self) -> None:
        """Nothing goes back, but that this call has read its buffers must be known: see SETS."""
        ready = self.main.record_event()
        for peer in self._peers():
            self.streams[peer].wait_event(ready)
            self.memory.signal(peer, DONE, self.epoch, self.streams[peer])
        wait = self._before(self.back, DONE, 1)
        self._await(DONE)
        self._join()
        self._end(wait)

    # -- small things ------------------------------------------------------------------------------

    def _peers(self) -> list[int]:
        """Whom to send to, beginning behind this rank, so that nobody is everybody's first."""
        if self.mode != LIVE:
            return []
        return [(self.index + step) % self.size for step in range(1, self.size)]

    def _swapped(self, peer: int) -> int:
        """Under a fault the slices of ranks 0 and 1 are exchanged."""
        swapped = {0: 1, 1: 0} if self.fault == "swapped-slices" else {}
        return swapped.get(peer, peer)

    def _copy(self, target, to_tokens: int, source, tokens: int, width: int, peer: int) -> None:
        at = self.layout
        for _ in range(self.scale):  # a payload that is padded costs as much again
            self.memory.copy_2d(
                target, to_tokens * at.dim, source, tokens * at.dim, width, at.batch,
                self.streams[peer],
            )  # fmt: skip

    def _poisoned(self, chunk: Tensor) -> Tensor:
        """What a reader finds who does not wait: anything, so here nothing that could be right."""
        found = chunk.clone()
        for peer in self._peers():
            found.view(self.size, self.layout.batch, -1)[peer].fill_(float("nan"))
        return found

    def _await(self, flag: int) -> None:
        for peer in self._peers():
            self.memory.wait(peer, flag, self.epoch, self.main)

    def _join(self) -> None:
        """What is freed from here on is read by no other stream any more."""
        for stream in self.streams:
            self.main.wait_stream(stream)

    def _before(self, stage: str, flag: int, count: int) -> Wait | None:
        """Ahead of waits for these flags, where there are any."""
        if self.mode != LIVE:
            return None
        return self.watch.before(self.epoch, stage, range(flag, flag + count))

    def _end(self, wait: Wait | None) -> None:
        if self.memory is not None:
            self.memory.last = self.main.record_event()
        if wait is not None:
            wait.end(self.main)


@functools.cache
def _streams(device: torch.device, size: int) -> list[torch.cuda.Stream]:
    """One a peer, the caller's own index included; above the caller's in priority."""
    return [torch.cuda.Stream(device, priority=-1) for _ in range(size)]


_MEMORIES: dict[tuple, tuple[PeerMemory, Watch]] = {}


def check() -> None:
    """Raise PeerLost if a wait of any call so far had to be released."""
    for _, watch in _MEMORIES.values():
        watch.check()


def memory_of(comm: Comm, at: Layout, dtype: torch.dtype) -> tuple[PeerMemory, Watch]:
    """Made at the first call of a shape, by all ranks; stays mapped."""
    key = (comm.links["ep"].ranks, at.rows, at.tokens, at.dim, dtype)
    if key not in _MEMORIES:
        sizes = {"x": at.rows * at.local * at.dim, "out": at.batch * at.tokens * at.dim}
        memory = PeerMemory(comm, sizes, dtype, DONE + 1)
        timeout = comm.roll_call.timeout_s if comm.roll_call else 25.0
        _MEMORIES[key] = memory, Watch(memory, timeout)
    return _MEMORIES[key]
