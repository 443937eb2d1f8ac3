"""On which nodes do the ranks of an expert-parallel group stand? Measured, asked once a group.

A node is what collectives/topology.py takes for one: a machine, a network namespace of it, a host
that NCCL was told about, or one of several agents. Nothing here trusts what was asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rlkernel.collectives import topology
from rlkernel.collectives.comm import Comm

TELLS_APART = ("boot", "network", "hostid", "agent")
_known: dict[tuple, Nodes] = {}


@dataclass(frozen=True)
class Nodes:
    """of: the node of each rank, by number, in group order. index: this rank's place in it."""

    of: tuple[int, ...]
    index: int

    @property
    def near(self) -> tuple[int, ...]:
        """Places in the group on this rank's node, its own among them."""
        return tuple(p for p, node in enumerate(self.of) if node == self.of[self.index])

    @property
    def far(self) -> tuple[int, ...]:
        return tuple(p for p, node in enumerate(self.of) if node != self.of[self.index])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks on each node."""
        return tuple(self.of.count(node) for node in dict.fromkeys(self.of))

    @property
    def two_levels(self) -> bool:
        """Several nodes, and one of them holds several ranks. The same on all ranks."""
        return 1 < len(self.sizes) < len(self.of)


def runs(places: Sequence[int]) -> list[slice]:
    """Ascending places as contiguous runs: (0, 1, 4) -> 0:2, 4:5."""
    found: list[slice] = []
    for p in places:
        if found and found[-1].stop == p:
            found[-1] = slice(found[-1].start, p + 1)
        else:
            found.append(slice(p, p + 1))
    return found


def of(comm: Comm, silent: bool = False, axis: str = "ep") -> Nodes | None:
    """Where the group's ranks are. All of them must call it; the first call exchanges one number a
    rank. silent: ask nobody; None for what is not known yet.
    """
    link = comm.links[axis]
    key = (link.ranks, comm.device)
    if link.size == 1:
        return Nodes((0,), 0)
    if key not in _known:
        if silent:
            return None
        place = topology.place(comm.device)
        here = " ".join(str(place[name]) for name in TELLS_APART)
        number = int.from_bytes(hashlib.sha256(here.encode()).digest()[:7], "big")
        mine = torch.tensor([number], device=comm.device)
        told = comm.unobserved().all_gather(mine, "nodes", axis).tolist()
        numbers = {node: n for n, node in enumerate(dict.fromkeys(told))}
        _known[key] = Nodes(tuple(numbers[node] for node in told), link.index)
    return _known[key]


def described(comm: Comm) -> dict:
    """For the record: kind, counts of hosts, nodes and GPUs, and where each rank is."""
    found = topology.described(comm.collect(topology.place(comm.device)), comm.grid)
    names = ("rank", "host", "node", "gpu")
    ranks = [{name: rank[name] for name in names} for rank in found["ranks"]]
    return {name: found[name] for name in ("kind", "hosts", "nodes", "gpus")} | {"ranks": ranks}


def withheld(topology: Mapping) -> str:
    """Why times and traces would be those of something else; "" where they are not: several ranks
    compute on one GPU. topology: as `described` gives it.
    """
    gpus = [rank["gpu"] for rank in topology["ranks"] if rank["gpu"] is not None]
    count = len(set(gpus))
    if count == len(gpus):
        return ""
    on = "a GPU" if count == 1 else f"{count} GPUs"
    return f"{len(gpus)} ranks share {on}: times and traces would show that, not the schedules"
