"""fold in the interpreter: the roots of shards become the root of the whole tree."""

from __future__ import annotations

import pytest
import torch

from rlkernel.compare import bit_report, bits
from rlkernel.contract import ReductionTree
from rlkernel.kernels import fold as module
from rlkernel.kernels import reference
from rlkernel.kernels.fold import fold
from rlkernel.kernels.gemm_tree import Config, gemm_tree
from tests.kernels.inputs import NAN, matrix

BF16, FP32 = torch.bfloat16, torch.float32


def run(parts, tree, dtype=None):
    out = torch.full(parts.shape[1:], NAN, dtype=dtype or tree.dtype)
    assert fold(parts, out, tree) is out
    return out


def parts_of(count, *shape, dtype, seed=0):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("round_to", ["bf16", "fp32"])
@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_the_bits_of_the_contract(count, round_to, dtype):
    tree = ReductionTree(16, round_to)
    for shape in [(7, 300), (1,), (), (2, 3, 4)]:
        parts = parts_of(count, *shape, dtype=tree.dtype)
        wanted = tree.fold(list(parts)).to(dtype)
        assert bit_report(run(parts, tree, dtype), wanted)
        assert bit_report(reference.fold(parts, tree, dtype), wanted)


@pytest.mark.parametrize("name", ["tree8.bf16", "tree8.fp32"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_fold_into_the_tree_of_one(name, ranks):
    tree, m, n, k = ReductionTree.parse(name), 9, 20, 128
    a, b = matrix(m, k, 1), matrix(k, n, 2)
    roots = torch.empty(ranks, m, n, dtype=tree.dtype)
    for rank in range(ranks):
        shard = slice(rank * k // ranks, (rank + 1) * k // ranks)
        config = Config(16, 32, 16, 4, 1)
        gemm_tree(a[:, shard], b[shard], roots[rank], tree.subtree(ranks), config)
    assert bit_report(run(roots, tree, BF16), tree.matmul(a, b, BF16))


def test_every_bf16_value_against_awkward_partners():
    tree = ReductionTree(2, "bf16")
    left = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(BF16)
    left = left[left.isfinite()]
    for right in (0.0, -0.0, 1.0, -1.0, 2.0**-133, -(2.0**-126), 3e38, -3e38, 0.3):
        parts = torch.stack([left, torch.full_like(left, right)])
        assert bit_report(run(parts, tree), tree.joint(*parts)), right


def test_negative_zeros_stay():
    zeros = torch.full((4, 5), -0.0, dtype=BF16)
    assert bits(run(zeros, ReductionTree(4))).unique().tolist() == [-(2**15)]


def test_parts_far_apart_and_nothing_beside_the_output():
    tree, wide = ReductionTree(4), parts_of(4, 3, 1030, dtype=BF16)
    parts = torch.full((4, 7, 1030), NAN, dtype=BF16)[:, 2:5].copy_(wide)
    whole = torch.full((5, 1030), NAN, dtype=BF16)
    fold(parts, whole[1:4], tree)
    assert bit_report(whole[1:4], tree.fold(list(wide)))
    assert whole[[0, 4]].isnan().all()


def test_nothing_to_do():
    assert run(parts_of(2, 0, 3, dtype=BF16), ReductionTree(2)).shape == (0, 3)


def test_other_orders_are_other_results(monkeypatch):
    tree = ReductionTree(8)
    parts = parts_of(8, 500, dtype=BF16)
    got = run(parts, tree)
    left = parts[0]
    for part in parts[1:]:
        left = tree.joint(left, part)
    assert bit_report(got, left).mismatches
    assert bit_report(got, tree.fold(list(parts[[0, 2, 1, 3, 4, 5, 6, 7]]))).mismatches
    monkeypatch.setattr(module, "to_bf16", lambda x: x.to(module.tl.bfloat16))
    assert bit_report(run(parts, tree), got).mismatches  # truncated


def test_refusals():
    tree, good = ReductionTree(4), parts_of(4, 6, 8, dtype=BF16)
    out = torch.full((6, 8), NAN, dtype=BF16)
    for error, match, parts, into in [
        (TypeError, "parts is torch.float32: tree4.bf16 keeps", good.float(), out),
        (TypeError, "out is torch.float16", good, out.half()),
        (ValueError, r"does not fold into out \(6, 8\)", good[:, :5], out),
        (ValueError, "power of two and at most 4", good[:3], out),
        (ValueError, "power of two and at most 4", torch.cat([good, good]), out),
        (ValueError, "contiguous", good.transpose(1, 2), out.t().contiguous()),
        (ValueError, "contiguous", good, out.t().contiguous().t()),
        (ValueError, "parts on meta", good.to("meta"), out),
    ]:
        with pytest.raises(error, match=match):
            fold(parts, into, tree)
    assert out.isnan().all()
