"""The fused layer with its kernels and CUDA calls played on the host: addresses, flags, epochs.

Each rank is a thread. kernels/a2a_reference.py plays the GEMMs tile by tile, a copy is a strided
copy, streams do nothing. Judged is what lies where under which flag, who waits for whom, and which
rung all ranks take; bits and the memory model are a device's to show.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch

from rlkernel.collectives.errors import PeerLost
from rlkernel.overlap import faults
from tests.overlap.inputs import differing, trained
from tests.overlap.played import Rank, by_hand, close, together


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
