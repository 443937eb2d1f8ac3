"""Checks of sums through shared memory: the kernels of the GPU, interpreted, between real ranks.

Run by ranks.py, which asks for the interpreter. Host memory that the ranks map stands in for
symmetric memory; rounds, epochs, slots and waits are the same code.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import time

import torch
from checks import check, noise, on_grids, refused

from rlkernel.collectives.groups import World
from rlkernel.compare import bit_report, bits
from rlkernel.contract import ReductionTree
from rlkernel.grid import Grid

BF16, FP32 = torch.bfloat16, torch.float32
TREES = (ReductionTree(8, "bf16"), ReductionTree(8, "fp32"))


@functools.cache
def sharing(world):
    """The same ranks and groups; their sums go through shared memory."""
    shared = World(world.store, "symmetric", world.timeout_s, "cpu")
    shared._groups = world._groups
    return shared


def both(world, *grids):
    """(by shared memory, by process group) of this rank for each grid."""
    return zip(on_grids(sharing(world), grids), on_grids(world, grids), strict=True)


def forms(comm, x, *blocks):
    """The sum of x by every form of the kernel, cut into blocks of so many bytes."""
    from rlkernel.kernels.peer_reduce import all_reduce
    from rlkernel.kernels.peer_shot import Shot

    peers = comm.links["tp"].transport._arena.peers
    for form, block in itertools.product(("words", "once", "twice"), blocks):
        out = torch.full_like(x, float("nan"))
        cut = Shot(form, block, 2, 4)
        yield form, all_reduce(x, out, comm.contract, peers, chosen=cut)


def left_fold(comm, x):
    parts = [comm.contract.round(part) for part in comm.links["tp"].transport.gather(x)]
    return functools.reduce(comm.contract.joint, parts).to(x.dtype)


@check()
def shared_memory_gives_the_bits_of_the_process_group(world):
    for ours, theirs in both(world, Grid(tp=2), Grid(tp=4), Grid(tp=8)):
        few = ours.grid.tp == 8  # eight interpreters share the cores
        for tree, dtype in itertools.product(TREES[few:], (BF16,) if few else (BF16, FP32)):
            a, b = ours.using(contract=tree), theirs.using(contract=tree)
            x = noise(200 + world.rank, 16, 24, dtype=dtype)
            total = b.all_reduce(x, "sum")
            assert bit_report(a.all_reduce(x, "sum"), total), (tree, dtype)
            if ours.grid.tp > 2 and tree.dtype == BF16:  # data that could not tell proves nothing
                assert not bit_report(total, left_fold(b, x))
            for form, out in forms(a, x, 256):
                assert bit_report(out, total), (form, tree, dtype)
            for dim in (0, 1) if tree.dtype == dtype else (1,):
                part = a.reduce_scatter(x, f"part{dim}", dim=dim)
                assert bit_report(part, b.reduce_scatter(x, f"part{dim}", dim=dim))
                whole = a.all_gather(x, f"whole{dim}", dim=dim)
                assert bit_report(whole, b.all_gather(x, f"whole{dim}", dim=dim))
        said = "all_reduce tree8.fp32 over tp by symmetric memory, host stand-in"
        assert ours.paths()["sum"] == said


@check()
def sizes_around_every_threshold_and_odd_places(world):
    from rlkernel.kernels import peer_shot

    pairs = list(both(world, Grid(tp=2)))
    if not pairs:
        return
    ((ours, theirs),) = pairs
    real, seen = peer_shot.STEPS_OF_TWO, []
    cuts = [cut for _, cut in real]
    peer_shot.STEPS_OF_TWO = tuple(
        zip((256, 512, 1024, 2048, 1 << 20), cuts, strict=True)
    )  # the same, smaller
    try:
        for count in (1, *(edge + d for edge in (128, 256, 512, 1024) for d in (-1, 0, 1))):
            x = noise(210 + world.rank, count + 1, dtype=BF16)[1:]  # an odd address
            assert bit_report(ours.all_reduce(x, "sum"), theirs.all_reduce(x, "sum")), count
            seen.append(peer_shot.shot(2 * count, 2))
    finally:
        peer_shot.STEPS_OF_TWO = real
    assert set(seen) == set(cuts) and len(cuts) == len(set(cuts)), "a step was left out"
    view = noise(220 + world.rank, 30, 8, dtype=BF16).t()
    assert bit_report(ours.all_reduce(view, "v"), theirs.all_reduce(view, "v"))
    assert bit_report(ours.all_reduce(view, "in place", out=view), view)
    assert ours.all_reduce(x[:0], "nothing").shape == (0,)


@check()
def a_gather_through_shared_memory_moves_bits_of_any_dtype(world):
    for ours, _ in both(world, Grid(tp=2)):
        pair = [ours.grid.tp * (world.rank // ours.grid.tp) + r for r in range(2)]
        nan = torch.tensor([0x7FC00001 + world.rank, -(2**31)], dtype=torch.int32).view(FP32)
        whole = ours.all_gather(nan, "nan")
        assert [v & 0xFFFFFFFF for v in bits(whole)[::2].tolist()] == [0x7FC00001 + r for r in pair]
        for dtype in (torch.float64, torch.int64, torch.bool, torch.float16):
            x = (torch.arange(6).view(2, 3) + world.rank).to(dtype)
            right = torch.cat([(torch.arange(6).view(2, 3) + r).to(dtype) for r in pair], 1)
            assert ours.all_gather(x, "any", dim=1).equal(right)


@check(2)
def calls_of_every_form_and_size_with_a_rank_delayed_at_random(world):
    ((ours, theirs),) = both(world, Grid(tp=2))
    late = random.Random(world.rank)
    ours.all_reduce(torch.ones(1), "open")
    for number in range(40):
        x = noise(1000 * world.rank + number, (100, 300, 700)[number % 3], dtype=BF16)
        if late.random() < 0.3:
            time.sleep(late.random() * 0.01)
        sums = [out.clone() for _, out in forms(ours, x, 512)]
        total = theirs.all_reduce(x, "sum")
        assert all(bit_report(out, total) for out in sums), number


@check(2)
def a_rank_that_does_not_wait_gets_another_sum(world):
    """The control: without its flags the same kernel reads slots before they are filled."""
    from rlkernel.kernels import peer_reduce
    from rlkernel.kernels.peer_shot import Shot

    ((ours, theirs),) = both(world, Grid(tp=2))
    x = noise(230 + world.rank, 100, dtype=BF16)
    total, waits, cut = theirs.all_reduce(x, "sum"), peer_reduce.gather, Shot("once", 512, 2, 4)
    assert bit_report(ours.all_reduce(x, "sum"), total)
    if world.rank == 1:
        world.store.wait(["rank 0 has not waited"])
    peer_reduce.gather = lambda *_: 1
    try:
        peers, hasty = ours.links["tp"].transport._arena.peers, torch.empty_like(x)
        peer_reduce.all_reduce(x, hasty, ours.contract, peers, chosen=cut)
    finally:
        peer_reduce.gather = waits
    if world.rank == 0:
        world.store.set("rank 0 has not waited", "yes")
        assert not bit_report(hasty, total)
    assert bit_report(ours.all_reduce(x, "sum"), total), "and nothing is left of it"


@check(4)
def groups_that_share_ranks_do_not_disturb_each_other(world):
    ((ours, _),) = both(world, Grid(cp=2, tp=2))
    for number in range(6):
        for axis in ("tp", "cp", "world"):
            total = ours.all_reduce(torch.tensor([2.0**ours.rank]), axis, axis)
            right = sum(2.0**r for r in ours.grid.group_of(ours.rank, axis))
            assert total.item() == right, (number, axis)
    assert ours.all_reduce(torch.tensor([2.0**ours.rank]), "pairs", "world", span=2).item() == (
        3.0 if ours.rank < 2 else 12.0
    )


@check(2)
def a_thousand_seams_and_a_hundred_arenas_leave_nothing_behind(world):
    from rlkernel.collectives.arenas import open_arena

    def held():
        with open("/proc/self/maps") as maps:
            return len(maps.readlines()), len(os.listdir("/proc/self/fd"))

    shared, grid = sharing(world), Grid(tp=2)
    link = shared.comm(grid).links["tp"]
    for number in range(1000):
        comm = shared.comm(grid)
        if number % 100 == 0:
            assert comm.all_reduce(torch.ones(3), "sum").tolist() == [2.0] * 3
    assert comm.links["tp"].transport._open is link.transport._open, "one arena, not a thousand"
    before = held()
    for _ in range(100):
        where = (link.ranks, link.index, torch.device("cpu"), world.store, 20.0)
        open_arena(None, *where).close()
    after = held()
    assert after[0] - before[0] < 20 and after[1] == before[1], (before, after)


@check(2)
def a_late_rank_is_named_on_both_and_spoils_what_it_missed(world):
    """Beside the seam, whose agreement would notice before any kernel waits."""
    import dataclasses

    from rlkernel.collectives.arenas import open_arena
    from rlkernel.collectives.errors import PeerLost
    from rlkernel.collectives.symmetric import SymmetricTransport

    link = sharing(world).comm(Grid(tp=2)).links["tp"]
    for form, count in (("words", 100), ("once", 200_000)):
        arena = open_arena(None, link.ranks, link.index, torch.device("cpu"), world.store, 20.0)
        arena.peers = dataclasses.replace(arena.peers, limit_ns=int(2e8))
        at = (None, link.ranks, link.index, torch.device("cpu"))
        late = SymmetricTransport(*at, lambda a=arena: a)
        x = torch.ones(count, dtype=BF16)
        if world.rank == 1:
            world.store.wait([f"gave up/{form}"])
        refused(
            PeerLost, ("rank 1", "0.2 s"), lambda t=late, x=x: t.tree_all_reduce(x, TREES[0], 2)
        )
        world.store.set(f"gave up/{form}", "yes")
        refused(PeerLost, ("rank 1",), lambda t=late, x=x: t.gather(x))  # and so it stays
        refused(PeerLost, ("rank 1",), late.settle)


@check(4)
def a_group_that_spans_hosts_never_shares_memory(world):
    shared = World(world.store, "symmetric", world.timeout_s, "cpu")
    shared._groups = world._groups
    os.environ["NCCL_HOSTID"] = f"node{world.rank // 2}"
    try:
        comm = shared.comm(Grid(cp=2, tp=2))
    finally:
        del os.environ["NCCL_HOSTID"]
    names = {axis: comm.links[axis].transport.name for axis in ("tp", "cp", "world")}
    assert names == {
        "tp": "symmetric memory, host stand-in",
        "cp": "process-group/gloo",
        "world": "process-group/gloo",
    }
    for axis in ("tp", "cp", "world"):
        total = comm.all_reduce(torch.tensor([2.0**comm.rank]), axis, axis)
        assert total.item() == sum(2.0**r for r in comm.grid.group_of(comm.rank, axis))
