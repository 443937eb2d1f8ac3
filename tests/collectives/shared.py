"""Checks of sums through shared memory, between real ranks.

ranks.py runs them in Triton's interpreter: host memory that the ranks map stands in for symmetric
memory; rounds, epochs, slots and waits are the same code. By hand they run on GPUs as well, those
of on_gpus.py with them:

    PYTHONPATH=. torchrun --nproc-per-node 2 tests/collectives/shared.py --device cuda

prints a line a check, and after each writes a JSON file (--out) with what every rank said. A check
that fails does not end the others. With fewer GPUs than ranks these share one: right for bits.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import time

import torch
from checks import check, noise, refused
from sharing import arena_of, both, forms, sharing

from rlkernel.collectives.groups import World
from rlkernel.compare import bit_report, bits
from rlkernel.contract import ReductionTree
from rlkernel.grid import Grid

BF16, FP32 = torch.bfloat16, torch.float32
TREES = (ReductionTree(8, "bf16"), ReductionTree(8, "fp32"))
BOTH = ("cpu", "cuda")


def left_fold(comm, x):
    parts = [comm.contract.round(part) for part in comm.links["tp"].transport.gather(x)]
    return functools.reduce(comm.contract.joint, parts).to(x.dtype)


@check(devices=BOTH)
def shared_memory_gives_the_bits_of_the_process_group(world):
    for ours, theirs in both(world, Grid(tp=2), Grid(tp=4), Grid(tp=8)):
        few = ours.grid.tp == 8  # eight interpreters share the cores
        for tree, dtype in itertools.product(TREES[few:], (BF16,) if few else (BF16, FP32)):
            a, b = ours.using(contract=tree), theirs.using(contract=tree)
            x = noise(200 + world.rank, 16, 24, dtype=dtype, device=ours.device)
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
        said = "all_reduce tree8.fp32 over tp by symmetric memory"
        said += ", host stand-in" if ours.device.type == "cpu" else ""
        assert ours.paths()["sum"] == said


def smaller(steps, *edges):
    """The same cuts, each up to fewer bytes."""
    return tuple(zip(edges, [cut for _, cut in steps], strict=True))


@check(2, devices=BOTH)
def sizes_around_every_threshold_and_odd_places(world):
    """One element below, at and above each; on a GPU where they are, and where a second round
    begins. In the interpreter the same thresholds lie lower.
    """
    from rlkernel.kernels import peer_shot

    ((ours, theirs),) = both(world, Grid(tp=2))
    real, streams, device = peer_shot.STEPS_OF_TWO, peer_shot.STREAM_OF_TWO, ours.device
    kinds = list(itertools.product(TREES, (BF16, FP32)))
    rounds = 256 * 16384  # bytes: lanes x block of the last step
    if device.type == "cpu":
        kinds, rounds = [kinds[0], kinds[3]], 2048
        peer_shot.STEPS_OF_TWO = smaller(real, 256, 512, 1024, 2048, 1 << 20)
        peer_shot.STREAM_OF_TWO = smaller(streams, 1024, 1 << 20)
    try:
        for tree, dtype in kinds:
            a, b = ours.using(contract=tree), theirs.using(contract=tree)
            wide = 2 if BF16 in (tree.dtype, dtype) else 4  # bytes an element on the wire
            edges = [up_to // wide for up_to, _ in peer_shot.STEPS_OF_TWO[:-1]] + [rounds // wide]
            seen = []
            for count in (1, *(edge + d for edge in edges for d in (-1, 0, 1))):
                # an odd address: behind the first element
                x = noise(210 + world.rank, count + 1, dtype=dtype, device=device)[1:]
                total = b.all_reduce(x, "sum")
                assert bit_report(a.all_reduce(x, "sum"), total), (count, tree, dtype)
                seen.append(peer_shot.shot(wide * count, 2))
            cuts = [cut for _, cut in real]
            assert set(seen) == set(cuts) and len(cuts) == len(set(cuts)), "a step was left out"
            edge = peer_shot.STREAM_OF_TWO[0][0] // wide
            for count in (edge - 1, edge, edge + 1):
                x = noise(215 + world.rank, 2 * count + 1, dtype=dtype, device=device)[1:]
                part = a.reduce_scatter(x, "part")
                assert bit_report(part, b.reduce_scatter(x, "part")), (count, tree, dtype)
                own = x[: count * wide // x.itemsize]
                whole = a.all_gather(own, "whole")
                assert bit_report(whole, b.all_gather(own, "whole")), (count, dtype)
    finally:
        peer_shot.STEPS_OF_TWO, peer_shot.STREAM_OF_TWO = real, streams
    view = noise(220 + world.rank, 30, 8, dtype=BF16, device=device).t()
    assert bit_report(ours.all_reduce(view, "v"), theirs.all_reduce(view, "v"))
    assert bit_report(ours.all_reduce(view, "in place", out=view), view)
    assert ours.all_reduce(x[:0], "nothing").shape == (0,)


@check(2, devices=BOTH)
def the_same_values_in_any_message_have_the_same_sum(world):
    """1024 values inside messages of other sizes, in another place each time."""
    ((ours, theirs),) = both(world, Grid(tp=2))
    sizes = (1 << 13, 1 << 18, 1 << 23)  # bytes
    values = noise(240 + world.rank, 1024, dtype=BF16, device=ours.device)
    for comm in (ours, theirs):
        alone = comm.all_reduce(values, "alone")
        cases = list(itertools.product(sizes, (0, 777, 3072)))
        if comm is ours and ours.device.type == "cpu":
            cases = cases[:4]  # an interpreter takes a second for 256 KiB
        for size, where in cases:
            x = torch.ones(size // 2, dtype=BF16, device=ours.device)
            x[where : where + 1024] = values
            total = comm.all_reduce(x, "inside")[where : where + 1024]
            assert bit_report(total, alone), (size, where)


@check(devices=BOTH)
def a_gather_through_shared_memory_moves_bits_of_any_dtype(world):
    for ours, _ in both(world, Grid(tp=2)):
        pair = [ours.grid.tp * (world.rank // ours.grid.tp) + r for r in range(2)]
        nan = torch.tensor([0x7FC00001 + world.rank, -(2**31)], dtype=torch.int32).view(FP32)
        whole = ours.all_gather(nan.to(ours.device), "nan").cpu()
        assert [v & 0xFFFFFFFF for v in bits(whole)[::2].tolist()] == [0x7FC00001 + r for r in pair]
        for dtype in (torch.float64, torch.int64, torch.bool, torch.float16):
            x = (torch.arange(6).view(2, 3) + world.rank).to(dtype)
            right = torch.cat([(torch.arange(6).view(2, 3) + r).to(dtype) for r in pair], 1)
            assert ours.all_gather(x.to(ours.device), "any", dim=1).cpu().equal(right)


@check(2, devices=BOTH)
def calls_of_every_form_and_size_with_a_rank_delayed_at_random(world):
    ((ours, theirs),) = both(world, Grid(tp=2))
    late = random.Random(world.rank)
    ours.all_reduce(torch.ones(1, device=ours.device), "open")
    for number in range(40):
        count, seed = (100, 300, 700)[number % 3], 1000 * world.rank + number
        x = noise(seed, count, dtype=BF16, device=ours.device)
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
    world.store.set(f"rank {world.rank} has read its slots", "yes")
    world.store.wait(["rank 1 has read its slots"])  # who does not wait would write into them
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


@check(4, devices=BOTH)
def groups_that_share_ranks_do_not_disturb_each_other(world):
    ((ours, _),) = both(world, Grid(cp=2, tp=2))
    for number in range(6):
        for axis in ("tp", "cp", "world"):
            mine = torch.tensor([2.0**ours.rank], device=ours.device)
            right = sum(2.0**r for r in ours.grid.group_of(ours.rank, axis))
            assert ours.all_reduce(mine, axis, axis).item() == right, (number, axis)
    pairs = ours.all_reduce(mine, "pairs", "world", span=2).item()
    assert pairs == (3.0 if ours.rank < 2 else 12.0)


@check(2, devices=BOTH)
def a_thousand_seams_and_a_thousand_arenas_leave_nothing_behind(world):
    """No mapping, no open file and, on a GPU, no memory of it. Arenas add before they close: each
    on a GPU, every fiftieth where adding is interpreted.
    """
    from rlkernel.collectives.symmetric import SymmetricTransport

    shared, grid = sharing(world), Grid(tp=2)
    comm = shared.comm(grid)
    link, ones = comm.links["tp"], torch.ones(3, device=comm.device)
    for number in range(1000):
        comm = shared.comm(grid)
        if number % 100 == 0:
            assert comm.all_reduce(ones, "sum").tolist() == [2.0] * 3
    assert comm.links["tp"].transport._open is link.transport._open, "one arena, not a thousand"

    def reopened(times):
        for number in range(times):
            arena = arena_of(world, link)
            if number % (50 if world.device == "cpu" else 1) == 0:
                at = (None, link.ranks, link.index, comm.device)
                fresh = SymmetricTransport(*at, lambda a=arena: a)
                assert fresh.tree_all_reduce(ones, TREES[0], 2).tolist() == [2.0] * 3
            arena.close()

    reopened(10)  # what is made once for all of them
    before, size = held(comm.device), arena_of(world, link).bytes
    reopened(1000)
    after = held(comm.device)
    assert after[0] - before[0] < 20 and after[1] - before[1] < 5, (before, after)
    assert after[2] - before[2] < 4 * size, (before, after, size)


def held(device):
    """Mappings and open files of this process, bytes in use on its GPU (whoever uses them)."""
    taken = 0
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, whole = torch.cuda.mem_get_info(device)
        taken = whole - free
    with open("/proc/self/maps") as maps:
        return len(maps.readlines()), len(os.listdir("/proc/self/fd")), taken


@check(2, devices=BOTH)
def a_late_rank_is_named_on_both_and_spoils_what_it_missed(world):
    """Beside the seam, whose agreement would notice before any kernel waits."""
    import dataclasses

    from rlkernel.collectives.errors import PeerLost
    from rlkernel.collectives.symmetric import SymmetricTransport

    comm = sharing(world).comm(Grid(tp=2))
    link = comm.links["tp"]
    for form, count in (("words", 100), ("once", 200_000)):
        arena = arena_of(world, link)
        arena.peers = dataclasses.replace(arena.peers, limit_ns=int(2e8))
        late = SymmetricTransport(None, link.ranks, link.index, comm.device, lambda a=arena: a)
        x, out = torch.ones(count, dtype=BF16, device=comm.device), []
        if world.rank == 1:
            world.store.wait([f"gave up/{form}"])

        def call(late=late, x=x, out=out):
            out.append(late.tree_all_reduce(x, TREES[0], 2))  # on a GPU it says nothing yet
            late.settle()

        refused(PeerLost, ("rank 1", "0.2 s"), call)
        assert all(part.isnan().all() for part in out)
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


if __name__ == "__main__":
    import by_hand

    by_hand.main()
