"""Bit reports, ULPs and drift, on inputs whose answer is known by hand."""

import math

import numpy as np
import pytest
import torch

from rlkernel.compare import bit_report, digest, drift, rounding_bound, ulp_distance, ulp_histogram


def from_bits(*patterns):
    return torch.tensor(patterns, dtype=torch.int32).view(torch.float32)


def test_signed_zeros_and_nan_payloads_differ():
    report = bit_report(torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]))
    assert (report.mismatches, report.elements, report.first) == (1, 2, (1,))
    assert not bit_report(from_bits(0x7FC00000), from_bits(0x7FC00001))
    assert bit_report(from_bits(0x7FC00001), from_bits(0x7FC00001))


def test_first_difference_and_words():
    left = torch.zeros(2, 3)
    right = left.clone()
    right[1, 2] = 2.0
    report = bit_report(left, right)
    assert str(report) == "1 / 6 elements; first at [1, 2]: 0.0 against 2.0"
    assert str(bit_report(left, left)) == "0 / 6 elements"


def test_layout_does_not_matter_and_shape_or_dtype_do():
    x = torch.randn(3, 4)
    assert bit_report(x.t(), x.t().contiguous())
    with pytest.raises(ValueError, match="cannot compare bits"):
        bit_report(x, x.t())
    with pytest.raises(ValueError, match="cannot compare bits"):
        bit_report(x, x.bfloat16())
    assert not bit_report(torch.tensor(1.0), torch.tensor(2.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ulp_counts_representable_steps(dtype):
    one = torch.ones(1, dtype=dtype)
    up = torch.nextafter(one, one * 2) if dtype == torch.float32 else _next(one)
    assert ulp_distance(up, one).item() == 1
    assert ulp_distance(-one, one).item() == 2 * ulp_distance(one, one * 0).item()
    assert ulp_distance(one * 0, -one * 0).item() == 0


def _next(x):
    return (x.view(torch.int16) + 1).view(x.dtype)


def test_ulp_histogram_counts_every_element_once():
    base = np.float32(1.0).view(np.int32).item()
    left = from_bits(base, base, base, base, base, base, base)
    right = from_bits(base, base + 1, base + 2, base + 4, base + 9, base - 300, base + 70000)
    assert ulp_histogram(left, right) == {
        "0": 1, "1": 1, "2": 1, "<=4": 1, "<=16": 1, "<=256": 0, "<=65536": 1, "more": 1,
    }  # fmt: skip


def test_drift_by_hand():
    reference = torch.zeros(100)
    reference[0] = 2.0
    value = reference + torch.arange(1, 101) / 100
    report = drift(value, reference)
    assert report.max_abs == pytest.approx(1.0)
    assert report.p95 == pytest.approx(0.95) and report.p99 == pytest.approx(0.99)
    assert report.mean_abs == pytest.approx(0.505)
    expected = math.sqrt(sum((i / 100) ** 2 for i in range(1, 101))) / 2
    assert report.rel_l2 == pytest.approx(expected)
    assert len(report.ecdf) == 21 and report.ecdf[0] == pytest.approx(0.01)
    assert list(report.ecdf) == sorted(report.ecdf) and report.ecdf[-1] == report.max_abs


@pytest.mark.parametrize("scale", [2.0**-40, 1.0, 2.0**40])
def test_relative_l2_does_not_depend_on_the_scale(scale):
    """Gradients are small: a norm below one must not make their errors look smaller."""
    reference = torch.tensor([3.0, 4.0]) * scale
    assert drift(reference * 1.5, reference).rel_l2 == pytest.approx(0.5)


def test_drift_of_nan_is_infinite_and_of_equal_infinities_nothing():
    assert drift(torch.tensor([math.nan, 1.0]), torch.tensor([1.0, 1.0])).max_abs == math.inf
    assert drift(torch.tensor([1.0]), torch.tensor([math.nan])).max_abs == math.inf
    assert drift(torch.tensor([math.inf]), torch.tensor([math.inf])).max_abs == 0


def test_drift_refuses_what_says_nothing():
    with pytest.raises(ValueError, match="empty"):
        drift(torch.empty(0), torch.empty(0))
    with pytest.raises(ValueError, match="cannot compare shapes"):
        drift(torch.zeros(2), torch.zeros(1, 2))


def test_rounding_bound():
    signal = torch.tensor([-3.0, 2.0])
    assert rounding_bound(torch.float32, 16, signal) == pytest.approx(4 * 2**-23 * 4 * 3)
    assert rounding_bound(torch.bfloat16, 16, signal) == pytest.approx(4 * 2**-8 * 4 * 3)


def test_digest_sees_bits_shape_and_dtype():
    x = torch.zeros(4)
    assert digest(x) == digest(x.clone()) and len(digest(x)) == 64
    others = [digest(-x), digest(x.view(2, 2)), digest(x.int()), digest(x, x), digest(x[0])]
    assert len({digest(x), *others}) == 6
