"""Checks of ranks.py: who gets what, and that it is right: order, values, a foreign ffn."""

from __future__ import annotations

import inspect
from functools import partial

import torch
import torch.distributed as dist

from rlkernel import plugin
from rlkernel.collectives.groups import comm_of
from rlkernel.overlap import path
from rlkernel.overlap.layer import exact
from tests.overlap.foreign import ForeignFFN
from tests.overlap.inputs import differing, drawn, far, layer, trained
from tests.overlap.registered import BF16, SIZES, check, pair, seam

# -- order -----------------------------------------------------------------------------------------


@check
def two_ranks_exchange_as_the_example_says(world):
    """[10, 11] and [20, 21] become [10, 20] and [11, 21], and come back."""
    comm = seam(world, 2)
    if comm is None:
        return
    mine = torch.tensor([[[10.0], [11.0]]]) + 10 * comm.rank
    there = comm.all_to_all(mine, "dispatch", split_dim=1, concat_dim=0)
    assert there.shape == (2, 1, 1) and there.flatten().tolist() == [[10, 20], [11, 21]][comm.rank]
    back = comm.all_to_all(there, "combine", split_dim=0, concat_dim=1)
    assert torch.equal(back, mine)


@check
def groups_that_are_a_part_of_the_world_and_out_of_order(world):
    """Rank order follows the group: members 5, 2, 7 are 0, 1, 2 there; three ranks are legal."""
    make = dist.distributed_c10d._new_group_with_tag
    free = {"sort_ranks": False} if "sort_ranks" in inspect.signature(make).parameters else {}
    ranks = [5, 2, 7] if free else [2, 5, 7]
    group = make(ranks, backend="gloo", **free)
    if world.rank not in ranks:
        return
    comm, me = comm_of(group), ranks.index(world.rank)
    assert comm.links["ep"].ranks == tuple(ranks) and comm.links["ep"].index == me
    mine = torch.arange(6.0).view(1, 6, 1) + 100 * me
    there = comm.all_to_all(mine, "order", split_dim=1, concat_dim=0)
    wanted = [100 * p + 2 * me + i for p in range(3) for i in range(2)]
    assert there.flatten().tolist() == wanted, (there.flatten().tolist(), wanted)
    ffn, x, dy = layer(6, 12, 2, comm), drawn(me, 2, 6, 12), drawn(me, 2, 6, 12, seed=1)
    right_on_every_rank(
        comm, ffn, x, dy, lambda p: (drawn(p, 2, 6, 12), drawn(p, 2, 6, 12, seed=1))
    )
    for overlap in ("with-sm", "kernel"):
        same = trained(partial(ffn, overlap=overlap), ffn, x, dy)
        assert not differing(same, trained(ffn, ffn, x, dy)), overlap


# -- values ----------------------------------------------------------------------------------------


def right_on_every_rank(comm, ffn, x, dy, of, overlap="none", limit=1e-5):
    """Output and gradients within `limit` of FP64, computed here from every rank's inputs."""
    got = trained(partial(ffn, overlap=overlap), ffn, x, dy)
    size, me, batch = ffn.ep_group_size, ffn.ep_index, x.shape[0]
    xs, dys = zip(*(of(p) for p in range(size)))
    own = lambda many: torch.cat([v.chunk(size, 1)[me] for v in many]).double()  # noqa: E731
    local = own(xs).requires_grad_()
    y = exact(ffn, local)
    named = {"input": local, **dict(ffn.named_parameters())}
    wanted = dict(zip(named, torch.autograd.grad(y, list(named.values()), own(dys))))
    wanted["output"] = y.detach()
    for name in ("output", "input"):  # what of all ranks' results went through this one
        all_of_it = comm.all_gather(got[name][None], f"oracle {name}", "ep")
        got[name] = torch.cat([v.chunk(size, 1)[me] for v in all_of_it])
    assert got["output"].shape == (size * batch, x.shape[1] // size, x.shape[2])
    assert not far(got, wanted, limit), far(got, wanted, limit)


@check
def every_schedule_is_right_against_fp64(world):
    for ranks in SIZES:
        comm = seam(world, ranks)
        if comm is None:
            continue
        for overlap, dtype, limit in (("none", torch.float32, 1e-5), ("kernel", BF16, 3e-2)):
            ffn, of = layer(16, 32, 2, comm, dtype=dtype), partial(pair, (3, 16, 32), dtype)
            right_on_every_rank(comm, ffn, *of(comm.rank), of, overlap, limit)


@check
def every_schedule_has_the_bits_of_none(world):
    """Odd batches, every k, widths that no vector divides; output and all gradients."""
    shapes = {2: [(1, 22, 132, 2), (7, 20, 140, 3)], 4: [(3, 20, 140, 2)], 8: [(2, 16, 144, 6)]}
    for ranks, wanted in shapes.items():
        comm = seam(world, ranks)
        for batch, tokens, dim, k in wanted if comm else ():
            for dtype in (torch.float32, BF16, torch.float16)[: 3 if ranks == 2 else 2]:
                ffn = layer(tokens, dim, k, comm, dtype=dtype)
                x, dy = (drawn(comm.rank, batch, tokens, dim, dtype=dtype, seed=s) for s in (0, 1))
                serial = trained(ffn, ffn, x, dy)
                for overlap in ("with-sm", "kernel"):
                    same = trained(partial(ffn, overlap=overlap), ffn, x, dy)
                    apart = differing(same, serial)
                    assert not apart, (ranks, batch, tokens, dim, k, dtype, overlap, apart)


@check
def a_padded_payload_changes_nothing(world):
    comm = seam(world, 2)
    if comm is None:
        return
    plain, padded = (layer(8, 16, 2, comm, comm_scale=scale) for scale in (1, 2))
    x, dy = drawn(comm.rank, 2, 8, 16), drawn(comm.rank, 2, 8, 16, seed=1)
    for overlap in ("none", "with-sm", "kernel"):
        results = [trained(partial(f, overlap=overlap), f, x, dy) for f in (plain, padded)]
        assert not differing(*results), overlap


@check
def transposed_inputs_are_as_good_as_contiguous_ones_and_stay(world):
    comm = seam(world, 2)
    if comm is None:
        return
    ffn, view = layer(8, 16, 2, comm), drawn(comm.rank, 8, 2, 16).transpose(0, 1)
    assert not view.is_contiguous()
    before = view.clone()
    for overlap in ("none", "with-sm", "kernel"):
        assert torch.equal(ffn(view, overlap), ffn(view.contiguous(), overlap))
    dy = drawn(comm.rank, 2, 16, 8, seed=1).transpose(1, 2)
    a, b = (trained(lambda x: ffn(x, "kernel"), ffn, view, d) for d in (dy, dy.contiguous()))
    assert not differing(a, b) and torch.equal(view, before)


# -- somebody else's ffn ---------------------------------------------------------------------------


@check
def a_foreign_ffn_keeps_its_own_bits(world):
    for ranks in (2, 8):
        group = dist.new_group(list(range(ranks)), backend="gloo")
        if world.rank >= ranks:
            continue
        for dtype, by_token in ((torch.float32, False), (BF16, False), (BF16, True)):
            ffn = ForeignFFN(16, 32, 2, group, dtype, by_token=by_token)
            x, dy = (drawn(world.rank, 3, 16, 32, dtype=dtype, seed=s) for s in (0, 1))
            with path.listening() as heard:
                got = trained(partial(plugin.forward_ffn, ffn), ffn, x, dy)
            apart = differing(got, trained(ffn, ffn, x, dy))
            assert not apart, (ranks, dtype, by_token, apart)
            assert heard[0].startswith("chunks: kernel"), heard
            alone = plugin.forward_ffn(ffn, x, comp_only=True)
            assert torch.equal(alone, ffn(x, comp_only=True))
