"""The fused layer with its kernels and CUDA calls played on the host: addresses, flags, epochs.

Each rank is a thread. kernels/a2a_reference.py plays the GEMMs tile by tile, a copy is a strided
copy, streams do nothing. Judged is what lies where under which flag, who waits for whom, and which
rung all ranks take; bits and the memory model are a device's to show.
"""

from __future__ import annotations

import ctypes
import threading
import time
import types
from dataclasses import replace

import pytest
import torch

from rlkernel.collectives.errors import PeerLost
from rlkernel.kernels import a2a_reference
from rlkernel.kernels.a2a_gemm import Schedule
from rlkernel.overlap import faults, fused_kernel, fused_memory, fused_rung
from rlkernel.overlap.fused_kernel import Choice, Fused
from rlkernel.overlap.fused_memory import FusedMemory
from rlkernel.overlap.layout import layout_of
from rlkernel.overlap.stage import stage_of
from tests.overlap.inputs import differing, drawn, layer, trained
from tests.overlap.played import Stream, by_hand, rank_of, together


class Memory:
    """PeerMemory of one of P ranks in one process; `shared` is seen by all of them."""

    def __init__(self, comm, sizes, dtype, flags, shared):
        link = comm.links["ep"]
        self.sizes, self.index, self.size = sizes, link.index, link.size
        self.shared, self.kinds = shared, dict.fromkeys(sizes, dtype) | {"flags": torch.int32}
        self.counts = {name: 2 * count for name, count in sizes.items()}
        self.counts["flags"] = self.size * flags

    def table(self, name, peer):
        kind = self.kinds[name]
        empty = 0 if kind == torch.int32 else float("nan")
        made = torch.full((self.counts[name],), empty, dtype=kind)
        return self.shared.setdefault((name, peer), made)

    def buffer(self, name, which, peer):
        size = self.sizes[name]
        return self.table(name, peer)[which * size : (which + 1) * size]


class Driver:
    """The runtime's two copies, on host memory."""

    cudaMemcpyKind = types.SimpleNamespace(cudaMemcpyDeviceToDevice=3)

    def __init__(self):
        self.copied = []

    def cudaMemcpy2DAsync(self, to, to_pitch, of, pitch, width, rows, kind, stream):
        assert width <= to_pitch and width <= pitch
        self.copied.append(width * rows)
        for row in range(rows):
            ctypes.memmove(to + row * to_pitch, of + row * pitch, width)
        return (0,)

    def cudaMemcpyAsync(self, to, of, count, kind, stream):
        ctypes.memmove(to, of, count)
        return (0,)


@pytest.fixture
def played(monkeypatch):
    """.shared: what ranks have mapped; .runtime; the twin instead of the kernels."""
    runtime, shared = Driver(), {}
    cuda = types.SimpleNamespace()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: Stream())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    for module in (fused_memory, fused_rung):
        monkeypatch.setattr(module, "driver", lambda: (runtime, cuda))
    monkeypatch.setattr(fused_memory, "PeerMemory", lambda *at: Memory(*at, shared))
    monkeypatch.setattr(fused_kernel, "A2AGemm", a2a_reference.A2AGemm)
    return types.SimpleNamespace(runtime=runtime, shared=shared)


class Rank:
    def __init__(self, me, size, flags=1, batch=3, tokens=24, dim=8, limit_s=20.0, **more):
        comm = rank_of(size, me)
        self.ffn = layer(tokens, dim, 2, comm, seed=9)
        self.x, self.dy = drawn(me, batch, tokens, dim), drawn(me, batch, tokens, dim, seed=1)
        self.at = layout_of(self.ffn, self.x)
        one = Schedule(chunks=flags, lead=1, bn=128, raster=2)
        choice = Choice.of(self.at) if flags == 1 else Choice(one, one, one, one)
        self.memory = FusedMemory(comm, self.at, self.x.dtype)
        limited = replace(self.memory.signals, limit_ns=int(limit_s * 1e9))
        self.memory.signals = limited
        made = {"memory": self.memory, "choice": choice, **more}
        self.fused = Fused(comm, self.at, stage_of(self.ffn), self.x.dtype, **made)

    def forward(self, x):
        return fused_kernel.run(self.ffn, x, self.fused)


def close(got, wanted):
    for name, right in wanted.items():
        torch.testing.assert_close(got[name], right, rtol=2e-5, atol=2e-5, msg=name)


@pytest.mark.parametrize("size, flags", [(2, 1), (2, 3), (3, 2), (4, 1), (4, 4)])
def test_every_element_arrives_where_it_belongs(played, size, flags):
    """Three calls in a row, so that both sets of buffers are written again; forward, backward."""
    ranks = [Rank(me, size, flags) for me in range(size)]
    wanted = by_hand(ranks)
    for _ in range(3):
        got = together(ranks, lambda r: trained(r.forward, r.ffn, r.x, r.dy))
        for mine, right in zip(got, wanted):
            close(mine, right)
    at = ranks[0].at
    assert {tuple(r.memory.signals.words.tolist()) for r in ranks} == {(7, 6)}
    assert not any(r.memory.signals.counters.any() or r.memory.host.any() for r in ranks)
    pushed = at.batch * at.tokens * at.dim * 4  # bytes of one exchange, the own slices included
    assert sum(played.runtime.copied) == 3 * 2 * size * pushed


def test_rows_beyond_a_tile_and_columns_beyond_one(played):
    ranks = [Rank(me, 2, 2, batch=130, tokens=4, dim=136) for me in range(2)]
    got = together(ranks, lambda r: trained(r.forward, r.ffn, r.x, r.dy))
    for mine, right in zip(got, by_hand(ranks)):
        torch.testing.assert_close(mine["output"], right["output"], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine["w1"], right["w1"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("part", ["arriving", "leaving", "begin"])
def test_a_slow_rank_is_not_overtaken(played, part):
    """Whatever a rank is slow with, its buffers are read before a peer's later call writes them."""
    ranks = [Rank(me, 2, 2) for me in range(2)]
    wanted, slow = by_hand(ranks), getattr(ranks[1].fused, part)
    setattr(ranks[1].fused, part, lambda *args: (time.sleep(0.03), slow(*args))[1])
    got = together(ranks, lambda r: [trained(r.forward, r.ffn, r.x, r.dy) for _ in range(4)])
    for mine, right in zip(got, wanted):
        for call in mine:
            assert not differing(call, mine[0])
            close(call, right)


def test_inputs_and_what_callers_hold_are_left_alone(played):
    ranks = [Rank(me, 2) for me in range(2)]
    kept = [r.x.clone() for r in ranks]

    def work(rank):
        with torch.no_grad():
            first = rank.forward(rank.x)
            held = first.clone()
            for n in range(1, 4):
                rank.forward(rank.x * n)
        return first.equal(held)

    assert all(together(ranks, work))
    assert all(r.x.equal(x) for r, x in zip(ranks, kept))


@pytest.mark.parametrize("fault", faults.FAULTS[1:])
def test_a_broken_order_is_seen(played, fault):
    ranks = [Rank(me, 2, 2, fault=fault) for me in range(2)]
    with torch.no_grad():
        got = together(ranks, lambda r: r.forward(r.x))
    for out, right in zip(got, by_hand(ranks)):
        assert not torch.allclose(out, right["output"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("stage", ["dispatch", "combine"])
def test_a_rank_that_does_not_come_is_named_by_all(played, stage):
    """Rank 1 of three does not call, or stops behind its dispatch; when it comes at last it finds
    every flag set, and must say so all the same.
    """
    ranks = [Rank(me, 3, limit_s=0.3) for me in range(3)]
    gave_up = threading.Event()
    if stage == "combine":
        leaving = ranks[1].fused.leaving
        ranks[1].fused.leaving = lambda *args: (gave_up.wait(20), leaving(*args))[1]

    def work(rank):
        with torch.no_grad():
            if stage == "dispatch" and rank is ranks[1]:
                gave_up.wait(20)
            rank.forward(rank.x)
            if rank is ranks[0]:
                gave_up.set()
            with pytest.raises(PeerLost, match=f"{stage}: rank 1 did not come") as said:
                rank.forward(rank.x)
        return said.value

    for error in together(ranks, work):
        assert error.ranks == (1,) and error.site == stage


def test_local_sends_nothing_and_waits_for_nobody(played):
    rank = Rank(1, 2, local=True)
    out = rank.forward(rank.x)
    torch.testing.assert_close(out, rank.ffn(rank.x, "none", comp_only=True))
    assert not played.runtime.copied and not played.shared["flags", 0].any()


def test_payloads_that_are_padded_are_sent_as_often(played):
    ranks = [Rank(me, 2, scale=3) for me in range(2)]
    got = together(ranks, torch.no_grad()(lambda r: r.forward(r.x)))
    for out, right in zip(got, by_hand(ranks)):
        torch.testing.assert_close(out, right["output"], rtol=2e-5, atol=2e-5)
    at = ranks[0].at
    assert sum(played.runtime.copied) == 3 * 2 * at.batch * at.local * at.dim * 4


# -- the ladder ------------------------------------------------------------------------------------


class OfThisThread(dict):
    """What one rank remembers; ranks are threads here."""

    def __contains__(self, key):
        return super().__contains__((threading.get_ident(), key))

    def __getitem__(self, key):
        return super().__getitem__((threading.get_ident(), key))

    def __setitem__(self, key, value):
        super().__setitem__((threading.get_ident(), key), value)


@pytest.fixture
def talking(played, monkeypatch):
    """Two ranks on a device that is fit; `proven` says what each rank is told that it saw."""
    ranks = [Rank(me, 2) for me in range(2)]
    meeting, said, asked = threading.Barrier(2, timeout=20), [None, None], []
    verdicts = [(True, True), (True, True)]

    def gatherer(me):
        def all_gather(x, site, axis):
            said[me] = x
            meeting.wait()
            both = torch.cat(said)
            meeting.wait()
            return both

        return all_gather

    def proven(at, stage, like, local):
        (me,) = (r.memory.index for r in ranks if r.x is like)
        asked.append(me)
        return verdicts[me]

    for rank in ranks:
        rank.ffn.comm.all_gather = gatherer(rank.memory.index)
    monkeypatch.setattr(fused_rung, "_known", OfThisThread())
    monkeypatch.setattr(fused_rung, "proven", proven)
    monkeypatch.setattr(fused_rung, "refuses", lambda at, like, chunks: None)
    return types.SimpleNamespace(ranks=ranks, verdicts=verdicts, asked=asked)


def rung(rank):
    """What runs a call with gradients, one without, one without communication; and why not."""
    found = [fused_rung.fused_of(rank.ffn, rank.x)]
    with torch.no_grad():
        found += [fused_rung.fused_of(rank.ffn, rank.x, alone) for alone in (False, True)]
    return [bool(fused) for fused, _ in found], [why for _, why in found], found


def test_what_is_proven_by_all_ranks_runs_fused_and_is_asked_once(talking):
    for ran, why, found in together(talking.ranks, rung):
        assert ran == [True] * 3 and why == [""] * 3
        assert [fused.local for fused, _ in found] == [False, False, True]
    assert sorted(talking.asked) == [0, 1]


def test_a_mismatch_on_one_rank_takes_all_ranks_down(talking):
    talking.verdicts[1] = (False, True)
    for ran, why, _ in together(talking.ranks, rung):
        assert ran == [False] * 3 and "the output's bits" in why[0]


def test_gradients_that_differ_on_one_rank_leave_the_forward_fused(talking):
    talking.verdicts[0] = (True, False)
    for ran, why, _ in together(talking.ranks, rung):
        assert ran == [False, True, True] and "the gradients' bits" in why[0]


def test_a_call_alone_asks_nobody(talking):
    rank = talking.ranks[0]
    assert fused_rung.fused_of(rank.ffn, rank.x, comp_only=True)[0] is None
    assert not talking.asked
