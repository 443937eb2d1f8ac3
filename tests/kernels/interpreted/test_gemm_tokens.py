"""gemm_tokens in the interpreter: the contract's bits for every number of tokens, tree and tile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel.compare import bit_report, bits
from rlkernel.contract import ReductionTree
from rlkernel.kernels import gemm_tokens as module
from rlkernel.kernels import select
from rlkernel.kernels.gemm_tokens import Config, candidates, gemm_tokens, refuses
from tests.kernels.inputs import LAYOUTS, laid_out, matrix, poisoned

BF16, FP32 = torch.bfloat16, torch.float32
TREES = ["chain", "tree2.bf16", "tree8.bf16", "tree8.fp32"]
TOKENS = [0, 1, 3, 7, 8, 9, 17, 31, 32, 33, 64]
SMALL, WIDE, WHOLE = (Config(size, 2 * size, 2, 4, 1) for size in (16, 32, 64))
tree_of = ReductionTree.parse


def run(a, b, tree, dtype=None, config=WHOLE, layout="rows"):
    out = poisoned(a.shape[0], b.shape[1], dtype or tree.dtype, layout)
    assert gemm_tokens(a, b, out, tree, config) is out
    return out


def check(a, b, tree, dtype=None, **more):
    report = bit_report(run(a, b, tree, dtype, **more), tree.matmul(a, b, dtype))
    assert report, f"{tree.name} {dtype} {tuple(a.shape)} @ {tuple(b.shape)}: {report}"


def gradient(tokens, rows=40, cols=77, kind="normal"):
    """(dC.t(), X) of `tokens` tokens."""
    return matrix(tokens, rows, tokens, kind).t(), matrix(tokens, cols, 99, kind)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", TREES)
def test_the_bits_of_the_contract(name, tokens):
    check(*gradient(tokens), tree_of(name), BF16)
    check(*gradient(tokens, 7, 9), tree_of(name), FP32, config=SMALL)


@pytest.mark.parametrize("round_to", ["bf16", "fp32"])
@pytest.mark.parametrize("leaves", [2, 8, 16])
def test_absent_leaves_change_nothing(leaves, round_to):
    # Signed zeros: +0.0 in place of an absent leaf would turn a rounded -0.0 into +0.0.
    tree = ReductionTree(leaves, round_to)
    for tokens in [2, 3, 5, 6, 7, 9, 13]:
        check(*gradient(tokens, 9, 11), tree, config=SMALL)
    for tokens in (1, 3, 5, 7):
        a = torch.full((4, tokens), -(2.0**-70), dtype=BF16)
        b = torch.full((tokens, 5), 2.0**-80 if round_to == "fp32" else 2.0**-70, dtype=BF16)
        check(a, b, tree, BF16, config=SMALL)
        if round_to == "bf16":
            assert bits(run(a, b, tree, config=SMALL)).unique().tolist() == [-(2**15)]


@pytest.mark.parametrize("name", ["tree2.bf16", "tree8.bf16"])
def test_tiles_and_strips_change_nothing(name):
    a, b = gradient(33, 50, 100)
    for config in [Config(16, 32, 2, 4, 1), Config(64, 16, 4, 4, 3), Config(32, 64, 9, 8, 2, 128)]:
        check(a, b, tree_of(name), config=config)
    check(a, b, tree_of(name), config=None)


@pytest.mark.parametrize("name", ["chain", "tree8.bf16", "tree8.fp32", "tree16.bf16"])
def test_every_candidate_gives_the_same_bits(name):
    (a, b), tree = gradient(35, 66, 40), tree_of(name)
    found = candidates(66, 40, 35, tree, hip=False)
    assert len(set(found)) == len(found) >= 2
    for config in found:
        check(a, b, tree, config=config)
    assert all(c.stages == 1 for c in candidates(66, 40, 35, tree, hip=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operand_layouts(layout):
    """NaN lies between and behind the rows of most of them."""
    (a, b), tree = gradient(19, 18, 20), tree_of("tree8.bf16")
    check(laid_out(a, layout), b, tree, config=WIDE)
    check(a, laid_out(b, layout), tree, config=WIDE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_output_layouts_write_nothing_beside(layout):
    (a, b), tree = gradient(9, 18, 20), tree_of("tree8.bf16")
    out = poisoned(18, 20, BF16, layout)
    whole = torch.empty(0, dtype=BF16).set_(out.untyped_storage())
    gemm_tokens(a, b, out, tree, SMALL)
    assert bit_report(out, tree.matmul(a, b))
    assert int(whole.isfinite().sum()) == out.numel()


@pytest.mark.filterwarnings("ignore:invalid value")
def test_infinity_and_nan_stay_in_their_leaf_row_and_column():
    (a, b), tree = gradient(32, 12, 12), tree_of("tree8.bf16")
    a, b = a.clone(), b.clone()
    a[3, 5], a[4, 30], b[7, 2], b[17, 6] = float("inf"), float("-inf"), float("nan"), float("inf")
    got, wanted = run(a, b, tree), tree.matmul(a, b)
    assert torch.equal(got.isnan(), wanted.isnan()) and got[:, 2].isnan().all()
    assert torch.equal(got.nan_to_num(), wanted.nan_to_num()) and got[0, 6].isinf()


@pytest.mark.parametrize("kind", ["cancelling", "subnormal", "zeros"])
@pytest.mark.parametrize("name", TREES)
def test_adversarial_values(name, kind):
    for dtype in (BF16, FP32):
        check(*gradient(29, 16, 16, kind), tree_of(name), dtype)


@settings(max_examples=25)
@given(
    m=st.integers(1, 20),
    n=st.integers(1, 40),
    tokens=st.integers(0, 64),
    leaves=st.sampled_from([1, 2, 4, 8, 16]),
    round_to=st.sampled_from(["bf16", "fp32"]),
    dtype=st.sampled_from([BF16, FP32]),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 3),
)
def test_any_shape(m, n, tokens, leaves, round_to, dtype, layouts):
    a, b = laid_out(matrix(m, tokens, 1), layouts[0]), laid_out(matrix(tokens, n, 2), layouts[1])
    check(a, b, ReductionTree(leaves, round_to), dtype, config=WIDE, layout=layouts[2])


def test_nothing_to_do_and_an_empty_sum():
    tree = tree_of("tree8.bf16")
    assert run(matrix(0, 5), matrix(5, 8), tree).shape == (0, 8)
    assert run(matrix(5, 0), matrix(0, 0), tree, config=None).shape == (5, 0)
    assert bits(run(matrix(5, 0), matrix(0, 6), tree, FP32, None)).unique().tolist() == [0]


# -- these tests would notice ----------------------------------------------------------------------


def differs(got, wanted) -> bool:
    return bit_report(got, wanted).mismatches > 0


def test_another_order_of_additions_is_another_result():
    (a, b), tree = gradient(64, 40, 60), tree_of("tree8.bf16")
    got = run(a, b, tree)
    leaves = [tree.leaf(a[:, lo:hi], b[lo:hi]) for lo, hi in tree.bounds(64)]
    left = leaves[0]
    for leaf in leaves[1:]:
        left = tree.joint(left, leaf)
    assert differs(got, left)
    for other in ("tree16.bf16", "tree4.bf16", "tree8.fp32", "chain"):
        assert differs(got, tree_of(other).matmul(a, b, BF16))


def test_leaves_cut_evenly_are_another_result(monkeypatch):
    (a, b), tree = gradient(29), tree_of("tree8.bf16")  # of 3, 4, 3, 4, 3, 4, 4, 4 tokens
    even = [(4 * i, min(4 * i + 4, 29)) for i in range(8)]
    assert differs(
        run(a, b, tree), tree.fold([tree.leaf(a[:, lo:hi], b[lo:hi]) for lo, hi in even])
    )


# -- what is refused, and what is chosen -----------------------------------------------------------


def refuse(error, match, **change):
    call = {"a": matrix(4, 32), "b": matrix(32, 6), "out": poisoned(4, 6, BF16)}
    call |= {"tree": tree_of("tree8.bf16")} | change
    with pytest.raises(error, match=match):
        gemm_tokens(**call)
    assert call["out"].isnan().all()
    call.pop("config", None)
    return refuses(**call)


def test_refusals():
    assert "a is torch.float32" in refuse(TypeError, "expected torch.bf", a=torch.zeros(4, 32))
    assert "out is" in refuse(TypeError, "torch.float16", out=poisoned(4, 6, torch.float16))
    assert "K differs" in refuse(ValueError, "K differs", b=matrix(31, 6))
    assert "at most 16" in refuse(ValueError, "at most 16", tree=ReductionTree(32))
    many = {"a": matrix(4, 65), "b": matrix(65, 6)}
    assert "more than 64 tokens" in refuse(ValueError, "K=65 .* at most 64 tokens", **many)
    assert refuse(ValueError, "block_n=48 ", config=Config(64, 48, 1, 4, 1)) is None
    assert refuse(ValueError, "span=0 ", config=Config(64, 64, 0, 4, 1)) is None


def test_selection_knows_it():
    (a, b), tree = gradient(32, 40, 30), tree_of("tree8.bf16")
    out = poisoned(40, 30, BF16)
    found = [c for c in select.choices(a, b, out, tree) if c.schedule == "tokens"]
    assert [c.config for c in found] == list(candidates(40, 30, 32, tree))
    select.gemm(a, b, out, tree, found[0])
    assert bit_report(out, tree.matmul(a, b))
    a, b = gradient(65, 40, 30)
    assert all(c.schedule != "tokens" for c in select.choices(a, b, out, tree))


def test_strips_outnumber_the_cores_of_a_large_gpu():
    tree = tree_of("tree8.bf16")
    for m, n in [(12288, 4096), (4096, 12288), (4096, 4096), (65, 65)]:
        config = module.default_config(m, n, 64, tree, hip=False)
        tiles = -(-m // config.block_m) * -(-n // config.block_n)
        assert 1 <= config.span <= 8 and (config.span == 1 or tiles // config.span >= 1536)
