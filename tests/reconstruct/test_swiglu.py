"""The SwiGLU block without ranks: its oracle, its fixture, and what its bounds must reject."""

import pytest
import torch

from rlkernel.collectives.comm import Comm, Link
from rlkernel.contract import ReductionTree
from rlkernel.experiments.reconstruction import ARTICLE_STD
from rlkernel.experiments.tp_swiglu import SIGNALS, SIZES
from rlkernel.grid import Grid
from rlkernel.reconstruct import step
from rlkernel.reconstruct.step import Pair
from rlkernel.reconstruct.swiglu import SwiGLU
from rlkernel.reconstruct.twin import rms_norm


def block_of(size, dtype):
    std = ARTICLE_STD if size == "article" else None
    return SwiGLU(11, dtype, std, False, **SIZES[size])


BLOCKS = {
    "article fp32": block_of("article", torch.float32),
    "article bf16": block_of("article", torch.bfloat16),
    "realistic fp32": block_of("realistic", torch.float32),
    "realistic bf16": block_of("realistic", torch.bfloat16),
}


def alone() -> Comm:
    """The seam of a grid with one rank: nothing moves, no process group is needed."""
    links = {axis: Link((0,), 0, None, None) for axis in ("tp", "cp", "dp", "grad")}
    return Comm(Grid(), 0, links, ReductionTree(1, "fp32"))


@pytest.fixture(params=BLOCKS, scope="module")
def block(request):
    return BLOCKS[request.param]


def test_the_dense_block_against_an_fp64_oracle(block):
    weights, (x, _) = block.weights(), block.data(0)
    w = {name: value.double() for name, value in weights.items()}
    n = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * w["norm"]
    gate, up = n @ w["gate_up"][0].T, n @ w["gate_up"][1].T
    oracle = x.double() + (gate / (1 + (-gate).exp()) * up) @ w["down"].T + w["down_bias"]
    atol = 5e-6 if block.dtype == torch.float32 else 5e-2
    torch.testing.assert_close(block.dense(weights, x).double(), oracle, atol=atol, rtol=2e-2)


def test_one_rank_of_one_trains_like_the_dense_block(block):
    for steps in (1, 2):
        pairs = block.train_both(alone(), 0.05, steps=steps)
        assert list(pairs) == list(SIGNALS)
        for name, pair in pairs.items():
            report = step.compare_signal(pair, block.dtype, None)
            assert report["excess"] <= 1, (name, report)


def test_a_second_step_uses_other_data_and_the_weights_of_the_first(block):
    once, twice = (block.train_both(alone(), 0.05, steps=n) for n in (1, 2))
    assert not once["output"].dense.equal(twice["output"].dense)
    assert not block.data(0)[0].equal(block.data(1)[0])


def test_gradients_against_finite_differences():
    block = SwiGLU(1, torch.float64, 0.5, False, 2, 1, 4, 6)
    weights, (x, target) = block.weights(), block.data(0)

    def loss(*values):
        named = dict(zip(weights, values[1:], strict=True))
        return (block.dense(named, values[0]) - target).square().mean()

    # The norm takes its statistics in FP32 as the official one does, hence the wide step.
    inputs = [v.double().requires_grad_() for v in (x, *weights.values())]
    assert torch.autograd.gradcheck(loss, inputs, eps=1e-2, atol=2e-3, rtol=1e-2)


def partials(block, parts=4):
    """What P ranks would send into the forward sum, and the dense output."""
    weights, (x, _) = block.weights(), block.data(0)
    n = rms_norm(x, weights["norm"])
    gate, up = (n @ w.T for w in weights["gate_up"])
    hidden = torch.nn.functional.silu(gate) * up
    pieces = zip(
        hidden.float().chunk(parts, -1), weights["down"].float().chunk(parts, 1), strict=True
    )
    return x, [h @ w.T for h, w in pieces], block.dense(weights, x)


def test_zeros_a_missing_and_a_doubled_partial_each_leave_the_bounds(block):
    x, parts, dense = partials(block)
    bound = 5e-7 if block.std and block.dtype == torch.float32 else None

    def excess(total):
        y = (x + total.to(x.dtype)) if total is not None else torch.zeros_like(x)
        return step.compare_signal(Pair(y, dense, block.ffn), block.dtype, bound)["excess"]

    rms = dense.float().square().mean().sqrt().item()
    assert 0.5 <= rms <= 2
    assert excess(sum(parts)) <= 1
    assert excess(None) > 1
    for i in range(len(parts)):
        assert excess(sum(parts) - parts[i]) > 1, f"partial {i} missing"
        assert excess(sum(parts) + parts[i]) > 1, f"partial {i} doubled"


def test_shapes_of_inspect():
    shapes = BLOCKS["article fp32"].shapes(alone())
    assert shapes["dense_shapes"]["w_gate_up"] == [2, 12, 8]
    assert shapes["rank_local_shapes"]["gate"] == [3, 2, 12]


def test_the_same_seed_gives_the_same_tensors_and_another_one_does_not():
    one, two, other = (
        SwiGLU(seed, torch.float32, 0.2, False, 3, 2, 8, 12) for seed in (11, 11, 12)
    )
    assert all(one.weights()[name].equal(two.weights()[name]) for name in one.weights())
    assert one.data(0)[0].equal(two.data(0)[0])
    assert not other.weights()["down"].equal(one.weights()["down"])
    assert not other.data(0)[0].equal(one.data(0)[0])
