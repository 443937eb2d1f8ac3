"""SwiGLU in the interpreter against eager torch on the CPU, over every BF16 gate there is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlkernel.compare import bit_report, bits, ulp_distance
from rlkernel.kernels import reference, swiglu
from rlkernel.kernels.swiglu import swiglu_backward, swiglu_forward
from tests.kernels.inputs import LAYOUTS, laid_out, matrix, poisoned

BF16 = torch.bfloat16


def census():
    """(d_hidden, gate, up), [64, 1024]: every BF16 pattern as a gate."""
    gate = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(BF16).view(64, 1024)
    return matrix(64, 1024, 1), gate, matrix(64, 1024, 2)


def same_exponential(gate):
    """Where numpy's exp, which the interpreter uses, has the bits of torch's."""
    x = -gate.float()
    with np.errstate(over="ignore", invalid="ignore"):
        return torch.from_numpy(np.exp(x.numpy()).view(np.int32)) == torch.exp(x).view(torch.int32)


def check(got, wanted, gate):
    """Equal bits where the exponentials agree, one BF16 step elsewhere, NaN in the same places."""
    agree, numbers = same_exponential(gate), ~wanted.isnan()
    assert torch.equal(got.isnan(), ~numbers)
    report = bit_report(got[agree & numbers], wanted[agree & numbers])
    assert report, report
    rest = ~agree & numbers & wanted.isfinite()
    assert not rest.any() or ulp_distance(got[rest], wanted[rest]).max() <= 1


def forward(gate, up, layout="rows"):
    hidden = poisoned(*gate.shape, BF16, layout)
    assert swiglu_forward(gate, up, hidden) is hidden
    return hidden


def backward(d_hidden, gate, up, layout="rows", again=True):
    out = [poisoned(*gate.shape, BF16, layout) for _ in range(3)]
    swiglu_backward(d_hidden, gate, up, out[0], out[1], out[2] if again else None)
    return out


def test_every_gate():
    d_hidden, gate, up = census()
    check(forward(gate, up), reference.swiglu_forward(gate, up), gate)
    d_gate, d_up, hidden = backward(d_hidden, gate, up)
    wanted = reference.swiglu_backward(d_hidden, gate, up)
    check(d_gate, wanted[0], gate)
    check(d_up, wanted[1], gate)
    assert torch.equal(bits(hidden), bits(forward(gate, up)))


def test_the_exponentials_agree_often_enough_to_mean_something():
    assert same_exponential(census()[1]).float().mean() > 0.5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    d_hidden, gate, up = (laid_out(matrix(5, 37, seed), layout) for seed in range(3))
    check(forward(gate, up, layout), reference.swiglu_forward(gate, up), gate)
    wanted = reference.swiglu_backward(d_hidden, gate, up)
    for got, want in zip(backward(d_hidden, gate, up, layout), wanted):
        check(got, want, gate)


@pytest.mark.parametrize("width", [1, 1023, 1024, 2500])
def test_two_halves_of_one_buffer(width):
    both = matrix(3, 2 * width, 1)
    gate, up = both[:, :width], both[:, width:]
    check(forward(gate, up), reference.swiglu_forward(gate, up), gate)
    into = poisoned(3, 2 * width, BF16)
    d_hidden = matrix(3, width, 2)
    swiglu_backward(d_hidden, gate, up, into[:, :width], into[:, width:])
    for got, want in zip(into.chunk(2, 1), reference.swiglu_backward(d_hidden, gate, up)):
        check(got, want, gate)


def test_results_may_take_the_place_of_the_inputs():
    d_hidden, gate, up = (matrix(4, 100, seed) for seed in range(3))
    wanted = reference.swiglu_backward(d_hidden, gate, up)
    hidden = forward(gate, up)
    g, u, dh = gate.clone(), up.clone(), d_hidden.clone()
    swiglu_backward(dh, g, u, g, u, dh)
    check(g, wanted[0], gate)
    check(u, wanted[1], gate)
    assert torch.equal(bits(dh), bits(hidden))
    u = up.clone()
    swiglu_forward(gate, u, u)
    assert torch.equal(bits(u), bits(hidden))


def test_without_hidden_nothing_else_is_written():
    *_, third = backward(matrix(3, 50, 1), matrix(3, 50, 2), matrix(3, 50, 3), again=False)
    assert third.isnan().all()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_nothing_to_do(shape):
    empty = torch.empty(shape, dtype=BF16)
    assert forward(empty, empty).shape == shape
    assert backward(empty, empty, empty)[0].shape == shape


def test_a_missing_rounding_is_noticed(monkeypatch):
    d_hidden, gate, up = (matrix(64, 512, seed) for seed in range(3))
    wanted = (reference.swiglu_forward(gate, up), *reference.swiglu_backward(d_hidden, gate, up))
    monkeypatch.setattr(swiglu, "rounded", lambda x, _: x)
    got = (forward(gate, up), *backward(d_hidden, gate, up)[:2])
    for left, right in zip(got, wanted):
        assert bit_report(left, right).mismatches > left.numel() // 100


def test_refusals():
    good = [matrix(3, 8, seed) for seed in range(3)]
    for error, match, change in [
        (TypeError, "gate is torch.float32: expected torch.bfloat16", (0, good[0].float())),
        (ValueError, r"up \(3, 7\) against gate \(3, 8\)", (1, good[1][:, :7])),
        (ValueError, r"hidden \(8, 3\) against", (2, good[2].t())),
        (ValueError, "up on meta", (1, good[1].to("meta"))),
        (ValueError, r"gate \(3, 8, 1\)", (0, good[0][..., None])),
    ]:
        call = list(good)
        call[change[0]] = change[1]
        with pytest.raises(error, match=match):
            swiglu_forward(*call)
    with pytest.raises(ValueError, match=r"d_up \(2, 8\)"):
        swiglu_backward(*good, good[0], good[1][:2])
