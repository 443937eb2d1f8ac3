"""The layer on one rank: an FP64 oracle within tolerances, the contract's bits, its weights."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rlkernel.compare import bit_report
from rlkernel.contract import LayerContract, ReductionTree
from rlkernel.ffn.backward import dw_route
from rlkernel.ffn.module import NAMES, DeterministicFFN
from rlkernel.kernels import reference
from tests.ffn.inputs import WIDE, H, M, eager, trained, weights
from tests.kernels.inputs import matrix

BF16 = torch.bfloat16
CONTRACTS = ("tree8.bf16", "tree8.fp32", "tree2.bf16", "chain")
FORWARD, GRADIENT = {"atol": 5e-2, "rtol": 2e-2}, {"atol": 1e-1, "rtol": 2e-2}


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dx", ["separate", "packed"])
def test_within_tolerance_of_an_fp64_oracle(dx):
    x, dy, layer = matrix(M, H, 3), matrix(M, H, 4), DeterministicFFN(*weights(), dx=dx)
    found = trained(layer, x, dy)
    wide = [t.double().requires_grad_() for t in (x, *weights())]
    exact = eager(*wide)
    exact.backward(dy.double())
    right = dict(zip(("y", "dx", *NAMES), (exact.detach(), *(t.grad for t in wide))))
    assert 0.5 < exact.square().mean().sqrt() < 2
    for name, value in found.items():
        within = FORWARD if name == "y" else GRADIENT
        assert torch.allclose(value.double(), right[name], **within), name
        for wrong in (torch.zeros_like(value), 2 * value):
            assert not torch.allclose(wrong.double(), right[name], **within), name
    half = reference.gate_up(x, *weights()[:2]).hidden
    half[:, : WIDE // 8] = 0  # one leaf of the down projection is missing
    assert not torch.allclose(F.linear(half, weights()[2]).double(), right["y"], **FORWARD)


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("m", [M, 13, 3])
def test_every_result_is_the_contracts_own(contract, m):
    """Products by ReductionTree alone; tokens over uneven and absent leaves (m = 13, 3)."""
    tree, (gate, up, down) = ReductionTree.parse(contract), weights()
    x, dy = matrix(m, H, 3), matrix(m, H, 4)
    g, u, hidden = reference.gate_up(x, gate, up)
    dh = ReductionTree.parse("chain").matmul(dy, down, BF16)
    dg, du = reference.swiglu_backward(dh, g, u)
    right = {
        "y": tree.matmul(hidden, down.t(), BF16),
        NAMES[0]: tree.matmul(dg.t(), x, BF16),
        NAMES[1]: tree.matmul(du.t(), x, BF16),
        NAMES[2]: tree.matmul(dy.t(), hidden, BF16),
    }
    slices = [slice(lo, hi) for lo, hi in tree.bounds(WIDE)]
    leaves = [
        tree.leaf(torch.cat([dg[:, at], du[:, at]], 1), torch.cat([gate[at], up[at]]))
        for at in slices
    ]
    dx = {
        "separate": tree.matmul(dg, gate, BF16) + tree.matmul(du, up, BF16),
        "packed": tree.fold(leaves).to(BF16),
    }
    assert not bit_report(dx["separate"], dx["packed"]), "two contracts that nothing tells apart"
    for way in ("separate", "packed"):
        found = trained(DeterministicFFN(gate, up, down, contract=contract, dx=way), x, dy)
        for name, value in {**right, "dx": dx[way]}.items():
            report = bit_report(found[name], value)
            assert report, f"{way} {name}: {report}"


def test_tokens_and_features_may_have_trees_of_their_own():
    both = LayerContract(ReductionTree(8), ReductionTree(2))
    x, dy = matrix(M, H, 3), matrix(M, H, 4)
    found = trained(DeterministicFFN(*weights(), contract=both), x, dy)
    eight, two = (
        trained(DeterministicFFN(*weights(), contract=name), x, dy)
        for name in ("tree8.bf16", "tree2.bf16")
    )
    for name, value in found.items():
        other = two if name in NAMES else eight
        assert bit_report(value, other[name]), name
        assert not bit_report(eight[name], two[name]), name


@pytest.mark.parametrize("contract", CONTRACTS)
def test_forward_without_gradients_has_the_bits_of_training(contract):
    layer, x = DeterministicFFN(*weights(), contract=contract), matrix(M, H, 3)
    trained = layer(x)
    with torch.no_grad():
        assert bit_report(layer(x), trained)
    assert trained.requires_grad and not layer.requires_grad_(False)(x).requires_grad
    assert bit_report(layer(x), trained)


def test_a_row_keeps_its_bits_in_any_batch():
    layer, x, dy = DeterministicFFN(*weights()), matrix(M, H, 3), matrix(M, H, 4)
    whole = trained(layer, x, dy)
    for rows in (slice(0, 1), slice(7, 24), slice(M - 1, M)):
        part = trained(layer, x[rows], dy[rows])
        assert bit_report(part["y"], whole["y"][rows])
        assert bit_report(part["dx"], whole["dx"][rows])


def test_any_layout_of_the_upstream_gradient():
    layer, x = DeterministicFFN(*weights()), matrix(M, H, 3)
    right = trained(layer, x, torch.ones(M, H, dtype=BF16))
    for dy in (torch.ones(1, dtype=BF16).expand(M, H), torch.ones(H, M, dtype=BF16).t()):
        assert not dy.is_contiguous()
        for name, value in trained(layer, x, dy).items():
            assert bit_report(value, right[name]), name


# -- tokens ----------------------------------------------------------------------------------------


def test_three_sequences_are_numbered_sequence_major():
    """token = s * B + b; the order of tokens is the order of dW's additions."""
    s, b = 8, 3
    x, dy = matrix(s * b, H, 5), matrix(s * b, H, 6)  # rows in the order of tokens
    layer = DeterministicFFN(*weights())
    right = trained(layer, x, dy)

    def by_sequence(t):
        return t.view(s, b, H).transpose(0, 1).contiguous()  # [B, S, H]

    found = trained(layer, by_sequence(x), by_sequence(dy))
    assert found["y"].shape == found["dx"].shape == (b, s, H)
    for name, value in found.items():
        value = value if name in NAMES else value.transpose(0, 1).reshape(-1, H)
        assert bit_report(value, right[name]), name
    batch_major = trained(layer, by_sequence(x).view(-1, H), by_sequence(dy).view(-1, H))
    assert not bit_report(batch_major[NAMES[0]], right[NAMES[0]]), "dW cannot tell the orders apart"
    sequence_first = DeterministicFFN(*weights(), batch_first=False)
    for name, value in trained(sequence_first, x.view(s, b, H), dy.view(s, b, H)).items():
        assert bit_report(value.view(right[name].shape), right[name]), name


# -- weights ---------------------------------------------------------------------------------------


def official(seed: int = 7) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    torch.manual_seed(seed)
    return Qwen3MLP(transformers.Qwen3Config(hidden_size=H, intermediate_size=WIDE)).to(BF16)


def test_weights_go_to_the_official_layer_and_come_back():
    mlp = official()
    layer = DeterministicFFN.from_hf(mlp)
    state = layer.state_dict()
    assert list(state) == list(mlp.state_dict()) == list(NAMES)
    assert all(bit_report(state[name], value) for name, value in mlp.state_dict().items())
    other = official(8)
    other.load_state_dict(state)
    x = matrix(M, H, 3)
    assert bit_report(other(x), mlp(x)) and not bit_report(official(8)(x), mlp(x))
    assert torch.allclose(layer(x), mlp(x), **FORWARD)
    fresh = DeterministicFFN(*weights())
    fresh.load_state_dict(mlp.state_dict())
    assert bit_report(fresh(x), layer(x))
    x = x.requires_grad_()
    mlp(x).sum().backward()
    layer(x).sum().backward()
    for (name, ours), theirs in zip(layer.gradients().items(), mlp.parameters()):
        assert torch.allclose(ours, theirs.grad, **GRADIENT), name


def test_a_whole_model_keeps_the_names():
    model = nn.Sequential(nn.Identity(), DeterministicFFN(*weights()))
    assert list(model.state_dict()) == [f"1.{name}" for name in NAMES]
    state = {f"1.{name}": w for name, w in zip(NAMES, weights(2))}
    model.load_state_dict(state)
    assert all(bit_report(model.state_dict()[name], w) for name, w in state.items())
    with pytest.raises(RuntimeError, match=r"Missing key.*1\.up_proj\.weight"):
        model.load_state_dict({k: w for k, w in state.items() if "up" not in k})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*1\.gate_up"):
        model.load_state_dict(state | {"1.gate_up": weights(2)[0]})
    with pytest.raises(RuntimeError, match=r"1\.down_proj\.weight is \[64, 64\].*\[64, 128\]"):
        model.load_state_dict(state | {"1.down_proj.weight": weights(2)[2][:, :64]})


def test_gate_and_up_have_one_storage():
    layer, (gate, up, _) = DeterministicFFN(*weights()), weights()
    assert {name: list(p.shape) for name, p in layer.named_parameters()} == {
        "gate_up": [2 * WIDE, H],
        "down": [H, WIDE],
    }
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    for tensors in (layer.state_dict(), layer.local()):
        assert {t.untyped_storage().data_ptr() for t in tensors.values()} == own
    assert bit_report(layer.gate_up, torch.cat([gate, up]))
    assert set(layer.gradients().values()) == {None}
    trained(layer, matrix(M, H, 3), matrix(M, H, 4))
    assert (
        torch.equal(torch.cat([layer.gradients()[n] for n in NAMES[:2]]), layer.gate_up.grad)
        and layer.gradients()[NAMES[2]] is layer.down.grad
    )


def test_an_optimizers_step_in_place_is_seen_at_once():
    layer, x, dy = DeterministicFFN(*weights()), matrix(M, H, 3), matrix(M, H, 4)
    before = trained(layer, x, dy)
    for optimizer in (
        torch.optim.SGD(layer.parameters(), 0.5),
        torch.optim.AdamW(layer.parameters()),
    ):
        optimizer.step()
        fresh = DeterministicFFN(*(w.clone() for w in layer.state_dict().values()))
        after, right = trained(layer, x, dy), trained(fresh, x, dy)
        for name, value in after.items():
            assert bit_report(value, right[name]), name
            assert not bit_report(value, before[name]), name
        with torch.no_grad():
            assert bit_report(layer(x), right["y"])


def test_a_step_between_forward_and_backward_is_an_error():
    layer, x = DeterministicFFN(*weights()), matrix(M, H, 3)
    y = layer(x)
    layer.load_state_dict(dict(zip(NAMES, weights(2))))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_gradients_accumulate_and_nobody_pays_for_what_is_frozen():
    layer, x, dy = DeterministicFFN(*weights()), matrix(M, H, 3), matrix(M, H, 4)
    once = {name: grad.clone() for name, grad in trained(layer, x, dy).items()}
    layer(x).backward(dy)  # x wants no gradient
    for name, grad in layer.gradients().items():
        assert bit_report(grad, once[name] + once[name]), name
    layer.gate_up.requires_grad_(False)
    frozen = trained(layer, x, dy)
    assert frozen[NAMES[0]] is None and bit_report(frozen[NAMES[2]], once[NAMES[2]])
    layer.requires_grad_(False)
    assert bit_report(trained(layer, x, dy)["dx"], once["dx"])


# -- routes, refusals ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lanes", "tokens", "tree", "route"),
    [
        (1, 9, "tree8.bf16", "local"),
        (2, 16, "tree8.bf16", "gather"),  # 16 * (2*64 + 3*64) < 3*64*64
        (2, 64, "tree8.bf16", "reduce"),
        (2, 64, "tree8.fp32", "gather"),  # its roots are twice as large
        (4, 16, "tree8.bf16", "gather"),  # two levels against three other lanes
        (4, 40, "tree8.bf16", "reduce"),
    ],
)
def test_the_automatic_route_moves_fewer_bytes(lanes, tokens, tree, route):
    contract = LayerContract(token=ReductionTree.parse(tree))
    layer = SimpleNamespace(
        lanes=lanes, dw="auto", intermediate=WIDE, tp=2, hidden=H, contract=contract
    )
    assert dw_route(layer, tokens) == route
    for asked in ("reduce", "gather"):
        layer.dw = asked
        assert dw_route(layer, tokens) == (asked if lanes > 1 else "local")


def test_what_is_refused_and_in_which_words():
    gate, up, down = weights()
    layer = DeterministicFFN(gate, up, down)
    linear = [SimpleNamespace(weight=w, bias=None) for w in (gate, up, down)]
    mlp = SimpleNamespace(**{n.partition(".")[0]: w for n, w in zip(NAMES, linear)})
    biased, gelu = copy.deepcopy(mlp), copy.deepcopy(mlp)
    biased.up_proj.bias, gelu.act_fn = torch.zeros(WIDE), nn.GELU()
    made, cut = DeterministicFFN, (gate[:124], up[:124], down[:, :124])
    for error, words, action in (
        (TypeError, "up_proj.weight is torch.float32", lambda: made(gate, up.float(), down)),
        (ValueError, r"\[I, H\], \[I, H\] and \[H, I\]", lambda: made(gate, up, down.t())),
        (ValueError, "I=124.* multiple of 8", lambda: made(*cut)),
        (ValueError, "dx='both' .* separate, packed", lambda: made(*weights(), dx="both")),
        (ValueError, "dw='none' .* reduce, gather, auto", lambda: made(*weights(), dw="none")),
        (ValueError, "unknown contract 'tree'", lambda: made(*weights(), contract="tree")),
        (TypeError, "x is torch.float32", lambda: layer(torch.zeros(3, H))),
        (ValueError, r"\(3, 65\).*H=64", lambda: layer(torch.zeros(3, 65, dtype=BF16))),
        (ValueError, r"\(64,\)", lambda: layer(torch.zeros(H, dtype=BF16))),
        (ValueError, "has biases", lambda: made.from_hf(biased)),
        (ValueError, "activation GELU", lambda: made.from_hf(gelu)),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            action()
    assert bit_report(DeterministicFFN.from_hf(mlp).down, down)


def test_no_tokens_are_an_empty_sum():
    found = trained(DeterministicFFN(*weights()), matrix(0, H), matrix(0, H))
    assert found["y"].shape == found["dx"].shape == (0, H)
    assert all(bit_report(found[name], torch.zeros_like(found[name])) for name in NAMES)
