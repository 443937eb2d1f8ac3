"""The exchange in chunks of tokens by messages: NCCL, RCCL or gloo, through the seam.

    x [B, T, D] --pack--> [P, B, l, D] --all-to-all--> [P, B, l, D] = [N, l, D]      dispatch
    y [N, l, D] = [P, B, l, D] --all-to-all--> [P, B, l, D] --unpack--> [B, T, D]    combine

On a GPU packing and unpacking run on a stream of their own, the collectives on NCCL's, the GEMMs on
the caller's. On a CPU messages travel while the caller computes. Every chunk has buffers of its
own, for each call anew: the next one lands while this one is computed, and no call can overwrite
what another still reads.

Memory on a GPU: what the side stream allocates is recorded for the caller's stream; what the
caller's stream allocates is read elsewhere only until `collect` or `leave`, which wait, and is held
until then. Holding it is ours: a transport forgets what it sends once somebody has waited for the
message, and that is the side stream, at once. The caller's allocator would hand out again, in the
caller's order, what NCCL still reads.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from rlkernel.collectives import exchange
from rlkernel.collectives.comm import Comm
from rlkernel.overlap.layout import Layout
from rlkernel.overlap.timeline import span

Key = TypeVar("Key", int, tuple[int, ...])  # of an arrival
SITES = {"forward": ("dispatch", "combine"), "backward": ("combine.dx", "dispatch.dx")}


class Messages:
    """One dispatch and one combine (pipeline.Route). like: gives dtype and device.

    by_arrival: chunks are computed in the order in which they come, the rank's own order; else
    first to last. silent: nothing is sent and the rank's own slices are what comes. scale: each
    message is padded to so many times its size. beside: side stream, on a GPU.
    """

    def __init__(
        self,
        comm: Comm,
        layout: Layout,
        slices: tuple[slice, ...],
        like: Tensor,
        direction: str,
        *,
        name: str,
        by_arrival: bool = False,
        silent: bool = False,
        scale: int = 1,
        beside: bool = True,
    ) -> None:
        self.comm, self.layout, self.slices, self.like = comm, layout, slices, like
        self.silent, self.scale = silent, scale
        self.there, self.back = SITES[direction]
        self.by_arrival = by_arrival and not silent and like.device.type == "cpu"
        self.side = _side(like.device) if beside and like.device.type == "cuda" else None
        self.caller = torch.cuda.current_stream(like.device) if self.side is not None else None
        self.results: dict[int, Tensor] = {}
        self.returning: dict[int, exchange.Arrival] = {}
        self.lent: list[object] = []  # what messages read of the caller's memory
        if not silent:
            at = f"{layout.batch}x{layout.tokens}x{layout.dim} in {len(slices)}"
            dtype = str(like.dtype).removeprefix("torch.")
            comm.agree(f"{dtype} x{scale}", f"{name} {direction} {at}", "ep")

    # -- there -------------------------------------------------------------------------------------

    def dispatch(self, x: Tensor) -> Iterator[tuple[int, slice, Tensor]]:
        at = self.layout
        x = x.view(at.batch, at.ranks, at.local, at.dim).transpose(0, 1)  # [P, B, L, D]
        # Ahead of the fork, so that the side stream may write it.
        self.out = self.like.new_empty(at.batch, at.ranks, at.local, at.dim)
        arrivals, packed = [], []
        with self._beside():
            for i, tokens in enumerate(self.slices):
                with span(f"copy/pack {i}"):
                    parts = x[:, :, tokens].contiguous()
                arrivals.append(self._start(parts, self.there, tag=i))
                if self.side is not None:
                    arrivals[i].arriving.landing.record_stream(self.caller)
                    packed.append(self.side.record_event())
        coming = dict(enumerate(arrivals))
        for i in as_they_come(coming) if self.by_arrival else coming:
            if self.side is not None:  # where nothing is sent, nothing else orders the two
                self.caller.wait_event(packed[i])
            came = arrivals[i].take()
            yield i, slice(0, at.rows), self._unpadded(came, self.slices[i]).flatten(0, 1)

    def keep(self, parts: dict[int, Tensor]) -> dict[int, Tensor]:
        return parts

    # -- back --------------------------------------------------------------------------------------

    def outgoing(self, i: int) -> Tensor:
        tokens, at = self.slices[i], self.layout
        shape = (at.rows, tokens.stop - tokens.start, at.dim)
        self.results[i] = self.like.new_empty(shape)
        return self.results[i]

    def send(self, i: int) -> None:
        parts = self.results[i].view(self.layout.ranks, self.layout.batch, -1, self.layout.dim)
        self.returning[i] = self._start(parts, self.back, tag=len(self.slices) + i)
        self._unpack_beside(i, [self.returning[i]])

    def collect(self) -> Tensor:
        if self.side is None:
            for i in self.returning:
                self._unpack(i)
        self.leave()
        return self.out.view(self.layout.batch, self.layout.tokens, self.layout.dim)

    def leave(self) -> None:
        if self.side is not None:
            self.caller.wait_stream(self.side)
            self.lent.clear()

    def _unpack_beside(self, i: int, coming: Iterable[exchange.Arrival]) -> None:
        """On a GPU: behind this chunk's GEMMs, beside the next one's."""
        if self.side is not None:
            self.lent += [arrival.arriving.keep for arrival in coming]
            with self._beside():
                self._unpack(i)

    def _unpack(self, i: int) -> None:
        came = self._unpadded(self.returning[i].take(), self.slices[i])  # [P, B, l, D]
        with span(f"copy/unpack {i}"):
            self.out[:, :, self.slices[i]].copy_(came.transpose(0, 1))

    # -- small things ------------------------------------------------------------------------------

    def _start(self, parts: Tensor, site: str, tag: int) -> exchange.Arrival:
        padded = self._padded(parts)
        if self.silent:
            return exchange.arrived(padded)
        with span(f"comm/{site} {tag % len(self.slices)}"):
            return exchange.start(self.comm, padded, site, "ep", tag)

    def _padded(self, parts: Tensor) -> Tensor:
        if self.scale == 1:
            return parts
        flat = parts.reshape(len(parts), -1)
        return torch.cat([flat, flat.new_zeros(len(flat), (self.scale - 1) * flat.shape[1])], 1)

    def _unpadded(self, came: Tensor, tokens: slice) -> Tensor:
        at = self.layout
        shape = (at.ranks, at.batch, tokens.stop - tokens.start, at.dim)
        if self.scale == 1:
            return came.view(shape)
        return came[:, : came.shape[1] // self.scale].reshape(shape)

    def _beside(self) -> contextlib.AbstractContextManager:
        if self.side is None:
            return contextlib.nullcontext()
        self.side.wait_stream(self.caller)
        return torch.cuda.stream(self.side)


def as_they_come(arrivals: Mapping[Key, exchange.Arrival]) -> Iterator[Key]:
    """The key of each arrival once it is there, on a CPU; of several that are, the smallest."""
    done: queue.SimpleQueue = queue.SimpleQueue()

    def wait(key: Key) -> None:
        try:
            arrivals[key].wait()
        except Exception as error:  # for the caller's thread
            done.put((key, error))
        else:
            done.put((key, None))

    for key in arrivals:
        threading.Thread(target=wait, args=(key,), daemon=True).start()
    here: list[Key] = []
    for _ in arrivals:
        while not here or not done.empty():
            key, error = done.get()
            if error is not None:
                arrivals[key].fail(error)
            heapq.heappush(here, key)
        yield heapq.heappop(here)


@functools.cache
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
