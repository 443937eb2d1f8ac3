"""The copy engine's schedule with the CUDA calls played by threads: addresses, flags, epochs, sets.

Each rank is a thread. A copy is a strided copy in host memory, a flag write is an assignment, a
wait spins. Streams run at once, so what is judged is which bytes go where under which flag, and
that no rank can overtake another; not what a device does with it.
"""

from __future__ import annotations

import contextlib
import threading
import time
import types

import pytest
import torch

from rlkernel.overlap import copy_engine, faults, ladder, pipeline
from rlkernel.overlap.layout import layout_of
from rlkernel.overlap.stage import stage_of
from rlkernel.overlap.watch import Wait
from tests.overlap.inputs import differing, drawn, layer, trained
from tests.overlap.played import Stream, by_hand, rank_of, slow_down, together

LIMIT_S = 20.0


class Memory:
    """PeerMemory of P ranks in one process. `shared` is seen by all of them."""

    def __init__(self, index, size, at, shared):
        self.index, self.shared, self.epoch, self.last = index, shared, 0, None
        self.sizes = {"x": at.rows * at.local * at.dim, "out": at.batch * at.tokens * at.dim}
        self.copied = []

    def next_epoch(self):
        self.epoch += 1
        return self.epoch

    def buffer(self, name, which, peer):
        size = self.sizes[name]
        poisoned = torch.full((copy_engine.SETS * size,), float("nan"))
        return self.shared.setdefault((name, peer), poisoned)[which * size : (which + 1) * size]

    def copy_2d(self, to, to_pitch, of, pitch, width, rows, stream):
        assert width <= to_pitch and width <= pitch
        self.copied.append(width * rows)
        to.as_strided((rows, width), (to_pitch, 1)).copy_(of.as_strided((rows, width), (pitch, 1)))

    def signal(self, peer, flag, epoch, stream):
        self.shared["flag", peer, self.index, flag] = epoch

    def wait(self, peer, flag, epoch, stream):
        until = time.monotonic() + LIMIT_S
        while self.shared.get(("flag", self.index, peer, flag), 0) < epoch:
            assert time.monotonic() < until, f"rank {self.index} waits for {peer}'s flag {flag}"
            time.sleep(1e-4)


class Watch:
    def __init__(self):
        self.calls = []

    def before(self, epoch, stage, flags):
        self.calls.append((epoch, stage, flags))
        return Wait(0.0, epoch, stage, flags)

    def check(self): ...


@pytest.fixture
def played(monkeypatch):
    """CUDA's streams do nothing; what is copied is copied at once."""
    lock = threading.Lock()  # setdefault of the shared buffers
    monkeypatch.setattr(copy_engine, "_streams", lambda device, size: [Stream()] * size)
    cuda = types.SimpleNamespace(
        current_stream=lambda device: Stream(), stream=lambda s: contextlib.nullcontext(),
        Event=object,
    )  # fmt: skip
    monkeypatch.setattr(copy_engine, "torch", types.SimpleNamespace(cuda=cuda, Tensor=torch.Tensor))
    return lock


class Rank:
    def __init__(self, me, size, shared, chunks, batch=3, tokens=24, dim=8, mode="live"):
        self.ffn = layer(tokens, dim, 2, rank_of(size, me), seed=9)
        self.x = drawn(me, batch, tokens, dim)
        self.dy = drawn(me, batch, tokens, dim, seed=1)
        self.at = layout_of(self.ffn, self.x)
        self.cut = self.at.slices(chunks)
        self.memory, self.watch, self.mode = Memory(me, size, self.at, shared), Watch(), mode
        self.scale, self.fault = 1, "none"

    def open(self, direction, slices):
        return copy_engine.Pushes(
            self.ffn.comm, self.memory, self.watch, self.at, slices, self.x, direction, self.mode,
            self.scale, self.fault,
        )  # fmt: skip

    def forward(self, x):
        plan = pipeline.Plan(self.at, self.cut, self.cut, stage_of(self.ffn), self.open)
        return pipeline.run(self.ffn, x, plan)


@pytest.mark.parametrize("size, chunks", [(2, 1), (2, 4), (3, 3), (4, 4), (4, 6)])
def test_every_byte_arrives_where_it_belongs(played, size, chunks):
    """Three calls in a row, so that both sets of buffers are written again; forward, backward."""
    shared = {}
    ranks = [Rank(me, size, shared, chunks) for me in range(size)]
    wanted = by_hand(ranks)
    for _ in range(3):
        got = together(ranks, lambda r: trained(r.forward, r.ffn, r.x, r.dy))
        for mine, right in zip(got, wanted):
            for name in right:
                torch.testing.assert_close(mine[name], right[name], rtol=2e-5, atol=2e-5)
    at = ranks[0].at
    assert ranks[0].memory.epoch == 6
    exchange = at.batch * at.tokens * at.dim * (size - 1) // size
    assert sum(ranks[0].memory.copied) == 3 * 4 * exchange, "B*T*D*(P-1)/P, twice a pass"


def test_a_slow_rank_is_not_overtaken(played):
    """One rank computes slowly; its buffers of a call are read before the peers' next call but one
    writes there, whatever the order of threads.
    """
    shared = {}
    ranks = [Rank(me, 2, shared, 4) for me in range(2)]
    wanted = by_hand(ranks)
    slow_down(ranks[1])
    got = together(ranks, lambda r: [trained(r.forward, r.ffn, r.x, r.dy) for _ in range(4)])
    for mine, right in zip(got, wanted):
        for call in mine:
            assert not differing(call, mine[0])
            torch.testing.assert_close(call["w1"], right["w1"], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("fault", faults.FAULTS[1:])
def test_a_broken_order_is_seen(played, fault):
    ranks = [Rank(me, 2, {}, 4) for me in range(2)]
    shared = ranks[0].memory.shared
    for rank in ranks:
        rank.memory.shared, rank.fault = shared, fault

    with torch.no_grad():
        got = together(ranks, lambda r: r.forward(r.x))
    for out, right in zip(got, by_hand(ranks)):
        assert not torch.allclose(out, right["output"], rtol=1e-3, atol=1e-3)


def test_an_input_without_gradient_closes_the_call_all_the_same(played):
    shared = {}
    ranks = [Rank(me, 2, shared, 4) for me in range(2)]

    def work(rank):
        for _ in range(3):
            out = rank.forward(rank.x)
            grads = torch.autograd.grad(out, list(rank.ffn.parameters()), rank.dy)
        return grads

    right = by_hand(ranks)
    for grads, wanted in zip(together(ranks, work), right):
        torch.testing.assert_close(grads[0], wanted["w1"], rtol=2e-5, atol=2e-5)
    assert shared["flag", 0, 1, copy_engine.DONE] == 6
    stages = {stage for _, stage, _ in ranks[0].watch.calls}
    assert stages == {"dispatch", "combine", "combine.dx", "dispatch.dx"}


def test_local_and_preset_send_nothing(played):
    for mode in ("local", "preset"):
        rank = Rank(1, 2, {}, 4, mode=mode)
        out = rank.forward(rank.x)
        assert rank.memory.copied == [] and not rank.watch.calls and rank.memory.epoch == 0
        assert not [key for key in rank.memory.shared if key[0] == "flag"]
        if mode == "local":
            torch.testing.assert_close(out, rank.ffn(rank.x, "none", comp_only=True))


def test_the_ladder_tries_chunks_where_they_will_lie(played):
    """As views of Xlocal, L * D apart, whereas messages leave them l * D apart."""
    rank = Rank(0, 2, {}, 4)
    stage, seen = stage_of(rank.ffn), []
    forward, backward = ladder.proven(rank.at, rank.cut, stage, rank.x, copy_engine.by_copies)
    assert forward and backward in (True, False)  # a CPU's library minds the strides
    for trial in (copy_engine.by_copies, ladder.by_messages):
        for _, _, part in trial(rank.at, rank.x, "forward", rank.cut).dispatch(rank.x):
            seen.append(part.stride())
    assert set(seen) == {(12 * 8, 8, 1), (3 * 8, 8, 1)}


def test_flags_of_each_kind_lie_apart():
    assert copy_engine.BACK == copy_engine.THERE + copy_engine.MOST_CHUNKS
    assert copy_engine.DONE == copy_engine.BACK + copy_engine.MOST_CHUNKS
    assert ladder.CHUNKS <= copy_engine.MOST_CHUNKS
