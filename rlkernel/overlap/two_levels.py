"""`kernel` where nodes hold several ranks: directly inside a node, in chunks of tokens between.

    dispatch of chunk i, [N, l, D]   rows of the own node       rows of other nodes
    first product (GEMM1, dH)        first, of all chunks       of each chunk as it comes
    all else, combine                                           chunk by chunk, the far way first

Bytes go inside a node through memory that its GPUs share, or by messages on a CPU; between nodes
always by messages. A product of some of the rows may be another kernel of the library than that of
all: the ladder asks (`RowsByNode`), and where the bits are not proven a chunk waits for its rows.

Direct: a rank sends to each rank of another node itself. The aggregated form (one message to the
peer of the same number, from there on to its neighbours) has fewer and larger messages, one more
copy of each byte and a wait between the two. It pays where messages are short against what a
network moves in its latency, 0.1 to 0.3 MiB. These are B * l * D elements: 1.25 MiB at B=512,
D=1280 in BF16 even where l is a single token. So it is not here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from rlkernel.collectives import exchange
from rlkernel.collectives.between import Between
from rlkernel.collectives.comm import Comm, Link
from rlkernel.collectives.transport import Arriving
from rlkernel.overlap import ladder, near_memory, path, pipeline
from rlkernel.overlap import stage as stages
from rlkernel.overlap.chunks import SITES, Messages, as_they_come
from rlkernel.overlap.layout import Layout
from rlkernel.overlap.near_memory import NearMemory
from rlkernel.overlap.nodes import Nodes, runs
from rlkernel.overlap.timeline import span

NEAR, FAR = 0, 1


def forward_ffn(
    ffn, inputs: Tensor, at: Layout, comm: Comm, where: Nodes, name: str, why: str = "", *,
    silent: bool = False,
) -> Tensor:  # fmt: skip
    """inputs [B, T, D] -> [B, T, D], the bits of `none`, on a group that spans nodes (`where`).

    why: for the record, why it is no other schedule. silent: nothing is sent, the rank's own slices
    are computed.
    """
    ways = _ways(ffn, inputs, at, where, silent)
    scale, mover = getattr(ffn, "comm_scale", 1), comm.links["ep"].transport.name
    shares = near_memory.usable(comm, where, max(len(way.slices) for way in ways.values()))
    said = f"inside by {near_memory.NAME if shares else mover}, between by {mover}"

    def open_route(direction: str, slices: tuple[slice, ...]) -> TwoLevels:
        near = None
        if shares and not silent:
            memory = near_memory.memory_of(comm, where, at, inputs.dtype)
            sites = SITES[direction]
            near = NearMemory(*memory, where.index, at, slices, sites, scale)
        return TwoLevels(comm, at, slices, inputs, direction, where, ways[direction].by_rows, near,
                         said, name=name, by_arrival=True, silent=silent, scale=scale)  # fmt: skip

    forward, backward = ways["forward"], ways["backward"]
    first = [direction for direction, way in ways.items() if way.by_rows]
    path.note(forward.rung, name, (
        f"{len(forward.slices)} token slices ({len(backward.slices)} backward) in two levels, nodes"
        f" of {'+'.join(map(str, where.sizes))} ranks: {said}; rows of the own node first in "
        f"{' and '.join(first) or 'no pass'}{why}"
    ))  # fmt: skip
    plan = pipeline.Plan(at, forward.slices, backward.slices, forward.stage, open_route)
    return pipeline.run(ffn, inputs, plan)


@dataclass(frozen=True)
class Way:
    """How one pass is cut. by_rows: the first product does not wait for all rows of a chunk."""

    rung: str
    slices: tuple[slice, ...]
    by_rows: bool
    stage: stages.Stage


def _ways(ffn, inputs: Tensor, at: Layout, where: Nodes, silent: bool) -> dict[str, Way]:
    """Each pass by rows where that is proven, else by whole chunks."""
    found = {}
    for by_rows, trial in ((True, RowsByNode(where)), (False, ladder.by_messages)):
        if len(found) == 2:
            break
        rung = ladder.climb(ffn, at, inputs, silent, trial)
        cuts = {"forward": rung.slices, "backward": rung.backward_slices}
        for direction, slices in cuts.items():
            if direction not in found and (len(slices) > 1 or not by_rows):
                name = path.CHUNKS if len(slices) > 1 else path.ONE_GEMM
                found[direction] = Way(name, slices, by_rows, rung.stage)
    return {direction: found[direction] for direction in ("forward", "backward")}


@dataclass(frozen=True)
class RowsByNode:
    """A trial's route (ladder.py): a rank alone, whose rows come as from these nodes."""

    where: Nodes

    def __call__(
        self, at: Layout, like: Tensor, direction: str, slices: tuple[slice, ...]
    ) -> pipeline.Route:
        alone = {"name": "", "silent": True}
        return TwoLevels(None, at, slices, like, direction, self.where, True, None, "", **alone)


class TwoLevels(Messages):
    """One dispatch and one combine (pipeline.Route) of a group that spans nodes.

    by_rows: rows of a chunk are handed out by level, else all at once. near: moves what stays on
    the node, else messages do. said: of both, for the record. Other options: those of Messages.
    """

    def __init__(
        self, comm: Comm | None, layout: Layout, slices: tuple[slice, ...], like: Tensor,
        direction: str, where: Nodes, by_rows: bool, near: NearMemory | None, said: str, **options,
    ) -> None:  # fmt: skip
        super().__init__(comm, layout, slices, like, direction, **options)
        self.by_rows, self.near, self.said = by_rows, near, said
        self.places = {NEAR: where.near, FAR: where.far}
        self.landings: dict[int, Tensor] = {}  # tag -> [P, ...], as messages are shaped
        self.seams = {} if self.silent else {n: self._seam(p) for n, p in self.places.items()}
        self.returning: dict[int, dict[int, exchange.Arrival]] = {}  # chunk -> level -> arrival

    def _seam(self, places: Sequence[int]) -> Comm:
        """The same seam, over which a rank talks with these of its group only."""
        link, seam = self.comm.links["ep"], self.comm.using()
        between = Between(link.transport, places, self.landings)
        seam.links = {"ep": Link(link.ranks, link.index, between, link.agreement)}
        return seam

    # -- there -------------------------------------------------------------------------------------

    def dispatch(self, x: Tensor) -> Iterator[tuple[int, slice, Tensor]]:
        at, count = self.layout, len(self.slices)
        # Ahead of the fork, so that the side stream may write them.
        shape = (at.batch, at.ranks, at.local, at.dim)
        self.out = self.like.new_empty(shape) if self.near is None else self.near.out
        chunks = [] if self.silent else [self._landing(i, i, self.near) for i in range(count)]
        with self._beside():
            parts = [self._packed(x, i) for i in range(count)]
            packed = self.side.record_event() if self.side is not None else None
            arrivals = {(NEAR, i): self._near(x, parts[i], i) for i in range(count)}
            arrivals |= {(FAR, i): self._go(FAR, parts[i], self.there, i) for i in range(count)}
        if packed is not None:  # where nothing is sent, nothing else orders the two
            self.caller.wait_event(packed)
        if self.silent:
            chunks = [self._unpadded(p, tokens) for p, tokens in zip(parts, self.slices)]
        seen: Counter = Counter()
        for level, i in as_they_come(arrivals) if self.by_arrival else arrivals:
            self._settle(arrivals[level, i].take(), chunks[i], level, i)
            seen[i] += 1
            for run in runs(self.places[level]) if self.by_rows else ():
                yield i, slice(run.start * at.batch, run.stop * at.batch), chunks[i].flatten(0, 1)
            if not self.by_rows and seen[i] == len(self.places):
                yield i, slice(0, at.rows), chunks[i].flatten(0, 1)
        self._noted(self.there)

    def _packed(self, x: Tensor, i: int) -> Tensor:
        """x [B, T, D] -> the parts of chunk i for all ranks, [P, B, l, D] or padded."""
        at = self.layout
        x = x.view(at.batch, at.ranks, at.local, at.dim).transpose(0, 1)
        with span(f"copy/pack {i}"):
            parts = self._padded(x[:, :, self.slices[i]].contiguous())
        if self.side is not None:
            parts.record_stream(self.caller)
        return parts

    def _landing(self, tag: int, i: int, near: NearMemory | None = None) -> Tensor:
        """Memory for what comes of chunk i under a tag -> its payload [P, B, l, D], the same memory
        where nothing is padded.
        """
        at, tokens = self.layout, self.slices[i]
        shape = (at.ranks, at.batch, tokens.stop - tokens.start, at.dim)
        payload = self.like.new_empty(shape) if near is None else near.payload(i)
        padded = (at.ranks, self.scale * payload[0].numel())
        self.landings[tag] = payload if self.scale == 1 else self.like.new_empty(padded)
        return payload

    def _near(self, x: Tensor, parts: Tensor, i: int) -> exchange.Arrival:
        if self.near is None:
            return self._go(NEAR, parts, self.there, i)
        self.near.push(x, i)
        arriving = Arriving(self.near.payload(i), [partial(self.near.arrived, i)])
        return exchange.Arrival(arriving, lambda action: action())

    def _settle(self, came: Tensor, payload: Tensor, level: int, i: int) -> None:
        """What came of one level into the payload, unless it has landed there."""
        if not self.silent and came.data_ptr() != payload.data_ptr():
            came = self._unpadded(came, self.slices[i])
            for run in runs(self.places[level]):
                payload[run].copy_(came[run])

    def keep(self, parts: dict[int, Tensor]) -> dict[int, Tensor]:
        """A copy where the chunks lie in mapped memory: that belongs to later calls."""
        return parts if self.near is None else {i: part.clone() for i, part in parts.items()}

    # -- back --------------------------------------------------------------------------------------

    def send(self, i: int) -> None:
        tag = len(self.slices) + i
        results = self.results[i].view(self.layout.ranks, self.layout.batch, -1, self.layout.dim)
        parts = self._padded(results)
        if not self.silent:
            self._landing(tag, i)
        self.returning[i] = {FAR: self._go(FAR, parts, self.back, tag)}
        if self.near is None:
            self.returning[i][NEAR] = self._go(NEAR, parts, self.back, tag)
        else:
            self.near.send(results, i)
        self._unpack_beside(i, self.returning[i].values())

    def collect(self) -> Tensor:
        if self.side is None:
            for i in self.returning:
                self._unpack(i)
        super().leave()
        self._noted(self.back)
        out = self.out if self.near is None else self.near.collect()
        return out.view(self.layout.batch, self.layout.tokens, self.layout.dim)

    def leave(self) -> None:
        super().leave()
        if self.near is not None:
            self.near.leave()

    def _unpack(self, i: int) -> None:
        for level, arrival in self.returning[i].items():
            came = self._unpadded(arrival.take(), self.slices[i])  # [P, B, l, D]
            with span(f"copy/unpack {i}"):
                for run in runs(self.places[level]):
                    self.out[:, run, self.slices[i]].copy_(came[run].transpose(0, 1))

    # -- small things ------------------------------------------------------------------------------

    def _go(self, level: int, parts: Tensor, site: str, tag: int) -> exchange.Arrival:
        if self.silent:
            return exchange.arrived(parts)
        with span(f"comm/{site} {tag % len(self.slices)}"):
            return exchange.start(self.seams[level], parts, site, "ep", tag)

    def _noted(self, site: str) -> None:
        if not self.silent:
            self.comm.note(site, f"all_to_all over ep in two levels: {self.said}")
