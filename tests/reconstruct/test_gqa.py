"""The GQA block without ranks: its oracle, its head groups, causality and rotation."""

import pytest
import torch
import torch.nn.functional as F

from rlkernel.experiments.tp_gqa import SIZES
from rlkernel.reconstruct.gqa import GQA, attend, rope

ARTICLE = GQA(11, torch.float32, 0.2, False, **SIZES["article"])


def test_the_dense_block_against_torch_s_attention_in_fp64():
    for block in (ARTICLE, GQA(3, torch.float32, None, False, **SIZES["realistic"])):
        weights, (x, _) = block.weights(), block.data(0)
        w = {name: value.double() for name, value in weights.items()}
        n = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
        q, k, v = (
            (n @ w[name].T).unflatten(-1, (-1, block.head_dim)).permute(1, 2, 0, 3)
            for name in ("wq", "wk", "wv")
        )
        q, k = rotated(q), rotated(k)
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        oracle = x.double() + context.permute(2, 0, 1, 3).flatten(2) @ w["wo"].T
        torch.testing.assert_close(block.dense(weights, x).double(), oracle, atol=1e-5, rtol=1e-5)


def rotated(x):
    """Rotary positions as complex numbers, in FP64: x [B, heads, S, D]."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-torch.arange(half).double() / half)
    angle = torch.arange(x.shape[2]).double()[:, None] * frequency
    turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def test_rotation_keeps_lengths_and_depends_on_the_distance_only():
    g = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 1, 1, 8, generator=g).expand(6, 1, 1, 8) for _ in range(2))
    a, b = rope(q), rope(k)
    torch.testing.assert_close(a.norm(dim=-1), q.norm(dim=-1))
    scores = torch.einsum("sbhd,tbhd->st", a, b)
    for distance in range(6):
        same = scores.diagonal(-distance)
        torch.testing.assert_close(same, same[:1].expand_as(same), atol=1e-5, rtol=1e-5)


def test_a_later_token_does_not_reach_an_earlier_one():
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(5, 2, heads, 4, generator=g) for heads in (4, 2, 2))
    before = attend(q, k, v)
    k[3:], v[3:] = 7.0, 7.0
    after = attend(q, k, v)
    assert after[:3].equal(before[:3]) and not after[3:].equal(before[3:])


def test_query_heads_read_the_kv_head_of_their_group():
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(5, 1, heads, 4, generator=g) for heads in (4, 2, 2))
    whole = attend(q, k, v).unflatten(-1, (4, 4))
    for head in range(4):
        group = head // 2
        alone = attend(q[:, :, [head]], k[:, :, [group]], v[:, :, [group]])
        torch.testing.assert_close(whole[:, :, head], alone)


@pytest.mark.parametrize(
    ("tp", "owned"),
    [
        (1, [([0, 1, 2, 3], [0, 1])]),
        (2, [([0, 1], [0]), ([2, 3], [1])]),
        (4, [([0], [0]), ([1], [0]), ([2], [1]), ([3], [1])]),
    ],
)
def test_whole_groups_stay_on_a_rank(tp, owned):
    found = [ARTICLE.owned(tp, rank) for rank in range(tp)]
    assert [(list(q), list(kv)) for q, kv in found] == owned
    assert ARTICLE.replicas(tp) == {1: 1, 2: 1, 4: 2}[tp]


@pytest.mark.parametrize("tp", [8, 3])
def test_more_ranks_than_query_heads_are_refused_by_name(tp):
    with pytest.raises(ValueError, match=f"tp={tp} cannot split 4 query over 2 KV heads"):
        ARTICLE.owned(tp, 0)
