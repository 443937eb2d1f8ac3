"""The A2A-FFN around the fused pass, forward and backward by chunks: the bits of one piece."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from rlkernel.experiments.a2a_gemm import LIMIT
from rlkernel.overlap import ladder, pipeline, preset_layer, stage
from rlkernel.overlap.layout import Layout

AT = Layout(batch=1, tokens=3, dim=16, hidden=24, ranks=1)
FUSED, PLAIN = stage.Fused(1e-5), stage.Torch((1e-5, 1e-5))
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def through(trial, how, forward, backward):
    slices = [AT.slices(chunks) for chunks in (forward, backward)]
    route = partial(ladder.by_messages, AT, trial.x)
    return trial.through(pipeline.Plan(AT, *slices, how, route))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_of_the_one_pass(dtype):
    trial = ladder.Try(AT, torch.empty(0, dtype=dtype))
    whole = through(trial, FUSED, 1, 1)
    for forward, backward in ((2, 2), (3, 1), (1, 3)):
        cut = through(trial, FUSED, forward, backward)
        assert all(torch.equal(a, b) for a, b in zip(cut, whole)), (forward, backward)
    for got, wanted in zip(whole, through(trial, PLAIN, 1, 1), strict=True):
        gap = (got.double() - wanted.double()).norm() / wanted.double().norm()
        assert gap < DTYPES[dtype], gap


def test_a_part_of_the_sums_that_is_not_filled_would_show():
    trial = ladder.Try(AT, torch.empty(0))
    whole = through(trial, FUSED, 1, 1)
    broken = type("Broken", (stage.Fused,), {"sums": lambda *a: stage.Fused.sums(*a).fill_(7)})(
        1e-5
    )
    real = stage.norm_gate.norm_gate_backward

    def not_the_last(dh, z, bias, norms, stats, dz, sums):
        real(dh, z, bias, norms, stats, dz, sums if len(skipped) < 1 else sums.clone())
        skipped.append(1)

    skipped = []
    stage.norm_gate.norm_gate_backward = not_the_last
    try:
        cut = through(trial, broken, 2, 2)
    finally:
        stage.norm_gate.norm_gate_backward = real
    same = [torch.equal(a, b) for a, b in zip(cut, whole)]
    assert same == [True, True, True, False, True, True, False, False, False, False]


def test_the_pass_is_held_against_fp64():
    at = Layout(batch=5, tokens=3, dim=16, hidden=24, ranks=1)
    bench = preset_layer.Pass(at, torch.device("cpu"), 3)
    assert 0 < bench.error() <= LIMIT
    bench.stats[0] += 0.1
    assert bench.error() > LIMIT, "a wrong mean is not noticed"
