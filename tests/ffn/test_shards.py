"""Shard references without a process group: who owns what, and what the pieces add up to."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from rlkernel.compare import bit_report
from rlkernel.contract import ReductionTree
from rlkernel.ffn import boundaries, ops, shards
from rlkernel.ffn.boundaries import outside
from rlkernel.ffn.shards import BOUNDARIES, PACKED
from rlkernel.grid import Grid

HOME, TREE = Grid(cp=2, tp=2), ReductionTree(2, "bf16")
M, H, WIDE = 12, 32, 64
TENSORS = shards.packed(shards.fixtures(M, H, WIDE, 3), HOME.tp)
EVERY = pytest.mark.parametrize("boundary", [*BOUNDARIES, PACKED], ids=lambda b: b.name)
SUMMED = pytest.mark.parametrize(
    "boundary", [b for b in (*BOUNDARIES, PACKED) if b.over], ids=lambda b: b.name
)


def owned(rank):
    return shards.owned(HOME, rank, M, WIDE)


def test_offsets_of_all_four_ranks():
    found = [own.to_dict() for own in shards.layout(HOME, M, WIDE)]
    assert [(o["tokens"], o["features"]) for o in found] == [
        ([0, 6], [0, 32]), ([0, 6], [32, 64]), ([6, 12], [0, 32]), ([6, 12], [32, 64]),
    ]  # fmt: skip
    assert [(o["tp"], o["lane"]) for o in found] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    eight = shards.layout(Grid(2, 2, 2), 24, WIDE)
    assert [(o.lane, o.tokens.start) for o in eight[::2]] == [(0, 0), (1, 6), (2, 12), (3, 18)]


@pytest.mark.parametrize("m, wide, says", [(13, 64, "tokens M=13"), (12, 63, "features I=63")])
def test_uneven_shards_are_refused(m, wide, says):
    with pytest.raises(ValueError, match=f"{says} does not divide"):
        shards.owned(HOME, 0, m, wide)


def test_groups_of_each_sum():
    found = {b.name: [shards.group(b, HOME, r) for r in (0, 3)] for b in BOUNDARIES}
    assert found["down.forward"] == found["gate.dx"] == found["up.dx"] == [(0, 1), (2, 3)]
    assert found["gate.dw"] == found["up.dw"] == found["down.dw"] == [(0, 2), (1, 3)]
    assert found["gate.forward"] == found["up.forward"] == found["down.dh"] == [(0,), (3,)]


@EVERY
def test_shapes_of_a_rank(boundary):
    a, b = shards.oriented(boundary, *shards.operands(boundary, TENSORS, owned(3)))
    wide, lane = WIDE // 2, M // 2
    assert (tuple(a.shape), tuple(b.shape)) == {
        "gate.forward": ((lane, H), (H, wide)), "up.forward": ((lane, H), (H, wide)),
        "down.forward": ((lane, wide), (wide, H)), "gate.dx": ((lane, wide), (wide, H)),
        "up.dx": ((lane, wide), (wide, H)), "down.dh": ((lane, H), (H, wide)),
        "gate.dw": ((H, lane), (lane, wide)), "up.dw": ((H, lane), (lane, wide)),
        "down.dw": ((wide, lane), (lane, H)), "gate_up.dx": ((lane, WIDE), (WIDE, H)),
    }[boundary.name]  # fmt: skip


@EVERY
def test_scaled_and_any_wrong_result_is_refused(boundary):
    own = owned(1)
    post = shards.reduced(boundary, TENSORS, HOME, 1, M, TREE)
    oracle = shards.oracle(boundary, TENSORS, own)
    assert 0.5 <= oracle.square().mean().sqrt() <= 2
    assert outside(boundary, post, oracle) == 0
    part = shards.partial(boundary, TENSORS, own, TREE, 2).float()
    wrong = [torch.zeros_like(post)] + [part, post + part] * bool(boundary.over)
    assert all(outside(boundary, value, oracle) > 0 for value in wrong)


@SUMMED
def test_two_ranks_sum_like_one_under_the_same_tree(boundary):
    """Bit for bit under both roundings; with BF16 partials no longer like an unbroken chain."""
    for rank in range(4):
        for tree in (TREE, ReductionTree(2, "fp32")):
            found = shards.reduced(boundary, TENSORS, HOME, rank, M, tree)
            assert bit_report(found, shards.undivided(boundary, TENSORS, owned(rank), tree))
    unbroken = shards.undivided(boundary, TENSORS, owned(0), ReductionTree(1, "fp32"))
    assert not bit_report(shards.reduced(boundary, TENSORS, HOME, 0, M, TREE), unbroken)


@EVERY
def test_the_partial_is_the_operators_gemm(boundary):
    """det_gemm on a rank's operands, in the layout in which the operator takes them."""
    first, second = shards.operands(boundary, TENSORS, owned(2))
    gemm = {"forward": ops.det_gemm_fwd, "da": ops.det_gemm_da, "db": ops.det_gemm_db}
    found = gemm[boundary.kind](first, second, "chain")
    assert bit_report(found, shards.partial(boundary, TENSORS, owned(2), TREE, 2))


@pytest.mark.parametrize("name, tp, dim", [("gate.forward", "f", 1), ("down.dh", "f", 1)])
def test_feature_shards_side_by_side_are_one_rank(name, tp, dim):
    boundary = next(b for b in BOUNDARIES if b.name == name)
    parts = [shards.partial(boundary, TENSORS, owned(r), TREE, 1) for r in (2, 3)]
    whole = owned(2)._replace(features=slice(None))
    assert bit_report(torch.cat(parts, dim), shards.undivided(boundary, TENSORS, whole, TREE))


def test_packed_slices_lie_side_by_side():
    d, w = (TENSORS[name].chunk(2, 1)[1] for name in ("d_gate_up", "w_gate_up"))
    assert torch.equal(d, torch.cat([TENSORS[n][:, WIDE // 2 :] for n in ("d_gate", "d_up")], 1))
    assert torch.equal(w, torch.cat([TENSORS[n][:, WIDE // 2 :] for n in ("w_gate", "w_up")], 1))


def test_fixtures_are_independent_and_the_same_each_time():
    again, other = (shards.fixtures(M, H, WIDE, seed) for seed in (3, 4))
    assert all(torch.equal(again[name], TENSORS[name]) for name in again)
    assert not any(torch.equal(other[name], again[name]) for name in again)
    assert not torch.equal(again["d_gate"], again["d_up"])
    ratio = (again["d_gate"].float() / again["d_gate.dw"].float()).unique()
    assert ratio.numel() == 1 and ratio.log2() == ratio.log2().round()


def test_no_process_group_was_needed():
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="torch.distributed is not initialised"):
        ops.row_parallel_forward(*_two(), None, grid=HOME)


def _two():
    return shards.operands(BOUNDARIES[2], TENSORS, owned(0))


@pytest.mark.parametrize(
    "ranks, axis, says",
    [
        ([1, 0], "tp", "another order"),
        ([0, 2], "tp", "rank 0's cp group; the members own different tokens"),
        ([0, 3], "tp", "different tokens"),
        ([0, 1], "cp", "rank 0's tp group; the members own different weight shards"),
        ([0, 3], "cp", "rank 0 holds tp 0, rank 3 holds tp 1"),
        ([0, 1, 2, 3], "cp", "expected \\[0, 2\\]"),
        ([0, 7], "tp", "the grid has 4 ranks"),
    ],
)
def test_a_group_of_others_is_named(ranks, axis, says):
    from rlkernel.ffn.parallel_ops import check_owners

    with pytest.raises(ValueError, match=f"a.site: group .* is not the {axis} group.*{says}"):
        check_owners("a.site", ranks, axis, 0, HOME)
    check_owners("a.site", HOME.group_of(0, axis), axis, 0, HOME)


@pytest.mark.parametrize(
    "capability, hip, says",
    [((9, 0), None, ""), ((8, 0), None, "compute capability 8.0"), ((9, 0), "7.2", "ROCm")],
)
def test_only_a_proven_backend_computes(capability, hip, says, monkeypatch):
    """Nothing stands in for the deterministic kernels where they have not been proven."""
    from rlkernel.ffn.parallel_ops import require_backend

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert require_backend(torch.device("cpu")) == "twin"
    if not says:
        assert require_backend(torch.device("cuda")) == "cuda_sm90"
        return
    with pytest.raises(ValueError, match=f"no deterministic GEMM is proven on cuda .{says}"):
        require_backend(torch.device("cuda"))


def test_drift_on_a_device_would_rank_alike():
    """The sort that a GPU takes, on the CPU: the same numbers as compare.drift."""
    value, oracle = torch.randn(7, 11), torch.randn(7, 11)
    expected = boundaries.compare.drift(value, oracle).to_dict()
    found = boundaries.sorted_drift(value, oracle)
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.allclose(torch.tensor(found[name]), torch.tensor(expected[name])), name
