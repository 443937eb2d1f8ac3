"""gemm_tree in the interpreter: the contract's bits, for every tree, layout, tile and size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel.compare import bit_report, bits
from rlkernel.contract import ReductionTree
from rlkernel.kernels import fold as fold_module
from rlkernel.kernels import gemm_tree as module
from rlkernel.kernels.gemm_tree import Config, candidates, gemm_tree
from tests.kernels.inputs import LAYOUTS, laid_out, matrix, poisoned

BF16, FP32 = torch.bfloat16, torch.float32
TREES = ["chain", "tree2.bf16", "tree8.bf16", "tree8.fp32", "tree16.bf16"]
SMALL = Config(32, 32, 16, 4, 2)


def tree_of(name: str) -> ReductionTree:
    return ReductionTree.parse(name)


def run(a, b, tree, dtype=None, config=SMALL, layout="rows"):
    out = poisoned(a.shape[0], b.shape[1], dtype or tree.dtype, layout)
    assert gemm_tree(a, b, out, tree, config) is out
    return out


def check(a, b, tree, dtype=None, **more):
    report = bit_report(run(a, b, tree, dtype, **more), tree.matmul(a, b, dtype))
    assert report, f"{tree.name} {dtype} {tuple(a.shape)} @ {tuple(b.shape)}: {report}"


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("shape", [(5, 7, 100), (33, 40, 256), (17, 3, 391)], ids=str)
def test_the_bits_of_the_contract(shape, name, dtype):
    m, n, k = shape
    check(matrix(m, k, 1), matrix(k, n, 2), tree_of(name), dtype)


@pytest.mark.parametrize("round_to", ["bf16", "fp32"])
def test_one_leaf_of_a_rank_is_rounded_like_a_leaf(round_to):
    tree = ReductionTree(8, round_to).subtree(8)
    check(matrix(9, 64, 1), matrix(64, 9, 2), tree, FP32)


@pytest.mark.parametrize("name", ["chain", "tree8.bf16", "tree8.fp32"])
def test_tiles_change_nothing(name):
    a, b, tree = matrix(50, 400, 1), matrix(400, 70, 2), tree_of(name)
    for sizes in [(16, 16, 64), (64, 32, 32), (64, 128, 16), (32, 64, 512)]:
        check(a, b, tree, config=Config(*sizes, 4, 2))
    check(a, b, tree, config=None)


@pytest.mark.parametrize("shape", [(1, 512, 128), (512, 1, 128), (128, 128, 9), (96, 80, 640)])
def test_every_candidate_gives_the_same_bits(shape):
    m, n, k = shape
    a, b, tree = matrix(m, k, 1), matrix(k, n, 2), tree_of("tree8.bf16")
    wanted = tree.matmul(a, b)
    found = candidates(m, n, k, tree)
    assert len(set(found)) == len(found) >= 2
    for config in found[:2]:
        assert bit_report(run(a, b, tree, config=config), wanted), config


def test_more_tiles_than_a_group_of_rows():
    check(matrix(300, 16, 1), matrix(16, 40, 2), tree_of("chain"), config=Config(16, 16, 16, 4, 1))


@pytest.mark.parametrize("a_layout", LAYOUTS)
@pytest.mark.parametrize("b_layout", LAYOUTS)
def test_operand_layouts(a_layout, b_layout):
    a, b = laid_out(matrix(18, 50, 1), a_layout), laid_out(matrix(50, 20, 2), b_layout)
    check(a, b, tree_of("tree2.bf16"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_output_layouts_write_nothing_beside(layout):
    tree, a, b = tree_of("tree2.bf16"), matrix(18, 32, 1), matrix(32, 20, 2)
    out = poisoned(18, 20, BF16, layout)
    whole = torch.empty(0, dtype=BF16).set_(out.untyped_storage())
    written = int(run(a, b, tree).isfinite().sum())
    gemm_tree(a, b, out, tree, SMALL)
    assert bit_report(out, tree.matmul(a, b))
    assert int(whole.isfinite().sum()) == written


def test_ones_at_an_awkward_length():
    a, b = torch.ones(3, 11528, dtype=BF16), torch.ones(11528, 8, dtype=BF16)
    wide = Config(16, 16, 512, 4, 2)
    for name in ("chain", "tree8.fp32"):
        assert run(a, b, tree_of(name), FP32, wide).unique().tolist() == [11528.0]
    check(a, b, tree_of("tree8.bf16"), config=wide)
    check(a, b, tree_of("chain"), BF16, config=wide)


def test_a_row_does_not_depend_on_its_batch():
    tree, b, anchor = tree_of("tree8.bf16"), matrix(128, 24, 2), matrix(1, 128, 3)
    wanted = tree.matmul(anchor, b)[0]
    for m in (1, 2, 17, 31, 32, 33, 64, 65, 128):
        batch = matrix(m, 128, m)
        for at in {0, m // 2, m - 1}:
            a = batch.clone()
            a[at] = anchor
            assert bit_report(run(a, b, tree, config=None)[at], wanted), (m, at)


@pytest.mark.parametrize("k", [100, 328, 1000])
def test_nan_behind_every_row_is_never_read(k):
    a = laid_out(matrix(9, k, 1), "padded rows")
    b = laid_out(matrix(k, 9, 2), "padded columns")
    got = [run(a, b, tree_of("tree8.bf16"), config=Config(16, 16, 64, 4, 2)) for _ in range(2)]
    assert got[0].isfinite().all() and bit_report(got[0], got[1])
    assert bit_report(got[0], tree_of("tree8.bf16").matmul(a, b))


def test_a_large_residual_and_small_partials():
    leaves = 8
    a, b = matrix(32, leaves * 16, 1), matrix(leaves * 16, 32, 2) * 30
    a[:, 0], b[0] = 300, 250  # 75000, where neighbours in BF16 are 512 apart
    rounded, exact = tree_of("tree8.bf16"), tree_of("tree8.fp32")
    check(a, b, rounded)
    check(a, b, exact, BF16)
    wanted = exact.matmul(a, b)
    assert wanted.min() > 65536 and wanted.max() < 131072
    assert (run(a, b, rounded).float() - wanted).abs().max() <= (1 + 3) / 2 * 512
    assert (run(a, b, exact, BF16).float() - wanted).abs().max() <= 512


@settings(max_examples=60)
@given(
    m=st.integers(1, 20),
    n=st.integers(1, 20),
    k=st.integers(0, 90),
    leaves=st.sampled_from([1, 2, 4, 8, 16]),
    round_to=st.sampled_from(["bf16", "fp32"]),
    dtype=st.sampled_from([BF16, FP32]),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 3),
    step=st.sampled_from([16, 32]),
)
def test_any_shape(m, n, k, leaves, round_to, dtype, layouts, step):
    a, b = laid_out(matrix(m, k, 1), layouts[0]), laid_out(matrix(k, n, 2), layouts[1])
    config = Config(32, 32, step, 4, 1)
    check(a, b, ReductionTree(leaves, round_to), dtype, config=config, layout=layouts[2])


@pytest.mark.parametrize("name", ["tree2.bf16", "tree8.bf16", "tree8.fp32", "tree16.fp32"])
def test_leaves_of_few_tokens(name):
    for tokens in [*range(1, 18), 31, 33, 64, 100, 131]:  # absent, uneven, of one step, of several
        d_out, x = matrix(tokens, 20, tokens), matrix(tokens, 24, 99)
        check(d_out.t(), x, tree_of(name))


@pytest.mark.parametrize("kind", ["cancelling", "subnormal", "zeros"])
@pytest.mark.parametrize("name", ["chain", "tree8.bf16", "tree8.fp32"])
def test_adversarial_values(name, kind):
    a, b = matrix(16, 128, 1, kind), matrix(128, 16, 2, kind)
    for dtype in (BF16, FP32):
        check(a, b, tree_of(name), dtype)
    if kind == "subnormal":
        assert 0 < run(a, b, tree_of(name), FP32).abs().max() < 2.0**-126


def test_integers_are_exact_under_every_tree():
    a, b = matrix(20, 200, 1, "integers"), matrix(200, 20, 2, "integers")
    wanted = (a.double() @ b.double()).float()
    for leaves in (1, 2, 8, 16):
        assert torch.equal(run(a, b, ReductionTree(leaves, "fp32")), wanted)


def test_a_negative_sum_too_small_for_bf16_is_negative_zero():
    a = torch.full((4, 16), -(2.0**-70), dtype=BF16)
    b = torch.full((16, 4), 2.0**-70, dtype=BF16)
    for name in ("tree8.bf16", "chain"):
        got = run(a, b, tree_of(name), BF16)
        assert bits(got).unique().tolist() == [-(2**15)]
        check(a, b, tree_of(name), BF16)


def test_infinity_and_nan_stay_in_their_row_and_column():
    a, b, tree = matrix(12, 64, 1), matrix(64, 12, 2), tree_of("tree8.bf16")
    a[3, 5], a[4, 40], b[7, 2] = float("inf"), float("-inf"), float("nan")
    got, wanted = run(a, b, tree), tree.matmul(a, b)
    assert torch.equal(got.isnan(), wanted.isnan()) and got[:, 2].isnan().all()
    assert torch.equal(got.nan_to_num(), wanted.nan_to_num())
    assert got[[3, 4]].isfinite().sum() == 0 and got[0].isfinite().sum() == 11


@pytest.mark.parametrize("shape", [(0, 5, 8), (5, 0, 8), (0, 0, 0)])
def test_nothing_to_do(shape):
    m, n, k = shape
    assert run(matrix(m, k), matrix(k, n), tree_of("tree8.bf16"), config=None).shape == (m, n)


@pytest.mark.parametrize("name", ["chain", "tree8.bf16"])
def test_an_empty_sum_is_positive_zero(name):
    out = run(matrix(5, 0), matrix(0, 6), tree_of(name), FP32, config=None)
    assert bits(out).unique().tolist() == [0]


# -- these tests would notice ----------------------------------------------------------------------

WIDE = (matrix(64, 512, 1), matrix(512, 64, 2))


def differs(got, wanted) -> bool:
    return bit_report(got, wanted).mismatches > 0


def test_another_tree_is_another_result():
    tree, (a, b) = tree_of("tree8.bf16"), WIDE
    got = run(a, b, tree)
    assert differs(got, tree_of("tree16.bf16").matmul(a, b))
    assert differs(got, tree_of("tree4.bf16").matmul(a, b))
    assert differs(got, tree_of("tree8.fp32").matmul(a, b, BF16))
    assert differs(got, tree_of("chain").matmul(a, b, BF16))


def test_a_left_fold_of_the_leaves_is_another_result():
    tree, (a, b) = tree_of("tree8.bf16"), WIDE
    leaves = [tree.leaf(a[:, lo:hi], b[lo:hi]) for lo, hi in tree.bounds(512)]
    left = leaves[0]
    for leaf in leaves[1:]:
        left = tree.joint(left, leaf)
    assert differs(run(a, b, tree), left)


def test_shifted_leaf_borders_are_another_result():
    tree, (a, b) = tree_of("tree8.bf16"), WIDE
    moved = [(max(lo - 1, 0), hi - (hi < 512)) for lo, hi in tree.bounds(512)]
    assert differs(
        run(a, b, tree), tree.fold([tree.leaf(a[:, lo:hi], b[lo:hi]) for lo, hi in moved])
    )


def test_truncation_in_place_of_rounding_is_another_result(monkeypatch):
    tree, (a, b) = tree_of("tree8.bf16"), WIDE
    for where in (module, fold_module):
        with monkeypatch.context() as planted:
            planted.setattr(where, "to_bf16", lambda x: x.to(module.tl.bfloat16))
            assert differs(run(a, b, tree), tree.matmul(a, b)), where.__name__
    check(a, b, tree)


# -- refused before any launch ---------------------------------------------------------------------


def refuse(error, match, **change):
    call = {
        "a": matrix(4, 32),
        "b": matrix(32, 6),
        "out": poisoned(4, 6, BF16),
        "tree": tree_of("tree8.bf16"),
    }
    call |= change
    with pytest.raises(error, match=match):
        gemm_tree(**call)
    assert call["out"].isnan().all()


def test_refusals():
    refuse(TypeError, "a is torch.float32: expected torch.bfloat16", a=torch.zeros(4, 32))
    refuse(TypeError, "b is torch.float16", b=torch.zeros(32, 6, dtype=torch.float16))
    refuse(TypeError, "out is torch.float16", out=poisoned(4, 6, torch.float16))
    refuse(ValueError, r"a \(4, 32, 1\) has 3 axes: expected 2", a=matrix(4, 32)[..., None])
    refuse(ValueError, "K differs", b=matrix(31, 6))
    refuse(ValueError, r"expected \(4, 6\)", out=poisoned(6, 4, BF16))
    refuse(ValueError, "at most 16", tree=ReductionTree(32))
    refuse(ValueError, "b on meta", b=torch.empty(32, 6, dtype=BF16, device="meta"))
    refuse(ValueError, "block_k=8 ", config=Config(16, 16, 8, 4, 1))
    refuse(ValueError, "block_m=48 ", config=Config(48, 16, 16, 4, 1))
