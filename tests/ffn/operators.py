"""The parallel operators on eight ranks: what ranks.py runs of them, beside ws2's four."""

from __future__ import annotations

import inspect
from functools import partial

import torch
import torch.distributed as dist

from rlkernel.collectives.errors import Disagreement
from rlkernel.collectives.faults import doubled, missing
from rlkernel.collectives.observers import Capture
from rlkernel.compare import bit_report
from rlkernel.contract import ReductionTree
from rlkernel.ffn import boundaries, ops, shards
from rlkernel.grid import Grid
from tests.collectives.checks import refused

H, WIDE, M = 32, 64, 24
GRID = Grid(2, 2, 2)
TREE = ReductionTree(8)
BY_NAME = {b.name: b for b in shards.BOUNDARIES}


def inputs(comm, name):
    """Operands of this rank at a boundary, and the reference behind its sum."""
    tensors = shards.fixtures(M, H, WIDE, 5)
    own = shards.owned(comm.grid, comm.rank, M, WIDE)
    right = shards.reduced(BY_NAME[name], tensors, comm.grid, comm.rank, M, TREE)
    return shards.operands(BY_NAME[name], tensors, own), right


def group(comm, axis):
    return comm.links[axis].transport.group


def gradient_groups_of_four(world):
    """DP=2 x CP=2 under a tree of eight; fewer leaves than ranks, the backend's sum and the CP
    group alone are refused by name."""
    comm = world.comm(GRID)
    (x, dy), right = inputs(comm, "gate.dw")
    grad, cp = group(comm, "grad"), group(comm, "cp")
    usual = {"grid": GRID, "contract": TREE, "reduction": "tree"}
    assert bit_report(ops.replicated_weight_dw(x, dy, grad, **usual), right)
    for words, wrong in (
        (["4 shards", "tree2.bf16"], {"contract": "tree2.bf16"}),
        (["adds 4 ranks in an order of its own"], {"reduction": "backend"}),
    ):
        call = lambda wrong=wrong: ops.replicated_weight_dw(x, dy, grad, **usual | wrong)  # noqa: E731
        refused(ValueError, words, call)
    words = ["gate.dw", "not the grad group", "'s cp group"]
    refused(ValueError, words, lambda: ops.replicated_weight_dw(x, dy, cp, **usual))
    for axis in ("cp", "tp"):
        home, of = Grid(cp=2, tp=2), group(comm, axis)
        call = lambda home=home, of=of: ops.row_parallel_forward(x, x.t(), of, grid=home)  # noqa: E731
        refused(ValueError, ["has 4 rank(s), the world has 8"], call)


def both_ways_and_any_layout(world):
    """The backend's sum and the tree's; transposed operands; a captured partial is a copy, the
    inputs stay, and an observer sees one sum a call."""
    comm = world.comm(GRID)
    tp = group(comm, "tp")
    (dy, weight), right = inputs(comm, "gate.dx")
    before, heard = dy.clone(), Capture()
    for reduction in ("backend", "tree"):
        for a, b in ((dy, weight), (dy.t().contiguous().t(), weight.t().contiguous().t())):
            found = ops.column_parallel_dx(
                a, b, tp, grid=GRID, contract=TREE, reduction=reduction, capture=True,
                observers=(heard,),
            )  # fmt: skip
            assert bit_report(found.output, right) and bit_report(dy, before)
            assert not bit_report(found.pre_reduce, right)
        for broken in (missing, doubled):
            usual = {"grid": GRID, "contract": TREE, "reduction": reduction}
            wrong = ops.column_parallel_dx(dy, weight, tp, observers=(broken,), **usual)
            assert not bit_report(wrong, right), "a sum left out or doubled must show"
    sites = [(call.kind, call.site) for call in heard.calls]
    assert sites == [("backend_all_reduce", "gate.dx")] * 2 + [("all_reduce", "gate.dx")] * 2
    assert all(bit_report(call.pre_reduce, found.pre_reduce) for call in heard.calls)


def lanes_of_other_lengths(world):
    """A shard of another length has a partial of the same shape: only the ranks' words differ."""
    comm = world.comm(GRID)
    tokens = 6 + comm.grid.coords(comm.rank).cp
    x = torch.ones(tokens, H, dtype=torch.bfloat16)
    call = lambda: ops.replicated_weight_dw(  # noqa: E731
        x, x, group(comm, "grad"), grid=GRID, contract=TREE, reduction="tree"
    )
    refused(Disagreement, ["gate.dw", "contracts 6 tokens", "contracts 7 tokens"], call)


def backwards(comm, axis):
    """This rank's group of `axis` with its ranks the other way round; None where this torch sorts
    them. All ranks of the world make the groups of all."""
    make = dist.distributed_c10d._new_group_with_tag
    if "sort_ranks" not in inspect.signature(make).parameters:
        return None
    made = {r: make(list(r[::-1]), backend="gloo", sort_ranks=False)
            for r in comm.grid.groups(axis)}  # fmt: skip
    return made[comm.grid.group_of(comm.rank, axis)]


def the_same_ranks_in_another_order(world):
    """Every operator refuses its own group reversed, though the sum of two would be the same."""
    comm = world.comm(GRID)
    for name, axis, operator in (
        ("down.forward", "tp", ops.row_parallel_forward),
        ("gate.dx", "tp", ops.column_parallel_dx),
        ("gate.dw", "grad", ops.replicated_weight_dw),
    ):
        operands, right = inputs(comm, name)
        usual = {"grid": GRID, "contract": TREE, "reduction": "tree"}
        assert bit_report(operator(*operands, group(comm, axis), **usual), right)
        other = backwards(comm, axis)
        if other is None:
            continue
        ranks = list(comm.grid.group_of(comm.rank, axis))
        assert dist.get_process_group_ranks(other) == ranks[::-1]
        words = [name, f"group {ranks[::-1]}", "another order"]
        refused(ValueError, words, partial(operator, *operands, other, **usual))


def a_case_of_eight_ranks(world):
    """ws2's own row, under FP32 partials too."""
    from rlkernel.experiments.case import Case

    comm = world.comm(GRID)
    for contract in ("tree8.bf16", "tree4.fp32"):
        at = {"part": "dp", "m": 6, "hidden": H, "intermediate": WIDE, "contract": contract,
              "reduction": "tree", "repeats": 2}  # fmt: skip
        row = boundaries.track_row(Case("ws2", GRID, "bf16", 5, parameters=at), comm)
        assert row["passed"], row["first_wrong"]
        assert [line["groups"] for line in row["lines"]] == [[[0, 2, 4, 6], [1, 3, 5, 7]]] * 3


def operators_sum_over_dp_and_cp_in_the_order_of_the_tree(world):
    gradient_groups_of_four(world)
    a_case_of_eight_ranks(world)


def operators_take_any_layout_and_refuse_uneven_lanes(world):
    both_ways_and_any_layout(world)
    lanes_of_other_lengths(world)
    the_same_ranks_in_another_order(world)


CHECKS = (
    operators_sum_over_dp_and_cp_in_the_order_of_the_tree,
    operators_take_any_layout_and_refuse_uneven_lanes,
)
