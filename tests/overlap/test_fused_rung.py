"""Who takes the fused rung: all ranks together or none, played on threads."""

from __future__ import annotations

import threading
import types

import pytest
import torch

from rlkernel import plugin
from rlkernel.collectives.errors import PeerLost
from rlkernel.overlap import fused, fused_kernel, fused_rung, path, settled
from tests.overlap.foreign import ForeignFFN
from tests.overlap.inputs import trained
from tests.overlap.played import Rank, by_hand, close, together


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
        me = local.signals.rank
        asked.append(me)
        return verdicts[me]

    for rank in ranks:
        rank.ffn.comm.all_gather = gatherer(rank.memory.index)
    monkeypatch.setattr(fused_rung, "_known", OfThisThread())
    monkeypatch.setattr(fused_rung, "_proofs", OfThisThread())
    monkeypatch.setattr(fused_rung, "chip", lambda device: threading.get_ident())
    monkeypatch.setattr(fused_rung, "proven", proven)
    monkeypatch.setattr(fused_rung, "refuses", lambda at, like, chunks: None)
    return types.SimpleNamespace(ranks=ranks, verdicts=verdicts, asked=asked)


def rung(rank):
    """What runs a call with gradients, one without, one without communication; and why not."""
    found = [fused_rung.fused_of(rank.ffn, rank.x)]
    with torch.no_grad():
        found += [fused_rung.fused_of(rank.ffn, rank.x, alone) for alone in (False, True)]
    return [bool(fused) for fused, _ in found], [why for _, why in found], found


def test_a_try_runs_with_and_without_gradients(played):
    rank, ways = Rank(0, 2, local=True), []
    forward = rank.fused.forward
    rank.fused.forward = lambda *args: (ways.append(args[-1]), forward(*args))[1]
    fused_rung.proven(rank.at, rank.fused.stage, rank.x, rank.fused)
    assert ways == [True, False]


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


def test_a_call_alone_asks_nobody_and_is_proven_for_its_rank(talking):
    """No thread stands at the other end: whoever asked would wait."""
    rank = talking.ranks[0]
    with torch.no_grad():
        found, why = fused_rung.fused_of(rank.ffn, rank.x, comp_only=True)
    assert found.local and why == "" and talking.asked == [0]
    out = fused_kernel.run(rank.ffn, rank.x, found).detach()
    torch.testing.assert_close(out, rank.ffn(rank.x, "none", comp_only=True).detach())


def test_a_call_alone_whose_bits_differ_is_not_fused(talking):
    talking.verdicts[1] = (False, True)
    rank = talking.ranks[1]
    found, why = fused_rung.fused_of(rank.ffn, rank.x, comp_only=True)
    assert found is None and "the output's bits" in why


def test_what_all_know_counts_for_a_call_alone(talking):
    """Rank 0 alone is right, and the group still runs no fused kernel: nor does rank 0 alone."""
    talking.verdicts[1] = (False, True)

    def work(rank):
        with torch.no_grad():
            alone = fused_rung.fused_of(rank.ffn, rank.x, comp_only=True)[0]
            live = fused_rung.fused_of(rank.ffn, rank.x)[0]
            return alone, live, fused_rung.fused_of(rank.ffn, rank.x, comp_only=True)[0]

    (before, live, after), _ = together(talking.ranks, work)
    assert before is not None and live is None and after is None
    assert sorted(talking.asked) == [0, 1]  # each once, the proof is kept


@pytest.mark.parametrize("chunks, flags", [(1, 1), (4, 4), (8, 8), (64, 8), (None, 1)])
def test_chunks_are_flags_of_a_rank(talking, chunks, flags):
    for rank in talking.ranks:
        rank.ffn.chunks = chunks
        if chunks is None:
            del rank.ffn.chunks
    found = together(talking.ranks, lambda r: fused_rung.fused_of(r.ffn, r.x)[0])
    assert [one.choice.gemm1.chunks for one in found] == [flags] * 2
    assert all(f", {flags} flag(s) a rank" in one.says for one in found)


def test_chunk_counts_share_memory_and_proof(talking):
    def work(rank):
        found = []
        for chunks in (1, 4, 4):
            rank.ffn.chunks = chunks
            found.append(fused_rung.fused_of(rank.ffn, rank.x)[0])
        return found

    for one, four, again in together(talking.ranks, work):
        assert one.memory is four.memory and four is again and one is not four
    assert sorted(talking.asked) == [0, 1]


def test_ranks_of_one_gpu_fall_to_chunks_together(talking, monkeypatch):
    monkeypatch.delenv(fused_rung.SHARED, raising=False)
    monkeypatch.setattr(fused_rung, "chip", lambda device: 7)
    for fused_, why in together(talking.ranks, lambda r: fused_rung.fused_of(r.ffn, r.x)):
        assert fused_ is None and "ranks [0, 1] share a GPU" in why and fused_rung.SHARED in why
    assert not talking.asked


def test_ranks_of_one_gpu_run_fused_where_torch_is_told(talking, monkeypatch):
    monkeypatch.setenv(fused_rung.SHARED, "1")
    monkeypatch.setattr(fused_rung, "chip", lambda device: 7)
    assert all(f for f, _ in together(talking.ranks, lambda r: fused_rung.fused_of(r.ffn, r.x)))


def test_a_package_that_one_rank_lacks_takes_all_down(talking, monkeypatch):
    first = []

    def driver():
        first.append(threading.get_ident())
        if first[0] == threading.get_ident():
            raise ValueError("no package")

    monkeypatch.setattr(fused_rung, "driver", driver)
    for found, why in together(talking.ranks, lambda r: fused_rung.fused_of(r.ffn, r.x)):
        assert found is None and "have no package cuda-bindings" in why


def test_a_rank_lost_in_the_last_call_is_named_behind_it(talking, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(fused_rung, "_known", known := OfThisThread())
    found = together(talking.ranks, lambda r: fused_rung.fused_of(r.ffn, r.x)[0])
    monkeypatch.setattr(fused_rung, "_known", dict(known))
    settled.settled(torch.device("cuda", 0))
    found[1].memory.host[0] = 1 + 1 + 256  # rank 1, combine
    with pytest.raises(PeerLost, match="combine: rank 1 did not come"):
        settled.settled(torch.device("cuda", 0))
    settled.settled(torch.device("cpu"))  # where nothing is left unsaid


@pytest.mark.parametrize("chunks", [1, 3])
def test_somebody_elses_layer_through_the_plugin(talking, monkeypatch, chunks):
    """Written without this package, eager: forward and all gradients, twice, inputs untouched."""
    monkeypatch.setattr(fused, "on_gpu", lambda inputs: True)
    for rank in talking.ranks:
        comm, size = rank.ffn.comm, rank.memory.size
        theirs = ForeignFFN(24 // size, 8, 2, seed=3 + rank.memory.index)
        theirs.ep_group_size, theirs.comm, theirs.chunks = size, comm, chunks
        rank.ffn = theirs
    kept = [rank.x.clone() for rank in talking.ranks]

    def work(rank):
        call = lambda x: plugin.forward_ffn(rank.ffn, x)  # noqa: E731
        return [trained(call, rank.ffn, rank.x, rank.dy) for _ in range(2)]

    with path.listening() as heard:
        got = together(talking.ranks, work)
    for calls, right in zip(got, by_hand(talking.ranks)):
        for call in calls:
            close(call, right)
    assert len(heard) == 4 and {path.rung(one) for one in heard} == {path.FUSED}
    assert all(f"{chunks} flag(s)" in one for one in heard)
    assert all(rank.x.equal(x) for rank, x in zip(talking.ranks, kept))
