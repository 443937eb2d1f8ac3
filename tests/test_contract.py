"""The tree: shards and folds give the bits of the whole, other orders do not."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkernel.compare import bit_report, bits
from rlkernel.contract import LayerContract, ReductionTree, balanced, chain

TREES = [ReductionTree(leaves, dtype) for leaves in (1, 2, 4, 8) for dtype in ("bf16", "fp32")]


def operands(seed, m, k, n, dtype=torch.bfloat16, spread=8):
    """Values over many binades: reordered sums then round differently almost surely."""
    g = torch.Generator().manual_seed(seed)
    scale = torch.exp2(torch.randint(-spread, spread + 1, (k,), generator=g).float())
    a = torch.randn(m, k, generator=g) * scale
    return a.to(dtype), torch.randn(k, n, generator=g).to(dtype)


def shard_roots(tree, a, b, parts):
    step, sub = a.shape[1] // parts, tree.subtree(parts)
    spans = [slice(i * step, (i + 1) * step) for i in range(parts)]
    return [sub.matmul(a[:, at], b[at]) for at in spans]


@given(
    seed=st.integers(0, 2**31),
    log_leaves=st.integers(0, 4),
    log_parts=st.integers(0, 4),
    leaf=st.integers(1, 9),
    m=st.integers(1, 3),
    n=st.integers(1, 3),
    round_to=st.sampled_from(["bf16", "fp32"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_shards_and_fold_are_the_whole_on_weight_axes(
    seed, log_leaves, log_parts, leaf, m, n, round_to, dtype
):
    tree = ReductionTree(2**log_leaves, round_to)
    parts = 2 ** min(log_parts, log_leaves)
    a, b = operands(seed, m, leaf * tree.leaves, n, dtype)
    tree.check_axis("I", a.shape[1], parts, kind="weight")
    assert bit_report(tree.fold(shard_roots(tree, a, b, parts)), tree.matmul(a, b))


@given(
    seed=st.integers(0, 2**31),
    log_parts=st.integers(0, 3),
    per_shard=st.integers(1, 11),
    round_to=st.sampled_from(["bf16", "fp32"]),
)
def test_shards_and_fold_are_the_whole_on_token_axes(seed, log_parts, per_shard, round_to):
    """Token counts that are no multiple of the leaves, down to absent leaves."""
    tree, parts = ReductionTree(8, round_to), 2**log_parts
    a, b = operands(seed, 2, parts * per_shard, 3)
    tree.check_axis("M", a.shape[1], parts, kind="token")
    assert bit_report(tree.fold(shard_roots(tree, a, b, parts)), tree.matmul(a, b))


@pytest.mark.parametrize("round_to", ["bf16", "fp32"])
def test_the_left_fold_of_eight_ranks_differs(round_to):
    tree = ReductionTree(8, round_to)
    a, b = operands(1, 16, 64, 16)
    roots = shard_roots(tree, a, b, 8)
    left = functools.reduce(tree.joint, roots)
    assert not bit_report(left, tree.fold(roots)), "a test that cannot tell these apart is void"


def test_sixteen_leaves_and_exchanged_ranks_differ():
    tree = ReductionTree(8, "bf16")
    a, b = operands(2, 16, 64, 16)
    whole = tree.matmul(a, b)
    assert not bit_report(ReductionTree(16, "bf16").matmul(a, b), whole)
    roots = shard_roots(tree, a, b, 4)
    roots[1], roots[2] = roots[2], roots[1]
    assert not bit_report(tree.fold(roots), whole)


def test_at_two_ranks_the_left_fold_is_the_tree():
    tree = ReductionTree(2, "bf16")
    a, b = operands(3, 4, 16, 4)
    roots = shard_roots(tree, a, b, 2)
    assert bit_report(functools.reduce(tree.joint, roots), tree.fold(roots))


def test_leaf_is_a_chain_and_rounds_once():
    a, b = operands(4, 3, 33, 5)
    by_hand = torch.zeros(3, 5)
    for k in range(33):
        by_hand = by_hand + a[:, k : k + 1].float() * b[k : k + 1].float()
    assert bit_report(chain(a, b), by_hand)
    assert bit_report(ReductionTree(8, "bf16").leaf(a, b), by_hand.bfloat16())


def test_chain_does_not_depend_on_rows_columns_or_threads():
    a, b = operands(5, 33, 257, 17, torch.float32)
    whole, threads = chain(a, b), torch.get_num_threads()
    assert bit_report(chain(a[4:5], b), whole[4:5])
    assert bit_report(chain(a, b[:, 3:4]), whole[:, 3:4])
    try:
        torch.set_num_threads(1)
        assert bit_report(chain(a, b), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("k", [11528, 7, 1])
def test_all_ones(k):
    a, b = torch.ones(2, k, dtype=torch.bfloat16), torch.ones(k, 8, dtype=torch.bfloat16)
    assert (ReductionTree(8, "fp32").matmul(a, b) == k).all()
    # By hand for 11528: leaves of 1441 round to 1440, 2880, 5760, 11520 are BF16 numbers.
    expected = {11528: 11520.0, 7: 7.0, 1: 1.0}[k]
    assert (ReductionTree(8, "bf16").matmul(a, b) == expected).all()


@pytest.mark.parametrize("m", [1, 2, 17, 31, 32, 33, 64, 65, 128, 257])
@pytest.mark.parametrize("tree", [TREES[0], TREES[6], TREES[7]], ids=lambda t: t.name)
def test_an_anchor_row_is_the_same_in_every_batch(tree, m):
    a, b = operands(6, 257, 32, 8)
    anchor = tree.matmul(a[:1], b)
    for position in {0, m // 2, m - 1}:
        batch = a[1 : m + 1].clone() if m < 257 else a.clone()
        batch[position] = a[0]
        assert bit_report(tree.matmul(batch, b)[position], anchor[0])


def test_nan_behind_the_rows_is_not_read():
    storage = torch.full((5, 40), float("nan"))
    storage[:, :33] = torch.randn(5, 33, generator=torch.Generator().manual_seed(7))
    a, b = storage[:, :33], torch.randn(33, 4, generator=torch.Generator().manual_seed(8))
    tree = ReductionTree(8, "fp32")
    assert tree.matmul(a, b).isfinite().all()
    assert bit_report(tree.matmul(a, b), tree.matmul(a.clone(), b))


def test_absent_leaves_are_absent_not_zero():
    """Three tokens under eight leaves: a sum of -0.0 alone keeps its sign only without a +0.0."""
    tree = ReductionTree(8, "bf16")
    assert [hi - lo for lo, hi in tree.bounds(3)].count(0) == 5
    minus_zero = torch.tensor([[-0.0]])
    assert bits(balanced([None, minus_zero, None, None], tree.joint)).item() != 0
    assert tree.fold([None] * 8) is None
    assert bits(tree.matmul(torch.ones(1, 0), torch.ones(0, 1))).item() == 0


def test_bounds_halve_at_the_midpoint():
    assert ReductionTree(4).bounds(10) == ((0, 2), (2, 5), (5, 7), (7, 10))
    assert ReductionTree(1).bounds(10) == ((0, 10),)


@pytest.mark.parametrize("leaves", [8, 16, 32])
def test_a_large_residual_stays_within_the_stated_steps(leaves):
    """About 75,000 (BF16 step 512) plus small partials: (1 + log2 leaves) / 2 steps, FP32 one."""
    g = torch.Generator().manual_seed(9)
    parts = [torch.randn(1000, generator=g) * 40 for _ in range(leaves)]
    parts[0] += 75_000
    exact = ReductionTree(leaves, "fp32").fold(parts)
    tree = ReductionTree(leaves, "bf16")
    rounded = tree.fold([tree.round(p) for p in parts]).float()
    steps = ((rounded - exact).abs() / 512).max().item()
    assert 0 < steps <= (1 + leaves.bit_length() - 1) / 2
    assert ((exact.bfloat16().float() - exact).abs() / 512).max().item() <= 1


@pytest.mark.parametrize("tree", TREES, ids=lambda t: t.name + "." + t.round_to)
def test_the_root_is_rounded_once_more_to_the_output(tree):
    a, b = operands(10, 4, 64, 4)
    for dtype in (torch.float32, torch.bfloat16):
        root = tree.matmul(a, b, out_dtype=dtype)
        assert root.dtype == dtype and bit_report(root, tree.matmul(a, b).to(dtype))


@pytest.mark.parametrize("tree", TREES, ids=lambda t: t.name + "." + t.round_to)
def test_names_read_back(tree):
    again = ReductionTree.parse(tree.name)
    assert again.leaves == tree.leaves
    assert tree.leaves == 1 or again == tree


def test_layer_contract_names_both_axes():
    both = LayerContract(ReductionTree(8, "bf16"), ReductionTree(2, "bf16"))
    assert both.name == "tree8.bf16/tokens:tree2.bf16" and both == LayerContract()
    for name in (both.name, "tree8.fp32", "chain", "chain/tokens:tree4.fp32"):
        assert LayerContract.parse(name).name == name


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (lambda: ReductionTree(3), "leaves=3"),
        (lambda: ReductionTree(8, "fp16"), "round_to='fp16'"),
        (lambda: ReductionTree.parse("tree8"), "unknown contract 'tree8'"),
        (lambda: ReductionTree(2).subtree(4), "4 shards cannot hold subtrees of tree2.bf16"),
        (lambda: ReductionTree(8).subtree(3), "3 shards"),
        (
            lambda: ReductionTree(8).check_axis("K", 12, 2, kind="weight"),
            "weight axis K=12 .* multiple of 8",
        ),
        (
            lambda: ReductionTree(8).check_axis("M", 9, 2, kind="token"),
            "token axis M=9 .* multiple of 2",
        ),
        (lambda: ReductionTree(8).check_axis("M", 8, 2, kind="time"), "axis kind 'time'"),
        (lambda: chain(torch.ones(2, 3), torch.ones(2, 3)), "chain needs"),
        (lambda: balanced([1, 2, 3], lambda x, y: x), "power of two of nodes: got 3"),
    ],
)
def test_refusals_name_what_was_given(action, words):
    with pytest.raises(ValueError, match=words):
        action()
