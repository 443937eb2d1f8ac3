"""One SGD step by hand, and how a signal is judged."""

import math

import pytest
import torch

from rlkernel.reconstruct import step
from rlkernel.reconstruct.step import Pair


def judge(twin, dense, length, bound, dtype=torch.float32):
    return step.compare_signal(Pair(twin, dense, length), dtype, bound)


def test_one_step_by_hand():
    weights, x = {"w": torch.tensor([2.0, 3.0])}, torch.tensor([1.0, -1.0])
    target = torch.tensor([0.0, 0.0])
    half = step.backward(lambda w, x: w["w"] * x, weights, x, target, 2)
    done = step.update(half, half.loss, half.grads, weights, 0.1)
    assert done.loss.item() == pytest.approx((4 + 9) / 2)
    assert done.grads["w"].tolist() == pytest.approx([2.0, 3.0])
    assert done.input_grad.tolist() == pytest.approx([4.0, -9.0])
    assert done.updated["w"].tolist() == pytest.approx([1.8, 2.7])
    assert weights["w"].tolist() == [2.0, 3.0] and not weights["w"].requires_grad


def test_a_fixed_bound_is_the_only_limit():
    dense = torch.ones(4)
    report = judge(dense + 0.25, dense, 100, 0.5)
    assert report["excess"] == pytest.approx(0.5) and report["rel_l2_bound"] is None
    assert (report["mismatches"], report["elements"]) == (4, 4)


def test_without_one_the_stricter_of_two_limits_decides():
    dense = torch.ones(100)
    spike = dense.clone()
    spike[0] += 4 * 2**-23 * 10 * 3
    assert judge(spike, dense, 100, None)["excess"] == pytest.approx(3, rel=0.01)
    shifted = dense + 2**-23 * 8
    assert judge(shifted, dense, 1_000_000, None)["excess"] == pytest.approx(2)


def test_the_block_s_dtype_sets_the_rounding_step():
    dense = torch.ones(100)
    shifted = dense + 2**-8
    assert judge(shifted, dense, 1, None)["excess"] > 1000
    assert judge(shifted, dense, 1, None, torch.bfloat16)["excess"] == pytest.approx(0.25)


def test_nan_is_out_of_every_bound_and_equality_within_a_zero_one():
    zeros = torch.zeros(3)
    assert judge(zeros, zeros, 4, None)["excess"] == 0
    broken = torch.tensor([0.0, math.nan, 0.0])
    report = judge(broken, torch.ones(3), 4, 1e-7)
    assert report["excess"] > 1


def test_worst_and_first_wrong():
    reports = [{"excess": e, "max_abs": 1.0, "mismatches": 1, "elements": 5} for e in (0.5, 2.0)]
    worst = step.worst(reports)
    assert worst["rank"] == 1 and worst["mismatches"] == 2 and worst["elements"] == 10
    signals = {"output": reports[0], "loss": reports[1], "input_grad": reports[1]}
    assert step.first_wrong(signals) == "loss"
    assert step.first_wrong({"output": reports[0]}) is None
