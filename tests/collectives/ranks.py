"""What every rank runs: checks of the seam with real processes over gloo. Started by test_ranks.py.

Each check is a function of (world); it asserts on every rank. A rank writes {check: traceback or
null} to rankN.json, and pytest shows one test a check; the first failure ends the launch. One
launch of eight ranks runs them all; the smaller groups are the first ranks of the same world.
"""

from __future__ import annotations

import itertools
import json
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from rlkernel.collectives import regions
from rlkernel.collectives.agreement import StoreAgreement
from rlkernel.collectives.comm import Link
from rlkernel.collectives.errors import Disagreement
from rlkernel.collectives.faults import ArrivalOrder, At, exchanged, left_fold, missing
from rlkernel.collectives.groups import World, comm_over
from rlkernel.compare import bit_report, bits, digest
from rlkernel.contract import ReductionTree
from rlkernel.grid import Grid

RANKS = 8
CHECKS = {}
TREES = (ReductionTree(8, "bf16"), ReductionTree(8, "fp32"))


def check(ranks=RANKS):
    """Register a check that the first `ranks` ranks run."""

    def register(function):
        CHECKS[function.__name__] = (ranks, function)
        return function

    return register


def noise(seed, *shape, dtype=torch.float32):
    """The same on every rank; values over many binades, so that another order of additions
    shows.
    """
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=g) * torch.exp2(torch.randn(*shape, generator=g) * 3)).to(
        dtype
    )


def on_grids(world, grids=(Grid(tp=2), Grid(tp=4), Grid(tp=8))):
    """This rank's Comm for each grid; every rank takes part in making the groups."""
    comms = [world.comm(grid) for grid in grids]
    return [comm for comm in comms if comm is not None]


def refused(error, words, action):
    """`action` raises `error`, with all of `words` in its message."""
    try:
        action()
    except error as raised:
        absent = [word for word in words if word not in str(raised)]
        assert not absent, f"{absent} not in: {raised}"
        return
    raise AssertionError(f"{error.__name__} was not raised")


@check()
def all_reduce_is_the_contract_whatever_p(world):
    for tree, comm in itertools.product(TREES, on_grids(world)):
        a, b = noise(1, 6, 64, dtype=torch.bfloat16), noise(2, 64, 5, dtype=torch.bfloat16)
        at = comm.grid.shard(64, "tp", comm.rank, "K")
        root = tree.subtree(comm.grid.tp).matmul(a[:, at], b[at])
        total = comm.using(contract=tree).all_reduce(root, "down.forward")
        assert bit_report(total, tree.matmul(a, b)), f"{tree.name} P={comm.grid.tp}"


@check()
def reduce_scatter_is_a_slice_of_all_reduce(world):
    for comm, dim, dtype in itertools.product(
        on_grids(world), (0, 1), (torch.float32, torch.bfloat16)
    ):
        x = noise(10 + comm.rank, 16, 24, dtype=dtype)
        whole = comm.all_reduce(x, "whole")
        part = comm.reduce_scatter(x, "part", dim=dim)
        at = comm.grid.shard(x.shape[dim], "tp", comm.rank, "dim")
        assert bit_report(part, whole.narrow(dim, at.start, at.stop - at.start))


@check()
def all_ranks_hold_the_same_bits(world):
    for comm in on_grids(world):
        total = comm.all_reduce(noise(20 + comm.rank, 1000), "sum")
        assert len(set(comm.collect(digest(total)))) == 1


@check()
def bits_do_not_depend_on_the_message_size(world):
    for comm in on_grids(world, (Grid(tp=4),)):
        anchor = noise(30 + comm.rank, 1024, dtype=torch.bfloat16)
        alone = comm.all_reduce(anchor, "anchor")
        for size in (8 << 10, 256 << 10, 8 << 20):
            message = noise(40 + comm.rank, size // 2, dtype=torch.bfloat16)
            for start in (0, message.numel() - 1024):
                message[start : start + 1024] = anchor
            total = comm.all_reduce(message, "message")
            assert bit_report(total[:1024], alone) and bit_report(total[-1024:], alone), size


@check()
def left_fold_exchange_and_arrival_order_differ_from_four_ranks_on(world):
    for comm in on_grids(world):
        x = noise(50 + comm.rank, 4096)
        tree = comm.all_reduce(x, "sum")
        assert bool(bit_report(broken(comm, left_fold, x), tree)) == (comm.grid.tp == 2)
        if comm.grid.tp > 2:
            assert not bit_report(broken(comm, exchanged, x), tree)


def broken(comm, observer, x):
    return comm.using(observers=[At("sum", observer)]).all_reduce(x, "sum")


@check(4)
def the_repeat_test_catches_an_arrival_order(world):
    (comm,) = on_grids(world, (Grid(tp=4),))
    x = noise(60 + comm.rank, 4096)
    assert len({digest(comm.all_reduce(x, "sum")) for _ in range(3)}) == 1
    racing = comm.using(observers=[ArrivalOrder(orders=[(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)])])
    assert len({digest(racing.all_reduce(x, "sum")) for _ in range(3)}) > 1


@check(4)
def a_non_contiguous_tensor_is_reduced_in_place(world):
    (comm,) = on_grids(world, (Grid(tp=4),))
    mine = noise(70 + comm.rank, 8, 6)
    view, expected = mine.t(), comm.all_reduce(mine.t().contiguous(), "sum")
    assert not view.is_contiguous()
    returned = comm.all_reduce(view, "sum", out=view)
    assert returned is view and bit_report(view, expected) and bit_report(mine, expected.t())


@check(4)
def inputs_stay_as_they_are(world):
    for comm in on_grids(world, (Grid(), Grid(tp=2), Grid(tp=4))):
        x = noise(80 + comm.rank, 4, 8)
        before = x.clone()
        for result in (
            comm.all_reduce(x, "a"),
            comm.reduce_scatter(x, "b"),
            comm.all_gather(x, "c"),
        ):
            result.add_(1)
        assert bit_report(x, before)


@check(4)
def a_gather_moves_bits_of_any_dtype(world):
    (comm,) = on_grids(world, (Grid(tp=4),))
    odd = torch.tensor([0x7FC00001 + comm.rank, -(2**31), 0x7F800000], dtype=torch.int32)
    whole = comm.all_gather(odd.view(torch.float32), "nan")
    assert [v & 0xFFFFFFFF for v in bits(whole)[::3].tolist()] == [0x7FC00001 + r for r in range(4)]
    for dtype in (torch.float64, torch.int64, torch.bool, torch.float16):
        x = (torch.arange(6).view(2, 3) + comm.rank).to(dtype)
        assert comm.all_gather(x, "any", dim=1).equal(
            torch.cat([(torch.arange(6).view(2, 3) + r).to(dtype) for r in range(4)], 1)
        )


@check(4)
def a_gather_of_a_transposed_gradient_is_that_of_a_contiguous_one(world):
    (comm,) = on_grids(world, (Grid(tp=4),))
    grads = []
    for transposed in (False, True):
        x = noise(90 + comm.rank, 2, 5).requires_grad_()
        whole = regions.gather(x, comm, "gather", "gather.dx")
        upstream = noise(95 + comm.rank, 5, 8).t()
        assert not upstream.is_contiguous()
        whole.backward(upstream if transposed else upstream.contiguous())
        grads.append(x.grad)
    assert bit_report(*grads)


@check(4)
def regions_are_conjugate(world):
    (comm,) = on_grids(world, (Grid(tp=4),))
    x, g = noise(100 + comm.rank, 8, 3), noise(110 + comm.rank, 8, 3)

    def both(region, x, g, *sites):
        x = x.clone().requires_grad_()
        y = region(x, comm, *sites)
        y.backward(g)
        return y.detach(), x.grad

    part = comm.grid.shard(8, "tp", comm.rank, "rows")
    y, dx = both(regions.copy, x, g, "c")
    assert bit_report(y, x) and bit_report(dx, comm.all_reduce(g, "ref"))
    y, dx = both(regions.reduce, x, g, "r")
    assert bit_report(y, comm.all_reduce(x, "ref")) and bit_report(dx, g)
    y, dx = both(regions.gather, x[part], g, "g", "g.dx")
    assert bit_report(y, comm.all_gather(x[part], "ref"))
    assert bit_report(dx, comm.reduce_scatter(g, "ref"))
    y, dx = both(regions.scatter, x, g[part], "s", "s.dx")
    assert bit_report(y, comm.reduce_scatter(x, "ref"))
    assert bit_report(dx, comm.all_gather(g[part], "ref"))


@check(4)
def the_gradient_of_ones_does_not_grow_with_p(world):
    """y = the ranks' shares of x @ w, summed; dy = 1. Small integers: exact in any order."""
    w = torch.arange(96).view(8, 12) % 7 - 3.0
    dense = torch.ones(3, 12) @ w.t()
    for comm in on_grids(world, (Grid(), Grid(tp=2), Grid(tp=4))):
        at = comm.grid.shard(12, "tp", comm.rank, "N")
        x = torch.ones(3, 8, requires_grad=True)
        shared = regions.copy(x, comm, "dx")
        regions.reduce((shared @ w[:, at]).sum(1), comm, "y").sum().backward()
        assert bit_report(x.grad, dense), f"P={comm.grid.tp}"


@check(4)
def sequence_parallel_gives_the_bits_of_the_run_without_it(world):
    from rlkernel.reconstruct import swiglu

    (comm,) = on_grids(world, (Grid(tp=4),))
    for dtype in (torch.float32, torch.bfloat16):
        blocks = [
            swiglu.Block(swiglu.Shape(8, 3, 16, 24), 5, dtype, None, sp) for sp in (False, True)
        ]
        plain, split = (
            block.train_both(comm.using(contract=ReductionTree(4, "fp32")), 0.05)
            for block in blocks
        )
        at = comm.grid.shard(8, "tp", comm.rank, "S")
        assert bit_report(split["output"].twin, plain["output"].twin[at])
        assert bit_report(split["input_grad"].twin, plain["input_grad"].twin[at])
        for name in ("gate_up_grad", "down_grad"):
            assert bit_report(split[name].twin, plain[name].twin), name


@check(4)
def context_and_gradient_groups_sum_over_their_own_axis(world):
    for grid in (Grid(cp=2, tp=2), Grid(dp=2, tp=2), Grid(dp=2, cp=2)):
        (comm,) = on_grids(world, (grid,))
        for axis in ("tp", "cp", "dp", "grad", "world"):
            total = comm.all_reduce(torch.tensor([2.0**comm.rank]), f"sum.{axis}", axis)
            assert total.item() == sum(2.0**r for r in grid.group_of(comm.rank, axis)), (grid, axis)


@check(4)
def observers_see_both_sides_and_wrap_from_the_outside_in(world):
    (comm,) = on_grids(world, (Grid(tp=4),))
    seen = []

    def capture(call, x, proceed):
        y = proceed(x)
        seen.append((call.kind, call.site, x.clone(), y.clone()))
        return y

    x = torch.tensor([float(comm.rank)])
    watched = comm.using(observers=[capture, lambda call, x, proceed: proceed(x * 10)])
    assert watched.all_reduce(x, "down.forward").item() == 60
    ((kind, site, before, after),) = seen
    assert (kind, site, before.item(), after.item()) == (
        "all_reduce",
        "down.forward",
        comm.rank,
        60,
    )
    gone = comm.using(observers=[At("elsewhere", missing)])
    assert (
        gone.all_reduce(x, "here").item() == 6
        and gone.all_reduce(x, "elsewhere").item() == comm.rank
    )
    assert gone.paths()["here"] == "all_reduce tree8.bf16 over tp by process-group/gloo"
    assert "elsewhere" not in gone.paths()


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


@check()
def the_control_plane_collects_in_rank_order(world):
    for comm in on_grids(world, (Grid(), Grid(tp=2), Grid(tp=8))):
        assert comm.collect({"rank": comm.rank}) == [{"rank": r} for r in range(comm.grid.size)]


def main(out: Path) -> None:
    torch.set_num_threads(1)
    world = World.join("gloo", 20)
    report = dict.fromkeys(CHECKS, "not run: an earlier check failed on some rank")
    file = out / f"rank{world.rank}.json"
    for name, (ranks, function) in CHECKS.items():
        # Groups are made by everybody, in the same order, before a smaller set of ranks goes on.
        for grid in (Grid(), *(Grid(d, c, t) for d, c, t in SHAPES)):
            world.comm(grid)
        try:
            if world.rank < ranks:
                function(world)
            report[name] = None
        except Exception:
            report[name] = traceback.format_exc()
            raise
        finally:
            file.write_text(json.dumps(report))
        world.meet(name, 60)
    world.leave()


SHAPES = [(1, 1, 2), (1, 1, 4), (1, 1, 8), (1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 4, 1), (1, 2, 4)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
