"""Checks of what the seam refuses, and in which words. Run by ranks.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from checks import check, on_grids, refused

from rlkernel.collectives.agreement import StoreAgreement
from rlkernel.collectives.comm import Link
from rlkernel.collectives.errors import Disagreement
from rlkernel.collectives.groups import comm_over
from rlkernel.contract import ReductionTree
from rlkernel.grid import Grid


@check(4)
def a_disagreement_is_named_on_every_rank(world):
    (comm,) = on_grids(world, (Grid(tp=4),))
    odd = comm.rank == 2
    x = torch.zeros(4, 6)
    tree4 = comm.using(contract=ReductionTree(4, "bf16"))
    everyone = [f"rank {r}:" for r in range(4)]
    for words, action in {
        ("float32[4x6]", "float32[6x4]"): lambda: comm.all_reduce(x.t() if odd else x, "s"),
        ("float32[4x6]", "bfloat16[4x6]"): lambda: comm.all_reduce(x.bfloat16() if odd else x, "s"),
        ("tree8.bf16", "tree4.bf16"): lambda: (tree4 if odd else comm).all_reduce(x, "s"),
        ("all_reduce", "all_gather"): lambda: (comm.all_gather if odd else comm.all_reduce)(x, "s"),
        ("here", "there"): lambda: comm.all_reduce(x, "there" if odd else "here"),
        ("dim 0", "dim 1"): lambda: comm.all_gather(x, "s", dim=int(odd)),
    }.items():
        refused(Disagreement, (*words, *everyone), action)
    assert comm.all_reduce(torch.ones(1), "after").item() == 4, "the group must still be usable"


@check(4)
def a_skipped_call_is_a_disagreement(world):
    comm = world.comm(Grid(cp=4))
    if comm.rank != 1:
        refused(Disagreement, ("call 1", "call 2", "rank 1"), lambda: two_calls(comm))
    else:
        comm.links["cp"].agreement.calls = 1
        refused(
            Disagreement,
            ("call 1", "call 2", "rank 1"),
            lambda: comm.all_reduce(torch.ones(1), "s", "cp"),
        )


def two_calls(comm):
    comm.all_reduce(torch.ones(1), "s", "cp")


@check(4)
def agreement_through_the_store_names_every_rank_and_asks_once(world):
    (comm,) = on_grids(world, (Grid(tp=4),))
    old = comm.links["tp"]
    agreement = StoreAgreement(world.store, old.ranks, comm.rank, 5.0)
    comm.links = {**comm.links, "tp": Link(old.ranks, old.index, old.transport, agreement)}
    for _ in range(3):
        assert comm.all_reduce(torch.ones(2), "stored").tolist() == [4, 4]
    assert agreement.changes == {"stored": 1}
    # Another wrapping of the same group, as in the next case, must not read the words of this one.
    fresh = StoreAgreement(world.store, old.ranks, comm.rank, 5.0)
    comm.links = {**comm.links, "tp": Link(old.ranks, old.index, old.transport, fresh)}
    assert comm.all_reduce(torch.ones(5), "stored").tolist() == [4] * 5
    odd = torch.ones(3 if comm.rank == 1 else 2)
    refused(Disagreement, ("[2]", "[3]", "rank 1"), lambda: comm.all_reduce(odd, "other"))


@check(4)
def what_is_not_supported_is_refused_before_anything_moves(world):
    (comm,) = on_grids(world, (Grid(tp=4),))
    before = comm.links["tp"].agreement.calls
    x = torch.ones(4, 3)
    tree2 = comm.using(contract=ReductionTree(2, "bf16"))
    for words, action in (
        (("float64", "float32 or bfloat16"), lambda: comm.all_reduce(x.double(), "s")),
        (("int64",), lambda: comm.reduce_scatter(x.long(), "s")),
        (("dimension 1", "(4, 3)", "tp=4"), lambda: comm.reduce_scatter(x, "s", dim=1)),
        (("4 shards", "tree2.bf16"), lambda: tree2.all_reduce(x, "s")),
        (("axis 'ep'",), lambda: comm.all_reduce(x, "s", "ep")),
        (("span=3", "tp=4"), lambda: comm.all_reduce(x, "s", span=3)),
        (("span=8", "tp=4"), lambda: comm.all_reduce(x, "s", span=8)),
        (("gloo moves cpu", "meta"), lambda: comm.all_reduce(x.to("meta"), "s")),
        (("needs 16 ranks", "8"), lambda: world.comm(Grid(tp=16))),
    ):
        refused(ValueError, words, action)
    assert comm.links["tp"].agreement.calls == before


@check()
def foreign_process_groups_are_refused_by_name(world):
    rows = [dist.new_group(list(r)) for r in Grid(cp=2, tp=4).groups("tp")]
    columns = [dist.new_group(list(r)) for r in Grid(cp=2, tp=4).groups("cp")]
    tp, cp = rows[world.rank // 4], columns[world.rank % 4]
    grid, tree = Grid(cp=2, tp=4), ReductionTree(8, "fp32")

    def over(grid, **groups):
        return comm_over(grid, groups, store=world.store, contract=tree, timeout_s=5)

    comm = over(grid, tp=tp, cp=cp)
    total = comm.all_reduce(comm.all_reduce(torch.ones(1), "a", "tp"), "b", "cp")
    assert total.item() == 8
    refused(ValueError, ("not the cp group", "rank"), lambda: over(grid, cp=tp))
    refused(ValueError, ("not the tp group",), lambda: over(Grid(cp=4, tp=2), tp=tp))
    refused(ValueError, ("4 rank(s)", "8"), lambda: over(Grid(tp=4), tp=tp))
    refused(ValueError, ("not a process group",), lambda: over(grid, tp=rows[1 - world.rank // 4]))
