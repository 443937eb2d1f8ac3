"""Checks of what the seam computes and moves. Run by ranks.py."""

from __future__ import annotations

import itertools

import torch
from checks import check, noise, on_grids

from rlkernel.collectives import regions
from rlkernel.collectives.faults import ArrivalOrder, At, exchanged, left_fold, missing
from rlkernel.collectives.observers import Capture, Timer
from rlkernel.compare import bit_report, bits, digest
from rlkernel.contract import ReductionTree
from rlkernel.grid import Grid

TREES = (ReductionTree(8, "bf16"), ReductionTree(8, "fp32"))


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
        # NaNs of different payloads: a sum keeps one of them, so the operands' order shows.
        nan = torch.full((4,), 0x7FC00001 + comm.rank, dtype=torch.int32).view(torch.float32)
        total = comm.using(contract=TREES[1]).all_reduce(nan, "nan")
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
    """dX and the projections' dW; what is replicated sums over other parts and is not claimed."""
    from rlkernel.reconstruct.gqa import GQA
    from rlkernel.reconstruct.swiglu import SwiGLU

    (comm,) = on_grids(world, (Grid(tp=4),))
    comm = comm.using(contract=ReductionTree(4, "fp32"))
    at = comm.grid.shard(8, "tp", comm.rank, "S")
    for dtype in (torch.float32, torch.bfloat16):
        for make, sizes, names in (
            (SwiGLU, (8, 3, 16, 24), ("gate_up", "down")),
            (GQA, (8, 3, 16, 4, 2, 4), ("wq", "wk", "wv", "wo")),
        ):
            steps = []
            for split in (False, True):
                block = make(5, dtype, None, split, *sizes)
                local = block.shard(block.weights(), comm)
                steps.append(block.twin_step(comm, 0.05, local, *block.data(0)))
            plain, split = steps
            assert bit_report(split.output, plain.output[at])
            assert bit_report(split.input_grad, plain.input_grad[at])
            for name in names:
                assert bit_report(split.grads[name], plain.grads[name]), (make, dtype, name)


@check(4)
def a_span_sums_over_neighbours_only(world):
    (comm,) = on_grids(world, (Grid(tp=4),))
    x = torch.tensor([2.0**comm.rank])
    assert comm.all_reduce(x, "pairs", span=2).item() == (3.0 if comm.rank < 2 else 12.0)
    assert comm.all_reduce(x, "alone", span=1).item() == x.item()
    w = torch.ones(1, requires_grad=True)
    (regions.copy(w, comm, "w.dw", span=2) * 2.0**comm.rank).sum().backward()
    assert w.grad.item() == (3.0 if comm.rank < 2 else 12.0)


@check(4)
def context_and_gradient_groups_sum_over_their_own_axis(world):
    for grid in (Grid(cp=2, tp=2), Grid(dp=2, tp=2), Grid(dp=2, cp=2)):
        (comm,) = on_grids(world, (grid,))
        for axis in ("tp", "cp", "dp", "grad", "world"):
            total = comm.all_reduce(torch.tensor([2.0**comm.rank]), f"sum.{axis}", axis)
            assert total.item() == sum(2.0**r for r in grid.group_of(comm.rank, axis)), (grid, axis)


@check(4)
def a_region_sums_over_the_axis_that_it_names(world):
    (comm,) = on_grids(world, (Grid(cp=2, tp=2),))
    own = torch.tensor([2.0**comm.rank])
    for axis in ("tp", "cp"):
        total = sum(2.0**r for r in comm.grid.group_of(comm.rank, axis))
        x = own.clone().requires_grad_()
        regions.copy(x, comm, f"copy.{axis}", axis).backward(own)
        assert x.grad.item() == total
        assert regions.reduce(own, comm, f"reduce.{axis}", axis).item() == total


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
    doubled = watched.using(observers=[lambda call, x, proceed: proceed(x) * 2])
    assert doubled.all_reduce(x, "again").item() == 120 and seen.pop()[3].item() == 60
    kept, timer = Capture(), Timer()
    both = comm.using(observers=[kept, timer])
    both.all_reduce(x, "down.forward")
    both.all_gather(x, "gather")
    first, second = kept.calls
    assert (first.site, first.pre_reduce.item(), first.post_reduce.item()) == (
        "down.forward",
        comm.rank,
        6,
    )
    assert kept.behind()["gather"][0].tolist() == [0, 1, 2, 3] and second.kind == "all_gather"
    assert [(s["site"], s["bytes"]) for s in timer.samples] == [("down.forward", 4), ("gather", 4)]
    assert all(0 < s["seconds"] < 20 for s in timer.samples)
    gone = comm.using(observers=[At("elsewhere", missing)])
    assert (
        gone.all_reduce(x, "here").item() == 6
        and gone.all_reduce(x, "elsewhere").item() == comm.rank
    )
    assert gone.paths()["here"] == "all_reduce tree8.bf16 over tp by process-group/gloo"
    assert "elsewhere" not in gone.paths()


@check()
def the_control_plane_collects_in_rank_order(world):
    for comm in on_grids(world, (Grid(), Grid(tp=2), Grid(tp=8))):
        assert comm.collect({"rank": comm.rank}) == [{"rank": r} for r in range(comm.grid.size)]
