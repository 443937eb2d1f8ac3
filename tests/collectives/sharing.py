"""A world of ranks that share memory: the host's between CPU ranks, their GPUs' own otherwise."""

from __future__ import annotations

import functools
import itertools
import os
import socket
import subprocess
import sys

import torch
from checks import on_grids

from rlkernel.collectives.comm import Comm, Link
from rlkernel.collectives.groups import World


def join(device: str, timeout_s: float) -> World:
    """The world of this launch. Ranks that share a GPU, which NCCL refuses, have gloo's groups."""
    if device == "cpu":
        return World.join("gloo", timeout_s)
    if torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"]):
        return World.join("nccl", timeout_s)
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    return World.join("gloo", timeout_s, "cuda")


@functools.cache
def sharing(world: World) -> World:
    """The same ranks and groups; their sums go through shared memory."""
    kind = torch.device(world.device).type
    shared = World(world.store, "symmetric", world.timeout_s, kind)
    shared.moves_by, shared._groups = world.moves_by, world._groups
    return shared


def both(world: World, *grids):
    """(by shared memory, by process group) of this rank for each grid that the world can hold."""
    fit = [grid for grid in grids if grid.size <= world.size]
    return zip(on_grids(sharing(world), fit), on_grids(world, fit), strict=True)


def arena_of(world: World, link: Link):
    """Another open arena of the same group."""
    from rlkernel.collectives.arenas import open_arena  # the first kernel: interpreted or not

    group = world._groups[world.moves_by, link.ranks]
    at = (link.ranks, link.index, torch.device(world.device), world.store, world.timeout_s)
    return open_arena(group, *at)


def forms(comm: Comm, x, *blocks):
    """The sum of x by every form of the kernel, cut into blocks of so many bytes."""
    from rlkernel.kernels.peer_reduce import all_reduce
    from rlkernel.kernels.peer_shot import Shot

    peers = comm.links["tp"].transport._arena.peers
    for form, block in itertools.product(("words", "once", "twice"), blocks):
        out = torch.full_like(x, float("nan"))
        cut = Shot(form, block, 2, 4)
        yield form, all_reduce(x, out, comm.contract, peers, chosen=cut)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def children(world: World, *words: str, **env: str) -> subprocess.CompletedProcess:
    """A world of fresh processes without an agent, one beside each rank: this rank's has ended."""
    key = f"children/{world.store.add(f'children of {world.rank}', 1)}"
    if world.rank == 0:
        world.store.set(key, str(free_port()))
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": world.store.get(key).decode()}
    own = {n: v for n, v in os.environ.items() if not n.startswith("TORCHELASTIC_")}
    return subprocess.run(
        [sys.executable, *words], env=own | meeting | env, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
