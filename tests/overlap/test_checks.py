"""The supplied checker's semantics, one test each; what it does not see, the other check does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlkernel.overlap import checks


class Block(nn.Module):
    """y = x * w. Overlapped schedules may be made wrong in a row, by a factor, or in a gradient."""

    def __init__(self, dtype=torch.float32, row=None, gap=0.0, tilt=0.0, hidden_parameter=False):
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, 8).to(dtype))
        self.extra = nn.Parameter(torch.ones(8).to(dtype))
        self.row, self.gap, self.tilt, self.hide = row, gap, tilt, hidden_parameter
        self.seen = []

    def forward(self, x, overlap="none", comp_only=False):
        self.seen.append((overlap, x.shape[0]))
        y = x * self.w
        if overlap == "none" or not self.hide:
            y = y + 0 * self.extra
        if overlap != "none" and self.row is not None and self.row < len(x):
            y = y.clone()
            y[self.row] += self.gap
        if overlap != "none" and self.tilt:
            y = y + self.tilt * (y - y.detach())  # the same values, other gradients
        return y


def inputs(batch=4, dtype=torch.float32):
    return torch.randn(batch, 3, 8, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("batch, rows", [(1, 1), (2, 2), (5, 2)])
def test_it_looks_at_two_rows_at_most(batch, rows):
    block = Block()
    checks.check_forward(block, inputs(batch), "kernel")
    checks.check_backward(block, inputs(batch), "kernel", "bitwise", 42)
    assert {seen for _, seen in block.seen} == {rows}
    assert {overlap for overlap, _ in block.seen} == {"none", "kernel"}


def test_a_mismatch_says_how_large_and_how_many():
    block = Block(row=1, gap=0.25)
    with pytest.raises(AssertionError, match=r"max abs error 0\.25, 24 / 48 elements mismatch"):
        checks.check_forward(block, inputs(), "with-sm")


def test_forward_has_no_tolerance_in_any_mode():
    """There is no mode to give: one bit is enough."""
    block = Block(row=0, gap=2.0**-24)
    with pytest.raises(AssertionError, match="differs from none"):
        checks.check_forward(block, inputs(), "kernel")


def test_a_third_row_is_seen_by_the_whole_batch_only():
    block = Block(row=2, gap=1.0)
    checks.check_forward(block, inputs(), "kernel")
    checks.check_backward(block, inputs(), "kernel", "approx", 42)
    with pytest.raises(AssertionError, match="whole batch, forward: kernel differs from none"):
        checks.whole_batch(block, inputs(), "kernel")
    assert checks.whole_batch(Block(), inputs(), "kernel")["mismatches"] == 0
    found = checks.whole_batch_backward(Block(), inputs(), "kernel", inputs(), "bitwise")
    assert set(found) == {"input", "w", "extra"}


TILTS = [
    (torch.float32, 5e-6, True), (torch.float32, 2e-5, False),
    (torch.bfloat16, 8e-3, True), (torch.bfloat16, 4e-2, False),
    (torch.float16, 1e-2, True), (torch.float16, 4e-2, False),
]  # fmt: skip


@pytest.mark.parametrize("dtype, tilt, held", TILTS, ids=str)
def test_backward_approx_is_a_frobenius_limit(dtype, tilt, held):
    x, block = inputs(dtype=dtype), Block(dtype, tilt=tilt)
    checks.check_forward(block, x, "kernel")
    if held:
        report = checks.check_backward(block, x, "kernel", "approx", 42)
        assert 0 < report["w"]["frobenius"] <= checks.LIMITS[dtype]
        with pytest.raises(AssertionError, match="torch.equal"):
            checks.check_backward(block, x, "kernel", "bitwise", 42)
    else:
        with pytest.raises(AssertionError, match=r"Frobenius limit .*elements mismatch"):
            checks.check_backward(block, x, "kernel", "approx", 42)


def test_limits_and_clamp():
    assert checks.LIMITS == {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
    zero = torch.zeros(4)
    assert checks.frobenius(torch.full((4,), 1e-13), zero) == pytest.approx(0.2)
    assert checks.frobenius(zero, zero) == 0


def test_upstream_comes_from_seed_plus_seven(monkeypatch):
    given = []
    monkeypatch.setattr(checks, "_compare_gradients", lambda b, x, up, *_: given.append(up))
    checks.check_backward(Block(), inputs(), "kernel", "approx", 42)
    random = torch.Generator().manual_seed(49)
    assert torch.equal(given[0], torch.randn(2, 3, 8, generator=random))


def test_other_gradient_keys_fail():
    with pytest.raises(AssertionError, match=r"other gradients: \['extra'\]"):
        checks.check_backward(Block(hidden_parameter=True), inputs(), "kernel", "approx", 42)


def test_ulp_and_max_abs_are_diagnostics_only():
    """A far ULP distance in one small element passes the Frobenius limit, and is shown."""
    wanted = {"w": torch.tensor([1.0, 1e-30])}
    report = checks.judge_gradients({"w": torch.tensor([1.0, 2e-30])}, wanted, "kernel", "approx")
    assert report["w"]["max_ulp"] > 1e6 and report["w"]["mismatches"] == 1
    assert report["w"]["max_abs"] == pytest.approx(1e-30)


def test_nan_never_passes():
    got, wanted = {"w": torch.tensor([float("nan")])}, {"w": torch.ones(1)}
    for mode in ("bitwise", "approx"):
        with pytest.raises(AssertionError):
            checks.judge_gradients(got, wanted, "kernel", mode)


def test_when_it_runs():
    assert all(checks.applies("approx", o) for o in ("with-sm", "sm-free", "kernel"))
    assert not checks.applies("approx", "none") and not checks.applies("off", "kernel")
    assert not checks.applies("bitwise", "kernel", comp_only=True)
    assert not checks.applies("bitwise", "kernel", large_block=True)


def test_the_timed_output_is_checked_for_its_shape():
    checks.check_shape(inputs(), inputs())
    with pytest.raises(AssertionError, match=r"output \(3, 3, 8\), inputs \(4, 3, 8\)"):
        checks.check_shape(inputs(3), inputs(4))
