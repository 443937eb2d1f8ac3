"""The decode schedules against the CPU's contract, bit by bit (needs TRITON_INTERPRET=1)."""

from __future__ import annotations

import math

import pytest
import torch

from rlkernel.contract import ReductionTree, chain
from rlkernel.kernels import workspace
from rlkernel.kernels.gemm_decode import candidates, default_config, gemm_decode, refuses
from rlkernel.kernels.stream import DecodeConfig
from rlkernel.kernels.swiglu_decode import gate_up_candidates, gate_up_decode

BF16 = torch.bfloat16
SMALL = DecodeConfig(32, 32, tma=False)
POISON = float("nan")


def operands(m, n, k, seed=0, k_inner=True):
    """a[m, k] and b[k, n] in BF16, with NaN behind the end of every row in memory."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows, columns):
        padded = torch.full((rows + 1, columns + 8), POISON, dtype=BF16)
        padded[:rows, :columns] = torch.randn(rows, columns, generator=generator).to(BF16)
        return padded[:rows, :columns]

    return matrix(m, k), (matrix(n, k).t() if k_inner else matrix(k, n))


def same_bits(left, right):
    assert left.dtype == right.dtype and left.shape == right.shape
    kind = torch.int16 if left.dtype == BF16 else torch.int32
    differ = (left.contiguous().view(kind) != right.contiguous().view(kind)).sum()
    assert differ == 0, f"{int(differ)} / {left.numel()} elements differ"


def poisoned(m, n, dtype=BF16):
    return torch.full((m, n), POISON, dtype=dtype)


@pytest.mark.parametrize("m", [1, 17, 64, 128])
@pytest.mark.parametrize("tree", ["chain", "tree2.bf16", "tree8.bf16", "tree8.fp32"])
@pytest.mark.parametrize("k_inner", [True, False], ids=["k-inner", "n-inner"])
def test_bits_of_the_contract(m, tree, k_inner):
    tree = ReductionTree.parse(tree)
    k = 80 if tree.leaves == 1 else 8 * 20  # leaves of 20 or 80: tails behind blocks of 16 and 32
    a, b = operands(m, 37, k, seed=m, k_inner=k_inner)
    config = DecodeConfig(32, 16 if tree.leaves == 8 else 32, tma=False)
    out = gemm_decode(a, b, poisoned(m, 37, tree.dtype), tree, config)
    same_bits(out, tree.matmul(a, b))


@pytest.mark.parametrize(("tree", "dtype"), [("tree2.fp32", BF16), ("tree2.bf16", torch.float32)])
def test_the_root_is_rounded_once_more_to_the_output(tree, dtype):
    tree = ReductionTree.parse(tree)
    a, b = operands(3, 37, 96)
    out = gemm_decode(a, b, poisoned(3, 37, dtype), tree, SMALL)
    same_bits(out, tree.matmul(a, b, out_dtype=dtype))


@pytest.mark.parametrize("k_inner", [True, False], ids=["k-inner", "n-inner"])
def test_configs_differ_in_speed_only(k_inner):
    tree = ReductionTree.parse("tree8.bf16")
    a, b = operands(5, 48, 8 * 32, k_inner=k_inner)
    wanted = tree.matmul(a, b)
    for leaves in (1, 2, 4, 8):
        for tma in (True, False):
            config = DecodeConfig(16, 32, leaves=leaves, tma=tma)
            same_bits(gemm_decode(a, b, poisoned(5, 48), tree, config), wanted)
    for config in (None, DecodeConfig(64, 16), DecodeConfig(32, 64)):
        same_bits(gemm_decode(a, b, poisoned(5, 48), tree, config), wanted)


@pytest.mark.parametrize("tma", [True, False], ids=["descriptors", "pointers"])
def test_a_chain_with_a_tail_reads_nothing_behind_the_row(tma):
    a, b = operands(3, 40, 72)
    tree = ReductionTree.parse("chain")
    out = gemm_decode(a, b, poisoned(3, 40, torch.float32), tree, DecodeConfig(32, 64, tma=tma))
    same_bits(out, chain(a, b))


def test_a_misaligned_view_takes_the_slower_path():
    tree = ReductionTree.parse("tree2.bf16")
    a, b = operands(4, 32, 64)
    shifted = torch.empty(1 + a.numel(), dtype=BF16)[1:].view(4, 64).copy_(a)
    same_bits(gemm_decode(shifted, b, poisoned(4, 32), tree, SMALL), tree.matmul(a, b))
    config = DecodeConfig(32, 32)
    same_bits(gemm_decode(shifted, b, poisoned(4, 32), tree, config), tree.matmul(a, b))


def test_another_order_of_the_leaves_has_other_bits():
    """Without this the tests above could not tell a tree from any other fold."""
    tree = ReductionTree.parse("tree8.bf16")
    a, b = operands(17, 37, 8 * 20)
    out = gemm_decode(a, b, poisoned(17, 37), tree, DecodeConfig(32, 32, tma=False))
    leaves = [tree.leaf(a[:, lo:hi], b[lo:hi]) for lo, hi in tree.bounds(160)]
    same_bits(out, tree.fold(leaves))
    one_by_one = leaves[0]
    for leaf in leaves[1:]:
        one_by_one = tree.joint(one_by_one, leaf)
    strided = tree.fold([leaves[i] for i in (0, 4, 1, 5, 2, 6, 3, 7)])
    unrounded = sum(leaf.float() for leaf in leaves).to(BF16)
    for other in (one_by_one, strided, unrounded, chain(a, b).to(BF16)):
        assert not torch.equal(out, other)


def test_rows_keep_their_bits_in_any_batch():
    tree = ReductionTree.parse("tree8.bf16")
    a, b = operands(65, 32, 8 * 16)
    config = DecodeConfig(32, 16, tma=False)
    whole = gemm_decode(a, b, poisoned(65, 32), tree, config)
    for rows in (slice(0, 1), slice(31, 33), slice(40, 64)):
        part = a[rows]
        same_bits(gemm_decode(part, b, poisoned(len(part), 32), tree, config), whole[rows])


def test_launches_of_any_parts_share_counters(monkeypatch):
    """8 parts, 2, 8, 4, 1, 8 and 2 on the same counters: each launch leaves them at zero."""
    shared = torch.zeros(4, dtype=torch.int32)
    monkeypatch.setattr(workspace, "counters", lambda device, count: shared[:count])
    for seed, (tree, leaves) in enumerate(
        [(8, 1), (8, 4), (8, 1), (4, 1), (8, 8), (8, 1), (2, 1)]  # PARTS = tree / leaves
    ):
        tree = ReductionTree(tree)
        a, b = operands(2, 64, 8 * 16, seed=seed)
        config = DecodeConfig(32, 16, leaves=leaves, tma=False)
        same_bits(gemm_decode(a, b, poisoned(2, 64), tree, config), tree.matmul(a, b))
        assert not shared.any(), f"{tree.leaves // leaves} parts left {shared.tolist()} behind"


@pytest.mark.parametrize("m", [1, 64, 128])
@pytest.mark.parametrize("n", [40, 12288])
@pytest.mark.parametrize("tree", ["chain", "tree2.bf16", "tree8.bf16"])
def test_candidates_differ_and_start_with_the_default(m, n, tree):
    tree = ReductionTree.parse(tree)
    for k_inner in (True, False):
        found = candidates(m, n, 8 * 96, tree, k_inner)
        assert found[0] == default_config(m, n, tree, k_inner)
        assert 3 <= len(found) <= 5 and len(set(found)) == len(found)
        assert {config.tma for config in found} == {True, False}
        assert tree.leaves == 1 or any(config.leaves > 1 for config in found)
    assert 3 <= len(gate_up_candidates(m)) <= 5


@pytest.mark.parametrize("m", [3, 100])
def test_candidates_have_the_bits_of_the_contract(m):
    tree = ReductionTree.parse("tree4.bf16")
    a, b = operands(m, 40, 4 * 48)
    for config in candidates(m, 40, 4 * 48, tree, True):
        same_bits(gemm_decode(a, b, poisoned(m, 40), tree, config), tree.matmul(a, b))


@pytest.mark.parametrize("m", [1, 17, 128])
@pytest.mark.parametrize("tma", [True, False], ids=["descriptors", "pointers"])
def test_gate_up_rounds_where_eager_rounds(m, tma):
    i, h = 37, 72
    x, gate_weight = operands(m, i, h, seed=m)
    _, up_weight = operands(m, i, h, seed=m + 1)
    gate, up, hidden = (poisoned(m, i) for _ in range(3))
    config = DecodeConfig(32, 32, tma=tma)
    gate_up_decode(x, gate_weight.t(), up_weight.t(), hidden, gate, up, config)
    g, u = chain(x, gate_weight).to(BF16), chain(x, up_weight).to(BF16)
    same_bits(gate, g)
    same_bits(up, u)
    activated = (g.float() / (1 + torch.exp(-g.float()))).to(BF16)
    same_bits(hidden, activated * u)
    alone = gate_up_decode(x, gate_weight.t(), up_weight.t(), poisoned(m, i), config=config)
    same_bits(alone, hidden)


def test_gate_up_takes_the_halves_of_a_packed_weight():
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(2 * 48, 64, generator=generator).to(BF16)
    x = torch.randn(3, 64, generator=generator).to(BF16)
    halves, wide = packed[:48], poisoned(3, 96)
    gate_up_decode(x, halves, packed[48:], wide[:, :48], config=DecodeConfig(32, 64))
    apart = gate_up_decode(x, halves.clone(), packed[48:].clone(), poisoned(3, 48), config=SMALL)
    same_bits(wide[:, :48], apart)
    assert wide[:, 48:].isnan().all(), "the store ran over the end of its rows"


def test_large_gates_saturate():
    one = torch.ones(1, 16, dtype=BF16)
    rows = torch.tensor([[-100.0], [-20.0], [0.0], [20.0], [math.inf]]).expand(5, 16)
    weight = torch.where(rows.isinf(), rows, rows / 16).to(BF16).contiguous()
    out = gate_up_decode(one, weight, torch.ones_like(weight), poisoned(1, 5), config=SMALL)
    gate = (weight.float() @ one.float().t()).t().to(BF16)
    expected = torch.nn.functional.silu(gate.float()).to(BF16) * 16
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=0)


@pytest.mark.parametrize(
    ("m", "k", "message"),
    [(129, 64, "M=129"), (0, 64, "M=0"), (4, 60, "K=60")],
)
def test_what_does_not_fit_is_named(m, k, message):
    a, b = torch.zeros(m, k, dtype=BF16), torch.zeros(k, 16, dtype=BF16)
    tree = ReductionTree.parse("tree8.bf16")
    assert message in refuses(a, b, poisoned(m, 16), tree)
    with pytest.raises(ValueError, match=message):
        gemm_decode(a, b, poisoned(m, 16), tree)


def test_layouts_that_do_not_fit_are_named():
    tree, out = ReductionTree.parse("chain"), poisoned(2, 8)
    a, b = torch.zeros(2, 16, dtype=BF16), torch.zeros(16, 8, dtype=BF16)
    assert refuses(a, b, out, tree) is None
    assert "float32" in refuses(a.float(), b, out, tree)
    assert "[2, 8]" in refuses(a, b, poisoned(2, 9), tree)
    assert "rows of a" in refuses(torch.zeros(16, 2, dtype=BF16).t(), b, out, tree)
    assert "along K or N" in refuses(a, torch.zeros(16, 16, dtype=BF16)[:, ::2], out, tree)
    assert "needs a[M, K]" in refuses(a, b.t(), out, tree)
    with pytest.raises(ValueError, match="both or not at all"):
        gate_up_decode(a, b.t(), b.t(), out, gate=out)


def test_a_sum_of_nothing_is_zero():
    empty = torch.zeros(2, 0, dtype=BF16), torch.zeros(0, 8, dtype=BF16)
    assert torch.equal(
        gemm_decode(*empty, poisoned(2, 8), ReductionTree(8)), torch.zeros(2, 8, dtype=BF16)
    )
