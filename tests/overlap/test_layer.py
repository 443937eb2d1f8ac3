"""The layer and its block on a lone rank: values against FP64, refusals, and what is left alone."""

from __future__ import annotations

import math

import pytest
import torch

from rlkernel.collectives.comm import Link
from rlkernel.collectives.groups import alone
from rlkernel.overlap import compiled, copy_engine, path
from rlkernel.overlap.block_check import oracle, signals
from rlkernel.overlap.layer import A2AFFN, RankMixer, exact, he_bound, mixed
from rlkernel.overlap.layout import Layout, layout_of
from tests.overlap.foreign import ForeignFFN
from tests.overlap.inputs import differing, drawn, far, layer, trained

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("overlap", ["none", "with-sm", "kernel"])
def test_output_and_every_gradient_against_fp64(dtype, overlap):
    ffn = layer(6, 20, 3, dtype=dtype)
    x, dy = drawn(0, 3, 6, 20, dtype=dtype), drawn(1, 3, 6, 20, dtype=dtype)
    got = trained(lambda x: ffn(x, overlap), ffn, x, dy)
    leaf = x.double().requires_grad_()
    named = {"input": leaf, **dict(ffn.named_parameters())}
    y = exact(ffn, leaf)
    wanted = {"output": y.detach()}
    wanted |= dict(zip(named, torch.autograd.grad(y, list(named.values()), dy.double())))
    assert not far(got, wanted, LIMITS[dtype])


def test_the_oracle_would_see_a_missing_bias():
    ffn, x = layer(4, 16, 2), drawn(0, 2, 4, 16)
    right = exact(ffn, x)
    for name in ("b1", "bout"):
        kept = getattr(ffn, name).data.clone()
        getattr(ffn, name).data.zero_()
        assert far({"y": ffn(x)}, {"y": right}, 1e-5), name
        getattr(ffn, name).data.copy_(kept)
    assert not far({"y": ffn(x)}, {"y": right}, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_block_against_fp64(dtype):
    block = RankMixer(layer(4, 16, 2, dtype=dtype), 4, 16)
    x, dy = drawn(0, 2, 4, 16, dtype=dtype), drawn(1, 2, 4, 16, dtype=dtype)
    wanted = signals(block, x, dy, lambda x: oracle(block, x))
    assert not far(signals(block, x, dy, block), wanted, LIMITS[dtype])


def test_mixing_makes_heads_into_tokens():
    """T = 2, D = 4: token 0 becomes the first heads of both tokens. Judged before the norm."""
    x = torch.arange(8.0).view(1, 2, 4)
    heads = torch.tensor([[[0, 1, 4, 5], [2, 3, 6, 7]]]).float()
    wanted = torch.nn.functional.layer_norm(heads + x, (4,))
    assert torch.equal(mixed(x, torch.ones(4), torch.zeros(4)), wanted)


def test_weights_are_he_uniform_from_seed_and_rank():
    one, same, other = (A2AFFN(64, 4, 3, seed=seed, dtype=torch.float32) for seed in (1, 1, 2))
    assert torch.equal(one.w1, same.w1) and not torch.equal(one.w1, other.w1)
    for weight, fan_in in ((one.w1, 64), (one.wout, 192)):
        bound = math.sqrt(6 / fan_in)
        assert he_bound(fan_in) == bound and weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    comm = alone()
    comm.links = {"ep": Link((7, 9), 1, None, None)}
    assert torch.equal(A2AFFN(64, 8, 3, comm, seed=1, dtype=torch.float32).w1, other.w1)
    assert A2AFFN(16, 4, 2, compute_scale=3).wout.shape == (4, 96, 16)


# ---- comp-only -----------------------------------------------------------------------------------


class Mute:
    """A transport and an agreement that nobody may use."""

    name, group, backend = "nothing", None, "gloo"

    def __getattr__(self, name):
        raise AssertionError(f"a collective was called: {name}")


def apart(ranks: int):
    comm = alone()
    comm.links = {"ep": Link(tuple(range(ranks)), 1, Mute(), Mute())}
    return comm


@pytest.mark.parametrize("overlap", ["none", "with-sm", "kernel"])
def test_comp_only_speaks_to_nobody_and_keeps_the_layout(overlap):
    """Xlocal is the rank's own P slices along the batch; the inverse at the end; autograd works."""
    ffn = layer(8, 16, 2, apart(4))
    x, dy = drawn(0, 3, 8, 16), drawn(1, 3, 8, 16)
    got = trained(lambda x: ffn(x, overlap, comp_only=True), ffn, x, dy)

    def by_hand(x):
        local = torch.cat(x.chunk(4, 1))
        return torch.cat(exact(ffn, local).split(3), 1)

    wanted = trained(by_hand, ffn, x, dy.double())
    assert got["output"].shape == x.shape and not far(got, wanted, 1e-5)
    assert torch.equal(got["output"], ffn._forward_comp_only(x))
    with pytest.raises(AssertionError, match="a collective was called"):
        ffn(x, overlap)


# ---- refusals ------------------------------------------------------------------------------------

REFUSED = {
    "T % P": (lambda f: f(drawn(0, 2, 6, 16)), "T=6 does not divide over P=4"),
    "B = 0": (lambda f: f(torch.empty(0, 8, 16)), r"\(0, 8, 16\)"),
    "not three axes": (lambda f: f(drawn(0, 8, 16)), "expected .B, T, D."),
    "float64": (lambda f: f(drawn(0, 2, 8, 16).double()), "float64"),
    "another dtype": (lambda f: f(drawn(0, 2, 8, 16).bfloat16()), "bfloat16 with weights of"),
    "another device": (lambda f: f(torch.empty(2, 8, 16, device="meta")), "inputs are on meta"),
    "another width": (lambda f: f(drawn(0, 2, 8, 12)), "w1 of shape"),
    "another T": (lambda f: f(drawn(0, 2, 12, 16)), "w1 of shape"),
    "an unknown schedule": (lambda f: f(drawn(0, 2, 8, 16), "fast"), "none, with-sm, sm-free"),
}


@pytest.mark.parametrize("overlap", ["none", "with-sm", "kernel"])
@pytest.mark.parametrize("call, says", REFUSED.values(), ids=REFUSED)
def test_what_cannot_run_is_refused_before_anything_is_sent(call, says, overlap):
    ffn = layer(8, 16, 2, apart(4))
    with pytest.raises(ValueError, match=says):
        call(lambda x, other=overlap: ffn(x, other))


WRONG = {
    "a norm without scales": ("norm_x", torch.nn.LayerNorm(32, elementwise_affine=False),
                              r"norm_x.weight is None: expected a tensor \(32,\)"),
    "a norm without biases": ("norm_gate", torch.nn.LayerNorm(32, bias=False),
                              r"norm_gate.bias is None: expected a tensor \(32,\)"),
    "a norm over another width": ("norm_gate", torch.nn.LayerNorm(16), "norm_gate.weight of shape"),
    "a norm of another dtype": ("norm_x", torch.nn.LayerNorm(32, dtype=torch.float64),
                                "norm_x.weight is torch.float64 on cpu, the inputs are"),
    "a norm elsewhere": ("norm_x", torch.nn.LayerNorm(32, device="meta"), "weight is .* on meta"),
    "no norm at all": ("norm_x", torch.nn.Identity(), "norm_x.weight is None"),
    "b1 of another dtype": ("b1", torch.nn.Parameter(torch.zeros(2, 64).half()), "b1 is .*float16"),
    "wout elsewhere": ("wout", torch.nn.Parameter(torch.zeros(2, 32, 16, device="meta")),
                       "wout is .* on meta"),
    "flat wout": ("wout", torch.nn.Parameter(torch.zeros(1024)), r"wout of shape \(1024,\)"),
    "no bout": ("bout", None, r"bout is None: expected a tensor \(2, 16\)"),
}  # fmt: skip


@pytest.mark.parametrize("overlap", ["none", "with-sm", "kernel"])
@pytest.mark.parametrize("name, given, says", WRONG.values(), ids=WRONG)
def test_an_ffn_that_cannot_run_is_refused_by_the_name_of_its_parameter(name, given, says, overlap):
    ffn = layer(8, 16, 2, apart(4))
    setattr(ffn, name, given)
    with pytest.raises(ValueError, match=says):
        ffn(drawn(0, 2, 8, 16), overlap)


MODES = [{"fwd_mode": "fused"}, {"bwd_mode": "sparse"}, {"gemm_backend": "cutedsl"}]


@pytest.mark.parametrize("mode", [*MODES, {"gemm_backend": "fp8"}], ids=str)
def test_optional_backends_are_refused_by_name(mode):
    ((name, value),) = mode.items()
    with pytest.raises(ValueError, match=f"{name}={value} is not available here"):
        A2AFFN(16, 8, 2, **mode)
    ffn = layer(8, 16, 2)
    setattr(ffn, name, value)
    with pytest.raises(ValueError, match=f"{name}={value} is not available here"):
        ffn(drawn(0, 2, 8, 16))


def test_shapes_of_the_block_and_the_layer():
    with pytest.raises(ValueError, match="D=18 does not divide into T=4 heads"):
        RankMixer(layer(4, 18, 2), 4, 18)
    with pytest.raises(ValueError, match="T=6 does not divide over P=4"):
        layer(6, 16, 2, apart(4))


def test_sm_free_needs_gpus():
    with pytest.raises(ValueError, match="needs GPUs of one host"):
        layer(4, 16, 2)(drawn(0, 2, 4, 16), "sm-free")
    with pytest.raises(ValueError, match="needs GPUs of one host"):
        copy_engine.forward_ffn(ForeignFFN(4, 16, 2), drawn(0, 2, 4, 16))


def test_a_group_of_another_size_is_refused():
    ffn = layer(8, 16, 2, apart(4))
    ffn.ep_group_size = 2
    ffn.w1.data, ffn.b1.data, ffn.wout.data, ffn.bout.data = (
        torch.cat([p.data, p.data]) for p in (ffn.w1, ffn.b1, ffn.wout, ffn.bout)
    )
    with pytest.raises(ValueError, match=r"ep_group has 4 rank\(s\), ep_group_size says 2"):
        ffn(drawn(0, 2, 8, 16))


# ---- chunks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [1, 2, 5, 11, 32])
@pytest.mark.parametrize("chunks, unit", [(1, 1), (2, 1), (4, 1), (8, 1), (4, 2), (4, 4), (3, 64)])
def test_slices_cover_each_token_once(local, chunks, unit):
    slices = Layout(2, local * 2, 4, 8, 2).slices(chunks, unit)
    assert [t for s in slices for t in range(local)[s]] == list(range(local))
    assert 1 <= len(slices) <= chunks and all(s.stop > s.start for s in slices)
    assert all(s.start % unit == 0 for s in slices)


def test_a_cut_on_a_cpu_ends_where_vectors_do():
    """The last elements of a tensor go one by one through another exp: B=1, T=11, D=132 showed."""
    ffn, x = layer(11, 132, 2, seed=4), drawn(3, 2, 11, 132)
    with path.listening() as heard:
        same = trained(lambda x: ffn(x, "kernel"), ffn, x, x)
    assert not differing(same, trained(ffn, ffn, x, x))
    assert heard == ["chunks: kernel, 3 token slices (3 backward) by one rank"]
    assert layout_of(ffn, x).slices(4, 4) == (slice(0, 4), slice(4, 8), slice(8, 11))


def test_frozen_inputs_and_no_grad():
    ffn, x = layer(8, 16, 2), drawn(0, 2, 8, 16)
    assert not ffn(x).grad_fn.needs_input_grad[0]
    ffn(x, "kernel").sum().backward()
    assert ffn.w1.grad is not None
    with torch.no_grad():
        assert torch.equal(ffn(x, "kernel"), ffn(x)) and not ffn(x).requires_grad


def test_each_shape_is_compiled_by_itself(monkeypatch):
    """One function for all shapes runs uncompiled from its ninth variant on, with other bits."""
    made = []
    monkeypatch.setattr(torch, "compile", lambda f, dynamic: made.append(f) or f)
    compiled._for.cache_clear()
    for width in range(4, 16):
        for _ in range(2):
            like = torch.ones(2, width)
            out = compiled.compiled(mixed, like.view(1, 2, width))
    assert len(made) == len({id(f.__code__) for f in made}) == 12
    x = drawn(0, 1, 2, 4)
    assert torch.equal(
        made[0](x, torch.ones(4), torch.zeros(4)), mixed(x, torch.ones(4), 0 * x[0, 0])
    )
    assert out is made[-1]
    compiled._for.cache_clear()
