"""Two levels on GPUs, played by threads as in test_copy_engine.py: ranks of a node copy into each
other's memory, messages between nodes are posted in a box. Which bytes go where, under which flag,
and that no rank overtakes another.
"""

from __future__ import annotations

import contextlib
import time
import types

import pytest
import torch

from rlkernel.collectives import exchange
from rlkernel.collectives.transport import Arriving
from rlkernel.overlap import near_memory
from rlkernel.overlap.chunks import SITES
from rlkernel.overlap.near_memory import NearMemory
from rlkernel.overlap.nodes import Nodes
from rlkernel.overlap.two_levels import FAR, TwoLevels
from tests.overlap.inputs import differing, trained
from tests.overlap.played import Stream, by_hand, slow_down, together
from tests.overlap.test_copy_engine import LIMIT_S, Memory, Rank

PLACES = ((0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 2, 0, 1))


@pytest.fixture(autouse=True)
def played(monkeypatch):
    """CUDA's streams do nothing; what is copied is copied at once."""
    monkeypatch.setattr(near_memory, "_streams", lambda device, size: [Stream()] * size)
    cuda = types.SimpleNamespace(
        current_stream=lambda device: Stream(), stream=lambda s: contextlib.nullcontext()
    )
    monkeypatch.setattr(near_memory, "torch", types.SimpleNamespace(cuda=cuda))


class Route(TwoLevels):
    """Messages lie in a box until their receiver takes them."""

    def _seam(self, places):
        return None

    def _go(self, level, parts, site, tag):
        assert level == FAR, "what stays on the node is no message"
        box, me, call = self.box, self.near.me, self.near.epoch
        for p in self.places[FAR]:
            box[call, site, tag, me, p] = parts[p].clone()
        landing = self.landings[tag]

        def take():
            until = time.monotonic() + LIMIT_S
            for p in self.places[FAR]:
                while (call, site, tag, p, me) not in box:
                    assert time.monotonic() < until, f"rank {me} waits for {p}"
                    time.sleep(1e-4)
                landing[p].copy_(box[call, site, tag, p, me])

        return exchange.Arrival(Arriving(landing, [take]), lambda action: action())


class Member(Rank):
    """A rank of a group on these nodes. shared: one memory a node. box: messages of all."""

    def __init__(self, me, of, shared, box, chunks=3, by_rows=True):
        super().__init__(me, len(of), {}, chunks)
        self.where, self.by_rows, self.box = Nodes(of, me), by_rows, box
        members = self.where.near
        self.memory = Memory(members.index(me), len(members), self.at, shared[of[me]])
        self.memory.device = "cpu"
        self.ffn.comm.agree = lambda *words: None

    def open(self, direction, slices):
        near = NearMemory(self.memory, self.watch, self.where.near, self.where.index, self.at,
                          slices, SITES[direction], self.scale)  # fmt: skip
        options = {"name": "kernel", "scale": self.scale}
        route = Route(self.ffn.comm, self.at, slices, self.x, direction, self.where, self.by_rows,
                      near, "played", **options)  # fmt: skip
        route.box = self.box
        return route


def group(of, **more):
    shared, box = {node: {} for node in of}, {}
    return [Member(me, of, shared, box, **more) for me in range(len(of))]


@pytest.mark.parametrize("of", PLACES, ids=str)
@pytest.mark.parametrize("by_rows", [True, False], ids=["rows first", "whole chunks"])
def test_every_byte_arrives_where_it_belongs(of, by_rows):
    """Three calls in a row, so that both sets of buffers are written again; forward, backward."""
    ranks = group(of, by_rows=by_rows)
    wanted = by_hand(ranks)
    for _ in range(3):
        got = together(ranks, lambda r: trained(r.forward, r.ffn, r.x, r.dy))
        for mine, right in zip(got, wanted):
            for name in right:
                torch.testing.assert_close(mine[name], right[name], rtol=2e-5, atol=2e-5)
    for rank in ranks:
        own = rank.at.batch * rank.at.local * rank.at.dim
        copied = 3 * 4 * own * (len(rank.where.near) - 1)
        assert sum(rank.memory.copied) == copied and rank.memory.epoch == 6


def test_a_slow_rank_is_not_overtaken():
    ranks = group((0, 0, 1, 1))
    slow_down(ranks[1])
    for call in together(ranks, lambda r: [trained(r.forward, r.ffn, r.x, r.dy) for _ in range(4)]):
        assert not any(differing(other, call[0]) for other in call)


def test_padded_payloads_and_inputs_without_gradient():
    ranks = group((0, 1, 0, 1))
    for rank in ranks:
        rank.scale = 2

    def work(rank):
        for _ in range(3):
            out = rank.forward(rank.x)
            grads = torch.autograd.grad(out, list(rank.ffn.parameters()), rank.dy)
        return out, grads

    for (out, grads), right in zip(together(ranks, work), by_hand(ranks)):
        torch.testing.assert_close(out, right["output"], rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(grads[0], right["w1"], rtol=2e-5, atol=2e-5)
    assert ranks[0].memory.shared["flag", 0, 1, near_memory.DONE] == 6
    stages = {stage for _, stage, _ in ranks[0].watch.calls}
    assert stages == {"dispatch", "combine", "combine.dx", "dispatch.dx"}


def test_what_was_handed_out_is_not_written_again():
    """Two more calls overwrite both sets of buffers before the first call's backward."""
    ranks = group((0, 0, 1, 1))

    def work(rank):
        outs = [rank.forward(x) for x in (rank.x, 2 * rank.x, 3 * rank.x)]
        return outs[0], torch.autograd.grad(outs[0], [rank.ffn.w1], rank.dy)[0]

    for (out, grad), right in zip(together(ranks, work), by_hand(ranks)):
        torch.testing.assert_close(out, right["output"], rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(grad, right["w1"], rtol=2e-5, atol=2e-5)


def test_only_gpus_that_nccl_joins_share_memory(monkeypatch):
    monkeypatch.setattr(near_memory.peer_memory, "driver", lambda: None)

    def usable(device="cuda", backend="nccl", of=(0, 0, 1, 1), chunks=4):
        link = types.SimpleNamespace(transport=types.SimpleNamespace(backend=backend))
        comm = types.SimpleNamespace(device=torch.device(device), links={"ep": link})
        return near_memory.usable(comm, Nodes(of, 0), chunks)

    assert usable()
    assert not usable(device="cpu") and not usable(backend="gloo") and not usable(of=(0, 1, 1))
    assert not usable(chunks=near_memory.MOST_CHUNKS + 1)
