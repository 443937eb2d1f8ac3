"""The twins on the CPU: the contract, eager torch, and what kernels say without an interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rlkernel.compare import bit_report
from rlkernel.contract import ReductionTree
from rlkernel.kernels import reference
from rlkernel.kernels.fold import fold
from rlkernel.kernels.gemm_tree import gemm_tree
from rlkernel.kernels.norm_gate import norm_gate, norm_gate_forward, order_sensitive, proven_equal
from rlkernel.kernels.swiglu import swiglu_forward
from tests.kernels.inputs import matrix, poisoned

BF16 = torch.bfloat16


def test_gemm_is_the_contract():
    for name in ("chain", "tree8.bf16", "tree8.fp32"):
        tree, a, b = ReductionTree.parse(name), matrix(5, 27, 1), matrix(27, 6, 2)
        assert bit_report(reference.gemm(a, b, tree), tree.matmul(a, b))
        assert reference.gemm(a, b, tree, torch.float32).dtype == torch.float32


def test_the_library_oracle_is_right_and_cuts_its_padding():
    a, b = matrix(5, 27, 1, "integers"), matrix(27, 6, 2, "integers")
    product = torch.mm
    try:  # torch.mm has no out_dtype on the CPU
        torch.mm = lambda x, y, out_dtype: product(x.to(out_dtype), y.to(out_dtype))
        got = reference._library_chain(a, b)
    finally:
        torch.mm = product
    assert torch.equal(got, a.float() @ b.float())


def test_swiglu_is_eager_autograd():
    gate, up, d_hidden = (matrix(4, 9, seed) for seed in range(3))
    with torch.no_grad():  # a twin needs no grad mode of its caller
        d_gate, d_up = reference.swiglu_backward(d_hidden, gate, up)
    silu = F.silu(gate)
    assert bit_report(d_up, d_hidden * silu)
    assert bit_report(reference.swiglu_forward(gate, up), silu * up)
    slope = torch.autograd.functional.jvp(F.silu, gate.double(), torch.ones(4, 9).double())[1]
    assert torch.allclose(d_gate.double(), (d_hidden * up).double() * slope, atol=1e-3, rtol=2e-2)
    assert gate.grad is None and not gate.requires_grad


def test_gate_up_takes_weights_as_a_linear_layer_keeps_them():
    x, wg, wu = matrix(3, 16, 1), matrix(10, 16, 2), matrix(10, 16, 3)
    got = reference.gate_up(x, wg, wu)
    assert got.gate.shape == got.hidden.shape == (3, 10) and got.up.dtype == BF16
    assert torch.allclose(got.up.float(), x.float() @ wu.float().t(), atol=1e-1, rtol=2e-2)
    assert bit_report(got.hidden, F.silu(got.gate) * got.up)


def test_norm_gate_is_eager_torch_on_the_cpu():
    given = order_sensitive(2, 3, 10, BF16)
    z, bias, *scales = given
    u, g = (z + bias)[..., :10].contiguous(), (z + bias)[..., 10:].contiguous()
    gate = F.silu(F.layer_norm(g, (10,), scales[2], scales[3], 1e-5))
    wanted = F.layer_norm(u, (10,), scales[0], scales[1], 1e-5) * gate
    out = torch.full((2, 3, 10), float("nan"), dtype=BF16)
    assert norm_gate(*given, out=out) is out and bit_report(out, wanted)
    assert proven_equal(3, 10, BF16, "cpu")
    leaves = [x.clone().requires_grad_() for x in given]
    norm_gate(*leaves).backward(d_h := matrix(6, 10, 1).view(2, 3, 10))
    for leaf, grad in zip(leaves, reference.norm_gate_backward(d_h, *given)):
        assert bit_report(leaf.grad, grad)


def test_norm_gate_has_the_gradient_of_its_formula():
    given = [x.requires_grad_() for x in order_sensitive(2, 1, 3, torch.float64)]
    assert torch.autograd.gradcheck(reference.norm_gate, given)


def test_fold_needs_shards_of_the_tree():
    parts = torch.ones(4, 3, dtype=BF16)
    assert reference.fold(parts, ReductionTree(8)).tolist() == [4.0] * 3
    with pytest.raises(ValueError, match="at most 2"):
        reference.fold(parts, ReductionTree(2))


def test_cpu_tensors_are_refused_outside_the_interpreter():
    tree, a, out = ReductionTree(2), matrix(4, 4), poisoned(4, 4, BF16)
    for launch in (
        lambda: gemm_tree(a, a, out, tree),
        lambda: fold(torch.stack([a, a]), out, tree),
        lambda: swiglu_forward(a, a, out),
        lambda: norm_gate_forward(a[None], a, tuple(a[:, :2].contiguous())),
    ):
        with pytest.raises(
            ValueError, match="TRITON_INTERPRET=1 .* use rlkernel.kernels.reference"
        ):
            launch()
    assert out.isnan().all()
