"""Checks of a whole block that no experiment runs by itself, and of where faults send a sum."""

from __future__ import annotations

import torch
from checks import check, on_grids

from rlkernel.collectives.faults import At, wrong_group
from rlkernel.contract import ReductionTree
from rlkernel.grid import Grid
from rlkernel.reconstruct.gqa import GQA
from rlkernel.reconstruct.step import compare_signal


@check(4)
def attention_with_an_output_bias_trains_like_the_dense_block(world):
    for comm in on_grids(world, (Grid(tp=2), Grid(tp=4), Grid(dp=2, tp=2))):
        comm = comm.using(contract=ReductionTree(comm.grid.size, "fp32"))
        for split in (False, True):
            block = GQA(11, torch.float32, None, split, 8, 2, 16, 4, 2, 4, bias_std=1.0)
            pairs = block.train_both(comm, 0.05)
            local = block.shard(block.weights(), comm)
            assert pairs["parameter_grad"].twin.numel() == sum(w.numel() for w in local.values())
            for name, pair in pairs.items():
                report = compare_signal(pair, torch.float32, None)
                assert report["excess"] <= 1, (comm.grid, split, name, report)


@check(4)
def a_sum_on_the_wrong_group_runs_over_other_ranks(world):
    for comm in on_grids(world, (Grid(dp=2, tp=2), Grid(tp=4))):
        comm = comm.using(contract=ReductionTree(4, "fp32"))
        broken = comm.using(observers=[At("sum", wrong_group)])
        mine = torch.tensor([10.0**comm.rank, 0.0])
        at, total = comm.grid.coords(comm.rank), {}
        if comm.grid.dp == 2:
            total["tp"], total["grad"] = 101 * 10**at.tp, 11 * 100**at.dp
            for axis, expected in total.items():
                assert broken.all_reduce(mine, "sum", axis)[0] == expected, axis
            chunk = broken.reduce_scatter(mine, "sum", "tp")
            assert chunk.tolist() == [total["tp"] if at.dp == 0 else 0.0]
        else:
            assert broken.all_reduce(mine, "sum", span=2)[0] == 1111
