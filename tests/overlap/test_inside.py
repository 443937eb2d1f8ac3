"""Timelines of fused GEMMs, recorded by the twin on played ranks; which line is recorded."""

from __future__ import annotations

import time

import pytest

from rlkernel.overlap import inside
from rlkernel.overlap.fused_kernel import GEMMS
from rlkernel.records import tiles
from tests.overlap.inputs import trained
from tests.overlap.played import Rank, together


def line(rung, variant):
    return {"rung": rung, "variant": variant, "chunks": int(variant[-1])}


def timed(**us):
    schedules = {f"kernel/{n[1:]}": {"slowest": {"median_us": v}} for n, v in us.items()}
    return {"documented": {"schedules": schedules}}


def test_the_fastest_fused_line_is_recorded_and_no_other():
    lines = [line("fused", "kernel/1"), line("fused", "kernel/4"), line("chunks", "kernel/8")]
    times = timed(_1=9.0, _4=7.0, _8=1.0)
    assert inside.wanted(lines, times, inside.PLUGIN) is lines[1]
    assert inside.wanted(lines, {}, inside.PLUGIN) is lines[0]
    assert inside.wanted(lines, times, "somebody.else") is None
    assert inside.wanted(lines[2:], times, inside.PLUGIN) is None
    assert inside.wanted(lines[2:], {}, inside.PLUGIN) is None


def test_the_call_in_the_middle_is_shown_by_its_least_rank():
    assert inside.median_call([[0.9, 0.2, 0.99, 0.8, 0.97], [0.5, 0.9, 0.98, 0.7, 0.6]]) == 4
    assert inside.median_call([[0.9], [None]]) == 0
    assert inside.median_call([[None, 0.4, 0.6], [None, 0.5, 0.7]]) == 1


@pytest.fixture
def recorded(played):
    """Forward and backward of two ranks, rank 1's pushes `late` s late -> [rank] GEMMs."""

    def run(late: float):
        played.shared.clear()
        ranks = [Rank(me, 2, 2) for me in range(2)]
        for rank in ranks:
            rank.fused = rank.fused.recording()
        push = ranks[1].memory.push
        ranks[1].memory.push = lambda *args: (time.sleep(late), push(*args))
        together(ranks, lambda r: trained(r.forward, r.ffn, r.x, r.dy))
        return [rank.fused.timelines() for rank in ranks]

    return run


def test_each_gemm_tells_its_flags(recorded):
    for me, gemms in enumerate(recorded(0.0)):
        assert tuple(one.name for one in gemms) == GEMMS
        for one in gemms:
            assert set(one.came) == {(1 - me, 0), (1 - me, 1)}
            assert set(one.released) == (set() if one.arrive else {(1 - me, 0), (1 - me, 1)})
            assert tiles.on_the_way(one) is not None
            assert all(tile.begin < tile.end for tile in one.tiles)


def test_a_late_rank_is_seen_inside_the_gemm_that_waits(recorded):
    calm, late = (tiles.summary(recorded(s)[0][0]) for s in (0.0, 0.25))
    assert calm["gemm"] == late["gemm"] == "gemm1"
    assert late["exposed_us"] > 2e5 > calm["exposed_us"]
    assert late["hidden"] < 0.5 and late["longest_wait_us"] > 2e5


def test_recording_keeps_the_memory_and_the_choice(played):
    (rank, _) = (Rank(me, 2, 2) for me in range(2))
    recorder = rank.fused.recording()
    assert recorder.memory is rank.fused.memory
    for name in GEMMS:
        plain, own = getattr(rank.fused.choice, name), getattr(recorder.choice, name)
        assert own.timeline and not plain.timeline and own.lead == plain.lead
    assert recorder.says == rank.fused.says
