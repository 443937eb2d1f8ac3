"""The fused bias + LayerNorm + SiLU gate in the interpreter, against eager torch and FP64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlkernel.compare import bit_report
from rlkernel.kernels import norm_gate as ng
from rlkernel.kernels import norm_gate_backward, norm_gate_forward, reference
from rlkernel.kernels.norm_gate import norm_gate, order_sensitive

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAN = float("nan")
# FP32: Welford's recurrence on rows whose mean is large beside their spread.
LIMITS = {FP32: 2e-5, BF16: 2e-2, FP16: 3e-3}
KINDS = list(LIMITS)
SHAPES = [(2, 2, 264), (2, 1, 512), (3, 1, 7)]


def gradient(n, length, width, dtype, seed=1):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(n, length, width, generator=random).to(dtype)


def within(value, exact, limit):
    """Relative Frobenius error, the measure of the layer's checker."""
    gap = (value.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-12)
    return bool(gap <= limit)  # NaN is not


def few(got, wanted, share):
    """Rows summed in another order round another way now and then, and only then."""
    report = bit_report(got, wanted)
    return report.mismatches <= share * report.elements


def doubles(given):
    return [x.double() for x in given]


def surrounded(x):
    """The same values between NaN in both outer axes; the last one contiguous."""
    room = x.new_full((x.shape[0] + 2, x.shape[1] + 3, x.shape[2] + 8), NAN)
    view = room[1:-1, 2:-1, 4:-4]
    return view.copy_(x), room


def kernels(given, d_h, segment=norm_gate_backward.SEGMENT):
    """(h, d_z, sums, stats) of the kernels, in poisoned outputs."""
    z, bias, *scales = given
    h, stats = d_h.new_full(d_h.shape, NAN), torch.full((4, *z.shape[:2]), NAN)
    ng.norm_gate_forward(z, bias, scales, out=h, stats=stats)
    d_z, sums = z.new_full(z.shape, NAN), torch.full((z.shape[1], 6, d_h.shape[2]), NAN)
    norm_gate_backward.launch(d_h, z, bias, scales, stats, d_z, sums, segment=segment)
    return h, d_z, sums, stats


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_eager_torch_and_fp64(shape, dtype):
    given, d_h = order_sensitive(*shape, dtype), gradient(*shape, dtype)
    leaves = [x.clone().requires_grad_() for x in given]
    h = norm_gate(*leaves)
    h.backward(d_h)
    assert within(h.detach(), reference.norm_gate(*doubles(given)), LIMITS[dtype])
    if dtype != FP32:
        assert few(h.detach(), reference.norm_gate(*given), 0.005)
    wanted = reference.norm_gate_backward(d_h.double(), *doubles(given))
    for leaf, exact in zip(leaves, wanted):
        assert leaf.grad.dtype == dtype and within(leaf.grad, exact, LIMITS[dtype])


@pytest.mark.parametrize("halves", [False, True])
def test_both_forms_of_the_backward(halves, monkeypatch):
    config = norm_gate_backward.Config(2, 1, halves)
    monkeypatch.setattr(norm_gate_backward, "default_config", lambda *_: config)
    given, d_h = order_sensitive(3, 1, 132, BF16), gradient(3, 1, 132, BF16)
    _, d_z, sums, _ = kernels(given, d_h, segment=2)
    wanted = reference.norm_gate_backward(d_h.double(), *doubles(given))
    for value, exact in zip((d_z, *ng.parameter_gradients(sums, BF16)), wanted):
        assert within(value, exact, LIMITS[BF16])


@pytest.mark.parametrize("hold", [None, 0, 1])
def test_a_row_read_twice_has_the_bits_of_a_row_held(hold, monkeypatch):
    given = order_sensitive(2, 1, 520, FP32)
    held = norm_gate(*given)
    assert norm_gate_forward.default_config(520).hold == 2
    config = norm_gate_forward.Config(hold)
    monkeypatch.setattr(norm_gate_forward, "default_config", lambda *_: config)
    assert bit_report(norm_gate(*given), held)


def test_statistics_of_a_row():
    given, d_h = order_sensitive(2, 3, 264, FP32), gradient(2, 3, 264, FP32)
    stats = kernels(given, d_h)[3].double()
    halves = (given[0] + given[1]).double().chunk(2, -1)
    for half, mean, rstd in zip(halves, stats[::2], stats[1::2]):
        assert torch.allclose(mean, half.mean(-1), rtol=1e-6, atol=1e-6)
        wanted = (half.var(-1, correction=0) + ng.EPS).rsqrt()
        assert torch.allclose(rstd, wanted, rtol=1e-6, atol=0)


def merged(own, other):
    """Two parts of rows, (mean, sum of squares, count) each, as one; every operation in FP32."""
    (mean_b, square_b, count_b), (mean_a, square_a, count_a) = own, other
    count = count_a + count_b
    share = np.where(count > 0, np.float32(1) / np.maximum(count, np.float32(1)), np.float32(0))
    share_a, share_b, delta = count_a * share, count_b * share, mean_b - mean_a
    square = square_a + square_b + delta * delta * count_a * share_b
    return share_a * mean_a + share_b * mean_b, square, count


def in_the_order_of_torch(row, lanes=32):
    """(mean, variance) of FP32 [H] as 128 threads of torch's CUDA kernel sum them."""
    first = np.arange(128) * 4
    mean, square, count = (np.zeros(128, np.float32) for _ in range(3))
    for step in range(0, len(row), 512):
        for col in range(step, step + 4):
            there = first + col < len(row)
            x, more = row[np.minimum(first + col, len(row) - 1)], count + np.float32(1)
            later = (x - mean) * (np.float32(1) / more) + mean
            total = (x - mean) * (x - later) + square
            mean, square = np.where(there, later, mean), np.where(there, total, square)
            count = np.where(there, more, count)
    parts = [part.reshape(-1, lanes) for part in (mean, square, count)]
    while parts[0].shape[1] > 1:
        half = parts[0].shape[1] // 2
        parts = merged([part[:, :half] for part in parts], [part[:, half:] for part in parts])
    while len(parts[0]) > 1:
        half = len(parts[0]) // 2
        parts = merged([part[:half] for part in parts], [part[half:] for part in parts])
    return parts[0][0, 0], parts[1][0, 0] / np.float32(len(row))


@pytest.mark.parametrize("width", [264, 512, 520])
def test_rows_are_summed_in_the_order_of_torch(width):
    given, d_h = order_sensitive(2, 1, width, FP32), gradient(2, 1, width, FP32)
    means = kernels(given, d_h)[3][0]
    rows = (given[0] + given[1])[:, 0, :width].numpy()
    wanted = [in_the_order_of_torch(row)[0] for row in rows]
    assert bit_report(means[:, 0], torch.tensor(wanted))
    other = [in_the_order_of_torch(row, lanes=64)[0] for row in rows]
    assert not bit_report(means[:, 0], torch.tensor(other))


def test_chunks_have_the_bits_of_the_whole():
    given, d_h = order_sensitive(3, 3, 72, BF16), gradient(3, 3, 72, BF16)
    z, bias, *scales = given
    h, d_z, sums, _ = kernels(given, d_h, segment=2)
    for low, high in [(0, 1), (1, 3)]:
        chunk = (z[:, low:high], bias[low:high], *scales)
        part = kernels(chunk, d_h[:, low:high], segment=2)
        for got, wanted in zip(part, (h[:, low:high], d_z[:, low:high], sums[low:high])):
            assert bit_report(got, wanted)
    part = kernels((z[2:], bias, *scales), d_h[2:])
    assert bit_report(part[0], h[2:]) and bit_report(part[1], d_z[2:])


def test_rows_anywhere_and_nothing_else_written():
    given, d_h = order_sensitive(2, 3, 40, BF16), gradient(2, 3, 40, BF16)
    wanted = kernels(given, d_h)
    (z, _), (d_h, _) = surrounded(given[0]), surrounded(d_h)
    (h, h_room), (d_z, d_z_room) = surrounded(wanted[0] * NAN), surrounded(wanted[1] * NAN)
    bias, *scales = given[1:]
    assert norm_gate(z, bias, *scales, out=h) is h
    stats = wanted[3]
    ng.norm_gate_backward(d_h, z, bias, scales, stats, d_z=d_z)
    assert bit_report(h, wanted[0]) and bit_report(d_z, wanted[1])
    assert (~h_room.isnan()).sum() == h.numel() and (~d_z_room.isnan()).sum() == d_z.numel()


def test_an_expanded_gradient_and_an_empty_batch():
    given = [x.requires_grad_() for x in order_sensitive(2, 1, 16, FP32)]
    norm_gate(*given).sum().backward()
    ones = torch.ones(2, 1, 16, dtype=torch.float64)
    wanted = reference.norm_gate_backward(ones, *doubles(given))
    assert all(within(x.grad, exact, 1e-5) for x, exact in zip(given, wanted))
    empty = [given[0].detach()[:0].requires_grad_(), *given[1:]]
    norm_gate(*empty).sum().backward()
    assert empty[0].grad.shape == (0, 1, 32)


def test_a_missing_rounding_is_noticed(monkeypatch):
    given = order_sensitive(2, 2, 264, BF16)
    monkeypatch.setattr(norm_gate_forward, "rounded", lambda x, *_: x)
    assert not few(norm_gate(*given), reference.norm_gate(*given), 0.02)


def test_a_missing_term_of_the_gradient_is_noticed(monkeypatch):
    shape = (2, 1, 40)
    given, d_h = order_sensitive(*shape, BF16), gradient(*shape, BF16)
    exact = reference.norm_gate_backward(d_h.double(), *doubles(given))[0]
    assert within(kernels(given, d_h)[1], exact, LIMITS[BF16])
    whole = norm_gate_backward._input
    without = lambda scaled, normal, rstd, level, slope, width: whole(  # noqa: E731
        scaled, normal, rstd, level, slope * 0.0, width
    )
    monkeypatch.setattr(norm_gate_backward, "_input", without)
    assert not within(kernels(given, d_h)[1], exact, LIMITS[BF16])


def test_a_segment_left_out_is_noticed(monkeypatch):
    given, d_h = order_sensitive(4, 1, 24, FP32), gradient(4, 1, 24, FP32)
    sums = kernels(given, d_h, segment=2)[2]
    assert within(sums, kernels(given, d_h)[2], 1e-6)
    add = norm_gate_backward.ordered_sum
    monkeypatch.setattr(norm_gate_backward, "ordered_sum", lambda parts, out: add(parts[:-1], out))
    assert not within(kernels(given, d_h, segment=2)[2], sums, 1e-3)


def test_refusals():
    good = list(order_sensitive(2, 3, 8, BF16))
    for error, match, at, bad in [
        (TypeError, "z is torch.float64", 0, good[0].double()),
        (TypeError, "bias is torch.float32", 1, good[1].float()),
        (ValueError, r"z \(2, 3, 15\): expected \[N, L, 2H\]", 0, good[0][..., :15]),
        (ValueError, r"bias \(2, 16\) against z .* expected \(3, 16\)", 1, good[1][:2]),
        (ValueError, r"beta_gate \(7,\)", 5, good[5][:7]),
        (ValueError, "z has strides .* contiguous", 0, good[0].repeat(1, 1, 2)[..., ::2]),
        (ValueError, "gamma_x on meta", 2, good[2].to("meta")),
    ]:
        with pytest.raises(error, match=match):
            norm_gate(*(bad if i == at else x for i, x in enumerate(good)))
    out = torch.empty(2, 3, 8, dtype=BF16)
    with pytest.raises(ValueError, match="out cannot take part in autograd"):
        norm_gate(good[0].requires_grad_(), *good[1:], out=out)
    with torch.no_grad():
        assert norm_gate(*good, out=out) is out
